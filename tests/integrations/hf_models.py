"""Tiny random transformers models whose experts matter, and the FP32 truth beside them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import transformers

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK, VOCAB = 64, 96, 8, 3, 128

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    num_experts_per_tok=TOPK,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_GROUPED = dict(n_routed_experts=NUM_EXPERTS, moe_intermediate_size=INTERMEDIATE, intermediate_size=64, n_group=2)

# Per architecture: the config class and what it needs beyond the common arguments.
CONFIGS = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=NUM_EXPERTS, moe_intermediate_size=INTERMEDIATE)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            num_experts=NUM_EXPERTS,
            moe_intermediate_size=INTERMEDIATE,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "mixtral": ("MixtralConfig", dict(num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE)),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE)),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            **_GROUPED,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            head_dim=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            n_shared_experts=1,
        ),
    ),
    "glm4_moe": ("Glm4MoeConfig", dict(**_GROUPED, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)),
    "minimax_m2": ("MiniMaxM2Config", dict(num_local_experts=NUM_EXPERTS, intermediate_size=INTERMEDIATE)),
}


def make_model(architecture: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """A random model in eval mode with experts of about unit gain, so that a wrong expert shows in the logits."""
    config_class, arguments = CONFIGS[architecture]
    config = getattr(transformers, config_class)(**{**_COMMON, **arguments})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                fan_in = HIDDEN if "experts" not in name or "gate_up" in name else INTERMEDIATE
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def truth_of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same weights, computed in FP32 by the model's own eager code."""
    truth = copy.deepcopy(model).float()
    truth.set_experts_implementation("eager")
    return truth


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts modules, in layer order."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


@dataclass
class Run:
    """Logits [batch, sequence, vocab] in FP32, and each experts module's (x, topk_idx, topk_weights), in call order."""

    logits: torch.Tensor
    inputs: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]

    @property
    def routes(self) -> list[torch.Tensor]:
        """The experts each token chose, sorted: one [tokens, topk] a layer."""
        return [topk_idx.sort(-1).values.cpu() for _, (_, topk_idx, _) in self.inputs]


def run(model: transformers.PreTrainedModel, ids: torch.Tensor) -> Run:
    """One forward pass, with what the experts got."""
    inputs: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: inputs.append((module, args)))
        for module in experts_of(model)
    ]
    try:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    return Run(logits, inputs)


def same_routes(*runs: Run) -> torch.Tensor:
    """Bool [batch, sequence]: positions up to which every run chose the same experts for every token of the sequence.

    Rounding may tip a near-tie in the router; from there on two runs are different networks.
    """
    first = runs[0]
    agree = torch.ones(first.routes[0].shape[0], dtype=torch.bool)
    for other in runs[1:]:
        for mine, theirs in zip(first.routes, other.routes, strict=True):
            agree &= (mine == theirs).all(-1)
    batch, sequence = first.logits.shape[:2]
    return agree.view(batch, sequence).int().cummin(1).values.bool().to(first.logits.device)


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())
