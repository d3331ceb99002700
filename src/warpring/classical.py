"""The classical, expert-centric path in its 8 stages: the baseline that warp decode is measured against.

Tokens are packed by expert, so that each expert's weights are read once however many tokens want it; that pays
at prefill, and costs five stages of bookkeeping (marked *) that compute nothing. What prefill really takes is
`warpring.grouped`, which leaves out all of it that it can. In order:

    1 pad *                   sort the (token, slot) pairs by expert, each expert's rows up to a multiple of BLOCK_ROWS
    2 quantize_activations *  x to MXFP8 (E4M3, a UE8M0 scale per 32) and back, as a block-scaled GEMM reads it
    3 gather *                copy the tokens into the expert-major buffer: topk copies of each, and the padding
    4 gate_up                 grouped GEMM with w13, FP32 sums, BF16 out
    5 activate                act(gate, up) in FP32, then the same MXFP8 round trip
    6 down                    grouped GEMM with w2, FP32 sums, BF16 out: the per-expert output buffer
    7 scatter *               copy the rows back to token-major order
    8 combine *               y[t] = sum_k topk_weights[t, k] * row[t, k], FP32, slots in order

Semantics are those of `warpring.reference`; what differs is rounding: activations pass through MXFP8 twice, gate/up
and each expert's output through BF16. Weights enter the GEMMs as BF16. That is exact for bf16, mxfp8 and mxfp4 (a
code has at most 4 significant bits and its scale is a power of two); a code times an FP32 scale (fp8_block,
fp8_channel, nvfp4) is rounded once to BF16.

Nothing here synchronises with the host on CUDA: every buffer's size follows from shapes, group ends stay on the
device. So the path can be captured in a CUDA graph wherever torch has a grouped GEMM kernel (compute capability 9.0
and 10.0; elsewhere torch loops over the experts from the host).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from warpring.experts import Experts
from warpring.formats import QuantizedTensor, ceil_div, get_format
from warpring.formats.mx import MX_BLOCK
from warpring.gemm import gemm_by_expert, gemm_by_library, row_chunks

#: Rows that an expert's group is padded to a multiple of. On a CPU each GEMM call takes exactly so many rows:
#: the library then sums every row in one order, whatever the batch (with other counts it may choose another).
BLOCK_ROWS = 16


@dataclass(frozen=True)
class Groups:
    """Where every (token, slot) pair lies in the expert-major buffer of `num_rows` rows.

    Attributes:
        row_token: int64 [num_rows], the token that each row copies; 0 in padding, whose rows nobody reads back.
        slot_row: int64 [num_tokens, topk], the row of each pair. Unused pairs lie past the last expert's group.
        used: bool [num_tokens, topk], false where the id is not in [0, num_experts).
        ends: int32 [num_experts], one past each expert's last row; multiples of BLOCK_ROWS.
    """

    row_token: torch.Tensor
    slot_row: torch.Tensor
    used: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class DenseExperts:
    """A layer in BF16: w13 [num_experts, 2 * intermediate, hidden], w2 [num_experts, hidden, intermediate]."""

    w13: torch.Tensor
    w2: torch.Tensor


_prepared: WeakKeyDictionary[Experts, DenseExperts] = WeakKeyDictionary()


def prepare(experts: Experts) -> DenseExperts:
    """Dequantise the weights once and keep them as long as `experts` lives, or until `release(experts)`.

    Without it every call dequantises what it needs: on a CPU one expert at a time, on CUDA all of w13, then all of w2
    (2 bytes a weight at the peak, of the larger of the two). With it 2 bytes a weight stay allocated; for bf16,
    whose weights are used in place, nothing does.
    """
    dense = _prepared.get(experts)
    if dense is None:
        dense = DenseExperts(w13=_Projection(experts.w13, None).all(), w2=_Projection(experts.w2, None).all())
        _prepared[experts] = dense
    return dense


def release(experts: Experts) -> None:
    """Drop what `prepare` kept; nothing happens where it kept nothing."""
    _prepared.pop(experts, None)


def moe_classical(
    x: torch.Tensor,
    experts: Experts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a layer's experts the expert-centric way, in the 8 stages of this module.

    Args:
        x: [num_tokens, hidden] bf16, any strides.
        experts: the layer's weights, any format, on x's device. See `prepare` for repeated calls.
        topk_idx: [num_tokens, topk] int32 or int64. An id outside [0, num_experts) is an unused slot: it contributes
            nothing, and its weight is ignored (it may be NaN).
        topk_weights: [num_tokens, topk], any float dtype.
        out: optional [num_tokens, hidden] bf16, overwritten; it may be x.

    Returns:
        out. The same inputs give the same bits. On a CPU a token's bits do not depend on the rest of the batch.

    Arguments are not checked here; `warpring.decode.moe_decode` does that. Asynchronous on the current stream.
    Temporaries, with R = num_tokens * topk and at most 15 rows more for each expert hit: the gathered and the gate/up
    rows, R * (hidden + 2 * intermediate) BF16; around the activation 11 bytes for each of R * intermediate; the outputs
    of the experts in both orders, (R + num_tokens * topk) * hidden BF16; and the weights, see `prepare`.
    """
    if out is None:
        out = torch.empty(x.shape[0], experts.hidden, dtype=torch.bfloat16, device=x.device)
    if topk_idx.numel() == 0:
        return out.zero_()
    groups = pad(topk_idx, experts.num_experts)
    rows = gather(quantize_activations(x), groups)
    rows = gate_up(rows, experts, groups)
    rows = activate(rows, experts, groups)
    rows = down(rows, experts, groups)
    slots = scatter(rows, groups)
    return combine(slots, experts, groups, topk_idx, topk_weights, out)


