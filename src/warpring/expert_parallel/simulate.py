"""How long an expert-parallel layer should take: bytes and operations of each role over what a machine gives.

The model is a roofline a role, put in sequence as the roles depend on each other:

    total = overhead + arrive + plan + max(experts, pull) + combine

with `experts` the slowest of memory, cache and tensor cores. Experts that nobody wants cost nothing, so counts are
expectations over random routings. `calibrate` fits overhead and efficiency to measured points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from warpring.errors import ArgumentError

#: Bytes of a weight in memory, scales included.
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8_block": 1.0 + 4 / (128 * 128),
    "fp8_channel": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
_TILE = 128  # rows of a task
_TOKEN_TILES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Machine:
    """What one GPU and its link give. Rates in GB/s, times in microseconds.

    Attributes:
        name: for tables.
        num_sms: multiprocessors.
        read_gbs: read peak of the memory.
        sm_read_gbs: what one multiprocessor can draw; a partition of n draws min(n * this, read_gbs).
        l2_gbs: what the cache gives all multiprocessors together.
        link_gbs: reads from peers, all of them together, one direction.
        sm_link_gbs: what one multiprocessor can pull over the link.
        fp8_tflops: dense tensor throughput of the FP8 form; the 16-bit form has half.
        hop_us: from a store in one rank to its sight in another, with the flag.
        overhead_us: launches and the fork into partitions, a layer.
        efficiency: achieved over ideal time of the experts; below 1.
        granularity: partitions are multiples of this many multiprocessors.
    """

    name: str
    num_sms: int
    read_gbs: float
    sm_read_gbs: float
    l2_gbs: float
    link_gbs: float
    sm_link_gbs: float
    fp8_tflops: float
    hop_us: float
    overhead_us: float
    efficiency: float = 1.0
    granularity: int = 8


#: Measured on two H200s, driver 580.159: read peak, reads by partition size (8 SMs 1.26 TB/s, 48 saturate), pull from a
#: peer (8 CTAs 321 GB/s), flag ping-pong (2.63 us both ways), fork into Green Contexts (4.9 to 6.6 us). The cache's and
#: the tensor cores' rates are nominal.
H200 = Machine("H200", 132, 4530.0, 157.0, 7000.0, 335.0, 40.0, 1979.0, 1.3, 5.5)
#: Nominal figures: nothing was measured on it.
B300 = Machine("B300", 148, 7000.0, 157.0, 12000.0, 800.0, 40.0, 4500.0, 1.3, 5.5)
MACHINES = {machine.name.lower(): machine for machine in (H200, B300)}


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

    def per_expert_probability(self) -> float:
        """That a token wants one given expert of the busiest rank."""
        return min(1.0, self.skew * self.topk / self.num_experts)


@dataclass(frozen=True)
class Counts:
    """Expected work of the busiest rank in one call: the call takes as long as its slowest rank."""

    pairs: float
    experts: float
    blocks: float
    padded: float  # tokens of all blocks, each block's rounded up to what the tensor cores take


def count_work(load: Workload) -> Counts:
    """Expected pairs, distinct experts, blocks and padded tokens of the busiest rank.

    The tokens of an expert are binomial: every one of R * T tokens wants it with the same probability, which is that of
    an average rank plus the chance that makes one rank the busiest of R.
    """
    tokens = load.num_ranks * load.tokens_per_rank
    local = load.num_experts // load.num_ranks
    p = min(1.0, load.per_expert_probability() * _luck(load)) if tokens else 0.0
    blocks = padded = 0.0
    for n, chance in _binomial(tokens, p):
        full, rest = divmod(n, load.block_m)
        blocks += chance * (full + (rest > 0))
        padded += chance * (full * load.block_m + (_pad(rest, load.block_m) if rest else 0))
    return Counts(
        pairs=local * tokens * p,
        experts=local * (1 - (1 - p) ** tokens) if tokens else 0.0,
        blocks=local * blocks,
        padded=local * padded,
    )


def _luck(load: Workload) -> float:
    """Pairs of the busiest of R ranks over those of an average one, by chance alone.

    A token's K experts fall on a rank hypergeometrically; the largest of R normal values lies about this many standard
    deviations above the mean (Blom's approximation of the expected maximum).
    """
    ranks, share = load.num_ranks, 1 / load.num_ranks
    spread = load.topk * share * (1 - share) * (load.num_experts - load.topk) / max(1, load.num_experts - 1)
    tokens = ranks * load.tokens_per_rank
    above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    return 1 + above * math.sqrt(tokens * spread) / (tokens * load.topk * share)


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


def _pad(tokens: int, block_m: int) -> int:
    return next(size for size in (*_TOKEN_TILES, block_m) if size >= min(tokens, block_m))


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one layer on the busiest rank.

    Attributes:
        comm_sms, compute_sms: the partition.
        arrive_us: publication until a peer sees it.
        plan_us: accounting of the routing.
        pull_us: the tokens' way over the link.
        memory_us, cache_us, tensor_us: the experts' time by each bound.
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
    tensor_us: float
    combine_us: float
    total_us: float
    floor_us: float

    @property
    def experts_us(self) -> float:
        """Time of the grouped GEMM by its tightest bound."""
        return max(self.memory_us, self.cache_us, self.tensor_us)

    @property
    def bound(self) -> str:
        """What the middle of the layer waits for."""
        times = {"memory": self.memory_us, "cache": self.cache_us, "tensor cores": self.tensor_us, "link": self.pull_us}
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
    remote = (load.num_ranks - 1) / load.num_ranks
    # GB/s are bytes a nanosecond: 1e3 of them a microsecond.
    stream = 1e3 * min(machine.read_gbs, machine.sm_read_gbs * compute_sms)
    link = 1e3 * min(machine.link_gbs, machine.sm_link_gbs * comm_sms)
    weights = counts.experts * load.expert_bytes
    wire = counts.pairs * remote * load.hidden * load.operand_bytes
    # Every task reads its block's tokens: H columns for I / 64 tasks, I columns for H / 128.
    images = counts.padded * load.hidden * load.intermediate * (1 / (_TILE / 2) + 1 / _TILE) * load.operand_bytes
    cache = 1e3 * machine.l2_gbs * compute_sms / machine.num_sms
    tensor = 1e6 * machine.fp8_tflops / load.operand_bytes * compute_sms / machine.num_sms
    results = load.tokens_per_rank * load.topk * load.hidden * load.partial_bytes
    prediction = Prediction(
        comm_sms=comm_sms,
        compute_sms=compute_sms,
        arrive_us=machine.hop_us if load.num_ranks > 1 else 0.0,
        # 1,024 threads look at a pair each in about 50 ns, several times over.
        plan_us=0.5 + 0.2 * math.ceil(load.num_ranks * load.tokens_per_rank * load.topk / 1024),
        pull_us=(2 * machine.hop_us if load.num_ranks > 1 else 0.0) + wire / link,
        memory_us=weights / stream,
        cache_us=(counts.blocks * load.expert_bytes + images) / cache,
        tensor_us=2 * 3 * counts.padded * load.hidden * load.intermediate / tensor,
        combine_us=(2 * machine.hop_us if load.num_ranks > 1 else 0.0) + results / (1e3 * machine.read_gbs),
        total_us=0.0,
        floor_us=max(weights / (1e3 * machine.read_gbs), wire / (1e3 * machine.link_gbs)),
    )
    middle = max(prediction.experts_us / machine.efficiency, prediction.pull_us)
    total = machine.overhead_us + prediction.arrive_us + prediction.plan_us + middle + prediction.combine_us
    return replace(prediction, total_us=total)


def best_split(machine: Machine, load: Workload) -> Prediction:
    """The partition with the least time; of equals the one with the fewest communication multiprocessors."""
    step = machine.granularity
    choices = range(step, min(machine.num_sms // 2, machine.num_sms - 32) + 1, step)
    # Rounded, so that a difference of no meaning does not take multiprocessors from compute.
    return min((predict(machine, load, n) for n in choices), key=lambda p: (round(p.total_us, 2), p.comm_sms))


@dataclass(frozen=True)
class Point:
    """A measured layer: its load, its partition, its time."""

    load: Workload
    comm_sms: int
    measured_us: float


@dataclass(frozen=True)
class Calibration:
    """A machine with fitted overhead and efficiency.

    Attributes:
        machine: to predict with.
        num_fitted, num_held_out: points of each kind.
        fitted_error, held_out_error: mean of |predicted / measured - 1|.
        worst_held_out: largest of those.
    """

    machine: Machine
    num_fitted: int
    num_held_out: int
    fitted_error: float
    held_out_error: float
    worst_held_out: float


def calibrate(machine: Machine, points: Sequence[Point], hold_out: int = 3) -> Calibration:
    """Fit `overhead_us` and `efficiency` to the points, every `hold_out`-th kept back to judge the fit.

    The time is linear in overhead and 1 / efficiency (where the experts and not the link are the bound): weighted least
    squares, so that the relative errors count.

    Raises:
        ArgumentError: fewer than 4 points, or points that all have the same load.
    """
    if len(points) < 4:
        raise ArgumentError(f"calibrate: at least 4 measured points are needed; got {len(points)}.")
    held = [point for index, point in enumerate(points) if index % hold_out == hold_out - 1]
    fitted = [point for index, point in enumerate(points) if index % hold_out != hold_out - 1]
    base = replace(machine, overhead_us=0.0, efficiency=1.0)
    # measured - fixed = overhead + experts / efficiency, both sides over measured.
    s11 = s12 = s22 = t1 = t2 = 0.0
    for point in fitted:
        ideal = predict(base, point.load, point.comm_sms)
        body = max(ideal.experts_us, ideal.pull_us)
        weight = 1 / point.measured_us
        a, b, y = weight, body * weight, (point.measured_us - (ideal.total_us - body)) * weight
        s11, s12, s22, t1, t2 = s11 + a * a, s12 + a * b, s22 + b * b, t1 + a * y, t2 + b * y
    determinant = s11 * s22 - s12 * s12
    if determinant <= 1e-12 * s11 * s22:
        raise ArgumentError("calibrate: the points all have the same load; measure several token counts.")
    overhead = (t1 * s22 - t2 * s12) / determinant
    slowdown = (s11 * t2 - s12 * t1) / determinant
    found = replace(machine, overhead_us=max(0.0, overhead), efficiency=1 / max(slowdown, 1e-3))

    def errors(some: Sequence[Point]) -> list[float]:
        return [abs(predict(found, p.load, p.comm_sms).total_us / p.measured_us - 1) for p in some]

    inside, outside = errors(fitted), errors(held)
    return Calibration(
        found, len(fitted), len(held), sum(inside) / len(inside), sum(outside) / len(outside), max(outside)
    )
