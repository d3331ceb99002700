"""The tile kernel's Python face: the whole layer in one launch, every wanted weight byte read once.

`moe_tile` (tile.cu) reads experts in tile layout (`warpring.layout`). A launch takes up to 512 (token, slot) pairs; an
expert with more of them than fit at once is read once for each such part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from warpring.errors import UnsupportedError
from warpring.formats import ceil_div
from warpring.layout import RECORD_BYTES, PackedExperts, PackedMatrix
from warpring.runtime.device import index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer
from warpring.runtime.workspace import scratch, zeroed

#: (token, slot) pairs of one launch.
MAX_PAIRS = 512
#: What a CTA may have of shared memory.
CTA_SMEM_BYTES = 227 * 1024
#: Bytes of a unit, the run of records that one bulk copy brings, at most.
UNIT_BYTES = 4896
#: Multiprocessors that the work is dealt out to where no GPU says how many there are, an H200's.
NUM_SMS = 132
#: Policies of tile_formats.cuh.
POLICIES = {
    "bf16": "TileBf16",
    "fp8_block": "TileFp8Block",
    "fp8_channel": "TileFp8Channel",
    "mxfp8": "TileMxfp8",
    "mxfp4": "TileMxfp4",
    "nvfp4": "TileNvfp4",
}
#: Warps that may share a panel's columns, the best first; of those that divide them evenly the one with the largest
#: units, but of so many warps at least where any are. A panel of 4-bit codes is half as long: fewer warps, each with
#: more of it, spend less on what a panel costs.
_FEWEST_WARPS = 4
_SPLITS = (8, 9, 7, 10, 6, 5, 4, 11, 12, 3, 2, 1)
_SPLITS_4_BIT = (4, 5, 3, 6, 7, 8, 9, 2, 1)
#: More warps would leave each fewer registers than it needs.
_MOST_SPLIT_OF_TWO_TEAMS = 5
#: Rows of x that are staged where there is room: two tiles.
_COLUMNS = 16
_PAIR_CLASSES = (32, 128, 256, MAX_PAIRS)
#: Records of a block of scales: their scales are requested before the wait for the weights.
_SCALE_BLOCK = 4
_QUEUE = 8
_PRODUCERS, _STAGERS, _FINISHERS, _FLAG_RAISERS = 2, 3, 2, 1
_TILE_COLUMNS = 8
_MOST_STAGES = 16
_MOST_PARTS = 8
_MOST_PANELS = 4
#: Share of the multiprocessors that the rounds of panels of down keep busy, all of them together, at least.
_FULL_ENOUGH = 0.8
_LEAST_RING = 72 * 1024
#: Dot products of down of so many bytes have shared memory of their own.
_DOTS_APART = 8 * 1024


@dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for.

    Attributes:
        format: of the weights.
        hidden, intermediate, num_experts, topk: of the routed experts.
        num_shared: experts beside them that every token wants.
    """

    format: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    num_shared: int = 0

    @property
    def record_bytes(self) -> int:
        """Of 16 x 32 weights."""
        return RECORD_BYTES[self.format]

    @property
    def has_4_bit_codes(self) -> bool:
        """Whether a byte of codes holds two weights."""
        return self.record_bytes < 512

    @property
    def pairs_a_token(self) -> int:
        """Routed slots and shared experts."""
        return self.topk + self.num_shared

    @property
    def split(self) -> int:
        """Warps that share the columns of a gate_up panel evenly. Decides the order of sums."""
        even = [n for n in (_SPLITS_4_BIT if self.has_4_bit_codes else _SPLITS) if self.hidden // 32 % n == 0]
        return max([n for n in even if n >= _FEWEST_WARPS] or even, key=self._unit)

    @property
    def gate_up_run(self) -> int:
        """Records of a unit of gate_up, whole blocks of scales where that divides. Decides the order of sums."""
        return self._unit(self.split)

    def _unit(self, split: int) -> int:
        own = self.hidden // 32 // split
        blocks = _SCALE_BLOCK if self.format == "fp8_block" and own % _SCALE_BLOCK == 0 else 1
        return blocks * _run(own // blocks, blocks * self.record_bytes, UNIT_BYTES)

    @property
    def down_run(self) -> int:
        """Records of a unit of down, no more than of one of gate_up."""
        return _run(self.intermediate // 32, 1, self.gate_up_run)


@dataclass(frozen=True)
class Config:
    """How a kernel is built. No choice changes a bit of the result.

    Attributes:
        teams: so many times `Sizes.split` warps multiply.
        columns: rows of x that are staged in shared memory; an expert's pairs beyond these read its weights again.
        stages: units in flight a multiplying warp.
        pairs: (token, slot) pairs that the launch may have.
        parts: that the experts of a panel of down are dealt out in.
        panels: of down that a unit of work may have where entries are few; 1 with parts.
    """

    teams: int
    columns: int
    stages: int
    pairs: int
    parts: int
    panels: int = 1

    def column_bytes(self, sizes: Sizes) -> int:
        """Of staged activations: so many rows of x, and one row of act for each stager at least."""
        return max(self.columns * _stride(sizes.hidden), _STAGERS * _stride(sizes.intermediate))

    def max_columns(self, sizes: Sizes) -> int:
        """Pairs of an expert that are multiplied at once."""
        act_slots = self.column_bytes(sizes) // _stride(sizes.intermediate)
        return min(2 * _TILE_COLUMNS, self.columns, act_slots // _STAGERS)


def _run(num_records: int, record_bytes: int, most_bytes: int) -> int:
    """The most records that divide `num_records` and fit `most_bytes`, one at least."""
    divisors = (n for n in range(1, num_records + 1) if num_records % n == 0)
    return max(n for n in divisors if n == 1 or n * record_bytes <= most_bytes)


def _stride(row: int) -> int:
    """Bytes of a staged row of BF16: neighbours lie 64 bytes apart modulo 128, so that lanes meet other banks."""
    return row * 2 if row * 2 % 128 == 64 else row * 2 + 64


def _entries(sizes: Sizes, config: Config) -> int:
    experts = sizes.num_experts + sizes.num_shared
    return min(experts, config.pairs) + config.pairs // config.max_columns(sizes)


def _warps(sizes: Sizes, config: Config) -> int:
    return sizes.split * config.teams + _PRODUCERS + _STAGERS + _FINISHERS + _FLAG_RAISERS


def _round_up(num_bytes: int, multiple: int) -> int:
    return ceil_div(num_bytes, multiple) * multiple


def smem_bytes(sizes: Sizes, config: Config) -> int:
    """sizeof(Smem) of tile_smem.cuh at least, which checks it at compile time."""
    unit = sizes.gate_up_run * sizes.record_bytes
    shares = 2 * _FINISHERS
    consumers = sizes.split * config.teams
    items = _STAGERS * consumers
    dots = 64 * (config.panels * config.pairs if config.parts == 1 else 1)
    barriers = 8 * (2 * config.stages * (config.teams + consumers) + 5 * _QUEUE + 1 + 2 * items + 2 * shares)
    lists = (16 + 4 * _STAGERS) * _QUEUE + 8 * items
    entries = _entries(sizes, config)
    routing = 4 * config.pairs + 2 * (2 * entries + 1) + 4 * (sizes.num_experts + sizes.num_shared)
    routing += 4 * _warps(sizes, config) + 8
    used = _round_up(config.stages * consumers * unit, 16) + config.column_bytes(sizes)
    used += shares * sizes.split * 512 + dots if dots <= _DOTS_APART else max(shares * sizes.split * 512, dots)
    used += 4 * config.pairs + barriers + lists + routing
    return _round_up(used + 64, 128)


def shared_bytes(sizes: Sizes, config: Config) -> int:
    """sizeof(Shared) of tile_smem.cuh."""
    return 4 * (2 + _entries(sizes, config) + _FINISHERS * (sizes.hidden // 16))


@lru_cache(maxsize=4096)
def config_for(sizes: Sizes, num_pairs: int, num_sms: int = NUM_SMS) -> Config:
    """The configuration for so many pairs: of the smallest class of batches that takes them and fits shared memory.

    Raises:
        UnsupportedError: a row of activations so long that no column fits shared memory.
    """
    # A larger class may fit where a smaller does not: its dot products lie in the place of shares, or panels are in
    # parts.
    for pairs in _PAIR_CLASSES:
        if num_pairs <= pairs and (config := _config_of_class(sizes, pairs, num_sms)) is not None:
            return config
    raise UnsupportedError(
        f"path 'tile': {sizes.format} with hidden {sizes.hidden}, intermediate {sizes.intermediate}, "
        f"{sizes.num_experts} experts does not fit shared memory. Use path='warp'."
    )


def _config_of_class(sizes: Sizes, pairs: int, num_sms: int) -> Config | None:
    """The configuration of a class of batches, or None where no column fits shared memory."""
    teams = 2 if sizes.has_4_bit_codes and sizes.split <= _MOST_SPLIT_OF_TWO_TEAMS else 1
    parts = _parts(sizes.hidden // 16, num_sms, pairs)
    stage = teams * (sizes.split * (sizes.gate_up_run * sizes.record_bytes + 16) + 16)
    panels = _panels(sizes.hidden // 16, num_sms, pairs) if parts == 1 else 1
    for columns in range(_COLUMNS, 0, -1):
        config = Config(teams, columns, 1, pairs, parts, panels)
        stages = min(_MOST_STAGES, 1 + (CTA_SMEM_BYTES - smem_bytes(sizes, config)) // stage)
        # A ring of less leaves the memory idle: then rather fewer columns.
        if stages >= 1 and (stages * stage >= _LEAST_RING or stages == _MOST_STAGES):
            config = replace(config, stages=stages)
            # What is left holds more columns: panels of down that are fetched ahead.
            left = (CTA_SMEM_BYTES - smem_bytes(sizes, config)) // _stride(sizes.hidden)
            more = replace(config, columns=columns + max(left, 0))
            return more if smem_bytes(sizes, more) <= CTA_SMEM_BYTES else config
    return None


def _parts(panels: int, num_sms: int, pairs: int) -> int:
    """Into how many parts the experts of a down panel are cut: more cost more rounds of a CTA's consumers.

    As few as leave hardly a multiprocessor idle over all rounds of work; and two where a multiprocessor has several
    panels of the largest launches: each takes long, and CTAs would end far apart.
    """

    def efficiency(parts: int) -> float:
        work = panels * parts
        return work / (ceil_div(work, num_sms) * num_sms)

    fewest = next((n for n in range(1, _MOST_PARTS) if efficiency(n) >= _FULL_ENOUGH), _MOST_PARTS)
    return max(fewest, 2) if pairs == MAX_PAIRS and panels > num_sms else fewest


def _panels(panels: int, num_sms: int, pairs: int) -> int:
    """Panels of a unit of down at most: no more than a multiprocessor has, nor than have their dot products apart."""
    return max(1, min(_MOST_PANELS, ceil_div(panels, num_sms), _DOTS_APART // (64 * pairs)))


@lru_cache(maxsize=4096)
def kernel_spec(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str, config: Config) -> KernelSpec:
    """The kernel for these sizes, routed by ids of `index_dtype`, built as `config` says."""
    smem = smem_bytes(sizes, config)
    macros = {
        "FORMAT": POLICIES[sizes.format],
        "HIDDEN": sizes.hidden,
        "INTERMEDIATE": sizes.intermediate,
        "TOPK": sizes.topk,
        "EXPERTS": sizes.num_experts,
        "SHARED": sizes.num_shared,
        "INDEX": "int64_t" if index_dtype == torch.int64 else "int32_t",
        "PAIRS": config.pairs,
        "MAX_COLUMNS": config.max_columns(sizes),
        "WARPS": _warps(sizes, config),
        "SPLIT": sizes.split,
        "TEAMS": config.teams,
        "GATE_UP_RUN": sizes.gate_up_run,
        "DOWN_RUN": sizes.down_run,
        "STAGES": config.stages,
        "COLUMN_BYTES": config.column_bytes(sizes),
        "PARTS": config.parts,
        "PANELS": config.panels,
        "SMEM_BYTES": smem,
        "SHARED_BYTES": shared_bytes(sizes, config),
    }
    named = tuple((f"WARPRING_{name}", str(value)) for name, value in macros.items())
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()
    return KernelSpec("tile.cu", "moe_tile", named + gelu, smem)


def sizes_of(packed: PackedExperts, topk: int) -> Sizes:
    """The sizes of these experts."""
    return Sizes(packed.format, packed.hidden, packed.intermediate, packed.num_experts, topk, packed.num_shared)


def all_specs(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str, num_sms: int = NUM_SMS) -> tuple[KernelSpec, ...]:
    """The kernels of every batch; UnsupportedError as in `config_for`."""
    classes = (pairs for pairs in _PAIR_CLASSES if pairs <= most_pairs(sizes, num_sms))
    configs = dict.fromkeys(config_for(sizes, pairs, num_sms) for pairs in classes)  # classes may share one
    return tuple(kernel_spec(sizes, index_dtype, gate_fn, config) for config in configs)


@lru_cache(maxsize=1024)
def most_pairs(sizes: Sizes, num_sms: int = NUM_SMS) -> int:
    """The largest class of batches whose kernel fits shared memory: what a launch takes. Errors as in `config_for`."""
    for pairs in reversed(_PAIR_CLASSES):
        if _config_of_class(sizes, pairs, num_sms) is not None:
            return pairs
    return config_for(sizes, _PAIR_CLASSES[0], num_sms).pairs  # which says why there is none


def precompile(packed: PackedExperts, topk: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of every batch, so that a later call can be captured."""
    sizes, index = sizes_of(packed, topk), index_of(device)
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    for spec in all_specs(sizes, index_dtype, packed.activation.gate_fn, num_sms):
        load(spec, index)


def input_arguments(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, shared_weights: torch.Tensor | None
) -> tuple[Any, ...]:
    """What a tile kernel is handed first: rows and strides of a batch, and how many there are."""
    rows: list[Any] = []
    for matrix in (x, topk_idx, topk_weights):
        rows += [matrix.data_ptr(), matrix.stride(0)]
    rows += [pointer(shared_weights), 0 if shared_weights is None else shared_weights.stride(0)]
    return (*rows, int32(len(x)))


def weight_arguments(matrix: PackedMatrix, bias: torch.Tensor | None) -> tuple[int, ...]:
    """What a kernel that reads records is handed of a matrix: codes, the scales that its format has, and its bias."""
    scales = (pointer(matrix.row_scale), pointer(matrix.block_scale))
    return (matrix.records.data_ptr(), matrix.matrix_scale.data_ptr(), *scales, pointer(bias))


def moe_tile(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    config: Config | None = None,
    shared_weights: torch.Tensor | None = None,
) -> None:
    """The layer on the current stream, a launch for each `most_pairs` pairs. Arguments as in `moe_warp`.

    Args:
        config: how the kernel is built; None for what fits the batch.
        shared_weights: FP32 [num_tokens], of every shared expert; None for 1.
    """
    num_tokens, topk = topk_idx.shape
    sizes = sizes_of(packed, topk)
    if config is None:
        at_once = most_pairs(sizes, torch.cuda.get_device_properties(x.device).multi_processor_count)
    else:
        at_once = config.pairs
    at_once = max(1, at_once // sizes.pairs_a_token)
    for first in range(0, num_tokens, at_once):
        rows = slice(first, first + at_once)
        gate = None if shared_weights is None else shared_weights[rows]
        _launch(x[rows], packed, topk_idx[rows], topk_weights[rows], gate, out[rows], sizes, config)


def _launch(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    shared_weights: torch.Tensor | None,
    out: torch.Tensor,
    sizes: Sizes,
    config: Config | None,
) -> None:
    num_pairs = len(x) * sizes.pairs_a_token
    device_index = x.device.index
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    config = config_for(sizes, num_pairs, num_sms) if config is None else config
    act = packed.activation
    spec = kernel_spec(sizes, topk_idx.dtype, act.gate_fn, config)
    act_bytes = num_pairs * packed.intermediate * 2
    dots_bytes = num_pairs * packed.hidden * 4 if config.parts > 1 else 0
    dots_at = _round_up(act_bytes, 128)
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        kernel = load(spec, device_index)
        state = zeroed(shared_bytes(sizes, config), x.device, stream)
        with scratch(dots_at + dots_bytes, x.device, stream) as buffer:
            launch(
                kernel,
                (num_sms, 1, 1),
                32 * _warps(sizes, config),
                (
                    *input_arguments(x, topk_idx, topk_weights, shared_weights),
                    *weight_arguments(packed.w13, packed.w13_bias),
                    *weight_arguments(packed.w2, packed.w2_bias),
                    float32(act.alpha),
                    float32(math.inf if act.limit is None else act.limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                    buffer.data_ptr() + dots_at,
                    out.data_ptr(),
                    out.stride(0),
                    state.data_ptr(),
                ),
                stream,
                spec.dynamic_smem_bytes,
            )
