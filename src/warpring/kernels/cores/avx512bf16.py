"""Dot products on x86 with AVX512-BF16, for E4M3 and E2M1: numbers stay BF16, activations too.

`vdpbf16ps` adds to each of 16 FP32 lanes the products of two neighbouring BF16 numbers with two others: twice the
products of a fused multiply-add, and no widening. Products are exact, sums round to nearest; numbers below 2^-126 count
as 0. BF16 weights stay with wide.py, which is as fast: they are bound by memory.

E4M3   64 columns a step, decoded as in avx512.py.
E2M1   128 columns a step. 16 codes, twice, fill one register with BF16 numbers, and the look-up minds the low five bits
       of a word only: word i holds 4 codes, and shifts bring one after the other down.
"""

from __future__ import annotations

from typing import Any

from warpring.kernels.cores import avx512
from warpring.kernels.cores.avx512 import DWORDS, Avx512Dots, decode_e4m3, e4m3_tables
from warpring.kernels.cores.emit import F32X16, I16, LANES, Code, Val, vector
from warpring.kernels.cores.formats import E2M1_VALUES, bf16_bits_of

_WORDS = vector(I16, 2 * LANES)
_ADD_PRODUCTS = "llvm.x86.avx512bf16.dpbf16ps.512"
_LOOK_UP_WORDS = "llvm.x86.avx512.permvar.hi.512"


class Bf16Dots(Avx512Dots):
    """A register holds 16 pairs of neighbouring BF16 numbers."""

    activation_bytes = 2

    def add_products(self, code: Code, weights: Val, activations: Val, before: Val | None) -> Val:
        start = code.zeros(F32X16) if before is None else before
        return code.target(_ADD_PRODUCTS, F32X16, start, weights, activations)


class Bf16E4m3Dots(Bf16Dots):
    """Two look-ups decode 64 codes."""

    columns = 64

    def spot(self, col: Val) -> Val:
        """Of every 16 columns, the first and the last 8 go different ways."""
        inside = col & (self.columns - 1)
        return (col & -self.columns) + ((inside >> 3) & 1) * 2 * LANES + (inside >> 4) * 8 + (inside & 7)

    def open_loop(self, code: Code) -> Any:
        return e4m3_tables(code)

    def decode(self, code: Code, shared: Any, at: Val) -> list[Val]:
        return decode_e4m3(code, shared, at)


class Bf16E2m1Dots(Bf16Dots):
    """A look-up decodes 32 codes, sign and all."""

    columns = 128

    def spot(self, col: Val) -> Val:
        """Four neighbours go to the same place of four vectors."""
        inside = col & (self.columns - 1)
        return (col & -self.columns) + (inside & 3) * 2 * LANES + (inside >> 2)

    def open_loop(self, code: Code) -> Any:
        return code.table(_WORDS, bf16_bits_of(E2M1_VALUES) * 2)

    def decode(self, code: Code, shared: Any, at: Val) -> list[Val]:
        codes = code.load(_WORDS, at)
        shifted = [codes, *(codes >> (4 * i) for i in range(1, 4))]
        return [code.target(_LOOK_UP_WORDS, _WORDS, shared, index).as_bits(DWORDS) for index in shifted]


#: LLVM's names of the processor features that each kind of code needs.
FEATURES = {codes: {*names, "avx512bw", "avx512bf16"} for codes, names in avx512.FEATURES.items()}


def dots_for(codes: str, features: frozenset[str]) -> type[Bf16Dots] | None:
    """The class for these codes, or None where the processor lacks a feature."""
    if codes not in FEATURES or not features.issuperset(FEATURES[codes]):
        return None
    return Bf16E4m3Dots if codes == "e4m3" else Bf16E2m1Dots
