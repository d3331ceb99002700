"""The expert-parallel bench on CPU ranks: what it counts, what it records, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

from warpring.bench import expert_parallel
from warpring.bench.ep_inputs import skewed
from warpring.bench.ep_variants import SharedApart, Variant
from warpring.bench.expert_parallel import EpBench, describe
from warpring.bench.inputs import random_experts
from warpring.bench.phases import Phases
from warpring.bench.records import Record, load, validate
from warpring.bench.shapes import LayerShape
from warpring.errors import ArgumentError, WarpringError
from warpring.expert_parallel import ExpertParallelDecode, Problem

ROOT = Path(__file__).parents[2]
SHAPE = LayerShape("h64xi96xe8xk3", 64, 96, 8, 3)

_RANK = """
import sys
import torch
from warpring.bench import expert_parallel
from warpring.bench.ep_variants import Variant
from warpring.bench.expert_parallel import EpBench
from warpring.bench.records import append
from warpring.bench.shapes import LayerShape
from warpring.bench.torchrun import process_group
shape = LayerShape("h64xi96xe8xk3", 64, 96, 8, 3)
with process_group(torch.device("cpu")) as (group, device):
    bench = EpBench(shape, "fp8_block", group, device, skew=1.5, windows=3)
    variants = [Variant(), Variant(activation="bf16"), Variant(impl="nccl")]
    for measured in bench.run([1, 5], variants):
        for rec in measured:
            if bench.rank == 0:
                append(sys.argv[1], rec)
