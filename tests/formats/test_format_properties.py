"""What holds for any weights of any shape: error bounds, idempotence, sizes, and that layout changes no bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from format_oracle import ALL, BLOCKS, E2M1, SCALED, oracle_values, round_trip, same_bits, scale_values
from hypothesis import given, settings
from hypothesis import strategies as st

from warpring.formats import QuantizedTensor, ceil_div, get_format
from warpring.formats import blocks as blocks_module

SHAPES = st.tuples(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 140), st.integers(1, 150) | st.sampled_from([256, 288])
).map(lambda t: (*t[0], t[1], t[2]))

BITS = {"bf16": 16, "fp8_block": 8, "fp8_channel": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """FP32 weights of any shape and size, rows spread over some powers of two, with zeros in between."""
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(shape, generator=generator)
    spread = draw(st.integers(0, 20))
    exponents = torch.randint(-spread, spread + 1, (*shape[:-1], 1), generator=generator)
    weight = weight * torch.exp2(exponents.float()) * 2.0 ** draw(st.integers(-80, 80))
    zeros = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    return weight.masked_fill(zeros, 0.0)


def _half_ulp(name: str, scaled: np.ndarray) -> np.ndarray:
    """Half the distance of neighbouring numbers around `scaled`, in units of the scale."""
    fraction_bits, least_exponent = {"bf16": (7, -126), "mxfp4": (1, 0), "nvfp4": (1, 0)}.get(name, (3, -6))
    exponent = np.frexp(scaled)[1] - 1  # floor(log2), and 0 for 0
    return 2.0 ** (np.maximum(exponent, least_exponent) - fraction_bits - 1)


def _coarse_scale(stored: QuantizedTensor) -> np.ndarray:
    """Whether a weight's NVFP4 block scale is an E4M3 subnormal, so that it is far from the amax it was meant for."""
    if stored.format != "nvfp4":
        return np.zeros(stored.shape, dtype=bool)
    without_global = replace(stored, global_scale=None)
    return scale_values(without_global) < 2.0**-6


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(weight=weights())
def test_error_is_at_most_half_an_ulp(name: str, weight: torch.Tensor) -> None:
    stored = get_format(name).quantize(weight)
    scale = scale_values(stored)
    scaled = np.abs(weight.double().numpy()) / scale
    error = np.abs(oracle_values(stored) - weight.double().numpy()) / scale
    # Scales that are not powers of two: the quotient is rounded to FP32 first, and a cut scale lets the amax exceed
    # the largest code by 2^-17.
    slack = 0 if name in ("bf16", "mxfp8", "mxfp4") else 2.0**-17 * scaled
    clipped = scaled > 6 if name in E2M1 else np.zeros_like(scaled, dtype=bool)
    assert (error <= _half_ulp(name, scaled) + slack)[~clipped].all()
    # A weight past 6 becomes 6, by choice of the scale: its whole block errs least that way.
    assert (error[clipped] <= (scaled - 6)[clipped] + 2.0**-17 * scaled[clipped]).all()
    limit = 12.0 if name == "mxfp4" else np.where(_coarse_scale(stored), 9.0, 6.5)
    assert (scaled <= limit)[clipped].all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(weight=weights())
def test_requantising_gives_the_same_values(name: str, weight: torch.Tensor) -> None:
    stored = get_format(name).quantize(weight)
    once = get_format(name).dequantize(stored)
    same = (round_trip(name, once) == once).numpy()
    assert (same | _coarse_scale(stored)).all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(weight=weights())
def test_fp32_values_are_exact(name: str, weight: torch.Tensor) -> None:
    stored = get_format(name).quantize(weight)
    np.testing.assert_array_equal(get_format(name).dequantize(stored).double().numpy(), oracle_values(stored))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES)
def test_sizes_are_those_of_the_format(name: str, shape: tuple[int, ...]) -> None:
    fmt = get_format(name)
    assert fmt.bits_per_weight == BITS[name]
    stored = fmt.quantize(torch.ones(shape))
    fmt.check(stored)
    rows, cols = shape[-2:]
    matrices = math.prod(shape[:-2])
    data_bytes = matrices * rows * ceil_div(cols * BITS[name], 8)
    assert tuple(stored.data.shape) == fmt.data_shape(shape)
    assert stored.data.numel() * stored.data.element_size() == data_bytes
    if name == "bf16":
        assert fmt.scale_shape(shape) is None
        assert stored.nbytes == data_bytes
        return
    assert fmt.block == BLOCKS[name]
    assert stored.scale is not None
    assert tuple(stored.scale.shape) == fmt.scale_shape(shape)
    block_rows, block_cols = BLOCKS[name] or (1, cols)
    scale_bytes = matrices * math.ceil(rows / block_rows) * math.ceil(cols / block_cols)
    scale_bytes *= 4 if name.startswith("fp8") else 1
    assert stored.nbytes == data_bytes + scale_bytes + (4 * matrices if name == "nvfp4" else 0)


