"""Registers, shared memory and spills of kernels: compiled without a GPU, and shown a row a kernel."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from warpring.bench.records import Record, load, record
from warpring.bench.tables import TABLES

ROOT = Path(__file__).parents[2]


def compiled(kernel: str, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "format": "mxfp8", "arch": "sm_90a", "registers": 96, "smem_bytes": 2048,
        "spill_bytes": 0, "cuda": "13.0", "commit": "abc", "date": "2026-05-01T10:00:00Z",
    }  # fmt: skip
    return record("resources", device="cpu", kernel=kernel, **(fields | changed))


def test_table_has_the_range_of_a_kernels_forms_in_the_last_run_of_each_layer() -> None:
    later = "2026-06-01T10:00:00Z"
    table = TABLES["resources"](
        [
            compiled("gone"),
            compiled("moe_tile", registers=118, date=later, form="PAIRS=64"),
            compiled("moe_tile", registers=96, smem_bytes=1024, spill_bytes=8, date=later),
            compiled("moe_down", date=later),
            compiled("moe_tile", format="bf16", commit="def"),
            compiled("moe_down", format="bf16", commit="def"),
        ]
    )
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| qwen")]
    assert lines == [
        ["qwen3-30b-a3b", "moe_tile", "bf16", "1", "96", "2.0", "0"],
        ["qwen3-30b-a3b", "moe_tile", "mxfp8", "2", "96 to 118", "1.0 to 2.0", "8"],
        ["qwen3-30b-a3b", "moe_down", "bf16, mxfp8", "1", "96", "2.0", "0"],
    ]
    assert table.endswith("\nCompiled for sm_90a by NVRTC 13.0; 2026-05-01, 2026-06-01; commit abc, def.\n")


def test_script_records_each_form_of_each_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs NVRTC")
    output = tmp_path / "resources.jsonl"
    words = ["--models", "h64xi64xe4xk2", "--formats", "bf16", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["resources.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "bench" / "resources.py"), run_name="__main__")
    assert ended.value.code == 0
    records = load(output)
    kernels = {rec["kernel"] for rec in records}
    assert {"moe_gate_up_3d_batched", "moe_tile", "grouped_gemm", "grouped_activate"} <= kernels
    assert all(rec["registers"] > 0 and rec["spill_bytes"] == 0 for rec in records)
    assert all(rec["smem_bytes"] > 64 << 10 for rec in records if rec["kernel"] in ("moe_tile", "grouped_gemm"))
    assert len({rec["date"] for rec in records}) == 1
    assert len({(rec["kernel"], rec.get("form")) for rec in records}) == len(records)
