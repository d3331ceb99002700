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
#: For each form: columns of one product, the least exponent of an operand, bits kept of terms and of sums.
_PRODUCT = {"fp8": (32, -6, 13, 13), "bf16": (16, -14, 25, 23)}


def expert_block(
    problem: Problem, experts: Experts, expert: int, tokens: Published, weights: torch.Tensor
) -> torch.Tensor:
    """Partial results [n, hidden] of the tokens [n] that want `expert`, as role2 rounds them."""
    form, n = problem.activation, tokens.codes.shape[0]
    routing = weights.numpy()[:, None]
    x, x_scale = tokens.codes.float().numpy(), tokens.scale.numpy()
    group = 128
    repeated = np.repeat(x_scale, problem.hidden_padded // group // x_scale.shape[1], axis=1)
    gate, up = (
        _gemm(problem, *_matrix(experts, "w13", (expert, half), form, problem.hidden_padded), x, repeated, group)
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
    second = _matrix(experts, "w2", (expert,), form, problem.intermediate_padded)
    out = _gemm(problem, *second, codes.flatten(1).float().numpy(), scale.numpy(), 64)
    bias = np.zeros(problem.hidden, np.float32) if experts.w2_bias is None else experts.w2_bias[expert].numpy()
    if form == "fp8":
        return torch.from_numpy(
            _fma(np.broadcast_to(bias, out.shape), np.broadcast_to(routing, out.shape), out)
        ).bfloat16()
    return torch.from_numpy((out + bias) * routing)


def _matrix(experts: Experts, name: str, index: tuple[int, ...], form: str, cols: int) -> tuple[Array, Array]:
    """Operands [rows, cols] and the factor [rows, chunks of 128 columns] of their sums."""
    stored = getattr(experts, name)
    for i in index:
        stored = stored[i]
    rows, width = stored.shape
    chunks = math.ceil(cols / 128)
    if stored.format == "mxfp4":
        codes = torch.stack((stored.data & 15, stored.data >> 4), -1).flatten(-2).numpy()
        padded = np.zeros((rows, chunks * 4, 32), np.uint8)
        padded.reshape(rows, -1)[:, :width] = codes
        scale = np.full((rows, chunks * 4), -1000)
        scale[:, : width // 32] = stored.scale.numpy()
        largest = np.where((padded & 7).any(-1) & (scale != 255), scale, -1).reshape(rows, chunks, 4).max(-1)
        largest = np.where(largest < 0, 127, largest)
        top = 6 if form == "fp8" else 0
        below = np.repeat(largest, 4, axis=1) - scale
        shift = np.where((below < 0) | (below > 13), 0.0, np.ldexp(1.0, top - np.clip(below, 0, 13)))
        shift = np.where(scale == 255, np.nan, shift)
        values = _E2M1[padded] * shift[..., None]
        return values.reshape(rows, -1)[:, :cols].astype(np.float32), np.ldexp(1.0, largest - 127 - top).astype(
            np.float32
        )
    values = np.zeros((rows, cols), np.float32)
    values[:, :width] = stored.data.float().numpy()
    scale = stored.scale.numpy()
    if stored.format == "fp8_block":
        return values, np.repeat(scale, 128, axis=0)[:rows]
    return values, np.repeat(scale, chunks, axis=1)


def _gemm(problem: Problem, values: Array, factor: Array, x: Array, x_scale: Array, group: int) -> Array:
    """[n, rows]: products of one group of columns on the tensor cores, then times both scales, then added in FP32."""
    depth = _PRODUCT[problem.activation][0]
    total = np.zeros((values.shape[0], x.shape[0]), np.float32)
    for g in range(values.shape[1] // group):
        part = np.zeros_like(total)
        for first in range(g * group, (g + 1) * group, depth):
            columns = slice(first, first + depth)
            part = _product(values[:, columns], x[:, columns], part, problem.activation)
        scale = factor[:, g * group // 128, None] * x_scale[None, :, g]
        total = _fma(part, scale, total)
    return np.ascontiguousarray(total.T)


def _exponent(v: Array, least: int) -> Array:
    return np.maximum(np.frexp(v)[1] - 1, least)


def _product(a: Array, b: Array, c: Array, form: str) -> Array:
    """c + a b^T as Hopper's tensor cores round it: terms cut below the largest, the sum cut to its own bits."""
    _, least, fraction_bits, result_bits = _PRODUCT[form]
    terms = a[:, None, :].astype(np.float64) * b[None].astype(np.float64)
    exponents = np.where(terms != 0, _exponent(a, least)[:, None, :] + _exponent(b, least)[None], -900).max(-1)
    largest = np.maximum(exponents, np.where(c != 0, _exponent(c, -126), -900))
    up = np.ldexp(1.0, fraction_bits - largest)
    cut = (np.trunc(c * up) + np.trunc(terms * up[..., None]).sum(-1)) / up
    unit = np.ldexp(1.0, _exponent(cut, -126) - result_bits)
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
    return gate / (one + exp) * up
