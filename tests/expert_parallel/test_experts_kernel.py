"""role2 alone, emulated: a feeder brings blocks; partial results must be the bits that experts_oracle.py computes."""

from __future__ import annotations

import ctypes
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from emulator import Launch, load, run, unusable_reason
from experts_oracle import expert_block

from warpring import SILU, Activation, Experts, gpt_oss_swiglu
from warpring.expert_parallel.arithmetic import Published, partial_dtype, publish
from warpring.expert_parallel.experts_kernel import EXPERTS_THREADS, ctas_per_sm, experts_spec
from warpring.expert_parallel.flags import Code, Flag
from warpring.expert_parallel.packing import pack_ep
from warpring.expert_parallel.problem import BLOCK_SIZES, ActivationForm, Problem
from warpring.expert_parallel.workspace import (
    EpState,
    Schedule,
    make_params,
    pinned_error,
    plan_layout,
    read_error,
)
from warpring.formats import ceil_div
from warpring.runtime.jit import KERNEL_DIR, KernelSpec, compile_kernel
from warpring.runtime.launch import int32

EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
TIMEOUT_NS = 2_000_000_000
POISON = 0xFF


@dataclass
class Block:
    """One token block: the expert, its tokens and where their partial results go."""

    expert: int
    tokens: Published
    weights: torch.Tensor
    pairs: list[tuple[int, int, int]]  # owner, token, slot


