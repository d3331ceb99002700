"""The whole layer on emulated GPUs: the kernels' own sources, with the arguments that the host gives them.

Replays with other tokens, routings and counts, against the same arithmetic done rank-locally in torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_ranks import HERE, Call, Ranks, macros, make_call
from emulator import EmulationError, Launch, load, run, unusable_reason
from moe_inputs import make_inputs

from warpring import ArgumentError, Experts, gpt_oss_swiglu, moe_exact
from warpring.errors import PeerTimeoutError, PoisonedError, WarpringError, WorkspaceBusyError
from warpring.expert_parallel import call as host
from warpring.expert_parallel import roles
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.packing import pack_ep
from warpring.expert_parallel.problem import Problem, local_experts
from warpring.expert_parallel.roles import Roles, failure
from warpring.expert_parallel.workspace import plan_schedule
from warpring.formats import ceil_div
from warpring.runtime import by_value
from warpring.runtime.jit import KERNEL_DIR, KernelSpec

EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
LEAST_COSINE = 0.9999997
BASE = Problem(128, 64, 4, 2, 2, 5, format="fp8_block", block_m=8)
PROBLEMS = {
    "two ranks, fp8": BASE,
    "three ranks, mxfp4, shared": replace(BASE, format="mxfp4", num_experts=6, num_ranks=3, num_shared=1, hidden=160),
    "one rank, mxfp4 in bf16, biases": replace(
        BASE, format="mxfp4", activation="bf16", num_ranks=1, has_bias=True, gate=gpt_oss_swiglu(), intermediate=96
    ),
}


@dataclass(frozen=True)
class Weights:
    """All routed experts, and the shared ones."""

    routed: Experts
    shared: Experts | None


def weights_of(problem: Problem) -> Weights:
    def some(count: int, format: str, bias: bool, seed: int) -> Experts:
        sizes = (problem.hidden, problem.intermediate, count, 1)
        return make_inputs(1, *sizes, format=format, activation=problem.gate, bias=bias, seed=seed).experts

    shared = some(problem.num_shared, problem.shared_format, False, 2) if problem.num_shared else None
    return Weights(some(problem.num_experts, problem.format, problem.has_bias, 1), shared)


class HostRanks(Ranks):
    """Ranks whose launches are made by the host's own code."""

    def __init__(self, problem: Problem, weights: Weights, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(problem, **options)
        monkeypatch.setattr(roles, "load", lambda spec, device_index: spec)
        self.packed = [
            pack_ep(local_experts(weights.routed, r, problem.num_ranks), weights.shared)
            for r in range(problem.num_ranks)
        ]
        per_sm = ctas_per_sm(problem)
        self.roles = [Roles(problem, rank.params, 0, self.combine_ctas, per_sm) for rank in self.ranks]

    def communication(self, rank: int, call: Call, *, with_combine: bool = True) -> list[Launch]:
        made = host.Call(call.x, call.topk_idx, call.topk_weights, call.count, len(call.x), call.shared_weights)
        ours = self.roles[rank]
        launches = (ours.shared(made), ours.dispatch(made), ours.combine(made, call.out))
        return [emulated(launch) for launch in launches if launch is not None]

    def after_generation(self, rank: int, generation: int) -> Launch:
        # Its source holds another kernel too, which asks for a narrow layer; this one reads the state alone.
        narrow = replace(self.problem, hidden=32, intermediate=128)
        kernel = load(KernelSpec("fake_experts.cu", "after_generation", macros(narrow)), HERE)
        return Launch(kernel, (1, 1, 1), 1, (self.ranks[rank].params, generation), overlaps_previous=False)

    def role2(self, ranks: Ranks, rank: int) -> list[Launch]:
        return [emulated(self.roles[rank].experts(self.packed[rank].arguments()))]


def emulated(launch: by_value.Launch) -> Launch:
    """A launch for the emulator in place of the driver."""
    spec: KernelSpec = launch.kernel
    grid = (launch.grid, 1, 1)
    return Launch(load(spec), grid, launch.block, launch.arguments.values, overlaps_previous=launch.programmatic)


def least_cosine(y: torch.Tensor, other: torch.Tensor) -> float:
    """Least cosine of a row, of any size; 1 for rows that are zero in both."""
    y, other = y.double(), other.double()
    zero = (y == 0).all(1) & (other == 0).all(1)
    cosine = (y * other).sum(1) / (y.norm(dim=1) * other.norm(dim=1))
    return torch.where(zero, 1.0, cosine).min().item() if len(y) else 1.0


@EMULATED
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("seed", [1, 3])
def test_replays_give_what_the_arithmetic_gives(problem: Problem, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch)
    generator = torch.Generator().manual_seed(seed)
    most = problem.max_tokens_per_rank
    counts = [[(most, 1, 0)[(rank + number) % 3] for rank in range(problem.num_ranks)] for number in range(3)]
    index = torch.int32 if problem is BASE else torch.int64
    calls = [[make_call(problem, count, generator, index) for count in row] for row in counts]
    ranks.calls(*calls, seed=seed, experts=ranks.role2, timeout_s=120)
    for row in calls:
        for call in row:
            check_results(problem, weights, call)
    assert all(rank.failure.code == 0 for rank in ranks.ranks)
    assert [rank.state.generation for rank in ranks.ranks] == [3] * problem.num_ranks


def check_results(problem: Problem, weights: Weights, call: Call) -> None:
    n = call.num_tokens
    shared_weights = None if call.shared_weights is None else call.shared_weights[:n]
    inputs = (call.x[:n], weights.routed, call.topk_idx[:n].long(), call.topk_weights[:n])
    expected = run_layer(problem, *inputs, weights.shared, shared_weights, "tensor_core")
    assert least_cosine(call.out[:n], expected) >= LEAST_COSINE
    assert call.out[n:].isnan().all()


@EMULATED
def test_every_pair_on_one_expert_goes_round_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(BASE, max_tokens_per_rank=24)
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch, num_slots=6)
    generator = torch.Generator().manual_seed(3)
    call = [make_call(problem, 24, generator) for _ in range(2)]
    for one in call:
        one.topk_idx[:] = 3
        one.topk_weights.nan_to_num_(0.5)
    ranks.calls(call, seed=4, experts=ranks.role2, timeout_s=120)
    for one in call:
        check_results(problem, weights, one)
        exact = moe_exact(one.x, weights.routed, one.topk_idx, one.topk_weights)
        assert least_cosine(one.out.flatten()[None], exact.flatten()[None]) > 0.997


