"""Dot products on x86 with AVX-512, for E4M3 and E2M1: codes become numbers by table, many of them an instruction.

E4M3   64 columns a step. 128 magnitudes fit the two registers of VBMI's byte look-up: one look-up for the upper, one
       for the lower byte of the BF16 numbers, which are FP32's upper halves.
E2M1   128 columns a step. 16 codes are FP32 numbers in one register, and the look-up minds the low four bits of a lane
       only: lane i holds 8 codes, and shifts bring one after the other down.

avx512bf16.py has the same for processors that multiply BF16 numbers.
"""

from __future__ import annotations

from typing import Any

from warpring.kernels.cores.dots import Dots, Row, spread
from warpring.kernels.cores.emit import F32X16, I8, I32, LANES, Code, Val, vector
from warpring.kernels.cores.formats import E2M1_VALUES, E4M3_VALUES, bf16_bits_of, fp32_bits_of

#: LLVM's names of the processor features that each kind of code needs.
FEATURES = {"e4m3": {"avx512f", "avx512bw", "avx512vbmi"}, "e2m1": {"avx512f"}}
DWORDS = vector(I32, LANES)
_BYTES = vector(I8, 64)
_LOOK_UP_BYTES = "llvm.x86.avx512.vpermi2var.qi.512"
_LOOK_UP_DWORDS = "llvm.x86.avx512.permvar.si.512"


class Avx512Dots(Dots):
    """Steps of 64 bytes of codes, decoded a register at a time; columns that share a scale lie in the same lanes."""

    unit = 1.0
    rows = 8
    passes = (2, 1)

    def open_row(self, code: Code, num_tokens: int) -> Row:
        return Row(code, num_tokens)

    def step(self, code: Code, shared: Any, row: Row, at: Val, scale: Val | None, xs: list[Val]) -> None:
        products = [total.get() if scale is None else None for total in row.sums]
        for index, weights in enumerate(self.decode(code, shared, at)):
            for token, x in enumerate(xs):
                activations = code.load(weights.type, x + 4 * LANES * index)
                products[token] = self.add_products(code, weights, activations, products[token])
        for total, product in zip(row.sums, products, strict=True):
            if product is not None:
                total.set(product if scale is None else code.fma(product, scale, total.get()))

    def step_scale(self, code: Code, scales: Val, step: Val) -> Val:
        block = self.stored.scale_block[1]
        if block > self.columns:
            return spread(code, scales + (step // (block // self.columns)) * 4, 1)
        count = self.columns // block
        return spread(code, scales + step * (4 * count), count)

    def decode(self, code: Code, shared: Any, at: Val) -> list[Val]:
        """The numbers of the codes at `at`, a register each."""
        raise NotImplementedError

    def add_products(self, code: Code, weights: Val, activations: Val, before: Val | None) -> Val:
        """FP32 [16]: the products of two registers, added to `before` where there is one."""
        return weights * activations if before is None else code.fma(weights, activations, before)


class Avx512E4m3Dots(Avx512Dots):
    """Two look-ups decode 64 codes."""

    columns = 64

    def spot(self, col: Val) -> Val:
        """Of every 16 columns, the first and the last 8 go different ways, then the even and the odd ones."""
        inside = col & (self.columns - 1)
        which = ((inside >> 3) & 1) * 2 + (inside & 1)
        return (col & -self.columns) + which * LANES + (inside >> 4) * 4 + ((inside & 7) >> 1)

    def open_loop(self, code: Code) -> Any:
        return e4m3_tables(code)

    def decode(self, code: Code, shared: Any, at: Val) -> list[Val]:
        halves = ((pairs << 16, pairs & -0x10000) for pairs in decode_e4m3(code, shared, at))
        return [number.as_bits(F32X16) for half in halves for number in half]


class Avx512E2m1Dots(Avx512Dots):
    """A look-up decodes 16 codes, sign and all."""

    columns = 128

    def spot(self, col: Val) -> Val:
        """Eight neighbours go to the same lane of eight vectors."""
        inside = col & (self.columns - 1)
        return (col & -self.columns) + (inside & 7) * LANES + (inside >> 3)

    def open_loop(self, code: Code) -> Any:
        return code.table(DWORDS, fp32_bits_of(E2M1_VALUES))

    def decode(self, code: Code, shared: Any, at: Val) -> list[Val]:
        codes = code.load(DWORDS, at)
        shifted = [codes, *(codes >> (4 * i) for i in range(1, 8))]
        return [code.target(_LOOK_UP_DWORDS, DWORDS, shared, index).as_bits(F32X16) for index in shifted]


def e4m3_tables(code: Code) -> list[list[Val]]:
    """Tables of the magnitudes' low and high bytes as BF16, each in two registers."""
    bits = bf16_bits_of(E4M3_VALUES)
    pieces = [[(b >> shift) & 0xFF for b in bits] for shift in (0, 8)]
    return [[code.table(_BYTES, piece[start : start + 64]) for start in (0, 64)] for piece in pieces]


def decode_e4m3(code: Code, tables: list[list[Val]], at: Val) -> list[Val]:
    """The 64 codes at `at` as BF16, two neighbours a lane: the first 8 of every 16 columns, and the last 8."""
    codes = code.load(_BYTES, at)
    low, high = (code.target(_LOOK_UP_BYTES, _BYTES, first, codes, second) for first, second in tables)
    high = high | (codes & -0x80)
    # Low and high bytes side by side, within 16 bytes each: one instruction a half.
    picks = [16 * lane + i + 64 * byte for lane in range(4) for i in range(8) for byte in (0, 1)]
    return [low.joined(high, [first + pick for pick in picks]).as_bits(DWORDS) for first in (0, 8)]


def dots_for(codes: str, features: frozenset[str]) -> type[Avx512Dots] | None:
    """The class for these codes, or None where the processor lacks a feature."""
    if codes not in FEATURES or not features.issuperset(FEATURES[codes]):
        return None
    return Avx512E4m3Dots if codes == "e4m3" else Avx512E2m1Dots
