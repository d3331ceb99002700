"""The grouped path on packed weights on Hopper: GEMMs that read the tile layout as it is, with FP32 sums to the end.

Five launches, none of which the host waits for:

    route     grouped_route.cu    the (token, slot) pairs become rows of experts, these blocks of at most 128 or 256
    gather    grouped_gather.cu   x of each row, in the order in which the tensor cores read it
    gate_up   grouped_gemm.cu     act = activation(w13 x), rounded once to BF16
    down      grouped_gemm.cu     w2 act in FP32
    combine   grouped_combine.cu  the slots of a token added up in their order, weighted, rounded once to BF16

Weights are read from HBM once, and decoded into registers. A token's bits depend neither on the rest of the batch nor
on its place in it: the order of additions is that of columns, then that of slots.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from warpring.experts import MAX_EXPERTS
from warpring.formats import ceil_div
from warpring.kernels.tile import CTA_SMEM_BYTES
from warpring.layout import RECORD_BYTES, PackedExperts, PackedMatrix
from warpring.runtime.device import HOPPER, index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer

#: The only architecture with these kernels.
ARCH = HOPPER
_ROUTE_THREADS, _GATHER_THREADS, _GEMM_THREADS, _COMBINE_THREADS = 1024, 128, 384, 128
#: The most CTAs that give pairs their rows. Each counts all pairs, so more of them save ever less.
_MOST_ROUTE_CTAS = 32
_CHUNK_COLUMNS, _CHUNK_ROW_BYTES, _UNIT_COLUMNS = 64, 128, 8
_TASK_PANELS = 8
#: Bytes of a stage of weights, about: fewer make copies short, more leave few stages.
_STAGE_BYTES = 16 * 1024
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Config:
    """How the kernels are built. No choice changes a bit of the result.

    Attributes:
        block_tokens: pairs of an expert that are multiplied at once; a multiple of 32 up to 256, or 16.
        stage_records: records of a panel in a stage of weights; a power of 2, two at least.
        weight_stages: stages of weights; None for what fits shared memory.
        token_stages: chunks of 64 columns of a block's rows. Not 4, a turn's chunks: the compiler then keeps addresses
            of each in registers that it has not got.
    """

    block_tokens: int = 128
    stage_records: int | None = None
    weight_stages: int | None = None
    token_stages: int = 6

    def records(self, format: str) -> int:
        """Records of a stage of weights."""
        if self.stage_records is not None:
            return self.stage_records
        return 1 << round(math.log2(_STAGE_BYTES / (_TASK_PANELS * RECORD_BYTES[format])))

    def stages(self, format: str, num_halves: int) -> int:
        """Stages of weights."""
        if self.weight_stages is not None:
            return self.weight_stages
        stage = _TASK_PANELS * self.records(format) * RECORD_BYTES[format] + 16
        return (CTA_SMEM_BYTES - self._token_bytes(num_halves)) // stage

    def _token_bytes(self, num_halves: int) -> int:
        chunk = self.block_tokens * _CHUNK_ROW_BYTES
        return self.token_stages * (chunk + 16) + (chunk if num_halves == 2 else 0)

    def smem_bytes(self, format: str, num_halves: int) -> int:
        """Shared memory of a CTA of the GEMMs, which grouped_gemm_smem.cuh checks at compile time."""
        stage = _TASK_PANELS * self.records(format) * RECORD_BYTES[format] + 16
        return self._token_bytes(num_halves) + self.stages(format, num_halves) * stage


#: What is on its way is mostly weights, which come from HBM once.
NARROW = Config()
#: Half the trips of weights from L2, which is what many tokens wait for.
WIDE = Config(block_tokens=256, token_stages=3)
#: Mean pairs of an expert above which most have more than a narrow block takes, or nearly.
_WIDE_PAIRS = 96


def config_for(format: str, num_pairs: int, num_experts: int) -> Config:
    """The configuration for so many pairs. With FP32 scales of blocks sums take two registers each: always narrow."""
    wide = num_pairs > _WIDE_PAIRS * num_experts and format != "fp8_block"
    return WIDE if wide else NARROW


def _macros(**values: object) -> tuple[tuple[str, str], ...]:
    return tuple((f"WARPRING_{name.upper()}", str(value)) for name, value in values.items())


def _spec(name: str, smem_bytes: int = 0, **macros: object) -> KernelSpec:
    return KernelSpec(f"{name}.cu", name, _macros(**macros), smem_bytes)


@lru_cache(maxsize=1024)
def gemm_spec(format: str, cols: int, rows: int, num_halves: int, gate_fn: str, config: Config) -> KernelSpec:
    """The kernel of one projection: `rows` of each half; `format` as in `layout.RECORD_BYTES`."""
    smem = config.smem_bytes(format, num_halves)
    macros = _macros(
        format="Tile" + "".join(word.capitalize() for word in format.split("_")),
        cols=cols,
        rows=rows,
        halves=num_halves,
        tokens=config.block_tokens,
        stage_records=config.records(format),
        weight_stages=config.stages(format, num_halves),
        token_stages=config.token_stages,
        smem_bytes=smem,
    )
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" and num_halves == 2 else ()
    return KernelSpec("grouped_gemm.cu", "grouped_gemm", macros + gelu, smem)


def _route_smem_bytes(num_experts: int) -> int:
    """A count for each warp, and two of all others."""
    return 4 * num_experts * (_ROUTE_THREADS // 32 + 2)


def _pairs_per_route_cta(num_pairs: int) -> int:
    """A multiple of the CTA's threads: as few as the most CTAs leave."""
    return ceil_div(num_pairs, _MOST_ROUTE_CTAS * _ROUTE_THREADS) * _ROUTE_THREADS


