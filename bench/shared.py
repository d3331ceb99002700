"""Measure shared experts, fused with the routed ones and as a layer of their own, into bench/results/shared.jsonl.

    PYTHONPATH=src python bench/shared.py
    PYTHONPATH=src python bench/shared.py --models glm-5.2 --formats mxfp8 --shared 1 --batches 1,8

The weights are random, uniform routing; each token's shared experts are gated. See `warpring.bench.shared`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from warpring.bench.console import HEADER, describe, row, words
from warpring.bench.records import append
from warpring.bench.shapes import parse_shape
from warpring.bench.shared import SharedBench

RESULTS = Path(__file__).parent / "results" / "shared.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=["qwen3-next-80b"], help="names or h2048xi768xe128xk8")
    parser.add_argument("--formats", type=words, default=["mxfp8", "mxfp4"])
    parser.add_argument("--batches", type=words, default=words("1,2,4,8,16,32,64"))
    parser.add_argument("--shared", type=int, help="shared experts of the routed width (default: the model's, or 1)")
    parser.add_argument("--path", default="tile", choices=("tile", "grouped"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    for model in args.models:
        shape = parse_shape(model)
        num_shared = args.shared or max(1, shape.shared_experts)
        for format in args.formats:
            bench = SharedBench(shape, format, num_shared, args.path, args.device, args.repeats, args.seed)
            for index, measured in enumerate(bench.run([int(batch) for batch in args.batches])):
                if index == 0:
                    print(f"\n{describe(measured[0])}\n{HEADER}")
                for rec in measured:
                    append(args.output, rec)
                    print(row(rec | {"path": f"{rec['path']}, shared {rec['shared_expert']}"}), flush=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
