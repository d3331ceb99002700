"""Weights of an expert-parallel bench: what is made of a few experts is what would be made of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from warpring.bench.ep_weights import LayerWeights
from warpring.bench.inputs import random_experts
from warpring.bench.phases import Phases
from warpring.bench.shapes import LayerShape
from warpring.errors import ArgumentError, UnsupportedError
from warpring.expert_parallel.packing import PackedForRole2, pack_ep
from warpring.experts import Experts
from warpring.formats import QuantizedTensor

CPU = torch.device("cpu")
SHAPE = LayerShape("h128xi96xe14xk2", 128, 96, 14, 2, shared_experts=2)


def bits(stored: QuantizedTensor) -> list[torch.Tensor]:
    parts = (stored.data, stored.scale)
    return [part.view(torch.uint8) for part in parts if part is not None]


def same(got: Experts, wanted: Experts) -> bool:
    pairs = [*zip(bits(got.w13), bits(wanted.w13), strict=True), *zip(bits(got.w2), bits(wanted.w2), strict=True)]
    biases = ((got.w13_bias, wanted.w13_bias), (got.w2_bias, wanted.w2_bias))
    pairs += [(a, b) for a, b in biases if a is not None and b is not None]
    return all(torch.equal(a, b) for a, b in pairs) and [a is None for a, _ in biases] == [b is None for _, b in biases]


def alike(got: PackedForRole2 | None, wanted: PackedForRole2 | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    names = ("w13", "w2", "w13_bias", "w2_bias")
    pairs = [(getattr(got, name), getattr(wanted, name)) for name in names]
    return (got.format, got.flushed) == (wanted.format, wanted.flushed) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_forms_are_those_of_all_experts(format: str, has_bias: bool) -> None:
    shape = replace(SHAPE, has_bias=has_bias)
    weights = LayerWeights(shape, format, CPU, 5, rank=1, num_ranks=2)
    # 7 of 14 a rank: no multiple of what is drawn.
    wanted = random_experts(replace(shape, num_experts=7, topk=1), format, CPU, 6)
    assert same(weights.experts, wanted)
    dense, (w13, w2) = weights.dense(), wanted.dequantize(torch.bfloat16)
    biases = None if wanted.w13_bias is None else wanted.w13_bias.flatten(1, 2)
    assert same(
        dense,
        Experts.from_dense(
            w13, w2, format="bf16", activation=wanted.activation, w13_bias=biases, w2_bias=wanted.w2_bias
        ),
    )
    for fused in (False, True):
        packed = pack_ep(wanted, weights.shared if fused else None)
        got = weights.packed(fused=fused)
        assert alike(got.routed, packed.routed)
        assert alike(got.shared, packed.shared)
        assert got.gate == packed.gate


def test_every_form_is_made_once_and_every_expert_has_memory_of_its_own() -> None:
    lines: list[str] = []
    weights = LayerWeights(SHAPE, "mxfp4", CPU, 0, phases=Phases(lines.append))
    assert not lines, "nothing is made before it is asked for"
    assert weights.experts is weights.experts
    assert weights.packed() is weights.packed()
    assert weights.packed(fused=True).routed is weights.packed().routed
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        "experts",
        "packed",
        "shared experts",
        "packed with shared",
    ]
    for images in (weights.packed().routed.w13, weights.experts.w13.data):
        assert images.untyped_storage().nbytes() == images.numel() * images.element_size()
        assert not torch.equal(images[0], images[1])


def test_ranks_have_experts_of_their_own_and_shared_ones_together() -> None:
    first, second = (LayerWeights(SHAPE, "fp8_block", CPU, 3, rank=rank, num_ranks=2) for rank in (0, 1))
    assert first.experts.num_experts == second.experts.num_experts == 7
    assert not same(first.experts, second.experts)
    assert same(first.shared, second.shared)
    assert (first.shared.num_experts, first.shared.format) == (2, "fp8_block")


def test_what_cannot_be_is_refused() -> None:
    alone = replace(SHAPE, shared_experts=0)
    with pytest.raises(ArgumentError, match="has no shared experts"):
        LayerWeights(alone, "mxfp4", CPU, 0).packed(fused=True)
    with pytest.raises(UnsupportedError, match="no policy for mxfp8"):
        LayerWeights(alone, "mxfp8", CPU, 0).packed()
