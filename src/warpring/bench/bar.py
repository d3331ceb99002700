"""The bar: how fast a layer must be on an H200 at each batch, and where each row stands.

A row sets a time, or a share of the read peak that unique bytes must reach, or both; the stricter counts. Rows that
miss it say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from warpring.bench.adapters import ADAPTERS
from warpring.bench.markdown import BATCHES, DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import OWN_IMPL, Record, newest

#: Paths of ours that a row may be served by: "auto" chooses among them by batch.
PATHS = ("auto", "warp", "tile", "grouped")
#: The format that peers store what we store in this format in: the same codes a weight, other scales.
PEER_FORMAT = {"mxfp8": "fp8_block"}


@dataclass(frozen=True)
class BarRow:
    """One point of the bar: `most_us` microseconds a layer, `least_share` of the read peak; None where none is set."""

    model: str
    format: str
    num_tokens: int
    routing: str = "uniform"
    most_us: float | None = None
    least_share: float | None = None


#: What the other models of a format must reach lies so far below Qwen3-30B-A3B's shares.
_ALLOWANCE = 0.05
_MXFP8_SHARES = {1: 0.80, 2: 0.88, 4: 0.91, 8: 0.92, 16: 0.92, 32: 0.92, 64: 0.91}
_MXFP8_US = {1: 10.9, 2: 19.1, 4: 34.8, 8: 60.0, 16: 95.3, 32: 131.0, 64: 150.0}
_BF16_SHARES = {1: 0.85, 4: 0.92, 8: 0.92, 16: 0.92, 32: 0.92, 64: 0.92}
_MXFP4_SHARES = {1: 0.55, 4: 0.80, 8: 0.88, 16: 0.88, 32: 0.88, 64: 0.88}
_FP8_US = {1: 8.0, 2: 13.5, 4: 24.0, 8: 45.0}


def _rows() -> Iterator[BarRow]:
    qwen = "qwen3-30b-a3b"

    def shares(model: str, format: str, of: Mapping[int, float], allowance: float = 0.0) -> Iterator[BarRow]:
        for batch in BATCHES:
            least = of.get(batch)
            yield BarRow(model, format, batch, least_share=None if least is None else round(least - allowance, 2))

    for batch in BATCHES:
        yield BarRow(qwen, "mxfp8", batch, most_us=_MXFP8_US[batch], least_share=_MXFP8_SHARES[batch])
    yield from shares(qwen, "bf16", _BF16_SHARES)
    yield from shares(qwen, "mxfp4", _MXFP4_SHARES)
    for batch in _FP8_US:
        yield BarRow("h2048xi512xe256xk8", "fp8_block", batch, most_us=_FP8_US[batch])
    yield from shares("gpt-oss-120b", "mxfp4", _MXFP4_SHARES, _ALLOWANCE)
    yield from shares("deepseek-v3-ep8", "fp8_block", _MXFP8_SHARES, _ALLOWANCE)
    yield from shares("qwen3-235b-a22b", "mxfp8", _MXFP8_SHARES, _ALLOWANCE)
    for routing in ("zipf", "recorded"):
        for batch in BATCHES:
            yield BarRow(qwen, "mxfp8", batch, routing)


ROWS = tuple(_rows())


def groups() -> dict[tuple[str, str, str], list[int]]:
    """(model, format, routing) -> batches of the rows, in their order: what one run of the bench measures together."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in ROWS:
        found.setdefault((row.model, row.format, row.routing), []).append(row.num_tokens)
    return found


def most_us(row: BarRow, rec: Record) -> float | None:
    """The time that `row` allows, given the unique bytes and the read peak of `rec`; None where no bar is set."""
    limits = [row.most_us] if row.most_us is not None else []
    floor = floor_us(rec)
    if row.least_share is not None and floor is not None:
        limits.append(floor / row.least_share)
    return min(limits) if limits else None


def floor_us(rec: Record) -> float | None:
    """Microseconds that the unique bytes of `rec` take at the read peak of its run; None where it has no peak."""
    return rec["unique_bytes"] / rec["read_peak_gbs"] / 1e3 if rec.get("read_peak_gbs") else None


def bar(records: Sequence[Record]) -> str:
    """A row a point of the bar: our fastest path, what was asked, by how much it is met or missed, the best peer."""
    points = _points(records)
    used: list[Record] = []
    rows: list[list[str]] = []
    for row in ROWS:
        peer_format = PEER_FORMAT.get(row.format, row.format)
        peers = [r for r in points if _is_of(r, row, peer_format) and r["impl"] in ADAPTERS]
        best = _fastest(points, row)
        peer = min(peers, key=lambda rec: rec["p50_us"], default=None)
        used += [rec for rec in (best, peer) if rec is not None]
        rows.append([row.model, row.format, row.routing, str(row.num_tokens), *_ours(row, best), _peer(peer)])
    header = (
        "model",
        "format",
        "routing",
        "tokens",
        "path",
        "p50 µs",
        "of peak",
        "may take µs",
        "verdict",
        "commit",
        "fastest peer µs",
    )
    return markdown(header, rows) + provenance(used)


