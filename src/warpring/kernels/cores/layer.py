"""The layer as three functions of LLVM IR, for one number format and one gate function.

    plan      one thread: sorts the (token, slot) pairs by expert, widens x to FP32
    gate_up   all threads: act[pair, i] = act(w13[e, 0, i] . x, w13[e, 1, i] . x), rounded to BF16
    down      all threads: y[t, h] = sum over pairs of t, ascending by expert, of weight * (w2[e, h] . act[pair])

A thread takes the next block of output rows until none is left, and reads each weight row of it once for all tokens
that want the expert. Who takes which block changes no bit: a dot product is 16 lanes, each a fixed chain of steps of
32 columns, and the pairs of a token are added up in the order of their experts, whatever else the batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from warpring.kernels.cores.arguments import FIELDS, PADDING, ROWS
from warpring.kernels.cores.avx512 import dots_for
from warpring.kernels.cores.dots import Dots
from warpring.kernels.cores.elementwise import activation, bf16_bits, scale_values
from warpring.kernels.cores.emit import F32, F32X16, I16, I32, I64, LANES, Code, Val, vector
from warpring.kernels.cores.formats import STORED
from warpring.kernels.cores.wide import WideDots


def build(format: str, gate_fn: str, features: frozenset[str]) -> Any:
    """The module with `plan`, `gate_up` and `down`, each `void (i64 address of FIELDS)`.

    Args:
        format: a number format.
        gate_fn: a gate function of `Activation`.
        features: LLVM's names of the processor's features.
    """
    stored = STORED[format]
    dots = (dots_for(stored.codes, features) or WideDots)(stored)
    module = ir.Module(f"warpring_{format}_{gate_fn}")
    functions = {count: dots.build(module, count) for count in dots.passes}
    _plan(module, dots)
    _gate_up(module, dots, functions, gate_fn)
    _down(module, dots, functions)
    return module


class Arguments:
    """The fields as seen from inside a function."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._base = code.parameters[0]

    def __getattr__(self, name: str) -> Val:
        return self._code.load(I64, self.address(name))

    def address(self, name: str) -> Val:
        """Where a field lies."""
        return self._base + 8 * FIELDS.index(name)

    def float(self, name: str) -> Val:
        """A field that holds an FP32 number."""
        return self._code.load(F32, self.address(name))


def arranged_bytes(cols: Val) -> Val:
    """Bytes of a vector of `cols` activations, padded."""
    return ((cols + (PADDING - 1)) & -PADDING) * 4


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

    def decode_scales(self, start: Val) -> None:
        """Decode the one-byte scales of rows start..start + ROWS, which lie next to each other."""
        if self.dots.stored.scale_bytes == 1:
            per_row, code = self._scales_per_row, self.code
            stored = self.scale + (self.index * self.rows + start) * per_row
            # ROWS is a multiple of LANES: so is the number of scales.
            with code.loop(code.i64(0), per_row * ROWS, LANES) as i:
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

    @property
    def _scales_per_row(self) -> Val:
        block = self.dots.stored.scale_block[1]
        return (self.cols + (block - 1)) // block


