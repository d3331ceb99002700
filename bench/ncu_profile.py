"""What bounds each kernel, as Nsight Compute sees it: memory rate, issue slots, stalls, registers, into profile.jsonl.

    PYTHONPATH=src python bench/ncu_profile.py                        warp and tile at 1, 8 and 32 tokens, as root
    PYTHONPATH=src python bench/ncu_profile.py --formats mxfp4 --batches 8

ncu runs one process of ours, in which one call of each path and batch is profiled: kernels alone, one after the other,
with cold caches and free clocks (`--clock-control none`). So a kernel's time here has no neighbour to overlap with: it
is no layer's time, which bench/decode.py measures. The read peak is measured in the same process, outside any profile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from warpring import moe_decode, pack_experts
from warpring.bench.console import words
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.ncu import DRAM_READ, METRICS, KernelProfile, parse_raw
from warpring.bench.read_peak import read_peak_gbs
from warpring.bench.records import Record, append, record
from warpring.bench.shapes import parse_shape
from warpring.errors import UnsupportedError, WarpringError
from warpring.runtime.device import arch_of
from warpring.runtime.jit import compile_kernel
from warpring.runtime.launch import loaded_kernels

RESULTS = Path(__file__).parent / "results" / "profile.jsonl"
_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy")
#: The metrics by name; where this ncu knows one of them by another name, whole sections that hold them.
REQUESTS = (
    ["--section", "WarpStateStats", "--metrics", ",".join(METRICS)],
    [*(word for section in _SECTIONS for word in ("--section", section)), "--metrics", DRAM_READ],
)
#: torch's kernel that only waits: launched before each call, it tells one call's kernels from the next one's.
MARKER = "spin_kernel"
SHOWN_STALLS = 3
SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--formats", type=words, default=["mxfp8", "mxfp4", "bf16"])
    parser.add_argument("--paths", type=words, default=["warp", "tile"])
    parser.add_argument("--batches", type=words, default=["1", "8", "32"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--calls", type=Path, metavar="FILE", help="make the calls to profile and list them in FILE")
    args = parser.parse_args()
    if args.calls is not None:
        args.calls.write_text(json.dumps(make_calls(args)), encoding="utf-8")
        return 0
    calls, profiles = run_ncu(args)
    for rec in to_records(args.model, calls, profiles, args.device):
        append(args.output, rec)
        shares = f"{100 * rec['fraction_of_peak']:.0f} % of peak, issue {100 * rec['issue_share']:.0f} %"
        sizes = f"{rec['registers']} registers, {rec['smem_bytes']} B shared, {rec['spill_bytes']} B spilled"
        where = f"{rec['format']:<10}{rec['path']:<6}B={rec['num_tokens']:<4}{rec['kernel']:<26}"
        print(f"{where}{rec['p50_us']:>8.1f} us {rec['dram_gbs']:>7.0f} GB/s = {shares}   {sizes}   {rec['stalls']}")
    return 0


@torch.inference_mode()
def make_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One profiled call of each format, path and batch, in that order; what must be known of each."""
    shape = parse_shape(args.model)
    cuda = args.device.type == "cuda"
    peak = read_peak_gbs(args.device)
    made: list[dict[str, Any]] = []
    for format in args.formats:
        experts = random_experts(shape, format, args.device, seed=0)
        for path in args.paths:
            layer = pack_experts(experts) if path == "tile" else experts
            for num_tokens in map(int, args.batches):
                routing = make_routing(shape, num_tokens, seed=num_tokens).to(args.device)
                x = torch.randn(num_tokens, shape.hidden, device=args.device).bfloat16()
                out = torch.empty_like(x)
                for profiled in (False, True):  # the first call compiles
                    if profiled and cuda:
                        torch.cuda.synchronize()
                        torch.cuda.profiler.start()
                        torch.cuda._sleep(1)  # pyright: ignore[reportPrivateUsage]
                    moe_decode(x, layer, routing.topk_idx, routing.topk_weights, out=out, path=path)
                    if profiled and cuda:
                        torch.cuda.synchronize()
                        torch.cuda.profiler.stop()
                made.append({"format": format, "path": path, "num_tokens": num_tokens, "read_peak_gbs": peak})
    spills = loaded_spills() if cuda else {}
    return [call | {"spills": spills} for call in made]


def loaded_spills() -> dict[str, int]:
    """Bytes that each kernel of this process spills, the most of all its specialisations."""
    spills: dict[str, int] = {}
    for spec, device in loaded_kernels():
        found = compile_kernel(spec, arch_of(device)).spill_bytes
        spills[spec.entry] = max(found, spills.get(spec.entry, 0))
    return spills


def run_ncu(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[list[KernelProfile]]]:
    """The calls that were made under ncu, and the launches of each."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedError("profile: needs Nsight Compute's ncu on the PATH. It comes with the CUDA toolkit.")
    said = ""
    for request in REQUESTS:
        with tempfile.TemporaryDirectory() as folder:
            calls, log = Path(folder, "calls.json"), Path(folder, "ncu.csv")
            command = [
                ncu, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all",
                "--kernel-name", f"regex:moe_|{MARKER}", "--csv", "--page", "raw",
                "--print-units", "base", "--print-kernel-base", "function", *request,
                "--log-file", str(log), sys.executable, __file__, "--calls", str(calls), "--model", args.model,
                "--formats", ",".join(args.formats), "--paths", ",".join(args.paths),
                "--batches", ",".join(args.batches), "--device", str(args.device),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            text = log.read_text(encoding="utf-8") if log.exists() else ""
            said = "\n".join((text[-1500:], done.stdout[-500:], done.stderr[-500:]))
            if done.returncode == 0 and calls.exists():
                try:
                    return json.loads(calls.read_text(encoding="utf-8")), parse_raw(text, MARKER)
                except WarpringError as error:
                    said = str(error)
    raise WarpringError(f"profile: ncu gave no profile. It said:\n{said}")


def to_records(
    model: str, calls: Sequence[dict[str, Any]], profiles: Sequence[Sequence[KernelProfile]], device: torch.device
) -> list[Record]:
    """A record a launch."""
    if len(profiles) != len(calls):
        raise WarpringError(f"profile: {len(calls)} calls were made, but {len(profiles)} were profiled.")
    recs: list[Record] = []
    for call, profile in ((call, profile) for call, found in zip(calls, profiles, strict=True) for profile in found):
        stalls = ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in profile.stalls[:SHOWN_STALLS])
        recs.append(
            record(
                "profile",
                device=device,
                model=parse_shape(model).name,
                format=call["format"],
                path=call["path"],
                num_tokens=call["num_tokens"],
                kernel=profile.kernel,
                p50_us=round(profile.duration_us, 3),
                read_peak_gbs=round(call["read_peak_gbs"], 1),
                dram_gbs=round(profile.dram_gbs, 1),
                fraction_of_peak=round(profile.dram_gbs / call["read_peak_gbs"], 4),
                issue_share=round(profile.issue_share, 4),
                occupancy=round(profile.occupancy, 4),
                registers=profile.registers,
                smem_bytes=profile.smem_bytes,
                spill_bytes=call["spills"].get(profile.kernel, 0),
                stalls=stalls,
                note=f"alone, cold caches, grid {profile.grid}, block {profile.block}",
            )
        )
    return recs


if __name__ == "__main__":
    sys.exit(main())
