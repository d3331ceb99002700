"""`moe_decode`: check the arguments, choose the path, run it; and the same as a torch custom op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warpring.activation import Activation
from warpring.classical import moe_classical
from warpring.errors import ArgumentError, UnsupportedError
from warpring.experts import Experts
from warpring.formats import QuantizedTensor
from warpring.kernels import cores, tile, warp
from warpring.layout import PackedExperts, PackedMatrix
from warpring.policy import choose_path
from warpring.reference import moe_reference

PATHS = ("auto", "warp", "tile", "cores", "classical", "reference")
MAX_TOPK = warp.MAX_TOPK


def moe_decode(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    path: str = "auto",
    validate: bool = False,
) -> torch.Tensor:
    """Run one MoE layer's experts on a decode batch.

    y[t] = sum_k topk_weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e]),  e = topk_idx[t, k]

    Args:
        x: [num_tokens, hidden] bf16. Strided rows are read in place where they are 16-byte aligned and dense; any other
            layout is copied first.
        experts: the layer's weights, in any format; `PackedExperts` (see `pack_experts`) take the tile path.
        topk_idx: [num_tokens, topk] int32 or int64, topk <= 32; -1 = unused slot, its weight is ignored (may be NaN).
            An expert named twice by one token counts twice. Ids that name no expert are an error where they can be
            seen without waiting for the GPU (CPU tensors) or with `validate=True`, and are skipped on the device.
        topk_weights: [num_tokens, topk], already normalised and scaled; fp32, or another float type that is converted.
        out: optional [num_tokens, hidden] bf16 with dense rows, overwritten; must overlap no other argument, nor
            its own rows each other. With it, fp32 weights and aligned inputs, nothing is allocated (after the first
            call on a stream).
        path: "auto" picks by batch and device (see policy.py); "warp" (CUDA), "cores" (CPU), "classical" or
            "reference" force one.
        validate: check the ids of CUDA tensors too; waits for the GPU.

    Returns:
        out, or a new [num_tokens, hidden] bf16 tensor. BF16 activations, FP32 sums in a fixed order: a token's bits
        do not depend on the rest of the batch, and are equal run to run.

    Asynchronous on the current stream; can be captured in a CUDA graph once compiled (see `precompile`).
    There is no backward.

    Raises:
        ArgumentError: a shape, dtype, device or range rule, named with its remedy.
        UnsupportedError: this device has no such path, or a gradient was asked for.
    """
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        raise UnsupportedError(
            "moe_decode: there is no backward, and x or topk_weights requires a gradient. Call it under "
            "torch.no_grad() or torch.inference_mode(), or train with the model's own experts."
        )
    if torch.compiler.is_compiling():
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if isinstance(experts, PackedExperts):
            weights = _flatten_packed(experts)
            torch.ops.warpring.moe_decode_packed(x, topk_idx, topk_weights, out, *weights, path, validate)
        else:
            torch.ops.warpring.moe_decode(x, topk_idx, topk_weights, out, *_flatten(experts), path, validate)
        return out
    run = _check(x, experts, topk_idx, topk_weights, out, path)
    if out is None:
        out = torch.empty(x.shape[0], experts.hidden, dtype=torch.bfloat16, device=x.device)
    if x.shape[0] == 0:
        return out
    if validate or x.device.type == "cpu":
        _check_ids(topk_idx, experts.num_experts)
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    topk_idx = topk_idx if topk_idx.stride(1) == 1 else topk_idx.contiguous()
    topk_weights = topk_weights.float()
    topk_weights = topk_weights if topk_weights.stride(1) == 1 else topk_weights.contiguous()
    run(x, experts, topk_idx, topk_weights, out)
    return out


def precompile(
    experts: Experts | PackedExperts,
    *,
    topk: int,
    index_dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> None:
    """Compile and load the kernels of these experts, so that the first call can be captured or timed.

    Args:
        experts: the layer's experts; one call serves every layer of the same shape and format.
        topk: slots a token.
        index_dtype: dtype that topk_idx will have, int32 or int64.
        device: a CUDA device; the experts' own by default. On a CPU, its own kernels.

    Raises:
        CompileError, UnsupportedError: see `warpring.runtime.jit.compile_kernel`.
    """
    _check_topk(topk)
    target = torch.device(device) if device is not None else experts.device
    if isinstance(experts, PackedExperts):
        if target.type == "cuda":
            tile.precompile(experts, topk, index_dtype, target)
    elif target.type == "cuda":
        warp.precompile(experts, topk, index_dtype, target)
    elif target.type == "cpu":
        cores.precompile(experts)


_Run = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _check(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None,
    path: str,
) -> _Run:
    """Raise on the first broken rule; else the function of the path."""
    if x.dim() != 2 or x.shape[1] != experts.hidden:
        raise ArgumentError(
            f"moe_decode: x must be [num_tokens, hidden={experts.hidden}]; got {list(x.shape)}. "
            "Flatten batch and sequence into num_tokens."
        )
    if x.dtype != torch.bfloat16:
        raise ArgumentError(f"moe_decode: x must be bfloat16; got {x.dtype}. Convert it with x.bfloat16().")
    num_tokens = x.shape[0]
    if topk_idx.dim() != 2 or topk_idx.shape[0] != num_tokens or topk_idx.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"moe_decode: topk_idx must be int32 or int64 [num_tokens={num_tokens}, topk]; got {topk_idx.dtype} "
            f"{list(topk_idx.shape)}."
        )
    _check_topk(topk_idx.shape[1])
    if topk_weights.shape != topk_idx.shape or not topk_weights.dtype.is_floating_point:
        raise ArgumentError(
            f"moe_decode: topk_weights must be floating point of topk_idx's shape {list(topk_idx.shape)}; got "
            f"{topk_weights.dtype} {list(topk_weights.shape)}."
        )
    if out is not None and (out.dtype != torch.bfloat16 or out.shape != x.shape or not _dense_rows(out)):
        raise ArgumentError(
            f"moe_decode: out must be bfloat16 {list(x.shape)} with dense rows, each in memory of its own; got "
            f"{out.dtype} {list(out.shape)}, strides {out.stride() if out.layout is torch.strided else out.layout}."
        )
    packed = isinstance(experts, PackedExperts)
    w13, w2 = (m.records if isinstance(m, PackedMatrix) else m.data for m in (experts.w13, experts.w2))
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "experts": w13}
    _check_places(tensors if out is None else tensors | {"out": out})
    if out is not None and num_tokens:
        _check_overlap(out, tensors | {"experts.w2": w2})
    if path not in PATHS:
        raise ArgumentError(f"moe_decode: path must be one of {', '.join(PATHS)}; got {path!r}.")
    if path == "auto":
        path = "tile" if isinstance(experts, PackedExperts) else choose_path(experts, num_tokens)
    if packed != (path == "tile"):
        raise UnsupportedError(
            "moe_decode: path 'tile' takes PackedExperts, and PackedExperts take no other path; got "
            f"{type(experts).__name__} with path {path!r}. Use warpring.pack_experts(experts), or plain Experts."
        )
    if path == "tile" and x.device.type != "cuda":
        raise UnsupportedError(
            f"moe_decode: path 'tile' needs CUDA tensors; got {x.device}. Use Experts, not packed, on a CPU."
        )
    if path == "warp" and x.device.type != "cuda":
        raise UnsupportedError(
            f"moe_decode: path 'warp' needs CUDA tensors; got {x.device}. Use 'auto' or 'cores' on a CPU."
        )
    if path == "cores" and x.device.type != "cpu":
        raise UnsupportedError(
            f"moe_decode: path 'cores' needs CPU tensors; got {x.device}. Use 'auto' or 'warp' on a GPU."
        )
    return _RUN[path]


def _check_places(tensors: dict[str, torch.Tensor]) -> None:
    """Raise unless all are strided tensors that hold data on the device of the first."""
    device = tensors["x"].device
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ArgumentError(
                f"moe_decode: {name} must be a strided tensor that holds data; got {tensor.layout} on {tensor.device}. "
                "Call .to_dense() on a sparse tensor, and load weights that are on 'meta'."
            )
        if tensor.device != device:
            raise ArgumentError(
                f"moe_decode: all tensors must lie on one device; got x on {device} and {name} on {tensor.device}. "
                f"Move {name} with .to({str(device)!r})."
            )


def _check_overlap(out: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Raise where out's range of memory, from its first to its last element, meets that of another tensor."""
    first, last = _span(out)
    for name, tensor in tensors.items():
        start, end = _span(tensor)
        if first < end and start < last:
            raise ArgumentError(
                f"moe_decode: out must not overlap {name}, which is read while out is written. Pass another tensor, "
                "or none."
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a non-empty tensor, and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _dense_rows(out: torch.Tensor) -> bool:
    """Whether a [rows, cols] tensor has dense rows of which no two share memory."""
    if out.layout is not torch.strided or out.stride(1) != 1:
        return False
    return out.shape[0] < 2 or out.stride(0) >= out.shape[1]


def _check_topk(topk: int) -> None:
    if not 1 <= topk <= MAX_TOPK:
        raise ArgumentError(
            f"moe_decode: topk must be 1 to {MAX_TOPK}; got {topk}. Split more slots over several calls."
        )


def _check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        raise ArgumentError(
            f"moe_decode: topk_idx must be -1 (unused) or in [0, {num_experts}); got {int(topk_idx[token, slot])} at "
            f"token {token}, slot {slot} ({int(bad.sum())} such ids). Map ids of other ranks to -1."
        )


_RUN: dict[str, _Run] = {
    "warp": warp.moe_warp,
    "tile": tile.moe_tile,
    "cores": cores.moe_cores,
    "classical": moe_classical,
    "reference": moe_reference,
}


# The custom op: torch.compile sees one node with the weights as inputs. It takes the experts' tensors one by one, as
# operator schemas know no dataclasses.
def _flatten(experts: Experts) -> tuple[object, ...]:
    w13, w2, act = experts.w13, experts.w2, experts.activation
    return (
        w13.data,
        w13.scale,
        w13.global_scale,
        w2.data,
        w2.scale,
        w2.global_scale,
        experts.w13_bias,
        experts.w2_bias,
        experts.format,
        list(w13.shape),
        act.gate_fn,
        act.alpha,
        act.limit,
        act.up_offset,
    )


@torch.library.custom_op("warpring::moe_decode", mutates_args=("out",))
def _moe_decode_op(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    w13_data: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w13_global: torch.Tensor | None,
    w2_data: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w2_global: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    format: str,
    w13_shape: list[int],
    gate_fn: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    path: str,
    validate: bool,
) -> None:
    num_experts, _, intermediate, hidden = w13_shape
    experts = Experts(
        QuantizedTensor(format, tuple(w13_shape), w13_data, w13_scale, w13_global),
        QuantizedTensor(format, (num_experts, hidden, intermediate), w2_data, w2_scale, w2_global),
        Activation(gate_fn, alpha, limit, up_offset),  # pyright: ignore[reportArgumentType]
        w13_bias,
        w2_bias,
    )
    moe_decode(x, experts, topk_idx, topk_weights, out=out, path=path, validate=validate)


@_moe_decode_op.register_fake
def _moe_decode_fake(x: torch.Tensor, *args: object) -> None:
    """Nothing to infer: the op only writes `out`."""


def _flatten_packed(packed: PackedExperts) -> tuple[object, ...]:
    act = packed.activation
    matrices = ((m.records, m.matrix_scale, m.row_scale, m.block_scale) for m in (packed.w13, packed.w2))
    return (
        *(t for matrix in matrices for t in matrix),
        packed.w13_bias,
        packed.w2_bias,
        packed.format,
        [packed.num_experts, packed.hidden, packed.intermediate],
        act.gate_fn,
        act.alpha,
        act.limit,
        act.up_offset,
    )


@torch.library.custom_op("warpring::moe_decode_packed", mutates_args=("out",))
def _moe_decode_packed_op(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    w13_records: torch.Tensor,
    w13_matrix_scale: torch.Tensor,
    w13_row_scale: torch.Tensor | None,
    w13_block_scale: torch.Tensor | None,
    w2_records: torch.Tensor,
    w2_matrix_scale: torch.Tensor,
    w2_row_scale: torch.Tensor | None,
    w2_block_scale: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    format: str,
    sizes: list[int],
    gate_fn: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    path: str,
    validate: bool,
) -> None:
    num_experts, hidden, intermediate = sizes
    packed = PackedExperts(
        PackedMatrix(w13_records, w13_matrix_scale, w13_row_scale, w13_block_scale),
        PackedMatrix(w2_records, w2_matrix_scale, w2_row_scale, w2_block_scale),
        format,
        num_experts,
        hidden,
        intermediate,
        Activation(gate_fn, alpha, limit, up_offset),  # pyright: ignore[reportArgumentType]
        w13_bias,
        w2_bias,
    )
    moe_decode(x, packed, topk_idx, topk_weights, out=out, path=path, validate=validate)


@_moe_decode_packed_op.register_fake
def _moe_decode_packed_fake(x: torch.Tensor, *args: object) -> None:
    """Nothing to infer: the op only writes `out`."""
