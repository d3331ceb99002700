"""The reference forms: `moe_exact` against a loop in FP64, `moe_reference` against `moe_exact`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from warpring.activation import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu
from warpring.experts import Experts
from warpring.formats import FORMATS, get_format
from warpring.reference import moe_exact, moe_reference

NAN = math.nan
HIDDEN, INTERMEDIATE, NUM_EXPERTS = 64, 96, 8
# Two roundings to BF16 (between the projections, and of the result). Each errs by at most 2^-8 of a value, evenly
# spread over that, so by 2^-8 / sqrt(3) in RMS, and a dot product keeps the ratio of RMS error to RMS value.
ROUNDING_RMS = 2**-8 * math.sqrt(2 / 3)

ACTIVATIONS = [SILU, GELU_TANH, gpt_oss_swiglu(limit=1.0), clipped_swiglu(0.5)]
ACTIVATION_IDS = ["silu", "gelu_tanh", "gpt_oss", "clipped"]
both_forms = pytest.mark.parametrize("form", [moe_exact, moe_reference])
every_format = pytest.mark.parametrize("format", FORMATS)


def make_experts(
    format: str = "bf16",
    activation: Activation = SILU,
    biased: bool = False,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    seed: int = 0,
) -> Experts:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Experts.from_dense(
        randn(NUM_EXPERTS, 2 * intermediate, hidden) / hidden**0.5,
        randn(NUM_EXPERTS, hidden, intermediate) / intermediate**0.5,
        format=format,
        activation=activation,
        w13_bias=randn(NUM_EXPERTS, 2 * intermediate) if biased else None,
        w2_bias=randn(NUM_EXPERTS, hidden) if biased else None,
    )


def make_inputs(
    num_tokens: int = 7, topk: int = 3, hidden: int = HIDDEN, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :topk]
    return x, topk_idx, torch.rand(num_tokens, topk, generator=generator) + 0.1


def naive_act(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation.limit is not None:
        gate = np.minimum(gate, activation.limit)
        up = np.clip(up, -activation.limit, activation.limit)
    up = up + activation.up_offset
    if activation.gate_fn == "silu":
        return gate / (1 + np.exp(-activation.alpha * gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def naive(x: torch.Tensor, experts: Experts, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The layer's equation in NumPy FP64, one slot and one output row at a time."""
    w13, w2 = (w.numpy() for w in experts.dequantize(torch.float64))
    intermediate = experts.intermediate
    y = np.zeros((x.shape[0], experts.hidden))
    for t, k in np.ndindex(*topk_idx.shape):
        e = int(topk_idx[t, k])
        if e == -1:
            continue
        row = x[t].double().numpy()
        gate, up = w13[e, :intermediate] @ row, w13[e, intermediate:] @ row
        if experts.w13_bias is not None:
            gate, up = gate + experts.w13_bias[e, 0].numpy(), up + experts.w13_bias[e, 1].numpy()
        down = w2[e] @ naive_act(experts.activation, gate, up)
        if experts.w2_bias is not None:
            down = down + experts.w2_bias[e].numpy()
        y[t] += float(topk_weights[t, k]) * down
    return torch.from_numpy(y)


def rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


# --- moe_exact -------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("biased", [False, True])
def test_exact_is_the_equation_in_fp64_for_every_format(format: str, biased: bool) -> None:
    experts, inputs = make_experts(format, biased=biased), make_inputs()
    actual = moe_exact(inputs[0], experts, *inputs[1:])
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, naive(inputs[0], experts, *inputs[1:]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ACTIVATION_IDS)
def test_exact_is_the_equation_in_fp64_for_every_activation(activation: Activation) -> None:
    experts, inputs = make_experts(activation=activation, biased=True), make_inputs(seed=2)
    actual = moe_exact(inputs[0], experts, *inputs[1:])
    torch.testing.assert_close(actual, naive(inputs[0], experts, *inputs[1:]), rtol=1e-11, atol=1e-12)


def test_exact_in_fp32_stays_within_the_error_of_fp32_sums() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(biased=True), make_inputs()
    exact = moe_exact(x, experts, topk_idx, topk_weights)
    single = moe_exact(x, experts, topk_idx, topk_weights, dtype=torch.float32)
    assert single.dtype == torch.float32
    # Two dot products of at most 96 terms: RMS error near sqrt(96) half-ulps, far below BF16's 2^-8.
    assert rms(single.double() - exact) < 1e-6 * rms(exact)


def test_exact_reads_the_up_half_as_up() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    w13, w2 = experts.dequantize()
    swapped = Experts.from_dense(torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2)
    exact, other = (moe_exact(x, e, topk_idx, topk_weights) for e in (experts, swapped))
    assert rms(exact - other) > 0.1 * rms(exact)


