"""Measure batches beyond decode and append them to bench/results/grouped.jsonl: what crossovers are made of.

    PYTHONPATH=src python bench/grouped.py
    PYTHONPATH=src python bench/grouped.py --paths tile,grouped --time-budget 60
    PYTHONPATH=src python bench/grouped.py --formats bf16 --batches 64,8192

The grouped path runs on row-major and on packed weights; beside it each decode path up to its most tokens, and at every
batch transformers' `grouped_mm` where it takes the format (BF16), on the same weights and routings. Batches lie close
where the tile path's second launch begins, behind 64 tokens of top-8: packed weights cross over there. Afterwards
`python -m warpring.bench.crossovers` writes the library's crossovers and `python bench/plots.py` the ablation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from warpring.bench.adapters import find_peers
from warpring.bench.console import HEADER, describe, row, words
from warpring.bench.crossovers import packed_grouped
from warpring.bench.layer import LayerBench
from warpring.bench.peer import Peer
from warpring.bench.records import append
from warpring.bench.shapes import parse_shape
from warpring.bench.tables import DECODE_MODEL

RESULTS = Path(__file__).parent / "results" / "grouped.jsonl"
FORMATS = "bf16,mxfp8,mxfp4,fp8_block,nvfp4,fp8_channel"
BATCHES = "32,64,72,80,96,128,192,256,512,1024,2048,4096,8192"
#: Layers of a replay: each takes 0.1 ms and more, so few make its start unseen, and their weights outgrow the cache.
LAYERS = 4
#: Decode paths of a device, and tokens beyond which each is hopeless: it takes a multiple of the grouped path's time.
MOST_DECODE = {"cuda": {"warp": 192, "tile": 512}, "cpu": {"cores": 512}}
PEERS = ("transformers_grouped_mm",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=[DECODE_MODEL], help="names or sizes like h2048xi768xe128xk8")
    parser.add_argument("--formats", type=words, default=words(FORMATS), help="in the order of measuring")
    parser.add_argument("--batches", type=words, default=words(BATCHES))
    parser.add_argument("--paths", type=words, metavar="PATH,...", help="default: decode paths of the device, grouped")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of a replay (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no further batch after S seconds")
    args = parser.parse_args()
    start = time.monotonic()
    batches = sorted(map(int, args.batches))
    left: list[str] = []
    for model in args.models:
        for format in args.formats:
            layers = (args.layers, args.layers)
            bench = LayerBench(
                parse_shape(model), format, device=args.device, repeats=args.repeats, seed=args.seed, layers=layers
            )
            peers, reasons = find_peers(PEERS, bench.shape, format, args.device)
            print("".join(f"\n{name} is left out: {why}" for name, why in reasons.items()))
            peers.append(packed_grouped())
            left += [f"{model} {format} B={batch}" for batch in measure(bench, batches, peers, args, start)]
    if left:
        print(f"\nthe time budget of {args.time_budget:.0f} s left out: {', '.join(left)}", file=sys.stderr)
    return 1 if left else 0


def measure(
    bench: LayerBench, batches: list[int], peers: list[Peer], args: argparse.Namespace, start: float
) -> list[int]:
    """Append and print the records of one layer; gives the batches that the time did not suffice for."""

    def due() -> Iterator[int]:
        for batch in batches:
            if args.time_budget is not None and time.monotonic() - start > args.time_budget:
                return
            yield batch

    done: list[int] = []
    most = MOST_DECODE[args.device.type]
    paths = args.paths or [*most, "grouped"]
    for measured in bench.run(due(), paths, peers=peers, most_tokens=most):
        if not done:
            print(f"{describe(measured[0])}\n{HEADER}")
        done.append(measured[0]["num_tokens"])
        for rec in measured:
            append(args.output, rec)
            print(row(rec), flush=True)
    return batches[len(done) :]


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
