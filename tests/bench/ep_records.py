"""Made-up records of expert-parallel decode on two GPUs, for tests of what is made of records."""

from __future__ import annotations

from typing import Any

from warpring.bench.records import Record, record

GPU: dict[str, Any] = {"gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "commit": "abc", "date": "2026-05-01T10:00:00Z"}


def ep_record(
    model: str = "deepseek-v4-flash", tokens: int = 8, p50_us: float | None = 250.0, **changed: Any
) -> Record:
    """One record; without a time where `p50_us` is None, which wants `failed` said."""
    fields: dict[str, Any] = {
        "model": model, "format": "fp8_block", "num_ranks": 2, "tokens_per_rank": tokens, "experts_per_rank": 128,
        "topk": 6, "routing": "uniform", "skew": 1.05, "asked_skew": 1.0, "wire": "fp8", "activation": "fp8",
        "shared_expert": "none", "overlap": True, "comm_sms": 16, "compute_sms": 116, "block_m": 32, "note": "auto",
        "weight_floor_us": 238.0, "wire_floor_us": 0.6, "tflops": 20.0, "hbm_gbs": 4100.0, "read_peak_gbs": 4500.0,
        "cosine_min": 0.9987,
    }  # fmt: skip
    if p50_us is not None:
        fields |= {"p10_us": p50_us - 1, "p50_us": p50_us, "p90_us": p50_us + 1}
    rec = record("expert_parallel", device="cpu", **(fields | GPU | changed))
    return {name: value for name, value in rec.items() if name not in ("cpu", "python")}


def nccl_record(**changed: Any) -> Record:
    """One record of the all-to-all baseline."""
    rec = ep_record(impl="nccl", format="bf16", activation="bf16", wire="bf16", **changed)
    return {name: value for name, value in rec.items() if name not in ("overlap", "comm_sms", "compute_sms", "note")}
