"""The tile layout: read back as the kernels read it, bit field by bit field, it holds the weights exactly."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import make_inputs

from warpring import layout, slabs
from warpring.activation import gpt_oss_swiglu
from warpring.errors import ArgumentError, UnsupportedError
from warpring.formats import FORMATS, QuantizedTensor, get_format
from warpring.layout import (
    PackedMatrix,
    pack,
    pack_experts,
    unpack,
    unpack_experts,
)
from warpring.slabs import SLAB_MOST_COLS, has_slabs, suits_slabs


def bf16_pair_values(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) half-words of int64 words, read as BF16, in FP64."""

    def value(half: torch.Tensor) -> torch.Tensor:
        return torch.where(half >= 0x8000, half - 0x10000, half).to(torch.int16).view(torch.bfloat16).double()

    return value(words & 0xFFFF), value(words >> 16 & 0xFFFF)


def lane_words(records: torch.Tensor, first: int, count: int, lane_bytes: int) -> torch.Tensor:
    """int64 words [..., 32 lanes, words] of the bytes [first, first + count) of each record."""
    lanes = records[..., first : first + count].reshape(*records.shape[:-1], 32, lane_bytes).contiguous()
    return lanes.view(torch.int32).long() & 0xFFFFFFFF


def e4m3_fields(word: torch.Tensor) -> list[torch.Tensor]:
    """The four codes of a word, as `unpack_e4m3` of tile_formats.cuh finds them, before the multiplier."""
    moved = ((word >> 4 | word << 28) & 0x87808780) | (word << 4 & 0x00700070)
    return [*bf16_pair_values(word & 0x87F087F0), *bf16_pair_values(moved)]


def e2m1_fields(word: torch.Tensor) -> list[torch.Tensor]:
    """The eight codes of a word, as `unpack_e2m1` finds them."""

    def rotated(left: int) -> torch.Tensor:
        return word << left | word >> (32 - left)

    moved = (rotated(12) & 0x80C080C0) | (word << 4 & 0x01000100)
    pairs = [word & 0x81C081C0, word << 6 & 0x81C081C0, rotated(10) & 0x81C081C0, moved]
    return [value for pair in pairs for value in bf16_pair_values(pair)]


def exponent_value(field: torch.Tensor) -> torch.Tensor:
    """BF16 value of an exponent field."""
    return (field.to(torch.int16) << 7).view(torch.bfloat16).double()


def read_back(packed: PackedMatrix, fmt: str) -> torch.Tensor:
    """Weights [E, panel, record, lane, half of the panel, 8 columns] as kernels see them, FP64, without row scales."""
    records = packed.records
    group = torch.arange(32) // 4
    if fmt == "bf16":
        halves = [lane_words(records, 512 * half, 512, 16) for half in (0, 1)]
        rows = [torch.stack([v for w in h.unbind(-1) for v in bf16_pair_values(w)], -1) for h in halves]
        return torch.stack(rows, -2)
    if fmt in ("mxfp4", "nvfp4"):
        words = lane_words(records, 0, 256, 8)
        rows = [torch.stack(e2m1_fields(word), -1) for word in words.unbind(-1)]
        scale_bytes = records[..., 256:].long()
    else:
        words = lane_words(records, 0, 512, 16)
        rows = [torch.stack(e4m3_fields(words[..., i]) + e4m3_fields(words[..., i + 1]), -1) for i in (0, 2)]
        scale_bytes = records[..., 512:].long()
    values = torch.stack(rows, -2)
    if fmt in ("mxfp8", "mxfp4"):
        scale = torch.stack([exponent_value(scale_bytes[..., 2 * group + half]) for half in (0, 1)], -1)
    elif fmt == "nvfp4":
        columns = torch.arange(32) % 4 // 2 * 16 + 2 * group
        codes = torch.stack([scale_bytes[..., columns + half] for half in (0, 1)], -1).to(torch.uint8)
        scale = codes.view(torch.float8_e4m3fn).double() * 2.0**118
    else:
        return values * 2.0**120
    return values * scale[..., None]


