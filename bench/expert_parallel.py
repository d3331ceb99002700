"""Measure the standard rows of an expert-parallel layer and append them to bench/results/expert_parallel.jsonl.

    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py bar
    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py bar --baselines "" --peers "" --tokens 8,32
    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py ablation
    PYTHONPATH=src torchrun --nproc-per-node 2 bench/expert_parallel.py ablation --knobs comm_sms --layers
        deepseek-v4-flash:mxfp4,deepseek-v4-flash:fp8_block

bar: tokens 1 to 256 a rank, two shapes, FP8 and MXFP4 weights, with the baselines; on FP8 weights with the --peers too
that can be imported (why the others are left out is said at the start of each layer). Peers come last, in turns with
our layer alone: one that gives no answer for --patience seconds ends the process, and takes nothing of ours with it.
ablation: one knob at a time, on one of these layers, or on those that --layers names.

What costs time can be left out: --baselines "" --peers "" measures our layer alone (NCCL's all-to-alls take longer than
all else), --activations one of its forms (the baseline `shared` is our kernels too), --tokens and --knobs some of the
points. Rank 0 tells on standard error how long each phase took.
Where the code runs without its git history, name its commit: WARPRING_COMMIT=$(git rev-parse --short=12 HEAD).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from warpring.bench.console import words
from warpring.bench.ep_compile import compile_ahead
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
from warpring.bench.ep_variants import BASELINES, Variant
from warpring.bench.ep_weights import LayerWeights
from warpring.bench.expert_parallel import EpBench, describe
from warpring.bench.phases import Phases
from warpring.bench.records import append
from warpring.bench.shapes import MODELS, LayerShape
from warpring.bench.torchrun import process_group
from warpring.bench.watchdog import PATIENCE, Watchdog
from warpring.cli.bench import parse_counts, parse_list
from warpring.errors import ArgumentError, WarpringError
from warpring.expert_parallel.problem import MAX_TOKENS_PER_RANK
from warpring.runtime.device import arch_of, index_of

_T = TypeVar("_T")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "expert_parallel.jsonl"
ACTIVATIONS = ("fp8", "bf16")
PEERS = (*EP_PEERS, *NOT_TIMED)
#: What the ablation turns; "form": 16-bit activations, fused shared experts; "shared": these fused or apart.
KNOBS = ("comm_sms", "block_m", "num_slots", "form", "skew", "shared")


class Work(NamedTuple):
    """What is measured at a time: its variants take turns.

    Attributes:
        knob: what they differ in; empty in the bar.
        peers: names of the peers that join in where they can.
    """

    shape: LayerShape
    format: str
    skew: float
    tokens: tuple[int, ...]
    variants: tuple[Variant, ...]
    knob: str = ""
    peers: tuple[str, ...] = ()


def bar(num_ranks: int) -> Iterator[Work]:
    """The rows of the bar: all experts on these ranks, and as many a rank as one of eight would have."""
    ours = (Variant(), Variant(impl="shared"), Variant(activation="bf16"))
    for name in BAR_MODELS:
        shape = MODELS[name]
        for format in BAR_FORMATS:
            other = Variant(shared="fused") if format == "mxfp4" else Variant(impl="nccl")
            peers = PEERS if format == "fp8_block" else ()
            yield Work(shape, format, 1.0, TOKENS, (*ours, other), peers=peers)
            yield Work(eighth(shape, num_ranks), format, 1.0, TOKENS, ours[:1], peers=peers)


def ablation(num_ranks: int) -> Iterator[Work]:
    """One knob at a time, on each shape and format of the bar."""
    splits = tuple(Variant(comm_sms=sms) for sms in COMM_SMS)
    groups = {
        "comm_sms": (
            *splits,
            Variant(partition="green"),
            Variant(partition="streams"),
            Variant(impl="shared"),
        ),
        "block_m": tuple(Variant(block_m=block_m) for block_m in BLOCK_SIZES),
        "num_slots": tuple(Variant(num_slots=slots) for slots in RING_BLOCKS),
        "form": (Variant(), Variant(activation="bf16"), Variant(shared="fused")),
        "skew": (Variant(), Variant(impl="shared")),
        "shared": (Variant(shared="fused"), Variant(shared="separate")),
    }
    for name in BAR_MODELS:
        for format in BAR_FORMATS:
            for knob in KNOBS:
                for skew in SKEWS if knob == "skew" else (1.0,):
                    if skew <= num_ranks:
                        yield Work(MODELS[name], format, skew, ABLATION_TOKENS, groups[knob], knob)


SWEEPS = {"bar": bar, "ablation": ablation}
#: Layers that are measured where --layers names none; all that the sweep has where it is not in here.
LAYERS = {"ablation": [f"{ABLATION_MODEL}:{ABLATION_FORMAT}"]}


def chosen(work: Iterable[Work], names: Sequence[str]) -> list[Work]:
    """Those of the layers called MODEL:FORMAT, in the order of the names; all without names."""
    found = list(work)
    labels = [f"{item.shape.name}:{item.format}" for item in found]
    unknown = set(names) - set(labels)
    if unknown:
        raise SystemExit(f"--layers: {', '.join(sorted(unknown))} is none of {', '.join(dict.fromkeys(labels))}")
    return [item for name in names for item, label in zip(found, labels, strict=True) if label == name] or found


def planned(args: argparse.Namespace, num_ranks: int) -> list[Work]:
    """What the command line asks for; SystemExit where that is nothing."""

    def is_asked(variant: Variant) -> bool:
        form = not variant.is_ours or variant.activation in args.activations
        return form and (variant.impl not in BASELINES or variant.impl in args.baselines)

    plan: list[Work] = []
    with_peers: list[Work] = []
    for item in chosen(SWEEPS[args.sweep](num_ranks), args.layers or LAYERS.get(args.sweep, [])):
        variants = tuple(filter(is_asked, item.variants))
        peers = tuple(name for name in args.peers if name in item.peers)
        if item.knob and item.knob not in args.knobs:
            continue
        item = item._replace(tokens=args.tokens or item.tokens, peers=())
        if variants:
            plan.append(item._replace(variants=variants))
        if peers:
            # A peer that hangs leaves a GPU on which nothing runs any more: all else is measured before.
            ours = tuple(variant for variant in variants if variant == Variant())
            with_peers.append(item._replace(variants=ours, peers=peers))
    plan += with_peers
    if not plan:
        raise SystemExit("nothing is left to measure: name more of --activations, --baselines, --peers or --knobs")
    return plan


def peers_of(bench: EpBench, names: Sequence[str]) -> tuple[Variant, ...]:
    """The peers of `names` that may serve this layer; rank 0 says why the others may not."""
    reasons = {name: why_not(name, bench.shape, bench.format, bench.device, bench.group) for name in names}
    for name, reason in reasons.items():
        if reason is not None and bench.rank == 0:
            print(f"{bench.shape.name}: {name} is left out, it {reason}", file=sys.stderr)
    return tuple(Variant(name) for name, reason in reasons.items() if reason is None)


def some_of(option: str, known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """How argparse reads an option that holds some, or none, of the `known` words."""

    def read(text: str) -> list[str]:
        return _distinct(lambda: parse_list(option, text, known)) if text.strip() else []

    return read


def counts(text: str) -> tuple[int, ...]:
    """How argparse reads counts of tokens a rank."""
    return tuple(_distinct(lambda: parse_counts("--tokens", text, MAX_TOKENS_PER_RANK)))


def _distinct(parse: Callable[[], list[_T]]) -> list[_T]:
    """What was parsed, in order; of other errors than its own argparse would not show the message."""
    try:
        return list(dict.fromkeys(parse()))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=tuple(SWEEPS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--layers", type=words, default=[], metavar="MODEL:FORMAT,...", help="these alone, in this order"
    )
    options = {
        "--baselines": (BASELINES, "empty for none"),
        "--peers": (PEERS, "in bar; empty for none"),
        "--activations": (ACTIVATIONS, "of our kernels; empty for NCCL and the peers alone"),
        "--knobs": (KNOBS, "in ablation"),
    }
    for option, (known, about) in options.items():
        what = f"some of {', '.join(known)} (default: all); {about}"
        parser.add_argument(option, type=some_of(option, known), default=[*known], metavar="NAME,...", help=what)
    parser.add_argument("--tokens", type=counts, metavar="T,...", help="a rank (default: those of the sweep)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, metavar="S", help="with a peer (default %(default)g)"
    )
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S", help="start nothing after S s")
    return parser


def compile_all(plan: Sequence[Work], group: Any | None, device: torch.device) -> None:
    """Compile our kernels for all that is planned; what does not compile is left to who builds it, and says so."""
    with suppress(WarpringError):
        compile_ahead(
            [
                EpBench(item.shape, item.format, group, device).problem(variant, max(item.tokens))
                for item in plan
                for variant in item.variants
                if variant.is_ours
            ],
            arch_of(index_of(device)),
            part=0 if group is None else group.rank(),
            parts=1 if group is None else group.size(),
        )


def main() -> int:
    args = command_line().parse_args()
    start = time.monotonic()
    weights: dict[tuple[LayerShape, str], LayerWeights] = {}
    with process_group(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as (group, device):
        tell = partial(print, file=sys.stderr, flush=True)
        phases = Phases(tell if group is None or group.rank() == 0 else None)
        plan = planned(args, 1 if group is None else group.size())
        if device.type == "cuda":
            with phases("compiled"):
                compile_all(plan, group, device)
        for shape, format, skew, tokens, variants, knob, peers in plan:
            bench = EpBench(
                shape, format, group, device, skew=skew, seed=args.seed, windows=args.windows, phases=phases,
                watchdog=Watchdog(args.patience),
            )  # fmt: skip
            what = f"{shape.name} {format} skew {skew} {knob}".rstrip()
            # Rank 0's clock decides for all, or some would wait for others that have stopped.
            if bench.first_of_all(time.monotonic() - start) > args.time_budget:
                if bench.rank == 0:
                    tell(f"left out: {what}")
                continue
            with phases(f"{what}: peers imported"):
                found = peers_of(bench, peers)
            if peers and not found:
                continue  # ours alone was measured before
            variants += found
            if (shape, format) not in weights:
                weights.clear()  # before the next layer's are made: both need not fit
                weights[shape, format] = bench.weights()
            for measured in bench.run(tokens, variants, weights[shape, format]):
                if bench.rank == 0:
                    for rec in measured:
                        append(args.output, rec)
                        print(describe(rec), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
