"""The tile kernels' Python face: every wanted weight byte read once, at every batch, through the tensor cores.

`moe_gate_up_tile` (tile_gate_up.cu) and `moe_down_tile` (tile_down.cu) read experts in tile layout (`warpring.layout`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from warpring.formats import ceil_div
from warpring.layout import RECORD_BYTES, PackedExperts
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer
from warpring.runtime.workspace import scratch

#: (token, slot) pairs of one launch: their down projections are held in shared memory.
MAX_PAIRS = 512
_WARPS = 8
_THREADS = 32 * _WARPS
_STAGES = 4
_POLICIES = {
    "bf16": "TileBf16",
    "fp8_block": "TileFp8Block",
    "fp8_channel": "TileFp8Channel",
    "mxfp8": "TileMxfp8",
    "mxfp4": "TileMxfp4",
    "nvfp4": "TileNvfp4",
}


def _stage_bytes(format: str) -> int:
    record = RECORD_BYTES[format]
    return record * (2 if record >= 1024 else 4 if record >= 512 else 8)


def _routing_bytes(num_experts: int) -> int:
    distinct = min(num_experts, MAX_PAIRS)
    shorts = distinct + distinct + 1 + 2 * MAX_PAIRS
    return ceil_div(2 * shorts, 4) * 4 + 4 * num_experts + 4 * _WARPS + 4


def _smem_bytes(format: str, num_experts: int, exchange_bytes: int) -> int:
    ring = _WARPS * _STAGES * _stage_bytes(format)
    return ceil_div(ring + exchange_bytes + 8 * _WARPS * _STAGES + _routing_bytes(num_experts), 128) * 128


@lru_cache(maxsize=1024)
def kernel_specs(
    format: str, hidden: int, intermediate: int, num_experts: int, topk: int, index_dtype: torch.dtype, gate_fn: str
) -> tuple[KernelSpec, KernelSpec]:
    """(gate_up, down) for a layer, routed `topk` ways by ids of `index_dtype`."""

    def spec(source: str, entry: str, exchange_bytes: int, *extra: tuple[str, str]) -> KernelSpec:
        smem = _smem_bytes(format, num_experts, exchange_bytes)
        macros = (
            ("WARPRING_FORMAT", _POLICIES[format]),
            ("WARPRING_HIDDEN", str(hidden)),
            ("WARPRING_INTERMEDIATE", str(intermediate)),
            ("WARPRING_TOPK", str(topk)),
            ("WARPRING_EXPERTS", str(num_experts)),
            ("WARPRING_INDEX", "int64_t" if index_dtype == torch.int64 else "int32_t"),
            ("WARPRING_STAGES", str(_STAGES)),
            ("WARPRING_SMEM_BYTES", str(smem)),
        )
        return KernelSpec(source, entry, macros + extra, smem)

    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()
    return (
        spec("tile_gate_up.cu", "moe_gate_up_tile", 2 * _WARPS * 2 * 16 * 8 * 4, *gelu),
        spec("tile_down.cu", "moe_down_tile", MAX_PAIRS * 16 * 4),
    )


def moe_tile(
    x: torch.Tensor, packed: PackedExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Both launches of the layer on the current stream. Arguments as in `moe_warp`; num_tokens * topk <= MAX_PAIRS."""
    num_tokens, topk = topk_idx.shape
    device_index = x.device.index
    experts, act = packed.experts, packed.experts.activation
    limit = math.inf if act.limit is None else act.limit
    specs = kernel_specs(
        experts.format, experts.hidden, experts.intermediate, experts.num_experts, topk, topk_idx.dtype, act.gate_fn
    )
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        gate_up, down = (load(spec, device_index) for spec in specs)
        num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
        with scratch(num_tokens * topk * experts.intermediate * 2, x.device, stream) as buffer:
            launch(
                gate_up,
                (num_sms, 1, 1),
                _THREADS,
                (
                    x.data_ptr(),
                    int32(x.stride(0)),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    int32(num_tokens),
                    packed.w13.records.data_ptr(),
                    packed.w13.matrix_scale.data_ptr(),
                    pointer(packed.w13.row_scale),
                    pointer(packed.w13.block_scale),
                    pointer(experts.w13_bias),
                    float32(act.alpha),
                    float32(limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                ),
                stream,
                specs[0].dynamic_smem_bytes,
            )
            launch(
                down,
                (experts.hidden // 16, 1, 1),
                _THREADS,
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
                    pointer(experts.w2_bias),
                    out.data_ptr(),
                    out.stride(0),
                ),
                stream,
                specs[1].dynamic_smem_bytes,
            )
