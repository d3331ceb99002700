"""Tables of expert-parallel records: the right record at each point, and gaps and failures said as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ep_records import ep_record, nccl_record

from warpring.bench.ep_bar import ASKED, limit_us
from warpring.bench.ep_points import ABLATION_TOKENS, Key, key_of, layer_of, points
from warpring.bench.ep_tables import ablation_rows
from warpring.bench.markdown import NOT_MEASURED
from warpring.bench.records import Record, append
from warpring.bench.tables import TABLES, main

ROOT = Path(__file__).parents[2]


def rows(name: str, records: list[Record]) -> list[list[str]]:
    """Cells of a table's rows."""
    lines = [line for line in TABLES[name](records).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def asked(records: list[Record], words: str) -> list[str]:
    """The row of the demand whose text begins so."""
    (row,) = [row for row in rows("ep-asked", records) if row[0].startswith(words)]
    return row[1:]


def test_documents_show_every_table() -> None:
    text = "".join(path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "performance.md"))
    for name in ("ep", "ep-asked", "ep-bar", "ep-ablation"):
        assert f"<!-- table:{name} -->" in text


@pytest.mark.parametrize(
    ("format", "tokens", "limit"),
    [
        ("fp8_block", 1, 115.0), ("fp8_block", 8, 115.0), ("fp8_block", 16, 120.0), ("fp8_block", 32, 120.0),
        ("fp8_block", 64, 107.0), ("fp8_block", 128, 107.0), ("fp8_block", 256, 112.0),
        ("mxfp4", 8, 115.0), ("mxfp4", 16, 120.0), ("mxfp4", 256, 120.0),
    ],
)  # fmt: skip
def test_limit_over_a_floor_of_100(format: str, tokens: int, limit: float) -> None:
    assert limit_us(format, tokens, 100.0) == pytest.approx(limit)


def test_knob_that_was_turned_makes_another_point() -> None:
    shipped = ep_record()
    turned = ep_record(knob="comm_sms", comm_sms=8, p50_us=200.0)
    slots = ep_record(knob="num_slots", ring_blocks=64)
    streams = ep_record(knob="partition", note="streams")
    found = points([shipped, turned, slots, streams])
    base = Key("deepseek-v4-flash", "fp8_block", 8)
    assert found[base] is shipped
    assert {(key.knob, key.value) for key in found} == {
        ("", None), ("comm_sms", 8), ("num_slots", 64), ("partition", "streams"),
    }  # fmt: skip
    assert key_of(ep_record(knob="num_slots+block_m")).value is None


def test_points_are_the_newest_even_ones_of_two_ranks_on_the_last_gpu() -> None:
    new = ep_record(date="2026-06-01T00:00:00Z", p50_us=240.0)
    others = [
        ep_record(),
        ep_record(num_ranks=4, experts_per_rank=64),
        ep_record(routing="zipf"),
        ep_record(gpu="GPU W", date="2026-04-01T00:00:00Z"),
        {name: value for name, value in ep_record().items() if name != "gpu"},
    ]
    assert list(points([new, *others]).values()) == [new]
    old = {name: value for name, value in new.items() if name not in ("asked_skew", "knob")}
    assert key_of(old) == key_of(new)


def test_layers_of_the_bar_have_shapes() -> None:
    whole, part = layer_of("glm-5.2"), layer_of("glm-5.2-ep8")
    assert whole is not None
    assert part is not None
    assert (whole.num_experts, part.num_experts, part.hidden) == (256, 64, whole.hidden)
    assert layer_of("h64xi64xe8xk2") is None


def test_bar_gives_the_time_above_the_floor_the_limit_and_rivals() -> None:
    records = [
        ep_record(),
        ep_record(impl="shared", p50_us=300.0),
        nccl_record(p50_us=1000.0),
        ep_record(impl="flashinfer_pull", p50_us=277.0),
        ep_record(tokens=16, p50_us=440.0, weight_floor_us=408.0),
    ]
    found = {row[3]: row for row in rows("ep-bar", records) if row[:2] == ["deepseek-v4-flash", "fp8_block"]}
    assert found["8"][2:] == [
        "128", "8", "250.0", "238.0", "+12.0", "253.0", "met", "20.0", "4100",
        "300.0 (1.20 x)", "1000.0 (4.00 x)", "277.0 (1.11 x), flashinfer_pull fp8_block",
    ]  # fmt: skip
    assert found["16"][4:9] == ["440.0", "408.0", "+32.0", "428.0", "missed by 3 %"]
    assert found["16"][11:] == ["-", "-", "-"]
    assert found["32"][4] == NOT_MEASURED


