"""A thin layer over llvmlite's IR builder, so that kernels read like the arithmetic they do.

A `Val` is one SSA value: an i64, a float, or a vector of 16 lanes; Python's operators build instructions from it.
Addresses are plain i64 values. Variables that change in loops are stack slots (`Code.var`), which LLVM turns into
registers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16
#: Floats of one step: 64 bytes. AVX-512 holds it in one register, AVX2 in two, NEON in four.
F32X16 = ir.VectorType(F32, LANES)
VOID = ir.VoidType()


Number = int | float


def vector(scalar: Any, lanes: int) -> Any:
    """The type of `lanes` scalars."""
    return ir.VectorType(scalar, lanes)


class Val:
    """One value of a function in the making. Operators take another `Val` of the type, or a Python number."""

    def __init__(self, builder: Any, value: Any) -> None:
        self._builder = builder
        self.raw = value

    @property
    def type(self) -> Any:
        """llvmlite's type."""
        return self.raw.type

    def __add__(self, other: Val | Number) -> Val:
        return self._binary("fadd" if self._is_float() else "add", other)

    def __sub__(self, other: Val | Number) -> Val:
        return self._binary("fsub" if self._is_float() else "sub", other)

    def __mul__(self, other: Val | Number) -> Val:
        return self._binary("fmul" if self._is_float() else "mul", other)

    def __truediv__(self, other: Val | Number) -> Val:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Val | Number) -> Val:
        return self._binary("sdiv", other)

    def __mod__(self, other: Val | Number) -> Val:
        return self._binary("srem", other)

    def __lshift__(self, other: Val | Number) -> Val:
        return self._binary("shl", other)

    def __rshift__(self, other: Val | Number) -> Val:
        """Arithmetic: the sign bit is repeated."""
        return self._binary("ashr", other)

    def __and__(self, other: Val | Number) -> Val:
        return self._binary("and_", other)

    def __or__(self, other: Val | Number) -> Val:
        return self._binary("or_", other)

    def __lt__(self, other: Val | Number) -> Val:
        return self._compare("<", other)

    def __gt__(self, other: Val | Number) -> Val:
        return self._compare(">", other)

    def equals(self, other: Val | Number) -> Val:
        """Whether both are equal: an i1."""
        return self._compare("==", other)

    def is_nan(self) -> Val:
        """Whether this float is NaN: an i1."""
        return self._new(self._builder.fcmp_unordered("uno", self.raw, self.raw))

    def select(self, if_true: Val, if_false: Val) -> Val:
        """This i1 value's choice between two values, both computed."""
        return self._new(self._builder.select(self.raw, if_true.raw, if_false.raw))

    def sext(self, to: Any) -> Val:
        """Integers in a wider type, the sign repeated."""
        return self._new(self._builder.sext(self.raw, to))

    def zext(self, to: Any) -> Val:
        """Integers in a wider type, zeros in front."""
        return self._new(self._builder.zext(self.raw, to))

    def trunc(self, to: Any) -> Val:
        """The low bits of integers."""
        return self._new(self._builder.trunc(self.raw, to))

    def as_bits(self, to: Any) -> Val:
        """The same bits as another type of the same size."""
        return self._new(self._builder.bitcast(self.raw, to))

    def widen(self, to: Any) -> Val:
        """A float, or a vector of floats, in a wider type; exact."""
        return self._new(self._builder.fpext(self.raw, to))

    def lanes(self, picked: list[int]) -> Val:
        """The vector of the lanes `picked` of this vector."""
        mask = ir.Constant(vector(I32, len(picked)), picked)
        undefined = ir.Constant(self.type, ir.Undefined)
        return self._new(self._builder.shuffle_vector(self.raw, undefined, mask))

    def joined(self, other: Val, picked: list[int]) -> Val:
        """The lanes `picked` of this vector followed by another one."""
        mask = ir.Constant(vector(I32, len(picked)), picked)
        return self._new(self._builder.shuffle_vector(self.raw, other.raw, mask))

    def lane(self, index: int) -> Val:
        """One lane of this vector."""
        return self._new(self._builder.extract_element(self.raw, ir.Constant(I32, index)))

    def replaced(self, index: int, value: Val) -> Val:
        """This vector with another value in one lane."""
        return self._new(self._builder.insert_element(self.raw, value.raw, ir.Constant(I32, index)))

    def splat(self, lanes: int = LANES) -> Val:
        """A vector with this scalar in every lane."""
        first = self._builder.insert_element(
            ir.Constant(vector(self.type, lanes), ir.Undefined), self.raw, ir.Constant(I32, 0)
        )
        return self._new(first).lanes([0] * lanes)

    def like(self, number: Number) -> Val:
        """The constant `number` in this value's type, in every lane of a vector."""
        kind = self.type
        content = [number] * kind.count if isinstance(kind, ir.VectorType) else number
        return self._new(ir.Constant(kind, content))

    def _is_float(self) -> bool:
        kind = self.type.element if isinstance(self.type, ir.VectorType) else self.type
        return isinstance(kind, ir.FloatType | ir.HalfType)

    def _operand(self, other: Val | Number) -> Any:
        return (other if isinstance(other, Val) else self.like(other)).raw

    def _binary(self, op: str, other: Val | Number) -> Val:
        return self._new(getattr(self._builder, op)(self.raw, self._operand(other)))

    def _compare(self, op: str, other: Val | Number) -> Val:
        build = self._builder.fcmp_ordered if self._is_float() else self._builder.icmp_signed
        return self._new(build(op, self.raw, self._operand(other)))

    def _new(self, value: Any) -> Val:
        return Val(self._builder, value)


