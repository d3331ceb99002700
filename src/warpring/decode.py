"""`moe_decode`: check the arguments, choose the path, run it; and the same as a torch custom op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warpring import grouped
from warpring.activation import Activation
from warpring.arguments import MAX_TOPK, check_call, check_ids, check_topk
from warpring.classical import moe_classical
from warpring.errors import ArgumentError, UnsupportedError
from warpring.experts import Experts
from warpring.formats import QuantizedTensor
from warpring.kernels import cores, panels, tile, tile_wgmma, warp
from warpring.layout import PackedExperts, PackedMatrix
from warpring.policy import choose_path
from warpring.reference import moe_reference

PATHS = ("auto", "warp", "tile", "cores", "grouped", "classical", "reference")
#: Paths of `PackedExperts`; "tile" is theirs alone.
PACKED_PATHS = ("auto", "tile", "grouped")
#: The kind of device that a path needs, and what to ask for elsewhere.
_NEEDS = {"warp": ("cuda", "'auto' or 'cores'"), "tile": ("cuda", "'auto'"), "cores": ("cpu", "'auto' or 'warp'")}

__all__ = ["MAX_TOPK", "PACKED_PATHS", "PATHS", "moe_decode", "precompile"]


def moe_decode(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    shared_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    path: str = "auto",
    validate: bool = False,
) -> torch.Tensor:
    """Run one MoE layer's experts on a batch, of one token or of a whole prompt.

    y[t] = sum_k topk_weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e]),  e = topk_idx[t, k]
           + shared_weights[t] * (the same of every shared expert)

    Args:
        x: [num_tokens, hidden] bf16. Strided rows are read in place where they are 16-byte aligned and dense; any other
            layout is copied first.
        experts: the layer's weights in any format, row-major (`Experts`) or packed for the tile path (`PackedExperts`,
            see `pack_experts`). Either serves every batch by itself: no second copy of the weights is needed. Shared
            experts, which every token wants, are given to `pack_experts`.
        topk_idx: [num_tokens, topk] int32 or int64, topk <= 32; -1 = unused slot, its weight is ignored (may be NaN).
            An expert named twice by one token counts twice. Ids that name no expert are an error where they can be
            seen without waiting for the GPU (CPU tensors) or with `validate=True`, and are skipped on the device.
        topk_weights: [num_tokens, topk], already normalised and scaled; fp32, or another float type that is converted.
        shared_weights: the gate of the shared experts, [num_tokens] or [num_tokens, 1], fp32 or another float type that
            is converted; None is 1. One gate a token for all of them.
        out: optional [num_tokens, hidden] bf16 with dense rows, overwritten; must overlap no other argument, nor
            its own rows each other. With it, fp32 weights and aligned inputs, the decode paths allocate nothing (after
            the first call on a stream).
        path: "auto" picks by batch, device, shape and format (see policy.py): on a GPU "warp" (`Experts`) or "tile"
            (`PackedExperts`) up to a measured crossover and "grouped" beyond it; on a CPU "cores", then "grouped";
            packed experts on a CPU are always "grouped". "classical" (8 stages, the baseline) and "reference" run on
            request, with `Experts`. A named path serves any batch.
        validate: check the ids of CUDA tensors too; waits for the GPU.

    Returns:
        out, or a new [num_tokens, hidden] bf16 tensor, equal bits run to run. BF16 activations and FP32 sums on every
        path but "classical", which quantises activations. On "warp", "tile", "cores" and "reference" sums have a fixed
        order and a token's bits do not depend on the rest of the batch, nor on "grouped" with packed experts on Hopper;
        elsewhere "grouped" rounds gate, up and each expert's output to BF16 besides, and leaves the order of sums to a
        library.

    Asynchronous on the current stream; can be captured in a CUDA graph once compiled (see `precompile`).
    There is no backward.

    Raises:
        ArgumentError: a shape, dtype, device or range rule, named with its remedy; shared_weights for a layer without
            shared experts.
        UnsupportedError: this device or layout has no such path, or a gradient was asked for.
    """
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        raise UnsupportedError(
            "moe_decode: there is no backward, and x or topk_weights requires a gradient. Call it under "
            "torch.no_grad() or torch.inference_mode(), or train with the model's own experts."
        )
    if torch.compiler.is_compiling():
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops.warpring.moe_decode(
            x, topk_idx, topk_weights, out, *_flatten(experts), path, validate, shared_weights
        )
        return out
    check_call(x, experts, topk_idx, topk_weights, out, shared_weights)
    run = _choose(path, experts, x, topk_idx.shape[1])
    if out is None:
        out = torch.empty(x.shape[0], experts.hidden, dtype=torch.bfloat16, device=x.device)
    if x.shape[0] == 0:
        return out
    if validate or x.device.type == "cpu":
        check_ids(topk_idx, experts.num_experts)
    extra = {} if shared_weights is None else {"shared_weights": _vector(shared_weights).float()}
    run(_aligned(x), experts, _dense(topk_idx), _dense(topk_weights.float()), out, **extra)
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
    check_topk(topk)
    target = torch.device(device) if device is not None else experts.device
    if target.type == "cuda":
        if isinstance(experts, PackedExperts):
            for kernels in (tile_wgmma,) if experts.in_slabs else (panels, tile):
                kernels.precompile(experts, topk, index_dtype, target)
        else:
            warp.precompile(experts, topk, index_dtype, target)
        grouped.precompile(experts, index_dtype, target)
    elif target.type == "cpu" and isinstance(experts, Experts):
        cores.precompile(experts)


#: (x, experts, topk_idx, topk_weights, out); those of packed experts take shared_weights too.
_Run = Callable[..., object]


def _moe_tile(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    shared_weights: torch.Tensor | None = None,
) -> None:
    """By the kernels of the layout, and of few tokens."""
    if packed.in_slabs:
        tile_wgmma.check_device(x.device)
        layer = tile_wgmma.moe_tile_wgmma
    else:
        few = panels.suits(tile.sizes_of(packed, topk_idx.shape[1]), len(x))
        layer = panels.moe_panels if few else tile.moe_tile
    layer(x, packed, topk_idx, topk_weights, out, shared_weights=shared_weights)


_RUN: dict[str, _Run] = {
    "warp": warp.moe_warp,
    "tile": _moe_tile,
    "cores": cores.moe_cores,
    "grouped": grouped.moe_grouped,
    "classical": moe_classical,
    "reference": moe_reference,
}


def _choose(path: str, experts: Experts | PackedExperts, x: torch.Tensor, topk: int) -> _Run:
    """The function of the path, or an error that names why these experts or this device have none."""
    packed = isinstance(experts, PackedExperts)
    if path == "auto":
        return _RUN[choose_path(experts, x.shape[0], topk, packed=packed)]
    if path not in PATHS:
        raise ArgumentError(f"moe_decode: path must be one of {', '.join(PATHS)}; got {path!r}.")
    if packed and path not in PACKED_PATHS:
        raise UnsupportedError(
            f"moe_decode: PackedExperts take path {', '.join(PACKED_PATHS)}; got {path!r}. Keep plain Experts for the "
            "others (warpring.unpack_experts gives them back)."
        )
    if path == "tile" and not packed:
        raise UnsupportedError(
            "moe_decode: path 'tile' takes PackedExperts; got Experts. Pack them once, with warpring.pack_experts."
        )
    kind, remedy = _NEEDS.get(path, (x.device.type, ""))
    if x.device.type != kind:
        raise UnsupportedError(
            f"moe_decode: path {path!r} needs {kind.upper()} tensors; got {x.device}. Use {remedy} there."
        )
    return _RUN[path]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless its rows are dense and 16-byte aligned."""
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A [rows, cols] tensor, copied unless its rows are dense."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _vector(column: torch.Tensor) -> torch.Tensor:
    """[rows] of [rows] or [rows, 1]."""
    return column[:, 0] if column.dim() == 2 else column


