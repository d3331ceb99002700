"""The arithmetic of the kernels in torch: how far from FP64, what is exact, and what NaN, Inf and zeros do."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_inputs import Inputs, make_inputs

from warpring import GELU_TANH, Activation, clipped_swiglu, gpt_oss_swiglu, moe_exact
from warpring.expert_parallel.arithmetic import _gemm, combine, publish, quantize, run_expert, run_layer
from warpring.expert_parallel.problem import ActivationForm, Problem
from warpring.expert_parallel.tensor_cores import e4m3_operands, e4m3_sums
from warpring.formats import FORMATS, get_format

#: Least cosine of a token with FP64, by the form of activations.
LEAST_COSINE: dict[ActivationForm, float] = {"fp8": 0.998, "bf16": 0.99999}
FORMS: tuple[ActivationForm, ...] = ("fp8", "bf16")


def problem_of(inputs: Inputs, activation: ActivationForm, **changes: object) -> Problem:
    experts = inputs.experts
    return Problem(
        experts.hidden,
        experts.intermediate,
        experts.num_experts,
        inputs.topk_idx.shape[1],
        1,
        max(1, inputs.x.shape[0]),
        format=experts.format,
        activation=activation,
        gate=experts.activation,
        has_bias=experts.w13_bias is not None,
        **changes,  # pyright: ignore[reportArgumentType]
    )


def least_cosine(y: torch.Tensor, exact: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(y.double(), exact.double(), dim=1).min().item()


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "gate", "bias"),
    [
        (256, 128, Activation(), False),
        (288, 96, gpt_oss_swiglu(), True),
        (160, 160, clipped_swiglu(), True),
        (512, 64, GELU_TANH, False),
    ],
    ids=str,
)
def test_cosine_with_fp64(
    hidden: int, intermediate: int, gate: Activation, bias: bool, format: str, activation: ActivationForm
) -> None:
    inputs = make_inputs(8, hidden, intermediate, 8, 3, format=format, activation=gate, bias=bias, seed=7)
    y = run_layer(problem_of(inputs, activation), *inputs.args())
    assert (y.shape, y.dtype) == (inputs.x.shape, torch.bfloat16)
    assert least_cosine(y, moe_exact(*inputs.args())) >= LEAST_COSINE[activation]


@pytest.mark.parametrize("activation", FORMS)
def test_the_bound_tells_a_wrong_expert(activation: ActivationForm) -> None:
    inputs = make_inputs(8, 256, 128, 8, 3, seed=8)
    y = run_layer(problem_of(inputs, activation), *inputs.args())
    wrong = inputs.topk_idx.clone()
    wrong[0, 2] = (wrong[0, 2] + 1) % 8
    exact = moe_exact(inputs.x, inputs.experts, wrong, inputs.topk_weights)
    assert least_cosine(y, exact) < LEAST_COSINE[activation]


# Publication


def bf16_row(generator: torch.Generator, low: int, high: int) -> torch.Tensor:
    """256 BF16 values with exponents from `low` to `high`, one of them at `high`."""
    exponents = torch.randint(low, high + 1, (256,), generator=generator)
    exponents[17] = high
    fraction = 1 + torch.randint(0, 128, (256,), generator=generator) / 128
    sign = torch.randint(0, 2, (256,), generator=generator) * 2 - 1
    return (sign * torch.ldexp(fraction, exponents)).bfloat16()


@given(seed=st.integers(0, 2**31), high=st.integers(-90, 127), span=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_bf16_tokens_travel_exactly_down_to_2_to_the_minus_9_of_the_largest(seed: int, high: int, span: int) -> None:
    low = max(high - span, -126)
    x = bf16_row(torch.Generator().manual_seed(seed), low, high)[None]
    codes, scale = quantize(x.float(), "bf16")
    back = codes.double().sum(1) * scale.double()[:, None]
    largest = x.double().abs().max()
    near = x.double().abs() >= largest * 2.0**-9
    assert torch.equal(back[near], x.double()[near])
    assert float((back - x.double()).abs().max()) <= float(largest) * 2.0**-17


@pytest.mark.parametrize("exponent", [-133, -126, -120, -119, -118, 0, 127])
def test_a_bf16_token_of_any_size_travels_exactly(exponent: int) -> None:
    x = torch.ldexp(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), torch.tensor(exponent)).bfloat16()[None]
    assert x[0, 0] != 0
    codes, scale = quantize(x.float(), "bf16")
    assert torch.equal(codes.double().sum(1) * scale.double()[:, None], x.double())
    assert scale.isfinite().all()
    assert scale.item() >= 2.0**-126
    magnitude = codes.float()[0, 0, 0].item()
    assert 2.0**7 <= magnitude < 2.0**8 or exponent < -119


@pytest.mark.parametrize("value", [1e-40, 2.0**-126, 3.1e-38, 1e-20, 0.3, 448.0, 1e30, 3e38])
def test_fp8_groups_of_any_size_keep_three_significant_bits(value: float) -> None:
    x = torch.linspace(0.5, 1, 128)[None] * value
    codes, scale = quantize(x, "fp8")
    back = codes.double().squeeze(1) * scale.double()[:, None]
    tolerance = 2.0**-4 if value > 1e-35 else 1.0
    assert torch.all((back - x.double()).abs() <= x.double() * tolerance + 448 * 2.0**-126 * 2.0**-10)
    assert codes.float().abs().max() <= 448
    assert scale.item() == max(float(torch.tensor(value) / torch.tensor(448.0)), 2.0**-126)


def test_fp8_code_is_the_nearest_even() -> None:
    # With 448 in the group the scale is exactly 1: ties of E4M3 show as they are.
    x = torch.tensor([[448.0, 17.0, 19.0, 16.99, 2.0**-10, 3 * 2.0**-10, -432.0]])
    codes, scale = quantize(x, "fp8")
    assert scale.item() == 1
    assert codes.float().squeeze(1).tolist() == [[448.0, 16.0, 20.0, 16.0, 0.0, 2.0**-8, -448.0]]


@pytest.mark.parametrize("activation", FORMS)
def test_a_token_of_zeros_travels_as_zeros(activation: ActivationForm) -> None:
    codes, scale = quantize(torch.zeros(2, 64), activation)
    assert not codes.float().any()
    assert scale.isfinite().all()
    assert activation != "fp8" or scale.tolist() == [1, 1]


def test_scales_cover_128_columns_and_ragged_ends_are_zeros() -> None:
    problem = Problem(288, 64, 1, 1, 1, 2)
    x = torch.randn(2, 288, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 128:256] *= 1000
    tokens = publish(problem, x)
    assert tokens.codes.shape == (2, 384)
    assert not tokens.codes[:, 288:].float().any()
    for block in range(3):
        amax = x[:, block * 128 : (block + 1) * 128].float().abs().amax(1)
        assert torch.equal(tokens.scale[:, block], amax / torch.full((), 448.0))


# What is not finite


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_token(activation: ActivationForm, bad: float) -> None:
    inputs = make_inputs(4, 256, 128, 4, 2, seed=3)
    problem = problem_of(inputs, activation)
    clean = run_layer(problem, *inputs.args())
    inputs.x[1, 200] = bad
    y = run_layer(problem, *inputs.args())
    assert not y[1].isfinite().any()
    others = torch.tensor([0, 2, 3])
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("activation", FORMS)
def test_unused_slots_ignore_weights_and_partials_that_are_nan(activation: ActivationForm) -> None:
    inputs = make_inputs(6, 128, 64, 4, 3, seed=4)
    problem = problem_of(inputs, activation)
    inputs.topk_idx[:, 1] = -1
    inputs.topk_idx[5] = -1
    inputs.topk_weights[:, 1] = torch.nan
    inputs.topk_idx[0, 2] = 4  # names no expert
    y = run_layer(problem, *inputs.args())
    assert y.isfinite().all()
    assert not y[5].any()
    inputs.topk_weights[:, 1] = 0
    inputs.topk_idx[0, 2] = -1
    assert least_cosine(y[:5], moe_exact(*inputs.args())[:5]) >= LEAST_COSINE[activation]


def test_combine_ignores_what_unused_slots_hold_and_adds_in_order() -> None:
    partials = torch.tensor([[[1.0], [torch.nan], [2.0**24], [1.0]]])
    valid = torch.tensor([[True, False, True, True]])
    # ((1 + 2^24) + 1) in FP32 is 2^24, while 1 + 1 first would give 2^24 + 2.
    assert combine(partials, valid).item() == 2.0**24
    again = torch.tensor([[[1.0], [torch.nan], [1.0], [2.0**24]]])
    exact = combine(again, valid)
    assert exact.float().item() == torch.tensor(2.0**24 + 2).bfloat16().float().item()


@pytest.mark.parametrize("activation", FORMS)
def test_a_token_of_zeros_gives_the_biases_alone(activation: ActivationForm) -> None:
    inputs = make_inputs(3, 128, 64, 4, 2, bias=True, seed=5)
    inputs.x[1] = 0
    y = run_layer(problem_of(inputs, activation), *inputs.args())
    assert least_cosine(y, moe_exact(*inputs.args())) >= LEAST_COSINE[activation]


@pytest.mark.parametrize("activation", FORMS)
def test_no_tokens(activation: ActivationForm) -> None:
    inputs = make_inputs(0, 128, 64, 4, 2)
    assert run_layer(problem_of(inputs, activation), *inputs.args()).shape == (0, 128)


# The parts together


@pytest.mark.parametrize("activation", FORMS)
def test_an_expert_named_twice_counts_twice(activation: ActivationForm) -> None:
    inputs = make_inputs(4, 128, 64, 4, 2, seed=6)
    inputs.topk_idx[:, 1] = inputs.topk_idx[:, 0]
    y = run_layer(problem_of(inputs, activation), *inputs.args())
    assert least_cosine(y, moe_exact(*inputs.args())) >= LEAST_COSINE[activation]


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("weighed", [False, True])
def test_shared_experts_are_added_with_their_weights(activation: ActivationForm, weighed: bool) -> None:
    inputs = make_inputs(5, 128, 64, 4, 2, seed=9)
    shared = make_inputs(1, 128, 64, 2, 1, format="fp8_block", seed=10).experts
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)) if weighed else None
    problem = replace(problem_of(inputs, activation), num_shared=2)
    y = run_layer(problem, *inputs.args(), shared, weights)
    both = torch.arange(2).expand(5, 2)
    exact = moe_exact(*inputs.args())
    exact += moe_exact(inputs.x, shared, both, torch.ones(5, 2) if weights is None else weights)
    assert least_cosine(y, exact) >= LEAST_COSINE[activation]
    without = run_layer(problem_of(inputs, activation), *inputs.args())
    assert least_cosine(without, exact) < 0.99


@pytest.mark.parametrize(("activation", "dtype"), [("fp8", torch.bfloat16), ("bf16", torch.float32)])
def test_partial_results_have_the_wires_dtype(activation: ActivationForm, dtype: torch.dtype) -> None:
    inputs = make_inputs(3, 128, 64, 4, 2)
    problem = problem_of(inputs, activation)
    tokens = publish(problem, inputs.x)
    assert run_expert(problem, inputs.experts, 0, tokens, torch.ones(3)).dtype == dtype


def test_run_twice_gives_equal_bits() -> None:
    inputs = make_inputs(9, 256, 128, 8, 3, format="mxfp4", seed=11)
    problem = problem_of(inputs, "fp8")
    assert torch.equal(run_layer(problem, *inputs.args()), run_layer(problem, *inputs.args()))


def test_sums_of_blocks_are_multiplied_and_added_with_one_rounding() -> None:
    """As role2's fmaf does: an activation between the GEMMs would else round to another E4M3 code now and then."""
    generator = torch.Generator().manual_seed(7)
    weight = get_format("fp8_channel").quantize(torch.randn(1, 40, 512, generator=generator))[0]
    codes = torch.randn(9, 512, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(9, 4, generator=generator)
    got = _gemm(codes, scale, weight, 128, "tensor_core")
    operands = e4m3_operands(weight, 512)
    once, twice = torch.zeros(9, 40), torch.zeros(9, 40)
    for part, columns in enumerate(torch.arange(512).split(128)):
        part_codes = codes.view(torch.uint8)[:, None, columns].view(codes.dtype)
        products = e4m3_sums(part_codes, operands.values[:, columns])
        factor = operands.factors[:, part] * scale[:, part, None]
        for row in range(9):
            for column in range(40):
                exact = Fraction(products[row, column].item()) * Fraction(factor[row, column].item())
                once[row, column] = float(exact + Fraction(once[row, column].item()))
        twice += products * factor
    assert torch.equal(got, once)
    assert not torch.equal(got, twice)
