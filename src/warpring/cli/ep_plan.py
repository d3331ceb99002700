"""`warpring ep-plan`: predicted time of an expert-parallel layer, and the partition to run it with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from warpring.expert_parallel.simulate import Machine, Prediction

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
        description="Predict the time of one expert-parallel layer from the bytes and operations of its roles, and "
        "choose how many multiprocessors to give to communication. Needs no GPU.",
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
    from warpring.expert_parallel.simulate import Workload, best_split, predict

    shape = parse_shape(args.shape or args.model or "deepseek-v4-flash")
    machine = _machine(args)
    rows: list[tuple[int, Prediction]] = []
    for tokens in parse_counts("--tokens", args.tokens, MAX_TOKENS_PER_RANK):
        load = Workload(
            shape.hidden, shape.intermediate, shape.num_experts, shape.topk,
            args.ranks, tokens, args.format, args.activation, args.skew,
        )  # fmt: skip
        chosen = best_split(machine, load) if args.comm_sms is None else predict(machine, load, args.comm_sms)
        rows.append((tokens, chosen))
    console = Console()
    title = f"{shape.name}, {args.format} weights, {args.activation} activations, {args.ranks} x {machine.name}"
    console.print(_table(title, rows))
    console.print("Predicted, not measured: bytes and operations over the rates of the machine.", style="dim")
    return 0


def _machine(args: argparse.Namespace) -> Machine:
    from dataclasses import replace

    from warpring.expert_parallel.simulate import MACHINES

    if args.machine not in MACHINES:
        raise ArgumentError(f"--machine must be one of {', '.join(MACHINES)}; got {args.machine!r}.")
    given = {"num_sms": args.sms, "read_gbs": args.read_gbs, "link_gbs": args.link_gbs}
    given = {name: value for name, value in given.items() if value is not None}
    if bad := [name for name, value in given.items() if value <= 0]:
        raise ArgumentError(f"{bad[0]} must be positive; got {given[bad[0]]}.")
    return replace(MACHINES[args.machine], **given)


def _table(title: str, rows: list[tuple[int, Prediction]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    heads = (
        "tokens/rank",
        "comm + compute SMs",
        "floor us",
        "pull us",
        "experts us",
        "combine us",
        "layer us",
        "bound",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for tokens, p in rows:
        times = (p.floor_us, p.pull_us, p.experts_us, p.combine_us, p.total_us)
        table.add_row(str(tokens), f"{p.comm_sms} + {p.compute_sms}", *(f"{time:.1f}" for time in times), p.bound)
    return table
