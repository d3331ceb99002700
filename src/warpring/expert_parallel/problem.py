"""What one expert-parallel layer is: sizes, formats and limits, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from warpring.activation import SILU, Activation
from warpring.errors import ArgumentError, RanksDisagreeError
from warpring.experts import MAX_EXPERTS, Experts
from warpring.formats import FORMATS, QuantizedTensor, ceil_div

#: Peers that the by-value table of addresses has room for (`PeerTable` in ep_params.cuh).
MAX_RANKS = 72
MAX_TOKENS_PER_RANK = 256
MAX_TOPK = 32
MAX_SHARED = 8
#: Capacities that a token block can have: the widths N of the tensor core instructions that the kernel has.
BLOCK_SIZES = (8, 16, 32, 64)
#: Columns that share one FP32 scale of an FP8 activation, and to which packed weights are padded along hidden.
HIDDEN_BLOCK = 128
#: Neurons of one task of the first GEMM, and columns that share one scale of its result.
NEURONS = 64
#: Bits of `l2_full`: one for each task of the first GEMM of a block.
MASK_BITS = 64

ActivationForm = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class Problem:
    """One expert-parallel layer, the same on every rank (its hash is compared when ranks meet).

    Attributes:
        hidden: model width, a multiple of 32.
        intermediate: width inside an expert, a multiple of 32, at most 4096.
        num_experts: routed experts of all ranks together, a multiple of num_ranks; rank r holds the experts from
            `r * num_local_experts` on.
        topk: routed experts a token, at most 32.
        num_ranks: ranks that share the experts, at most 72.
        max_tokens_per_rank: tokens that one rank may bring to a call, at most 256.
        format: number format of the routed experts' weights.
        activation: form of tokens on the wire and in both GEMMs: "fp8" (E4M3 with scales, fast) or "bf16" (the sum of
            two E4M3 numbers, which holds BF16 values down to 2^-9 of the largest of their 128 columns exactly).
        gate: the gated activation between the projections.
        num_shared: experts that see every token of their own rank, fused into the same kernels; at most 8.
        shared_format: number format of the shared experts' weights.
        has_bias: whether routed experts have biases.
        block_m: tokens of a ring block: 8, 16, 32, 64, or None for twice what an expert gets on average.
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    num_ranks: int
    max_tokens_per_rank: int
    format: str = "fp8_block"
    activation: ActivationForm = "fp8"
    gate: Activation = SILU
    num_shared: int = 0
    shared_format: str = "fp8_block"
    has_bias: bool = False
    block_m: int | None = None

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate"):
            size = getattr(self, field)
            least = max(32, ceil_div(size, 32) * 32)
            self._rule(size >= 32 and size % 32 == 0, field, "a positive multiple of 32", f"Zero-pad it to {least}.")
        self._between("num_ranks", 1, MAX_RANKS, "Spread the experts over fewer ranks.")
        self._between("num_experts", 1, MAX_EXPERTS, "Split the layer.")
        self._between("topk", 1, MAX_TOPK, "Split more slots over several calls.")
        self._between("max_tokens_per_rank", 1, MAX_TOKENS_PER_RANK, "Split larger batches over several calls.")
        self._between("num_shared", 0, MAX_SHARED, "Run more shared experts as a dense layer.")
        self._rule(
            self.num_experts % self.num_ranks == 0,
            "num_experts",
            f"a multiple of num_ranks = {self.num_ranks}",
            f"Pad with experts that nothing is routed to, up to {self.num_local_experts * self.num_ranks}.",
        )
        self._rule(
            self.num_neuron_tasks <= MASK_BITS,
            "intermediate",
            f"at most {MASK_BITS * NEURONS}, since a ring block has one mask of {MASK_BITS} bits and a bit stands for "
            f"{NEURONS} neurons",
            "Split each expert into two of half the width (their outputs add up), or shard it over ranks.",
        )
        for field in ("format", "shared_format"):
            self._rule(getattr(self, field) in FORMATS, field, f"one of {', '.join(FORMATS)}", "See docs/formats.md.")
        self._rule(self.activation in ("fp8", "bf16"), "activation", "'fp8' or 'bf16'", "See docs/expert_parallel.md.")
        if self.block_m is None:
            object.__setattr__(self, "block_m", self._default_block_m())
        self._rule(self.block_m in BLOCK_SIZES, "block_m", f"one of {BLOCK_SIZES} or None", "None picks one.")

    def _rule(self, holds: bool, field: str, rule: str, remedy: str) -> None:
        if not holds:
            raise ArgumentError(f"Problem: {field} must be {rule}; got {getattr(self, field)!r}. {remedy}")

    def _between(self, field: str, low: int, high: int, remedy: str) -> None:
        self._rule(low <= getattr(self, field) <= high, field, f"{low} to {high}", remedy)

    def _default_block_m(self) -> int:
        pairs = self.num_ranks * self.max_tokens_per_rank * self.topk
        wanted = ceil_div(2 * pairs, self.num_experts)
        return next((size for size in BLOCK_SIZES if size >= wanted), BLOCK_SIZES[-1])

    @property
    def tokens_per_block(self) -> int:
        """`block_m`, which is a number once the object exists."""
        return self.block_m or BLOCK_SIZES[0]

    @property
    def num_local_experts(self) -> int:
        """Routed experts that one rank holds."""
        return ceil_div(self.num_experts, self.num_ranks)

    @property
    def num_slots_per_token(self) -> int:
        """Rows of `partials` a token: topk routed, then the shared experts."""
        return self.topk + self.num_shared

    @property
    def hidden_padded(self) -> int:
        """hidden rounded up to whole scales of a token."""
        return ceil_div(self.hidden, HIDDEN_BLOCK) * HIDDEN_BLOCK

    @property
    def intermediate_padded(self) -> int:
        """intermediate rounded up to whole tasks of the first GEMM."""
        return ceil_div(self.intermediate, NEURONS) * NEURONS

    @property
    def num_neuron_tasks(self) -> int:
        """Tasks of a block's first GEMM (N1)."""
        return self.intermediate_padded // NEURONS

    @property
    def num_output_tasks(self) -> int:
        """Tasks of a block's second GEMM (N2)."""
        return self.hidden_padded // HIDDEN_BLOCK

    @property
    def activation_bytes(self) -> int:
        """Bytes of one column of a token on the wire: the E4M3 numbers whose sum it is."""
        return 1 if self.activation == "fp8" else 2

    @property
    def scales_per_token(self) -> int:
        """FP32 scales of a published token."""
        return self.hidden_padded // HIDDEN_BLOCK

    @property
    def max_blocks(self) -> int:
        """Blocks that a call can have at most, on one rank, for any routing.

        An expert with n > 0 pairs has `ceil(n / block_m) <= 1 + floor(n / block_m)` blocks; summed over experts.
        """
        pairs = self.num_ranks * self.max_tokens_per_rank * self.topk
        routed = min(self.num_local_experts, pairs) + pairs // self.tokens_per_block
        return routed + self.num_shared * ceil_div(self.max_tokens_per_rank, self.tokens_per_block)

    def description(self) -> dict[str, Any]:
        """Every field as plain values, for hashing and for comparing ranks."""
        return asdict(self)


