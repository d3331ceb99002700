"""BF16: weights as they are, no scales."""

from __future__ import annotations

import torch

from warpring.formats.base import Format, QuantizedTensor
from warpring.formats.checks import check_absent, check_dtype, check_stored, check_tensor, check_weight


class Bf16(Format):
    """One bfloat16 a weight. Rounds to nearest even; beyond the largest BF16 that gives Inf, as IEEE 754 has it."""

    name = "bf16"
    bits_per_weight = 16
    block = None
    title = "BF16"

    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        """See `Format.quantize`. Contiguous BF16 weights are taken as they are, without a copy."""
        shape = check_weight(self.name, weight)
        data = weight if weight.dtype == torch.bfloat16 else weight.float().bfloat16()
        return QuantizedTensor(self.name, shape, data.contiguous())

    def dequantize(self, stored: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See `Format.dequantize`. As BF16 the stored tensor itself, without a copy."""
        self.check(stored)
        check_dtype(self.name, dtype)
        return stored.data.to(dtype)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def scale_shape(self, shape: tuple[int, ...]) -> None:
        return None

    def check(self, stored: QuantizedTensor) -> None:
        shape = check_stored(self.name, stored)
        check_tensor(self.name, "data", stored.data, torch.bfloat16, shape)
        check_absent(self.name, "scale", stored.scale)
        check_absent(self.name, "global_scale", stored.global_scale)
