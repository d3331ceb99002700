"""`Experts`: the expert weights of one MoE layer, in one number format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from warpring.activation import SILU, Activation
from warpring.errors import ArgumentError
from warpring.formats import QuantizedTensor, get_format

MAX_EXPERTS = 1024


class _Sized(Protocol):
    """A matrix that knows its bytes."""

    @property
    def nbytes(self) -> int: ...


class _Layer(_Sized, Protocol):
    """What `LayerBytes` needs of a layer."""

    @property
    def w13(self) -> _Sized: ...
    @property
    def w2(self) -> _Sized: ...
    @property
    def w13_bias(self) -> torch.Tensor | None: ...
    @property
    def w2_bias(self) -> torch.Tensor | None: ...
    @property
    def num_experts(self) -> int: ...


class LayerBytes:
    """The memory that a layer's experts take, in whatever layout they are."""

    @property
    def nbytes(self: _Layer) -> int:
        """Bytes of weights, scales and biases."""
        biases = (b for b in (self.w13_bias, self.w2_bias) if b is not None)
        return self.w13.nbytes + self.w2.nbytes + sum(b.numel() * b.element_size() for b in biases)

    @property
    def bytes_per_expert(self: _Layer) -> int:
        """Bytes that one expert's work must read at least once: codes, scales, biases."""
        return self.nbytes // self.num_experts


