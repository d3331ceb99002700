"""`warpring precompile`: compile the kernels of a shape ahead of time, with or without a GPU."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from warpring.cli.bench import add_shape_arguments, parse_counts, parse_list
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warpring.bench.shapes import LayerShape
    from warpring.expert_parallel.problem import Problem
    from warpring.runtime.jit import KernelSpec

#: A kernel to compile: the format that it serves, the architecture, and what it is.
Work = tuple[str, str, "KernelSpec"]

_EXAMPLES = """\
examples
  warpring precompile --model qwen3-30b-a3b --format mxfp8                 for the GPU of this machine
  warpring precompile --model gpt-oss-120b --format mxfp4 --arch sm_90a,sm_100a       no GPU needed
  warpring precompile --model deepseek-v4-flash --format mxfp4 --ranks 8 --tokens 64  expert-parallel, on 8 GPUs
"""
#: Limits that between them have every size of a token block that a layer can have: it grows with the limit, in the
#: same powers of two.
_TOKENS = "1,2,4,8,16,32,64,128,256"
#: Options of an expert-parallel layer, which mean nothing without --ranks.
_LAYER_OPTIONS = ("tokens", "activation", "shared", "shared_format")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `precompile`."""
    parser = subparsers.add_parser(
        "precompile",
        help="compile the kernels of a shape ahead of time",
        description="Compile the kernels of a shape and format into the kernel cache, so that the first "
        "request does not wait: those of one GPU, or with --ranks those of an expert-parallel layer. The cache lies in "
        "$WARPRING_CACHE, else $XDG_CACHE_HOME/warpring, else ~/.cache/warpring.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_arguments(parser)
    parser.add_argument(
        "--arch", metavar="ARCH,...", help="sm_90a, sm_100a, sm_103a, ... (default: that of this machine's GPU)"
    )
    parser.add_argument(
        "--index", choices=("int32", "int64"), help="type of the expert ids (default int64; both with --ranks)"
    )
    layer = parser.add_argument_group(
        "an expert-parallel layer",
        "Its kernels, in both forms: for Green Contexts, and for the plain streams that stand in for them. They take\n"
        "the formats fp8_block, fp8_channel and mxfp4.",
    )
    layer.add_argument("--ranks", metavar="R,...", help="GPUs that share the experts; the other options need it")
    layer.add_argument(
        "--tokens",
        metavar="T,...",
        help="max_tokens_per_rank of the layers (default: 1 to 256 in powers of two, whose kernels serve any)",
    )
    layer.add_argument("--activation", metavar="FORM,...", help="forms of the tokens: fp8, bf16 (default fp8)")
    layer.add_argument("--shared", metavar="N,...", help="fused shared experts (default: 0, and those of the model)")
    layer.add_argument("--shared-format", metavar="FORMAT,...", help="of the shared experts (default fp8_block)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile every kernel of every format and architecture; print registers and time of each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from warpring.bench.shapes import parse_shape
    from warpring.runtime.jit import cache_dir, compile_kernel

    shape = parse_shape(args.shape or args.model or "qwen3-30b-a3b")
    work = decode_work(args, shape) if args.ranks is None else layer_work(args, shape)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        for format, arch, spec in progress.track(work):
            start = time.perf_counter()
            cubin = compile_kernel(spec, arch)
            progress.console.print(
                f"{shape.name}  {format:<12}{arch:<9}{spec.entry:<26}{cubin.registers:>4} registers, "
                f"{cubin.spill_bytes} bytes spilled  {time.perf_counter() - start:6.2f} s  "
                f"{distinction(spec, [other for served, _, other in work if served == format])}".rstrip(),
                highlight=False,
                soft_wrap=True,
            )
    print(f"kernel cache: {cache_dir()}")
    return 0


def decode_work(args: argparse.Namespace, shape: LayerShape) -> list[Work]:
    """What a layer of one GPU may need.

    Raises:
        ArgumentError: an option of an expert-parallel layer, or one that cannot be.
    """
    import torch

    from warpring.bench.records import FORMATS

    for name in _LAYER_OPTIONS:
        if (value := getattr(args, name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(
                f"precompile: {option} must come with --ranks, since it describes an expert-parallel layer; got "
                f"{option} {value} alone. Add --ranks, as in --ranks 8, or leave it out."
            )
    index_dtype = getattr(torch, args.index or "int64")
    return [
        (format, arch, spec)
        for format in parse_list("--format", args.format, FORMATS)
        for arch in architectures(args.arch)
        for spec in specs_of(shape, format, index_dtype, arch)
    ]


def layer_work(args: argparse.Namespace, shape: LayerShape) -> list[Work]:
    """What the expert-parallel layers that the options describe may need; what several of them share, once a format.

    Raises:
        ArgumentError: options that describe no layer.
    """
    if args.index is not None:
        raise ArgumentError(
            f"precompile: --index must be left out with --ranks, where every layer loads the kernels of both; got "
            f"{args.index!r}."
        )
    problems, archs = layer_problems(args, shape), layer_architectures(args.arch)
    return list(
        dict.fromkeys(
            (problem.format, arch, spec) for problem in problems for arch in archs for spec in layer_specs_of(problem)
        )
    )


def layer_problems(args: argparse.Namespace, shape: LayerShape) -> list[Problem]:
    """Every combination of the options, formats outermost.

    Raises:
        ArgumentError: an option that cannot be, or experts that do not divide by the ranks.
    """
    from itertools import product

    from warpring.expert_parallel.packing import POLICIES
    from warpring.expert_parallel.problem import MAX_RANKS, MAX_SHARED, MAX_TOKENS_PER_RANK, Problem

    if shape.routed_over:
        raise ArgumentError(
            f"precompile: --model must hold the experts of all ranks with --ranks; got {shape.name}, which holds "
            f"{shape.num_experts} of {shape.routed_over}. Name the whole layer."
        )
    forms: list[Any] = parse_list("--activation", args.activation or "fp8", ("fp8", "bf16"))
    fused = args.shared or ",".join(map(str, sorted({0, shape.shared_experts})))
    chosen = product(
        parse_list("--format (with --ranks)", args.format, tuple(POLICIES)),
        parse_counts("--ranks", args.ranks, MAX_RANKS),
        parse_counts("--tokens", args.tokens or _TOKENS, MAX_TOKENS_PER_RANK),
        forms,
        parse_list("--shared", fused, tuple(map(str, range(MAX_SHARED + 1)))),
        parse_list("--shared-format", args.shared_format or "fp8_block", tuple(POLICIES)),
    )
    return [
        Problem(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_experts=shape.num_experts,
            topk=shape.topk,
            num_ranks=ranks,
            max_tokens_per_rank=tokens,
            format=format,
            activation=form,
            gate=shape.activation,
            num_shared=int(num_shared),
            shared_format=shared_format,
            has_bias=shape.has_bias,
        )
        for format, ranks, tokens, form, num_shared, shared_format in chosen
    ]


def layer_specs_of(problem: Problem) -> list[KernelSpec]:
    """Every kernel that the layer may load: in Green Contexts, and with one CTA of role2 a multiprocessor without."""
    from warpring.expert_parallel.experts_kernel import ctas_per_sm
    from warpring.expert_parallel.roles import role_specs

    return list(dict.fromkeys(spec for ctas in (ctas_per_sm(problem), 1) for spec in role_specs(problem, ctas).all()))


def specs_of(shape: LayerShape, format: str, index_dtype: torch.dtype, arch: str) -> list[KernelSpec]:
    """Every kernel that one GPU of that architecture may need: of warp decode, the tile path, the grouped path."""
    from warpring.bench.inputs import one_expert
    from warpring.kernels import expand, grouped_activate, grouped_gemm, panels, tile, tile_wgmma, warp
    from warpring.slabs import suits_slabs

    sizes, gate_fn = (shape.hidden, shape.intermediate, shape.num_experts), shape.activation.gate_fn
    rows = [] if format == "bf16" else [expand.rows_spec(format, cols) for cols in sizes[:2]]
    in_slabs = arch == tile_wgmma.ARCH and suits_slabs(format, *sizes[:2])  # as `pack_experts` decides on such a GPU
    kernels, order = ((tile_wgmma,), f"{format}_slabs") if in_slabs else ((panels, tile), format)
    if arch == grouped_gemm.ARCH:
        packed = [*grouped_gemm.all_specs(order, *sizes[:2], gate_fn, index_dtype)]
    else:
        packed = [expand.panels_spec(format, cols, halves) for cols, halves in ((sizes[0], 2), (sizes[1], 1))]
    return [
        *warp.kernel_specs(one_expert(shape, format), shape.topk, index_dtype).all(),
        *(s for k in kernels for s in k.all_specs(tile.Sizes(format, *sizes, shape.topk), index_dtype, gate_fn)),
        *rows,
        *packed,
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


def layer_architectures(text: str | None) -> list[str]:
    """The architectures that --arch names for expert-parallel kernels; without it, the first GPU's, or without a GPU
    all that they run on.

    Raises:
        ArgumentError: an architecture that they have no instructions for.
    """
    import torch

    from warpring.expert_parallel.engine import KERNEL_ARCHS

    known = ", ".join(KERNEL_ARCHS)
    if text is None and not torch.cuda.is_available():
        return list(KERNEL_ARCHS)
    names = architectures(text)
    for name in names:
        if name not in KERNEL_ARCHS:
            raise ArgumentError(
                f"precompile: --arch must be {known} with --ranks, what expert-parallel kernels run on; got {name!r}. "
                f"Name it, as in --arch {KERNEL_ARCHS[0]}, or leave out --ranks for the kernels of one GPU."
            )
    return names
