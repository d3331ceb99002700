"""`warpring bench`: a table, JSONL and a plot of a tiny layer on the CPU; what is refused, and before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from warpring.bench import layer, read_peak
from warpring.bench.records import load
from warpring.cli import main

TINY = ["bench", "--shape", "h64xi32xe6xk2", "--device", "cpu", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_read_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)


def test_bench_prints_a_row_a_point_and_appends_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    argv = [*TINY, "--batches", "1,3", "--format", "mxfp8,bf16", "--jsonl", str(path)]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    records = load(path)
    points = [(f, p, b) for f in ("mxfp8", "bf16") for b in (1, 3) for p in ("cores", "classical")]
    assert [(r["format"], r["path"], r["num_tokens"]) for r in records] == points
    assert lines[0].startswith("h64xi32xe6xk2 on ")
    assert [tuple(line.split()[:3]) for line in lines[2:]] == [(f, p, str(b)) for f, p, b in points]
    assert main(argv) == 0
    assert len(load(path)) == 2 * len(points), "a rerun appends"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_bench_draws_its_own_records(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    target = tmp_path / f"plot.{suffix}"
    assert main([*TINY, "--batches", "1,2", "--path", "reference", "--plot", str(target)]) == 0
    assert target.stat().st_size > 2000


def test_bench_takes_a_recorded_load(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text("[5, 1, 1]")
    path = tmp_path / "out.jsonl"
    recorded = ["--routing", "recorded", "--load", str(tmp_path / "load.json")]
    assert main([*TINY, *recorded, "--batches", "1", "--path", "reference", "--jsonl", str(path)]) == 0
    assert [r["routing"] for r in load(path)] == ["recorded"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "0"], "--batches must be counts of at least 1"),
        (["--batches", "1,,2"], "--batches must be counts of at least 1"),
        (["--batches", ""], "--batches must be counts of at least 1"),
        (["--format", "mxfp6"], "--format must hold bf16"),
        (["--format", ","], "--format must hold bf16"),
        (["--path", "fast"], "--path must hold auto"),
        (["--path", "warp"], "needs CUDA tensors"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "tpu9"], "--device must be cuda"),
        (["--device", "meta"], "--device must be cuda"),
        (["--device", "cuda:99"], "is not there"),
        (["--plot", "plot.jpg"], "must end in .png"),
        (["--routing", "recorded"], "--routing recorded and --load FILE go together"),
        (["--batches", str(10**14)], "not enough memory"),
        (["--load", "missing.json"], "missing.json: No such file"),
        (["--shape", "h64xi32"], "sizes like h2048xi768xe128xk8"),
        (["--shape", "h65xi32xe6xk2"], "hidden must be a positive multiple of 32; got 65"),
    ],
)
def test_bad_option_is_one_line_and_nothing_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    assert main([*TINY, "--jsonl", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not path.exists()


def test_paths_follow_the_device_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        layer.LayerBench, "run", lambda self, batches, paths, on_stage: asked.append(tuple(paths)) or []
    )
    assert main(TINY) == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([*TINY, "--device", "cuda"]) == 0
    assert main([*TINY, "--device", "cuda", "--path", "auto"]) == 0
    assert asked == [("cores", "classical"), ("warp", "tile", "classical"), ("auto",)]
