"""What the bench scripts read from a command line, and decode records as lines of a terminal."""

from __future__ import annotations

from warpring.bench.records import Record

HEADER = (
    f"{'format':<12}{'path':<24}{'B':>4}{'p50 us':>11}{'p10':>10}{'p90':>10}"
    f"{'unique GB/s':>13}{'of peak':>9}{'requested':>11}{'launches':>10}"
)


def words(text: str) -> list[str]:
    """How argparse reads a list of words between commas; empty ones do not count."""
    return [word for word in text.split(",") if word]


def describe(rec: Record) -> str:
    """Where a record was measured, in one line."""
    where = f"{rec['gpu']}, driver {rec['driver']}, CUDA {rec['cuda']}" if "gpu" in rec else rec["cpu"]
    peak = f", read peak {rec['read_peak_gbs']:.0f} GB/s" if "read_peak_gbs" in rec else ""
    return f"{rec['model']} on {where}, torch {rec['torch']}, {rec['routing']} routing{peak}"


def row(rec: Record) -> str:
    """One decode record under `HEADER`; what does not apply is a dash."""
    requested = f"{rec['requested_bytes'] / rec['p50_us'] / 1e3:.2f}" if "requested_bytes" in rec else "-"
    share = f"{100 * rec['fraction_of_peak']:.1f} %" if "fraction_of_peak" in rec else "-"
    return (
        f"{rec['format']:<12}{rec.get('path', rec['impl']):<24}{rec['num_tokens']:>4}"
        f"{rec['p50_us']:>11.1f}{rec['p10_us']:>10.1f}{rec['p90_us']:>10.1f}"
        f"{rec['unique_bytes'] / rec['p50_us'] / 1e3:>13.2f}{share:>9}{requested:>11}{rec.get('launches', '-'):>10}"
    )