@pytest.mark.parametrize("name", SCALED)
@settings(max_examples=15, deadline=None)
@given(weight=weights())
def test_overhanging_blocks_are_as_if_padded_with_zeros(name: str, weight: torch.Tensor) -> None:
    rows, cols = weight.shape[-2:]
    block_rows, block_cols = BLOCKS[name] or (1, cols)
    padded = torch.nn.functional.pad(weight, (0, -cols % block_cols, 0, -rows % block_rows))
    assert torch.equal(round_trip(name, padded)[..., :rows, :cols], round_trip(name, weight))


@pytest.mark.parametrize("name", ALL)
def test_each_matrix_is_quantised_by_itself(name: str) -> None:
    weight = torch.randn(3, 2, 70, 90, generator=torch.Generator().manual_seed(1))
    weight[1] *= 1000
    stored = get_format(name).quantize(weight)
    for expert in range(3):
        for half in range(2):
            assert same_bits(stored[expert][half], get_format(name).quantize(weight[expert, half]))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk", [1, 128 * 40, 1 << 30])
def test_size_of_a_piece_changes_no_bit(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2, 150, 40, generator=torch.Generator().manual_seed(2))
    stored = get_format(name).quantize(weight)
    values = get_format(name).dequantize(stored)
    monkeypatch.setattr(blocks_module, "_CHUNK_ELEMENTS", chunk)
    assert same_bits(get_format(name).quantize(weight), stored)
    assert torch.equal(get_format(name).dequantize(stored), values)


@pytest.mark.parametrize("name", ALL)
def test_strided_weights_give_the_same_bits_as_contiguous_ones(name: str) -> None:
    base = torch.randn(2, 96, 160, generator=torch.Generator().manual_seed(3))
    for view in (base.mT, base[:, ::2, 1:], base.transpose(0, 1)):
        stored = get_format(name).quantize(view)
        assert same_bits(stored, get_format(name).quantize(view.contiguous()))
        assert all(tensor.is_contiguous() for tensor in stored.tensors())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float_dtype_are_read_as_fp32(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert same_bits(get_format(name).quantize(weight), get_format(name).quantize(weight.float()))


@pytest.mark.parametrize("name", ALL)
def test_quantising_does_not_change_its_argument(name: str) -> None:
    weight = torch.randn(33, 65, generator=torch.Generator().manual_seed(5))
    before = weight.clone()
    round_trip(name, weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", ALL)
def test_no_experts_give_no_weights(name: str) -> None:
    stored = get_format(name).quantize(torch.empty(0, 64, 96))
    get_format(name).check(stored)
    assert get_format(name).dequantize(stored).shape == (0, 64, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_cuda_bits_equal_cpu_bits(name: str) -> None:
    weight = torch.randn(3, 200, 333, generator=torch.Generator().manual_seed(6))
    weight *= torch.exp2(torch.randint(-90, 90, (3, 200, 1), generator=torch.Generator().manual_seed(7)).float())
    stored = get_format(name).quantize(weight)
    on_gpu = get_format(name).quantize(weight.cuda())
    assert on_gpu.device.type == "cuda"
    assert same_bits(on_gpu, stored)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = get_format(name).dequantize(on_gpu, dtype)
        assert torch.equal(values.cpu(), get_format(name).dequantize(stored, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_cuda_treats_nonfinite_weights_as_the_cpu_does(name: str) -> None:
    weight = torch.randn(2, 130, 200, generator=torch.Generator().manual_seed(8))
    weight[0, 3, 5], weight[1, 128, 7], weight[1, 0, 199] = math.nan, math.inf, -math.inf
    on_gpu = get_format(name).dequantize(get_format(name).quantize(weight.cuda()))
    np.testing.assert_array_equal(on_gpu.cpu().numpy(), round_trip(name, weight).numpy())
