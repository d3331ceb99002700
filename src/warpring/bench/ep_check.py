"""What outputs of expert-parallel calls are worth: against the same arithmetic done rank-locally, and against FP64.

The yardstick costs hundreds of small operations for each expert, however many tokens it has. So rows of many cases are
judged together, and each case gets its figures from its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.problem import ActivationForm, Problem
from warpring.experts import Experts
from warpring.reference import moe_exact

#: Least cosine of a token with the same arithmetic done rank-locally, and least with FP64 of all tokens of a case.
LEAST_COSINE = 0.9999997
LEAST_EXACT_COSINE: dict[ActivationForm, float] = {"fp8": 0.998, "bf16": 0.9999}
#: Width from which on LEAST_COSINE holds. In narrower rows an output that BF16 rounds the other way, because FP32 sums
#: were added in another order, weighs more: 2^-8 of one column.
_WIDE = 1024
#: Rows that are judged at once, by what the yardstick holds for them: a few GiB for the largest layers.
_AT_ONCE = 16384


def least_cosine(hidden: int) -> float:
    """Least cosine of a token of `hidden` columns with the same arithmetic done rank-locally."""
    return 1.0 - (1.0 - LEAST_COSINE) * max(1.0, _WIDE / hidden)


@dataclass(frozen=True)
class Outcome:
    """What a case gave on one rank, or the worst of several ranks.

    Attributes:
        cosine: least over all compared tokens, against the same arithmetic done rank-locally.
        exact_cosine, exact_error: of all compared tokens together against FP64: cosine, RMS relative error.
        replays: calls that were made.
        tokens: compared tokens.
        hidden: their width, which the bound of their cosines depends on.
    """

    cosine: float
    exact_cosine: float
    exact_error: float
    replays: int
    tokens: int = 0
    hidden: int = _WIDE

    def met(self, activation: ActivationForm) -> bool:
        """Whether both bounds hold."""
        return self.right() and self.exact_cosine >= LEAST_EXACT_COSINE[activation]

    def right(self) -> bool:
        """Whether the outputs are those of the same arithmetic."""
        return self.cosine >= least_cosine(self.hidden)

    def worse(self, other: Outcome) -> Outcome:
        """The worse of two, field by field."""
        return Outcome(
            min(self.cosine, other.cosine),
            min(self.exact_cosine, other.exact_cosine),
            max(self.exact_error, other.exact_error),
            max(self.replays, other.replays),
            max(self.tokens, other.tokens),
            min(self.hidden, other.hidden),
        )


@dataclass(frozen=True)
class Rows:
    """Tokens of some cases and what the layer gave for them.

    Attributes:
        x, y: BF16 [n, hidden].
        topk_idx: [n, topk], below 0 for unused slots.
        topk_weights: FP32 [n, topk].
        case: int64 [n], the number of the case that a row belongs to.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    y: torch.Tensor
    case: torch.Tensor

    def fields(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in order."""
        return self.x, self.topk_idx, self.topk_weights, self.y, self.case

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Rows of all parts, one behind the other."""
        return Rows(*(torch.cat(same) for same in zip(*(part.fields() for part in parts), strict=True)))

    def split(self, most: int) -> list[Rows]:
        """Pieces of at most `most` rows."""
        return [Rows(*same) for same in zip(*(field.split(most) for field in self.fields()), strict=True)]


@dataclass(frozen=True)
class Yardstick:
    """One layer as a rank computes it alone, from the few experts that all others repeat.

    Attributes:
        problem: the layer.
        few: expert e has the weights of `few`'s expert e % few.num_experts.
        shared: the shared experts, or None.
    """

    problem: Problem
    few: Experts
    shared: Experts | None

    def values(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer must give for these tokens (BF16), and what it would in FP64; both [n, hidden]."""
        drawn = torch.where(topk_idx >= 0, topk_idx % self.few.num_experts, -1)
        problem = replace(self.problem, num_experts=self.few.num_experts, num_ranks=1)
        sums = "tensor_core" if x.is_cuda else "fp32"
        expected = run_layer(problem, x, self.few, drawn, topk_weights, self.shared, sums=sums)
        exact = moe_exact(x, self.few, drawn, topk_weights)
        if self.shared is not None:
            everyone = torch.arange(problem.num_shared, device=x.device).expand(len(x), -1)
            exact += moe_exact(x, self.shared, everyone, torch.ones(everyone.shape, device=x.device))
        return expected, exact

    def judge(self, rows: Rows, cases: int) -> list[Outcome]:
        """An outcome for each of the cases 0 to cases - 1; waits for the device. One without rows is perfect."""
        device = rows.x.device
        least = torch.ones(cases, dtype=torch.float64, device=device)
        sums = torch.zeros(4, cases, dtype=torch.float64, device=device)
        for part in rows.split(_AT_ONCE) if len(rows.x) else ():
            expected, exact = self.values(part.x, part.topk_idx, part.topk_weights)
            least.scatter_reduce_(0, part.case, cosines(part.y, expected), "amin")
            y = part.y.double()
            products = (y * exact, y * y, exact * exact, (y - exact).square())
            sums.index_add_(1, part.case, torch.stack([product.sum(1) for product in products]))
        both, ours, theirs, off = sums
        exact_cosine = _cosine(both, ours, theirs)
        error = off.sqrt() / theirs.sqrt().clamp(min=1e-300)
        error = torch.where(error.isnan(), torch.inf, error)
        tokens = torch.zeros(cases, dtype=torch.int64, device=device).index_add_(
            0, rows.case, torch.ones_like(rows.case)
        )
        figures = zip(least.tolist(), exact_cosine.tolist(), error.tolist(), tokens.tolist(), strict=True)
        width = self.problem.hidden
        return [Outcome(cosine, exact, off_by, 0, count, width) for cosine, exact, off_by, count in figures]


def cosines(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cosine of each row, FP64; 1 for rows that are zero in both, and -1 where something is not finite."""
    y, other = y.double(), other.double()
    return _cosine((y * other).sum(1), (y * y).sum(1), (other * other).sum(1))


def _cosine(both: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Cosines from sums of products of two vectors with each other and with themselves."""
    cosine = both / (ours * theirs).sqrt()
    return torch.where((ours == 0) & (theirs == 0), 1.0, cosine).nan_to_num(-1.0)
