"""Plot of a whole model: how many times as fast as with other experts, against the context."""

from __future__ import annotations

import os
from collections.abc import Sequence

from warpring.bench.compared import LEAST_FACTOR, OUR_FORMS, THEIR_FORMS, rate, whole_models
from warpring.bench.plots import check_plot_path, figure_class, save
from warpring.bench.records import Record
from warpring.errors import ArgumentError

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
_TITLES = ("over the classical path", "over the better of transformers' own")

#: batch -> context -> factor.
Curves = dict[int, dict[int, float]]


def factors(records: Sequence[Record], others: Sequence[str]) -> Curves:
    """Rate of `auto` over that of the fastest of `others`, wherever both were measured."""
    curves: Curves = {}
    for (batch, context), found in whole_models(records).items():
        rates = [rate(found[name]) for name in others if name in found]
        if rates and OUR_FORMS[0] in found:
            curves.setdefault(batch, {})[context] = rate(found[OUR_FORMS[0]]) / max(rates)
    return curves


def plot_end_to_end(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw a curve a batch into `path` (.png, .svg, .pdf): left over the classical path, with the least factor that is
    asked for dotted; right over the better of transformers' own.

    Raises:
        ArgumentError: no point of `auto` beside the classical path, or an unknown suffix.
        UnsupportedError: matplotlib is not installed.
    """
    check_plot_path(path)
    sides = [factors(records, ("classical",)), factors(records, THEIR_FORMS)]
    if not sides[0]:
        raise ArgumentError("plot_end_to_end: needs end_to_end records of 'auto' beside 'classical'; got none.")
    figure = figure_class()(figsize=(9.5, 4.0), layout="constrained")
    for axes, title, curves in zip(figure.subplots(1, 2, sharey=True), _TITLES, sides, strict=True):
        for (batch, curve), colour in zip(sorted(curves.items()), _COLOURS, strict=False):
            contexts = sorted(curve)
            rates = [curve[context] for context in contexts]
            axes.plot(contexts, rates, label=f"batch {batch}", color=colour, marker="o", markersize=4, linewidth=1.4)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens of context")
        axes.set_xscale("log", base=2)
        contexts = sorted({context for curve in curves.values() for context in curve})
        axes.set_xticks(contexts, labels=[str(context) for context in contexts])
        axes.axhline(1.0, color="#666666", linewidth=0.8)
        axes.grid(True, which="major", alpha=0.3)
        axes.set_ylim(bottom=0.0)
        if curves is sides[0]:
            least = max(LEAST_FACTOR.values())
            batches = ", ".join(str(batch) for batch, factor in LEAST_FACTOR.items() if factor == least)
            axes.axhline(least, color="#666666", linestyle=":", linewidth=1, label=f"asked of batches {batches}")
            axes.set_ylabel("times as fast, weights packed (auto)")
            axes.legend(fontsize=8, loc="lower left")
    last = max((rec for found in whole_models(records).values() for rec in found.values()), key=lambda rec: rec["date"])
    figure.suptitle(f"A whole model in decode: {last['model']}, {last['format']}, {last['gpu']}", fontsize=11)
    save(figure, path)
