"""What a GPU is to us: its architecture name, and whether our kernels run on it."""

from __future__ import annotations

from functools import cache

import torch

from warpring.errors import UnsupportedError

#: Architectures that every kernel is compiled for in the tests.
TESTED_ARCHS = ("sm_90a", "sm_100a", "sm_103a")


@cache
def arch_of(device_index: int) -> str:
    """NVRTC's name of the GPU's architecture, e.g. "sm_90a".

    Raises:
        UnsupportedError: older than compute capability 9.0 (the kernels use programmatic dependent launch).
    """
    major, minor = torch.cuda.get_device_capability(device_index)
    if major < 9:
        raise UnsupportedError(
            f"warp kernels need a GPU of compute capability 9.0 or newer; got {major}.{minor} "
            f"({torch.cuda.get_device_name(device_index)}). Use path='classical' or 'reference'."
        )
    return f"sm_{major}{minor}a"


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; of `torch.device("cuda")`, the current one's."""
    # torch's stub calls the index an int; in torch.device("cuda") it is None.
    unnumbered = device.index is None  # pyright: ignore[reportUnnecessaryComparison]
    return torch.cuda.current_device() if unnumbered else device.index
