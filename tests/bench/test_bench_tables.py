"""Tables and plots: what the records say, in the documents; and a test that the documents say it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from warpring import ArgumentError
from warpring.bench import plots
from warpring.bench.markdown import provenance
from warpring.bench.plots import check_plot_path, plot_decode
from warpring.bench.records import FORMATS, Record, append, record
from warpring.bench.tables import BATCHES, NOT_MEASURED, TABLES, documents, main, render, stale

ROOT = Path(__file__).parents[2]
GPU: dict[str, Any] = {"gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "commit": "abc", "date": "2026-05-01T10:00:00Z"}


def decode(path: str = "warp", num_tokens: int = 1, p50_us: float = 10.0, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "format": "mxfp8", "path": path, "num_tokens": num_tokens, "topk": 8,
        "routing": "uniform", "unique_bytes": 40_000_000, "requested_bytes": 44_000_000, "read_peak_gbs": 4500.0,
        "fraction_of_peak": 0.8889, "p10_us": p50_us - 1, "p50_us": p50_us, "p90_us": p50_us + 1, "launches": 2,
    }  # fmt: skip
    rec = record("decode", device="cpu", **(fields | GPU | changed))
    return {name: value for name, value in rec.items() if name not in ("cpu", "python")}


def accuracy(path: str, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "model": "tiny-qwen3-moe", "format": "mxfp8", "path": path, "num_tokens": 1, "inputs": "recorded",
        "cosine_min": 0.9999, "max_abs_diff": 0.01, "rms_rel_error": 0.002,
    }  # fmt: skip
    return record("accuracy", device="cpu", **(fields | changed))


def perplexity(format: str, value: float) -> Record:
    fields: dict[str, Any] = {"checkpoint": "tiny", "format": format, "held_out_tokens": 1000, "perplexity": value}
    return record("perplexity", device="cpu", **fields)


def rows(table: str) -> list[list[str]]:
    """Cells of the rows below the header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_documents_hold_what_the_records_say() -> None:
    names = [str(path.relative_to(ROOT)) for path in stale(ROOT)]
    assert names == [], "run: python -m warpring.bench.tables"


def test_standard_tables_are_shown_somewhere() -> None:
    shown = "".join(path.read_text() for path in documents(ROOT))
    for name in ("decode", "decode-mxfp8", "decode-bf16", "decode-mxfp4"):
        assert f"<!-- table:{name} -->" in shown


@pytest.mark.parametrize("name", sorted(set(TABLES) - {"records"}))  # which is made of no records
def test_point_without_a_record_reads_not_measured(name: str) -> None:
    table = TABLES[name]([])
    assert rows(table)
    assert all(NOT_MEASURED in row for row in rows(table))
    assert "Measured on" not in table


def test_overview_has_a_row_a_batch_and_its_figures() -> None:
    table = TABLES["decode"](
        [decode(), decode("tile", p50_us=12.0), decode("classical", p50_us=30.04), decode(num_tokens=64, p50_us=123.0)]
    )
    found = {row[0]: row[1:] for row in rows(table)}
    assert list(found) == [str(batch) for batch in BATCHES]
    assert found["1"][:3] == ["10.0 (89 %)", "12.0 (89 %)", "30.0"]
    assert found["64"][:2] == ["123.0 (89 %)", NOT_MEASURED]
    assert found["1"][3:] == [NOT_MEASURED] * 6
    assert "GPU X, driver 1.2, CUDA 13.0" in table
    assert "read peak 4.50 TB/s; 2026-05-01; commit abc." in table


@pytest.mark.parametrize(
    ("peaks", "words"),
    [
        ((34.4, 57.6), "34 to 58 GB/s"),
        ((33.8, 34.2), "34 GB/s"),
        ((999.4, 999.4), "999 GB/s"),
        ((1000.0, 1000.0), "1.00 TB/s"),
        ((4496.0, 4504.0), "4.50 TB/s"),
    ],
)
def test_read_peaks_below_a_terabyte_a_second_are_in_gigabytes(peaks: tuple[float, float], words: str) -> None:
    records = [decode(num_tokens=batch, read_peak_gbs=peak) for batch, peak in enumerate(peaks, start=1)]
    assert f"; read peak {words}; 2026" in provenance(records)


