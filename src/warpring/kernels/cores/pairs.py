"""Dot products on x86 with AVX512_VBMI and AVX512_BF16: a step is 64 columns, whose codes become BF16 numbers by table.

One instruction multiplies 32 of them with BF16 activations and adds the products two by two into 16 FP32 lanes. It takes
subnormal BF16 numbers for zero; no code of E4M3 or E2M1 becomes one.
"""

from __future__ import annotations

from typing import Any

import torch

from warpring.kernels.cores.dots import Dots, Row, spread
from warpring.kernels.cores.emit import BF16, F32X16, I8, I16, LANES, Code, Val, vector
from warpring.kernels.cores.formats import E2M1_VALUES, E4M3_VALUES, StoredFormat

STEP = 64
#: LLVM's names of the processor features.
FEATURES = ("avx512f", "avx512bw", "avx512vbmi", "avx512bf16")
_BYTES, _WORDS, _NUMBERS = vector(I8, STEP), vector(I16, STEP // 2), vector(BF16, STEP // 2)
_MULTIPLY = "llvm.x86.avx512bf16.dpbf16ps.512"
_LOOK_UP_BYTES = "llvm.x86.avx512.vpermi2var.qi.512"
_LOOK_UP_WORDS = "llvm.x86.avx512.permvar.hi.512"


class PairDots(Dots):
    columns = STEP
    x_bits = 16
    unit = 1.0
    rows = 8
    passes = (2, 1)

    def __init__(self, stored: StoredFormat) -> None:
        super().__init__(stored)
        self._byte_wide = stored.codes == "e4m3"

    def spot(self, col: Val) -> Val:
        """E4M3's two vectors of a step hold, of every 16 columns, the first and the last 8; E2M1's the even and odd."""
        inside = col & (STEP - 1)
        if self._byte_wide:
            return (col & -STEP) + ((inside >> 3) & 1) * 32 + (inside >> 4) * 8 + (inside & 7)
        return (col & -STEP) + (inside & 1) * 32 + (inside >> 1)

    def open_row(self, code: Code, num_tokens: int) -> Row:
        return Row(code, num_tokens)

    def open_loop(self, code: Code) -> Any:
        """The tables: BF16 numbers of the E4M3 magnitudes, low and high bytes; or of the E2M1 codes, twice."""
        if not self._byte_wide:
            return code.table(_WORDS, _bf16_bits(E2M1_VALUES) * 2)
        bits = _bf16_bits(E4M3_VALUES)
        pieces = [[(b >> shift) & 0xFF for b in bits] for shift in (0, 8)]
        return [[code.table(_BYTES, piece[start : start + STEP]) for start in (0, STEP)] for piece in pieces]

    def step(self, code: Code, shared: Any, row: Row, at: Val, scale: Val | None, xs: list[Val], columns: int) -> None:
        low, high = (self._e4m3 if self._byte_wide else self._e2m1)(code, shared, at, columns)
        for total, x in zip(row.sums, xs, strict=True):
            product = total.get() if scale is None else code.zeros(F32X16)
            for half, weights in enumerate((low, high)):
                activations = code.load(_NUMBERS, x + STEP * half)
                product = code.target(_MULTIPLY, F32X16, product, weights, activations)
            total.set(product if scale is None else code.fma(product, scale, total.get()))

    def step_scale(self, code: Code, scales: Val, step: Val, columns: int) -> Val:
        block = self.stored.scale_block[1]
        if block > STEP:
            return spread(code, scales + (step // (block // STEP)) * 4, 1, LANES)
        return spread(code, scales + step * (4 * STEP // block), columns // block, LANES * block // STEP)

    def _e4m3(self, code: Code, tables: Any, at: Val, columns: int) -> tuple[Val, Val]:
        codes = code.load(vector(I8, columns), at).padded(STEP)
        low, high = (code.target(_LOOK_UP_BYTES, _BYTES, first, codes, second) for first, second in tables)
        high = high | (codes & -0x80)
        # Bytes to words within each 16 bytes, as one instruction does it: of 16 codes the first 8, and the last 8.
        picks = [
            [16 * lane + half + i + STEP * byte for lane in range(4) for i in range(8) for byte in (0, 1)]
            for half in (0, 8)
        ]
        return tuple(low.joined(high, pick).as_bits(_NUMBERS) for pick in picks)  # pyright: ignore[reportReturnType]

    def _e2m1(self, code: Code, table: Any, at: Val, columns: int) -> tuple[Val, Val]:
        words = code.load(vector(I8, columns // 2), at).padded(STEP // 2).zext(_WORDS)
        # The look-up minds the low five bits: a nibble and one bit more, so that the table holds every number twice.
        even, odd = (code.target(_LOOK_UP_WORDS, _WORDS, table, index) for index in (words, words >> 4))
        return even.as_bits(_NUMBERS), odd.as_bits(_NUMBERS)


def _bf16_bits(values: tuple[float, ...]) -> list[int]:
    return torch.tensor(values).bfloat16().view(torch.int16).tolist()
