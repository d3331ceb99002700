"""The tile kernels' Python face: every wanted weight byte read once a launch, through the tensor cores.

A launch takes up to 512 (token, slot) pairs; an expert with more than 64 of them is read once for each 64.

`moe_gate_up_tile` (tile_gate_up.cu) and `moe_down_tile` (tile_down.cu) read experts in tile layout (`warpring.layout`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from warpring.formats import ceil_div
from warpring.layout import RECORD_BYTES, PackedExperts
from warpring.runtime.device import index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer
from warpring.runtime.workspace import scratch

#: (token, slot) pairs of one launch: their down projections are held in shared memory.
MAX_PAIRS = 512
#: Pairs of one expert that are multiplied at once; what more want reads the expert's weights again.
MAX_COLUMNS = 64
_STAGES = 2
#: Warps of a CTA: gate_up has 8, and two CTAs an SM; down has 8 for one token, which wants few experts, else 16.
_GATE_UP_WARPS = 8
_GATE_UP_CTAS = 2
_POLICIES = {
    "bf16": "TileBf16",
    "fp8_block": "TileFp8Block",
    "fp8_channel": "TileFp8Channel",
    "mxfp8": "TileMxfp8",
    "mxfp4": "TileMxfp4",
    "nvfp4": "TileNvfp4",
}


@dataclass(frozen=True)
class TileSpecs:
    """The kernels of one layer."""

    gate_up: KernelSpec
    down_one: KernelSpec
    down_many: KernelSpec

    def down(self, num_tokens: int) -> KernelSpec:
        """The down kernel for a batch of `num_tokens`; the choice changes no bit of the result."""
        return self.down_one if num_tokens == 1 else self.down_many

    def all(self) -> tuple[KernelSpec, ...]:
        """Every kernel that some batch of this layer needs."""
        return self.gate_up, self.down_one, self.down_many


def _smem_bytes(format: str, num_experts: int, warps: int, exchange_bytes: int) -> int:
    """sizeof(Smem) of the kernels, rounded up; they check it at compile time."""
    record = RECORD_BYTES[format]
    records = 4 if record >= 1024 else 8 if record >= 512 else 16
    ring = warps * _STAGES * records * record
    entries = min(num_experts, MAX_PAIRS) + MAX_PAIRS // MAX_COLUMNS
    shorts = 2 * (2 * entries + 1 + 2 * MAX_PAIRS)
    routing = ceil_div(shorts, 4) * 4 + 4 * num_experts + 4 * warps + 4
    return ceil_div(ring + exchange_bytes + 8 * warps * _STAGES + routing, 128) * 128


@lru_cache(maxsize=1024)
def kernel_specs(
    format: str, hidden: int, intermediate: int, num_experts: int, topk: int, index_dtype: torch.dtype, gate_fn: str
) -> TileSpecs:
    """The kernels for a layer, routed `topk` ways by ids of `index_dtype`."""

    def spec(source: str, entry: str, warps: int, exchange_bytes: int, *extra: tuple[str, str]) -> KernelSpec:
        smem = _smem_bytes(format, num_experts, warps, exchange_bytes)
        macros = (
            ("WARPRING_FORMAT", _POLICIES[format]),
            ("WARPRING_HIDDEN", str(hidden)),
            ("WARPRING_INTERMEDIATE", str(intermediate)),
            ("WARPRING_TOPK", str(topk)),
            ("WARPRING_EXPERTS", str(num_experts)),
            ("WARPRING_INDEX", "int64_t" if index_dtype == torch.int64 else "int32_t"),
            ("WARPRING_WARPS", str(warps)),
            ("WARPRING_SMEM_BYTES", str(smem)),
        )
        return KernelSpec(source, entry, macros + extra, smem)

    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()
    parts = 2 * _GATE_UP_WARPS * 2 * 16 * 8 * 4  # buffers, warps, tiles, rows, columns, FP32
    dots = MAX_PAIRS * 16 * 4
    return TileSpecs(
        gate_up=spec("tile_gate_up.cu", "moe_gate_up_tile", _GATE_UP_WARPS, parts, *gelu),
        down_one=spec("tile_down.cu", "moe_down_tile", 8, dots),
        down_many=spec("tile_down.cu", "moe_down_tile", 16, dots),
    )


def specs_of(packed: PackedExperts, topk: int, index_dtype: torch.dtype) -> TileSpecs:
    """The kernels for these experts."""
    sizes = (packed.hidden, packed.intermediate, packed.num_experts)
    return kernel_specs(packed.format, *sizes, topk, index_dtype, packed.activation.gate_fn)


def precompile(packed: PackedExperts, topk: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the layer's kernels, so that a later call can be captured."""
    index = index_of(device)
    for spec in specs_of(packed, topk, index_dtype).all():
        load(spec, index)


def moe_tile(
    x: torch.Tensor, packed: PackedExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """The layer on the current stream, two launches for each MAX_PAIRS // topk tokens. Arguments as in `moe_warp`."""
    num_tokens, topk = topk_idx.shape
    at_once = MAX_PAIRS // topk
    for first in range(0, num_tokens, at_once):
        rows = slice(first, first + at_once)
        _launch_both(x[rows], packed, topk_idx[rows], topk_weights[rows], out[rows])


def _launch_both(
    x: torch.Tensor, packed: PackedExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    num_tokens, topk = topk_idx.shape
    device_index = x.device.index
    act = packed.activation
    limit = math.inf if act.limit is None else act.limit
    specs = specs_of(packed, topk, topk_idx.dtype)
    down_spec = specs.down(num_tokens)
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        gate_up, down = load(specs.gate_up, device_index), load(down_spec, device_index)
        num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
        with scratch(num_tokens * topk * packed.intermediate * 2, x.device, stream) as buffer:
            launch(
                gate_up,
                (num_sms * _GATE_UP_CTAS, 1, 1),
                32 * _GATE_UP_WARPS,
                (
                    x.data_ptr(),
                    x.stride(0),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    int32(num_tokens),
                    packed.w13.records.data_ptr(),
                    packed.w13.matrix_scale.data_ptr(),
                    pointer(packed.w13.row_scale),
                    pointer(packed.w13.block_scale),
                    pointer(packed.w13_bias),
                    float32(act.alpha),
                    float32(limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                ),
                stream,
                specs.gate_up.dynamic_smem_bytes,
            )
            launch(
                down,
                (packed.hidden // 16, 1, 1),
                32 * (8 if num_tokens == 1 else 16),
                (
                    buffer.data_ptr(),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    topk_weights.data_ptr(),
                    topk_weights.stride(0),
                    int32(num_tokens),
                    packed.w2.records.data_ptr(),
                    packed.w2.matrix_scale.data_ptr(),
                    pointer(packed.w2.row_scale),
                    pointer(packed.w2.block_scale),
                    pointer(packed.w2_bias),
                    out.data_ptr(),
                    out.stride(0),
                ),
                stream,
                down_spec.dynamic_smem_bytes,
            )
