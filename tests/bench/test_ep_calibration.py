"""The fit of the simulation's constants: found again from made-up times, judged on points that it has not seen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from ep_records import ep_record, nccl_record

from warpring.bench.ep_calibration import calibrate, from_records, main, same, split_loss, stale
from warpring.bench.ep_measured import Point, ep_predicted, points_of
from warpring.bench.records import Record, append
from warpring.errors import ArgumentError
from warpring.expert_parallel import machines
from warpring.expert_parallel.machines import DATA_DIR, H200, Machine, calibration_of, read, write
from warpring.expert_parallel.simulate import Workload, predict
from warpring.policy import file_of

ROOT = Path(__file__).parents[2]
TRUTH = replace(H200, overhead_us=11.0, stream_share=0.9, issue_share=0.5, task_us=0.3, exposed=0.4)
SHAPES = {"deepseek-v4-flash": (4096, 2048, 6), "glm-5.2": (6144, 2048, 8)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def measured(truth: Machine, noise: float = 0.0, models: tuple[str, ...] = tuple(SHAPES)) -> list[Point]:
    """What layers would take on that machine, times that differ by the noise."""
    luck = random.Random(1)
    found: list[Point] = []
    for model in models:
        hidden, intermediate, topk = SHAPES[model]
        for form in (("fp8_block", "fp8"), ("mxfp4", "fp8"), ("mxfp4", "bf16")):
            for tokens in TOKENS:
                load = Workload(hidden, intermediate, 256, topk, 2, tokens, *form)
                for sms in (8, 16, 24, 32) if tokens in (1, 8, 32, 256) else (16,):
                    time = predict(truth, load, sms).total_us * (1 + luck.uniform(-noise, noise))
                    found.append(Point(model, load, sms, time))
    return found


def records_of(found: list[Point], gpu: str = "NVIDIA H200") -> list[Record]:
    """The same as the bench would have written it."""
    return [
        ep_record(
            point.model, point.load.tokens_per_rank, point.measured_us, format=point.load.format, gpu=gpu,
            activation=point.load.activation, block_m=32, comm_sms=point.comm_sms, read_peak_gbs=4530.0,
            **({"knob": "comm_sms"} if point.comm_sms != 16 else {}),
        )
        for point in found
    ]  # fmt: skip


def test_library_has_what_its_records_say() -> None:
    assert list(stale(ROOT, DATA_DIR)) == [], "run: python -m warpring.bench.ep_calibration"


def test_fit_of_exact_times_predicts_what_it_has_not_seen() -> None:
    found = calibrate(H200, measured(TRUTH))
    assert found.held_out_error < 0.005
    assert found.worst_held_out < 0.02
    assert found.machine.stream_share == pytest.approx(0.9, rel=0.01)
    assert found.machine.issue_share == pytest.approx(0.5, rel=0.02)
    assert found.machine.overhead_us == pytest.approx(11.0, rel=0.1)
    assert found.splits == (8, 16, 24, 32)
    assert found.split_loss < 0.005
    untouched = {name: getattr(H200, name) for name in vars(H200) if name not in found.fitted}
    assert {name: getattr(found.machine, name) for name in untouched} == untouched


def test_bound_that_the_start_does_not_feel_is_found() -> None:
    truth = replace(TRUTH, issue_share=0.45)
    found = calibrate(H200, measured(truth))
    assert found.machine.issue_share == pytest.approx(0.45, rel=0.02)
    assert found.worst_held_out < 0.02


def test_error_of_noisy_times_is_the_noise() -> None:
    found = calibrate(H200, measured(TRUTH, 0.06))
    assert 0.01 < found.fitted_error < 0.04
    assert 0.02 < found.held_out_error < 0.04
    assert 0.04 < found.worst_held_out < 0.2


def test_points_held_out_move_no_constant() -> None:
    points = measured(TRUTH)
    wrong = [replace(p, measured_us=3 * p.measured_us) if p.held_out else p for p in points]
    right, misled = calibrate(H200, points), calibrate(H200, wrong)
    assert misled.machine == right.machine
    assert misled.held_out_error == pytest.approx(2 / 3, abs=0.01)
    assert misled.fitted_error == right.fitted_error
    held = [p for p in points if p.held_out]
    assert {p.model for p in held} == set(SHAPES)
    assert {p.load.tokens_per_rank for p in held if p.model == "deepseek-v4-flash"} == {4, 32}
    assert not any(p.held_out for p in points if p.model == "deepseek-v4-flash" and p.load.tokens_per_rank == 8)


def test_constants_without_a_trace_in_the_times_stay_where_probes_put_them() -> None:
    truth = replace(H200, overhead_us=11.0, stream_share=0.9, issue_share=0.7)
    found = calibrate(H200, [p for p in measured(truth) if p.load.format == "fp8_block"]).machine
    assert found.issue_share == pytest.approx(H200.issue_share, rel=0.01)
    assert found.stream_share == pytest.approx(0.9, rel=0.01)


def test_too_little_to_fit_is_refused() -> None:
    flash = measured(TRUTH, models=("deepseek-v4-flash",))
    seen = [p for p in flash if not p.held_out]
    for some in (seen, flash[:5], [seen[0]] * 9 + [p for p in flash if p.held_out]):
        with pytest.raises(ArgumentError, match="at least 8 points of several loads"):
            calibrate(H200, some)


def test_split_loss_is_the_worst_choice_among_measured_splits() -> None:
    load = Workload(4096, 2048, 256, 6, 2, 256, "mxfp4")
    chosen = min((8, 16), key=lambda sms: predict(H200, load, sms).total_us)
    times = {chosen: 110.0, 24 - chosen: 100.0}
    points = [Point("deepseek-v4-flash", load, sms, time) for sms, time in times.items()]
    assert split_loss(H200, points) == pytest.approx(0.1)
    assert split_loss(H200, points[:1]) == 0


def test_only_layers_that_the_simulation_knows_are_points() -> None:
    good = [
        ep_record(),
        ep_record(tokens=16, knob="comm_sms", comm_sms=24),
        ep_record(model="glm-5.2-ep8"),
        ep_record(tokens=2, shared_expert="fused"),
        ep_record(tokens=2, asked_skew=1.5),
    ]
    others = [
        ep_record(impl="shared", overlap=False, comm_sms=132),
        nccl_record(),
        ep_record(knob="num_slots", ring_blocks=64),
        ep_record(knob="partition", note="streams"),
        ep_record(shared_expert="separate"),
        ep_record(model="h64xi64xe8xk2"),
        ep_record(tokens=64, p50_us=None, failed="late"),
    ]
    found = {(p.model, p.load.tokens_per_rank): p for p in points_of([*good, *others], 2)}
    assert set(found) == {
        (m, t)
        for m, t in (("deepseek-v4-flash", 8), ("deepseek-v4-flash", 16), ("glm-5.2-ep8", 8), ("deepseek-v4-flash", 2))
    }
    assert len(points_of([*good, *others], 2)) == len(good)
    assert found["glm-5.2-ep8", 8].load.num_experts == 64
    assert found["deepseek-v4-flash", 16].comm_sms == 24


def test_command_writes_constants_once_and_says_how_good_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rec in records_of(measured(TRUTH, 0.02)):
        append(tmp_path / "bench" / "results" / "expert_parallel.jsonl", rec)
    argv = ["--root", str(tmp_path), "--output", str(tmp_path / "data")]
    assert main([*argv, "--check"]) == 1
    assert not (tmp_path / "data").exists()
    assert main(argv) == 0
    assert "predictions are off by" in capsys.readouterr().out
    written = read(file_of(tmp_path / "data", "NVIDIA H200"))
    assert written is not None
    assert (written.commit, written.date) == ("abc", "2026-05-01")
    assert main([*argv, "--check"]) == 0
    assert main(argv) == 0
    assert capsys.readouterr().out == ""


def test_gpus_without_a_description_and_few_points_give_nothing() -> None:
    assert from_records(records_of(measured(TRUTH), gpu="GPU X")) == {}
    assert from_records(records_of(measured(TRUTH)[:6])) == {}
    assert from_records([]) == {}


def test_calibrations_are_the_same_up_to_rounding() -> None:
    one = calibrate(H200, measured(TRUTH))
    assert same(one, replace(one, machine=replace(one.machine, overhead_us=one.machine.overhead_us * 1.01)))
    assert not same(one, replace(one, machine=replace(one.machine, overhead_us=one.machine.overhead_us * 1.1)))
    assert not same(one, replace(one, num_fitted=1))
    assert not same(None, one)


def test_table_sets_predictions_beside_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "DATA_DIR", tmp_path)
    calibration_of.cache_clear()
    records = records_of(measured(TRUTH))
    assert "Not fitted to measured layers" in ep_predicted(records)
    known = calibrate(H200, measured(TRUTH))
    write(file_of(tmp_path, "NVIDIA H200"), "NVIDIA H200", known)
    table = ep_predicted(records[:-1])
    assert known.statement in table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[0:1] == "|"]
    found = {tuple(row[:4]): row[4:] for row in rows[2:]}
    seen, unseen = found["deepseek-v4-flash", "fp8_block", "fp8", "8"], found["glm-5.2", "mxfp4", "bf16", "8"]
    assert (seen[0], seen[4], unseen[4]) == ("16", "yes", "no")
    assert abs(float(seen[3].removesuffix(" %"))) < 2
    assert float(seen[1]) == pytest.approx(float(seen[2]), rel=0.02)
    calibration_of.cache_clear()
