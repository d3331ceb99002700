"""The table of batches beyond decode."""

from __future__ import annotations

from typing import Any

from warpring.bench.grouped_table import grouped_table
from warpring.bench.records import PACKED_GROUPED, Record, record


def measured(name: str, num_tokens: int, p50_us: float, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "format": "bf16", "num_tokens": num_tokens, "topk": 8, "routing": "uniform",
        "unique_bytes": 1 << 30, "read_peak_gbs": 4500.0, "p10_us": p50_us - 1, "p50_us": p50_us, "p90_us": p50_us + 1,
        "gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "commit": "abc", "date": "2026-05-01T10:00:00Z",
    }  # fmt: skip
    of = {"path": name} if name in ("warp", "tile", "grouped") else {"impl": name}
    rec = record("decode", device="cpu", **(fields | of | changed))
    return {key: value for key, value in rec.items() if key not in ("cpu", "python")}


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_row_a_batch_at_which_the_grouped_path_was_measured() -> None:
    table = grouped_table(
        [
            measured("tile", 64, 269.0),
            measured("grouped", 64, 480.9),
            measured("transformers_grouped_mm", 64, 507.5),
            measured(PACKED_GROUPED, 256, 1207.0),
            measured("tile", 512, 2149.0),
            measured("grouped", 32, 400.0),
        ]
    )
    assert cells(table) == [
        ["qwen3-30b-a3b", "bf16", "64", "-", "269", "481", "-", "508"],
        ["qwen3-30b-a3b", "bf16", "256", "-", "-", "-", "1207", "-"],
    ]
    assert "GPU X" in table


def test_the_newest_record_of_a_point_counts_and_other_routings_do_not() -> None:
    table = grouped_table(
        [
            measured("grouped", 64, 480.0),
            measured("grouped", 64, 470.0, date="2026-05-02T10:00:00Z"),
            measured("grouped", 128, 1.0, routing="zipf"),
        ]
    )
    assert [row[2:6] for row in cells(table)] == [["64", "-", "-", "470"]]


def test_nothing_measured_reads_so() -> None:
    assert "not measured" in grouped_table([])
