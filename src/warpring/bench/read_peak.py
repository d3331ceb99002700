"""The read peak: how fast this machine reads memory when it does nothing else. Every share of the peak refers to it."""

from __future__ import annotations

import time

import torch

from warpring.bench.timing import capture
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import launch, load

#: Bytes of the buffer that is read, far above any cache; half of what is free where that is less.
READ_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
PROBE = KernelSpec("read_probe.cu", "read_probe")
#: read_probe.cu's constants: bytes of one CTA's tile, threads of a CTA.
TILE_BYTES, THREADS = 32 << 10, 256
#: CTAs of a multiprocessor that are tried; the best is the peak.
CTAS_PER_SM = (4, 6, 8)
_REPEATS = 10
_best: dict[str, float] = {}


def read_peak_gbs(device: torch.device) -> float:
    """Best of several reads of one large buffer, in 1e9 bytes a second, by this process so far.

    A probe beside tens of GB of weights was seen to read 13 % slower than one on an empty GPU, slower than the kernels
    that it is the yardstick of; so a later probe of a process may raise the peak, never lower it.

    On a GPU a kernel of ours that only reads, replayed from a CUDA graph; on a CPU torch's sum over int64.
    """
    found = _cuda_peak(device) if device.type == "cuda" else _cpu_peak()
    _best[str(device)] = max(found, _best.get(str(device), 0.0))
    return _best[str(device)]


def _cpu_peak() -> float:
    buffer = torch.ones(READ_BYTES["cpu"] // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(_REPEATS // 2):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return READ_BYTES["cpu"] / best / 1e9


def _cuda_peak(device: torch.device) -> float:
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        num_tiles = min(READ_BYTES["cuda"], torch.cuda.mem_get_info()[0] // 2) // TILE_BYTES
        # Random bytes, as weights are: zeros would cost the memory less power.
        buffer = torch.empty(num_tiles * TILE_BYTES // 8, dtype=torch.int64, device=device).random_()
        sink = torch.zeros(1, dtype=torch.int32, device=device)
        kernel = load(PROBE, index)
        num_sms = torch.cuda.get_device_properties(index).multi_processor_count
        best = 0.0
        for ctas in CTAS_PER_SM:
            grid = (ctas * num_sms, 1, 1)

            def call(grid: tuple[int, int, int] = grid) -> None:
                args = (buffer.data_ptr(), num_tiles, sink.data_ptr())
                launch(kernel, grid, THREADS, args, torch.cuda.current_stream())

            graph = capture([call])
            for _ in range(_REPEATS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                best = max(best, num_tiles * TILE_BYTES / start.elapsed_time(end) / 1e6)
        return best
