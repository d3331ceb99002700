"""Every code of every format, with every scale code, read by warpring and by ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_oracle import oracle_values

from warpring.formats import QuantizedTensor, get_format

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def _fp32_scales(count: int) -> torch.Tensor:
    """Positive FP32 scales with all 24 bits in use, from subnormal to near the top, by random bit patterns."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(1, 0x7F000000, (count,), generator=generator, dtype=torch.int32)
    bits[:4] = torch.tensor([1, 0x007FFFFF, 0x00800000, 0x322BCC77])  # smallest, subnormal, 2^-126, 1e-8
    return bits.view(torch.float32)


def _every_code(name: str) -> QuantizedTensor:
    """All 256 data bytes in each row, a row for each scale code (FP32 scales: random ones)."""
    data = ALL_BYTES.repeat(256, 1)
    by_row = ALL_BYTES[:, None]
    if name == "bf16":
        bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
        return QuantizedTensor(name, (256, 256), bits.view(torch.bfloat16).reshape(256, 256))
    if name == "mxfp8":
        return QuantizedTensor(name, (256, 256), data.view(torch.float8_e4m3fn), by_row.repeat(1, 8))
    if name == "mxfp4":
        return QuantizedTensor(name, (256, 512), data, by_row.repeat(1, 16))
    if name == "nvfp4":
        scale = by_row.repeat(1, 32).view(torch.float8_e4m3fn)
        batch = 6
        return QuantizedTensor(
            name, (batch, 256, 512), data.repeat(batch, 1, 1), scale.repeat(batch, 1, 1), _fp32_scales(batch)
        )
    data = data.view(torch.float8_e4m3fn)
    if name == "fp8_channel":
        return QuantizedTensor(name, (256, 256), data, _fp32_scales(256)[:, None])
    return QuantizedTensor(name, (16, 256, 256), data.repeat(16, 1, 1), _fp32_scales(64).reshape(16, 2, 2))


FORMATS = ("bf16", "fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_with_every_scale_is_exact_in_fp64(name: str) -> None:
    stored = _every_code(name)
    got = get_format(name).dequantize(stored, torch.float64).numpy()
    np.testing.assert_array_equal(got, oracle_values(stored))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_in_fp32_is_the_exact_value_rounded_once(name: str) -> None:
    stored = _every_code(name)
    with np.errstate(over="ignore"):
        expected = oracle_values(stored).astype(np.float32)
    np.testing.assert_array_equal(get_format(name).dequantize(stored).numpy(), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_results_are_the_fp32_ones_cast(name: str, dtype: torch.dtype) -> None:
    stored = _every_code(name)
    got = get_format(name).dequantize(stored, dtype)
    assert got.dtype == dtype
    expected = get_format(name).dequantize(stored).to(dtype)
    np.testing.assert_array_equal(got.double().numpy(), expected.double().numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_negative_zero_keeps_its_sign(name: str) -> None:
    weight = torch.tensor([[-0.0, 0.0, 1.0, -1e-9]])
    fmt = get_format(name)
    signs = torch.signbit(fmt.dequantize(fmt.quantize(weight)))
    assert signs.tolist() == [[True, False, False, True]]


def test_e8m0_code_0_is_2_to_minus_127_and_255_is_nan() -> None:
    ones = torch.full((1, 96), 1.0).to(torch.float8_e4m3fn)
    stored = QuantizedTensor("mxfp8", (1, 96), ones, torch.tensor([[0, 254, 255]], dtype=torch.uint8))
    got = get_format("mxfp8").dequantize(stored)[0]
    assert got[0].item() == 2.0**-127
    assert got[32].item() == 2.0**127
    assert got[64].isnan()
