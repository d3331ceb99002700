"""Offsets: no overlap, aligned, as many bytes as the stated formula; the structs as the kernels' header has them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from warpring import ArgumentError
from warpring.expert_parallel import workspace
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.workspace import (
    EpError,
    EpParams,
    EpState,
    PeerTable,
    Region,
    make_params,
    pinned_error,
    plan_layout,
    plan_schedule,
    read_error,
)
from warpring.runtime.jit import KERNEL_DIR
from warpring.runtime.symmetric import SymmetricBuffer

HEADER = (KERNEL_DIR / "ep_params.cuh").read_text()
FLASH = Problem(4096, 2048, 256, 6, 2, 256, num_shared=1)
PROBLEMS = {
    "v4-flash": FLASH,
    "v4-flash, bf16": replace(FLASH, activation="bf16"),
    "gpt-oss-120b": Problem(2880, 2880, 128, 4, 2, 256, format="mxfp4", has_bias=True),
    "one rank, one token": Problem(32, 32, 1, 1, 1, 1),
    "72 ranks": Problem(7168, 2048, 576, 8, 72, 128, num_shared=1, block_m=64),
    "ragged": Problem(288, 96, 6, 5, 3, 7, activation="bf16", block_m=8, num_shared=2),
}
CASES = [(problem, ctas) for problem in PROBLEMS.values() for ctas in ((8, 124), (2, 32), (20, 128))]


def fields_of(name: str) -> list[tuple[str, str, int]]:
    """(type, field, array length) of a struct in the header."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", HEADER, re.DOTALL | re.MULTILINE)
    assert body
    text = re.sub(r"//.*", "", body[1])
    found: list[tuple[str, str, int]] = []
    for kind, declarators in re.findall(r"([A-Za-z]\w*\s*\*?)\s*((?:\w+(?:\[\w+\])?(?:,\s*)?)+);", text):
        for field, length in re.findall(r"(\w+)(?:\[(\w+)\])?", declarators):
            count = 72 if length == "kMaxRanks" else int(length or 1)
            found.append((kind.replace(" ", ""), field, count))
    return found


