"""The expanding kernels' Python face: slices of stored weights as BF16, for the grouped path on a GPU.

`expand_rows` (expand_rows.cu) reads weights as formats store them, `expand_panels` (expand_panels.cu) the tile layout.
Both skip experts that no row of the batch wants, and nothing waits for the GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from warpring.experts import Experts
from warpring.formats import QuantizedTensor, ceil_div
from warpring.layout import PANEL_ROWS, PackedExperts, PackedMatrix
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import int32, launch, load, pointer

_THREADS = 256
_WARPS = 8


@lru_cache(maxsize=1024)
def rows_spec(format: str, cols: int) -> KernelSpec:
    """The kernel for row-major weights; bf16 needs none."""
    return KernelSpec("expand_rows.cu", "expand_rows", (("WARPRING_FORMAT", _policy(format)), _cols(cols)))


@lru_cache(maxsize=1024)
def panels_spec(format: str, cols: int, num_halves: int) -> KernelSpec:
    """The kernel for packed weights; `format` as in `layout.RECORD_BYTES`."""
    macros = (("WARPRING_FORMAT", f"Tile{_policy(format)}"), _cols(cols), ("WARPRING_HALVES", str(num_halves)))
    return KernelSpec("expand_panels.cu", "expand_panels", macros)


def _policy(format: str) -> str:
    """fp8_block -> Fp8Block: the policy of formats.cuh; that of tile_formats.cuh has Tile before it."""
    return "".join(word.capitalize() for word in format.split("_"))


def _cols(cols: int) -> tuple[str, str]:
    return "WARPRING_COLS", str(cols)


def specs_of(experts: Experts | PackedExperts) -> tuple[KernelSpec, ...]:
    """Every kernel that the grouped path needs of these experts on a GPU."""
    if isinstance(experts, PackedExperts):
        sizes = ((experts.hidden, 2), (experts.intermediate, 1))
        return tuple(panels_spec(experts.order, cols, halves) for cols, halves in sizes)
    if experts.format == "bf16":
        return ()
    return tuple(rows_spec(experts.format, cols) for cols in (experts.hidden, experts.intermediate))


def expand_slice(
    stored: QuantizedTensor | PackedMatrix, format: str, num_rows: int, first: int, last: int, ends: torch.Tensor
) -> torch.Tensor:
    """Rows [first, last) of every half of each expert that has rows in the batch, on the current stream.

    Args:
        stored: w13 or w2, of any format but row-major bf16.
        format: its format.
        num_rows: rows of a half.
        first, last: the slice; first divides by 128, last by 16, in slabs by 64.
        ends: int32 [num_experts], one past each expert's last row in the batch; an expert without rows stays unwritten.

    Returns:
        BF16 [num_experts, halves * (last - first), cols].
    """
    device, num_experts, count = ends.device, ends.numel(), last - first
    packed = isinstance(stored, PackedMatrix)
    if isinstance(stored, PackedMatrix):
        num_halves, cols = stored.num_halves, stored.cols
        spec = panels_spec(stored.order(format), cols, num_halves)
        grid = (ceil_div(count * num_halves // PANEL_ROWS, _WARPS), num_experts, 1)
        weights = (
            stored.records.data_ptr(),
            stored.matrix_scale.data_ptr(),
            pointer(stored.row_scale),
            pointer(stored.block_scale),
        )
    else:
        num_halves, cols = (2 if len(stored.shape) == 4 else 1), stored.shape[-1]
        spec = rows_spec(format, cols)
        chunks = stored.data.shape[-1] * stored.data.element_size() // 16
        grid = (ceil_div(count * chunks, _THREADS), num_halves, num_experts)
        weights = (stored.data.data_ptr(), pointer(stored.scale), pointer(stored.global_scale))
    out = torch.empty(num_experts, num_halves * count, cols, dtype=torch.bfloat16, device=device)
    with torch.cuda.device(device):
        kernel = load(spec, device.index)
        rows = (int32(num_rows), int32(first), int32(count))
        args = (*weights, ends.data_ptr(), *rows, out.data_ptr())
        launch(kernel, grid, 32 * _WARPS if packed else _THREADS, args, torch.cuda.current_stream())
    return out
