"""The cases that expert-parallel decode is verified by: layers of real models, token counts, routings; and their runs.

Experts repeat a few drawn ones, as in `inputs`, but so that experts with the same place on different ranks differ: a
token that went to the wrong rank shows. Outputs are judged in `ep_check`, by the drawn experts alone: every expert has
the weights of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from warpring.bench.ep_check import LEAST_COSINE, LEAST_EXACT_COSINE, Outcome, Rows, Yardstick
from warpring.bench.inputs import drawn_experts, repeat_experts
from warpring.bench.shapes import MODELS, LayerShape, parse_shape
from warpring.errors import ArgumentError
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import ActivationForm, Problem

__all__ = [
    "FORMATS",
    "LEAST_COSINE",
    "LEAST_EXACT_COSINE",
    "Case",
    "Outcome",
    "Verifier",
    "case_fields",
    "cases",
    "layer_fields",
    "problem_of",
]

#: Models that are verified, each in the format that its checkpoints hold and the kernels have; then ragged sizes.
FORMATS = {
    "deepseek-v4-flash": "mxfp4",
    "deepseek-v4.1-flash": "mxfp4",
    "glm-5.2": "fp8_block",
    "qwen3-235b-a22b": "fp8_block",
    "gpt-oss-120b": "mxfp4",
    "h288xi96xe24xk5": "mxfp4",
    "h160xi224xe24xk3": "fp8_block",
}
TOKENS = (0, 1, 2, 3, 7, 8, 16, 31, 64, 128, 256)
#: Routings beside an even one, with the token counts that they are verified at.
SKEWED = {"zipf": (16, 256), "one expert": (8, 256), "one rank": (31, 256), "unused": (64,)}
#: Numbers of drawn experts to choose from: one that does not divide a rank's share.
_DRAWN = (7, 5, 11, 13)
#: On a CPU, widths are divided by 16, and no rank brings more tokens than this.
_CPU_DIVISOR, _CPU_TOKENS = 16, 24
#: Rows of a call that are compared at most: every s-th one, other ones in each of s calls that follow each other.
COMPARED_ROWS = 32
#: Calls of few rows have a form of their own on a GPU (EARLY_TOKENS of the engine): cases that fit take it.
_FEW_ROWS = 64
_NO_EXPERT = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """What the ranks bring to a call.

    Attributes:
        tokens: of each rank, or None for other counts on every rank and in every replay.
        routing: "uniform", "zipf", "one expert", "one rank", "unused" or "empty rank".
    """

    tokens: int | None
    routing: str = "uniform"

    def count(self, rank: int, num_ranks: int, most: int, seed: int) -> int:
        """Tokens of a rank in the replay with that seed."""
        if self.tokens is None:
            return int(torch.randint(0, most + 1, (1,), generator=torch.Generator().manual_seed(seed)))
        if self.routing == "empty rank" and rank == num_ranks - 1:
            return 0
        return min(self.tokens, most)

    def __str__(self) -> str:
        return f"{'unequal' if self.tokens is None else self.tokens} {self.routing}"


def cases(most: int) -> list[Case]:
    """The cases of one layer whose ranks bring at most `most` tokens; counts that come out equal once."""
    found = [Case(min(count, most)) for count in TOKENS]
    found += [Case(min(count, most), kind) for kind, counts in SKEWED.items() for count in counts]
    found += [Case(None), Case(min(16, most), "empty rank")]
    return list(dict.fromkeys(found))


def layer_shape(name: str, num_ranks: int, device: torch.device) -> LayerShape:
    """The model's layer, scaled down on a CPU, with a number of experts that divides by the ranks."""
    shape = parse_shape(name)
    experts = shape.num_experts
    if device.type == "cpu" and name in MODELS:
        shape = replace(
            shape,
            hidden=max(32, shape.hidden // _CPU_DIVISOR // 32 * 32),
            intermediate=max(32, shape.intermediate // _CPU_DIVISOR // 32 * 32),
        )
        experts = max(shape.topk, experts // _CPU_DIVISOR)
    return replace(shape, num_experts=-(-experts // num_ranks) * num_ranks)


def num_drawn(num_local_experts: int) -> int:
    """How many experts to draw, so that repeating them gives ranks different experts in the same place."""
    return next((number for number in _DRAWN if num_local_experts % number), _DRAWN[0])


def problem_of(
    name: str,
    num_ranks: int,
    device: torch.device,
    *,
    format: str | None = None,
    activation: ActivationForm = "fp8",
    num_shared: int = 0,
    max_tokens: int = max(TOKENS),
) -> Problem:
    """The problem that a `Verifier` with these arguments builds."""
    if format is None and name not in FORMATS:
        raise ArgumentError(f"Verifier: name must be one of {', '.join(FORMATS)}; got {name!r}. Or pass a format.")
    shape = layer_shape(name, num_ranks, device)
    return Problem(
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.topk,
        num_ranks,
        min(max_tokens, _CPU_TOKENS) if device.type == "cpu" else max_tokens,
        format=format or FORMATS[name],
        activation=activation,
        gate=shape.activation,
        num_shared=num_shared,
        has_bias=shape.has_bias,
    )


class Verifier:
    """One layer of one model on this rank, ready to run cases.

    Attributes:
        layer: the layer.
        problem: what it is.
        rank, device: of this process.
        yardstick: what judges its outputs.
        inputs: tensors of a call.
    """

    def __init__(
        self,
        name: str,
        group: Any | None,
        device: torch.device,
        *,
        format: str | None = None,
        activation: ActivationForm = "fp8",
        num_shared: int = 0,
        seed: int = 0,
        max_tokens: int = max(TOKENS),
        **options: Any,
    ) -> None:
        """Build the layer; a collective.

        Args:
            name: a key of `FORMATS`, or with a format of one's own any name or sizes that `parse_shape` reads.
            group, options: as in `ExpertParallelDecode`.
            device: of this rank.
            format: of the routed weights; None is that of `FORMATS`.
            activation, num_shared: as in `Problem`.
            seed: of weights and inputs.
            max_tokens: most tokens of a rank; on a CPU not more than 24 of them.
        """
        self.rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.problem = problem = problem_of(
            name,
            num_ranks,
            device,
            format=format,
            activation=activation,
            num_shared=num_shared,
            max_tokens=max_tokens,
        )
        self.device, self._seed = device, seed
        shape = layer_shape(name, num_ranks, device)
        local = problem.num_local_experts
        drawn = num_drawn(local)
        few = drawn_experts(shape, problem.format, device, seed, drawn)
        which = torch.arange(self.rank * local, (self.rank + 1) * local, device=device) % drawn
        shared = None
        if num_shared:
            plain = replace(shape, has_bias=False)
            shared = drawn_experts(plain, problem.shared_format, device, seed + 1, num_shared)
        self.yardstick = Yardstick(problem, few, shared)
        self.layer = ExpertParallelDecode(problem, group, repeat_experts(few, which), shared=shared, **options)
        self.inputs = CaseInputs(problem, device)

    def run(self, case: Case, *, replays: int, checked: int) -> Outcome:
        """`run_all` of one case."""
        return self.run_all([case], replays=replays, checked=checked)[0]

    def run_all(self, cases: Sequence[Case], *, replays: int, checked: int) -> list[Outcome]:
        """Run cases with changing inputs, routings and counts, `checked` replays of each compared; a collective.

        On a GPU every replay is one of the same captured graph (of one for few rows where no rank brings more), and the
        host waits for nothing in between.
        """
        parts: list[Rows] = []
        clean: list[torch.Tensor] = []
        callers: dict[int, Callable[[], object]] = {}  # graphs must be gone before the layer's contexts are
        for number, case in enumerate(cases):
            rows = self.rows_of(case)
            if rows not in callers:
                callers[rows] = self._caller(rows)
            clean.append(self._run(case, callers[rows], number, replays, checked, parts))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.layer.check()
        outcomes = self.yardstick.judge(Rows.joined(parts), len(cases)) if parts else [_PERFECT] * len(cases)
        broken = Outcome(-1.0, -1.0, math.inf, replays)
        return [
            replace(outcome, replays=replays) if bool(whole) else outcome.worse(broken)
            for outcome, whole in zip(outcomes, clean, strict=True)
        ]

    def rows_of(self, case: Case) -> int:
        """Rows of the call that serves a case."""
        few = case.tokens is not None and case.tokens <= _FEW_ROWS
        return min(_FEW_ROWS if few else self.problem.max_tokens_per_rank, self.problem.max_tokens_per_rank)

    def _run(
        self, case: Case, call: Callable[[], object], number: int, replays: int, checked: int, parts: list[Rows]
    ) -> torch.Tensor:
        """Replay one case, and keep rows of the calls that are compared, for case `number`.

        Returns:
            bool scalar on the device: whether every call wrote all of its tokens, finite values, and nothing else.
        """
        most, inputs = self.problem.max_tokens_per_rank, self.inputs
        clean = torch.ones((), dtype=torch.bool, device=self.device)
        for index, (seed, common) in enumerate(self._seeds(case, replays)):
            num_tokens = case.count(self.rank, self.problem.num_ranks, most, seed)
            inputs.fill(case.routing, num_tokens, seed, common)
            call()
            self.layer.check()
            clean &= inputs.out[:num_tokens].isfinite().all() & inputs.out[num_tokens:].isnan().all()
            if num_tokens and index * checked // replays != (index + 1) * checked // replays:
                step = -(-num_tokens // COMPARED_ROWS)
                parts.append(inputs.rows(slice(index % step, num_tokens, step), number))
        return clean

    def _caller(self, rows: int) -> Callable[[], object]:
        """What makes one call with the first `rows` rows of the inputs: on a GPU, by replaying a graph."""
        inputs = self.inputs

        def call() -> object:
            part = slice(rows)
            arguments = (inputs.x[part], inputs.topk_idx[part], inputs.topk_weights[part], inputs.count)
            return self.layer(*arguments, out=inputs.out[part])

        if self.device.type == "cpu":
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def _seeds(self, case: Case, replays: int) -> Iterator[tuple[int, int]]:
        """Two seeds for each replay: one of every rank's own, and one that all ranks have.

        Made of a hash of text, since Python's own differs by process.
        """
        start = sum(ord(letter) * 131**place for place, letter in enumerate(str(case))) + self._seed
        for index in range(replays):
            common = start + 7919 * index
            yield (common + 104729 * (self.rank + 1)) % 2**40, common % 2**40

    def compare(self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Outcome:
        """What the layer's outputs `y` [num_tokens, hidden] of one call are worth; waits for the device."""
        case = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return self.yardstick.judge(Rows(x, topk_idx, weights, y, case), 1)[0]


class CaseInputs:
    """The tensors of a call, and their filling without a wait for the device.

    Attributes:
        x, out: BF16 [rows, hidden].
        topk_idx, topk_weights: int64 and FP32 [rows, topk].
        count: int32 [1].
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem = problem
        rows, topk = problem.max_tokens_per_rank, problem.topk
        self.x = torch.empty(rows, problem.hidden, dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.empty(rows, topk, dtype=torch.int64, device=device)
        self.topk_weights = torch.empty(rows, topk, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.out = torch.full_like(self.x, torch.nan)
        self._own, self._common = torch.Generator(device), torch.Generator(device)

    def fill(self, routing: str, num_tokens: int, seed: int, common: int) -> None:
        """New tokens and a new routing; rows that do not count are NaN and name no expert, and outputs are poisoned."""
        self._own.manual_seed(seed)
        self._common.manual_seed(common)
        self.x.normal_(generator=self._own)
        self.topk_weights.copy_(self.topk_weights.normal_(generator=self._own).softmax(1))
        self.topk_idx.copy_(self._routed(routing))
        if routing == "unused":
            draw = torch.rand(self.topk_idx.shape, generator=self._own, device=self.x.device)
            self.topk_idx.masked_fill_(draw < 0.5, -1)
            self.topk_weights.masked_fill_(draw < 0.5, torch.nan)
        for tensor, poison in ((self.x, torch.nan), (self.topk_idx, _NO_EXPERT), (self.topk_weights, torch.nan)):
            tensor[num_tokens:] = poison
        self.out.fill_(torch.nan)
        self.count.fill_(num_tokens)

    def _routed(self, routing: str) -> torch.Tensor:
        """Expert ids [rows, topk], distinct within a token where all experts take part; hot ones are everywhere."""
        problem, device = self._problem, self.x.device
        if routing == "one expert":
            return torch.full_like(self.topk_idx, problem.num_experts - 1)
        scores = torch.rand(len(self.x), problem.num_experts, generator=self._own, device=device)
        if routing == "zipf":
            # The least of draws from exponentials of these rates are a draw without replacement in proportion to them.
            rank = torch.randperm(problem.num_experts, generator=self._common, device=device) + 1
            scores = scores.clamp(min=1e-30).log() * rank
        ids = scores.topk(problem.topk, dim=1).indices
        return ids % problem.num_local_experts if routing == "one rank" else ids

    def rows(self, part: slice, number: int) -> Rows:
        """A copy of some rows and of what the layer gave for them."""
        x, ids, weights, y = (t[part].clone() for t in (self.x, self.topk_idx, self.topk_weights, self.out))
        return Rows(x, ids, weights, y, torch.full((len(x),), number, dtype=torch.int64, device=x.device))


_PERFECT = Outcome(1.0, 1.0, 0.0, 0)


def layer_fields(verifier: Verifier, model: str, seed: int) -> dict[str, Any]:
    """The fields of a record that say what was verified, but for its tokens."""
    problem, split = verifier.problem, verifier.layer.sm_counts
    fields: dict[str, Any] = {
        "model": model,
        "format": problem.format,
        "activation": problem.activation,
        "shared_expert": "fused" if problem.num_shared else "none",
        "num_ranks": problem.num_ranks,
        "experts_per_rank": problem.num_local_experts,
        "topk": problem.topk,
        "seed": seed,
    }
    if split is not None:
        fields |= {"comm_sms": split.comm_sms, "compute_sms": split.compute_sms}
    return fields


def case_fields(verifier: Verifier, model: str, case: Case, outcome: Outcome, seed: int) -> dict[str, Any]:
    """The fields of a record of bench "ep_verify"."""
    problem = verifier.problem
    fields: dict[str, Any] = {
        **layer_fields(verifier, model, seed),
        "max_tokens_per_rank": problem.max_tokens_per_rank,
        "case": str(case),
        "repeats": outcome.replays,
        "tokens": outcome.tokens,
        "cosine_min": outcome.cosine,
        "exact_cosine_min": outcome.exact_cosine,
        "met": outcome.met(problem.activation),
    }
    if math.isfinite(outcome.exact_error):
        fields["rms_rel_error"] = outcome.exact_error
    return fields
