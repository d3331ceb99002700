"""warpring: mixture-of-experts decode at the speed of memory.

    from warpring import Experts, moe_decode
    experts = Experts.from_dense(w13, w2, format="mxfp8").to("cuda")
    y = moe_decode(x, experts, topk_idx, topk_weights)

Names are imported when first used: `import warpring` costs nothing, and `warpring --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warpring.activation import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu
    from warpring.decode import moe_decode, precompile
    from warpring.errors import (
        ArgumentError,
        CheckpointError,
        CompileError,
        PeerTimeoutError,
        PoisonedError,
        RanksDisagreeError,
        UnsupportedError,
        WarpringError,
        WorkspaceBusyError,
    )
    from warpring.experts import Experts
    from warpring.layout import PackedExperts, pack_experts, unpack_experts, unpack_shared
    from warpring.reference import moe_exact
    from warpring.routing import Router

__version__ = "0.1.0"

__all__ = [
    "GELU_TANH",
    "SILU",
    "Activation",
    "ArgumentError",
    "CheckpointError",
    "CompileError",
    "Experts",
    "PackedExperts",
    "PeerTimeoutError",
    "PoisonedError",
    "RanksDisagreeError",
    "Router",
    "UnsupportedError",
    "WarpringError",
    "WorkspaceBusyError",
    "__version__",
    "clipped_swiglu",
    "gpt_oss_swiglu",
    "moe_decode",
    "moe_exact",
    "pack_experts",
    "precompile",
    "unpack_experts",
    "unpack_shared",
]

_HOMES = {
    "activation": ("GELU_TANH", "SILU", "Activation", "clipped_swiglu", "gpt_oss_swiglu"),
    "decode": ("moe_decode", "precompile"),
    "errors": (
        "ArgumentError",
        "CheckpointError",
        "CompileError",
        "PeerTimeoutError",
        "PoisonedError",
        "RanksDisagreeError",
        "UnsupportedError",
        "WarpringError",
        "WorkspaceBusyError",
    ),
    "experts": ("Experts",),
    "layout": ("PackedExperts", "pack_experts", "unpack_experts", "unpack_shared"),
    "reference": ("moe_exact",),
    "routing": ("Router",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"warpring.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'warpring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
