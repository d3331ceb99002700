"""The layer as three functions of LLVM IR, for one number format and one gate function.

    plan      one thread: sorts the (token, slot) pairs by expert, widens x to FP32
    gate_up   all threads: act[pair, i] = act(w13[e, 0, i] . x, w13[e, 1, i] . x), rounded to BF16
    down      all threads: y[t, h] = sum over pairs of t, ascending by expert, of weight * (w2[e, h] . act[pair])

A thread takes the next block of output rows until none is left, and reads each weight row of it once for all tokens
that want the expert. Who takes which block changes no bit: a dot product is 16 lanes, each a fixed chain of steps of
32 columns, and the pairs of a token are added up in the order of their experts, whatever else the batch holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from warpring.kernels.cores.codes import CODES, STEP, Codes, is_nan_row
from warpring.kernels.cores.emit import F32, F32X16, I8, I16, I32, I64, LANES, Code, Val, vector

#: Arguments of all three functions: one array of 8-byte fields, in this order. Strides are bytes. The first three
#: are written by the functions, and start at 0.
FIELDS = (
    *("next_gate_up", "next_down", "num_active"),
    *("x", "x_stride", "idx", "idx_stride", "idx_bytes", "weights", "weights_stride", "out", "out_stride"),
    *("num_tokens", "topk", "num_experts", "hidden", "intermediate"),
    *("w13", "w13_scale", "w13_global", "w13_bias", "w2", "w2_scale", "w2_global", "w2_bias"),
    *("wide_x", "act", "y", "cursor", "active", "first", "pair_token", "pair_weight"),
    *("alpha", "limit", "up_offset"),
)
#: Output rows that a thread takes at a time; divides hidden and intermediate.
ROWS = 32
#: Tokens of one pass over a pair of rows.
TOKENS = 2
_FLOAT_STEP = 4 * STEP


class Arguments:
    """The fields as seen from inside a function."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._base = code.parameters[0]

    def __getattr__(self, name: str) -> Val:
        return self._code.load(I64, self.address(name))

    def address(self, name: str) -> Val:
        return self._base + 8 * FIELDS.index(name)

    def float(self, name: str) -> Val:
        return self._code.load(F32, self.address(name))


def build(format: str, gate_fn: str) -> Any:
    """The module with `plan`, `gate_up` and `down`, each `void (i64 address of FIELDS)`."""
    codes = CODES[format]
    module = ir.Module(f"warpring_{format}_{gate_fn}")
    dots = {count: _dot_rows(module, codes, count) for count in (TOKENS, 1)}
    _plan(module, codes)
    _gate_up(module, codes, dots, gate_fn)
    _down(module, codes, dots)
    return module


# -- dot products ----------------------------------------------------------------------------------------------------


def _dot_rows(module: Any, codes: Codes, num_tokens: int) -> Any:
    """`dot`: two rows with each of `num_tokens` vectors; the products go to out[token][row].

    Parameters: codes of row 0 and 1; their FP32 scales; their factors; addresses of the vectors; out; number of steps;
    distance in bytes at which codes are prefetched.
    """
    kinds = [*[I64] * 4, F32, F32, *[I64] * (num_tokens + 3)]
    code = Code(module, f"dot_2x{num_tokens}", kinds, internal=True)
    rows, scales, factors = code.parameters[0:2], code.parameters[2:4], code.parameters[4:6]
    vectors, (out, steps, ahead) = code.parameters[6:-3], code.parameters[-3:]
    scaled = codes.scale_block[1] > 0
    sums = [[[code.var(code.zeros(F32X16)) for _ in range(1 if scaled else 2)] for _ in vectors] for _ in rows]
    largest = [code.var(code.zeros(vector(I8, STEP))) if codes.tracks_nan else None for _ in rows]
    with code.loop(code.i64(0), steps) as step:
        offset = step * codes.step_bytes
        xs = [[code.load(F32X16, x + step * _FLOAT_STEP + 4 * LANES * half) for half in (0, 1)] for x in vectors]
        for row in (0, 1):
            code.prefetch(rows[row] + offset + ahead)
            low, high = codes.decode(code, rows[row] + offset, largest[row])
            scale = _step_scale(code, codes, scales[row], step) if scaled else None
            for sum_, (x_low, x_high) in zip(sums[row], xs, strict=True):
                if scale is None:
                    sum_[0].set(code.fma(low, x_low, sum_[0].get()))
                    sum_[1].set(code.fma(high, x_high, sum_[1].get()))
                else:
                    product = code.fma(high, x_high, low * x_low)
                    sum_[0].set(code.fma(product, scale, sum_[0].get()))
    for token in range(num_tokens):
        for row in (0, 1):
            lanes = sums[row][token][0].get()
            if not scaled:
                lanes = lanes + sums[row][token][1].get()
            total = code.fold(lanes, lambda a, b: a + b) * factors[row]
            if (seen := largest[row]) is not None:
                total = is_nan_row(code, seen).select(code.f32(float("nan")), total)
            code.store(total, out + 4 * (2 * token + row))
    code.end()
    return code.function


