"""Scratch memory of a layer's kernels: between them, and among the CTAs of one.

Outside a capture, each (device, stream) has one buffer that grows and stays: calls on one stream follow each other, so
they may share it, and in steady state nothing is allocated. Two threads that use one stream take turns (the lock is
held from the first launch to the last). While a CUDA graph is captured the buffer comes from torch, that is from the
graph's own memory pool: a graph may be replayed on any stream, beside eager calls or other graphs, without sharing.

Some kernels count among their CTAs, from zero, and leave zeros behind (`zeroed`). Here too each (device, stream) has
one buffer outside a capture; each stream of each capture gets a block of a reserve that was cleared before, so that no
graph shares one and none has to clear it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

from warpring.runtime.graph import capture_id

_lock = threading.Lock()
_buffers: dict[tuple[int, int], torch.Tensor] = {}
#: Zeros of each (device, stream), and of each (device, stream, capture).
_zeroed: dict[tuple[int, int, int | None], torch.Tensor] = {}
#: Cleared blocks that no capture has yet, by device.
_reserve: dict[int, list[torch.Tensor]] = {}
_BLOCK_BYTES, _BLOCKS = 16 * 1024, 256


@contextmanager
def scratch(num_bytes: int, device: torch.device, stream: torch.cuda.Stream) -> Generator[torch.Tensor]:
    """A uint8 buffer of at least `num_bytes`, ours for the launches made inside the `with` block."""
    if torch.cuda.is_current_stream_capturing():
        yield torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return
    key = (stream.device_index, stream.cuda_stream)
    with _lock:
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            # The old buffer returns to torch's allocator, which hands it out again in stream order only.
            # It outlives the call: not an inference tensor, whatever the mode that this call happens in.
            with torch.inference_mode(False):
                buffer = _buffers[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        yield buffer


def zeroed(num_bytes: int, device: torch.device, stream: torch.cuda.Stream) -> torch.Tensor:
    """At least `num_bytes` of zeros for a launch that leaves zeros behind; launches on one stream share them in turns.

    In a capture, where the reserve has no block left (256 captures since the last call outside of one) or none so
    large, the zeros are part of the graph: right too, but each replay clears them.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    key = (stream.device_index, stream.cuda_stream, capture_id(stream) if capturing else None)
    with _lock:
        reserve = _reserve.setdefault(stream.device_index, [])
        if not capturing:
            _refill(reserve, device)
        block = _zeroed.get(key)
        if block is not None and block.numel() >= num_bytes:
            return block
        if capturing:
            if num_bytes > _BLOCK_BYTES or not reserve:
                return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            block = reserve.pop()
        else:
            with torch.inference_mode(False):
                block = torch.zeros(max(num_bytes, _BLOCK_BYTES), dtype=torch.uint8, device=device)
        _zeroed[key] = block
        return block


def _refill(reserve: list[torch.Tensor], device: torch.device) -> None:
    """Cleared blocks for the captures to come, once fewer than half are left."""
    if len(reserve) >= _BLOCKS // 2:
        return
    with torch.inference_mode(False):
        blocks = torch.zeros(_BLOCKS, _BLOCK_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # a graph may use them on any stream
    reserve.extend(blocks.unbind())


def release() -> None:
    """Give the scratch buffers of calls outside of captures back to torch's allocator."""
    with _lock:
        _buffers.clear()
        for key in [key for key in _zeroed if key[2] is None]:
            del _zeroed[key]
