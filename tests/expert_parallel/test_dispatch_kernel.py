"""role1 and role4: compiled within their budget; in the CPU emulator: what they publish, plan, pull, and report."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from emulated_ranks import Call, Ranks, expected, macros, make_call
from emulator import run, unusable_reason

from warpring.expert_parallel.arithmetic import publish
from warpring.expert_parallel.flags import DISPATCH_THREADS, SHARED_THREADS, Code, Flag
from warpring.expert_parallel.problem import Problem
from warpring.formats import ceil_div
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import KernelSpec, compile_kernel

emulated = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))

SMALL = Problem(
    hidden=160,
    intermediate=256,
    num_experts=6,
    topk=3,
    num_ranks=1,
    max_tokens_per_rank=8,
    block_m=8,
)


def run_and_check(ranks: Ranks, counts: Sequence[Sequence[int]], seed: int, **kwargs: int) -> None:
    """Calls in a row with these token counts (of each rank), and every output compared bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.int64 if seed % 2 else torch.int32
    calls = [[make_call(ranks.problem, n, generator, index) for n in of_ranks] for of_ranks in counts]
    ranks.calls(*calls, seed=seed, **kwargs)
    check_outputs(ranks, calls)
    for rank in ranks.ranks:
        state = rank.state
        assert (state.poison, rank.failure.code) == (0, Code.OK)
        assert state.claimed == state.generation % 2**32
        assert state.combine_begun == state.combine_done == (state.generation << 16) % 2**32


def check_outputs(ranks: Ranks, calls: Sequence[Sequence[Call]]) -> None:
    for call in (call for of_ranks in calls for call in of_ranks):
        n = call.num_tokens
        assert torch.equal(call.out[:n].view(torch.int16), expected(ranks.problem, call).view(torch.int16))
        assert call.out[n:].isnan().all()


# Compiled

#: hidden, intermediate, topk, experts, ranks, shared, block_m: DeepSeek-V4-Flash, GLM-5.2, gpt-oss-120b, V4.1-Flash,
#: the smallest, the largest.
SHAPES = [
    (4096, 2048, 6, 256, 2, 1, 8),
    (6144, 2048, 8, 256, 2, 1, 16),
    (2880, 2880, 4, 128, 2, 0, 64),
    (5120, 2304, 6, 384, 72, 1, 32),
    (32, 32, 1, 1, 1, 0, 8),
    (7168, 2048, 32, 1024, 1, 8, 64),
]


def check_budget(problem: Problem, arch: str, index: str) -> None:
    """No spills; and role1 and role4 fit on one multiprocessor together: role4 may not wait for role1 to end."""
    registers = 0
    for name, threads in (("ep_dispatch", DISPATCH_THREADS), ("ep_shared", SHARED_THREADS), ("ep_combine", 0)):
        if name == "ep_shared" and problem.num_shared == 0:
            continue
        cubin = compile_kernel(KernelSpec(f"{name}.cu", name, macros(problem, index)), arch)
        assert cubin.spill_bytes == 0
        assert cubin.smem_bytes <= 24 * 1024
        registers += cubin.registers * threads
    assert registers <= 65536