@EMULATED
@pytest.mark.parametrize("seed", [6, 25, 27, 29, 32])
def test_rings_of_the_fewest_slots_go_round_with_any_grid(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots and CTAs far apart: uses of a slot that look alike, entries of the queue that are used again."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=g))]

    sizes = {"format": pick("fp8_block", "mxfp4"), "intermediate": pick(64, 128, 192), "hidden": pick(128, 256)}
    problem = replace(BASE, max_tokens_per_rank=24, num_shared=pick(0, 1), **sizes)
    ctas = pick(1, 2, 3, 4, 5, 6)
    least = ceil_div(ctas, problem.num_neuron_tasks) + 3
    ranks = HostRanks(
        problem, weights := weights_of(problem), monkeypatch,
        num_slots=least + pick(0, 1), comm_ctas=pick(1, 2, 3, 4), compute_ctas=ctas,
    )  # fmt: skip
    calls: list[list[Call]] = []
    for _ in range(3):
        calls.append([make_call(problem, pick(*range(25)), g) for _ in range(2)])
        if pick(False, True):
            for call in calls[-1]:
                call.topk_idx[:] = 3
                call.topk_weights.nan_to_num_(0.5)
    ranks.calls(*calls, seed=seed, experts=ranks.role2, timeout_s=120)
    for call in (call for row in calls for call in row):
        check_results(problem, weights, call)
    tasks = problem.num_neuron_tasks + problem.num_output_tasks
    for rank in ranks.ranks:
        assert rank.failure.code == 0
        assert rank.state.tickets == rank.state.block_base * tasks + 3 * ctas


@EMULATED
def test_roles_in_sequence_need_no_other_to_run_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(BASE)
    slots = plan_schedule(BASE, 2, 3, sequence=True).num_slots
    ranks = HostRanks(BASE, weights, monkeypatch, num_slots=slots)
    generator = torch.Generator().manual_seed(7)
    calls = [[make_call(BASE, count, generator) for count in row] for row in ((5, 2), (0, 5), (4, 4))]
    streams: list[list[Launch]] = [[], []]
    for row in calls:
        for rank, call in enumerate(row):
            *before, combine = ranks.communication(rank, call)
            streams[rank] += [*before, *ranks.role2(ranks, rank), combine]
    run(*streams, seed=2, concurrent=True, timeout_s=120)
    for row in calls:
        for call in row:
            check_results(BASE, weights, call)


# What goes wrong


def failures(ranks: Ranks) -> list[Exception | None]:
    """What the host would raise on each rank."""
    return [failure(rank.failure, 1.0) for rank in ranks.ranks]


@EMULATED
def test_a_rank_that_never_calls_is_named_and_the_output_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = HostRanks(BASE, weights_of(BASE), monkeypatch, timeout_ns=10**9)
    generator = torch.Generator().manual_seed(8)
    good = [make_call(BASE, 4, generator) for _ in range(2)]
    call = make_call(BASE, 4, generator)
    ranks.calls(good, [call, None], seed=1, experts=ranks.role2, timeout_s=120)
    error, other = failures(ranks)
    assert isinstance(error, PeerTimeoutError)
    assert (error.rank, error.peer, error.flag, error.generation) == (0, 1, "meta", 2)
    assert other is None
    assert call.out[:4].isnan().all()


@EMULATED
def test_a_count_beyond_the_limit_ends_the_call_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = HostRanks(BASE, weights_of(BASE), monkeypatch, timeout_ns=10**9)
    generator = torch.Generator().manual_seed(9)
    calls = [make_call(BASE, 4, generator) for _ in range(2)]
    calls[1].count.fill_(BASE.max_tokens_per_rank + 1)
    ranks.calls(calls, seed=1, experts=ranks.role2, timeout_s=120)
    peer, own = failures(ranks)
    assert isinstance(own, ArgumentError)
    assert "num_tokens must be 0 to 5; the device held 6" in str(own)
    assert isinstance(peer, PoisonedError)
    assert "rank 1 had a num_tokens beyond its limit" in str(peer)
    assert calls[0].out[:4].isnan().all()


def chained(ranks: HostRanks, rank: int, call: Call, *, few: bool) -> list[Launch]:
    """A call as the host chains it on one stream."""
    made = host.Call(call.x, call.topk_idx, call.topk_weights, call.count, len(call.x), call.shared_weights)
    ours = ranks.roles[rank]
    launches = (
        ours.shared(made, programmatic=True),
        ours.dispatch(made, programmatic=True),
        ours.experts(ranks.packed[rank].arguments(), programmatic=True),
        ours.combine(made, call.out, early=few, programmatic=few),
    )
    return [emulated(launch) for launch in launches if launch is not None]


@EMULATED
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_chain_of_launches_goes_round_the_smallest_ring(
    few: bool, num_shared: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """role1 waits for slots while CTAs of role2 find the list at its end: these must not wait for role1 before they
    have published what they did."""
    problem = replace(BASE, max_tokens_per_rank=24, num_shared=num_shared)
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch, num_slots=6, compute_ctas=3)
    generator = torch.Generator().manual_seed(seed)
    calls = [[make_call(problem, count, generator) for count in row] for row in ((24, 3), (24, 24), (0, 24))]
    for call in calls[1]:
        call.topk_idx[:] = 3
        call.topk_weights.nan_to_num_(0.5)
    streams: list[list[Launch]] = [[], []]
    for row in calls:
        for rank, call in enumerate(row):
            streams[rank] += chained(ranks, rank, call, few=few)
    run(*streams, seed=seed, concurrent=True, timeout_s=60)
    for call in (call for row in calls for call in row):
        check_results(problem, weights, call)
    assert all(rank.failure.code == 0 for rank in ranks.ranks)


@dataclass(frozen=True)
class Change:
    """A kernel whose source has `new` where the project's has `old`."""

    entry: str
    old: str
    new: str = ""

    def write(self, folder: Path) -> None:
        changed = folder / f"{self.entry}.cu"
        text = (changed if changed.exists() else KERNEL_DIR / changed.name).read_text()
        assert text.count(self.old) == 1
        changed.write_text(text.replace(self.old, self.new))


# A CTA of role1 that all others overtake.
_SLOW = (
    "for (int i = 0; blockIdx.x == gridDim.x - 1 && i < 1500; ++i) ld_relaxed_gpu_u32(&params.gmem_state->poison);\n"
)
_CLAIM, _START = "claim(params, sync);\n\n", "const EpSync sync = ep_sync"
SLOW_CLAIM = Change("ep_dispatch", _CLAIM, f"{_SLOW}{_CLAIM}")
SLOW_START = Change("ep_dispatch", _START, f"{_SLOW}{_START}")
# No block anywhere: nobody waits for role1's last CTA. And more blocks, of one expert and of shared ones, than slots.
NOTHING, MUCH = (8, -1), (56, 3)


def run_chain(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load_of_call: tuple[int, int], changes: list[Change]
) -> None:
    """Calls in chains round the smallest ring, with kernels that are changed; raises what goes wrong."""
    tokens, expert = load_of_call
    problem = replace(BASE, max_tokens_per_rank=tokens, num_shared=int(expert >= 0))
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch, num_slots=6, compute_ctas=3)
    for change in changes:
        change.write(folder)
    generator = torch.Generator().manual_seed(1)
    calls = [[make_call(problem, tokens, generator) for _ in range(2)] for _ in range(2)]
    streams: list[list[Launch]] = [[], []]
    for rank, call in ((rank, call) for row in calls for rank, call in enumerate(row)):
        call.topk_idx[:] = expert
        call.topk_weights.nan_to_num_(0.5)
        for launch in chained(ranks, rank, call, few=True):
            spec = launch.kernel.spec
            changed = (folder / spec.source).exists()
            streams[rank].append(replace(launch, kernel=load(spec, folder)) if changed else launch)
    run(*streams, seed=2, concurrent=True, timeout_s=60)
    for error in failures(ranks):
        if error is not None:
            raise error
    assert all((rank.state.generation, rank.state.claimed) == (2, 2) for rank in ranks.ranks)
    assert all((rank.state.combine_begun, rank.state.combine_done) == (2 << 16, 2 << 16) for rank in ranks.ranks)
    for call in (call for row in calls for call in row):
        check_results(problem, weights, call)


