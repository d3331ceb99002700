"""Time our paths and other libraries' MoE layers in turns, on the same weights and routings, into peers.jsonl.

    PYTHONPATH=src python bench/peers.py                                  the layers of docs/performance.md
    PYTHONPATH=src python bench/peers.py --peers vllm_triton --models qwen3-30b-a3b --formats fp8_block

A peer takes part where it can be imported: transformers (batched_mm, grouped_mm), vLLM and SGLang (Triton fused MoE),
FlashInfer (mono_moe, cutlass_fused_moe), triton_kernels (gpt-oss in MXFP4). First each runs once in a process of its
own, where its result is compared with the exact one and a CUDA graph of it is tried, so that one that fails or dies
costs nothing but itself. At the end is said, by name, which took part and why the others did not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpring.bench.adapters import ADAPTERS, find_peers, why_not
from warpring.bench.compared import PEER_LAYERS
from warpring.bench.console import HEADER, describe, row, words
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.layer import LEAST_COSINE, LayerBench, least_cosine
from warpring.bench.markdown import BATCHES
from warpring.bench.peer import Peer
from warpring.bench.records import append
from warpring.bench.shapes import parse_shape
from warpring.bench.timing import capture
from warpring.reference import moe_exact

RESULTS = Path(__file__).parent / "results" / "peers.jsonl"
#: Seconds that all trials together may take, or this share of --time-budget where that is less.
TRIAL_SECONDS, TRIAL_SHARE = 180.0, 0.6
#: How a line of a trial's output begins that says how it went.
SAID = "trial: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, help="names or sizes like h2048xi768xe128xk8, each in all --formats")
    parser.add_argument("--formats", type=words)
    parser.add_argument("--batches", type=words, default=[str(batch) for batch in BATCHES])
    parser.add_argument("--paths", type=words, default=["warp", "tile"], help="paths of ours beside the peers")
    parser.add_argument("--peers", type=words, default=list(ADAPTERS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--time-budget", type=float, metavar="S", help="start no further batch after S seconds, trials included"
    )
    parser.add_argument("--trial", action="store_true", help="try the one peer of --peers and say how it went, as JSON")
    args = parser.parse_args()
    if (args.models is None) != (args.formats is None):
        parser.error("--models and --formats go together; without both, the layers of docs/performance.md are measured")
    if args.trial:
        batches = [int(batch) for batch in args.batches]
        for said in try_peer(args.peers[0], args.models[0], args.formats[0], batches, args.device):
            print(f"\n{SAID}{json.dumps(said)}", flush=True)
        return 0
    start = time.monotonic()
    verdicts: dict[str, list[str]] = {name: [] for name in args.peers}
    layers = chosen_layers(args.models, args.formats)
    trials = {(model, format): start_trials(args, model, format, verdicts) for model, format in layers}
    seconds = TRIAL_SECONDS if args.time_budget is None else min(TRIAL_SECONDS, TRIAL_SHARE * args.time_budget)
    # Every trial ends before anything is timed.
    able = {
        key: finish_trials(running, *key, args.device, verdicts, start + seconds) for key, running in trials.items()
    }
    print(f"trials: {time.monotonic() - start:.0f} s", flush=True)
    missing: list[str] = []
    for (model, format), peers in able.items():
        missing += [f"{model} {format}: {said}" for said in measure_layer(args, model, format, peers, start)]
    if missing:
        print("\n  ".join(("\nnot measured", *missing)))
    print("\npeers")
    for name, said in verdicts.items():
        print("\n".join(f"  {name:<26}{line}" for line in said))
    return 0


def chosen_layers(models: list[str] | None, formats: list[str] | None) -> list[tuple[str, str]]:
    """Every model in every format; without both, the layers of docs/performance.md."""
    if models is None or formats is None:
        return list(PEER_LAYERS)
    return [(model, format) for model in models for format in formats]


def measure_layer(args: argparse.Namespace, model: str, format: str, peers: list[Peer], start: float) -> list[str]:
    """Append and print the records of one shape and format; says what was not measured."""
    failures: list[str] = []
    # Neither a path of ours that fails nor a peer that fails here, though not in its trial, costs others their rows.
    for paths, some in ((args.paths, peers), (args.paths[:1], peers), (args.paths, [])):
        try:
            return [*failures, *measure(args, paths, model, format, some, start)]
        except Exception as error:  # whatever a library raises
            failures.append(f"{', '.join([*paths, *(peer.name for peer in some)])}: {type(error).__name__}: {error}")
    return failures


def measure(
    args: argparse.Namespace, paths: list[str], model: str, format: str, peers: list[Peer], start: float
) -> list[str]:
    """Append and print the records; says which peers were wrong, and which batches the time did not suffice for."""
    bench = LayerBench(parse_shape(model), format, device=args.device, repeats=args.repeats)
    batches = [int(batch) for batch in args.batches]
    missing: list[str] = []
    runs = bench.run(batches, paths, peers=peers, on_wrong=missing.append)
    for index, batch in enumerate(batches):
        if args.time_budget is not None and time.monotonic() - start > args.time_budget:
            return [*missing, *(f"B={later}: left out, the time budget is spent" for later in batches[index:])]
        measured = next(runs)
        if batch == batches[0]:
            print(f"\n{describe(measured[0])}\n{HEADER}")
        for rec in measured:
            append(args.output, rec)
            print(row(rec), flush=True)
    return missing


def try_peer(name: str, model: str, format: str, batches: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Run one peer on one layer: an `error`, or after each batch the least `cosine` so far, whether it is `capturable`,
    and the batch as `most_tokens`; the last one has no `most_tokens`, for then all batches were tried."""
    shape = parse_shape(model)
    peers, left_out = find_peers([name], shape, format, device)
    if left_out:
        yield {"error": left_out[name]}
        return
    (peer,) = peers
    experts = random_experts(shape, format, device, seed=0)
    weights = peer.prepare(experts)
    cosine, capturable = 1.0, True
    # All of them: a peer may take one way for few tokens and another for many.
    for num_tokens in [batch for batch in batches if batch <= peer.most_tokens]:
        routing = make_routing(shape, num_tokens, seed=1).to(device)
        x = torch.randn(num_tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        out = torch.full_like(x, torch.nan)
        call = peer.bind(weights, x, routing.topk_idx, routing.topk_weights, out)
        given = call()
        y = given if isinstance(given, torch.Tensor) else out
        exact = moe_exact(x, experts, routing.topk_idx, routing.topk_weights, torch.float32)
        found = least_cosine(exact, y.float())
        cosine = min(cosine, found) if found == found else -1.0  # NaN is wrong too
        if device.type == "cuda" and capturable:
            try:
                capture([call]).replay()
                torch.cuda.synchronize()
            except RuntimeError:
                # What a failed capture leaves behind would disturb the next one: this process tries no other.
                capturable = False
                break
        yield {"cosine": cosine, "capturable": capturable, "most_tokens": num_tokens}
    yield {"cosine": cosine, "capturable": capturable}


def start_trials(
    args: argparse.Namespace, model: str, format: str, verdicts: dict[str, list[str]]
) -> dict[str, subprocess.Popen[str]]:
    """A process for each peer that may serve this layer, all running at once; the others' verdicts say why not."""
    layer = ["--models", model, "--formats", format, "--batches", ",".join(args.batches), "--device", str(args.device)]
    command = [sys.executable, __file__, "--trial", *layer]
    running: dict[str, subprocess.Popen[str]] = {}
    for name in args.peers:
        reason = why_not(name, parse_shape(model), format, args.device)
        if reason is None:
            pipe = subprocess.PIPE
            running[name] = subprocess.Popen([*command, "--peers", name], stdout=pipe, stderr=pipe, text=True)
        else:
            verdicts[name].append(f"{model} {format}: left out, {reason}")
    return running


def finish_trials(
    running: dict[str, subprocess.Popen[str]],
    model: str,
    format: str,
    device: torch.device,
    verdicts: dict[str, list[str]],
    deadline: float,
) -> list[Peer]:
    """The peers that ran and were right until `deadline`; adds to each one's verdicts what came of it."""
    peers: list[Peer] = []
    for name, process in running.items():
        said = outcome(process, max(0.0, deadline - time.monotonic()))
        where = f"{model} {format}"
        if said.get("error"):
            verdicts[name].append(f"{where}: left out, {said['error']}")
        elif said["cosine"] < LEAST_COSINE:
            verdicts[name].append(f"{where}: left out, its result is wrong (cosine {said['cosine']:.4f})")
        else:
            (peer,) = find_peers([name], parse_shape(model), format, device)[0]
            most = said.get("most_tokens", peer.most_tokens)
            peers.append(replace(peer, capturable=said["capturable"], most_tokens=most))
            how = "in a CUDA graph" if said["capturable"] else "call by call"
            how += f" up to B={most}, for which the time for trials sufficed" if "most_tokens" in said else ""
            verdicts[name].append(f"{where}: timed {how}, cosine {said['cosine']:.6f}, {peer.note}")
    return peers


def outcome(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """The last that a trial printed, or how it died. It is ended after so many seconds more: what it tried counts."""
    late = False
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out, err = process.communicate()
    # A library may have words of its own, also at the end.
    said = [line.removeprefix(SAID) for line in out.splitlines() if line.startswith(SAID)]
    if said and (late or process.returncode == 0):
        return json.loads(said[-1])
    last = (err.strip().splitlines() or ["no message"])[-1]
    how = "gave no answer in the time for trials" if late else f"died with exit code {process.returncode}"
    return {"error": f"{how}: {last}"}


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