class Role2:
    """One rank's memory, a peer's region, and role2 run on them."""

    def __init__(
        self, problem: Problem, experts: Experts, compute_ctas: int, shared: Experts | None = None, per_sm: int = 1
    ) -> None:
        self.problem, self.experts, self.shared, self.per_sm = problem, experts, shared, per_sm
        lag = ceil_div(compute_ctas, problem.num_neuron_tasks) + 1
        self.schedule = Schedule(
            1, compute_ctas, lag, num_slots=lag + 2
        )  # the fewest slots, so that all are used again
        self.layout = plan_layout(problem, self.schedule)
        self.regions = [self._buffer(self.layout.symmetric_bytes) for _ in range(problem.num_ranks)]
        for region in self.regions:
            region[: self.layout.offset("partials")] = 0
        self.local = self._buffer(self.layout.local_bytes)
        for name in ("state", "plan", "l1_full", "l1_empty", "l2_full", "l2_empty"):
            part = next(r for r in self.layout.local if r.name == name)
            self.local[part.offset : part.offset + part.num_bytes] = 0
        self.error = pinned_error()
        self.packed = pack_ep(experts, shared)
        self.blocks_run = self.calls = 0

    @staticmethod
    def _buffer(num_bytes: int) -> torch.Tensor:
        whole = torch.full((num_bytes + 256,), POISON, dtype=torch.uint8)
        start = -whole.data_ptr() % 256
        return whole[start : start + num_bytes]

    def counters(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        part = next(r for r in self.layout.local if r.name == name)
        return self.local[part.offset : part.offset + part.num_bytes].view(dtype)[: self.schedule.num_slots]

    def partials(self, rank: int) -> torch.Tensor:
        problem, part = self.problem, next(r for r in self.layout.symmetric if r.name == "partials")
        shape = (problem.max_tokens_per_rank, problem.num_slots_per_token, problem.hidden)
        raw = self.regions[rank][part.offset : part.offset + part.num_bytes]
        return raw.view(partial_dtype(problem.activation)).view(shape)

    def run(
        self,
        blocks: Sequence[Block],
        seed: int,
        plan_first: bool = True,
        fed: int | None = None,
        planned: bool = True,
        ctas: int | None = None,
    ) -> None:
        """One call on rank 0; only the first `fed` blocks come, no plan without `planned`; `ctas` CTAs run."""
        problem = self.problem
        params = make_params(
            problem,
            self.schedule,
            self.layout,
            rank=0,
            addresses=[region.data_ptr() for region in self.regions],
            local_address=self.local.data_ptr(),
            error_address=self.error.data_ptr(),
            timeout_ns=TIMEOUT_NS,
        )
        self.local[:16].view(torch.int64)[:] = torch.tensor([self.calls, self.blocks_run])
        spec = experts_spec(problem, self.per_sm)
        plan = torch.tensor([[b.expert, len(b.pairs)] for b in blocks], dtype=torch.int32).reshape(-1, 2)
        infos, images, scales = (torch.stack(t) if t else torch.zeros(0) for t in self._prepare(blocks))
        feeder = load(KernelSpec("feed_ring.cu", "feed_ring", spec.macros), Path(__file__).parent)
        num_fed = len(blocks) if fed is None else fed
        feed = (plan, infos, images, scales, int32(len(blocks)), int32(num_fed), int32(plan_first))
        grid = self.schedule.compute_ctas if ctas is None else ctas
        streams = [[Launch(load(spec), (grid, 1, 1), EXPERTS_THREADS, (params, self.packed.arguments()))]]
        if planned:
            streams.append([Launch(feeder, (1, 1, 1), 64, (params, *feed))])
        run(*streams, seed=seed, concurrent=True)
        self.calls += 1
        self.blocks_run += len(blocks)

    def _prepare(self, blocks: Sequence[Block]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        problem, size = self.problem, self.problem.tokens_per_block
        slots = problem.num_slots_per_token
        infos: list[torch.Tensor] = []
        images: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for block in blocks:
            count = len(block.pairs)
            width = next(w for w in (8, 16, 32, 64) if w >= count)
            info = torch.full((4 + 2 * size,), -1, dtype=torch.int32)
            info[:2] = torch.tensor([block.expert, count])
            ids = [(owner * problem.max_tokens_per_rank + token) * slots + slot for owner, token, slot in block.pairs]
            info[4 : 4 + count] = torch.tensor(ids, dtype=torch.int32)
            info[4 + size : 4 + size + count] = block.weights.view(torch.int32)
            infos.append(info)
            codes = torch.full((width, problem.hidden_padded * problem.activation_bytes), POISON, dtype=torch.uint8)
            codes[:count] = block.tokens.codes.contiguous().view(torch.uint8)
            image = codes.view(width // 8, 8, -1, 8, 16).permute(2, 3, 0, 1, 4).flatten()
            whole = torch.full((size * codes.shape[1],), POISON, dtype=torch.uint8)
            whole[: image.numel()] = image
            images.append(whole)
            scale = torch.full((problem.scales_per_token, size), float("nan"))
            scale[:, :count] = block.tokens.scale.T
            scales.append(scale)
        return infos, images, scales

    def expected(self, block: Block) -> torch.Tensor:
        local = self.problem.num_local_experts
        if block.expert >= local:
            assert self.shared is not None
            return expert_block(self.problem, self.shared, block.expert - local, block.tokens, block.weights)
        return expert_block(self.problem, self.experts, block.expert, block.tokens, block.weights)


def make_experts(problem: Problem, num_experts: int, format: str, g: torch.Generator) -> Experts:
    hidden, intermediate = problem.hidden, problem.intermediate
    # Rows and blocks of very different size, so that every scale matters.
    spread = 14 if format == "mxfp4" else 4
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=g) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, intermediate, generator=g) / intermediate**0.5
    for w in (w13, w2):
        w *= torch.exp2(
            torch.randint(-spread, spread + 1, (*w.shape[:2], w.shape[2] // 32), generator=g)
        ).repeat_interleave(32, -1)
    biases = {}
    if problem.has_bias:
        biases = {
            "w13_bias": torch.randn(num_experts, 2 * intermediate, generator=g),
            "w2_bias": torch.randn(num_experts, hidden, generator=g),
        }
    return Experts.from_dense(w13, w2, format=format, activation=problem.gate, **biases)


def make_blocks(problem: Problem, counts: Sequence[tuple[int, int]], g: torch.Generator) -> list[Block]:
    """Blocks of (expert, tokens), with tokens of very different size and pairs all over both ranks."""
    places = [
        (owner, token, slot)
        for owner in range(problem.num_ranks)
        for token in range(problem.max_tokens_per_rank)
        for slot in range(problem.num_slots_per_token)
    ]
    order = iter(torch.randperm(len(places), generator=g).tolist())
    blocks: list[Block] = []
    for expert, count in counts:
        x = torch.randn(count, problem.hidden, generator=g)
        x *= torch.exp2(torch.randint(-20, 20, (count, 1), generator=g))
        x[torch.rand(count, generator=g) < 0.1] = 0
        weights = torch.rand(count, generator=g)
        blocks.append(
            Block(expert, publish(problem, x.bfloat16()), weights, [places[next(order)] for _ in range(count)])
        )
    return blocks


def check(role2: Role2, calls: Sequence[Sequence[Block]]) -> None:
    """Every partial result in its place, nothing else touched, all signals given."""
    problem, slots = role2.problem, role2.schedule.num_slots
    want = [torch.full_like(role2.partials(rank).view(torch.uint8), POISON) for rank in range(problem.num_ranks)]
    for block in (block for blocks in calls for block in blocks):
        for row, (owner, token, slot) in zip(role2.expected(block), block.pairs, strict=True):
            want[owner][token, slot] = row.contiguous().view(torch.uint8)
    for rank in range(problem.num_ranks):
        got = role2.partials(rank)
        wanted = want[rank].view(got.dtype)
        differ = (got.view(torch.uint8) != want[rank]).any(-1).nonzero()
        assert torch.equal(got.view(torch.uint8), want[rank]), (
            rank,
            differ[:5],
            got[tuple(differ[0])],
            wanted[tuple(differ[0])],
        )
        done = role2.regions[rank][role2.layout.offset("done") :][: 8 * 72].view(torch.int64)
        assert done.tolist() == [role2.schedule.compute_ctas * len(calls)] + [0] * 71
    total = sum(map(len, calls))
    uses = [len(range(slot, total, slots)) for slot in range(slots)]
    assert role2.counters("l1_empty", torch.int32).tolist() == [problem.num_neuron_tasks * use for use in uses]
    assert role2.counters("l2_empty", torch.int32).tolist() == [problem.num_output_tasks * use for use in uses]
    mask = 2**problem.num_neuron_tasks - 1
    assert role2.counters("l2_full", torch.int64).tolist() == [mask * (use % 2) for use in uses]
    assert read_error(role2.error).code == 0


def small_problem(seed: int, **fields: object) -> tuple[Problem, torch.Generator]:
    g = torch.Generator().manual_seed(seed)

    def pick(values: Sequence[int]) -> int:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    sizes = {"hidden": pick((128, 160, 256, 320)), "intermediate": pick((64, 96, 128, 192))}
    return Problem(**{**sizes, "num_experts": 6, "topk": 2, "num_ranks": 2, "max_tokens_per_rank": 256, **fields}), g


def random_counts(block_m: int, num_blocks: int, g: torch.Generator) -> list[tuple[int, int]]:
    experts = torch.randint(0, 3, (num_blocks,), generator=g).sort().values.tolist()
    counts = torch.randint(1, block_m + 1, (num_blocks,), generator=g).tolist()
    return list(zip(experts, counts, strict=True))


CASES = [
    ("fp8_block", "fp8", 8, SILU, False),
    ("fp8_block", "fp8", 64, gpt_oss_swiglu(), True),
    ("fp8_block", "bf16", 16, gpt_oss_swiglu(), True),
    ("fp8_block", "bf16", 64, SILU, False),
    ("fp8_channel", "fp8", 16, SILU, False),
    ("fp8_channel", "bf16", 32, SILU, True),
    ("mxfp4", "fp8", 8, gpt_oss_swiglu(), True),
    ("mxfp4", "fp8", 32, SILU, False),
    ("mxfp4", "bf16", 16, SILU, False),
    ("mxfp4", "bf16", 64, gpt_oss_swiglu(), True),
]


@EMULATED
@pytest.mark.parametrize(("format", "activation", "block_m", "gate", "has_bias"), CASES)
def test_partial_results_are_the_oracles_bit_for_bit(
    format: str, activation: ActivationForm, block_m: int, gate: Activation, has_bias: bool
) -> None:
    seed = CASES.index((format, activation, block_m, gate, has_bias))
    problem, g = small_problem(
        seed, format=format, activation=activation, block_m=block_m, gate=gate, has_bias=has_bias
    )
    role2 = Role2(problem, make_experts(problem, 3, format, g), compute_ctas=2 + seed % 3)
    blocks = make_blocks(problem, random_counts(block_m, 5, g), g)
    role2.run(blocks, seed=seed, plan_first=bool(seed % 2))
    check(role2, [blocks])


@EMULATED
@pytest.mark.parametrize("block_m", [8, 16, 32])
def test_two_ctas_a_multiprocessor_give_the_same_bits(block_m: int) -> None:
    problem, g = small_problem(15 + block_m, format="mxfp4", block_m=block_m, num_shared=1, shared_format="mxfp4")
    assert ctas_per_sm(problem) == 2
    routed, shared = make_experts(problem, 3, "mxfp4", g), make_experts(problem, 1, "mxfp4", g)
    role2 = Role2(problem, routed, 4, shared, per_sm=2)
    blocks = make_blocks(problem, [(3, block_m - 3), *random_counts(block_m, 4, g), (2, block_m)], g)
    role2.run(blocks, seed=block_m)
    check(role2, [blocks])


@EMULATED
@pytest.mark.parametrize(("format", "activation"), [("mxfp4", "fp8"), ("fp8_block", "bf16")])
def test_slots_are_used_again_within_a_call_and_over_calls(format: str, activation: ActivationForm) -> None:
    problem, g = small_problem(
        20, hidden=128, intermediate=64, format=format, activation=activation, block_m=8, max_tokens_per_rank=64
    )
    role2 = Role2(problem, make_experts(problem, 3, format, g), compute_ctas=2)
    sizes = (3 * role2.schedule.num_slots + 1, 0, 2)
    everything = make_blocks(problem, random_counts(8, sum(sizes), g), g)
    calls: list[list[Block]] = []
    for seed, size in enumerate(sizes):
        calls.append([everything.pop() for _ in range(size)])
        role2.run(calls[-1], seed=seed, plan_first=seed == 1)
    check(role2, calls)


@EMULATED
def test_bits_depend_neither_on_the_grid_nor_on_the_schedule_nor_on_the_blocks() -> None:
    """The same pairs in blocks of up to 8, 16 or 64 tokens, on 1 to 4 CTAs."""
    results: list[torch.Tensor] = []
    for seed, (block_m, ctas) in enumerate([(8, 1), (16, 4), (64, 3)]):
        problem, g = small_problem(30, hidden=160, intermediate=96, format="mxfp4", block_m=block_m)
        experts = make_experts(problem, 3, "mxfp4", g)
        (whole,) = make_blocks(problem, [(1, 37)], g)
        parts = [slice(at, min(at + block_m, 37)) for at in range(0, 37, block_m)]
        blocks = [Block(1, whole.tokens[part], whole.weights[part], whole.pairs[part]) for part in parts]
        role2 = Role2(problem, experts, ctas)
        role2.run(blocks, seed=seed + 5)
        results.append(torch.stack([role2.partials(rank).view(torch.uint8) for rank in range(2)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@EMULATED
def test_ctas_draw_their_tasks_so_one_that_never_comes_leaves_none_undone() -> None:
    problem, g = small_problem(35, hidden=160, intermediate=96, format="fp8_block", block_m=8)
    experts = make_experts(problem, 3, "fp8_block", g)
    blocks = make_blocks(problem, random_counts(8, 3, g), g)
    results: list[torch.Tensor] = []
    for ctas in (4, 1):
        role2 = Role2(problem, experts, 4)
        role2.run(blocks, seed=ctas, ctas=ctas)
        results.append(torch.stack([role2.partials(rank).view(torch.uint8) for rank in range(2)]))
        state = EpState.from_buffer_copy(role2.local[: ctypes.sizeof(EpState)].numpy().tobytes())
        assert state.tickets == 3 * (problem.num_neuron_tasks + problem.num_output_tasks) + ctas
    assert torch.equal(results[0], results[1])


@EMULATED
@pytest.mark.parametrize("shared_format", ["fp8_block", "mxfp4"])
def test_shared_experts_run_in_the_same_list_of_tasks(shared_format: str) -> None:
    problem, g = small_problem(
        40, hidden=160, intermediate=192, format="mxfp4", num_shared=2, shared_format=shared_format, block_m=16
    )
    routed, shared = make_experts(problem, 3, "mxfp4", g), make_experts(problem, 2, shared_format, g)
    role2 = Role2(problem, routed, 3, shared)
    blocks = make_blocks(problem, [(3, 16), (4, 2), (0, 9), (2, 1)], g)
    role2.run(blocks, seed=2, plan_first=False)
    check(role2, [blocks])


@EMULATED
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_a_nan_stays_with_its_pair(activation: ActivationForm) -> None:
    problem, g = small_problem(50, hidden=128, intermediate=64, activation=activation, block_m=8)
    role2 = Role2(problem, make_experts(problem, 3, "fp8_block", g), 2)
    x = torch.randn(5, 128, generator=g).bfloat16()
    x[1, 7], x[3, 9] = float("nan"), float("inf")
    pairs = [(t % 2, t, 0) for t in range(5)]
    role2.run([Block(1, publish(problem, x), torch.ones(5), pairs)], seed=3)
    for token, (owner, row, slot) in enumerate(pairs):
        result = role2.partials(owner)[row, slot].float()
        assert bool(result.isfinite().all()) == (token not in (1, 3))
        assert token not in (1, 3) or not bool(result.isfinite().any())


@EMULATED
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_mxfp4_blocks_of_nan_make_their_rows_nan_and_those_of_the_least_scale_are_zeros(
    activation: ActivationForm,
) -> None:
    problem, g = small_problem(
        55, hidden=128, intermediate=64, format="mxfp4", activation=activation, block_m=8, has_bias=False
    )
    experts = make_experts(problem, 3, "mxfp4", g)
    assert experts.w2.scale is not None
    experts.w2.scale[1, 5, 1] = 255
    experts.w2.scale[1, 9] = 0
    role2 = Role2(problem, experts, 2)
    x = torch.randn(4, 128, generator=g).bfloat16()
    x[2] = 0  # nothing but zeros meets the block of NaN
    pairs = [(t % 2, t, 0) for t in range(4)]
    role2.run([Block(1, publish(problem, x), torch.ones(4), pairs)], seed=7)
    for token, (owner, row, slot) in enumerate(pairs):
        result = role2.partials(owner)[row, slot].float()
        assert result.isnan().nonzero().flatten().tolist() == [5]
        assert result[9] == 0
        assert token == 2 or (result != 0).sum() > 120


@EMULATED
@pytest.mark.parametrize(("planned", "flag"), [(True, Flag.L1_FULL), (False, Flag.PLAN)])
def test_what_never_comes_poisons_the_layer_and_publishes_nothing(planned: bool, flag: Flag) -> None:
    problem, g = small_problem(60, hidden=128, intermediate=128, format="mxfp4", block_m=8)
    role2 = Role2(problem, make_experts(problem, 3, "mxfp4", g), 3)
    blocks = make_blocks(problem, [(0, 3), (1, 8), (2, 5)], g)
    role2.run(blocks, seed=4, fed=2, planned=planned)
    error = read_error(role2.error)
    assert (error.code, error.flag) == (Code.TIMEOUT, flag)
    assert (error.rank, error.generation) == (0, 1)
    state = role2.local[: ctypes.sizeof(EpState)].numpy().tobytes()
    assert EpState.from_buffer_copy(state).poison == 1
    done = role2.regions[1][role2.layout.offset("done") :][:8].view(torch.int64)
    assert done.item() < role2.schedule.compute_ctas
    for owner, token, slot in blocks[2].pairs:
        assert bool((role2.partials(owner)[token, slot].view(torch.uint8) == POISON).all())


def test_kernels_compile_without_spills_and_without_products_one_at_a_time() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    # Blocks of 64 tokens hold every width, and take ptxas a while: once for each form of the tokens.
    for format, block_m in (("mxfp4", 64), ("fp8_block", 16)):
        for activation in ("fp8", "bf16"):
            problem = Problem(4096, 2048, 256, 6, 2, 256, format=format, activation=activation, block_m=block_m)
            log = compile_log(experts_spec(problem))
            assert re.findall(r"\(C7\d\d\d\).*", log) == []
            assert "Used 168 registers" in log
            assert re.findall(r"[1-9]\d* bytes spill.*", log) == []


@pytest.mark.parametrize(("block_m", "per_sm"), [(8, 2), (16, 2), (32, 2), (64, 1)])
def test_as_many_ctas_as_a_multiprocessor_is_to_hold_fit(block_m: int, per_sm: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    problem = Problem(4096, 2048, 256, 6, 2, 256, format="mxfp4", block_m=block_m)
    assert ctas_per_sm(problem) == per_sm
    assert ctas_per_sm(replace(problem, format="fp8_block")) == 1
    others = [replace(problem, num_shared=1), replace(problem, activation="bf16")] if block_m == 32 else []
    for form in (problem, *others):
        assert ctas_per_sm(form) == per_sm
        spec = experts_spec(form, per_sm)
        log = compile_log(spec)
        assert re.findall(r"[1-9]\d* bytes spill.*", log) == []
        registers = re.search(r"Used (\d+) registers", log)
        assert registers is not None
        assert per_sm * int(registers[1]) * EXPERTS_THREADS <= 64 * 1024
        assert per_sm * (spec.dynamic_smem_bytes + 1024) <= 228 * 1024
        assert re.findall(r"\(C7\d\d\d\).*", log) == []


@pytest.mark.parametrize("block_m", BLOCK_SIZES)
def test_every_policy_compiles_at_every_block_size(block_m: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    gelu = Activation(gate_fn="gelu_tanh")
    problem = Problem(2880, 2880, 128, 4, 2, 64, format="fp8_channel", block_m=block_m, gate=gelu, num_shared=1)
    cubin = compile_kernel(experts_spec(problem), "sm_90a")
    assert cubin.registers == 168
    assert cubin.spill_bytes == 0


def compile_log(spec: KernelSpec) -> str:
    """What ptxas says while it compiles `spec`: jit keeps only the resources."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=spec.source,
        arch="sm_90a",
        std="c++17",
        include_path=str(KERNEL_DIR),
        define_macro=[(name, value) if value else name for name, value in spec.macros],
        ptxas_options=["-v"],
    )
    program = Program((KERNEL_DIR / spec.source).read_text(), "c++", options)
    program.compile("cubin", logs=log)
    program.close()
    return log.getvalue()
