"""The tiny model's card: `training_log.json` for programs, `README.md` for people, from the same facts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

_BARS = " ▁▂▃▄▅▆▇█"
_EDGES = (0.25, 0.5, 1.0, 2.0, 4.0)


def unigram_loss(counts: torch.Tensor, tokens: torch.Tensor) -> float:
    """Nats a token of the unigram model with add-one smoothing: what knowing only the frequencies gives.

    Args:
        counts: [vocab] occurrences in the training text.
        tokens: [num_tokens] ids to score; the first is not scored, as a language model cannot score it.
    """
    log_probability = (counts.double() + 1).log() - (counts.sum().double() + len(counts)).log()
    return -float(log_probability[tokens[1:]].mean())


def load_table(loads: Sequence[Sequence[int]]) -> str:
    """Text table of one row a layer: how uneven its expert loads are, their histogram, and a bar an expert."""
    names = [f"<{_EDGES[0]:g}", *(f"{a:g}-{b:g}" for a, b in itertools.pairwise(_EDGES)), f">={_EDGES[-1]:g}"]
    lines = ["layer  min/mean  max/mean  " + "".join(f"{name:>9}" for name in names) + "  load of each expert"]
    for layer, row in enumerate(loads):
        mean = sum(row) / len(row)
        buckets = [0] * (len(_EDGES) + 1)
        for load in row:
            buckets[sum(load >= edge * mean for edge in _EDGES)] += 1
        bars = "".join(_BARS[math.ceil(load / max(row) * (len(_BARS) - 1))] for load in row)
        lines.append(
            f"{layer:>5}  {min(row) / mean:8.2f}  {max(row) / mean:8.2f}  "
            + "".join(f"{count:>9}" for count in buckets)
            + f"  {bars}"
        )
    return "\n".join(lines)


def write(out: Path, log: dict) -> None:
    """Write `training_log.json` and `README.md` into `out`."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in log.items())
    (out / "training_log.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    (out / "README.md").write_text(card(log), encoding="utf-8")


def card(log: dict) -> str:
    """The model card in Markdown."""
    where = log["gpu"] or "CPU"
    loss, unigram = log["held_out_loss"], log["held_out_unigram_loss"]
    seen = f"{log['tokens_seen'] / 1e6:.1f} M tokens seen ({log['tokens_seen'] / log['training_tokens']:.1f} epochs)"
    best = f"step {log['best_step']:,} had the lowest validation loss, {log['validation_loss']:.3f} nats a token"
    settings = ", ".join(f"{name} {value:g}" for name, value in log["settings"].items())
    return f"""# tiny-qwen3-moe

A `Qwen3MoeForCausalLM` of {log["parameters"] / 1e6:.2f} M parameters in BF16, trained from scratch on Python's standard
library: small enough to lie in a repository, and with a router that has learned to choose. It exists to run and to test
MoE kernels on something real. What it writes looks like Python and means little.

4 layers, hidden 160, 8 query and 2 key/value heads of 32, 32 experts of intermediate 96, top-4 renormalised, vocabulary
{len(log["unigram_counts"])} (byte-level BPE), context 512, tied embeddings.

## Data

Sources and `pydoc` language reference of Python {log["python"]}: {log["training_files"]} files,
{log["training_bytes"] / 1e6:.2f} MB, {log["training_tokens"]:,} tokens; third-party packages and tests are left out.
The text is under the PSF licence; its SHA-256 is `{log["training_sha256"]}`.
Never trained on: ten modules that choose the snapshot and ten that are measured below (`examples/tiny_text.py` names
them).

## Training

`examples/train_tiny.py` on {where}, torch {log["torch"]}, transformers {log["transformers"]}: {log["steps"]:,} steps in
{log["seconds"]:g} s, {seen}, AdamW, cosine schedule, seed {log["seed"]}
({settings}).
The snapshot of {best}, and is the one kept.

## Held-out text

{log["held_out_tokens"]:,} tokens; the weights as stored, in BF16, windows of 512 tokens.

| | nats a token | perplexity |
|---|---:|---:|
| this model | {loss:.3f} | {math.exp(loss):.2f} |
| unigram model of the training text | {unigram:.3f} | {math.exp(unigram):.1f} |

## Expert load on the held-out text

Number of experts by load over the layer's mean load; the bars are the experts in order, the highest the most used.

```
{load_table(log["expert_load"])}
```

Every figure here and the learning curve: `training_log.json`.
"""
