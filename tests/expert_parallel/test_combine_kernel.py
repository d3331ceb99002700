"""role3 in the CPU emulator: the sum over slots, bit for bit, and the end of a call."""

from __future__ import annotations

import pytest
import torch
from emulated_ranks import Call, Ranks, make_call
from emulator import guarded, run, unusable_reason

from warpring.expert_parallel.arithmetic import combine, partial_dtype
from warpring.expert_parallel.flags import Code, Flag
from warpring.expert_parallel.problem import Problem

pytestmark = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))

NUM_BLOCKS = 7


def problem_of(activation: str, topk: int = 9, num_shared: int = 1, num_ranks: int = 2) -> Problem:
    return Problem(
        hidden=96,
        intermediate=64,
        num_experts=8,
        topk=topk,
        num_ranks=num_ranks,
        max_tokens_per_rank=6,
        activation=activation,
        num_shared=num_shared,
    )


def finish_call(ranks: Ranks, call: Call, *, done: list[int] | None = None, seed: int = 1) -> torch.Tensor:
    """Runs role3 of rank 0 as if all else of its next call had happened; returns the partial results that it found."""
    problem, rank = ranks.problem, ranks.ranks[0]
    generation = rank.state.generation + 1
    complete = generation * ranks.schedule.compute_ctas
    counters = rank.region("done", torch.int64)
    counters[: problem.num_ranks] = torch.tensor(done or [complete] * problem.num_ranks)
    rank.region("plan", torch.int64)[:2] = torch.tensor([generation, NUM_BLOCKS])
    shape = (problem.max_tokens_per_rank, problem.num_slots_per_token, problem.hidden)
    partials = rank.region("partials", partial_dtype(problem.activation)).view(shape)
    partials.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    partials[:, : problem.topk][unused(problem, call)] = torch.nan
    partials[call.num_tokens :] = torch.nan
    run(ranks.communication(0, call)[-1:], seed=seed, concurrent=True)
    return partials.clone()


def unused(problem: Problem, call: Call) -> torch.Tensor:
    return (call.topk_idx < 0) | (call.topk_idx >= problem.num_experts)


def wanted(problem: Problem, call: Call, partials: torch.Tensor) -> torch.Tensor:
    valid = torch.ones(partials.shape[:2], dtype=torch.bool)
    valid[:, : problem.topk] = ~unused(problem, call)
    return combine(partials[: call.num_tokens], valid[: call.num_tokens])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_sum_is_that_of_the_slots_in_order_and_unused_ones_are_not_read(
    num_tokens: int, activation: str, index: torch.dtype
) -> None:
    problem = problem_of(activation)
    ranks = Ranks(problem)
    call = make_call(problem, num_tokens, torch.Generator().manual_seed(num_tokens), index)
    out = finish_call(ranks, call)
    assert torch.equal(call.out[:num_tokens].view(torch.int16), wanted(problem, call, out).view(torch.int16))
    assert call.out[num_tokens:].isnan().all()


@pytest.mark.parametrize(("topk", "num_shared"), [(31, 1), (32, 1), (32, 8)])
def test_as_many_slots_as_bits_and_more(topk: int, num_shared: int) -> None:
    problem = problem_of("fp8", topk, num_shared)
    call = make_call(problem, 6, torch.Generator().manual_seed(topk + num_shared))
    partials = finish_call(Ranks(problem), call)
    assert torch.equal(call.out.view(torch.int16), wanted(problem, call, partials).view(torch.int16))


@pytest.mark.parametrize("combine_ctas", [1, 5])
def test_grid_and_strides_change_no_bit(combine_ctas: int) -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem, combine_ctas=combine_ctas)
    call = make_call(problem, 5, torch.Generator().manual_seed(2))
    wide = torch.full((6, 2 * problem.hidden), torch.nan, dtype=torch.bfloat16)
    call.out = wide[:, : problem.hidden]
    call.topk_idx = torch.cat([call.topk_idx, call.topk_idx.flip(1)], 1)[:, : problem.topk]
    partials = finish_call(ranks, call)
    assert torch.equal(call.out[:5], wanted(problem, call, partials))
    assert wide[:, problem.hidden :].isnan().all()


@pytest.mark.parametrize("given", [3, -1, 2**20])
def test_routing_beyond_the_rows_is_not_looked_at(given: int) -> None:
    """Slots are looked at before the count is checked: never beyond the rows that there are."""
    ranks = Ranks(problem_of("fp8"))
    call = make_call(ranks.problem, 3, torch.Generator().manual_seed(5))
    call.topk_idx = guarded(call.topk_idx)
    call.count.fill_(given)
    ranks.ranks[0].state.poison = int(given != 3)  # as role1 leaves it
    finish_call(ranks, call)
    rows = 3 if given == 3 else len(call.out)
    assert call.out[:rows].isnan().any() == (given != 3)


def test_last_cta_moves_the_layer_on_in_every_call() -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem, combine_ctas=3)
    for generation in (1, 2, 3):
        finish_call(ranks, make_call(problem, 2, torch.Generator().manual_seed(1)), seed=generation)
        state = ranks.ranks[0].state
        assert (state.generation, state.block_base) == (generation, NUM_BLOCKS * generation)
        assert state.combine_begun == state.combine_done == generation << 16


def test_counter_of_finished_ctas_may_wrap() -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem, combine_ctas=3)
    before = 2**40 - 1
    ranks.ranks[0].state.generation = before
    state = ranks.ranks[0].state
    state.combine_begun = state.combine_done = (before << 16) % 2**32
    finish_call(ranks, make_call(problem, 2, torch.Generator().manual_seed(1)))
    assert ranks.ranks[0].state.generation == before + 1


def test_poisoned_layer_fills_its_rows_with_nan_and_stays_where_it_is() -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem)
    ranks.ranks[0].state.poison = 1
    call = make_call(problem, 4, torch.Generator().manual_seed(1))
    call.out.zero_()
    finish_call(ranks, call)
    assert call.out[:4].isnan().all()
    assert (call.out[4:] == 0).all()
    assert ranks.ranks[0].state.generation == 0


def test_peer_that_is_not_done_is_reported() -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem, timeout_ns=10**6)
    call = make_call(problem, 4, torch.Generator().manual_seed(1))
    finish_call(ranks, call, done=[3, 2])
    error = ranks.ranks[0].failure
    assert (error.code, error.flag, error.rank, error.peer) == (Code.TIMEOUT, Flag.DONE, 0, 1)
    assert (error.generation, error.expected, error.seen) == (1, 3, 2)
    state = ranks.ranks[0].state
    assert (state.poison, state.generation, state.block_base) == (1, 0, 0)
    assert call.out[:4].isnan().all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_a_peer_and_so_the_own_rank_are_not_done_the_peer_is_named(seed: int) -> None:
    problem = problem_of("fp8")
    ranks = Ranks(problem, timeout_ns=10**6)
    finish_call(ranks, make_call(problem, 4, torch.Generator().manual_seed(1)), done=[2, 2], seed=seed)
    error = ranks.ranks[0].failure
    assert (error.code, error.flag, error.rank, error.peer) == (Code.TIMEOUT, Flag.DONE, 0, 1)
