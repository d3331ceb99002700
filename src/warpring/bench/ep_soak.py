"""Expert-parallel decode under load: thousands of replays back to back, each with inputs that the device makes itself.

One captured graph draws the inputs of several calls and makes these calls, one behind the other; the host only replays
it, and waits for nothing. What a replay draws is a function of its number and its rank, so that inputs can be drawn
again afterwards: for a check against the same arithmetic done rank-locally, and for a repetition of the first replays,
which must give the same bits. On a CPU the same work is done call by call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warpring.bench.ep_cases import Verifier, layer_fields
from warpring.bench.ep_check import Outcome, Rows
from warpring.errors import ArgumentError
from warpring.expert_parallel.problem import Problem

#: What is soaked by default: the proportions of DeepSeek-V4-Flash, small, and the most tokens that a rank brings.
SOAK_SHAPE, SOAK_FORMAT, SOAK_TOKENS = "h2048xi1024xe64xk8", "mxfp4", 64
#: What is soaked by default where only the semantics can be: a layer of `FORMATS`.
SOAK_SHAPE_OF_CPUS = "h160xi224xe24xk3"
#: Calls in a replay, without anything between them.
CALLS = 4
#: Different tokens, of which every row of a call is one: to draw 64 rows of 2048 numbers would take as long as a call.
_TOKENS = 4096
#: Replays that are repeated at the end, and compared bit by bit.
_REPEATED = 8
#: Memory is looked at after this share of the replays, and at the end.
_SETTLED = 10
#: What the driver takes at a time: no growth of a device's memory up to this is a leak of thousands of replays.
_DRIVER_BYTES = 2 << 20
_MASK = 2**63 - 1
_NO_EXPERT = 2**31 - 1


@dataclass(frozen=True)
class SoakOutcome:
    """What a soak gave on one rank, or the worst of several ranks.

    Attributes:
        replays, checks: replays of the graph, and how many of them were compared.
        worst: over all tokens of the compared replays.
        changed: values of the repeated replays' outputs that differ from the first time.
        allocated_bytes, device_bytes: growth of what torch holds and of what the whole device holds, between a tenth of
            the replays and the end; 0 on a CPU.
        seconds: of all replays.
    """

    replays: int
    checks: int
    worst: Outcome
    changed: int
    allocated_bytes: int
    device_bytes: int
    seconds: float

    def met(self) -> bool:
        """Whether outputs were right, stayed the same, and memory did not grow."""
        flat = self.allocated_bytes <= 0 and self.device_bytes <= _DRIVER_BYTES
        return self.worst.right() and self.changed == 0 and flat

    def worse(self, other: SoakOutcome) -> SoakOutcome:
        """The worse of two, field by field."""
        return SoakOutcome(
            min(self.replays, other.replays),
            min(self.checks, other.checks),
            self.worst.worse(other.worst),
            max(self.changed, other.changed),
            max(self.allocated_bytes, other.allocated_bytes),
            max(self.device_bytes, other.device_bytes),
            max(self.seconds, other.seconds),
        )


class DrawnInputs:
    """Inputs of `CALLS` calls, drawn on the device without a word from the host.

    Every row is one of a few thousand random tokens. Counts go from 0 to the most; rows beyond are NaN and name no
    expert. One slot in 16 is unused, with a NaN weight. Of eight calls one sends every slot of every rank to one
    expert, one goes to the experts of one rank, and of 32 one has no token on any rank.

    Attributes:
        number: int64 scalar on the device: which replay `draw` draws next.
        x, topk_idx, topk_weights, counts: BF16 [CALLS, rows, hidden], int64 and FP32 [CALLS, rows, topk], int32
            [CALLS].
    """

    def __init__(self, problem: Problem, rank: int, device: torch.device, seed: int) -> None:
        rows, topk = problem.max_tokens_per_rank, problem.topk
        self._problem, self._rank, self._seed = problem, rank, seed
        self._parts = [rows, rows * problem.num_experts, rows * topk, rows * topk, 1]
        self._places = torch.arange(1, sum(self._parts) + 1, device=device)
        self._calls = torch.arange(CALLS, device=device)[:, None]
        self._rows = torch.arange(rows, device=device)[None, :, None]
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.randn(_TOKENS, problem.hidden, generator=generator, device=device)
        self._tokens = tokens.bfloat16()
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.x = torch.zeros(CALLS, rows, problem.hidden, dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.zeros(CALLS, rows, topk, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros(CALLS, rows, topk, device=device)
        self.counts = torch.zeros(CALLS, dtype=torch.int32, device=device)

    def draw(self) -> None:
        """The inputs of replay `number`, and the next one's number."""
        problem = self._problem
        rows, topk, num_experts = problem.max_tokens_per_rank, problem.topk, problem.num_experts
        of_all_ranks = mixed((self.number * CALLS + self._calls) * 2**20 + self._seed)
        bits = mixed(mixed(of_all_ranks + self._rank + 1) + self._places)
        token, scores, weights, used, count = bits.split(self._parts, dim=1)
        self.counts.copy_((count[:, 0] % (rows + 1)).masked_fill(of_all_ranks[:, 0] % 32 == 2, 0))
        beyond = self._rows >= self.counts[:, None, None]
        self.x.copy_(self._tokens[token % _TOKENS].masked_fill(beyond, torch.nan))
        ids = scores.reshape(CALLS, rows, num_experts).topk(topk, dim=2).indices
        ids = _skewed(ids, of_all_ranks[:, :, None], problem)
        unused = used.view(CALLS, rows, topk) % 16 == 0
        self.topk_idx.copy_(ids.masked_fill(unused, -1).masked_fill(beyond, _NO_EXPERT))
        new_weights = uniform(weights).view(self.topk_weights.shape) / topk
        self.topk_weights.copy_(new_weights.masked_fill(unused | beyond, torch.nan))
        self.number += 1


