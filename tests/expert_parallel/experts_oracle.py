"""role2's arithmetic for one block, every rounding of it, in numpy: what test_experts_kernel.py compares bits with."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from warpring import Experts
from warpring.expert_parallel.arithmetic import Published, quantize
from warpring.expert_parallel.problem import Problem

Array = np.ndarray
_LIBM = ctypes.CDLL("libm.so.6")
_LIBM.expf.restype, _LIBM.expf.argtypes = ctypes.c_float, [ctypes.c_float]
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
#: How much smaller an operand is than the E2M1 code whose bits it has.
_SHORT = 2.0**6
#: Columns of one product, the least exponent of an operand, bits kept of terms and of sums.
_DEPTH, _LEAST, _BITS = 32, -6, 13


def expert_block(
    problem: Problem, experts: Experts, expert: int, tokens: Published, weights: torch.Tensor
) -> torch.Tensor:
    """Partial results [n, hidden] of the tokens [n] that want `expert`, as role2 rounds them."""
    form, n = problem.activation, tokens.codes.shape[0]
    routing = weights.numpy()[:, None]
    x = tokens.codes.float().unflatten(1, (problem.hidden_padded // 128, -1, 128)).numpy()
    gate, up = (
        _gemm(*_matrix(experts, "w13", (expert, half), problem.hidden_padded), x, tokens.scale.numpy())
        for half in (0, 1)
    )
    if experts.w13_bias is not None:
        bias = experts.w13_bias[expert].numpy()
        gate, up = gate + bias[0], up + bias[1]
    act = _activate(experts, gate, up)
    if form == "fp8":
        act = act * routing
    padded = np.zeros((n, problem.intermediate_padded), np.float32)
    padded[:, : problem.intermediate] = act
    codes, scale = quantize(torch.from_numpy(padded).unflatten(1, (-1, 64)), form)
    second = _matrix(experts, "w2", (expert,), problem.intermediate_padded)
    out = _gemm(*second, codes.float().numpy(), scale.numpy())
    bias = np.zeros(problem.hidden, np.float32) if experts.w2_bias is None else experts.w2_bias[expert].numpy()
    if form == "fp8":
        return torch.from_numpy(
            _fma(np.broadcast_to(bias, out.shape), np.broadcast_to(routing, out.shape), out)
        ).bfloat16()
    return torch.from_numpy((out + bias) * routing)


def _matrix(experts: Experts, name: str, index: tuple[int, ...], cols: int) -> tuple[Array, Array]:
    """Operands [rows, cols], and the factor [rows, chunks of 128 or blocks of 32 columns] of their sums."""
    stored = getattr(experts, name)
    for i in index:
        stored = stored[i]
    rows, width = stored.shape
    chunks = math.ceil(cols / 128)
    if stored.format == "mxfp4":
        codes = torch.stack((stored.data & 15, stored.data >> 4), -1).flatten(-2).numpy()
        values = np.zeros((rows, cols), np.float32)
        values[:, :width] = _E2M1[codes] / _SHORT
        factor = np.zeros((rows, cols // 32), np.float32)
        exponent = stored.scale.numpy().astype(int)
        factor[:, : width // 32] = np.where(exponent == 0, 0, np.ldexp(1.0, exponent - 127)).astype(np.float32)
        return values, factor
    values = np.zeros((rows, cols), np.float32)
    values[:, :width] = stored.data.float().numpy()
    scale = stored.scale.numpy()
    if stored.format == "fp8_block":
        return values, np.repeat(scale, 128, axis=0)[:rows]
    return values, np.repeat(scale, chunks, axis=1)


def _gemm(values: Array, factor: Array, x: Array, x_scale: Array) -> Array:
    """[n, rows] for x [n, groups, terms, columns]: products on the tensor cores, over a group's columns or 32, the last
    term of 32 columns first; times both scales, added in FP32.
    """
    terms, group = x.shape[2:]
    blocks = values.shape[1] // 32
    fine = factor.shape[1] == blocks
    total = np.zeros((values.shape[0], x.shape[0]), np.float32)
    for g in range(values.shape[1] // group):
        within, token = np.zeros_like(total), x_scale[None, :, g]
        columns = 32 if fine else group
        for begin in range(g * group, (g + 1) * group, columns):
            part = np.zeros_like(total)
            for first in range(begin, begin + columns, _DEPTH):
                for term in reversed(range(terms)):
                    tokens = x[:, g, term, first - g * group : first - g * group + _DEPTH]
                    part = _product(values[:, first : first + _DEPTH], tokens, part)
            if fine:
                within = _fma(part, np.broadcast_to(factor[:, begin // 32, None], part.shape), within)
            else:
                total = _fma(part, factor[:, begin // 128, None] * token, total)
        if fine:
            total = _fma(within, np.broadcast_to(token, within.shape), total)
    return np.ascontiguousarray(total.T) * np.float32(_SHORT if fine else 1)


def _exponent(v: Array, least: int) -> Array:
    return np.maximum(np.frexp(v)[1] - 1, least)


def _product(a: Array, b: Array, c: Array) -> Array:
    """c + a b^T as Hopper's tensor cores round it: terms cut below the largest, the sum cut to its own bits."""
    terms = a[:, None, :].astype(np.float64) * b[None].astype(np.float64)
    exponents = np.where(terms != 0, _exponent(a, _LEAST)[:, None, :] + _exponent(b, _LEAST)[None], -900).max(-1)
    largest = np.maximum(exponents, np.where(c != 0, _exponent(c, -126), -900))
    up = np.ldexp(1.0, _BITS - largest)
    cut = (np.trunc(c * up) + np.trunc(terms * up[..., None]).sum(-1)) / up
    unit = np.ldexp(1.0, _exponent(cut, -126) - _BITS)
    result = np.where(cut == 0, 0, np.trunc(cut / unit) * unit)
    plain = terms.sum(-1) + c
    return np.where(np.isfinite(plain), result, plain).astype(np.float32)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once (64 bits of fraction hold the product of two FP32 numbers)."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def _activate(experts: Experts, gate: Array, up: Array) -> Array:
    act = experts.activation
    one = np.float32(1)
    if act.limit is not None:
        limit = np.float32(act.limit)
        gate, up = np.where(gate > limit, limit, gate), np.where(up > limit, limit, up)
        up = np.where(up < -limit, -limit, up)
    up = up + np.float32(act.up_offset)
    slope = -np.float32(act.alpha) * gate
    exp = np.array([_LIBM.expf(v) for v in slope.ravel().tolist()], np.float32).reshape(slope.shape)
    return gate * (one / (one + exp)) * up
