"""Benchmark of one expert-parallel layer: every rank runs this, the slowest rank's time counts.

A replay is a CUDA graph of several calls of the layer, each with inputs and a routing of its own, so that experts come
from memory and not from cache. Ranks start every timed window together; a window's time is that of the slowest rank.
Variants take turns, window by window. On CPUs (gloo) the calls are run one by one: the same code, for tests and a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from warpring.bench.ep_inputs import Inputs, Load, skewed
from warpring.bench.ep_peers import PeerLayer
from warpring.bench.ep_variants import (
    Built,
    Layer,
    SharedApart,
    Variant,
    bind,
    raise_failure,
    routed_layer,
    shared_output,
)
from warpring.bench.ep_weights import LayerWeights
from warpring.bench.inputs import make_routing
from warpring.bench.phases import Phases
from warpring.bench.read_peak import read_peak_gbs
from warpring.bench.records import Record, record
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Timing, capture, percentiles
from warpring.bench.watchdog import Watchdog
from warpring.errors import ArgumentError, WarpringError
from warpring.expert_parallel.baseline import AllToAllExpertParallel
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import Problem
from warpring.experts import Experts

#: Calls of the layer in one replay, and the routings that they take turns with.
CALLS, ROUTINGS = 16, 8
#: Replays before, windows, and replays of a window: 100 replays in all.
WARMUP, WINDOWS, REPLAYS = 10, 30, 3
#: A variant whose output has a lower cosine with the all-to-all baseline is broken, and its time means nothing.
LEAST_COSINE = 0.99
#: Seconds that a rank of our layer waits for another: a bench is watched, and its GPUs are rented.
TIMEOUT = 30.0
_LINK_BYTES = 256 << 20


@dataclass(frozen=True)
class EpBench:
    """What to bench.

    Attributes:
        shape: the layer; its experts are spread over the ranks of `group`.
        format: number format of the routed weights.
        group: the ranks, or None for one alone.
        device: of this rank.
        routing: "uniform" or "zipf".
        skew: share of the pairs that falls on rank 0's experts, over an even share; 1 is even.
        seed: of weights, inputs and routings.
        windows: timed windows.
        phases: told what takes how long; by default nobody.
        watchdog: ends the process where a peer gives no answer.
    """

    shape: LayerShape
    format: str
    group: Any | None
    device: torch.device
    routing: str = "uniform"
    skew: float = 1.0
    seed: int = 0
    windows: int = WINDOWS
    phases: Phases = field(default_factory=Phases)
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else self.group.rank()

    def weights(self) -> LayerWeights:
        """This rank's weights of the layer, for `run`."""
        return LayerWeights(
            self.shape,
            self.format,
            self.device,
            self.seed,
            rank=self.rank,
            num_ranks=self.num_ranks,
            phases=self.phases,
        )

    def run(
        self, tokens: Sequence[int], variants: Sequence[Variant], weights: LayerWeights | None = None
    ) -> Iterator[list[Record]]:
        """Measure; yields one record a variant for each count of tokens a rank. A collective of the group.

        A variant that cannot be built, that fails, or whose output is not that of the baseline costs the others
        nothing: its records have no time, and say in `failed` what went wrong.

        Args:
            tokens: tokens a rank, each 1 to 256.
            variants: distinct; all are built at once and stay in memory.
            weights: from `weights` of a bench of the same layer, format, seed and group, which then need not be made
                again; None makes them.

        Raises:
            ArgumentError: tokens, variants or a skew that cannot be.
        """
        if not tokens or min(tokens) < 1 or not variants or len(set(variants)) < len(variants):
            raise ArgumentError(
                f"EpBench.run: needs tokens of at least 1 and distinct variants; got {list(tokens)}, {list(variants)}."
            )
        weights = self.weights() if weights is None else weights
        with self.phases("ranks met"):
            self._barrier()
        with self.phases("peaks"):
            peaks = read_peak_gbs(self.device), self._link_gbs()
        experts = weights.experts
        shared = weights.shared if any(v.shared != "none" for v in variants) else None
        built = Built(self._everyone)
        for variant in variants:
            with self.phases(f"built {variant.name}"):
                built.attempt(variant, partial(self._build, variant, weights, max(tokens)), keep=True)
        checked = self.num_ranks > 1 and any(v.impl != "nccl" for v in variants)
        reference = AllToAllExpertParallel(experts, self.group) if checked else None
        try:
            for count in tokens:
                with self.phases(f"T={count} inputs"):
                    calls = [self._inputs(count, index) for index in range(ROUTINGS)]
                    load = self._load(calls, experts)
                    wanted = self._wanted(reference, shared, calls[0])
                with self.phases(f"T={count} checked"):
                    cosines = {
                        variant: self._checked(built, variant, wanted, calls[0]) for variant in list(built.layers)
                    }
                timings = self._time(built, calls, f"T={count}")
                for variant, layer in list(built.layers.items()):
                    built.attempt(variant, partial(raise_failure, layer))
                common = self._common(count, load, *peaks)
                yield [
                    self._record(variant, built.layers[variant], load, timings[variant], cosines[variant], common)
                    if variant in built.layers
                    else self._failure(variant, built.failed[variant], common)
                    for variant in variants
                ]
        finally:
            built.close()

    def problem(self, variant: Variant, max_tokens: int) -> Problem:
        """The layer of a variant."""
        return Problem(
            hidden=self.shape.hidden,
            intermediate=self.shape.intermediate,
            num_experts=self.shape.num_experts,
            topk=self.shape.topk,
            num_ranks=self.num_ranks,
            max_tokens_per_rank=max_tokens,
            format=self.format,
            activation=variant.activation,
            gate=self.shape.activation,
            num_shared=self.shape.shared_experts if variant.shared == "fused" else 0,
            has_bias=self.shape.has_bias,
            block_m=variant.block_m,
        )

    def _build(self, variant: Variant, weights: LayerWeights, max_tokens: int) -> Layer:
        experts = weights.experts
        if variant.is_peer:
            return PeerLayer(variant.impl, self.shape, experts, self.group)
        if variant.impl == "nccl":
            return AllToAllExpertParallel(weights.dense(), self.group)
        fused = variant.shared == "fused"
        layer = ExpertParallelDecode(
            self.problem(variant, max_tokens),
            self.group,
            experts,
            shared=weights.shared if fused else None,
            packed=weights.packed(fused=fused) if self.device.type == "cuda" else None,
            comm_sms=variant.comm_sms,
            num_slots=variant.num_slots,
            timeout=TIMEOUT,
            partition="sequence" if variant.impl == "shared" else variant.partition,
        )
        return SharedApart(layer, weights.shared) if variant.shared == "separate" else layer

    def _inputs(self, count: int, index: int) -> Inputs:
        seed = (self.seed * ROUTINGS + index) * self.num_ranks + self.rank
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, self.shape.hidden, generator=generator).bfloat16()
        routing = make_routing(self.shape, count, self.routing, seed=seed)
        topk_idx = routing.topk_idx
        if self.skew > 1:
            topk_idx = skewed(self.shape.num_experts, self.num_ranks, topk_idx.shape, self.skew, generator)
        return Inputs(x.to(self.device), topk_idx.to(self.device), routing.topk_weights.to(self.device))

    def _load(self, calls: Sequence[Inputs], experts: Experts) -> Load:
        """The same on every rank: each looks at what all of them route where."""
        weight = wire = pairs = skew = 0.0
        expert_bytes = experts.bytes_per_expert
        form = self.problem(Variant(), 1)
        row_bytes = form.hidden_padded * form.activation_bytes + 4 * form.scales_per_token
        for call in calls:
            everyone = self._gather(call.topk_idx.cpu())
            ranks = [idx // experts.num_experts for idx in everyone]
            per_rank = torch.stack([torch.bincount(r.flatten(), minlength=self.num_ranks) for r in ranks])
            distinct = torch.bincount(torch.cat(everyone).unique() // experts.num_experts, minlength=self.num_ranks)
            rows = torch.tensor([
                sum(int((r == reader).any(1).sum()) for owner, r in enumerate(ranks) if owner != reader)
                for reader in range(self.num_ranks)
            ])  # fmt: skip
            received = per_rank.sum(0)
            weight += float(distinct.max()) * expert_bytes
            wire += float(rows.max()) * row_bytes
            pairs += float(received.sum())
            skew += float(received.max() / received.float().mean())
        return Load(weight / len(calls), wire / len(calls), pairs / len(calls), skew / len(calls))

    def _wanted(
        self, reference: AllToAllExpertParallel | None, shared: Experts | None, call: Inputs
    ) -> dict[bool, torch.Tensor]:
        """The baseline's output, FP64, without and with the reference path's of shared experts; {} without baseline."""
        if reference is None:
            return {}
        routed = reference(call.x, call.topk_idx, call.topk_weights).double()
        return {False: routed} | ({} if shared is None else {True: routed + shared_output(shared, call.x).double()})

    def _checked(
        self, built: Built, variant: Variant, wanted: Mapping[bool, torch.Tensor], call: Inputs
    ) -> float | None:
        """Lowest cosine of a token with the baseline, over all ranks; None where the variant failed, is or has none."""
        layer = built.layers[variant]
        with self._watched(variant, call):
            if isinstance(layer, PeerLayer):
                # Libraries clear buffers that other ranks write to while a session opens: no call before all are open.
                built.attempt(variant, partial(self._opened, layer, call))
            if variant in built.layers:
                return built.attempt(variant, partial(self._check, variant, layer, wanted, call))
        return None

    def _opened(self, layer: PeerLayer, call: Inputs) -> None:
        """A peer's session for the call's count, on this rank."""
        layer.bind(call.x, call.topk_idx, call.topk_weights)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _watched(self, variant: Variant, call: Inputs) -> AbstractContextManager[object]:
        """Watches over a peer; our own layers and the baselines end by themselves."""
        if not variant.is_peer:
            return nullcontext()
        count = call.x.shape[0]
        return self.watchdog(f"{self.shape.name} {self.format}: {variant.impl} on rank {self.rank}, T={count},")

    def _check(self, variant: Variant, layer: Layer, wanted: Mapping[bool, torch.Tensor], call: Inputs) -> float | None:
        """Lowest cosine of a token with the baseline, over all ranks; None where the variant is or has none."""
        if not wanted or variant.impl == "nccl":
            return None
        got = layer(call.x, call.topk_idx, call.topk_weights).double()
        expected = wanted[variant.shared != "none"]
        mine = torch.nn.functional.cosine_similarity(expected, got, dim=1).min().cpu()
        lowest = float(min(self._gather(mine)))
        if not lowest >= LEAST_COSINE:
            raise_failure(layer)  # what the kernels say of it says more than a number
            raise WarpringError(f"cosine {lowest:.6f} with the baseline, at least {LEAST_COSINE} is asked")
        return lowest

    def _time(self, built: Built, calls: Sequence[Inputs], what: str) -> dict[Variant, Timing]:
        order = [index % len(calls) for index in range(CALLS if self.device.type == "cuda" else len(calls))]
        replays: dict[Variant, Callable[[], object]] = {}
        with self.phases(f"{what} captured"):
            for variant, layer in list(built.layers.items()):
                with self._watched(variant, calls[0]):
                    replay = built.attempt(variant, partial(self._replay, variant, layer, calls, order))
                if replay is not None:
                    replays[variant] = replay
        samples: dict[Variant, list[float]] = {variant: [] for variant in replays}
        with self.phases(f"{what} timed"):
            for window in range(-1, self.windows):
                for variant, replay in replays.items():
                    with self._watched(variant, calls[0]):
                        self._barrier()
                        mine = self._window(replay, WARMUP if window < 0 else REPLAYS) / len(order)
                    if window >= 0:
                        samples[variant].append(mine)
        # The slowest rank of each window, told once: a gather a window would cost more than a short one takes.
        ranks: list[dict[Variant, list[float]]] = self._everyone(samples)
        return {
            variant: percentiles([max(window) for window in zip(*(rank[variant] for rank in ranks), strict=True)])
            for variant in replays
        }

    def _replay(
        self, variant: Variant, layer: Layer, calls: Sequence[Inputs], order: Sequence[int]
    ) -> Callable[[], object]:
        """All calls once: a graph where the layer can be captured, else one by one (the baseline asks the host)."""
        bound = [bind(layer, call) for call in calls]

        def eager() -> None:
            for index in order:
                bound[index]()

        if self.device.type == "cpu" or variant.impl == "nccl":
            eager()
            return eager
        try:
            return capture([eager]).replay
        except RuntimeError as error:
            if isinstance(error, WarpringError) or not variant.is_peer:
                raise
            raise WarpringError(f"{variant.impl} was not captured in a CUDA graph: {error}") from error

    def _window(self, replay: Callable[[], object], count: int) -> float:
        """Microseconds of one of `count` replays in a row; on a CPU of one."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            replay()
            return (time.perf_counter() - start) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    def first_of_all(self, mine: float) -> float:
        """Rank 0's number, on every rank."""
        return float(self._gather(torch.tensor(mine, dtype=torch.float64))[0])

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's CPU tensor."""
        return self._everyone(mine)

    def _everyone(self, mine: Any) -> list[Any]:
        """Every rank's object."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def _barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _link_gbs(self) -> float:
        """Rate of one rank's reads from its neighbour while all ranks read; 0 where there is no neighbour's GPU."""
        if self.device.type != "cuda" or self.num_ranks == 1:
            return 0.0
        peer = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
        if peer == torch.device("cuda", torch.cuda.current_device()):
            return 0.0
        far, near = (torch.empty(_LINK_BYTES, dtype=torch.uint8, device=place) for place in (peer, self.device))
        near.copy_(far)
        best = float("inf")
        for _ in range(5):
            self._barrier()
            best = min(best, self._window(lambda: near.copy_(far), 4))
        return float(min(self._gather(torch.tensor(_LINK_BYTES / best / 1e3))))

    def _common(self, count: int, load: Load, read_gbs: float, link_gbs: float) -> dict[str, Any]:
        """Fields that all variants share."""
        fields = {
            "model": self.shape.name,
            "seed": self.seed,
            "read_peak_gbs": round(read_gbs, 1),
            "num_ranks": self.num_ranks,
            "tokens_per_rank": count,
            "experts_per_rank": self.shape.num_experts // self.num_ranks,
            "topk": self.shape.topk,
            "routing": self.routing,
            "skew": round(load.skew, 3),
            "asked_skew": self.skew,
            "weight_floor_us": _rounded(load.weight_bytes / read_gbs / 1e3),
        }
        if link_gbs:
            fields["wire_floor_us"] = _rounded(load.wire_bytes / link_gbs / 1e3)
        return fields

    def _record(
        self, variant: Variant, layer: Layer, load: Load, timing: Timing, cosine: float | None, common: dict[str, Any]
    ) -> Record:
        seconds = timing.p50_us * 1e-6
        operations = 2 * 3 * load.pairs / self.num_ranks * self.shape.hidden * self.shape.intermediate
        fields: dict[str, Any] = {
            **common,
            **self._what(variant),
            "repeats": timing.repeats,
            "p10_us": timing.p10_us,
            "p50_us": timing.p50_us,
            "p90_us": timing.p90_us,
            "tflops": _rounded(operations / seconds / 1e12),
            "hbm_gbs": _rounded(load.weight_bytes / seconds / 1e9),
        }
        if cosine is not None:
            fields["cosine_min"] = cosine
        if isinstance(layer, PeerLayer):
            fields["note"] = layer.note
        if (routed := routed_layer(layer)) is not None:
            fields["block_m"] = routed.problem.tokens_per_block
            if (counts := routed.sm_counts) is not None:
                fields |= {"comm_sms": counts.comm_sms, "compute_sms": counts.compute_sms, "note": variant.partition}
        return record("expert_parallel", device=self.device, **fields)

    def _failure(self, variant: Variant, reason: str, common: dict[str, Any]) -> Record:
        """A point without a time: what was asked for, and why there is none."""
        note = None if variant.is_peer else variant.partition
        asked = {"comm_sms": variant.comm_sms, "block_m": variant.block_m, "note": note}
        fields = {name: value for name, value in asked.items() if value is not None}
        return record("expert_parallel", device=self.device, **common, **self._what(variant), **fields, failed=reason)

    def _what(self, variant: Variant) -> dict[str, Any]:
        """Fields that say what a variant is."""
        baseline = variant.impl == "nccl"
        activation = "bf16" if baseline else variant.activation
        fields: dict[str, Any] = {
            "impl": variant.impl,
            "format": "bf16" if baseline else self.format,
            "wire": activation,
            "activation": activation,
            "shared_expert": variant.shared,
        }
        if variant.knob:
            fields["knob"] = variant.knob
        if not baseline and not variant.is_peer:
            fields["overlap"] = variant.impl != "shared"
        if variant.num_slots is not None:
            fields["ring_blocks"] = variant.num_slots
        return fields


def describe(rec: Record) -> str:
    """One line of a record."""
    split = f" {rec['comm_sms']}+{rec['compute_sms']}" if "compute_sms" in rec else ""
    what = f"{rec['model']} {rec['format']} {rec['impl']}{split} act {rec['activation']} shared {rec['shared_expert']}"
    if "failed" in rec:
        return f"{what} T={rec['tokens_per_rank']} skew {rec['skew']}  failed: {rec['failed']}"
    time_us = f"{rec['p50_us']:.1f} us [{rec['p10_us']:.1f}, {rec['p90_us']:.1f}]"
    cosine = f"  cosine {rec['cosine_min']:.6f}" if "cosine_min" in rec else ""
    return (
        f"{what} T={rec['tokens_per_rank']} skew {rec['skew']}  {time_us}  floor {rec['weight_floor_us']:.1f}{cosine}"
    )


def _rounded(value: float) -> float:
    """To five digits: toy layers and whole models alike."""
    return float(f"{value:.5g}")
