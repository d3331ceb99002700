"""The tile path's form for MXFP4 in slabs, on warpgroup products of E4M3: a layer in one launch (tile_wgmma.cu).

`moe_tile_wgmma` does what `moe_tile` does, with less work a weight: E2M1 codes become operands by a few masks, and BF16
activations go to the tensor cores as two E4M3 terms each, which together hold all of their bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from warpring.errors import UnsupportedError
from warpring.formats import ceil_div
from warpring.kernels.tile import CTA_SMEM_BYTES, MAX_PAIRS, Sizes, input_arguments, sizes_of
from warpring.layout import PackedExperts
from warpring.runtime.device import HOPPER, index_of, is_hopper
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, launch, load, pointer
from warpring.runtime.workspace import scratch, zeroed
from warpring.slabs import BLOCK_COLS, PIECE_BYTES, SLAB_PANELS

#: The only architecture with this kernel.
ARCH = HOPPER
#: (token, slot) pairs that launches are built for.
_PAIR_CLASSES = (32, 64, 128, 256, MAX_PAIRS)
_WARPS, _GROUPS, _COLUMNS, _QUEUE, _SHARES = 24, 4, 8, 8, 2
#: Rows of weights of a slab, with padding in shared memory.
_SHARE_ROWS = 68
_UNIT_BYTES = 4 * SLAB_PANELS * PIECE_BYTES
#: Units in flight a warpgroup: fewer leave the memory idle, more are not needed.
_LEAST_STAGES, _MOST_STAGES = 2, 5
_MOST_ACT_IMAGES = 12


@dataclass(frozen=True)
class Config:
    """How a kernel is built. No choice changes a bit of the result.

    Attributes:
        stages: units of weights in flight a warpgroup.
        x_images: groups of gate_up whose rows of x are staged; 0 for the rows of all tokens, 8 at most, which stay.
        act_images: images of act that are staged.
        act_apart: behind those of x, not in their place.
        pairs: (token, slot) pairs that the launch may have.
    """

    stages: int
    x_images: int
    act_images: int
    act_apart: bool
    pairs: int


#: x_images, act_images and act_apart, the best first; the first three for few tokens.
_FORMS = (
    *((0, 4, True), (0, 3, True), (0, 2, True), (0, 2, False)),
    *((2, 4, False), (2, 3, False), (2, 2, False), (1, 2, False), (1, 1, False)),
)


def _entries(sizes: Sizes, config: Config) -> int:
    return min(sizes.num_experts + sizes.num_shared, config.pairs) + config.pairs // _COLUMNS


def _act_scales(sizes: Sizes) -> int:
    """Floats of a pair: a scale for every 32 neurons, with padding to 16 bytes."""
    return ceil_div(sizes.intermediate // 32, 4) * 4


def smem_bytes(sizes: Sizes, config: Config) -> int:
    """sizeof(Smem) of tile_wgmma_smem.cuh at least, which checks it at compile time."""
    x_images = max(1, config.x_images)
    x, act = (images * cols * 2 * _COLUMNS for images, cols in _images(sizes, config))
    used = config.stages * _GROUPS * _UNIT_BYTES + (x + act if config.act_apart else max(x, act))
    used += 4 * _SHARES * _GROUPS * _COLUMNS * _SHARE_ROWS + 4 * config.act_images * _COLUMNS * (_act_scales(sizes) + 4)
    used += 4 * _COLUMNS * (x_images + 3) + 4 * config.pairs + 12 * _QUEUE
    used += 8 * (2 * _GROUPS * config.stages + 2 * _QUEUE + 3 * x_images + 2 * _SHARES + 2 * config.act_images + 1)
    entries, experts = _entries(sizes, config), sizes.num_experts + sizes.num_shared
    used += 4 * config.pairs + 2 * (2 * entries + 1) + 4 * experts + 4 * _WARPS + 8
    return ceil_div(used + 128, 128) * 128


def _images(sizes: Sizes, config: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    return (max(1, config.x_images), sizes.hidden), (config.act_images, sizes.intermediate)


def shared_bytes(sizes: Sizes, config: Config) -> int:
    """sizeof(Shared) of tile_wgmma_smem.cuh."""
    return 4 * (2 + _entries(sizes, config) + sizes.hidden // BLOCK_COLS)


@lru_cache(maxsize=4096)
def config_for(sizes: Sizes, num_tokens: int) -> Config:
    """The configuration for so many tokens, no more than `most_tokens`.

    Raises:
        UnsupportedError: more experts than shared memory has room for beside rows of activations.
    """
    pairs = next(pairs for pairs in _PAIR_CLASSES if num_tokens * sizes.pairs_a_token <= pairs)
    for x_images, act_images, act_apart in _FORMS:
        if x_images == 0 and num_tokens > _COLUMNS:
            continue
        config = Config(1, x_images, act_images, act_apart, pairs)
        left = CTA_SMEM_BYTES - smem_bytes(sizes, config)
        stages = 1 + left // (_GROUPS * (_UNIT_BYTES + 16)) if left >= 0 else 0
        if stages >= _LEAST_STAGES:
            return _with_more_images(sizes, replace(config, stages=min(stages, _MOST_STAGES)))
    raise UnsupportedError(
        f"path 'tile': mxfp4 with hidden {sizes.hidden}, intermediate {sizes.intermediate}, {sizes.num_experts} "
        "experts does not fit shared memory in slabs. Pack with in_slabs=False."
    )


def _with_more_images(sizes: Sizes, config: Config) -> Config:
    """What is left of shared memory holds more of act, fetched ahead."""
    more = replace(config, act_images=config.act_images + 1)
    if more.act_images > _MOST_ACT_IMAGES or smem_bytes(sizes, more) > CTA_SMEM_BYTES:
        return config
    return _with_more_images(sizes, more)


def most_tokens(sizes: Sizes) -> int:
    """Tokens of one launch."""
    return MAX_PAIRS // sizes.pairs_a_token


@lru_cache(maxsize=4096)
def kernel_spec(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str, config: Config) -> KernelSpec:
    """The kernel for these sizes, routed by ids of `index_dtype`, built as `config` says."""
    smem = smem_bytes(sizes, config)
    macros = {
        "HIDDEN": sizes.hidden,
        "INTERMEDIATE": sizes.intermediate,
        "TOPK": sizes.topk,
        "EXPERTS": sizes.num_experts,
        "SHARED": sizes.num_shared,
        "INDEX": "int64_t" if index_dtype == torch.int64 else "int32_t",
        "PAIRS": config.pairs,
        "MAX_COLUMNS": _COLUMNS,
        "WARPS": _WARPS,
        "STAGES": config.stages,
        "X_IMAGES": config.x_images,
        "ACT_IMAGES": config.act_images,
        "ACT_APART": int(config.act_apart),
        "SMEM_BYTES": smem,
        "SHARED_BYTES": shared_bytes(sizes, config),
    }
    named = tuple((f"WARPRING_{name}", str(value)) for name, value in macros.items())
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()
    return KernelSpec("tile_wgmma.cu", "moe_tile_wgmma", named + gelu, smem)


def all_specs(sizes: Sizes, index_dtype: torch.dtype, gate_fn: str) -> tuple[KernelSpec, ...]:
    """The kernels of every batch; UnsupportedError as in `config_for`."""
    configs = dict.fromkeys(config_for(sizes, tokens) for tokens in range(1, most_tokens(sizes) + 1))
    return tuple(kernel_spec(sizes, index_dtype, gate_fn, config) for config in configs)


def precompile(packed: PackedExperts, topk: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of every batch, so that a later call can be captured."""
    check_device(device)
    for spec in all_specs(sizes_of(packed, topk), index_dtype, packed.activation.gate_fn):
        load(spec, index_of(device))


