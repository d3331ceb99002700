"""Held-out perplexity of the tiny trained model, in every number format and by every path of this machine.

    PYTHONPATH=src python bench/perplexity.py                      all held-out text; appends to bench/results/
    PYTHONPATH=src python bench/perplexity.py --formats mxfp4 --tokens 4096 --dry-run

The text is that of the ten standard library modules which the model never saw (`examples/tiny_text.py`). They differ a
little from one Python version to another, so figures compare within one version; each record names its own.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from warpring.bench.records import append, record
from warpring.formats import FORMATS
from warpring.integrations.transformers import install

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tiny-qwen3-moe"
RESULTS = ROOT / "bench" / "results" / "perplexity.jsonl"

sys.path.insert(0, str(ROOT / "examples"))
import tiny_card  # noqa: E402
import tiny_text  # noqa: E402


def held_out_tokens(model_dir: Path, limit: int | None = None) -> torch.Tensor:
    """Ids of the held-out modules' text, [num_tokens]; at most `limit`, taken evenly from all ten modules."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    documents = tiny_text.read_modules(tiny_text.HELD_OUT)
    if limit is None:
        return torch.tensor(tiny_text.encode_documents(tokenizer, documents))
    share = limit // len(documents)
    return torch.cat([torch.tensor(tiny_text.encode_documents(tokenizer, [text])[:share]) for text in documents])


def unigram_loss(model_dir: Path, tokens: torch.Tensor) -> float:
    """Nats a token of the unigram model of the training text."""
    log = json.loads((model_dir / "training_log.json").read_text(encoding="utf-8"))
    return tiny_card.unigram_loss(torch.tensor(log["unigram_counts"]), tokens)


@torch.inference_mode()
def mean_loss(model: Any, tokens: torch.Tensor, window: int) -> float:
    """Nats a token: each but the first is predicted once, from those before it in its window of `window` tokens."""
    losses = []
    for start in range(0, len(tokens) - 1, window):
        ids = tokens[start : start + window + 1].to(model.device)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").double())
    return float(torch.cat(losses).mean())


def load_model(model_dir: Path, device: torch.device | str = "cpu") -> Any:
    """The model in BF16 with transformers' own experts; `install` switches it over."""
    return (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, local_files_only=True).to(device).eval()
    )


def main() -> int:
    gpu = torch.cuda.is_available()
    paths = ["warp", "classical"] if gpu else ["reference", "classical"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model that train_tiny.py wrote")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--paths", type=lambda text: text.split(","), default=paths)
    parser.add_argument("--tokens", type=int, help="take so many tokens instead of all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSONL file to append to")
    parser.add_argument("--dry-run", action="store_true", help="show, but append nothing")
    args = parser.parse_args()

    tokens = held_out_tokens(args.model, args.tokens)
    unigram = math.exp(unigram_loss(args.model, tokens))
    model = load_model(args.model, "cuda" if gpu else "cpu")
    note = f"held-out text of Python {platform.python_version()}; unigram model {unigram:.1f}"
    print(f"{len(tokens):,} tokens; {note}")
    with Progress(transient=True) as bar:
        for format in bar.track(args.formats, description="formats"):
            for path in args.paths:
                install(model, format=format, path=path)
                perplexity = math.exp(mean_loss(model, tokens, model.config.max_position_embeddings))
                bar.console.print(f"{format:<12} {path:<10} {perplexity:8.3f}")
                if not args.dry_run:
                    fields = {"checkpoint": args.model.name, "format": format, "path": path, "note": note}
                    append(
                        args.out,
                        record("perplexity", held_out_tokens=len(tokens), perplexity=perplexity, **fields),
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
