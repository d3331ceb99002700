"""The tile path's time as a line over the floor: what a layer costs beside its bytes, and how fast those stream."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression

from warpring.bench.bar import ROWS, floor_us
from warpring.bench.markdown import BATCHES, DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import OWN_IMPL, Record, newest

#: The batch at which pairs outgrow distinct experts: beside the line, which is of the batches below.
BEYOND = BATCHES[-1]
#: (model, format) of the bar's rows, in their order.
LAYERS = tuple(dict.fromkeys((row.model, row.format) for row in ROWS))


def fitted(records: Sequence[Record]) -> str:
    """A row a layer: microseconds at floor 0 and their slope below the largest batch, and how far that lies above."""
    tiles = [rec for rec in records if rec["bench"] == "decode" and "gpu" in rec and rec.get("path") == "tile"]
    tiles = [rec for rec in tiles if rec["impl"] == OWN_IMPL and rec["routing"] == "uniform"]
    tiles = [rec for rec in tiles if rec["num_tokens"] in BATCHES and floor_us(rec) is not None]
    points = newest(on_latest_gpu(tiles), ("model", "format", "num_tokens"))
    used: list[Record] = []
    rows: list[list[str]] = []
    for layer in LAYERS:
        found = [rec for rec in points if (rec["model"], rec["format"]) == layer]
        found.sort(key=lambda rec: rec["num_tokens"])
        below = [rec for rec in found if rec["num_tokens"] < BEYOND]
        if len(below) < 2:
            rows.append([*layer, NOT_MEASURED] + [DASH] * 4)
            continue
        used += found
        rows.append([*layer, *_line(below, found[len(below) :])])
    header = (
        "model",
        "format",
        "tokens",
        "fixed, µs",
        "µs a µs of floor",
        "farthest from the line, µs",
        f"{BEYOND} tokens above it, µs",
    )
    return markdown(header, rows) + provenance(used)


def _line(below: Sequence[Record], beyond: Sequence[Record]) -> list[str]:
    """Cells of a layer: least squares over `below`, two at least in the order of batches; `beyond` is one or none."""
    floors, times = [floor_us(rec) or 0.0 for rec in below], [rec["p50_us"] for rec in below]
    slope, fixed = linear_regression(floors, times)
    off = max(abs(fixed + slope * floor - time) for floor, time in zip(floors, times, strict=True))
    above = [f"{rec['p50_us'] - fixed - slope * (floor_us(rec) or 0.0):.1f}" for rec in beyond] or [DASH]
    tokens = f"{below[0]['num_tokens']} to {below[-1]['num_tokens']}"
    return [tokens, f"{fixed:.1f}", f"{slope:.2f}", f"{off:.1f}", *above]