@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compile_within_their_budget(shape: tuple[int, ...], activation: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    hidden, intermediate, topk, num_experts, num_ranks, num_shared, block_m = shape
    num_experts = ceil_div(num_experts, num_ranks) * num_ranks
    problem = Problem(
        hidden,
        intermediate,
        num_experts,
        topk,
        num_ranks,
        256,
        num_shared=num_shared,
        block_m=block_m,
        activation=activation,
    )
    check_budget(problem, "sm_90a", "int64_t")


@pytest.mark.parametrize("arch", TESTED_ARCHS)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    check_budget(replace(SMALL, num_shared=1), arch, "int32_t")


# What role1 and role4 leave in memory


def tokens_of_slot(ranks: Ranks, slot: int, count: int) -> torch.Tensor:
    """Bytes [count, bytes of a token] of the B image in a slot, by the formula of docs/expert_parallel.md."""
    problem = ranks.problem
    row_bytes = problem.hidden_padded * problem.activation_bytes
    image = ranks.ranks[0].region("ring_x").view(ranks.schedule.num_slots, -1)[slot]
    width = next(size for size in (8, 16, 32, 64) if size >= count)
    k = torch.arange(row_bytes) % 128
    chunk = torch.arange(row_bytes) // 128
    n = torch.arange(count)[:, None]
    at = chunk * width * 128 + ((k // 16) * (width // 8) + n // 8) * 128 + (n % 8) * 16 + k % 16
    return image[at]


@emulated
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize(("block_m", "comm_ctas"), [(8, 1), (16, 3), (64, 2)])
def test_ring_plan_and_rows_hold_what_the_routing_says(activation: str, block_m: int, comm_ctas: int) -> None:
    problem = replace(SMALL, activation=activation, block_m=block_m, num_shared=1, max_tokens_per_rank=40)
    ranks = Ranks(problem, comm_ctas=comm_ctas, num_slots=64)
    call = make_call(problem, 37, torch.Generator().manual_seed(block_m))
    call.topk_idx[:20, 0], call.topk_weights[:20, 0] = 4, 0.25  # an expert with several blocks
    run(ranks.communication(0, call, with_combine=False), seed=block_m, concurrent=True)

    published = publish(problem, call.x[:37])
    codes = published.codes.view(torch.uint8)
    rank, slots = ranks.ranks[0], ranks.schedule.num_slots
    plan = rank.region("plan", torch.int32).view(-1, 4)
    num_blocks = int(plan[0, 2])
    assert (plan[: num_blocks + 1, :2] == torch.tensor([1, 0])).all()  # the generation, 64 bits
    info = rank.region("ring_info", torch.int32).view(slots, -1)
    scales = rank.region("ring_x_scale", torch.float32).view(slots, problem.scales_per_token, block_m)
    seen: list[tuple[int, int]] = []
    experts: list[int] = []
    for slot in range(num_blocks):
        expert, count = info[slot, :2].tolist()
        assert plan[1 + slot, 2:].tolist() == [expert, count]
        assert rank.region("l1_full", torch.int32)[slot] == 1
        pair = info[slot, 4 : 4 + count]
        token, k = pair // problem.num_slots_per_token, pair % problem.num_slots_per_token
        experts.append(expert)
        seen += zip(token.tolist(), k.tolist(), strict=True)
        if expert < problem.num_experts:
            assert (call.topk_idx[token, k] == expert).all()
            weight = call.topk_weights[token, k]
        else:
            assert (k == problem.topk).all()
            weight = call.shared_weights[token, 0] if call.shared_weights is not None else torch.ones(count)
        assert torch.equal(info[slot, 4 + block_m : 4 + block_m + count].view(torch.float32), weight)
        assert torch.equal(tokens_of_slot(ranks, slot, count), codes[token])
        assert torch.equal(scales[slot, :, :count].mT, published.scale[token])
        assert scales[slot, :, count:].isnan().all()  # left as they were
    valid = (call.topk_idx[:37] >= 0) & (call.topk_idx[:37] < problem.num_experts)
    wanted = [tuple(pair) for pair in valid.nonzero().tolist()] + [(t, problem.topk) for t in range(37)]
    assert sorted(seen) == sorted(wanted)
    num_shared = ceil_div(37, block_m)
    assert experts[:num_shared] == [problem.num_experts] * num_shared
    assert experts[num_shared:] == sorted(experts[num_shared:])
    per_expert = torch.bincount(call.topk_idx[:37][valid].long(), minlength=problem.num_experts)
    assert num_blocks == num_shared + int(sum(ceil_div(n, block_m) for n in per_expert.tolist()))


@emulated
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_tokens_with_nan_infinity_and_zeros_are_published_like_the_reference(activation: str) -> None:
    problem = replace(SMALL, activation=activation)
    ranks = Ranks(problem, num_slots=32)
    call = make_call(problem, 6, torch.Generator().manual_seed(3))
    call.x[0] = 0
    call.x[1, 7], call.x[2, 130], call.x[3, 5] = torch.nan, torch.inf, -torch.inf
    call.x[4] = torch.finfo(torch.bfloat16).tiny / 128
    run(ranks.communication(0, call, with_combine=False), concurrent=True)
    published = publish(problem, call.x[:6])
    row = ranks.ranks[0].region("rows").view(problem.max_tokens_per_rank, -1)[:6]
    columns = problem.hidden_padded * problem.activation_bytes
    codes = row[:, :columns].view(published.codes.dtype).float()
    assert torch.equal(codes.nan_to_num(nan=1e9), published.codes.float().nan_to_num(nan=1e9))
    scale = row[:, columns : columns + 4 * problem.scales_per_token].contiguous().view(torch.float32)
    assert torch.equal(scale.nan_to_num(nan=-1.0), published.scale.nan_to_num(nan=-1.0))
    weights = row[:, columns + 4 * problem.scales_per_token :].contiguous().view(torch.float32)[:, : problem.topk]
    assert torch.equal(weights.view(torch.int32), call.topk_weights[:6].view(torch.int32))


# Whole calls, with a stand-in for role2


@emulated
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_one_rank_touches_no_peer(num_shared: int, seed: int) -> None:
    ranks = Ranks(replace(SMALL, num_shared=num_shared))
    run_and_check(ranks, [[5], [0], [8], [1]], seed)


@emulated
@pytest.mark.parametrize("seed", [0, 3, 4, 5])
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_two_ranks_replay_with_changing_counts(activation: str, seed: int) -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2, activation=activation, num_shared=1))
    run_and_check(ranks, [[5, 3], [0, 8], [8, 8], [1, 0], [0, 0], [2, 7]], seed)


@emulated
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_ranks_one_of_them_empty(seed: int) -> None:
    ranks = Ranks(replace(SMALL, num_ranks=3), comm_ctas=3, compute_ctas=2)
    run_and_check(ranks, [[3, 0, 8], [4, 0, 1], [0, 2, 0]], seed)


@emulated
@pytest.mark.parametrize("seed", [1, 2])
def test_more_blocks_than_slots_all_for_one_expert_of_one_rank(seed: int) -> None:
    problem = replace(SMALL, num_ranks=2, max_tokens_per_rank=32)
    ranks = Ranks(problem, num_slots=4)
    generator = torch.Generator().manual_seed(seed)
    calls = [[make_call(problem, n, generator) for n in counts] for counts in ([32, 31], [9, 32])]
    for call in (call for of_ranks in calls for call in of_ranks):
        call.topk_idx[call.topk_weights.isfinite()] = 5
    ranks.calls(*calls, seed=seed)
    check_outputs(ranks, calls)
    assert ranks.ranks[1].state.block_base > 4 * ranks.schedule.num_slots
    assert ranks.ranks[0].state.block_base == 0


@emulated
@pytest.mark.parametrize(("num_ranks", "max_tokens", "topk"), [(17, 3, 2), (2, 120, 9), (3, 22, 32)])
def test_more_ranks_than_warps_and_more_packets_than_lanes(num_ranks: int, max_tokens: int, topk: int) -> None:
    problem = Problem(32, 128, 2 * num_ranks, topk, num_ranks, max_tokens, block_m=64)
    ranks = Ranks(problem, compute_ctas=1)
    counts = [max_tokens - rank % 2 for rank in range(num_ranks)]
    run_and_check(ranks, [counts], 2)


@emulated
@pytest.mark.parametrize("fill", [-1, 6, 2**31 - 1])
def test_routing_without_any_valid_slot_gives_zeros(fill: int) -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2))
    call = make_call(ranks.problem, 4, torch.Generator().manual_seed(1))
    call.topk_idx.fill_(fill)
    other = make_call(ranks.problem, 2, torch.Generator().manual_seed(2))
    ranks.calls([call, other])
    assert (call.out[:4] == 0).all()
    check_outputs(ranks, [[other]])


