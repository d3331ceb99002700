"""Launches of emulated kernels: one stream or several, with a schedule that a seed decides."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from emulator.build import Kernel, runtime

#: The runtime has one machine a process.
_LOCK = threading.Lock()
_REPORT_BYTES = 1 << 16
_LIBC = ctypes.CDLL(None)


class EmulationError(AssertionError):
    """The kernel did what a GPU would not survive, or what it must not do: deadlock, trap, access out of bounds."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: from `load`.
        grid: CTAs in x, y, z.
        block: threads of a CTA.
        args: ctypes values, and ints for pointers and 64-bit sizes, as `warpring.runtime.launch.launch` takes them; or
            tensors, which live as long as the launch.
        smem_bytes: dynamic shared memory; None for what the kernel's spec says.
        overlaps_previous: programmatic dependent launch, as the project launches all its kernels.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int | tuple[int, int, int]
    args: Sequence[Any]
    smem_bytes: int | None = None
    overlaps_previous: bool = True


class _GridSpec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem", ctypes.c_uint32),
        ("smem_alignment", ctypes.c_uint32),
        ("static_smem", ctypes.c_uint32),
        ("overlaps_previous", ctypes.c_int),
    )


class _Options(ctypes.Structure):
    _fields_ = (("seed", ctypes.c_uint64), ("resident_ctas", ctypes.c_int), ("timeout_s", ctypes.c_double))


def run(
    *streams: Sequence[Launch], seed: int = 0, concurrent: bool = False, resident_ctas: int = 4, timeout_s: float = 20
) -> None:
    """Run launches to their end: those of one stream in order, streams beside each other.

    Args:
        *streams: launches of each stream.
        seed: 0 runs threads in order; other seeds at random, odd ones by priorities, so that some threads and warps run
            far ahead of others. A run is the same every time with the same seed.
        concurrent: all CTAs run beside each other, as kernels need that wait for each other's flags.
        resident_ctas: without `concurrent`, how many CTAs run beside each other.
        timeout_s: how long threads may do nothing but poll.

    Raises:
        EmulationError: with the kernel, CTA, thread, and place in its source.
    """
    kept: list[Any] = []
    specs = [_spec(launch, kept) for stream in streams for launch in stream]
    grids = (_GridSpec * len(specs))(*specs)
    counts = (ctypes.c_int * len(streams))(*map(len, streams))
    options = _Options(seed, 0 if concurrent else resident_ctas, timeout_s)
    report = ctypes.create_string_buffer(_REPORT_BYTES)
    with _LOCK:
        failed = runtime().cuda_on_cpu_run(
            grids, counts, len(streams), ctypes.byref(options), report, ctypes.c_size_t(_REPORT_BYTES)
        )
    if failed:
        raise EmulationError(_with_lines(report.value.decode()) + f" (seed {seed})")


def _spec(launch: Launch, kept: list[Any]) -> _GridSpec:
    kernel = launch.kernel
    values = [_value(arg) for arg in launch.args]
    sizes = tuple(ctypes.sizeof(value) for value in values)
    if sizes != kernel.argument_sizes:
        raise EmulationError(
            f"{kernel.spec.entry} takes arguments of {kernel.argument_sizes} bytes; got {sizes}: check order and types"
        )
    pointers = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(value) for value in values))
    name = kernel.spec.entry.encode()
    kept += [values, pointers, name]
    block = launch.block if isinstance(launch.block, tuple) else (launch.block, 1, 1)
    smem = kernel.spec.dynamic_smem_bytes if launch.smem_bytes is None else launch.smem_bytes
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= 1024 or min(*launch.grid) < 1 or max(launch.grid[1:]) > 65535:
        raise EmulationError(f"{kernel.spec.entry}: no GPU launches grid {launch.grid}, block {block}")
    if kernel.static_smem_bytes + smem > 227 * 1024:
        raise EmulationError(
            f"{kernel.spec.entry}: a CTA has 227 KiB of shared memory; the launch asks for {smem} bytes"
        )
    return _GridSpec(
        name,
        kernel.address,
        pointers,
        (ctypes.c_uint * 3)(*launch.grid),
        (ctypes.c_uint * 3)(*block),
        smem,
        kernel.smem_alignment,
        kernel.static_smem_bytes,
        launch.overlaps_previous,
    )


def _value(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        arg = arg.data_ptr()
    return ctypes.c_int64(arg) if isinstance(arg, int) else arg


def _with_lines(report: str) -> str:
    """The report with `[library+offset]` of a fault as a line of the source, where binutils can tell."""

    def place(match: re.Match[str]) -> str:
        try:
            done = subprocess.run(
                ["addr2line", "-i", "-e", match[1], match[2]], capture_output=True, text=True, timeout=20
            )
        except OSError:
            return match[0]
        lines = [line.rsplit("/", 1)[-1].split(" ")[0] for line in done.stdout.splitlines()]
        return " < ".join(lines) if lines and "??" not in lines[0] else match[0]

    return re.sub(r"\[([^\]+]+)\+(0x[0-9a-f]+)\]", place, report)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose memory ends where the next access faults (less than 16 bytes before, to keep alignment).

    Reads beyond it are caught, where they would find a neighbour's memory on a GPU.
    """
    bytes_ = tensor.numel() * tensor.element_size()
    used = -(-bytes_ // 16) * 16
    page = mmap.PAGESIZE
    pages = max(1, -(-used // page))
    area = mmap.mmap(-1, (pages + 1) * page)
    view = (ctypes.c_char * len(area)).from_buffer(area)
    if _LIBC.mprotect(ctypes.c_void_p(ctypes.addressof(view) + pages * page), ctypes.c_size_t(page), 0):
        raise OSError("mprotect failed")
    flat = torch.frombuffer(area, dtype=torch.uint8, count=bytes_, offset=pages * page - used)
    copy = flat.view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy
