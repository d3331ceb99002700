"""`warpring bench`: time one MoE layer of any shape, format and batch."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from warpring.cli import seed
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warpring.bench.layer import LayerBench
    from warpring.bench.records import Record

_EXAMPLES = """\
examples
  warpring bench --model qwen3-30b-a3b --format mxfp8 --batches 1,2,4,8 --path warp,classical
  warpring bench --shape h512xi256xe32xk4 --format bf16 --batches 1,4        a free shape; a CPU will do
  warpring bench --model gpt-oss-20b --format mxfp4 --jsonl out.jsonl --plot out.png
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time one MoE layer of any shape, format and batch",
        description="Time one MoE layer. On a GPU: CUDA-graph replays with weights that no cache holds, in percent of "
        "the read peak measured in the same run; on a CPU: wall clock.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_arguments(parser)
    parser.add_argument("--batches", default="1,2,4,8", metavar="B,B,...", help="token counts (default %(default)s)")
    parser.add_argument(
        "--path",
        metavar="PATH,...",
        help="paths to compare: reference, classical, cores, warp, tile, grouped, auto (default: "
        "warp,tile,classical on a GPU, cores,classical on a CPU)",
    )
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf", "recorded"), help="default uniform")
    parser.add_argument(
        "--load", metavar="JSON", help="experts' load for --routing recorded: a JSON list, one number an expert"
    )
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="replays that count (default %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default %(default)s")
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    parser.add_argument("--jsonl", metavar="FILE", help="append the records to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw time and share of the peak into FILE (.png or .svg)")
    parser.set_defaults(run=run)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """--model or --shape, and --format: shared with `precompile`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="shape of a known model (default qwen3-30b-a3b)")
    which.add_argument(
        "--shape", metavar="SIZES", help="free sizes, e.g. h2048xi768xe128xk8: hidden, intermediate, experts, top-k"
    )
    parser.add_argument(
        "--format",
        default="mxfp8",
        metavar="FORMAT,...",
        help="bf16, fp8_block, fp8_channel, mxfp8, mxfp4, nvfp4 (default %(default)s)",
    )


def parse_list(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    """The comma-separated words of `text`, each one of `known`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words or [text]:
        if word not in known:
            raise ArgumentError(f"{option} must hold {', '.join(known)}; got {word!r}.")
    return words


def parse_counts(option: str, text: str, most: int | None = None) -> list[int]:
    """The comma-separated counts of `text`, each at least 1, and at most `most` where there is such a limit."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or (most is not None and max(counts) > most):
        bounds = "at least 1" if most is None else f"1 to {most}"
        raise ArgumentError(f"{option} must be counts of {bounds}, as in 1,2,4; got {text!r}.")
    return counts


def run(args: argparse.Namespace) -> int:
    """Bench, print a table row as soon as it is measured, write the JSONL and the plot."""
    # Imported here so that `warpring --help` does not wait for torch.
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from warpring.bench.console import HEADER, describe, row
    from warpring.bench.plots import check_plot_path, plot_decode
    from warpring.bench.records import append

    benches, batches, paths = plan(args)
    if args.plot:
        check_plot_path(args.plot)
    records: list[Record] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=None)

        def say(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)

        for bench in benches:
            label = f"{bench.shape.name} {bench.format}"

            def stage(text: str, label: str = label) -> None:
                progress.update(task, description=f"{label}: {text}")

            for measured in bench.run(batches, paths, on_stage=stage):
                if not records:
                    say(describe(measured[0]))
                    say(HEADER)
                for rec in measured:
                    say(row(rec))
                    if args.jsonl:
                        append(args.jsonl, rec)
                records += measured
    if args.plot:
        plot_decode(records, args.plot)
        print(f"plot: {args.plot}")
    return 0


def plan(args: argparse.Namespace) -> tuple[list[LayerBench], list[int], list[str]]:
    """Check the whole command line before anything runs: a bench a format, the batches, the paths."""
    from warpring.bench.inputs import read_load
    from warpring.bench.layer import LayerBench
    from warpring.bench.records import FORMATS
    from warpring.bench.shapes import parse_shape
    from warpring.decode import PATHS

    device = choose_device(args.device)
    shape = parse_shape(args.shape or args.model or "qwen3-30b-a3b")
    paths = args.path or ("warp,tile,classical" if device.type == "cuda" else "cores,classical")
    load = None if args.load is None else read_load(args.load)
    if (args.routing == "recorded") != (load is not None):
        raise ArgumentError("bench: --routing recorded and --load FILE go together; give both or neither.")
    if args.repeats < 1:
        raise ArgumentError(f"bench: --repeats must be at least 1; got {args.repeats}.")
    benches = [
        LayerBench(shape, format, args.routing, device, args.repeats, args.seed, load)
        for format in parse_list("--format", args.format, FORMATS)
    ]
    return benches, parse_counts("--batches", args.batches), parse_list("--path", paths, PATHS)


def choose_device(text: str | None) -> torch.device:
    """The torch device that `text` names, or the GPU if there is one."""
    import torch

    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ArgumentError(f"--device must be cuda, cuda:N or cpu; got {text!r}.") from error
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError(f"--device must be cuda, cuda:N or cpu; got {text!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"--device {text} is not there; torch sees {torch.cuda.device_count()} GPUs. See 'warpring doctor'."
        )
    return device
