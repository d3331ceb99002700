"""The accuracy report: its arithmetic, its bounds from both sides, and what it finds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from warpring.activation import gpt_oss_swiglu
from warpring.errors import ArgumentError
from warpring.formats import FORMATS
from warpring.layout import pack_experts
from warpring.reference import moe_exact, moe_reference
from warpring.verify import (
    BATCHES,
    MAX_ABS_DIFF,
    MAX_RMS_REL_ERROR,
    MIN_COSINE,
    SYNTHETIC_RMS,
    Accuracy,
    Inputs,
    Result,
    accuracy,
    compare,
    promises_bounds,
    report,
    synthetic_inputs,
    worst,
)

SMALL = {"hidden": 96, "intermediate": 64, "num_experts": 6, "topk": 3}


def test_equal_outputs_have_no_error() -> None:
    y = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    found = compare(y, y)
    assert found.cosine_min == pytest.approx(1, abs=1e-12)
    assert (found.max_abs_diff, found.rms_rel_error) == (0, 0)
    assert found.output_max == float(y.abs().max())


def test_each_figure_is_what_its_name_says() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    y = torch.tensor([[3.0, 4.0], [1.0, 2.0]])
    found = compare(y, exact)
    assert found.cosine_min == pytest.approx(4 / (5**0.5 * 2))
    assert found.max_abs_diff == 1
    assert found.rms_rel_error == pytest.approx(1 / 29**0.5)
    assert found.output_max == 4


def test_cosine_is_the_worst_tokens_not_the_mean() -> None:
    exact = torch.ones(64, 8)
    y = exact.clone()
    y[63] *= -1
    assert compare(y, exact).cosine_min == pytest.approx(-1)


def test_token_without_experts_must_be_zero() -> None:
    exact = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert compare(exact, exact).cosine_min == pytest.approx(1)
    y = torch.tensor([[1.0, 1.0], [1e-9, 0.0]])
    assert compare(y, exact).cosine_min == -1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_or_inf_in_the_output_meets_no_bound(bad: float) -> None:
    exact = torch.full((3, 8), 0.25)
    y = exact.clone()
    y[1, 5] = bad
    found = compare(y, exact)
    assert not found.cosine_met
    assert not found.abs_diff_met
    assert not found.rms_met


def test_one_nan_among_layers_is_the_worst() -> None:
    fine = Accuracy(1.0, 0.0, 0.0, 0.25)
    found = worst([fine, Accuracy(math.nan, math.nan, math.nan, 0.25), fine])
    assert math.isnan(found.cosine_min)
    assert math.isnan(found.max_abs_diff)
    assert math.isnan(found.rms_rel_error)


def test_worst_takes_each_figure_from_where_it_is_worst() -> None:
    found = worst([Accuracy(0.9, 0.1, 0.5, 3.0), Accuracy(0.8, 0.2, 0.4, 2.0)])
    assert found == Accuracy(0.8, 0.2, 0.5, 3.0)


@pytest.mark.parametrize("exact", [torch.zeros(2, 4), torch.full((2, 4), math.nan), torch.ones(0, 4), torch.ones(2, 3)])
def test_no_error_is_relative_to_nothing(exact: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="compare: "):
        compare(torch.ones(exact.shape[0], 4), exact)


def make_result(found: Accuracy, path: str = "warp", hidden: int = 2048) -> Result:
    bounded = promises_bounds(path, torch.device("cpu"))
    return Result("synthetic", "m", hidden, "mxfp8", path, 1, found, found, 1.0, 1.0, bounded)


def test_bounds_are_the_published_ones_and_hold_on_one_side_only() -> None:
    assert (MIN_COSINE, f"{MAX_ABS_DIFF:.6f}") == (0.999996, "0.001953")
    met = Accuracy(math.nextafter(MIN_COSINE, 1), MAX_ABS_DIFF, MAX_RMS_REL_ERROR, 0.49)
    assert make_result(met).bounds_met
    for miss in (
        replace(met, cosine_min=MIN_COSINE),
        replace(met, max_abs_diff=math.nextafter(MAX_ABS_DIFF, 1)),
        replace(met, rms_rel_error=math.nextafter(MAX_RMS_REL_ERROR, 1)),
    ):
        assert not make_result(miss).bounds_met
        assert not make_result(miss, path="reference").bounds_met
        assert make_result(miss, path="classical").bounds_met


def test_grouped_path_promises_bounds_where_its_own_gemms_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, other = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr("warpring.verify.has_grouped_gemms", lambda device: device == hopper)
    assert promises_bounds("grouped_packed", hopper)
    assert not promises_bounds("grouped_packed", other)
    assert not promises_bounds("grouped", hopper), "in rows the weights go through torch's GEMMs there too"
    inputs = synthetic_inputs(3, **SMALL)
    (found,) = report(inputs, paths=("grouped_packed",), formats=("bf16",), batches=(3,))
    assert not found.bounded
    monkeypatch.setattr("warpring.verify.has_grouped_gemms", lambda device: device == torch.device("cpu"))
    (found,) = report(inputs, paths=("grouped_packed",), formats=("bf16",), batches=(3,))
    assert found.bounded


def test_each_bound_applies_within_its_scope_only() -> None:
    met = Accuracy(1.0, 0.0, 0.0, 0.25)
    cosine, diff = replace(met, cosine_min=0.9999), replace(met, max_abs_diff=0.01)
    assert not make_result(cosine, hidden=2048).bounds_met
    assert make_result(cosine, hidden=2016).bounds_met
    assert replace(diff, output_max=math.nextafter(0.5, 0)).abs_diff_met is False
    assert replace(diff, output_max=0.5).abs_diff_met is None
    assert not make_result(diff, hidden=32).bounds_met


@pytest.mark.parametrize("activation", [None, gpt_oss_swiglu()])
def test_synthetic_outputs_have_the_stated_scale(activation: object) -> None:
    options = {"activation": activation} if activation else {}
    (layer,) = synthetic_inputs(64, hidden=256, intermediate=128, num_experts=8, topk=4, **options).layers
    exact = moe_exact(layer.x, layer.dense, layer.topk_idx, layer.topk_weights)
    assert float(exact.square().mean().sqrt()) == pytest.approx(SYNTHETIC_RMS, rel=0.15)
    assert float(exact.abs().max()) < 0.5
    assert layer.topk_idx.sort(1).values.diff(dim=1).min() > 0


def test_equal_seeds_give_equal_inputs() -> None:
    (one,), (two,), (other,) = (synthetic_inputs(3, **SMALL, seed=seed).layers for seed in (1, 1, 2))
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.dense.w13.data, two.dense.w13.data)
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize("format", FORMATS)
def test_reference_meets_the_published_bounds_at_a_real_layers_size(format: str) -> None:
    inputs = synthetic_inputs(2, hidden=2048, intermediate=768, num_experts=4, topk=4, seed=5)
    (found,) = report(inputs, paths=("reference",), formats=(format,), batches=(2,))
    assert found.accuracy.cosine_met
    assert found.accuracy.abs_diff_met is True
    assert found.bounds_met


def test_report_says_what_accuracy_says() -> None:
    inputs = synthetic_inputs(9, **SMALL)
    (layer,) = inputs.layers
    experts = layer.quantized("mxfp4")
    for found in report(inputs, paths=("reference", "classical"), formats=("mxfp4",), batches=(1, 9)):
        args = layer.topk_idx[: found.num_tokens], layer.topk_weights[: found.num_tokens]
        direct = accuracy(layer.x[: found.num_tokens], experts, *args, path=found.path)
        assert found.accuracy.rms_rel_error == pytest.approx(direct.rms_rel_error, rel=1e-9)
        assert found.accuracy.max_abs_diff == pytest.approx(direct.max_abs_diff, rel=1e-9)
        assert found.accuracy.cosine_min == pytest.approx(direct.cosine_min, abs=1e-12)


@pytest.mark.parametrize("path", ["classical", "grouped_packed", pytest.param("tile", marks=pytest.mark.gpu)])
def test_packed_experts_are_measured_against_the_weights_that_they_were_made_of(path: str) -> None:
    (layer,) = synthetic_inputs(9, **SMALL).to("cuda" if path == "tile" else "cpu").layers
    experts = layer.quantized("mxfp4")
    packed = pack_experts(experts)
    args = layer.topk_idx, layer.topk_weights
    rows_path = {"tile": "warp", "grouped_packed": "grouped"}.get(path, path)
    found, expected = accuracy(layer.x, packed, *args, path), accuracy(layer.x, experts, *args, rows_path)
    assert found.output_max == expected.output_max
    assert found.rms_rel_error == pytest.approx(expected.rms_rel_error, rel=1e-9 if path == rows_path else 0.5)


def test_factor_is_classical_error_over_ours() -> None:
    inputs = synthetic_inputs(16, **SMALL)
    ours, classical = report(inputs, paths=("reference", "classical"), formats=("mxfp8",), batches=(16,))
    factor = classical.accuracy.rms_rel_error / ours.accuracy.rms_rel_error
    assert ours.error_factor_vs_classical == pytest.approx(factor)
    assert classical.error_factor_vs_classical == 1
    assert factor > 5


def test_with_the_weights_rounding_counted_mxfp8_leaves_about_root_two() -> None:
    # Weights and activations are rounded alike, twice each: the classical path has twice the squared error.
    inputs = synthetic_inputs(32, hidden=256, intermediate=256, num_experts=8, topk=4)
    (found,) = report(inputs, paths=("reference",), formats=("mxfp8",), batches=(32,))
    assert found.error_factor_dense == pytest.approx(2**0.5, rel=0.1)
    assert found.accuracy_dense.rms_rel_error > 5 * found.accuracy.rms_rel_error


def test_dense_yardstick_is_the_unquantised_layer() -> None:
    inputs = synthetic_inputs(5, **SMALL)
    (layer,) = inputs.layers
    args = layer.topk_idx, layer.topk_weights
    (found,) = report(inputs, paths=("reference",), formats=("nvfp4",), batches=(5,))
    expected = compare(moe_reference(layer.x, layer.quantized("nvfp4"), *args), moe_exact(layer.x, layer.dense, *args))
    assert found.accuracy_dense == expected


def test_report_covers_every_format_path_and_batch_once() -> None:
    inputs = synthetic_inputs(4, **SMALL)
    found = list(report(inputs, paths=("reference",), batches=(1, 4)))
    keys = {(result.format, result.path, result.num_tokens) for result in found}
    assert len(found) == len(keys) == 2 * len(FORMATS)
    assert BATCHES == (1, 2, 4, 8, 16, 32, 64)


def test_several_layers_count_by_the_worst() -> None:
    first, second = (synthetic_inputs(4, **SMALL, seed=seed).layers[0] for seed in (3, 4))
    options = {"paths": ("reference",), "formats": ("bf16",), "batches": (4,)}
    (one,) = report(Inputs("recorded", "m", (first,)), **options)
    (two,) = report(Inputs("recorded", "m", (second,)), **options)
    (both,) = report(Inputs("recorded", "m", (first, second)), **options)
    assert both.accuracy == worst([one.accuracy, two.accuracy])


@pytest.mark.parametrize("batches", [(), (0,), (1, 5)])
def test_batches_beyond_the_inputs_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="batches must be 1 to 4"):
        list(report(synthetic_inputs(4, **SMALL), paths=("reference",), batches=batches))


@pytest.mark.gpu
def test_warp_meets_the_published_bounds_in_every_format_and_batch() -> None:
    inputs = synthetic_inputs(64, hidden=2048, intermediate=768, num_experts=16, topk=8).to("cuda")
    missed = [result for result in report(inputs, paths=("warp",)) if not result.bounds_met]
    assert not missed


@pytest.mark.gpu
def test_grouped_path_on_packed_weights_meets_the_published_bounds_on_hopper() -> None:
    """In blocks of either size: 400 tokens give experts 200 rows each."""
    if not promises_bounds("grouped_packed", torch.device("cuda")):
        pytest.skip("no grouped GEMMs of our own")
    inputs = synthetic_inputs(400, hidden=2048, intermediate=768, num_experts=16, topk=8).to("cuda")
    results = list(report(inputs, paths=("grouped_packed",), batches=(1, 64, 400)))
    assert len(results) == 3 * len(FORMATS)
    assert [result for result in results if not result.bounds_met] == []
