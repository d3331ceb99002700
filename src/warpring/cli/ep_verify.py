"""`warpring ep-verify`: expert-parallel decode against the same arithmetic done rank-locally, and against FP64."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeVar

from warpring.cli import seed
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warpring.bench.ep_cases import Case, Outcome, Verifier
    from warpring.bench.ep_soak import SoakOutcome

    _Outcome = TypeVar("_Outcome", Outcome, SoakOutcome)

_EXAMPLES = """\
examples
  torchrun --nproc-per-node 2 -m warpring ep-verify                 every model, routed and shared, FP8 and BF16
  torchrun --nproc-per-node 2 -m warpring ep-verify --model glm-5.2 --activation bf16 --replays 1000
  torchrun --nproc-per-node 2 -m warpring ep-verify --soak 10000 --jsonl soak.jsonl    replays back to back
  warpring ep-verify --device cpu                                   one rank alone, scaled down
"""


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
    parser.add_argument("--checked", type=int, metavar="N", default=10, help="of these compared (default %(default)s)")
    parser.add_argument("--soak", type=int, metavar="N", help="N replays back to back of a small layer or of --model")
    parser.add_argument("--jsonl", metavar="FILE", help="append a record of every soak to FILE")
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
    from warpring.bench.ep_soak import SOAK_SHAPE
    from warpring.bench.torchrun import process_group
    from warpring.cli.bench import choose_device, parse_list

    known = tuple(FORMATS) if args.soak is None else (SOAK_SHAPE, *FORMATS)
    models = parse_list("--model", args.model or ",".join(known if args.soak is None else known[:1]), known)
    forms = parse_list("--activation", args.activation, ("fp8", "bf16"))
    shared = [int(count) for count in parse_list("--shared", args.shared, tuple(map(str, range(9))))]
    if any(count is not None and count < 1 for count in (args.checked, args.replays, args.soak)):
        raise ArgumentError("ep-verify: --replays, --soak and --checked must be at least 1.")
    work = _verify if args.soak is None else _soak
    console = Console(soft_wrap=True)
    met = True
    with process_group(choose_device(args.device)) as (group, device):
        for model in models:
            for form in forms:
                for num_shared in shared:
                    met &= work(args, console, group, device, model, form, num_shared)
    return 0 if met else 1


def _verifier(
    args: argparse.Namespace,
    group: Any | None,
    device: torch.device,
    model: str,
    form: str,
    num_shared: int,
    **sizes: Any,
) -> Verifier:
    """What runs and judges the layer; `sizes` are further arguments of it."""
    from warpring.bench.ep_cases import Verifier

    return Verifier(
        model,
        group,
        device,
        activation="fp8" if form == "fp8" else "bf16",
        num_shared=num_shared,
        seed=args.seed,
        timeout=args.timeout,
        comm_sms=args.comm_sms,
        **sizes,
    )


def _verify(
    args: argparse.Namespace,
    console: Any,
    group: Any | None,
    device: torch.device,
    model: str,
    form: str,
    num_shared: int,
) -> bool:
    """One layer and all of its cases; whether every bound was met on every rank."""
    from warpring.bench.ep_cases import cases

    verifier = _verifier(args, group, device, model, form, num_shared)
    replays = args.replays or (100 if device.type == "cuda" else 3)
    with verifier.layer:
        results: list[tuple[Case, Outcome]] = []
        for case in cases(verifier.problem.max_tokens_per_rank):
            outcome = verifier.run(case, replays=replays, checked=min(args.checked, replays))
            results.append((case, worst_of_ranks(group, outcome)))
        if verifier.rank == 0:
            _print(console, verifier, model, results)
    return all(outcome.met(verifier.problem.activation) for _, outcome in results)


def _soak(
    args: argparse.Namespace,
    console: Any,
    group: Any | None,
    device: torch.device,
    model: str,
    form: str,
    num_shared: int,
) -> bool:
    """One layer, replayed without a pause; whether every bound was met on every rank."""
    from warpring.bench.ep_cases import FORMATS
    from warpring.bench.ep_soak import SOAK_FORMAT, SOAK_TOKENS, Soak, soak_fields
    from warpring.bench.records import append, record

    sizes = {"format": FORMATS.get(model, SOAK_FORMAT), "max_tokens": SOAK_TOKENS}
    verifier = _verifier(args, group, device, model, form, num_shared, **sizes)
    with verifier.layer:
        outcome = worst_of_ranks(group, Soak(verifier, args.seed).run(args.soak, min(args.checked, args.soak)))
        fields = soak_fields(verifier, model, outcome, args.seed)
    if verifier.rank == 0:
        console.print(describe(outcome, f"{model} {fields['format']}, activations {form}, shared {num_shared}"))
        if args.jsonl:
            append(args.jsonl, record("soak", device=device, **fields))
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


def _print(console: Any, verifier: Verifier, model: str, results: list[tuple[Case, Outcome]]) -> None:
    from rich.table import Table

    problem, layer = verifier.problem, verifier.layer
    where = (
        "CPU reference" if layer.sm_counts is None else f"SMs {layer.sm_counts.comm_sms}+{layer.sm_counts.compute_sms}"
    )
    title = f"{model} {problem.format}, activations {problem.activation}, shared {problem.num_shared}"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens/rank, routing", no_wrap=True)
    for name in ("calls", "cosine", "cosine\nFP64", "RMS\nFP64", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, outcome in results:
        table.add_row(
            str(case),
            str(outcome.replays),
            f"{outcome.cosine:.9f}",
            f"{outcome.exact_cosine:.6f}",
            f"{outcome.exact_error:.1e}",
            "yes" if outcome.met(problem.activation) else "NO",
        )
    console.print(
        f"\n{title}: h{problem.hidden} i{problem.intermediate}, {problem.num_experts} experts on {problem.num_ranks} "
        f"ranks, top-{problem.topk}, {where}",
        highlight=False,
    )
    for line in layer.memory.splitlines()[:1]:
        console.print(f"workspace: {line}", highlight=False)
    console.print(table)
