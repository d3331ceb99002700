"""What formats ask of their arguments, each rule in one place."""

from __future__ import annotations

import torch

from warpring.errors import ArgumentError
from warpring.formats.base import QuantizedTensor


def check_weight(name: str, weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight to quantise, or ArgumentError."""
    if not weight.is_floating_point():
        raise ArgumentError(f"{name}.quantize: weight must be floating point; got {weight.dtype}. Call .float().")
    if weight.dim() < 2 or 0 in weight.shape[-2:]:
        raise ArgumentError(
            f"{name}.quantize: weight must be [..., rows, cols] with at least one row and column; "
            f"got {list(weight.shape)}. Add a dimension of 1 for a vector."
        )
    return tuple(weight.shape)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """ArgumentError unless `dtype` is one that dequantising can give."""
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ArgumentError(
            f"{name}.dequantize: dtype must be float32, float64, bfloat16 or float16; got {dtype}. Cast the result."
        )


def check_stored(name: str, stored: QuantizedTensor) -> tuple[int, ...]:
    """The logical shape of stored weights of format `name`, or ArgumentError."""
    if stored.format != name:
        raise ArgumentError(
            f"{name}: the weights are stored as {stored.format!r}. Use get_format({stored.format!r}), or requantise."
        )
    if len(stored.shape) < 2 or 0 in stored.shape[-2:]:
        raise ArgumentError(
            f"{name}: shape must be [..., rows, cols] with at least one row and column; got {list(stored.shape)}."
        )
    return stored.shape


def check_tensor(name: str, part: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """ArgumentError unless the stored tensor `part` is there, of this dtype and shape."""
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        got = "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ArgumentError(
            f"{name}: {part} must be {dtype} {list(shape)}; got {got}. "
            f"get_format({name!r}).quantize makes a fitting one."
        )


def check_absent(name: str, part: str, tensor: torch.Tensor | None) -> None:
    """ArgumentError where a stored tensor that the format does not have is given."""
    if tensor is not None:
        raise ArgumentError(f"{name}: {part} must be None; got {tensor.dtype} {list(tensor.shape)}. Leave it out.")
