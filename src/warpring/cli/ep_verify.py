"""`warpring ep-verify`: expert-parallel decode against the same arithmetic done rank-locally, and against FP64."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from warpring.cli import seed
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warpring.bench.ep_cases import Case, Outcome, Verifier
    from warpring.bench.ep_soak import SoakOutcome
    from warpring.expert_parallel.problem import ActivationForm, Problem

    _Outcome = TypeVar("_Outcome", Outcome, SoakOutcome)

#: Replays of a soak that are compared, unless told otherwise.
_SOAK_CHECKS = 100
_EXAMPLES = """\
examples
  torchrun --nproc-per-node 2 -m warpring ep-verify                 every model, routed and shared, FP8 and BF16
  torchrun --nproc-per-node 2 -m warpring ep-verify --model glm-5.2 --activation bf16 --replays 1000
  torchrun --nproc-per-node 2 -m warpring ep-verify --max-tokens 8  layers built for few tokens: narrow blocks
  torchrun --nproc-per-node 2 -m warpring ep-verify --soak 10000 --jsonl soak.jsonl    replays back to back
  warpring ep-verify --device cpu                                   one rank alone, scaled down
"""


@dataclass(frozen=True)
class _Layer:
    """One layer to verify."""

    model: str
    form: ActivationForm
    num_shared: int


@dataclass(frozen=True)
class _Place:
    """Where layers run, and who prints."""

    group: Any | None
    device: torch.device
    console: Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `ep-verify`."""
    parser = subparsers.add_parser(
        "ep-verify",
        help="verify expert-parallel decode on the ranks of torchrun",
        description="Run layers of real models on all ranks, with changing inputs, routings and token counts, and "
        "compare every rank's outputs with the same arithmetic done rank-locally in torch, and with FP64. On CPUs the "
        "layers are scaled down. With --soak, one captured graph is replayed without a pause instead: outputs must be "
        "right and the same when inputs come again, and memory must not grow. Exit code 1 if a bound is missed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="MODEL,...", help="models to verify (default: all that are known)")
    parser.add_argument(
        "--activation", metavar="FORM,...", default="fp8,bf16", help="forms of the tokens (default %(default)s)"
    )
    parser.add_argument("--shared", metavar="N,...", default="0,1", help="fused shared experts (default %(default)s)")
    parser.add_argument("--replays", type=int, metavar="N", help="calls of a case (default: 100 on GPUs, 3 on CPUs)")
    parser.add_argument(
        "--checked", type=int, metavar="N", help=f"of these compared (default: all; {_SOAK_CHECKS} of a soak)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of a rank (default: 256; 64 of a soak)")
    parser.add_argument("--soak", type=int, metavar="N", help="N replays back to back of a small layer or of --model")
    parser.add_argument("--jsonl", metavar="FILE", help="append a record of every case or soak to FILE")
    parser.add_argument(
        "--partition", metavar="MODE", default="auto", help="how roles share a GPU, as in ExpertParallelDecode"
    )
    parser.add_argument("--comm-sms", type=int, metavar="N", help="communication SMs (default: a choice that fits)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="bound of a wait (default %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and inputs (default %(default)s)")
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu (default: GPUs if there are any)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify every layer on every rank; rank 0 prints. 1 if a bound is missed."""
    from rich.console import Console

    from warpring.bench.ep_cases import FORMATS
    from warpring.bench.ep_soak import SOAK_SHAPE, SOAK_SHAPE_OF_CPUS
    from warpring.bench.torchrun import process_group
    from warpring.cli.bench import choose_device, parse_list

    known = tuple(FORMATS) if args.soak is None else (SOAK_SHAPE, *FORMATS)
    device = choose_device(args.device)
    soaked = SOAK_SHAPE if device.type == "cuda" else SOAK_SHAPE_OF_CPUS
    models = parse_list("--model", args.model or (",".join(FORMATS) if args.soak is None else soaked), known)
    forms = parse_list("--activation", args.activation, ("fp8", "bf16"))
    shared = [int(count) for count in parse_list("--shared", args.shared, tuple(map(str, range(9))))]
    counts = (args.checked, args.replays, args.soak, args.max_tokens)
    if any(count is not None and count < 1 for count in counts):
        raise ArgumentError("ep-verify: --replays, --soak, --checked and --max-tokens must be at least 1.")
    # Forms outside, so that a run which is cut short has seen every model.
    layers = [
        _Layer(model, "fp8" if form == "fp8" else "bf16", num_shared)
        for form in forms
        for num_shared in shared
        for model in models
    ]
    work = _verify if args.soak is None else _soak
    with process_group(device) as (group, device):
        place = _Place(group, device, Console(soft_wrap=True))
        _compile(args, place, layers)
        return 0 if all([work(args, place, layer) for layer in layers]) else 1


def _sizes(args: argparse.Namespace, layer: _Layer) -> dict[str, Any]:
    """Arguments of `problem_of` and `Verifier` that say which layer it is."""
    from warpring.bench.ep_cases import FORMATS, TOKENS
    from warpring.bench.ep_soak import SOAK_FORMAT, SOAK_TOKENS

    return {
        "format": FORMATS.get(layer.model, SOAK_FORMAT),
        "activation": layer.form,
        "num_shared": layer.num_shared,
        "max_tokens": args.max_tokens or (max(TOKENS) if args.soak is None else SOAK_TOKENS),
    }


def _compile(args: argparse.Namespace, place: _Place, layers: list[_Layer]) -> None:
    """Fill the kernel cache for all layers at once, where they run on GPUs."""
    if place.device.type == "cpu":
        return
    import os

    from warpring.bench.ep_cases import problem_of
    from warpring.bench.ep_compile import compile_ahead
    from warpring.runtime.device import arch_of, index_of

    num_ranks = 1 if place.group is None else place.group.size()
    problems: list[Problem] = [
        problem_of(layer.model, num_ranks, place.device, **_sizes(args, layer)) for layer in layers
    ]
    part, parts = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    compile_ahead(problems, arch_of(index_of(place.device)), part=part, parts=parts)


def _verifier(args: argparse.Namespace, place: _Place, layer: _Layer) -> Verifier:
    """What runs and judges a layer."""
    from warpring.bench.ep_cases import Verifier

    return Verifier(
        layer.model,
        place.group,
        place.device,
        seed=args.seed,
        timeout=args.timeout,
        comm_sms=args.comm_sms,
        partition=args.partition,
        **_sizes(args, layer),
    )


def _verify(args: argparse.Namespace, place: _Place, layer: _Layer) -> bool:
    """All cases of one layer; whether every bound was met on every rank."""
    import time

    from warpring.bench.ep_cases import case_fields, cases
    from warpring.bench.records import append, record

    start = time.perf_counter()
    verifier = _verifier(args, place, layer)
    replays = args.replays or (100 if place.device.type == "cuda" else 3)
    checked = min(args.checked or replays, replays)
    with verifier.layer:
        found = cases(verifier.problem.max_tokens_per_rank)
        outcomes = verifier.run_all(found, replays=replays, checked=checked)
        results = [(case, worst_of_ranks(place.group, own)) for case, own in zip(found, outcomes, strict=True)]
        if verifier.rank == 0:
            _print(place.console, verifier, layer.model, results, time.perf_counter() - start)
            for case, outcome in results if args.jsonl else ():
                fields = case_fields(verifier, layer.model, case, outcome, args.seed)
                append(args.jsonl, record("ep_verify", device=place.device, **fields))
    return all(outcome.met(verifier.problem.activation) for _, outcome in results)


def _soak(args: argparse.Namespace, place: _Place, layer: _Layer) -> bool:
    """One layer, replayed without a pause; whether every bound was met on every rank."""
    from warpring.bench.ep_soak import Soak, soak_fields
    from warpring.bench.records import append, record

    verifier = _verifier(args, place, layer)
    with verifier.layer:
        own = Soak(verifier, args.seed).run(args.soak, min(args.checked or _SOAK_CHECKS, args.soak))
        outcome = worst_of_ranks(place.group, own)
        fields = soak_fields(verifier, layer.model, outcome, args.seed)
    if verifier.rank == 0:
        what = f"{layer.model} {fields['format']}, activations {layer.form}, shared {layer.num_shared}"
        place.console.print(describe(outcome, what))
        if args.jsonl:
            append(args.jsonl, record("soak", device=place.device, **fields))
    return outcome.met()


def describe(outcome: SoakOutcome, what: str) -> str:
    """A soak in words."""
    return (
        f"{what}: {outcome.replays} replays in {outcome.seconds:.1f} s, cosine {outcome.worst.cosine:.9f} in "
        f"{outcome.checks} checks, {outcome.changed} values changed when inputs came again, memory grew by "
        f"{outcome.allocated_bytes} bytes in torch and {outcome.device_bytes} on the device: "
        f"{'met' if outcome.met() else 'NOT MET'}"
    )


def worst_of_ranks(group: Any | None, outcome: _Outcome) -> _Outcome:
    """The worst outcome of all ranks; a collective."""
    if group is None:
        return outcome
    import torch.distributed as dist

    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, outcome, group=group)
    for other in outcomes:
        outcome = outcome.worse(other)
    return outcome


def _print(console: Any, verifier: Verifier, model: str, results: list[tuple[Case, Outcome]], seconds: float) -> None:
    from rich.table import Table

    problem, layer = verifier.problem, verifier.layer
    where = (
        "CPU reference" if layer.sm_counts is None else f"SMs {layer.sm_counts.comm_sms}+{layer.sm_counts.compute_sms}"
    )
    title = f"{model} {problem.format}, activations {problem.activation}, shared {problem.num_shared}"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens/rank, routing", no_wrap=True)
    for name in ("calls", "tokens\ncompared", "cosine", "cosine\nFP64", "RMS\nFP64", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, outcome in results:
        table.add_row(
            str(case),
            str(outcome.replays),
            str(outcome.tokens),
            f"{outcome.cosine:.9f}",
            f"{outcome.exact_cosine:.6f}",
            f"{outcome.exact_error:.1e}",
            "yes" if outcome.met(problem.activation) else "NO",
        )
    console.print(
        f"\n{title}: h{problem.hidden} i{problem.intermediate}, {problem.num_experts} experts on {problem.num_ranks} "
        f"ranks, top-{problem.topk}, {where}, {seconds:.1f} s",
        highlight=False,
    )
    for line in layer.memory.splitlines()[:1]:
        console.print(f"workspace: {line}", highlight=False)
    console.print(table)
