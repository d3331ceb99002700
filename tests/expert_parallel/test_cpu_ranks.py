"""The whole layer on CPU ranks in processes of their own: results, fresh routings, and everything that can go wrong."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks
from moe_inputs import make_inputs

from warpring import Experts, gpt_oss_swiglu, moe_exact
from warpring.errors import PeerTimeoutError, RanksDisagreeError
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import Problem, local_experts

#: Between equal arithmetic with other batches in the matrix products.
LEAST_COSINE = 0.9999997
BASE = Problem(hidden=160, intermediate=96, num_experts=6, topk=3, num_ranks=1, max_tokens_per_rank=12, format="mxfp8")


@dataclass(frozen=True)
class Batch:
    """One rank's tokens and where they go."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def experts_of(problem: Problem, *, shared: bool = False) -> Experts:
    """The same on every rank: all routed experts, or the shared ones."""
    count = problem.num_shared if shared else problem.num_experts
    return make_inputs(
        1,
        problem.hidden,
        problem.intermediate,
        count,
        1,
        format=problem.shared_format if shared else problem.format,
        activation=problem.gate,
        bias=problem.has_bias and not shared,
        seed=99 if shared else 98,
    ).experts


def batch_of(problem: Problem, num_tokens: int, kind: str, seed: int) -> Batch:
    """Random tokens. Rows beyond num_tokens are NaN and name no expert at all."""
    generator = torch.Generator().manual_seed(seed)
    rows, topk, experts = problem.max_tokens_per_rank, problem.topk, problem.num_experts
    x = torch.randn(rows, problem.hidden, generator=generator).bfloat16()
    topk_idx = torch.rand(rows, experts, generator=generator).argsort(1)[:, :topk].contiguous()
    weights = torch.rand(rows, topk, generator=generator)
    if kind == "one expert":  # every token of every rank, in every slot: duplicates too
        topk_idx[:] = experts - 1
    elif kind == "one rank":
        topk_idx %= problem.num_local_experts
    elif kind == "unused":
        unused = torch.rand(rows, topk, generator=generator) < 0.5
        topk_idx[unused], weights[unused] = -1, torch.nan
    elif kind == "nowhere":
        topk_idx[:], weights[:] = -1, torch.nan
    x[num_tokens:], topk_idx[num_tokens:], weights[num_tokens:] = torch.nan, 10**6, torch.nan
    return Batch(x, topk_idx, weights)


def build(problem: Problem, rank: int, **options: Any) -> ExpertParallelDecode:
    """The layer with this rank's experts."""
    options = {"timeout": 60.0, **options}
    shared = experts_of(problem, shared=True) if problem.num_shared else None
    experts = local_experts(experts_of(problem), rank, problem.num_ranks)
    group = dist.group.WORLD if problem.num_ranks > 1 else None
    return ExpertParallelDecode(problem, group, experts, shared=shared, **options)


def cosines(y: torch.Tensor, other: torch.Tensor) -> float:
    """Least cosine of a token; 1 where there is none, or both are zero."""
    zero = (y == 0).all(1) & (other == 0).all(1)
    cosine = torch.nn.functional.cosine_similarity(y.double(), other.double(), dim=1)
    return torch.where(zero, 1.0, cosine).min().item() if len(y) else 1.0


# Results

KINDS = ("uniform", "one expert", "one rank", "unused", "nowhere")
COUNTS = (0, 1, 7, 12)


