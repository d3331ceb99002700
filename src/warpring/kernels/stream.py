"""The stream kernels' Python face, a candidate for the tile path: the same operation, layout and arguments.

`moe_gate_up_stream` (stream_gate_up.cu) and `moe_down_stream` (stream_down.cu) read experts in tile layout. No path of
`moe_decode` leads here: tests and `bench/candidates.py` call `moe_stream`. Compiled for sm_90a, not yet run on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from warpring.errors import UnsupportedError
from warpring.formats import ceil_div
from warpring.kernels.tile import MAX_PAIRS
from warpring.layout import RECORD_BYTES, PackedExperts
from warpring.runtime.device import index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer
from warpring.runtime.workspace import scratch

#: Shared memory that a CTA may have, and that of a multiprocessor, where each CTA costs 1 KiB more than it asks for.
#: Pairs of one expert that are multiplied at once; what more want reads the expert's weights again.
MAX_COLUMNS = 32
CTA_SMEM_BYTES = 227 * 1024
SM_SMEM_BYTES = 228 * 1024
#: What a CTA asks for that must have no second one of its kernel beside it.
EXCLUSIVE_SMEM_BYTES = SM_SMEM_BYTES // 2 - 1024 + 128
_POLICIES = {
    "bf16": "TileBf16",
    "fp8_block": "TileFp8Block",
    "fp8_channel": "TileFp8Channel",
    "mxfp8": "StreamMxfp8",
    "mxfp4": "StreamMxfp4",
    "nvfp4": "StreamNvfp4",
}
#: Multiprocessors of the GPU that the configurations are made for, an H200.
_NUM_SMS = 132
_CHUNK_BYTES = 18 * 1024
_SPLITS = (8, 9, 7, 10, 6, 5, 4, 11, 12, 3, 2, 1)
_MOST_RUN = 16
_SLOTS = 2
_SM_REGISTERS = 65536


@dataclass(frozen=True)
class Config:
    """How the kernels of one launch are built. No choice changes a bit of the result.

    Attributes:
        gate_up_ctas: CTAs a multiprocessor.
        gate_up_registers: registers a thread.
        gate_up_stages: chunks of a panel in flight a CTA, about 18 KB each.
        gate_up_columns: columns of x staged in shared memory: 0, 1, 2, 4, 8 or 16; experts with more read through L1.
        down_ctas: CTAs that shared memory must hold a multiprocessor.
        down_registers: registers a thread.
        down_warps: warps of a CTA.
        down_stages: runs in flight a warp.
        down_run_bytes: bytes of a run, at most.
        down_columns: columns of act staged: 0, 1, 2, 4 or 8.
        pairs: (token, slot) pairs that the launch may have.
        early: gate_up lets down start at once, not when its last weights are requested.
    """

    gate_up_ctas: int = 1
    gate_up_registers: int = 128
    gate_up_stages: int = 6
    gate_up_columns: int = 8
    down_ctas: int = 1
    down_registers: int = 128
    down_warps: int = 8
    down_stages: int = 2
    down_run_bytes: int = 4352
    down_columns: int = 8
    pairs: int = MAX_PAIRS
    early: bool = False


@dataclass(frozen=True)
class StreamSpecs:
    """The kernels of one layer for one `Config`."""

    gate_up: KernelSpec
    down: KernelSpec
    gate_up_warps: int
    down_warps: int
    gate_up_ctas: int

    def all(self) -> tuple[KernelSpec, ...]:
        """Both kernels."""
        return self.gate_up, self.down


def split_of(num_records: int, record_bytes: int) -> tuple[int, int]:
    """(warps that share a panel's columns, chunks of a panel): both divide it evenly, chunks are about 18 KB.

    Depends on format and sizes alone, since it decides the order of sums.
    """
    split = next(n for n in _SPLITS if num_records % n == 0)
    own = num_records // split
    fits = [n for n in range(1, own + 1) if own % n == 0 and own // n <= _MOST_RUN]
    chunks = next((n for n in fits if num_records // n * record_bytes <= _CHUNK_BYTES), fits[-1])
    return split, chunks


def run_of(num_records: int, record_bytes: int, most_bytes: int) -> int:
    """Records of a run of the down kernel: the most that divide a row and fit `most_bytes`, one at least."""
    return max(
        n for n in range(1, num_records + 1) if num_records % n == 0 and (n == 1 or n * record_bytes <= most_bytes)
    )


def _registers(num_warps: int, available: int, most: int) -> int:
    """Registers a thread, in the steps of 8 that the hardware gives out, for so many warps of `available` registers."""
    return min(most, available // (32 * num_warps) // 8 * 8)


def _routing_bytes(num_experts: int, warps: int) -> int:
    """sizeof(Routing) of tile_common.cuh."""
    entries = min(num_experts, MAX_PAIRS) + MAX_PAIRS // MAX_COLUMNS
    shorts = 2 * (2 * entries + 1 + 2 * MAX_PAIRS)
    return ceil_div(shorts, 4) * 4 + 4 * num_experts + 4 * warps + 4


def _round_up(num_bytes: int) -> int:
    return ceil_div(num_bytes, 128) * 128


def gate_up_smem(format: str, hidden: int, num_experts: int, config: Config) -> int:
    """What a CTA of gate_up asks for: sizeof(Smem) of stream_gate_up.cu at least, which it checks at compile time.

    One CTA a multiprocessor must be one: the work is dealt out evenly, and two beside each other would end last.
    """
    record, num_records = RECORD_BYTES[format], hidden // 32
    split, chunks = split_of(num_records, record)
    ring = config.gate_up_stages * (num_records // chunks) * record
    staged = split * (num_records // split * config.gate_up_columns * 64 or 16)
    parts = _SLOTS * split * 16 * 8 * 4
    barriers = 8 * 2 * (config.gate_up_stages + _SLOTS)
    used = _round_up(_round_up(ring) + staged + parts + barriers + _routing_bytes(num_experts, split + 2) + 16)
    return max(used, EXCLUSIVE_SMEM_BYTES) if config.gate_up_ctas == 1 else used


def down_smem(format: str, intermediate: int, num_experts: int, config: Config) -> int:
    """sizeof(Smem) of stream_down.cu, rounded up; it checks it at compile time."""
    record = RECORD_BYTES[format]
    run = run_of(intermediate // 32, record, config.down_run_bytes)
    stages = config.down_warps * config.down_stages
    staged = stages * (run * config.down_columns * 64 or 16)
    sums = config.pairs * (16 * 4 + 4)
    routing = _routing_bytes(num_experts, config.down_warps)
    return _round_up(_round_up(stages * run * record) + staged + sums + 8 * stages + routing + 16)


def config_for(format: str, hidden: int, intermediate: int, num_experts: int, topk: int, num_tokens: int) -> Config:
    """The configuration for a batch: few pairs let both kernels fit a multiprocessor, with more each has it alone.

    Raises:
        UnsupportedError: sizes whose smallest configuration does not fit shared memory.
    """
    sizes = (format, hidden, intermediate, num_experts)
    return (together if num_tokens * topk <= 128 else alone)(*sizes, topk, num_tokens)


def together(format: str, hidden: int, intermediate: int, num_experts: int, topk: int, num_tokens: int) -> Config:
    """Both kernels fit a multiprocessor beside each other, where shared memory allows: down starts while gate_up runs.

    Raises:
        UnsupportedError: sizes whose smallest configuration does not fit shared memory.
    """
    sizes = (format, hidden, intermediate, num_experts)
    pairs = next((n for n in (32, 128, 256) if num_tokens * topk <= n), MAX_PAIRS)
    columns = min(4, 1 << (num_tokens - 1).bit_length())
    # Short runs and many of them: more of down's weights are there before it may start. Long ones for 4-bit codes.
    stages, run_bytes = (3, 4352) if RECORD_BYTES[format] < 512 else (6, 2176)
    split, _ = split_of(hidden // 32, RECORD_BYTES[format])
    registers = _registers(split + 2, _SM_REGISTERS - 8 * 32 * 96, 112)
    config = shrink(Config(1, registers, 5, columns, 1, 96, 8, stages, run_bytes, columns, pairs), *sizes)

    def fit(config: Config) -> bool:
        both = gate_up_smem(format, hidden, num_experts, config) + down_smem(format, intermediate, num_experts, config)
        return both + 2 * 1024 <= SM_SMEM_BYTES

    least = {"down_stages": 2 + stages // 6, "gate_up_stages": 4, "down_columns": 1, "gate_up_columns": 1}
    for name in least:
        while not fit(config) and getattr(config, name) > least[name]:
            value = getattr(config, name)
            config = replace(config, **{name: value - 1 if name.endswith("stages") else value // 2})
    return config


def alone(format: str, hidden: int, intermediate: int, num_experts: int, topk: int, num_tokens: int) -> Config:
    """Each kernel has the multiprocessors for itself: as many warps, as much in flight as fit.

    Raises:
        UnsupportedError: sizes whose smallest configuration does not fit shared memory.
    """
    sizes = (format, hidden, intermediate, num_experts)
    # Twice the pairs of an expert on average: few experts have more.
    columns = 4 if num_tokens * topk <= num_experts else 8
    stages = 3 if columns == 4 else 2
    # More panels than multiprocessors: two CTAs of down on each, so that all of them run at once.
    run_bytes = 2176
    ctas, warps = (1, 16) if hidden // 16 <= _NUM_SMS else (2, 8)
    if RECORD_BYTES[format] < 512 and ctas == 1:  # 4-bit codes are bound by instructions, which longer runs save
        warps, stages, run_bytes = 12, 2, 4352
    split, _ = split_of(hidden // 32, RECORD_BYTES[format])
    registers = _registers(2 * (split + 2), _SM_REGISTERS, 96)
    two = shrink(Config(2, registers, 4, columns, ctas, 128, warps, stages, run_bytes, columns, MAX_PAIRS), *sizes)
    if two.gate_up_columns == columns:
        return two
    return shrink(
        replace(two, gate_up_ctas=1, gate_up_registers=128, gate_up_stages=6, gate_up_columns=columns), *sizes
    )


def shrink(wanted: Config, format: str, hidden: int, intermediate: int, num_experts: int) -> Config:
    """`wanted` with as many stages and staged columns as shared memory holds.

    Raises:
        UnsupportedError: sizes whose smallest configuration does not fit shared memory.
    """

    def used(config: Config, kind: str) -> int:
        if kind == "gate_up":
            return gate_up_smem(format, hidden, num_experts, config)
        return down_smem(format, intermediate, num_experts, config)

    config = wanted
    for kind in ("gate_up", "down"):
        room = min(CTA_SMEM_BYTES, SM_SMEM_BYTES // getattr(config, f"{kind}_ctas") - 1024)
        for name, least in ((f"{kind}_stages", 3), (f"{kind}_columns", 0), (f"{kind}_stages", 1)):
            while used(config, kind) > room and getattr(config, name) > least:
                value = getattr(config, name)
                config = replace(config, **{name: value - 1 if name.endswith("stages") else value // 2})
        if used(config, kind) > room:
            raise UnsupportedError(
                f"stream kernels: {format} with hidden {hidden}, intermediate {intermediate}, {num_experts} experts do "
                "not fit shared memory. Use path='warp'."
            )
    return config


@lru_cache(maxsize=1024)
def kernel_specs(
    format: str,
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    index_dtype: torch.dtype,
    gate_fn: str,
    config: Config,
) -> StreamSpecs:
    """The kernels for a layer, routed `topk` ways by ids of `index_dtype`, built as `config` says."""
    record = RECORD_BYTES[format]
    split, chunks = split_of(hidden // 32, record)

    def spec(kind: str, warps: int, stages: int, columns: int, registers: int, smem: int, **own: object) -> KernelSpec:
        macros = {
            "FORMAT": _POLICIES[format],
            "HIDDEN": hidden,
            "INTERMEDIATE": intermediate,
            "TOPK": topk,
            "EXPERTS": num_experts,
            "INDEX": "int64_t" if index_dtype == torch.int64 else "int32_t",
            "WARPS": warps,
            "MAX_COLUMNS": MAX_COLUMNS,
            "STAGES": stages,
            "COLUMNS": columns,
            "REGISTERS": registers,
            "PAIRS": config.pairs,
            "SMEM_BYTES": smem,
            **own,
        }
        named = tuple((f"WARPRING_{name}", str(value)) for name, value in macros.items())
        return KernelSpec(f"stream_{kind}.cu", f"moe_{kind}_stream", named, smem)

    own = {"GELU_TANH": ""} if gate_fn == "gelu_tanh" else {}
    if config.early:
        own["EARLY"] = ""
    gate_up = spec(
        "gate_up",
        split + 2,
        config.gate_up_stages,
        config.gate_up_columns,
        config.gate_up_registers,
        gate_up_smem(format, hidden, num_experts, config),
        SPLIT=split,
        CHUNKS=chunks,
        **own,
    )
    down = spec(
        "down",
        config.down_warps,
        config.down_stages,
        config.down_columns,
        config.down_registers,
        down_smem(format, intermediate, num_experts, config),
        RUN=run_of(intermediate // 32, record, config.down_run_bytes),
    )
    return StreamSpecs(gate_up, down, split + 2, config.down_warps, config.gate_up_ctas)


def specs_of(
    packed: PackedExperts, topk: int, index_dtype: torch.dtype, num_tokens: int, config: Config | None = None
) -> StreamSpecs:
    """The kernels for these experts and a batch of `num_tokens`; `config` overrides what fits the batch."""
    sizes = (packed.format, packed.hidden, packed.intermediate, packed.num_experts)
    config = config_for(*sizes, topk, num_tokens) if config is None else config
    return kernel_specs(*sizes, topk, index_dtype, packed.activation.gate_fn, config)


def precompile(
    packed: PackedExperts,
    topk: int,
    index_dtype: torch.dtype,
    num_tokens: int,
    device: torch.device,
    config: Config | None = None,
) -> None:
    """Compile and load the kernels of a batch of `num_tokens`, so that a later call can be captured."""
    for spec in specs_of(packed, topk, index_dtype, num_tokens, config).all():
        load(spec, index_of(device))


def moe_stream(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    config: Config | None = None,
) -> None:
    """The layer on the current stream, two launches for each MAX_PAIRS // topk tokens. Arguments as in `moe_tile`.

    Args:
        config: how the kernels are built; None for what fits the batch.
    """
    num_tokens, topk = topk_idx.shape
    at_once = (MAX_PAIRS if config is None else config.pairs) // topk
    for first in range(0, num_tokens, at_once):
        rows = slice(first, first + at_once)
        _launch_both(x[rows], packed, topk_idx[rows], topk_weights[rows], out[rows], config)


def _launch_both(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    config: Config | None,
) -> None:
    num_tokens, topk = topk_idx.shape
    specs = specs_of(packed, topk, topk_idx.dtype, num_tokens, config)
    with (
        torch.cuda.device(x.device.index),
        scratch(num_tokens * topk * packed.intermediate * 2, x.device, torch.cuda.current_stream()) as act,
    ):
        launch_gate_up(specs, x, packed, topk_idx, act)
        launch_down(specs, act, packed, topk_idx, topk_weights, out)


def launch_gate_up(
    specs: StreamSpecs, x: torch.Tensor, packed: PackedExperts, topk_idx: torch.Tensor, act: torch.Tensor
) -> None:
    """The first kernel alone; act [num_tokens, topk, intermediate] bf16, as bytes."""
    activation = packed.activation
    device_index = x.device.index
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    launch(
        load(specs.gate_up, device_index),
        (num_sms * specs.gate_up_ctas, 1, 1),
        32 * specs.gate_up_warps,
        (
            x.data_ptr(),
            x.stride(0),
            topk_idx.data_ptr(),
            topk_idx.stride(0),
            int32(topk_idx.shape[0]),
            packed.w13.records.data_ptr(),
            packed.w13.matrix_scale.data_ptr(),
            pointer(packed.w13.row_scale),
            pointer(packed.w13.block_scale),
            pointer(packed.w13_bias),
            float32(activation.alpha),
            float32(math.inf if activation.limit is None else activation.limit),
            float32(activation.up_offset),
            act.data_ptr(),
        ),
        torch.cuda.current_stream(),
        specs.gate_up.dynamic_smem_bytes,
    )


def launch_down(
    specs: StreamSpecs,
    act: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The second kernel alone."""
    launch(
        load(specs.down, out.device.index),
        (packed.hidden // 16, 1, 1),
        32 * specs.down_warps,
        (
            act.data_ptr(),
            topk_idx.data_ptr(),
            topk_idx.stride(0),
            topk_weights.data_ptr(),
            topk_weights.stride(0),
            int32(topk_idx.shape[0]),
            packed.w2.records.data_ptr(),
            packed.w2.matrix_scale.data_ptr(),
            pointer(packed.w2.row_scale),
            pointer(packed.w2.block_scale),
            pointer(packed.w2_bias),
            out.data_ptr(),
            out.stride(0),
        ),
        torch.cuda.current_stream(),
        specs.down.dynamic_smem_bytes,
    )
