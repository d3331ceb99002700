"""CUDA graphs through the driver: nodes with a context each, put into a capture as one child graph.

Capturing the launches on their green streams gives nodes in the same contexts; the explicit graph states them, and the
edges, itself. `torch.cuda.graph` cannot hold such a graph, so it is added to the one that torch's stream captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpring.runtime.by_value import Launch, check_result


@dataclass(frozen=True)
class Node:
    """A kernel of a graph.

    Attributes:
        launch: what runs.
        context: handle of the context that it runs in (CUcontext).
        after: places in the list of the nodes that it follows. With `launch.programmatic` it starts once all CTAs of
            those have let it or ended, else once they have ended.
    """

    launch: Launch
    context: int
    after: tuple[int, ...] = ()


def node_params(node: Node) -> Any:
    """The driver's description of a node (CUgraphNodeParams)."""
    from cuda.bindings import driver

    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernel, launch = params.kernel, node.launch
    # func stays null: only then do the driver read kern and ctx.
    kernel.kern = driver.CUkernel(int(launch.kernel.handle))
    kernel.ctx = driver.CUcontext(node.context)
    kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ = launch.grid, 1, 1
    kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = launch.block, 1, 1
    kernel.sharedMemBytes = launch.smem_bytes
    kernel.kernelParams = launch.arguments.address
    params.kernel = kernel
    return params


def edge(node: Node) -> Any:
    """The kind of the edges into a node (CUgraphEdgeData)."""
    from cuda.bindings import driver

    data = driver.CUgraphEdgeData()
    if node.launch.programmatic:
        data.from_port = int(driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
        data.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return data


def add_child_graph(nodes: Sequence[Node], stream: torch.cuda.Stream) -> None:
    """Add the nodes as one child graph to the graph that `stream` is capturing; what is captured next follows it.

    Arguments are copied now. A node follows only nodes before it in the list.
    """
    from cuda.bindings import driver

    result, graph = driver.cuGraphCreate(0)
    check_result(result, "cuGraphCreate")
    try:
        handles: list[Any] = []
        for node in nodes:
            before = [handles[place] for place in node.after]
            edges = [edge(node) for _ in before]
            result, handle = driver.cuGraphAddNode(graph, before, edges, len(before), node_params(node))
            check_result(result, "cuGraphAddNode")
            handles.append(handle)
        state = driver.cuStreamGetCaptureInfo(driver.CUstream(stream.cuda_stream))
        check_result(state[0], "cuStreamGetCaptureInfo")
        parent, dependencies = state[3], list(state[4])
        result, child = driver.cuGraphAddChildGraphNode(parent, dependencies, len(dependencies), graph)
        check_result(result, "cuGraphAddChildGraphNode")
        replace = int(driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        (result,) = driver.cuStreamUpdateCaptureDependencies(
            driver.CUstream(stream.cuda_stream), [child], [driver.CUgraphEdgeData()], 1, replace
        )
        check_result(result, "cuStreamUpdateCaptureDependencies")
    finally:
        # The child node holds a copy.
        driver.cuGraphDestroy(graph)


def capture_id(stream: torch.cuda.Stream) -> int | None:
    """A number for the capture that a stream is in, unique in the process; None where it is in none."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    from cuda.bindings import driver

    state = driver.cuStreamGetCaptureInfo(driver.CUstream(stream.cuda_stream))
    check_result(state[0], "cuStreamGetCaptureInfo")
    return int(state[2])


def primary_context(device: torch.device) -> int:
    """Handle of the context that torch works in on a device (CUcontext)."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream()
        result, context = driver.cuCtxGetCurrent()
    check_result(result, "cuCtxGetCurrent")
    return int(context)
