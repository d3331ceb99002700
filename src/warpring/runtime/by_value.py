"""Launches with structs by value, through the driver's own entry: `cuda.core.launch` takes scalars and pointers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from warpring.errors import WarpringError


class KernelArguments:
    """Argument values of one launch, and the array of pointers to them that drivers take.

    Attributes:
        values: ctypes scalars and structures, in the kernel's order.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

    @property
    def address(self) -> int:
        """Of the array of pointers (`void**`), valid as long as this object."""
        return ctypes.addressof(self._pointers)


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that its launch needs but a stream.

    Attributes:
        kernel: a loaded kernel of `warpring.runtime.launch.load`.
        grid, block: CTAs, and threads of each.
        arguments: by value.
        smem_bytes: dynamic shared memory of a CTA.
        programmatic: whether it may start once its predecessor in the stream lets it (programmatic dependent launch).
    """

    kernel: Any
    grid: int
    block: int
    arguments: KernelArguments
    smem_bytes: int = 0
    programmatic: bool = False

    def on(self, stream: torch.cuda.Stream) -> None:
        """Launch on a stream, in the stream's own context."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.hStream = driver.CUstream(stream.cuda_stream)
        if self.programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        function = driver.CUfunction(int(self.kernel.handle))
        (result,) = driver.cuLaunchKernelEx(config, function, self.arguments.address, 0)
        check_result(result, "cuLaunchKernelEx")


def check_result(result: Any, call: str) -> None:
    """Raise unless a driver call succeeded."""
    if int(result):
        name = getattr(result, "name", str(result))
        raise WarpringError(f"{call} failed with {name}. Run with CUDA_LAUNCH_BLOCKING=1 to see which work was first.")
