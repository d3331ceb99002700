"""The weight matrices as the compiled functions see them: where rows and scales lie, and calls of `dot` on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warpring.kernels.cores.arguments import ROWS
from warpring.kernels.cores.dots import Dots
from warpring.kernels.cores.elementwise import scale_values
from warpring.kernels.cores.emit import F32, LANES, Code, Val


@dataclass(frozen=True)
class Matrix:
    """One [rows, cols] matrix of an expert, seen from inside a function.

    Attributes:
        data, scale, global_scale: addresses of the whole tensors.
        index: which of their matrices this is.
        scratch: where `decode_scales` puts the scales of `ROWS` rows.
    """

    code: Code
    dots: Dots
    data: Val
    scale: Val
    global_scale: Val
    index: Val
    rows: Val
    cols: Val
    scratch: Val

    @property
    def row_bytes(self) -> Val:
        return (self.cols * self.dots.stored.code_bits) >> 3

    def row(self, row: Val) -> Val:
        """Address of a row's codes."""
        return self.data + (self.index * self.rows + row) * self.row_bytes

    def decode_scales(self, start: Val, after: Matrix, after_start: Val) -> None:
        """Decode the one-byte scales of rows start..start + ROWS, which lie next to each other.

        Meanwhile those of the rows of `after` from `after_start` on are prefetched.
        """
        if self.dots.stored.scale_bytes == 1:
            code, stored, wanted = self.code, self._scale_codes(start), after._scale_codes(after_start)
            # ROWS is a multiple of LANES: so is the number of scales.
            with code.loop(code.i64(0), self._scales_per_row * ROWS, LANES) as i:
                code.prefetch(wanted + i)
                values = scale_values(code, self.dots.stored, stored + i)
                code.store(values, self.scratch + i * 4)

    def scales(self, row: Val, start: Val) -> tuple[Val, Val]:
        """Address of the FP32 scales of a row whose block was decoded from `start` on; bytes to the next row's."""
        stored, code = self.dots.stored, self.code
        if stored.scale_bytes == 1:
            size = self._scales_per_row * 4
            return self.scratch + (row - start) * size, size
        if not stored.scales_columns:
            return code.i64(0), code.i64(0)
        # ROWS divides the rows of a block: its rows share their scales.
        block_rows = stored.scale_block[0]
        down = (self.rows + (block_rows - 1)) // block_rows
        address = self.scale + (self.index * down + row // block_rows) * self._scales_per_row * 4
        return address, code.i64(0)

    def whole_scale(self) -> Val:
        """The matrix's own scale."""
        if not self.dots.stored.has_global_scale:
            return self.code.f32(1.0)
        return self.code.load(F32, self.global_scale + self.index * 4)

    def row_scale(self, row: Val) -> Val:
        """Address of a row's only scale."""
        return self.scale + (self.index * self.rows + row) * 4

    def _scale_codes(self, row: Val) -> Val:
        """Address of a row's one-byte scales."""
        return self.scale + (self.index * self.rows + row) * self._scales_per_row

    @property
    def _scales_per_row(self) -> Val:
        block = self.dots.stored.scale_block[1]
        return (self.cols + (block - 1)) // block


def scale_scratch(code: Code, dots: Dots, cols: Val) -> Val:
    """Stack for the decoded scales of `ROWS` rows."""
    if dots.stored.scale_bytes != 1:
        return code.i64(0)
    return code.dynamic_slot(F32, (cols // dots.stored.scale_block[1]) * ROWS)


@dataclass(frozen=True)
class Pass:
    """The dot products of a few rows with the vectors of one expert's pairs.

    Attributes:
        functions: `Dots.build` for several numbers of tokens.
        groups: (matrix, first row) of the two groups of rows.
        ends, afters: see `Dots.build`.
        start: first row of the block that they belong to.
        vector_of: address of the vector of a pair.
        products: stack for the results of one call.
    """

    functions: dict[int, Any]
    groups: list[tuple[Matrix, Val]]
    start: Val
    vector_of: Callable[[Val], Val]
    products: Val
    ends: list[Val]
    afters: list[Val]

    def run(self, code: Code, first: Val, last: Val, use: Callable[[Val, Val], None]) -> None:
        """Build the calls for pairs first..last; `use` gets a pair and the address of its products."""
        matrix = self.groups[0][0]
        scales = [m.scales(row, self.start) for m, row in self.groups]
        common = [
            *(m.row(row) for m, row in self.groups),
            matrix.row_bytes,
            *(address for address, _ in scales),
            scales[0][1],
            *(m.whole_scale() for m, _ in self.groups),
            *(m.row_scale(row) for m, row in self.groups),
        ]
        tail = [self.products, matrix.cols, *self.ends, *self.afters]
        pair = code.var(first)
        for count, function in self.functions.items():
            with code.while_(lambda count=count: pair.get() + (count - 1) < last):
                now = pair.get()
                code.call(function, *common, *(self.vector_of(now + i) for i in range(count)), *tail)
                for i in range(count):
                    use(now + i, self.products + 4 * matrix.dots.rows * i)
                pair.set(now + count)


def products_slot(code: Code, dots: Dots) -> Val:
    """Stack for the products of one call of `dot`."""
    return code.slot(F32, dots.rows * max(dots.passes))
