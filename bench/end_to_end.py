"""Tokens a second of a transformers model in decode, with its experts served by each path, into end_to_end.jsonl.

    PYTHONPATH=src python bench/end_to_end.py                        Qwen3-30B-A3B: 48 layers, random weights, one GPU
    PYTHONPATH=src python bench/end_to_end.py --batches 1 --contexts 1024 --paths auto,classical

One model exists, and everything but the experts is the same memory in every form of it: `auto` has them packed for the
tile path, `warp` row-major, as the classical path. A step decodes one token a
sequence in one CUDA graph: embedding, all layers over transformers' StaticCache, logits, argmax. The cache is filled
with random keys and values up to the last slot, which the step writes; attention is torch's flash attention over all
of it, with grouped heads. Replays of the forms take turns.

Two further forms tell where the time goes: without experts (the routed experts give their input back), and without
experts and attention (likewise). Experts' share of a form is what it takes beyond the former; attention's is the
difference of the two; the rest is projections, norms, rotary embedding, router, cache update, embedding and logits.

Expert weights come in `--weight-sets` sets in turns over the layers: the experts that one set's layers hit between two
uses exceed any cache many times over, and there is room for long caches. transformers' own experts and the classical
path compute from the BF16 values of the very same quantised weights.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache
from transformers.integrations.moe import ExpertsInterface

from warpring import Experts, PackedExperts
from warpring.bench.console import words
from warpring.bench.inputs import random_experts, random_packed
from warpring.bench.layer import free_bytes
from warpring.bench.records import Record, append, record
from warpring.bench.shapes import LayerShape, parse_shape
from warpring.bench.timing import Measured, measure
from warpring.classical import prepare
from warpring.errors import WarpringError
from warpring.integrations.transformers import install_packed

RESULTS = Path(__file__).parent / "results" / "end_to_end.jsonl"
#: transformers' own: its grouped_mm and batched_mm.
THEIRS = ("grouped_mm", "batched_mm")
NO_EXPERTS, BARE = "without experts", "without experts and attention"
#: Bytes left free beside the cache: graphs' buffers, of which batched_mm's copies of weights are the largest.
RESERVE_BYTES = 8 << 30
#: A form whose experts have a lower cosine with another's computes another layer. The classical path's activations are
#: quantised: 0.999.
LEAST_COSINE = 0.99
SCALE = 0.02
T = TypeVar("T")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def give_back(module: torch.nn.Module, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
    """Experts that compute nothing."""
    return hidden_states


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one query token a sequence over a full cache: no mask, flash attention, grouped heads."""
    backends = [SDPBackend.FLASH_ATTENTION] if query.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=settings["scaling"], enable_gqa=True
        )
    return out.transpose(1, 2), None


def skip_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, None]:
    """Attention that computes nothing."""
    return query.transpose(1, 2), None


ExpertsInterface.register("bench_give_back", give_back)
# No mask is registered under these names: transformers then makes none.
AttentionInterface.register("bench_attend", attend)
AttentionInterface.register("bench_skip_attention", skip_attention)


@dataclass(frozen=True)
class Sets:
    """The sets of expert weights: as stored, and packed for the tile path (none on a CPU)."""

    stored: list[Experts]
    packed: list[PackedExperts]


def make_model(shape: LayerShape, args: argparse.Namespace, sets: list[Experts]) -> PreTrainedModel:
    """The model with random BF16 weights on the device, made one by one; its experts are BF16 copies of `sets`."""
    settings: dict[str, Any] = {"head_dim": args.head_dim, "attn_implementation": "bench_attend"}
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.topk,
        norm_topk_prob=True,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=max(args.contexts),
        **settings,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    layer = 0
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            dense = prepare(sets[layer % len(sets)])
            module.gate_up_proj = torch.nn.Parameter(dense.w13, requires_grad=False)
            module.down_proj = torch.nn.Parameter(dense.w2, requires_grad=False)
            layer += 1
            continue
        for name, weight in module.named_parameters(recurse=False):
            made = torch.ones(weight.shape, device=args.device, dtype=torch.bfloat16)
            if weight.dim() > 1:
                made.normal_(0, SCALE, generator=generator)
            setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(args.device)
    return model


