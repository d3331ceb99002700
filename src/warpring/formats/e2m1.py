"""E2M1, the 4-bit float of MXFP4 and NVFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN, no Inf."""

from __future__ import annotations

import torch

E2M1_MAX = 6.0


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """FP32 to E2M1 codes (uint8, 0 to 15): nearest even, saturating at +-6. NaN must not come in."""
    halves, ones, twos = _steps(values.abs())
    return (halves + ones + twos).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def squared_error(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept as size 1, of the squared error that E2M1 rounding makes."""
    magnitudes = values.abs()
    halves, ones, twos = _steps(magnitudes)
    error = halves / 2 + ones + twos * 2 - magnitudes
    return error.square_().sum(-1, keepdim=True)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., cols] to bytes [..., ceil(cols / 2)]: even column in the low nibble, 0 beside a last odd column."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., cols] of packed codes [..., ceil(cols / 2)].

    A code's sign, exponent and fraction moved to those of FP16 are its value times 2^-14, subnormal or not: no
    table has to reach the device, so this can be captured in a CUDA graph.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :cols].to(torch.int16)
    halves = ((codes & 7) << 9 | (codes & 8) << 12).view(torch.float16)
    return halves.to(dtype).mul_(2.0**14)


def _steps(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many steps of 0.5 (up to 2), of 1 (from 2 to 4) and of 2 (from 4 to 6) lead to the nearest number.

    Their sum is the code. In each range an even code is an even multiple of the step, so the ties-to-even of
    torch.round is that of the format.
    """
    halves = magnitudes.clamp(max=2).mul_(2).round_()
    ones = magnitudes.clamp(2, 4).round_().sub_(2)
    twos = magnitudes.clamp(4, 6).div_(2).round_().sub_(2)
    return halves, ones, twos
