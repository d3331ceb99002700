"""The table of batches beyond decode: where the grouped path takes over, and what transformers takes there."""

from __future__ import annotations

from collections.abc import Sequence

from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import OWN_IMPL, PACKED_GROUPED, Record, newest

#: Columns: what a record is of, and how the table calls it.
COLUMNS = {
    "warp": "warp",
    "tile": "tile",
    "grouped": "grouped, rows",
    PACKED_GROUPED: "grouped, packed",
    "transformers_grouped_mm": "transformers_grouped_mm",
}
#: The smallest batch of the table: less is decode, which has tables of its own.
LEAST_TOKENS = 64


def grouped_table(records: Sequence[Record]) -> str:
    """Microseconds a layer of each path that was measured with the grouped one, on the GPU that was measured last."""
    ours = [
        rec
        for rec in records
        if rec["bench"] == "decode" and "gpu" in rec and rec["routing"] == "uniform"
        and _name(rec) in COLUMNS and rec["num_tokens"] >= LEAST_TOKENS
    ]  # fmt: skip
    found = {
        (rec["model"], rec["format"], rec["num_tokens"], _name(rec)): rec
        for rec in newest(on_latest_gpu(ours), ("model", "format", "num_tokens", "impl", "path"))
    }
    points = sorted({key[:-1] for key in found if key[-1] in ("grouped", PACKED_GROUPED)})
    used: list[Record] = []
    rows: list[list[str]] = []
    for point in points:
        recs = [found.get((*point, name)) for name in COLUMNS]
        used += [rec for rec in recs if rec is not None]
        model, format, num_tokens = point
        rows.append(
            [model, format, str(num_tokens), *(DASH if rec is None else f"{rec['p50_us']:.0f}" for rec in recs)]
        )
    header = ("model", "format", "tokens", *(f"{name}, µs" for name in COLUMNS.values()))
    return markdown(header, rows or [[NOT_MEASURED] + [DASH] * (len(header) - 1)]) + provenance(used)


def _name(rec: Record) -> str:
    return rec.get("path", "") if rec["impl"] == OWN_IMPL else rec["impl"]
