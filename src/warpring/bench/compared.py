"""Tables of comparisons: other libraries' layers, a whole model under each path, kernels under Nsight Compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warpring.bench.adapters import ADAPTERS
from warpring.bench.bar import PATHS
from warpring.bench.markdown import BATCHES, DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import OWN_IMPL, Record, newest

#: What bench/peers.py measures.
PEER_LAYERS = (
    ("qwen3-30b-a3b", "fp8_block"),
    ("h2048xi512xe256xk8", "fp8_block"),
    ("gpt-oss-120b", "mxfp4"),
    ("qwen3-30b-a3b", "bf16"),
)
#: What tells runs apart: each measures its own read peak, once, and writes it into all of its records.
_RUN = ("commit", "read_peak_gbs")
#: What bench/end_to_end.py measures.
DECODE_BATCHES, CONTEXTS = (1, 4, 8, 16, 32), (1 << 10, 4 << 10, 16 << 10, 32 << 10)
#: Batch -> the least factor over the classical path in every context.
LEAST_FACTOR = {1: 1.84, 4: 1.84, 8: 1.84, 32: 1.0}
#: One layout of weights serves every batch under "auto"; a server of few sequences may keep them row-major instead.
OUR_FORMS = ("auto", "warp")
THEIR_FORMS = ("transformers_grouped_mm", "transformers_batched_mm")


def peers(records: Sequence[Record]) -> str:
    """A row a layer and batch, all of its cells from one run: our fastest path in it, each peer as times of that."""
    decode = [rec for rec in records if rec["bench"] == "decode" and "gpu" in rec and rec["routing"] == "uniform"]
    decode = on_latest_gpu(decode)
    used: list[Record] = []
    rows: list[list[str]] = []
    for model, format in PEER_LAYERS:
        for batch in BATCHES:
            here = [r for r in decode if (r["model"], r["format"], r["num_tokens"]) == (model, format, batch)]
            ours, theirs = _side_by_side(here)
            used += [*([] if ours is None else [ours]), *theirs.values()]
            cells = [NOT_MEASURED if ours is None else f"{ours['p50_us']:.1f} ({ours['path']})"]
            cells += [_times(theirs.get(name), ours) for name in ADAPTERS]
            rows.append([model, format, str(batch), *cells])
    return markdown(("model", "format", "tokens", "ours, µs", *ADAPTERS), rows) + provenance(used)


def _side_by_side(here: Sequence[Record]) -> tuple[Record | None, dict[str, Record]]:
    """Our fastest path and the peers, by name, of the run with most peers at this point; the newest one of several."""
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for rec in newest(here, ("impl", "path", *_RUN)):
        runs.setdefault(tuple(rec.get(name) for name in _RUN), []).append(rec)

    def peers_of(run: Sequence[Record]) -> dict[str, Record]:
        return {rec["impl"]: rec for rec in run if rec["impl"] in ADAPTERS}

    chosen = max(runs.values(), key=lambda run: (len(peers_of(run)), max(rec["date"] for rec in run)), default=[])
    theirs = peers_of(chosen)
    ours = [rec for rec in chosen if theirs and rec["impl"] == OWN_IMPL and rec.get("path") in PATHS]
    return min(ours, key=lambda rec: rec["p50_us"], default=None), theirs


def _times(rec: Record | None, best: Record | None) -> str:
    if rec is None:
        return DASH
    return f"{rec['p50_us']:.1f}" + ("" if best is None else f" ({rec['p50_us'] / best['p50_us']:.2f} x)")


def whole_models(records: Sequence[Record]) -> dict[tuple[int, int], dict[str, Record]]:
    """(batch, context) -> form -> newest record, on the GPU that was measured last."""
    whole = [rec for rec in records if rec["bench"] == "end_to_end" and "gpu" in rec and "context" in rec]
    found: dict[tuple[int, int], dict[str, Record]] = {}
    for rec in newest(on_latest_gpu(whole), ("batch", "context", "impl", "path")):
        found.setdefault((rec["batch"], rec["context"]), {})[rec.get("path", rec["impl"])] = rec
    return found


def end_to_end(records: Sequence[Record]) -> str:
    """A row a batch and context: tokens a second of each form, factors over the classical path, shares of `auto`."""
    points = whole_models(records)
    used: list[Record] = []
    rows: list[list[str]] = []
    forms = (*OUR_FORMS, "classical", *THEIR_FORMS)
    for batch in DECODE_BATCHES:
        for context in CONTEXTS:
            found = points.get((batch, context), {})
            rates = {name: rate(rec) for name, rec in found.items()}
            used += found.values()
            rows.append(
                [
                    str(batch),
                    str(context),
                    *(f"{rates[name]:.0f}" if name in rates else NOT_MEASURED for name in forms),
                    *_factor(rates, OUR_FORMS[:1], batch),
                    *_factor(rates, OUR_FORMS, batch),
                    *_shares(found.get(OUR_FORMS[0])),
                ]
            )
    header = (
        "batch",
        "context",
        *forms,
        "auto ÷ classical",
        "verdict",
        "faster of ours ÷ classical",
        "verdict",
        "experts",
        "attention",
        "other",
    )
    return markdown(header, rows) + provenance(used)


def rate(rec: Record) -> float:
    """Tokens a second: of the step's time, since the record's own rate is rounded to less than the verdicts need."""
    return rec["batch"] / rec["p50_us"] * 1e6 if "p50_us" in rec else rec["tokens_per_s"]


def _factor(rates: Mapping[str, float], ours: Sequence[str], batch: int) -> list[str]:
    """Rate of the fastest of `ours` over the classical path's, and whether it is as large as it must be."""
    best = max((rates[name] for name in ours if name in rates), default=None)
    if best is None or "classical" not in rates:
        return [DASH, DASH]
    factor, least = best / rates["classical"], LEAST_FACTOR.get(batch)
    verdict = (
        DASH
        if least is None
        else "met"
        if factor >= least
        else f"missed by {100 * (1 - factor / least):.1f} % of {least}"
    )
    return [f"{factor:.2f}", verdict]


