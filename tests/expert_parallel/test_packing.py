"""Packed images: every bit of the weights is in them, at the place that the kernel's lanes read."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from warpring import Experts, UnsupportedError
from warpring.activation import gpt_oss_swiglu
from warpring.errors import ArgumentError
from warpring.expert_parallel.experts_kernel import STAGE_CHUNKS, num_stages, smem_bytes
from warpring.expert_parallel.packing import (
    CODE_BYTES,
    POLICIES,
    EpWeights,
    image_bytes,
    pack_ep,
    pack_matrix,
    unpack_matrix,
)
from warpring.expert_parallel.problem import BLOCK_SIZES, ActivationForm, Problem
from warpring.formats import FORMATS, QuantizedTensor, get_format
from warpring.runtime.jit import KERNEL_DIR

FORMS: tuple[ActivationForm, ...] = ("fp8", "bf16")
SIZES = [(128, 64), (320, 96), (160, 192), (256, 128)]


def random_experts(format: str, hidden: int, intermediate: int, seed: int) -> Experts:
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randn(2, 2 * intermediate, hidden, generator=g)
    w2 = torch.randn(2, hidden, intermediate, generator=g)
    return Experts.from_dense(w13, w2, format=format)


def code_bytes(stored: QuantizedTensor) -> torch.Tensor:
    return stored.data.view(torch.uint8)


@pytest.mark.parametrize("format", POLICIES)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_unpacking_gives_every_bit_back(format: str, hidden: int, intermediate: int) -> None:
    experts = random_experts(format, hidden, intermediate, hidden + intermediate)
    for stored in (experts.w13, experts.w2):
        images, flushed = pack_matrix(stored)
        rows = intermediate if len(stored.shape) == 4 else hidden
        per_task = 64 if len(stored.shape) == 4 else 128
        assert images.shape == (2, -(-rows // per_task), -(-stored.shape[-1] // 128), image_bytes(format))
        assert flushed == 0
        back = unpack_matrix(images, format, stored.shape)
        get_format(format).check(back)
        assert torch.equal(code_bytes(back), code_bytes(stored))
        assert back.scale is not None
        assert stored.scale is not None
        assert torch.equal(back.scale, stored.scale)


def test_codes_lie_where_the_lanes_of_a_warp_take_them() -> None:
    rows, cols = 128, 256
    data = torch.randint(0, 256, (1, 2, 64, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data[data & 0x7F == 0x7F] = 0
    stored = QuantizedTensor(
        "fp8_block", (1, 2, 64, cols), data.view(torch.float8_e4m3fn), torch.ones(1, 2, 1, cols // 128)
    )
    image = pack_matrix(stored)[0][0, 0]
    for row in range(0, rows, 7):
        warp, half, g = row // 16, row % 16 // 8, row % 8
        want = data[0, half, 8 * warp + g]
        for column in range(0, cols, 5):
            chunk, step, at = column // 128, column % 128 // 32, column % 32
            q, byte = at % 16 // 4, (2 * (at // 16) + half) * 4 + at % 4  # register 2 (at / 16) + half, byte at % 4
            lane = 4 * g + q
            assert image[chunk, warp * 2048 + step * 512 + lane * 16 + byte] == want[column]


def test_mxfp4_codes_are_operands_where_the_kernels_masks_have_them() -> None:
    """The decoding of ep_weights.cuh, lane by lane, against E2M1's bits at their place in E4M3."""
    stored = random_experts("mxfp4", 256, 64, 4).w2[0]  # [256, 64]
    codes = torch.stack((stored.data & 15, stored.data >> 4), -1).flatten(-2).tolist()
    images = pack_matrix(random_experts("mxfp4", 256, 64, 4).w2)[0][0].contiguous()
    for task, warp, step, lane in ((0, 0, 0, 0), (0, 3, 1, 13), (1, 7, 1, 31), (1, 2, 0, 6)):
        words = images[task, 0].view(torch.int32)[warp * 256 + lane * 4 + step * 2 :][:2].tolist()
        low, high = (word & 0xFFFFFFFF for word in words)
        row, q = task * 128 + warp * 16 + lane // 4, lane % 4
        a = [low, high, low << 1 ^ high >> 2, low << 2 ^ high << 3]
        for r, register in enumerate(a):
            for byte in range(4):
                code = codes[row + r % 2 * 8][step * 32 + r // 2 * 16 + 4 * q + byte]
                assert register >> 8 * byte & 0x9C == (code & 8) << 4 | (code & 7) << 2


def test_mxfp4_blocks_of_a_row_may_be_of_any_size() -> None:
    experts = random_experts("mxfp4", 256, 64, 5)
    w13 = experts.w13
    assert w13.scale is not None
    w13.scale[:] = torch.randint(1, 255, w13.scale.shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    images, flushed = pack_matrix(w13)
    assert flushed == 0
    back = unpack_matrix(images, "mxfp4", w13.shape)
    assert torch.equal(back.data, w13.data)
    assert back.scale is not None
    assert torch.equal(back.scale, w13.scale)


def test_mxfp4_loses_blocks_of_the_least_scale_alone_and_keeps_nan() -> None:
    experts = random_experts("mxfp4", 1024, 64, 3)
    w2 = experts.w2  # [2, 1024, 64]
    assert w2.scale is not None
    w2.scale[0] = torch.arange(1024)[:, None] // 4  # both blocks of a row alike: 0 to 255
    w2.scale[1] = 0
    w2.data[1] = 0x80  # zeros of both signs: nothing is lost
    want = get_format("mxfp4").dequantize(w2)
    images, flushed = pack_matrix(w2)
    assert flushed == int((want[0, :4] != 0).sum()) > 0
    want[:, :4] = 0
    back = get_format("mxfp4").dequantize(unpack_matrix(images, "mxfp4", w2.shape))
    torch.testing.assert_close(back, want, rtol=0, atol=0, equal_nan=True)
    assert bool(back[0, 1020:].isnan().all())
    assert not bool(back[0, :1020].isnan().any())


def test_weights_of_a_model_flush_nothing() -> None:
    """Gaussian rows, rows of 2^-8 .. 2^8, and a tenth of the columns 100 times larger, quantised as checkpoints are."""
    g = torch.Generator().manual_seed(7)
    w13 = torch.randn(1, 512, 1024, generator=g) * torch.exp2(torch.randint(-8, 9, (1, 512, 1), generator=g))
    w13[..., ::10] *= 100
    w2 = torch.randn(1, 1024, 256, generator=g) * 0.02
    assert pack_ep(Experts.from_dense(w13, w2, format="mxfp4")).flushed == 0


@pytest.mark.parametrize("format", sorted(set(FORMATS) - set(POLICIES)))
def test_a_format_without_a_policy_is_refused_by_name(format: str) -> None:
    with pytest.raises(UnsupportedError, match=format):
        pack_ep(random_experts(format, 128, 64, 0))


def test_shared_experts_must_fit_the_routed_ones() -> None:
    routed = random_experts("mxfp4", 128, 64, 0)
    packed = pack_ep(routed, random_experts("fp8_block", 128, 64, 1))
    assert packed.shared is not None
    assert packed.nbytes == packed.routed.nbytes + packed.shared.nbytes
    for other in (random_experts("fp8_block", 160, 64, 1), Experts(routed.w13, routed.w2, gpt_oss_swiglu())):
        with pytest.raises(ArgumentError, match="shared experts"):
            pack_ep(routed, other)


def test_what_the_kernel_is_handed_names_the_packed_tensors() -> None:
    packed = pack_ep(random_experts("fp8_block", 128, 64, 0))
    arguments = packed.arguments()
    assert arguments.gmem_w13 == packed.routed.w13.data_ptr()
    assert arguments.gmem_w2 == packed.routed.w2.data_ptr()
    assert arguments.gmem_w2_bias is None
    assert (arguments.alpha, arguments.limit, arguments.up_offset) == (1.0, float("inf"), 0.0)


def test_both_sides_agree_on_the_structs_and_on_the_bytes_of_an_image() -> None:
    source = (Path(KERNEL_DIR) / "ep_weights.cuh").read_text()
    size = re.search(r"sizeof\(EpWeights\) == (\d+)", source)
    assert size is not None
    assert int(size[1]) == ctypes.sizeof(EpWeights)
    body = re.search(r"struct EpWeights \{(.*?)\n\};", source, re.DOTALL)
    assert body is not None
    names = re.findall(r"\b(gmem_\w+|alpha|limit|up_offset|reserved)\b", re.sub(r"//.*", "", body[1]))
    assert names == [name for name, _ in EpWeights._fields_]
    assert CODE_BYTES == {"fp8_block": 128 * 128, "fp8_channel": 128 * 128, "mxfp4": 128 * 128 // 2}


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("format", POLICIES)
def test_enough_weights_are_in_flight_at_every_block_size(format: str, activation: ActivationForm) -> None:
    """4.5 TB/s over 116 CTAs for 1.5 us are 58 KB each."""
    for block_m in BLOCK_SIZES:
        problem = Problem(4096, 2048, 256, 6, 2, 256, format=format, activation=activation, block_m=block_m)
        in_flight = num_stages(problem) * STAGE_CHUNKS * image_bytes(format)
        assert 60 * 1024 <= in_flight < smem_bytes(1)
        assert in_flight >= 110 * 1024 or block_m > 16
