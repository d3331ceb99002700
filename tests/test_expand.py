"""Stored weights as BF16: bit for bit what the formats themselves say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from warpring.expand import expand
from warpring.formats import FORMATS, QuantizedTensor, get_format

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def stored(format: str, *shape: int, seed: int) -> QuantizedTensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return get_format(format).quantize(weight * torch.logspace(-3, 3, shape[-1]))


def check(weights: QuantizedTensor) -> None:
    want = get_format(weights.format).dequantize(weights, torch.bfloat16)
    got = expand(weights)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.isnan(), want.isnan())
    # Bits, so that the sign of zero counts too.
    keep = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[keep], want.view(torch.int16)[keep])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 2, 160, 288), (5, 96, 64), (2, 32, 32), (1, 384, 256)], ids=str)
def test_values_are_those_of_the_format(format: str, shape: tuple[int, ...], device: str) -> None:
    check(stored(format, *shape, seed=1).to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_every_code_has_its_value(format: str, device: str) -> None:
    weights = stored(format, 1, 128, 128, seed=2)
    codes = torch.arange(weights.data.numel()).to(torch.uint8)
    weights.data.view(torch.uint8).copy_(codes.view(weights.data.shape))
    check(weights.to(device))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_every_ue8m0_scale_has_its_value(format: str) -> None:
    weights = stored(format, 1, 128, 256, seed=3)
    every = torch.arange(weights.scale.numel()).to(torch.uint8).view(weights.scale.shape)
    check(replace(weights, scale=every))


def test_every_e4m3_scale_has_its_value() -> None:
    weights = stored("nvfp4", 1, 64, 128, seed=4)
    every = torch.arange(weights.scale.numel()).to(torch.uint8).view(torch.float8_e4m3fn).view(weights.scale.shape)
    check(replace(weights, scale=every, global_scale=torch.tensor([3.7e-4])))


def test_bf16_weights_are_not_copied() -> None:
    weights = stored("bf16", 2, 32, 32, seed=5)
    assert expand(weights).data_ptr() == weights.data.data_ptr()


def test_nan_code_is_a_nan_in_its_place_only() -> None:
    weights = stored("fp8_channel", 1, 32, 64, seed=6)
    weights.data.view(torch.uint8)[0, 5, 9] = 0xFF
    values = expand(weights)
    assert values[0, 5, 9].isnan()
    assert int(values.isnan().sum()) == 1
