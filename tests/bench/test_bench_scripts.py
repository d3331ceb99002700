"""bench/decode.py and bench/plots.py, run as a user runs them, on a tiny layer of the CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from ep_records import ep_record

from warpring.bench import read_peak
from warpring.bench.records import append, load, record

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def small_read_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)


def run(monkeypatch: pytest.MonkeyPatch, script: str, *argv: str) -> int:
    """Exit code of the script."""
    monkeypatch.setattr(sys, "argv", [script, *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def tiny(output: Path) -> list[str]:
    sizes = ["--models", "h64xi32xe6xk2", "--formats", "mxfp8,nvfp4", "--batches", "1,2", "--repeats", "1"]
    return [*sizes, "--paths", "reference", "--device", "cpu", "--output", str(output)]


@pytest.mark.parametrize("routing", ["uniform", "recorded"])
def test_decode_script_appends_a_record_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], routing: str
) -> None:
    output = tmp_path / "decode.jsonl"
    assert run(monkeypatch, "decode.py", *tiny(output), "--routing", routing) == 0
    points = [(r["format"], r["num_tokens"], r["routing"]) for r in load(output)]
    assert points == [(f, b, routing) for f in ("mxfp8", "nvfp4") for b in (1, 2)]
    assert capsys.readouterr().out.count("reference") == len(points)


def test_decode_script_says_what_its_time_did_not_suffice_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "decode.jsonl"
    assert run(monkeypatch, "decode.py", *tiny(output), "--time-budget", "0") == 1
    assert load(output) == []
    err = capsys.readouterr().err
    assert all(f"{format} B={batch}" in err for format in ("mxfp8", "nvfp4") for batch in (1, 2))


def test_path_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "warp" needs a GPU, so from the first batch on the two are measured one by one."""
    output = tmp_path / "decode.jsonl"
    argv = tiny(output)
    argv[argv.index("reference")] = "warp,reference"
    assert run(monkeypatch, "decode.py", *argv) == 1
    points = [(r["format"], r["num_tokens"], r["path"]) for r in load(output)]
    assert points == [(f, b, "reference") for f in ("mxfp8", "nvfp4") for b in (1, 2)]
    err = capsys.readouterr().err
    assert err.count("warp from B=1 on: moe_decode: path 'warp' needs CUDA tensors") == 2


def test_plots_script_draws_what_was_measured_by_format_and_beside_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    rec = record(
        "decode", device="cpu", gpu="X", driver="1", cuda="13.0", model="qwen3-30b-a3b", format="mxfp8", path="warp",
        num_tokens=1, topk=8, routing="uniform", p50_us=10.0, unique_bytes=1000, read_peak_gbs=4000.0,
    )  # fmt: skip
    append(tmp_path / "decode.jsonl", rec)
    peer = {name: value for name, value in (rec | {"impl": "vllm_triton", "format": "bf16"}).items() if name != "path"}
    append(tmp_path / "peers.jsonl", peer)
    cores = {name: value for name, value in (rec | {"path": "cores"}).items() if name not in ("gpu", "driver", "cuda")}
    append(tmp_path / "decode_cpu.jsonl", cores | {"cpu": "Y (2 cores)"})
    turned = ep_record(format="mxfp4", knob="comm_sms", comm_sms=8)
    for rec in (ep_record(), ep_record(format="mxfp4"), turned):
        append(tmp_path / "expert_parallel.jsonl", rec)
    files = ["--results", str(tmp_path / "decode.jsonl"), "--peers", str(tmp_path / "peers.jsonl")]
    assert run(monkeypatch, "plots.py", *files, "--output", str(tmp_path / "img")) == 0
    drawn = sorted(path.name for path in (tmp_path / "img").iterdir())
    assert drawn == [
        "ablation-qwen3-30b-a3b.svg",
        "decode-cpu-qwen3-30b-a3b.svg",
        "decode-qwen3-30b-a3b-mxfp8.svg",
        "ep-ablation.svg",
        "ep-deepseek-v4-flash.svg",
        "peers-qwen3-30b-a3b-bf16.svg",
    ]
    assert capsys.readouterr().out.count("no records, not drawn") == 9


def test_grouped_script_measures_decode_paths_up_to_a_batch_and_grouped_ones_at_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "grouped.jsonl"
    sizes = ["--models", "h64xi32xe6xk2", "--formats", "mxfp4", "--batches", "513,2", "--repeats", "1"]
    argv = [*sizes, "--device", "cpu", "--output", str(output)]
    assert run(monkeypatch, "grouped.py", *argv) == 0
    points = [(r["num_tokens"], r.get("path", r["impl"])) for r in load(output)]
    packed = "warpring_grouped_packed"
    assert points == [(2, "cores"), (2, "grouped"), (2, packed), (513, "grouped"), (513, packed)]
    assert all(r["note"].startswith("4 layers a replay, 4 weight sets") for r in load(output))
    assert "transformers_grouped_mm is left out: takes bf16, not mxfp4" in capsys.readouterr().out
    few = tmp_path / "few.jsonl"
    assert run(monkeypatch, "grouped.py", *argv[:-1], str(few), "--paths", "grouped", "--layers", "2") == 0
    assert [r.get("path", r["impl"]) for r in load(few)] == ["grouped", packed] * 2
    assert all(r["note"].startswith("2 layers a replay") for r in load(few))
    assert run(monkeypatch, "grouped.py", *argv, "--time-budget", "0") == 1
    assert "h64xi32xe6xk2 mxfp4 B=513" in capsys.readouterr().err
