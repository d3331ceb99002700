"""E2M1, the 4-bit float of MXFP4 and NVFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN, no Inf."""

from __future__ import annotations

import torch

E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))

# A magnitude's code is the number of these that lie below it. They are the midpoints between neighbours; where a tie
# goes up to the even code the midpoint itself must count as above, so the FP32 number just below stands for it.
_THRESHOLDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """FP32 to E2M1 codes (uint8, 0 to 15): nearest even, saturating at +-6. NaN must not come in."""
    return _magnitude_codes(values).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def squared_error(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept as size 1, of the squared error that E2M1 rounding makes."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=values.dtype, device=values.device)
    error = magnitudes[_magnitude_codes(values)] - values.abs()
    return error.square_().sum(-1, keepdim=True)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., cols] to bytes [..., ceil(cols / 2)]: even column in the low nibble, 0 beside a last odd column."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., cols] of packed codes [..., ceil(cols / 2)], by a table of the 256 bytes."""
    table = torch.tensor([(_VALUES[b & 15], _VALUES[b >> 4]) for b in range(256)], dtype=dtype, device=packed.device)
    return table[packed.int()].flatten(-2)[..., :cols]


def _magnitude_codes(values: torch.Tensor) -> torch.Tensor:
    thresholds = torch.tensor(_THRESHOLDS, dtype=values.dtype, device=values.device)
    return torch.bucketize(values.abs(), thresholds, out_int32=True)
