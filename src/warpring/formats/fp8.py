"""FP8 E4M3 with FP32 scales: one a 128 x 128 block (DeepSeek's `weight_scale_inv`), or one a row."""

from __future__ import annotations

import torch

from warpring.formats.blocks import MIN_SCALE, Parts, ScaledFormat, finite_amax, from_blocks, to_blocks

#: Largest finite E4M3 number (the `fn` variant: no infinities, NaN is S.1111.111).
E4M3_MAX = 448.0


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """FP32 to E4M3: nearest even, saturating at +-448; NaN and Inf become NaN, for E4M3 has no Inf."""
    finite = values.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(values.isinf(), torch.nan, finite).to(torch.float8_e4m3fn)


def unit_where_zero(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The scale of an all-zero block is 1: nothing is divided by zero, and nothing is subnormal."""
    return torch.where(amax == 0, 1.0, scale.clamp(min=MIN_SCALE))


class _Fp8(ScaledFormat):
    bits_per_weight = 8
    data_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32

    def encode(self, weight: torch.Tensor) -> Parts:
        _, rows, cols = weight.shape
        blocks = to_blocks(weight, self.block or (1, cols))
        amax = finite_amax(blocks, (2, 4))
        scale = unit_where_zero(amax / E4M3_MAX, amax)
        return from_blocks(to_e4m3(blocks / scale).view(torch.uint8), rows, cols).view(self.data_dtype), scale[
            :, :, 0, :, 0
        ]

    def decode(self, parts: Parts, cols: int, dtype: torch.dtype) -> torch.Tensor:
        data, scale = parts
        rows = data.shape[1]
        blocks = to_blocks(data.to(dtype), self.block or (1, cols))
        return from_blocks(blocks * scale[:, :, None, :, None].to(dtype), rows, cols)


class Fp8Block(_Fp8):
    """E4M3 codes; value = code * scale, scale FP32 = amax / 448 of the block."""

    name = "fp8_block"
    block = (128, 128)
    title = "FP8 E4M3, FP32 scale per 128 x 128"


class Fp8Channel(_Fp8):
    """E4M3 codes; value = code * scale, scale FP32 = amax / 448 of the row, shape [..., rows, 1]."""

    name = "fp8_channel"
    block = None
    title = "FP8 E4M3, FP32 scale per row"
