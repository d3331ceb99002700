"""The semantics of a MoE layer in plain torch: the truth that kernels are tested against, and what runs without a GPU.

    y[t] = sum_k topk_weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e]),   e = topk_idx[t, k]

Slots with id -1 contribute nothing, whatever their weight holds; duplicates in one token add up.
Two forms: `moe_exact` rounds nothing (FP64 by default) and is the yardstick of every accuracy figure;
`moe_reference` rounds where warp decode rounds (BF16 activations, FP32 sums) and is the CPU's decode path.
"""

from __future__ import annotations

import torch

from warpring.experts import Experts
from warpring.formats import QuantizedTensor, get_format


def moe_exact(
    x: torch.Tensor,
    experts: Experts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The layer's value with every operation in `dtype`, from the stored (quantised) weights.

    Args:
        x: [num_tokens, hidden], any float dtype.
        topk_idx: [num_tokens, topk] integer, -1 or in [0, num_experts).
        topk_weights: [num_tokens, topk].
        dtype: float32 or float64.

    Returns:
        [num_tokens, hidden] of `dtype`.
    """
    y = torch.zeros(x.shape[0], experts.hidden, dtype=dtype, device=x.device)
    for expert in topk_idx.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (topk_idx == expert).nonzero(as_tuple=True)
        act = _gate_up(x[tokens].to(dtype), experts, expert, _dequantize(experts.w13[expert], dtype))
        out = act @ _dequantize(experts.w2[expert], dtype).mT
        if experts.w2_bias is not None:
            out = out + experts.w2_bias[expert].to(dtype)
        y.index_add_(0, tokens, out * topk_weights[tokens, slots, None].to(dtype))
    return y


def moe_reference(
    x: torch.Tensor,
    experts: Experts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer with warp decode's roundings: BF16 in, FP32 sums, BF16 between the projections, BF16 out.

    Every (token, slot) is computed by itself, slots are added in order: a token's bits do not depend on the
    rest of the batch. Shapes as in `moe_exact`, but any id that names no expert is skipped, as on a GPU's warp path;
    returns BF16 [num_tokens, hidden].
    """
    if out is None:
        out = torch.empty(x.shape[0], experts.hidden, dtype=torch.bfloat16, device=x.device)
    # Expert by expert, so that weights are dequantised once and one expert at a time.
    rows = torch.empty(*topk_idx.shape, experts.hidden, dtype=torch.float32, device=x.device)
    for expert in topk_idx.unique().tolist():
        if not 0 <= expert < experts.num_experts:
            continue
        w13 = _dequantize(experts.w13[expert], torch.float32)
        w2 = _dequantize(experts.w2[expert], torch.float32)
        for token, slot in (topk_idx == expert).nonzero().tolist():
            act = _gate_up(x[token].float(), experts, expert, w13).bfloat16().float()
            rows[token, slot] = torch.mv(w2, act)
        if experts.w2_bias is not None:
            rows[topk_idx == expert] += experts.w2_bias[expert]
    for token, expert_ids in enumerate(topk_idx.tolist()):
        y = torch.zeros(experts.hidden, dtype=torch.float32, device=x.device)
        for slot, expert in enumerate(expert_ids):
            if 0 <= expert < experts.num_experts:
                y += topk_weights[token, slot].float() * rows[token, slot]
        out[token] = y
    return out


def _gate_up(x: torch.Tensor, experts: Experts, expert: int, w13: torch.Tensor) -> torch.Tensor:
    """act(w13 @ x + bias) for x [..., hidden] and one expert's w13 [2, intermediate, hidden]: [..., intermediate]."""
    gate, up = (torch.mv(w, x) if x.dim() == 1 else x @ w.mT for w in w13)
    if experts.w13_bias is not None:
        gate = gate + experts.w13_bias[expert, 0].to(x.dtype)
        up = up + experts.w13_bias[expert, 1].to(x.dtype)
    return experts.activation(gate, up)


def _dequantize(stored: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    return get_format(stored.format).dequantize(stored, dtype)
