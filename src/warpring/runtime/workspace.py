"""Scratch memory between the two kernels of a layer.

Outside a capture, each (device, stream) has one buffer that grows and stays: calls on one stream follow each other, so
they may share it, and in steady state nothing is allocated. Two threads that use one stream take turns (the lock is
held from the first launch to the last). While a CUDA graph is captured the buffer comes from torch, that is from the
graph's own memory pool: a graph may be replayed on any stream, beside eager calls or other graphs, without sharing.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_buffers: dict[tuple[int, int], torch.Tensor] = {}


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


def release() -> None:
    """Give every scratch buffer back to torch's allocator."""
    with _lock:
        _buffers.clear()
