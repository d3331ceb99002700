"""`warpring verify`: the accuracy of every path against FP64, on synthetic inputs and on a real model's activations."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from warpring.cli import read_text, seed
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from warpring.verify import Inputs, Result

#: Where a checkout keeps its trained model; taken by default if it is there.
EXAMPLE_MODEL = Path("examples/tiny-qwen3-moe")
#: The size of real layers, so that the bounds mean what they meant when they were published. Fewer experts than the
#: models have: an expert that no token hits changes nothing.
SYNTHETIC_SHAPE = "h2048xi768xe8xk4"

_EXAMPLES = """\
examples
  warpring verify                                       all formats, batches 1 to 64; the example model if it is there
  warpring verify --path warp --format mxfp8 --each     every batch in a line of its own
  warpring verify --model path/to/model --jsonl accuracy.jsonl
"""

_LEGEND = """\
factor  RMS error of the classical path / of this one, least over the batches
cos     cosine > 0.999996 for every token; promised from hidden 2048 on
2^-9    |diff| at most 0.001953; n/a where outputs reach 1/2: BF16 is too coarse
Warp, tile, cores, reference, and on Hopper grouped_packed, promise both, and in
any layer an RMS relative error of at most 2^-8, one unit of BF16's rounding.
Grouped and classical promise none."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `verify`."""
    parser = subparsers.add_parser(
        "verify",
        help="accuracy of every path against FP64",
        description="Compare paths with FP64 from the stored weights, in every format and batch. Exit code 1 if a "
        "path misses a bound that it promises; the legend below the tables states which do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--path",
        metavar="PATH,...",
        help="warp, tile, cores, grouped, grouped_packed, classical, reference (default: warp,tile,classical on a GPU, "
        "reference,classical on a CPU)",
    )
    parser.add_argument("--format", metavar="FORMAT,...", help="number formats (default: all six)")
    parser.add_argument("--batches", metavar="B,B,...", default="1,2,4,8,16,32,64", help="default %(default)s")
    parser.add_argument(
        "--shape",
        metavar="SIZES",
        default=SYNTHETIC_SHAPE,
        help="synthetic layer: model name or sizes (default %(default)s)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help=f"record a model's activations (default: {EXAMPLE_MODEL}, if there)"
    )
    parser.add_argument("--text", metavar="FILE", help="text that the model reads (default: a standard library module)")
    parser.add_argument("--inputs", choices=("all", "synthetic", "recorded"), default="all", help="default %(default)s")
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of the synthetic inputs (default %(default)s)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    parser.add_argument("--each", action="store_true", help="a line a batch instead of the worst over all batches")
    parser.add_argument("--jsonl", metavar="FILE", help="append a record a batch to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify, print tables, append records; 1 if a bound is missed."""
    # Imported here so that `warpring --help` does not wait for torch.
    from rich.console import Console
    from rich.progress import Progress

    from warpring.bench.records import append
    from warpring.cli.bench import choose_device, parse_counts, parse_list
    from warpring.decode import PATHS
    from warpring.formats import FORMATS
    from warpring.verify import PACKED_PATHS, report

    device = choose_device(args.device)
    batches = parse_counts("--batches", args.batches)
    formats = parse_list("--format", args.format, tuple(FORMATS)) if args.format else list(FORMATS)
    default = "warp,tile,classical" if device.type == "cuda" else "reference,classical"
    paths = parse_list("--path", args.path or default, (*(path for path in PATHS if path != "auto"), *PACKED_PATHS))
    console = Console()
    results: list[Result] = []
    with Progress(console=console, transient=True) as progress:
        for inputs in gather_inputs(args, max(batches)):
            task = progress.add_task(f"{inputs.kind} {inputs.model}", total=len(formats) * len(batches) * len(paths))
            for result in report(inputs.to(device), paths=paths, formats=formats, batches=batches):
                results.append(result)
                progress.advance(task)
                if args.jsonl and math.isfinite(result.accuracy.rms_rel_error):
                    append(args.jsonl, make_record(result, device=str(device), seed=args.seed))
    print_report(console, results, each=args.each)
    return 0 if all(result.bounds_met for result in results) else 1


def gather_inputs(args: argparse.Namespace, num_tokens: int) -> list[Inputs]:
    """The synthetic and the recorded inputs that the command line asks for, on the CPU."""
    from warpring.bench.shapes import parse_shape
    from warpring.verify import synthetic_inputs

    found: list[Inputs] = []
    if args.inputs != "recorded":
        shape = parse_shape(args.shape)
        found.append(
            synthetic_inputs(
                num_tokens,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                num_experts=shape.num_experts,
                topk=shape.topk,
                activation=shape.activation,
                model=shape.name,
                seed=args.seed,
            )
        )
    model = Path(args.model) if args.model else EXAMPLE_MODEL
    if args.inputs == "recorded" or (args.inputs == "all" and (args.model or model.is_dir())):
        # The parts below need transformers, an optional dependency.
        try:
            from warpring.integrations.recording import recorded_inputs
        except ImportError as error:
            raise ArgumentError(
                f"verify: recording a model needs transformers ({error}). Install warpring[transformers], or use "
                "--inputs synthetic."
            ) from error
        text = read_text(args.text) if args.text else None
        found.append(recorded_inputs(model, num_tokens, text=text))
    return found


def make_record(result: Result, *, device: str, seed: int) -> dict[str, object]:
    """The result as a record of bench "accuracy"."""
    from warpring.bench.records import record

    fields: dict[str, object] = {
        "model": result.model,
        "format": result.format,
        "path": result.path,
        "num_tokens": result.num_tokens,
        "inputs": result.inputs,
        "cosine_min": result.accuracy.cosine_min,
        "max_abs_diff": result.accuracy.max_abs_diff,
        "rms_rel_error": result.accuracy.rms_rel_error,
        "note": f"largest output {result.accuracy.output_max:.3g}; against the weights before quantising: RMS relative "
        f"error {result.accuracy_dense.rms_rel_error:.3e}, classical error / ours {result.error_factor_dense:.3f}",
    }
    if math.isfinite(result.error_factor_vs_classical):
        fields["error_factor_vs_classical"] = result.error_factor_vs_classical
    if result.inputs == "synthetic":
        fields["seed"] = seed
    return record("accuracy", device=device, **fields)


def print_report(console: Console, results: Sequence[Result], *, each: bool) -> None:
    """A table for each kind of inputs, and below it what the errors say of the published factor."""
    from rich.table import Table

    for inputs, model in dict.fromkeys((result.inputs, result.model) for result in results):
        ours = [result for result in results if (result.inputs, result.model) == (inputs, model)]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("format", "path"):
            table.add_column(name, no_wrap=True)
        for name in (
            "tokens",
            "cosine\nmin",
            "|diff|\nmax",
            "|y|\nmax",
            "RMS\nrel.",
            "factor",
            "cos\nmet",
            "2^-9\nmet",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for group in _groups(ours, each=each):
            table.add_row(*_cells(group))
        console.print(f"\n{inputs} inputs, {model}: error against FP64 from the stored weights", highlight=False)
        console.print(table)
        for line in _factors(ours):
            console.print(line, highlight=False)
    console.print(f"\n{_LEGEND}", highlight=False)


def _groups(results: Sequence[Result], *, each: bool) -> list[list[Result]]:
    """Results that share a line: all batches of one format and path, or with `each` every result alone."""
    if each:
        return [[result] for result in results]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.format, result.path), []).append(result)
    return list(groups.values())


