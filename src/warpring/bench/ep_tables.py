"""Tables of expert-parallel decode: the bar point by point, how far it is met, one knob at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from warpring.bench.ep_bar import ASKED, bar_keys, limit_us, nccl_of, p50_us, peers_of, shared_of
from warpring.bench.ep_measured import ep_predicted
from warpring.bench.ep_points import (
    ABLATION_FORMAT,
    ABLATION_MODEL,
    ABLATION_TOKENS,
    BAR_FORMATS,
    BAR_MODELS,
    BLOCK_SIZES,
    COMM_SMS,
    NUM_RANKS,
    RING_BLOCKS,
    SKEWS,
    TOKENS,
    Key,
    Points,
    floor_us,
    layer_of,
    points,
)
from warpring.bench.ep_verified import ep_soak, ep_verified
from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, provenance
from warpring.bench.records import Record

#: Rows of README's table.
OVERVIEW_TOKENS = (1, 8, 32, 128, 256)
_REASON_LETTERS = 80
#: (knob, value, which point of the layer it is).
Row = tuple[str, str, Callable[[Key], Key]]


def ep_overview(records: Sequence[Record]) -> str:
    """A row a token count: microseconds and floor of each layer of the bar, and how much longer the baselines take."""
    found = points(records)
    layers = [(model, format) for model in BAR_MODELS for format in BAR_FORMATS]
    used: list[Record] = []
    rows: list[list[str]] = []
    for tokens in OVERVIEW_TOKENS:
        keys = [Key(model, format, tokens) for model, format in layers]
        rows.append([str(tokens), *(_with_floor(found.get(key)) for key in keys)])
        rows[-1] += [_factors(found, keys, shared_of, used), _factors(found, keys, nccl_of, used)]
        used += [found[key] for key in keys if key in found]
    header = ("tokens a rank", *(f"{model} {format}" for model, format in layers), "not split ÷ ours", "NCCL ÷ ours")
    return markdown(header, rows) + provenance(used)


def _with_floor(rec: Record | None) -> str:
    floor = None if p50_us(rec) is None or rec is None else floor_us(rec)
    return _time(rec) + ("" if floor is None else f" ({floor:.1f})")


def _factors(found: Points, keys: Sequence[Key], other: Callable[[Key], Key], used: list[Record]) -> str:
    """How many times ours the others take: the least and the most of these points."""
    factors: list[float] = []
    for key in keys:
        ours, theirs = p50_us(found.get(key)), p50_us(found.get(other(key)))
        if ours and theirs:
            factors.append(theirs / ours)
            used.append(found[other(key)])
    if not factors:
        return DASH
    low, high = f"{min(factors):.2f}", f"{max(factors):.2f}"
    return low if low == high else f"{low} to {high}"


def ep_bar(records: Sequence[Record]) -> str:
    """A row a point of the bar; one row for a layer without any record."""
    found = points(records)
    used: list[Record] = []
    rows: list[list[str]] = []
    for layer in bar_keys():
        model, format = layer[0].model, layer[0].format
        shape = layer_of(model)
        what = [model, format, DASH if shape is None else str(shape.num_experts // NUM_RANKS)]
        if not any(key in found for key in layer):
            rows.append([*what, f"{TOKENS[0]} to {TOKENS[-1]}", NOT_MEASURED, *[DASH] * 9])
            continue
        for key in layer:
            beside = [found.get(shared_of(key)), found.get(nccl_of(key)), _best_peer(found, key)]
            used += [rec for rec in (found.get(key), *beside) if rec is not None]
            others = [_against(rec, found.get(key)) for rec in beside]
            rows.append([*what, str(key.tokens), *_bar_cells(key, found.get(key)), *others])
    header = (
        "model",
        "weights",
        "experts a rank",
        "tokens a rank",
        "p50 µs",
        "floor W µs",
        "µs above W",
        "may take µs",
        "verdict",
        "TFLOP/s",
        "weights GB/s",
        "not split µs",
        "NCCL µs",
        "peer µs",
    )
    drawn = dict.fromkeys(key.model for key, rec in found.items() if key.model in BAR_MODELS and p50_us(rec))
    plots = [f"\n![{model}: microseconds, and above W, against tokens a rank](img/ep-{model}.svg)\n" for model in drawn]
    return markdown(header, rows) + provenance(used) + "".join(plots)


def _bar_cells(key: Key, rec: Record | None) -> list[str]:
    """Time, floor, time above it, limit, verdict and rates."""
    p50, floor = p50_us(rec), None if rec is None else floor_us(rec)
    limit = None if floor is None else limit_us(key.format, key.tokens, floor)
    over = None if p50 is None or limit is None else p50 / limit - 1
    if rec is None or p50 is None:
        verdict = NOT_MEASURED if rec is None else _reason(rec)
    else:
        verdict = DASH if over is None else "met" if over <= 0 else f"missed by {100 * over:.0f} %"
    return [
        _time(rec),
        DASH if floor is None else f"{floor:.1f}",
        DASH if floor is None or p50 is None else f"{p50 - floor:+.1f}",
        DASH if limit is None else f"{limit:.1f}",
        verdict,
        *(DASH if rec is None or name not in rec else f"{rec[name]:.{digits}f}" for name, digits in _RATES),
    ]


_RATES = (("tflops", 1), ("hbm_gbs", 0))


def _best_peer(found: Points, key: Key) -> Record | None:
    return min(peers_of(found, key), key=lambda rec: rec["p50_us"], default=None)


def _against(rec: Record | None, ours: Record | None) -> str:
    """A rival's time and how many times ours it is; a peer's with its name."""
    if rec is None:
        return DASH
    theirs, mine = p50_us(rec), p50_us(ours)
    factor = f" ({theirs / mine:.2f} x)" if theirs and mine else ""
    peer = "" if rec["impl"] in ("shared", "nccl") else f", {rec['impl']} {rec['format']}"
    return _time(rec) + factor + peer


def ep_asked(records: Sequence[Record]) -> str:
    """A row a demand of the bar: on how many of its measured points it is met, and the worst of them."""
    found = points(records)
    used: list[Record] = []
    rows: list[list[str]] = []
    for asked in ASKED:
        points_of = list(asked.checks(found))
        checks = [check for check in points_of if check is not None]
        used += [rec for check in checks for rec in check.records]
        met = f"{sum(check.met for check in checks)} of {len(checks)}" if checks else NOT_MEASURED
        if checks and len(checks) < len(points_of):
            met += f", {len(points_of) - len(checks)} {NOT_MEASURED}"
        rows.append([asked.text, met, max(checks, key=lambda check: check.over).text if checks else DASH])
    return markdown(("asked", "met on", "worst point"), rows) + provenance(used)


def ablation_rows() -> Iterator[Row]:
    """The ablation's rows in the order of the table; the first is what the others stand against."""
    yield "-", "as shipped", lambda key: key
    for sms in COMM_SMS:
        yield "communication SMs", str(sms), lambda key, sms=sms: replace(key, knob="comm_sms", value=sms)
    yield "partition", "Green Contexts", lambda key: replace(key, knob="partition", value="green")
    yield "partition", "two plain streams", lambda key: replace(key, knob="partition", value="streams")
    yield "overlap", "off: role after role, all SMs", shared_of
    for count in RING_BLOCKS:
        yield "ring blocks", str(count), lambda key, count=count: replace(key, knob="num_slots", value=count)
    for size in BLOCK_SIZES:
        yield "tokens a block (BM)", str(size), lambda key, size=size: replace(key, knob="block_m", value=size)
    yield "wire and activations", "16-bit", lambda key: replace(key, activation="bf16")
    yield "shared expert", "fused", lambda key: replace(key, shared="fused")
    yield "shared expert", "a layer of its own", lambda key: replace(key, shared="separate")
    for skew in SKEWS:
        yield "skew", f"{skew:g}", lambda key, skew=skew: replace(key, skew=skew)
        yield "skew, overlap off", f"{skew:g}", lambda key, skew=skew: replace(key, skew=skew, impl="shared")


