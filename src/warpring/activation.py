"""Gated activations: `act(gate, up)`, one frozen description each, with its reference.

Every model we serve fits one formula (the reference below), so a kernel needs one policy per gate
function and four numbers, and a clamp can never be dropped: it is part of the description.

    g = min(gate, limit)                    (a NaN stays NaN)
    u = clamp(up, -limit, limit) + up_offset
    act = g * sigmoid(alpha * g) * u        for gate_fn "silu"
    act = gelu_tanh(g) * u                  for gate_fn "gelu_tanh"
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from warpring.errors import ArgumentError

GateFn = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Activation:
    """A gated activation.

    Attributes:
        gate_fn: "silu" (`g * sigmoid(alpha * g)`) or "gelu_tanh" (the tanh form of GELU).
        alpha: sigmoid slope, "silu" only.
        limit: clamp of gate (from above) and up (both sides); None = no clamp.
        up_offset: added to up after the clamp.
    """

    gate_fn: GateFn = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.gate_fn not in ("silu", "gelu_tanh"):
            raise ArgumentError(f"Activation: gate_fn must be 'silu' or 'gelu_tanh'; got {self.gate_fn!r}.")
        if self.gate_fn == "gelu_tanh" and self.alpha != 1.0:
            raise ArgumentError(
                f"Activation: alpha belongs to gate_fn 'silu'; got alpha={self.alpha} with 'gelu_tanh'. "
                "Leave alpha at 1."
            )
        if self.limit is not None and not self.limit > 0:
            raise ArgumentError(f"Activation: limit must be > 0 or None; got {self.limit}.")
        if not (math.isfinite(self.alpha) and math.isfinite(self.up_offset)):
            raise ArgumentError(
                f"Activation: alpha and up_offset must be finite; got {self.alpha} and {self.up_offset}."
            )

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Reference: `act(gate, up)` elementwise, computed in the inputs' own dtype."""
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        if self.up_offset:
            up = up + self.up_offset
        if self.gate_fn == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return gate * torch.sigmoid(self.alpha * gate) * up


#: SiLU(gate) * up: Qwen3, Mixtral, DeepSeek-V3, GLM, MiniMax.
SILU = Activation()
#: GELU-tanh(gate) * up: Gemma.
GELU_TANH = Activation(gate_fn="gelu_tanh")


def gpt_oss_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """gpt-oss: both halves clamped, sigmoid slope alpha, 1 added to up."""
    return Activation(alpha=alpha, limit=limit, up_offset=1.0)


def clipped_swiglu(limit: float = 10.0) -> Activation:
    """SwiGLU with clip, as DeepSeek-V4 uses it (limit 10)."""
    return Activation(limit=limit)
