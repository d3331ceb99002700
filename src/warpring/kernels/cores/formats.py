"""The six number formats as bytes in memory: codes and scales, as `warpring.formats` lays them out."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

E4M3_NAN = 0x7F
#: What the codes 0 to 127 stand for; 128 more are their negatives.
E4M3_VALUES = (
    *(code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(E4M3_NAN)),
    math.nan,
)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))


def fp32_bits_of(values: tuple[float, ...]) -> list[int]:
    """The bits of FP32 numbers, as signed integers."""
    return list(struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values)))


def bf16_bits_of(values: tuple[float, ...]) -> list[int]:
    """The bits of numbers that BF16 holds exactly."""
    return [bits >> 16 for bits in fp32_bits_of(values)]


@dataclass(frozen=True)
class StoredFormat:
    """One format.

    Attributes:
        codes: "bf16", "e4m3" or "e2m1" (two a byte, the even column low).
        scale: "e8m0", "e4m3", "f32", or None.
        scale_block: (rows, cols) under one scale; cols 0 = a whole row.
        has_global_scale: whether each matrix has one more FP32 scale.
    """

    codes: str
    scale: str | None = None
    scale_block: tuple[int, int] = (1, 0)
    has_global_scale: bool = False

    @property
    def code_bits(self) -> int:
        return {"bf16": 16, "e4m3": 8, "e2m1": 4}[self.codes]

    @property
    def scale_bytes(self) -> int:
        return 0 if self.scale is None else 4 if self.scale == "f32" else 1

    @property
    def scales_columns(self) -> bool:
        """Whether a row has several scales."""
        return self.scale_block[1] > 0


STORED = {
    "bf16": StoredFormat("bf16"),
    "fp8_block": StoredFormat("e4m3", "f32", (128, 128)),
    "fp8_channel": StoredFormat("e4m3", "f32"),
    "mxfp8": StoredFormat("e4m3", "e8m0", (1, 32)),
    "mxfp4": StoredFormat("e2m1", "e8m0", (1, 32)),
    "nvfp4": StoredFormat("e2m1", "e4m3", (1, 16), has_global_scale=True),
}