def test_detail_gives_rates_and_the_floor() -> None:
    table = TABLES["decode-mxfp8"]([decode()])
    assert rows(table)[0] == ["1", "warp", "10.0", "9.0 to 11.0", "4.00", "88.9 %", "4.40", "8.9", "2"]


def test_rerun_replaces_the_point_and_the_last_measured_gpu_is_shown_alone() -> None:
    later: dict[str, Any] = {"date": "2026-06-01T10:00:00Z"}
    records = [
        decode(p50_us=11.0, **later, commit="def"),
        decode(p50_us=10.0),
        decode(num_tokens=2, p50_us=20.0),
        decode(num_tokens=4, p50_us=30.0, gpu="GPU Y"),
    ]
    table = TABLES["decode"](records)
    found = {row[0]: row[1] for row in rows(table)}
    assert [found[b].split()[0] for b in ("1", "2")] == ["11.0", "20.0"]
    assert found["4"] == NOT_MEASURED
    assert "2026-05-01 to 2026-06-01; commit abc, def." in table


def test_decode_tables_leave_out_other_models_routings_peers_and_cpus() -> None:
    peer = decode(impl="peer")
    del peer["path"]
    on_cpu = record("decode", device="cpu", **{k: v for k, v in decode().items() if k not in GPU and k != "bench"})
    others = [decode(model="glm-5.2"), decode(routing="zipf"), peer, on_cpu, decode(num_tokens=3)]
    assert TABLES["decode"](others) == TABLES["decode"]([])


def test_accuracy_shows_the_worst_of_all_batches() -> None:
    records = [
        accuracy("warp", error_factor_vs_classical=3.0),
        accuracy("warp", num_tokens=64, cosine_min=0.99, max_abs_diff=0.5, error_factor_vs_classical=2.0),
        accuracy("warp", num_tokens=8, rms_rel_error=0.004),
        accuracy("classical", cosine_min=0.9, date="2020-01-01T00:00:00Z"),
        accuracy("classical", cosine_min=0.98),
    ]
    found = {(row[1], row[2]): row[3:] for row in rows(TABLES["accuracy"](records))}
    assert found["mxfp8", "warp"] == ["1 to 64", "0.9900000", "0.5", "4.00e-03", "2.00"]
    assert found["mxfp8", "classical"] == ["1", "0.9800000", "0.01", "2.00e-03", "-"]
    assert found["bf16", "warp"][0] == NOT_MEASURED


def test_accuracy_overview_puts_the_worst_of_both_paths_in_a_row_a_format() -> None:
    records = [
        accuracy("reference", error_factor_vs_classical=9.0, cosine_min=0.999),
        accuracy("reference", inputs="synthetic", model="h64xi32xe4xk2", error_factor_vs_classical=7.5),
        accuracy("classical", cosine_min=0.98, rms_rel_error=0.03),
    ]
    table = TABLES["accuracy-overview"](records)
    found = {row[0]: row[1:] for row in rows(table)}
    assert table.startswith("| format | reference: cosine, min |")
    assert found["mxfp8"] == ["0.9990000", "2.00e-03", "0.9800000", "3.00e-02", "7.50"]
    assert found["bf16"] == [NOT_MEASURED, "-", NOT_MEASURED, "-", "-"]


@pytest.mark.parametrize("name", ["accuracy", "accuracy-overview"])
def test_accuracy_on_a_gpu_replaces_that_on_a_cpu(name: str) -> None:
    on_gpu = {k: v for k, v in accuracy("warp", **GPU).items() if k not in ("cpu", "python")}
    assert TABLES[name]([accuracy("reference"), accuracy("classical"), on_gpu]) == TABLES[name]([on_gpu])


