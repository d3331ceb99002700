"""`warpring quantize`: a checkpoint whose experts are stored in another number format."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _SubParsersAction  # pyright: ignore[reportPrivateUsage]

# Named here and not taken from warpring.formats, which imports torch: `--help` stays fast. A test compares the two.
FORMAT_NAMES = ("bf16", "fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_parser(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "quantize",
        help="store a checkpoint's experts in another number format",
        description="Write the checkpoint SRC to the directory DST with the weights of its routed experts in another "
        "number format. Every other tensor and file is copied unchanged. DST appears once it is complete, or never.",
    )
    parser.add_argument("src", metavar="SRC", help="checkpoint directory (config.json and safetensors)")
    parser.add_argument("dst", metavar="DST", help="directory to write")
    parser.add_argument("--format", required=True, choices=FORMAT_NAMES, help="number format of the experts")
    parser.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="most bytes of tensors in one file, e.g. 500MB or 2GiB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint at DST, if there is one")
    parser.set_defaults(run=run)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500 MiB" or "4096"; ArgumentError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    # A file system's largest file is far below; beyond it a float would not hold the bytes either.
    size = float(found[1]) * _UNITS[found[2].upper()] if found and found[2].upper() in _UNITS else 0.0
    if not 1 <= size < 1 << 63:
        raise ArgumentError(f"--shard-size must be a positive size such as 500MB or 2GiB; got {text!r}.")
    return int(size)


def run(args: Namespace) -> int:
    """Quantise; 0 when DST is complete. Errors are WarpringError or OSError."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from warpring.checkpoint import quantize_checkpoint

    shard_bytes = parse_size(args.shard_size)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"quantizing to {args.format}", total=None)

        def show(done: int, steps: int) -> None:
            bar.update(task, completed=done, total=steps)

        quantize_checkpoint(
            args.src, args.dst, args.format, shard_bytes=shard_bytes, overwrite=args.overwrite, progress=show
        )
    print(f"{args.dst}: experts in {args.format}")
    return 0
