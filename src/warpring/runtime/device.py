"""What a GPU is to us: its architecture name, and whether our kernels run on it."""

from __future__ import annotations

from functools import cache

import torch

from warpring.errors import UnsupportedError

#: Architectures that every kernel of one GPU is compiled for in the tests.
TESTED_ARCHS = ("sm_90a", "sm_100a", "sm_103a")


#: The architecture with `wgmma`, on which packed weights have grouped GEMMs of our own.
HOPPER = "sm_90a"

#: Least compute capability of our kernels, which use programmatic dependent launch.
LEAST_CAPABILITY = (9, 0)


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether a CUDA device is new enough for our kernels."""
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is of compute capability 9.0, which alone has the products of `wgmma`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def arch_of(device_index: int) -> str:
    """NVRTC's name of the GPU's architecture, e.g. "sm_90a".

    Raises:
        UnsupportedError: older than `LEAST_CAPABILITY`.
    """
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) < LEAST_CAPABILITY:
        raise UnsupportedError(
            f"our kernels need a GPU of compute capability 9.0 or newer; got {major}.{minor} "
            f"({torch.cuda.get_device_name(device_index)}). Use path='auto', 'grouped' or 'reference'."
        )
    return f"sm_{major}{minor}a"


def has_grouped_gemms(device: torch.device) -> bool:
    """Whether the grouped path multiplies packed weights as they are there (`warpring.kernels.grouped_gemm`)."""
    return is_hopper(device)


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; of `torch.device("cuda")`, the current one's."""
    # torch's stub calls the index an int; in torch.device("cuda") it is None.
    unnumbered = device.index is None  # pyright: ignore[reportUnnecessaryComparison]
    return torch.cuda.current_device() if unnumbered else device.index