def test_perplexity_is_compared_with_bf16() -> None:
    found = {
        row[1]: row[3:] for row in rows(TABLES["perplexity"]([perplexity("bf16", 16.0), perplexity("mxfp4", 16.8)]))
    }
    assert found["bf16"] == ["1000", "16.0000", "+0.00 %"]
    assert found["mxfp4"] == ["1000", "16.8000", "+5.00 %"]
    assert set(found) == set(FORMATS)


def test_rendering_replaces_between_the_marks_only_and_settles() -> None:
    text = "before\n<!-- table:decode -->\nold\n<!-- /table:decode -->\nafter <!-- note -->\n"
    once = render(text, [decode()])
    assert once.startswith("before\n<!-- table:decode -->\n| tokens |")
    assert once.endswith("<!-- /table:decode -->\nafter <!-- note -->\n")
    assert "old" not in once
    assert render(once, [decode()]) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:speed -->\n<!-- /table:speed -->", "asks for table 'speed'"),
        ("<!-- table:decode -->\n", "1 table marks for 0 tables"),
        ("<!-- /table:decode -->\n", "1 table marks for 0 tables"),
        ("<!-- table:decode -->\n<!-- /table:accuracy -->\n", "2 table marks for 0 tables"),
        ("<!-- table:decode --><!-- /table:decode -->\n", "2 table marks for 0 tables"),
    ],
)
def test_wrong_marks_are_refused_by_document(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"page.md.*{message}"):
        render(text, [], "page.md")


def test_command_checks_then_writes_then_finds_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "performance.md"
    page.write_text("<!-- table:decode-bf16 -->\n<!-- /table:decode-bf16 -->\n")
    append(tmp_path / "bench" / "results" / "decode.jsonl", decode(format="bf16", p50_us=17.5))
    root = ["--root", str(tmp_path)]
    assert main([*root, "--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert "17.5" not in page.read_text()
    assert main(root) == 0
    assert "17.5" in page.read_text()
    assert main([*root, "--check"]) == 0


def test_plot_draws_each_path_and_its_floor(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    records = [decode(path, n, 10.0 * n) for path in ("warp", "classical") for n in (1, 2, 4)]
    for suffix in plots.SUFFIXES:
        target = tmp_path / "img" / f"decode{suffix}"
        plot_decode(records, target)
        assert target.stat().st_size > 2000
    ElementTree.parse(tmp_path / "img" / "decode.svg")
    assert (tmp_path / "img" / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_the_same_records_has_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    targets = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for target in targets:
        plot_decode([decode()], target)
    assert targets[0].read_bytes() == targets[1].read_bytes()


def test_plot_shows_the_newest_point_with_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="plots are an extra")
    drawn: list[Any] = []

    class Kept(figure_module.Figure):
        def savefig(self, *_: Any, **__: Any) -> None:
            drawn.append(self)

    monkeypatch.setattr(figure_module, "Figure", Kept)
    plot_decode([decode(p50_us=99.0, date="2020-01-01T00:00:00Z"), decode(p50_us=10.0)], tmp_path / "x.png")
    times, shares = drawn[0].axes
    assert [list(line.get_ydata()) for line in times.lines] == [[10.0], [pytest.approx(40e6 / 4500 / 1e3)]]
    assert list(shares.lines[0].get_ydata()) == [pytest.approx(88.888, abs=0.01)]


@pytest.mark.parametrize("name", ["plot.jpg", "plot", "plot.png.txt"])
def test_plot_into_an_unknown_kind_of_file_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"must end in \.png, \.svg"):
        check_plot_path(name)


def test_plot_of_no_records_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    with pytest.raises(ArgumentError, match="at least one decode record"):
        plot_decode([accuracy("warp")], tmp_path / "x.png")