def ep_ablation(records: Sequence[Record]) -> str:
    """A row a value of a knob, a column a token count; in brackets the change against the layer as shipped."""
    found = points(records)
    used: list[Record] = []
    rows: list[list[str]] = []
    for knob, value, point in ablation_rows():
        cells: list[str] = []
        for tokens in ABLATION_TOKENS:
            shipped = Key(ABLATION_MODEL, ABLATION_FORMAT, tokens)
            rec, base = found.get(point(shipped)), p50_us(found.get(shipped))
            used += [rec] if rec else []
            p50 = p50_us(rec)
            change = "" if not p50 or not base or value == "as shipped" else f" ({100 * (p50 / base - 1):+.1f} %)"
            cells.append(_time(rec) + change)
        rows.append([knob, value, *cells])
    header = ("knob", "value", *(f"T = {tokens}, µs" for tokens in ABLATION_TOKENS))
    compared = any(" %)" in cell for row in rows for cell in row)
    plot = "\n![Change of the time by each knob](img/ep-ablation.svg)\n" if compared else ""
    return markdown(header, rows) + provenance(used) + plot


def _time(rec: Record | None) -> str:
    p50 = p50_us(rec)
    return NOT_MEASURED if rec is None else "failed" if p50 is None else f"{p50:.1f}"


def _reason(rec: Record) -> str:
    """Why a point has no time, fit for a cell."""
    text = " ".join(rec["failed"].split()).replace("|", "/")
    return text if len(text) <= _REASON_LETTERS else f"{text[:_REASON_LETTERS]}…"


EP_TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "ep": ep_overview,
    "ep-asked": ep_asked,
    "ep-bar": ep_bar,
    "ep-ablation": ep_ablation,
    "ep-predicted": ep_predicted,
    "ep-verified": ep_verified,
    "ep-soak": ep_soak,
}