class Var:
    """A stack slot."""

    def __init__(self, builder: Any, slot: Any) -> None:
        self._builder = builder
        self._slot = slot

    def get(self) -> Val:
        """The value now."""
        return Val(self._builder, self._builder.load(self._slot))

    def set(self, value: Val) -> None:
        """Replace the value."""
        self._builder.store(value.raw, self._slot)


class Code:
    """One function `name(parameters) -> void` of `module`, written from top to bottom; call `end` last.

    Attributes:
        module: llvmlite's module.
        function: the function, to be called from others.
        parameters: its parameters, in order.
    """

    def __init__(self, module: Any, name: str, parameters: list[Any], *, internal: bool = False) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, parameters), name)
        if internal:
            self.function.linkage = "internal"
        # Slots go into a block of their own, so that a loop does not grow the stack.
        self._slots = ir.IRBuilder(self.function.append_basic_block("slots"))
        self._body = self.function.append_basic_block("body")
        self._builder = ir.IRBuilder(self._body)
        self.parameters = [Val(self._builder, argument) for argument in self.function.args]

    def end(self) -> None:
        """Close the function."""
        self._builder.ret_void()
        self._slots.branch(self._body)

    def i64(self, number: int) -> Val:
        """A constant."""
        return Val(self._builder, ir.Constant(I64, number))

    def f32(self, number: float) -> Val:
        """A constant."""
        return Val(self._builder, ir.Constant(F32, number))

    def zeros(self, kind: Any) -> Val:
        """All bits 0."""
        return Val(self._builder, ir.Constant(kind, None))

    def var(self, start: Val) -> Var:
        """A variable with a start value."""
        var = Var(self._builder, self._slots.alloca(start.type))
        var.set(start)
        return var

    def slot(self, kind: Any, count: int) -> Val:
        """Address of `count` elements of stack."""
        return Val(self._builder, self._builder.ptrtoint(self._slots.alloca(kind, count), I64))

    def dynamic_slot(self, kind: Any, count: Val) -> Val:
        """Address of stack for `count` elements, counted at run time; not inside a loop."""
        return Val(self._builder, self._builder.ptrtoint(self._builder.alloca(kind, count.raw), I64))

    def load(self, kind: Any, address: Val) -> Val:
        """An unaligned load."""
        return Val(self._builder, self._builder.load(self._pointer(kind, address), align=1, typ=kind))

    def load_first(self, kind: Any, address: Val, count: Val) -> Val:
        """A vector of which the first `count` lanes are loaded, unaligned; the others are 0, and not read."""
        lanes = vector(I32, kind.count)
        numbers = Val(self._builder, ir.Constant(lanes, list(range(kind.count))))
        mask = numbers < count.trunc(I32).splat(kind.count)
        scalar = "f32" if isinstance(kind.element, ir.FloatType) else f"i{kind.element.width}"
        signature = ir.FunctionType(kind, [ir.PointerType(I8), I32, mask.type, kind])
        function = self._intrinsic(f"llvm.masked.load.v{kind.count}{scalar}.p0", signature)
        pointer, unaligned = self._pointer(I8, address), ir.Constant(I32, 1)
        return Val(self._builder, self._builder.call(function, [pointer, unaligned, mask.raw, self.zeros(kind).raw]))

    def store(self, value: Val, address: Val) -> None:
        """An unaligned store."""
        self._builder.store(value.raw, self._pointer(value.type, address), align=1)

    def fetch_add(self, address: Val, amount: Val) -> Val:
        """Add to an i64 that other threads add to as well; the value before."""
        pointer, ordering = self._pointer(I64, address), "monotonic"
        return Val(self._builder, self._builder.atomic_rmw("add", pointer, amount.raw, ordering))

    def load_shared(self, address: Val) -> Val:
        """The value at the moment of an i64 that other threads add to."""
        return Val(self._builder, self._builder.load_atomic(self._pointer(I64, address), "monotonic", 8, typ=I64))

    def prefetch(self, address: Val) -> None:
        """Ask for the cache line at an address, which need not exist: into the second nearest cache."""
        signature = ir.FunctionType(VOID, [ir.PointerType(I8), I32, I32, I32])
        read, second, data = (ir.Constant(I32, number) for number in (0, 2, 1))
        self._builder.call(
            self._intrinsic("llvm.prefetch.p0", signature), [self._pointer(I8, address), read, second, data]
        )

    def target(self, name: str, result: Any, *arguments: Val) -> Val:
        """One instruction of the processor, by the name of LLVM's intrinsic."""
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = self._intrinsic(name, signature)
        return Val(self._builder, self._builder.call(function, [argument.raw for argument in arguments]))

    def table(self, kind: Any, numbers: list[int]) -> Val:
        """A constant vector."""
        return Val(self._builder, ir.Constant(kind, numbers))

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """a * b + c, rounded once."""
        suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        signature = ir.FunctionType(a.type, [a.type] * 3)
        return Val(
            self._builder, self._builder.call(self._intrinsic(f"llvm.fma.{suffix}", signature), [a.raw, b.raw, c.raw])
        )

    def umax(self, a: Val, b: Val) -> Val:
        """The larger of two unsigned integers, lane by lane."""
        kind = a.type
        suffix = f"v{kind.count}i{kind.element.width}" if isinstance(kind, ir.VectorType) else f"i{kind.width}"
        signature = ir.FunctionType(kind, [kind, kind])
        return Val(self._builder, self._builder.call(self._intrinsic(f"llvm.umax.{suffix}", signature), [a.raw, b.raw]))

    def fold(self, vec: Val, combine: Any) -> Val:
        """The lanes of a vector combined in a fixed order: halves on each other, until one is left."""
        count = vec.type.count
        while count > 1:
            count //= 2
            vec = combine(vec.lanes(list(range(count))), vec.lanes(list(range(count, 2 * count))))
        return vec.lane(0)

    def call(self, function: Any, *arguments: Val) -> None:
        """Call a function that returns nothing."""
        self._builder.call(function, [argument.raw for argument in arguments])

    @contextmanager
    def loop(self, start: Val, stop: Val, step: int = 1) -> Generator[Val]:
        """`for index in range(start, stop, step)`."""
        index = self.var(start)
        with self.while_(lambda: index.get() < stop):
            yield index.get()
            index.set(index.get() + step)

    @contextmanager
    def while_(self, condition: Any) -> Generator[None]:
        """`while condition():`, with `condition` a function that builds an i1 value."""
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "loop", "after"))
        self._builder.branch(head)
        self._builder.position_at_end(head)
        self._builder.cbranch(condition().raw, body, after)
        self._builder.position_at_end(body)
        yield
        self._builder.branch(head)
        self._builder.position_at_end(after)

    @contextmanager
    def if_(self, condition: Val) -> Generator[None]:
        """`if condition:`."""
        with self._builder.if_then(condition.raw):
            yield

    def _pointer(self, kind: Any, address: Val) -> Any:
        return self._builder.inttoptr(address.raw, ir.PointerType(kind))

    def _intrinsic(self, name: str, signature: Any) -> Any:
        found = self.module.globals.get(name)
        return found if found is not None else ir.Function(self.module, signature, name)