def test_floor_is_the_links_where_that_takes_longer() -> None:
    (row,) = [row for row in rows("ep-bar", [ep_record(wire_floor_us=240.0)]) if row[3] == "8"]
    assert row[5] == "240.0"


def test_layer_without_any_record_takes_one_row() -> None:
    found = [row for row in rows("ep-bar", [ep_record()]) if row[0] == "glm-5.2"]
    assert [row[1:5] for row in found] == [[f, "128", "1 to 256", NOT_MEASURED] for f in ("fp8_block", "mxfp4")]


def test_failed_point_says_why_and_meets_nothing() -> None:
    failed = ep_record(p50_us=None, failed="rank 1 | is late\nby 300 s " + "x" * 100)
    (row,) = [row for row in rows("ep-bar", [failed, ep_record(impl="shared")]) if row[3] == "8"]
    assert row[4] == "failed"
    assert row[8].startswith("rank 1 / is late by 300 s x")
    assert row[8].endswith("…")
    assert asked([failed], "FP8 weights, T ≤ 8") == [
        "0 of 1, 15 not measured",
        "deepseek-v4-flash fp8_block, T = 8: failed",
    ]
    assert rows("ep", [failed])[1][1] == "failed"
    assert asked([failed, ep_record(impl="shared")], "never slower")[0] == NOT_MEASURED


def test_each_demand_is_checked_at_its_points() -> None:
    flash = "deepseek-v4-flash"
    records = [
        ep_record(),
        ep_record(tokens=16, p50_us=500.0, weight_floor_us=408.0),
        ep_record(impl="shared", p50_us=300.0),
        ep_record(tokens=16, impl="shared", p50_us=490.0),
        nccl_record(p50_us=1000.0),
        ep_record(impl="flashinfer_pull", p50_us=249.0),
        ep_record(activation="bf16", p50_us=275.0, cosine_min=0.99985),
        ep_record(format="mxfp4", p50_us=141.0, weight_floor_us=126.0),
        ep_record(format="mxfp4", p50_us=150.0, weight_floor_us=126.0, shared_expert="fused"),
    ]
    assert asked(records, "FP8 weights, T ≤ 8") == [
        "1 of 1, 15 not measured",
        f"{flash} fp8_block, T = 8: 250.0 µs, 253.0 allowed",
    ]
    assert asked(records, "FP8 weights, T = 16")[0] == "0 of 1, 7 not measured"
    assert asked(records, "FP8 weights, T = 64") == [NOT_MEASURED, "-"]
    assert asked(records, "FP8 weights: faster") == ["0 of 1", f"{flash} fp8_block, T = 8: 250.0 µs, 249.0 allowed"]
    assert asked(records, "MXFP4 weights, T ≤ 8")[0] == "1 of 1, 15 not measured"
    assert asked(records, "16-bit activations: 1.10")[0] == "1 of 1"
    assert asked(records, "16-bit activations: cosine") == ["0 of 1", f"{flash} fp8_block, T = 8: 0.999850"]
    assert asked(records, "never slower")[0] == "1 of 2"
    # 300 / 250 and 490 / 500
    assert asked(records, "these take") == ["0 of 1", "1.09 x on average of 2 points"]
    assert asked(records, "NCCL's")[0] == "2 of 2"
    # 25.2 MB at 4.5 TB/s are 5.6 us; 9 us were added, 8.6 are allowed.
    assert asked(records, "fused shared expert") == ["0 of 1", f"{flash} mxfp4, T = 8: +9.0 µs for bytes of 5.6 µs"]