@dataclass(frozen=True, eq=False)
class Experts(LayerBytes):
    """Expert weights of one layer.

    Attributes:
        w13: gate and up projections, logical shape [num_experts, 2, intermediate, hidden]; index 0 of the
            second dimension is gate, 1 is up. Its codes are, byte for byte, those of the usual
            [num_experts, 2 * intermediate, hidden] with gate rows first; but blocks of scales never straddle
            the two halves, so every intermediate size works with every block size.
        w2: down projection, [num_experts, hidden, intermediate], same format.
        activation: the gated activation between them.
        w13_bias: FP32 [num_experts, 2, intermediate] or None.
        w2_bias: FP32 [num_experts, hidden] or None; scaled by the routing weight like the projection itself.

    All tensors are contiguous and lie on one device. The object is immutable; `to` returns a new one.
    """

    w13: QuantizedTensor
    w2: QuantizedTensor
    activation: Activation = field(default=SILU)
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def format(self) -> str:
        return self.w13.format

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def intermediate(self) -> int:
        return self.w13.shape[2]

    @property
    def hidden(self) -> int:
        return self.w13.shape[3]

    @property
    def device(self) -> torch.device:
        return self.w13.device

    @classmethod
    def from_dense(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        format: str = "bf16",
        activation: Activation = SILU,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> Experts:
        """Quantise dense weights. They are data here: gradients do not reach them.

        Args:
            w13: [num_experts, 2 * intermediate, hidden], gate rows first, any float dtype.
            w2: [num_experts, hidden, intermediate].
            format: a name of `warpring.formats.FORMATS`.
            activation: see `Activation`.
            w13_bias: [num_experts, 2 * intermediate], gate first, or None.
            w2_bias: [num_experts, hidden] or None.

        Raises:
            ArgumentError: shapes that do not fit each other, an unknown format; before anything is quantised.
        """
        if w13.dim() != 3 or w2.dim() != 3 or w13.shape[1] % 2:
            raise ArgumentError(
                "Experts.from_dense: w13 must be [num_experts, 2 * intermediate, hidden] and w2 [num_experts, hidden, "
                f"intermediate]; got w13 {list(w13.shape)}, w2 {list(w2.shape)}."
            )
        fmt = get_format(format)
        num_experts, two_intermediate, hidden = w13.shape
        shape = (num_experts, 2, two_intermediate // 2, hidden)
        _check_shapes(shape, tuple(w2.shape))
        if w13_bias is not None:
            if tuple(w13_bias.shape) != (num_experts, two_intermediate):
                raise ArgumentError(
                    f"Experts.from_dense: w13_bias must be [num_experts, 2 * intermediate] = "
                    f"{[num_experts, two_intermediate]}, gate first; got {list(w13_bias.shape)}."
                )
            w13_bias = w13_bias.detach().float().reshape(shape[:3]).contiguous()
        if w2_bias is not None:
            w2_bias = w2_bias.detach().float().contiguous()
        _check_biases(shape, w13_bias, w2_bias)
        return cls(
            w13=fmt.quantize(w13.detach().reshape(shape)),
            w2=fmt.quantize(w2.detach()),
            activation=activation,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )

    def to(self, device: torch.device | str) -> Experts:
        """The same experts on another device."""
        return replace(
            self,
            w13=self.w13.to(device),
            w2=self.w2.to(device),
            w13_bias=None if self.w13_bias is None else self.w13_bias.to(device),
            w2_bias=None if self.w2_bias is None else self.w2_bias.to(device),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense (w13 [num_experts, 2 * intermediate, hidden], w2 [num_experts, hidden, intermediate])."""
        fmt = get_format(self.format)
        return fmt.dequantize(self.w13, dtype).flatten(1, 2), fmt.dequantize(self.w2, dtype)

    def __repr__(self) -> str:
        return (
            f"Experts({self.num_experts} x {self.hidden} x {self.intermediate}, {self.format}, {self.activation}, "
            f"{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def _check(experts: Experts) -> None:
    w13, w2 = experts.w13, experts.w2
    _check_shapes(w13.shape, w2.shape)
    if w13.format != w2.format:
        raise ArgumentError(
            f"Experts: w13 and w2 must have one format; got {w13.format} and {w2.format}. Requantise one of them."
        )
    for name, stored in (("w13", w13), ("w2", w2)):
        get_format(stored.format).check(stored)
        for tensor in stored.tensors():
            if not tensor.is_contiguous():
                raise ArgumentError(
                    f"Experts: {name} must be contiguous; got strides {tensor.stride()}. Call .contiguous()."
                )
    _check_biases(w13.shape, experts.w13_bias, experts.w2_bias)
    devices = {t.device for t in (*w13.tensors(), *w2.tensors())}
    devices |= {bias.device for bias in (experts.w13_bias, experts.w2_bias) if bias is not None}
    if len(devices) != 1:
        raise ArgumentError(f"Experts: all tensors must lie on one device; got {sorted(map(str, devices))}. Use .to().")


def _check_shapes(w13: tuple[int, ...], w2: tuple[int, ...]) -> None:
    """Raise unless the logical shapes of the projections fit each other and the rules on sizes."""
    shapes = f"w13 {list(w13)}, w2 {list(w2)}"
    if len(w13) != 4 or w13[1] != 2 or len(w2) != 3:
        raise ArgumentError(
            "Experts: w13 must be [num_experts, 2, intermediate, hidden] and w2 [num_experts, hidden, intermediate]; "
            f"got {shapes}."
        )
    num_experts, _, intermediate, hidden = w13
    if w2 != (num_experts, hidden, intermediate):
        raise ArgumentError(
            "Experts: w2 must be [num_experts, hidden, intermediate] = "
            f"{[num_experts, hidden, intermediate]} to fit w13; got {shapes}."
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ArgumentError(
            f"Experts: num_experts must be 1 to {MAX_EXPERTS}; got {num_experts}. Shard the experts over ranks."
        )
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < 32 or size % 32:
            raise ArgumentError(
                f"Experts: {name} must be a positive multiple of 32; got {size} ({shapes}). "
                f"Zero-pad {name} to {max(32, -(-size // 32) * 32)} in both w13 and w2."
            )


def _check_biases(w13: tuple[int, ...], w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None) -> None:
    """Raise unless each bias is None or contiguous FP32 of the shape that goes with w13's."""
    for name, bias, shape in (("w13_bias", w13_bias, w13[:3]), ("w2_bias", w2_bias, (w13[0], w13[3]))):
        if bias is None:
            continue
        if tuple(bias.shape) != shape or bias.dtype != torch.float32 or not bias.is_contiguous():
            raise ArgumentError(
                f"Experts: {name} must be contiguous float32 {list(shape)}; got {bias.dtype} {list(bias.shape)}."
            )
