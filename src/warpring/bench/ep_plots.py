"""Plots of expert-parallel decode: time against tokens a rank, and what turning each knob changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from warpring.bench.ep_bar import nccl_of, p50_us, shared_of
from warpring.bench.ep_points import (
    ABLATION_FORMAT,
    ABLATION_MODEL,
    ABLATION_TOKENS,
    BAR_FORMATS,
    OWN,
    Key,
    Points,
    floor_us,
    points,
)
from warpring.bench.ep_tables import ablation_rows
from warpring.bench.plots import MARKERS, check_plot_path, figure_class, save
from warpring.bench.records import Record
from warpring.errors import ArgumentError

#: A colour a form, and for peers what is left, from a palette that colour-blind readers can tell apart.
_COLOURS = {"ours": "#0072b2", "not split": "#e69f00", "NCCL": "#d55e00"}
_PEER_COLOURS = ("#56b4e9", "#cc79a7", "#009e73", "#f0e442", "#000000")
_LINES = ("#0072b2", "#e69f00", "#009e73", "#d55e00")
_NOT_SPLIT = "not split "
#: What the values of the table are called where there is less room.
_SHORT = {
    "off: role after role, all SMs": "role after role",
    "16-bit": "16-bit activations",
    "fused": "shared fused",
    "a layer of its own": "shared apart",
}
#: Title of a panel, and the rows of the ablation's table that it shows, by knob.
_PANELS = (
    ("communication SMs", ("communication SMs",)),
    ("overlap", ("partition", "overlap")),
    ("ring blocks", ("ring blocks",)),
    ("tokens a block (BM)", ("tokens a block (BM)",)),
    ("activations, shared expert", ("wire and activations", "shared expert")),
    ("skew (dashed: not split)", ("skew", "skew, overlap off")),
)

#: tokens -> value of the knob -> percent more time than the layer as shipped.
Panel = dict[int, dict[str, float]]


def plotted(records: Sequence[Record], model: str) -> dict[str, dict[int, Record]]:
    """Curves of a model: label -> tokens -> record with a time; only those that have points."""
    found = {key: rec for key, rec in points(records).items() if p50_us(rec) is not None}
    curves: dict[str, dict[int, Record]] = {}

    def add(label: str, key: Key) -> None:
        if key in found:
            curves.setdefault(label, {})[key.tokens] = found[key]

    tokens = sorted({key.tokens for key in found if key.model == model})
    for format in BAR_FORMATS:
        for count in tokens:
            key = Key(model, format, count)
            add(f"{format} ours", key)
            add(f"{format} not split", shared_of(key))
            add("bf16 NCCL", nccl_of(key))
    for key in found:
        if key.model == model and key.impl not in OWN:
            add(f"{key.format} {key.impl}", key)
    return {label: dict(sorted(curve.items())) for label, curve in curves.items()}


def plot_tokens(records: Sequence[Record], model: str, path: str | os.PathLike[str]) -> None:
    """Draw one model's layer. Left: microseconds, p10 to p90 as a band, floors dotted; right: microseconds above W.

    Raises:
        ArgumentError: no record of that model with a time, or an unknown suffix.
        UnsupportedError: matplotlib is not installed.
    """
    check_plot_path(path)
    curves = plotted(records, model)
    if not curves:
        raise ArgumentError(f"plot_tokens: needs expert-parallel records of {model!r} with a time; got none.")
    figure = figure_class()(figsize=(11, 4.4), layout="constrained")
    times, above = figure.subplots(1, 2)
    peers = [label for label in curves if label.split()[1] not in {name.split()[0] for name in _COLOURS}]
    for label, curve in curves.items():
        format, form = label.split(maxsplit=1)
        colour = _COLOURS.get(form) or _PEER_COLOURS[peers.index(label) % len(_PEER_COLOURS)]
        _curve(times, above, label, curve, colour, MARKERS[format])
    tokens = sorted({count for curve in curves.values() for count in curve})
    for axes in (times, above):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, labels=[str(count) for count in tokens])
        axes.set_xlabel("tokens a rank")
        axes.set_yscale("log")
        axes.grid(True, which="major", alpha=0.3)
    times.set_ylabel("µs per layer, slowest rank (p50, band p10 to p90)")
    above.set_ylabel("µs above the floor W")
    times.legend(fontsize=8)
    last = max((rec for curve in curves.values() for rec in curve.values()), key=lambda rec: rec["date"])
    figure.suptitle(f"One expert-parallel layer, {model}, {last['num_ranks']} x {last['gpu']}", fontsize=11)
    save(figure, path)


def _curve(times: Any, above: Any, label: str, curve: dict[int, Record], colour: str, marker: str) -> None:
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
    times.plot(list(curve), [rec["p50_us"] for rec in curve.values()], label=label, **style)
    if all("p10_us" in rec and "p90_us" in rec for rec in curve.values()):
        low, high = [rec["p10_us"] for rec in curve.values()], [rec["p90_us"] for rec in curve.values()]
        times.fill_between(list(curve), low, high, color=colour, alpha=0.15, linewidth=0)
    floors = {count: floor for count, rec in curve.items() if (floor := floor_us(rec)) is not None}
    if label.endswith(" ours"):
        named = f"{label.removesuffix(' ours')} floor W"
        dots: dict[str, Any] = {"color": "#666666", "marker": marker, "markersize": 3, "linestyle": ":"}
        times.plot(list(floors), list(floors.values()), label=named, linewidth=1, **dots)
    # Log scale: a point at its floor or below it has no place.
    over = {count: curve[count]["p50_us"] - floor for count, floor in floors.items()}
    over = {count: value for count, value in over.items() if value > 0}
    above.plot(list(over), list(over.values()), label=label, **style)


def plot_knobs(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw the ablation: a panel a knob, a line a token count, percent more time than the layer as shipped.

    Raises:
        ArgumentError: no knob was turned where the layer as shipped was measured too, or an unknown suffix.
        UnsupportedError: matplotlib is not installed.
    """
    check_plot_path(path)
    panels = turned(records)
    if not panels:
        raise ArgumentError("plot_knobs: needs records of turned knobs beside those of the layer as shipped; got none.")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = figure_class()(figsize=(3.9 * columns, 3.3 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (title, panel) in zip(grid, panels.items(), strict=False):
        _panel(axes, title, panel)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[::columns]:
        axes.set_ylabel("more time, %")
    grid[0].legend(fontsize=8)
    last = max(points(records).values(), key=lambda rec: rec["date"])
    what = f"{ABLATION_MODEL}, {ABLATION_FORMAT}, {last['num_ranks']} x {last['gpu']}"
    figure.suptitle(f"Against the layer as shipped: {what}", fontsize=11)
    save(figure, path)


def turned(records: Sequence[Record]) -> dict[str, Panel]:
    """Panels of the ablation that have points: title -> tokens -> value -> percent more time than as shipped."""
    found = points(records)
    return {title: panel for title, knobs in _PANELS if (panel := _changes(found, knobs))}


def _changes(found: Points, knobs: Sequence[str]) -> Panel:
    panel: Panel = {}
    for knob, value, point in ablation_rows():
        if knob not in knobs:
            continue
        label = _NOT_SPLIT + value if knob == "skew, overlap off" else _SHORT.get(value, value)
        for tokens in ABLATION_TOKENS:
            shipped = Key(ABLATION_MODEL, ABLATION_FORMAT, tokens)
            base, turned = p50_us(found.get(shipped)), p50_us(found.get(point(shipped)))
            if base and turned:
                panel.setdefault(tokens, {})[label] = 100 * (turned / base - 1)
    return panel


def _panel(axes: Any, title: str, panel: Panel) -> None:
    """Values that are numbers in order, joined by lines (those of the layer not split dashed); others as dots."""
    names = [label.removeprefix(_NOT_SPLIT) for line in panel.values() for label in line]
    names = list(dict.fromkeys(names))
    numbers = all(name.replace(".", "").isdigit() for name in names)
    for colour, (tokens, line) in zip(_LINES, panel.items(), strict=False):
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.4}
        whole = {label: value for label, value in line.items() if not label.startswith(_NOT_SPLIT)}
        solid = "-" if numbers else "none"
        where = [names.index(name) for name in whole]
        axes.plot(where, list(whole.values()), linestyle=solid, label=f"T = {tokens}", **style)
        rest = {label.removeprefix(_NOT_SPLIT): value for label, value in line.items() if label not in whole}
        axes.plot([names.index(name) for name in rest], list(rest.values()), linestyle="--", **style)
    axes.axhline(0.0, color="#666666", linestyle=":", linewidth=1)
    axes.set_xlim(-0.4, len(names) - 0.6)
    axes.set_xticks(range(len(names)), labels=names, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
