"""Plots of expert-parallel records: which curves and panels there are, and that equal records give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ep_records import ep_record, nccl_record

from warpring.bench.ep_plots import plot_knobs, plot_tokens, plotted, turned
from warpring.bench.records import Record
from warpring.errors import ArgumentError

pytest.importorskip("matplotlib", reason="plots are an extra")

FLASH = "deepseek-v4-flash"


def curves() -> list[Record]:
    records: list[Record] = []
    for tokens in (1, 8, 32):
        records += [ep_record(tokens=tokens), ep_record(tokens=tokens, impl="shared", p50_us=300.0)]
        records += [
            nccl_record(tokens=tokens, p50_us=900.0),
            ep_record(tokens=tokens, impl="flashinfer_pull", p50_us=277.0),
        ]
    return records


def knobs() -> list[Record]:
    records: list[Record] = []
    for tokens in (1, 8):
        records += [ep_record(tokens=tokens, format="mxfp4", p50_us=200.0)]
        for sms in (8, 16):
            records += [ep_record(tokens=tokens, format="mxfp4", knob="comm_sms", comm_sms=sms, p50_us=200.0 + sms)]
        records += [ep_record(tokens=tokens, format="mxfp4", asked_skew=1.5, p50_us=300.0)]
        records += [ep_record(tokens=tokens, format="mxfp4", asked_skew=1.5, impl="shared", p50_us=350.0)]
    return records


def texts(svg: Path) -> set[str]:
    """Everything that is written in a plot."""
    lines = [line.strip() for line in svg.read_text().splitlines()]
    return {line.removeprefix("<!-- ").removesuffix(" -->") for line in lines if line.startswith("<!--")}


def test_curves_are_ours_rivals_and_peers_without_what_failed() -> None:
    records = [*curves(), ep_record(tokens=64, p50_us=None, failed="late"), ep_record(model="glm-5.2")]
    found = plotted(records, FLASH)
    assert list(found) == ["fp8_block ours", "fp8_block not split", "bf16 NCCL", "fp8_block flashinfer_pull"]
    assert all(list(curve) == [1, 8, 32] for curve in found.values())
    assert plotted([], FLASH) == {}


def test_plot_of_a_model_names_its_curves_and_floor(tmp_path: Path) -> None:
    target = tmp_path / "new" / "ep.svg"
    plot_tokens(curves(), FLASH, target)
    first = target.read_text()
    plot_tokens(curves(), FLASH, target)
    assert target.read_text() == first
    assert {"fp8_block ours", "fp8_block floor W", "bf16 NCCL", "fp8_block flashinfer_pull", "32"} <= texts(target)
    assert f"One expert-parallel layer, {FLASH}, 2 x GPU X" in texts(target)


def test_point_at_its_floor_is_left_out_of_a_logarithmic_scale(tmp_path: Path) -> None:
    plot_tokens([ep_record(p50_us=238.0), ep_record(tokens=1)], FLASH, tmp_path / "ep.png")
    assert (tmp_path / "ep.png").stat().st_size > 2000


def test_knobs_are_percent_over_the_layer_as_shipped() -> None:
    panels = turned(knobs())
    assert panels["communication SMs"] == {
        tokens: {"8": pytest.approx(4.0), "16": pytest.approx(8.0)} for tokens in (1, 8)
    }
    assert panels["skew (dashed: not split)"][1] == {"1.5": pytest.approx(50.0), "not split 1.5": pytest.approx(75.0)}
    assert set(panels) == {"communication SMs", "skew (dashed: not split)"}


def test_plot_of_knobs_has_a_panel_each(tmp_path: Path) -> None:
    target = tmp_path / "knobs.svg"
    plot_knobs(knobs(), target)
    assert {"communication SMs", "skew (dashed: not split)", "T = 1", "T = 8", "1.5"} <= texts(target)


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"needs expert-parallel records of 'glm-5\.2'"):
        plot_tokens(curves(), "glm-5.2", tmp_path / "a.svg")
    with pytest.raises(ArgumentError, match="needs records of turned knobs"):
        plot_knobs([ep_record(format="mxfp4")], tmp_path / "a.svg")
    with pytest.raises(ArgumentError, match="must end in"):
        plot_knobs(knobs(), tmp_path / "a.gif")