def _scale_scratch(code: Code, dots: Dots, cols: Val) -> Val:
    """Stack for the decoded scales of `ROWS` rows."""
    if dots.stored.scale_bytes != 1:
        return code.i64(0)
    return code.dynamic_slot(F32, (cols // dots.stored.scale_block[1]) * ROWS)


@contextmanager
def _blocks(code: Code, counter: Val, count: Val) -> Generator[Val]:
    """Take blocks of work, shared with all other threads, until none is left."""
    block = code.var(code.fetch_add(counter, 1))
    with code.while_(lambda: block.get() < count):
        yield block.get()
        block.set(code.fetch_add(counter, 1))


@dataclass(frozen=True)
class Pass:
    """The dot products of a few rows with the vectors of one expert's pairs.

    Attributes:
        functions: `Dots.build` for several numbers of tokens.
        groups: (matrix, first row) of the two groups of rows.
        start: first row of the block that they belong to.
        vector_of: address of the vector of a pair.
        products: stack for the results of one call.
        next_rows: how many rows further on a matrix the next call reads.
    """

    functions: dict[int, Any]
    groups: list[tuple[Matrix, Val]]
    start: Val
    vector_of: Callable[[Val], Val]
    products: Val
    next_rows: int

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
        tail = [self.products, matrix.cols, matrix.row_bytes * self.next_rows]
        pair = code.var(first)
        for count, function in self.functions.items():
            with code.while_(lambda count=count: pair.get() + (count - 1) < last):
                now = pair.get()
                code.call(function, *common, *(self.vector_of(now + i) for i in range(count)), *tail)
                for i in range(count):
                    use(now + i, self.products + 4 * matrix.dots.rows * i)
                pair.set(now + count)


def _products(code: Code, dots: Dots) -> Val:
    return code.slot(F32, dots.rows * max(dots.passes))


# -- the three functions ---------------------------------------------------------------------------------------------


def _plan(module: Any, dots: Dots) -> None:
    code = Code(module, "plan", [I64])
    args = Arguments(code)
    zero = code.i64(0)
    with code.loop(zero, args.num_experts) as e:
        code.store(zero, args.cursor + e * 8)
    with _used_slots(code, args) as (_, _, at):
        code.store(code.load(I64, at) + 1, at)
    num_active, position = code.var(zero), code.var(zero)
    with code.loop(zero, args.num_experts) as e:
        at = args.cursor + e * 8
        pairs = code.load(I64, at)
        with code.if_(pairs > 0):
            n = num_active.get()
            code.store(e, args.active + n * 8)
            code.store(position.get(), args.first + n * 8)
            code.store(position.get(), at)
            position.set(position.get() + pairs)
            num_active.set(n + 1)
    code.store(position.get(), args.first + num_active.get() * 8)
    code.store(num_active.get(), args.address("num_active"))
    act_bytes = arranged_bytes(args.intermediate)
    with _used_slots(code, args) as (token, slot, at):
        pair = code.load(I64, at)
        code.store(pair + 1, at)
        code.store(token, args.pair_token + pair * 8)
        code.store(code.load(F32, args.weights + token * args.weights_stride + slot * 4), args.pair_weight + pair * 4)
        _zero_padding(code, args.act + (pair + 1) * act_bytes)
    x_bytes = arranged_bytes(args.hidden)
    with code.loop(zero, args.num_tokens) as token:
        to = args.arranged_x + token * x_bytes
        _zero_padding(code, to + x_bytes)
        with code.loop(zero, args.hidden) as col:
            bits = code.load(I16, args.x + token * args.x_stride + col * 2)
            _store_activation(code, dots, bits, to, col)
    code.end()


@contextmanager
def _used_slots(code: Code, args: Arguments) -> Generator[tuple[Val, Val, Val]]:
    """(token, slot, address of its expert's cursor) of all slots that name an expert."""
    zero = code.i64(0)
    with code.loop(zero, args.num_tokens) as token, code.loop(zero, args.topk) as slot:
        # The low half of an int64 id: moe_decode has seen to it that ids are -1 or name an expert.
        e = code.load(I32, args.idx + token * args.idx_stride + slot * args.idx_bytes).sext(I64)
        with code.if_(e > -1):
            yield token, slot, args.cursor + e * 8


def _zero_padding(code: Code, end: Val) -> None:
    """Zero the last `PADDING` activations of a vector that ends at `end`."""
    size = 4 * PADDING
    for offset in range(0, size, 4 * LANES):
        code.store(code.zeros(F32X16), end + (offset - size))


def _store_activation(code: Code, dots: Dots, bf16: Val, base: Val, col: Val) -> None:
    """Put column `col`, given as the bits of a BF16 number, into the vector at `base`."""
    code.store(bf16.zext(I32) << 16, base + dots.spot(col) * 4)


def _gate_up(module: Any, dots: Dots, functions: dict[int, Any], gate_fn: str) -> None:
    code = Code(module, "gate_up", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    x_bytes, act_bytes = (arranged_bytes(cols) for cols in (hidden, intermediate))
    blocks_per_expert = intermediate // ROWS
    products = _products(code, dots)
    scratch = [_scale_scratch(code, dots, hidden) for _ in (0, 1)]
    with _blocks(code, args.address("next_gate_up"), args.num_active * blocks_per_expert) as block:
        active, start = block // blocks_per_expert, (block % blocks_per_expert) * ROWS
        expert = code.load(I64, args.active + active * 8)
        first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))
        w13 = args.w13, args.w13_scale, args.w13_global
        halves = [Matrix(code, dots, *w13, expert * 2 + half, intermediate, hidden, scratch[half]) for half in (0, 1)]
        for matrix in halves:
            matrix.decode_scales(start)
        group = dots.rows // 2
        floats = vector(F32, group)
        with code.loop(start, start + ROWS, group) as row:

            def use(pair: Val, products: Val, expert: Val = expert, row: Val = row) -> None:
                values = [code.var(code.load(floats, products + 4 * group * half)) for half in (0, 1)]
                with code.if_(args.w13_bias > 0):
                    for half, value in enumerate(values):
                        at = args.w13_bias + ((expert * 2 + half) * intermediate + row) * 4
                        value.set(value.get() + code.load(floats, at))
                numbers = (args.float(name).splat(group) for name in ("alpha", "limit", "up_offset"))
                act = bf16_bits(activation(code, gate_fn, *(value.get() for value in values), *numbers))
                for i in range(group):
                    _store_activation(code, dots, act.lane(i), args.act + pair * act_bytes, row + i)

            def x_of(pair: Val) -> Val:
                return args.arranged_x + code.load(I64, args.pair_token + pair * 8) * x_bytes

            groups = [(matrix, row) for matrix in halves]
            Pass(functions, groups, start, x_of, products, group).run(code, first, last, use)
    code.end()


def _down(module: Any, dots: Dots, functions: dict[int, Any]) -> None:
    code = Code(module, "down", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    act_bytes = arranged_bytes(intermediate)
    zero = code.i64(0)
    products = _products(code, dots)
    scratch = _scale_scratch(code, dots, intermediate)
    with _blocks(code, args.address("next_down"), hidden // ROWS) as block:
        start = block * ROWS
        with code.loop(zero, args.num_tokens) as token:
            code.store(code.zeros(F32X16), args.y + (token * hidden + start) * 4)
        with code.loop(zero, args.num_active) as active:
            expert = code.load(I64, args.active + active * 8)
            first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))
            w2 = Matrix(code, dots, args.w2, args.w2_scale, args.w2_global, expert, hidden, intermediate, scratch)
            w2.decode_scales(start)
            floats = vector(F32, dots.rows)
            with code.loop(start, start + ROWS, dots.rows) as row:

                def use(pair: Val, products: Val, expert: Val = expert, row: Val = row) -> None:
                    values = code.var(code.load(floats, products))
                    with code.if_(args.w2_bias > 0):
                        values.set(values.get() + code.load(floats, args.w2_bias + (expert * hidden + row) * 4))
                    weight = code.load(F32, args.pair_weight + pair * 4).splat(dots.rows)
                    token = code.load(I64, args.pair_token + pair * 8)
                    at = args.y + (token * hidden + row) * 4
                    code.store(code.fma(weight, values.get(), code.load(floats, at)), at)

                def act_of(pair: Val) -> Val:
                    return args.act + pair * act_bytes

                groups = [(w2, row), (w2, row + dots.rows // 2)]
                Pass(functions, groups, start, act_of, products, dots.rows).run(code, first, last, use)
        with code.loop(zero, args.num_tokens) as token:
            value = code.load(F32X16, args.y + (token * hidden + start) * 4)
            code.store(bf16_bits(value), args.out + token * args.out_stride + start * 2)
    code.end()
