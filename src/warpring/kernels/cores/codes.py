"""How each number format becomes floats in registers: 32 weights of a row at a time, as two vectors of 16.

A code is moved to the exponent and mantissa bits of an FP16 number and widened, which is exact for subnormal codes too
and does not depend on the processor's flush-to-zero mode. The value comes out smaller by a power of two, `Codes.unit`,
which multiplies the finished dot product instead. E4M3 has NaN codes that FP16 would read as numbers: the largest code
of a row is tracked, and one NaN code makes the row's dot product NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from warpring.kernels.cores.emit import F16, F32, F32X16, I8, I16, I32, LANES, Code, Val, Var, vector

#: Weights of one step. Sizes of a layer are multiples of it.
STEP = 32
_E4M3_NAN = 0x7F
_E8M0_NAN = 255
_LOW, _HIGH = list(range(LANES)), list(range(LANES, 2 * LANES))


class Codes(ABC):
    """One format's codes and scales.

    Class attributes:
        name: the format's.
        step_bytes: bytes of 32 codes.
        unit: power of two that turns decoded numbers into values; multiplies the dot product of a row.
        interleaved: whether the two vectors of a step hold its even and odd columns, not its first and last 16.
        scale_bytes: bytes of one stored scale; 0 where rows have none.
        scale_block: (rows, cols) under one scale; cols 0 = a whole row.
        scales_per_step: scales that a step of 32 columns meets, at most 2.
        has_global_scale: whether each matrix has one more FP32 scale.
        tracks_nan: whether codes can be NaN (see `largest`).
    """

    name: str
    step_bytes: int
    unit: float = 1.0
    interleaved: bool = False
    scale_bytes: int = 0
    scale_block: tuple[int, int] = (1, 0)
    scales_per_step: int = 1
    has_global_scale: bool = False
    tracks_nan: bool = False

    @abstractmethod
    def decode(self, code: Code, address: Val, largest: Var | None) -> tuple[Val, Val]:
        """The 32 weights at `address`, without their scale. Where codes can be NaN, `largest` is brought up to date."""

    def scale_value(self, code: Code, address: Val) -> Val:
        """The scale stored at `address`, as a float."""
        return code.load(F32, address)


class Bf16Codes(Codes):
    """BF16: the upper half of an FP32."""

    name = "bf16"
    step_bytes = 2 * STEP

    def decode(self, code: Code, address: Val, largest: Var | None) -> tuple[Val, Val]:
        low, high = (code.load(vector(I16, LANES), address + 2 * LANES * half) for half in (0, 1))
        return tuple((v.zext(vector(I32, LANES)) << 16).as_bits(F32X16) for v in (low, high))  # pyright: ignore[reportReturnType]


class _E4m3(Codes):
    step_bytes = STEP
    unit = 2.0**8
    tracks_nan = True

    def decode(self, code: Code, address: Val, largest: Var | None) -> tuple[Val, Val]:
        codes = code.load(vector(I8, STEP), address)
        if largest is not None:
            largest.set(code.umax(largest.get(), codes << 1))
        # s|eeee|mmm -> s|0eeee|mmm0000000. The sign extension leaves the sign in two places; one is masked out.
        bits = (codes.sext(vector(I16, STEP)) << 7) & -0x4080
        halves = bits.as_bits(vector(F16, STEP))
        return halves.lanes(_LOW).widen(F32X16), halves.lanes(_HIGH).widen(F32X16)


class Fp8BlockCodes(_E4m3):
    name = "fp8_block"
    scale_bytes = 4
    scale_block = (128, 128)


class Fp8ChannelCodes(_E4m3):
    name = "fp8_channel"
    scale_bytes = 4


class Mxfp8Codes(_E4m3):
    name = "mxfp8"
    scale_bytes = 1
    scale_block = (1, 32)

    def scale_value(self, code: Code, address: Val) -> Val:
        return _e8m0(code, address)


class _E2m1(Codes):
    step_bytes = STEP // 2
    unit = 2.0**14
    interleaved = True

    def decode(self, code: Code, address: Val, largest: Var | None) -> tuple[Val, Val]:
        # A word holds one byte, sign-extended: ssssssss|see.m|see.m. Each nibble s|ee|m moves to s|000ee|m000000000.
        words = code.load(vector(I8, LANES), address).sext(vector(I16, LANES))
        even, odd = ((words << 12) >> 3) & -0x7200, (words << 5) & -0x7200
        return tuple(w.as_bits(vector(F16, LANES)).widen(F32X16) for w in (even, odd))  # pyright: ignore[reportReturnType]


class Mxfp4Codes(_E2m1):
    name = "mxfp4"
    scale_bytes = 1
    scale_block = (1, 32)

    def scale_value(self, code: Code, address: Val) -> Val:
        return _e8m0(code, address)


class Nvfp4Codes(_E2m1):
    name = "nvfp4"
    unit = 2.0**22  # of the codes, and of the E4M3 scales
    scale_bytes = 1
    scale_block = (1, 16)
    scales_per_step = 2
    has_global_scale = True

    def scale_value(self, code: Code, address: Val) -> Val:
        stored = code.load(I8, address)
        bits = (stored.sext(I16) << 7) & -0x4080
        value = bits.as_bits(F16).widen(F32)
        return (stored & _E4M3_NAN).equals(_E4M3_NAN).select(code.f32(float("nan")), value)


def _e8m0(code: Code, address: Val) -> Val:
    """2^(code - 127). Code 0 is the subnormal 2^-127, whose bits are those of half a normal exponent; 255 is NaN."""
    stored = code.load(I8, address).zext(I32)
    bits = code.umax(stored << 23, stored.like(1 << 22))
    return stored.equals(_E8M0_NAN).select(code.f32(float("nan")), bits.as_bits(F32))


def is_nan_row(code: Code, largest: Var) -> Val:
    """Whether an E4M3 code of the row was NaN: codes were doubled, so that the sign fell off."""
    return code.fold(largest.get(), code.umax).zext(I32).equals(2 * _E4M3_NAN)


CODES: dict[str, Codes] = {
    codes.name: codes
    for codes in (Bf16Codes(), Fp8BlockCodes(), Fp8ChannelCodes(), Mxfp8Codes(), Mxfp4Codes(), Nvfp4Codes())
}
