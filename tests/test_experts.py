"""`Experts`: both sides of every rule, every format and odd size, moves between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from warpring.activation import SILU, clipped_swiglu
from warpring.errors import ArgumentError
from warpring.experts import MAX_EXPERTS, Experts
from warpring.formats import FORMATS, QuantizedTensor, get_format

every_format = pytest.mark.parametrize("format", FORMATS)


def dense(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, intermediate, generator=generator) / intermediate**0.5
    return w13, w2


def make(
    format: str = "bf16", num_experts: int = 3, hidden: int = 64, intermediate: int = 96, biased: bool = False
) -> Experts:
    w13, w2 = dense(num_experts, hidden, intermediate)
    w13_bias = torch.randn(num_experts, 2 * intermediate) if biased else None
    w2_bias = torch.randn(num_experts, hidden) if biased else None
    return Experts.from_dense(w13, w2, format=format, w13_bias=w13_bias, w2_bias=w2_bias)


def bf16(*shape: int) -> QuantizedTensor:
    """Stored BF16 weights of a shape that the quantiser need not have seen."""
    return QuantizedTensor("bf16", shape, torch.zeros(shape, dtype=torch.bfloat16))


# --- from_dense ------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (96, 160), (160, 96), (192, 352), (288, 192)])
def test_from_dense_stores_what_the_format_makes_of_each_half(format: str, hidden: int, intermediate: int) -> None:
    w13, w2 = dense(3, hidden, intermediate)
    experts = Experts.from_dense(w13, w2, format=format)

    fmt = get_format(format)
    dense_w13, dense_w2 = experts.dequantize()
    # Gate and up are quantised apart: a block of scales that straddled them would change these values.
    halves = [fmt.dequantize(fmt.quantize(half.contiguous())) for half in w13.chunk(2, dim=1)]
    assert torch.equal(dense_w13, torch.cat(halves, dim=1))
    assert torch.equal(dense_w2, fmt.dequantize(fmt.quantize(w2)))
    assert dense_w13.shape == w13.shape


@every_format
@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 96), (64, 2880), (64, 2304), (5120, 32)])
def test_from_dense_takes_the_odd_sizes_of_real_models(format: str, hidden: int, intermediate: int) -> None:
    w13, w2 = dense(1, hidden, intermediate)
    experts = Experts.from_dense(w13, w2, format=format)
    assert (experts.num_experts, experts.hidden, experts.intermediate) == (1, hidden, intermediate)
    for stored, original in zip(experts.dequantize(), (w13, w2), strict=True):
        # No format here is worse than 4 bits: wrong rows, halves or blocks would give an error near 1.
        assert (stored - original).norm() < 0.15 * original.norm()


@every_format
def test_from_dense_of_another_dtype_equals_from_dense_of_its_fp32_values(format: str) -> None:
    w13, w2 = (w.bfloat16() for w in dense(2, 64, 96))
    for actual, expected in zip(
        Experts.from_dense(w13, w2, format=format).dequantize(),
        Experts.from_dense(w13.float(), w2.float(), format=format).dequantize(),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@every_format
def test_from_dense_of_strided_weights_equals_from_dense_of_contiguous_ones(format: str) -> None:
    w13, w2 = dense(2, 64, 96)
    strided = Experts.from_dense(w13.mT.contiguous().mT, w2.mT.contiguous().mT, format=format)
    for actual, expected in zip(
        strided.dequantize(), Experts.from_dense(w13, w2, format=format).dequantize(), strict=True
    ):
        assert torch.equal(actual, expected)


def test_codes_of_w13_are_those_of_gate_rows_first() -> None:
    w13, w2 = dense(2, 64, 96)
    experts = Experts.from_dense(w13, w2)
    assert experts.w13.shape == (2, 2, 96, 64)
    assert torch.equal(experts.w13.data.flatten(1, 2), w13.bfloat16())


def test_biases_become_fp32_and_split_into_gate_and_up() -> None:
    w13, w2 = dense(2, 64, 96)
    w13_bias, w2_bias = torch.randn(2, 192).bfloat16(), torch.randn(64, 2).bfloat16().mT
    experts = Experts.from_dense(w13, w2, w13_bias=w13_bias, w2_bias=w2_bias)
    assert experts.w13_bias is not None
    assert experts.w2_bias is not None
    assert torch.equal(experts.w13_bias[:, 0], w13_bias[:, :96].float())
    assert torch.equal(experts.w13_bias[:, 1], w13_bias[:, 96:].float())
    assert torch.equal(experts.w2_bias, w2_bias.float())
    assert experts.w2_bias.is_contiguous()


def test_activation_is_kept_and_silu_by_default() -> None:
    w13, w2 = dense(1, 32, 32)
    assert Experts.from_dense(w13, w2).activation == SILU
    assert Experts.from_dense(w13, w2, activation=clipped_swiglu(3.0)).activation == clipped_swiglu(3.0)


@pytest.mark.parametrize(
    ("w13_shape", "w2_shape", "message"),
    [
        ((2, 192), (2, 64, 96), r"w13 must be .* got w13 \[2, 192\]"),
        ((2, 192, 64), (64, 96), r"w2 .* got .* w2 \[64, 96\]"),
        ((2, 191, 64), (2, 64, 96), r"got w13 \[2, 191, 64\]"),
        ((2, 192, 64), (2, 96, 64), r"w2 must be .* = \[2, 64, 96\] to fit w13; got .* w2 \[2, 96, 64\]"),
        ((2, 192, 64), (3, 64, 96), r"w2 must be .* = \[2, 64, 96\]"),
        ((2, 192, 48), (2, 48, 96), r"hidden must be a positive multiple of 32; got 48 .*Zero-pad hidden to 64"),
        ((2, 160, 64), (2, 64, 80), r"intermediate must be .* got 80 .*Zero-pad intermediate to 96 in both w13 and w2"),
        ((2, 32, 64), (2, 64, 16), r"intermediate .* got 16 .*Zero-pad intermediate to 32"),
        ((0, 192, 64), (0, 64, 96), "num_experts must be 1 to 1024; got 0"),
    ],
)
def test_shapes_that_break_a_rule_are_refused(
    w13_shape: tuple[int, ...], w2_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Experts.from_dense(torch.zeros(w13_shape), torch.zeros(w2_shape))


def test_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"format must be one of bf16, .*; got 'int3'"):
        Experts.from_dense(*dense(1, 32, 32), format="int3")


@pytest.mark.parametrize("bias_shape", [(2, 96), (2, 191), (192,), (3, 192)])
def test_w13_bias_of_a_wrong_shape_is_refused(bias_shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="w13_bias must be"):
        Experts.from_dense(*dense(2, 64, 96), w13_bias=torch.zeros(bias_shape))


@pytest.mark.parametrize("bias_shape", [(2, 96), (64,), (1, 64)])
def test_w2_bias_of_a_wrong_shape_is_refused(bias_shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"w2_bias must be .* \[2, 64\]"):
        Experts.from_dense(*dense(2, 64, 96), w2_bias=torch.zeros(bias_shape))


# --- the constructor's own rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_1024_experts_are_allowed_and_1025_are_not(format: str) -> None:
    assert MAX_EXPERTS == 1024
    w13, w2 = torch.zeros(1025, 64, 32), torch.zeros(1025, 32, 32)
    assert Experts.from_dense(w13[:1024], w2[:1024], format=format).num_experts == 1024
    with pytest.raises(ArgumentError, match=r"num_experts must be 1 to 1024; got 1025.*Shard the experts"):
        Experts.from_dense(w13, w2, format=format)


@pytest.mark.parametrize(
    ("w13", "w2", "message"),
    [
        (bf16(2, 192, 64), bf16(2, 64, 96), r"w13 must be \[num_experts, 2, .* got w13 \[2, 192, 64\]"),
        (bf16(2, 3, 96, 64), bf16(2, 64, 96), r"got w13 \[2, 3, 96, 64\]"),
        (bf16(2, 2, 96, 64), bf16(2, 1, 64, 96), r"w2 \[2, 1, 64, 96\]"),
        (bf16(2, 2, 96, 64), bf16(2, 64, 32), r"w2 must be .* = \[2, 64, 96\]"),
        (bf16(2, 2, 0, 64), bf16(2, 64, 0), "intermediate must be a positive multiple of 32; got 0 .* to 32 in both"),
        (bf16(2, 2, 96, 0), bf16(2, 0, 96), "hidden must be a positive multiple of 32; got 0 .* to 32 in both"),
    ],
)
def test_stored_shapes_that_break_a_rule_are_refused(w13: QuantizedTensor, w2: QuantizedTensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^Experts: .*{message}"):
        Experts(w13, w2)


def test_two_formats_in_one_layer_are_refused() -> None:
    with pytest.raises(ArgumentError, match="must have one format; got bf16 and mxfp8"):
        Experts(make("bf16").w13, make("mxfp8").w2)


@every_format
def test_stored_tensors_that_break_the_format_are_refused(format: str) -> None:
    experts = make(format)
    for part in ("w13", "w2"):
        stored = getattr(experts, part)
        with pytest.raises(ArgumentError, match="data must be"):
            replace(experts, **{part: replace(stored, data=stored.data[..., :-1])})


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


@every_format
@pytest.mark.parametrize("part", ["w13", "w2"])
def test_strided_weights_are_refused(format: str, part: str) -> None:
    experts = make(format)
    with pytest.raises(ArgumentError, match=rf"{part} must be contiguous; got strides .*\.contiguous\(\)"):
        replace(experts, **{part: getattr(experts, part).map(lambda t: _strided(t) if t.dim() > 2 else t)})


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("w13_bias", torch.Tensor.double),
        ("w13_bias", lambda bias: bias.flatten(1)),
        ("w13_bias", _strided),
        ("w2_bias", torch.Tensor.bfloat16),
        ("w2_bias", lambda bias: bias[:, :-1]),
        ("w2_bias", _strided),
    ],
)
def test_biases_that_break_a_rule_are_refused(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    experts = make(biased=True)
    with pytest.raises(ArgumentError, match=f"{part} must be contiguous float32"):
        replace(experts, **{part: change(getattr(experts, part))})


@pytest.mark.parametrize("part", ["w13", "w2", "w13_bias", "w2_bias"])
def test_tensors_on_two_devices_are_refused(part: str) -> None:
    experts = make(biased=True)
    with pytest.raises(ArgumentError, match=r"one device; got \['cpu', 'meta'\].*\.to\(\)"):
        replace(experts, **{part: getattr(experts, part).to("meta")})


def test_one_bias_without_the_other_is_allowed() -> None:
    experts = make(biased=True)
    assert replace(experts, w13_bias=None).w2_bias is experts.w2_bias
    assert replace(experts, w2_bias=None).w13_bias is experts.w13_bias


# --- the object ------------------------------------------------------------------------------------------------------


def test_experts_are_frozen_and_compare_by_identity() -> None:
    experts = make()
    with pytest.raises(FrozenInstanceError):
        experts.w2 = experts.w2  # type: ignore[misc]
    assert experts != make()
    assert len({experts, experts}) == 1


BYTES_PER_EXPERT = {
    # 3 matrices of 64 x 96 weights; scales: of w13 (2 halves of 96 x 64) and of w2 (64 x 96).
    "bf16": 3 * 64 * 96 * 2,
    "fp8_block": 3 * 64 * 96 + 4 * (2 + 1),
    "fp8_channel": 3 * 64 * 96 + 4 * (2 * 96 + 64),
    "mxfp8": 3 * 64 * 96 * 33 // 32,
    "mxfp4": 3 * 64 * 96 * 17 // 32,
    "nvfp4": 3 * 64 * 96 * 9 // 16 + 4 * (2 + 1),
}


@every_format
@pytest.mark.parametrize("biased", [False, True])
def test_bytes_count_codes_scales_and_biases(format: str, biased: bool) -> None:
    experts = make(format, num_experts=5, biased=biased)
    expected = BYTES_PER_EXPERT[format] + biased * 4 * (2 * 96 + 64)
    assert experts.bytes_per_expert == expected
    assert experts.nbytes == 5 * expected


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dequantize_gives_dense_shapes_of_the_dtype(format: str, dtype: torch.dtype) -> None:
    w13, w2 = make(format).dequantize(dtype)
    assert (w13.shape, w2.shape) == ((3, 192, 64), (3, 64, 96))
    assert w13.dtype == w2.dtype == dtype


@every_format
@pytest.mark.parametrize("biased", [False, True])
def test_to_moves_every_tensor_and_keeps_the_rest(format: str, biased: bool) -> None:
    experts = replace(make(format, biased=biased), activation=clipped_swiglu())
    moved = experts.to("meta")
    tensors = [*moved.w13.tensors(), *moved.w2.tensors()]
    tensors += [bias for bias in (moved.w13_bias, moved.w2_bias) if bias is not None]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.device == torch.device("meta")
    assert experts.device == torch.device("cpu")
    assert (moved.format, moved.activation, moved.nbytes) == (format, clipped_swiglu(), experts.nbytes)
    assert (moved.w13_bias is None) == (experts.w13_bias is None)


def test_repr_says_sizes_format_and_device_on_one_line() -> None:
    text = repr(make("mxfp4", num_experts=7, hidden=128, intermediate=96))
    assert "\n" not in text
    for part in ("7 x 128 x 96", "mxfp4", "MiB on cpu", "silu"):
        assert part in text


@pytest.mark.gpu
@every_format
def test_experts_survive_the_gpu_and_back(format: str) -> None:
    experts = make(format, biased=True)
    there: Any = experts.to("cuda")
    assert there.device.type == "cuda"
    back = there.to("cpu")
    for stored, original in ((back.w13, experts.w13), (back.w2, experts.w2)):
        for actual, expected in zip(stored.tensors(), original.tensors(), strict=True):
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(back.w13_bias, experts.w13_bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": torch.zeros(1025, 64, 32), "w2": torch.zeros(1025, 32, 32)}, "num_experts must be 1 to 1024"),
        ({"w13": torch.zeros(2, 64, 48), "w2": torch.zeros(2, 48, 32)}, "hidden must be a positive multiple of 32"),
        ({"w13_bias": torch.zeros(2, 32)}, r"w13_bias must be .* \[2, 64\], gate first; got \[2, 32\]"),
        ({"w2_bias": torch.zeros(2, 31)}, r"w2_bias must be .* \[2, 32\]; got"),
    ],
)
def test_broken_rules_are_found_before_anything_is_quantised(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, torch.Tensor], message: str
) -> None:
    def never(self: object, weight: torch.Tensor) -> None:
        raise RuntimeError("quantised")

    monkeypatch.setattr(type(get_format("mxfp8")), "quantize", never)
    arguments = {"w13": torch.zeros(2, 64, 32), "w2": torch.zeros(2, 32, 32)} | change
    with pytest.raises(ArgumentError, match=message):
        Experts.from_dense(format="mxfp8", **arguments)


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_experts_of_trainable_weights_are_data(format: str) -> None:
    parameters = [torch.zeros(shape).requires_grad_() for shape in ((2, 64, 32), (2, 32, 32), (2, 64), (2, 32))]
    w13, w2, w13_bias, w2_bias = parameters
    experts = Experts.from_dense(w13, w2, format=format, w13_bias=w13_bias, w2_bias=w2_bias)
    stored = (*experts.w13.tensors(), *experts.w2.tensors(), experts.w13_bias, experts.w2_bias)
    assert not any(tensor.requires_grad for tensor in stored if tensor is not None)
