"""The grouped path's activation on a GPU in one launch: biases, gate, routing weight and the rounding to BF16."""

from __future__ import annotations

import math
from functools import cache

import torch

from warpring.activation import Activation
from warpring.formats import ceil_div
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer

_THREADS = 256
#: Columns of a thread: 16 bytes of BF16.
_COLUMNS = 8


@cache
def kernel_spec(index_dtype: torch.dtype, gate_fn: str) -> KernelSpec:
    """The kernel for expert ids of a type and for a gate function."""
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()
    index = ("WARPRING_INDEX", "int64_t" if index_dtype == torch.int64 else "int32_t")
    return KernelSpec("grouped_activate.cu", "grouped_activate", (index, *gelu))


def activate(
    gate_up: torch.Tensor,
    order: torch.Tensor,
    expert: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    num_experts: int,
    activation: Activation,
    first: int,
    act: torch.Tensor,
) -> None:
    """act[:, first : first + cols] = weight * activation(gate, up), on the current stream.

    Args:
        gate_up: BF16 [rows, 2, cols], contiguous, rows sorted by expert.
        order: int64 [rows], the (token, slot) pair of each row.
        expert: int32 or int64 [rows], its expert; a row of num_experts or above stays unwritten.
        weights: FP32 [pairs], contiguous.
        bias: FP32 [num_experts, 2, intermediate] or None.
        num_experts: experts of the layer.
        activation: the gated activation.
        first: the first of the layer's intermediate columns that gate_up holds.
        act: BF16 [rows or more, intermediate], contiguous.
    """
    rows, _, cols = gate_up.shape
    limit = math.inf if activation.limit is None else activation.limit
    with torch.cuda.device(gate_up.device):
        kernel = load(kernel_spec(expert.dtype, activation.gate_fn), gate_up.device.index)
        launch(
            kernel,
            (ceil_div(rows * (cols // _COLUMNS), _THREADS), 1, 1),
            _THREADS,
            (
                gate_up.data_ptr(),
                order.data_ptr(),
                expert.data_ptr(),
                weights.data_ptr(),
                pointer(bias),
                int32(num_experts),
                int32(rows),
                int32(cols),
                int32(first),
                int32(act.shape[1]),
                float32(activation.alpha),
                float32(limit),
                float32(activation.up_offset),
                act.data_ptr(),
            ),
            torch.cuda.current_stream(),
        )
