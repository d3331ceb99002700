"""The model of scale: counts against drawn routings, bounds against each other, the fit against held-out points."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from warpring.errors import ArgumentError
from warpring.expert_parallel.simulate import (
    B300,
    H200,
    Counts,
    Point,
    Workload,
    best_split,
    calibrate,
    count_work,
    predict,
)

FLASH = Workload(4096, 2048, 256, 6, 2, 8)


def drawn(load: Workload, seed: int) -> Counts:
    """Work of the busiest rank for one random routing."""
    generator = torch.Generator().manual_seed(seed)
    tokens = load.num_ranks * load.tokens_per_rank
    wanted = torch.rand(tokens, load.num_experts, generator=generator).topk(load.topk, dim=1).indices
    per_expert = torch.bincount(wanted.flatten(), minlength=load.num_experts).view(load.num_ranks, -1)
    blocks = (per_expert + load.block_m - 1) // load.block_m
    rest = per_expert - (blocks - 1).clamp(min=0) * load.block_m
    sizes = torch.tensor([8, 16, 32, 64])
    padded = (blocks - 1).clamp(min=0) * load.block_m + torch.where(
        rest > 0, sizes[torch.searchsorted(sizes, rest.clamp(min=1))], 0
    )
    rank = int(per_expert.sum(1).argmax())
    return Counts(
        float(per_expert[rank].sum()),
        float((per_expert[rank] > 0).sum()),
        float(blocks[rank].sum()),
        float(padded[rank].sum()),
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("block_m", [8, 32])
def test_expected_counts_are_those_of_random_routings(ranks: int, tokens: int, block_m: int) -> None:
    load = replace(FLASH, num_ranks=ranks, tokens_per_rank=tokens, block_m=block_m)
    samples = [drawn(load, seed) for seed in range(60)]
    expected = count_work(load)
    for name in ("experts", "blocks", "padded"):
        mean = sum(getattr(sample, name) for sample in samples) / len(samples)
        # At one token a rank the busiest of 8 holds few experts, whole numbers that a normal value only resembles.
        assert getattr(expected, name) == pytest.approx(mean, rel=0.12 if tokens == 1 else 0.04), name


def test_skew_moves_pairs_but_no_more_than_there_are() -> None:
    even, skewed = count_work(FLASH), count_work(replace(FLASH, skew=2.0))
    assert skewed.pairs > 1.5 * even.pairs
    assert skewed.pairs <= FLASH.num_ranks * FLASH.tokens_per_rank * FLASH.topk * 1.2
    one_expert = Workload(4096, 2048, 2, 1, 2, 256, skew=2.0, block_m=64)
    assert count_work(one_expert) == Counts(pairs=512, experts=1, blocks=8, padded=512)


def test_no_tokens_no_work() -> None:
    counts = count_work(replace(FLASH, tokens_per_rank=0))
    assert counts == Counts(0, 0, 0, 0)
    assert predict(H200, replace(FLASH, tokens_per_rank=0), 16).floor_us == 0


def test_floor_is_unique_weight_bytes_over_read_peak() -> None:
    p = predict(H200, FLASH, 16)
    assert p.floor_us == pytest.approx(count_work(FLASH).experts * 3 * 4096 * 2048 * (1 + 4 / 16384) / 4530e3)
    assert p.total_us > p.floor_us
    half = predict(H200, replace(FLASH, format="mxfp4"), 16)
    assert half.floor_us == pytest.approx(p.floor_us * 0.53125 / (1 + 4 / 16384))


def test_small_compute_partition_is_slower_only_below_saturation() -> None:
    machine = replace(H200, num_sms=56)  # 28.9 saturate the memory
    assert predict(machine, FLASH, 8).memory_us == predict(machine, FLASH, 16).memory_us
    assert predict(replace(machine, sm_read_gbs=100.0), FLASH, 24).memory_us > predict(machine, FLASH, 24).memory_us


def test_bound_names_the_largest_time() -> None:
    assert predict(H200, FLASH, 16).bound == "memory"
    slow_link = replace(H200, link_gbs=1.0)
    assert predict(slow_link, replace(FLASH, tokens_per_rank=64), 16).bound == "link"
    slow_tensor = replace(H200, fp8_tflops=10.0)
    assert predict(slow_tensor, replace(FLASH, tokens_per_rank=256), 16).bound == "tensor cores"


def test_best_split_is_the_fastest_of_all_and_the_smallest_of_equals() -> None:
    for load in (FLASH, replace(FLASH, tokens_per_rank=256), replace(FLASH, tokens_per_rank=256, skew=2.0)):
        best = best_split(H200, load)
        others = [predict(H200, load, n) for n in range(8, 67, 8)]
        assert best.total_us <= min(other.total_us for other in others) + 0.01
        assert best.comm_sms == min(o.comm_sms for o in others if round(o.total_us, 2) == round(best.total_us, 2))
    few = replace(H200, sm_link_gbs=0.2)
    assert best_split(few, replace(FLASH, tokens_per_rank=256)).comm_sms > 8
    assert best_split(B300, FLASH).compute_sms + best_split(B300, FLASH).comm_sms == 148


def test_calibration_finds_overhead_and_efficiency_and_judges_itself_on_held_out_points() -> None:
    truth = replace(H200, overhead_us=9.0, efficiency=0.87)
    loads = [replace(FLASH, tokens_per_rank=t) for t in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    exact = [Point(load, 16, predict(truth, load, 16).total_us) for load in loads]
    found = calibrate(H200, exact)
    assert found.machine.overhead_us == pytest.approx(9.0, abs=0.1)
    assert found.machine.efficiency == pytest.approx(0.87, abs=0.005)
    assert (found.num_fitted, found.num_held_out) == (6, 3)
    assert found.worst_held_out < 1e-3
    noise = random.Random(1)
    noisy = [replace(point, measured_us=point.measured_us * noise.uniform(0.9, 1.1)) for point in exact]
    judged = calibrate(H200, noisy)
    assert 0.005 < judged.held_out_error < 0.1


def test_calibration_refuses_what_cannot_be_fitted() -> None:
    same = [Point(FLASH, 16, 250.0)] * 6
    with pytest.raises(ArgumentError, match="same load"):
        calibrate(H200, same)
    with pytest.raises(ArgumentError, match="at least 4"):
        calibrate(H200, same[:3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "int4"}, "format must be one of"),
        ({"activation": "int8"}, "activation must be"),
        ({"num_ranks": 3}, "divide num_experts"),
        ({"num_ranks": 128}, "1 to 72"),
        ({"skew": 2.5}, "skew must be 1 to num_ranks"),
        ({"skew": 0.5}, "skew must be 1 to num_ranks"),
        ({"tokens_per_rank": -1}, "tokens_per_rank"),
    ],
)
def test_workload_rules(change: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(FLASH, **change)


@pytest.mark.parametrize("comm_sms", [1, 101])
def test_partition_rules(comm_sms: int) -> None:
    with pytest.raises(ArgumentError, match="comm_sms"):
        predict(H200, FLASH, comm_sms)