def same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules on the same memory. Experts' parameters are wrapped anew, for `install` empties them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            own = hasattr(module, "gate_up_proj")
            memo[id(parameter)] = torch.nn.Parameter(parameter.data, requires_grad=False) if own else parameter
    return copy.deepcopy(model, memo)


def in_turns(names: list[str], sets: list[T]) -> dict[str, T]:
    """A set for each module, from the first again after the last."""
    return {name: sets[i % len(sets)] for i, name in enumerate(names)}


def make_forms(model: PreTrainedModel, paths: list[str], sets: Sets) -> dict[str, PreTrainedModel]:
    """A model for each path, for transformers' own experts, and for the two that tell the shares."""
    forms: dict[str, PreTrainedModel] = {}
    names = [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]
    for path in (*paths, NO_EXPERTS, BARE):
        form = forms[path] = same_weights(model)
        if path in THEIRS:
            form.set_experts_implementation(path)
        elif path in (NO_EXPERTS, BARE):
            form.set_experts_implementation("bench_give_back")
        elif path in ("auto", "tile") and sets.packed:
            install_packed(form, in_turns(names, sets.packed), path=path)
        else:
            install_packed(form, in_turns(names, sets.stored), path=path)
    forms[BARE].set_attn_implementation("bench_skip_attention")
    return forms


@dataclass(frozen=True)
class Inputs:
    """What the forms of the model share in one bucket: a filled cache, the tokens, their position."""

    cache: StaticCache
    lengths: torch.Tensor
    ids: torch.Tensor
    position: torch.Tensor
    context: int


