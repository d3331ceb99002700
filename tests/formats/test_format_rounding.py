"""Round to nearest, ties to even: every number, every midpoint, and the FP32 neighbours of both, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import e2m1_values, e4m3_values

from warpring.formats import get_format
from warpring.formats.e2m1 import pack, to_e2m1


def _numbers(dtype: type, num_codes: int) -> np.ndarray:
    """All finite numbers of a small float, FP32, sorted, one zero."""
    codes = np.arange(num_codes, dtype=np.uint8 if num_codes <= 256 else np.uint16)
    values = codes.view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def _probes(numbers: np.ndarray) -> np.ndarray:
    """The numbers, the midpoints of neighbours, and the FP32 values just below and above each."""
    midpoints = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
    points = np.concatenate([numbers, midpoints.astype(np.float32)])
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])


E4M3_PROBES = np.clip(_probes(_numbers(ml_dtypes.float8_e4m3fn, 256)), -448, 448)
E2M1_PROBES = np.clip(_probes(_numbers(ml_dtypes.float4_e2m1fn, 16)), -6, 6)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp8"])
def test_e4m3_ties_go_to_even_and_neighbours_to_nearest(name: str) -> None:
    # 448 in each 32 columns makes every scale 1, so the probes reach the rounding unchanged.
    rows = np.full((len(E4M3_PROBES) // 31 + 1, 32), 448, dtype=np.float32)
    flat = np.resize(E4M3_PROBES, rows[:, 1:].shape)
    rows[:, 1:] = flat
    stored = get_format(name).quantize(torch.from_numpy(rows))
    expected = rows.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(e4m3_values(stored.data), expected)


def test_e2m1_ties_go_to_even_and_neighbours_to_nearest() -> None:
    probes = torch.from_numpy(E2M1_PROBES)
    got = e2m1_values(pack(to_e2m1(probes)), len(E2M1_PROBES))
    np.testing.assert_array_equal(got, E2M1_PROBES.astype(ml_dtypes.float4_e2m1fn).astype(np.float64))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(E2M1_PROBES))


def test_e2m1_codes_match_the_oracle_on_random_bit_patterns() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 0x40C00001, (100_000,), generator=generator, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, -values])
    got = to_e2m1(values).numpy()
    expected = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", [6.0, 6.5, 7.0, 7.5, 8.0, 1e30, 3.4e38])
def test_e2m1_saturates_at_6(value: float) -> None:
    assert to_e2m1(torch.tensor([value, -value])).tolist() == [7, 15]


def test_bf16_ties_go_to_even_for_every_midpoint() -> None:
    probes = _probes(_numbers(ml_dtypes.bfloat16, 65536))
    stored = get_format("bf16").quantize(torch.from_numpy(probes)[None])
    expected = probes.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(stored.data.view(torch.uint16).numpy()[0], expected)


def test_mxfp4_block_with_exact_numbers_keeps_them() -> None:
    numbers = _numbers(ml_dtypes.float4_e2m1fn, 16)
    row = torch.from_numpy(np.resize(numbers, 32))[None]
    stored = get_format("mxfp4").quantize(row)
    assert stored.scale is not None
    assert stored.scale.tolist() == [[127]]
    np.testing.assert_array_equal(e2m1_values(stored.data, 32), row.numpy())


def test_even_column_is_the_low_nibble_and_an_odd_end_is_padded_with_zero() -> None:
    row = torch.tensor([[0.5, 6.0, -1.5]])
    stored = get_format("mxfp4").quantize(row)
    assert stored.data.tolist() == [[0x71, 0x0B]]
