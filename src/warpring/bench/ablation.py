"""The ablation of our own paths: literal warp decode, tiles, classical, grouped, against the batch, in one plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from warpring.bench.crossovers import crossing
from warpring.bench.plots import COLOURS, check_plot_path, figure_class, save
from warpring.bench.records import OWN_IMPL, Record, newest
from warpring.errors import ArgumentError

#: In the order of the legend.
PATHS = ("warp", "tile", "grouped", "classical")


def plot_ablation(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw a panel a format: microseconds a layer over the floor (unique bytes at the read peak), against the batch.

    A path at 1 reads every wanted byte once at the rate of the read peak. Dashed lines mark where a path stops leading.

    Args:
        records: decode records of one model and device; the newest of each point counts.
        path: .png, .svg or .pdf.

    Raises:
        ArgumentError: no record of ours with a floor, or an unknown suffix.
        UnsupportedError: matplotlib is not installed.
    """
    check_plot_path(path)
    kept = [rec for rec in records if rec["bench"] == "decode" and rec["impl"] == OWN_IMPL and _has_floor(rec)]
    points = [rec for rec in newest(kept, ("format", "path", "num_tokens")) if rec["path"] in PATHS]
    if not points:
        raise ArgumentError("plot_ablation: needs decode records of our paths with a read peak; got none.")
    formats = list(dict.fromkeys(rec["format"] for rec in points))
    figure = figure_class()(figsize=(3.8 * len(formats), 4.0), layout="constrained")
    panels = figure.subplots(1, len(formats), sharey=True, squeeze=False)[0]
    for axes, format in zip(panels, formats, strict=True):
        _panel(axes, format, [rec for rec in points if rec["format"] == format])
    panels[0].set_ylabel("time over the floor")
    panels[0].legend(fontsize=8)
    last = max(points, key=lambda rec: rec["date"])
    where = last.get("gpu", last.get("cpu", ""))
    figure.suptitle(f"The same layer by each path: {last['model']}, {where}", fontsize=11)
    save(figure, path)


def _has_floor(rec: Record) -> bool:
    return bool(rec.get("read_peak_gbs"))


def _panel(axes: Any, format: str, points: Sequence[Record]) -> None:
    curves = {path: {rec["num_tokens"]: rec for rec in points if rec["path"] == path} for path in PATHS}
    for path, curve in curves.items():
        batches = sorted(curve)
        over = [curve[b]["p50_us"] * curve[b]["read_peak_gbs"] * 1e3 / curve[b]["unique_bytes"] for b in batches]
        if batches:
            axes.plot(batches, over, label=path, color=COLOURS[path], marker="o", markersize=3.5, linewidth=1.4)
    times = {path: {batch: float(rec["p50_us"]) for batch, rec in curve.items()} for path, curve in curves.items()}
    for path in ("warp", "tile"):
        for rival in PATHS[PATHS.index(path) + 1 :]:
            found = crossing(times[path], times[rival])
            if found is not None and found.above is not None and found.max_tokens:
                axes.axvline(found.max_tokens, color=COLOURS[rival], linestyle="--", linewidth=0.8)
                where = (found.max_tokens, 0.99)
                axes.annotate(
                    f" {path} | {rival}: {found.max_tokens}",
                    where,
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    va="top",
                    ha="right",
                    fontsize=7,
                )
    batches = sorted(b for b in {rec["num_tokens"] for rec in points} if b & (b - 1) == 0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(batches, labels=[str(batch) for batch in batches], fontsize=8)
    axes.minorticks_off()
    axes.set_yticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("tokens in the batch")
    axes.set_title(format, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
