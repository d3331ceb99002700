"""Run both kernels of both GPU paths, in every format and at odd sizes, under compute-sanitizer.

    PYTHONPATH=src python bench/sanitize.py [--tool memcheck racecheck] [--output bench/results/sanitizer.log]

memcheck looks for reads and writes out of bounds, racecheck for hazards in shared memory. torch's caching allocator is
switched off, so that every tensor is an allocation of its own and a byte beyond its end is seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from warpring import Experts, gpt_oss_swiglu, moe_decode, moe_exact, pack_experts
from warpring.bench.records import environment
from warpring.formats import FORMATS

#: (num_tokens, hidden, intermediate, num_experts, topk)
SIZES = [(1, 96, 160, 5, 2), (3, 160, 96, 7, 4), (40, 64, 32, 3, 2), (70, 64, 32, 2, 2)]
MOST_ERROR = 4e-3


def run_layers() -> None:
    """Every format at every size through both paths; raises SystemExit on a wrong result."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    for num_tokens, hidden, intermediate, num_experts, topk in SIZES:
        x = normal(num_tokens, hidden).bfloat16()
        weights, idx = normal(num_tokens, num_experts).softmax(-1).topk(topk)
        weights = weights.contiguous()
        idx[0, 0] = -1  # an unused slot
        if num_tokens > 1:
            idx[-1, -1] = num_experts  # a foreign id is skipped likewise
        exact_idx = torch.where(idx >= num_experts, -1, idx)
        for format in FORMATS:
            experts = Experts.from_dense(
                normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5,
                normal(num_experts, hidden, intermediate) * intermediate**-0.5,
                format=format,
                activation=gpt_oss_swiglu(),
                w13_bias=normal(num_experts, 2 * intermediate),
                w2_bias=normal(num_experts, hidden),
            )
            exact = moe_exact(x, experts, exact_idx, weights)
            for path, layer in (("warp", experts), ("tile", pack_experts(experts))):
                y = moe_decode(x, layer, idx, weights, path=path)
                error = float((y - exact).norm() / exact.norm())
                if not error < MOST_ERROR:
                    sys.exit(f"{path} {format} {[num_tokens, hidden, intermediate]}: error {error:.2e}")
    torch.cuda.synchronize()
    print(f"ran {len(SIZES)} sizes x {len(FORMATS)} formats x 2 paths")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sanitizer.log")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        run_layers()
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("bench/sanitize.py needs compute-sanitizer, which comes with the CUDA toolkit; none is on the PATH.")
    run_layers()  # compiles the kernels, so that the sanitizer watches them alone
    lines = [f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} " + ", ".join(f"{k} {v}" for k, v in environment().items())]
    worst = 0
    for tool in args.tool:
        command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        if tool == "racecheck":
            command += ["--kernel-name", "kernel_substring=moe_"]
        inside = [sys.executable, __file__, "--inside"]
        variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run([*command, *inside], env=variables, capture_output=True, text=True)
        worst = max(worst, done.returncode)
        lines += [f"$ {' '.join(['compute-sanitizer', *command[1:], 'python bench/sanitize.py --inside'])}"]
        lines += [*(done.stdout + done.stderr).splitlines()[-20:], f"exit code {done.returncode}"]
    text = "\n".join(lines) + "\n"
    args.output.write_text(text)
    print(text)
    return worst


if __name__ == "__main__":
    sys.exit(main())
