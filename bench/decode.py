"""Measure the standard rows of one decode layer and append them to bench/results/decode.jsonl.

    PYTHONPATH=src python bench/decode.py                                     the rows of README.md
    PYTHONPATH=src python bench/decode.py --models gpt-oss-20b --formats mxfp4 --time-budget 300
    PYTHONPATH=src python bench/decode.py --bar --paths warp,tile             every row of docs/performance.md's bar

Afterwards `python -m warpring.bench.tables` writes the tables and `python bench/plots.py` the plots. Where the code
runs without its git history, name its commit: WARPRING_COMMIT=$(git rev-parse --short=12 HEAD).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from warpring.bench import bar
from warpring.bench.console import HEADER, describe, row, words
from warpring.bench.inputs import read_load
from warpring.bench.layer import LayerBench
from warpring.bench.records import Record, append
from warpring.bench.shapes import parse_shape
from warpring.bench.tables import BATCHES, DECODE_FORMATS, DECODE_MODEL, DECODE_PATHS
from warpring.errors import WarpringError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "decode.jsonl"
#: Where "recorded" routing comes from unless told otherwise: a model whose router was trained.
LOAD = ROOT / "examples" / "tiny-qwen3-moe" / "training_log.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=[DECODE_MODEL], help="names or sizes like h2048xi768xe128xk8")
    parser.add_argument("--formats", type=words, default=list(DECODE_FORMATS), help="in the order of measuring")
    parser.add_argument("--batches", type=words, default=[str(batch) for batch in BATCHES])
    parser.add_argument("--paths", type=words, default=list(DECODE_PATHS))
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf", "recorded"))
    parser.add_argument("--bar", action="store_true", help="the bar's models, formats, batches and routings instead")
    parser.add_argument("--load", type=Path, default=LOAD, help="the experts' load for --routing recorded")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no further batch after S seconds")
    args = parser.parse_args()
    start = time.monotonic()
    load = read_load(args.load) if args.bar or args.routing == "recorded" else None
    every = [int(batch) for batch in args.batches]
    asked = {(model, format, args.routing): every for model in args.models for format in args.formats}
    work = bar.groups() if args.bar else asked
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left: list[str] = []
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=sum(map(len, work.values())))
        for (model, format, routing), batches in work.items():
            recorded = load if routing == "recorded" else None
            bench = LayerBench(parse_shape(model), format, routing, args.device, args.repeats, args.seed, recorded)
            label = f"{model} {format}" if routing == "uniform" else f"{model} {format} {routing}"

            def stage(text: str, label: str = label) -> None:
                progress.update(task, description=f"{label}: {text}")

            done: set[int] = set()
            runs = measured_batches(bench, batches, args.paths, stage, label, left)
            while args.time_budget is None or time.monotonic() - start <= args.time_budget:
                measured = next(runs, None)
                if measured is None:
                    break
                if not done:
                    progress.console.print(f"\n{describe(measured[0])}\n{HEADER}", highlight=False, soft_wrap=True)
                for rec in measured:
                    append(args.output, rec)
                    progress.console.print(row(rec), highlight=False, soft_wrap=True)
                if measured[0]["num_tokens"] not in done:
                    progress.advance(task)
                done.add(measured[0]["num_tokens"])
            else:
                left += [f"{label} B={batch}: the time budget is spent" for batch in batches if batch not in done]
    if left:
        print("\n".join(("", "left out", *left)), file=sys.stderr)
    return 1 if left else 0


def measured_batches(
    bench: LayerBench,
    batches: Sequence[int],
    paths: Sequence[str],
    on_stage: Callable[[str], None],
    label: str,
    left: list[str],
) -> Iterator[list[Record]]:
    """The records of each batch. Where a path fails, the batches from there on are measured path by path."""
    runs = bench.run(batches, paths, on_stage=on_stage)
    for index, batch in enumerate(batches):
        try:
            measured = next(runs)
        except (WarpringError, torch.OutOfMemoryError) as error:
            failure = str(error)
        else:
            yield measured
            continue
        # Only here, where the error is gone, are the weights that its frames held gone too.
        if len(paths) == 1:
            left.append(f"{label} {paths[0]} from B={batch} on: {failure}")
            return
        for path in paths:
            yield from measured_batches(bench, batches[index:], [path], on_stage, label, left)
        return


if __name__ == "__main__":
    sys.exit(main())
