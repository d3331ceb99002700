"""The grouped path, for batches beyond decode and prefill: each expert is read once, for all pairs that want it.

Packed weights have GEMMs of their own on Hopper (`warpring.kernels.grouped_gemm`), which decode the tile layout and
keep sums in FP32. All others go through torch's:

    1 route      sort the (token, slot) pairs by expert; group ends stay on the device
    2 gather     the token of each pair, BF16, in that order
    3 gate_up    grouped GEMM with w13, FP32 sums, BF16 out
    4 activate   routing weight * act(gate, up) in FP32, rounded once to BF16
    5 down       grouped GEMM with w2, FP32 sums, BF16 out
    6 combine    each token's rows added up in FP32 in slot order: one pass of `embedding_bag`, no scatter, no atomics

Neither activations are quantised nor groups padded, unlike in `warpring.classical`; the routing weight is folded in
before a rounding that happens anyway, so no pass over the outputs is spent on it. Sorts, gathers and GEMMs are as many
as in transformers' `grouped_mm` on BF16 weights, passes over the outputs fewer (see docs/architecture.md).

BF16 row-major weights are multiplied in place. All others are expanded to BF16 first: on a CPU one expert at a time, of
those that have tokens; elsewhere in slices of output rows, of all experts at once, no larger than `WORKSPACE_BYTES`.
Slicing outputs, not experts, keeps every group's ends on the device: nothing waits for the GPU, and all of it can be
captured in a CUDA graph where torch has a grouped GEMM kernel (compute capability 9.0 and 10.0; elsewhere torch loops
over the experts from the host). BF16 is exact for bf16, mxfp8 and mxfp4 weights; a code times an FP32 scale (fp8_block,
fp8_channel, nvfp4) is rounded once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch.nn import functional

from warpring.activation import SILU
from warpring.errors import UnsupportedError
from warpring.expand import expand
from warpring.experts import Experts
from warpring.formats import QuantizedTensor, ceil_div, get_format
from warpring.gemm import gemm_by_expert, gemm_by_library, row_chunks
from warpring.kernels import grouped_gemm
from warpring.kernels.expand import expand_slice, specs_of
from warpring.kernels.grouped_activate import activate, kernel_spec
from warpring.kernels.grouped_gemm import moe_grouped_gemm
from warpring.layout import PackedExperts, PackedMatrix, unpack
from warpring.runtime.device import arch_of, has_grouped_gemms, index_of
from warpring.runtime.jit import compiler_version
from warpring.runtime.launch import load

#: Tokens of one pass; larger batches are split, which bounds the gathered rows and their products.
MAX_TOKENS = 8192
#: BF16 bytes of expanded weights that exist at a time away from a CPU (one slice of 128 rows a half at the least).
WORKSPACE_BYTES = 512 << 20
#: A slice of output rows starts at a multiple of this: blocks of scales and panels of the tile layout are never cut.
_SLICE_ROWS = 128


def moe_grouped(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    shared_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a layer's experts through grouped GEMMs. Arguments are checked by `moe_decode`.

    Args:
        x: BF16 [num_tokens, hidden], num_tokens >= 1.
        experts: the layer's weights, row-major or packed, on the device of x.
        topk_idx: int32 or int64 [num_tokens, topk]; an id outside [0, num_experts) is an unused slot.
        topk_weights: [num_tokens, topk], any float type; an unused slot's is ignored (it may be NaN).
        out: BF16 [num_tokens, hidden], overwritten.
        shared_weights: FP32 [num_tokens], the gate of the shared experts, which are slots behind the routed ones; or
            None for 1.

    Returns:
        out. Equal bits from run to run. With our own GEMMs a token's do not depend on its batch; else they may, since a
        library chooses its kernels by size.

    Asynchronous on the current stream. Temporaries of our own GEMMs: see `moe_grouped_gemm`. Of the others, with R =
    min(num_tokens, MAX_TOKENS) * (topk + num_shared): R * (hidden + 2 * intermediate) BF16, then R * (intermediate +
    hidden) BF16; FP32 pieces of the activation; the expanded weights.
    """
    if isinstance(experts, PackedExperts) and _has_gemms(x.device):
        _passes_of_own_gemms(x, experts, topk_idx, topk_weights.float(), out, shared_weights)
        return out
    if isinstance(experts, PackedExperts) and experts.num_shared:
        topk_idx, topk_weights = _with_shared(experts, topk_idx, topk_weights, shared_weights)
        experts = replace(experts, num_experts=experts.num_experts + experts.num_shared, num_shared=0)
    for first in range(0, x.shape[0], MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        _one_pass(x[rows], experts, topk_idx[rows], topk_weights[rows], out[rows])
    return out


def _passes_of_own_gemms(
    x: torch.Tensor,
    packed: PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    shared_weights: torch.Tensor | None,
) -> None:
    for first in range(0, x.shape[0], MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        gate = None if shared_weights is None else shared_weights[rows]
        moe_grouped_gemm(x[rows], packed, topk_idx[rows], topk_weights[rows], out[rows], gate)


def _with_shared(
    experts: PackedExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, shared_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights with a slot more for each shared expert: the experts behind the routed ones."""
    size = (len(topk_idx), experts.num_shared)
    ids = torch.arange(experts.num_shared, dtype=topk_idx.dtype, device=topk_idx.device) + experts.num_experts
    # An id that names no routed expert must not come to name a shared one.
    routed = topk_idx.masked_fill(topk_idx >= experts.num_experts, -1)
    gate = topk_weights.new_ones(size) if shared_weights is None else shared_weights[:, None].expand(size)
    return torch.cat((routed, ids.expand(size)), 1), torch.cat((topk_weights, gate.to(topk_weights.dtype)), 1)


def precompile(experts: Experts | PackedExperts, index_dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels that the path needs of these experts on a GPU, so that a call can be captured."""
    if isinstance(experts, PackedExperts) and _has_gemms(device):
        grouped_gemm.precompile(experts, index_dtype, device)
    elif _has_kernels(device):
        for spec in (*specs_of(experts), kernel_spec(index_dtype, experts.activation.gate_fn)):
            load(spec, index_of(device))


def _one_pass(
    x: torch.Tensor,
    experts: Experts | PackedExperts,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    route = _route(topk_idx, topk_weights, experts.num_experts)
    rows = x.index_select(0, route.token)
    # One row more than pairs: `combine` reads it for unused slots, as padding.
    act = x.new_empty(rows.shape[0] + 1, experts.intermediate)
    for cols, gate_up in _products(rows, _weights(experts, "w13"), route.ends):
        _activate(gate_up.unflatten(1, (2, -1)), experts, route, cols, act)
    for cols, down in _products(act, _weights(experts, "w2"), route.ends):
        if experts.w2_bias is not None:
            bias_row = route.expert.clamp(max=experts.num_experts - 1)
            down[:-1].addcmul_(route.weight[:, None], experts.w2_bias[:, cols].index_select(0, bias_row))
        pad = down.shape[0] - 1
        out[:, cols] = functional.embedding_bag(route.slot_row, down, mode="sum", padding_idx=pad)


@dataclass(frozen=True)
class _Route:
    """The (token, slot) pairs sorted by expert; those of no expert come last.

    Attributes:
        token: int64 [pairs], the token of each row.
        expert: [pairs], its expert; num_experts where it has none.
        order: int64 [pairs], its pair, token * topk + slot.
        weights: [pairs], routing weights in the order of pairs.
        ends: int32 [num_experts], one past each expert's last row.
        slot_row: [num_tokens, topk], the row of each pair; `pairs` where it has no expert.
    """

    token: torch.Tensor
    expert: torch.Tensor
    order: torch.Tensor
    weights: torch.Tensor
    ends: torch.Tensor
    slot_row: torch.Tensor

    @cached_property
    def weight(self) -> torch.Tensor:
        """[pairs], the routing weight of each row."""
        return self.weights[self.order]


def _route(topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> _Route:
    """Few launches: at some hundred tokens they cost as much as what they do."""
    num_tokens, topk = topk_idx.shape
    pairs = num_tokens * topk
    # Every id that names no expert becomes num_experts, -1 by the remainder.
    group = topk_idx.clamp(-1, num_experts).remainder_(num_experts + 1).flatten()
    expert, order = group.sort(stable=True)
    count = torch.arange(max(pairs, num_experts), dtype=expert.dtype, device=expert.device)
    ends = torch.searchsorted(expert, count[:num_experts], right=True, out_int32=True)
    slot_row = torch.empty_like(expert)
    slot_row[order] = count[:pairs]
    slot_row.masked_fill_(slot_row >= ends[-1], pairs)
    return _Route(order // topk, expert, order, topk_weights.flatten(), ends, slot_row.view(num_tokens, topk))


def _activate(
    halves: torch.Tensor, experts: Experts | PackedExperts, route: _Route, cols: slice, out: torch.Tensor
) -> None:
    """out[:, cols] = routing weight * act(gate, up) from BF16 [rows, 2, cols], biases included."""
    act, bias = experts.activation, experts.w13_bias
    if _has_kernels(halves.device) and route.weights.dtype == torch.float32:
        weights, num_experts = route.weights, experts.num_experts
        activate(halves, route.order, route.expert, weights, bias, num_experts, act, cols.start, out)
        return
    for chunk in row_chunks(halves.shape[0], halves.shape[2], halves.device):
        gate, up = halves[chunk, 0].float(), halves[chunk, 1]
        if bias is not None:
            expert = route.expert[chunk].clamp(max=experts.num_experts - 1)
            gate += bias[:, 0, cols].index_select(0, expert)
            up = up + bias[:, 1, cols].index_select(0, expert)
        # The commonest gate in two passes over FP32 in place of four.
        value = functional.silu(gate, inplace=True).mul_(up) if act == SILU else act(gate, up.float())
        torch.mul(value, route.weight[chunk, None], out=out[chunk, cols])


def _products(rows: torch.Tensor, weights: _Weights, ends: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(columns of one half, BF16 [num_rows, halves * columns]) of rows @ weights.T, for all columns in turn."""
    if rows.device.type == "cpu":
        num_outputs = weights.num_halves * weights.num_rows
        yield slice(0, weights.num_rows), gemm_by_expert(rows, weights.expert, num_outputs, ends)
        return
    yield from _products_by_library(rows, weights, ends)


def _products_by_library(
    rows: torch.Tensor, weights: _Weights, ends: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    if weights.in_place:
        step = weights.num_rows
    else:
        row_bytes = ends.numel() * weights.num_halves * rows.shape[1] * 2
        step = max(1, WORKSPACE_BYTES // row_bytes // _SLICE_ROWS) * _SLICE_ROWS
    for first in range(0, weights.num_rows, step):
        last = min(first + step, weights.num_rows)
        yield slice(first, last), gemm_by_library(rows, weights.rows(first, last, ends), ends)


@dataclass(frozen=True)
class _Weights:
    """One projection in any layout, as BF16 matrices [num_halves * rows, cols].

    Attributes:
        stored: row-major or packed.
        format: its number format.
        num_halves: 2 for gate and up, 1 for down.
        num_rows: rows of a half.
    """

    stored: QuantizedTensor | PackedMatrix
    format: str
    num_halves: int
    num_rows: int

    @property
    def in_place(self) -> bool:
        """Whether `rows` gives the stored weights themselves."""
        return self.format == "bf16" and isinstance(self.stored, QuantizedTensor)

    def expert(self, expert: int) -> torch.Tensor:
        """[num_halves * num_rows, cols] of one expert."""
        if isinstance(self.stored, PackedMatrix):
            return self._expand(unpack(self.stored.expert(expert), self.format))[0]
        return expand(self.stored[expert]).flatten(0, -2)

    def rows(self, first: int, last: int, ends: torch.Tensor) -> torch.Tensor:
        """[num_experts, num_halves * (last - first), cols]: these rows of each half; `first` divides by 128.

        Those of an expert that has no rows in the batch, by `ends`, may hold anything.
        """
        if not self.in_place and _has_kernels(ends.device):
            return expand_slice(self.stored, self.format, self.num_rows, first, last, ends)
        if isinstance(self.stored, PackedMatrix):
            return self._expand(unpack(self.stored.rows(first, last), self.format))
        return self._expand(_row_slice(self.stored, first, last))

    def _expand(self, stored: QuantizedTensor) -> torch.Tensor:
        return expand(stored).flatten(1, -2)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether our kernels expand weights and activate there; where they cannot, torch does, in many passes."""
    if device.type != "cuda":
        return False
    try:
        arch_of(index_of(device))
        compiler_version()
    except UnsupportedError as error:
        warnings.warn(f"warpring: path 'grouped' runs through torch alone, slower: {error}", stacklevel=2)
        return False
    return True


def _has_gemms(device: torch.device) -> bool:
    """Whether our own GEMMs run there, on packed weights."""
    return _has_kernels(device) and has_grouped_gemms(device)


def _weights(experts: Experts | PackedExperts, name: str) -> _Weights:
    stored = experts.w13 if name == "w13" else experts.w2
    num_rows = experts.intermediate if name == "w13" else experts.hidden
    return _Weights(stored, experts.format, 2 if name == "w13" else 1, num_rows)


def _row_slice(stored: QuantizedTensor, first: int, last: int) -> QuantizedTensor:
    """Rows [first, last) of every matrix, sharing storage; `first` starts a block of scales."""
    if (first, last) == (0, stored.shape[-2]):
        return stored
    block_rows = (get_format(stored.format).block or (1, 1))[0]
    scale = stored.scale
    return replace(
        stored,
        shape=(*stored.shape[:-2], last - first, stored.shape[-1]),
        data=stored.data[..., first:last, :],
        scale=None if scale is None else scale[..., first // block_rows : ceil_div(last, block_rows), :],
    )
