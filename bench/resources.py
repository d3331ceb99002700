"""Compile every kernel of some layers, and append what each takes of a multiprocessor to resources.jsonl.

    PYTHONPATH=src python bench/resources.py                       the layers of docs/kernels.md; needs no GPU
    PYTHONPATH=src python bench/resources.py --models glm-5.2 --formats mxfp4,fp8_block

A record is one form of a kernel: several batches, block sizes or dtypes of ids may each have their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from warpring.bench.console import words
from warpring.bench.records import FORMATS, Record, append, record
from warpring.bench.shapes import parse_shape
from warpring.cli.precompile import distinction, layer_problems, layer_specs_of, specs_of
from warpring.runtime.jit import KernelSpec, compile_kernel, compiler_version

RESULTS = Path(__file__).parent / "results" / "resources.jsonl"
#: (model, formats): gpt-oss has MXFP4 in slabs.
LAYERS = (("qwen3-30b-a3b", FORMATS), ("gpt-oss-120b", ("mxfp4",)))
EP_LAYERS = (("deepseek-v4-flash", ("fp8_block", "mxfp4")),)
#: Tokens a rank at most: role2 has a form for each block of 8 to 64 tokens, and one for larger layers.
EP_TOKENS = "8,16,32,64,256"


def ep_specs(model: str, format: str) -> list[KernelSpec]:
    """The kernels of expert-parallel layers on two ranks, in both forms of activations, with and without a shared
    expert."""
    options = {"tokens": EP_TOKENS, "activation": "fp8,bf16", "shared": None, "shared_format": None, "index": None}
    args = argparse.Namespace(format=format, ranks="2", **options)
    problems = layer_problems(args, parse_shape(model))
    return list(dict.fromkeys(spec for problem in problems for spec in layer_specs_of(problem)))


def layers(args: argparse.Namespace) -> Iterator[tuple[str, str, list[KernelSpec]]]:
    """(model, format, kernels) of everything that is asked for."""
    asked = None if args.models is None else [(model, args.formats or FORMATS) for model in args.models]
    for model, formats in asked or LAYERS:
        for format in formats:
            yield model, format, list(dict.fromkeys(specs_of(parse_shape(model), format, torch.int64, args.arch)))
    for model, formats in () if asked else EP_LAYERS:
        for format in formats:
            yield model, format, ep_specs(model, format)


def to_record(model: str, format: str, spec: KernelSpec, specs: list[KernelSpec], arch: str, date: str) -> Record:
    """Compile one form of a kernel, or take it from the cache."""
    cubin = compile_kernel(spec, arch)
    form = distinction(spec, specs)
    return record(
        "resources",
        device="cpu",
        model=model,
        format=format,
        arch=arch,
        kernel=spec.entry,
        registers=cubin.registers,
        smem_bytes=cubin.smem_bytes + spec.dynamic_smem_bytes,
        spill_bytes=cubin.spill_bytes,
        cuda=compiler_version(),
        date=date,
        **({"form": form} if form else {}),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, help="layers of one GPU instead of those of docs/kernels.md")
    parser.add_argument("--formats", type=words, help=f"with --models (default: {','.join(FORMATS)})")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    for model, format, specs in layers(args):
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # one of a layer tells its forms from an older run's
        for spec in specs:
            rec = to_record(model, format, spec, specs, args.arch, date)
            append(args.output, rec)
            sizes = (
                f"{rec['registers']:>4} registers  {rec['smem_bytes']:>7} bytes shared  {rec['spill_bytes']} spilled"
            )
            print(f"{model}  {format:<12}{spec.entry:<26}{sizes}  {rec.get('form', '')}".rstrip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