class Specs(NamedTuple):
    """The kernels of a layer, in the order of their launches."""

    route: KernelSpec
    gather: KernelSpec
    gate_up: KernelSpec
    down: KernelSpec
    combine: KernelSpec


@lru_cache(maxsize=1024)
def specs_for(
    format: str, hidden: int, intermediate: int, gate_fn: str, index_dtype: torch.dtype, config: Config
) -> Specs:
    """The kernels of one configuration for a layer of these sizes, routed by ids of `index_dtype`."""
    index = "int64_t" if index_dtype == torch.int64 else "int32_t"
    tokens = config.block_tokens
    return Specs(
        _spec("grouped_route", _route_smem_bytes(MAX_EXPERTS), index=index, tokens=tokens),
        _spec("grouped_gather", hidden=hidden, tokens=tokens),
        gemm_spec(format, hidden, intermediate, 2, gate_fn, config),
        gemm_spec(format, intermediate, hidden, 1, gate_fn, config),
        _spec("grouped_combine", hidden=hidden, tokens=tokens),
    )


def all_specs(
    format: str, hidden: int, intermediate: int, gate_fn: str, index_dtype: torch.dtype
) -> tuple[KernelSpec, ...]:
    """The kernels of every batch."""
    configs = dict.fromkeys(config_for(format, num_pairs, 1) for num_pairs in (1, _WIDE_PAIRS + 1))
    return tuple(
        spec for config in configs for spec in specs_for(format, hidden, intermediate, gate_fn, index_dtype, config)
    )


