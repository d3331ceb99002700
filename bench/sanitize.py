"""Run our kernels at small and odd sizes under compute-sanitizer: decode on one GPU, and expert parallelism.

    PYTHONPATH=src python bench/sanitize.py [decode] [expert_parallel] [--tool memcheck racecheck] [--output FOLDER]
    PYTHONPATH=src python bench/sanitize.py decode --formats mxfp8 --sizes 2 3          some of it
    PYTHONPATH=src python bench/sanitize.py expert_parallel --layers h160xi224xe24xk3 --seconds 60

decode: the kernels of the decode paths and of the grouped one, in every format. expert_parallel: one rank, every role,
both forms of activations, with and without a shared expert. memcheck looks for reads and writes out of bounds,
racecheck for hazards in shared memory. torch's caching allocator is switched off, so that every tensor is an allocation
of its own and a byte beyond its end is seen. A tool that takes longer than --seconds is ended, and the log says so.

The roles of expert parallelism wait for each other, and a sanitizer may let only one kernel run at a time. So they run
where that does no harm: launched in the order of their dependences (role4, role1, role2, role3), and with a ring that
has a slot for every block of a call, so that role1 never waits for role2. "sequence" has them on one stream, "streams"
on two. Green Contexts are left out: the kernels and their grids are the same on two streams.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from warpring import Experts, gpt_oss_swiglu, moe_decode, moe_exact, pack_experts
from warpring.bench.ep_cases import FORMATS as EP_FORMATS
from warpring.bench.ep_cases import LEAST_COSINE, Verifier
from warpring.bench.ep_soak import CALLS, DrawnInputs
from warpring.bench.records import environment
from warpring.expert_parallel.problem import ActivationForm
from warpring.expert_parallel.workspace import plan_schedule
from warpring.formats import FORMATS

#: (num_tokens, hidden, intermediate, num_experts, topk): pairs of every class of the tile kernel; experts that more
#: pairs want than fit at once, among few pairs and among many; more tokens than rows of x that stay, panels of several
#: passes; more pairs than a launch takes.
SIZES = [
    (1, 96, 160, 5, 2),
    (3, 160, 96, 7, 4),
    (40, 64, 32, 3, 2),
    (70, 64, 32, 2, 2),
    (30, 64, 32, 1, 1),
    (40, 2048, 128, 4, 2),
    (300, 64, 32, 2, 2),
]
#: Of the decode paths, and of the grouped one with its further roundings: RMS error relative to the exact layer.
MOST_ERROR = {"warp": 4e-3, "tile": 4e-3, "grouped": 8e-3}
#: Ways of decode: a path, and which layout of the weights it reads.
WAYS = ("warp", "tile", "grouped", "grouped_packed")
#: Layers of expert parallelism: ragged sizes, MXFP4 and FP8; and tokens of the rank.
EP_LAYERS = [name for name in EP_FORMATS if name.startswith("h")]
EP_TOKENS = 12
#: Seconds that a role may wait: a sanitizer is slow, but whoever must be stopped by hand leaves no log.
EP_TIMEOUT = 60.0
#: In what order the roles may run; see above.
EP_MODES: tuple[Literal["sequence", "streams"], ...] = ("sequence", "streams")
#: Lines of a log: of the sanitizer's own, and of the end.
OWN_LINES, LAST_LINES = 60, 20
#: What the kernels of each part have in their names: the tools look at no others, torch's above all.
PARTS = {"decode": ("moe_", "expand_", "grouped_"), "expert_parallel": ("ep_",)}


def run_decode(formats: Sequence[str], sizes: Sequence[int], ways: Sequence[str]) -> None:
    """These formats at these of `SIZES` through these of `WAYS`; raises SystemExit on a wrong result."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    for num_tokens, hidden, intermediate, num_experts, topk in [SIZES[index] for index in sizes]:
        x = normal(num_tokens, hidden).bfloat16()
        weights, idx = normal(num_tokens, num_experts).softmax(-1).topk(topk)
        weights = weights.contiguous()
        idx[0, 0] = -1  # an unused slot
        if num_tokens > 1:
            idx[-1, -1] = num_experts  # a foreign id is skipped likewise
        exact_idx = torch.where(idx >= num_experts, -1, idx)
        for format in formats:
            experts = Experts.from_dense(
                normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5,
                normal(num_experts, hidden, intermediate) * intermediate**-0.5,
                format=format,
                activation=gpt_oss_swiglu(),
                w13_bias=normal(num_experts, 2 * intermediate),
                w2_bias=normal(num_experts, hidden),
            )
            exact = moe_exact(x, experts, exact_idx, weights)
            packed = pack_experts(experts)
            for way in ways:
                path = way.removesuffix("_packed")
                layer = packed if way in ("tile", "grouped_packed") else experts
                y = moe_decode(x, layer, idx, weights, path=path)
                error = float((y - exact).norm() / exact.norm())
                if not error < MOST_ERROR[path]:
                    sys.exit(f"{path} {format} {[num_tokens, hidden, intermediate]}: error {error:.2e}")
    torch.cuda.synchronize()
    print(f"ran {len(sizes)} sizes x {len(formats)} formats x {len(ways)} ways")


