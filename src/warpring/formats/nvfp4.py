"""NVFP4: E2M1 codes, an E4M3 scale per 16 columns, and one FP32 scale a matrix."""

from __future__ import annotations

import torch

from warpring.formats.blocks import ScaledFormat, cut_significand, divide, finite_amax, unit_where_zero
from warpring.formats.e2m1 import E2M1_MAX, squared_error, to_e2m1
from warpring.formats.fp8 import E4M3_MAX, to_e4m3

# An E2M1 code times an E4M3 scale has 6 significand bits: times a scale of this many they fit FP32's 24.
_GLOBAL_SCALE_BITS = 18

# Smallest positive E4M3 number. A block with a non-zero weight never gets a smaller scale: 0 would erase it.
_MIN_BLOCK_SCALE = 2.0**-9

# E2M1 numbers that a block's amax may be mapped to. 4 makes the scale coarser by half, but spends no code on the
# gap between 4 and 6: better for blocks with many weights near their amax.
_TARGETS = (E2M1_MAX, 4.0)


class Nvfp4(ScaledFormat):
    """E2M1 codes, two a byte; value = code * scale * global_scale.

    global_scale = amax of the matrix / (448 * 6), cut to 18 significand bits;
    scale = amax of the block / 6 or / 4, whichever has the smaller squared error, / global_scale, rounded to E4M3.
    """

    name = "nvfp4"
    bits_per_weight = 4
    block = (1, 16)
    title = "NVFP4 E2M1, E4M3 scale per 16, FP32 scale per matrix"
    data_dtype = torch.uint8
    scale_dtype = torch.float8_e4m3fn
    packed = True
    has_global_scale = True

    def global_scale(self, amax: torch.Tensor) -> torch.Tensor:
        return unit_where_zero(cut_significand(divide(amax, E4M3_MAX * E2M1_MAX), _GLOBAL_SCALE_BITS), amax)

    def encode(self, blocks: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        finite = blocks.isfinite()
        blocks = torch.where(finite, blocks, 0)
        amax = finite_amax(blocks, (2, 4))
        first, second = (_block_scale(amax, target, global_scale) for target in _TARGETS)
        errors = [squared_error(blocks / (s * global_scale)) * s.square() for s in (first, second)]
        scale = torch.where(errors[1] < errors[0], second, first)
        codes = to_e2m1(blocks / (scale * global_scale))
        # E2M1 has no NaN: one NaN or Inf makes the whole block NaN, by its scale.
        scale = torch.where(finite.all(4, keepdim=True), scale, torch.nan)
        return codes, scale.to(self.scale_dtype)


def _block_scale(amax: torch.Tensor, target: float, global_scale: torch.Tensor) -> torch.Tensor:
    """FP32 value of the E4M3 scale that maps a block's amax to `target`; 1 for an all-zero block."""
    wanted = (divide(amax, target) / global_scale).clamp(min=_MIN_BLOCK_SCALE)
    return to_e4m3(torch.where(amax == 0, 1.0, wanted)).float()
