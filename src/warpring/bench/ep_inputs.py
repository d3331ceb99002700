"""What the ranks of an expert-parallel bench bring to a call, and what the slowest of them must do with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpring.errors import ArgumentError


@dataclass(frozen=True)
class Inputs:
    """One call of one rank: x [T, hidden], topk_idx [T, topk] over all ranks' experts, topk_weights [T, topk]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Load:
    """What the slowest rank must do in a call, on average over the calls of a replay.

    Attributes:
        weight_bytes: distinct local experts that somebody wants.
        wire_bytes: published rows that come from other ranks, once each.
        pairs: (token, slot) pairs of all ranks together.
        skew: pairs of the busiest rank over the mean.
    """

    weight_bytes: float
    wire_bytes: float
    pairs: float
    skew: float


def skewed(
    num_experts: int, num_ranks: int, size: Sequence[int], skew: float, generator: torch.Generator
) -> torch.Tensor:
    """Random expert ids [num_tokens, topk], distinct in a token, `skew` times the even share of them on rank 0.

    Raises:
        ArgumentError: skew beyond the number of ranks, or more slots than rank 0 has experts while all are its.
    """
    local = num_experts // num_ranks
    if not 1 <= skew <= num_ranks or (skew == num_ranks and size[1] > local):
        raise ArgumentError(
            f"skewed: skew must be 1 to num_ranks = {num_ranks}, and topk at most {local} where rank 0 gets all; got "
            f"skew {skew}, topk {size[1]}."
        )
    # Each slot goes to rank 0 with probability skew / num_ranks; within a group of ranks experts are drawn evenly.
    hot = torch.rand(*size, generator=generator) < skew / num_ranks
    wanted = hot.sum(1, keepdim=True).clamp(max=local, min=size[1] - (num_experts - local))
    hot = torch.arange(size[1]) < wanted
    first = torch.rand(size[0], local, generator=generator).argsort(1)
    others = torch.rand(size[0], num_experts - local, generator=generator).argsort(1) + local
    place = torch.where(hot, torch.arange(size[1]), torch.arange(size[1]) - wanted).clamp(min=0)
    cold = others.gather(1, place.clamp(max=others.shape[1] - 1)) if others.shape[1] else place
    return torch.where(hot, first.gather(1, place.clamp(max=local - 1)), cold)
