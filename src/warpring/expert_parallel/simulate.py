"""How long an expert-parallel layer should take: bytes and operations of each role over what a machine gives.

Each role is a roofline, put in sequence as the roles depend on each other:

    total  = overhead + role1 up to the plan + middle + role3
    middle = max(experts, pull, results) + exposed * min(experts, pull)
    experts = bounds together (memory, cache, issue slots, tensor cores) + task_us * tasks of a multiprocessor

Bounds far apart cost the largest of them; two that are nearly alike get in each other's way (a norm of order 8).

Experts that nobody wants cost nothing, so counts are expectations over random routings. The constants are in
`machines.py`; where a file of measured ones exists, they were fitted to measured layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from warpring.errors import ArgumentError
from warpring.expert_parallel.machines import Machine, calibration_of
from warpring.expert_parallel.partition import DEFAULT_COMM_SMS
from warpring.expert_parallel.problem import BLOCK_SIZES, MAX_TOKENS_PER_RANK, NEURONS, Problem

#: Bytes of a weight in memory, scales included.
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8_block": 1.0 + 4 / (128 * 128),
    "fp8_channel": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
#: Lane instructions a weight in the main loops (first, second GEMM) by the width of a block, counted in the machine
#: code for sm_90a with "fp8" activations; formats without a kernel are taken not to bind.
_FP8 = ((0.6, 0.7), (0.7, 1.0), (1.0, 1.6), (1.6, 2.7))
INSTRUCTIONS: dict[str, tuple[tuple[float, float], ...]] = {
    "fp8_block": _FP8,
    "fp8_channel": _FP8,
    "mxfp4": ((1.5, 1.6), (1.8, 2.0), (2.6, 2.9), (4.1, 4.5)),
}
#: What the products of a second term add: 16 weights a lane share one and its descriptor.
_TERM_INSTRUCTIONS = 0.1
_NORM = 8  # of the experts' bounds: two alike cost 9 % more than one of them
_LANES = 128  # lane instructions that a multiprocessor issues a cycle
_TILE = 128  # rows of a task
#: Differences between splits below this are no reason to leave the usual one: the simulation cannot tell them.
_TIE = 0.005


@dataclass(frozen=True)
class Workload:
    """One layer and its load.

    Attributes:
        hidden, intermediate, num_experts, topk: the routed layer's shape.
        num_ranks: GPUs that share the experts.
        tokens_per_rank: tokens that each rank brings.
        format: number format of the routed weights.
        activation: "fp8" or "bf16": operands of the tensor cores, and the form on the wire.
        skew: load of the busiest rank over the mean; 1 is even, num_ranks is everything on one.
        block_m: tokens of a ring block.
        num_shared: fused shared experts, in FP8, which see every token of their own rank.
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    num_ranks: int
    tokens_per_rank: int
    format: str = "fp8_block"
    activation: str = "fp8"
    skew: float = 1.0
    block_m: int = 32
    num_shared: int = 0

    def __post_init__(self) -> None:
        if self.format not in WEIGHT_BYTES:
            raise ArgumentError(f"Workload: format must be one of {', '.join(WEIGHT_BYTES)}; got {self.format!r}.")
        if self.activation not in ("fp8", "bf16"):
            raise ArgumentError(f"Workload: activation must be fp8 or bf16; got {self.activation!r}.")
        if not 1 <= self.num_ranks <= 72 or self.num_experts % self.num_ranks:
            raise ArgumentError(
                f"Workload: num_ranks must be 1 to 72 and divide num_experts; got {self.num_ranks} ranks for "
                f"{self.num_experts} experts."
            )
        if not 1 <= self.skew <= self.num_ranks:
            raise ArgumentError(f"Workload: skew must be 1 to num_ranks ({self.num_ranks}); got {self.skew}.")
        if self.block_m not in BLOCK_SIZES:
            raise ArgumentError(f"Workload: block_m must be one of {BLOCK_SIZES}; got {self.block_m}.")
        if self.tokens_per_rank < 0:
            raise ArgumentError(f"Workload: tokens_per_rank must not be negative; got {self.tokens_per_rank}.")

    @property
    def operand_bytes(self) -> int:
        """Bytes of one activation in the tensor cores and on the wire."""
        return 1 if self.activation == "fp8" else 2

    @property
    def partial_bytes(self) -> int:
        """Bytes of one value of a partial result."""
        return 2 if self.activation == "fp8" else 4

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights."""
        return 3 * self.hidden * self.intermediate * WEIGHT_BYTES[self.format]

    @property
    def busiest(self) -> float:
        """Pairs of the busiest rank over those of an average one: the skew, and chance.

        A token's K experts fall on a rank hypergeometrically; of R normal values that add up to a constant the largest
        lies about this many standard deviations above the mean (Blom's approximation of the expected maximum).
        """
        ranks, share, tokens = self.num_ranks, 1 / self.num_ranks, self.num_ranks * self.tokens_per_rank
        if ranks == 1 or not tokens:
            return 1.0
        spread = self.topk * share * (1 - share) * (self.num_experts - self.topk) / max(1, self.num_experts - 1)
        above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * math.sqrt(ranks / (ranks - 1))
        luck = above * math.sqrt(tokens * spread) / (tokens * self.topk * share)
        # Where one rank leads by skew, chance seldom makes another one the busiest.
        return min(1 + math.hypot(self.skew - 1, luck * (1 - (self.skew - 1) / max(1, ranks - 1))), float(ranks))


def usual_block_m(num_experts: int, topk: int, num_ranks: int, max_tokens: int = MAX_TOKENS_PER_RANK) -> int:
    """Tokens of a ring block of a layer that serves so many tokens a rank, where nobody says otherwise."""
    return Problem(32, 32, num_experts, topk, num_ranks, max_tokens).tokens_per_block


def workload_of(problem: Problem, tokens_per_rank: int, skew: float = 1.0) -> Workload:
    """The load of a layer with so many tokens a rank."""
    return Workload(
        problem.hidden,
        problem.intermediate,
        problem.num_experts,
        problem.topk,
        problem.num_ranks,
        tokens_per_rank,
        problem.format,
        problem.activation,
        skew,
        problem.tokens_per_block,
        problem.num_shared,
    )


@dataclass(frozen=True)
class Counts:
    """Expected work of the busiest rank in one call: the call takes as long as its slowest rank.

    Attributes:
        pairs: (token, slot) pairs, those of shared experts included.
        experts: distinct routed experts.
        widths: blocks whose tokens are 8, 16, 32 and 64 columns of a product.
    """

    pairs: float
    experts: float
    widths: tuple[float, ...]

    @property
    def blocks(self) -> float:
        """Ring blocks."""
        return sum(self.widths)

    @property
    def padded(self) -> float:
        """Tokens of all blocks, each block's rounded up to what the tensor cores take."""
        return sum(width * blocks for width, blocks in zip(BLOCK_SIZES, self.widths, strict=True))


@lru_cache(maxsize=4096)
def count_work(load: Workload) -> Counts:
    """Expected pairs, distinct experts and blocks of the busiest rank.

    The tokens of an expert are binomial: every one of R * T tokens wants it with the same probability.
    """
    tokens = load.num_ranks * load.tokens_per_rank
    local = load.num_experts // load.num_ranks
    p = min(1.0, load.busiest * load.topk / load.num_experts) if tokens else 0.0
    widths = [0.0] * len(BLOCK_SIZES)

    def add(pairs: int, experts: float) -> None:
        full, rest = divmod(pairs, load.block_m)
        widths[BLOCK_SIZES.index(load.block_m)] += experts * full
        if rest:
            widths[_width(rest)] += experts

    for n, chance in _binomial(tokens, p):
        add(n, local * chance)
    add(load.tokens_per_rank, load.num_shared)
    return Counts(
        pairs=local * tokens * p + load.num_shared * load.tokens_per_rank,
        experts=local * (1 - (1 - p) ** tokens) if tokens else 0.0,
        widths=tuple(widths),
    )


def _binomial(n: int, p: float) -> Iterable[tuple[int, float]]:
    """(k, chance of k) for k >= 1, without the tail that adds up to less than 1e-12."""
    if p >= 1.0:
        yield n, 1.0
        return
    left = 1.0
    for k in range(n + 1):
        log_chance = (
            math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
            + (k * math.log(p) if k else 0.0) + (n - k) * math.log1p(-p)
        )  # fmt: skip
        chance = math.exp(log_chance)
        if k:
            yield k, chance
        left -= chance
        if left < 1e-12 and k > n * p:
            return


def _width(tokens: int) -> int:
    """Place among the widths of the least one that holds so many tokens."""
    return next(place for place, size in enumerate(BLOCK_SIZES) if size >= tokens)


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one layer on the busiest rank.

    Attributes:
        comm_sms, compute_sms: the partition.
        arrive_us: publication until a peer sees it.
        plan_us: accounting of the routing.
        pull_us: the tokens' way into the ring.
        memory_us, cache_us, issue_us, tensor_us: the experts' time by each bound.
        tasks_us: what their tasks cost beyond that.
        results_us: partial results on their way over the link.
        combine_us: last partial result over the link, and the sum.
        total_us: the layer.
        floor_us: unique weight bytes over the read peak, or wire bytes over the link if that is more.
    """

    comm_sms: int
    compute_sms: int
    arrive_us: float
    plan_us: float
    pull_us: float
    memory_us: float
    cache_us: float
    issue_us: float
    tensor_us: float
    tasks_us: float
    results_us: float
    combine_us: float
    total_us: float
    floor_us: float

    @property
    def dispatch_us(self) -> float:
        """role1: routing, plan and tokens."""
        return self.arrive_us + self.plan_us + self.pull_us

    @property
    def experts_us(self) -> float:
        """role2: both GEMMs by their bounds, and their tasks."""
        bounds = (self.memory_us, self.cache_us, self.issue_us, self.tensor_us)
        largest = max(bounds)
        if not largest:
            return self.tasks_us
        return largest * sum((bound / largest) ** _NORM for bound in bounds) ** (1 / _NORM) + self.tasks_us

    @property
    def bound(self) -> str:
        """What the middle of the layer waits for."""
        times = {
            "memory": self.memory_us,
            "cache": self.cache_us,
            "issue slots": self.issue_us,
            "tensor cores": self.tensor_us,
            "link": max(self.pull_us, self.results_us),
        }
        return max(times, key=lambda name: times[name])


def predict(machine: Machine, load: Workload, comm_sms: int) -> Prediction:
    """Time of one layer with that partition."""
    compute_sms = machine.num_sms - comm_sms
    if comm_sms < 2 or compute_sms < 32:
        raise ArgumentError(
            f"predict: comm_sms must leave 2 multiprocessors for communication and 32 for compute; got {comm_sms} of "
            f"{machine.num_sms}."
        )
    counts = count_work(load)
    remote = (counts.pairs - load.num_shared * load.tokens_per_rank) * (load.num_ranks - 1) / load.num_ranks
    hop = machine.hop_us if load.num_ranks > 1 else 0.0
    matrix = load.hidden * load.intermediate
    share = compute_sms / machine.num_sms
    # GB/s are bytes a nanosecond: 1e3 of them a microsecond.
    stream = 1e3 * min(machine.read_gbs * machine.stream_share, machine.sm_read_gbs * compute_sms)
    link = 1e3 * machine.link_gbs
    shared = load.num_shared * 3 * matrix * WEIGHT_BYTES["fp8_block"]
    weights = counts.experts * load.expert_bytes + shared
    row = load.hidden * load.operand_bytes
    # Every task reads its block's tokens: H columns for I / 64 tasks, I columns for H / 128.
    images = counts.padded * matrix * (1 / NEURONS + 1 / _TILE) * load.operand_bytes
    tasks = counts.blocks * (load.intermediate / NEURONS + load.hidden / _TILE)
    results = load.tokens_per_rank * (load.topk + load.num_shared) * load.hidden * load.partial_bytes
    issue_rate = 1e3 * machine.clock_ghz * _LANES * compute_sms * machine.issue_share
    tensor_rate = 1e6 * machine.fp8_tflops / load.operand_bytes * share
    prediction = Prediction(
        comm_sms=comm_sms,
        compute_sms=compute_sms,
        arrive_us=hop,
        # 1,024 threads look at a pair each in about 50 ns, several times over.
        plan_us=0.5 + 0.2 * math.ceil(load.num_ranks * load.tokens_per_rank * load.topk / 1024),
        pull_us=2 * hop + max(remote * row / link, counts.pairs * row / (1e3 * machine.sm_link_gbs * comm_sms)),
        memory_us=weights / stream,
        cache_us=(counts.blocks * load.expert_bytes + images) / (1e3 * machine.l2_gbs * share),
        issue_us=_instructions(load, counts) / issue_rate if machine.converts else 0.0,
        tensor_us=2 * 3 * counts.padded * matrix / tensor_rate,
        tasks_us=machine.task_us * tasks / compute_sms,
        results_us=remote * load.hidden * load.partial_bytes / link,
        combine_us=2 * hop + results / (1e3 * machine.read_gbs),
        total_us=0.0,
        floor_us=max(weights / (1e3 * machine.read_gbs), _wire_bytes(load) / link),
    )
    experts, pull = prediction.experts_us, prediction.pull_us
    middle = max(experts, pull, prediction.results_us) + machine.exposed * min(experts, pull)
    before = machine.overhead_us + prediction.arrive_us + prediction.plan_us
    return replace(prediction, total_us=before + middle + prediction.combine_us)


def _instructions(load: Workload, counts: Counts) -> float:
    """Lane instructions of the main loops."""
    by_width = INSTRUCTIONS.get(load.format)
    if by_width is None:
        return 0.0
    matrix, more = load.hidden * load.intermediate, _TERM_INSTRUCTIONS * (load.operand_bytes - 1)
    return sum(
        blocks * matrix * (2 * first + second + 3 * more)
        for blocks, (first, second) in zip(counts.widths, by_width, strict=True)
    )


def _wire_bytes(load: Workload) -> float:
    """Rows that a rank needs of the others, each once."""
    local = load.num_experts // load.num_ranks
    elsewhere = math.prod((load.num_experts - local - k) / (load.num_experts - k) for k in range(load.topk))
    rows = (load.num_ranks - 1) * load.tokens_per_rank * (1 - max(0.0, elsewhere))
    return rows * load.hidden * load.operand_bytes


def splits_of(machine: Machine) -> list[int]:
    """Communication partitions of a machine, up to half of it."""
    step = machine.granularity
    return list(range(step, min(machine.num_sms // 2, machine.num_sms - 32) + 1, step))


def best_split(machine: Machine, load: Workload, splits: Sequence[int] | None = None) -> Prediction:
    """The partition with the least time; of equals the one with the fewest communication multiprocessors.

    Args:
        machine, load: what runs where.
        splits: communication multiprocessors to choose from; None for every step up to half of the machine.
    """
    # Rounded, so that a difference of no meaning does not take multiprocessors from compute.
    choices = (predict(machine, load, sms) for sms in splits or splits_of(machine))
    return min(choices, key=lambda p: (round(p.total_us, 2), p.comm_sms))


def choose_comm_sms(problem: Problem, device: str, num_sms: int) -> int | None:
    """Communication multiprocessors for a layer, by the simulation; None where no measured constants fit the GPU.

    A partition outlives the calls, which have 1 to max_tokens_per_rank tokens: the choice has the least time over the
    best of each of these loads, on average over powers of two. It is one of those that were measured; and where the
    difference is too small to be told, the usual one.

    Args:
        problem: the layer.
        device: CUDA's name of the GPU.
        num_sms: its multiprocessors.
    """
    calibration = calibration_of(device)
    if calibration is None or calibration.machine.num_sms != num_sms or not calibration.splits:
        return None
    most = problem.max_tokens_per_rank
    counts = sorted({*(2**k for k in range(most.bit_length())), most})
    loads = [workload_of(problem, tokens) for tokens in counts]
    total = dict.fromkeys(calibration.splits, 0.0)
    for load in loads:
        times = {sms: predict(calibration.machine, load, sms).total_us for sms in calibration.splits}
        for sms, time in times.items():
            total[sms] += time / min(times.values()) / len(loads)
    best = min(total.values())
    near = [sms for sms, mean in total.items() if mean <= best * (1 + _TIE)]
    return DEFAULT_COMM_SMS if DEFAULT_COMM_SMS in near else min(near)
