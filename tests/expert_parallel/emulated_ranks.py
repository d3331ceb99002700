"""Several ranks of one layer in this process: their memory, and the launches of a call for the CPU emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from emulator import Launch, load, run

from warpring.expert_parallel.arithmetic import combine, partial_dtype, publish
from warpring.expert_parallel.flags import COMBINE_THREADS, DISPATCH_THREADS, SHARED_THREADS
from warpring.expert_parallel.problem import MAX_RANKS, Problem
from warpring.expert_parallel.workspace import (
    EpError,
    EpParams,
    EpState,
    Layout,
    make_params,
    plan_layout,
    plan_schedule,
)
from warpring.runtime.jit import KernelSpec

HERE = Path(__file__).parent
#: What must be zero before the first call; all else is poisoned.
ZEROED = {"arrived", "done", "meta", "state", "plan", "l1_full", "l1_empty", "l2_full", "l2_empty"}
FAKE_THREADS = 64


def macros(problem: Problem, index: str = "int32_t") -> tuple[tuple[str, str], ...]:
    """Macros of the protocol's kernels."""
    values = {
        "HIDDEN": problem.hidden,
        "INTERMEDIATE": problem.intermediate,
        "TOPK": problem.topk,
        "EXPERTS": problem.num_experts,
        "LOCAL_EXPERTS": problem.num_local_experts,
        "NUM_SHARED": problem.num_shared,
        "BLOCK_M": problem.tokens_per_block,
        "ACTIVATION_FP8": int(problem.activation == "fp8"),
        "INDEX": index,
        "EP_PARAMS_BYTES": ctypes.sizeof(EpParams),
    }
    return tuple((f"WARPRING_{name}", str(value)) for name, value in values.items())


