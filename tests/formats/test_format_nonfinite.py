"""What one NaN or Inf does: to itself in BF16 and the FP8 codes, to its whole block in 4-bit formats, never more."""

from __future__ import annotations

import math

import pytest
import torch
from format_oracle import SCALED, round_trip

from warpring.formats import get_format

NONFINITE = [math.nan, math.inf, -math.inf]


def _weights() -> torch.Tensor:
    return torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp8"])
@pytest.mark.parametrize("bad", NONFINITE)
def test_e4m3_nonfinite_weight_is_nan_and_touches_nothing_else(name: str, bad: float) -> None:
    weight = _weights()
    weight[1, 130, 70] = 0.0
    expected = round_trip(name, weight)
    weight[1, 130, 70] = bad
    values = round_trip(name, weight)
    assert values[1, 130, 70].isnan()
    values[1, 130, 70] = expected[1, 130, 70]
    assert torch.equal(values, expected)


@pytest.mark.parametrize(("name", "width"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("bad", NONFINITE)
def test_e2m1_nonfinite_weight_makes_its_block_nan_and_touches_nothing_else(name: str, width: int, bad: float) -> None:
    weight = _weights()
    weight[1, 130, 70] = 0.0
    expected = round_trip(name, weight)
    weight[1, 130, 70] = bad
    values = round_trip(name, weight)
    first = 70 // width * width
    assert values[1, 130, first : first + width].isnan().all()
    values[1, 130, first : first + width] = expected[1, 130, first : first + width]
    assert torch.equal(values, expected)


def test_nan_scales_are_255_and_e4m3_nan() -> None:
    weight = torch.ones(1, 64)
    weight[0, 3] = math.nan
    mxfp4, nvfp4 = (get_format(name).quantize(weight) for name in ("mxfp4", "nvfp4"))
    assert mxfp4.scale is not None
    assert nvfp4.scale is not None
    assert mxfp4.scale[0, 0] == 255
    assert (nvfp4.scale.view(torch.uint8)[0, 0] & 0x7F) == 0x7F
    assert nvfp4.scale.float()[0, 1:].isfinite().all()


@pytest.mark.parametrize("name", SCALED)
def test_a_block_of_nothing_but_nan_is_nan(name: str) -> None:
    weight = torch.full((1, 40), math.nan)
    assert round_trip(name, weight).isnan().all()


@pytest.mark.parametrize("bad", NONFINITE)
def test_bf16_keeps_nan_and_inf(bad: float) -> None:
    weight = torch.tensor([[1.0, bad]])
    assert torch.equal(round_trip("bf16", weight).nan_to_num(9.0), weight.nan_to_num(9.0))


def test_bf16_rounds_past_its_largest_number_to_inf() -> None:
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.tensor([[largest, torch.finfo(torch.float32).max]])
    assert round_trip("bf16", weight).tolist() == [[largest, math.inf]]


@pytest.mark.parametrize("name", SCALED)
def test_fp64_weights_beyond_fp32_count_as_inf(name: str) -> None:
    weight = torch.ones(1, 64, dtype=torch.float64)
    weight[0, 1] = 1e300
    values = round_trip(name, weight)
    assert values[0, 1].isnan()
    assert torch.allclose(values[0, 32:], torch.ones(32), rtol=2**-17, atol=0)
