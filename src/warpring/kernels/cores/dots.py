"""Dot products of weight rows with activations: what differs between number formats and processors.

    WideDots     any processor (wide.py)
    Avx512Dots   x86 with AVX-512, for 8-bit and 4-bit codes (avx512.py)
    Bf16Dots     the same where the processor multiplies BF16 numbers (avx512bf16.py)

Codes become FP32 or BF16 numbers, exactly; activations are BF16 numbers, in FP32 where the weights are. A dot product
is 16 FP32 lanes, each a fixed chain of additions, added up in a fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from warpring.kernels.cores.emit import F32, F32X16, I32, I64, LANES, Code, Val, Var, vector
from warpring.kernels.cores.formats import StoredFormat

#: Sizes of a layer are multiples of this many columns.
SMALLEST = 32
#: Codes are prefetched this many bytes ahead, rounded up to whole rows. Two to three times as far was no better, half
#: as far slower by a tenth (docs/cores.md).
AHEAD = 3 << 10


class Dots(ABC):
    """Dot products for one format on one kind of processor. A step longer than SMALLEST has 64 bytes of codes.

    Attributes:
        stored: the format.
        columns: columns of a step.
        unit: power of two that turns decoded codes into values; multiplies the finished dot product.
        rows: rows of one call of `dot`.
        passes: numbers of tokens that it serves, largest first.
        activation_bytes: bytes of an activation in vectors: 2 for BF16, 4 for FP32.
    """

    columns: int
    unit: float
    rows: int
    passes: tuple[int, ...]
    activation_bytes: int = 4

    def __init__(self, stored: StoredFormat) -> None:
        self.stored = stored

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's codes."""
        return self.columns * self.stored.code_bits // 8

    @abstractmethod
    def spot(self, col: Val) -> Val:
        """Where a column of an activation vector lies among those that steps read."""

    @abstractmethod
    def open_row(self, code: Code, num_tokens: int) -> Row:
        """The variables of one row's dot products."""

    @abstractmethod
    def open_loop(self, code: Code) -> Any:
        """Constants that all steps share."""

    @abstractmethod
    def step(self, code: Code, shared: Any, row: Row, at: Val, scale: Val | None, xs: list[Val]) -> None:
        """Add the products of a step: codes at `at`, activations of each token at `xs`."""

    @abstractmethod
    def step_scale(self, code: Code, scales: Val, step: Val) -> Val:
        """The scales of a step's 16 lanes, from the row's FP32 scales."""

    def finish(self, code: Code, rows: list[Row], totals: Val) -> Val:
        """Correct the rows' dot products, once their lanes are added up."""
        return totals

    def build(self, module: Any, num_tokens: int) -> Any:
        """The function `dot`: `rows` rows with each of `num_tokens` vectors; the products go to out[token][row].

        The rows are two groups of neighbours, either read from its first row to its last. Parameters: codes of either
        group's first row; bytes from row to row; FP32 scales of either first row; bytes from row to row; scale of
        either group as a whole; scales of their rows (where a row has one); the vectors; out; number of columns; of
        either group, where the rows end that lie and are read one after the other, and where those read then begin.
        """
        kinds = [*[I64] * 6, F32, F32, *[I64] * (2 + num_tokens + 6)]
        code = Code(module, f"dot_{self.rows}x{num_tokens}", kinds, internal=True)
        codes, scales = code.parameters[0:2], code.parameters[3:5]
        row_bytes, scale_bytes = code.parameters[2], code.parameters[5]
        group_scales, row_scales, vectors = code.parameters[6:8], code.parameters[8:10], code.parameters[10:-6]
        out, columns = code.parameters[-6:-4]
        ends, afters = code.parameters[-4:-2], code.parameters[-2:]
        half = self.rows // 2
        starts = [start + row_bytes * i for start in codes for i in range(half)]
        scale_starts = [start + scale_bytes * i for start in scales for i in range(half)]
        rows = [self.open_row(code, num_tokens) for _ in starts]
        shared = self.open_loop(code)

        whole = columns // self.columns
        ahead = (row_bytes + (AHEAD - 1)) // row_bytes * row_bytes
        for i in range(half):
            pair = [i, half + i]
            wanted = [starts[index] + ahead for index in pair]
            wanted = [(w < end).select(w, w - end + after) for w, end, after in zip(wanted, ends, afters, strict=True)]
            with code.loop(code.i64(0), whole) as step:
                xs = [x + step * (self.activation_bytes * self.columns) for x in vectors]
                for index, next_start in zip(pair, wanted, strict=True):
                    at = starts[index] + step * self.step_bytes
                    code.prefetch(next_start + step * self.step_bytes)
                    lanes = self.step_scale(code, scale_starts[index], step) if self.stored.scales_columns else None
                    self.step(code, shared, rows[index], at, lanes, xs)
        if self.columns > SMALLEST:
            rest = columns % self.columns
            with code.if_(rest > 0):
                self._last_step(code, shared, rows, starts, scale_starts, vectors, whole, rest)
        factors = [self._factor(code, *pair) for pair in zip(group_scales, row_scales, strict=True)]
        factor = factors[0].joined(factors[1], list(range(self.rows)))
        for token in range(num_tokens):
            totals = fold_rows([row.sums[token].get() for row in rows])
            totals = self.finish(code, rows, totals)
            code.store(totals * factor, out + 4 * self.rows * token)
        code.end()
        return code.function

    def _last_step(
        self,
        code: Code,
        shared: Any,
        rows: list[Row],
        starts: list[Val],
        scale_starts: list[Val],
        vectors: list[Val],
        step: Val,
        rest: Val,
    ) -> None:
        """A step of `rest` columns, from a register of codes and scales that end in zeros. Activations do already."""
        codes, scales = code.slot(F32X16, 1), code.slot(F32X16, 1)
        dwords = (rest * self.stored.code_bits) >> 5
        xs = [x + step * (self.activation_bytes * self.columns) for x in vectors]
        block = self.stored.scale_block[1]
        for row, start, scale in zip(rows, starts, scale_starts, strict=True):
            code.store(code.load_first(vector(I32, LANES), start + step * self.step_bytes, dwords), codes)
            lanes = None
            if 0 < block < self.columns:
                at = scale + step * (self.columns // block) * 4
                code.store(code.load_first(F32X16, at, rest // block), scales)
                lanes = self.step_scale(code, scales, code.i64(0))
            elif self.stored.scales_columns:
                lanes = self.step_scale(code, scale, step)
            self.step(code, shared, row, codes, lanes, xs)

    def _factor(self, code: Code, group_scale: Val, row_scales: Val) -> Val:
        """What multiplies the dot products of a group's rows."""
        factor = (group_scale * self.unit).splat(self.rows // 2)
        if self.stored.scale_bytes and not self.stored.scales_columns:
            factor = factor * code.load(factor.type, row_scales)
        return factor


class Row:
    """Running sums of one row: `sums[token]` has 16 lanes; `largest` see WideDots."""

    def __init__(self, code: Code, num_tokens: int, largest: Var | None = None) -> None:
        self.sums = [code.var(code.zeros(F32X16)) for _ in range(num_tokens)]
        self.largest = largest


def fold_rows(vectors: list[Val]) -> Val:
    """The sum of each vector's lanes, as one vector: halves on each other, the vectors side by side.

    The order of a row's additions is the same for any number of rows.
    """
    width = LANES
    while width > 1:
        half = width // 2
        if len(vectors) > 1:  # two half-empty vectors become one
            pairs = [(a, b) for a, b in zip(vectors[0::2], vectors[1::2], strict=True)]
        else:
            pairs = [(vectors[0], None)]
        vectors = [_fold_pair(a, b, width, half) for a, b in pairs]
        width = half
    return vectors[0]


def _fold_pair(a: Val, b: Val | None, width: int, half: int) -> Val:
    count = a.type.count
    low = [start + i for start in range(0, count, width) for i in range(half)]
    high = [i + half for i in low]
    if b is None:
        return a.lanes(low) + a.lanes(high)
    return a.joined(b, [*low, *(i + count for i in low)]) + a.joined(b, [*high, *(i + count for i in high)])


def spread(code: Code, scales: Val, count: int) -> Val:
    """`count` neighbouring FP32 scales, each for an equal share of the 16 lanes."""
    if count == 1:
        return code.load(F32, scales).splat()
    return code.load(vector(F32, count), scales).lanes([lane * count // LANES for lane in range(LANES)])
