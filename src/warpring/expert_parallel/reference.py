"""The whole layer on CPU ranks: the kernels' semantics and errors, carried by gloo. Runs on any machine.

Data go the way that the kernels send them: a token to the ranks that have one of its experts and to no other, one
partial result back for each of its slots there, and the sum over the slots at the token's owner.
"""

from __future__ import annotations

from typing import Any

import torch

from warpring.expert_parallel.arithmetic import Published, combine, partial_dtype, publish, run_expert, run_shared
from warpring.expert_parallel.call import Call
from warpring.expert_parallel.partition import Split
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.rendezvous import Deadline, Ranks
from warpring.experts import Experts

_TAGS_PER_CALL = 3
_TAG_LIMIT = 2**30


_Weights = tuple[Experts, Experts | None]


class GlooEngine:
    """role1 to role4 of one rank in plain torch. See `Engine` in turns.py for the methods."""

    sm_counts: Split | None = None
    memory = ""

    def __init__(self, problem: Problem, group: Any | None, timeout: float) -> None:
        self.ranks = Ranks(group, timeout)
        try:
            self.ranks.check_agreement({**problem.description(), "device": "cpu"})
        except BaseException:
            self.ranks.close()
            raise
        self._problem = problem
        self._timeout = timeout
        self._generation = 0
        self._tokens: Published | None = None
        self._count = 0

    def pack(self, experts: Experts, shared: Experts | None) -> _Weights:
        """The experts as they are."""
        return experts, shared

    def send(self, call: Call, weights: _Weights, *, whole: bool = True) -> None:
        """Publish the routing to every rank, and each token to the ranks that have one of its experts."""
        problem, ranks = self._problem, self.ranks
        self._generation += 1
        count = self._count = call.count
        tokens = self._tokens = publish(problem, call.x[:count])
        header = torch.full((1 + problem.max_tokens_per_rank * problem.topk,), -1, dtype=torch.int32)
        header[0] = count
        header[1 : 1 + count * problem.topk] = call.topk_idx[:count].flatten()
        for peer in ranks.peers():
            ranks.send(header, peer, self._tag(0), generation=self._generation)
            wanted = self._wants(call.topk_idx[:count], peer).any(1)
            if wanted.any():
                packed = _pack(tokens[wanted], call.topk_weights[:count][wanted])
                ranks.send(packed, peer, self._tag(1), generation=self._generation)

    def receive(self, call: Call, weights: _Weights, out: torch.Tensor) -> None:
        """Run the experts on what the ranks published, return the partial results, add up one's own."""
        problem, ranks, count, tokens = self._problem, self.ranks, self._count, self._tokens
        if tokens is None:
            return
        deadline = Deadline(self._timeout)
        experts, shared = weights
        topk_idx, topk_weights = call.topk_idx[:count], call.topk_weights[:count]
        dtype = partial_dtype(problem.activation)
        partials = torch.zeros(count, problem.num_slots_per_token, problem.hidden, dtype=dtype)
        # One's own pairs first: peers may still be on their way.
        mine = self._wants(topk_idx, ranks.rank)
        partials[:, : problem.topk][mine] = self._run(experts, tokens, topk_idx, topk_weights, mine)
        if shared is not None:
            partials[:, problem.topk :] = run_shared(problem, shared, tokens, call.shared_weights_of(count))
        for peer in ranks.peers():
            self._serve(experts, peer, deadline)
        for peer in ranks.peers():
            theirs = self._wants(topk_idx, peer)
            rows = torch.empty(int(theirs.sum()), problem.hidden, dtype=dtype)
            if rows.numel():
                ranks.receive(_as_bytes(rows), peer, self._tag(2), deadline, flag="done", generation=self._generation)
                partials[:, : problem.topk][theirs] = rows
        ranks.flush(deadline, flag="done", generation=self._generation)
        valid = torch.ones(count, problem.num_slots_per_token, dtype=torch.bool)
        valid[:, : problem.topk] = topk_idx >= 0
        out[:count] = combine(partials, valid)

    def _serve(self, experts: Experts, peer: int, deadline: Deadline) -> None:
        """Receive a peer's routing and tokens, send the partial results of its pairs back in its order."""
        problem, ranks, generation = self._problem, self.ranks, self._generation
        header = torch.empty(1 + problem.max_tokens_per_rank * problem.topk, dtype=torch.int32)
        ranks.receive(header, peer, self._tag(0), deadline, flag="meta", generation=generation)
        count = int(header[0])
        topk_idx = header[1 : 1 + count * problem.topk].view(count, problem.topk)
        topk_idx = topk_idx[self._wants(topk_idx, ranks.rank).any(1)]
        if not len(topk_idx):
            return
        packed = torch.empty(len(topk_idx), _row_bytes(problem), dtype=torch.uint8)
        ranks.receive(packed, peer, self._tag(1), deadline, flag="arrived", generation=generation)
        tokens, weights = _unpack(problem, packed)
        mine = self._wants(topk_idx, ranks.rank)
        partials = _as_bytes(self._run(experts, tokens, topk_idx, weights, mine))
        ranks.send(partials, peer, self._tag(2), generation=generation)

    def _run(
        self,
        experts: Experts,
        tokens: Published,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        mine: torch.Tensor,
    ) -> torch.Tensor:
        """Partial results of the pairs (token, slot) that `mine` marks, in that order: [pairs, hidden]."""
        problem = self._problem
        rows, slots = mine.nonzero(as_tuple=True)
        local = topk_idx[rows, slots].long() - self.ranks.rank * problem.num_local_experts
        out = torch.empty(len(rows), problem.hidden, dtype=partial_dtype(problem.activation))
        for expert in local.unique().tolist():
            pairs = local == expert
            pair_weights = weights[rows[pairs], slots[pairs]]
            out[pairs] = run_expert(problem, experts, expert, tokens[rows[pairs]], pair_weights)
        return out

    def _wants(self, topk_idx: torch.Tensor, rank: int) -> torch.Tensor:
        """Which slots name an expert of `rank`: bool of the shape of topk_idx."""
        count = self._problem.num_local_experts
        return (topk_idx >= rank * count) & (topk_idx < (rank + 1) * count)

    def _tag(self, kind: int) -> int:
        return 16 + (self._generation * _TAGS_PER_CALL + kind) % _TAG_LIMIT

    def check(self) -> None:
        """Nothing runs in the background here."""

    def close(self) -> None:
        """Drop the connections."""
        self.ranks.close()


def _row_bytes(problem: Problem) -> int:
    return problem.activation_bytes * problem.hidden_padded + 4 * problem.scales_per_token + 4 * problem.topk


def _pack(tokens: Published, weights: torch.Tensor) -> torch.Tensor:
    """Published tokens and their routing weights, one row of bytes each."""
    parts = (tokens.codes, tokens.scale, weights)
    return torch.cat([_as_bytes(part) for part in parts], dim=1)


def _unpack(problem: Problem, packed: torch.Tensor) -> tuple[Published, torch.Tensor]:
    """The inverse of `_pack`."""
    codes_bytes = problem.activation_bytes * problem.hidden_padded
    scale_bytes = 4 * problem.scales_per_token
    codes, scale, weights = packed.split((codes_bytes, scale_bytes, 4 * problem.topk), dim=1)
    tokens = Published(codes.contiguous().view(torch.float8_e4m3fn), scale.contiguous().view(torch.float32))
    return tokens, weights.contiguous().view(torch.float32)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, sharing storage where it is contiguous."""
    return tensor.contiguous().view(torch.uint8)