def config_hash(description: dict[str, Any]) -> str:
    """A stable hash of a description: equal on every machine and Python for equal values."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def check_agreement(descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise unless every rank (the index) gave the same description.

    Raises:
        RanksDisagreeError: naming each field that differs, its values, and the ranks that hold each.
    """
    if len({config_hash(description) for description in descriptions}) <= 1:
        return
    lines: list[str] = []
    for field in sorted(set().union(*descriptions)):
        holders: dict[str, list[int]] = {}
        for rank, description in enumerate(descriptions):
            holders.setdefault(repr(description.get(field)), []).append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{value} on rank {_ranks(ranks)}" for value, ranks in holders.items())
            lines.append(f"{field} is {values}")
    raise RanksDisagreeError(
        f"ExpertParallelDecode: every rank must describe the same layer; {'. '.join(lines)}. "
        "Build it from the same arguments everywhere."
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def local_experts(experts: Experts, rank: int, num_ranks: int) -> Experts:
    """The consecutive experts that `rank` holds, sharing storage with `experts` [num_experts].

    Raises:
        ArgumentError: num_experts does not divide by num_ranks, or no such rank.
    """
    if experts.num_experts % num_ranks or not 0 <= rank < num_ranks:
        raise ArgumentError(
            f"local_experts: num_experts must divide by num_ranks and rank lie below it; got {experts.num_experts} "
            f"experts, rank {rank} of {num_ranks}. Pad with experts that nothing is routed to."
        )
    count = experts.num_experts // num_ranks
    part = slice(rank * count, (rank + 1) * count)

    def cut(stored: QuantizedTensor) -> QuantizedTensor:
        return replace(stored.map(lambda t: t[part]), shape=(count, *stored.shape[1:]))

    return replace(
        experts,
        w13=cut(experts.w13),
        w2=cut(experts.w2),
        w13_bias=None if experts.w13_bias is None else experts.w13_bias[part],
        w2_bias=None if experts.w2_bias is None else experts.w2_bias[part],
    )