@emulated
def test_rows_may_be_strided_and_the_count_a_plain_number() -> None:
    ranks = Ranks(SMALL)
    call = make_call(ranks.problem, 8, torch.Generator().manual_seed(4))
    call.x = torch.cat([call.x, call.x * torch.nan], 1)[:, : SMALL.hidden]
    call.topk_weights = torch.cat([call.topk_weights, call.topk_weights * torch.nan], 1)[:, : SMALL.topk]
    dispatch, combine = ranks.communication(0, call)
    no_count = [
        replace(launch, args=[0 if arg is call.count else arg for arg in launch.args]) for launch in (dispatch, combine)
    ]
    run(no_count, ranks.fake_experts(0), seed=1, concurrent=True)
    check_outputs(ranks, [[call]])


@emulated
def test_counters_and_sequence_numbers_may_wrap() -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2))
    problem, schedule = ranks.problem, ranks.schedule
    use, generation = 2**32 - 1, 2**33 + 5
    for rank in ranks.ranks:
        state = rank.state
        state.generation, state.block_base = generation, use * schedule.num_slots
        state.combine_begun = state.combine_done = (generation << 16) % 2**32
        rank.region("arrived", torch.int64)[:] = generation * schedule.comm_ctas
        rank.region("done", torch.int64)[:] = generation * schedule.compute_ctas
        for name, each in (
            ("l1_full", 1),
            ("l1_empty", problem.num_neuron_tasks),
            ("l2_empty", problem.num_output_tasks),
        ):
            count = use * each % 2**32
            rank.region(name, torch.int32)[:] = count - 2**32 * (count >= 2**31)
        rank.region("l2_full", torch.int64)[:] = (
            2**problem.num_neuron_tasks - 1
        )  # `use` is odd: uses before it an odd number
    ranks.generation = generation
    run_and_check(ranks, [[8, 8], [8, 5], [3, 8]], seed=1)
    assert ranks.ranks[0].state.block_base > (use + 1) * schedule.num_slots


