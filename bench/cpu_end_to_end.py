"""Tokens a second of a transformers model on CPU cores: its own experts against warpring's, into end_to_end_cpu.jsonl.

    PYTHONPATH=src python bench/cpu_end_to_end.py

The model has Qwen3-30B-A3B's layers at full width (hidden 2048, 128 experts of 768, 8 a token, 32 query and 4
key-value heads), but 2 of its 48 and a vocabulary of 8192; weights are random. All forms decode greedily in one
process, in turns of `--tokens` tokens, so that a drift of clocks or load touches all alike.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from warpring.bench.records import append, record
from warpring.integrations.transformers import install

RESULTS = Path(__file__).parent / "results" / "end_to_end_cpu.jsonl"
LAYERS, VOCABULARY, PROMPT = 2, 8192, 16


def make_model() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # made in BF16 at once: a copy in FP32 would take twice the memory
    try:
        return Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def decode(model: PreTrainedModel, tokens: int) -> float:
    """Tokens a second of greedy decode after a short prompt, the first token not counted."""
    ids = torch.arange(PROMPT)[None] % VOCABULARY
    out = model(ids, use_cache=True)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(tokens):
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,mxfp8,mxfp4")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    formats = args.formats.split(",")
    theirs = make_model()
    # Embeddings, attention and routers are shared; only the experts differ.
    models = {"transformers": theirs}
    for format in formats:
        ours = copy.deepcopy(theirs, {id(p): p for p in theirs.parameters()})
        install(ours, format=format)
        models[format] = ours
    rates: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(-1, args.rounds):
        for name, model in models.items():
            rate = decode(model, args.tokens)
            if round_ >= 0:
                rates[name].append(rate)
    base = statistics.median(rates["transformers"])
    for name, taken in rates.items():
        rate = statistics.median(taken)
        own = name in formats
        note = (
            f"{LAYERS} of 48 layers at full width, vocabulary {VOCABULARY}, random weights, {torch.get_num_threads()} "
            f"threads; {rate / base:.2f} x transformers' default ({theirs.config._experts_implementation})"
        )
        append(
            RESULTS,
            record(
                "end_to_end",
                device=torch.device("cpu"),
                model="qwen3-30b-a3b",
                format=name if own else "bf16",
                batch=1,
                context=PROMPT + args.tokens,
                tokens_per_s=round(rate, 2),
                repeats=args.rounds,
                seed=0,
                note=note,
                **({"path": "cores"} if own else {"impl": "transformers"}),
            ),
        )
        spread = f"[{min(taken):.1f}, {max(taken):.1f}]"
        print(f"{name:<14}{rate:>8.1f} tokens/s {spread:<18}x{rate / base:.2f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
