"""Green Contexts: streams that own a part of a device's SMs, through `cuda.core`.

Both parts come from one split call: two independent splits would overlap. The contexts share the primary context's
memory and modules, so a kernel or tensor made for one runs and reads in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warpring.errors import UnsupportedError
from warpring.runtime.jit import IMPORT_LOCK


@dataclass(frozen=True)
class SmLimits:
    """What the driver says of a device's SMs.

    Attributes:
        num_sms: all of them.
        min_partition_sms: the least partition.
        alignment: partitions are multiples of this many SMs (the remainder of a split is not bound by it).
    """

    num_sms: int
    min_partition_sms: int
    alignment: int


class GreenStream:
    """A stream in a Green Context of its own.

    Attributes:
        num_sms: SMs that the driver granted.
        stream: the stream, for torch.
        context: handle of the context (CUcontext), for nodes of an explicit graph.
    """

    def __init__(self, device: Any, device_index: int, resources: list[Any]) -> None:
        from cuda.core import ContextOptions, StreamOptions

        self._context = device.create_context(ContextOptions(resources=resources))
        try:
            self._stream = self._context.create_stream(StreamOptions(nonblocking=True))
        except Exception:
            self._context.close()
            raise
        self.num_sms = int(resources[0].sm_count)
        self.context = int(self._context.handle)
        self.stream: torch.cuda.Stream = torch.cuda.ExternalStream(int(self._stream.handle), device=device_index)

    def close(self) -> None:
        """Wait for the stream's work, then give stream and context back."""
        self.stream.synchronize()
        self._stream.close()
        self._context.close()


def sm_limits(device_index: int) -> SmLimits:
    """What can be split on this device.

    Raises:
        UnsupportedError: no cuda.core, a driver before 12.4, or a device that gives no SM resource (MIG, MPS).
    """
    try:
        sm = _device(device_index).resources.sm
        return SmLimits(int(sm.sm_count), int(sm.min_partition_size), int(sm.coscheduled_alignment))
    except Exception as error:  # cuda.core raises its own types, which differ between its versions
        raise _unsupported(device_index, error) from error


def has_workqueues(device_index: int) -> bool:
    """Whether driver and bindings give partitions work queues of their own (13.1 and newer)."""
    try:
        return bool(_device(device_index).resources.workqueue.concurrency_limit)
    except Exception:  # an older driver, older bindings, or an older cuda.core: each says so in its own way
        return False


def split_device(device_index: int, first_sms: int) -> tuple[GreenStream, GreenStream]:
    """Two streams: one that owns `first_sms` SMs (as `SmLimits` allows), and one that owns all others.

    Where the driver has work queues as a resource, each context gets its own, so that no kernel of one part waits
    behind the other's. The caller checks what was granted.

    Raises:
        UnsupportedError: see `sm_limits`; or the driver refused the split.
    """
    with_queues = has_workqueues(device_index)
    opened: list[GreenStream] = []
    try:
        from cuda.core import SMResourceOptions

        device = _device(device_index)
        groups, rest = device.resources.sm.split(SMResourceOptions(count=first_sms))
        for sm in (groups[0], rest):
            queues = [_own_queues(device)] if with_queues else []
            opened.append(GreenStream(device, device_index, [sm, *queues]))
    except Exception as error:
        for stream in opened:
            stream.close()
        raise _unsupported(device_index, error) from error
    return opened[0], opened[1]


def _device(device_index: int) -> Any:
    with IMPORT_LOCK:
        from cuda.core import Device

    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # torch's primary context exists and is current
        device = Device(device_index)
        device.set_current()
    return device


def _own_queues(device: Any) -> Any:
    """A work queue resource that other contexts do not share while there are enough."""
    from cuda.core import WorkqueueResourceOptions

    queues = device.resources.workqueue
    queues.configure(WorkqueueResourceOptions(sharing_scope="green_ctx_balanced"))
    return queues


def _unsupported(device_index: int, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"cuda:{device_index} has no Green Contexts: {' '.join(str(error).split()) or type(error).__name__}. They need "
        "driver 12.4 or newer and cuda-core 1.2 or newer (pip install 'warpring[cuda]'), and neither MIG nor MPS."
    )
