"""The tables of README.md and docs/, generated from bench/results/*.jsonl.

    python -m warpring.bench.tables [--root CHECKOUT] [--check]

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; whatever is between them is replaced.
With --check nothing is written and the exit code is 1 if a file is stale. A point that no record holds reads
"not measured".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from warpring.bench.bar import bar, missed
from warpring.bench.compared import end_to_end, ncu, peers
from warpring.bench.cores_tables import CORES_TABLES
from warpring.bench.ep_tables import EP_TABLES
from warpring.bench.fitted import fitted
from warpring.bench.grouped_table import grouped_table
from warpring.bench.markdown import BATCHES, DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import FORMATS, Record, load, newest
from warpring.bench.resources import resources
from warpring.bench.shared import shared_table
from warpring.bench.vocabulary import vocabulary
from warpring.errors import ArgumentError

#: What the decode tables show.
DECODE_MODEL = "qwen3-30b-a3b"
DECODE_FORMATS = ("mxfp8", "bf16", "mxfp4")
DECODE_PATHS = ("warp", "tile", "classical")

_BLOCK = re.compile(r"(<!-- table:([a-z0-9_-]+) -->\n)(.*?)(<!-- /table:\2 -->)", re.DOTALL)
_MARK = re.compile(r"<!-- /?table:([^ ]*) -->")


def decode_records(records: Sequence[Record], formats: Sequence[str]) -> dict[tuple[str, str, int], Record]:
    """(format, path, batch) -> newest record on the GPU that was measured last."""
    ours = [
        rec
        for rec in records
        if rec["bench"] == "decode" and "gpu" in rec and "path" in rec and rec["model"] == DECODE_MODEL
        and rec["routing"] == "uniform" and rec["format"] in formats and rec["num_tokens"] in BATCHES
    ]  # fmt: skip
    ours = on_latest_gpu(ours)
    latest = newest(ours, ("format", "path", "num_tokens"))
    return {(rec["format"], rec["path"], rec["num_tokens"]): rec for rec in latest}


def decode_overview(records: Sequence[Record]) -> str:
    """Microseconds a layer: a row a batch, our paths (with their share of the peak) and classical."""
    found = decode_records(records, DECODE_FORMATS)
    used: list[Record] = []

    def cell(format: str, path: str, batch: int) -> str:
        rec = found.get((format, path, batch))
        if rec is None:
            return NOT_MEASURED
        used.append(rec)
        share = f" ({100 * rec['fraction_of_peak']:.0f} %)" if path != "classical" and "fraction_of_peak" in rec else ""
        return f"{rec['p50_us']:.1f}{share}"

    header = ["tokens", *(f"{format} {path}" for format in DECODE_FORMATS for path in DECODE_PATHS)]
    rows = [
        [str(batch), *(cell(format, path, batch) for format in DECODE_FORMATS for path in DECODE_PATHS)]
        for batch in BATCHES
    ]
    return markdown(header, rows) + provenance(used)


def decode_detail(format: str) -> Callable[[Sequence[Record]], str]:
    """A table of one format with percentiles, bandwidths and launches."""

    def table(records: Sequence[Record]) -> str:
        found = decode_records(records, (format,))
        rows: list[list[str]] = []
        for batch in BATCHES:
            for path in DECODE_PATHS:
                rec = found.get((format, path, batch))
                rows.append([str(batch), path, *(_detail_cells(rec) if rec else [NOT_MEASURED] + [DASH] * 6)])
        header = (
            "tokens",
            "path",
            "p50 µs",
            "p10 to p90",
            "unique TB/s",
            "of peak",
            "requested TB/s",
            "floor µs",
            "launches",
        )
        used = [rec for (_, path, _), rec in found.items() if path in DECODE_PATHS]
        return markdown(header, rows) + provenance(used)

    return table


def _detail_cells(rec: Record) -> list[str]:
    def rate(name: str) -> str:
        return f"{rec[name] / rec['p50_us'] / 1e6:.2f}" if name in rec else DASH

    peak = rec.get("read_peak_gbs")
    return [
        f"{rec['p50_us']:.1f}",
        f"{rec['p10_us']:.1f} to {rec['p90_us']:.1f}" if "p10_us" in rec and "p90_us" in rec else DASH,
        rate("unique_bytes"),
        f"{100 * rec['fraction_of_peak']:.1f} %" if "fraction_of_peak" in rec else DASH,
        rate("requested_bytes"),
        f"{rec['unique_bytes'] / peak / 1e3:.1f}" if peak else DASH,
        str(rec.get("launches", DASH)),
    ]


_ACCURACY_KEYS = ("model", "inputs", "format", "path", "num_tokens")


def accuracy_records(records: Sequence[Record]) -> list[Record]:
    """The newest record of each point, on the GPU that was measured last, or on CPUs where none was."""
    return newest(on_latest_gpu([rec for rec in records if rec["bench"] == "accuracy"]), _ACCURACY_KEYS)


def accuracy_overview(records: Sequence[Record]) -> str:
    """A row a format: the worst of all inputs and batches, warp decode (on a CPU its reference) beside classical."""
    found = accuracy_records(records)
    ours = "warp" if any(rec["path"] == "warp" for rec in found) else "reference"
    rows: list[list[str]] = []
    used: list[Record] = []
    for format in FORMATS:
        cells: list[str] = []
        for path in (ours, "classical"):
            recs = [rec for rec in found if (rec["format"], rec["path"]) == (format, path)]
            used += recs
            _, cosine, _, rms, factor = _worst(recs) if recs else ["", NOT_MEASURED, "", DASH, DASH]
            cells += [cosine, rms, factor] if path == ours else [cosine, rms]
        rows.append([format, *cells[:2], *cells[3:], cells[2]])
    header = (
        "format",
        f"{ours}: cosine, min",
        "RMS rel. error",
        "classical: cosine, min",
        "RMS rel. error",
        "classical error ÷ ours, min",
    )
    return markdown(header, rows) + provenance(used)


def accuracy(records: Sequence[Record]) -> str:
    """Worst over all batches, for each kind of input, format and path."""
    ours = accuracy_records(records)
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for rec in ours:
        groups.setdefault((rec["inputs"], rec["model"], rec["format"], rec["path"]), []).append(rec)
    sources = sorted({key[:2] for key in groups}) or [("recorded", NOT_MEASURED)]
    rows: list[list[str]] = []
    for inputs, model in sources:
        paths = sorted({key[3] for key in groups if key[:2] == (inputs, model)}, reverse=True) or ["warp", "classical"]
        for format in FORMATS:
            for path in paths:
                found = groups.get((inputs, model, format, path))
                rows.append(
                    [f"{inputs}, {model}", format, path, *(_worst(found) if found else [NOT_MEASURED] + [DASH] * 4)]
                )
    header = (
        "inputs",
        "format",
        "path",
        "tokens",
        "cosine, min",
        "abs. difference, max",
        "RMS rel. error",
        "classical error ÷ ours",
    )
    return markdown(header, rows) + provenance(ours)


def _worst(recs: Sequence[Record]) -> list[str]:
    batches = sorted({rec["num_tokens"] for rec in recs})
    factors = [rec["error_factor_vs_classical"] for rec in recs if "error_factor_vs_classical" in rec]
    return [
        str(batches[0]) if len(batches) == 1 else f"{batches[0]} to {batches[-1]}",
        f"{min(rec['cosine_min'] for rec in recs):.7f}",
        f"{max(rec['max_abs_diff'] for rec in recs):.3g}",
        f"{max(rec['rms_rel_error'] for rec in recs):.2e}",
        f"{min(factors):.2f}" if factors else DASH,
    ]


def perplexity(records: Sequence[Record]) -> str:
    """Held-out perplexity of each format, and its distance to BF16 of the same checkpoint and path."""
    ours = newest((rec for rec in records if rec["bench"] == "perplexity"), ("checkpoint", "format", "path"))
    runs = sorted({(rec["checkpoint"], rec.get("path", DASH)) for rec in ours}) or [(DASH, DASH)]
    rows: list[list[str]] = []
    for checkpoint, path in runs:
        found = {r["format"]: r for r in ours if (r["checkpoint"], r.get("path", DASH)) == (checkpoint, path)}
        base = found.get("bf16", {}).get("perplexity")
        for format in FORMATS:
            rec = found.get(format)
            if rec is None:
                rows.append([checkpoint, format, path, DASH, NOT_MEASURED, DASH])
                continue
            change = f"{100 * (rec['perplexity'] / base - 1):+.2f} %" if base else DASH
            rows.append([checkpoint, format, path, f"{rec['held_out_tokens']}", f"{rec['perplexity']:.4f}", change])
    header = ("checkpoint", "format", "path", "held-out tokens", "perplexity", "against bf16")
    return markdown(header, rows) + provenance(ours)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "decode": decode_overview,
    **{f"decode-{format}": decode_detail(format) for format in FORMATS},
    "accuracy": accuracy,
    "accuracy-overview": accuracy_overview,
    "perplexity": perplexity,
    "bar": bar,
    "bar-missed": missed,
    "fitted": fitted,
    "peers": peers,
    "end-to-end": end_to_end,
    "ncu": ncu,
    "resources": resources,
    "shared": shared_table,
    "grouped": grouped_table,
    "records": vocabulary,
    **CORES_TABLES,
    **EP_TABLES,
}


def render(text: str, records: Sequence[Record], name: str = "text") -> str:
    """`text` with every marked table replaced by one made of `records`.

    Raises:
        ArgumentError: an unknown table, or a mark without its partner; the message calls the text `name`.
    """
    replaced: list[str] = []

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ArgumentError(f"render: {name} asks for table {match[2]!r}; known are {', '.join(TABLES)}.")
        replaced.append(match[2])
        return f"{match[1]}{TABLES[match[2]](records)}{match[4]}"

    new = _BLOCK.sub(table, text)
    marks = _MARK.findall(text)
    if len(marks) != 2 * len(replaced):
        raise ArgumentError(
            f"render: {name} has {len(marks)} table marks for {len(replaced)} tables ({', '.join(marks)}). Each table "
            "needs '<!-- table:NAME -->' on a line of its own and '<!-- /table:NAME -->' after it."
        )
    return new


def documents(root: Path) -> list[Path]:
    """The files that may hold tables: README.md and docs/*.md."""
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]


def read_results(root: Path) -> list[Record]:
    """All records of bench/results/*.jsonl."""
    return [rec for path in sorted((root / "bench" / "results").glob("*.jsonl")) for rec in load(path)]


def stale(root: Path) -> dict[Path, str]:
    """Each document whose tables are not what the records say, with the text that it should have."""
    records = read_results(root)
    texts = {path: path.read_text(encoding="utf-8") for path in documents(root)}
    rendered = {path: render(text, records, path.name) for path, text in texts.items()}
    return {path: new for path, new in rendered.items() if new != texts[path]}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or with --check only say which documents are stale."""
    parser = argparse.ArgumentParser(
        prog="python -m warpring.bench.tables", description="Write the tables of README.md and docs/."
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the current folder)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a document is stale")
    args = parser.parse_args(argv)
    changed = stale(args.root)
    for path, text in changed.items():
        print(f"{'stale' if args.check else 'wrote'}: {path}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
