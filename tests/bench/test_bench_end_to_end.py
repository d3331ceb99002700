"""bench/end_to_end.py on a tiny model and a CPU: what a form of the model is, what is shared, what is recorded."""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring import WarpringError
from warpring.bench.records import load
from warpring.bench.shapes import parse_shape

pytest.importorskip("transformers", reason="the script measures a transformers model")

SCRIPT = Path(__file__).parents[2] / "bench" / "end_to_end.py"
CPU = torch.device("cpu")
SIZES = [
    "--device", "cpu", "--model", "h64xi32xe4xk2", "--layers", "3", "--heads", "4", "--kv-heads", "2",
    "--head-dim", "32", "--vocabulary", "128", "--batches", "1,3", "--contexts", "16",
    "--weight-sets", "2", "--repeats", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, script: dict[str, Any]) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *SIZES, "--paths", "reference,batched_mm"])
    return script["parse_args"]()


def build(script: dict[str, Any], args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    shape = parse_shape(args.model)
    sets = script["make_sets"](shape, args)
    model = script["make_model"](shape, args, sets.stored)
    return model, script["make_forms"](model, args.paths, sets)


def run(script: dict[str, Any], model: Any, inputs: Any) -> torch.Tensor:
    logits = torch.full((inputs.ids.shape[0], 128), torch.nan, dtype=torch.bfloat16)
    script["step"](model, inputs, logits, torch.empty(inputs.ids.shape[0], dtype=torch.int64))
    return logits


@torch.inference_mode()
def test_step_decodes_the_last_token_of_a_full_cache_and_can_be_repeated(
    script: dict[str, Any], args: argparse.Namespace
) -> None:
    _, forms = build(script, args)
    inputs = script["make_inputs"](forms["batched_mm"], 3, 16, 0, CPU)
    before = inputs.cache.layers[1].keys.clone()
    logits = run(script, forms["batched_mm"], inputs)
    assert torch.equal(before[:, :, :-1], inputs.cache.layers[1].keys[:, :, :-1])
    assert not torch.equal(before[:, :, -1], inputs.cache.layers[1].keys[:, :, -1])
    assert torch.equal(logits, run(script, forms["batched_mm"], inputs)), "the length was set back"
    # transformers' own attention, which masks by position, over the same cache.
    forms["batched_mm"].set_attn_implementation("sdpa")
    theirs = run(script, forms["batched_mm"], inputs)
    assert torch.nn.functional.cosine_similarity(theirs.float(), logits.float(), dim=1).min() > 0.999


@torch.inference_mode()
def test_forms_share_all_memory_but_their_experts(script: dict[str, Any], args: argparse.Namespace) -> None:
    model, forms = build(script, args)
    places = [
        {name: p.data_ptr() for name, p in form.named_parameters() if "experts" not in name} for form in forms.values()
    ]
    assert all(place == places[0] for place in places)
    assert len(places[0]) > 20
    first, third = model.model.layers[0].mlp.experts, model.model.layers[2].mlp.experts
    assert first.gate_up_proj.data_ptr() == third.gate_up_proj.data_ptr(), "two sets over three layers"
    assert first.gate_up_proj.numel(), "install frees the weights of its own copy alone"


@torch.inference_mode()
def test_forms_without_parts_leave_those_parts_out(script: dict[str, Any], args: argparse.Namespace) -> None:
    _, forms = build(script, args)
    inputs = script["make_inputs"](forms["reference"], 2, 16, 0, CPU)
    ours, theirs = run(script, forms["reference"], inputs), run(script, forms["batched_mm"], inputs)
    without, bare = run(script, forms[script["NO_EXPERTS"]], inputs), run(script, forms[script["BARE"]], inputs)
    assert torch.nn.functional.cosine_similarity(ours.float(), theirs.float(), dim=1).min() > 0.99
    assert not torch.allclose(ours, without)
    assert not torch.allclose(without, bare)
    inputs.cache.layers[0].values.mul_(-1)
    assert torch.equal(bare, run(script, forms[script["BARE"]], inputs)), "it does not look at the cache"


@torch.inference_mode()
@pytest.mark.parametrize("factor", [-1.0, float("nan")])
def test_experts_that_compute_another_layer_are_refused(
    script: dict[str, Any], args: argparse.Namespace, factor: float
) -> None:
    model, forms = build(script, args)
    inputs = script["make_inputs"](model, 2, 16, 0, CPU)
    steps = {name: lambda form=form: run(script, form, inputs) for name, form in forms.items()}
    assert 0.999 < script["compare"](forms, steps) <= 1
    experts = forms["batched_mm"].model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj * factor, requires_grad=False)
    with pytest.raises(WarpringError, match="experts batched_mm compute another layer than reference"):
        script["compare"](forms, steps)


