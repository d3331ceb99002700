"""Measure one MoE layer on CPU cores against torch's own BF16 forms, interleaved, into bench/results/decode_cpu.jsonl.

    PYTHONPATH=src python bench/cpu_decode.py                                       Qwen3-30B-A3B, all formats
    PYTHONPATH=src python bench/cpu_decode.py --models gpt-oss-20b --formats mxfp4 --batches 1,4

Every round has routings of its own and times each form once, in an order drawn anew, so that a drift of clocks or load
touches all alike. Right before, each form runs with another routing for 10 ms: it finds its own threads awake, and
those of the form before it asleep. The read peak (best sum over a buffer far above any cache) is measured in the same
rounds. Torch's forms compute from BF16 weights; `torch_eager` is a loop over the experts in use, `torch_grouped_mm`
sorts and multiplies group by group, `torch_batched_mm` copies the experts of each slot. onnxruntime and llama.cpp take
part where they can be imported (cpu_peers.py); who does not is said by name. Afterwards `python -m
warpring.bench.tables` writes the tables of docs/cores.md, and `python bench/plots.py` the plots.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from cpu_peers import Layer, PeerForm, peer_forms

from warpring import Experts, moe_decode
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.records import FORMATS, append, record
from warpring.bench.shapes import LayerShape, parse_shape
from warpring.bench.timing import percentiles
from warpring.kernels.cores.engine import processor, unusable_reason

RESULTS = Path(__file__).parent / "results" / "decode_cpu.jsonl"
PROBE_BYTES = 256 << 20
#: batched_mm copies every slot's weights: left out where that would take more than this.
MOST_COPIED_BYTES = 1 << 30
#: Libraries' idle threads spin for milliseconds before they sleep.
SETTLE_SECONDS = 0.01
#: Of a form that rounds weights to 4 bits and activations to 8.
LEAST_COSINE = 0.95


def torch_forms(experts: Experts) -> dict[str, Layer]:
    """The three ways in which torch code computes this layer, as transformers writes them, from BF16 weights."""
    w13, w2, act = experts.w13.data.flatten(1, 2), experts.w2.data, experts.activation
    b13 = None if experts.w13_bias is None else experts.w13_bias.flatten(1).bfloat16()
    b2 = None if experts.w2_bias is None else experts.w2_bias.bfloat16()

    def eager(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for e in idx.unique().tolist():
            tokens, slots = (idx == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], w13[e], None if b13 is None else b13[e]).chunk(2, dim=-1)
            out = F.linear(act(gate, up), w2[e], None if b2 is None else b2[e])
            y.index_add_(0, tokens, out * weights[tokens, slots, None].to(x.dtype))
        return y

    def grouped(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = idx.flatten()
        order = flat.argsort()
        tokens, ids = order // idx.shape[1], flat[order]
        counts = torch.histc(ids.float(), bins=experts.num_experts, min=0, max=experts.num_experts - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate_up = F.grouped_mm(x[tokens], w13.mT, offs=offsets)
        gate, up = (gate_up if b13 is None else gate_up + b13[ids]).chunk(2, dim=-1)
        out = F.grouped_mm(act(gate, up), w2.mT, offs=offsets)
        out = (out if b2 is None else out + b2[ids]) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add_(0, tokens, out)

    def batched(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids = idx.flatten()
        gate_up = torch.bmm(w13[ids], x.repeat_interleave(idx.shape[1], 0)[:, :, None])[:, :, 0]
        gate, up = (gate_up if b13 is None else gate_up + b13[ids]).chunk(2, dim=-1)
        out = torch.bmm(w2[ids], act(gate, up)[:, :, None])[:, :, 0]
        out = (out if b2 is None else out + b2[ids]) * weights.flatten()[:, None].to(x.dtype)
        return out.view(*idx.shape, -1).sum(1)

    return {"torch_eager": eager, "torch_grouped_mm": grouped, "torch_batched_mm": batched}


def ours(experts: Experts) -> Layer:
    return lambda x, idx, weights: moe_decode(x, experts, idx, weights, path="cores")


def measure(
    shape: LayerShape,
    formats: list[str],
    batch: int,
    rounds: int,
    layers: dict[str, Experts],
    peers: dict[str, PeerForm],
) -> None:
    """Time every form `rounds` times; append and print the records."""
    forms = {format: ours(layers[format]) for format in formats}
    forms |= torch_forms(layers["bf16"]) | {name: peer.run for name, peer in peers.items()}
    if batch * shape.topk * layers["bf16"].bytes_per_expert > MOST_COPIED_BYTES:
        del forms["torch_batched_mm"]
    check(shape, batch, forms, formats, layers, peers)
    taken: dict[str, list[float]] = {name: [] for name in forms}
    experts: list[int] = []
    probe, peaks = torch.ones(PROBE_BYTES // 8, dtype=torch.int64), [0.0]
    for index in range(rounds):
        warm, timed = (make_routing(shape, batch, seed=2 * index + i) for i in (0, 1))
        x = torch.randn(batch, shape.hidden, generator=torch.Generator().manual_seed(index)).bfloat16()
        experts.append(len(timed.topk_idx.unique()))
        start = time.perf_counter()
        probe.sum()
        peaks.append(PROBE_BYTES / (time.perf_counter() - start) / 1e9)
        for name in random.Random(index).sample(list(forms), len(forms)):
            start = time.perf_counter()
            while time.perf_counter() - start < SETTLE_SECONDS:
                forms[name](x, warm.topk_idx, warm.topk_weights)
            start = time.perf_counter()
            forms[name](x, timed.topk_idx, timed.topk_weights)
            taken[name].append((time.perf_counter() - start) * 1e6)
    fastest = min(statistics.median(taken[name]) for name in forms if name.startswith("torch_"))
    for name in forms:
        timing, peer = percentiles(taken[name]), peers.get(name)
        format = name if name in formats else "bf16" if peer is None else peer.like
        weights = 3 * shape.hidden * shape.intermediate
        expert_bytes = layers[format].bytes_per_expert if peer is None else weights * peer.bits / 8
        bytes_ = statistics.fmean(experts) * expert_bytes
        rec = record(
            "decode",
            device=torch.device("cpu"),
            model=shape.name,
            format=format,
            num_tokens=batch,
            topk=shape.topk,
            routing="uniform",
            seed=0,
            unique_bytes=round(bytes_),
            read_peak_gbs=round(max(peaks), 1),
            fraction_of_peak=round(bytes_ / timing.p50_us / 1e3 / max(peaks), 4),
            note=f"{torch.get_num_threads()} threads; fastest torch form / this = {fastest / timing.p50_us:.2f}; "
            f"processor {processor_name()}; median of the read rate {statistics.median(peaks[1:]):.1f} GB/s",
            **({"path": "cores"} if name in formats else {"impl": name}),
            **vars(timing),
        )
        append(RESULTS, rec)
        label = f"{shape.name:<16}B={batch:<4}{name:<22}"
        rate = f"{bytes_ / timing.p50_us / 1e3:>7.1f} GB/s = {100 * rec['fraction_of_peak']:.1f} % of {max(peaks):.1f}"
        spread = f"[{timing.p10_us:.0f}, {timing.p90_us:.0f}]"
        print(f"{label}{timing.p50_us:>10.0f} us {spread:<18}{rate}   x{fastest / timing.p50_us:.2f}", flush=True)


def check(
    shape: LayerShape,
    batch: int,
    forms: dict[str, Layer],
    formats: list[str],
    layers: dict[str, Experts],
    peers: dict[str, PeerForm],
) -> None:
    """Each form that is not ours against ours of the format whose numbers it has."""
    routing = make_routing(shape, batch, seed=0)
    x = torch.randn(batch, shape.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, form in forms.items():
        if name not in formats:
            like = layers[peers[name].like if name in peers else "bf16"]
            y, expected = (f(x, routing.topk_idx, routing.topk_weights).float() for f in (form, ours(like)))
            cosine = F.cosine_similarity(y, expected, dim=1).min()
            if not cosine > LEAST_COSINE:
                sys.exit(f"{name} computes another layer: cosine {cosine:.4f}")


def processor_name() -> str:
    """LLVM's name of the processor, where the kernels can be compiled."""
    return processor() if unusable_reason() is None else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b", help="comma-separated names or sizes")
    parser.add_argument("--formats", default="bf16,mxfp8,mxfp4,nvfp4,fp8_block,fp8_channel")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave onnxruntime and llama.cpp out")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if not set(formats) <= set(FORMATS):
        parser.error(f"--formats must hold {', '.join(FORMATS)}")
    for model in args.models.split(","):
        shape = parse_shape(model)
        layers = {format: random_experts(shape, format, "cpu", seed=0) for format in {"bf16", *formats}}
        peers, missing = peer_forms(layers, shape.topk) if args.peers else ({}, {})
        for name, reason in missing.items():
            print(f"{shape.name:<16}{name} takes no part: {reason}")
        for batch in args.batches.split(","):
            measure(shape, formats, int(batch), args.rounds, layers, peers)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
