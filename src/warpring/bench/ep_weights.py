"""One rank's random weights in an expert-parallel bench, in each form that a variant wants, and each made once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from warpring.bench.inputs import NUM_DRAWN, drawn_experts, random_experts, repeat_experts
from warpring.bench.phases import Phases
from warpring.bench.shapes import LayerShape
from warpring.errors import ArgumentError
from warpring.expert_parallel.packing import EpPacked, PackedForRole2, pack_ep
from warpring.experts import Experts


class LayerWeights:
    """A rank's experts, those of `random_experts` bit for bit, and what is made of them.

    A few are drawn and the others repeat them, so a form is made of the few and repeated: every expert has memory of
    its own, as if the form had been made of each. Variants, and benches of the same layer one after the other, share
    the forms; nothing is made before it is asked for.

    Args:
        shape: the layer, all ranks together.
        format: of the routed weights.
        device: of this rank.
        seed: of the layer.
        rank, num_ranks: whose experts these are.
        phases: told what took how long.
    """

    def __init__(
        self,
        shape: LayerShape,
        format: str,
        device: torch.device,
        seed: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        phases: Phases | None = None,
    ) -> None:
        self._shape, self._format, self._device = shape, format, device
        self._local = replace(shape, num_experts=shape.num_experts // num_ranks, topk=1)
        self._seed, self._rank = seed, rank
        self._phases = phases or Phases()
        self._packed: dict[bool, EpPacked] = {}

    @cached_property
    def _few(self) -> Experts:
        drawn = min(NUM_DRAWN, self._local.num_experts)
        return drawn_experts(self._local, self._format, self._device, self._seed + self._rank, drawn)

    @property
    def _which(self) -> torch.Tensor:
        return torch.arange(self._local.num_experts, device=self._device) % self._few.num_experts

    @cached_property
    def experts(self) -> Experts:
        """All of this rank's routed experts."""
        with self._phases("experts"):
            return repeat_experts(self._few, self._which)

    @cached_property
    def shared(self) -> Experts:
        """The layer's shared experts, in fp8_block, the same on every rank; ArgumentError where it has none."""
        if not self._shape.shared_experts:
            raise ArgumentError(
                f"EpBench: {self._shape.name} has no shared experts; got a variant with some. Leave it out."
            )
        shape = replace(self._shape, num_experts=self._shape.shared_experts, topk=1, has_bias=False)
        with self._phases("shared experts"):
            return random_experts(shape, "fp8_block", self._device, self._seed - 1)

    def dense(self) -> Experts:
        """The routed experts in BF16; not kept, since it is the largest form and has one user."""
        with self._phases("dense"):
            few = self._few
            w13, w2 = few.dequantize(torch.bfloat16)
            dense = Experts.from_dense(
                w13, w2, format="bf16", activation=few.activation,
                w13_bias=None if few.w13_bias is None else few.w13_bias.flatten(1, 2), w2_bias=few.w2_bias,
            )  # fmt: skip
            return repeat_experts(dense, self._which)

    def packed(self, *, fused: bool = False) -> EpPacked:
        """What `pack_ep` makes of the experts, with the shared ones or without; the routed part is one for both.

        Raises:
            UnsupportedError: the kernels have no policy for the format.
        """
        if fused not in self._packed:
            shared = self.shared if fused else None
            with self._phases(f"packed{' with shared' if fused else ''}"):
                few = pack_ep(self._few, shared)
                twin = self._packed.get(not fused)
                routed = _repeated(few.routed, self._which) if twin is None else twin.routed
                self._packed[fused] = replace(few, routed=routed)
        return self._packed[fused]


def _repeated(few: PackedForRole2, which: torch.Tensor) -> PackedForRole2:
    """The experts `which`; none has flushed weights, since no block of drawn ones has the least scale."""
    return replace(
        few,
        w13=few.w13[which],
        w2=few.w2[which],
        w13_bias=None if few.w13_bias is None else few.w13_bias[which],
        w2_bias=None if few.w2_bias is None else few.w2_bias[which],
    )
