"""What Nsight Compute measured of a kernel, read from the CSV of its raw page.

The raw page has a column a metric: a row of names, a row of units, then a row a launch, in the order of launching.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

from warpring.errors import WarpringError

#: Metrics that are read, with what is asked of ncu for them. Stall reasons come with the section WarpStateStats.
DURATION = "gpu__time_duration.sum"
DRAM_READ = "dram__bytes_read.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
#: The same as a number of instructions a cycle and scheduler, at most 1, as the section SchedulerStats names it.
ISSUE_PER_CYCLE = "smsp__issue_active.avg.per_cycle_active"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
STATIC_SMEM, DYNAMIC_SMEM = "launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"
METRICS = (DURATION, DRAM_READ, ISSUE, OCCUPANCY, REGISTERS, STATIC_SMEM, DYNAMIC_SMEM)
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
#: Not a reason to wait: the warp was issued.
_ISSUED = "selected"

_UNITS = {
    "byte": 1.0,
    "second": 1.0,
    "nsecond": 1e-9,
    "usecond": 1e-6,
    "msecond": 1e-3,
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class KernelProfile:
    """One launch of one kernel.

    Attributes:
        kernel: its name.
        grid, block: as ncu writes them, e.g. "(264, 1, 1)".
        duration_us: time on the GPU, alone and with cold caches.
        dram_read_bytes: bytes read from memory.
        issue_share: cycles in which a scheduler issued an instruction, over all active ones, 0 to 1.
        occupancy: active warps over what the multiprocessor has room for, 0 to 1.
        registers: registers a thread.
        smem_bytes: shared memory a CTA, static and dynamic.
        stalls: (reason, share of the warps' time), the longest first; shares of all reasons and of issuing add up to 1.
    """

    kernel: str
    grid: str
    block: str
    duration_us: float
    dram_read_bytes: int
    issue_share: float
    occupancy: float
    registers: int
    smem_bytes: int
    stalls: tuple[tuple[str, float], ...]

    @property
    def dram_gbs(self) -> float:
        """Bytes read from memory a nanosecond."""
        return self.dram_read_bytes / self.duration_us / 1e3


def parse_raw(text: str, marker: str) -> list[list[KernelProfile]]:
    """The launches after each launch of the kernel `marker`, from a raw page in CSV, whatever ncu printed before it.

    Raises:
        WarpringError: no such page, or a metric that is missing or no number.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise WarpringError(f"parse_raw: found no page of metrics; ncu said: {' / '.join(lines[-5:])}")
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[first:])))
    calls: list[list[KernelProfile]] = []
    for row in rows:
        launch = dict(zip(names, row, strict=False))
        if _name(launch) == marker:
            calls.append([])
        elif row and calls:
            calls[-1].append(_profile(launch, dict(zip(names, units, strict=True))))
    return calls


def _name(row: dict[str, str]) -> str:
    """The kernel's name without its parameters' types."""
    return row.get("Kernel Name", "").replace("(anonymous namespace)", "").split("(")[0].split("::")[-1]


def _profile(row: dict[str, str], units: dict[str, str]) -> KernelProfile:
    def number(name: str) -> float:
        try:
            return float(row[name].replace(",", "")) * _factor(units[name])
        except (KeyError, ValueError) as error:
            raise WarpringError(
                f"parse_raw: {row.get('Kernel Name')} has no number for {name}: {row.get(name)!r} {units.get(name)!r}"
            ) from error

    waits = {match[1]: number(name) for name in row if (match := _STALL.fullmatch(name)) and row[name]}
    total = sum(waits.values())
    stalls = sorted(((reason, wait) for reason, wait in waits.items() if reason != _ISSUED), key=lambda pair: -pair[1])
    return KernelProfile(
        kernel=_name(row),
        grid=row["Grid Size"],
        block=row["Block Size"],
        duration_us=number(DURATION) * 1e6,
        dram_read_bytes=round(number(DRAM_READ)),
        issue_share=number(ISSUE) / 100 if ISSUE in row else number(ISSUE_PER_CYCLE),
        occupancy=number(OCCUPANCY) / 100,
        registers=round(number(REGISTERS)),
        smem_bytes=round(number(STATIC_SMEM) + number(DYNAMIC_SMEM)),
        stalls=tuple((reason, round(wait / total, 4)) for reason, wait in stalls if wait > 0),
    )


def _factor(unit: str) -> float:
    """What one of this unit is in bytes or seconds; 1 for a percentage, a ratio or a count."""
    base = unit.split("/")[0]
    for name, factor in _UNITS.items():
        prefix = base.removesuffix(name)
        if prefix != base and prefix in _PREFIXES:
            return factor * _PREFIXES[prefix]
    return 1.0
