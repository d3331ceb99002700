"""What FP8 tensor cores do to a sum: Hopper adds E4M3 products with 13 bits behind the largest one's leading bit.

With FP32 sums instead, a few in a thousand of the activations between the GEMMs round to the next E4M3 code, which is
more than separates a right kernel from a wrong one. On a GPU the tensor cores themselves are asked, through torch;
elsewhere the rule is computed. MXFP4 weights become E4M3 by the windows of packing.py.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from warpring.errors import UnsupportedError
from warpring.formats import QuantizedTensor, ceil_div
from warpring.formats.e2m1 import unpack

#: Columns of one instruction, the least exponent of an operand, bits kept behind the largest term and of a sum.
_DEPTH, _LEAST_EXPONENT, _BITS = 32, -6, 13
_WINDOW, _MX_BLOCK = 128, 32
_E8M0_NAN, _E8M0_BIAS = 255, 127
#: MXFP4: the largest block of a window is scaled up by 2^6, the most that E4M3 holds; blocks down to 2^-13 of it stay.
_TOP_SHIFT, _MOST_SHIFT = 6, 13
_ZERO = -900  # the exponent of nothing


def e4m3_operands(weight: QuantizedTensor, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [rows, width] as the E4M3 codes that tensor cores get, and what multiplies the sums of 128 columns.

    Returns:
        FP32 values [rows, cols] that E4M3 holds, zeros beyond width; FP32 factors [rows, ceil(cols / 128)].

    Raises:
        UnsupportedError: the kernels have no policy for the weights' format.
    """
    rows, width = weight.shape
    chunks = ceil_div(cols, _WINDOW)
    scale = weight.scale
    if scale is None or weight.format not in ("fp8_block", "fp8_channel", "mxfp4"):
        raise UnsupportedError(f"e4m3_operands: no expert-parallel kernel takes {weight.format} weights.")
    if weight.format == "mxfp4":
        values, factors = _windows(unpack(weight.data, width, torch.float32), scale, chunks)
        return values[:, :cols], factors
    values = pad(weight.data.float(), (0, cols - width))
    if weight.format == "fp8_block":
        return values, scale.repeat_interleave(_WINDOW, 0)[:rows]
    return values, scale.expand(rows, chunks)


def e4m3_sums(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """FP32 [n, rows]: codes @ values.T as the tensor cores add it, for at most 128 columns.

    Args:
        codes: E4M3 [n, cols].
        values: FP32 [rows, cols] that E4M3 holds.
    """
    if codes.is_cuda:
        one = torch.ones((), device=codes.device)
        weight = values.to(torch.float8_e4m3fn)
        tokens = pad(codes.contiguous().view(torch.uint8), (0, 0, 0, -codes.shape[0] % 16)).view(codes.dtype)
        sums = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            tokens, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
        )
        return sums[: codes.shape[0]]
    x, w = codes.double(), values.double()
    sums = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    for first in range(0, x.shape[1], _DEPTH):
        sums = _add(x[:, first : first + _DEPTH], w[:, first : first + _DEPTH], sums)
    return sums.float()


def _add(x: torch.Tensor, w: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """sums + x @ w.T for one instruction's columns: terms cut to 13 bits behind the largest, the sum to 13 bits."""
    terms = x[:, None] * w[None]
    both = _exponent(x, _LEAST_EXPONENT)[:, None] + _exponent(w, _LEAST_EXPONENT)[None]
    largest = torch.where(terms != 0, both, _ZERO).amax(-1)
    largest = torch.maximum(largest, torch.where(sums != 0, _exponent(sums, -126), _ZERO))
    up = torch.ldexp(torch.ones_like(sums), _BITS - largest)
    cut = ((sums * up).trunc() + (terms * up[..., None]).trunc().sum(-1)) / up
    unit = torch.ldexp(torch.ones_like(sums), _exponent(cut, -126) - _BITS)
    plain = sums + terms.sum(-1)
    return torch.where(plain.isfinite(), torch.where(cut == 0, 0.0, (cut / unit).trunc() * unit), plain)


def _exponent(values: torch.Tensor, least: int) -> torch.Tensor:
    return (torch.frexp(values).exponent - 1).clamp(min=least)


def _windows(values: torch.Tensor, scale: torch.Tensor, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 values [rows, width], UE8M0 scales [rows, blocks]: shifted values [rows, chunks * 128], powers of two."""
    rows = values.shape[0]
    blocks = pad(values, (0, chunks * _WINDOW - values.shape[1])).view(rows, -1, _MX_BLOCK)
    scales = pad(scale.int(), (0, blocks.shape[1] - scale.shape[1]), value=-1000)
    counts = (blocks != 0).any(-1) & (scales != _E8M0_NAN)
    largest = torch.where(counts, scales, -1).view(rows, chunks, -1).amax(-1)
    largest = torch.where(largest < 0, _E8M0_BIAS, largest)
    below = largest.repeat_interleave(_WINDOW // _MX_BLOCK, 1) - scales
    shift = torch.ldexp(torch.ones_like(below, dtype=torch.float32), _TOP_SHIFT - below.clamp(0, _MOST_SHIFT))
    shift = torch.where((below < 0) | (below > _MOST_SHIFT), 0.0, shift)
    shift = torch.where(scales == _E8M0_NAN, torch.nan, shift)
    factors = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - _E8M0_BIAS - _TOP_SHIFT)
    return (blocks * shift[..., None]).view(rows, -1), factors
