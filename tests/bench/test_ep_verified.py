"""Tables of what `ep-verify` found: gaps, the worst of all cases, misses, and only GPUs."""

from __future__ import annotations

from typing import Any

from ep_records import GPU

from warpring.bench.ep_cases import FORMATS
from warpring.bench.ep_soak import SOAK_SHAPE
from warpring.bench.ep_verified import ep_soak, ep_verified
from warpring.bench.records import Record, record


def on_gpu(bench: str, **fields: Any) -> Record:
    rec = record(bench, device="cpu", **(GPU | fields))
    return {name: value for name, value in rec.items() if name not in ("cpu", "python")}


def verified(case: str = "8 uniform", **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "glm-5.2", "format": "fp8_block", "activation": "fp8", "shared_expert": "none", "num_ranks": 2,
        "case": case, "repeats": 100, "tokens": 800, "cosine_min": 1.0, "exact_cosine_min": 0.999,
        "rms_rel_error": 0.04, "met": True,
    }  # fmt: skip
    return on_gpu("ep_verify", **(fields | changed))


def soaked(**changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": SOAK_SHAPE, "format": "mxfp4", "activation": "bf16", "shared_expert": "fused", "num_ranks": 2,
        "repeats": 10_000, "calls": 40_000, "checks": 100, "cosine_min": 0.9999999, "changed_values": 0,
        "allocated_bytes": 0, "device_bytes": 1024, "seconds": 8.25,
    }  # fmt: skip
    return on_gpu("soak", **(fields | changed))


def rows(table: str, *words: str) -> list[str]:
    return [
        line for line in table.splitlines() if line.startswith("|") and all(f"| {word} |" in line for word in words)
    ]


def test_without_records_every_layer_is_not_measured() -> None:
    assert ep_verified([]).count("not measured") == 4 * len(FORMATS)
    assert ep_soak([]).count("not measured") == 4


def test_a_row_has_the_worst_of_its_cases() -> None:
    worse = verified("1 uniform", tokens=100, cosine_min=0.5, exact_cosine_min=0.6, rms_rel_error=0.7, met=False)
    empty = verified("0 uniform", tokens=0, cosine_min=0.25, rms_rel_error=0.0)
    table = ep_verified([verified(), worse, empty, verified(activation="bf16")])
    assert rows(table, "glm-5.2", "fp8", "none") == [
        "| glm-5.2 | fp8_block | fp8 | none | 2 of 3 | 300 | 900 | 0.50000000 | 0.600000 | 7.0e-01 |"
    ]
    assert "1 of 1" in rows(table, "glm-5.2", "bf16", "none")[0]
    assert "Measured on GPU X" in table


def test_the_newest_record_of_a_case_counts_and_none_of_a_cpu() -> None:
    old = verified(met=False, date="2026-01-01T00:00:00Z")
    on_cpu = {
        **{k: v for k, v in verified("2 uniform").items() if k not in GPU},
        "cpu": "C",
        **{k: GPU[k] for k in ("commit", "date")},
    }
    assert "| 1 of 1 |" in rows(ep_verified([verified(), old, on_cpu]), "glm-5.2")[0]


def test_a_soak_of_one_rank_or_of_another_layer_is_not_shown() -> None:
    table = ep_soak([soaked(), soaked(num_ranks=1, shared_expert="none"), soaked(model="glm-5.2", activation="fp8")])
    assert rows(table, "bf16", "fused") == ["| bf16 | fused | 10,000 | 40,000 | 8.2 | 100 | 0.99999990 | 0 | 1,024 |"]
    assert table.count("not measured") == 3
