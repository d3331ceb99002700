"""The warp-decode kernels' Python face: which cubin serves which experts, and its launch.

`moe_gate_up_3d_batched` (warp_gate_up.cu) and `moe_down_3d_batched` (warp_down.cu) make up the whole layer. They are
specialised at compile time for format, hidden, intermediate, topk, the index type and the gate function; the number
of experts and tokens, strides and the activation's numbers are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from warpring.experts import Experts
from warpring.runtime.device import index_of
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import float32, int32, launch, load, pointer
from warpring.runtime.workspace import scratch

MAX_TOPK = 32
_WARPS = 8
_THREADS = 32 * _WARPS
_POLICIES = {
    "bf16": "Bf16",
    "fp8_block": "Fp8Block",
    "fp8_channel": "Fp8Channel",
    "mxfp8": "Mxfp8",
    "mxfp4": "Mxfp4",
    "nvfp4": "Nvfp4",
}
FORMATS = tuple(_POLICIES)


#: 16-byte loads in flight a lane of the down kernel: deep for one token, when few warps run, shallow for more.
#: The choice changes no bit of the result.
_DOWN_BATCH = {"deep": 12, "shallow": 4}


@dataclass(frozen=True)
class WarpSpecs:
    """The kernels of one layer."""

    gate_up: KernelSpec
    down_deep: KernelSpec
    down_shallow: KernelSpec

    def down(self, num_tokens: int) -> KernelSpec:
        """The down kernel for a batch of `num_tokens`."""
        return self.down_deep if num_tokens == 1 else self.down_shallow

    def all(self) -> tuple[KernelSpec, ...]:
        """Every kernel that some batch of this layer needs."""
        return self.gate_up, self.down_deep, self.down_shallow


@lru_cache(maxsize=1024)
def _specs(format: str, hidden: int, intermediate: int, topk: int, index_dtype: torch.dtype, gate_fn: str) -> WarpSpecs:
    common = (
        ("WARPRING_FORMAT", _POLICIES[format]),
        ("WARPRING_HIDDEN", str(hidden)),
        ("WARPRING_INTERMEDIATE", str(intermediate)),
        ("WARPRING_TOPK", str(topk)),
        ("WARPRING_INDEX", "int64_t" if index_dtype == torch.int64 else "int32_t"),
    )
    gelu = (("WARPRING_GELU_TANH", ""),) if gate_fn == "gelu_tanh" else ()

    def down(depth: str) -> KernelSpec:
        batch = (("WARPRING_DOWN_BATCH", str(_DOWN_BATCH[depth])),)
        return KernelSpec("warp_down.cu", "moe_down_3d_batched", common + batch)

    gate_up = KernelSpec("warp_gate_up.cu", "moe_gate_up_3d_batched", common + gelu)
    return WarpSpecs(gate_up, down("deep"), down("shallow"))


def kernel_specs(experts: Experts, topk: int, index_dtype: torch.dtype) -> WarpSpecs:
    """The kernels for these experts, routed `topk` ways by ids of `index_dtype` (int32 or int64)."""
    return _specs(experts.format, experts.hidden, experts.intermediate, topk, index_dtype, experts.activation.gate_fn)


def precompile(experts: Experts, topk: int, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the layer's kernels, so that a later call can be captured."""
    index = index_of(device)
    for spec in kernel_specs(experts, topk, index_dtype).all():
        load(spec, index)


def moe_warp(
    x: torch.Tensor, experts: Experts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Both launches of the layer on the current stream. Arguments are checked by `moe_decode`.

    Args:
        x: BF16 [num_tokens, hidden], last stride 1, rows 16-byte aligned; num_tokens >= 1.
        experts: the layer's weights, on the device of x.
        topk_idx: int32 or int64 [num_tokens, topk], last stride 1.
        topk_weights: FP32 [num_tokens, topk], last stride 1.
        out: BF16 [num_tokens, hidden], last stride 1, overwritten.
    """
    num_tokens, topk = topk_idx.shape
    device_index = x.device.index
    w13, w2, act = experts.w13, experts.w2, experts.activation
    limit = math.inf if act.limit is None else act.limit
    with torch.cuda.device(device_index):
        stream = torch.cuda.current_stream()
        specs = kernel_specs(experts, topk, topk_idx.dtype)
        gate_up, down = load(specs.gate_up, device_index), load(specs.down(num_tokens), device_index)
        with scratch(num_tokens * topk * experts.intermediate * 2, x.device, stream) as buffer:
            launch(
                gate_up,
                (num_tokens * topk, experts.intermediate // _WARPS, 1),
                _THREADS,
                (
                    x.data_ptr(),
                    x.stride(0),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    w13.data.data_ptr(),
                    pointer(w13.scale),
                    pointer(w13.global_scale),
                    pointer(experts.w13_bias),
                    int32(experts.num_experts),
                    float32(act.alpha),
                    float32(limit),
                    float32(act.up_offset),
                    buffer.data_ptr(),
                ),
                stream,
            )
            launch(
                down,
                (num_tokens, experts.hidden // _WARPS, 1),
                _THREADS,
                (
                    buffer.data_ptr(),
                    topk_idx.data_ptr(),
                    topk_idx.stride(0),
                    topk_weights.data_ptr(),
                    topk_weights.stride(0),
                    w2.data.data_ptr(),
                    pointer(w2.scale),
                    pointer(w2.global_scale),
                    pointer(experts.w2_bias),
                    int32(experts.num_experts),
                    out.data_ptr(),
                    out.stride(0),
                ),
                stream,
            )
