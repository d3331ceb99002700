"""How the SMs of a device are split into a communication and a compute partition: the plan, then the streams.

The four rules of a split: at least 32 compute SMs, an even number of them, at least 2 communication SMs, and both
together are all of the device's. A driver adds its own: a least partition, and a granularity.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from warpring.errors import ArgumentError, UnsupportedError
from warpring.formats import ceil_div
from warpring.runtime.green import GreenStream, SmLimits, has_workqueues, sm_limits, split_device

PartitionMode = Literal["auto", "green", "streams", "sequence"]
MODES: tuple[str, ...] = get_args(PartitionMode)

MIN_COMPUTE_SMS = 32
MIN_COMM_SMS = 2
#: Communication SMs where nobody says otherwise: 16 of an H200's 132 pull at the full rate of NVLink.
DEFAULT_COMM_SMS = 16
#: At most this share of a device goes to communication by default.
_DEFAULT_SHARE = 8


@dataclass(frozen=True)
class Split:
    """SMs of the two partitions.

    Attributes:
        comm_sms: for dispatch (role1, and role4).
        compute_sms: for the experts (role2).
    """

    comm_sms: int
    compute_sms: int


def broken_rules(split: Split, num_sms: int) -> Iterator[str]:
    """Those of the four rules that a split of a device with `num_sms` SMs breaks, in words."""
    if split.compute_sms < MIN_COMPUTE_SMS:
        yield f"compute SMs must be at least {MIN_COMPUTE_SMS}; got {split.compute_sms}"
    if split.compute_sms % 2:
        yield f"compute SMs must be an even number; got {split.compute_sms}"
    if split.comm_sms < MIN_COMM_SMS:
        yield f"communication SMs must be at least {MIN_COMM_SMS}; got {split.comm_sms}"
    if split.comm_sms + split.compute_sms != num_sms:
        yield (
            f"communication and compute SMs together must be the device's {num_sms}; got {split.comm_sms} + "
            f"{split.compute_sms}"
        )


def check_split(split: Split, num_sms: int) -> None:
    """Raise unless a split, as granted by the driver, follows the four rules.

    Raises:
        UnsupportedError: naming every rule that is broken.
    """
    if broken := list(broken_rules(split, num_sms)):
        raise UnsupportedError(f"partition: {'; '.join(broken)}. Ask for another comm_sms, or use two plain streams.")


def plan_split(limits: SmLimits, comm_sms: int | None = None) -> Split:
    """The split to ask the driver for.

    Args:
        limits: what the driver says.
        comm_sms: wanted communication SMs, rounded up to what the driver can grant; None for 16, or an eighth of a
            small device.

    Raises:
        ArgumentError: comm_sms is no number of SMs that leaves enough for compute.
        UnsupportedError: the device is too small for any split.
    """
    step = max(1, limits.alignment)
    least = max(limits.min_partition_sms, MIN_COMM_SMS)
    if comm_sms is not None and not MIN_COMM_SMS <= comm_sms <= limits.num_sms - MIN_COMPUTE_SMS:
        raise ArgumentError(
            f"partition: comm_sms must be {MIN_COMM_SMS} to {limits.num_sms - MIN_COMPUTE_SMS} on a device of "
            f"{limits.num_sms} SMs; got {comm_sms}. Leave it out for a choice that fits."
        )
    wanted = min(DEFAULT_COMM_SMS, limits.num_sms // _DEFAULT_SHARE) if comm_sms is None else comm_sms
    asked = ceil_div(max(wanted, least), step) * step
    # The remainder has the parity of the device; a step of an odd size can mend an odd one.
    for comm in (asked, asked + step):
        split = Split(comm, limits.num_sms - comm)
        if not any(broken_rules(split, limits.num_sms)):
            return split
    broken = "; ".join(broken_rules(Split(asked, limits.num_sms - asked), limits.num_sms))
    raise UnsupportedError(
        f"partition: a device of {limits.num_sms} SMs, split in steps of {step}, cannot give {asked} to communication: "
        f"{broken}. Run without partitions (two plain streams)."
    )


def plan_capped(num_sms: int, comm_sms: int | None = None) -> Split:
    """The grids of two plain streams where there are no partitions: CTAs of each role, all of them resident at once.

    The same numbers as a partition in steps of 2, so that what follows (grids, the order of tasks) does not differ.

    Raises:
        ArgumentError, UnsupportedError: see `plan_split`.
    """
    even = num_sms - num_sms % 2
    return plan_split(SmLimits(even, MIN_COMM_SMS, 2), comm_sms)


@dataclass
class Partition:
    """Where the roles of a layer run.

    Attributes:
        mode: "green", "streams" or "sequence", as it came out.
        split: SMs of each (granted), or CTAs of each where they own none.
        streams: for communication and for compute; None where all roles follow each other on the caller's stream.
        fallback_reason: why "auto" gave plain streams, or None.
    """

    mode: PartitionMode
    split: Split
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
    fallback_reason: str | None = None
    _green: tuple[GreenStream, ...] = field(default=(), repr=False)

    @property
    def contexts(self) -> tuple[int, int] | None:
        """Handles of the two contexts (communication, compute); None without Green Contexts."""
        return (self._green[0].context, self._green[1].context) if self._green else None

    def close(self) -> None:
        """Give the Green Contexts back, after their work."""
        for stream in self._green:
            stream.close()
        self._green = ()


def open_partition(device_index: int, comm_sms: int | None = None, mode: PartitionMode = "auto") -> Partition:
    """Split the device, or set up what stands in for a split.

    Args:
        device_index: of the CUDA device.
        comm_sms: see `plan_split`.
        mode: "green": two Green Contexts; "auto": these for calls in two halves (or where there are none plain streams,
            with a warning), while a call in one is a chain of launches on the caller's stream, each as soon as the one
            before runs; "streams": two plain streams with capped grids, which share the SMs; "sequence": role after
            role, each on all SMs, as a library without partitions does it.

    Raises:
        ArgumentError: an unknown mode; comm_sms, see `plan_split`.
        UnsupportedError: no split is possible and the mode is "green", or the device is too small for either.

    Warns:
        RuntimeWarning: on falling back, with the reason.
    """
    if mode not in MODES:
        raise ArgumentError(f"partition: mode must be one of {', '.join(MODES)}; got {mode!r}. Leave it at 'auto'.")
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    if mode == "sequence":
        return Partition(mode, Split(num_sms, num_sms))
    _check_connections(device_index)
    reason: str | None = None
    if mode != "streams":
        try:
            return _open_green(device_index, comm_sms)
        except UnsupportedError as error:
            if mode == "green":
                raise
            reason = str(error)
    split = plan_capped(num_sms, comm_sms)
    if reason is not None:
        warnings.warn(
            f"warpring: {reason} Falling back to two plain streams with grids of {split.comm_sms} and "
            f"{split.compute_sms} CTAs: results are the same, but dispatch and experts share SMs. partition='green' "
            "makes this an error, 'streams' a choice.",
            RuntimeWarning,
            stacklevel=3,
        )
    return Partition("streams", split, (torch.cuda.Stream(device_index), torch.cuda.Stream(device_index)), reason)


def _check_connections(device_index: int) -> None:
    """Raise where all streams share one hardware queue: role2 would stand behind role1, which waits for it."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if connections.strip() == "1" and not has_workqueues(device_index):
        raise UnsupportedError(
            "partition: CUDA_DEVICE_MAX_CONNECTIONS must be above 1, since roles on two streams wait for each other; "
            "got 1. Unset it, set 8 or more before CUDA starts, or take partition='sequence'."
        )


def _open_green(device_index: int, comm_sms: int | None) -> Partition:
    limits = sm_limits(device_index)
    wanted = plan_split(limits, comm_sms)
    comm, compute = split_device(device_index, wanted.comm_sms)
    split = Split(comm.num_sms, compute.num_sms)
    try:
        check_split(split, limits.num_sms)
    except UnsupportedError:
        comm.close()
        compute.close()
        raise
    return Partition("green", split, (comm.stream, compute.stream), _green=(comm, compute))
