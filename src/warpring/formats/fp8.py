"""FP8 E4M3 with FP32 scales: one a 128 x 128 block (DeepSeek's `weight_scale_inv`), or one a row."""

from __future__ import annotations

import torch

from warpring.formats.blocks import ScaledFormat, cut_significand, divide, finite_amax, unit_where_zero

#: Largest finite E4M3 number (the `fn` variant: no infinities, NaN is S.1111.111).
E4M3_MAX = 448.0

# E4M3 has 4 significand bits: a code times a scale of this many fits FP32's 24.
_SCALE_BITS = 20


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """FP32 to E4M3: nearest even, saturating at +-448; NaN and Inf become NaN, for E4M3 has no Inf."""
    finite = values.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(values.isinf(), torch.nan, finite).to(torch.float8_e4m3fn)


class _Fp8(ScaledFormat):
    bits_per_weight = 8
    data_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32

    def encode(self, blocks: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amax = finite_amax(blocks, (2, 4))
        scale = unit_where_zero(cut_significand(divide(amax, E4M3_MAX), _SCALE_BITS), amax)
        return to_e4m3(blocks / scale).view(torch.uint8), scale


class Fp8Block(_Fp8):
    """E4M3 codes; value = code * scale, scale FP32 = amax of the block / 448, cut to 20 significand bits."""

    name = "fp8_block"
    block = (128, 128)
    title = "FP8 E4M3, FP32 scale per 128 x 128"


class Fp8Channel(_Fp8):
    """E4M3 codes; value = code * scale, scale FP32 = amax of the row / 448, cut to 20 significand bits."""

    name = "fp8_channel"
    block = None
    title = "FP8 E4M3, FP32 scale per row"
