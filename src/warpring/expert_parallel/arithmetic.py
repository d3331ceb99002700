"""The kernels' arithmetic in plain torch, role by role: the yardstick of kernels, and what runs without a GPU.

Every rounding of docs/expert_parallel.md is here: of published tokens, of the activations between the two GEMMs, of
partial results and of the output. Sums inside a chunk are FP32's, or with `sums="tensor_core"` those of the FP8 tensor
cores (tensor_cores.py): what a kernel must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from warpring.expert_parallel.problem import HIDDEN_BLOCK, NEURONS, ActivationForm, Problem
from warpring.expert_parallel.tensor_cores import Operands, e4m3_operands, e4m3_sums
from warpring.experts import Experts
from warpring.formats import QuantizedTensor, ceil_div, get_format
from warpring.formats.blocks import divide
from warpring.formats.fp8 import E4M3_MAX, to_e4m3

Sums = Literal["fp32", "tensor_core"]

#: The least scale of an FP8 group, so that its reciprocal is finite.
_LEAST_SCALE = 2.0**-126
_ABS = 0x7FFFFFFF
_FRACTION_BITS = 23


@dataclass(frozen=True)
class Published:
    """Tokens in the form in which they travel; value = sum of its terms' codes * scale of the column's group.

    Attributes:
        codes: E4M3 [num_tokens, hidden_padded * terms]: the terms of a scale's columns follow each other.
        scale: FP32 [num_tokens, scales_per_token].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __getitem__(self, rows: torch.Tensor | slice) -> Published:
        """Some of the tokens."""
        return Published(self.codes.view(torch.uint8)[rows].view(self.codes.dtype), self.scale[rows])


def partial_dtype(activation: ActivationForm) -> torch.dtype:
    """dtype of one expert's result for one token on its way back."""
    return torch.bfloat16 if activation == "fp8" else torch.float32


def quantize(groups: torch.Tensor, activation: ActivationForm) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 values to what the tensor cores eat, a scale for each vector of the last dimension (ep_quantize.cuh).

    "fp8": E4M3, scale = amax / 448, at least 2^-126, and 1 for zeros. "bf16": the sum of two E4M3 numbers, scale = the
    power of two that brings the largest magnitude into [2^7, 2^8), 2^-126 at least: BF16 values of 2^-9 of it or more
    stay as they are, of others at most 2^-17 of it is lost. A NaN is larger than everything; with one, or an infinity,
    the group's values are lost and its sums become NaN or infinite.

    Args:
        groups: FP32 [..., n].
        activation: the form.

    Returns:
        E4M3 codes [..., terms, n] and FP32 scale [...] with value = sum of codes * scale.
    """
    amax = (groups.contiguous().view(torch.int32) & _ABS).amax(-1, keepdim=True)
    if activation == "fp8":
        scale = divide(amax.view(torch.float32), E4M3_MAX)
        scale = torch.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
        scale = torch.where(amax == 0, 1.0, scale)
        return to_e4m3(groups * scale.reciprocal()).unsqueeze(-2), scale.squeeze(-1)
    exponent = (amax >> _FRACTION_BITS).clamp(min=8)
    multiplier = ((261 - exponent) << _FRACTION_BITS).view(torch.float32)
    scale = torch.where(exponent == 255, amax, (exponent - 7) << _FRACTION_BITS).view(torch.float32)
    halves = (groups * multiplier).half().float()
    first = to_e4m3(halves.clamp(-E4M3_MAX, E4M3_MAX))  # of an infinity, as the hardware has it
    second = to_e4m3((halves - first.float()).clamp(-E4M3_MAX, E4M3_MAX))
    codes = torch.stack([term.view(torch.uint8) for term in (first, second)], -2).view(first.dtype)
    return codes, scale.squeeze(-1)


def publish(problem: Problem, x: torch.Tensor) -> Published:
    """role1's first half: BF16 tokens [num_tokens, hidden] as they travel."""
    columns = pad(x.float(), (0, problem.hidden_padded - problem.hidden))
    codes, scale = quantize(columns.unflatten(1, (-1, HIDDEN_BLOCK)), problem.activation)
    return Published(codes.flatten(1), scale)