def expected_lanes(dense: torch.Tensor) -> torch.Tensor:
    """[E, halves, rows, cols] -> [E, panel, record, lane, half of the panel, 8 columns]."""
    num_experts, num_halves, rows, cols = dense.shape
    out = []
    for panel in range(rows * num_halves // 16):
        if num_halves == 2:
            low, high = dense[:, 0, panel * 8 : panel * 8 + 8], dense[:, 1, panel * 8 : panel * 8 + 8]
        else:
            low, high = dense[:, 0, panel * 16 : panel * 16 + 8], dense[:, 0, panel * 16 + 8 : panel * 16 + 16]
        halves = [h.reshape(num_experts, 8, cols // 32, 4, 8).permute(0, 2, 1, 3, 4).flatten(2, 3) for h in (low, high)]
        out.append(torch.stack(halves, 3))
    return torch.stack(out, 1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_packed_weights_read_back_exactly(fmt: str, matrix: str) -> None:
    stored: QuantizedTensor = getattr(make_inputs(1, 160, 96, 3, 1, format=fmt, seed=2).experts, matrix)
    packed = pack(stored)
    dense = get_format(fmt).dequantize(stored, torch.float64)
    halves = dense if dense.dim() == 4 else dense[:, None]
    scale = packed.matrix_scale.double()[..., None, None].expand_as(halves).clone()
    if packed.row_scale is not None:
        scale = scale * packed.row_scale.double()[..., None]
    if packed.block_scale is not None:
        rows, cols = halves.shape[2:]
        blocks = packed.block_scale.double().repeat_interleave(128, 2).repeat_interleave(128, 3)
        scale = scale * blocks[:, :, :rows, :cols]
    value = read_back(packed, fmt) * expected_lanes(scale)
    assert torch.equal(value, expected_lanes(halves))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("shift", [100, -100])
def test_scales_of_any_size_keep_their_value(fmt: str, shift: int) -> None:
    stored = make_inputs(1, 64, 32, 2, 1, format=fmt, seed=3).experts.w2
    moved = QuantizedTensor(fmt, stored.shape, stored.data, (stored.scale.int() + shift).to(torch.uint8))
    packed = pack(moved)
    dense = get_format(fmt).dequantize(moved, torch.float64)[:, None]
    scale = packed.matrix_scale.double()[..., None, None].expand_as(dense)
    value = read_back(packed, fmt) * expected_lanes(scale.contiguous())
    assert torch.equal(value, expected_lanes(dense))


def test_nan_scale_becomes_a_block_of_nans() -> None:
    stored = make_inputs(1, 64, 32, 2, 1, format="mxfp8", seed=4).experts.w2
    stored.scale[1, 5, 0] = 255
    value = read_back(pack(stored), "mxfp8")
    # Row 5 of expert 1: panel 0, lanes of g = 5, lower half, the first record.
    assert value[1, 0, 0, 20:24, 0].isnan().all()
    assert value.isnan().sum() == 32


def test_nan_code_becomes_a_block_of_nans() -> None:
    stored = make_inputs(1, 64, 32, 2, 1, format="mxfp8", seed=5).experts.w2
    stored.data.view(torch.uint8)[0, 9, 3] = 0xFF
    value = read_back(pack(stored), "mxfp8")
    assert value[0, 0, 0, 4:8, 1].isnan().all()
    assert value.isnan().sum() == 32


@pytest.mark.parametrize("fmt", ["fp8_block", "fp8_channel"])
def test_nan_code_of_fp8_is_refused_by_name(fmt: str) -> None:
    stored = make_inputs(1, 64, 32, 2, 1, format=fmt, seed=6).experts.w2
    stored.data.view(torch.uint8)[0, 9, 3] = 0x7F
    with pytest.raises(UnsupportedError, match="NaN codes"):
        pack(stored)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_integers(a), as_integers(b))


def as_integers(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)
    for name in ("data", "scale", "global_scale"):
        assert same_bits(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_unpack_gives_back_every_bit(fmt: str, matrix: str) -> None:
    stored: QuantizedTensor = getattr(make_inputs(1, 160, 96, 3, 1, format=fmt, seed=7).experts, matrix)
    assert_same(unpack(pack(stored), fmt), stored)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_channel", "nvfp4"])
def test_unpack_gives_back_every_code(fmt: str) -> None:
    """All 256 bytes of codes but the NaNs of E4M3, in every place of a record."""
    stored = make_inputs(1, 256, 256, 1, 1, format=fmt, seed=8).experts.w2
    size = stored.data.numel()
    codes = (torch.arange(size) * 7 + torch.arange(size) // 256).to(torch.uint8)
    if fmt in ("mxfp8", "fp8_channel"):
        codes = torch.where((codes & 0x7F) == 0x7F, 3, codes)
    stored.data.view(torch.uint8).copy_(codes.view_as(stored.data))
    assert_same(unpack(pack(stored), fmt), stored)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_unpack_gives_back_scales_of_any_size(fmt: str) -> None:
    stored = make_inputs(1, 256, 64, 2, 1, format=fmt, seed=9).experts.w2
    stored.scale.copy_(torch.randperm(stored.scale.numel()).view_as(stored.scale).clamp(max=254))
    assert {0, 254} <= set(stored.scale.flatten().tolist())
    assert_same(unpack(pack(stored), fmt), stored)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_and_experts_of_a_matrix_are_those_of_its_weights(fmt: str) -> None:
    experts = make_inputs(1, 288, 416, 3, 1, format=fmt, seed=10).experts
    for stored, sizes in ((experts.w13, (0, 416)), (experts.w2, (0, 288))):
        dense = get_format(fmt).dequantize(stored, torch.float64)
        packed = pack(stored)
        for first, last in ((128, 256), (0, 128), (256, sizes[1]), sizes):
            part = get_format(fmt).dequantize(unpack(packed.rows(first, last), fmt), torch.float64)
            assert torch.equal(part, dense[..., first:last, :])
        one = get_format(fmt).dequantize(unpack(packed.expert(2), fmt), torch.float64)
        assert torch.equal(one, dense[2:])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_experts", [1, 9])
def test_unpack_experts_is_the_inverse_of_pack_experts(fmt: str, num_experts: int) -> None:
    experts = make_inputs(
        1, 96, 64, num_experts, 1, format=fmt, activation=gpt_oss_swiglu(), bias=True, seed=11
    ).experts
    packed = pack_experts(experts)
    again = unpack_experts(packed)
    assert_same(again.w13, experts.w13)
    assert_same(again.w2, experts.w2)
    assert again.activation == experts.activation
    assert again.w13_bias is experts.w13_bias
    assert again.w2_bias is experts.w2_bias


@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_layer_takes_no_more_memory_than_the_weights(fmt: str) -> None:
    experts = make_inputs(1, 256, 128, 4, 1, format=fmt, bias=True, seed=12).experts
    packed = pack_experts(experts)
    assert experts.nbytes <= packed.nbytes <= experts.nbytes + 2 * 4 * 2 * 4  # a matrix scale a half
    assert packed.bytes_per_expert == packed.nbytes // 4
    assert f"{fmt}, " in repr(packed)


def test_packed_layer_moves_to_another_device() -> None:
    packed = pack_experts(make_inputs(1, 64, 32, 2, 1, format="fp8_channel", bias=True, seed=13).experts)
    moved = packed.to("meta")
    tensors = (*moved.w13.tensors(), *moved.w2.tensors(), moved.w13_bias, moved.w2_bias)
    assert {t.device.type for t in tensors if t is not None} == {moved.device.type} == {"meta"}


# ---- slabs -----------------------------------------------------------------------------------------------------------


def slab_values(packed: PackedMatrix) -> torch.Tensor:
    """Weights [E, panel, block, lane, half of the panel, record of the block, 8 columns] as the kernel sees them, FP64.

    By its steps: masks and shifts to E4M3 numbers, scales as FP32 exponents.
    """
    pieces = packed.records.transpose(2, 3).flatten(1, 2)
    words = pieces[..., :512].contiguous().view(torch.int32).unflatten(-1, (32, 2, 2)).long() & 0xFFFFFFFF
    low, high = words.unbind(-1)
    operands = [w & 0x9C9C9C9C for w in (low, high, low << 1 ^ high >> 2, low << 2 ^ high << 3)]
    codes = [torch.stack([w >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8) for w in operands]
    values = [c.view(torch.float8_e4m3fn).double() for c in codes]
    rows = torch.stack(
        [torch.cat((values[half], values[half + 2]), -1) for half in (0, 1)], -3
    )  # [.., half, record, 8]
    word = (pieces[..., 512:].contiguous().view(torch.int32).long() & 0xFFFFFFFF)[..., torch.arange(32) // 4]
    moved = [word, word << 8, word << 16, (word << 24 | word >> 8) & 0xFFFFFFFF]
    fields = torch.stack([m & 0x7F800000 for m in moved], -1).int().view(torch.float32).double()
    return rows * fields.unflatten(-1, (2, 2))[..., None]


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_slabs_read_back_exactly(matrix: str) -> None:
    stored: QuantizedTensor = getattr(make_inputs(1, 192, 128, 3, 1, format="mxfp4", seed=2).experts, matrix)
    stored.scale[1, ..., 5, 0] = 253
    stored.scale[1, ..., 6, 1] = 0
    stored.scale[2, ..., 7, 1] = 254
    packed = pack(stored, in_slabs=True)
    assert packed.in_slabs
    dense = get_format("mxfp4").dequantize(stored, torch.float64)
    dense = dense if dense.dim() == 4 else dense[:, None]
    scale = packed.matrix_scale.double()[..., None, None].expand_as(dense).contiguous()
    value = slab_values(packed).transpose(-2, -3).transpose(-3, -4).flatten(2, 3)  # [E, panel, record, lane, half, 8]
    assert torch.equal(value * expected_lanes(scale), expected_lanes(dense))


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_unpack_gives_back_every_bit_of_slabs(matrix: str) -> None:
    stored: QuantizedTensor = getattr(make_inputs(1, 192, 128, 3, 1, format="mxfp4", seed=7).experts, matrix)
    codes = torch.arange(stored.data.numel()) * 7 + torch.arange(stored.data.numel()) // 256
    stored.data.view(torch.uint8).copy_(codes.to(torch.uint8).view_as(stored.data))
    assert_same(unpack(pack(stored, in_slabs=True), "mxfp4"), stored)
    for most in (253, 254):
        stored.scale.copy_(torch.randperm(stored.scale.numel()).view_as(stored.scale) % (most + 1))
        assert {0, most} <= set(stored.scale.flatten().tolist())
        assert_same(unpack(pack(stored, in_slabs=True), "mxfp4"), stored)


def test_nan_scale_becomes_a_block_of_nans_in_slabs() -> None:
    stored = make_inputs(1, 64, 64, 2, 1, format="mxfp4", seed=4).experts.w2
    stored.scale[1, 5, 0] = 255
    packed = pack(stored, in_slabs=True)
    value = slab_values(packed)
    assert value[1, 0, 0, 20:24, 0, 0].isnan().all()
    assert value.isnan().sum() == 32
    again = unpack(packed, "mxfp4")
    assert torch.equal(again.scale, stored.scale)
    assert (again.data[1, 5, :16] == 0).all()


def test_rows_and_experts_of_slabs_are_those_of_its_weights() -> None:
    experts = make_inputs(1, 320, 448, 3, 1, format="mxfp4", seed=10).experts
    for stored, rows in ((experts.w13, 448), (experts.w2, 320)):
        dense = get_format("mxfp4").dequantize(stored, torch.float64)
        packed = pack(stored, in_slabs=True)
        assert packed.cols == stored.shape[-1]
        for first, last in ((128, 256), (0, 128), (256, rows), (0, rows)):
            part = get_format("mxfp4").dequantize(unpack(packed.rows(first, last), "mxfp4"), torch.float64)
            assert torch.equal(part, dense[..., first:last, :])
        one = get_format("mxfp4").dequantize(unpack(packed.expert(2), "mxfp4"), torch.float64)
        assert torch.equal(one, dense[2:])


def test_slabs_take_as_much_memory_as_records() -> None:
    experts = make_inputs(1, 256, 128, 9, 1, format="mxfp4", bias=True, seed=12).experts
    packed = pack_experts(experts, in_slabs=True)
    assert packed.nbytes == pack_experts(experts).nbytes
    again = unpack_experts(packed)
    assert_same(again.w13, experts.w13)
    assert_same(again.w2, experts.w2)


def test_slabs_are_for_shapes_and_gpus_that_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_slabs("mxfp4", 64, SLAB_MOST_COLS)
    for format, hidden, intermediate in (
        ("mxfp8", 64, 64),
        ("mxfp4", 96, 64),
        ("mxfp4", 64, 96),
        ("mxfp4", SLAB_MOST_COLS + 64, 64),
    ):
        assert not has_slabs(format, hidden, intermediate)
    assert suits_slabs("mxfp4", 2880, 2880)
    for shape in (("mxfp4", 2880, 2752), ("mxfp8", 2880, 2880), ("mxfp4", 2912, 2880)):
        assert not suits_slabs(*shape)
    experts = make_inputs(1, 128, 64, 2, 1, format="mxfp4", seed=13).experts
    narrow = make_inputs(1, 96, 64, 2, 1, format="mxfp4", seed=13).experts
    assert not pack_experts(experts).in_slabs
    monkeypatch.setattr(layout, "is_hopper", lambda device: True)
    assert not pack_experts(experts).in_slabs  # small
    monkeypatch.setattr(slabs, "SLAB_LEAST_WEIGHTS", 128 * 64)
    assert pack_experts(experts).in_slabs
    assert not pack_experts(experts, in_slabs=False).in_slabs
    assert not pack_experts(narrow).in_slabs
    with pytest.raises(ArgumentError, match="divide by 64"):
        pack_experts(narrow, in_slabs=True)


def test_slabs_that_move_to_a_gpu_without_the_kernel_become_records(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_inputs(1, 128, 64, 5, 1, format="mxfp4", bias=True, seed=14).experts
    packed = pack_experts(experts, in_slabs=True)
    convert = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, to: t if to == "cuda" else convert(t, to))
    assert packed.to("cpu").in_slabs
    for hopper in (True, False):
        monkeypatch.setattr(layout, "is_hopper", lambda device, hopper=hopper: hopper)
        moved = packed.to("cuda")
        assert torch.equal(moved.w13.records, pack_experts(experts, in_slabs=hopper).w13.records)
        assert torch.equal(moved.w2.matrix_scale, pack_experts(experts, in_slabs=hopper).w2.matrix_scale)