def missed_rows(records: Sequence[Record]) -> list[tuple[BarRow, Record]]:
    """Each row that our fastest path misses, with the record of that path."""
    points = _points(records)
    found = [(row, _fastest(points, row)) for row in ROWS]
    return [(row, rec) for row, rec in found if rec is not None and rec["p50_us"] > (most_us(row, rec) or math.inf)]


def missed(records: Sequence[Record]) -> str:
    """A row a missed point: time above the floor beside what the bar leaves, the tile kernels before, the profiler."""
    decode = _decode(records)
    profiles = on_latest_gpu([rec for rec in records if rec["bench"] == "profile"])
    profiles = newest(profiles, ("model", "format", "path", "kernel", "num_tokens"))
    rows: list[list[str]] = []
    found = missed_rows(records)
    for row, rec in found:
        limit, floor = most_us(row, rec) or math.nan, floor_us(rec)
        above = [DASH, DASH] if floor is None else [f"{rec['p50_us'] - floor:.1f}", f"{limit - floor:.1f}"]
        cells = [row.model, row.format, row.routing, str(row.num_tokens), rec["path"], rec["commit"][:7]]
        cells += [f"{rec['p50_us']:.1f}", f"{limit:.1f}", *above]
        rows.append([*cells, _tiles(decode, row), _profile(profiles, row, rec["path"])])
    header = (
        "model",
        "format",
        "routing",
        "tokens",
        "path",
        "commit",
        "p50 µs",
        "may take µs",
        "above floor, µs",
        "may be above, µs",
        "tile kernels, µs",
        "DRAM of peak, issue slots, longest stall",
    )
    nothing = [[DASH if decode else NOT_MEASURED] + [DASH] * (len(header) - 1)]
    return markdown(header, rows or nothing) + provenance([rec for _, rec in found])


def _tiles(decode: Sequence[Record], row: BarRow) -> str:
    """Times of the tile kernel of each commit, in the order of their newest records."""
    ours = [rec for rec in decode if _is_of(rec, row, row.format) and rec["impl"] == OWN_IMPL]
    tiles = newest([rec for rec in ours if rec.get("path") == "tile"], ("commit",))
    tiles = sorted(tiles, key=lambda rec: rec["date"])
    return ", ".join(f"{rec['p50_us']:.1f} ({rec['commit'][:7]})" for rec in tiles) or NOT_MEASURED


def _profile(profiles: Sequence[Record], row: BarRow, path: str) -> str:
    """What bounds each kernel of `path`, alone, in the order in which they were profiled."""
    asked = (row.model, row.format, row.num_tokens, path)
    kernels = [r for r in profiles if (r["model"], r["format"], r["num_tokens"], r["path"]) == asked]
    shares = (
        ", ".join(
            [f"{100 * rec[name]:.0f} %" for name in ("fraction_of_peak", "issue_share") if name in rec]
            + ([rec["stalls"].split(",")[0]] if "stalls" in rec else [])
        )
        for rec in kernels
    )
    return "; ".join(shares) or NOT_MEASURED


def _points(records: Sequence[Record]) -> list[Record]:
    """The newest record of each path and peer at each point."""
    return newest(_decode(records), ("model", "format", "routing", "num_tokens", "impl", "path"))


def _decode(records: Sequence[Record]) -> list[Record]:
    return on_latest_gpu([rec for rec in records if rec["bench"] == "decode" and "gpu" in rec])


def _fastest(points: Sequence[Record], row: BarRow) -> Record | None:
    ours = [r for r in points if _is_of(r, row, row.format) and r["impl"] == OWN_IMPL and r.get("path") in PATHS]
    return min(ours, key=lambda rec: rec["p50_us"], default=None)


def _is_of(rec: Record, row: BarRow, format: str) -> bool:
    return (rec["model"], rec["format"], rec["routing"], rec["num_tokens"]) == (
        row.model,
        format,
        row.routing,
        row.num_tokens,
    )


def _ours(row: BarRow, rec: Record | None) -> list[str]:
    if rec is None:
        asked = DASH if row.most_us is None else f"{row.most_us:.1f}"
        return [DASH, NOT_MEASURED, DASH, asked, NOT_MEASURED, DASH]
    limit = most_us(row, rec)
    verdict = DASH
    if limit is not None:
        over = rec["p50_us"] / limit - 1
        verdict = "met" if over <= 0 else f"missed by {100 * over:.0f} %"
    share = f"{100 * rec['fraction_of_peak']:.0f} %" if "fraction_of_peak" in rec else DASH
    allowed = DASH if limit is None else f"{limit:.1f}"
    return [rec["path"], f"{rec['p50_us']:.1f}", share, allowed, verdict, rec["commit"][:7]]


def _peer(rec: Record | None) -> str:
    return DASH if rec is None else f"{rec['p50_us']:.1f} ({rec['impl']}, {rec['format']})"