def _skewed(ids: torch.Tensor, bits: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Expert ids [CALLS, rows, topk], of some calls all of one expert or of one rank, as `bits` [CALLS, 1, 1] say."""
    kind, expert = bits % 8, (bits >> 8) % problem.num_experts
    local = problem.num_local_experts
    ids = torch.where(kind == 0, expert, ids)
    return torch.where(kind == 1, ids % local + expert // local * local, ids)


def mixed(keys: torch.Tensor) -> torch.Tensor:
    """int64 to random-looking int64, one to one: shifts and products (factors of splitmix64 and moremur)."""
    for factor in (-0x40A7B892E31B1A47, 0x3C79AC492BA7B653):
        keys = (keys ^ ((keys >> 31) & (2**33 - 1))) * factor
    return keys ^ ((keys >> 31) & (2**33 - 1))


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Random int64 as FP32 in [0, 1)."""
    return ((bits & _MASK) >> 39).float() * 2.0**-24


class Soak:
    """Replays of one layer on one rank."""

    def __init__(self, verifier: Verifier, seed: int) -> None:
        """Make the tensors and, on a GPU, the graph; a collective.

        Args:
            verifier: the layer and its check.
            seed: of the inputs, the same on every rank.
        """
        self._verifier, self._device = verifier, verifier.device
        self._inputs = DrawnInputs(verifier.problem, verifier.rank, verifier.device, seed)
        self._out = torch.zeros_like(self._inputs.x)
        self._replay = self._captured()

    def run(self, replays: int, checks: int) -> SoakOutcome:
        """Replay; a collective.

        Args:
            replays: of the graph, before the first few are repeated.
            checks: how many of these are compared, spread evenly.

        Raises:
            ArgumentError: no replays or checks.
            PeerTimeoutError, PoisonedError: a call failed.
        """
        if replays < 1 or not 1 <= checks <= replays:
            raise ArgumentError(f"Soak.run: needs 1 <= checks <= replays; got {checks} checks of {replays} replays.")
        repeated = min(_REPEATED, replays)
        numbers = [*range(replays), *range(repeated)]
        checked = {(index + 1) * replays // checks - 1 for index in range(checks)}
        kept = sorted(checked | set(range(repeated))) + list(range(replays, replays + repeated))
        outputs = self._out.new_empty(len(kept), *self._out.shape)
        where = {step: place for place, step in enumerate(kept)}
        self._restart()
        start = time.perf_counter()
        before = (0, 0)
        for step in range(len(numbers)):
            if step == replays:
                self._restart()
            self._replay()
            if step in where:
                outputs[where[step]].copy_(self._out)
            if step == replays // _SETTLED:
                before = self._memory()
            self._verifier.layer.check()
        after = self._memory()
        seconds = time.perf_counter() - start
        self._verifier.layer.check()
        changed = sum(
            int((_bits(outputs[where[step]]) != _bits(outputs[where[replays + step]])).sum())
            for step in range(repeated)
        )
        worst = self._compare({step: outputs[where[step]] for step in sorted(checked)}, replays)
        growth = (after[0] - before[0], after[1] - before[1])
        return SoakOutcome(replays, checks, worst, changed, *growth, seconds)

    def _calls(self) -> None:
        """Draw, and call the layer on each call's inputs. Outputs are poisoned before."""
        inputs, layer = self._inputs, self._verifier.layer
        inputs.draw()
        self._out.fill_(torch.nan)
        for index in range(CALLS):
            part = (inputs.x[index], inputs.topk_idx[index], inputs.topk_weights[index])
            layer(*part, inputs.counts[index : index + 1], out=self._out[index])

    def _captured(self) -> Callable[[], object]:
        if self._device.type == "cpu":
            return self._calls
        # Once outside, so that what torch loads or allocates at first is there.
        self._calls()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._calls()
        return graph.replay

    def _restart(self) -> None:
        self._inputs.number.zero_()

    def _memory(self) -> tuple[int, int]:
        """Bytes that torch and the whole device hold; waits for the device."""
        if self._device.type == "cpu":
            return 0, 0
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_allocated(self._device), total - free

    def _compare(self, outputs: dict[int, torch.Tensor], replays: int) -> Outcome:
        """Draw the inputs of these replays anew and judge all of their calls; no row beyond a count may be written."""
        inputs = self._inputs
        parts: list[Rows] = []
        untouched = True
        for number, out in outputs.items():
            inputs.number.fill_(number)
            inputs.draw()
            for index, count in enumerate(inputs.counts.tolist()):
                untouched &= bool(out[index, count:].isnan().all())
                fields = (inputs.x, inputs.topk_idx, inputs.topk_weights, out)
                x, ids, weights, y = (field[index, :count].clone() for field in fields)
                parts.append(Rows(x, ids, weights, y, torch.full((count,), len(parts), device=self._device)))
        worst = Outcome(1.0, 1.0, 0.0, replays) if untouched else Outcome(-1.0, -1.0, math.inf, replays)
        for outcome in self._verifier.yardstick.judge(Rows.joined(parts), len(parts)):
            worst = worst.worse(outcome)
        return worst


def _bits(values: torch.Tensor) -> torch.Tensor:
    """BF16 as integers, so that NaN equals itself."""
    return values.view(torch.int16)


def soak_fields(verifier: Verifier, name: str, outcome: SoakOutcome, seed: int) -> dict[str, Any]:
    """The fields of a record of bench "soak"."""
    return {
        **layer_fields(verifier, name, seed),
        "tokens_per_rank": verifier.problem.max_tokens_per_rank,
        "repeats": outcome.replays,
        "calls": outcome.replays * CALLS,
        "checks": outcome.checks,
        "cosine_min": outcome.worst.cosine,
        "changed_values": outcome.changed,
        "allocated_bytes": max(0, outcome.allocated_bytes),
        "device_bytes": max(0, outcome.device_bytes),
        "seconds": round(outcome.seconds, 3),
        "note": f"cosine with FP64 {outcome.worst.exact_cosine:.6f}",
    }