def _cells(group: Sequence[Result]) -> list[str]:
    """The worst of a group as cells of the table."""
    from warpring.verify import worst

    found = worst([result.accuracy for result in group])
    batches = [result.num_tokens for result in group]
    return [
        group[0].format,
        group[0].path,
        str(batches[0]) if len(batches) == 1 else f"{min(batches)}-{max(batches)}",
        f"{found.cosine_min:.7f}",
        f"{found.max_abs_diff:.1e}",
        f"{found.output_max:.2f}",
        f"{found.rms_rel_error:.1e}",
        f"{min(result.error_factor_vs_classical for result in group):.2f}",
        _verdict([result.accuracy.cosine_met for result in group]),
        _verdict([result.accuracy.abs_diff_met for result in group]),
    ]


def _verdict(met: Sequence[bool | None]) -> str:
    """One bound over a group of results; None where it does not apply."""
    checked = [value for value in met if value is not None]
    if not checked:
        return "n/a"
    return "yes" if all(checked) else "no"


def _factors(results: Sequence[Result]) -> list[str]:
    """Lines that set the paths' errors beside the classical path's, and beside the published 1.4."""
    lines: list[str] = []
    for path in dict.fromkeys(result.path for result in results if result.path != "classical"):
        ours = [result for result in results if result.path == path]
        factors = _span([result.error_factor_vs_classical for result in ours])
        lines.append(f"{path} is closer to FP64 than classical by a factor of {factors}.")
        lines.append("With the rounding of the weights counted too (published, MXFP8: 1.4) by")
        for format in dict.fromkeys(result.format for result in ours):
            lines.append(f"  {format:<12}{_span([r.error_factor_dense for r in ours if r.format == format])}")
    return lines


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