# The custom op: torch.compile sees one node with the weights as inputs. It takes the layer's tensors as a list, as
# operator schemas know no dataclasses.
def _flatten(experts: Experts | PackedExperts) -> tuple[object, ...]:
    """The op's arguments from `weights` to `up_offset`."""
    if isinstance(experts, PackedExperts):
        pairs = ((m.records, m.matrix_scale, m.row_scale, m.block_scale) for m in (experts.w13, experts.w2))
        num_shared = experts.num_shared
    else:
        num_shared = 0
        pairs = ((m.data, m.scale, m.global_scale) for m in (experts.w13, experts.w2))
    act = experts.activation
    return (
        [*(tensor for matrix in pairs for tensor in matrix), experts.w13_bias, experts.w2_bias],
        isinstance(experts, PackedExperts),
        experts.format,
        [experts.num_experts, experts.hidden, experts.intermediate, num_shared],
        act.gate_fn,
        act.alpha,
        act.limit,
        act.up_offset,
    )


def _unflatten(
    weights: list[torch.Tensor | None], packed: bool, format: str, sizes: list[int], activation: Activation
) -> Experts | PackedExperts:
    num_experts, hidden, intermediate, num_shared = sizes
    tensors: list[Any] = list(weights)
    if packed:
        w13, w2 = PackedMatrix(*tensors[:4]), PackedMatrix(*tensors[4:8])
        return PackedExperts(
            w13, w2, format, num_experts, hidden, intermediate, activation, *tensors[8:], num_shared=num_shared
        )
    return Experts(
        QuantizedTensor(format, (num_experts, 2, intermediate, hidden), *tensors[:3]),
        QuantizedTensor(format, (num_experts, hidden, intermediate), *tensors[3:6]),
        activation,
        *tensors[6:],
    )


@torch.library.custom_op("warpring::moe_decode", mutates_args=("out",))
def _moe_decode_op(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    weights: list[torch.Tensor | None],
    packed: bool,
    format: str,
    sizes: list[int],
    gate_fn: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    path: str,
    validate: bool,
    shared_weights: torch.Tensor | None = None,
) -> None:
    activation = Activation(gate_fn, alpha, limit, up_offset)  # pyright: ignore[reportArgumentType]
    experts = _unflatten(weights, packed, format, sizes, activation)
    moe_decode(x, experts, topk_idx, topk_weights, shared_weights=shared_weights, out=out, path=path, validate=validate)


@_moe_decode_op.register_fake
def _moe_decode_fake(x: torch.Tensor, *args: object) -> None:
    """Nothing to infer: the op only writes `out`."""