def main_with(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *SIZES, *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_script_records_every_bucket_of_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "e.jsonl"
    with torch.inference_mode():
        assert main_with(monkeypatch, "--paths", "reference,grouped_mm", "--no-trials", "--output", str(output)) == 0
    recs = load(output)
    points = [(r["batch"], r["context"], r.get("path", r["impl"])) for r in recs]
    assert points == [(b, 16, name) for b in (1, 3) for name in ("reference", "transformers_grouped_mm")]
    for rec in recs:
        assert rec["tokens_per_s"] == pytest.approx(rec["batch"] / rec["p50_us"] * 1e6, rel=1e-3, abs=0.05)
        shares = [rec[f"{name}_share"] for name in ("experts", "attention", "other")]
        assert sum(shares) == pytest.approx(1, abs=1e-3)
        assert "3 layers, 2 sets of expert weights" in rec["note"]
    assert capsys.readouterr().out.count("tokens/s") == len(recs)


def test_buckets_beyond_the_time_budget_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "e.jsonl"
    argv = ["--paths", "reference", "--no-trials", "--time-budget", "0", "--output", str(output)]
    with torch.inference_mode():
        assert main_with(monkeypatch, *argv) == 0
    assert load(output) == []
    assert "batch 3, context 16: the time budget is spent" in capsys.readouterr().out


def test_path_that_fails_its_trial_is_tried_eagerly_and_then_left_out(
    script: dict[str, Any], args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "warp" fails both ways, "grouped_mm" in a graph only."""

    def trial(path: str, args: argparse.Namespace, eager: bool) -> subprocess.Popen[str]:
        fails = path == "warp" or (path == "grouped_mm" and not eager)
        code = f"print('chatter'); print('{path} is ill'); raise SystemExit({int(fails)})"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    monkeypatch.setitem(script["start_trials"].__globals__, "trial", trial)
    args.paths, args.eager = ["warp", "batched_mm", "grouped_mm"], []
    running = script["start_trials"](args)
    assert list(running) == args.paths
    said = script["end_trials"](args, running)
    assert (args.paths, args.eager) == (["batched_mm", "grouped_mm"], ["grouped_mm"])
    assert said == [
        "warp, in a CUDA graph: warp is ill",
        "grouped_mm, in a CUDA graph: grouped_mm is ill",
        "warp, eagerly: warp is ill",
    ]


def test_trial_runs_one_layer_of_the_same_model_in_a_process_of_its_own(
    script: dict[str, Any], args: argparse.Namespace
) -> None:
    process = script["trial"]("batched_mm", args, True)
    out = process.communicate()[0]
    assert process.returncode == 0, out
    assert "h64xi32xe4xk2, 1 layers" in out
    assert "transformers_batched_mm" in out


@pytest.mark.gpu
def test_every_path_decodes_the_same_model_in_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "e.jsonl"
    argv = ["--device", "cuda", "--paths", "auto,warp,classical,grouped_mm,batched_mm", "--output", str(output)]
    with torch.inference_mode():
        assert main_with(monkeypatch, *argv) == 0
    recs = load(output)
    assert {r.get("path", r["impl"]) for r in recs} >= {"auto", "warp", "classical", "transformers_batched_mm"}
    assert "auto, in a CUDA graph" not in capsys.readouterr().out
