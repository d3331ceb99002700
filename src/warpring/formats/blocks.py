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

# Elements of a chunk: FP32 temporaries of 1 MiB stay in cache, and in memory that the allocator has at hand.
_CHUNK_ELEMENTS = 1 << 18


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
    def encode(self, blocks: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise FP32 `blocks`.

        Args:
            blocks: FP32 block tensor.
            global_scale: FP32 [matrices, 1, 1, 1, 1]; 1 where the format has none.

        Returns:
            Codes, uint8 bits of the shape of `blocks`; scales, [matrices, block rows, 1, block cols, 1].
        """

    def global_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """FP32 [matrices] global scale for each matrix's largest finite magnitude."""
        return torch.ones_like(amax)

    def scale_value(self, scale: torch.Tensor) -> torch.Tensor:
        """The numbers that stored scales stand for, in a dtype that holds them exactly."""
        return scale

    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        shape = check_weight(self.name, weight)
        flat = weight.reshape(math.prod(shape[:-2]), *shape[-2:])
        stored = self._empty(shape, weight.device)
        data, scale, *global_scale = self._flat(stored)
        multiplier = torch.ones(flat.shape[0], device=weight.device)
        for target in global_scale:
            multiplier = target.copy_(self.global_scale(self._matrix_amax(flat)))
        for matrices, rows, scale_rows in self._chunks(shape):
            blocks = to_blocks(flat[matrices, rows].float(), self._block(shape))
            codes, scales = self.encode(blocks, multiplier[matrices, None, None, None, None])
            codes = from_blocks(codes, *flat[matrices, rows].shape[1:])
            data[matrices, rows] = pack(codes) if self.packed else codes.view(self.data_dtype)
            scale[matrices, scale_rows] = scales[:, :, 0, :, 0]
        return stored

    def dequantize(self, stored: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.check(stored)
        check_dtype(self.name, dtype)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        shape, cols = stored.shape, stored.shape[-1]
        out = torch.empty(math.prod(shape[:-2]), *shape[-2:], dtype=dtype, device=stored.device)
        data, scale, *global_scale = self._flat(stored)
        for matrices, rows, scale_rows in self._chunks(shape):
            codes = data[matrices, rows]
            values = unpack(codes, cols, compute) if self.packed else codes.to(compute)
            factors = self.scale_value(scale[matrices, scale_rows]).to(compute)
            blocks = to_blocks(values, self._block(shape)) * factors[:, :, None, :, None]
            for factor in global_scale:
                blocks *= factor[matrices, None, None, None, None].to(compute)
            out[matrices, rows] = from_blocks(blocks, codes.shape[1], cols)
        return out.reshape(shape)

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

    def _flat(self, stored: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        """The stored tensors with the batch dimensions flattened into one."""
        batch = len(stored.shape) - 2
        matrices = math.prod(stored.shape[:-2])
        return tuple(tensor.reshape(matrices, *tensor.shape[batch:]) for tensor in stored.tensors())

    def _chunks(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, slice, slice]]:
        """(matrices, rows, scale rows) of pieces of about `_CHUNK_ELEMENTS`: several matrices, or rows of one."""
        matrices, rows, cols = math.prod(shape[:-2]), *shape[-2:]
        block_rows = self._block(shape)[0]
        height = min(rows, max(1, _CHUNK_ELEMENTS // (cols * block_rows)) * block_rows)
        depth = max(1, _CHUNK_ELEMENTS // (rows * cols))
        for matrix in range(0, matrices, depth):
            for row in range(0, rows, height):
                scale_rows = slice(row // block_rows, ceil_div(row + height, block_rows))
                yield slice(matrix, matrix + depth), slice(row, row + height), scale_rows

    def _matrix_amax(self, flat: torch.Tensor) -> torch.Tensor:
        """FP32 [matrices]: largest finite magnitude of each of [matrices, rows, cols]."""
        amax = torch.zeros(flat.shape[0], device=flat.device)
        for matrices, rows, _ in self._chunks(tuple(flat.shape)):
            piece = finite_amax(flat[matrices, rows].float(), (1, 2)).flatten()
            amax[matrices] = torch.maximum(amax[matrices], piece)
        return amax


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


def divide(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """FP32 quotient, rounded once. On CUDA, torch multiplies by a Python number's reciprocal, which rounds twice."""
    return values / torch.full((), divisor, dtype=torch.float32, device=values.device)


def cut_significand(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Non-negative FP32 values cut down (never up) to `bits` significand bits, the leading one counted.

    A scale with so few bits gives products with codes that FP32 holds exactly, and none beyond the block's amax.
    """
    return (values.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)


def unit_where_zero(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """FP32 scales, 1 where amax is 0 and nowhere below `MIN_SCALE`: nothing divides by zero or is subnormal."""
    return torch.where(amax == 0, 1.0, scale.clamp(min=MIN_SCALE))
