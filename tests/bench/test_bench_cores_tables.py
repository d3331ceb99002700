"""Tables of CPU cores: the newest of the CPU measured last, factors over the fastest torch form, gaps."""

from __future__ import annotations

from typing import Any

from warpring.bench.cores_tables import cores_end_to_end, cores_layer

COMMON = {"torch": "2.9", "commit": "abc", "cpu": "Some CPU (2 cores)", "date": "2026-01-02T00:00:00Z"}


def decode(p50_us: float, num_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    own = {"bench": "decode", "impl": "warpring", "model": "qwen3-30b-a3b", "format": "mxfp8", "path": "cores"}
    rec = {**COMMON, **own, "num_tokens": num_tokens, "p50_us": p50_us, "fraction_of_peak": 0.75, "read_peak_gbs": 30.0}
    return rec | fields


def peer(impl: str, p50_us: float, **fields: Any) -> dict[str, Any]:
    rec = decode(p50_us, impl=impl, format="bf16", **fields)
    del rec["path"]
    return rec


RECORDS = [
    decode(1.0, cpu="Old CPU", date="2026-01-01T00:00:00Z"),
    decode(900.0, date="2026-01-01T00:00:00Z"),
    decode(1000.0),
    decode(3000.0, num_tokens=4),
    decode(9000.0, num_tokens=512, commit="of-no-row"),
    peer("torch_eager", 5000.0),
    peer("torch_grouped_mm", 4000.0),
    peer("llama.cpp_q8_0", 2000.0),
    decode(1.0, model="gpt-oss-20b"),
    decode(1.0, path="classical"),
    peer("warpring_grouped_packed", 1.0),
    decode(1.0, gpu="H200"),
]


def test_layer_shows_the_newest_record_and_its_factor_over_the_fastest_torch_form() -> None:
    lines = cores_layer("qwen3-30b-a3b")(RECORDS).splitlines()
    assert lines[5] == "| mxfp8 | 1000 (4.00 x) | - | 3000 | - | - | 75 % |"
    assert lines[6] == "| mxfp4 | - | - | - | - | - | not measured |"
    assert lines[8].startswith("| torch_eager | 5000 (0.80 x) |")
    assert lines[9].startswith("| torch_grouped_mm | 4000 (1.00 x) |")
    assert lines[10].startswith("| llama.cpp_q8_0 | 2000 (2.00 x) |")
    assert "Measured on Some CPU (2 cores);" in lines[12]
    assert "of-no-row" not in lines[12], "a batch that is not shown"
    assert len(lines) == 13


def test_end_to_end_is_sorted_and_compared_with_transformers() -> None:
    def whole(rate: float, **fields: Any) -> dict[str, Any]:
        return {**COMMON, "bench": "end_to_end", "tokens_per_s": rate, "format": "bf16"} | fields

    records = [
        whole(50.0, impl="warpring", path="cores", format="mxfp8"),
        whole(20.0, impl="transformers"),
        whole(9999.0, impl="warpring", path="warp", gpu="H200"),
    ]
    lines = cores_end_to_end(records).splitlines()
    assert lines[2:4] == ["| transformers | 20.0 | 1.00 x |", "| mxfp8 | 50.0 | 2.50 x |"]
