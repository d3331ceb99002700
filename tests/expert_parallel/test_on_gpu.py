"""The layer on real GPUs: graphs read back, replays, and calls that overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks
from gpu_layers import PROBLEM, Buffers, captured, device_of, drawn, experts_of, green

from warpring import ArgumentError
from warpring.bench.ep_cases import FORMATS, Verifier, cases
from warpring.errors import PeerTimeoutError, PoisonedError, UnsupportedError, WorkspaceBusyError
from warpring.expert_parallel.engine import EARLY_TOKENS
from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.partition import MODES
from warpring.expert_parallel.roles import EARLY_COMBINE_CTAS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "green"])
@pytest.mark.parametrize("changes", [{}, {"num_shared": 1}, {"activation": "bf16", "format": "fp8_block"}], ids=str)
def test_replays_with_other_inputs_and_counts(mode: str, changes: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **changes)
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    partition: Any = mode
    with ExpertParallelDecode(problem, None, experts, shared=shared, partition=partition, timeout=5.0) as layer:
        graph = captured(layer, buffers)
        for number, count in enumerate((32, 0, 1, 17, 32, 5)):
            buffers.fill(count, seed=number)
            graph.replay()
            torch.cuda.synchronize()
            layer.check()
            buffers.check(experts, shared)


def test_layers_that_share_a_workspace_in_one_graph() -> None:
    experts, _ = experts_of(PROBLEM)
    others = drawn(PROBLEM.hidden, PROBLEM.intermediate, PROBLEM.num_experts, PROBLEM.format, seed=3)
    first, second = Buffers(PROBLEM), Buffers(PROBLEM)
    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as layer:
        next_layer = layer.with_experts(others)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(*first.args(), out=first.out)
            next_layer(*second.args(), out=second.out)
        for seed in range(3):
            first.fill(32 - seed, seed=seed)
            second.fill(seed, seed=seed + 10)
            graph.replay()
            torch.cuda.synchronize()
            layer.check()
            first.check(experts, None)
            second.check(others, None)


@pytest.mark.parametrize("num_shared", [0, 1])
def test_a_child_graph_replays_too(num_shared: int) -> None:
    problem = replace(PROBLEM, num_shared=num_shared)
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    with ExpertParallelDecode(problem, None, experts, shared=shared, child_graph=True, timeout=5.0) as layer:
        if layer.sm_counts is None or not green(layer):
            pytest.skip("needs Green Contexts; this GPU or driver has none")
        graph = captured(layer, buffers)
        for count in (32, 3):
            buffers.fill(count, seed=count)
            graph.replay()
            torch.cuda.synchronize()
            layer.check()
            buffers.check(experts, shared)


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("rows", [EARLY_TOKENS, EARLY_TOKENS + 1])
def test_the_captured_fork_read_back(rows: int, num_shared: int) -> None:
    """Of few rows role3 follows role1 alone in the graph: role2's `done` is what its CTAs wait for."""
    from cuda.bindings import driver

    problem = replace(PROBLEM, num_shared=num_shared, max_tokens_per_rank=rows)
    early = rows <= EARLY_TOKENS
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    try:
        opened = ExpertParallelDecode(problem, None, experts, shared=shared, partition="green", timeout=5.0)
    except UnsupportedError as error:
        pytest.skip(str(error))
    with opened as layer:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            layer(*buffers.args(), out=buffers.out)
        handle = driver.CUgraph(graph.raw_cuda_graph())
        _, _, count = driver.cuGraphGetNodes(handle, 0)
        _, nodes, _ = driver.cuGraphGetNodes(handle, count)
        kernels = [node for node in nodes if int(driver.cuGraphNodeGetType(node)[1]) == 0]
        assert len(kernels) == 3 + num_shared
        grids = [driver.cuGraphKernelNodeGetParams(node)[1].gridDimX for node in kernels]
        split = layer.sm_counts
        assert split is not None
        role2 = split.compute_sms * ctas_per_sm(problem)
        role3 = EARLY_COMBINE_CTAS * split.comm_sms if early else 132
        assert sorted(grids) == sorted([split.comm_sms] * (1 + num_shared) + [role2, role3])
        contexts = {int(driver.cuGraphKernelNodeGetParams(node)[1].ctx) for node in kernels}
        assert len(contexts) == (2 if early else 3)
        _, sources, targets, _, edges = driver.cuGraphGetEdges(handle, 64)
        last = kernels[grids.index(role3)]
        into_last = [int(source) for source, target in zip(sources, targets, strict=False) if int(target) == int(last)]
        assert len(into_last) == (1 if early else 2)
        roots = {int(node) for node in kernels} - {int(target) for target in targets[:edges]}
        assert int(kernels[grids.index(role2)]) in roots


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("rows", [EARLY_TOKENS, EARLY_TOKENS + 1])
def test_the_captured_chain_read_back(rows: int, num_shared: int) -> None:
    """Two calls are one line of kernels in one context. Every edge is programmatic, but for many rows role3's own."""
    from cuda.bindings import driver

    problem = replace(PROBLEM, num_shared=num_shared, max_tokens_per_rank=rows)
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    with ExpertParallelDecode(problem, None, experts, shared=shared, timeout=5.0) as layer:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for _ in range(2):
                layer(*buffers.args(), out=buffers.out)
        handle = driver.CUgraph(graph.raw_cuda_graph())
        _, _, count = driver.cuGraphGetNodes(handle, 0)
        _, nodes, _ = driver.cuGraphGetNodes(handle, count)
        kernels = [node for node in nodes if int(driver.cuGraphNodeGetType(node)[1]) == 0]
        roles = 3 + num_shared
        assert len(kernels) == 2 * roles
        assert len({int(driver.cuGraphKernelNodeGetParams(node)[1].ctx) for node in kernels}) == 1
        _, sources, targets, kinds, edges = driver.cuGraphGetEdges(handle, 64)
        after = {int(s): (int(t), int(k.type)) for s, t, k in zip(sources, targets, kinds[:edges], strict=False)}
        assert len(after) == edges == 2 * roles - 1
        (node,) = {int(kernel) for kernel in kernels} - {target for target, _ in after.values()}
        types: list[int] = []
        while node in after:
            node, type = after[node]
            types.append(type)
        one = [1] * (roles - 2) + [int(rows <= EARLY_TOKENS)]
        assert types == [*one, 1, *one]