def compare(rank: int, problem: Problem) -> tuple[float, float, bool]:
    """Calls with other routings and counts: least cosine with the arithmetic and with FP64; only tokens written."""
    least, least_exact, clean = 1.0, 1.0, True
    experts = experts_of(problem)
    shared = experts_of(problem, shared=True) if problem.num_shared else None
    with build(problem, rank) as layer:
        for call, kind in enumerate((*KINDS, *KINDS)):
            count = COUNTS[(call + rank) % len(COUNTS)]
            batch = batch_of(problem, count, kind, seed=100 * rank + call)
            out = torch.full_like(batch.x, 7.0)
            gate = torch.rand(len(out), problem.num_shared) if shared and call % 2 else None
            layer(batch.x, batch.topk_idx, batch.topk_weights, count, shared=gate, out=out)
            clean &= bool((out[count:] == 7).all())
            x, ids, weights = batch.x[:count], batch.topk_idx[:count], batch.topk_weights[:count]
            gate = None if gate is None else gate[:count]
            least = min(least, cosines(out[:count], run_layer(problem, x, experts, ids, weights, shared, gate)))
            exact = moe_exact(x, experts, ids, weights)
            if shared is not None:
                everyone = torch.arange(problem.num_shared).expand(count, -1)
                ones = torch.ones(count, problem.num_shared) if gate is None else gate
                exact += moe_exact(x, shared, everyone, ones)
            # Of the whole batch: single tokens of so small a layer go a little lower with FP8 activations.
            least_exact = min(least_exact, cosines(out[None, :count].flatten(1), exact[None].flatten(1)))
    return least, least_exact, clean


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("changes", "least_exact"),
    [
        ({"activation": "fp8"}, 0.998),
        ({"activation": "bf16", "num_shared": 2, "format": "mxfp4"}, 0.99999),
        ({"activation": "fp8", "format": "fp8_block", "has_bias": True, "gate": gpt_oss_swiglu()}, 0.998),
    ],
    ids=["fp8", "bf16, shared", "fp8, biases"],
)
def test_results_are_those_of_the_arithmetic(num_ranks: int, changes: dict[str, Any], least_exact: float) -> None:
    problem = replace(BASE, num_ranks=num_ranks, **changes)
    for cosine, cosine_exact, clean in run_ranks(compare, num_ranks, problem):
        assert cosine >= LEAST_COSINE
        assert cosine_exact >= least_exact
        assert clean


def twice(rank: int, problem: Problem) -> bool:
    batch = batch_of(problem, 12, "uniform", seed=rank)
    with build(problem, rank) as layer:
        first = layer(batch.x, batch.topk_idx, batch.topk_weights)
        second = layer(batch.x, batch.topk_idx.int(), batch.topk_weights, torch.tensor(12, dtype=torch.int32))
    return torch.equal(first, second)


def test_the_same_call_gives_the_same_bits() -> None:
    assert run_ranks(twice, 2, replace(BASE, num_ranks=2)) == [True, True]


# What goes wrong


def outcome(work: Any) -> tuple[str, Any]:
    """The name of what a call raised, and the error's fields or text."""
    try:
        work()
    except PeerTimeoutError as error:
        return "PeerTimeoutError", (error.rank, error.peer, error.flag, error.generation, error.expected, error.seen)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", None


def die(rank: int, problem: Problem) -> tuple[Any, Any, Any, bool, float]:
    """Rank 1 dies after one good call; what the others see of it, then, and when they call again."""
    batch = batch_of(problem, 12, "uniform", seed=rank)
    layer = build(problem, rank)
    layer(batch.x, batch.topk_idx, batch.topk_weights)
    if rank == 1:
        os._exit(1)
    out = torch.zeros_like(batch.x)
    start = time.monotonic()
    failed = outcome(lambda: layer(batch.x, batch.topk_idx, batch.topk_weights, out=out))
    seconds = time.monotonic() - start
    again = outcome(lambda: layer(batch.x, batch.topk_idx, batch.topk_weights))
    layer.close()
    closed = outcome(lambda: layer.check())
    return failed, again, closed, bool(out.isnan().all()), seconds


def test_a_dead_rank_is_a_named_error_on_every_other_rank() -> None:
    results = run_ranks(die, 3, replace(BASE, num_ranks=3))
    assert results[1] is None
    for rank in (0, 2):
        failed, again, closed, all_nan, seconds = results[rank]
        assert failed[0] == "PeerTimeoutError"
        assert failed[1][0] == rank
        assert failed[1][1] in {0, 1, 2} - {rank}
        assert failed[1][3:] == (2, 2, 1)
        assert (again[0], closed[0]) == ("PoisonedError", "PoisonedError")
        assert "it failed before" in again[1]
        assert all_nan
        assert seconds < 60
    assert 1 in {results[0][0][1][1], results[2][0][1][1]}


def stall(rank: int, problem: Problem) -> tuple[Any, float, bool]:
    """Rank 1 comes too late; then both close, build the layer again, at other times, and it works."""
    batch = batch_of(problem, 12, "uniform", seed=rank)
    layer = build(problem, rank, timeout=3.0)
    dist.barrier()
    if rank == 1:
        time.sleep(4.5)
    start = time.monotonic()
    failed = outcome(lambda: layer(batch.x, batch.topk_idx, batch.topk_weights))
    seconds = time.monotonic() - start
    layer.close()
    if rank == 0:
        time.sleep(1)
    with build(problem, rank) as rebuilt:
        y = rebuilt(batch.x, batch.topk_idx, batch.topk_weights)
    expected = run_layer(problem, batch.x, experts_of(problem), batch.topk_idx, batch.topk_weights)
    return failed, seconds, cosines(y, expected) >= LEAST_COSINE


