"""NVFP4: E2M1 codes, an E4M3 scale per 16 columns, and one FP32 scale a matrix."""

from __future__ import annotations

import torch

from warpring.formats.blocks import Parts, ScaledFormat, finite_amax, from_blocks, to_blocks
from warpring.formats.e2m1 import E2M1_MAX, pack, to_e2m1, unpack
from warpring.formats.fp8 import E4M3_MAX, to_e4m3, unit_where_zero

# Smallest positive E4M3 number. A block with a non-zero weight never gets a smaller scale: 0 would erase it.
_MIN_BLOCK_SCALE = 2.0**-9


class Nvfp4(ScaledFormat):
    """E2M1 codes, two a byte; value = code * scale * global_scale.

    global_scale = amax of the matrix / (448 * 6), scale = amax of the block / 6 / global_scale rounded to E4M3.
    """

    name = "nvfp4"
    bits_per_weight = 4
    block = (1, 16)
    title = "NVFP4 E2M1, E4M3 scale per 16, FP32 scale per matrix"
    data_dtype = torch.uint8
    scale_dtype = torch.float8_e4m3fn
    codes_per_element = 2
    has_global_scale = True

    def encode(self, weight: torch.Tensor) -> Parts:
        _, rows, cols = weight.shape
        blocks = to_blocks(weight, self.block)
        amax = finite_amax(blocks, (2, 4))
        matrix_amax = amax.amax((1, 3), keepdim=True)
        global_scale = unit_where_zero(matrix_amax / (E4M3_MAX * E2M1_MAX), matrix_amax)
        wanted = (amax / E2M1_MAX / global_scale).clamp(min=_MIN_BLOCK_SCALE)
        scale = to_e4m3(torch.where(amax == 0, 1.0, wanted)).float()
        finite = blocks.isfinite()
        codes = to_e2m1(torch.where(finite, blocks, 0) / (scale * global_scale))
        # E2M1 has no NaN: one NaN or Inf makes the whole block NaN, by its scale.
        scale = torch.where(finite.all(4, keepdim=True), scale, torch.nan).to(self.scale_dtype)
        return pack(from_blocks(codes, rows, cols)), scale[:, :, 0, :, 0], global_scale.flatten()

    def decode(self, parts: Parts, cols: int, dtype: torch.dtype) -> torch.Tensor:
        data, scale, global_scale = parts
        blocks = to_blocks(unpack(data, cols, dtype), self.block)
        # Code times block scale has 6 significand bits, exact; only the last product rounds, and only in FP32.
        blocks = blocks * scale[:, :, None, :, None].to(dtype) * global_scale[:, None, None, None, None].to(dtype)
        return from_blocks(blocks, data.shape[1], cols)