def pad(topk_idx: torch.Tensor, num_experts: int) -> Groups:
    """Stage 1: sort the pairs by expert, round each expert's group of rows up to BLOCK_ROWS."""
    pairs, device = topk_idx.numel(), topk_idx.device
    used = (topk_idx >= 0) & (topk_idx < num_experts)
    # Unused pairs form one more group behind the last expert's, which no GEMM touches.
    group = torch.where(used, topk_idx, num_experts).flatten().long()
    sorted_group, order = torch.sort(group, stable=True)
    starts = torch.searchsorted(sorted_group, torch.arange(num_experts + 2, device=device))
    padded = (starts.diff() + (BLOCK_ROWS - 1)) & -BLOCK_ROWS
    ends = padded.cumsum(0)
    row = torch.arange(pairs, device=device) + (ends - padded - starts[:-1])[sorted_group]
    # The worst case, so that no size depends on the routing itself: every group hit has one used row in its last block.
    num_rows = ceil_div(pairs + min(pairs, num_experts + 1) * (BLOCK_ROWS - 1), BLOCK_ROWS) * BLOCK_ROWS
    row_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
    row_token[row] = order // topk_idx.shape[1]
    slot_row = torch.empty_like(row)
    slot_row[order] = row
    return Groups(row_token, slot_row.view(topk_idx.shape), used, ends[:num_experts].int())


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Stage 2: [rows, cols] of any float dtype to MXFP8 and back, as BF16 (which holds every such value).

    The values are those of `get_format("mxfp8")`, which takes five times as many launches: it stores scales and treats
    NaN and Inf element by element. Here they stay, but the finite values of their block are lost.
    """
    blocks = x.unflatten(1, (-1, MX_BLOCK))
    amax = torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    # The smallest power of two, 2^-126 at least, with amax <= 448 * scale. 448 is 1.75 * 2^8: a larger fraction than
    # 0.75 carries into the exponent, from which 8 are then taken.
    exponent = ((amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000).clamp_(min=9 << 23).sub_(8 << 23)
    scale = exponent.view(torch.float32)
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return codes.bfloat16().mul_(scale.bfloat16()).flatten(1)


def gather(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Stage 3: [num_tokens, hidden] copied into the expert-major buffer [num_rows, hidden]."""
    return x.index_select(0, groups.row_token)


