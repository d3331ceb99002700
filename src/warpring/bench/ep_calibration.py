"""Constants of the expert-parallel simulation, fitted to measured layers and judged on others that were held out.

    python -m warpring.bench.ep_calibration [--root CHECKOUT] [--check]

writes `src/warpring/data/expert_parallel/*.json` from the records of GPUs in `bench/results/*.jsonl`; with --check
nothing is written and the exit code is 1 if a file is not what the records say.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from warpring.bench.data_files import main_of
from warpring.bench.ep_measured import HELD_OUT, Point, points_of
from warpring.bench.records import Record
from warpring.bench.tables import read_results
from warpring.errors import ArgumentError
from warpring.expert_parallel.machines import (
    DATA_DIR,
    DEVICE_NAMES,
    MACHINES,
    Calibration,
    Machine,
    read,
    write,
)
from warpring.expert_parallel.simulate import Workload, predict
from warpring.policy import file_of

#: A constant's least and largest value, and how far (as a factor's logarithm) measured layers may draw it from what
#: probes and data sheets say: little where a probe measured it alone.
FITTED: dict[str, tuple[float, float, float]] = {
    "overhead_us": (0.5, 60.0, 0.7),
    "stream_share": (0.3, 1.0, 0.3),
    "issue_share": (0.2, 1.0, 0.3),
    "task_us": (0.001, 10.0, 1.5),
    "sm_link_gbs": (2.0, 80.0, 0.5),
    "exposed": (0.001, 1.0, 1.0),
    "hop_us": (0.8, 4.0, 0.15),
    "l2_gbs": (3000.0, 14000.0, 0.2),
}
#: What a time is taken to be off by, as a share of it.
_NOISE = 0.03
LEAST_POINTS = 8
#: Shares of the issue slots that searches start from.
_STARTS = (0.9, 0.6, 0.35)
#: Figures that a file holds: more would differ from one machine's arithmetic to another's.
_DIGITS = 4


def calibrate(machine: Machine, measured: Sequence[Point], commit: str = "unknown", date: str = "") -> Calibration:
    """Fit the machine's constants to the points that are not held out, and judge them on those that are.

    Raises:
        ArgumentError: fewer than 8 points to fit, none held out, or points that all have the same load.
    """
    inside = [point for point in measured if not point.held_out]
    outside = [point for point in measured if point.held_out]
    if len(inside) < LEAST_POINTS or not outside or len({point.load for point in inside}) < 2:
        raise ArgumentError(
            f"calibrate: needs at least {LEAST_POINTS} points of several loads to fit, and points held out "
            f"({HELD_OUT}); got {len(inside)} of {len({point.load for point in inside})} loads and {len(outside)}."
        )
    found = min((_fit(machine, inside, share) for share in _STARTS), key=lambda fit: fit[1])[0]
    fitted, unseen = ([abs(_ratio(found, point) - 1) for point in some] for some in (inside, outside))
    return Calibration(
        machine=found,
        fitted=tuple(FITTED),
        splits=tuple(sorted({point.comm_sms for point in measured})),
        num_fitted=len(inside),
        num_held_out=len(outside),
        held_out=HELD_OUT,
        fitted_error=_rounded(statistics.fmean(fitted)),
        held_out_error=_rounded(statistics.fmean(unseen)),
        worst_held_out=_rounded(max(unseen)),
        split_loss=_rounded(split_loss(found, measured)),
        commit=commit,
        date=date,
    )


def split_loss(machine: Machine, measured: Sequence[Point]) -> float:
    """Time at the split that the simulation likes best over that at the best one, less 1: the largest of all layers."""
    by_load: dict[Workload, dict[int, float]] = {}
    for point in measured:
        by_load.setdefault(point.load, {})[point.comm_sms] = point.measured_us
    losses = [0.0]
    for load, times in by_load.items():
        chosen = min(times, key=lambda sms, load=load: (round(predict(machine, load, sms).total_us, 2), sms))
        losses.append(times[chosen] / min(times.values()) - 1)
    return max(losses)


def _ratio(machine: Machine, point: Point) -> float:
    return predict(machine, point.load, point.comm_sms).total_us / point.measured_us


def _fit(machine: Machine, measured: Sequence[Point], issue_share: float) -> tuple[Machine, float]:
    """Levenberg and Marquardt's least squares in the logarithms of the constants, drawn to those of the machine.

    The search starts there, but for `issue_share`: a bound that is not felt at the start has no slope to follow.

    Returns:
        The machine found, and the sum of squares that is left.
    """
    names = tuple(FITTED)
    low, high, width = (torch.tensor(column, dtype=torch.float64) for column in zip(*FITTED.values(), strict=True))
    start = torch.tensor([getattr(machine, name) for name in names], dtype=torch.float64).log()

    def machine_at(values: torch.Tensor) -> Machine:
        return replace(machine, **{name: float(v) for name, v in zip(names, values.exp(), strict=True)})

    def residuals(values: torch.Tensor) -> torch.Tensor:
        at = machine_at(values)
        off = [math.log(_ratio(at, point)) / _NOISE for point in measured]
        return torch.cat([torch.tensor(off, dtype=torch.float64), (values - start) / width])

    values, damping = start.clone(), 1e-2
    values[names.index("issue_share")] = math.log(issue_share)
    values = values.clamp(low.log(), high.log())
    now = residuals(values)
    for _ in range(60):
        steps = torch.eye(len(names), dtype=torch.float64) * 1e-4
        jacobian = torch.stack([(residuals(values + step) - now) / 1e-4 for step in steps], dim=1)
        normal = jacobian.T @ jacobian
        move = torch.linalg.solve(normal + damping * normal.diag().diag(), jacobian.T @ now)
        trial = (values - move).clamp(low.log(), high.log())
        there = residuals(trial)
        if float(there.square().sum()) < float(now.square().sum()):
            settled = float((trial - values).abs().max()) < 1e-5
            values, now, damping = trial, there, damping / 4
            if settled:
                break
        else:
            damping *= 8
            if damping > 1e8:
                break
    found = {name: _rounded(float(v)) for name, v in zip(names, values.exp(), strict=True)}
    return replace(machine, **found), float(now.square().sum())


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def from_records(records: Sequence[Record]) -> dict[str, Calibration]:
    """CUDA's name of a GPU -> what its records say; GPUs without a description or with too few points are left out."""
    found: dict[str, Calibration] = {}
    for short, device in DEVICE_NAMES.items():
        ours = [rec for rec in records if rec["bench"] == "expert_parallel" and rec.get("gpu") == device]
        measured = [point for ranks in sorted({rec["num_ranks"] for rec in ours}) for point in points_of(ours, ranks)]
        if len([point for point in measured if not point.held_out]) < LEAST_POINTS or not any(
            point.held_out for point in measured
        ):
            continue
        last = max(ours, key=lambda rec: rec["date"])
        peaks = [rec["read_peak_gbs"] for rec in ours if "read_peak_gbs" in rec]
        base = replace(MACHINES[short], **({"read_gbs": _rounded(statistics.median(peaks))} if peaks else {}))
        found[device] = calibrate(base, measured, last["commit"], last["date"][:10])
    return found


def same(one: Calibration | None, other: Calibration) -> bool:
    """Whether two calibrations say the same, but for what differs between machines' arithmetic."""
    if one is None:
        return False
    mine, theirs = (asdict(c) | asdict(c)["machine"] for c in (one, other))
    return all(
        math.isclose(value, theirs[name], rel_tol=0.02, abs_tol=2e-3)
        if isinstance(value, float)
        else value == theirs[name]
        for name, value in mine.items()
        if name != "machine"
    )


def stale(root: Path, directory: Path) -> dict[str, Calibration]:
    """Devices whose file in `directory` is not what the records under `root` say, with what they do say."""
    found = from_records(read_results(root))
    return {device: said for device, said in found.items() if not same(read(file_of(directory, device)), said)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the library's constants, or with --check only say which file is stale."""
    return main_of("warpring.bench.ep_calibration", DATA_DIR, stale, write, argv, lambda said: f". {said.statement}")


if __name__ == "__main__":
    sys.exit(main())