def run_expert(
    problem: Problem,
    experts: Experts,
    expert: int,
    tokens: Published,
    weights: torch.Tensor,
    sums: Sums = "fp32",
) -> torch.Tensor:
    """role2 for one expert: both GEMMs and what is between them.

    Args:
        problem: the layer.
        experts: weights that hold it (routed or shared).
        expert: index in `experts`.
        tokens: the pairs' tokens, n of them.
        weights: FP32 [n], their routing weights.
        sums: how FP8 products are added inside a chunk.

    Returns:
        [n, hidden] partial results, BF16 ("fp8") or FP32 ("bf16").
    """
    weights = weights[:, None]
    w13 = experts.w13[expert]
    gate, up = (_gemm(tokens.codes, tokens.scale, w13[half], HIDDEN_BLOCK, sums) for half in (0, 1))
    if experts.w13_bias is not None:
        gate, up = gate + experts.w13_bias[expert, 0], up + experts.w13_bias[expert, 1]
    act = experts.activation(gate, up)
    if problem.activation == "fp8":
        act = act * weights
    groups = pad(act, (0, problem.intermediate_padded - problem.intermediate)).unflatten(1, (-1, NEURONS))
    codes, scale = quantize(groups, problem.activation)
    out = _gemm(codes.flatten(1), scale, experts.w2[expert], NEURONS, sums)
    bias = 0.0 if experts.w2_bias is None else experts.w2_bias[expert]
    out = out + bias * weights if problem.activation == "fp8" else (out + bias) * weights
    return out.to(partial_dtype(problem.activation))


