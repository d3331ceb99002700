"""The layer as three functions of LLVM IR, for one number format and one gate function.

    plan      one thread: sorts the (token, slot) pairs by expert, widens x to FP32
    gate_up   all threads: act[pair, i] = act(w13[e, 0, i] . x, w13[e, 1, i] . x), rounded to BF16
    down      all threads: y[t, h] = sum over pairs of t, ascending by expert, of weight * (w2[e, h] . act[pair])

A thread takes the next blocks of output rows until none is left, and reads each weight row of them once for all tokens
that want the expert. It walks through memory in two streams of neighbouring rows, and knows the block after the one
that it works on: what it will read next is prefetched while it computes. Who takes which block changes no bit: a dot
product is 16 lanes, each a fixed chain of steps, and the pairs of a token are added up in the order of their experts,
whatever else the batch holds.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from warpring.kernels.cores import avx512, avx512bf16
from warpring.kernels.cores.arguments import FIELDS, PADDING, ROWS
from warpring.kernels.cores.dots import Dots
from warpring.kernels.cores.elementwise import activation, bf16_bits
from warpring.kernels.cores.emit import F32, F32X16, I16, I32, I64, LANES, Code, Val, Var, vector
from warpring.kernels.cores.formats import STORED
from warpring.kernels.cores.matrix import Matrix, Pass, products_slot, scale_scratch
from warpring.kernels.cores.wide import WideDots

#: A thread takes this fraction of its share of the blocks that are left.
_SHARES = 2


def build(format: str, gate_fn: str, features: frozenset[str]) -> Any:
    """The module with `plan`, `gate_up` and `down`, each `void (i64 address of FIELDS)`.

    Args:
        format: a number format.
        gate_fn: a gate function of `Activation`.
        features: LLVM's names of the processor's features.
    """
    stored = STORED[format]
    dots = (avx512bf16.dots_for(stored.codes, features) or avx512.dots_for(stored.codes, features) or WideDots)(stored)
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


def arranged_bytes(dots: Dots, cols: Val) -> Val:
    """Bytes of a vector of `cols` activations, padded."""
    return ((cols + (PADDING - 1)) & -PADDING) * dots.activation_bytes


@contextmanager
def _blocks(code: Code, args: Arguments, counter: Val, count: Val) -> Generator[tuple[Val, Val]]:
    """Take blocks of work, shared with all other threads, until none is left: each with the one after it, if any.

    A thread takes several neighbours at once, the fewer the fewer are left: cores far from each other pass the
    counter's cache line slowly, and slow cores must not keep the fast ones waiting at the end.
    """
    shares = args.num_threads * _SHARES

    def take(block: Var, end: Var) -> None:
        share = (count - code.load_shared(counter)) // shares
        share = (share > 1).select(share, code.i64(1))
        start = code.fetch_add(counter, share)
        block.set(start)
        end.set(start + share)

    block, end = (code.var(code.i64(0)) for _ in (0, 1))
    take(block, end)
    with code.while_(lambda: block.get() < count):
        now = block.get()
        block.set(now + 1)
        with code.if_(block.get().equals(end.get())):
            take(block, end)
        next_ = block.get()
        yield now, (next_ < count).select(next_, now)


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
    act_bytes = arranged_bytes(dots, args.intermediate)
    with _used_slots(code, args) as (token, slot, at):
        pair = code.load(I64, at)
        code.store(pair + 1, at)
        code.store(token, args.pair_token + pair * 8)
        code.store(code.load(F32, args.weights + token * args.weights_stride + slot * 4), args.pair_weight + pair * 4)
        _zero_padding(code, dots, args.act + (pair + 1) * act_bytes)
    x_bytes = arranged_bytes(dots, args.hidden)
    with code.loop(zero, args.num_tokens) as token:
        to = args.arranged_x + token * x_bytes
        _zero_padding(code, dots, to + x_bytes)
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


def _zero_padding(code: Code, dots: Dots, end: Val) -> None:
    """Zero the last `PADDING` activations of a vector that ends at `end`."""
    size = dots.activation_bytes * PADDING
    for offset in range(0, size, 4 * LANES):
        code.store(code.zeros(F32X16), end + (offset - size))


def _store_activation(code: Code, dots: Dots, bf16: Val, base: Val, col: Val) -> None:
    """Put column `col`, given as the bits of a BF16 number, into the vector at `base`."""
    number = bf16 if dots.activation_bytes == 2 else bf16.zext(I32) << 16
    code.store(number, base + dots.spot(col) * dots.activation_bytes)


def _gate_up(module: Any, dots: Dots, functions: dict[int, Any], gate_fn: str) -> None:
    code = Code(module, "gate_up", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    x_bytes, act_bytes = (arranged_bytes(dots, cols) for cols in (hidden, intermediate))
    blocks_per_expert = intermediate // ROWS
    products = products_slot(code, dots)
    scratch = [scale_scratch(code, dots, hidden) for _ in (0, 1)]
    with _blocks(code, args, args.address("next_gate_up"), args.num_active * blocks_per_expert) as (block, next_block):
        active, start = block // blocks_per_expert, (block % blocks_per_expert) * ROWS
        expert = code.load(I64, args.active + active * 8)
        next_expert = code.load(I64, args.active + (next_block // blocks_per_expert) * 8)
        next_start = (next_block % blocks_per_expert) * ROWS
        first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))

        def half_of(expert: Val, half: int) -> Matrix:
            w13 = args.w13, args.w13_scale, args.w13_global
            return Matrix(code, dots, *w13, expert * 2 + half, intermediate, hidden, scratch[half])

        halves, next_halves = ([half_of(e, half) for half in (0, 1)] for e in (expert, next_expert))
        for matrix, next_matrix in zip(halves, next_halves, strict=True):
            matrix.decode_scales(start, next_matrix, next_start)
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

            ends = [m.row(start + ROWS) for m in halves]
            afters = [m.row(next_start) for m in next_halves]
            groups = [(matrix, row) for matrix in halves]
            Pass(functions, groups, start, x_of, products, ends, afters).run(code, first, last, use)
    code.end()


def _down(module: Any, dots: Dots, functions: dict[int, Any]) -> None:
    code = Code(module, "down", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    act_bytes = arranged_bytes(dots, intermediate)
    zero = code.i64(0)
    products = products_slot(code, dots)
    scratch = scale_scratch(code, dots, intermediate)
    with _blocks(code, args, args.address("next_down"), hidden // ROWS) as (block, next_block):
        start = block * ROWS
        with code.loop(zero, args.num_tokens) as token:
            code.store(code.zeros(F32X16), args.y + (token * hidden + start) * 4)
        with code.loop(zero, args.num_active) as active:
            expert = code.load(I64, args.active + active * 8)
            first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))
            more = active + 1 < args.num_active
            next_expert = code.load(I64, args.active + more.select(active + 1, zero) * 8)
            next_start = more.select(start, next_block * ROWS)

            def w2_of(expert: Val) -> Matrix:
                return Matrix(code, dots, args.w2, args.w2_scale, args.w2_global, expert, hidden, intermediate, scratch)

            w2, next_w2 = w2_of(expert), w2_of(next_expert)
            w2.decode_scales(start, next_w2, next_start)
            # One group of rows walks through the first half of the block, the other through the second.
            half, group = ROWS // 2, dots.rows // 2
            floats = vector(F32, group)
            with code.loop(start, start + half, group) as row:

                def use(pair: Val, products: Val, expert: Val = expert, row: Val = row) -> None:
                    weight = code.load(F32, args.pair_weight + pair * 4).splat(group)
                    token = code.load(I64, args.pair_token + pair * 8)
                    for which in (0, 1):
                        of = row + half * which
                        value = code.var(code.load(floats, products + 4 * group * which))
                        with code.if_(args.w2_bias > 0):
                            value.set(value.get() + code.load(floats, args.w2_bias + (expert * hidden + of) * 4))
                        at = args.y + (token * hidden + of) * 4
                        code.store(code.fma(weight, value.get(), code.load(floats, at)), at)

                def act_of(pair: Val) -> Val:
                    return args.act + pair * act_bytes

                groups = [(w2, row), (w2, row + half)]
                ends = [w2.row(start + half), w2.row(start + ROWS)]
                afters = [next_w2.row(next_start), next_w2.row(next_start + half)]
                Pass(functions, groups, start, act_of, products, ends, afters).run(code, first, last, use)
        with code.loop(zero, args.num_tokens) as token:
            value = code.load(F32X16, args.y + (token * hidden + start) * 4)
            code.store(bf16_bits(value), args.out + token * args.out_stride + start * 2)
    code.end()
