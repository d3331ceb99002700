"""The bar of expert-parallel decode on two H200s: what each point may take, and how each demand is checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from warpring.bench.ep_points import (
    BAR_FORMATS,
    BAR_MODELS,
    EIGHTH_NAME,
    OWN,
    TOKENS,
    Key,
    Points,
    floor_us,
    layer_of,
)
from warpring.bench.records import Record

#: How much longer 16-bit activations may take, and the cosine that they must keep with the all-to-all baseline.
BF16_FACTOR, BF16_COSINE = 1.10, 0.9999
#: How many times ours the layer without partition must take on average, and NCCL's all-to-alls at every point.
SHARED_MEAN, NCCL_FACTOR = 1.19, 2.0
#: Beyond the time of its own bytes.
FUSED_US = 3.0
#: How the name of the peer to beat begins.
PEER_TO_BEAT = "flashinfer"


def limit_us(format: str, tokens: int, floor: float) -> float:
    """Microseconds that our layer may take, given its floor W."""
    if tokens <= 8:
        return floor + 15
    if format == "mxfp4":
        return 1.10 * floor + 10
    if tokens <= 32:
        return floor + 20
    return (1.07 if tokens <= 128 else 1.12) * floor


def bar_layers() -> Iterator[tuple[str, str]]:
    """(model, format) of the bar's layers."""
    for model in BAR_MODELS:
        for name in (model, model + EIGHTH_NAME):
            for format in BAR_FORMATS:
                yield name, format


def bar_keys() -> list[list[Key]]:
    """The bar's points, a list a layer."""
    return [[Key(model, format, tokens) for tokens in TOKENS] for model, format in bar_layers()]


def nccl_of(key: Key) -> Key:
    """The all-to-all baseline of a point."""
    return replace(key, format="bf16", impl="nccl", activation="bf16")


def shared_of(key: Key) -> Key:
    """The same kernels one after the other on all multiprocessors."""
    return replace(key, impl="shared")


def p50_us(rec: Record | None) -> float | None:
    """The time of a point; None where there is none, or no record."""
    return None if rec is None or "p50_us" not in rec else float(rec["p50_us"])


def peers_of(found: Points, key: Key) -> list[Record]:
    """Peers at that point: of its format, or where they have none of it, of any."""
    theirs = [
        rec
        for other, rec in found.items()
        if other.impl not in OWN and (other.model, other.tokens) == (key.model, key.tokens) and p50_us(rec) is not None
    ]
    return [rec for rec in theirs if rec["format"] == key.format] or theirs


@dataclass(frozen=True)
class Check:
    """A demand at one point: met where `value` is at most `limit`. `text` says both."""

    value: float
    limit: float
    text: str
    records: tuple[Record, ...]

    @property
    def met(self) -> bool:
        """Whether the demand holds."""
        return self.value <= self.limit

    @property
    def over(self) -> float:
        """How far the value lies above the limit, relative to it."""
        return self.value / self.limit - 1


@dataclass(frozen=True)
class Asked:
    """A demand in words, and its checks: None for a point of the bar that was not measured."""

    text: str
    checks: Callable[[Points], Iterator[Check | None]]


def _name(key: Key) -> str:
    return f"{key.model} {key.format}, T = {key.tokens}"


def _time(key: Key, rec: Record, limit: float, *others: Record) -> Check:
    value = float(rec["p50_us"])
    return Check(value, limit, f"{_name(key)}: {value:.1f} µs, {limit:.1f} allowed", (rec, *others))


def _above_floor(format: str, least: int, most: int) -> Callable[[Points], Iterator[Check | None]]:
    def checks(found: Points) -> Iterator[Check | None]:
        for key in itertools.chain.from_iterable(bar_keys()):
            if key.format != format or not least <= key.tokens <= most:
                continue
            rec = found.get(key)
            floor = None if rec is None else floor_us(rec)
            if rec is None or floor is None:
                yield None
            elif p50_us(rec) is None:
                yield Check(math.inf, 1.0, f"{_name(key)}: failed", (rec,))
            else:
                yield _time(key, rec, limit_us(format, key.tokens, floor))

    return checks