def make_inputs(model: PreTrainedModel, batch: int, context: int, seed: int, device: torch.device) -> Inputs:
    """A cache of `context` slots, all but the last one taken."""
    config, generator = model.config, torch.Generator(device).manual_seed(seed)
    cache = StaticCache(config=config, max_cache_len=context)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, device)
    # One tensor holds the lengths of all layers, so that one launch sets them back before each step.
    lengths = torch.full((config.num_hidden_layers,), context - 1, device=device)
    layers: list[Any] = list(cache.layers)
    for layer, length in zip(layers, lengths, strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = length
    ids = torch.randint(config.vocab_size, (batch, 1), generator=generator, device=device)
    return Inputs(cache, lengths, ids, torch.full((1, 1), context - 1, device=device), context)


def step(model: PreTrainedModel, inputs: Inputs, logits: torch.Tensor, chosen: torch.Tensor) -> None:
    """Decode one token of every sequence; can be repeated, for it sets the cache's length back."""
    inputs.lengths.fill_(inputs.context - 1)
    out = model(
        input_ids=inputs.ids,
        position_ids=inputs.position,
        past_key_values=inputs.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits.copy_(out.logits[:, -1])
    torch.argmax(logits, dim=-1, out=chosen)


def compare(forms: dict[str, PreTrainedModel], steps: dict[str, Callable[[], None]]) -> float:
    """The least cosine of the first layer's experts, of any form with those of the first one; runs every step once.

    All forms hand that layer the same input. Later ones meet routings that rounding has turned at near-ties.
    """
    found = {name: first_experts(forms[name], run) for name, run in steps.items()}
    base = next(iter(forms))
    worst = 1.0
    for name, given in found.items():
        if name in (NO_EXPERTS, BARE):
            continue
        cosine = float(torch.nn.functional.cosine_similarity(given, found[base], dim=1).min().nan_to_num(-1))
        if cosine < LEAST_COSINE:
            raise WarpringError(f"end_to_end: experts {name} compute another layer than {base}: cosine {cosine:.4f}.")
        worst = min(worst, cosine)
    return worst


def first_experts(model: PreTrainedModel, run: Callable[[], None]) -> torch.Tensor:
    """Output of the first layer's routed experts in one step, FP32 [num_tokens, hidden]."""
    seen: list[torch.Tensor] = []
    module = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    hook = module.register_forward_hook(lambda _, __, output: seen.append(output.float()))
    run()
    hook.remove()
    return seen[0]


def distinct_experts(model: PreTrainedModel, run: Callable[[], None]) -> float:
    """Mean number of experts that a layer's tokens are routed to."""
    counts: list[int] = []

    def look(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts.append(int(args[1].unique().numel()))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if hasattr(m, "gate_up_proj")]
    run()
    for hook in hooks:
        hook.remove()
    return statistics.fmean(counts)


def measure_bucket(
    forms: dict[str, PreTrainedModel], inputs: Inputs, args: argparse.Namespace, shape: LayerShape
) -> list[Record]:
    """The records of one batch and context."""
    batch, vocabulary = inputs.ids.shape[0], args.vocabulary
    logits = {name: torch.empty(batch, vocabulary, device=args.device, dtype=torch.bfloat16) for name in forms}
    chosen = torch.empty(batch, device=args.device, dtype=torch.int64)
    steps = {name: partial(step, form, inputs, logits[name], chosen) for name, form in forms.items()}
    cosine = compare(forms, steps)
    base = next(iter(forms))
    experts = distinct_experts(forms[base], steps[base])
    calls = {name: [run] for name, run in steps.items()}
    # A step takes milliseconds, and every replay is preceded by another: one more warms up all there is.
    timed = measure(calls, args.device, args.repeats, warmup=1, eager=args.eager)
    note = (
        f"{args.layers} layers, {args.weight_sets} sets of expert weights, {experts:.1f} experts hit a layer, "
        f"least cosine of two paths' experts {cosine:.4f}"
    )
    return [
        to_record(name, timed, batch, inputs.context, args, shape, note)
        for name in forms
        if name not in (NO_EXPERTS, BARE)
    ]


def to_record(
    name: str,
    timed: dict[str, Measured],
    batch: int,
    context: int,
    args: argparse.Namespace,
    shape: LayerShape,
    note: str,
) -> Record:
    own = timed[name].timing
    # In this order on a quiet machine; where noise has turned two around, a share is 0 and none is below.
    without = min(timed[NO_EXPERTS].timing.p50_us, own.p50_us)
    bare = min(timed[BARE].timing.p50_us, without)
    if name in args.eager:
        note += "; called eagerly, for no CUDA graph can hold it, so its share of experts holds launches of all layers"
    return record(
        "end_to_end",
        device=args.device,
        model=shape.name,
        format=args.format,
        batch=batch,
        context=context,
        tokens_per_s=round(batch / own.p50_us * 1e6, 1),
        experts_share=round((own.p50_us - without) / own.p50_us, 4),
        attention_share=round((without - bare) / own.p50_us, 4),
        other_share=round(bare / own.p50_us, 4),
        seed=args.seed,
        note=note,
        **asdict(own),
        **({"impl": f"transformers_{name}"} if name in THEIRS else {"path": name}),
    )


def make_sets(shape: LayerShape, args: argparse.Namespace) -> Sets:
    """The sets of expert weights as the paths take them."""
    which = [(shape, args.format, args.device, seed) for seed in range(args.weight_sets)]
    packed = [random_packed(*these) for these in which] if args.device.type == "cuda" else []
    return Sets([random_experts(*these) for these in which], packed)


def trial(path: str, args: argparse.Namespace, eager: bool) -> subprocess.Popen[str]:
    """One layer, one step, in a process of its own: what a failed capture leaves behind must not meet the others."""
    small = {"layers": 1, "weight-sets": 1, "batches": 2, "contexts": min(args.contexts), "repeats": 1}
    same = {"model": args.model, "heads": args.heads, "kv-heads": args.kv_heads, "head-dim": args.head_dim}
    settings = small | same | {"vocabulary": 128, "format": args.format, "device": args.device, "paths": path}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    options += ["--eager", path] if eager else []
    command = [sys.executable, __file__, *options, "--no-trials", "--output", os.devnull]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_trials(args: argparse.Namespace, eager: bool = False) -> dict[str, subprocess.Popen[str]]:
    """A trial of each path that is to be called eagerly, or of each other one, all at once."""
    return {path: trial(path, args, eager) for path in args.paths if (path in args.eager) == eager}


def end_trials(args: argparse.Namespace, running: dict[str, subprocess.Popen[str]]) -> list[str]:
    """Leave in `args` the paths that work, with those that no graph can hold in `args.eager`; says which do not.

    Args:
        args: of the script.
        running: of `start_trials`, of paths in a graph.
    """
    said: list[str] = []
    for eager in (False, True):
        for path, process in (start_trials(args, eager) if eager else running).items():
            out = process.communicate()[0]
            if process.returncode == 0:
                continue
            last = (out.strip().splitlines() or ["no message"])[-1]
            said.append(f"{path}, {'eagerly' if eager else 'in a CUDA graph'}: {last}")
            if eager:
                args.paths.remove(path)
                args.eager.remove(path)
            else:
                args.eager.append(path)
    return said


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="experts: a name or sizes like h2048xi768xe128xk8")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--format", default="mxfp8")
    parser.add_argument("--paths", type=words, default=["auto", "warp", "classical", "grouped_mm", "batched_mm"])
    parser.add_argument("--eager", type=words, default=[], help="forms that no CUDA graph can hold")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8, 32, 16])
    parser.add_argument("--contexts", type=numbers, default=[1 << 10, 4 << 10, 16 << 10, 32 << 10])
    parser.add_argument("--weight-sets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--no-trials", action="store_true", help="trust that every path works in a CUDA graph")
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no further bucket after S seconds")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    start = time.monotonic()
    shape = parse_shape(args.model)
    # Each trial spends its time on starting; meanwhile the model is made.
    running = {} if args.no_trials else start_trials(args)
    sets = make_sets(shape, args)
    model = make_model(shape, args, sets.stored)
    left_out = [] if args.no_trials else end_trials(args, running)
    forms = make_forms(model, args.paths, sets)
    print(f"{shape.name}, {args.layers} layers, {args.format}: made in {time.monotonic() - start:.0f} s", flush=True)
    for batch in args.batches:
        for context in args.contexts:
            gc.collect()
            bucket = f"batch {batch}, context {context}"
            needed = 4 * args.layers * args.kv_heads * args.head_dim * batch * context
            free = free_bytes(args.device)
            if args.device.type == "cuda" and needed + RESERVE_BYTES > free:
                left_out.append(f"{bucket}: its cache takes {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
                continue
            if args.time_budget is not None and time.monotonic() - start > args.time_budget:
                left_out.append(f"{bucket}: the time budget is spent")
                continue
            try:
                recs = measure_bucket(forms, make_inputs(model, batch, context, args.seed, args.device), args, shape)
            except torch.OutOfMemoryError as error:
                left_out.append(f"{bucket}: {str(error).splitlines()[0]}")
                continue
            for rec in recs:
                append(args.output, rec)
                print(row(rec), flush=True)
    print("\n".join(("", "left out:", *left_out)) if left_out else "")
    return 0


def row(rec: Record) -> str:
    shares = "   ".join(f"{name} {100 * rec[f'{name}_share']:.0f} %" for name in ("experts", "attention", "other"))
    name = rec.get("path", rec["impl"])
    rate = f"{rec['tokens_per_s']:>9.1f} tokens/s   {rec['p50_us'] / 1e3:>8.3f} ms a step"
    return f"batch {rec['batch']:<4}context {rec['context']:<7}{name:<25}{rate}   {shares}"


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
