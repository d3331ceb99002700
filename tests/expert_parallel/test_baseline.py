"""The all-to-all baseline: the same numbers as one rank that holds every expert."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

from warpring.errors import ArgumentError
from warpring.expert_parallel.baseline import AllToAllExpertParallel
from warpring.experts import Experts
from warpring.grouped import moe_grouped

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK = 64, 96, 12, 3


def dense() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    return w13, torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5


def inputs(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, TOPK), generator=generator)
    topk_weights = torch.rand(num_tokens, TOPK, generator=generator)
    topk_weights[(topk_idx < 0) | (topk_idx >= NUM_EXPERTS)] = torch.nan
    return x, topk_idx, topk_weights


def run_rank(rank: int, tokens: list[int]) -> list[list[list[float]]]:
    w13, w2 = dense()
    num_ranks = dist.get_world_size()
    local = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
    layer = AllToAllExpertParallel(Experts.from_dense(w13[local], w2[local], format="mxfp8"))
    with pytest.raises(ArgumentError, match="x must be bfloat16"):
        layer(torch.zeros(1, HIDDEN + 1).bfloat16(), torch.zeros(1, TOPK, dtype=torch.int64), torch.zeros(1, TOPK))
    # Counts change from call to call. Lists, since a tensor's memory ends with its process.
    return [layer(*inputs(rank + shift, tokens[rank])).tolist() for shift in range(2)]


@pytest.mark.parametrize("tokens", [[4, 0], [1, 7, 3]])
def test_every_rank_gets_its_tokens_results(tokens: list[int]) -> None:
    results = run_ranks(run_rank, len(tokens), tokens)
    everything = Experts.from_dense(*dense(), format="mxfp8")
    for rank, num_tokens in enumerate(tokens):
        for shift in range(2):
            got = torch.tensor(results[rank][shift]).view(-1, HIDDEN)
            x, topk_idx, topk_weights = inputs(rank + shift, num_tokens)
            assert got.shape == x.shape
            if num_tokens:
                wanted = moe_grouped(x, everything, topk_idx, topk_weights, torch.full_like(x, torch.nan))
                torch.testing.assert_close(got, wanted.float(), rtol=0.02, atol=0.02)
