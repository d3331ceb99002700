"""Dot products on any processor: a step is 32 columns, whose codes become FP32 numbers.

A code moves to the exponent and mantissa bits of an FP16 number, which is then widened: exact for subnormal codes too,
and whatever the processor's flush-to-zero mode. The number comes out smaller than the value by `unit`. E4M3 has a NaN
code that FP16 reads as a number: the largest code of a row is tracked, and a NaN among them makes the row's dot
products NaN.
"""

from __future__ import annotations

from typing import Any

from warpring.kernels.cores.dots import Dots, Row, spread
from warpring.kernels.cores.emit import F16, F32X16, I8, I16, I32, LANES, Code, Val, vector
from warpring.kernels.cores.formats import E4M3_NAN, StoredFormat

STEP = 32
_UNITS = {"bf16": 1.0, "e4m3": 2.0**8, "e2m1": 2.0**14}
_LOW, _HIGH = list(range(LANES)), list(range(LANES, 2 * LANES))


class WideDots(Dots):
    """Steps of 32 columns, two vectors of 16."""

    columns = STEP
    rows = 4
    passes = (2, 1)

    def __init__(self, stored: StoredFormat) -> None:
        super().__init__(stored)
        self.unit = _UNITS[stored.codes]

    def spot(self, col: Val) -> Val:
        """E2M1's two vectors of a step are its even and its odd columns; the others' its first and its last 16."""
        if self.stored.codes != "e2m1":
            return col
        return (col & -STEP) + (col & 1) * LANES + ((col & (STEP - 1)) >> 1)

    def open_row(self, code: Code, num_tokens: int) -> Row:
        largest = code.var(code.zeros(vector(I8, STEP))) if self.stored.codes == "e4m3" else None
        return Row(code, num_tokens, largest)

    def open_loop(self, code: Code) -> Any:
        return None

    def step(self, code: Code, shared: Any, row: Row, at: Val, scale: Val | None, xs: list[Val]) -> None:
        low, high = self._decode(code, row, at)
        for total, x in zip(row.sums, xs, strict=True):
            x_low, x_high = (code.load(F32X16, x + 4 * LANES * half) for half in (0, 1))
            if scale is None:
                total.set(code.fma(high, x_high, code.fma(low, x_low, total.get())))
            else:
                total.set(code.fma(code.fma(high, x_high, low * x_low), scale, total.get()))

    def step_scale(self, code: Code, scales: Val, step: Val) -> Val:
        block = self.stored.scale_block[1]
        if block < STEP:
            return spread(code, scales + step * 8, 2)
        return spread(code, scales + (step // (block // STEP)) * 4, 1)

    def finish(self, code: Code, rows: list[Row], totals: Val) -> Val:
        for index, row in enumerate(rows):
            if row.largest is not None:
                largest = code.fold(row.largest.get(), code.umax).zext(I32)
                value = largest.equals(2 * E4M3_NAN).select(code.f32(float("nan")), totals.lane(index))
                totals = totals.replaced(index, value)
        return totals

    def _decode(self, code: Code, row: Row, at: Val) -> tuple[Val, Val]:
        """The 32 codes at `at` as two vectors."""
        if self.stored.codes == "bf16":
            low, high = (code.load(vector(I16, LANES), at + 2 * LANES * half) for half in (0, 1))
            return _shifted(low), _shifted(high)
        if self.stored.codes == "e2m1":
            # A word holds one byte, sign-extended: ssssssss|seem|seem. Each nibble s|ee|m goes to s|000ee|m000000000.
            words = code.load(vector(I8, LANES), at).sext(vector(I16, LANES))
            even, odd = ((words << 12) >> 3) & -0x7200, (words << 5) & -0x7200
            return _halves(even), _halves(odd)
        codes = code.load(vector(I8, STEP), at)
        if row.largest is not None:
            row.largest.set(code.umax(row.largest.get(), codes << 1))  # the shift drops the sign
        # s|eeee|mmm -> s|0eeee|mmm0000000. The sign extension leaves the sign in two places; one is masked out.
        bits = (codes.sext(vector(I16, STEP)) << 7) & -0x4080
        return _halves(bits.lanes(_LOW)), _halves(bits.lanes(_HIGH))


def _shifted(bf16: Val) -> Val:
    return (bf16.zext(vector(I32, LANES)) << 16).as_bits(F32X16)


def _halves(bits: Val) -> Val:
    return bits.as_bits(vector(F16, LANES)).widen(F32X16)
