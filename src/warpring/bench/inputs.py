"""Inputs of a benchmark: random experts made in their number format, and routings.

Experts of a large layer do not fit beside a dense copy of themselves, and several layers are needed so that
no cache holds the weights. So a few experts are drawn and quantised, and the layer repeats them: every expert
has its own bytes in memory, and all codes and scales are ones that quantised weights really have.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warpring.bench.shapes import LayerShape
from warpring.errors import ArgumentError
from warpring.experts import Experts
from warpring.formats import QuantizedTensor, get_format
from warpring.layout import PackedExperts, pack_experts

#: Experts that are drawn; the others of the layer repeat them.
NUM_DRAWN = 4


def random_experts(shape: LayerShape, format: str, device: torch.device | str, seed: int) -> Experts:
    """A layer of `shape` with random weights of 1 / sqrt(fan-in), stored in `format` on `device`.

    At most `NUM_DRAWN` experts exist densely at any time. Equal seeds give equal experts on equal devices.
    """
    few = drawn_experts(shape, format, device, seed, min(NUM_DRAWN, shape.num_experts))
    return repeat_experts(few, torch.arange(shape.num_experts, device=device) % few.num_experts)


def random_packed(
    shape: LayerShape, format: str, device: torch.device | str, seed: int, shared: Experts | None = None
) -> PackedExperts:
    """`pack_experts(random_experts(...), shared)` bit for bit, without packing equal experts over and over."""
    drawn = min(NUM_DRAWN, shape.num_experts)
    few = pack_experts(drawn_experts(shape, format, device, seed, drawn), shared)
    which = torch.arange(shape.num_experts, device=device) % drawn
    # Shared experts lie behind the routed ones.
    which = torch.cat((which, torch.arange(drawn, drawn + few.num_shared, device=device)))
    return replace(
        few,
        w13=few.w13.map(lambda t: t[which]),
        w2=few.w2.map(lambda t: t[which]),
        num_experts=shape.num_experts,
        w13_bias=None if few.w13_bias is None else few.w13_bias[which],
        w2_bias=None if few.w2_bias is None else few.w2_bias[which],
    )


def drawn_experts(shape: LayerShape, format: str, device: torch.device | str, seed: int, drawn: int) -> Experts:
    """`drawn` random experts of a layer of `shape`, each with weights of its own."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device) * std

    return Experts.from_dense(
        normal(drawn, 2 * shape.intermediate, shape.hidden, std=shape.hidden**-0.5),
        normal(drawn, shape.hidden, shape.intermediate, std=shape.intermediate**-0.5),
        format=format,
        activation=shape.activation,
        w13_bias=normal(drawn, 2 * shape.intermediate, std=0.1) if shape.has_bias else None,
        w2_bias=normal(drawn, shape.hidden, std=0.1) if shape.has_bias else None,
    )


def repeat_experts(few: Experts, which: torch.Tensor) -> Experts:
    """The experts `which` (int [num_experts]) of `few`, each with memory of its own."""

    def repeated(stored: torch.Tensor) -> torch.Tensor:
        # Bytes, since not every device can index the 8-bit float types.
        as_bytes = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        return as_bytes[which].view(stored.dtype)

    def all_experts(stored: QuantizedTensor) -> QuantizedTensor:
        return replace(stored.map(repeated), shape=(len(which), *stored.shape[1:]))

    return replace(
        few,
        w13=all_experts(few.w13),
        w2=all_experts(few.w2),
        w13_bias=None if few.w13_bias is None else repeated(few.w13_bias),
        w2_bias=None if few.w2_bias is None else repeated(few.w2_bias),
    )


def one_expert(shape: LayerShape, format: str) -> Experts:
    """A layer of `shape` with one expert and no memory behind it (device "meta"): for sizes and kernel choice."""
    fmt = get_format(format)
    sample = fmt.quantize(torch.zeros(1, 32, 32))

    def stored(*sizes: int) -> QuantizedTensor:
        logical = (1, *sizes)
        scale_shape = fmt.scale_shape(logical)
        return QuantizedTensor(
            format=format,
            shape=logical,
            data=torch.empty(fmt.data_shape(logical), dtype=sample.data.dtype, device="meta"),
            scale=None
            if sample.scale is None or scale_shape is None
            else torch.empty(scale_shape, dtype=sample.scale.dtype, device="meta"),
            global_scale=None if sample.global_scale is None else torch.empty(logical[:-2], device="meta"),
        )

    return Experts(
        stored(2, shape.intermediate, shape.hidden),
        stored(shape.hidden, shape.intermediate),
        shape.activation,
        torch.empty(1, 2, shape.intermediate, device="meta") if shape.has_bias else None,
        torch.empty(1, shape.hidden, device="meta") if shape.has_bias else None,
    )