def check_device(device: torch.device) -> None:
    """Raise UnsupportedError where the kernel does not run."""
    if not is_hopper(device):
        raise UnsupportedError(
            f"path 'tile': experts packed in slabs need a GPU of compute capability 9.0; {device} is none. Move them "
            "there with PackedExperts.to, which packs them anew."
        )


def moe_tile_wgmma(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    config: Config | None = None,
    shared_weights: torch.Tensor | None = None,
) -> None:
    """The layer on the current stream, a launch for each `most_tokens`. Arguments as in `moe_tile`, packed in slabs."""
    num_tokens, topk = topk_idx.shape
    sizes = sizes_of(packed, topk)
    at_once = most_tokens(sizes) if config is None else config.pairs // sizes.pairs_a_token
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
    config = config_for(sizes, len(x)) if config is None else config
    act = packed.activation
    spec = kernel_spec(sizes, topk_idx.dtype, act.gate_fn, config)
    scales_at = num_pairs * packed.intermediate * 2
    dots_at = scales_at + num_pairs * _act_scales(sizes) * 4
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        kernel = load(spec, device_index)
        state = zeroed(shared_bytes(sizes, config), x.device, stream)
        with scratch(dots_at + num_pairs * packed.hidden * 4, x.device, stream) as buffer:
            launch(
                kernel,
                (num_sms, 1, 1),
                32 * _WARPS,
                (
                    *input_arguments(x, topk_idx, topk_weights, shared_weights),
                    packed.w13.records.data_ptr(),
                    packed.w13.matrix_scale.data_ptr(),
                    pointer(packed.w13_bias),
                    packed.w2.records.data_ptr(),
                    packed.w2.matrix_scale.data_ptr(),
                    pointer(packed.w2_bias),
                    float32(act.alpha),
                    float32(math.inf if act.limit is None else act.limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                    buffer.data_ptr() + scales_at,
                    buffer.data_ptr() + dots_at,
                    out.data_ptr(),
                    out.stride(0),
                    state.data_ptr(),
                ),
                stream,
                spec.dynamic_smem_bytes,
            )
