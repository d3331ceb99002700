"""Elementwise arithmetic of the layer: rounding to BF16, decoding scales, the gated activation."""

from __future__ import annotations

from warpring.kernels.cores.emit import F16, F32X16, I8, I16, I32, LANES, Code, Val, vector
from warpring.kernels.cores.formats import E4M3_NAN, StoredFormat

_E8M0_NAN = 255


def bf16_bits(value: Val) -> Val:
    """A vector of FP32 to the bits of BF16: nearest, ties to even; NaN stays NaN."""
    lanes = value.type.count
    bits = value.as_bits(vector(I32, lanes))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return value.is_nan().select(bits.like(0x7FC0), rounded).trunc(vector(I16, lanes))


def scale_values(code: Code, stored: StoredFormat, address: Val) -> Val:
    """16 one-byte scales as floats."""
    codes = code.load(vector(I8, LANES), address)
    nan = code.f32(float("nan")).splat()
    if stored.scale == "e8m0":
        # Code 0 is the subnormal 2^-127, whose one bit is larger than 0 << 23 and smaller than 1 << 23.
        bits = codes.zext(vector(I32, LANES)) << 23
        return codes.equals(_E8M0_NAN).select(nan, code.umax(bits, bits.like(1 << 22)).as_bits(F32X16))
    # E4M3, through FP16 as in wide.py: exact, too small by 2^8.
    halves = (codes.sext(vector(I16, LANES)) << 7) & -0x4080
    values = halves.as_bits(vector(F16, LANES)).widen(F32X16) * 256.0
    return (codes & E4M3_NAN).equals(E4M3_NAN).select(nan, values)


def activation(code: Code, gate_fn: str, gate: Val, up: Val, alpha: Val, limit: Val, up_offset: Val) -> Val:
    """act(gate, up) of warpring/activation.py on vectors. Comparisons are false for NaN, so that a NaN stays one."""
    gate = (gate > limit).select(limit, gate)
    up = (up > limit).select(limit, up)
    negative = limit * -1.0
    up = (up < negative).select(negative, up) + up_offset
    if gate_fn == "gelu_tanh":
        # 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u))
        cubed = gate * gate * gate
        exponent = code.fma(cubed, gate.like(0.044715), gate) * -1.5957691216057308
    else:
        exponent = gate * alpha * -1.0
    return gate / (_exp(code, exponent) + 1.0) * up


def _exp(code: Code, x: Val) -> Val:
    """e^x within 2 units of FP32's last place, infinite from 88 on; a NaN stays one."""
    clamped = (x < -87.0).select(x.like(-87.0), x)
    clamped = (clamped > 88.0).select(x.like(88.0), clamped)
    # 2^23 * 1.5 has no fraction bits: added to a number it leaves the nearest integer in the low bits.
    magic = 12582912.0
    shifted = code.fma(clamped, x.like(1.4426950408889634), x.like(magic))
    whole = shifted - magic
    rest = code.fma(whole, x.like(-0.693145751953125), clamped)
    rest = code.fma(whole, x.like(-1.428606765330187e-6), rest)
    series = x.like(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = code.fma(series, rest, x.like(coefficient))
    power = ((shifted.as_bits(vector(I32, x.type.count)) << 23) + (127 << 23)).as_bits(x.type)
    return (x > 88.0).select(x.like(float("inf")), series * power)
