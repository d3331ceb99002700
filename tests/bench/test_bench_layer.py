"""The bench of one layer: valid records, fresh routings, checked outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from warpring import ArgumentError, Experts, PackedExperts, UnsupportedError, WarpringError, unpack_experts
from warpring.bench import layer, read_peak
from warpring.bench.inputs import count_traffic, make_routing, random_experts
from warpring.bench.layer import LayerBench, free_bytes
from warpring.bench.peer import Peer
from warpring.bench.records import validate
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call
from warpring.formats import FORMATS
from warpring.reference import moe_reference

TINY = LayerShape("h64xi32xe6xk2", hidden=64, intermediate=32, num_experts=6, topk=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_read_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)


def bench(format: str = "mxfp8", **settings: object) -> LayerBench:
    return LayerBench(TINY, format, device=CPU, repeats=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_cpu_records_are_valid_and_complete(format: str) -> None:
    found = list(bench(format).run([1, 3], ["reference", "classical"]))
    assert [[(r["num_tokens"], r["path"]) for r in batch] for batch in found] == [
        [(1, "reference"), (1, "classical")],
        [(3, "reference"), (3, "classical")],
    ]
    for rec in (rec for batch in found for rec in batch):
        validate(rec)
        assert (rec["bench"], rec["model"], rec["format"], rec["topk"]) == ("decode", TINY.size, format, 2)
        assert 0 < rec["p10_us"] <= rec["p50_us"] <= rec["p90_us"]
        assert rec["repeats"] == 2
        share = rec["unique_bytes"] / (rec["p50_us"] * 1e-6) / (rec["read_peak_gbs"] * 1e9)
        assert rec["fraction_of_peak"] == pytest.approx(share, rel=0.1, abs=1e-4)
        assert ("requested_bytes" in rec) == (rec["path"] == "reference"), "the classical path reads an expert once"
        assert "launches" not in rec


def test_bytes_are_the_mean_over_the_layers_of_a_replay() -> None:
    rec = next(bench(seed=7).run([3], ["reference"]))[0]
    layers = int(rec["note"].split()[0])
    experts = random_experts(TINY, "mxfp8", CPU, seed=0)
    most = layer.LAYERS["cpu"][1]
    counts = [count_traffic(experts, make_routing(TINY, 3, seed=7 * most + i).topk_idx) for i in range(layers)]
    assert rec["unique_bytes"] == round(sum(c.unique_bytes for c in counts) / layers)
    assert rec["requested_bytes"] == counts[0].requested_bytes
    assert len({c.unique_bytes for c in counts}) > 1, "the routings of a replay differ"


def test_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(
        x: torch.Tensor, experts: object, *_: object, out: torch.Tensor | None = None, path: str
    ) -> torch.Tensor:
        return (torch.empty_like(x) if out is None else out).normal_()

    monkeypatch.setattr(layer, "moe_decode", broken)
    with pytest.raises(WarpringError, match="'reference' gives a wrong result"):
        next(bench().run([1], ["reference"]))


def test_output_that_is_never_written_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "moe_decode", lambda *_, **__: None)
    with pytest.raises(WarpringError, match="wrong result"):
        next(bench().run([1], ["reference"]))


@pytest.mark.parametrize(("batches", "paths"), [([], ["reference"]), ([0], ["reference"]), ([1], [])])
def test_nothing_to_measure_is_refused(batches: list[int], paths: list[str]) -> None:
    with pytest.raises(ArgumentError, match="at least 1 token and at least one path"):
        next(bench().run(batches, paths))


def test_path_that_needs_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match="warp"):
        next(bench().run([1], ["warp"]))


def test_weights_that_memory_cannot_hold_are_refused_before_they_are_made() -> None:
    huge = replace(bench(), shape=LayerShape("huge", 1 << 20, 1 << 20, num_experts=1024, topk=1), format="bf16")
    with pytest.raises(ArgumentError, match=r"needs \d+\.\d GB, and cpu has \d+\.\d GB free"):
        next(huge.run([1], ["reference"]))


@pytest.mark.parametrize(("paths", "expected"), [(["reference"], 3), (["reference", "classical"], 1)])
def test_weight_sets_are_shared_in_turns_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, paths: list[str], expected: int
) -> None:
    """Room for five sets, 70 % of it for weights; the classical path keeps a BF16 copy (33/32 + 2 bytes a weight)."""
    size = 6 * 3 * 64 * 32 * 33 // 32
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return random_experts(*args, **kwargs)

    monkeypatch.setattr(layer, "random_experts", counted)
    monkeypatch.setattr(layer, "free_bytes", lambda _: 5 * size - sum(made) * size * (1 if len(paths) == 1 else 2.94))
    for recs in bench().run([1, 2], paths):
        assert recs[0]["note"].startswith(f"4 layers a replay, {expected} weight sets")


def test_free_memory_of_the_host_is_told() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


@pytest.mark.gpu
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_gpu_records_are_valid_and_touch_more_than_the_cache(format: str) -> None:
    shape = LayerShape("h2048xi768xe32xk8", 2048, 768, num_experts=32, topk=8)
    for recs in LayerBench(shape, format, repeats=5).run([1, 9], ["warp", "classical"]):
        warp, classical = recs
        validate(warp)
        validate(classical)
        layers = int(warp["note"].split()[0])
        assert layers >= 16
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        assert layers * warp["unique_bytes"] > layer.CACHE_MULTIPLE * l2_bytes
        assert warp["launches"] == 2
        assert classical["launches"] > 8
        # Probed once more: where another process used the GPU meanwhile, the record's peak is too low.
        peak = read_peak.read_peak_gbs(torch.device("cuda"))
        assert 0 < warp["fraction_of_peak"] * warp["read_peak_gbs"] / peak < 1.05


def copying_peer(**changed: Any) -> Peer:
    """A peer that keeps a BF16 copy of the weights and computes with torch."""

    def bind(
        weights: Experts, x: torch.Tensor, idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        return lambda: out.copy_(moe_reference(x, weights, idx, topk_weights))

    return replace(Peer("other", "version 1", lambda experts: experts, bind), **changed)


def test_peer_is_timed_on_the_same_weights_and_recorded_by_its_name() -> None:
    ours, theirs = next(bench().run([2], ["reference"], peers=[copying_peer()]))
    validate(theirs)
    assert (ours["impl"], theirs["impl"]) == ("warpring", "other")
    assert "path" not in theirs
    assert "requested_bytes" not in theirs
    assert theirs["note"].endswith("; version 1")
    assert theirs["unique_bytes"] == ours["unique_bytes"]


def test_peer_that_no_graph_can_hold_says_so() -> None:
    theirs = next(bench().run([1], ["reference"], peers=[copying_peer(capturable=False)]))[1]
    assert theirs["note"].endswith("called one by one, for no CUDA graph can hold it")


def test_peer_sits_out_the_batches_that_it_does_not_serve() -> None:
    found = list(bench().run([2, 3], ["reference"], peers=[copying_peer(most_tokens=2)]))
    assert [[rec["impl"] for rec in recs] for recs in found] == [["warpring", "other"], ["warpring"]]


def test_path_sits_out_the_batches_beyond_its_most_tokens() -> None:
    found = list(bench().run([2, 3], ["reference", "classical"], most_tokens={"reference": 2}))
    assert [[rec["path"] for rec in recs] for recs in found] == [["reference", "classical"], ["classical"]]


def test_peer_that_takes_packed_weights_gets_those_of_the_same_experts() -> None:
    given: list[Any] = []
    packed = replace(copying_peer(prepare=lambda w: given.append(w) or unpack_experts(w)), takes_packed=True)
    recs = next(bench(seed=5).run([2], ["reference"], peers=[packed]))
    assert [rec["impl"] for rec in recs] == ["warpring", "other"], "it computes the same layer"
    assert all(isinstance(weights, PackedExperts) for weights in given)


def test_peer_with_a_wrong_result_is_not_timed() -> None:
    def bind(*args: Any) -> Call:
        return lambda: args[-1].normal_()

    with pytest.raises(WarpringError, match="'other' gives a wrong result"):
        next(bench().run([1], ["reference"], peers=[copying_peer(bind=bind)]))


def test_peer_that_is_wrong_at_one_batch_costs_its_own_row_alone() -> None:
    def bind(weights: Experts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, out: torch.Tensor) -> Call:
        sign = -1 if len(x) == 3 else 1
        return lambda: out.copy_(sign * moe_reference(x, weights, ids, scores))

    faulty = replace(copying_peer(bind=bind), name="faulty")
    said: list[str] = []
    runs = bench().run([2, 3, 4], ["reference"], peers=[faulty, copying_peer()], on_wrong=said.append)
    assert [[rec["impl"] for rec in recs] for recs in runs] == [
        ["warpring", "faulty", "other"], ["warpring", "other"], ["warpring", "faulty", "other"],
    ]  # fmt: skip
    (only,) = said
    assert "'faulty' gives a wrong result" in only
    assert "B=3 (cosine -" in only


def test_a_path_of_ours_that_is_wrong_is_an_error_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "LEAST_COSINE", 2.0)
    with pytest.raises(WarpringError, match="'reference' gives a wrong result"):
        next(bench().run([1], ["reference"], peers=[copying_peer()], on_wrong=lambda _: None))


def test_rank_with_few_of_the_experts_is_benched_though_some_tokens_have_none() -> None:
    rank = LayerShape("rank", hidden=64, intermediate=32, num_experts=3, topk=2, routed_over=12)
    recs = next(replace(bench(), shape=rank).run([4], ["reference", "classical"]))
    whole = next(replace(bench(), shape=replace(rank, routed_over=0)).run([4], ["reference"]))[0]
    assert recs[0]["unique_bytes"] < whole["unique_bytes"]


@pytest.mark.parametrize(
    ("y", "least"),
    [([[0.0, 0.0], [1.0, 1.0]], 1.0), ([[0.0, 1e-3], [1.0, 1.0]], -1.0), ([[0.0, 0.0], [-1.0, -1.0]], -1.0)],
)
def test_token_without_experts_must_give_exactly_zero(y: list[list[float]], least: float) -> None:
    assert layer.least_cosine(torch.tensor([[0.0, 0.0], [2.0, 2.0]]), torch.tensor(y)) == pytest.approx(least)
