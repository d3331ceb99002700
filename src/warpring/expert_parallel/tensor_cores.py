"""What FP8 tensor cores do to a sum: Hopper adds E4M3 products with 13 bits behind the largest one's leading bit.

With FP32 sums instead, a few in a thousand of the activations between the GEMMs round to the next E4M3 code, which is
more than separates a right kernel from a wrong one. On a GPU the tensor cores themselves are asked, through torch;
elsewhere the rule is computed. MXFP4 codes are E4M3 numbers 2^6 times smaller (e2m1_words.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from warpring.errors import UnsupportedError
from warpring.formats import QuantizedTensor, ceil_div
from warpring.formats.e2m1 import unpack

#: Columns of one instruction, the least exponent of an operand, bits kept behind the largest term and of a sum.
_DEPTH, _LEAST_EXPONENT, _BITS = 32, -6, 13
_FP8_COLUMNS, _MX_COLUMNS = 128, 32
_E8M0_NAN, _E8M0_BIAS = 255, 127
_E2M1_SCALE = 2.0**-6  # from E2M1 to the E4M3 number with the same bits
_ZERO = -900  # the exponent of nothing


@dataclass(frozen=True)
class Operands:
    """A weight as the tensor cores get it: value = code * factor of its columns * sum_factor.

    Attributes:
        values: FP32 [rows, cols] that E4M3 holds.
        factors: FP32 [rows, ceil(cols / columns)], which multiply the sums of `columns` columns.
        columns: 128 or 32.
        sum_factor: what multiplies the sum of all columns.
    """

    values: torch.Tensor
    factors: torch.Tensor
    columns: int
    sum_factor: float


def e4m3_operands(weight: QuantizedTensor, cols: int) -> Operands:
    """A weight [rows, width] as the E4M3 codes that tensor cores get, zeros beyond width, and what multiplies sums.

    Raises:
        UnsupportedError: the kernels have no policy for the weights' format.
    """
    rows, width = weight.shape
    scale = weight.scale
    if scale is None or weight.format not in ("fp8_block", "fp8_channel", "mxfp4"):
        raise UnsupportedError(f"e4m3_operands: no expert-parallel kernel takes {weight.format} weights.")
    if weight.format == "mxfp4":
        values = pad(unpack(weight.data, width, torch.float32) * _E2M1_SCALE, (0, cols - width))
        exponent = pad(scale.int(), (0, ceil_div(cols, _MX_COLUMNS) - scale.shape[1]))
        factors = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - _E8M0_BIAS)
        factors = torch.where(exponent == 0, 0.0, torch.where(exponent == _E8M0_NAN, torch.nan, factors))
        return Operands(values, factors, _MX_COLUMNS, 1 / _E2M1_SCALE)
    values = pad(weight.data.float(), (0, cols - width))
    if weight.format == "fp8_block":
        return Operands(values, scale.repeat_interleave(_FP8_COLUMNS, 0)[:rows], _FP8_COLUMNS, 1.0)
    return Operands(values, scale.expand(rows, ceil_div(cols, _FP8_COLUMNS)), _FP8_COLUMNS, 1.0)


def e4m3_sums(terms: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """FP32 [n, rows]: (sum of terms) @ values.T as role2 has the tensor cores add it, for at most 128 columns.

    An instruction's columns are added term by term, the last term first.

    Args:
        terms: E4M3 [n, terms, cols].
        values: FP32 [rows, cols] that E4M3 holds.
    """
    n, count, cols = terms.shape
    rows, depth = values.shape[0], min(_DEPTH, cols)
    codes = terms.view(torch.uint8).flip(1).unflatten(2, (-1, depth)).transpose(1, 2).flatten(1).view(terms.dtype)
    repeated = values.unflatten(1, (-1, 1, depth)).expand(-1, -1, count, -1).flatten(1)
    if codes.is_cuda:
        one = torch.ones((), device=codes.device)
        tokens = pad(codes.view(torch.uint8), (0, 0, 0, -n % 16)).view(codes.dtype)
        sums = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            tokens, repeated.to(codes.dtype).t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
        )
        return sums[:n]
    x, w = codes.double(), repeated.double()
    sums = torch.zeros(n, rows, dtype=torch.float64)
    for first in range(0, x.shape[1], depth):
        sums = _add(x[:, first : first + depth], w[:, first : first + depth], sums)
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