@dataclass(frozen=True)
class Routing:
    """Where a batch goes.

    Attributes:
        topk_idx: [num_tokens, topk] int64, as routers give it, distinct within a token; -1 where the router chose an
            expert of another rank.
        topk_weights: [num_tokens, topk] float32, positive, adding up to 1 a token.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device | str) -> Routing:
        """The same routing on another device."""
        return Routing(self.topk_idx.to(device), self.topk_weights.to(device))


def make_routing(
    shape: LayerShape,
    num_tokens: int,
    kind: str = "uniform",
    *,
    seed: int,
    load: Sequence[float] | None = None,
) -> Routing:
    """A random routing on the CPU; equal seeds give equal routings.

    Args:
        shape: gives num_experts, topk and routed_over.
        num_tokens: tokens in the batch.
        kind: "uniform": every expert as likely; "zipf": the r-th expert with probability ~ 1 / r; "recorded":
            as likely as `load` says. Which expert is the hot one is drawn anew with each seed.
        seed: of the drawing.
        load: relative load of each expert of a measured model, any length; it is stretched to num_experts.

    Raises:
        ArgumentError: an unknown kind; "recorded" without a load, or a load with it that cannot be one.
    """
    generator = torch.Generator().manual_seed(seed)
    total = shape.routed_over or shape.num_experts
    share = _expert_share(total, kind, load)
    share = share[torch.randperm(total, generator=generator)]
    # The largest of log p + Gumbel noise are a draw without replacement in proportion to p.
    noise = -torch.empty(num_tokens, total, dtype=torch.float64).exponential_(generator=generator).log()
    topk_idx = (share.log() + noise).topk(shape.topk, dim=1).indices
    topk_idx[topk_idx >= shape.num_experts] = -1
    scores = torch.randn(num_tokens, shape.topk, generator=generator)
    return Routing(topk_idx.contiguous(), scores.softmax(dim=1))


def _expert_share(num_experts: int, kind: str, load: Sequence[float] | None) -> torch.Tensor:
    """Relative load of each expert, largest first, FP64, all above 0."""
    if kind == "uniform":
        return torch.ones(num_experts, dtype=torch.float64)
    if kind == "zipf":
        return 1.0 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    if kind != "recorded":
        raise ArgumentError(f"make_routing: kind must be uniform, zipf or recorded; got {kind!r}.")
    if load is None or not len(load) or min(load) < 0 or not 0 < sum(load) < math.inf:
        raise ArgumentError(
            "make_routing: kind 'recorded' needs load, the finite, non-negative load of each expert of a model, "
            f"not all zero; got {'None' if load is None else list(load)}."
        )
    curve = torch.tensor(sorted(load, reverse=True), dtype=torch.float64)
    # An expert that got no token in the recording is rare, not impossible: half of the smallest load seen.
    curve = curve.clamp(min=0.5 * float(curve[curve > 0].min()))
    stretched = torch.nn.functional.interpolate(curve[None, None], size=num_experts, mode="linear", align_corners=True)
    return stretched[0, 0]


def read_load(path: str | os.PathLike[str]) -> list[float]:
    """A recorded load of each expert, largest first: the mean over layers where the file has one list a layer.

    The file is JSON: a list with one number an expert, a list of such lists, or an object whose "expert_load" is one.

    Raises:
        ArgumentError: the file holds something else.
    """
    try:
        value: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = torch.tensor(value["expert_load"] if isinstance(value, dict) else value, dtype=torch.float64)
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"read_load: {path} must hold a JSON list of numbers, one an expert, or a list of such lists, one a layer, "
            f"or an object with such an 'expert_load'; reading it gave {type(error).__name__}: {error}"
        ) from error
    if rows.dim() not in (1, 2) or not rows.numel():
        raise ArgumentError(f"read_load: {path} must hold one or two levels of lists; got shape {list(rows.shape)}.")
    # Layers differ in which expert is hot, so it is the sorted curves that are alike.
    curves = rows.reshape(-1, rows.shape[-1]).sort(dim=1, descending=True).values
    return curves.mean(dim=0).tolist()


@dataclass(frozen=True)
class Traffic:
    """Bytes that one layer must move.

    Attributes:
        unique_bytes: each distinct expert that is hit once (codes, scales, biases), x once, out once.
        requested_bytes: the same with an expert's bytes counted for every (token, slot) that wants it: what warp
            decode asks the memory system for.
    """

    unique_bytes: int
    requested_bytes: int


def count_traffic(experts: Experts, topk_idx: torch.Tensor) -> Traffic:
    """Traffic of one layer for `topk_idx` [num_tokens, topk]; slots below 0 move nothing."""
    used = topk_idx[topk_idx >= 0]
    ends = 2 * topk_idx.shape[0] * experts.hidden * torch.bfloat16.itemsize
    return Traffic(
        unique_bytes=int(used.unique().numel()) * experts.bytes_per_expert + ends,
        requested_bytes=int(used.numel()) * experts.bytes_per_expert + ends,
    )
