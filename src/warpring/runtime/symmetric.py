"""Symmetric memory: a buffer on every rank of a group that each rank's kernels can read and write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from warpring.errors import UnsupportedError


@dataclass(frozen=True)
class SymmetricBuffer:
    """A buffer of the same size on every rank.

    Attributes:
        local: uint8, this rank's own buffer.
        addresses: of every rank's buffer, as kernels of this rank reach it.
        handle: keeps the mappings alive; None for one rank alone.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    handle: Any = None


def allocate(num_bytes: int, device: torch.device, group: Any | None) -> SymmetricBuffer:
    """Allocate zeros on every rank and exchange the addresses; a collective, outside of graph capture.

    The zeros are written before the exchange, so that no peer can signal into memory that is cleared afterwards.

    Args:
        num_bytes: the same on every rank.
        device: a CUDA device.
        group: a torch.distributed group of the ranks, or None for one rank alone.

    Raises:
        UnsupportedError: torch cannot map peers' memory here (no NVLink or P2P access, several hosts, an older torch).
    """
    if group is None:
        local = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        return SymmetricBuffer(local, (local.data_ptr(),))
    # Nothing here uses NVLink multicast, and setting it up needs services that not every host runs.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        local.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(local, group)
        addresses = tuple(int(address) for address in handle.buffer_ptrs)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UnsupportedError(
            f"symmetric memory of {num_bytes:,} bytes on {device} failed: {' '.join(str(error).split())}. It needs "
            "GPUs of one host (or one NVLink domain) with peer access; `warpring doctor` shows what there is."
        ) from error
    return SymmetricBuffer(local, addresses, handle)
