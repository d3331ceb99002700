"""Run a compiled function on all cores: on torch's own OpenMP threads, so that no second pool fights for them."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_once(function: int, arguments: int) -> None:
    """Call the function at address `function` with the address `arguments`; Python's lock is released meanwhile."""
    _FUNCTION(function)(arguments)


def run_parallel(function: int, arguments: int, num_threads: int) -> None:
    """The same call on `num_threads` threads at once; returns when all of them have."""
    if num_threads == 1:
        run_once(function, arguments)
    elif (openmp := _openmp()) is not None:
        openmp(function, arguments, num_threads, 0)
    else:
        wait([_threads().submit(run_once, function, arguments) for _ in range(num_threads)])


@cache
def _openmp() -> Any:
    """GNU's entry to a parallel region (LLVM's and Intel's libraries have it too) as torch links it, or None."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            entry = ctypes.CDLL(str(folder / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        entry.restype = None
        return entry
    return None


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="warpring")
