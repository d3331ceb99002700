"""Timing. On a GPU: replays of a captured graph of many layers, interleaved between variants; on a CPU: calls.

A variant is a list of calls, one a layer. Every layer of it has weights and a routing of its own, and all
of its weights together exceed the cache, so what is timed is what decode is: weights that come from memory.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from warpring.errors import ArgumentError, WarpringError

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a layer: 10th, 50th and 90th percentile over `repeats` replays."""

    p10_us: float
    p50_us: float
    p90_us: float
    repeats: int


def percentiles(samples_us: Sequence[float]) -> Timing:
    """The percentiles of at least one sample, linear between neighbours, to the nanosecond."""
    if not samples_us:
        raise ArgumentError("percentiles: needs at least one sample; got none. Ask for repeats >= 1.")
    cuts = statistics.quantiles(samples_us, n=10, method="inclusive") if len(samples_us) > 1 else [samples_us[0]] * 9
    return Timing(round(cuts[0], 3), round(cuts[4], 3), round(cuts[8], 3), len(samples_us))


@dataclass(frozen=True)
class Measured:
    """What one variant took, and how many kernels (with copies and memsets) a layer launched; None without a graph."""

    timing: Timing
    launches: int | None


def measure(
    variants: Mapping[str, Sequence[Call]],
    device: torch.device,
    repeats: int,
    warmup: int = 3,
    eager: Collection[str] = (),
) -> dict[str, Measured]:
    """Time every variant, one replay of each in turn, so that a drift of clocks or load touches all alike.

    Args:
        variants: name -> calls, one a layer; all are run once before anything is timed.
        device: a CUDA device (calls are captured into a graph; they must be capturable) or the CPU.
        repeats: replays of each variant that count.
        warmup: replays of each variant that do not.
        eager: variants that no graph can hold: on a GPU their calls are queued one by one, launch costs included.
    """
    if repeats < 1:
        raise ArgumentError(f"measure: repeats must be at least 1; got {repeats}.")
    if device.type == "cuda":
        return _measure_cuda(variants, device, repeats, warmup, eager)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-min(warmup, 1), repeats):
        for name, calls in variants.items():
            start = time.perf_counter()
            for call in calls:
                call()
            if round_ >= 0:
                samples[name].append((time.perf_counter() - start) / len(calls) * 1e6)
    return {name: Measured(percentiles(taken), None) for name, taken in samples.items()}


def _measure_cuda(
    variants: Mapping[str, Sequence[Call]], device: torch.device, repeats: int, warmup: int, eager: Collection[str]
) -> dict[str, Measured]:
    with torch.cuda.device(device):
        graphs = {name: capture(calls) for name, calls in variants.items() if name not in eager}
        runs = {
            name: graphs[name].replay if name in graphs else partial(_call_all, calls)
            for name, calls in variants.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for round_ in range(-warmup, repeats):
            for name, run in runs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                # A replay ahead keeps the GPU busy while the timed one is queued: its launch costs no time then.
                run()
                start.record()
                run()
                end.record()
                end.synchronize()
                if round_ >= 0:
                    samples[name].append(start.elapsed_time(end) * 1e3 / len(variants[name]))
        launches = {name: round(count_launches(graph) / len(variants[name])) for name, graph in graphs.items()}
        return {name: Measured(percentiles(samples[name]), launches.get(name)) for name in variants}


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all `calls` in order, after one run of each outside of it (compiling, allocating workspaces)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.instantiate()
    return graph


def count_launches(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph that do work: kernels, copies, memsets."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    kinds = driver.CUgraphNodeType
    working = (kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY, kinds.CU_GRAPH_NODE_TYPE_MEMSET)

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise WarpringError(f"count_launches: the CUDA driver answered {result[0]}.")
        return result[1:]

    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = checked(driver.cuGraphGetNodes(raw))
    nodes, _ = checked(driver.cuGraphGetNodes(raw, count))
    return sum(checked(driver.cuGraphNodeGetType(node))[0] in working for node in nodes[:count])


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory: L2 of a GPU, L3 of a CPU (32 MiB where it cannot be told)."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.L2_cache_size)
    told = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = told.read_text().strip() if told.exists() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else 32 << 20