def _against(other: Callable[[Key], Key], factor: float) -> Callable[[Points], Iterator[Check]]:
    """Ours may take `factor` times the other's time."""

    def checks(found: Points) -> Iterator[Check]:
        for ours, rec, theirs in pairs(found, other):
            yield _time(ours, rec, factor * theirs["p50_us"], theirs)

    return checks


def pairs(found: Points, other: Callable[[Key], Key]) -> Iterator[tuple[Key, Record, Record]]:
    """Points of the bar where ours and the other one of a point were measured."""
    for key in itertools.chain.from_iterable(bar_keys()):
        ours, theirs = found.get(key), found.get(other(key))
        if ours and theirs and p50_us(ours) and p50_us(theirs):
            yield key, ours, theirs


def _faster_than_peer(found: Points) -> Iterator[Check]:
    for key in itertools.chain.from_iterable(bar_keys()):
        rec = found.get(key)
        peers = [peer for peer in peers_of(found, key) if peer["impl"].startswith(PEER_TO_BEAT)]
        if key.format == "fp8_block" and rec and p50_us(rec) is not None and peers:
            best = min(peers, key=lambda peer: peer["p50_us"])
            yield _time(key, rec, best["p50_us"], best)


def _bf16(found: Points) -> Iterator[Check]:
    for key, eight, sixteen in pairs(found, lambda key: replace(key, activation="bf16")):
        yield _time(key, sixteen, BF16_FACTOR * eight["p50_us"], eight)


def _bf16_cosine(found: Points) -> Iterator[Check]:
    for key in itertools.chain.from_iterable(bar_keys()):
        rec = found.get(replace(key, activation="bf16"))
        if rec and "cosine_min" in rec:
            text = f"{_name(key)}: {rec['cosine_min']:.6f}"
            yield Check(1 - rec["cosine_min"], 1 - BF16_COSINE, text, (rec,))


def _shared_mean(found: Points) -> Iterator[Check]:
    measured = list(pairs(found, shared_of))
    if measured:
        mean = sum(theirs["p50_us"] / ours["p50_us"] for _, ours, theirs in measured) / len(measured)
        records = tuple(rec for _, *both in measured for rec in both)
        yield Check(SHARED_MEAN / mean, 1.0, f"{mean:.2f} x on average of {len(measured)} points", records)


def _fused(found: Points) -> Iterator[Check]:
    for key, alone, fused in pairs(found, lambda key: replace(key, shared="fused")):
        layer, peak = layer_of(key.model), alone.get("read_peak_gbs")
        if layer is None or not peak:
            continue
        own = layer.shared_experts * 3 * layer.hidden * layer.intermediate * (1 + 4 / 128**2) / peak / 1e3
        added = fused["p50_us"] - alone["p50_us"]
        text = f"{_name(key)}: {added:+.1f} µs for bytes of {own:.1f} µs"
        yield Check(added, own + FUSED_US, text, (alone, fused))


_LAST = TOKENS[-1]
ASKED = (
    Asked("FP8 weights, T ≤ 8: W + 15 µs", _above_floor("fp8_block", 1, 8)),
    Asked("FP8 weights, T = 16 and 32: W + 20 µs", _above_floor("fp8_block", 16, 32)),
    Asked("FP8 weights, T = 64 and 128: 1.07 W", _above_floor("fp8_block", 64, 128)),
    Asked(f"FP8 weights, T = {_LAST}: 1.12 W", _above_floor("fp8_block", _LAST, _LAST)),
    Asked("FP8 weights: faster than FlashInfer's kernel", _faster_than_peer),
    Asked("MXFP4 weights, T ≤ 8: W + 15 µs", _above_floor("mxfp4", 1, 8)),
    Asked("MXFP4 weights, T ≥ 16: 1.10 W + 10 µs", _above_floor("mxfp4", 16, _LAST)),
    Asked("16-bit activations: 1.10 times the FP8 form", _bf16),
    Asked(f"16-bit activations: cosine of {BF16_COSINE} with the BF16 baseline", _bf16_cosine),
    Asked("never slower than the same kernels without partition", _against(shared_of, 1.0)),
    Asked(f"these take {SHARED_MEAN} times as long on average", _shared_mean),
    Asked("NCCL's all-to-alls take twice as long everywhere", _against(nccl_of, 1 / NCCL_FACTOR)),
    Asked("fused shared expert: the time of its bytes + 3 µs", _fused),
)