def test_every_demand_can_be_met() -> None:
    """A layer that takes its floor, beside slow rivals, meets all of them."""
    records: list[Record] = []
    for format, floor in (("fp8_block", 238.0), ("mxfp4", 126.0)):
        for model in ("deepseek-v4-flash", "glm-5.2", "deepseek-v4-flash-ep8", "glm-5.2-ep8"):
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                at: dict[str, Any] = {"model": model, "tokens": tokens, "weight_floor_us": floor}
                ours: dict[str, Any] = {**at, "format": format, "p50_us": floor}
                rival: dict[str, Any] = {**at, "format": format, "p50_us": 400.0}
                records += [ep_record(**ours), ep_record(**rival, impl="shared")]
                records += [ep_record(**ours, activation="bf16", cosine_min=0.99999)]
                records += [ep_record(**ours, shared_expert="fused"), nccl_record(**at, p50_us=900.0)]
                records += [ep_record(**rival, impl="flashinfer_push")]
    for row in rows("ep-asked", records):
        met, total = row[1].split(" of ")
        assert met == total, row
    assert len(rows("ep-asked", records)) == len(ASKED)


def test_overview_has_times_floors_and_the_range_of_factors() -> None:
    records = [
        ep_record(),
        ep_record(impl="shared", p50_us=300.0),
        ep_record(format="mxfp4", p50_us=150.0, weight_floor_us=126.4),
        ep_record(format="mxfp4", impl="shared", p50_us=225.0),
        nccl_record(p50_us=1000.0),
    ]
    found = {row[0]: row[1:] for row in rows("ep", records)}
    assert found["8"] == ["250.0 (238.0)", "150.0 (126.4)", NOT_MEASURED, NOT_MEASURED, "1.20 to 1.50", "4.00 to 6.67"]
    assert found["1"] == [NOT_MEASURED] * 4 + ["-", "-"]


def test_ablation_shows_each_value_against_the_layer_as_shipped() -> None:
    def rec(p50_us: float | None = 150.0, **changed: Any) -> Record:
        return ep_record(format="mxfp4", p50_us=p50_us, **changed)

    records = [
        rec(),
        rec(knob="comm_sms", comm_sms=8, p50_us=147.0),
        rec(knob="block_m", block_m=64, p50_us=165.0),
        rec(knob="num_slots", ring_blocks=16, p50_us=None, failed="too few"),
        rec(impl="shared", p50_us=180.0),
        rec(asked_skew=1.5, p50_us=210.0),
        rec(asked_skew=1.5, impl="shared", p50_us=240.0),
        rec(shared_expert="separate", p50_us=300.0),
    ]
    column = 2 + ABLATION_TOKENS.index(8)
    found = {(row[0], row[1]): row[column] for row in rows("ep-ablation", records)}
    assert len(found) == len(list(ablation_rows()))
    assert found["-", "as shipped"] == "150.0"
    assert found["communication SMs", "8"] == "147.0 (-2.0 %)"
    assert found["communication SMs", "16"] == NOT_MEASURED
    assert found["tokens a block (BM)", "64"] == "165.0 (+10.0 %)"
    assert found["ring blocks", "16"] == "failed"
    assert found["overlap", "off: role after role, all SMs"] == "180.0 (+20.0 %)"
    assert found["skew", "1.5"] == "210.0 (+40.0 %)"
    assert found["skew, overlap off", "1.5"] == "240.0 (+60.0 %)"
    assert found["shared expert", "a layer of its own"] == "300.0 (+100.0 %)"


def test_plots_are_shown_where_they_can_be_drawn() -> None:
    shown = "](img/ep-deepseek-v4-flash.svg)"
    assert shown in TABLES["ep-bar"]([ep_record()])
    assert shown not in TABLES["ep-bar"]([ep_record(p50_us=None, failed="late")])
    turned = ep_record(format="mxfp4", knob="comm_sms", comm_sms=8)
    assert "](img/ep-ablation.svg)" not in TABLES["ep-ablation"]([turned])
    assert "](img/ep-ablation.svg)" in TABLES["ep-ablation"]([turned, ep_record(format="mxfp4")])


def test_command_writes_the_tables_from_a_file_of_records(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "performance.md"
    page.write_text("".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in ("ep-bar", "ep-ablation")))
    append(tmp_path / "bench" / "results" / "expert_parallel.jsonl", ep_record(p50_us=251.7))
    assert main(["--root", str(tmp_path)]) == 0
    assert "251.7" in page.read_text()
    assert main(["--root", str(tmp_path), "--check"]) == 0
