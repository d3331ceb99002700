"""Partitions of a real GPU at work: whose SMs kernels run on, that none waits behind the other's, and fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_layers import PROBLEM, Buffers, bits, captured, experts_of, green, probe

from warpring.errors import UnsupportedError
from warpring.expert_parallel import partition as partition_module
from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.partition import Partition, check_split, open_partition

pytestmark = pytest.mark.gpu
MILLISECOND = 1_000_000
#: Kernels in one partition's queue, more than a context has hardware queues for.
MANY = 64


@pytest.fixture
def partition() -> Iterator[Partition]:
    try:
        opened = open_partition(0, mode="green")
    except UnsupportedError as error:
        pytest.skip(f"needs Green Contexts: {error}")
    yield opened
    torch.cuda.synchronize()
    opened.close()


def sms_of(partition: Partition) -> tuple[int, int]:
    return partition.split.comm_sms, partition.split.compute_sms


def check_sms_and_overlap(partition: Partition, written: list[tuple[torch.Tensor, ...]]) -> None:
    """Two probes ran on disjoint sets of SMs, of at most the granted size, and at the same time."""
    (comm_sms, comm_start, comm_end), (compute_sms, compute_start, compute_end) = written
    assert not set(comm_sms.tolist()) & set(compute_sms.tolist())
    assert len(set(comm_sms.tolist())) <= partition.split.comm_sms
    assert len(set(compute_sms.tolist())) <= partition.split.compute_sms
    assert comm_start.min() < compute_end.max()
    assert compute_start.min() < comm_end.max()


def test_partitions_are_disjoint_and_run_at_the_same_time(partition: Partition) -> None:
    check_split(partition.split, torch.cuda.get_device_properties(0).multi_processor_count)
    assert partition.streams is not None
    launches = [probe(sms * 4, 2 * MILLISECOND) for sms in sms_of(partition)]
    torch.cuda.synchronize()
    for (launch, _), stream in zip(launches, partition.streams, strict=True):
        launch.on(stream)
    torch.cuda.synchronize()
    check_sms_and_overlap(partition, [written for _, written in launches])


def test_nodes_of_a_captured_graph_keep_to_their_partitions(partition: Partition) -> None:
    """The fork and the join of a call, with probes in the place of role1 and role2; every replay is looked at."""
    assert partition.streams is not None
    launches = [probe(sms * 4, MILLISECOND) for sms in sms_of(partition)]
    torch.cuda.synchronize()
    for (launch, _), stream in zip(launches, partition.streams, strict=True):
        launch.on(stream)  # loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for (launch, _), stream in zip(launches, partition.streams, strict=True):
            stream.wait_stream(current)
            launch.on(stream)
        for stream in partition.streams:
            current.wait_stream(stream)
    for _ in range(3):
        for _, written in launches:
            for tensor in written:
                tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        check_sms_and_overlap(partition, [written for _, written in launches])


@pytest.mark.parametrize("busy", [0, 1], ids=["communication is busy", "compute is busy"])
def test_a_kernel_waits_behind_none_of_the_other_partitions(partition: Partition, busy: int) -> None:
    """One partition has 64 kernels of a millisecond before it; the other's, launched behind them, runs meanwhile."""
    assert partition.streams is not None
    sizes = sms_of(partition)
    queued = [probe(sizes[busy], MILLISECOND) for _ in range(MANY)]
    alone, (_, _, end) = probe(sizes[1 - busy], MILLISECOND // 10)
    for launch, stream in ((queued[0][0], partition.streams[busy]), (alone, partition.streams[1 - busy])):
        launch.on(stream)  # loaded before it counts
    torch.cuda.synchronize()
    for launch, _ in queued:
        launch.on(partition.streams[busy])
    alone.on(partition.streams[1 - busy])
    torch.cuda.synchronize()
    starts_of_last = queued[-1][1][1]
    assert int(end.max()) < int(starts_of_last.min())


@pytest.mark.parametrize("num_shared", [0, 1])
def test_the_explicit_graph_read_back(num_shared: int) -> None:
    """One child of three or four nodes: role1 and role2 in their contexts with no edge between them, role3 behind."""
    from cuda.bindings import driver

    problem = replace(PROBLEM, num_shared=num_shared)
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    with ExpertParallelDecode(problem, None, experts, shared=shared, child_graph=True, timeout=5.0) as layer:
        if not green(layer):
            pytest.skip("needs Green Contexts; this GPU or driver has none")
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            layer(*buffers.args(), out=buffers.out)
        parent = driver.CUgraph(graph.raw_cuda_graph())
        _, nodes, count = driver.cuGraphGetNodes(parent, 8)
        children = [n for n in nodes[:count] if int(driver.cuGraphNodeGetType(n)[1]) == 4]
        assert len(children) == 1
        _, child = driver.cuGraphChildGraphNodeGetGraph(children[0])
        _, nodes, count = driver.cuGraphGetNodes(child, 8)
        parameters = {int(node): driver.cuGraphKernelNodeGetParams(node)[1] for node in nodes[:count]}
        _, sources, targets, _, edges = driver.cuGraphGetEdges(child, 16)
        found = {(int(a), int(b)) for a, b in zip(sources[:edges], targets[:edges], strict=True)}
        assert (len(parameters), len(found)) == (3 + num_shared, 2 + num_shared)
        assert layer.sm_counts is not None
        (role3,) = set(parameters) - {source for source, _ in found}
        before = {source for source, target in found if target == role3}
        grid = layer.sm_counts.compute_sms * ctas_per_sm(problem)
        (role2,) = [node for node in before if parameters[node].gridDimX == grid]
        (role1,) = before - {role2}
        roots = set(parameters) - {target for _, target in found}
        role4 = roots - {role1, role2}
        assert roots == (role4 | {role2} if num_shared else {role1, role2})
        assert all((node, role1) in found for node in role4)
        contexts = {node: int(parameters[node].ctx) for node in parameters}
        assert len({contexts[role] for role in (role1, role2, role3)}) == 3
        assert all(contexts[node] == contexts[role1] for node in role4)


def test_without_green_contexts_two_streams_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver before 12.4, MIG or MPS leaves: the same kernels, with a warning."""
    experts, _ = experts_of(PROBLEM)
    buffers = Buffers(PROBLEM)
    buffers.fill(32, seed=4)

    def run() -> torch.Tensor:
        buffers.out.fill_(torch.nan)
        graph = captured(layer, buffers)
        graph.replay()
        torch.cuda.synchronize()
        layer.check()
        buffers.check(experts, None)
        return bits(buffers.out)

    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as layer:
        expected = run()

    def none(device_index: int) -> None:
        raise UnsupportedError("cuda:0 has no Green Contexts: MIG.")

    monkeypatch.setattr(partition_module, "sm_limits", none)
    with pytest.warns(RuntimeWarning, match="MIG. Falling back to two plain streams"):
        layer = ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0)
    with layer:
        assert not green(layer)
        assert torch.equal(run(), expected)
    with pytest.raises(UnsupportedError, match="no Green Contexts: MIG"):
        ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0, partition="green")
