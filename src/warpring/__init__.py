"""warpring: mixture-of-experts decode at the speed of memory.

    from warpring import Experts, moe_decode
    experts = Experts.from_dense(w13, w2, format="mxfp8").to("cuda")
    y = moe_decode(x, experts, topk_idx, topk_weights)
"""

from __future__ import annotations

from warpring.activation import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu
from warpring.decode import moe_decode, precompile
from warpring.errors import ArgumentError, CheckpointError, CompileError, UnsupportedError, WarpringError
from warpring.experts import Experts
from warpring.reference import moe_exact

__version__ = "0.1.0"

__all__ = [
    "GELU_TANH",
    "SILU",
    "Activation",
    "ArgumentError",
    "CheckpointError",
    "CompileError",
    "Experts",
    "UnsupportedError",
    "WarpringError",
    "__version__",
    "clipped_swiglu",
    "gpt_oss_swiglu",
    "moe_decode",
    "moe_exact",
    "precompile",
]
