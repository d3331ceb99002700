"""What a number format is: a way to store a weight matrix, and the exact value of what was stored.

A format stores the last two dimensions `[rows, cols]` of a tensor; every leading dimension (expert,
gate/up half) is a batch dimension. `cols` is the reduction dimension of the layer's dot products.
Quantising always rounds to nearest, ties to even. Dequantising is exact in FP32 for all that our quantisers
write: their FP32 scales are cut to so few bits that code times scale fits FP32. A checkpoint's own FP32 scales
may use all 24 bits; then the product is rounded once to FP32, and FP64 holds it exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from warpring.errors import ArgumentError


@dataclass(frozen=True)
class QuantizedTensor:
    """Weights of logical shape `shape = [..., rows, cols]`, stored as `format` says.

    Attributes:
        format: name of the format, a key of `warpring.formats.get_format`.
        shape: logical shape, `[..., rows, cols]`.
        data: codes. One element a weight (bf16, e4m3), or uint8 with two 4-bit codes a byte,
            `[..., rows, ceil(cols / 2)]`, the even column in the low nibble.
        scale: one scale a block, `[..., scale rows, scale cols]`, or None (bf16). FP32 for the FP8
            formats, uint8 UE8M0 for the MX formats (value 2^(code - 127), 255 = NaN), e4m3 for NVFP4.
        global_scale: FP32 of the batch shape `[...]`, NVFP4 only: the second-level scale.
    """

    format: str
    shape: tuple[int, ...]
    data: torch.Tensor
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The stored tensors that exist: data, then scale, then global_scale."""
        return tuple(t for t in (self.data, self.scale, self.global_scale) if t is not None)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        """The same weights with `fn` applied to each stored tensor (a move to a device, a clone)."""
        return replace(
            self,
            data=fn(self.data),
            scale=None if self.scale is None else fn(self.scale),
            global_scale=None if self.global_scale is None else fn(self.global_scale),
        )

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same weights on another device."""
        return self.map(lambda t: t.to(device))

    def __getitem__(self, index: int) -> QuantizedTensor:
        """One entry of the first batch dimension, sharing storage."""
        if len(self.shape) < 3:
            raise ArgumentError(
                f"QuantizedTensor[...]: only a batch dimension can be indexed; got shape {list(self.shape)}. "
                "Dequantise to reach rows."
            )
        return replace(self.map(lambda t: t[index]), shape=self.shape[1:])


class Format(ABC):
    """One number format. Instances are stateless; `get_format(name)` returns the registered one.

    Class attributes:
        name: registry key, e.g. "mxfp8".
        bits_per_weight: bits of one code, scales not counted.
        block: (rows, cols) that share one scale; it may overhang the edge of the matrix. None where no size is
            fixed: BF16 has no scale, per-channel FP8 one a row.
        title: one line for tables and error messages.
    """

    name: str
    bits_per_weight: int
    block: tuple[int, int] | None
    title: str

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantise `[..., rows, cols]` floating-point weights (any float dtype, read as FP32)."""

    @abstractmethod
    def dequantize(self, stored: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The stored values, `[..., rows, cols]`, computed in FP32 (FP64 where `dtype` is) and cast to `dtype`."""

    @abstractmethod
    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `data` for a logical shape."""

    @abstractmethod
    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of `scale` for a logical shape, None where the format has none."""

    @abstractmethod
    def check(self, stored: QuantizedTensor) -> None:
        """Raise ArgumentError unless dtypes and shapes of the stored tensors follow the format."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, b > 0."""
    return -(-a // b)
