"""Random layers and routings for tests, and the error figures they are judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpring import SILU, Activation, Experts, moe_exact
from warpring.reference import moe_reference


@dataclass(frozen=True)
class Inputs:
    """Arguments of one `moe_decode` call."""

    x: torch.Tensor
    experts: Experts
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def args(self) -> tuple[torch.Tensor, Experts, torch.Tensor, torch.Tensor]:
        return self.x, self.experts, self.topk_idx, self.topk_weights

    def to(self, device: str) -> Inputs:
        return Inputs(
            self.x.to(device), self.experts.to(device), self.topk_idx.to(device), self.topk_weights.to(device)
        )


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """The call for these tokens alone."""
    return Inputs(inputs.x[rows], inputs.experts, inputs.topk_idx[rows], inputs.topk_weights[rows])


def make_inputs(
    num_tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    *,
    format: str = "mxfp8",
    activation: Activation = SILU,
    bias: bool = False,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """A layer with weights of the usual scale (outputs of order 0.1 to 1) and a fresh routing.

    The experts of a token are distinct.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device) * std

    experts = Experts.from_dense(
        normal(num_experts, 2 * intermediate, hidden, std=hidden**-0.5),
        normal(num_experts, hidden, intermediate, std=intermediate**-0.5),
        format=format,
        activation=activation,
        w13_bias=normal(num_experts, 2 * intermediate, std=0.3) if bias else None,
        w2_bias=normal(num_experts, hidden, std=0.3) if bias else None,
    )
    scores = normal(num_tokens, num_experts)
    topk_weights, topk_idx = scores.softmax(-1).topk(min(topk, num_experts), dim=-1)
    return Inputs(normal(num_tokens, hidden).bfloat16(), experts, topk_idx.to(index_dtype), topk_weights.contiguous())


def rms_rel_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """||y - exact|| / ||exact||."""
    return float((y.double() - exact.double()).norm() / exact.double().norm())


def check_against_exact(y: torch.Tensor, inputs: Inputs) -> None:
    """The error of `y` is at most twice that of the same computation in torch at the same dtypes, and small."""
    exact = moe_exact(*inputs.args())
    reference = moe_reference(*inputs.args())
    error, allowed = rms_rel_error(y, exact), rms_rel_error(reference, exact)
    assert y.isfinite().all()
    assert error <= 2 * allowed, f"rms error {error:.2e}, torch at the same dtypes {allowed:.2e}"
    # One BF16 rounding of output and one of the activation: about 2^-9 each.
    assert error < 4e-3, f"rms error {error:.2e}"
