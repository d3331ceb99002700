"""Plots of decode records: time and share of the read peak against the batch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpring.bench.records import Record, newest
from warpring.errors import ArgumentError, UnsupportedError

SUFFIXES = (".png", ".svg", ".pdf")
#: A colour a path or peer, from a palette that colour-blind readers can tell apart; any other takes grey.
COLOURS = {
    "warp": "#0072b2",
    "tile": "#e69f00",
    "classical": "#d55e00",
    "reference": "#009e73",
    "cores": "#0072b2",
    "auto": "#cc79a7",
    "grouped": "#009e73",
    "vllm_triton": "#56b4e9",
    "sglang_triton": "#f0e442",
    "flashinfer_mono_moe": "#cc79a7",
    "flashinfer_cutlass": "#000000",
    "transformers_grouped_mm": "#999999",
    "transformers_batched_mm": "#bbbbbb",
}
MARKERS = {"mxfp8": "o", "bf16": "s", "mxfp4": "^", "fp8_block": "D", "fp8_channel": "v", "nvfp4": "P"}


def check_plot_path(path: str | os.PathLike[str]) -> None:
    """Raise before hours of measuring, not after: a suffix that cannot be drawn, or no matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"plot: the file must end in {', '.join(SUFFIXES)}; got {os.fspath(path)!r}.")
    figure_class()


def plot_decode(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw the newest record of each (model, format, path, batch) into `path` (.png, .svg, .pdf).

    Left: microseconds a layer with p10 to p90 as a band, and the floor (unique bytes at the read peak) dotted.
    Right: unique bytes a second in percent of the read peak.

    Raises:
        ArgumentError: no decode record, or an unknown suffix.
        UnsupportedError: matplotlib is not installed.
    """
    check_plot_path(path)
    points = newest(
        (rec for rec in records if rec["bench"] == "decode"),
        ("model", "format", "impl", "path", "num_tokens", "routing"),
    )
    if not points:
        raise ArgumentError("plot_decode: needs at least one decode record; got none.")
    figure = figure_class()(figsize=(11, 4.4), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for key, line in _lines(points).items():
        _draw(times, shares, key, line)
    batches = sorted({rec["num_tokens"] for rec in points})
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, labels=[str(batch) for batch in batches])
        axes.set_xlabel("tokens in the batch")
        axes.grid(True, which="major", alpha=0.3)
    times.set_yscale("log")
    times.set_ylabel("µs per layer (p50, band p10 to p90)")
    shares.set_ylim(0, 105)
    shares.set_ylabel("unique bytes, % of the read peak")
    times.legend(fontsize=8)
    newest_rec = max(points, key=lambda rec: rec["date"])
    models = ", ".join(sorted({rec["model"] for rec in points}))
    figure.suptitle(f"One MoE layer, {models}, {newest_rec.get('gpu', newest_rec.get('cpu', ''))}", fontsize=11)
    save(figure, path)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure without date and random ids, so that the same records give the same bytes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "warpring"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _lines(points: Sequence[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Points grouped by (model, format, path or peer), each sorted by batch."""
    lines: dict[tuple[str, str, str], list[Record]] = {}
    for rec in sorted(points, key=lambda rec: rec["num_tokens"]):
        lines.setdefault((rec["model"], rec["format"], rec.get("path", rec["impl"])), []).append(rec)
    return lines


def _draw(times: Any, shares: Any, key: tuple[str, str, str], line: Sequence[Record]) -> None:
    _, format, path = key
    colour, marker = COLOURS.get(path, "#666666"), MARKERS[format]
    batches = [rec["num_tokens"] for rec in line]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
    times.plot(batches, [rec["p50_us"] for rec in line], label=f"{format} {path}", **style)
    if all("p10_us" in rec and "p90_us" in rec for rec in line):
        low, high = [rec["p10_us"] for rec in line], [rec["p90_us"] for rec in line]
        times.fill_between(batches, low, high, color=colour, alpha=0.15, linewidth=0)
    with_peak = [rec for rec in line if rec.get("read_peak_gbs")]
    batches = [rec["num_tokens"] for rec in with_peak]
    floor = [rec["unique_bytes"] / rec["read_peak_gbs"] / 1e3 for rec in with_peak]
    # The floor depends on the format, not on the path: one label a format.
    named = f"{format} floor: unique bytes at the read peak"
    label = named if named not in times.get_legend_handles_labels()[1] else None
    times.plot(batches, floor, color="#666666", marker=marker, markersize=3, linestyle=":", linewidth=1, label=label)
    shares.plot(batches, [100 * at / rec["p50_us"] for at, rec in zip(floor, with_peak, strict=True)], **style)


def figure_class() -> Any:
    """matplotlib's Figure, which needs no display; UnsupportedError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "plot: drawing needs matplotlib. Install it with: pip install 'warpring[plots]'"
        ) from error
    return Figure
