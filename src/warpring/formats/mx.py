"""The OCP Microscaling formats: 32 columns share one UE8M0 scale, a power of two in one byte."""

from __future__ import annotations

import torch

from warpring.errors import ArgumentError
from warpring.formats.base import QuantizedTensor
from warpring.formats.blocks import ScaledFormat, finite_amax
from warpring.formats.e2m1 import E2M1_MAX, squared_error, to_e2m1
from warpring.formats.fp8 import E4M3_MAX, to_e4m3

MX_BLOCK = 32
E8M0_ONE = 127
E8M0_NAN = 255


def e8m0_value(code: torch.Tensor) -> torch.Tensor:
    """FP32 value 2^(code - 127) of uint8 UE8M0 codes; 255 is NaN. Built from bits: code 0 is the subnormal 2^-127."""
    bits = code.int() << 23
    bits = torch.where(code == 0, 1 << 22, bits)
    return torch.where(code == E8M0_NAN, torch.nan, bits.view(torch.float32))


def e8m0_scale(amax: torch.Tensor, element_max: float) -> torch.Tensor:
    """UE8M0 code (uint8) of the smallest power of two, 2^-126 at least, with amax <= element_max * scale; 1 for amax 0.

    amax is finite FP32, element_max a normal FP32 number. Both are compared by exponent and fraction bits, so that
    no logarithm is rounded.
    """
    limit = int(torch.tensor(element_max, dtype=torch.float32).view(torch.int32))
    bits = amax.view(torch.int32)
    fraction = (1 << 23) - 1
    exponent = (bits >> 23) - (limit >> 23) + ((bits & fraction) > (limit & fraction)).int()
    code = (exponent + E8M0_ONE).clamp(min=1).to(torch.uint8)
    return torch.where(amax == 0, E8M0_ONE, code)


class _Mx(ScaledFormat):
    block = (1, MX_BLOCK)
    scale_dtype = torch.uint8

    def scale_value(self, scale: torch.Tensor) -> torch.Tensor:
        return e8m0_value(scale)


class Mxfp8(_Mx):
    """E4M3 codes; value = code * 2^(scale - 127), the smallest scale that lets no weight saturate."""

    name = "mxfp8"
    bits_per_weight = 8
    title = "MXFP8 E4M3, UE8M0 scale per 32"
    data_dtype = torch.float8_e4m3fn

    def encode(self, blocks: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = e8m0_scale(finite_amax(blocks, (2, 4)), E4M3_MAX)
        return to_e4m3(blocks / e8m0_value(scale)).view(torch.uint8), scale


class Mxfp4(_Mx):
    """E2M1 codes, two a byte; value = code * 2^(scale - 127), the scale of least squared error."""

    name = "mxfp4"
    bits_per_weight = 4
    title = "MXFP4 E2M1, UE8M0 scale per 32"
    data_dtype = torch.uint8
    packed = True

    def encode(self, blocks: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        finite = blocks.isfinite()
        blocks = torch.where(finite, blocks, 0)
        scale = e8m0_scale(finite_amax(blocks, (2, 4)), E2M1_MAX)
        # Half that scale clips weights above 6 but is finer for the others. Errors here are in units of either scale.
        scaled = blocks / e8m0_value(scale)
        halve = (squared_error(scaled * 2) < 4 * squared_error(scaled)) & (scale > 1)
        codes = to_e2m1(torch.where(halve, scaled * 2, scaled))
        # E2M1 has no NaN: one NaN or Inf makes the whole block NaN, by its scale.
        return codes, torch.where(finite.all(4, keepdim=True), scale - halve.to(torch.uint8), E8M0_NAN)


def mxfp4_from_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
    """MXFP4 weights from a gpt-oss checkpoint's `*_blocks` and `*_scales`, without touching a bit.

    gpt-oss already keeps the even column of a pair in the low nibble, so the 16 bytes of each block only join up.
    Rows stay in the checkpoint's order (its gate and up rows alternate).

    Args:
        blocks: uint8 [..., rows, cols / 32, 16].
        scales: uint8 UE8M0 [..., rows, cols / 32].

    Returns:
        QuantizedTensor of shape [..., rows, cols], sharing storage where blocks are contiguous.

    Raises:
        ArgumentError: dtypes or shapes that do not fit.
    """
    fits = blocks.dim() >= 3 and blocks.shape[-1] == MX_BLOCK // 2 and scales.shape == blocks.shape[:-1]
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ArgumentError(
            "mxfp4_from_gpt_oss: blocks must be uint8 [..., rows, cols / 32, 16], scales uint8 [..., rows, cols / 32]; "
            f"got blocks {blocks.dtype} {list(blocks.shape)}, scales {scales.dtype} {list(scales.shape)}. "
            "Pass the tensors as the checkpoint holds them."
        )
    shape = (*blocks.shape[:-2], blocks.shape[-2] * MX_BLOCK)
    return QuantizedTensor(Mxfp4.name, shape, blocks.flatten(-2).contiguous(), scales.contiguous())
