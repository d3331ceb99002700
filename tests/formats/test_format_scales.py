"""Which scale a block gets: the stated policy of each format, its error measured, and the ends of the range."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import SCALED, e2m1_values, oracle_values, rms_error, round_trip, scale_values

from warpring.formats import QuantizedTensor, get_format

FLT_MAX = torch.finfo(torch.float32).max


def _weights(distribution: str, rows: int = 512, cols: int = 512) -> torch.Tensor:
    """Synthetic weights whose blocks differ in size."""
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(rows, cols, generator=generator)
    spread = torch.exp(torch.randn(rows, 1, generator=generator))
    if distribution == "gaussian":
        return normal * spread
    # Student's t with 4 degrees of freedom: the heavy tails of trained weights.
    chi2 = torch.randn(4, rows, cols, generator=generator).square().sum(0)
    return normal / (chi2 / 4).sqrt() * spread


def _relative(stored: QuantizedTensor, weight: torch.Tensor) -> float:
    error = oracle_values(stored) - weight.double().numpy()
    return float(np.linalg.norm(error) / np.linalg.norm(weight.numpy()))


def _mx_with_policy(name: str, weight: torch.Tensor, policy: str) -> QuantizedTensor:
    """MX weights whose scales follow the spec's floor rule or the ceiling rule, codes rounded by the oracle's types."""
    element, top, emax = (ml_dtypes.float8_e4m3fn, 448.0, 8) if name == "mxfp8" else (ml_dtypes.float4_e2m1fn, 6.0, 2)
    rows, cols = weight.shape
    blocks = weight.double().numpy().reshape(rows, cols // 32, 32)
    amax = np.abs(blocks).max(-1)
    exponent = np.floor(np.log2(amax)) - emax if policy == "floor" else np.ceil(np.log2(amax / top))
    scaled = np.clip(blocks / 2.0 ** exponent[..., None], -top, top).astype(element).view(np.uint8).reshape(rows, cols)
    data = torch.from_numpy(scaled.copy())
    data = data.view(torch.float8_e4m3fn) if name == "mxfp8" else data[:, 0::2] | (data[:, 1::2] << 4)
    return QuantizedTensor(name, (rows, cols), data, torch.from_numpy((exponent + 127).astype(np.uint8)))


@pytest.mark.parametrize("distribution", ["gaussian", "student"])
def test_mxfp8_errs_less_than_the_floor_rule_and_never_saturates(distribution: str) -> None:
    weight = _weights(distribution)
    assert rms_error("mxfp8", weight) < 0.92 * _relative(_mx_with_policy("mxfp8", weight, "floor"), weight)
    scaled = weight.numpy() / scale_values(get_format("mxfp8").quantize(weight))
    blocks = np.abs(scaled).reshape(512, 16, 32).max(-1)
    assert blocks.max() <= 448
    assert blocks.min() > 224  # half the scale would saturate: it is the smallest that does not


@pytest.mark.parametrize("distribution", ["gaussian", "student"])
@pytest.mark.parametrize("policy", ["floor", "ceil"])
def test_mxfp4_errs_less_than_either_fixed_rule(distribution: str, policy: str) -> None:
    weight = _weights(distribution)
    assert rms_error("mxfp4", weight) < 0.98 * _relative(_mx_with_policy("mxfp4", weight, policy), weight)


def test_mxfp4_scale_has_the_least_error_of_all_256() -> None:
    weight = _weights("student", rows=64, cols=32)
    chosen = ((round_trip("mxfp4", weight, torch.float64) - weight) ** 2).sum(-1)
    for code in range(100, 160):
        scale = 2.0 ** (code - 127)
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) * scale
        nearest = (weight.double().abs()[..., None] - magnitudes).abs().amin(-1)
        assert (chosen <= nearest.square().sum(-1) * (1 + 1e-12)).all(), f"scale code {code} errs less"


@pytest.mark.parametrize("distribution", ["gaussian", "student"])
def test_nvfp4_errs_less_than_with_every_amax_mapped_to_6(distribution: str) -> None:
    weight = _weights(distribution)
    stored = get_format("nvfp4").quantize(weight)
    assert stored.global_scale is not None
    blocks = weight.reshape(512, 32, 16)
    scale = (blocks.abs().amax(-1) / 6 / stored.global_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn).double()
    unit = (scale * stored.global_scale.double())[..., None]
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = (blocks.double().abs()[..., None] / unit[..., None] - magnitudes).abs().amin(-1) * unit
    assert rms_error("nvfp4", weight) < 0.95 * float(nearest.norm() / weight.double().norm())
    ours = ((round_trip("nvfp4", weight, torch.float64) - weight) ** 2).reshape(512, 32, 16).sum(-1)
    assert (ours <= nearest.square().sum(-1) * (1 + 1e-5)).all()  # no block is worse; 1e-5: errors compared in FP32


def test_nvfp4_uses_the_whole_range_of_its_scales() -> None:
    weight = _weights("gaussian").reshape(4, 128, 512)
    stored = get_format("nvfp4").quantize(weight)
    assert stored.scale is not None
    assert stored.global_scale is not None
    assert stored.scale.float().amax((1, 2)).tolist() == [448.0] * 4
    expected = weight.abs().amax((1, 2)) / 2688
    assert (stored.global_scale <= expected).all()
    assert (stored.global_scale > expected * (1 - 2.0**-17)).all()


@pytest.mark.parametrize(("name", "bits"), [("fp8_block", 20), ("fp8_channel", 20), ("nvfp4", 18)])
def test_fp32_scales_are_short_so_that_fp32_results_are_exact(name: str, bits: int) -> None:
    weight = _weights("student", 256, 192) * 1.2345e-3
    stored = get_format(name).quantize(weight)
    scale = stored.global_scale if name == "nvfp4" else stored.scale
    assert scale is not None
    assert (scale.view(torch.int32) & ((1 << (24 - bits)) - 1)).eq(0).all()
    np.testing.assert_array_equal(get_format(name).dequantize(stored).double().numpy(), oracle_values(stored))


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_fp8_scale_is_amax_over_448(name: str) -> None:
    weight = _weights("gaussian", 130, 200)
    stored = get_format(name).quantize(weight)
    assert stored.scale is not None
    expected = weight[:128, :128].abs().max() / 448 if name == "fp8_block" else weight[0].abs().max() / 448
    assert expected * (1 - 2.0**-19) < stored.scale[0, 0] <= expected
    if name == "fp8_block":
        edge = weight[128:, 128:].abs().max() / 448
        assert edge * (1 - 2.0**-19) < stored.scale[1, 1] <= edge


@pytest.mark.parametrize("name", SCALED)
def test_all_zero_blocks_have_scale_1_and_stay_zero(name: str) -> None:
    weight = torch.zeros(3, 4, 64)
    weight[1] = 5.0  # one matrix that is not zero beside them
    stored = get_format(name).quantize(weight)
    assert torch.equal(get_format(name).dequantize(stored)[0], torch.zeros(4, 64))
    np.testing.assert_array_equal(scale_values(stored)[[0, 2]], np.ones((2, 4, 64)))


def test_zero_block_in_a_nonzero_matrix_has_block_scale_1() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 20] = 3.0
    nvfp4 = get_format("nvfp4").quantize(weight)
    assert nvfp4.scale is not None
    assert nvfp4.scale.float()[0, 0].item() == 1.0
    assert torch.equal(get_format("nvfp4").dequantize(nvfp4)[0, :16], torch.zeros(16))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("amax", [1e-8, 1e-30, 1.2e-36])
def test_tiny_weights_keep_their_relative_precision(name: str, amax: float) -> None:
    weight = _weights("gaussian", 128, 128)
    tiny = weight / weight.abs().max() * amax
    bound = {"mxfp4": 0.15, "nvfp4": 0.12}.get(name, 0.04)
    # The rows differ in size by more than the range of E2M1 and E4M3 covers, so compare with the same at full size.
    assert rms_error(name, tiny) < max(bound, 1.05 * rms_error(name, weight))


@pytest.mark.parametrize("name", SCALED)
def test_subnormal_weights_err_by_less_than_the_grid_of_the_smallest_scale(name: str) -> None:
    weight = _weights("gaussian", 64, 64)
    weight = weight / weight.abs().max() * 1e-40
    values = round_trip(name, weight, torch.float64)
    # Half the widest step that 1e-40 can meet, times 2^-126: E4M3 subnormals 2^-10, E2M1 below 0.5 2^-2, and for
    # NVFP4, whose block scales go down to 2^-9, E2M1 between 4 and 6.
    half_step = 2.0**-126 * {"mxfp4": 2.0**-2, "nvfp4": 2.0**-9}.get(name, 2.0**-10)
    assert (values - weight.double()).abs().max() <= half_step
    assert values.isfinite().all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-8, 1.0, 1e38])
def test_no_quantiser_writes_a_subnormal_scale(name: str, amax: float) -> None:
    weight = torch.full((2, 64), amax)
    weight[0, :32] /= 2
    stored = get_format(name).quantize(weight)
    for scale in (stored.scale, stored.global_scale):
        if scale is None:
            continue
        if scale.dtype == torch.uint8:
            assert scale.min() >= 1
            assert scale.max() < 255
        else:
            assert scale.float().min() >= (2.0**-9 if scale.dtype == torch.float8_e4m3fn else 2.0**-126)


def test_nvfp4_small_blocks_beside_a_large_one_are_not_erased() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0] = 1.0
    # Its wanted scale, 2.5e-6 / 6 * 2688 = 0.00112, lies between E4M3's smallest, 2^-9, and half of that.
    weight[0, 16] = 2.5e-6
    stored = get_format("nvfp4").quantize(weight)
    assert stored.scale is not None
    assert stored.scale.float()[0, 1].item() == 2.0**-9
    assert abs(round_trip("nvfp4", weight)[0, 16].item() / 2.5e-6 - 1) < 0.15
    weight[0, 16] = 1e-9  # far below half the smallest step: 0, by rounding to nearest
    assert round_trip("nvfp4", weight)[0, 16].item() == 0.0


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "nvfp4"])
@pytest.mark.parametrize("seed", range(4))
def test_dequantised_weights_never_exceed_the_amax(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 128, generator=generator)
    weight = weight / weight.abs().max() * FLT_MAX * (1 if seed == 0 else torch.rand(1, generator=generator))
    values = round_trip(name, weight)
    assert values.isfinite().all()
    assert values.abs().max() <= weight.abs().max()


def test_mx_weights_that_round_to_2_to_128_are_inf_in_fp32_and_finite_in_fp64() -> None:
    weight = torch.full((1, 32), FLT_MAX)
    for name in ("mxfp8", "mxfp4"):
        assert (round_trip(name, weight) == torch.inf).all()
        assert (round_trip(name, weight, torch.float64) == 2.0**128).all()


def test_scale_exponent_is_exact_at_powers_of_two() -> None:
    # amax = 448 * 2^k must take scale 2^k, the next FP32 number above it 2^(k + 1): no rounded logarithm decides.
    exponents = torch.arange(-120, 118)
    at = torch.ldexp(torch.full_like(exponents, 448.0, dtype=torch.float32), exponents)[:, None]
    above = torch.nextafter(at, torch.tensor(torch.inf))
    codes = [get_format("mxfp8").quantize(amax.expand(-1, 32)).scale for amax in (at, above)]
    assert torch.equal(codes[0][:, 0].int(), exponents.int() + 127)
    assert torch.equal(codes[1][:, 0].int(), exponents.int() + 128)


def test_mxfp4_halves_the_scale_only_where_that_errs_less() -> None:
    # One weight a little above 6 beside many that need the finer grid, and the same with nothing to gain.
    gain = torch.full((1, 32), 0.5)
    gain[0, 0] = 6.5
    lose = torch.zeros(1, 32)
    lose[0, 0] = 8.0
    stored = get_format("mxfp4").quantize(torch.cat([gain, lose]))
    assert stored.scale is not None
    assert stored.scale.flatten().tolist() == [127, 128]
    assert e2m1_values(stored.data, 32)[0, 0] == 6.0
