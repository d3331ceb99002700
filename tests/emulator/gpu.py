"""The emulator in place of a GPU, under the Python faces of kernels: they run as they are, on CPU tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from emulator.build import KERNEL_DIR, load
from emulator.launch import Launch, guarded, run
from warpring.runtime.jit import KernelSpec


@contextmanager
def emulated_gpu(
    *faces: ModuleType,
    seed: int = 0,
    num_sms: int = 3,
    concurrent: bool = False,
    resident_ctas: int = 4,
    directory: Path = KERNEL_DIR,
) -> Generator[list[Launch]]:
    """Launches that the modules `faces` make inside are collected, and run as one stream at the end.

    Args:
        *faces: modules that use `load` and `launch` of `warpring.runtime.launch`.
        seed: see `run`.
        num_sms: what the GPU says it has.
        concurrent, resident_ctas: see `run`.
        directory: where the sources are.

    Yields:
        the launches collected so far; memory that they read must live until the end.
    """
    stream: list[Launch] = []

    def load_emulated(spec: KernelSpec, device_index: int | None) -> KernelSpec:
        del device_index
        return spec

    def launch_emulated(
        spec: KernelSpec,
        grid: tuple[int, int, int],
        block: int,
        args: tuple[Any, ...],
        stream_: object,
        smem_bytes: int = 0,
    ) -> None:
        del stream_
        stream.append(Launch(load(spec, directory), grid, block, args, smem_bytes))

    buffers: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []

    @contextmanager
    def scratch(num_bytes: int, device: torch.device, stream_: object) -> Generator[torch.Tensor]:
        del device, stream_
        if not buffers or buffers[-1].numel() < num_bytes:
            buffers.append(guarded(torch.full((num_bytes,), 0xFF, dtype=torch.uint8)))  # BF16 and FP32 NaN
        yield buffers[-1]

    def zeroed(num_bytes: int, device: torch.device, stream_: object) -> torch.Tensor:
        del device, stream_
        if not zeros or zeros[-1].numel() < num_bytes:
            zeros.append(guarded(torch.zeros(num_bytes, dtype=torch.uint8)))
        return zeros[-1]

    properties = SimpleNamespace(multi_processor_count=num_sms)
    with ExitStack() as patches:
        for face in faces:
            patches.enter_context(mock.patch.object(face, "load", load_emulated))
            patches.enter_context(mock.patch.object(face, "launch", launch_emulated))
            if hasattr(face, "scratch"):
                patches.enter_context(mock.patch.object(face, "scratch", scratch))
            if hasattr(face, "zeroed"):
                patches.enter_context(mock.patch.object(face, "zeroed", zeroed))
        patches.enter_context(mock.patch.object(torch.cuda, "device", return_value=nullcontext()))
        patches.enter_context(
            mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0))
        )
        patches.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        yield stream
    run(stream, seed=seed, concurrent=concurrent, resident_ctas=resident_ctas)
    for state in zeros:
        assert not state.any(), "a kernel that counts from zero has not left zeros behind"
