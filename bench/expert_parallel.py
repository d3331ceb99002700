"""Measure the standard rows of an expert-parallel layer and append them to bench/results/expert_parallel.jsonl.

    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py bar
    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py ablation

bar: tokens 1 to 256 a rank, two shapes, FP8 and MXFP4 weights, with the baselines; on FP8 weights with the --peers too
that can be imported (why the others are left out is said at the start of each layer). ablation: one knob at a time.
Where the code runs without its git history, name its commit: WARPRING_COMMIT=$(git rev-parse --short=12 HEAD).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from warpring.bench.ep_peers import EP_PEERS, NOT_TIMED, why_not
from warpring.bench.ep_points import (
    ABLATION_FORMAT,
    ABLATION_MODEL,
    ABLATION_TOKENS,
    BAR_FORMATS,
    BAR_MODELS,
    BLOCK_SIZES,
    COMM_SMS,
    RING_BLOCKS,
    SKEWS,
    TOKENS,
    eighth,
)
from warpring.bench.ep_variants import Variant
from warpring.bench.expert_parallel import EpBench, describe
from warpring.bench.records import append
from warpring.bench.shapes import MODELS, LayerShape
from warpring.bench.torchrun import process_group

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "expert_parallel.jsonl"

Work = tuple[LayerShape, str, float, tuple[int, ...], tuple[Variant, ...]]


def bar(num_ranks: int) -> Iterator[Work]:
    """The rows of the bar: all experts on these ranks, and as many a rank as one of eight would have."""
    ours = (Variant(), Variant(impl="shared"), Variant(activation="bf16"))
    for name in BAR_MODELS:
        shape = MODELS[name]
        for format in BAR_FORMATS:
            yield shape, format, 1.0, TOKENS, ours if format == "mxfp4" else (*ours, Variant(impl="nccl"))
            yield eighth(shape, num_ranks), format, 1.0, TOKENS, ours[:1]
        yield shape, "mxfp4", 1.0, TOKENS, (Variant(), Variant(shared="fused"))


def ablation(num_ranks: int) -> Iterator[Work]:
    """One knob at a time, on one shape and format."""
    layer, tokens = (MODELS[ABLATION_MODEL], ABLATION_FORMAT), ABLATION_TOKENS
    splits = tuple(Variant(comm_sms=sms) for sms in COMM_SMS)
    yield *layer, 1.0, tokens, (*splits, Variant(partition="streams"), Variant(impl="shared"))
    yield *layer, 1.0, tokens, tuple(Variant(block_m=block_m) for block_m in BLOCK_SIZES)
    yield *layer, 1.0, tokens, tuple(Variant(num_slots=slots) for slots in RING_BLOCKS)
    yield *layer, 1.0, tokens, (Variant(), Variant(activation="bf16"), Variant(shared="fused"))
    for skew in SKEWS:
        if skew <= num_ranks:
            yield *layer, skew, tokens, (Variant(), Variant(impl="shared"))
    yield *layer, 1.0, tokens, (Variant(shared="fused"), Variant(shared="separate"))


SWEEPS = {"bar": bar, "ablation": ablation}


def chosen(work: Iterable[Work], names: Sequence[str]) -> list[Work]:
    """Those of the layers called MODEL:FORMAT, in the order of the names; all without names."""
    found = list(work)
    labels = [f"{shape.name}:{format}" for shape, format, *_ in found]
    unknown = set(names) - set(labels)
    if unknown:
        raise SystemExit(f"--layers: {', '.join(sorted(unknown))} is none of {', '.join(dict.fromkeys(labels))}")
    return [item for name in names for item, label in zip(found, labels, strict=True) if label == name] or found


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def peers_of(bench: EpBench, names: Sequence[str]) -> tuple[Variant, ...]:
    """The peers of `names` that may serve this layer; rank 0 says why the others may not."""
    reasons = {name: why_not(name, bench.shape, bench.format, bench.device, bench.group) for name in names}
    for name, reason in reasons.items():
        if reason is not None and bench.rank == 0:
            print(f"{bench.shape.name}: {name} is left out, it {reason}", file=sys.stderr)
    return tuple(Variant(name) for name, reason in reasons.items() if reason is None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=tuple(SWEEPS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--layers", type=words, default=[], metavar="MODEL:FORMAT,...", help="these alone, in this order"
    )
    parser.add_argument("--peers", type=words, default=[*EP_PEERS, *NOT_TIMED], help="in bar; empty for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S", help="start nothing after S s")
    args = parser.parse_args()
    start = time.monotonic()
    with process_group(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as (group, device):
        num_ranks = 1 if group is None else group.size()
        for shape, format, skew, tokens, variants in chosen(SWEEPS[args.sweep](num_ranks), args.layers):
            bench = EpBench(shape, format, group, device, skew=skew, seed=args.seed, windows=args.windows)
            # Rank 0's clock decides for all, or some would wait for others that have stopped.
            if bench.first_of_all(time.monotonic() - start) > args.time_budget:
                print(f"left out: {shape.name} {format} skew {skew}", file=sys.stderr)
                continue
            if args.sweep == "bar" and format == "fp8_block":
                variants += peers_of(bench, args.peers)
            for measured in bench.run(tokens, variants):
                if bench.rank == 0:
                    for rec in measured:
                        append(args.output, rec)
                        print(describe(rec), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