# When things go wrong

SOON = 10**6  # ns: time passes in the emulator while all threads poll


@emulated
def test_rank_that_never_comes_is_named_by_all_others() -> None:
    ranks = Ranks(replace(SMALL, num_ranks=3), timeout_ns=SOON)
    calls = [make_call(ranks.problem, 4, torch.Generator().manual_seed(rank)) for rank in range(3)]
    ranks.calls([calls[0], None, calls[2]], [calls[0], None, calls[2]])
    for index in (0, 2):
        error = ranks.ranks[index].failure
        assert (error.code, error.flag, error.rank, error.peer) == (Code.TIMEOUT, Flag.META, index, 1)
        assert (error.generation, error.expected, error.seen) == (1, 1, 0)
        state = ranks.ranks[index].state
        assert (state.poison, state.generation) == (1, 0)
        assert calls[index].out[:4].isnan().all()
    assert ranks.ranks[1].failure.code == Code.OK


@emulated
def test_rank_that_stops_after_a_call_is_named_with_the_call() -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2), timeout_ns=SOON)
    first, second = (
        [make_call(ranks.problem, 4, torch.Generator().manual_seed(i + r)) for r in range(2)] for i in (0, 2)
    )
    ranks.calls(first, [second[0], None])
    check_outputs(ranks, [first])
    error = ranks.ranks[0].failure
    assert (error.code, error.flag, error.peer) == (Code.TIMEOUT, Flag.META, 1)
    assert (error.generation, error.expected, error.seen) == (2, 2, 0)
    assert second[0].out[:4].isnan().all()


