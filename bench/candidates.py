"""The stream kernels, candidates for the tile path, on a GPU: right first, then timed beside tile and warp.

    PYTHONPATH=src python bench/candidates.py --compile          any machine: fills the kernel cache, touches no GPU
    PYTHONPATH=src python bench/candidates.py                    checks, then times: some 90 s of an H200 (full cache)
    PYTHONPATH=src python bench/candidates.py --formats mxfp4 --batches 1,8 --seconds 40

Checked: each format, on some odd shapes, against the exact layer, and that no configuration changes a bit.
Timed: gate_up, down and both for every configuration, replays of CUDA graphs of 24 layers in turns, four sets of
weights in rotation; the last line of a batch names the fastest. Stops after --seconds, wherever it is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from warpring import Experts, moe_decode, moe_exact, pack_experts
from warpring.bench.inputs import Routing, count_traffic, make_routing, random_experts
from warpring.bench.read_peak import read_peak_gbs
from warpring.bench.shapes import LayerShape, parse_shape
from warpring.bench.timing import Call, measure
from warpring.errors import UnsupportedError, WarpringError
from warpring.formats import FORMATS
from warpring.kernels import stream
from warpring.kernels.stream import Config, alone, shrink, together
from warpring.kernels.stream_layout import to_stream
from warpring.layout import PackedExperts
from warpring.runtime.jit import KernelSpec, compile_kernel

SETS, LAYERS, REPEATS = 4, 24, 15
#: The largest error of a layer, relative to its norm: two BF16 roundings are about 2^-9 each.
MOST_ERROR = 4e-3
#: Beside the timed layer: partial blocks, divisions without eights, an expert that more than 64 tokens want.
CHECKED = ("h2880xi2880xe8xk4", "h96xi192xe5xk2", "h160xi96xe4xk3")
CHECKED_TOKENS = (1, 40, 150)
#: Experts and tokens of the timed layer where it is checked: the exact layer is dense in FP64.
CHECKED_EXPERTS, FEW_TOKENS = 16, (1, 33)
CHECKED_CONFIGS = ("together", "alone")


def configurations(shape: LayerShape, format: str, num_tokens: int) -> dict[str, Config]:
    """The configurations that compete, by name; those that come out alike appear once."""
    sizes = (format, shape.hidden, shape.intermediate, shape.num_experts)
    whole = alone(*sizes, shape.topk, num_tokens)
    beside = together(*sizes, shape.topk, num_tokens)
    wanted = {
        "together": beside,  # both kernels on a multiprocessor
        "together-early": replace(beside, early=True),  # down starts at once
        "together-long": shrink(replace(beside, gate_up_stages=6, down_stages=2, down_run_bytes=4352), *sizes),
        "alone": whole,  # two CTAs of gate_up, 16 warps of down
        "alone-8": shrink(replace(whole, down_warps=8, down_stages=3, down_run_bytes=4352), *sizes),
        "alone-1": shrink(
            replace(whole, gate_up_ctas=1, gate_up_registers=128, gate_up_stages=9, gate_up_columns=8, down_columns=8),
            *sizes,
        ),
        "alone-3": shrink(replace(whole, gate_up_stages=3, down_warps=12, down_run_bytes=4352, down_stages=2), *sizes),
    }
    found: dict[str, Config] = {}
    for name, config in wanted.items():
        if config not in found.values():
            found[name] = config
    return found


def specs(shape: LayerShape, format: str, config: Config) -> stream.StreamSpecs:
    sizes = (format, shape.hidden, shape.intermediate, shape.num_experts)
    return stream.kernel_specs(*sizes, shape.topk, torch.int64, shape.activation.gate_fn, config)


def checked_configurations(shape: LayerShape, format: str, num_tokens: int) -> dict[str, Config]:
    found = configurations(shape, format, num_tokens)
    return {name: found[name] for name in CHECKED_CONFIGS if name in found}


def all_specs(shape: LayerShape, formats: Sequence[str], batches: Sequence[int]) -> set[KernelSpec]:
    """Every kernel of the run."""
    layers = [(shape, fmt, configurations(shape, fmt, size).values()) for fmt in formats for size in batches]
    layers += [
        (layer, fmt, checked_configurations(layer, fmt, size).values())
        for layer in map(parse_shape, CHECKED)
        for fmt in FORMATS
        for size in CHECKED_TOKENS
    ]
    few = replace(shape, num_experts=CHECKED_EXPERTS)
    layers += [(few, fmt, checked_configurations(few, fmt, size).values()) for fmt in formats for size in FEW_TOKENS]
    return {spec for layer, fmt, configs in layers for config in configs for spec in specs(layer, fmt, config).all()}


def check(shape: LayerShape, format: str, num_tokens: int, configs: dict[str, Config]) -> None:
    """Raise unless every configuration is right, and all give the same bits."""
    experts = random_experts(shape, format, "cuda", seed=num_tokens)
    packed = to_stream(pack_experts(experts))
    routing = make_routing(shape, num_tokens, "zipf", seed=num_tokens).to("cuda")
    x = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    exact = moe_exact(x, experts, routing.topk_idx, routing.topk_weights).double()
    first: torch.Tensor | None = None
    for name, config in configs.items():
        out = torch.full_like(x, torch.nan)
        stream.moe_stream(x, packed, routing.topk_idx, routing.topk_weights, out, config)
        error = float((out.double() - exact).norm() / exact.norm())
        where = f"{shape.name} {format} B={num_tokens} {name}"
        if not error < MOST_ERROR:
            raise WarpringError(f"{where}: rms error {error:.2e}, may be {MOST_ERROR}. {config}")
        if first is not None and not torch.equal(out, first):
            raise WarpringError(f"{where}: other bits than the first configuration. {config}")
        first = out


def layer_calls(
    shape: LayerShape,
    format: str,
    num_tokens: int,
    sets: Sequence[tuple[Experts, PackedExperts, PackedExperts]],
    routings: Sequence[Routing],
) -> dict[str, list[Call]]:
    """Variant -> one call a layer."""
    x = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    act = torch.zeros(num_tokens, shape.topk, shape.intermediate, device="cuda", dtype=torch.bfloat16)
    layers = [(*sets[i % len(sets)], routing) for i, routing in enumerate(routings)]
    # Called bare: what moe_decode checks and the scratch buffer cost a graph nothing.
    calls: dict[str, list[Call]] = {
        "tile": [_call(moe_decode, x, tiled, r, out, path="tile") for _, tiled, _, r in layers],
        "warp": [_call(moe_decode, x, experts, r, out, path="warp") for experts, _, _, r in layers],
    }
    for name, config in configurations(shape, format, num_tokens).items():
        built = specs(shape, format, config)
        calls[f"{name} both"] = [_call(stream.moe_stream, x, packed, r, out, config) for _, _, packed, r in layers]
        calls[f"{name} gate_up"] = [
            _bare(stream.launch_gate_up, built, x, packed, r.topk_idx, act) for _, _, packed, r in layers
        ]
        calls[f"{name} down"] = [
            _bare(stream.launch_down, built, act, packed, r.topk_idx, r.topk_weights, out) for _, _, packed, r in layers
        ]
    return calls


def _call(
    layer: Callable[..., object],
    x: torch.Tensor,
    experts: object,
    routing: Routing,
    out: torch.Tensor,
    config: Config | None = None,
    path: str | None = None,
) -> Call:
    if path is not None:
        return lambda: layer(x, experts, routing.topk_idx, routing.topk_weights, out=out, path=path)
    return lambda: layer(x, experts, routing.topk_idx, routing.topk_weights, out, config)


def _bare(kernel: Callable[..., None], *args: object) -> Call:
    return lambda: kernel(*args)


def time_format(args: argparse.Namespace, shape: LayerShape, format: str, peak_gbs: float, until: float) -> None:
    """Time every batch of one format and print what came out."""
    sets: list[tuple[Experts, PackedExperts, PackedExperts]] = []
    for seed in range(SETS):
        experts = random_experts(shape, format, "cuda", seed)
        tiled = pack_experts(experts)
        sets.append((experts, tiled, to_stream(tiled)))
    for num_tokens in args.batches:
        if time.monotonic() > until:
            print(f"out of time before {format} B={num_tokens}", flush=True)
            return
        routings = [make_routing(shape, num_tokens, args.routing, seed=i).to("cuda") for i in range(LAYERS)]
        calls = layer_calls(shape, format, num_tokens, sets, routings)
        measured = measure(calls, torch.device("cuda"), REPEATS)
        unique = sum(count_traffic(sets[0][0], r.topk_idx).unique_bytes for r in routings) / LAYERS
        floor = unique / peak_gbs / 1e3
        print(f"{format} B={num_tokens}: floor {floor:.1f} us", flush=True)
        for name, result in measured.items():
            p50 = result.timing.p50_us
            share = "" if name.endswith(("gate_up", "down")) else f"   {100 * floor / p50:.0f} % of peak"
            print(f"    {name:<22}{p50:8.1f} us{share}", flush=True)
            line = {
                "format": format,
                "num_tokens": num_tokens,
                "variant": name,
                "p50_us": p50,
                "floor_us": round(floor, 2),
            }
            with args.output.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line | {"shape": shape.size, "routing": args.routing}) + "\n")
        best = min((name for name in measured if name.endswith("both")), key=lambda name: measured[name].timing.p50_us)
        config = configurations(shape, format, num_tokens)[best.removesuffix(" both")]
        print(f"    fastest: {best.removesuffix(' both')} = {config}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["mxfp8", "mxfp4", "bf16"])
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform")
    parser.add_argument("--seconds", type=float, default=240, help="start nothing new after that long")
    parser.add_argument("--compile", action="store_true", help="only compile, for --arch")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=None, help="processes that compile")
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument(
        "--output", type=Path, default=Path("candidates.jsonl"), help="one JSON line a figure is appended"
    )
    args = parser.parse_args()
    start = time.monotonic()
    shape = parse_shape(args.model)
    wanted = sorted(all_specs(shape, args.formats, args.batches), key=repr)
    with ProcessPoolExecutor(args.jobs) as pool:
        cubins = list(pool.map(compile_kernel, wanted, [args.arch] * len(wanted)))
    print(f"{len(cubins)} kernels compiled or found after {time.monotonic() - start:.0f} s", flush=True)
    if args.compile:
        return 0
    if not torch.cuda.is_available():
        raise UnsupportedError("bench/candidates.py: needs a CUDA GPU; give --compile where there is none.")
    start = time.monotonic()
    if not args.no_check:
        for layer in map(parse_shape, CHECKED):
            for fmt in FORMATS:
                for size in CHECKED_TOKENS:
                    check(layer, fmt, size, checked_configurations(layer, fmt, size))
        few = replace(shape, num_experts=CHECKED_EXPERTS)
        for fmt in args.formats:
            for size in FEW_TOKENS:
                check(few, fmt, size, checked_configurations(few, fmt, size))
        print(f"all configurations right, and alike in every bit, after {time.monotonic() - start:.0f} s", flush=True)
    peak_gbs = read_peak_gbs(torch.device("cuda"))
    print(f"read peak {peak_gbs:.0f} GB/s", flush=True)
    for fmt in args.formats:
        with torch.inference_mode():
            time_format(args, shape, fmt, peak_gbs, start + args.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
