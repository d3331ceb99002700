"""The memory of one layer: every offset computed once, here, from the problem and the grids.

Kernels get the result by value as `EpParams` (kernels/ep_params.cuh), mirrored below. What ranks share lies in one
symmetric region with the same offsets on every rank, all else in one local buffer. With T tokens a rank, K slots,
K' = K + shared, R ranks, H and I padded to H_p and I_p, c bytes a column (E4M3 terms), p bytes a partial (2 or 4), s
scales a token, S ring slots of BM tokens and B blocks at most:

    symmetric = 1152 + 32 R ceil(T K / 4) + T ceil128(c H_p + 4 s + 4 K) + p T K' H
    local     = 32 + 16 (B + 1) + S (16 + 8 BM + BM (c H_p + 4 s) + BM (c I_p + I_p / 16) + 20)

and at most 255 bytes of padding before each region.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warpring.errors import ArgumentError
from warpring.expert_parallel.problem import MAX_RANKS, NEURONS, Problem
from warpring.formats import ceil_div

_ALIGNMENT = 256
_ROW_ALIGNMENT = 128
_PACKET_BYTES = 16
_IDS_PER_PACKET = 4
#: Ring slots where nobody says otherwise, if that many are enough for the order of tasks: a few MiB, in cache.
DEFAULT_SLOTS = 32
_u64, _u32, _i32, _ptr = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


class PeerTable(ctypes.Structure):
    """Where the peers' regions lie: `base + offset[p]` modulo 2^64; 592 bytes."""

    _fields_ = (("base", _u64), ("offset", _u64 * MAX_RANKS), ("rank", _i32), ("num_ranks", _i32))


class EpState(ctypes.Structure):
    """Persistent device state of a layer."""

    _fields_ = (
        ("generation", _u64),
        ("block_base", _u64),
        ("poison", _u32),
        ("combine_begun", _u32),
        ("combine_done", _u32),
        ("claimed", _u32),
        ("tickets", _u32),
        ("reserved", _u32),
    )


class EpError(ctypes.Structure):
    """What a failed wait tells the host, in pinned host memory."""

    _fields_ = (
        ("code", _u32),
        ("rank", _i32),
        ("peer", _i32),
        ("flag", _u32),
        ("generation", _u64),
        ("expected", _u64),
        ("seen", _u64),
    )


class EpParams(ctypes.Structure):
    """What every kernel is handed by value; see ep_params.cuh for the fields."""

    _fields_ = (
        ("peers", PeerTable),
        ("arrived_offset", _u64),
        ("done_offset", _u64),
        ("meta_offset", _u64),
        ("rows_offset", _u64),
        ("partials_offset", _u64),
        ("meta_bytes", _u64),
        ("row_bytes", _u64),
        ("gmem_state", _ptr),
        ("pinned_error", _ptr),
        ("gmem_plan", _ptr),
        ("gmem_ring_info", _ptr),
        ("gmem_ring_x", _ptr),
        ("gmem_ring_x_scale", _ptr),
        ("gmem_ring_act", _ptr),
        ("gmem_ring_act_scale", _ptr),
        ("gmem_l1_full", _ptr),
        ("gmem_l1_empty", _ptr),
        ("gmem_l2_full", _ptr),
        ("gmem_l2_empty", _ptr),
        ("timeout_ns", _u64),
        ("max_tokens", _i32),
        ("num_slots", _i32),
        ("max_blocks", _i32),
        ("comm_ctas", _i32),
        ("compute_ctas", _i32),
        ("lag", _i32),
    )


@dataclass(frozen=True)
class Schedule:
    """The grids, and how far the order of tasks lets the GEMMs of a block lie apart; the same on every rank.

    Attributes:
        comm_ctas: CTAs of role1.
        compute_ctas: CTAs of role2.
        lag: blocks between a block's first and second GEMM in the list of tasks.
        num_slots: ring slots.
    """

    comm_ctas: int
    compute_ctas: int
    lag: int
    num_slots: int