@emulated
def test_rank_whose_experts_stall_is_named() -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2), timeout_ns=SOON, num_slots=32)
    calls = [make_call(ranks.problem, 4, torch.Generator().manual_seed(rank)) for rank in range(2)]
    ranks.calls(calls, experts=lambda ranks, rank: [] if rank == 1 else ranks.fake_experts(rank))
    error = ranks.ranks[0].failure
    assert (error.code, error.flag, error.peer, error.seen) == (Code.TIMEOUT, Flag.DONE, 1, 0)
    assert error.expected == ranks.schedule.compute_ctas


@emulated
def test_full_ring_that_nobody_empties_is_reported() -> None:
    ranks = Ranks(replace(SMALL, max_tokens_per_rank=32), timeout_ns=SOON, num_slots=4)
    call = make_call(ranks.problem, 32, torch.Generator().manual_seed(1))
    call.topk_idx.fill_(2)
    ranks.calls([call], experts=lambda ranks, rank: [])
    error = ranks.ranks[0].failure
    assert (error.code, error.flag, error.peer) == (Code.TIMEOUT, Flag.L1_EMPTY, -1)
    assert (error.expected, error.seen) == (ranks.problem.num_neuron_tasks, 0)


@emulated
@pytest.mark.parametrize("count", [-1, 9, 2**31 - 1])
def test_count_beyond_the_limit_fails_on_every_rank_at_once(count: int) -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2))  # a timeout would take the emulator's own
    calls = [make_call(ranks.problem, 4, torch.Generator().manual_seed(rank)) for rank in range(2)]
    calls[1].count.fill_(count)
    ranks.calls(calls)
    own, peer = ranks.ranks[1].failure, ranks.ranks[0].failure
    assert (own.code, own.rank, own.expected) == (Code.TOO_MANY_TOKENS, 1, 8)
    assert ctypes.c_int32(own.seen).value == count
    assert (peer.code, peer.rank, peer.peer) == (Code.PEER_TOO_MANY_TOKENS, 0, 1)
    for call in calls:
        assert call.out[:4].isnan().all()


@emulated
def test_count_beyond_the_rows_of_x_is_refused() -> None:
    ranks = Ranks(SMALL)
    call = make_call(ranks.problem, 4, torch.Generator().manual_seed(1))
    call.x, call.out = call.x[:3], call.out[:3]
    ranks.calls([call])
    error = ranks.ranks[0].failure
    assert (error.code, error.expected, error.seen) == (Code.TOO_MANY_TOKENS, 3, 4)


@emulated
def test_call_over_another_one_is_refused() -> None:
    ranks = Ranks(SMALL, timeout_ns=SOON)
    ranks.ranks[0].state.claimed = 1
    call = make_call(ranks.problem, 4, torch.Generator().manual_seed(1))
    ranks.calls([call])
    assert ranks.ranks[0].failure.code == Code.OVERLAP
    assert ranks.ranks[0].state.poison == 1


@emulated
def test_call_over_one_that_still_adds_is_refused() -> None:
    """role3 has moved the state on, and a CTA of it has not read its partial results yet."""
    ranks = Ranks(SMALL, timeout_ns=SOON)
    state = ranks.ranks[0].state
    state.generation = state.claimed = 1
    state.combine_begun, state.combine_done = 1 << 16, (1 << 16) - 1
    ranks.generation = 1
    ranks.calls([make_call(ranks.problem, 4, torch.Generator().manual_seed(1))])
    assert ranks.ranks[0].failure.code == Code.OVERLAP
    assert ranks.ranks[0].state.poison == 1


@emulated
def test_poisoned_layer_sends_and_changes_nothing() -> None:
    ranks = Ranks(replace(SMALL, num_ranks=2, num_shared=1))
    ranks.ranks[0].state.poison = 1
    call = make_call(ranks.problem, 4, torch.Generator().manual_seed(1))
    before = [(rank.symmetric.clone(), rank.local.clone()) for rank in ranks.ranks]
    run(ranks.communication(0, call), concurrent=True)
    for rank, (symmetric, local) in zip(ranks.ranks, before, strict=True):
        assert torch.equal(rank.symmetric, symmetric)
        assert torch.equal(rank.local, local)
    assert call.out[:4].isnan().all()
