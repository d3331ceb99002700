"""`warpring ep-plan`: predicted time of an expert-parallel layer, and the partition to run it with."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from warpring.expert_parallel.machines import Calibration, Machine
    from warpring.expert_parallel.simulate import Prediction

_EXAMPLES = """\
examples
  warpring ep-plan --model deepseek-v4-flash --format mxfp4 --ranks 2
  warpring ep-plan --model deepseek-v3 --ranks 8 --tokens 1,32,256 --skew 3 --sms 132 --link-gbs 335
"""
_TOKENS = "1,2,4,8,16,32,64,128,256"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `ep-plan`."""
    parser = subparsers.add_parser(
        "ep-plan",
        help="predict an expert-parallel layer and its best partition",
        description="Predict the time of one expert-parallel layer, role by role, from bytes and operations, and "
        "choose how many multiprocessors to give to communication. Says how far off predictions are where layers "
        "were measured on that GPU. Needs no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--model", help="a known model (default deepseek-v4-flash)")
    shape.add_argument("--shape", help="free sizes, like h4096xi2048xe256xk6")
    parser.add_argument("--format", default="mxfp4", help="number format of the weights (default %(default)s)")
    parser.add_argument("--activation", default="fp8", choices=("fp8", "bf16"), help="operands (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="GPUs, 1 to 72 (default %(default)s)")
    parser.add_argument("--tokens", default=_TOKENS, metavar="T,...", help="tokens a rank (default %(default)s)")
    parser.add_argument("--skew", type=float, default=1.0, help="load of the busiest rank over the mean (default 1)")
    parser.add_argument("--machine", default="h200", help="GPU: h200 or b300 (default %(default)s)")
    parser.add_argument("--sms", type=int, metavar="N", help="multiprocessors, instead of the GPU's")
    parser.add_argument("--read-gbs", type=float, metavar="GB/S", help="memory read peak, instead of the GPU's")
    parser.add_argument("--link-gbs", type=float, metavar="GB/S", help="link to the peers, instead of the GPU's")
    parser.add_argument("--comm-sms", type=int, metavar="N", help="this partition, instead of the best one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row for each token count."""
    from rich.console import Console

    from warpring.bench.shapes import parse_shape
    from warpring.cli.bench import parse_counts
    from warpring.expert_parallel.problem import MAX_TOKENS_PER_RANK
    from warpring.expert_parallel.simulate import Workload, best_split, predict, usual_block_m

    shape = parse_shape(args.shape or args.model or "deepseek-v4-flash")
    machine, calibration = _machine(args)
    counts = parse_counts("--tokens", args.tokens, MAX_TOKENS_PER_RANK)
    load = Workload(
        shape.hidden, shape.intermediate, shape.num_experts, shape.topk,
        args.ranks, max(counts), args.format, args.activation, args.skew,
    )  # fmt: skip
    block_m = usual_block_m(shape.num_experts, shape.topk, args.ranks, max(counts))
    # Between measured partitions one could guess; a GPU of another size has others.
    splits = calibration.splits if calibration is not None and machine.num_sms == calibration.machine.num_sms else None
    rows: list[tuple[int, Prediction]] = []
    for tokens in counts:
        at = replace(load, tokens_per_rank=tokens, block_m=block_m)
        chosen = best_split(machine, at, splits) if args.comm_sms is None else predict(machine, at, args.comm_sms)
        rows.append((tokens, chosen))
    console = Console()
    title = f"{shape.name}, {args.format} weights, {args.activation} activations, {args.ranks} x {machine.name}"
    console.print(_table(title, rows))
    console.print(_trust(machine, calibration), style="dim")
    return 0


def _machine(args: argparse.Namespace) -> tuple[Machine, Calibration | None]:
    """The GPU as asked for, and what is known of it from measured layers."""
    from warpring.expert_parallel.machines import DEVICE_NAMES, MACHINES, calibration_of

    if args.machine not in MACHINES:
        raise ArgumentError(f"--machine must be one of {', '.join(MACHINES)}; got {args.machine!r}.")
    given = {"num_sms": args.sms, "read_gbs": args.read_gbs, "link_gbs": args.link_gbs}
    given = {name: value for name, value in given.items() if value is not None}
    if bad := [name for name, value in given.items() if value <= 0]:
        raise ArgumentError(f"{bad[0]} must be positive; got {given[bad[0]]}.")
    device = DEVICE_NAMES.get(args.machine)
    calibration = None if device is None else calibration_of(device)
    return replace(MACHINES[args.machine] if calibration is None else calibration.machine, **given), calibration


def _trust(machine: Machine, calibration: Calibration | None) -> str:
    """How good the predictions are, in words."""
    if calibration is None:
        return f"Predicted, not measured: no layer was measured on {machine.name}, so the error is not known."
    changed = "" if machine == calibration.machine else " That holds for the GPU as it is, not for changed figures."
    return f"Predicted. {calibration.statement}{changed}"


def _table(title: str, rows: list[tuple[int, Prediction]]) -> Table:
    from rich.table import Table

    table = Table(title=title, caption="microseconds; T tokens a rank; SMs for communication + compute")
    for head in ("T", "SMs", "floor", "role1", "role2", "role3", "layer", "bound"):
        table.add_column(head, justify="right", no_wrap=True)
    for tokens, p in rows:
        times = (p.floor_us, p.dispatch_us, p.experts_us, p.combine_us, p.total_us)
        table.add_row(str(tokens), f"{p.comm_sms} + {p.compute_sms}", *(f"{time:.1f}" for time in times), p.bound)
    return table