# --- the semantics of slots, the same for both forms -----------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("poison", [NAN, math.inf, 1e30])
def test_unused_slot_ignores_its_weight(form, poison: float) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(biased=True), make_inputs()
    topk_idx[:, 1] = -1
    topk_weights[:, 1] = poison
    without = form(x, experts, topk_idx[:, [0, 2]], topk_weights[:, [0, 2]])
    assert torch.equal(form(x, experts, topk_idx, topk_weights), without)
    assert without.isfinite().all()


@both_forms
def test_token_without_a_used_slot_is_zero(form) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(biased=True), make_inputs()
    topk_idx[2], topk_weights[2], x[2] = -1, NAN, NAN
    y = form(x, experts, topk_idx, topk_weights)
    assert (y[2] == 0).all()
    assert (y[1] != 0).any()
    assert y.isfinite().all()
    assert (form(x, experts, torch.full_like(topk_idx, -1), topk_weights) == 0).all()


@both_forms
def test_duplicates_in_a_token_add_up(form) -> None:
    experts, (x, _, _) = make_experts(biased=True), make_inputs()
    twice = form(x, experts, torch.full((7, 2), 5), torch.tensor([[0.25, 0.5]]).expand(7, 2))
    once = form(x, experts, torch.full((7, 1), 5), torch.full((7, 1), 0.75))
    torch.testing.assert_close(twice, once, rtol=2**-7 if form is moe_reference else 1e-12, atol=0)


@both_forms
@pytest.mark.parametrize("topk", [1, 32])
def test_one_slot_and_thirty_two_slots_follow_the_equation(form, topk: int) -> None:
    experts, (x, _, _) = make_experts(), make_inputs()
    generator = torch.Generator().manual_seed(3)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (7, topk), generator=generator)
    topk_weights = torch.rand(7, topk, generator=generator) / topk
    expected = naive(x, experts, topk_idx, topk_weights)
    error = rms(form(x, experts, topk_idx, topk_weights).double() - expected)
    assert error <= (ROUNDING_RMS if form is moe_reference else 1e-12) * rms(expected)


@both_forms
@pytest.mark.parametrize("topk", [1, 4])
def test_zero_tokens_give_an_empty_result(form, topk: int) -> None:
    x, topk_idx, topk_weights = torch.empty(0, HIDDEN), torch.empty(0, topk).long(), torch.empty(0, topk)
    assert form(x.bfloat16(), make_experts(), topk_idx, topk_weights).shape == (0, HIDDEN)


@both_forms
def test_zero_slots_give_zeros(form) -> None:
    y = form(make_inputs()[0], make_experts(biased=True), torch.empty(7, 0).long(), torch.empty(7, 0))
    assert y.shape == (7, HIDDEN)
    assert (y == 0).all()


@both_forms
def test_int32_and_int64_ids_give_equal_bits(form) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    topk_idx[0, 0] = -1
    assert torch.equal(form(x, experts, topk_idx.int(), topk_weights), form(x, experts, topk_idx.long(), topk_weights))


@both_forms
def test_strided_inputs_give_the_values_of_contiguous_ones(form) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(biased=True), make_inputs()
    wide = torch.full((14, 2 * HIDDEN), NAN, dtype=torch.bfloat16)
    wide[::2, ::2] = x
    strided = form(wide[::2, ::2], experts, topk_idx.mT.contiguous().mT, topk_weights.mT.contiguous().mT)
    torch.testing.assert_close(strided, form(x, experts, topk_idx, topk_weights))


