"""`warpring precompile`: compile the kernels of a shape ahead of time, with or without a GPU."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from warpring.cli.bench import add_shape_arguments, parse_list
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warpring.bench.shapes import LayerShape
    from warpring.runtime.jit import KernelSpec

_EXAMPLES = """\
examples
  warpring precompile --model qwen3-30b-a3b --format mxfp8                 for the GPU of this machine
  warpring precompile --model gpt-oss-120b --format mxfp4 --arch sm_90a,sm_100a       no GPU needed
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `precompile`."""
    parser = subparsers.add_parser(
        "precompile",
        help="compile the kernels of a shape ahead of time",
        description="Compile the kernels of a shape and format into the kernel cache, so that the first "
        "request does not wait. The cache lies in $WARPRING_CACHE, else $XDG_CACHE_HOME/warpring, else "
        "~/.cache/warpring.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_arguments(parser)
    parser.add_argument(
        "--arch", metavar="ARCH,...", help="sm_90a, sm_100a, sm_103a, ... (default: that of this machine's GPU)"
    )
    parser.add_argument(
        "--index", default="int64", choices=("int32", "int64"), help="type of the expert ids (default %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile every kernel of every format and architecture; print registers and time of each."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from warpring.bench.records import FORMATS
    from warpring.bench.shapes import parse_shape
    from warpring.runtime.jit import cache_dir, compile_kernel

    shape = parse_shape(args.shape or args.model or "qwen3-30b-a3b")
    formats = parse_list("--format", args.format, FORMATS)
    index_dtype = getattr(torch, args.index)
    work = [
        (format, arch, spec)
        for format in formats
        for arch in architectures(args.arch)
        for spec in specs_of(shape, format, index_dtype)
    ]
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        for format, arch, spec in progress.track(work):
            start = time.perf_counter()
            cubin = compile_kernel(spec, arch)
            progress.console.print(
                f"{shape.name}  {format:<12}{arch:<9}{spec.entry:<26}{cubin.registers:>4} registers, "
                f"{cubin.spill_bytes} bytes spilled  {time.perf_counter() - start:6.2f} s  "
                f"{distinction(spec, [other for _, _, other in work])}".rstrip(),
                highlight=False,
                soft_wrap=True,
            )
    print(f"kernel cache: {cache_dir()}")
    return 0


def specs_of(shape: LayerShape, format: str, index_dtype: torch.dtype) -> list[KernelSpec]:
    """Every kernel that a layer may need on a GPU: of warp decode, of the tile path, and of the grouped path."""
    from warpring.bench.inputs import one_expert
    from warpring.kernels import expand, grouped_activate, tile, warp

    sizes, gate_fn = (shape.hidden, shape.intermediate, shape.num_experts), shape.activation.gate_fn
    rows = [] if format == "bf16" else [expand.rows_spec(format, cols) for cols in sizes[:2]]
    return [
        *warp.kernel_specs(one_expert(shape, format), shape.topk, index_dtype).all(),
        *tile.all_specs(tile.Sizes(format, *sizes, shape.topk), index_dtype, gate_fn),
        *rows,
        expand.panels_spec(format, shape.hidden, num_halves=2),
        expand.panels_spec(format, shape.intermediate, num_halves=1),
        grouped_activate.kernel_spec(index_dtype, gate_fn),
    ]


def distinction(spec: KernelSpec, specs: Sequence[KernelSpec]) -> str:
    """The macros in which `spec` differs from its namesakes of one format, e.g. "DOWN_BATCH=4"; often none."""
    rivals = [set(other.macros) for other in specs if (other.entry, other.macros[0]) == (spec.entry, spec.macros[0])]
    own = sorted(set(spec.macros) - set[tuple[str, str]].intersection(*rivals))
    return " ".join(f"{name.removeprefix('WARPRING_')}={value}" for name, value in own)


def architectures(text: str | None) -> list[str]:
    """The architectures that --arch names; without it, that of the first GPU.

    Raises:
        ArgumentError: a name of another form, or neither --arch nor a GPU.
        UnsupportedError: a GPU that the kernels do not run on.
    """
    if text is not None:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            match = re.fullmatch(r"sm_(\d+)[af]?", name)
            if match is None or int(match[1]) < 90:
                raise ArgumentError(
                    f"precompile: --arch must name architectures from sm_90a on, as in sm_90a,sm_100a; got {name!r}."
                )
        return names
    import torch

    from warpring.runtime.device import arch_of

    if not torch.cuda.is_available():
        raise ArgumentError("precompile: there is no GPU to take the architecture from. Name it, as in --arch sm_90a.")
    return [arch_of(torch.cuda.current_device())]
