"""Cubin -> running kernel: load once a process, launch on torch's current stream."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

from warpring.errors import UnsupportedError, WarpringError
from warpring.runtime.device import arch_of
from warpring.runtime.jit import IMPORT_LOCK, KernelSpec, compile_kernel

_loaded: dict[tuple[KernelSpec, int], Any] = {}


def load(spec: KernelSpec, device_index: int) -> Any:
    """The kernel, compiled and loaded for that GPU; at most once a process.

    Loading is refused while the stream captures a graph, since it may synchronise and so break the capture.
    """
    kernel = _loaded.get((spec, device_index))
    if kernel is not None:
        return kernel
    if torch.cuda.is_current_stream_capturing():
        raise WarpringError(
            f"kernel {spec.entry} is not loaded yet and cannot be loaded while a CUDA graph is captured. Call "
            "warpring.precompile(experts, topk=...) or run the layer once before the capture."
        )
    cubin = compile_kernel(spec, arch_of(device_index))
    with IMPORT_LOCK:
        from cuda.core import Device, ObjectCode

    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # torch's primary context, the one the kernel will run in
        Device(device_index).set_current()
        kernel = ObjectCode.from_cubin(cubin.code, name=spec.entry).get_kernel(spec.entry)
        # Reading an attribute makes the driver load the code now rather than at the first launch.
        kernel.attributes.num_regs  # noqa: B018
        _allow_smem(kernel, spec.dynamic_smem_bytes, device_index)
    _loaded[spec, device_index] = kernel
    return kernel


def loaded_kernels() -> list[tuple[KernelSpec, int]]:
    """What this process has loaded so far: kernels, each with the index of its GPU."""
    return list(_loaded)


def _allow_smem(kernel: Any, num_bytes: int, device_index: int) -> None:
    """Raise the kernel's limit of dynamic shared memory where it is above the 48 KiB that need no asking."""
    if num_bytes <= 48 * 1024:
        return
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (result,) = driver.cuKernelSetAttribute(limit, num_bytes, driver.CUkernel(int(kernel.handle)), device_index)
    if int(result):
        raise UnsupportedError(
            f"this GPU does not give a CTA {num_bytes} bytes of shared memory (error {int(result)}). Use path='warp'."
        )


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


@lru_cache(maxsize=4096)
def _config(grid: tuple[int, int, int], block: int, smem_bytes: int) -> Any:
    from cuda.core import LaunchConfig

    # Programmatic dependent launch: the kernel may start before its predecessor ends, and waits for it itself.
    return LaunchConfig(grid=grid, block=(block, 1, 1), shmem_size=smem_bytes, programmatic_stream_serialization=True)


@cache
def _launch_function() -> Any:
    from cuda.core import launch

    return launch


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    block: int,
    args: tuple[Any, ...],
    stream: torch.cuda.Stream,
    smem_bytes: int = 0,
) -> None:
    """Launch with programmatic dependent launch. `args` are ctypes scalars, or ints for pointers and 64-bit sizes."""
    _launch_function()(_stream(stream.cuda_stream), _config(grid, block, smem_bytes), kernel, *args)


def pointer(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element, a null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


int32 = ctypes.c_int32
float32 = ctypes.c_float
