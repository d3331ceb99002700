"""From a matrix's stored tensors to its weights: which number format they are in, checked before a byte is read.

The format follows from the dtypes and the scale's shape, never from a name alone: FP8 weights go with `weight_scale`
in three layouts, and a 4-bit matrix looks the same in two formats but for its scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from warpring.checkpoint.shards import Shards, TensorSpec
from warpring.errors import CheckpointError
from warpring.formats import Format, QuantizedTensor, get_format

DENSE = "dense"
_DENSE_DTYPES = ("BF16", "F16", "F32")
_MX_BLOCK_BYTES = 16

#: Weights as they were stored: dense (still unrounded), or in one of our formats.
Matrix = torch.Tensor | QuantizedTensor


@dataclass(frozen=True)
class Rule:
    """One way that checkpoints store a matrix: our format's name, and the dtypes that tell it."""

    format: str
    data: tuple[str, ...]
    scale: tuple[str, ...]
    global_scale: bool = False


RULES = (
    Rule("fp8_block", ("F8_E4M3",), ("F32", "BF16", "F8_E8M0")),
    Rule("fp8_channel", ("F8_E4M3",), ("F32", "BF16")),
    Rule("mxfp8", ("F8_E4M3",), ("U8", "F8_E8M0")),
    Rule("mxfp4", ("U8", "I8"), ("U8", "F8_E8M0")),
    Rule("nvfp4", ("U8",), ("F8_E4M3",), global_scale=True),
)


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix, or a batch of them, in a checkpoint.

    Attributes:
        parts: "data", "scale", "global_scale", "bias" -> tensor name.
        shape: logical shape [..., rows, cols], a leading expert dimension included where the tensor is stacked.
        format: a name of `FORMATS`, or "dense".
        transposed: dense data is [..., cols, rows].
    """

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    format: str
    transposed: bool

    def read(self, shards: Shards, index: int | None = None) -> Matrix:
        """The weights; with `index` those of one entry of the leading dimension."""
        data = shards.read(self.parts["data"], index)
        if self.format == DENSE:
            return data.mT if self.transposed else data
        fmt, shape = get_format(self.format), self.shape if index is None else self.shape[1:]
        scale = shards.read(self.parts["scale"], index)
        stored = QuantizedTensor(
            format=self.format,
            shape=shape,
            data=(data.view(torch.uint8) if data.dtype == torch.int8 else data).reshape(fmt.data_shape(shape)),
            scale=_canonical_scale(scale, fmt, shape),
            global_scale=shards.read(self.parts["global_scale"], index).reshape(shape[:-2])
            if "global_scale" in self.parts
            else None,
        )
        fmt.check(stored)
        return stored

    def read_bias(self, shards: Shards, index: int | None = None) -> torch.Tensor | None:
        """The bias in FP32, shape [..., rows], or None where the matrix has none."""
        return shards.read(self.parts["bias"], index).float() if "bias" in self.parts else None


def locate(shards: Shards, parts: Mapping[str, str], shape: tuple[int, ...], *, transposed: bool) -> StoredMatrix:
    """Find out how the matrix of logical `shape` is stored; reads headers only.

    Raises:
        CheckpointError: a tensor is misshapen, of a dtype that no format has, or its scale is missing.
    """
    specs = {part: shards.spec(name) for part, name in parts.items()}
    if "bias" in specs:
        _require(parts["bias"], specs["bias"], _DENSE_DTYPES, [shape[:-1]])
    data = specs["data"]
    if data.dtype in _DENSE_DTYPES and "scale" not in specs:
        stored_shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        _require(parts["data"], data, _DENSE_DTYPES, [stored_shape])
        return StoredMatrix(parts, shape, DENSE, transposed)
    rules = [rule for rule in RULES if data.dtype in rule.data]
    if not rules:
        raise CheckpointError(
            f"Checkpoint: tensor {parts['data']} in {data.file} must be {'/'.join(_all_data_dtypes())}; got {data}. "
            "Load a variant of the model that is stored in one of these."
        )
    if "scale" not in specs:
        raise CheckpointError(
            f"Checkpoint: tensor {parts['data']} in {data.file} is {data}, but its scale is missing: no tensor "
            f"{parts['data']}_scale_inv, _scale or _scales is listed. The checkpoint is incomplete."
        )
    return StoredMatrix(parts, shape, _match(parts, specs, shape, rules), transposed=False)


def _match(parts: Mapping[str, str], specs: Mapping[str, TensorSpec], shape: tuple[int, ...], rules: list[Rule]) -> str:
    scale = specs["scale"]
    expected: list[str] = []
    for rule in rules:
        shapes = _scale_shapes(get_format(rule.format), shape)
        expected.append(f"{'/'.join(rule.scale)} {' or '.join(str(list(s)) for s in shapes)} ({rule.format})")
        if scale.dtype not in rule.scale or scale.shape not in shapes:
            continue
        _require(parts["data"], specs["data"], rule.data, _data_shapes(get_format(rule.format), shape))
        if rule.global_scale != ("global_scale" in specs):
            raise CheckpointError(
                f"Checkpoint: tensor {parts['data']} in {specs['data'].file} is {rule.format}, which "
                + ("needs a global scale, and none is listed." if rule.global_scale else "has no global scale.")
            )
        if rule.global_scale:
            batch = shape[:-2]
            _require(parts["global_scale"], specs["global_scale"], ("F32",), [batch, batch or (1,)])
        return rule.format
    raise CheckpointError(
        f"Checkpoint: tensor {parts['scale']} in {scale.file} must be {', or '.join(expected)} to fit "
        f"{parts['data']} of shape {list(shape)}; got {scale}."
    )


def _scale_shapes(fmt: Format, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    scale_shape = fmt.scale_shape(shape) or ()
    if fmt.name != "fp8_channel":
        return [scale_shape]
    # A scale per row may lack its last dimension; one scale a matrix is the same scale for every row.
    return [scale_shape, shape[:-1], shape[:-2], (*shape[:-2], 1)]


def _data_shapes(fmt: Format, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    data_shape = fmt.data_shape(shape)
    if fmt.name != "mxfp4":
        return [data_shape]
    return [data_shape, (*data_shape[:-1], data_shape[-1] // _MX_BLOCK_BYTES, _MX_BLOCK_BYTES)]


def _canonical_scale(scale: torch.Tensor, fmt: Format, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale as our formats hold it: FP32 for the FP8 formats, bytes for the MX ones, E4M3 for NVFP4."""
    scale_shape = fmt.scale_shape(shape) or ()
    if fmt.name in ("fp8_block", "fp8_channel"):
        scale = scale.float()
        if scale.numel() != math.prod(scale_shape):
            return scale.reshape(*shape[:-2], 1, 1).expand(scale_shape).contiguous()
        return scale.reshape(scale_shape)
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def _require(name: str, spec: TensorSpec, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    if spec.dtype not in dtypes or spec.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise CheckpointError(
            f"Checkpoint: tensor {name} in {spec.file} must be {'/'.join(dtypes)} {wanted}; got {spec}. "
            "config.json and the weights do not belong together, or the file is damaged."
        )


def _all_data_dtypes() -> list[str]:
    return list(dict.fromkeys((*_DENSE_DTYPES, *(dtype for rule in RULES for dtype in rule.data))))


def convert(matrix: Matrix, fmt: Format | None) -> QuantizedTensor:
    """The matrix in `fmt`; None keeps its stored format (dense: BF16). Equal formats are passed through bit by bit."""
    if isinstance(matrix, torch.Tensor):
        return (fmt or get_format("bf16")).quantize(matrix)
    if fmt is None or fmt.name == matrix.format:
        return matrix
    return fmt.quantize(get_format(matrix.format).dequantize(matrix))