def plan_schedule(
    problem: Problem, comm_ctas: int, compute_ctas: int, num_slots: int | None = None, *, sequence: bool = False
) -> Schedule:
    """The schedule for these grids.

    Args:
        problem: the layer.
        comm_ctas, compute_ctas: grids of role1 and role2.
        num_slots: ring slots; None for 32, or as many as are needed.
        sequence: whether role1 ends before role2 begins, so that it can wait for no slot to become free.

    Raises:
        ArgumentError: fewer slots than the least lag and two: the earliest unfinished task could then wait for a later
            one; or in a sequence, fewer than a call's blocks.
    """
    least_lag = ceil_div(compute_ctas, problem.num_neuron_tasks) + 1
    least = max(least_lag + 2, problem.max_blocks if sequence else 0)
    if num_slots is None:
        num_slots = max(least, min(DEFAULT_SLOTS, problem.max_blocks))
    if num_slots < least:
        blocks = f" and max_blocks = {problem.max_blocks}, as the roles follow each other" if sequence else ""
        raise ArgumentError(
            f"plan_schedule: num_slots must be at least {least_lag + 2} with {compute_ctas} compute CTAs and "
            f"{problem.num_neuron_tasks} tasks a block{blocks}; got {num_slots}. Leave it out for a number that fits."
        )
    # Half of the ring, so that the first GEMMs of a small batch all come before its second ones and the tail is short;
    # but role1 must be able to fill the blocks that all CTAs take up at once.
    ahead = ceil_div(compute_ctas, problem.num_neuron_tasks + problem.num_output_tasks) + 3
    lag = min(min(num_slots, DEFAULT_SLOTS) // 2, num_slots - ahead)
    return Schedule(comm_ctas, compute_ctas, max(least_lag, lag), num_slots)


@dataclass(frozen=True)
class Region:
    """A named part of a buffer, `offset` bytes from its start and a multiple of 256."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where everything lies.

    Attributes:
        symmetric, local: the parts of the two buffers, in order.
        meta_bytes: routing that one rank publishes to each other in a call.
        row_bytes: one published token.
        params_bytes: size of `EpParams`, which the kernels check.
    """

    symmetric: tuple[Region, ...]
    local: tuple[Region, ...]
    meta_bytes: int
    row_bytes: int
    params_bytes: int = ctypes.sizeof(EpParams)

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of the symmetric buffer."""
        return _end(self.symmetric)

    @property
    def local_bytes(self) -> int:
        """Bytes of the local buffer."""
        return _end(self.local)

    def offset(self, name: str) -> int:
        """Offset of the region of that name in its buffer."""
        return next(region.offset for region in (*self.symmetric, *self.local) if region.name == name)

    def report(self) -> str:
        """The regions and their bytes, one a line, for people."""
        lines = [f"symmetric {self.symmetric_bytes:,} bytes, local {self.local_bytes:,} bytes"]
        for kind, regions in (("symmetric", self.symmetric), ("local", self.local)):
            lines += [f"  {kind:<10}{r.name:<16}{r.num_bytes:>14,} at {r.offset:,}" for r in regions]
        return "\n".join(lines)


def plan_layout(problem: Problem, schedule: Schedule) -> Layout:
    """Offsets of all regions: a pure function, the same on every rank."""
    tokens, ranks, block = problem.max_tokens_per_rank, problem.num_ranks, problem.tokens_per_block
    column, scales = problem.activation_bytes, problem.scales_per_token
    partial_bytes = 2 if problem.activation == "fp8" else 4
    meta_bytes = _PACKET_BYTES * ceil_div(tokens * problem.topk, _IDS_PER_PACKET)
    row_bytes = _up(column * problem.hidden_padded + 4 * scales + 4 * problem.topk, _ROW_ALIGNMENT)
    slots = schedule.num_slots
    symmetric = _place(
        arrived=8 * MAX_RANKS,
        done=8 * MAX_RANKS,
        meta=2 * ranks * meta_bytes,
        rows=tokens * row_bytes,
        partials=tokens * problem.num_slots_per_token * problem.hidden * partial_bytes,
    )
    local = _place(
        state=ctypes.sizeof(EpState),
        plan=_PACKET_BYTES * (1 + problem.max_blocks),
        ring_info=slots * (16 + 8 * block),
        ring_x=slots * block * column * problem.hidden_padded,
        ring_x_scale=slots * block * 4 * scales,
        ring_act=slots * block * column * problem.intermediate_padded,
        ring_act_scale=slots * block * 4 * (problem.intermediate_padded // NEURONS),
        l1_full=4 * slots,
        l1_empty=4 * slots,
        l2_full=8 * slots,
        l2_empty=4 * slots,
    )
    return Layout(symmetric, local, meta_bytes, row_bytes)


def make_params(
    problem: Problem,
    schedule: Schedule,
    layout: Layout,
    *,
    rank: int,
    addresses: Sequence[int],
    local_address: int,
    error_address: int,
    timeout_ns: int,
) -> EpParams:
    """The struct that the kernels of `rank` get.

    Args:
        addresses: of every rank's symmetric buffer as this rank sees it.
        local_address, error_address: of this rank's local buffer and pinned error record.
        timeout_ns: bound of every wait.
    """
    table = PeerTable(base=addresses[rank], rank=rank, num_ranks=problem.num_ranks)
    for peer, address in enumerate(addresses):
        table.offset[peer] = (address - addresses[rank]) % 2**64
    pointers = {f"gmem_{region.name}": local_address + region.offset for region in layout.local}
    offsets = {f"{region.name}_offset": region.offset for region in layout.symmetric}
    return EpParams(
        peers=table,
        **offsets,
        **pointers,
        pinned_error=error_address,
        meta_bytes=layout.meta_bytes,
        row_bytes=layout.row_bytes,
        timeout_ns=timeout_ns,
        max_tokens=problem.max_tokens_per_rank,
        num_slots=schedule.num_slots,
        max_blocks=problem.max_blocks,
        comm_ctas=schedule.comm_ctas,
        compute_ctas=schedule.compute_ctas,
        lag=schedule.lag,
    )


def pinned_error() -> torch.Tensor:
    """An error record of zeros (uint8 [40]) in pinned host memory, which kernels reach at the same address."""
    return torch.zeros(ctypes.sizeof(EpError), dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def read_error(record: torch.Tensor) -> EpError:
    """What the record holds now; `code` 0 is no error. Reading waits for nothing."""
    return EpError.from_buffer_copy(record.numpy().tobytes())


def _place(**sizes: int) -> tuple[Region, ...]:
    regions: list[Region] = []
    for name, size in sizes.items():
        regions.append(Region(name, _up(_end(regions), _ALIGNMENT), size))
    return tuple(regions)


def _end(regions: Sequence[Region]) -> int:
    return regions[-1].offset + regions[-1].num_bytes if regions else 0


def _up(size: int, alignment: int) -> int:
    return ceil_div(size, alignment) * alignment
