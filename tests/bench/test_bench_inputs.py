"""Shapes, random experts, routings, and the bytes that a layer must move."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warpring import ArgumentError, Experts, pack_experts
from warpring.bench.inputs import (
    count_traffic,
    make_routing,
    one_expert,
    random_experts,
    random_packed,
    read_load,
)
from warpring.bench.shapes import MODELS, LayerShape, parse_shape
from warpring.formats import FORMATS

TINY = LayerShape("tiny", hidden=96, intermediate=64, num_experts=7, topk=3)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_is_found_by_name_in_any_case_and_by_its_sizes(name: str) -> None:
    shape = parse_shape(name.upper())
    assert shape is MODELS[name]
    free = parse_shape(shape.size)
    assert (free.hidden, free.intermediate, free.num_experts, free.topk) == (
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.topk,
    )


def test_models_that_clamp_or_have_biases_say_so() -> None:
    assert MODELS["gpt-oss-20b"].has_bias
    assert MODELS["gpt-oss-120b"].activation.limit == 7.0
    assert MODELS["deepseek-v4-flash"].activation.limit == 10.0
    assert MODELS["qwen3-30b-a3b"].activation.limit is None


@pytest.mark.parametrize("text", ["", "qwen", "h2048", "h2048xi768xe128", "h2048xi768xe128xk8x", "h-32xi32xe1xk1"])
def test_unreadable_shape_names_the_known_models(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"qwen3-30b-a3b.*h2048xi768xe128xk8"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h33xi32xe4xk2", "hidden"),
        ("h0xi32xe4xk2", "hidden"),
        ("h32xi48xe4xk2", "intermediate"),
        ("h32xi32xe0xk1", "num_experts"),
        ("h32xi32xe1025xk1", "num_experts"),
        ("h32xi32xe4xk5", "topk"),
        ("h32xi32xe64xk33", "topk"),
        ("h32xi32xe4xk0", "topk"),
    ],
)
def test_size_that_the_library_does_not_serve_is_named(text: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=f"{named} must be"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["h32xi32xe1xk1", "h32xi32xe1024xk32"])
def test_sizes_at_the_limits_are_served(text: str) -> None:
    assert parse_shape(text).size == text


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("has_bias", [False, True])
def test_random_experts_are_finite_distinct_in_memory_and_repeatable(format: str, has_bias: bool) -> None:
    shape = replace(TINY, has_bias=has_bias)
    experts = random_experts(shape, format, "cpu", seed=3)
    assert (experts.num_experts, experts.hidden, experts.intermediate) == (7, 96, 64)
    w13, w2 = experts.dequantize()
    assert w13.isfinite().all()
    # A few experts are drawn and repeated; unit variance after the projection means std 1 / sqrt(fan-in).
    assert w13.std().item() == pytest.approx(96**-0.5, rel=0.1)
    assert w2.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert torch.equal(w13[0], w13[4])
    assert not torch.equal(w13[0], w13[1])
    assert experts.w13.data.untyped_storage().nbytes() == experts.w13.data.nbytes
    assert (experts.w13_bias is not None) == has_bias
    same, other = random_experts(shape, format, "cpu", seed=3), random_experts(shape, format, "cpu", seed=4)
    assert torch.equal(same.dequantize()[0], w13)
    assert not torch.equal(other.dequantize()[0], w13)


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("num_shared", [0, 2])
def test_random_packed_is_what_packing_all_experts_gives(format: str, num_shared: int) -> None:
    shape = replace(TINY, has_bias=True)
    shared = random_experts(replace(shape, num_experts=num_shared, topk=1), format, "cpu", 9) if num_shared else None
    packed = random_packed(shape, format, "cpu", 3, shared)
    whole = pack_experts(random_experts(shape, format, "cpu", seed=3), shared)
    assert (packed.num_experts, packed.num_shared, packed.nbytes) == (7, num_shared, whole.nbytes)
    for ours, theirs in ((packed.w13, whole.w13), (packed.w2, whole.w2)):
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert packed.w13_bias is not None
    assert whole.w13_bias is not None
    assert torch.equal(packed.w13_bias, whole.w13_bias)
    assert packed.w13.records.untyped_storage().nbytes() == packed.w13.records.nbytes, "each expert has its own bytes"


def stored_bytes(format: str, rows: int, cols: int) -> int:
    """Bytes of one [rows, cols] matrix, counted from what each format is, not from its tensors."""
    up = {block: -(-cols // block) for block in (16, 32, 128)}
    return {
        "bf16": 2 * rows * cols,
        "fp8_block": rows * cols + 4 * -(-rows // 128) * up[128],
        "fp8_channel": rows * cols + 4 * rows,
        "mxfp8": rows * cols + rows * up[32],
        "mxfp4": rows * cols // 2 + rows * up[32],
        "nvfp4": rows * cols // 2 + rows * up[16] + 4,
    }[format]


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("has_bias", [False, True])
def test_bytes_of_an_expert_are_codes_scales_and_biases(format: str, has_bias: bool) -> None:
    shape = replace(TINY, hidden=160, has_bias=has_bias)
    expected = 2 * stored_bytes(format, 64, 160) + stored_bytes(format, 160, 64)
    expected += 4 * (2 * 64 + 160) if has_bias else 0
    assert one_expert(shape, format).nbytes == expected
    assert random_experts(shape, format, "cpu", seed=0).bytes_per_expert == expected


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_traffic_counts_distinct_experts_once_and_wanted_ones_each_time(format: str) -> None:
    experts = random_experts(TINY, format, "cpu", seed=0)
    topk_idx = torch.tensor([[0, 1, -1], [1, 6, 1], [-1, -1, -1], [6, 0, -1]])
    one = 2 * stored_bytes(format, 64, 96) + stored_bytes(format, 96, 64)
    ends = 4 * 96 * 2 + 4 * 96 * 2
    traffic = count_traffic(experts, topk_idx)
    assert traffic.unique_bytes == 3 * one + ends
    assert traffic.requested_bytes == 7 * one + ends


def test_one_expert_has_no_memory_and_the_layer_s_kernels() -> None:
    expert = one_expert(MODELS["gpt-oss-20b"], "mxfp4")
    assert isinstance(expert, Experts)
    assert expert.device.type == "meta"
    assert expert.activation == MODELS["gpt-oss-20b"].activation


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_one_expert_has_the_tensors_of_a_real_one(format: str) -> None:
    shape = replace(TINY, num_experts=1, topk=1, hidden=160, has_bias=True)
    real, empty = random_experts(shape, format, "cpu", seed=0), one_expert(shape, format)
    for mine, theirs in ((empty.w13, real.w13), (empty.w2, real.w2)):
        assert mine.shape == theirs.shape
        assert [(t.shape, t.dtype) for t in mine.tensors()] == [(t.shape, t.dtype) for t in theirs.tensors()]


@pytest.mark.parametrize("kind", ["uniform", "zipf", "recorded"])
def test_routing_is_distinct_in_range_normalised_and_repeatable(kind: str) -> None:
    load = [5.0, 0.0, 1.0]
    routing = make_routing(TINY, 50, kind, seed=1, load=load)
    assert routing.topk_idx.shape == routing.topk_weights.shape == (50, 3)
    assert routing.topk_idx.dtype == torch.int64
    assert routing.topk_idx.min() >= 0
    assert routing.topk_idx.max() < 7
    assert all(len(set(row)) == 3 for row in routing.topk_idx.tolist())
    torch.testing.assert_close(routing.topk_weights.sum(dim=1), torch.ones(50))
    assert torch.equal(routing.topk_idx, make_routing(TINY, 50, kind, seed=1, load=load).topk_idx)
    assert not torch.equal(routing.topk_idx, make_routing(TINY, 50, kind, seed=2, load=load).topk_idx)


def measured_share(kind: str, load: list[float] | None) -> torch.Tensor:
    """Share of each of 8 experts under top-1, largest first."""
    shape = LayerShape("s", 32, 32, num_experts=8, topk=1)
    counts = make_routing(shape, 40_000, kind, seed=5, load=load).topk_idx.flatten().bincount(minlength=8)
    return (counts / counts.sum()).sort(descending=True).values


def test_routing_follows_its_distribution() -> None:
    harmonic = 1 / torch.arange(1, 9)
    # 40,000 draws: a share of at most 0.5 has a standard deviation of at most 0.0025.
    torch.testing.assert_close(measured_share("zipf", None), harmonic / harmonic.sum(), atol=0.01, rtol=0)
    torch.testing.assert_close(measured_share("uniform", None), torch.full((8,), 0.125), atol=0.01, rtol=0)
    load = [3.0, 10.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    expected = torch.tensor(load).sort(descending=True).values / 20
    torch.testing.assert_close(measured_share("recorded", load), expected, atol=0.01, rtol=0)


def test_recorded_load_of_another_number_of_experts_keeps_its_ends() -> None:
    share = measured_share("recorded", [8.0, 1.0])
    assert (share[0] / share[-1]).item() == pytest.approx(8, rel=0.15)


@pytest.mark.parametrize("load", [None, [], [0.0, 0.0], [1.0, -1.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_recorded_routing_needs_a_load(load: list[float] | None) -> None:
    with pytest.raises(ArgumentError, match="needs load"):
        make_routing(TINY, 1, "recorded", seed=0, load=load)


def test_unknown_routing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="uniform, zipf or recorded"):
        make_routing(TINY, 1, "skewed", seed=0)


@pytest.mark.parametrize("content", [[3, 1, 2], [[3, 1, 2], [1, 2, 3]], {"expert_load": [[2, 1, 3]], "steps": 4}])
def test_load_is_read_from_a_list_lists_or_a_training_log(tmp_path: Path, content: object) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps(content))
    assert read_load(path) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("text", ["[", "3", '"a"', "[]", "[[1], [1, 2]]", '["a"]', '{"load": [1]}', "[[[1]]]", "null"])
def test_other_content_is_refused_by_file_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"load\.json must hold"):
        read_load(path)


def test_one_rank_of_many_sees_its_share_of_the_routing() -> None:
    shape = MODELS["deepseek-v3-ep8"]
    routing = make_routing(shape, 512, seed=1)
    whole = make_routing(MODELS["deepseek-v3"], 512, seed=1)
    local = routing.topk_idx >= 0
    assert routing.topk_idx.min() == -1
    assert routing.topk_idx.max() == shape.num_experts - 1
    assert 0.9 < local.sum() / 512 < 1.1, "8 slots over 256 experts, of which the rank has 32"
    assert torch.equal(routing.topk_idx, whole.topk_idx.where(whole.topk_idx < 32, torch.tensor(-1)))
    assert torch.equal(routing.topk_weights, whole.topk_weights)


def test_router_that_chooses_from_fewer_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ArgumentError, match="routed_over must be 0 or at least num_experts=8; got 4"):
        LayerShape("x", 64, 32, 8, 2, routed_over=4)
