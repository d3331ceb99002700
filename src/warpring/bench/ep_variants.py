"""The ways in which the expert-parallel bench runs a layer, and the layers that it built of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from warpring.bench.ep_inputs import Inputs
from warpring.bench.ep_peers import EP_PEERS, PeerLayer
from warpring.bench.timing import Call
from warpring.decode import moe_decode
from warpring.errors import WarpringError
from warpring.expert_parallel.baseline import AllToAllExpertParallel
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import MAX_TOKENS_PER_RANK
from warpring.experts import Experts
from warpring.layout import pack_experts

#: What our layer is compared with, beside the peers: its own kernels without overlap, and all-to-alls.
BASELINES = ("shared", "nccl")


@dataclass(frozen=True)
class Variant:
    """One way to run the layer.

    Attributes:
        impl: "warpring"; "shared" for the same kernels in stream order on all multiprocessors; "nccl" for the
            all-to-all baseline on BF16 weights; or one of `EP_PEERS`.
        comm_sms, num_slots, block_m: of `ExpertParallelDecode` and `Problem`; None leaves the choice to them.
        partition: as in `ExpertParallelDecode`.
        activation: "fp8" or "bf16".
        shared: the model's shared experts: "none", "fused" into the kernels, or "separate", a tile-path layer of their
            own before the routed one.
    """

    impl: str = "warpring"
    comm_sms: int | None = None
    num_slots: int | None = None
    block_m: int | None = None
    partition: Literal["auto", "green", "streams"] = "auto"
    activation: Literal["fp8", "bf16"] = "fp8"
    shared: Literal["none", "fused", "separate"] = "none"

    @property
    def knob(self) -> str:
        """What was not left to the layer, by name."""
        names = ("comm_sms", "num_slots", "block_m", "partition")
        return "+".join(name for name in names if getattr(self, name) not in (None, "auto"))

    @property
    def name(self) -> str:
        """For people: what runs, and what was chosen for it."""
        names = ("comm_sms", "num_slots", "block_m", "partition", "activation", "shared")
        usual = Variant()
        chosen = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return " ".join((self.impl, *chosen))

    @property
    def is_ours(self) -> bool:
        """Whether our kernels compute it, in whatever order."""
        return self.impl in ("warpring", "shared")

    @property
    def is_peer(self) -> bool:
        """Whether another library computes it."""
        return self.impl in EP_PEERS


class SharedApart:
    """A layer, and before it its shared experts as a layer of their own, as a model without fusion has them."""

    def __init__(self, routed: ExpertParallelDecode, shared: Experts) -> None:
        self.routed = routed
        self._shared = pack_experts(shared) if shared.device.type == "cuda" else shared
        self._path = "tile" if shared.device.type == "cuda" else "auto"
        ids = torch.arange(shared.num_experts, device=shared.device)
        self._ids = ids.repeat(MAX_TOKENS_PER_RANK, 1)
        self._weights = torch.ones(self._ids.shape, device=shared.device)

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        apart = moe_decode(x, self._shared, self._ids[: len(x)], self._weights[: len(x)], path=self._path)
        return self.routed(x, topk_idx, topk_weights).add_(apart)


def shared_output(shared: Experts, x: torch.Tensor) -> torch.Tensor:
    """What shared experts give for x, by the reference path."""
    ids = torch.arange(shared.num_experts, device=x.device).repeat(len(x), 1)
    return moe_decode(x, shared, ids, torch.ones(ids.shape, device=x.device), path="reference")


#: What a variant runs.
Layer = ExpertParallelDecode | AllToAllExpertParallel | SharedApart | PeerLayer


def bind(layer: Layer, call: Inputs) -> Call:
    """What is timed: the layer on these inputs, after whatever a peer does with them ahead."""
    arguments = (call.x, call.topk_idx, call.topk_weights)
    return layer.bind(*arguments) if isinstance(layer, PeerLayer) else partial(layer, *arguments)


def routed_layer(layer: Layer) -> ExpertParallelDecode | None:
    """The kernels' part of it."""
    layer = layer.routed if isinstance(layer, SharedApart) else layer
    return layer if isinstance(layer, ExpertParallelDecode) else None


class Built:
    """The variants' layers, and why some of them are not there (any more); the same on every rank."""

    def __init__(self, everyone: Callable[[Any], list[Any]]) -> None:
        self.layers: dict[Variant, Layer] = {}
        self.failed: dict[Variant, str] = {}
        self._everyone = everyone

    def attempt(self, variant: Variant, step: Callable[[], Any], *, keep: bool = False) -> Any:
        """The step's result, kept as the variant's layer or not; None, and no such layer, where any rank fails."""
        result, reason = None, ""
        try:
            result = step()
        except WarpringError as error:
            reason = str(error)
        if keep and result is not None:
            self.layers[variant] = result
        if reason := next(filter(None, self._everyone(reason)), ""):
            self.failed[variant] = reason
            if variant in self.layers:
                close_layer(self.layers.pop(variant))
            return None
        return result

    def close(self) -> None:
        """Close all layers."""
        for layer in self.layers.values():
            close_layer(layer)


def raise_failure(layer: Layer) -> None:
    """Raise what the layer's kernels reported while they were timed."""
    if (routed := routed_layer(layer)) is not None:
        routed.check()


def close_layer(layer: Layer) -> None:
    """Close a layer; one that failed has said so already."""
    closing = layer if isinstance(layer, PeerLayer) else routed_layer(layer)
    if closing is not None:
        with suppress(WarpringError):
            closing.close()
