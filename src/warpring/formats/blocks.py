"""What the scaled formats share: chunked quantising and dequantising, blocks with overhanging edges, checks.

Every function below this line works on `[matrices, rows, cols]`; the batch dimensions are flattened once, in
`ScaledFormat`, and the work is cut into chunks of matrices, so that temporaries stay small beside the weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch

from warpring.errors import ArgumentError
from warpring.formats.base import Format, QuantizedTensor, ceil_div

#: FP32's smallest normal number. No quantiser writes a smaller scale: kernels may flush subnormals to zero.
MIN_SCALE = 2.0**-126

# Elements of FP32 temporaries a step may make (64 MiB each), unless one matrix alone is larger.
_CHUNK_ELEMENTS = 1 << 24

Parts = tuple[torch.Tensor, ...]


class ScaledFormat(Format):
    """A format of codes and scales. Subclasses say how one chunk is encoded and decoded.

    Class attributes:
        data_dtype, scale_dtype: dtypes of the stored tensors.
        codes_per_element: codes in one element of `data`: 1, or 2 for packed 4-bit codes.
        has_global_scale: whether each matrix has one more FP32 scale.
    """

    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    codes_per_element: int = 1
    has_global_scale: bool = False

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> Parts:
        """(data, scale[, global_scale]) of FP32 weights [matrices, rows, cols]."""

    @abstractmethod
    def decode(self, parts: Parts, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """[matrices, rows, cols] of `dtype` (float32 or float64) from what `encode` gave."""

    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        shape = check_weight(self.name, weight)
        flat = weight.reshape(math.prod(shape[:-2]), *shape[-2:])
        stored = self._empty(shape, weight.device)
        targets = self._flat(stored)
        for chunk in _chunks(flat.shape):
            for target, part in zip(targets, self.encode(flat[chunk].float()), strict=True):
                target[chunk] = part
        return stored

    def dequantize(self, stored: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.check(stored)
        check_dtype(self.name, dtype)
        rows, cols = stored.shape[-2:]
        out = torch.empty(math.prod(stored.shape[:-2]), rows, cols, dtype=dtype, device=stored.device)
        parts = self._flat(stored)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        for chunk in _chunks(out.shape):
            out[chunk] = self.decode(tuple(part[chunk] for part in parts), cols, compute)
        return out.reshape(stored.shape)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], ceil_div(shape[-1], self.codes_per_element))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        block_rows, block_cols = self.block or (1, shape[-1])
        return (*shape[:-2], ceil_div(shape[-2], block_rows), ceil_div(shape[-1], block_cols))

    def check(self, stored: QuantizedTensor) -> None:
        shape = check_stored(self.name, stored)
        check_tensor(self.name, "data", stored.data, self.data_dtype, self.data_shape(shape))
        check_tensor(self.name, "scale", stored.scale, self.scale_dtype, self.scale_shape(shape))
        if self.has_global_scale:
            check_tensor(self.name, "global_scale", stored.global_scale, torch.float32, shape[:-2])
        else:
            check_absent(self.name, "global_scale", stored.global_scale)
        devices = {tensor.device for tensor in stored.tensors()}
        if len(devices) > 1:
            raise ArgumentError(
                f"{self.name}: data and scales must lie on one device; got {sorted(map(str, devices))}. Use .to()."
            )

    def _empty(self, shape: tuple[int, ...], device: torch.device) -> QuantizedTensor:
        return QuantizedTensor(
            format=self.name,
            shape=shape,
            data=torch.empty(self.data_shape(shape), dtype=self.data_dtype, device=device),
            scale=torch.empty(self.scale_shape(shape), dtype=self.scale_dtype, device=device),
            global_scale=torch.empty(shape[:-2], device=device) if self.has_global_scale else None,
        )

    def _flat(self, stored: QuantizedTensor) -> Parts:
        """The stored tensors with the batch dimensions flattened into one."""
        batch = len(stored.shape) - 2
        matrices = math.prod(stored.shape[:-2])
        return tuple(tensor.reshape(matrices, *tensor.shape[batch:]) for tensor in stored.tensors())


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    matrices, rows, cols = shape
    step = max(1, _CHUNK_ELEMENTS // (rows * cols))
    for start in range(0, matrices, step):
        yield slice(start, start + step)


def to_blocks(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[matrices, rows, cols] as [matrices, block rows, rows of one, block cols, cols of one], edges padded with 0."""
    matrices, rows, cols = tensor.shape
    block_rows, block_cols = block
    down, across = ceil_div(rows, block_rows), ceil_div(cols, block_cols)
    padding = (0, across * block_cols - cols, 0, down * block_rows - rows)
    if any(padding):
        tensor = torch.nn.functional.pad(tensor, padding)
    return tensor.reshape(matrices, down, block_rows, across, block_cols)


def from_blocks(blocks: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `to_blocks`: padding cut off."""
    return blocks.flatten(3, 4).flatten(1, 2)[:, :rows, :cols]


def finite_amax(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude over `dims`, kept as size 1; 0 where there is none."""
    return torch.where(tensor.isfinite(), tensor, 0).abs().amax(dims, keepdim=True)


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
