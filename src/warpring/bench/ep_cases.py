"""The cases that expert-parallel decode is verified by: layers of real models, token counts, routings; and their check.

Experts repeat a few drawn ones, as in `inputs`, but so that experts with the same place on different ranks differ: a
token that went to the wrong rank shows. The yardstick is `run_layer` on each rank's own tokens, with the drawn experts
alone: every expert has the weights of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from warpring.bench.inputs import drawn_experts, make_routing, repeat_experts
from warpring.bench.shapes import MODELS, LayerShape, parse_shape
from warpring.errors import ArgumentError
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import ActivationForm, Problem
from warpring.reference import moe_exact

#: Least cosine of a token with the same arithmetic done rank-locally, and least with FP64 of a whole batch.
LEAST_COSINE = 0.9999997
LEAST_EXACT_COSINE: dict[ActivationForm, float] = {"fp8": 0.998, "bf16": 0.9999}
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


@dataclass(frozen=True)
class Outcome:
    """What a case gave on one rank, or the worst of several ranks.

    Attributes:
        cosine: least over all tokens and checked replays, against the same arithmetic done rank-locally.
        exact_cosine, exact_error: of whole batches against FP64: least cosine, largest RMS relative error.
        replays: calls that were made.
    """

    cosine: float
    exact_cosine: float
    exact_error: float
    replays: int

    def met(self, activation: ActivationForm) -> bool:
        """Whether both bounds hold."""
        return self.cosine >= LEAST_COSINE and self.exact_cosine >= LEAST_EXACT_COSINE[activation]

    def worse(self, other: Outcome) -> Outcome:
        """The worse of two, field by field."""
        return Outcome(
            min(self.cosine, other.cosine),
            min(self.exact_cosine, other.exact_cosine),
            max(self.exact_error, other.exact_error),
            max(self.replays, other.replays),
        )


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


class Verifier:
    """One layer of one model on this rank, ready to run cases.

    Attributes:
        layer: the layer.
        problem: what it is.
        rank, device: of this process.
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
        if format is None and name not in FORMATS:
            raise ArgumentError(f"Verifier: name must be one of {', '.join(FORMATS)}; got {name!r}. Or pass a format.")
        format = format or FORMATS[name]
        self.rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._shape = shape = layer_shape(name, num_ranks, device)
        self.device, self._seed = device, seed
        self.problem = Problem(
            shape.hidden,
            shape.intermediate,
            shape.num_experts,
            shape.topk,
            num_ranks,
            min(max_tokens, _CPU_TOKENS) if device.type == "cpu" else max_tokens,
            format=format,
            activation=activation,
            gate=shape.activation,
            num_shared=num_shared,
            has_bias=shape.has_bias,
        )
        local = self.problem.num_local_experts
        drawn = num_drawn(local)
        self._few = drawn_experts(shape, format, device, seed, drawn)
        which = torch.arange(self.rank * local, (self.rank + 1) * local, device=device) % drawn
        self._shared = None
        if num_shared:
            plain = replace(shape, has_bias=False)
            self._shared = drawn_experts(plain, self.problem.shared_format, device, seed + 1, num_shared)
        self.layer = ExpertParallelDecode(
            self.problem, group, repeat_experts(self._few, which), shared=self._shared, **options
        )

    def run(self, case: Case, *, replays: int, checked: int) -> Outcome:
        """Run a case with changing inputs, routings and counts, `checked` of the replays compared; a collective.

        On a GPU every replay is one of the same captured graph.
        """
        most = self.problem.max_tokens_per_rank
        x = torch.empty(most, self.problem.hidden, dtype=torch.bfloat16, device=self.device)
        topk_idx = torch.empty(most, self.problem.topk, dtype=torch.int64, device=self.device)
        weights = torch.empty(most, self.problem.topk, device=self.device)
        count = torch.zeros(1, dtype=torch.int32, device=self.device)
        out = torch.full_like(x, torch.nan)
        replay = self._replayer(x, topk_idx, weights, count, out)
        outcome = Outcome(1.0, 1.0, 0.0, replays)
        for index, seed in enumerate(self._seeds(case, replays)):
            num_tokens = case.count(self.rank, self.problem.num_ranks, most, seed)
            self._fill(case, num_tokens, seed, x, topk_idx, weights)
            count.fill_(num_tokens)
            replay()
            if index * checked // replays != (index + 1) * checked // replays:
                part = slice(num_tokens)
                outcome = outcome.worse(self.compare(x[part], topk_idx[part], weights[part], out[part]))
        return outcome

    def _replayer(
        self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, count: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], object]:
        def call() -> object:
            return self.layer(x, topk_idx, weights, count, out=out)

        if self.device.type == "cpu":
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize(self.device)
            self.layer.check()

        return replay

    def _seeds(self, case: Case, replays: int) -> Iterator[int]:
        """A seed for each replay, other ones on every rank; a hash of text, since Python's own differs by process."""
        start = sum(ord(letter) * 131**place for place, letter in enumerate(str(case))) + self._seed
        for index in range(replays):
            yield (start + 7919 * index + 104729 * self.rank) % 2**40

    def _fill(
        self,
        case: Case,
        num_tokens: int,
        seed: int,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """New tokens and a new routing; rows that do not count are NaN, and name an expert that is not there."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x.normal_(generator=generator)
        kind = "zipf" if case.routing == "zipf" else "uniform"
        routing = make_routing(self._shape, len(x), kind, seed=seed).to(self.device)
        ids, new_weights = routing.topk_idx, routing.topk_weights
        if case.routing == "one expert":
            ids[:] = self.problem.num_experts - 1
        elif case.routing == "one rank":
            ids %= self.problem.num_local_experts
        elif case.routing == "unused":
            unused = torch.rand(ids.shape, generator=generator, device=self.device) < 0.5
            ids[unused], new_weights[unused] = -1, torch.nan
        topk_idx.copy_(ids)
        weights.copy_(new_weights)
        x[num_tokens:], topk_idx[num_tokens:], weights[num_tokens:] = torch.nan, 2**31 - 1, torch.nan

    def compare(self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Outcome:
        """What the layer's outputs `y` [num_tokens, hidden] for these inputs are worth; waits for the device."""
        if not len(x):
            return Outcome(1.0, 1.0, 0.0, 0)
        used = topk_idx >= 0
        drawn = torch.where(used, topk_idx % self._few.num_experts, -1)
        problem = replace(self.problem, num_experts=self._few.num_experts, num_ranks=1)
        sums = "tensor_core" if x.is_cuda else "fp32"
        expected = run_layer(problem, x, self._few, drawn, weights, self._shared, sums=sums)
        exact = moe_exact(x, self._few, drawn, weights)
        if self._shared is not None:
            everyone = torch.arange(self.problem.num_shared, device=x.device).expand(len(x), -1)
            exact += moe_exact(x, self._shared, everyone, torch.ones(everyone.shape, device=x.device))
        error = float((y.double() - exact).norm() / exact.norm().clamp(min=1e-300))
        return Outcome(_cosine(y, expected), _cosine(y.flatten()[None], exact.flatten()[None]), error, 0)


def _cosine(y: torch.Tensor, other: torch.Tensor) -> float:
    """Least cosine of a row; 1 for rows that are zero in both, and -1 where something is not finite."""
    y, other = y.double(), other.double()
    zero = (y == 0).all(1) & (other == 0).all(1)
    cosine = (y * other).sum(1) / (y.norm(dim=1) * other.norm(dim=1))
    return float(torch.where(zero, 1.0, cosine).nan_to_num(-1.0).min())
