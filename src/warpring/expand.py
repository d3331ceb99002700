"""Stored weights as BF16, for GEMMs: the bits of `Format.dequantize(stored, torch.bfloat16)`, several times as fast.

The codes of every format fit FP16 (E4M3 as value times 2^-8, E2M1 as value times 2^-14, subnormals included), so they
are moved there by shifts and masks and widened by the processor; only then FP32 scales come in, and one rounding.
"""

from __future__ import annotations

import torch

from warpring.formats import QuantizedTensor, get_format
from warpring.formats.mx import e8m0_value

_E4M3_NAN = 0x7F
#: What a code's FP16 bits are worth less than the code.
_E4M3_UNIT, _E2M1_UNIT = 2.0**8, 2.0**14


def expand(stored: QuantizedTensor) -> torch.Tensor:
    """BF16 [..., rows, cols]; of bf16 weights the stored tensor itself. Waits for nothing but a CPU."""
    if stored.format == "bf16":
        return stored.data
    values = _e2m1(stored.data) if stored.format in ("mxfp4", "nvfp4") else _e4m3(stored.data)
    scale = stored.scale
    if scale is not None:
        factor = e8m0_value(scale) if scale.dtype == torch.uint8 else scale.float()
        block_rows, block_cols = get_format(stored.format).block or (1, stored.shape[-1])
        if block_rows > 1:
            factor = factor.repeat_interleave(block_rows, -2)[..., : stored.shape[-2], :]
        _multiply_blocks(values, factor, block_cols)
    if stored.global_scale is not None:
        values.mul_(stored.global_scale[..., None, None])
    return values.bfloat16()


def _multiply_blocks(values: torch.Tensor, factor: torch.Tensor, block_cols: int) -> None:
    """values[..., c] *= factor[..., c // block_cols]; the last block may overhang."""
    cols = values.shape[-1]
    whole = cols // block_cols
    if whole:
        blocks = values[..., : whole * block_cols].unflatten(-1, (whole, block_cols))
        blocks.mul_(factor[..., :whole, None])
    if cols % block_cols:
        values[..., whole * block_cols :].mul_(factor[..., whole:])


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3 codes."""
    raw = codes.view(torch.int8)
    # Sign-extended and shifted, bit 15 is the sign and bits 13 to 7 are exponent and fraction.
    halves = raw.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x407F)
    values = halves.view(torch.float16).float().mul_(_E4M3_UNIT)
    magnitude = raw & _E4M3_NAN
    if codes.device.type != "cpu" or (magnitude.numel() and int(magnitude.amax()) == _E4M3_NAN):
        values.masked_fill_(magnitude == _E4M3_NAN, torch.nan)
    return values


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values [..., cols] of packed E2M1 codes [..., cols / 2], the even column in the low nibble."""
    even = (codes & 0x07).to(torch.int16) << 9 | (codes & 0x08).to(torch.int16) << 12
    odd = (codes & 0x70).to(torch.int16) << 5 | (codes & 0x80).to(torch.int16) << 8
    return torch.stack((even, odd), -1).flatten(-2).view(torch.float16).float().mul_(_E2M1_UNIT)
