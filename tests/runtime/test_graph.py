"""What the driver is told of launches and graph nodes, read back from its own structures; no GPU needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from warpring import WarpringError
from warpring.runtime.by_value import KernelArguments, Launch, check_result
from warpring.runtime.graph import Node, edge, node_params

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_int32))


def launch(*, programmatic: bool = False) -> Launch:
    arguments = KernelArguments(Pair(2**63, -5), ctypes.c_int32(7))
    return Launch(SimpleNamespace(handle=0x1234), 16, 512, arguments, 4096, programmatic)


def test_arguments_are_pointers_to_the_values() -> None:
    arguments = KernelArguments(Pair(2**63, -5), ctypes.c_int32(7))
    pointers = (ctypes.c_void_p * 2).from_address(arguments.address)
    assert pointers[0] is not None
    assert pointers[1] is not None
    pair = Pair.from_address(pointers[0])
    assert (pair.first, pair.second) == (2**63, -5)
    assert ctypes.c_int32.from_address(pointers[1]).value == 7


def test_a_node_has_kernel_context_grid_and_arguments() -> None:
    made = launch()
    params = node_params(Node(made, context=0x77))
    kernel = params.kernel
    assert int(params.type) == 0
    assert (int(kernel.kern), int(kernel.ctx), int(kernel.func)) == (0x1234, 0x77, 0)
    assert (kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ) == (16, 1, 1)
    assert (kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ) == (512, 1, 1)
    assert kernel.sharedMemBytes == 4096
    assert int(kernel.kernelParams) == made.arguments.address


@pytest.mark.parametrize(("programmatic", "kind"), [(False, (0, 0)), (True, (1, 1))])
def test_an_edge_is_programmatic_where_the_launch_is(programmatic: bool, kind: tuple[int, int]) -> None:
    data = edge(Node(launch(programmatic=programmatic), context=1))
    assert (data.from_port, data.type) == kind


def test_a_failed_call_is_named() -> None:
    check_result(0, "cuGraphCreate")
    with pytest.raises(WarpringError, match="cuGraphCreate failed with 201"):
        check_result(201, "cuGraphCreate")