def run_expert_parallel(device: torch.device, layers: Sequence[str] = EP_LAYERS) -> None:
    """One rank, every form and mode of these layers, `CALLS` calls each; raises SystemExit on a wrong result."""
    forms: tuple[ActivationForm, ...] = ("fp8", "bf16")
    number = 0
    for name, activation, num_shared, mode in product(layers, forms, (0, 1), EP_MODES):
        options: dict[str, Any] = {"partition": mode, "timeout": EP_TIMEOUT}
        verifier = Verifier(
            name, None, device, activation=activation, num_shared=num_shared, max_tokens=EP_TOKENS, **options
        )
        with verifier.layer:
            _check_ring(verifier, mode)
            _run_calls(verifier, f"{name} {activation} shared {num_shared} {mode}")
        number += 1
    print(f"ran {number} layers of expert parallelism, {number * CALLS} calls")


def _check_ring(verifier: Verifier, mode: str) -> None:
    """Raises SystemExit where role1 would wait for role2 (see above)."""
    split, most = verifier.layer.sm_counts, verifier.problem.max_blocks
    if split is not None:
        sequence = mode == "sequence"
        slots = plan_schedule(verifier.problem, split.comm_sms, split.compute_sms, sequence=sequence).num_slots
        if slots < most:
            sys.exit(f"{mode}: {slots} ring slots for {most} blocks")


def _run_calls(verifier: Verifier, what: str) -> None:
    """`CALLS` calls, each checked; raises SystemExit on a wrong result."""
    inputs = DrawnInputs(verifier.problem, 0, verifier.device, seed=1)
    inputs.draw()
    for call, count in enumerate(inputs.counts.tolist()):
        x, topk_idx, weights = inputs.x[call], inputs.topk_idx[call], inputs.topk_weights[call]
        out = torch.full_like(x, torch.nan)
        verifier.layer(x, topk_idx, weights, inputs.counts[call : call + 1], out=out)
        outcome = verifier.compare(x[:count], topk_idx[:count], weights[:count], out[:count])
        verifier.layer.check()
        if outcome.cosine < LEAST_COSINE or not out[count:].isnan().all():
            sys.exit(f"{what}, {count} tokens: {outcome}")


def run_part(part: str, args: argparse.Namespace) -> None:
    """A part's kernels, without a sanitizer or inside of one."""
    if part == "decode":
        run_decode(args.formats, args.sizes, args.ways)
    else:
        run_expert_parallel(torch.device("cuda", 0), args.layers)


def bounded(command: Sequence[str], variables: dict[str, str], seconds: float | None) -> tuple[str, int]:
    """All that a command says, and its exit code: 124 where it was ended, with all that it started, after `seconds`."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=variables, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(f"ended after {seconds:g} s", file=said)
            code = 124
        said.seek(0)
        return said.read(), code


def told(lines: Sequence[str]) -> list[str]:
    """What a log keeps: the sanitizer's own first lines, which name a fault, and the last ones, whoever wrote them."""
    own = [line for line in lines[:-LAST_LINES] if line.startswith("=========")]
    return [*own[:OWN_LINES], *lines[-LAST_LINES:]]


def sanitize(sanitizer: str, part: str, args: argparse.Namespace) -> tuple[str, int]:
    """A log of all tools over a part, and the worst exit code."""
    if part == "decode":
        which = ["--formats", *args.formats, "--sizes", *map(str, args.sizes), "--ways", *args.ways]
    else:
        which = ["--layers", *args.layers]
    lines = [f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} " + ", ".join(f"{k} {v}" for k, v in environment().items())]
    worst = 0
    for tool in args.tool:
        command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        names = args.kernels or PARTS[part]
        command += [word for name in names for word in ("--kernel-name", f"kernel_substring={name}")]
        inside = [sys.executable, __file__, part, *which, "--inside"]
        variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        said, code = bounded([*command, *inside], variables, args.seconds)
        worst = max(worst, code)
        lines += [
            f"$ {' '.join(['compute-sanitizer', *command[1:], f'python bench/sanitize.py {part}', *which, '--inside'])}"
        ]
        lines += [*told(said.splitlines()), f"exit code {code}"]
    return "\n".join(lines) + "\n", worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", default=list(PARTS), help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="of decode")
    numbers = range(len(SIZES))
    parser.add_argument("--sizes", nargs="+", type=int, default=numbers, choices=numbers, help="of decode, in SIZES")
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, help="of decode: racecheck takes no grouped one"
    )
    parser.add_argument("--layers", nargs="+", default=EP_LAYERS, choices=EP_LAYERS, help="of expert_parallel")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="that a tool may take (default: as long as it likes)"
    )
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="to look at (default: all of ours)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="a folder for the logs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.part) - set(PARTS):
        parser.error(f"part must be one of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if args.inside:
        for part in args.part:
            run_part(part, args)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("bench/sanitize.py needs compute-sanitizer, which comes with the CUDA toolkit; none is on the PATH.")
    worst = 0
    for part in args.part:
        run_part(part, args)  # compiles the kernels, so that the sanitizer watches them alone
        text, code = sanitize(sanitizer, part, args)
        (args.output / ("sanitizer.log" if part == "decode" else f"sanitizer_{part}.log")).write_text(text)
        print(text)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
