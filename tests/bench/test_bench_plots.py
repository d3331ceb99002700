"""The plots of the documents: drawn from the records as they are, shown somewhere; and a whole model's factors."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from warpring import ArgumentError
from warpring.bench.end_to_end_plot import factors, plot_end_to_end
from warpring.bench.records import Record, record
from warpring.bench.tables import documents

matplotlib = pytest.importorskip("matplotlib", reason="plots are an extra")

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docs" / "img").glob("*.svg"))


def whole_model(name: str, p50_us: float, batch: int = 1, context: int = 1024) -> Record:
    where: dict[str, Any] = {"gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "date": "2026-05-01T10:00:00Z"}
    named = {"impl": name} if name.startswith("transformers") else {"path": name}
    rates = {"tokens_per_s": round(batch / p50_us * 1e6, 1), "p50_us": p50_us, "batch": batch, "context": context}
    return record("end_to_end", device="cpu", model="qwen3-30b-a3b", format="mxfp8", **(named | rates | where))


def drawn_by(image: Path) -> str:
    """Version of matplotlib that an image names: another one may draw the same in other bytes."""
    found = re.search(r"Matplotlib v([\w.]+)", image.read_text())
    return found[1] if found else "?"


def test_plots_are_those_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if {drawn_by(image) for image in IMAGES} != {matplotlib.__version__}:
        pytest.skip(f"drawn by another matplotlib than {matplotlib.__version__}, that of requirements/test.txt")
    monkeypatch.setattr(sys, "argv", ["plots.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "bench" / "plots.py"), run_name="__main__")
    now = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in IMAGES}
    assert sorted(now) == sorted(kept)
    assert [name for name in now if now[name] != kept[name]] == [], "run: python bench/plots.py"


def test_every_plot_is_shown_in_a_document() -> None:
    shown = "".join(path.read_text() for path in documents(ROOT))
    assert [image.name for image in IMAGES if f"img/{image.name})" not in shown] == []


def test_factors_are_of_auto_over_the_fastest_other_where_both_were_measured() -> None:
    records = [
        whole_model("auto", 100.0),
        whole_model("warp", 50.0),
        whole_model("classical", 190.0),
        whole_model("transformers_grouped_mm", 150.0),
        whole_model("transformers_batched_mm", 140.0),
        whole_model("auto", 200.0, batch=8, context=4096),
        whole_model("classical", 300.0, batch=8, context=4096),
        whole_model("classical", 300.0, batch=8),
        whole_model("warp", 300.0, batch=8),
    ]
    assert factors(records, ("classical",)) == {1: {1024: pytest.approx(1.9)}, 8: {4096: pytest.approx(1.5)}}
    theirs = ("transformers_grouped_mm", "transformers_batched_mm")
    assert factors(records, theirs) == {1: {1024: pytest.approx(1.4)}}


def test_plot_of_a_whole_model_has_a_curve_a_batch_and_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []

    class Kept(figure_module.Figure):
        def savefig(self, *_: Any, **__: Any) -> None:
            drawn.append(self)

    monkeypatch.setattr(figure_module, "Figure", Kept)
    steps = [("auto", 100.0), ("classical", 190.0)]
    records = [whole_model(name, p50_us, batch) for name, p50_us in steps for batch in (1, 4)]
    plot_end_to_end(records, tmp_path / "x.png")
    labels = [line.get_label() for line in drawn[0].axes[0].lines]
    assert [label for label in labels if label.startswith("batch")] == ["batch 1", "batch 4"]
    assert "asked of batches 1, 4, 8" in labels
    with pytest.raises(ArgumentError, match="'auto' beside 'classical'"):
        plot_end_to_end(records[:1], tmp_path / "x.png")