C_TYPES = {"uint64_t": ctypes.c_uint64, "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "PeerTable": PeerTable}


@pytest.mark.parametrize("struct", [PeerTable, EpState, EpError, EpParams], ids=lambda struct: struct.__name__)
def test_struct_is_the_headers(struct: type[ctypes.Structure]) -> None:
    expected = []
    for kind, field, count in fields_of(struct.__name__):
        c_type = ctypes.c_uint64 if kind.endswith("*") else C_TYPES[kind]
        expected.append((field, c_type if count == 1 else c_type * count))
    assert list(struct._fields_) == expected
    assert len(expected) >= 4


def test_sizes_are_those_that_the_header_asserts() -> None:
    asserted = dict(re.findall(r"static_assert\(sizeof\((\w+)\) == (\d+),", HEADER))
    assert asserted == {"PeerTable": "592", "EpState": "40", "EpError": "40"}
    for name, size in asserted.items():
        assert ctypes.sizeof(getattr(workspace, name)) == int(size)


def test_the_tables_room_is_the_headers() -> None:
    assert re.search(r"constexpr int kMaxRanks = 72;", HEADER)
    assert PeerTable.offset.size == 72 * 8


def buffers(problem: Problem, ctas: tuple[int, int]) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    layout = plan_layout(problem, plan_schedule(problem, *ctas))
    return layout.symmetric, layout.local


@pytest.mark.parametrize(("problem", "ctas"), CASES)
def test_regions_are_aligned_and_do_not_overlap(problem: Problem, ctas: tuple[int, int]) -> None:
    for regions in buffers(problem, ctas):
        assert regions[0].offset == 0
        assert all(region.offset % 256 == 0 and region.num_bytes > 0 for region in regions)
        for region, following in pairwise(regions):
            assert 0 <= following.offset - (region.offset + region.num_bytes) < 256


@pytest.mark.parametrize(("problem", "ctas"), CASES)
def test_bytes_are_as_the_formula_says(problem: Problem, ctas: tuple[int, int]) -> None:
    schedule = plan_schedule(problem, *ctas)
    layout = plan_layout(problem, schedule)
    tokens, topk, ranks = problem.max_tokens_per_rank, problem.topk, problem.num_ranks
    hidden_p, intermediate_p = -(-problem.hidden // 128) * 128, -(-problem.intermediate // 64) * 64
    (column, partial), scales = (1, 2) if problem.activation == "fp8" else (2, 4), hidden_p // 128
    row = -(-(column * hidden_p + 4 * scales + 4 * topk) // 128) * 128
    symmetric = 1152 + 32 * ranks * -(-tokens * topk // 4) + tokens * row
    symmetric += partial * tokens * (topk + problem.num_shared) * problem.hidden
    block, slots = problem.tokens_per_block, schedule.num_slots
    a_slot = 16 + 8 * block + block * (column * hidden_p + 4 * scales)
    a_slot += block * (column * intermediate_p + intermediate_p // 16) + 20
    local = 40 + 16 * (problem.max_blocks + 1) + slots * a_slot
    assert sum(region.num_bytes for region in layout.symmetric) == symmetric
    assert sum(region.num_bytes for region in layout.local) == local
    assert 0 <= layout.symmetric_bytes - symmetric < 256 * len(layout.symmetric)
    assert 0 <= layout.local_bytes - local < 256 * len(layout.local)


def test_report_names_every_region_and_the_totals() -> None:
    layout = plan_layout(FLASH, plan_schedule(FLASH, 16, 116))
    report = layout.report()
    assert f"symmetric {layout.symmetric_bytes:,} bytes, local {layout.local_bytes:,} bytes" in report
    for region in (*layout.symmetric, *layout.local):
        assert re.search(rf" {region.name} +{region.num_bytes:,} at {region.offset:,}$", report, re.MULTILINE)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("compute_ctas", [2, 32, 116, 132])
def test_slots_suffice_for_the_order_of_tasks_and_fewer_are_refused(problem: Problem, compute_ctas: int) -> None:
    least_lag = -(-compute_ctas // problem.num_neuron_tasks) + 1
    for wanted in (None, least_lag + 2, least_lag + 5, 64):
        if wanted is None or wanted >= least_lag + 2:
            schedule = plan_schedule(problem, 16, compute_ctas, wanted)
            assert wanted in (None, schedule.num_slots)
            assert least_lag <= schedule.lag <= max(least_lag, 16)
            assert schedule.num_slots >= schedule.lag + 2
    assert plan_schedule(problem, 16, compute_ctas, least_lag + 2).lag == least_lag
    with pytest.raises(ArgumentError, match=f"num_slots must be at least {least_lag + 2} with"):
        plan_schedule(problem, 16, compute_ctas, least_lag + 1)


def test_the_lag_is_half_of_a_ring_that_leaves_role1_room() -> None:
    # 32 and 32 tasks a block: 116 CTAs take up 2 blocks at once.
    assert plan_schedule(FLASH, 16, 116).lag == 16
    assert plan_schedule(FLASH, 16, 116, 12).lag == 6
    assert plan_schedule(FLASH, 16, 116, 9).lag == 5
    assert plan_schedule(FLASH, 132, 132, sequence=True).lag == 16


def test_a_sequence_needs_a_slot_for_every_block() -> None:
    assert plan_schedule(FLASH, 132, 132, sequence=True).num_slots == FLASH.max_blocks
    assert plan_schedule(FLASH, 132, 132, FLASH.max_blocks, sequence=True).num_slots == FLASH.max_blocks
    with pytest.raises(ArgumentError, match=f"num_slots must be .* and max_blocks = {FLASH.max_blocks}"):
        plan_schedule(FLASH, 132, 132, FLASH.max_blocks - 1, sequence=True)
    small = PROBLEMS["one rank, one token"]
    assert plan_schedule(small, 132, 132, sequence=True).num_slots == 132 + 1 + 2 > small.max_blocks


def test_params_reach_every_peer_even_below_the_base() -> None:
    schedule = plan_schedule(FLASH, 16, 116)
    layout = plan_layout(FLASH, schedule)
    addresses = (0x7F00_0000_0000, 0x7E00_0000_0000)
    for rank in range(2):
        params = make_params(
            FLASH,
            schedule,
            layout,
            rank=rank,
            addresses=addresses,
            local_address=0x1000,
            error_address=0x2000,
            timeout_ns=5,
        )
        table = params.peers
        assert (table.rank, table.num_ranks, table.offset[rank]) == (rank, 2, 0)
        assert [(table.base + table.offset[peer]) % 2**64 for peer in range(2)] == list(addresses)
        assert params.gmem_state == 0x1000
        assert params.gmem_l2_empty == 0x1000 + layout.local[-1].offset
        assert (params.rows_offset, params.partials_offset) == (layout.offset("rows"), layout.offset("partials"))
        assert (params.max_blocks, params.lag, params.timeout_ns) == (FLASH.max_blocks, schedule.lag, 5)


def test_every_field_of_the_struct_is_set() -> None:
    schedule = plan_schedule(FLASH, 16, 116)
    params = make_params(
        FLASH,
        schedule,
        plan_layout(FLASH, schedule),
        rank=1,
        addresses=(1 << 40, 1 << 41),
        local_address=1 << 30,
        error_address=1 << 31,
        timeout_ns=7,
    )
    zero_by_nature = {"arrived_offset"}
    values = {name: getattr(params, name) for name, _ in EpParams._fields_ if name != "peers"}
    assert {name for name, value in values.items() if value == 0} == zero_by_nature


def test_error_record_is_read_back_whole() -> None:
    record = pinned_error()
    assert read_error(record).code == 0
    written = EpError(code=2, rank=1, peer=-1, flag=3, generation=2**40, expected=2**63, seen=2**64 - 1)
    record.copy_(torch.frombuffer(bytearray(bytes(written)), dtype=torch.uint8))
    assert bytes(read_error(record)) == bytes(written)


def test_one_rank_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    from warpring.runtime.symmetric import allocate

    buffer = allocate(1000, torch.device("cpu"), None)
    assert isinstance(buffer, SymmetricBuffer)
    assert buffer.addresses == (buffer.local.data_ptr(),)
    assert not buffer.local.any()
