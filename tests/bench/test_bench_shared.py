"""bench/shared.py on a tiny layer of the CPU, and the table of what it measures."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring import moe_decode
from warpring.bench import read_peak, shared
from warpring.bench.records import Record, load, record
from warpring.bench.shapes import parse_shape
from warpring.bench.shared import KINDS, SharedBench, shared_table
from warpring.errors import WarpringError

SCRIPT = Path(__file__).parents[2] / "bench" / "shared.py"


@pytest.fixture(autouse=True)
def small_read_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)


def shared_record(kind: str, num_tokens: int, p50_us: float, **more: Any) -> Record:
    fields = {"model": "qwen3-next-80b", "format": "mxfp8", "path": "tile", "num_shared": 1, "unique_bytes": 1000}
    measured = {"num_tokens": num_tokens, "shared_expert": kind, "p50_us": p50_us, "fraction_of_peak": 0.875}
    return record("shared", device="cpu", gpu="X", driver="1", cuda="13.0", **fields, **measured, **more)


def test_script_appends_a_record_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shared.jsonl"
    argv = ["--models", "h64xi32xe6xk2", "--formats", "mxfp8", "--batches", "1,3", "--shared", "2", "--repeats", "1"]
    monkeypatch.setattr(
        sys, "argv", ["shared.py", *argv, "--path", "grouped", "--device", "cpu", "--output", str(output)]
    )
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 0
    found = load(output)
    assert [(r["num_tokens"], r["shared_expert"], r["num_shared"]) for r in found] == [
        (batch, kind, 2) for batch in (1, 3) for kind in KINDS
    ]
    none, fused, separate = found[:3]
    assert fused["unique_bytes"] == separate["unique_bytes"] == none["unique_bytes"] * 2 - 2 * 64 * 2
    assert capsys.readouterr().out.count("grouped, shared fused") == 2


def test_wrong_result_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gate(*args: Any, shared_weights: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return moe_decode(*args, shared_weights=None if shared_weights is None else -shared_weights, **kwargs)

    monkeypatch.setattr(shared, "moe_decode", without_gate)
    bench = SharedBench(parse_shape("h64xi32xe6xk2"), "mxfp8", 2, "grouped", torch.device("cpu"), repeats=1)
    with pytest.raises(WarpringError, match="fused shared experts give a wrong result for h64xi32xe6xk2 mxfp8, B=3"):
        list(bench.run([3]))


def test_table_has_a_row_a_point_and_its_newest_record() -> None:
    old = shared_record("fused", 2, 99.0, date="2020-01-01T00:00:00Z")
    kinds = [shared_record(kind, 2, us) for kind, us in (("fused", 10.0), ("separate", 12.5), ("none", 9.0))]
    table = shared_table([old, *kinds, shared_record("fused", 1, 7.0)])
    lines = table.splitlines()
    assert lines[2] == "| qwen3-next-80b, mxfp8 | 1 | 1 | not measured | 7.0 | not measured | - | 88 % |"
    assert lines[3] == "| qwen3-next-80b, mxfp8 | 1 | 2 | 9.0 | 10.0 | 12.5 | 1.25 | 88 % |"
    assert "Measured on X" in table
    assert "not measured" in shared_table([])