"""


def test_two_ranks_write_one_record_a_variant_and_count(tmp_path: Path) -> None:
    script, results = tmp_path / "rank.py", tmp_path / "out.jsonl"
    script.write_text(_RANK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    records = load(results)
    assert [(rec["impl"], rec["activation"], rec["tokens_per_rank"]) for rec in records] == [
        (impl, activation, tokens)
        for tokens in (1, 5)
        for impl, activation in (("warpring", "fp8"), ("warpring", "bf16"), ("nccl", "bf16"))
    ]
    for rec in records:
        assert rec["experts_per_rank"] == 4
        assert rec["repeats"] == 3
        assert rec["hbm_gbs"] * rec["p50_us"] == pytest.approx(rec["weight_floor_us"] * rec["read_peak_gbs"], rel=0.01)
        assert rec["p10_us"] <= rec["p50_us"] <= rec["p90_us"]
        assert 1 <= rec["skew"] <= 2
        assert rec["asked_skew"] == 1.5
    assert all(rec["cosine_min"] > 0.99 for rec in records if rec["impl"] == "warpring")
    by_form = {rec["activation"]: rec["cosine_min"] for rec in records if rec["impl"] == "warpring"}
    assert by_form["bf16"] > by_form["fp8"]


def test_shared_experts_apart_add_what_fused_ones_add() -> None:
    problem = Problem(64, 96, 8, 3, 1, 4, format="mxfp4", activation="bf16", num_shared=1)
    routed = random_experts(SHAPE, "mxfp4", torch.device("cpu"), 1)
    shared = random_experts(replace(SHAPE, num_experts=1, topk=1), "fp8_block", torch.device("cpu"), 2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 64, generator=generator).bfloat16()
    topk_idx = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(4)])
    call = (x, topk_idx, torch.rand(4, 3, generator=generator))
    with (
        ExpertParallelDecode(problem, None, routed, shared=shared) as fused,
        ExpertParallelDecode(replace(problem, num_shared=0), None, routed) as alone,
    ):
        expected, got = fused(*call).double(), SharedApart(alone, shared)(*call).double()
        assert float((got - expected).norm() / expected.norm()) < 0.01
        assert float((got - alone(*call).double()).norm() / expected.norm()) > 0.1


def measure(rank: int, shape: LayerShape, variants: list[Variant]) -> list[Record]:
    """The records of one rank of a group."""
    bench = EpBench(shape, "fp8_block", dist.group.WORLD, torch.device("cpu"), windows=1)
    return [rec for measured in bench.run([2], variants) for rec in measured]


def test_shared_experts_are_checked_too() -> None:
    variants = [Variant(), Variant(shared="fused"), Variant(shared="separate")]
    records, same = run_ranks(measure, 2, replace(SHAPE, shared_experts=1), variants)
    assert [rec["shared_expert"] for rec in records] == ["none", "fused", "separate"]
    assert all(0.99 < rec["cosine_min"] == other["cosine_min"] for rec, other in zip(records, same, strict=True))


def test_record_names_what_was_not_left_to_the_layer() -> None:
    shape = replace(SHAPE, shared_experts=1)
    bench = EpBench(shape, "mxfp4", None, torch.device("cpu"), windows=1)
    variants = [Variant(), Variant(block_m=32, num_slots=16), Variant(shared="fused"), Variant(shared="separate")]
    (records,) = bench.run([2], variants)
    assert [rec.get("knob") for rec in records] == [None, "num_slots+block_m", None, None]
    assert [rec["shared_expert"] for rec in records] == ["none", "none", "fused", "separate"]
    assert all(rec["overlap"] for rec in records)
    assert records[1]["ring_blocks"] == 16


def test_one_rank_needs_no_group() -> None:
    bench = EpBench(SHAPE, "mxfp4", None, torch.device("cpu"), windows=1)
    ((rec,),) = bench.run([2], [Variant()])
    assert (rec["num_ranks"], rec["experts_per_rank"], rec["skew"]) == (1, 8, 1.0)
    assert "cosine_min" not in rec


def test_variant_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unbuilt, late = Variant(comm_sms=1), Variant(block_m=16)

    class Faulty(ExpertParallelDecode):
        def __init__(self, *args: Any, **options: Any) -> None:
            if options["comm_sms"] == 1:
                raise ArgumentError("no such partition")
            super().__init__(*args, **options)

        def check(self) -> None:
            super().check()
            if self.problem.tokens_per_block == 16:
                raise WarpringError("rank 1 is late")

    monkeypatch.setattr(expert_parallel, "ExpertParallelDecode", Faulty)
    bench = EpBench(SHAPE, "mxfp4", None, torch.device("cpu"), windows=1)
    for count, records in zip((2, 3), bench.run([2, 3], [unbuilt, Variant(), late]), strict=True):
        for rec in records:
            validate(rec)
            assert rec["tokens_per_rank"] == count
        assert [rec.get("failed") for rec in records] == ["no such partition", None, "rank 1 is late"]
        assert ["p50_us" in rec for rec in records] == [False, True, False]
        assert (records[0]["comm_sms"], records[2]["block_m"]) == (1, 16)
        assert "failed: no such partition" in describe(records[0])


def measure_again(rank: int) -> tuple[list[Record], list[Record], list[str], int]:
    """Two benches of one layer, the second on the first one's weights; what each phase was, and baseline calls."""
    lines: list[str] = []
    calls = 0
    call = expert_parallel.AllToAllExpertParallel.__call__

    class Counting(expert_parallel.AllToAllExpertParallel):
        def __call__(self, *args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return call(self, *args)

    expert_parallel.AllToAllExpertParallel = Counting
    shape = replace(SHAPE, shared_experts=1)
    say = lines.append if rank == 0 else None
    bench = EpBench(shape, "mxfp4", dist.group.WORLD, torch.device("cpu"), windows=1, phases=Phases(say))
    weights = bench.weights()
    variants = [Variant(), Variant(activation="bf16"), Variant(shared="fused")]
    first = [rec for measured in bench.run([2, 3], variants, weights) for rec in measured]
    second = [rec for measured in replace(bench, skew=1.5).run([2], variants[:1], weights) for rec in measured]
    return first, second, lines, calls


def test_weights_and_baseline_are_made_once_and_every_phase_is_told() -> None:
    (first, second, lines, calls), (*_, silent, _) = run_ranks(measure_again, 2)
    assert not silent
    assert all("p50_us" in rec for rec in first + second)
    assert (len(first), len(second)) == (6, 1)
    assert calls == 3, "one a count of tokens, for all variants"
    names = [line.rsplit(" ", 2)[0] for line in lines]
    counted = [f"T={count} {what}" for count in (2, 3) for what in ("inputs", "checked", "captured", "timed")]
    built = ["built warpring", "built warpring activation=bf16", "built warpring shared=fused"]
    assert names == [
        "ranks met", "peaks", "experts", "shared experts", *built, *counted,
        "ranks met", "peaks", built[0], *counted[:4],
    ]  # fmt: skip


def test_weights_of_another_bench_give_the_same_cosines() -> None:
    pairs = run_ranks(measure_twice, 2)
    assert all(own == shared for own, shared in pairs)


def measure_twice(rank: int) -> tuple[list[float], list[float]]:
    """Cosines with weights of its own and with those of a bench of the same layer."""
    bench = EpBench(SHAPE, "fp8_block", dist.group.WORLD, torch.device("cpu"), windows=1, seed=3)
    own, shared = (bench.run([4], [Variant()], weights) for weights in (None, replace(bench, skew=1.25).weights()))
    return [rec["cosine_min"] for (rec,) in own], [rec["cosine_min"] for (rec,) in shared]


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_rank_of_each_window_counts(slow: int) -> None:
    records = run_ranks(measure_slow, 2, slow)
    assert [rec["p50_us"] for rec in records] == [100.0, 100.0]


def measure_slow(rank: int, slow: int) -> Record:
    """A record where one rank takes 100 us a call in every window, and the other 10."""
    EpBench._window = lambda self, replay, count: (replay(), (100.0 if rank == slow else 10.0) * 8)[1]  # pyright: ignore
    bench = EpBench(SHAPE, "fp8_block", dist.group.WORLD, torch.device("cpu"), windows=3)
    ((rec,),) = bench.run([2], [Variant()])
    return rec


def test_variant_with_a_wrong_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise WarpringError("cosine 0.5")

    monkeypatch.setattr(EpBench, "_check", wrong)
    bench = EpBench(SHAPE, "mxfp4", None, torch.device("cpu"), windows=1)
    ((rec,),) = bench.run([2], [Variant()])
    assert rec["failed"] == "cosine 0.5"


@pytest.mark.parametrize("skew", [1.0, 1.25, 1.6, 2.0])
def test_skewed_routing_puts_that_share_on_rank_0(skew: float) -> None:
    ids = skewed(64, 2, (4000, 6), skew, torch.Generator().manual_seed(1))
    assert ids.sort(1).values.diff(dim=1).min() > 0, "distinct in a token"
    assert (ids.min() >= 0) & (ids.max() < 64)
    assert float((ids < 32).float().mean()) == pytest.approx(skew / 2, abs=0.01)
    counts = torch.bincount(ids.flatten(), minlength=64).float()
    assert counts[:32].max() < 1.2 * counts[:32].mean(), "even within a rank"


def test_skewed_routing_with_few_experts_a_rank_stays_distinct() -> None:
    ids = skewed(8, 2, (500, 6), 1.5, torch.Generator().manual_seed(2))
    assert ids.sort(1).values.diff(dim=1).min() > 0
    with pytest.raises(ArgumentError, match="topk at most 4"):
        skewed(8, 2, (5, 6), 2.0, torch.Generator())
    with pytest.raises(ArgumentError, match="skew must be 1 to num_ranks"):
        skewed(8, 2, (5, 2), 2.5, torch.Generator())


def test_impossible_asks_are_refused() -> None:
    bench = EpBench(SHAPE, "mxfp4", None, torch.device("cpu"), windows=1)
    for tokens, variants in (([], [Variant()]), ([0], [Variant()]), ([1], []), ([1], [Variant(), Variant()])):
        with pytest.raises(ArgumentError, match=r"EpBench\.run: needs"):
            next(bench.run(tokens, variants))
    with pytest.raises(ArgumentError, match="has no shared experts"):
        next(bench.run([1], [Variant(shared="fused")]))
