"""Dot products of weight rows with activations: what differs between number formats and processors.

    WideDots   any processor: codes become FP32 numbers
    PairDots   x86 with AVX512_VBMI and AVX512_BF16: codes become BF16 numbers, by table, and an instruction multiplies
               and adds two of them a lane

Codes are exact in either, activations are BF16, products are summed in FP32: 16 lanes, each a fixed chain of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from warpring.kernels.cores.emit import F32, F32X16, I64, LANES, Code, Val, Var, vector
from warpring.kernels.cores.formats import StoredFormat


class Dots(ABC):
    """Dot products for one format on one kind of processor.

    Attributes:
        stored: the format.
        columns: columns of a step.
        x_bits: bits of an activation as steps read it: 32 (FP32) or 16 (BF16).
        unit: power of two that turns decoded codes into values; multiplies the finished dot product.
        passes: numbers of tokens that one pass over a pair of rows serves, largest first.
    """

    columns: int
    x_bits: int
    unit: float
    passes: tuple[int, ...]

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
    def step(self, code: Code, shared: Any, row: Row, at: Val, scale: Val | None, xs: list[Val], columns: int) -> None:
        """Add the products of `columns` columns: codes at `at`, activations of each token at `xs`."""

    @abstractmethod
    def step_scale(self, code: Code, scales: Val, step: Val, columns: int) -> Val:
        """The scales of a step's 16 lanes, from the row's FP32 scales."""

    def finish(self, code: Code, row: Row, token: int) -> Val:
        """The dot product, without its factor."""
        lanes = row.sums[token][0].get()
        for more in row.sums[token][1:]:
            lanes = lanes + more.get()
        return code.fold(lanes, lambda a, b: a + b)

    def build(self, module: Any, num_tokens: int) -> Any:
        """The function `dot`: two rows with each of `num_tokens` vectors; the products go to out[token][row].

        Parameters: codes of the rows; their FP32 scales; their factors; the vectors; out; number of columns; how many
        bytes ahead codes are prefetched.
        """
        kinds = [*[I64] * 4, F32, F32, *[I64] * (num_tokens + 3)]
        code = Code(module, f"dot_2x{num_tokens}", kinds, internal=True)
        codes, scales, factors = code.parameters[0:2], code.parameters[2:4], code.parameters[4:6]
        vectors, (out, columns, ahead) = code.parameters[6:-3], code.parameters[-3:]
        rows = [self.open_row(code, num_tokens) for _ in codes]
        shared = self.open_loop(code)

        def steps(step: Val, width: int) -> None:
            xs = [x + step * (self.columns * self.x_bits // 8) for x in vectors]
            for row, start, scale in zip(rows, codes, scales, strict=True):
                at = start + step * self.step_bytes
                code.prefetch(at + ahead)
                lanes = self.step_scale(code, scale, step, width) if self.stored.scales_columns else None
                self.step(code, shared, row, at, lanes, xs, width)

        whole = columns // self.columns
        with code.loop(code.i64(0), whole) as step:
            steps(step, self.columns)
        if self.columns > 32:
            with code.if_(columns % self.columns > 0):
                steps(whole, 32)
        for token in range(num_tokens):
            for index, (row, factor) in enumerate(zip(rows, factors, strict=True)):
                code.store(self.finish(code, row, token) * factor, out + 4 * (2 * token + index))
        code.end()
        return code.function


class Row:
    """Running sums of one row: `sums[token]` are vectors of 16 lanes; `largest` see WideDots."""

    def __init__(self, code: Code, num_tokens: int, chains: int, largest: Var | None = None) -> None:
        self.sums = [[code.var(code.zeros(F32X16)) for _ in range(chains)] for _ in range(num_tokens)]
        self.largest = largest


def add_scaled(code: Code, sums: list[Var], product: Val, scale: Val) -> None:
    """Add the scaled sum of a step."""
    sums[0].set(code.fma(product, scale, sums[0].get()))


def spread(code: Code, scales: Val, count: int, lanes_each: int) -> Val:
    """`count` neighbouring FP32 scales, each for `lanes_each` lanes; the last one for all lanes that are left."""
    if count == 1:
        return code.load(F32, scales).splat()
    stored = code.load(vector(F32, count), scales)
    return stored.lanes([min(lane // lanes_each, count - 1) for lane in range(LANES)])
