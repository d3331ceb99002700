"""The ranks that torchrun started, as a group for the expert-parallel benches."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def process_group(device: torch.device) -> Generator[tuple[Any | None, torch.device]]:
    """The group of torchrun's processes (None for one alone) and this process's device; taken down afterwards.

    Args:
        device: a CPU, or any CUDA device, which becomes that of this process on its host.
    """
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None, device
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    try:
        yield dist.group.WORLD, device
    finally:
        dist.destroy_process_group()
