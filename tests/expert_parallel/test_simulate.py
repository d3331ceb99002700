"""The model of scale: counts against drawn routings, bounds against each other, the split that it chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warpring.errors import ArgumentError
from warpring.expert_parallel import Problem, machines
from warpring.expert_parallel.machines import B300, H200, Calibration, Machine, calibration_of, write
from warpring.expert_parallel.partition import DEFAULT_COMM_SMS
from warpring.expert_parallel.simulate import (
    INSTRUCTIONS,
    Counts,
    Workload,
    best_split,
    choose_comm_sms,
    count_work,
    predict,
    usual_block_m,
    workload_of,
)
from warpring.policy import file_of

SIZES = (8, 16, 32, 64)
FLASH = Workload(4096, 2048, 256, 6, 2, 8)


def drawn(load: Workload, seed: int) -> Counts:
    """Work of the busiest rank for one random routing."""
    generator = torch.Generator().manual_seed(seed)
    tokens = load.num_ranks * load.tokens_per_rank
    wanted = torch.rand(tokens, load.num_experts, generator=generator).topk(load.topk, dim=1).indices
    per_expert = torch.bincount(wanted.flatten(), minlength=load.num_experts).view(load.num_ranks, -1)
    rank = int(per_expert.sum(1).argmax())
    widths = [0.0] * len(SIZES)
    for pairs in per_expert[rank].tolist():
        full, rest = divmod(pairs, load.block_m)
        widths[SIZES.index(load.block_m)] += full
        if rest:
            widths[next(place for place, size in enumerate(SIZES) if size >= rest)] += 1
    return Counts(float(per_expert[rank].sum()), float((per_expert[rank] > 0).sum()), tuple(widths))


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
    assert skewed.pairs <= FLASH.num_ranks * FLASH.tokens_per_rank * FLASH.topk * (1 + 1e-9)
    one_expert = Workload(4096, 2048, 2, 1, 2, 256, skew=2.0, block_m=64)
    assert count_work(one_expert) == Counts(512, 1, (0, 0, 0, 8))
    assert (count_work(one_expert).blocks, count_work(one_expert).padded) == (8, 512)


@pytest.mark.parametrize("skew", [1.0, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("tokens", [1, 8, 256])
def test_busiest_rank_has_its_skew_and_the_luck_of_a_draw(skew: float, tokens: int) -> None:
    load = replace(FLASH, tokens_per_rank=tokens, skew=skew)
    generator = torch.Generator().manual_seed(tokens)
    slots = 2 * tokens * load.topk
    shares = [
        2 * max(hot, slots - hot) / slots
        for _ in range(400)
        for hot in [int((torch.rand(slots, generator=generator) < skew / 2).sum())]
    ]
    assert load.busiest == pytest.approx(sum(shares) / len(shares), rel=0.06 if tokens == 1 else 0.03)


def test_shared_experts_add_their_bytes_and_tokens() -> None:
    load = replace(FLASH, num_shared=2, tokens_per_rank=33)
    plain, fused = count_work(replace(load, num_shared=0)), count_work(load)
    assert fused.pairs == plain.pairs + 66
    assert fused.experts == plain.experts
    assert [round(b - a, 6) for a, b in zip(plain.widths, fused.widths, strict=True)] == [2, 0, 2, 0]
    added = predict(H200, load, 16).floor_us - predict(H200, replace(load, num_shared=0), 16).floor_us
    assert added == pytest.approx(2 * 3 * 4096 * 2048 * (1 + 4 / 16384) / 4530e3)
    before, after = predict(H200, replace(load, num_shared=0), 16), predict(H200, load, 16)
    assert after.results_us == pytest.approx(before.results_us), "shared experts' results stay on their rank"


def test_no_tokens_no_work() -> None:
    counts = count_work(replace(FLASH, tokens_per_rank=0))
    assert counts == Counts(0, 0, (0, 0, 0, 0))
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


def test_conversions_bind_where_there_are_many_and_the_machine_needs_them() -> None:
    wide = replace(FLASH, tokens_per_rank=256, format="mxfp4", activation="bf16", block_m=64)
    slow = replace(H200, clock_ghz=1.0)
    assert predict(slow, wide, 16).bound == "issue slots"
    assert predict(slow, wide, 16).issue_us == pytest.approx(predict(slow, wide, 74).issue_us * 58 / 116)
    assert predict(replace(slow, converts=False), wide, 16).issue_us == 0
    assert predict(slow, replace(wide, format="nvfp4"), 16).issue_us == 0


def test_instruction_counts_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    rows = page[page.index("Instructions a weight in the main loops") :].splitlines()[5:7]
    names = {"FP8": "fp8_block", "MXFP4": "mxfp4"}
    for row in rows:
        format, *widths = (cell.strip() for cell in row.strip("|").split("|"))
        counts = tuple(tuple(float(number) for number in cell.split("/")) for cell in widths)
        assert INSTRUCTIONS[names[format]] == counts
    assert len(rows) == 2


def test_roles_add_up_to_the_layer_where_nothing_overlaps() -> None:
    p = predict(replace(H200, exposed=1.0), FLASH, 16)
    assert p.total_us == pytest.approx(H200.overhead_us + p.dispatch_us + p.experts_us + p.combine_us)
    hidden = predict(replace(H200, exposed=1e-9), FLASH, 16)
    assert hidden.total_us == pytest.approx(p.total_us - p.pull_us)


def test_bounds_that_are_alike_get_in_each_others_way() -> None:
    p = predict(H200, FLASH, 16)
    alone = replace(p, memory_us=100.0, cache_us=50.0, issue_us=0.0, tensor_us=0.0, tasks_us=0.0)
    assert alone.experts_us == pytest.approx(100, rel=1e-3)
    assert replace(alone, cache_us=100.0).experts_us == pytest.approx(100 * 2 ** (1 / 8))
    assert replace(alone, memory_us=0.0, cache_us=0.0).experts_us == 0


def test_tasks_cost_by_the_multiprocessor() -> None:
    plain, costly = (predict(replace(H200, task_us=us), FLASH, 16) for us in (1e-9, 1.0))
    tasks = count_work(FLASH).blocks * (2048 / 64 + 4096 / 128)
    assert costly.experts_us - plain.experts_us == pytest.approx(tasks / 116)


def test_workload_of_a_problem_has_its_sizes() -> None:
    problem = Problem(4096, 2048, 256, 6, 2, 256, format="mxfp4", activation="bf16", num_shared=1)
    expected = Workload(4096, 2048, 256, 6, 2, 31, "mxfp4", "bf16", block_m=32, num_shared=1)
    assert workload_of(problem, 31) == expected
    assert usual_block_m(256, 6, 2) == problem.block_m


# -- the split that a layer gets --------------------------------------------------------------------------------------

PROBLEM = Problem(4096, 2048, 256, 6, 2, 256, format="mxfp4")


def calibrated(directory: Path, machine: Machine, splits: tuple[int, ...] = (8, 16, 24, 32)) -> None:
    """Write a calibration of "GPU X"."""
    known = Calibration(machine, (), splits, 10, 5, "some", 0.01, 0.02, 0.03, 0.0, "abc", "2026-05-01")
    write(file_of(directory, "GPU X"), "GPU X", known)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machines, "DATA_DIR", tmp_path)
    calibration_of.cache_clear()
    return tmp_path


def test_no_split_is_chosen_where_nothing_was_measured(data: Path) -> None:
    assert choose_comm_sms(PROBLEM, "GPU X", 132) is None
    calibrated(data, H200)
    assert choose_comm_sms(PROBLEM, "GPU X", 132) is not None
    assert choose_comm_sms(PROBLEM, "GPU X", 114) is None
    assert choose_comm_sms(PROBLEM, "GPU Y", 132) is None
    calibrated(data, H200, splits=())
    assert choose_comm_sms(PROBLEM, "GPU X", 132) is None


def test_split_follows_the_machine_and_stays_among_the_measured(data: Path) -> None:
    slow_fetch = replace(H200, sm_link_gbs=0.2)
    calibrated(data, slow_fetch)
    assert choose_comm_sms(PROBLEM, "GPU X", 132) == 32
    calibrated(data, slow_fetch, splits=(8, 24))
    assert choose_comm_sms(PROBLEM, "GPU X", 132) == 24
    slow_compute = replace(H200, clock_ghz=0.4)
    calibrated(data, slow_compute)
    assert choose_comm_sms(PROBLEM, "GPU X", 132) == 8


def test_difference_that_cannot_be_told_keeps_the_usual_split(data: Path) -> None:
    only_memory = replace(H200, sm_link_gbs=1000.0, clock_ghz=20.0, l2_gbs=1e6)
    calibrated(data, only_memory)
    assert choose_comm_sms(PROBLEM, "GPU X", 132) == DEFAULT_COMM_SMS
    calibrated(data, only_memory, splits=(8, 24))
    assert choose_comm_sms(PROBLEM, "GPU X", 132) == 8


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
        ({"block_m": 24}, "block_m must be one of"),
    ],
)
def test_workload_rules(change: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(FLASH, **change)


@pytest.mark.parametrize("comm_sms", [1, 101])
def test_partition_rules(comm_sms: int) -> None:
    with pytest.raises(ArgumentError, match="comm_sms"):
        predict(H200, FLASH, comm_sms)
