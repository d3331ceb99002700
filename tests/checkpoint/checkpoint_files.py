"""Small checkpoints for the tests: transformers' own models saved by transformers, and hand-written ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from warpring import Experts
from warpring.formats import QuantizedTensor

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 48,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 96, "intermediate_size": 128}
_NARROW = {"intermediate_size": 96}
_GROUPED = {"n_routed_experts": 5, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}

#: model_type -> config of a tiny model; intermediate 96 and hidden 64 differ, so that no transposition goes unseen.
CONFIGS: dict[str, dict[str, object]] = {
    "qwen3_moe": {**_MOE, "num_experts": 5},
    "qwen3_next": {**_MOE, "num_experts": 5, "shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": {**_MOE, "num_experts": 5, "shared_expert_intermediate_size": 32},
    "olmoe": {**_NARROW, "num_experts": 5},
    "mixtral": {**_NARROW, "num_local_experts": 5},
    "minimax_m2": {**_NARROW, "num_local_experts": 5},
    "deepseek_v3": {**_MOE, **_GROUPED, **_MLA},
    "glm4_moe": {**_MOE, **_GROUPED},
    "gpt_oss": {**_NARROW, "num_local_experts": 5},
    "gemma4_text": {
        **_MOE,
        "num_experts": 5,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "vocab_size_per_layer_input": 48,
        "global_head_dim": 32,
    },
}
INTERLEAVED = ("gpt_oss",)
WITH_DENSE_FIRST_LAYER = ("deepseek_v3", "glm4_moe")


def tiny_model(model_type: str, seed: int = 0) -> torch.nn.Module:
    """A transformers model whose parameters, biases too, are random BF16 numbers held in FP32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_COMMON, **CONFIGS[model_type]})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).mul(0.5).bfloat16())
    return model.eval()


def save_pretrained(model: torch.nn.Module, path: Path, max_shard_size: str = "5GB") -> Path:
    """As users do it: BF16, transformers' own naming."""
    model.bfloat16().save_pretrained(path, max_shard_size=max_shard_size)
    model.float()
    return path


def experts_modules(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Layer -> transformers' module that holds the routed experts (`gate_up_proj`, `down_proj`)."""
    found: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and name.endswith(".experts"):
            found[int(name.split("layers.")[1].split(".")[0])] = module
    return found


def write(path: Path, config: Mapping[str, object], *shards: Mapping[str, torch.Tensor]) -> Path:
    """A hand-written checkpoint: one file, or as many indexed shards as are given."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file({name: tensor.contiguous() for name, tensor in shards[0].items()}, path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, **changes: object) -> None:
    """Set keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read without warpring."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(left: Experts, right: Experts) -> None:
    """Same format, shapes, activation and every stored bit."""
    assert left.activation == right.activation
    for one, other in ((left.w13, right.w13), (left.w2, right.w2)):
        assert (one.format, one.shape) == (other.format, other.shape)
        for a, b in zip(one.tensors(), other.tensors(), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(bits(a), bits(b))
    for a, b in ((left.w13_bias, right.w13_bias), (left.w2_bias, right.w2_bias)):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


def qwen3_config(*, num_experts: int, intermediate: int, hidden: int, layers: int = 1) -> dict[str, object]:
    """The keys of config.json that a checkpoint without a model behind it needs."""
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "num_experts": num_experts,
        "moe_intermediate_size": intermediate,
        "hidden_size": hidden,
    }


def per_expert(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    *,
    names: Mapping[str, str],
    layer: str = "model.layers.0.mlp.",
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, torch.Tensor]:
    """Quantised weights, a tensor an expert and projection; `names` maps data, scale, global_scale to suffixes."""
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(gate_up.shape[0]):
        for leaf, stored in zip(leaves, (gate_up[expert][0], gate_up[expert][1], down[expert]), strict=True):
            for part, suffix in names.items():
                tensor = getattr(stored, part)
                tensors[f"{layer}experts.{expert}.{leaf}.{suffix}"] = tensor.clone()
    return tensors
