"""The ablation plot: which records it draws, and that equal records give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpring.bench.ablation import plot_ablation
from warpring.bench.records import Record, record
from warpring.errors import ArgumentError

pytest.importorskip("matplotlib", reason="plots are an extra")


def rec(path: str, num_tokens: int, p50_us: float, **fields: object) -> Record:
    return record(
        "decode", device="cpu", gpu="X1", driver="1", cuda="13.0", model="qwen3-30b-a3b", path=path,
        num_tokens=num_tokens, topk=8, routing="uniform", p50_us=p50_us, unique_bytes=1000,
        **({"format": "mxfp8", "read_peak_gbs": 4000.0} | fields),
    )  # fmt: skip


def curves(format: str) -> list[Record]:
    times = {"warp": lambda b: 10.0 * b, "tile": lambda b: 20.0 + b, "classical": lambda b: 200.0}
    return [rec(path, b, time(b), format=format) for path, time in times.items() for b in (1, 2, 4, 8, 64)]


def test_a_panel_a_format_with_the_crossovers_written_in(tmp_path: Path) -> None:
    target = tmp_path / "new" / "ablation.svg"
    records = curves("mxfp8") + curves("bf16")
    plot_ablation(records, target)
    first = target.read_text()
    plot_ablation(records, target)
    assert target.read_text() == first
    texts = [line for line in first.splitlines() if line.strip().startswith("<!--")]
    assert sum("warp | tile: 2" in line for line in texts) == 2
    assert sum("warp | classical:" in line for line in texts) == 2
    assert not any("tile | classical" in line for line in texts), "tile leads wherever it was measured"
    assert {"mxfp8", "bf16"} <= {line.strip().removeprefix("<!-- ").removesuffix(" -->") for line in texts}


def test_newest_record_of_a_point_counts(tmp_path: Path) -> None:
    target, again = tmp_path / "a.svg", tmp_path / "b.svg"
    records = [r | {"date": "2026-02-01T00:00:00Z"} for r in curves("mxfp8")]
    plot_ablation(records, target)
    plot_ablation([rec("warp", 4, 1e6, date="2026-01-01T00:00:00Z"), *records], again)
    assert target.read_text() == again.read_text()


def test_records_without_a_floor_or_of_others_are_nothing_to_draw(tmp_path: Path) -> None:
    bare = {name: value for name, value in rec("warp", 1, 1.0).items() if name != "read_peak_gbs"}
    peer = {name: value for name, value in (rec("warp", 1, 1.0) | {"impl": "vllm"}).items() if name != "path"}
    with pytest.raises(ArgumentError, match="needs decode records of our paths"):
        plot_ablation([bare, peer, rec("reference", 1, 1.0)], tmp_path / "a.svg")


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="must end in"):
        plot_ablation(curves("mxfp8"), tmp_path / "a.gif")
