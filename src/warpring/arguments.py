"""The rules on `moe_decode`'s arguments. What cannot change of a layer is asked of it once, not at every call."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from warpring.errors import ArgumentError
from warpring.experts import Experts
from warpring.layout import PackedExperts

MAX_TOPK = 32


@dataclass(frozen=True)
class _Facts:
    """What the rules need of a layer: sizes, place, and the two tensors that hold nearly all of its memory."""

    hidden: int
    num_experts: int
    num_shared: int
    device: torch.device
    w13: torch.Tensor
    w2: torch.Tensor


_facts: WeakKeyDictionary[Experts | PackedExperts, _Facts] = WeakKeyDictionary()


def check_call(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None,
    shared_weights: torch.Tensor | None = None,
) -> None:
    """Raise ArgumentError on the first broken rule of shape, dtype, place or overlap."""
    facts = _facts.get(experts) or _facts_of(experts)
    num_tokens = x.shape[0] if x.dim() == 2 else -1
    if num_tokens < 0 or x.shape[1] != facts.hidden:
        raise ArgumentError(
            f"moe_decode: x must be [num_tokens, hidden={facts.hidden}]; got {list(x.shape)}. "
            "Flatten batch and sequence into num_tokens."
        )
    if x.dtype != torch.bfloat16:
        raise ArgumentError(f"moe_decode: x must be bfloat16; got {x.dtype}. Convert it with x.bfloat16().")
    _check_routing(num_tokens, topk_idx, topk_weights)
    if shared_weights is not None:
        _check_gate(num_tokens, shared_weights, facts.num_shared)
    if out is not None and (out.dtype != torch.bfloat16 or out.shape != x.shape or not _dense_rows(out)):
        raise ArgumentError(
            f"moe_decode: out must be bfloat16 {list(x.shape)} with dense rows, each in memory of its own; got "
            f"{out.dtype} {list(out.shape)}, strides {out.stride() if out.layout is torch.strided else out.layout}."
        )
    device = x.device
    _check_place("x", x, device)
    _check_place("topk_idx", topk_idx, device)
    _check_place("topk_weights", topk_weights, device)
    if shared_weights is not None:
        _check_place("shared_weights", shared_weights, device)
    if facts.device != device or facts.w13.is_meta:
        _check_place("experts", facts.w13, device)
    if out is not None:
        _check_place("out", out, device)
        if num_tokens:
            _check_overlap(out, x, topk_idx, topk_weights, shared_weights, facts)


def check_topk(topk: int) -> None:
    """Raise unless a token may have so many slots."""
    if not 1 <= topk <= MAX_TOPK:
        raise ArgumentError(
            f"moe_decode: topk must be 1 to {MAX_TOPK}; got {topk}. Split more slots over several calls."
        )


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raise unless every id is -1 or an expert's; waits for a GPU."""
    low, high = torch.aminmax(topk_idx)
    if int(low) >= -1 and int(high) < num_experts:
        return
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    token, slot = bad.nonzero()[0].tolist()
    raise ArgumentError(
        f"moe_decode: topk_idx must be -1 (unused) or in [0, {num_experts}); got {int(topk_idx[token, slot])} at "
        f"token {token}, slot {slot} ({int(bad.sum())} such ids). Map ids of other ranks to -1."
    )


def _facts_of(experts: Experts | PackedExperts) -> _Facts:
    if isinstance(experts, PackedExperts):
        w13, w2, num_shared = experts.w13.records, experts.w2.records, experts.num_shared
    else:
        w13, w2, num_shared = experts.w13.data, experts.w2.data, 0
    facts = _facts[experts] = _Facts(experts.hidden, experts.num_experts, num_shared, experts.device, w13, w2)
    return facts


def _check_routing(num_tokens: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
    if topk_idx.dim() != 2 or topk_idx.shape[0] != num_tokens or topk_idx.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"moe_decode: topk_idx must be int32 or int64 [num_tokens={num_tokens}, topk]; got {topk_idx.dtype} "
            f"{list(topk_idx.shape)}."
        )
    check_topk(topk_idx.shape[1])
    if topk_weights.shape != topk_idx.shape or not topk_weights.dtype.is_floating_point:
        raise ArgumentError(
            f"moe_decode: topk_weights must be floating point of topk_idx's shape {list(topk_idx.shape)}; got "
            f"{topk_weights.dtype} {list(topk_weights.shape)}."
        )


def _check_gate(num_tokens: int, shared_weights: torch.Tensor, num_shared: int) -> None:
    if not num_shared:
        raise ArgumentError(
            "moe_decode: shared_weights must be None where the layer has no shared experts; got "
            f"{shared_weights.dtype} {list(shared_weights.shape)}. Give them to warpring.pack_experts(experts, shared)."
        )
    if list(shared_weights.shape) not in ([num_tokens], [num_tokens, 1]) or not shared_weights.dtype.is_floating_point:
        raise ArgumentError(
            f"moe_decode: shared_weights must be floating point [num_tokens={num_tokens}] or [{num_tokens}, 1], the "
            f"gate of the shared experts, or None for 1; got {shared_weights.dtype} {list(shared_weights.shape)}."
        )


def _check_place(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless a tensor is strided and holds data on `device`."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ArgumentError(
            f"moe_decode: {name} must be a strided tensor that holds data; got {tensor.layout} on {tensor.device}. "
            "Call .to_dense() on a sparse tensor, and load weights that are on 'meta'."
        )
    if tensor.device != device:
        raise ArgumentError(
            f"moe_decode: all tensors must lie on one device; got x on {device} and {name} on {tensor.device}. "
            f"Move {name} with .to({str(device)!r})."
        )


def _check_overlap(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    shared_weights: torch.Tensor | None,
    facts: _Facts,
) -> None:
    """Raise where out's range of memory, from its first to its last element, meets that of another tensor."""
    first, last = _span(out)
    others = (x, topk_idx, topk_weights, shared_weights, facts.w13, facts.w2)
    names = ("x", "topk_idx", "topk_weights", "shared_weights", "experts", "experts.w2")
    for name, tensor in zip(names, others, strict=True):
        if tensor is None:
            continue
        start, end = _span(tensor)
        if first < end and start < last:
            raise ArgumentError(
                f"moe_decode: out must not overlap {name}, which is read while out is written. Pass another tensor, "
                "or none."
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a non-empty tensor, and of the byte after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _dense_rows(out: torch.Tensor) -> bool:
    """Whether a [rows, cols] tensor has dense rows of which no two share memory."""
    if out.layout is not torch.strided or out.stride(1) != 1:
        return False
    return out.shape[0] < 2 or out.stride(0) >= out.shape[1]
