"""Launches of the kernels in probes.cu and probe_wgmma.cu."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulationError, Launch, load, run, unusable_reason
from warpring.runtime.jit import KernelSpec

HERE = Path(__file__).parent
#: Schedules that a rule is checked with.
SEEDS = range(8)
needs_compiler = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))


def launch(
    entry: str, *args: Any, block: int = 32, grid: int = 1, smem: int = 0, source: str = "probes.cu", **macros: object
) -> Launch:
    """One launch of a probe; ints are 32-bit values."""
    spec = KernelSpec(source, entry, tuple((name, str(value)) for name, value in macros.items()))
    values = [ctypes.c_int32(arg) if isinstance(arg, int) else arg for arg in args]
    return Launch(load(spec, HERE), (grid, 1, 1), block, values, smem)


def ints(count: int) -> torch.Tensor:
    return torch.full((count,), -77, dtype=torch.int32)


def error_of(launched: Launch, seed: int = 0, **kwargs: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run([launched], seed=seed, **kwargs)
    return str(caught.value)