@dataclass
class Call:
    """One rank's inputs of one call, with room for `rows` tokens; beyond num_tokens they are poisoned.

    Attributes:
        x: BF16 [rows, hidden].
        topk_idx: [rows, topk], int32 or int64.
        topk_weights: FP32 [rows, topk].
        count: int32 [1], the number of tokens, where a kernel reads it.
        out: BF16 [rows, hidden], NaN at first.
        shared_weights: FP32 [rows, num_shared], or None for 1.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    count: torch.Tensor
    out: torch.Tensor
    shared_weights: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.count)


def make_call(problem: Problem, num_tokens: int, generator: torch.Generator, index: torch.dtype = torch.int32) -> Call:
    """Random tokens and routing, a tenth of the slots unused (-1, or no expert's number), with a NaN weight each."""
    rows, topk = problem.max_tokens_per_rank, problem.topk
    x = torch.randn(rows, problem.hidden, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    x[num_tokens:] = torch.nan
    idx = torch.randint(0, problem.num_experts, (rows, topk), generator=generator)
    unused = torch.rand(rows, topk, generator=generator) < 0.1
    idx[unused] = torch.tensor([-1, problem.num_experts, 2**31 - 1, -(2**31)])[torch.arange(int(unused.sum())) % 4]
    weights = torch.rand(rows, topk, generator=generator).masked_fill(unused, torch.nan)
    idx[num_tokens:], weights[num_tokens:] = 0, torch.nan
    shared = torch.rand(rows, problem.num_shared, generator=generator) if problem.num_shared else None
    count = torch.tensor([num_tokens], dtype=torch.int32)
    out = torch.full((rows, problem.hidden), torch.nan, dtype=torch.bfloat16)
    return Call(x.bfloat16(), idx.to(index), weights, count, out, shared)


def expected(problem: Problem, call: Call) -> torch.Tensor:
    """What the ranks give with fake_experts.cu in role2's place: bit for bit."""
    n, topk = call.num_tokens, problem.topk
    tokens = publish(problem, call.x[:n])
    terms = tokens.codes.float().unflatten(1, (problem.scales_per_token, -1, 128))
    values = (terms.sum(2) * tokens.scale[:, :, None]).flatten(1)[:, : problem.hidden]
    idx = call.topk_idx[:n].long()
    valid = torch.ones(n, problem.num_slots_per_token, dtype=torch.bool)
    valid[:, :topk] = (idx >= 0) & (idx < problem.num_experts)
    factors = torch.ones(n, problem.num_slots_per_token)
    factors[:, :topk] = idx.clamp(0, problem.num_experts - 1) + 1
    factors[:, topk:] = torch.arange(problem.num_experts + 1, problem.num_experts + 1 + problem.num_shared)
    weights = torch.ones_like(factors)
    weights[:, :topk] = call.topk_weights[:n]
    if call.shared_weights is not None:
        weights[:, topk:] = call.shared_weights[:n]
    partials = values[:, None] * weights[:, :, None] * factors[:, :, None]
    return combine(partials.to(partial_dtype(problem.activation)), valid)


@dataclass
class Rank:
    """Memory of one rank."""

    symmetric: torch.Tensor
    local: torch.Tensor
    error: torch.Tensor
    params: EpParams = field(default_factory=EpParams)
    layout: Layout | None = None

    def region(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A region, flat."""
        assert self.layout is not None
        for buffer, regions in ((self.symmetric, self.layout.symmetric), (self.local, self.layout.local)):
            for region in regions:
                if region.name == name:
                    return buffer[region.offset : region.offset + region.num_bytes].view(dtype)
        raise KeyError(name)

    @property
    def state(self) -> EpState:
        """The device state itself: assignments reach it."""
        return EpState.from_buffer(self.region("state").numpy())

    @property
    def failure(self) -> EpError:
        """The error record."""
        return EpError.from_buffer(self.error.numpy())


def aligned_bytes(num_bytes: int, value: int) -> torch.Tensor:
    """uint8 memory at a multiple of 256, as GPUs allocate it."""
    raw = torch.full((num_bytes + 256,), value, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    return raw[start : start + num_bytes]


#: (ranks, rank) -> launches that stand in role2's place, in a stream of their own.
Experts = Callable[["Ranks", int], list[Launch]]


class Ranks:
    """All ranks of a problem; `calls` runs one or several calls in a row on all of them."""

    def __init__(
        self,
        problem: Problem,
        *,
        comm_ctas: int = 2,
        compute_ctas: int = 3,
        num_slots: int | None = None,
        timeout_ns: int = 10**12,
        combine_ctas: int = 2,
    ) -> None:
        self.problem = problem
        self.schedule = plan_schedule(problem, comm_ctas, compute_ctas, num_slots)
        self.layout = plan_layout(problem, self.schedule)
        self.combine_ctas = combine_ctas
        self.generation = 0
        self.ranks = [
            Rank(
                aligned_bytes(self.layout.symmetric_bytes, 0xFF),
                aligned_bytes(self.layout.local_bytes, 0xFF),
                aligned_bytes(ctypes.sizeof(EpError), 0),
                layout=self.layout,
            )
            for _ in range(problem.num_ranks)
        ]
        for index, rank in enumerate(self.ranks):
            for name in ZEROED:
                rank.region(name).zero_()
            rank.params = make_params(
                problem,
                self.schedule,
                self.layout,
                rank=index,
                addresses=[r.symmetric.data_ptr() for r in self.ranks],
                local_address=rank.local.data_ptr(),
                error_address=rank.error.data_ptr(),
                timeout_ns=timeout_ns,
            )
            for absent in range(problem.num_ranks, MAX_RANKS):
                rank.params.peers.offset[absent] = 2**62  # faults when touched

    def kernel(self, name: str, index: str = "int32_t") -> KernelSpec:
        """The spec of one of the protocol's kernels."""
        return KernelSpec(f"{name}.cu", name, macros(self.problem, index))

    def communication(self, rank: int, call: Call, *, with_combine: bool = True) -> list[Launch]:
        """role4 (with shared experts), role1 and role3 of one call, one after the other."""
        params, rows = self.ranks[rank].params, ctypes.c_int32(call.x.shape[0])
        index = "int64_t" if call.topk_idx.dtype == torch.int64 else "int32_t"
        comm = self.schedule.comm_ctas
        x, idx = (call.x, call.x.stride(0)), (call.topk_idx, call.topk_idx.stride(0))
        launches: list[Launch] = []
        if self.problem.num_shared:
            shared = call.shared_weights
            weights = (0, 0) if shared is None else (shared, shared.stride(0))
            args = (params, *x, call.count, rows, *weights)
            launches.append(
                Launch(load(self.kernel("ep_shared")), (comm, 1, 1), SHARED_THREADS, args, overlaps_previous=False)
            )
        args = (params, *x, *idx, call.topk_weights, call.topk_weights.stride(0), call.count, rows)
        dispatch = load(self.kernel("ep_dispatch", index))
        overlaps = self.problem.num_shared > 0
        launches.append(Launch(dispatch, (comm, 1, 1), DISPATCH_THREADS, args, overlaps_previous=overlaps))
        if with_combine:
            args = (params, call.out, call.out.stride(0), *idx, call.count, rows)
            kernel = load(self.kernel("ep_combine", index))
            grid = (self.combine_ctas, 1, 1)
            launches.append(Launch(kernel, grid, COMBINE_THREADS, args, overlaps_previous=False))
        return launches

    def fake_experts(self, rank: int) -> list[Launch]:
        """fake_experts.cu in role2's place."""
        kernel = load(KernelSpec("fake_experts.cu", "fake_experts", macros(self.problem)), HERE)
        args = (self.ranks[rank].params,)
        return [Launch(kernel, (self.schedule.compute_ctas, 1, 1), FAKE_THREADS, args, overlaps_previous=False)]

    def after_generation(self, rank: int, generation: int) -> Launch:
        """Holds a stream until the rank has completed that many calls."""
        kernel = load(KernelSpec("fake_experts.cu", "after_generation", macros(self.problem)), HERE)
        args = (self.ranks[rank].params, generation)
        return Launch(kernel, (1, 1, 1), 1, args, overlaps_previous=False)

    def calls(
        self,
        *calls: Sequence[Call | None],
        seed: int = 0,
        experts: Experts | None = None,
        timeout_s: float = 20,
    ) -> None:
        """Run calls in a row, each a Call a rank (None: that rank never comes), as fast as the protocol lets them."""
        streams: list[list[Launch]] = []
        for rank in range(self.problem.num_ranks):
            communication: list[Launch] = []
            compute: list[Launch] = []
            for number, call in enumerate(calls):
                if (own := call[rank]) is None:
                    break
                communication += self.communication(rank, own)
                compute.append(self.after_generation(rank, self.generation + number))
                compute += self.fake_experts(rank) if experts is None else experts(self, rank)
            streams += [communication, compute]
        run(*(stream for stream in streams if stream), seed=seed, concurrent=True, timeout_s=timeout_s)
        self.generation += len(calls)
