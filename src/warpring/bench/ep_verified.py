"""Tables of what `warpring ep-verify` found on GPUs: cases with their cosines, and soaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from warpring.bench.ep_cases import FORMATS
from warpring.bench.ep_soak import SOAK_SHAPE
from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.records import Record, newest

#: Forms of each layer: activations, shared expert.
_FORMS = tuple(product(("fp8", "bf16"), ("none", "fused")))


def ep_verified(records: Sequence[Record]) -> str:
    """A row a layer: how many cases met their bounds, and the worst figures of all of its cases."""
    ours = _ours(
        records, "ep_verify", ("model", "activation", "shared_expert", "num_ranks", "max_tokens_per_rank", "case")
    )
    rows: list[list[str]] = []
    for model, (activation, shared) in product(FORMATS, _FORMS):
        found = [rec for rec in ours if _is(rec, model, activation, shared)]
        if not found:
            rows.append([model, FORMATS[model], activation, shared, NOT_MEASURED, *[DASH] * 5])
            continue
        met = sum(rec["met"] for rec in found)
        errors = [rec["rms_rel_error"] for rec in found if "rms_rel_error" in rec]
        compared = [rec for rec in found if rec["tokens"]]
        rows.append(
            [
                model,
                found[0]["format"],
                activation,
                shared,
                f"{met} of {len(found)}",
                f"{sum(rec['repeats'] for rec in found):,}",
                f"{sum(rec['tokens'] for rec in found):,}",
                f"{min(rec['cosine_min'] for rec in compared):.8f}" if compared else DASH,
                f"{min(rec['exact_cosine_min'] for rec in compared):.6f}" if compared else DASH,
                f"{max(errors):.1e}" if errors else DASH,
            ]
        )
    header = (
        "model",
        "weights",
        "activations",
        "shared expert",
        "cases met",
        "replays",
        "tokens compared",
        "least cosine",
        "with FP64",
        "RMS error",
    )
    return markdown(header, rows) + provenance(ours)


def ep_soak(records: Sequence[Record]) -> str:
    """A row a form of the soaked layer."""
    ours = _ours(records, "soak", ("model", "activation", "shared_expert", "num_ranks"))
    rows: list[list[str]] = []
    for activation, shared in _FORMS:
        found = [rec for rec in ours if _is(rec, SOAK_SHAPE, activation, shared) and rec["num_ranks"] > 1]
        for rec in found:
            grown = max(rec.get("allocated_bytes", 0), rec["device_bytes"])
            cells = [f"{rec['repeats']:,}", f"{rec.get('calls', 0):,}", f"{rec.get('seconds', 0.0):.1f}"]
            cells += [str(rec["checks"]), f"{rec['cosine_min']:.8f}", str(rec["changed_values"]), f"{grown:,}"]
            rows.append([activation, shared, *cells])
        if not found:
            rows.append([activation, shared, NOT_MEASURED, *[DASH] * 6])
    header = (
        "activations",
        "shared expert",
        "replays",
        "calls",
        "seconds",
        "replays compared",
        "least cosine",
        "changed values",
        "bytes grown",
    )
    return markdown(header, rows) + provenance(ours)


def _ours(records: Sequence[Record], bench: str, keys: Sequence[str]) -> list[Record]:
    """The newest records of each of `keys` on the GPU that was used last; none of CPUs."""
    return newest(on_latest_gpu([rec for rec in records if rec["bench"] == bench and "gpu" in rec]), keys)


def _is(rec: Record, model: str, activation: str, shared: str) -> bool:
    return (rec["model"], rec.get("activation"), rec.get("shared_expert")) == (model, activation, shared)
