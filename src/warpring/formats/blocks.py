"""What the scaled formats share: chunked quantising and dequantising, blocks with overhanging edges, checks.

The batch dimensions are flattened once, in `ScaledFormat`, to `[matrices, rows, cols]`, and the work is cut into
chunks of matrices, so that temporaries stay small beside the weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch

from warpring.errors import ArgumentError
from warpring.formats.base import Format, QuantizedTensor, ceil_div
from warpring.formats.checks import check_absent, check_dtype, check_stored, check_tensor, check_weight
from warpring.formats.e2m1 import pack, unpack

#: FP32's smallest normal number. No quantiser writes a smaller scale: kernels may flush subnormals to zero.
MIN_SCALE = 2.0**-126

# Elements a chunk may have (64 MiB of each FP32 temporary), unless one matrix alone has more.
_CHUNK_ELEMENTS = 1 << 24

Parts = tuple[torch.Tensor, ...]


class ScaledFormat(Format):
    """A format of codes and scales; value = code * scale (* global_scale).

    Subclasses encode blocks. A block tensor is [matrices, block rows, rows of one, block cols, cols of one].

    Class attributes:
        data_dtype, scale_dtype: dtypes of the stored tensors.
        packed: whether `data` holds two E2M1 codes a byte; else an element is a number by itself.
        has_global_scale: whether each matrix has one more FP32 scale.
    """

    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    packed: bool = False
    has_global_scale: bool = False

    @abstractmethod
    def encode(self, blocks: torch.Tensor) -> Parts:
        """Codes (uint8 bits) of FP32 `blocks`, scale [matrices, block rows, 1, block cols, 1] (, global_scale)."""

    def scale_value(self, scale: torch.Tensor) -> torch.Tensor:
        """The numbers that stored scales stand for, in a dtype that holds them exactly."""
        return scale

    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        shape = check_weight(self.name, weight)
        flat = weight.reshape(math.prod(shape[:-2]), *shape[-2:])
        stored = self._empty(shape, weight.device)
        targets = self._flat(stored)
        for chunk in _chunks(flat.shape):
            codes, *scales = self.encode(to_blocks(flat[chunk].float(), self._block(shape)))
            codes = from_blocks(codes, *shape[-2:])
            codes = pack(codes) if self.packed else codes.view(self.data_dtype)
            for target, part in zip(targets, (codes, *scales), strict=True):
                target[chunk] = part.reshape(target[chunk].shape)
        return stored

    def dequantize(self, stored: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.check(stored)
        check_dtype(self.name, dtype)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        rows, cols = stored.shape[-2:]
        out = torch.empty(math.prod(stored.shape[:-2]), rows, cols, dtype=dtype, device=stored.device)
        parts = self._flat(stored)
        for chunk in _chunks(out.shape):
            data, scale, *global_scale = (part[chunk] for part in parts)
            values = unpack(data, cols, compute) if self.packed else data.to(compute)
            blocks = to_blocks(values, self._block(stored.shape))
            blocks = blocks * self.scale_value(scale).to(compute)[:, :, None, :, None]
            for factor in global_scale:
                blocks = blocks * factor.to(compute)[:, None, None, None, None]
            out[chunk] = from_blocks(blocks, rows, cols)
        return out.reshape(stored.shape)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], ceil_div(shape[-1], 2) if self.packed else shape[-1])

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        block_rows, block_cols = self._block(shape)
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

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(rows, cols) under one scale; a format without a fixed block scales each row."""
        return self.block or (1, shape[-1])

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


def cut_significand(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Non-negative FP32 values cut down (never up) to `bits` significand bits, the leading one counted.

    A scale with so few bits gives products with codes that FP32 holds exactly, and none beyond the block's amax.
    """
    return (values.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)


def unit_where_zero(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """FP32 scales, 1 where amax is 0 and nowhere below `MIN_SCALE`: nothing divides by zero or is subnormal."""
    return torch.where(amax == 0, 1.0, scale.clamp(min=MIN_SCALE))
