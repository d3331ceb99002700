"""What this machine has of all that expert-parallel decode needs, in words: `warpring doctor` prints it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from warpring.errors import ArgumentError, UnsupportedError
from warpring.expert_parallel.partition import plan_split
from warpring.runtime.green import has_workqueues, sm_limits

_PROBE_BYTES = 1 << 20


def facts() -> Iterator[tuple[str, str]]:
    """(label, text) of CPU ranks, what was not tried of ranks, peer access, symmetric memory and Green Contexts."""
    yield "CPU ranks", _gloo()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (text := rendezvous(count)) is not None:
        yield "rendezvous", text
    if not count:
        yield "GPU ranks", "none: no GPU; the reference runs on CPU ranks"
        return
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


def rendezvous(num_gpus: int) -> str | None:
    """What facts of one process leave open where there are several ranks, and which commands try it; else None.

    Ranks are those of torchrun that this process is one of (WORLD_SIZE), or else one a GPU.
    """
    world, local = (_count(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    ranks = world if world > 1 else num_gpus
    if ranks < 2:
        return None
    several_hosts = world > 1 and 0 < local < world
    start = "torchrun, with the options of this start," if several_hosts else f"torchrun --nproc-per-node {ranks}"
    return (
        f"not tried: whether {ranks} ranks meet and exchange tokens ('{start} -m warpring ep-verify --soak 10' tries "
        "it), and how fast (likewise '-m warpring ep-bench' times a layer)"
    )


def _count(variable: str) -> int:
    """The count in an environment variable; 0 where it holds none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


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
        return f"yes, one rank allocates it, backend {symmetric_memory.get_backend(torch.device('cuda', 0))}"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"no: {' '.join(str(error).split())[:200]}"


def _gloo() -> str:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "no: this torch has no gloo"
    return "yes, through gloo"
