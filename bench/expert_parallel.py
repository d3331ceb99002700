"""Measure the standard rows of an expert-parallel layer and append them to bench/results/expert_parallel.jsonl.

    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py bar
    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py ablation

bar: tokens 1 to 256 a rank, two shapes, FP8 and MXFP4 weights, with the baselines. ablation: one knob at a time.
Where the code runs without its git history, name its commit: WARPRING_COMMIT=$(git rev-parse --short=12 HEAD).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from warpring.bench.ep_variants import Variant
from warpring.bench.expert_parallel import EpBench, describe
from warpring.bench.records import append
from warpring.bench.shapes import MODELS, LayerShape
from warpring.bench.torchrun import process_group

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "expert_parallel.jsonl"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODELS_OF_BAR = ("deepseek-v4-flash", "glm-5.2")
#: Experts a rank of the load of one rank of eight.
EIGHTH = 32

Work = tuple[LayerShape, str, float, tuple[int, ...], tuple[Variant, ...]]


def bar(num_ranks: int) -> Iterator[Work]:
    """The rows of the bar: all experts on these ranks, and as many a rank as one of eight would have."""
    ours = (Variant(), Variant(impl="shared"), Variant(activation="bf16"))
    for name in MODELS_OF_BAR:
        shape = MODELS[name]
        for format in ("fp8_block", "mxfp4"):
            yield shape, format, 1.0, TOKENS, ours if format == "mxfp4" else (*ours, Variant(impl="nccl"))
            eighth = replace(shape, name=f"{name}-ep8", num_experts=EIGHTH * num_ranks)
            yield eighth, format, 1.0, TOKENS, ours[:1]
        yield shape, "mxfp4", 1.0, TOKENS, (Variant(), Variant(shared="fused"))


def ablation(num_ranks: int) -> Iterator[Work]:
    """One knob at a time, on one shape and format."""
    shape, tokens = MODELS[MODELS_OF_BAR[0]], (1, 8, 32, 256)
    splits = tuple(Variant(comm_sms=sms) for sms in (8, 16, 24, 32))
    yield shape, "mxfp4", 1.0, tokens, (*splits, Variant(partition="streams"), Variant(impl="shared"))
    yield shape, "mxfp4", 1.0, tokens, tuple(Variant(block_m=block_m) for block_m in (8, 16, 32, 64))
    yield shape, "mxfp4", 1.0, tokens, tuple(Variant(num_slots=slots) for slots in (16, 32, 64, 128))
    yield shape, "mxfp4", 1.0, tokens, (Variant(), Variant(activation="bf16"), Variant(shared="fused"))
    for skew in (1.25, 1.5, 2.0):
        if skew <= num_ranks:
            yield shape, "mxfp4", skew, tokens, (Variant(), Variant(impl="shared"))
    yield shape, "mxfp4", 1.0, tokens, (Variant(shared="fused"), Variant(shared="separate"))


SWEEPS = {"bar": bar, "ablation": ablation}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=tuple(SWEEPS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S", help="start nothing after S s")
    args = parser.parse_args()
    start = time.monotonic()
    with process_group(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as (group, device):
        num_ranks = 1 if group is None else group.size()
        for shape, format, skew, tokens, variants in SWEEPS[args.sweep](num_ranks):
            bench = EpBench(shape, format, group, device, skew=skew, seed=args.seed, windows=args.windows)
            # Rank 0's clock decides for all, or some would wait for others that have stopped.
            if bench.first_of_all(time.monotonic() - start) > args.time_budget:
                print(f"left out: {shape.name} {format} skew {skew}", file=sys.stderr)
                continue
            for measured in bench.run(tokens, variants):
                if bench.rank == 0:
                    for rec in measured:
                        append(args.output, rec)
                        print(describe(rec), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
