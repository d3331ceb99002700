"""The tile path's form for few tokens: warp decode on tile layout, in two launches (panels_gate_up.cu, panels_down.cu).

A batch of one or two tokens is over before the roles of `moe_tile` have met. Here every warp requests its weights as
soon as it knows the expert, straight to registers, and multiplies them with one row on tensor cores. A token's bits are
those of `moe_tile`: the order of sums follows from format and sizes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from warpring.formats import ceil_div
from warpring.kernels.tile import POLICIES, Sizes, config_for, sizes_of, weight_arguments
from warpring.layout import PackedExperts
from warpring.runtime.device import index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, launch, load, pointer
from warpring.runtime.workspace import scratch

#: Where this form is the faster one, measured on an H200 (docs/kernels.md). One token: where a warp has one unit of a
#: panel of gate_up, and else up to so many weights of an expert's w2. Two tokens: up to so many weights. Up to four
#: tokens where rows of act are so long that `moe_tile` multiplies them one by one.
_MOST_WEIGHTS_OF_TWO, _MOST_WEIGHTS_OF_SEVERAL_UNITS = 2**21, 7 * 2**18
_MOST_TOKENS_OF_LONG_ROWS = 4
_MOST_SLOTS = 32
_SMEM_BYTES = 48 * 1024
_SM_REGISTERS = 65536
#: Registers of a lane's codes and scales of a record.
_RECORD_WORDS = {"bf16": 8, "fp8_block": 4, "fp8_channel": 4, "mxfp8": 5, "mxfp4": 3, "nvfp4": 3}
#: Warps of gate_up's CTAs about, and of down's at most: for one token more, each with fewer units and more registers.
_GATE_UP_WARPS, _DOWN_WARPS_OF_ONE, _DOWN_WARPS = 8, 16, 8
#: CTAs of gate_up that share a multiprocessor at most.
_MOST_GATE_UP_CTAS = 4


@dataclass(frozen=True)
class Config:
    """How the kernels are built. No choice changes a bit of the result.

    Attributes:
        teams: so many times `Sizes.split` warps multiply in a CTA of gate_up, each team a panel.
        rounds: panels that a team has at most.
        gate_up_ctas: of a multiprocessor, at least; bounds the registers.
        down_warps: of a CTA of down.
        down_ctas: of a multiprocessor, at least.
    """

    teams: int
    rounds: int
    gate_up_ctas: int
    down_warps: int
    down_ctas: int


@lru_cache(maxsize=1024)
def suits(sizes: Sizes, num_tokens: int) -> bool:
    """Whether this form decodes so many tokens, and faster than `moe_tile`."""
    slots = sizes.pairs_a_token
    if slots > _MOST_SLOTS or 64 * _down_items(sizes) + 136 * slots > _SMEM_BYTES:
        return False
    if config_for(sizes, slots).max_columns(sizes) == 1:
        return num_tokens <= _MOST_TOKENS_OF_LONG_ROWS
    weights = sizes.hidden * sizes.intermediate
    if _passes(sizes) > 1:
        return num_tokens <= 2 and weights <= _MOST_WEIGHTS_OF_SEVERAL_UNITS
    return num_tokens == 1 or (num_tokens == 2 and weights <= _MOST_WEIGHTS_OF_TWO)


def _passes(sizes: Sizes) -> int:
    """Units of a warp in a panel of gate_up."""
    return sizes.hidden // 32 // sizes.gate_up_run // sizes.split


def _down_items(sizes: Sizes) -> int:
    """Units of the panels of a token's experts."""
    return sizes.pairs_a_token * (sizes.intermediate // 32 // sizes.down_run)


@lru_cache(maxsize=1024)
def panels_config(sizes: Sizes, num_tokens: int) -> Config:
    """The configuration for so many tokens."""
    # Units of one pass are covered by other CTAs' while they are multiplied; of several, by the warp's own next one.
    ahead = _passes(sizes) > 1
    teams = max(1, _GATE_UP_WARPS // sizes.split)
    in_flight = sizes.gate_up_run * _RECORD_WORDS[sizes.format]
    registers = 2 * in_flight + 48 if ahead else in_flight + 24
    registers += 8 if sizes.format == "fp8_block" else 0  # scales from another place
    threads = 32 * sizes.split * teams
    # Two CTAs of 128 registers a thread rather than one that spills nothing.
    fewest = max(1, min(2, _SM_REGISTERS // (threads * 128)))
    ctas = _SM_REGISTERS // (threads * 8 * ceil_div(registers, 8))
    warps, down_ctas = (_DOWN_WARPS_OF_ONE, 1) if num_tokens == 1 else (_DOWN_WARPS, 2)
    ctas, rounds = min(max(ctas, fewest), _MOST_GATE_UP_CTAS), 3 if ahead else 1
    return Config(teams, rounds, ctas, min(warps, _down_items(sizes)), down_ctas)


@dataclass(frozen=True)
class PanelsSpecs:
    """The kernels of one layer."""

    gate_up: KernelSpec
    down: KernelSpec


@lru_cache(maxsize=1024)
def kernel_specs(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str, config: Config) -> PanelsSpecs:
    """The kernels for these sizes, routed by ids of `index_dtype`, built as `config` says."""
    common = {
        "FORMAT": POLICIES[sizes.format],
        "HIDDEN": sizes.hidden,
        "INTERMEDIATE": sizes.intermediate,
        "TOPK": sizes.topk,
        "EXPERTS": sizes.num_experts,
        "SHARED": sizes.num_shared,
        "INDEX": "int64_t" if index_dtype == torch.int64 else "int32_t",
        "PAIRS": sizes.pairs_a_token,
        "MAX_COLUMNS": 1,
        "SPLIT": sizes.split,
        "GATE_UP_RUN": sizes.gate_up_run,
        "DOWN_RUN": sizes.down_run,
    }
    gate_up = {"TEAMS": config.teams, "WARPS": sizes.split * config.teams, "MIN_CTAS": config.gate_up_ctas}
    gate_up |= {"ROUNDS": int(config.rounds > 1)}
    down = {"TEAMS": 1, "WARPS": config.down_warps, "MIN_CTAS": config.down_ctas}
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()

    def named(macros: dict[str, int]) -> tuple[tuple[str, str], ...]:
        return tuple((f"WARPRING_{name}", str(value)) for name, value in (common | macros).items())

    return PanelsSpecs(
        KernelSpec("panels_gate_up.cu", "moe_gate_up_panels", named(gate_up) + gelu),
        KernelSpec("panels_down.cu", "moe_down_panels", named(down)),
    )


def all_specs(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str) -> tuple[KernelSpec, ...]:
    """The kernels of every batch that `suits`; none where there is none."""
    batches = [tokens for tokens in range(1, _MOST_TOKENS_OF_LONG_ROWS + 1) if suits(sizes, tokens)]
    specs = [kernel_specs(sizes, index_dtype, gate_fn, panels_config(sizes, tokens)) for tokens in batches]
    return tuple(dict.fromkeys(spec for both in specs for spec in (both.gate_up, both.down)))


def precompile(packed: PackedExperts, topk: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of every batch, so that a later call can be captured."""
    for spec in all_specs(sizes_of(packed, topk), index_dtype, packed.activation.gate_fn):
        load(spec, index_of(device))


def moe_panels(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    config: Config | None = None,
    shared_weights: torch.Tensor | None = None,
) -> None:
    """Both launches of the layer on the current stream. Arguments as in `moe_tile`; packed in records, not in slabs.

    Args:
        config: how the kernels are built; None for what fits the batch.
        shared_weights: FP32 [num_tokens], of every shared expert; None for 1.
    """
    num_tokens, topk = topk_idx.shape
    sizes, act = sizes_of(packed, topk), packed.activation
    device_index = x.device.index
    config = panels_config(sizes, num_tokens) if config is None else config
    num_pairs = num_tokens * sizes.pairs_a_token
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        specs = kernel_specs(sizes, topk_idx.dtype, act.gate_fn, config)
        gate_up, down = load(specs.gate_up, device_index), load(specs.down, device_index)
        with scratch(num_pairs * packed.intermediate * 2, x.device, stream) as buffer:
            launch(
                gate_up,
                (num_pairs, ceil_div(packed.intermediate // 8, config.teams * config.rounds), 1),
                32 * sizes.split * config.teams,
                (
                    x.data_ptr(),
                    x.stride(0),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    *weight_arguments(packed.w13, packed.w13_bias),
                    float32(act.alpha),
                    float32(math.inf if act.limit is None else act.limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                ),
                stream,
            )
            launch(
                down,
                (num_tokens, packed.hidden // 16, 1),
                32 * config.down_warps,
                (
                    buffer.data_ptr(),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    topk_weights.data_ptr(),
                    topk_weights.stride(0),
                    pointer(shared_weights),
                    0 if shared_weights is None else shared_weights.stride(0),
                    *weight_arguments(packed.w2, packed.w2_bias),
                    out.data_ptr(),
                    out.stride(0),
                ),
                stream,
            )
