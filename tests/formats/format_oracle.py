"""An independent reading of stored weights: numpy and ml_dtypes, FP64, scales repeated over their blocks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from warpring.formats import QuantizedTensor, get_format

SCALED = ("fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4")
E4M3 = ("fp8_block", "fp8_channel", "mxfp8")
E2M1 = ("mxfp4", "nvfp4")
ALL = ("bf16", *SCALED)

BLOCKS = {"fp8_block": (128, 128), "fp8_channel": None, "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}


def e4m3_values(codes: torch.Tensor) -> np.ndarray:
    """FP64 values of E4M3 codes."""
    return codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def e2m1_values(packed: torch.Tensor, cols: int) -> np.ndarray:
    """FP64 values of packed E2M1 codes, even column in the low nibble."""
    codes = packed.numpy()
    both = np.stack([codes & 15, codes >> 4], axis=-1)
    return both.reshape(*codes.shape[:-1], -1)[..., :cols].view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def scale_values(stored: QuantizedTensor) -> np.ndarray:
    """FP64 value of each weight's scale, global scale included, of the weights' logical shape."""
    if stored.scale is None:
        return np.ones(stored.shape)
    if stored.scale.dtype == torch.uint8:
        scale = stored.scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    elif stored.scale.dtype == torch.float32:
        scale = stored.scale.numpy().astype(np.float64)
    else:
        scale = e4m3_values(stored.scale)
    rows, cols = stored.shape[-2:]
    block_rows, block_cols = BLOCKS[stored.format] or (1, cols)
    scale = scale.repeat(block_rows, axis=-2).repeat(block_cols, axis=-1)[..., :rows, :cols]
    if stored.global_scale is not None:
        scale = scale * stored.global_scale.numpy().astype(np.float64)[..., None, None]
    return scale


def oracle_values(stored: QuantizedTensor) -> np.ndarray:
    """FP64 values of stored weights, exact."""
    if stored.format == "bf16":
        with np.errstate(invalid="ignore"):  # a signalling NaN among the codes
            return stored.data.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).astype(np.float64)
    codes = e2m1_values(stored.data, stored.shape[-1]) if stored.format in E2M1 else e4m3_values(stored.data)
    with np.errstate(invalid="ignore"):
        return codes * scale_values(stored)


def round_trip(name: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantised quantised weights."""
    fmt = get_format(name)
    return fmt.dequantize(fmt.quantize(weight), dtype)


def rms_error(name: str, weight: torch.Tensor) -> float:
    """Root of the summed squared error, relative to that of the weights."""
    error = round_trip(name, weight, torch.float64) - weight.double()
    return float(error.norm() / weight.double().norm())


def same_bits(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether two stored tensors agree in every byte."""
    return a.format == b.format and a.shape == b.shape and all(map(_same_bytes, a.tensors(), b.tensors()))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
