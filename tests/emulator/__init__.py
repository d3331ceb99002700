"""The project's CUDA kernels on a CPU: the real sources, compiled with g++, every CUDA thread a fiber.

`load(spec)` compiles what `warpring.runtime.jit` would give to NVRTC; `run(...)` runs launches of it on CPU tensors.
`emulated_gpu(...)` puts both in place of the GPU under a kernel's Python face.
"""

from __future__ import annotations

from emulator.build import Kernel, load, unusable_reason
from emulator.changed import write_changed
from emulator.gpu import emulated_gpu
from emulator.launch import EmulationError, Launch, guarded, run

__all__ = [
    "EmulationError",
    "Kernel",
    "Launch",
    "emulated_gpu",
    "guarded",
    "load",
    "run",
    "unusable_reason",
    "write_changed",
]