def precompile(packed: PackedExperts, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of every batch, so that a later call can be captured."""
    gate_fn = packed.activation.gate_fn
    for spec in all_specs(packed.order, packed.hidden, packed.intermediate, gate_fn, index_dtype):
        load(spec, index_of(device))


@contextmanager
def scratch(num_bytes: int, device: torch.device, stream: torch.cuda.Stream) -> Generator[torch.Tensor]:
    """Memory of one call. Not the stream's own buffer, which stays: a prefill takes a multiple of decoding's."""
    del stream
    yield torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _Workspace:
    """Offsets of a pass's temporaries, each aligned for bulk copies and images.

    Attributes:
        plan: an int4, and one for each block of pairs.
        places: an int4 for each pair.
        image, act: rows of x and of the activations, BF16, whole chunks of 64 columns.
        dots: FP32 [pairs, hidden].
        num_bytes: of all.
    """

    def __init__(self, packed: PackedExperts, num_pairs: int, config: Config) -> None:
        self.num_bytes = 0
        blocks = packed.num_experts + packed.num_shared + num_pairs // config.block_tokens
        self.plan = self._take(16 * (1 + blocks))
        self.places = self._take(16 * num_pairs)
        self.image = self._take(num_pairs * ceil_div(packed.hidden, _CHUNK_COLUMNS) * _CHUNK_ROW_BYTES)
        self.act = self._take(num_pairs * ceil_div(packed.intermediate, _CHUNK_COLUMNS) * _CHUNK_ROW_BYTES)
        self.dots = self._take(4 * num_pairs * packed.hidden)

    def _take(self, num_bytes: int) -> int:
        at = self.num_bytes
        self.num_bytes += ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT
        return at


def moe_grouped_gemm(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    shared_weights: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """The layer for one pass of tokens on the current stream. Arguments as in `warpring.grouped.moe_grouped`.

    Args:
        x: BF16 [num_tokens, hidden], rows dense and 16-byte aligned.
        topk_weights: FP32, rows dense like those of topk_idx.
        config: how the kernels are built; None for what suits the batch.

    Temporaries, with R = num_tokens * (topk + num_shared): R * (6 * hidden + 2 * intermediate) bytes.
    """
    num_tokens, topk = topk_idx.shape
    num_slots = topk + packed.num_shared
    num_experts = packed.num_experts + packed.num_shared
    if config is None:
        config = config_for(packed.format, num_tokens * num_slots, num_experts)
    gate_fn = packed.activation.gate_fn
    specs = specs_for(packed.order, packed.hidden, packed.intermediate, gate_fn, topk_idx.dtype, config)
    at = _Workspace(packed, num_tokens * num_slots, config)
    device_index = x.device.index
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    shared = (pointer(shared_weights), 0 if shared_weights is None else shared_weights.stride(0))
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        with scratch(at.num_bytes, x.device, stream) as buffer:
            base = buffer.data_ptr()
            plan, places = base + at.plan, base + at.places

            def run(
                spec: KernelSpec, grid: tuple[int, int, int], block: int, *args: object, smem_bytes: int | None = None
            ) -> None:
                smem = spec.dynamic_smem_bytes if smem_bytes is None else smem_bytes
                launch(load(spec, device_index), grid, block, args, stream, smem)

            per_cta = _pairs_per_route_cta(num_tokens * num_slots)
            sizes = map(int32, (num_tokens, topk, packed.num_experts, packed.num_shared, per_cta))
            run(
                specs.route,
                (ceil_div(num_tokens * num_slots, per_cta), 1, 1),
                _ROUTE_THREADS,
                *(topk_idx.data_ptr(), topk_idx.stride(0), *sizes, plan, places),
                smem_bytes=_route_smem_bytes(num_experts),
            )
            run(
                specs.gather,
                (num_tokens, ceil_div(packed.hidden // _UNIT_COLUMNS, _GATHER_THREADS), 1),
                _GATHER_THREADS,
                *(x.data_ptr(), x.stride(0), int32(num_slots), places, base + at.image),
            )
            w13 = _gemm_args(packed, packed.w13, packed.w13_bias, plan, base + at.image, base + at.act)
            run(specs.gate_up, (num_sms, 1, 1), _GEMM_THREADS, *w13)
            w2 = _gemm_args(packed, packed.w2, packed.w2_bias, plan, base + at.act, base + at.dots)
            run(specs.down, (num_sms, 1, 1), _GEMM_THREADS, *w2)
            weights = (topk_weights.data_ptr(), topk_weights.stride(0), *shared)
            run(
                specs.combine,
                (ceil_div(packed.hidden, 4 * _COMBINE_THREADS), num_tokens, 1),
                _COMBINE_THREADS,
                *(base + at.dots, places, *weights, int32(topk), int32(num_slots), out.data_ptr(), out.stride(0)),
            )


def _gemm_args(
    packed: PackedExperts, matrix: PackedMatrix, bias: torch.Tensor | None, plan: int, image: int, out: int
) -> tuple[object, ...]:
    act = packed.activation
    return (
        matrix.records.data_ptr(),
        matrix.matrix_scale.data_ptr(),
        pointer(matrix.row_scale),
        pointer(matrix.block_scale),
        pointer(bias),
        plan,
        image,
        out,
        float32(act.alpha),
        float32(math.inf if act.limit is None else act.limit),
        float32(act.up_offset),
    )
