"""Grouped matrix products: rows sorted by expert, each group times its own expert's matrix.

    result[r] = weights[e] @ rows[r]   for rows r of expert e: ends[e - 1] <= r < ends[e];  rows past ends[-1] unwritten

On a GPU torch's grouped GEMM, which keeps group ends on the device and so can be captured; on a CPU one product an
expert, of weights that are made when their expert's turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

# torch's grouped GEMM on CUDA takes fewer groups than this.
_MAX_CUDA_GROUPS = 1024

# Elements an elementwise step may span. CPU: torch's own grain, below which it does not split the work between
# threads; a split inside a row would end in scalar code, whose exp differs from the vector code's in the last bit.
_CPU_ELEMENTS = 1 << 15
_CUDA_ELEMENTS = 1 << 24


def gemm_by_library(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM, for any number of groups.

    Args:
        rows: BF16 [num_rows, cols], sorted by expert.
        weights: BF16 [num_experts, num_outputs, cols].
        ends: int32 [num_experts], on the device of rows.

    Returns:
        BF16 [num_rows, num_outputs], sums in FP32.
    """
    dense = weights.mT
    if dense.shape[0] < _MAX_CUDA_GROUPS:
        return functional.grouped_mm(rows, dense, offs=ends)
    # One expert too many: the last one in a second call, whose first group is everything before it and is discarded.
    most = functional.grouped_mm(rows, dense[:-1], offs=ends[:-1])
    last = functional.grouped_mm(rows, dense[-2:], offs=ends[-2:])
    row = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((row < ends[-2])[:, None], most, last)


def gemm_by_expert(
    rows: torch.Tensor,
    weights: Callable[[int], torch.Tensor],
    num_outputs: int,
    ends: torch.Tensor,
    step: int | None = None,
) -> torch.Tensor:
    """One expert after the other, for a CPU: torch's own grouped GEMM there is such a loop too.

    Args:
        rows: BF16 [num_rows, cols], sorted by expert.
        weights: BF16 [num_outputs, cols] of an expert; asked only for experts that have rows.
        num_outputs: rows of each expert's matrix.
        ends: int32 [num_experts].
        step: rows of one product; None takes an expert's whole group.
    """
    result = rows.new_empty(rows.shape[0], num_outputs)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            weight = weights(expert).mT
            for first in range(start, end, step or end - start):
                last = min(first + step, end) if step else end
                torch.mm(rows[first:last], weight, out=result[first:last])
            start = end
    return result


def row_chunks(num_rows: int, cols: int, device: torch.device) -> Iterator[slice]:
    """Pieces of [num_rows, cols] that an elementwise step in FP32 takes at a time: its temporaries stay small."""
    size = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _CUDA_ELEMENTS) // cols)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
