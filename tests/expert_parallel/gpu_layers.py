"""Layers on real GPUs for tests: experts, tensors that a captured graph reads, their check, and a probe of SMs."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from moe_inputs import make_inputs

from warpring import Experts
from warpring.bench.ep_cases import LEAST_COSINE
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.partition import Partition
from warpring.expert_parallel.problem import Problem
from warpring.runtime.by_value import KernelArguments, Launch
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import load

PROBLEM = Problem(512, 256, 16, 4, 1, 32, format="mxfp4")
CUDA = torch.device("cuda", 0)


def device_of(rank: int) -> torch.device:
    """The GPU of a rank, made the process's own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def experts_of(problem: Problem) -> tuple[Experts, Experts | None]:
    """All routed experts, and the shared ones; made once for layers of the same weights."""
    sizes = (problem.hidden, problem.intermediate)
    routed = drawn(*sizes, problem.num_experts, problem.format, seed=1)
    shared = drawn(*sizes, problem.num_shared, problem.shared_format, seed=2) if problem.num_shared else None
    return routed, shared


@cache
def drawn(hidden: int, intermediate: int, num_experts: int, format: str, *, seed: int) -> Experts:
    """Experts that were drawn and quantised on the GPU."""
    return make_inputs(1, hidden, intermediate, num_experts, 1, format=format, seed=seed, device="cuda").experts


class Buffers:
    """Tensors of a call that a captured graph reads, and their filling."""

    def __init__(self, problem: Problem, index_dtype: torch.dtype = torch.int32) -> None:
        self.problem = problem
        rows, topk = problem.max_tokens_per_rank, problem.topk
        self.x = torch.zeros(rows, problem.hidden, dtype=torch.bfloat16, device=CUDA)
        self.topk_idx = torch.zeros(rows, topk, dtype=index_dtype, device=CUDA)
        self.topk_weights = torch.zeros(rows, topk, device=CUDA)
        self.count = torch.zeros(1, dtype=torch.int32, device=CUDA)
        self.out = torch.full_like(self.x, torch.nan)

    def fill(self, num_tokens: int, seed: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(seed)
        self.x.normal_(generator=generator)
        scores = torch.rand(len(self.x), self.problem.num_experts, device=CUDA, generator=generator)
        weights, ids = scores.topk(self.problem.topk)
        self.topk_idx.copy_(ids)
        self.topk_weights.copy_(weights)
        self.x[num_tokens:] = torch.nan
        self.count.fill_(num_tokens)

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.topk_idx, self.topk_weights, self.count

    def check(self, experts: Experts, shared: Experts | None) -> None:
        n = int(self.count)
        inputs = (self.x[:n], experts, self.topk_idx[:n].long(), self.topk_weights[:n])
        expected = run_layer(self.problem, *inputs, shared, sums="tensor_core").double()
        y = self.out[:n].double()
        cosine = (y * expected).sum(1) / (y.norm(dim=1) * expected.norm(dim=1))
        assert n == 0 or cosine.min().item() >= LEAST_COSINE


def captured(layer: ExpertParallelDecode, buffers: Buffers, calls: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of calls with the same buffers."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            layer(*buffers.args(), out=buffers.out)
    return graph


def bits(values: torch.Tensor) -> torch.Tensor:
    """A copy of BF16 values as integers, so that a NaN equals itself."""
    return values.view(torch.int16).clone()


def green(layer: ExpertParallelDecode) -> bool:
    """Whether a layer runs in Green Contexts."""
    engine: Any = layer._turns.engine
    partition: Partition = engine._partition
    return partition.mode == "green"


def probe(num_ctas: int, busy_ns: int) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """A kernel that stays on its SMs for some time, and where it writes which and when."""
    source = str(Path(__file__).parent / "partition_probe.cu")
    kernel = load(KernelSpec(source, "partition_probe"), 0)
    written = tuple(torch.zeros(num_ctas, dtype=torch.int64, device=CUDA) for _ in range(3))
    addresses = [ctypes.c_uint64(tensor.data_ptr()) for tensor in written]
    arguments = KernelArguments(*addresses, ctypes.c_uint64(busy_ns))
    return Launch(kernel, num_ctas, 32, arguments), written