def _step_scale(code: Code, codes: Codes, scales: Val, step: Val) -> Val:
    """The scale of a step's products, lane by lane."""
    if codes.scales_per_step == 2:
        pair = code.load(vector(F32, 2), scales + step * 8)
        return pair.lanes([0] * (LANES // 2) + [1] * (LANES // 2))
    steps_per_scale = codes.scale_block[1] // STEP
    index = step if steps_per_scale == 1 else step >> (steps_per_scale.bit_length() - 1)
    return code.load(F32, scales + index * 4).splat()


@dataclass(frozen=True)
class Matrix:
    """One [rows, cols] matrix of an expert, seen from inside a function."""

    code: Code
    codes: Codes
    data: Val
    scale: Val
    global_scale: Val
    index: Val
    rows: Val
    cols: Val

    @property
    def row_bytes(self) -> Val:
        return (self.cols // STEP) * self.codes.step_bytes

    def row(self, row: Val) -> Val:
        """Address of a row's codes."""
        return self.data + (self.index * self.rows + row) * self.row_bytes

    def scales(self, row: Val, scratch: Val) -> Val:
        """Address of a row's FP32 scales: where they are stored, or `scratch`, to which they are decoded."""
        codes, code = self.codes, self.code
        block_rows, block_cols = codes.scale_block
        if not codes.scale_bytes or not block_cols:
            return scratch
        per_row = (self.cols + (block_cols - 1)) // block_cols
        down = (self.rows + (block_rows - 1)) // block_rows
        stored = self.scale + (self.index * down + row // block_rows) * per_row * codes.scale_bytes
        if codes.scale_bytes == 4:
            return stored
        with code.loop(code.i64(0), per_row) as i:
            code.store(codes.scale_value(code, stored + i), scratch + i * 4)
        return scratch

    def factor(self, row: Val) -> Val:
        """What multiplies a row's dot product."""
        codes, code = self.codes, self.code
        factor = code.f32(codes.unit)
        if codes.has_global_scale:
            factor = factor * code.load(F32, self.global_scale + self.index * 4)
        if codes.scale_bytes and not codes.scale_block[1]:
            factor = factor * codes.scale_value(code, self.scale + (self.index * self.rows + row) * 4)
        return factor


@contextmanager
def _blocks(code: Code, counter: Val, count: Val) -> Iterator[Val]:
    """Take blocks of work, shared with all other threads, until none is left."""
    block = code.var(code.fetch_add(counter, 1))
    with code.while_(lambda: block.get() < count):
        yield block.get()
        block.set(code.fetch_add(counter, 1))


def _dot_pairs(
    code: Code, dots: dict[int, Any], first: Val, last: Val, common: list[Val], x_of: Any, tail: list[Val], use: Any
) -> None:
    """`dot` for the pairs first..last of one expert, `TOKENS` at a time; `use(pair, address of its two products)`."""
    results = tail[0]
    pair = code.var(first)
    for count in (TOKENS, 1):
        with code.while_(lambda count=count: pair.get() + (count - 1) < last):
            now = pair.get()
            code.call(dots[count], *common, *(x_of(now + i) for i in range(count)), *tail)
            for i in range(count):
                use(now + i, results + 8 * i)
            pair.set(now + count)


# -- the three functions ---------------------------------------------------------------------------------------------


def _plan(module: Any, codes: Codes) -> None:
    code = Code(module, "plan", [I64])
    args = Arguments(code)
    topk, num_experts, cursor = args.topk, args.num_experts, args.cursor
    zero = code.i64(0)
    with code.loop(zero, num_experts) as e:
        code.store(zero, cursor + e * 8)

    @contextmanager
    def used_slots() -> Iterator[tuple[Val, Val, Val]]:
        """(token, slot, address of its expert's cursor) of all slots that name an expert."""
        with code.loop(zero, args.num_tokens) as token, code.loop(zero, topk) as slot:
            # The low half of an int64 id: moe_decode has seen to it that ids are -1 or name an expert.
            e = code.load(I32, args.idx + token * args.idx_stride + slot * args.idx_bytes).sext(I64)
            with code.if_(e > -1):
                yield token, slot, cursor + e * 8

    with used_slots() as (_, _, at):
        code.store(code.load(I64, at) + 1, at)
    num_active, position = code.var(zero), code.var(zero)
    with code.loop(zero, num_experts) as e:
        at = cursor + e * 8
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
    with used_slots() as (token, slot, at):
        pair = code.load(I64, at)
        code.store(pair + 1, at)
        code.store(token, args.pair_token + pair * 8)
        code.store(code.load(F32, args.weights + token * args.weights_stride + slot * 4), args.pair_weight + pair * 4)
    with code.loop(zero, args.num_tokens) as token:
        to = args.wide_x + token * args.hidden * 4
        with code.loop(zero, args.hidden, STEP) as col:
            _widen_step(code, codes, args.x + token * args.x_stride + col * 2, to + col * 4)
    code.end()


def _widen_step(code: Code, codes: Codes, bf16: Val, to: Val) -> None:
    """32 BF16 values as FP32, in the order in which the format's weights are decoded."""
    if codes.interleaved:
        pairs = code.load(vector(I32, LANES), bf16)
        low, high = pairs << 16, pairs & -0x10000
    else:
        low, high = (code.load(vector(I16, LANES), bf16 + 2 * LANES * h).zext(vector(I32, LANES)) << 16 for h in (0, 1))
    code.store(low.as_bits(F32X16), to)
    code.store(high.as_bits(F32X16), to + 4 * LANES)


def _gate_up(module: Any, codes: Codes, dots: dict[int, Any], gate_fn: str) -> None:
    code = Code(module, "gate_up", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    blocks_per_expert = intermediate // ROWS
    products = code.slot(F32, 2 * TOKENS)
    scratch = _scale_scratch(code, codes, hidden)
    with _blocks(code, args.address("next_gate_up"), args.num_active * blocks_per_expert) as block:
        active, start = block // blocks_per_expert, (block % blocks_per_expert) * ROWS
        expert = code.load(I64, args.active + active * 8)
        first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))
        matrices = [
            Matrix(code, codes, args.w13, args.w13_scale, args.w13_global, expert * 2 + half, intermediate, hidden)
            for half in (0, 1)
        ]
        with code.loop(start, start + ROWS) as row:
            common = [
                *(m.row(row) for m in matrices),
                *(m.scales(row, s) for m, s in zip(matrices, scratch, strict=True)),
                *(m.factor(row) for m in matrices),
            ]

            def use(pair: Val, products: Val, expert: Val = expert, row: Val = row) -> None:
                gate_up = [code.load(F32, products + 4 * half) for half in (0, 1)]
                bias = args.w13_bias
                biased = [code.var(value) for value in gate_up]
                with code.if_(bias > 0):
                    for half, var in enumerate(biased):
                        at = bias + ((expert * 2 + half) * intermediate + row) * 4
                        var.set(var.get() + code.load(F32, at))
                act = _activation(code, args, gate_fn, biased[0].get(), biased[1].get())
                to = args.act + (pair * intermediate + _position(codes, row)) * 4
                code.store((_bf16_bits(act).zext(I32) << 16).as_bits(F32), to)

            def x_of(pair: Val) -> Val:
                return args.wide_x + code.load(I64, args.pair_token + pair * 8) * hidden * 4

            tail = [products, hidden // STEP, matrices[0].row_bytes]
            _dot_pairs(code, dots, first, last, common, x_of, tail, use)
    code.end()


def _down(module: Any, codes: Codes, dots: dict[int, Any]) -> None:
    code = Code(module, "down", [I64])
    args = Arguments(code)
    hidden, intermediate = args.hidden, args.intermediate
    zero = code.i64(0)
    products = code.slot(F32, 2 * TOKENS)
    scratch = _scale_scratch(code, codes, intermediate)
    with _blocks(code, args.address("next_down"), hidden // ROWS) as block:
        start = block * ROWS
        with code.loop(zero, args.num_tokens) as token:
            for half in range(ROWS // LANES):
                code.store(code.zeros(F32X16), args.y + (token * hidden + start + LANES * half) * 4)
        with code.loop(zero, args.num_active) as active:
            expert = code.load(I64, args.active + active * 8)
            first, last = (code.load(I64, args.first + (active + i) * 8) for i in (0, 1))
            w2 = Matrix(code, codes, args.w2, args.w2_scale, args.w2_global, expert, hidden, intermediate)
            with code.loop(start, start + ROWS, 2) as row:
                pair_of_rows = (row, row + 1)
                common = [
                    *(w2.row(r) for r in pair_of_rows),
                    *(w2.scales(r, s) for r, s in zip(pair_of_rows, scratch, strict=True)),
                    *(w2.factor(r) for r in pair_of_rows),
                ]

                def use(pair: Val, products: Val, expert: Val = expert, row: Val = row) -> None:
                    values = code.var(code.load(vector(F32, 2), products))
                    bias = args.w2_bias
                    with code.if_(bias > 0):
                        at = bias + (expert * hidden + row) * 4
                        values.set(values.get() + code.load(vector(F32, 2), at))
                    weight = code.load(F32, args.pair_weight + pair * 4).splat(2)
                    token = code.load(I64, args.pair_token + pair * 8)
                    at = args.y + (token * hidden + row) * 4
                    code.store(code.fma(weight, values.get(), code.load(vector(F32, 2), at)), at)

                def act_of(pair: Val) -> Val:
                    return args.act + pair * intermediate * 4

                tail = [products, intermediate // STEP, w2.row_bytes * 2]
                _dot_pairs(code, dots, first, last, common, act_of, tail, use)
        with code.loop(zero, args.num_tokens) as token:
            for half in range(ROWS // LANES):
                col = start + LANES * half
                value = code.load(F32X16, args.y + (token * hidden + col) * 4)
                code.store(_bf16_bits(value), args.out + token * args.out_stride + col * 2)
    code.end()


def _scale_scratch(code: Code, codes: Codes, cols: Val) -> list[Val]:
    """Stack for the decoded scales of two rows."""
    if codes.scale_bytes != 1:
        return [code.i64(0)] * 2
    return [code.dynamic_slot(F32, cols // codes.scale_block[1]) for _ in (0, 1)]


def _position(codes: Codes, col: Val) -> Val:
    """Where a column of the intermediate lies, so that it meets the format's weights as they are decoded."""
    if not codes.interleaved:
        return col
    return (col & -STEP) + (col & 1) * LANES + ((col & (STEP - 1)) >> 1)


# -- elementwise -----------------------------------------------------------------------------------------------------


def _bf16_bits(value: Val) -> Val:
    """FP32 to the bits of BF16: nearest, ties to even; NaN stays NaN."""
    wide, narrow = (vector(I32, LANES), vector(I16, LANES)) if value.type == F32X16 else (I32, I16)
    bits = value.as_bits(wide)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (value.is_nan().select(bits.like(0x7FC0), rounded)).trunc(narrow)


def _activation(code: Code, args: Arguments, gate_fn: str, gate: Val, up: Val) -> Val:
    """act(gate, up) of warpring/activation.py. Comparisons are false for NaN, so that a NaN stays one."""
    limit = args.float("limit")
    gate = (gate > limit).select(limit, gate)
    up = (up > limit).select(limit, up)
    negative = code.f32(0.0) - limit
    up = (up < negative).select(negative, up) + args.float("up_offset")
    if gate_fn == "gelu_tanh":
        # 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u))
        cubed = gate * gate * gate
        exponent = code.fma(cubed, code.f32(0.044715), gate) * -1.5957691216057308
    else:
        exponent = gate * args.float("alpha") * -1.0
    return gate / (_exp(code, exponent) + 1.0) * up


def _exp(code: Code, x: Val) -> Val:
    """e^x within 2 units of FP32's last place, infinite from 88 on; a NaN stays one."""
    clamped = (x < -87.0).select(code.f32(-87.0), x)
    clamped = (clamped > 88.0).select(code.f32(88.0), clamped)
    # 2^23 * 1.5 has no fraction bits: added to a number it leaves the nearest integer in the low bits.
    magic = 12582912.0
    shifted = code.fma(clamped, code.f32(1.4426950408889634), code.f32(magic))
    whole = shifted - magic
    rest = code.fma(whole, code.f32(-0.693145751953125), clamped)
    rest = code.fma(whole, code.f32(-1.428606765330187e-6), rest)
    series = code.f32(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = code.fma(series, rest, code.f32(coefficient))
    power = ((shifted.as_bits(I32) << 23) + (127 << 23)).as_bits(F32)
    return (x > 88.0).select(code.f32(float("inf")), series * power)
