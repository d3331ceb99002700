"""Each broken rule gives an ArgumentError that names the format, the part, the rule and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from format_oracle import ALL, SCALED

from warpring.errors import ArgumentError
from warpring.formats import FORMATS, QuantizedTensor, get_format, mxfp4_from_gpt_oss


def _stored(name: str) -> QuantizedTensor:
    return get_format(name).quantize(torch.ones(2, 130, 70))


def test_registry_has_the_six_formats_by_their_names() -> None:
    assert tuple(FORMATS) == ALL
    assert all(fmt.name == name and fmt.title for name, fmt in FORMATS.items())


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"bf16, fp8_block.*nvfp4; got 'int3'"):
        get_format("int3")


@pytest.mark.parametrize("name", ALL)
def test_integer_weights_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}\.quantize: weight must be floating point; got torch\.int32"):
        get_format(name).quantize(torch.ones(4, 4, dtype=torch.int32))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (8,), (0, 8), (2, 8, 0)])
def test_weights_without_rows_or_columns_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}\.quantize: weight must be \[\.\.\., rows, cols\]"):
        get_format(name).quantize(torch.ones(shape))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_results_of_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}\.dequantize: dtype must be .*; got {dtype}"):
        get_format(name).dequantize(_stored(name), dtype)


@pytest.mark.parametrize("name", ALL)
def test_weights_of_another_format_are_refused(name: str) -> None:
    other = "mxfp8" if name != "mxfp8" else "mxfp4"
    with pytest.raises(ArgumentError, match=rf"{name}: the weights are stored as '{other}'"):
        get_format(name).dequantize(_stored(other))


PARTS = [
    *((name, "data") for name in ALL),
    *((name, "scale") for name in SCALED),
    ("nvfp4", "global_scale"),
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_wrong_dtype_of_a_part_is_named(name: str, part: str) -> None:
    stored = _stored(name)
    wrong = replace(stored, **{part: getattr(stored, part).to(torch.float16)})
    with pytest.raises(ArgumentError, match=rf"{name}: {part} must be torch\.\w+ \[.*\]; got torch\.float16 \[.*\]"):
        get_format(name).check(wrong)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_wrong_shape_of_a_part_is_named(name: str, part: str) -> None:
    stored = _stored(name)
    tensor = getattr(stored, part)
    wrong = replace(stored, **{part: tensor[:1]})
    expected, got = str(list(tensor.shape)), str(list(tensor[:1].shape))
    with pytest.raises(ArgumentError) as error:
        get_format(name).check(wrong)
    assert f"{name}: {part} must be {tensor.dtype} {expected}; got {tensor.dtype} {got}." in str(error.value)


@pytest.mark.parametrize("name", SCALED)
def test_missing_scale_is_named(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: scale must be .*; got None"):
        get_format(name).dequantize(replace(_stored(name), scale=None))


def test_missing_global_scale_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"nvfp4: global_scale must be torch\.float32 \[2\]; got None"):
        get_format("nvfp4").check(replace(_stored("nvfp4"), global_scale=None))


@pytest.mark.parametrize(
    ("name", "part"),
    [("bf16", "scale"), *((name, "global_scale") for name in ALL if name != "nvfp4")],
)
def test_part_that_the_format_lacks_is_refused(name: str, part: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: {part} must be None; got torch\.float32 \[2\]"):
        get_format(name).check(replace(_stored(name), **{part: torch.ones(2)}))


@pytest.mark.parametrize("name", SCALED)
def test_parts_on_two_devices_are_refused(name: str) -> None:
    stored = _stored(name)
    with pytest.raises(ArgumentError, match=rf"{name}: data and scales must lie on one device; got \['cpu', 'meta'\]"):
        get_format(name).check(replace(stored, data=stored.data.to("meta")))


@pytest.mark.parametrize("name", ALL)
def test_logical_shape_without_rows_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: shape must be \[\.\.\., rows, cols\]"):
        get_format(name).check(replace(_stored(name), shape=(70,)))


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(2, 4, 3, 8, dtype=torch.uint8), torch.zeros(2, 4, 3, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, 2, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 16, dtype=torch.int8), torch.zeros(2, 4, 3, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, 3)),
        (torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
        (torch.zeros(16, dtype=torch.uint8), torch.zeros((), dtype=torch.uint8)),
    ],
)
def test_misshapen_gpt_oss_blocks_are_refused(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"mxfp4_from_gpt_oss: blocks must be uint8 .*; got blocks torch\."):
        mxfp4_from_gpt_oss(blocks, scales)
