"""What this machine has of all that expert-parallel decode needs, in words: `warpring doctor` prints it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from warpring.errors import ArgumentError, UnsupportedError
from warpring.expert_parallel.partition import plan_split
from warpring.runtime.green import has_workqueues, sm_limits

_PROBE_BYTES = 1 << 20


def facts() -> Iterator[tuple[str, str]]:
    """(label, text) of ranks on CPUs, peer access, symmetric memory and Green Contexts."""
    yield "CPU ranks", _gloo()
    if not torch.cuda.is_available():
        yield "GPU ranks", "none: no GPU; the reference runs on CPU ranks"
        return
    count = torch.cuda.device_count()
    yield "peer access", peer_access(count)
    yield "symmetric mem.", _symmetric_memory()
    for index in range(count):
        yield f"green ctx. {index}", green_contexts(index)


def peer_access(count: int) -> str:
    """Which GPUs read each other's memory."""
    if count == 1:
        return "one GPU alone; a layer of one rank"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    cut = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not cut:
        return f"all {count} GPUs reach each other"
    return f"missing from {', '.join(f'{a} to {b}' for a, b in cut[:6])}{' and more' if len(cut) > 6 else ''}"


def green_contexts(index: int) -> str:
    """How a GPU's SMs can be split, or why not."""
    try:
        limits = sm_limits(index)
        split = plan_split(limits)
    except (UnsupportedError, ArgumentError) as error:
        return f"no: {error} Two plain streams stand in."
    queues = "own" if has_workqueues(index) else "shared (own ones need driver and bindings 13.1)"
    return (
        f"yes, {limits.num_sms} SMs in steps of {limits.alignment}, at least {limits.min_partition_sms}; by default "
        f"{split.comm_sms} + {split.compute_sms}; work queues {queues}"
    )


def _symmetric_memory() -> str:
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        symmetric_memory.empty(_PROBE_BYTES, dtype=torch.uint8, device=torch.device("cuda", 0))
        return f"yes, backend {symmetric_memory.get_backend(torch.device('cuda', 0))}"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"no: {' '.join(str(error).split())[:200]}"


def _gloo() -> str:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "no: this torch has no gloo"
    return "yes, through gloo"