def gate_up(rows: torch.Tensor, experts: Experts, groups: Groups) -> torch.Tensor:
    """Stage 4: rows @ w13[e].T, BF16 [num_rows, 2 * intermediate], gate first."""
    dense = _prepared.get(experts)
    return _grouped_gemm(rows, _Projection(experts.w13, None if dense is None else dense.w13), groups.ends)


def activate(rows: torch.Tensor, experts: Experts, groups: Groups) -> torch.Tensor:
    """Stage 5: act(gate, up), biases included, from BF16 [num_rows, 2 * intermediate]; through MXFP8 to BF16."""
    bias, row_expert = experts.w13_bias, None
    if bias is not None:
        row = torch.arange(rows.shape[0], device=rows.device)
        row_expert = torch.bucketize(row, groups.ends, right=True).clamp(max=experts.num_experts - 1)
    act = torch.empty(rows.shape[0], experts.intermediate, device=rows.device)
    for chunk in row_chunks(rows.shape[0], experts.intermediate, rows.device):
        halves = rows[chunk].float().view(-1, 2, experts.intermediate)
        if bias is not None and row_expert is not None:
            halves = halves + bias[row_expert[chunk]]
        act[chunk] = experts.activation(halves[:, 0], halves[:, 1])
    return quantize_activations(act)


def down(rows: torch.Tensor, experts: Experts, groups: Groups) -> torch.Tensor:
    """Stage 6: rows @ w2[e].T, BF16 [num_rows, hidden]."""
    dense = _prepared.get(experts)
    return _grouped_gemm(rows, _Projection(experts.w2, None if dense is None else dense.w2), groups.ends)


def scatter(rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Stage 7: expert-major rows back to [num_tokens, topk, hidden], zero in unused slots."""
    return rows[groups.slot_row].masked_fill_(~groups.used[..., None], 0)


def combine(
    slots: torch.Tensor,
    experts: Experts,
    groups: Groups,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Stage 8: the weighted sum over slots, biases included, FP32 and in slot order; no atomics."""
    # Not weight * 0: an unused slot's weight or bias may be NaN.
    unused = ~groups.used
    weights = topk_weights.float().masked_fill(unused, 0)
    y = torch.zeros(out.shape, device=out.device)
    for slot in range(topk_idx.shape[1]):
        row = slots[:, slot]
        if experts.w2_bias is not None:
            expert = topk_idx[:, slot].clamp(0, experts.num_experts - 1)
            row = (row + experts.w2_bias[expert]).masked_fill_(unused[:, slot, None], 0)
        y.addcmul_(weights[:, slot, None], row)
    return out.copy_(y)


#: The 8 stages in order, and those of them that only manage data.
STAGES = (pad, quantize_activations, gather, gate_up, activate, down, scatter, combine)
BOOKKEEPING = (pad, quantize_activations, gather, scatter, combine)


@dataclass(frozen=True)
class _Projection:
    """w13 or w2: what is stored, and its BF16 copy where `prepare` made one. Both halves of w13 make one matrix."""

    stored: QuantizedTensor
    dense: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        return math.prod(self.stored.shape[1:-1])

    def expert(self, expert: int) -> torch.Tensor:
        """BF16 [rows, cols] of one expert."""
        return _dequantize(self.stored[expert]).flatten(0, -2) if self.dense is None else self.dense[expert]

    def all(self) -> torch.Tensor:
        """BF16 [num_experts, rows, cols]."""
        return _dequantize(self.stored).flatten(1, -2) if self.dense is None else self.dense


def _grouped_gemm(rows: torch.Tensor, weights: _Projection, ends: torch.Tensor) -> torch.Tensor:
    """rows[group e] @ weights[e].T for every expert e; rows past ends[-1] are left unwritten."""
    if rows.device.type == "cpu":
        return gemm_by_expert(rows, weights.expert, weights.num_rows, ends, BLOCK_ROWS)
    return gemm_by_library(rows, weights.all(), ends)


def _dequantize(stored: QuantizedTensor) -> torch.Tensor:
    return get_format(stored.format).dequantize(stored, torch.bfloat16)