# What goes wrong


def test_a_count_beyond_the_rows_is_an_error_and_poisons() -> None:
    experts, _ = experts_of(PROBLEM)
    buffers = Buffers(PROBLEM)
    layer = ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0)
    buffers.fill(33, seed=0)
    buffers.out.zero_()

    def call_twice() -> None:
        layer(*buffers.args(), out=buffers.out)  # raises already where the GPU is quicker than the host
        torch.cuda.synchronize()
        layer(*buffers.args())

    with pytest.raises(ArgumentError, match="the device held 33"):
        call_twice()
    torch.cuda.synchronize()
    assert buffers.out.isnan().all()
    with pytest.raises(PoisonedError):
        layer(*buffers.args())
    layer.close()
    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as rebuilt:
        buffers.fill(4, seed=1)
        rebuilt(*buffers.args(), out=buffers.out)
        torch.cuda.synchronize()
        buffers.check(experts, None)


def test_replays_that_overlap_are_an_error() -> None:
    experts, _ = experts_of(PROBLEM)
    buffers, others = Buffers(PROBLEM), Buffers(PROBLEM)
    layer = ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0)
    for own in (buffers, others):
        own.fill(32, seed=3)
    graphs = [captured(layer, own, calls=20) for own in (buffers, others)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    with pytest.raises((WorkspaceBusyError, PeerTimeoutError)):
        layer.check()
    layer.close()


# Several GPUs


def verify(rank: int, name: str, num_shared: int) -> list[tuple[str, bool, float]]:
    verifier = Verifier(name, dist.group.WORLD, device_of(rank), num_shared=num_shared, timeout=20.0)
    form = verifier.problem.activation
    with verifier.layer:
        chosen = cases(256)
        outcomes = verifier.run_all(chosen, replays=100, checked=100)
    return [(str(case), outcome.met(form), outcome.cosine) for case, outcome in zip(chosen, outcomes, strict=True)]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("h")])
def test_two_gpus_give_what_the_arithmetic_gives(name: str, num_shared: int) -> None:
    for outcomes in run_ranks(verify, 2, name, num_shared):
        assert [(case, cosine) for case, met, cosine in outcomes if not met] == []