def _shares(rec: Record | None) -> list[str]:
    names = ("experts_share", "attention_share", "other_share")
    return [DASH if rec is None or name not in rec else f"{100 * rec[name]:.0f} %" for name in names]


def ncu(records: Sequence[Record]) -> str:
    """A row a kernel launch, alone and with cold caches."""
    points = on_latest_gpu([rec for rec in records if rec["bench"] == "profile"])
    points = newest(points, ("model", "format", "path", "kernel", "num_tokens"))
    order = ("model", "format", "path", "num_tokens")
    rows = [
        [
            rec["model"],
            rec["format"],
            rec["path"],
            str(rec["num_tokens"]),
            rec["kernel"],
            f"{rec['p50_us']:.1f}",
            f"{rec['dram_gbs'] / 1e3:.2f}",
            f"{100 * rec['fraction_of_peak']:.0f} %" if "fraction_of_peak" in rec else DASH,
            f"{100 * rec['issue_share']:.0f} %" if "issue_share" in rec else DASH,
            f"{100 * rec['occupancy']:.0f} %" if "occupancy" in rec else DASH,
            str(rec["registers"]),
            f"{rec['smem_bytes'] / 1024:.1f}" if "smem_bytes" in rec else DASH,
            str(rec["spill_bytes"]),
            rec.get("stalls", DASH),
        ]
        for rec in sorted(points, key=lambda rec: tuple(rec[name] for name in order))
    ] or [[NOT_MEASURED] + [DASH] * 13]
    header = (
        "model",
        "format",
        "path",
        "tokens",
        "kernel",
        "µs, alone",
        "DRAM TB/s",
        "of peak",
        "issue slots",
        "occupancy",
        "registers",
        "shared KiB",
        "spilled bytes",
        "longest stalls",
    )
    return markdown(header, rows) + provenance(points)