def test_a_late_rank_is_an_error_within_the_bound_and_the_layer_can_be_rebuilt() -> None:
    (failed, seconds, works), (failed_late, _, works_late) = run_ranks(stall, 2, replace(BASE, num_ranks=2))
    assert failed == ("PeerTimeoutError", (0, 1, "meta", 1, 1, 0))
    assert 2.5 < seconds < 20
    assert failed_late[0] == "PeerTimeoutError"
    assert works
    assert works_late


def never_come(rank: int, problem: Problem) -> Any:
    if rank == 2:
        return None
    return outcome(lambda: build(problem, rank, timeout=2.0))


def test_a_rank_that_never_builds_the_layer_is_named() -> None:
    first, second, _ = run_ranks(never_come, 3, replace(BASE, num_ranks=3))
    for rank, (name, fields) in enumerate((first, second)):
        assert name == "PeerTimeoutError"
        # Whoever gives up first still counts the other as there.
        assert fields[0] == rank
        assert fields[1:4] in ((2, "rendezvous", 0), (1 - rank, "rendezvous", 0))
    assert 2 in {first[1][1], second[1][1]}


def disagree(rank: int, problem: Problem) -> tuple[str, Any]:
    mine = replace(problem, max_tokens_per_rank=12 - rank)
    return outcome(lambda: build(mine, rank))


def test_ranks_that_disagree_all_hear_in_what() -> None:
    for name, text in run_ranks(disagree, 2, replace(BASE, num_ranks=2)):
        assert name == RanksDisagreeError.__name__
        assert "max_tokens_per_rank is 12 on rank 0; 11 on rank 1" in text


def too_many(rank: int, problem: Problem) -> tuple[list[Any], bool]:
    """Rank 1 breaks rules before it makes a proper call; rank 0 waits for that one."""
    batch = batch_of(problem, 12, "uniform", seed=rank)
    wrong = []
    with build(problem, rank) as layer:
        if rank == 1:
            x = torch.zeros(13, problem.hidden, dtype=torch.bfloat16)
            ids = torch.zeros(13, problem.topk, dtype=torch.int64)
            wrong.append(outcome(lambda: layer(x, ids, ids.float())))
            wrong.append(outcome(lambda: layer(batch.x, batch.topk_idx, batch.topk_weights, 13)))
            wrong.append(outcome(lambda: layer(batch.x, batch.topk_idx + problem.num_experts, batch.topk_weights)))
        y = layer(batch.x, batch.topk_idx, batch.topk_weights)
    expected = run_layer(problem, batch.x, experts_of(problem), batch.topk_idx, batch.topk_weights)
    return wrong, cosines(y, expected) >= LEAST_COSINE


def test_wrong_arguments_send_nothing_and_leave_the_layer_usable() -> None:
    (_, works), (wrong, works_after) = run_ranks(too_many, 2, replace(BASE, num_ranks=2))
    assert works
    assert works_after
    assert [name for name, _ in wrong] == ["ArgumentError"] * 3
    assert "at most max_tokens_per_rank = 12 rows; got 13" in wrong[0][1]
    assert "num_tokens must be 0 to 12" in wrong[1][1]
    assert "topk_idx must be -1 (unused) or an expert" in wrong[2][1]


def halves(rank: int, problem: Problem) -> tuple[str, bool]:
    first, second = (batch_of(problem, 12, "uniform", seed=10 * call + rank) for call in range(2))
    with build(problem, rank) as layer:
        handle = layer.send(first.x, first.topk_idx, first.topk_weights)
        busy = outcome(lambda: layer.send(second.x, second.topk_idx, second.topk_weights))
        y = layer.receive(handle)
        layer(second.x, second.topk_idx, second.topk_weights)
    expected = run_layer(problem, first.x, experts_of(problem), first.topk_idx, first.topk_weights)
    return busy[0], cosines(y, expected) >= LEAST_COSINE


def test_the_halves_make_a_call_and_a_second_send_is_refused() -> None:
    assert run_ranks(halves, 2, replace(BASE, num_ranks=2)) == [("WorkspaceBusyError", True)] * 2
