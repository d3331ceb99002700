"""Warp decode's idea on CPU cores: a thread owns output rows, and reads each weight row once for all who want it.

The kernels are LLVM IR (layer.py), compiled for this processor by llvmlite (engine.py), which installs as a wheel and
needs no compiler on the machine. Where they cannot run, the torch reference computes the layer, and says so once.
"""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
from functools import cache

import torch

from warpring.experts import Experts
from warpring.kernels.cores import pool
from warpring.kernels.cores.arguments import PACKED, PADDING
from warpring.kernels.cores.engine import Layer, load_layer, unusable_reason
from warpring.kernels.cores.formats import STORED
from warpring.reference import moe_reference

#: Weight bytes that one thread reads in about the time that waking another one takes.
_BYTES_PER_THREAD = 64 << 10
_local = threading.local()


def moe_cores(
    x: torch.Tensor, experts: Experts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """The layer on torch's CPU threads. Arguments are checked by `moe_decode`.

    Args:
        x: BF16 [num_tokens, hidden], last stride 1; num_tokens >= 1.
        experts: the layer's weights, on the CPU.
        topk_idx: int32 or int64 [num_tokens, topk], last stride 1, each -1 or an expert's.
        topk_weights: FP32 [num_tokens, topk], last stride 1.
        out: BF16 [num_tokens, hidden], last stride 1, overwritten.
    """
    if unusable_reason() is not None:
        _say_fallback()
        moe_reference(x, experts, topk_idx, topk_weights, out)
        return
    layer = load_layer(experts.format, experts.activation.gate_fn)
    num_threads = _num_threads(experts, topk_idx.numel())
    arguments, keep = _arguments(x, experts, topk_idx, topk_weights, out, num_threads)
    address = ctypes.addressof(arguments)
    pool.run_once(layer.plan, address)
    pool.run_parallel(layer.gate_up, address, num_threads)
    pool.run_parallel(layer.down, address, num_threads)
    del keep


def precompile(experts: Experts) -> None:
    """Compile and load what these experts need, so that the first call does not wait."""
    if unusable_reason() is None:
        load_layer(experts.format, experts.activation.gate_fn)


__all__ = ["Layer", "moe_cores", "precompile", "scratch_buffers", "unusable_reason"]


@cache
def _say_fallback() -> None:
    warnings.warn(
        f"warpring: path 'cores' cannot run: {unusable_reason()}. The torch reference computes the layer, slower.",
        stacklevel=4,
    )


def _num_threads(experts: Experts, num_pairs: int) -> int:
    """torch's threads, but no more than have work worth waking them."""
    # Codes alone, from sizes: adding up the bytes of all tensors takes longer than this is worth.
    codes = 3 * experts.hidden * experts.intermediate * STORED[experts.format].code_bits // 8
    work = min(num_pairs, experts.num_experts) * codes
    return max(1, min(torch.get_num_threads(), work // _BYTES_PER_THREAD))


def _arguments(
    x: torch.Tensor,
    experts: Experts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    num_threads: int,
) -> tuple[ctypes.Array[ctypes.c_char], torch.Tensor]:
    """The block of `arguments.FIELDS`, and the scratch memory that it points into."""
    num_tokens, topk = topk_idx.shape
    num_experts, hidden, intermediate = experts.num_experts, experts.hidden, experts.intermediate
    pairs = num_tokens * topk
    padded = [-(-size // PADDING) * PADDING for size in (hidden, intermediate)]
    # arranged_x, act, y, cursor, active, first, pair_token, pair_weight
    sizes = (
        num_tokens * padded[0] * 4,
        pairs * padded[1] * 4,
        num_tokens * hidden * 4,
        num_experts * 8,
        num_experts * 8,
        (num_experts + 1) * 8,
        pairs * 8,
        pairs * 4,
    )
    buffer = _scratch(sum(sizes) + 64)
    place = -(-buffer.data_ptr() // 64) * 64
    places: list[int] = []
    for size in sizes:
        places.append(place)
        place += size
    act = experts.activation
    packed = PACKED.pack(
        *(0, 0, 0),
        *(x.data_ptr(), x.stride(0) * 2),
        *(topk_idx.data_ptr(), topk_idx.stride(0) * topk_idx.element_size(), topk_idx.element_size()),
        *(topk_weights.data_ptr(), topk_weights.stride(0) * 4, out.data_ptr(), out.stride(0) * 2),
        *(num_tokens, topk, num_experts, hidden, intermediate, num_threads),
        *(_pointer(t) for t in (experts.w13.data, experts.w13.scale, experts.w13.global_scale, experts.w13_bias)),
        *(_pointer(t) for t in (experts.w2.data, experts.w2.scale, experts.w2.global_scale, experts.w2_bias)),
        *places,
        *(act.alpha, math.inf if act.limit is None else act.limit, act.up_offset),
    )
    return ctypes.create_string_buffer(packed, len(packed)), buffer


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def scratch_buffers() -> list[torch.Tensor]:
    """This thread's scratch memory, if it has any."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    return [] if buffer is None else [buffer]


def _scratch(num_bytes: int) -> torch.Tensor:
    """A buffer of this thread that grows and stays, so that calls allocate nothing."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < num_bytes:
        # It outlives the call: an inference tensor could not be written by a later call of another mode.
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(num_bytes, dtype=torch.uint8)
    return buffer
