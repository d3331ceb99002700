"""Whose scratch memory and whose zeros a launch gets: by stream outside of captures, by capture inside of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from moe_inputs import make_inputs

from warpring import moe_decode, pack_experts, precompile
from warpring.runtime import workspace

BLOCK, BLOCKS = workspace._BLOCK_BYTES, workspace._BLOCKS
CPU = torch.device("cpu")


@dataclass
class Machine:
    """What stands in for the GPU.

    Attributes:
        capture: number of the capture that calls happen in, or None.
        synchronized: how often all streams were waited for.
    """

    capture: int | None = None
    synchronized: int = 0

    def zeroed(self, num_bytes: int = 8, stream: int = 1, device_index: int = 0) -> torch.Tensor:
        found = SimpleNamespace(device_index=device_index, cuda_stream=stream)
        return workspace.zeroed(num_bytes, CPU, found)  # pyright: ignore[reportArgumentType]

    def reserve(self, device_index: int = 0) -> list[torch.Tensor]:
        return workspace._reserve.get(device_index, [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU that is none, and a module that has given nothing out yet."""
    made = Machine()

    def synchronize(device: torch.device) -> None:
        made.synchronized += 1

    for name in ("_buffers", "_zeroed", "_reserve"):
        monkeypatch.setattr(workspace, name, {})
    monkeypatch.setattr(workspace, "capture_id", lambda stream: made.capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capture is not None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_launches_on_one_stream_share_their_zeros(machine: Machine) -> None:
    first = machine.zeroed(100)
    assert first.dtype == torch.uint8
    assert first.numel() >= 100
    assert not first.any()
    assert same(machine.zeroed(BLOCK), first)
    assert not same(machine.zeroed(8, stream=2), first)
    assert not same(machine.zeroed(8, device_index=1), first)


def test_more_zeros_than_there_were_are_new_ones_that_stay(machine: Machine) -> None:
    first = machine.zeroed(BLOCK)
    larger = machine.zeroed(BLOCK + 1)
    assert larger.numel() == BLOCK + 1
    assert not larger.any()
    assert not same(larger, first)
    assert same(machine.zeroed(8), larger)


def test_each_capture_has_a_block_of_its_own(machine: Machine) -> None:
    eager = machine.zeroed()
    assert (len(machine.reserve()), machine.synchronized) == (BLOCKS, 1)
    blocks: list[torch.Tensor] = []
    for machine.capture in (11, 12):
        blocks.append(machine.zeroed())
        assert same(machine.zeroed(BLOCK), blocks[-1])  # a later launch of the same graph
        blocks.append(machine.zeroed(stream=2))  # a branch of it
    machine.capture = None
    assert same(machine.zeroed(), eager)
    assert len({block.data_ptr() for block in [eager, *blocks]}) == 5
    assert all(block.numel() == BLOCK and not block.any() for block in blocks)
    assert len(machine.reserve()) == BLOCKS - 4
    assert machine.synchronized == 1


@pytest.mark.parametrize("num_bytes", [8, BLOCK + 1])
def test_without_a_block_that_suits_the_zeros_are_part_of_the_graph(machine: Machine, num_bytes: int) -> None:
    """No call has filled the reserve yet, or the launch wants more than a block, which then uses up none."""
    if num_bytes > BLOCK:
        machine.zeroed()
    held, machine.capture = len(machine.reserve()), 11
    first = machine.zeroed(num_bytes)
    assert first.numel() == num_bytes
    assert not first.any()
    assert not same(machine.zeroed(num_bytes), first)  # every launch clears its own
    assert len(machine.reserve()) == held
    assert (0, 1, 11) not in workspace._zeroed


def test_a_reserve_that_was_used_up_is_filled_by_a_call_outside_of_captures(machine: Machine) -> None:
    machine.zeroed()
    for machine.capture in range(BLOCKS):
        machine.zeroed()
    assert machine.reserve() == []
    machine.capture = BLOCKS
    assert machine.zeroed(100).numel() == 100
    machine.capture = None
    machine.zeroed()
    assert (len(machine.reserve()), machine.synchronized) == (BLOCKS, 2)


def test_a_reserve_that_is_half_full_is_left_alone(machine: Machine) -> None:
    machine.zeroed()
    for machine.capture in range(BLOCKS // 2):
        machine.zeroed()
    machine.capture = None
    machine.zeroed()
    assert (len(machine.reserve()), machine.synchronized) == (BLOCKS // 2, 1)
    machine.capture = BLOCKS
    machine.zeroed()
    machine.capture = None
    machine.zeroed()
    assert (len(machine.reserve()), machine.synchronized) == (BLOCKS // 2 - 1 + BLOCKS, 2)


def test_release_keeps_what_graphs_use(machine: Machine) -> None:
    eager = machine.zeroed()
    machine.capture = 11
    block = machine.zeroed()
    workspace.release()
    assert same(machine.zeroed(), block)
    machine.capture = None
    assert not same(machine.zeroed(), eager)


def test_zeros_made_in_inference_mode_can_be_written_outside_of_it(machine: Machine) -> None:
    with torch.inference_mode():
        made = machine.zeroed()
        machine.capture = 11
        block = machine.zeroed()
    made.fill_(0)
    block.fill_(0)
    assert not made.is_inference()
    assert not block.is_inference()


# ---- graphs of the tile path, on a GPU -------------------------------------------------------------------------------


@pytest.fixture
def empty_reserve() -> Iterator[None]:
    """No block for captures of the first GPU; those that there were come back."""
    reserve = workspace._reserve.setdefault(0, [])
    kept = reserve.copy()
    reserve.clear()
    yield
    reserve.extend(kept)


def graphs_on_two_streams() -> None:
    """Two graphs of several layers each, replayed beside each other, give what eager calls give."""
    both = [make_inputs(6, 160, 96, 8, 3, format="mxfp4", seed=seed, device="cuda") for seed in (31, 32)]
    packed = [pack_experts(inputs.experts) for inputs in both]
    precompile(packed[0], topk=3)
    graphs = [torch.cuda.CUDAGraph() for _ in both]
    outs = [[torch.empty_like(inputs.x) for _ in range(20)] for inputs in both]
    for graph, inputs, layer, results in zip(graphs, both, packed, outs, strict=True):
        with torch.cuda.graph(graph):
            for out in results:
                moe_decode(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, out=out, path="tile")
    streams = [torch.cuda.Stream() for _ in both]
    for _ in range(10):
        for results in outs:
            for out in results:
                out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        for inputs, layer, results in zip(both, packed, outs, strict=True):
            expected = moe_decode(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, path="tile")
            assert all(torch.equal(out, expected) for out in results)


@pytest.mark.gpu
def test_graphs_replayed_beside_each_other_count_each_for_itself() -> None:
    inputs = make_inputs(1, 160, 96, 8, 3, seed=30, device="cuda")
    moe_decode(inputs.x, pack_experts(inputs.experts), inputs.topk_idx, inputs.topk_weights, path="tile")
    held = len(workspace._reserve[0])
    assert held >= 2
    graphs_on_two_streams()
    assert len(workspace._reserve[0]) == held - 2


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_reserve")
def test_graphs_clear_their_own_zeros_where_no_block_is_left() -> None:
    before = len(workspace._zeroed)
    graphs_on_two_streams()
    assert all(key[2] is None for key in list(workspace._zeroed)[before:])
