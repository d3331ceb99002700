"""The sums of FP8 tensor cores against exact ones, and the E4M3 operands that weights become."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import make_inputs, rms_rel_error

from warpring import UnsupportedError
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.tensor_cores import e4m3_operands, e4m3_sums
from warpring.formats import get_format
from warpring.formats.e2m1 import unpack
from warpring.formats.fp8 import to_e4m3

GENERATOR = torch.Generator().manual_seed(5)


def codes(*shape: int) -> torch.Tensor:
    return to_e4m3(torch.randn(shape, generator=GENERATOR) * 30)


def test_sums_are_exact_where_the_bits_suffice() -> None:
    x = torch.tensor([[1.0, 2.0, -3.0, 448.0]]).repeat(1, 32).to(torch.float8_e4m3fn)
    w = torch.tensor([[1.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]]).repeat(1, 32)
    assert e4m3_sums(x[:, None], w).tolist() == [[32 * 224.0, 0.0]]


def test_terms_far_below_the_largest_are_dropped() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1:] = 448.0, 2.0**-6
    w = torch.ones(1, 32)
    # 448 leaves 13 bits down to 2^-5: terms of 2^-6 are cut off, however many there are.
    assert e4m3_sums(x[:, None].to(torch.float8_e4m3fn), w).item() == 448.0
    w[0, 1:] = 2.0
    assert e4m3_sums(x[:, None].to(torch.float8_e4m3fn), w).item() == 448.0 + 31 * 2.0**-5


@pytest.mark.parametrize("cols", [32, 64, 128])
def test_sums_lose_about_13_bits_and_no_more(cols: int) -> None:
    x, w = codes(16, cols), codes(48, cols).float()
    exact = x.double() @ w.double().T
    error = rms_rel_error(e4m3_sums(x[:, None], w), exact)
    assert 1e-6 < error < 2.0**-10


@pytest.mark.parametrize("cols", [32, 64, 128])
def test_terms_of_32_columns_follow_each_other_the_last_one_first(cols: int) -> None:
    high, low, w = codes(5, cols), codes(5, cols), codes(9, cols).float()
    order = torch.stack((low.view(torch.uint8), high.view(torch.uint8)), 1).unflatten(2, (-1, 32))
    one = order.transpose(1, 2).flatten(1).view(torch.float8_e4m3fn)
    both = w.unflatten(1, (-1, 1, 32)).expand(-1, -1, 2, -1).flatten(1)
    want = torch.zeros(5, 9)
    if cols == 32:  # the sum of one term is where that of the next begins
        want = e4m3_sums(one[:, None, :], both)
    got = e4m3_sums(torch.stack((high.view(torch.uint8), low.view(torch.uint8)), 1).view(torch.float8_e4m3fn), w)
    exact = (high.double() + low.double()) @ w.double().T
    assert rms_rel_error(got, exact) < 2.0**-9
    assert cols != 32 or torch.equal(got, want)


def test_nan_stays() -> None:
    x, w = codes(2, 32).float(), codes(3, 32).float()
    x[1, 4] = torch.nan
    sums = e4m3_sums(x[:, None].to(torch.float8_e4m3fn), w)
    assert sums[0].isfinite().all()
    assert sums[1].isnan().all()


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "mxfp4"])
@pytest.mark.parametrize(("rows", "width", "cols"), [(64, 128, 128), (160, 96, 128), (32, 288, 384), (32, 96, 128)])
def test_operands_are_e4m3_and_give_the_weights_back(format: str, rows: int, width: int, cols: int) -> None:
    fmt = get_format(format)
    weight = fmt.quantize(torch.randn(rows, width, generator=GENERATOR))
    operands = e4m3_operands(weight, cols)
    values, columns = operands.values, 32 if format == "mxfp4" else 128
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)
    assert operands.columns == columns
    assert operands.factors.shape == (rows, -(-cols // columns))
    back = values * operands.factors.repeat_interleave(columns, 1)[:, :cols] * operands.sum_factor
    assert torch.equal(back[:, :width], fmt.dequantize(weight))
    assert not values[:, width:].any()


def test_mxfp4_takes_every_scale_but_the_least_and_nan_stays() -> None:
    weight = get_format("mxfp4").quantize(torch.ones(256, 32))
    assert weight.scale is not None
    weight.scale[:, 0] = torch.arange(256)
    operands = e4m3_operands(weight, 32)
    back = operands.values.double() * operands.factors * operands.sum_factor
    want = torch.ldexp(unpack(weight.data, 32, torch.float64), torch.arange(256)[:, None] - 127)
    assert torch.equal(back[1:255], want[1:255])
    assert not back[0].any()
    assert back[255].isnan().all()


def test_formats_without_a_policy_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no expert-parallel kernel takes nvfp4 weights"):
        e4m3_operands(get_format("nvfp4").quantize(torch.ones(32, 32)), 128)


def test_a_layer_with_these_sums_is_near_that_with_fp32_sums() -> None:
    inputs = make_inputs(6, 256, 128, 4, 2, format="mxfp4", seed=3)
    problem = Problem(256, 128, 4, 2, 1, 6, format="mxfp4")
    ours, plain = (run_layer(problem, *inputs.args(), sums=sums) for sums in ("tensor_core", "fp32"))
    assert not torch.equal(ours, plain)
    assert rms_rel_error(ours, plain) < 0.01
