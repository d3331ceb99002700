"""The bar's rows and the tables of comparisons: what is met, what is missed, what was not measured."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring.bench import bar, read_peak
from warpring.bench.adapters import ADAPTERS
from warpring.bench.bar import ROWS, BarRow, groups, missed_rows, most_us
from warpring.bench.compared import PEER_LAYERS
from warpring.bench.inputs import make_routing
from warpring.bench.markdown import NOT_MEASURED
from warpring.bench.records import FORMATS, Record, load, record
from warpring.bench.shapes import parse_shape
from warpring.bench.tables import TABLES, read_results
from warpring.kernels.tile import Sizes, config_for

ROOT = Path(__file__).parents[2]

GPU: dict[str, Any] = {"gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "commit": "abc", "date": "2026-05-01T10:00:00Z"}


def on_gpu(rec: Record) -> Record:
    return {name: value for name, value in (rec | GPU).items() if name not in ("cpu", "python")}


def decode(path: str | None = "tile", impl: str = "warpring", **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "format": "mxfp8", "num_tokens": 1, "topk": 8, "routing": "uniform", "p50_us": 10.0,
        "unique_bytes": 40_000_000, "read_peak_gbs": 4000.0, "fraction_of_peak": 1.0,
    }  # fmt: skip
    named = {"impl": impl} if path is None else {"path": path}
    return on_gpu(record("decode", device="cpu", **(fields | named | changed)))


def profile(kernel: str, num_tokens: int, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "format": "mxfp8", "path": "warp", "num_tokens": num_tokens, "kernel": kernel,
        "p50_us": 12.5, "dram_gbs": 3200.0, "fraction_of_peak": 0.71, "registers": 96, "smem_bytes": 66560,
        "spill_bytes": 0, "stalls": "long_scoreboard 60 %, wait 7 %", "issue_share": 0.3, "occupancy": 0.5,
    }  # fmt: skip
    return on_gpu(record("profile", device="cpu", **(fields | changed)))


def end_to_end(name: str, rate: float, batch: int = 1, context: int = 1024, **changed: Any) -> Record:
    named = {"impl": name} if name.startswith("transformers") else {"path": name}
    fields = {"model": "qwen3-30b-a3b", "format": "mxfp8", "batch": batch, "context": context, "tokens_per_s": rate}
    return on_gpu(record("end_to_end", device="cpu", **(fields | named | changed)))


def rows(name: str, records: list[Record]) -> list[list[str]]:
    lines = [line for line in TABLES[name](records).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_row_of_the_bar_can_be_measured() -> None:
    for row in ROWS:
        parse_shape(row.model)
        assert row.format in FORMATS
        assert row.routing in ("uniform", "zipf", "recorded")
    assert len({(row.model, row.format, row.routing, row.num_tokens) for row in ROWS}) == len(ROWS)
    assert sum(map(len, groups().values())) == len(ROWS)


def test_stricter_of_time_and_share_counts() -> None:
    rec = {"unique_bytes": 40_000_000, "read_peak_gbs": 4000.0}  # a floor of 10 us
    assert most_us(BarRow("m", "bf16", 1, most_us=11.0, least_share=0.8), rec) == 11.0
    assert most_us(BarRow("m", "bf16", 1, most_us=13.0, least_share=0.8), rec) == pytest.approx(12.5)
    assert most_us(BarRow("m", "bf16", 1, most_us=13.0), {"unique_bytes": 1}) == 13.0
    assert most_us(BarRow("m", "bf16", 1), rec) is None


@pytest.mark.parametrize(("p50_us", "verdict"), [(10.9, "met"), (10.91, "missed by 0 %"), (21.8, "missed by 100 %")])
def test_row_is_met_up_to_its_limit_and_missed_beyond(p50_us: float, verdict: str) -> None:
    assert rows("bar", [decode(p50_us=p50_us)])[0][4:10] == ["tile", f"{p50_us:.1f}", "100 %", "10.9", verdict, "abc"]


def test_fastest_path_of_ours_stands_beside_the_fastest_peer_on_as_many_bytes() -> None:
    records = [
        decode("warp", p50_us=9.0),
        decode("tile", p50_us=8.0),
        decode("classical", p50_us=1.0),
        decode(None, "vllm_triton", format="fp8_block", p50_us=23.0),
        decode(None, "flashinfer_cutlass", format="fp8_block", p50_us=20.0),
        decode(None, "vllm_triton", format="bf16", p50_us=5.0),
        decode(None, "unheard-of", format="fp8_block", p50_us=1.0),
    ]
    first = rows("bar", records)[0]
    assert (first[4], first[5]) == ("tile", "8.0")
    assert first[-1] == "20.0 (flashinfer_cutlass, fp8_block)"


def test_row_without_a_bar_has_no_verdict_and_row_without_a_record_is_not_measured() -> None:
    found = {tuple(row[:4]): row for row in rows("bar", [decode(routing="zipf")])}
    assert found["qwen3-30b-a3b", "mxfp8", "zipf", "1"][7:9] == ["-", "-"]
    assert found["qwen3-30b-a3b", "mxfp8", "uniform", "1"][5:10] == [NOT_MEASURED, "-", "10.9", NOT_MEASURED, "-"]


def test_missed_rows_stand_with_their_distance_from_the_floor_their_history_and_what_bounds_them() -> None:
    older = decode(p50_us=21.0) | {"commit": "0123456789ab", "date": "2026-04-01T00:00:00Z"}
    records = [
        decode("warp", p50_us=12.0),  # 10.9 us are allowed; the floor is 10
        decode(p50_us=12.5),
        older,
        decode(num_tokens=2, p50_us=11.3),  # the stricter of 19.1 us and 10 / 0.88
        decode(num_tokens=4, p50_us=30.0, unique_bytes=4000, read_peak_gbs=4e-1),
        profile("moe_gate_up_3d_batched", 1),
        profile("moe_down_3d_batched", 1, fraction_of_peak=0.5, issue_share=0.25),
        profile("moe_gate_up_3d_batched", 8),
    ]
    assert rows("bar-missed", records) == [
        [
            *("qwen3-30b-a3b", "mxfp8", "uniform", "1", "warp", "abc", "12.0", "10.9", "2.0", "0.9"),
            "21.0 (0123456), 12.5 (abc)",
            "71 %, 30 %, long_scoreboard 60 %; 50 %, 25 %, long_scoreboard 60 %",
        ],
        [
            *("qwen3-30b-a3b", "mxfp8", "uniform", "4", "tile", "abc", "30.0", "11.0", "20.0", "1.0"),
            "30.0 (abc)",
            NOT_MEASURED,
        ],
    ]


def test_row_of_a_time_alone_is_missed_without_a_read_peak_and_nothing_missed_is_an_empty_table() -> None:
    rec = decode(model="h2048xi512xe256xk8", format="fp8_block", p50_us=8.01)
    del rec["read_peak_gbs"]
    assert rows("bar-missed", [rec])[0][6:10] == ["8.0", "8.0", "-", "-"]
    assert rows("bar-missed", [rec | {"p50_us": 8.0}]) == [["-"] * 12]


def test_every_row_of_the_bar_has_a_record_and_each_missed_layer_is_accounted_for() -> None:
    records = read_results(ROOT)
    assert [row[:4] for row in rows("bar", records) if row[5] == NOT_MEASURED] == []
    page = (ROOT / "docs" / "kernels.md").read_text()
    section = page.partition("## Rows of the bar that are missed\n")[2].partition("\n## ")[0]
    for row, _ in missed_rows(records):
        assert f"**{row.model}, {row.format}.**" in section
    assert "missed" not in TABLES["end-to-end"](records) or "**A whole model**" in section


def bytes_read_more_than_once(model: str, format: str, routing: str, num_tokens: int) -> float:
    """Share of a layer's bytes that the tile path reads again, since more pairs want an expert than fit at once."""
    shape = parse_shape(model)
    sizes = Sizes(format, shape.hidden, shape.intermediate, shape.num_experts, shape.topk)
    at_once = config_for(sizes, num_tokens * shape.topk).max_columns(sizes)
    wanted, read = 0, 0
    for seed in range(16):  # those of the bench
        ids = make_routing(shape, num_tokens, routing, seed=seed).topk_idx
        pairs = torch.bincount(ids[ids >= 0])
        wanted += int((pairs > 0).sum())
        read += int((-(-pairs // at_once)).sum())
    return read / wanted - 1


def test_tile_reads_hardly_a_byte_twice_where_the_bar_sets_a_limit() -> None:
    limited = [row for row in ROWS if row.routing == "uniform"]
    again = [bytes_read_more_than_once(row.model, row.format, row.routing, row.num_tokens) for row in limited]
    assert sum(share > 0 for share in again) == 2
    assert max(again) < 0.007
    assert 0.08 < bytes_read_more_than_once("qwen3-30b-a3b", "mxfp8", "zipf", 64) < 0.09


def test_peers_table_gives_times_and_factors_by_name() -> None:
    records = [
        decode("warp", format="bf16", p50_us=20.0),
        decode(None, "vllm_triton", format="bf16", p50_us=30.0),
        decode(None, "unheard-of", format="bf16", p50_us=1.0),
    ]
    found = {tuple(row[:3]): row[3:] for row in rows("peers", records)}
    here = dict(zip(("ours", *ADAPTERS), found["qwen3-30b-a3b", "bf16", "1"], strict=True))
    assert here["ours"] == "20.0 (warp)"
    assert here["vllm_triton"] == "30.0 (1.50 x)"
    assert here["sglang_triton"] == "-"
    assert len(found) == 7 * len(PEER_LAYERS)


def test_peers_stand_beside_ours_of_their_own_run_alone() -> None:
    """A newer run of ours alone, at the same commit or another, says nothing of a peer that it did not time."""
    old: dict[str, Any] = {"format": "bf16", "read_peak_gbs": 4000.0}
    later: dict[str, Any] = {"date": "2026-06-01T10:00:00Z"}
    records = [
        decode("warp", **old, p50_us=20.0),
        decode("tile", **old, p50_us=21.0),
        decode(None, "vllm_triton", **old, p50_us=30.0),
        decode(None, "sglang_triton", format="bf16", read_peak_gbs=3999.9, p50_us=5.0)
        | {"date": "2020-01-01T00:00:00Z"},
        decode("tile", format="bf16", read_peak_gbs=4000.1, p50_us=10.0) | later,
        decode("tile", **old, p50_us=10.0) | later | {"commit": "def"},
        decode(None, "transformers_grouped_mm", **old, p50_us=40.0),
        decode(None, "transformers_grouped_mm", **old, p50_us=10.0) | later | {"commit": "def"},  # fewer peers
        decode("warp", **old, num_tokens=2),
    ]
    found = {tuple(row[:3]): row[3:] for row in rows("peers", records)}
    here = dict(zip(("ours", *ADAPTERS), found["qwen3-30b-a3b", "bf16", "1"], strict=True))
    assert here["ours"] == "20.0 (warp)"
    assert here["vllm_triton"] == "30.0 (1.50 x)"
    assert here["transformers_grouped_mm"] == "40.0 (2.00 x)"
    assert here["sglang_triton"] == "-"
    assert found["qwen3-30b-a3b", "bf16", "2"] == [NOT_MEASURED, *["-"] * len(ADAPTERS)]
    assert "def" not in TABLES["peers"](records).split("Measured on")[1]


def test_whole_model_is_compared_with_the_classical_path_in_every_bucket() -> None:
    shares: dict[str, Any] = {"experts_share": 0.5, "attention_share": 0.2, "other_share": 0.3}
    changed: dict[str, Any] = shares | {"experts_share": 0.1}
    records = [
        end_to_end("auto", 184.0, **shares),
        end_to_end("classical", 100.0),
        end_to_end("transformers_batched_mm", 50.0),
        end_to_end("auto", 183.0, context=4096, **shares),
        end_to_end("warp", 184.0, context=4096, **changed),
        end_to_end("classical", 100.0, context=4096),
        end_to_end("auto", 183.0, batch=8),
        end_to_end("classical", 100.0, batch=8),
        end_to_end("warp", 99.0, batch=32),
        end_to_end("classical", 100.0, batch=32),
    ]
    found = {(row[0], row[1]): row[2:] for row in rows("end-to-end", records)}
    rates = ["184", NOT_MEASURED, "100", NOT_MEASURED, "50"]
    assert found["1", "1024"] == [*rates, "1.84", "met", "1.84", "met", "50 %", "20 %", "30 %"]
    # Another layout's rate makes up for nothing that "auto" misses, and is told apart from it.
    assert found["1", "4096"][5:] == ["1.83", "missed by 0.5 % of 1.84", "1.84", "met", "50 %", "20 %", "30 %"]
    assert found["8", "1024"][5:7] == ["1.83", "missed by 0.5 % of 1.84"]
    assert found["32", "1024"][5:9] == ["-", "-", "0.99", "missed by 1.0 % of 1.0"]
    assert found["8", "4096"][:5] == [NOT_MEASURED] * 5
    assert len(found) == 20
    # A step's time counts where there is one: rounded, this rate would do.
    exact = [end_to_end("auto", 184.0, p50_us=1e6 / 183.9), end_to_end("classical", 100.0, p50_us=1e4)]
    assert rows("end-to-end", exact)[0][7:9] == ["1.84", "missed by 0.1 % of 1.84"]


def test_tile_times_are_fitted_below_the_largest_batch_which_stands_apart() -> None:
    """Floors of 10, 20 and 40 us, 3 us + 1.5 floor; then 50 us, which take 2 more than that."""
    points = [(1, 10, 18.0), (8, 20, 33.0), (32, 40, 63.0), (64, 50, 80.0)]
    records = [decode(num_tokens=b, unique_bytes=4_000_000 * floor, p50_us=p50_us) for b, floor, p50_us in points]
    older = decode(num_tokens=8, p50_us=99.0) | {"date": "2020-01-01T00:00:00Z"}
    others = [decode("warp", num_tokens=8, p50_us=9.0), decode(routing="zipf"), decode(num_tokens=3, p50_us=9.0), older]
    lines = {tuple(row[:2]): row[2:] for row in rows("fitted", others + records)}
    assert lines["qwen3-30b-a3b", "mxfp8"] == ["1 to 32", "3.0", "1.50", "0.0", "2.0"]
    assert lines["qwen3-30b-a3b", "bf16"] == [NOT_MEASURED, *["-"] * 4]
    lines = {tuple(row[:2]): row[2:] for row in rows("fitted", records[:1] + records[2:3])}
    assert lines["qwen3-30b-a3b", "mxfp8"] == ["1 to 32", "3.0", "1.50", "0.0", "-"]
    assert rows("fitted", records[2:])[0][2] == NOT_MEASURED


def test_kernels_stand_in_order_with_the_newest_profile_of_each() -> None:
    newer = profile("moe_down_3d_batched", 1) | {"date": "2026-06-01T00:00:00Z", "p50_us": 7.0}
    other = profile("moe_gate_up_3d_batched", 1, model="gpt-oss-120b")
    found = rows("ncu", [profile("moe_gate_up_3d_batched", 8), profile("moe_down_3d_batched", 1), newer, other])
    assert [(row[0], row[3], row[4], row[5]) for row in found] == [
        ("gpt-oss-120b", "1", "moe_gate_up_3d_batched", "12.5"),
        ("qwen3-30b-a3b", "1", "moe_down_3d_batched", "7.0"),
        ("qwen3-30b-a3b", "8", "moe_gate_up_3d_batched", "12.5"),
    ]
    assert found[1][6:] == ["3.20", "71 %", "30 %", "50 %", "96", "65.0", "0", "long_scoreboard 60 %, wait 7 %"]


def test_decode_script_measures_the_rows_of_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)
    tiny = ("h64xi32xe6xk2", "mxfp8")
    monkeypatch.setattr(bar, "ROWS", (BarRow(*tiny, 1), BarRow(*tiny, 3), BarRow(*tiny, 2, "recorded")))
    output = tmp_path / "decode.jsonl"
    argv = ["decode.py", "--bar", "--paths", "reference", "--repeats", "1", "--device", "cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "bench" / "decode.py"), run_name="__main__")
    assert [(r["num_tokens"], r["routing"]) for r in load(output)] == [(1, "uniform"), (3, "uniform"), (2, "recorded")]
