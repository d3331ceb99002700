"""`warpring ep-bench`: time one expert-parallel layer on the ranks of torchrun."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from warpring.cli import seed
from warpring.errors import ArgumentError

if TYPE_CHECKING:
    from warpring.bench.ep_variants import Variant

_EXAMPLES = """\
examples
  torchrun --nproc-per-node 2 -m warpring ep-bench --model deepseek-v4-flash --format mxfp4
  torchrun --nproc-per-node 2 -m warpring ep-bench --tokens 1,8,64 --comm-sms 8,16 --impl warpring,shared,nccl
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `ep-bench`."""
    parser = subparsers.add_parser(
        "ep-bench",
        help="time expert-parallel decode on the ranks of torchrun",
        description="Time one expert-parallel layer: CUDA graphs of 16 calls with changing routings, 10 replays to "
        "warm up, 30 windows, the slowest rank. Baselines: shared (the same kernels without partition, in stream "
        "order) and nccl (all-to-alls around a grouped GEMM, BF16 weights). Peers, where they can be imported: "
        "flashinfer_pull, flashinfer_pull_staged, flashinfer_push, deepgemm_mega (fp8_block). On CPUs it shows how it "
        "works, not how fast.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--model", help="a known model (default deepseek-v4-flash)")
    shape.add_argument("--shape", help="free sizes, like h4096xi2048xe256xk6")
    parser.add_argument("--format", default="mxfp4", help="number format of the weights (default %(default)s)")
    parser.add_argument("--tokens", default="1,8,32,128", metavar="T,...", help="a rank (default %(default)s)")
    parser.add_argument("--impl", default="warpring", metavar="NAME,...", help="warpring, shared, nccl, or a peer")
    parser.add_argument("--activation", default="fp8", metavar="FORM,...", help="fp8, bf16 (default %(default)s)")
    parser.add_argument("--comm-sms", metavar="N,...", help="communication SMs (default: a choice that fits)")
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf"), help="(default %(default)s)")
    parser.add_argument("--skew", type=float, default=1.0, help="share of rank 0 over an even one (default 1)")
    parser.add_argument("--windows", type=int, default=30, metavar="N", help="timed windows (default %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and inputs (default %(default)s)")
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu (default: GPUs if there are any)")
    parser.add_argument("--output", metavar="FILE", help="append the records to this JSONL file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Bench on every rank; rank 0 prints a line a record."""
    from warpring.bench.expert_parallel import EpBench, describe
    from warpring.bench.records import FORMATS, append
    from warpring.bench.shapes import parse_shape
    from warpring.bench.torchrun import process_group
    from warpring.cli.bench import choose_device, parse_counts, parse_list
    from warpring.expert_parallel.problem import MAX_TOKENS_PER_RANK

    shape = parse_shape(args.shape or args.model or "deepseek-v4-flash")
    (format,) = parse_list("--format", args.format, FORMATS)[:1]
    tokens, variants = parse_counts("--tokens", args.tokens, MAX_TOKENS_PER_RANK), _variants(args)
    if args.windows < 1:
        raise ArgumentError(f"--windows must be at least 1; got {args.windows}.")
    with process_group(choose_device(args.device)) as (group, device):
        bench = EpBench(shape, format, group, device, args.routing, args.skew, args.seed, args.windows)
        for measured in bench.run(tokens, variants):
            if bench.rank == 0:
                for rec in measured:
                    print(describe(rec), flush=True)
                    if args.output is not None:
                        append(args.output, rec)
    return 0


def _variants(args: argparse.Namespace) -> list[Variant]:
    from warpring.bench.ep_peers import EP_PEERS
    from warpring.bench.ep_variants import Variant
    from warpring.cli.bench import parse_counts, parse_list

    impls: Any = parse_list("--impl", args.impl, ("warpring", "shared", "nccl", *EP_PEERS))
    forms: Any = parse_list("--activation", args.activation, ("fp8", "bf16"))
    splits: list[int | None] = [None] if args.comm_sms is None else list(parse_counts("--comm-sms", args.comm_sms, 256))
    found: list[Variant] = []
    for impl in impls:
        if impl == "nccl":
            found.append(Variant(impl="nccl", activation="bf16"))
            continue
        if impl in EP_PEERS:
            found.append(Variant(impl))
            continue
        for form in forms:
            found += [Variant(impl, sms, activation=form) for sms in (splits if impl == "warpring" else [None])]
    return list(dict.fromkeys(found))
