"""Shared experts, which every token wants: cut to the width of the routed ones, so that one kernel runs both alike.

An expert of m times the width is m experts that each have a run of its neurons: exactly, since the down projection
sums over neurons. Codes and scales are moved, never rounded anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from warpring.errors import ArgumentError
from warpring.experts import MAX_EXPERTS, Experts
from warpring.formats import QuantizedTensor, get_format

#: Shared experts of the routed experts' width that a layer may have.
MAX_SHARED = 32


def shared_beside(routed: Experts, shared: Experts) -> Experts:
    """The shared experts as experts of the routed ones' width.

    Args:
        routed: the layer's routed experts.
        shared: its shared ones, of m times their intermediate; all else is alike.

    Returns:
        m * shared.num_experts experts, those of one shared expert behind each other.

    Raises:
        ArgumentError: shared experts of another hidden size, format, activation or device; an intermediate size that
            does not divide, or that would cut blocks of scales; too many.
    """
    for name in ("hidden", "format", "activation", "device"):
        wanted, got = getattr(routed, name), getattr(shared, name)
        if wanted != got:
            raise ArgumentError(
                f"pack_experts: shared must have the {name} of the routed experts, {wanted}; got {got}. "
                f"{_REMEDIES[name]}"
            )
    pieces = split_experts(shared, routed.intermediate)
    if pieces.num_experts > MAX_SHARED or routed.num_experts + pieces.num_experts > MAX_EXPERTS:
        raise ArgumentError(
            f"pack_experts: shared must be at most {MAX_SHARED} experts of the routed width, and with the routed ones "
            f"at most {MAX_EXPERTS}; got {pieces.num_experts} beside {routed.num_experts}. Run the shared experts as a "
            "layer of their own."
        )
    return pieces


_REMEDIES = {
    "hidden": "They read the same x.",
    "format": "Quantise the shared experts to it, or run them as a layer of their own.",
    "activation": "Run the shared experts as a layer of their own.",
    "device": "Move one of them with .to().",
}


def split_experts(experts: Experts, intermediate: int) -> Experts:
    """Each expert as m of the given size, behind each other; their outputs add up to its own.

    The bias of w2 goes to the first of them.

    Raises:
        ArgumentError: a size that does not divide the experts' own, or that cuts blocks of scales.
    """
    if experts.intermediate == intermediate:
        return experts
    block = get_format(experts.format).block
    m, rest = divmod(experts.intermediate, intermediate)
    if rest or intermediate % (block or (1, 1))[1]:
        rule = "a multiple of the routed experts'" if rest else "as large as the routed experts', for blocks of scales"
        raise ArgumentError(
            f"pack_experts: intermediate of shared must be {rule} ({intermediate}); got {experts.intermediate} in "
            f"{experts.format}{'' if block is None else f', blocks of {block[0]} x {block[1]}'}. "
            f"{'Zero-pad it in w13 and w2' if rest else 'Take another format'}, or run the shared experts as a layer "
            "of their own."
        )
    w13_bias, w2_bias = experts.w13_bias, experts.w2_bias
    if w13_bias is not None:
        w13_bias = _split(w13_bias, 2, m)
    if w2_bias is not None:
        w2_bias = torch.stack((w2_bias, *[torch.zeros_like(w2_bias)] * (m - 1)), 1).flatten(0, 1)
    return Experts(
        _split_matrix(experts.w13, -2, m), _split_matrix(experts.w2, -1, m), experts.activation, w13_bias, w2_bias
    )


def _split_matrix(stored: QuantizedTensor, dim: int, m: int) -> QuantizedTensor:
    """[S, .., rows, cols] -> [S * m, ..] with the m-th part of rows or columns, by `dim` from the end."""
    shape = list(stored.shape)
    shape[0], shape[dim] = shape[0] * m, shape[dim] // m
    scale, global_scale = stored.scale, stored.global_scale
    if scale is not None:
        # Per channel there is one scale for all columns.
        scale = _repeat(scale, m) if scale.shape[dim] == 1 else _split(scale, scale.dim() + dim, m)
    return replace(
        stored,
        shape=tuple(shape),
        data=_split(stored.data, stored.data.dim() + dim, m),
        scale=scale,
        global_scale=None if global_scale is None else _repeat(global_scale, m),
    )


def _split(t: torch.Tensor, dim: int, m: int) -> torch.Tensor:
    """[S, .., m * n, ..] -> [S * m, .., n, ..], dense."""
    return t.unflatten(dim, (m, -1)).movedim(dim, 1).flatten(0, 1).contiguous()


def _repeat(t: torch.Tensor, m: int) -> torch.Tensor:
    """[S, ..] -> [S * m, ..], each entry m times."""
    return t[:, None].expand(-1, m, *t.shape[1:]).flatten(0, 1).contiguous()


def join_biases(
    routed: torch.Tensor | None, shared: torch.Tensor | None, counts: tuple[int, int]
) -> torch.Tensor | None:
    """Biases behind each other, [sum(counts), ..]: zeros for those that have none, None where all have none."""
    given = [bias for bias in (routed, shared) if bias is not None]
    if not given:
        return None
    none = given[0].new_zeros(1, *given[0].shape[1:])
    return torch.cat(
        [none.expand(n, *none.shape[1:]) if b is None else b for b, n in zip((routed, shared), counts, strict=True)]
    )
