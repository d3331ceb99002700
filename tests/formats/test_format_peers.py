"""The same weights read and made by other libraries: transformers' gpt-oss reader and torchao's MX and NVFP4 code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_oracle import e2m1_values, e4m3_values, oracle_values

from warpring.formats import QuantizedTensor, get_format, mxfp4_from_gpt_oss

TORCHAO = "torchao is an optional oracle: pip install --no-deps torchao"


def _gpt_oss_checkpoint(num_experts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(21)
    shape = (num_experts, rows, cols // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(97, 140, shape, generator=generator, dtype=torch.uint8)


def test_gpt_oss_blocks_read_as_transformers_reads_them() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is an optional dependency")
    blocks, scales = _gpt_oss_checkpoint(3, 10, 96)
    stored = mxfp4_from_gpt_oss(blocks, scales)
    get_format("mxfp4").check(stored)
    assert stored.shape == (3, 10, 96)
    theirs = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert theirs.shape == (3, 96, 10)  # they transpose
    assert torch.equal(get_format("mxfp4").dequantize(stored), theirs.mT)


def test_gpt_oss_blocks_read_as_the_oracle_reads_them() -> None:
    blocks, scales = _gpt_oss_checkpoint(2, 5, 64)
    stored = mxfp4_from_gpt_oss(blocks, scales)
    np.testing.assert_array_equal(get_format("mxfp4").dequantize(stored, torch.float64).numpy(), oracle_values(stored))
    assert stored.data.data_ptr() == blocks.data_ptr()  # no copy


def test_requantising_gpt_oss_weights_loses_nothing() -> None:
    stored = mxfp4_from_gpt_oss(*_gpt_oss_checkpoint(2, 64, 128))
    values = get_format("mxfp4").dequantize(stored)
    assert torch.equal(get_format("mxfp4").dequantize(get_format("mxfp4").quantize(values)), values)


def _weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(22)
    return torch.randn(64, 256, generator=generator) * torch.exp2(torch.arange(-32, 32).float())[:, None]


def test_mxfp8_equals_torchao_rounding_up() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=TORCHAO)
    scale, codes = mx.to_mx(_weight(), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    stored = get_format("mxfp8").quantize(_weight())
    assert stored.scale is not None
    assert torch.equal(stored.scale, scale.view(torch.uint8))
    np.testing.assert_array_equal(e4m3_values(stored.data), e4m3_values(codes))


def test_mxfp4_equals_torchao_rounding_up_where_the_scale_is_the_same_and_errs_less_elsewhere() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=TORCHAO)
    weight = _weight()
    scale, codes = mx.to_mx(weight, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.RCEIL)
    theirs = QuantizedTensor("mxfp4", tuple(weight.shape), codes.view(torch.uint8), scale.view(torch.uint8))
    stored = get_format("mxfp4").quantize(weight)
    assert stored.scale is not None
    assert theirs.scale is not None
    same = (stored.scale == theirs.scale).numpy()
    assert 0 < same.sum() < same.size
    assert torch.equal(stored.scale[~torch.from_numpy(same)] + 1, theirs.scale[~torch.from_numpy(same)])
    by_block = [e2m1_values(t.data, 256).reshape(64, 8, 32)[same] for t in (stored, theirs)]
    np.testing.assert_array_equal(*by_block)
    errors = [((oracle_values(t) - weight.double().numpy()) ** 2).reshape(64, 8, 32).sum(-1) for t in (stored, theirs)]
    assert (errors[0][~same] < errors[1][~same]).all()


def test_torchao_mxfp4_weights_read_the_same() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=TORCHAO)
    weight = _weight()
    scale, codes = mx.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    theirs = mx.to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, torch.float32)
    stored = QuantizedTensor("mxfp4", tuple(weight.shape), codes.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(get_format("mxfp4").dequantize(stored), theirs)


def test_torchao_nvfp4_weights_read_the_same_and_ours_err_less() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=TORCHAO)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(23))
    global_scale = nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    scale, codes = nvfp4.nvfp4_quantize(weight, 16, global_scale)
    theirs = QuantizedTensor(
        "nvfp4", (64, 256), codes.view(torch.uint8), scale.view(torch.float8_e4m3fn).reshape(64, 16), global_scale
    )
    reader = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=global_scale)
    values = get_format("nvfp4").dequantize(theirs)
    torch.testing.assert_close(values, reader.dequantize(torch.float32), rtol=2**-22, atol=0)
    ours = get_format("nvfp4").dequantize(get_format("nvfp4").quantize(weight))
    assert (ours - weight).norm() < 0.95 * (values - weight).norm()
