"""What a GPU and its links give: nominal, probed, or fitted to measured layers and stored as data.

`python -m warpring.bench.ep_calibration` fits the constants to the records of `bench/results` and writes them to
`warpring/data/expert_parallel`, a file a GPU, with the error of the fit on points that it has not seen.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from warpring.policy import file_of

#: Written into every file; a file of another schema is not read.
SCHEMA = 1
DATA_DIR = Path(__file__).parents[1] / "data" / "expert_parallel"


@dataclass(frozen=True)
class Machine:
    """One GPU and its link to the others. Rates in GB/s, times in microseconds.

    Attributes:
        name: for tables.
        num_sms: multiprocessors.
        read_gbs: read peak of the memory.
        sm_read_gbs: what one multiprocessor can draw; a partition of n draws min(n * this, read_gbs).
        l2_gbs: what the cache gives all multiprocessors together.
        link_gbs: reads from peers, all of them together, one direction.
        sm_link_gbs: rows that one multiprocessor fetches, from peers or from the rank itself.
        fp8_tflops: dense tensor throughput of the FP8 form; the 16-bit form has half.
        clock_ghz: of the multiprocessors, each of which issues four instructions a cycle.
        hop_us: from a store in one rank to its sight in another, with the flag.
        overhead_us: launches and the fork into partitions, a layer.
        stream_share: of the read peak that the experts' stream reaches.
        issue_share: of the issue slots that their conversions and products can use.
        task_us: what a task of the experts costs beyond that: its first and last steps, and the wait for its turn.
        exposed: share of the tokens' way that nothing hides.
        granularity: partitions are multiples of this many multiprocessors.
        converts: whether weights pass through instructions on their way to the tensor cores, as in our kernels for
            sm_90a; tensor cores that take FP4 and FP8 with their scales need none.
    """

    name: str
    num_sms: int
    read_gbs: float
    sm_read_gbs: float
    l2_gbs: float
    link_gbs: float
    sm_link_gbs: float
    fp8_tflops: float
    clock_ghz: float
    hop_us: float
    overhead_us: float
    stream_share: float = 0.97
    issue_share: float = 0.85
    task_us: float = 0.1
    exposed: float = 0.2
    granularity: int = 8
    converts: bool = True


#: From probes on two H200s, driver 580.159: read peak, reads by partition size (8 SMs 1.26 TB/s, 48 saturate), pull
#: from a peer (8 CTAs 321 GB/s), flag ping-pong (2.63 us both ways), fork into Green Contexts (4.9 to 6.6 us). The
#: cache's, the tensor cores' and the issue rates are nominal; shares and `task_us` are what a fit starts from.
H200 = Machine("H200", 132, 4530.0, 157.0, 7000.0, 335.0, 40.0, 1979.0, 1.98, 1.3, 5.5)
#: Nominal figures: nothing was measured on it.
B300 = Machine("B300", 148, 7000.0, 157.0, 12000.0, 800.0, 40.0, 4500.0, 1.92, 1.3, 5.5, converts=False)
MACHINES = {machine.name.lower(): machine for machine in (H200, B300)}
#: What CUDA calls the GPU of that name.
DEVICE_NAMES = {"h200": "NVIDIA H200"}


@dataclass(frozen=True)
class Calibration:
    """A machine whose constants were fitted to measured layers, and how far to trust it.

    Attributes:
        machine: to predict with.
        fitted: names of the constants that the fit could move.
        splits: communication partitions that were measured: a choice among others would be a guess.
        num_fitted, num_held_out: points of each kind.
        held_out: which points the fit has not seen, in words.
        fitted_error, held_out_error: mean of |predicted / measured - 1|.
        worst_held_out: the largest of those.
        split_loss: time at the split that the simulation chooses over that at the best one measured, less 1: the
            largest over the layers where several were measured.
        commit, date: of the newest code that was measured, and the day.
    """

    machine: Machine
    fitted: tuple[str, ...]
    splits: tuple[int, ...]
    num_fitted: int
    num_held_out: int
    held_out: str
    fitted_error: float
    held_out_error: float
    worst_held_out: float
    split_loss: float
    commit: str
    date: str

    @property
    def statement(self) -> str:
        """How good a prediction is, in a sentence."""
        return (
            f"Fitted to {self.num_fitted} measured points of {self.date}; on {self.num_held_out} others "
            f"({self.held_out}) predictions are off by {100 * self.held_out_error:.1f} % on average, "
            f"{100 * self.worst_held_out:.1f} % at worst."
        )


_ERRORS = ("fitted_error", "held_out_error", "worst_held_out", "split_loss")


@lru_cache(maxsize=64)
def calibration_of(device: str) -> Calibration | None:
    """The library's calibration of a device by CUDA's name for it, None where there is none."""
    return read(file_of(DATA_DIR, device))


def read(path: Path) -> Calibration | None:
    """The calibration of a file; None where it is missing, or (with a warning) where it cannot be used."""
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if held.pop("schema") != SCHEMA:
            raise ValueError(f"another schema than {SCHEMA}")
        del held["device"]
        machine = _machine(held.pop("machine"))
        lists = {"fitted": tuple(map(str, held.pop("fitted"))), "splits": tuple(map(int, held.pop("splits")))}
        numbers = {name: float(held.pop(name)) for name in _ERRORS}
        found = Calibration(machine=machine, **lists, **numbers, **held)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"warpring: {path} is not used ({type(error).__name__}: {error}). Write it anew with "
            "'python -m warpring.bench.ep_calibration'.",
            stacklevel=3,
        )
        return None
    return found


def _machine(entry: dict[str, Any]) -> Machine:
    """A machine of a file; ValueError or TypeError where it is none."""
    for name, value in entry.items():
        if name not in ("name", "converts") and not value > 0:
            raise ValueError(f"{name} must be positive; got {value}")
    return Machine(**entry)


def write(path: Path, device: str, calibration: Calibration) -> None:
    """Write a calibration in one step, and forget what was looked up before."""
    text = json.dumps({"schema": SCHEMA, "device": device, **asdict(calibration)}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
        handle.write(text + "\n")
    os.replace(handle.name, path)
    calibration_of.cache_clear()
