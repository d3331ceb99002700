"""Train the tiny Qwen3-MoE of this folder from scratch: about five minutes on one data-centre GPU.

    python3 examples/train_tiny.py --minutes 4.5 --out examples/tiny-qwen3-moe

Needs torch, transformers, tokenizers, safetensors and numpy. The text is the running Python's standard library
(see `tiny_text.py`). The run ends when its time or its epochs are used up, whichever comes first; the learning rate
follows that progress. `--steps 20 --batch 2 --eval-tokens 2000` is
a smoke run for a CPU.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import tiny_card
import tiny_text
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

VOCAB_SIZE = 2048
SEQUENCE = 512
EXPERT_DROPOUT = 0.1


@dataclass
class Run:
    """What the training loop leaves behind."""

    steps: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_validation: float = math.inf
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


def model_config() -> Qwen3MoeConfig:
    """32 experts of 96, top-4: sizes that divide by 32 but not by 128, as a kernel's edge cases want."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=SEQUENCE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE; id 0 is the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[tiny_text.END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def dense_experts(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every token, unrouted ones times zero: two large GEMMs, quicker here than any gather.

    In training some of a token's expert slots are dropped, which is what keeps 32 experts from learning by heart.
    """
    gates = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts)
    gates = gates.scatter(1, top_k_index, top_k_weights.to(gates.dtype))
    gates = F.dropout(gates, EXPERT_DROPOUT, self.training)
    gate_up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.num_experts, 2, -1))
    act = F.silu(gate_up[..., 0, :]) * gate_up[..., 1, :] * gates[..., None].to(gate_up.dtype)
    return F.linear(act.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1)).to(hidden_states.dtype)


def new_model(device: torch.device, dropout: float) -> Qwen3MoeForCausalLM:
    """FP32 master weights; dropout on what each block adds to the residual stream and on the embeddings."""
    ExpertsInterface.register("dense_training", dense_experts)
    model = Qwen3MoeForCausalLM(model_config()).to(device)
    model.set_experts_implementation("dense_training")

    def drop(module: torch.nn.Module, _: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        if isinstance(out, tuple):
            return (F.dropout(out[0], dropout, module.training), *out[1:])
        return F.dropout(out, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj")):
            # Residual branches start small, as deep as the sum of them goes.
            parameter.data.mul_((2 * model.config.num_hidden_layers) ** -0.5)
    return model


def losses(model: Qwen3MoeForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, load-balancing loss) of a batch [sequences, SEQUENCE + 1] of token ids."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=batch.is_cuda):
        out = model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
    cross_entropy = F.cross_entropy(out.logits.float().flatten(0, 1), batch[:, 1:].flatten())
    balance = [balance_loss(router_logits, model.config.num_experts_per_tok) for router_logits in out.router_logits]
    return cross_entropy, torch.stack(balance).mean()


def balance_loss(router_logits: torch.Tensor, topk: int) -> torch.Tensor:
    """1 where a layer's load is even; grows as load and probability gather on few experts.

    Args:
        router_logits: [num_tokens, num_experts].
    """
    probabilities = router_logits.float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(topk).indices, 1.0 / topk)
    return probabilities.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


@torch.no_grad()
def mean_loss(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> float:
    """Mean cross entropy in nats a token, over consecutive windows of SEQUENCE tokens."""
    model.eval()
    total, count = 0.0, 0
    for window in ids.split(64 * SEQUENCE):
        rows = max(1, (len(window) - 1) // SEQUENCE)
        length = min(SEQUENCE, len(window) - 1)
        batch = window[: rows * length + 1].unfold(0, length + 1, length)
        total += float(losses(model, batch)[0]) * rows * length
        count += rows * length
    model.train()
    return total / count


def optimizer_for(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def rate(progress: float, warmup: float = 0.02) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine down to 2 %."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def train(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, validation: torch.Tensor, args: argparse.Namespace) -> Run:
    """Random windows of the packed tokens; the snapshot with the best validation loss is kept.

    The host reads the device only where it validates, about twenty times a run.
    """
    run, optimizer = Run(), optimizer_for(model, args.lr)
    generator = torch.Generator(tokens.device).manual_seed(args.seed)
    span = torch.arange(SEQUENCE + 1, device=tokens.device)
    tokens_a_step = args.batch * SEQUENCE
    max_steps = args.steps or math.ceil(args.epochs * len(tokens) / tokens_a_step)
    started, next_check, progress = time.perf_counter(), 0.05, 0.0
    model.train()
    while progress < 1:
        starts = torch.randint(len(tokens) - SEQUENCE, (args.batch, 1), device=tokens.device, generator=generator)
        cross_entropy, balance = losses(model, tokens[starts + span])
        # Strong at first, or a few experts take everything and the rest never learn; weak at the end, so that the
        # loads become as uneven as the text makes them.
        (cross_entropy + args.aux * (1 - 0.9 * progress) * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.steps += 1
        run.seconds = time.perf_counter() - started
        progress = max(run.steps / max_steps, run.seconds / (60 * args.minutes))
        if progress < min(next_check, 1.0):
            continue
        next_check = progress + 0.05
        check(model, run, validation, float(cross_entropy.detach()), float(balance.detach()), progress)
        speed = run.steps * tokens_a_step / run.seconds
        print(
            f"{progress:4.0%}  step {run.steps}/{max_steps}  {run.seconds:.0f} s  {speed:,.0f} tokens/s  "
            + "  ".join(f"{k} {v:.3f}" for k, v in run.curve[-1].items() if k not in ("step", "progress")),
            flush=True,
        )
        if not math.isfinite(run.curve[-1]["train"]):
            print("the loss is no longer finite: stopping at the best snapshot (lower --lr)", file=sys.stderr)
            break
    if not run.best_state:
        raise SystemExit("train_tiny: no finite validation loss was reached; lower --lr.")
    return run


def check(
    model: Qwen3MoeForCausalLM, run: Run, validation: torch.Tensor, train_loss: float, balance: float, progress: float
) -> None:
    """Append a point to the curve; keep the weights if none had a lower validation loss."""
    value = mean_loss(model, validation)
    run.curve.append(
        {"step": run.steps, "progress": progress, "train": train_loss, "validation": value, "balance": balance}
    )
    if value < run.best_validation:
        run.best_validation, run.best_step = value, run.steps
        run.best_state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Hugging Face layout: BF16 safetensors, config, generation config, tokenizer."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.8, top_k=50
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=tiny_text.END_OF_TEXT,
        pad_token=tiny_text.END_OF_TEXT,
        model_max_length=SEQUENCE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


@torch.no_grad()
def evaluate(out: Path, held_out: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Held-out loss and expert loads [num_layers, num_experts] (slots counted) of what lies on the disk."""
    dtype = torch.bfloat16 if held_out.is_cuda else torch.float32
    model = Qwen3MoeForCausalLM.from_pretrained(out, dtype=dtype).to(held_out.device)
    model.set_experts_implementation("dense_training")
    loads = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.int64)
    for row, layer in zip(loads, model.model.layers, strict=True):

        def count(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], row: torch.Tensor = row) -> None:
            row += inputs[1].flatten().cpu().bincount(minlength=len(row))

        layer.mlp.experts.register_forward_pre_hook(count)
    return mean_loss(model, held_out), loads


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=4.5, help="training time at most (default 4.5)")
    parser.add_argument("--epochs", type=float, default=24, help="passes over the text at most (default 24)")
    parser.add_argument("--steps", type=int, help="train this many steps instead of --epochs")
    parser.add_argument("--batch", type=int, default=32, help=f"sequences of {SEQUENCE} tokens a step (default 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    parser.add_argument(
        "--aux", type=float, default=3e-2, help="first weight of the load-balancing loss (default 3e-2)"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout on the residual branches (default 0.1)")
    parser.add_argument("--eval-tokens", type=int, help="validate and measure on this many tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    files = tiny_text.training_files()
    documents = [tiny_text.read_document(path) for path in files]
    started = time.perf_counter()
    tokenizer = train_tokenizer(documents)
    tokens, validation, held_out = (
        torch.tensor(tiny_text.encode_documents(tokenizer, texts), device=device)
        for texts in (
            documents,
            tiny_text.read_modules(tiny_text.VALIDATION),
            tiny_text.read_modules(tiny_text.HELD_OUT),
        )
    )
    validation, held_out = validation[: args.eval_tokens], held_out[: args.eval_tokens]
    print(f"{len(files)} files, {len(tokens):,} tokens, read in {time.perf_counter() - started:.0f} s", flush=True)
    model = new_model(device, args.dropout)
    run = train(model, tokens, validation, args)
    model.load_state_dict(run.best_state)
    save(model, tokenizer, args.out)
    held_out_loss, loads = evaluate(args.out, held_out)
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).cpu()
    log = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "seed": args.seed,
        "settings": {name: getattr(args, name) for name in ("minutes", "epochs", "batch", "lr", "aux", "dropout")},
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_files": len(files),
        "training_bytes": sum(len(d.encode()) for d in documents),
        "training_sha256": tiny_text.fingerprint(documents),
        "training_tokens": len(tokens),
        "steps": run.steps,
        "tokens_seen": run.steps * args.batch * SEQUENCE,
        "seconds": round(run.seconds, 1),
        "best_step": run.best_step,
        "validation_loss": run.best_validation,
        "held_out_tokens": len(held_out),
        "held_out_loss": held_out_loss,
        "held_out_unigram_loss": tiny_card.unigram_loss(counts, held_out.cpu()),
        "expert_load": loads.tolist(),
        "curve": run.curve,
        "unigram_counts": counts.tolist(),
    }
    tiny_card.write(args.out, log)
    print((args.out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