@EMULATED
@pytest.mark.parametrize("load_of_call", [NOTHING, MUCH], ids=["nothing", "much"])
@pytest.mark.parametrize("slow", [SLOW_CLAIM, SLOW_START], ids=["claim", "start"])
def test_a_chain_ends_no_call_before_the_last_cta_of_role1(
    slow: Change, load_of_call: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody waits for one without a block: it may come to read the state and claim the workspace behind `done`."""
    run_chain(tmp_path, monkeypatch, load_of_call, [slow])


# Of role3, before its loads of the state: a CTA, or a warp whose CTA has said that it has read them.
_READ = "    const uint64_t generation = params.gmem_state->generation + 1;\n"
SLOW_CTA = Change("ep_combine", _READ, _SLOW + _READ)
SLOW_WARP = Change("ep_combine", _READ, _SLOW.replace("- 1 &&", "- 1 && threadIdx.x < 32 &&") + _READ)


@EMULATED
@pytest.mark.parametrize("slow", [SLOW_CTA, SLOW_WARP], ids=["CTA", "warp"])
def test_role3_moves_the_state_on_when_all_its_warps_have_read_it(
    slow: Change, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_chain(tmp_path, monkeypatch, NOTHING, [slow])


def overwrite(target: torch.Tensor, value: int, *, programmatic: bool = False) -> Launch:
    """A kernel of the user's, behind a call or between two; it waits for nothing itself."""
    kernel = load(KernelSpec("overwrite.cu", "overwrite"), HERE)
    return Launch(kernel, (1, 1, 1), 1, (target, ctypes.c_int32(value)), overlaps_previous=programmatic)


@EMULATED
def test_a_chain_ends_when_role4_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody waits for a CTA of role4 without a block; it reads the count, which whoever comes next may overwrite."""
    problem = replace(BASE, num_ranks=1, num_experts=2, num_shared=1, max_tokens_per_rank=48)
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch, num_slots=64)
    begins = "    const uint64_t generation = "
    Change("ep_shared", begins, _SLOW + begins).write(tmp_path)
    generator = torch.Generator().manual_seed(1)
    calls = [make_call(problem, count, generator) for count in (8, 48)]
    calls[0].count = calls[1].count
    calls[0].count.fill_(8)
    stream: list[Launch] = []
    for call in calls:
        for launch in chained(ranks, 0, call, few=True):
            spec = launch.kernel.spec
            changed = (tmp_path / spec.source).exists()
            stream.append(replace(launch, kernel=load(spec, tmp_path)) if changed else launch)
        stream.append(overwrite(call.count, 48))
    run(stream, seed=2, concurrent=True, timeout_s=60)
    assert failures(ranks) == [None]
    check_results(problem, weights, calls[1])
    calls[0].count = torch.tensor([8], dtype=torch.int32)
    check_results(problem, weights, calls[0])


# Of role3, before it reads partial results: a CTA, or a warp of each CTA.
_SUMS = "    while (unit < num_units) {\n"
LATE_CTA = Change("ep_combine", _SUMS, _SLOW.replace("blockIdx.x == gridDim.x - 1", "blockIdx.x == 1") + _SUMS)
LATE_WARP = Change("ep_combine", _SUMS, _SLOW.replace("blockIdx.x == gridDim.x - 1", "threadIdx.x / 32 == 1") + _SUMS)


@EMULATED
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [LATE_CTA, LATE_WARP], ids=["CTA", "warp"])
def test_a_call_that_begins_when_the_state_has_moved_on_is_refused_while_role3_reads(
    late: Change, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody may order calls like this one. Without an error both have given what they should."""
    problem = replace(BASE, num_experts=2, num_ranks=1, max_tokens_per_rank=48)
    weights = weights_of(problem)
    ranks = HostRanks(problem, weights, monkeypatch, num_slots=64, comm_ctas=3, combine_ctas=4, timeout_ns=10**8)
    late.write(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    calls = [make_call(problem, 48, generator) for _ in range(2)]
    streams: list[list[Launch]] = [[], [ranks.after_generation(0, 1)]]
    for stream, call in zip(streams, calls, strict=True):
        for launch in chained(ranks, 0, call, few=True):
            spec = launch.kernel.spec
            changed = (tmp_path / spec.source).exists()
            stream.append(replace(launch, kernel=load(spec, tmp_path)) if changed else launch)
    run(*streams, seed=seed, concurrent=True, timeout_s=60)
    (error,) = failures(ranks)
    assert error is None or isinstance(error, WorkspaceBusyError)
    if error is None:
        for call in calls:
            check_results(problem, weights, call)


@EMULATED
@pytest.mark.parametrize(
    ("load_of_call", "changes"),
    [
        (NOTHING, [SLOW_CLAIM, Change("ep_combine", "    pdl_wait();\n    if (threadIdx", "    if (threadIdx")]),
        (NOTHING, [SLOW_START, Change("ep_combine", "    pdl_wait();\n    if (threadIdx", "    if (threadIdx")]),
        (NOTHING, [SLOW_CLAIM, Change("ep_experts", "            pdl_wait();\n")]),
        (MUCH, [Change("ep_experts", "3 * kLanes) publish_tasks", "3 * kLanes) pdl_wait(), publish_tasks")]),
        (NOTHING, [Change("ep_dispatch", "    if constexpr (kNumShared == 0) pdl_wait();\n")]),
        (MUCH, [Change("ep_shared", "    pdl_wait();")]),
        (MUCH, [Change("ep_dispatch", "pdl_launch_dependents();")]),
        (MUCH, [Change("ep_shared", "pdl_launch_dependents();")]),
    ],
    ids=[
        "role3 moves the state on, a claim comes later",
        "role3 moves the state on, a CTA reads it later",
        "role2 ends before role1",
        "role2 waits before it publishes",
        "role1 reads before the last call has ended",
        "role4 reads before the last call has ended",
        "role1 lets role2 start at its end",
        "role4 lets role1 start at its end",
    ],
)
def test_a_chain_needs_each_of_its_waits(
    load_of_call: tuple[int, int], changes: list[Change], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises((WarpringError, EmulationError, AssertionError)):
        run_chain(tmp_path, monkeypatch, load_of_call, changes)