def combine(partials: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """role3: sum partial results over valid slots, in order, in FP32.

    Args:
        partials: [num_tokens, slots, hidden]. What invalid slots hold does not matter.
        valid: bool [num_tokens, slots].

    Returns:
        BF16 [num_tokens, hidden].
    """
    total = torch.zeros(partials.shape[0], partials.shape[2], device=partials.device)
    for slot in range(partials.shape[1]):
        total += torch.where(valid[:, slot, None], partials[:, slot].float(), 0)
    return total.bfloat16()


def run_layer(
    problem: Problem,
    x: torch.Tensor,
    experts: Experts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: Experts | None = None,
    shared_weights: torch.Tensor | None = None,
    sums: Sums = "fp32",
) -> torch.Tensor:
    """The whole layer for one rank's tokens, with all experts at hand: what every rank compares its results with.

    Args:
        problem: the layer.
        x: BF16 [num_tokens, hidden].
        experts: all `num_experts` routed experts.
        topk_idx: [num_tokens, topk] integer; ids that name no expert are unused slots.
        topk_weights: FP32 [num_tokens, topk].
        shared: the shared experts, or None where the problem has none.
        shared_weights: FP32 [num_tokens, num_shared]; None weighs each by 1.
        sums: how FP8 products are added inside a chunk.

    Returns:
        BF16 [num_tokens, hidden].
    """
    tokens = publish(problem, x)
    slots, topk = problem.num_slots_per_token, problem.topk
    partials = x.new_zeros(x.shape[0], slots, problem.hidden, dtype=partial_dtype(problem.activation))
    valid = torch.ones(x.shape[0], slots, dtype=torch.bool, device=x.device)
    valid[:, :topk] = (topk_idx >= 0) & (topk_idx < problem.num_experts)
    for expert in topk_idx[valid[:, :topk]].unique().tolist():
        rows, where = (topk_idx == expert).nonzero(as_tuple=True)
        pair_weights = topk_weights[rows, where].float()
        partials[rows, where] = run_expert(problem, experts, expert, tokens[rows], pair_weights, sums)
    if shared is not None:
        partials[:, topk:] = run_shared(problem, shared, tokens, shared_weights, sums)
    return combine(partials, valid)


def run_shared(
    problem: Problem, shared: Experts, tokens: Published, weights: torch.Tensor | None, sums: Sums = "fp32"
) -> torch.Tensor:
    """role2 for the shared experts, which see every token: partial results [num_tokens, num_shared, hidden]."""
    if weights is None:
        weights = torch.ones(tokens.scale.shape[0], problem.num_shared, device=tokens.scale.device)
    parts = [run_expert(problem, shared, s, tokens, weights[:, s].float(), sums) for s in range(problem.num_shared)]
    return torch.stack(parts, dim=1)


def _gemm(codes: torch.Tensor, scale: torch.Tensor, weight: QuantizedTensor, block: int, sums: Sums) -> torch.Tensor:
    """FP32 [n, rows] = (codes * scale) @ weight.T for weight [rows, cols], codes [n, blocks * terms * block].

    The products of `block` columns are summed unscaled, then multiplied by weight scale x token scale and added up.
    """
    num_blocks = scale.shape[1]
    terms = codes.unflatten(1, (num_blocks, -1, block))
    if sums == "tensor_core":
        return _tensor_core_gemm(terms, scale, e4m3_operands(weight, num_blocks * block))
    values, weight_scale = _split_weight(weight, block, num_blocks * block)
    total = torch.zeros(codes.shape[0], weight.shape[0], device=codes.device)
    for index in range(num_blocks):
        part = slice(index * block, (index + 1) * block)
        factor = weight_scale[:, index] * scale[:, index, None]
        total = total + (terms[:, index].float().sum(1) @ values[:, part].mT) * factor
    return total


def _tensor_core_gemm(terms: torch.Tensor, scale: torch.Tensor, weight: Operands) -> torch.Tensor:
    """`_gemm` with the sums of FP8 tensor cores, codes [n, blocks, terms, block].

    Where the weight's scales reach less far than the token's, they are applied to the sums of their own columns, and
    the token's to the sum of these.
    """
    block = terms.shape[-1]
    columns = min(block, weight.columns)
    total = torch.zeros(terms.shape[0], weight.values.shape[0], device=terms.device)
    for index in range(terms.shape[1]):
        token_scale = scale[:, index, None]
        within = torch.zeros_like(total)
        for first in range(0, block, columns):
            before = index * block + first
            products = e4m3_sums(
                terms[:, index, :, first : first + columns], weight.values[:, before : before + columns]
            )
            factor = weight.factors[:, before // weight.columns]
            if weight.columns < block:
                within = _fma(products, factor, within)
            else:
                total = _fma(products, factor * token_scale, total)
        if weight.columns < block:
            total = _fma(within, token_scale, total)
    return total * weight.sum_factor


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c with one rounding, as the kernels do it: a product of two FP32 numbers is exact in FP64."""
    return (c + a.double() * b).float()


def _split_weight(weight: QuantizedTensor, block: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [rows, cols] as FP32 values [rows, cols, padded] and FP32 factors [rows, blocks] applied to sums."""
    rows, num_blocks = weight.shape[0], cols // block
    if weight.format in ("fp8_block", "fp8_channel") and weight.scale is not None:
        values, scale = weight.data.float(), weight.scale
        if weight.format == "fp8_block":
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128 // block, 1)
        # A half block of columns beyond the weight's own only ever meets zeros.
        scale = scale[:, : ceil_div(weight.shape[1], block)]
        factors = pad(scale, (0, num_blocks - scale.shape[1]), value=1.0) if scale.shape[1] > 1 else scale
        factors = factors.expand(rows, num_blocks)
    else:
        values = get_format(weight.format).dequantize(weight)
        factors = torch.ones(rows, num_blocks, device=weight.device)
    return pad(values, (0, cols - weight.shape[1])), factors