@both_forms
def test_nan_of_a_token_stays_with_that_token(form) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    clean = form(x, experts, topk_idx, topk_weights)
    x[3, 5] = NAN
    y = form(x, experts, topk_idx, topk_weights)
    assert y[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(y[others], clean[others])


@both_forms
def test_nan_weight_of_a_used_slot_shows(form) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    topk_weights[4, 2] = NAN
    y = form(x, experts, topk_idx, topk_weights)
    assert y[4].isnan().all()
    assert y[[0, 1, 2, 3, 5, 6]].isfinite().all()


def test_exact_form_refuses_an_id_beyond_the_experts() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    topk_idx[0, 0] = NUM_EXPERTS
    with pytest.raises(IndexError):
        moe_exact(x, experts, topk_idx, topk_weights)


@both_forms
def test_inputs_are_left_alone(form) -> None:
    experts, inputs = make_experts(biased=True), make_inputs()
    before = [tensor.clone() for tensor in inputs]
    form(inputs[0], experts, *inputs[1:])
    for actual, expected in zip(inputs, before, strict=True):
        assert torch.equal(actual, expected)


# --- moe_reference ---------------------------------------------------------------------------------------------------


def same_dtypes_in_torch(
    x: torch.Tensor, experts: Experts, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The layer at the reference's dtypes with torch's batched products: FP32 sums, BF16 between and after."""
    w13, w2 = experts.dequantize()
    gate, up = torch.einsum("th,tkih->tki", x.float(), w13[topk_idx]).chunk(2, dim=-1)
    if experts.w13_bias is not None:
        gate, up = gate + experts.w13_bias[topk_idx, 0], up + experts.w13_bias[topk_idx, 1]
    act = experts.activation(gate, up).bfloat16().float()
    down = torch.einsum("tki,tkhi->tkh", act, w2[topk_idx])
    if experts.w2_bias is not None:
        down = down + experts.w2_bias[topk_idx]
    return torch.einsum("tk,tkh->th", topk_weights, down).bfloat16()


@every_format
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ACTIVATION_IDS)
def test_reference_errs_no_more_than_its_roundings(format: str, activation: Activation) -> None:
    experts = make_experts(format, activation, biased=True)
    x, topk_idx, topk_weights = make_inputs(num_tokens=16)
    exact = moe_exact(x, experts, topk_idx, topk_weights)
    error = moe_reference(x, experts, topk_idx, topk_weights).double() - exact
    torch_error = same_dtypes_in_torch(x, experts, topk_idx, topk_weights).double() - exact

    assert rms(error) <= ROUNDING_RMS * rms(exact)
    assert rms(error) <= 2 * rms(torch_error)
    assert error.abs().max() <= 2 * torch_error.abs().max()


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 32), (192, 160), (2880, 96), (64, 2880), (160, 2304)])
def test_reference_errs_no_more_than_its_roundings_at_odd_sizes(hidden: int, intermediate: int) -> None:
    experts = make_experts("mxfp4", hidden=hidden, intermediate=intermediate)
    x, topk_idx, topk_weights = make_inputs(num_tokens=3, topk=2, hidden=hidden)
    exact = moe_exact(x, experts, topk_idx, topk_weights)
    error = moe_reference(x, experts, topk_idx, topk_weights).double() - exact
    assert rms(error) <= ROUNDING_RMS * rms(exact)


def test_reference_rounds_between_the_projections() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs(num_tokens=16)
    exact = moe_exact(x, experts, topk_idx, topk_weights)
    error = rms(moe_reference(x, experts, topk_idx, topk_weights).double() - exact)
    only_the_result_rounded = rms(exact.bfloat16().double() - exact)
    assert error > 1.1 * only_the_result_rounded


@every_format
def test_token_bits_do_not_depend_on_the_batch(format: str) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(format, biased=True), make_inputs(num_tokens=9)
    together = moe_reference(x, experts, topk_idx, topk_weights)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(4))
    shuffled = moe_reference(x[order], experts, topk_idx[order], topk_weights[order])
    alone = [
        moe_reference(x[t : t + 1], experts, topk_idx[t : t + 1], topk_weights[t : t + 1]) for t in range(x.shape[0])
    ]
    assert torch.equal(shuffled, together[order])
    assert torch.equal(torch.cat(alone), together)


def test_bits_are_equal_run_to_run() -> None:
    experts, inputs = make_experts("nvfp4", biased=True), make_inputs()
    first, second = (moe_reference(inputs[0], experts, *inputs[1:]) for _ in range(2))
    assert torch.equal(first, second)


def test_out_is_overwritten_and_returned() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    topk_idx[1] = -1
    out = torch.full((7, HIDDEN), NAN, dtype=torch.bfloat16)
    result = moe_reference(x, experts, topk_idx, topk_weights, out)
    assert result is out
    assert torch.equal(out, moe_reference(x, experts, topk_idx, topk_weights))


def test_reference_returns_bf16_for_any_float_input() -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(), make_inputs()
    expected = moe_reference(x, experts, topk_idx, topk_weights)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(moe_reference(x.float(), experts, topk_idx, topk_weights), expected)


@pytest.mark.gpu
@every_format
def test_reference_on_the_gpu_errs_no_more_than_its_roundings(format: str) -> None:
    experts, (x, topk_idx, topk_weights) = make_experts(format, biased=True), make_inputs(num_tokens=16)
    exact = moe_exact(x, experts, topk_idx, topk_weights)
    y = moe_reference(x.cuda(), experts.to("cuda"), topk_idx.cuda(), topk_weights.cuda())
    assert rms(y.cpu().double() - exact) <= ROUNDING_RMS * rms(exact)


@pytest.mark.parametrize("bad", [NUM_EXPERTS, -2, 2**40])
def test_reference_skips_ids_that_name_no_expert(bad: int) -> None:
    experts = make_experts("mxfp8", biased=True)
    x, topk_idx, topk_weights = make_inputs()
    unused = topk_idx.clone()
    unused[::2, 1] = -1
    topk_weights[::2, 1] = NAN
    expected = moe_reference(x, experts, unused, topk_weights)
    assert expected.isfinite().all()
    assert torch.equal(moe_reference(x, experts, unused.where(unused >= 0, bad), topk_weights), expected)


def test_reference_dequantises_each_expert_once(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts("mxfp4")
    x, topk_idx, topk_weights = make_inputs(num_tokens=9, topk=4)
    calls = []
    dequantise = type(get_format("mxfp4")).dequantize

    def counted(self: object, *arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return dequantise(self, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(get_format("mxfp4")), "dequantize", counted)
    moe_reference(x, experts, topk_idx, topk_weights)
    assert len(calls) == 2 * topk_idx.unique().numel()
