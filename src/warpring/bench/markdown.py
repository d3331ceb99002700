"""What all generated tables share: Markdown, where and when the figures were measured, words for gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warpring.bench.records import Record

#: Batches of the standard rows.
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NOT_MEASURED = "not measured"
#: What does not apply.
DASH = "-"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def provenance(records: Sequence[Record]) -> str:
    """One line that says on what, with what and when `records` were measured."""
    if not records:
        return ""

    def all_of(name: str) -> str:
        return ", ".join(sorted({rec[name] for rec in records if name in rec}))

    gpus, cpus, peaks = all_of("gpu"), all_of("cpu"), [r["read_peak_gbs"] for r in records if "read_peak_gbs" in r]
    parts = [f"{gpus}, driver {all_of('driver')}, CUDA {all_of('cuda')}"] if gpus else []
    parts += [cpus] if cpus else []
    parts.append(f"torch {all_of('torch')}")
    if peaks:
        parts.append(f"read peak {_rates(min(peaks), max(peaks))}")
    days = sorted({rec["date"][:10] for rec in records})
    parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    parts.append(f"commit {all_of('commit')}")
    return f"\nMeasured on {'; '.join(parts)}.\n"


def _rates(low: float, high: float) -> str:
    """A range of rates, given in GB/s: TB/s from 1000 GB/s on, else GB/s; one number where both read alike."""
    unit = "TB/s" if high >= 1000 else "GB/s"
    first, last = (f"{gbs / 1e3:.2f}" if high >= 1000 else f"{gbs:.0f}" for gbs in (low, high))
    return f"{first} {unit}" if first == last else f"{first} to {last} {unit}"


def on_latest_gpu(records: Sequence[Record]) -> list[Record]:
    """Those of the GPU that was measured last; all of them where none is of a GPU."""
    gpus = [rec for rec in records if "gpu" in rec]
    if not gpus:
        return list(records)
    last = max(gpus, key=lambda rec: rec["date"])["gpu"]
    return [rec for rec in gpus if rec["gpu"] == last]
