"""The bar: how fast a layer must be on an H200 at each batch, and where each row stands.

A row sets a time, or a share of the read peak that unique bytes must reach, or both; the stricter counts. Rows that
miss it say so.
"""

from __future__ import annotations

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
    if row.least_share is not None and rec.get("read_peak_gbs"):
        limits.append(rec["unique_bytes"] / rec["read_peak_gbs"] / 1e3 / row.least_share)
    return min(limits) if limits else None


def bar(records: Sequence[Record]) -> str:
    """A row a point of the bar: our fastest path, what was asked, by how much it is met or missed, the best peer."""
    decode = on_latest_gpu([rec for rec in records if rec["bench"] == "decode" and "gpu" in rec])
    points = newest(decode, ("model", "format", "routing", "num_tokens", "impl", "path"))
    used: list[Record] = []
    rows: list[list[str]] = []
    for row in ROWS:
        ours = [r for r in points if _is_of(r, row, row.format) and r["impl"] == OWN_IMPL and r.get("path") in PATHS]
        peer_format = PEER_FORMAT.get(row.format, row.format)
        peers = [r for r in points if _is_of(r, row, peer_format) and r["impl"] in ADAPTERS]
        best = min(ours, key=lambda rec: rec["p50_us"], default=None)
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
        "fastest peer µs",
    )
    return markdown(header, rows) + provenance(used)


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
        return [DASH, NOT_MEASURED, DASH, asked, NOT_MEASURED]
    limit = most_us(row, rec)
    verdict = DASH
    if limit is not None:
        over = rec["p50_us"] / limit - 1
        verdict = "met" if over <= 0 else f"missed by {100 * over:.0f} %"
    share = f"{100 * rec['fraction_of_peak']:.0f} %" if "fraction_of_peak" in rec else DASH
    return [rec["path"], f"{rec['p50_us']:.1f}", share, DASH if limit is None else f"{limit:.1f}", verdict]


def _peer(rec: Record | None) -> str:
    return DASH if rec is None else f"{rec['p50_us']:.1f} ({rec['impl']}, {rec['format']})"
