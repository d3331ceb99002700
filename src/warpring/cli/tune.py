"""`warpring tune`: measure on this machine which path serves which batch fastest, and keep it for the library."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from warpring.cli import seed
from warpring.cli.bench import choose_device, parse_list
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from warpring.bench.shapes import LayerShape

_EXAMPLES = """\
examples
  warpring tune examples/tiny-qwen3-moe                      the layers of a checkpoint, in its own format
  warpring tune --model qwen3-30b-a3b --format mxfp8,mxfp4   a known shape
  warpring tune --shape h2048xi512xe256xk8 --format fp8_block --seconds 20
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `tune`."""
    parser = subparsers.add_parser(
        "tune",
        help="measure which path serves which batch fastest, and keep it",
        description='Measure up to which batch the decode paths lead over the grouped path, which path="auto" goes by. '
        "What is found is kept beside the kernel cache ('warpring doctor' says where) and used from then on for this "
        "device, shape and format, and for shapes near it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a checkpoint directory")
    which.add_argument("--model", metavar="NAME", help="shape of a known model (default qwen3-30b-a3b)")
    which.add_argument("--shape", metavar="SIZES", help="free sizes, e.g. h2048xi768xe128xk8")
    parser.add_argument(
        "--format",
        metavar="FORMAT,...",
        help="bf16, fp8_block, fp8_channel, mxfp8, mxfp4, nvfp4 (default: the checkpoint's, else mxfp8)",
    )
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=50.0,
        metavar="S",
        help="about how long a format may take (default %(default)g)",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure each format, print what was found, write the device's file."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from warpring.bench.crossovers import merge, search, tuning_bench
    from warpring.bench.records import FORMATS
    from warpring.policy import device_name, file_of, tuned_dir

    if not args.seconds > 0:
        raise ArgumentError(f"tune: --seconds must be above 0; got {args.seconds:g}.")
    device = choose_device(args.device)
    shape, formats = layer_of(args)
    formats = parse_list("--format", args.format, FORMATS) if args.format else formats
    name = device_name(device)
    target = file_of(tuned_dir(), name)
    print(f"{shape.size} on {name}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        for format in formats:
            task = progress.add_task(f"{format}: preparing", total=args.seconds)

            def on_batch(batch: int, seconds: float, format: str = format, task: int = task) -> None:
                progress.update(task, description=f"{format}: {batch} tokens", completed=min(seconds, args.seconds))  # pyright: ignore[reportArgumentType]

            found = search(tuning_bench(shape, format, device, args.seed), args.seconds, on_batch)
            merge(target, name, found)
            progress.update(task, completed=args.seconds, visible=False)
            for crossover in found:
                progress.console.print(
                    f"{format:<12}{crossover.path:<7}{describe(crossover.max_tokens, crossover.open_end)}  "
                    f"(measured: {', '.join(map(str, crossover.batches))} tokens)",
                    highlight=False,
                    soft_wrap=True,
                )
    print(f"kept in {target}")
    return 0


def describe(max_tokens: int, open_end: bool) -> str:
    """Up to which batch a path leads, in words."""
    if not max_tokens:
        return "never leads; grouped serves every batch"
    return f"leads up to {max_tokens} tokens{' at least' if open_end else '; grouped beyond'}"


def layer_of(args: argparse.Namespace) -> tuple[LayerShape, list[str]]:
    """The layer that the command line names, and the formats to measure where it names none."""
    from warpring.bench.shapes import LayerShape, parse_shape
    from warpring.checkpoint import Checkpoint
    from warpring.checkpoint.families import text_config

    if args.checkpoint is None:
        return parse_shape(args.shape or args.model or "qwen3-30b-a3b"), ["mxfp8"]
    checkpoint = Checkpoint(args.checkpoint)
    topk = text_config(checkpoint.config).get("num_experts_per_tok")
    if not isinstance(topk, int):
        raise ArgumentError(
            f"tune: {args.checkpoint}: config.json must say num_experts_per_tok; got {topk!r}. Name the layer with "
            "--shape."
        )
    sizes = (checkpoint.hidden, checkpoint.intermediate, checkpoint.num_experts, topk)
    free = parse_shape("h{}xi{}xe{}xk{}".format(*sizes))
    shape = LayerShape(free.name, *sizes, activation=checkpoint.activation)
    return shape, [checkpoint.stored_format(checkpoint.moe_layers[0])]
