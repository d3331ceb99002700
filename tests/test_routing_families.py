"""Routing against transformers: what each model family's MoE block hands to its experts, `Router` must hand too."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from warpring.routing import Router

# FP32 against FP32 through another order of operations: exp, a sum of at most 16 terms, a division, a product.
WEIGHT_RTOL = 2e-6
E = 32


def random_logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(48, E, generator=torch.Generator().manual_seed(seed)) * scale


def random_bias(seed: int) -> torch.Tensor:
    return torch.randn(E, generator=torch.Generator().manual_seed(seed)) * 0.2


@dataclass
class Family:
    """A transformers MoE block: its module, the names of its config and block, and what its config needs."""

    module: str
    config: str
    block: str
    fields: dict[str, Any] = field(default_factory=dict)
    block_args: tuple[int, ...] = ()
    biased: bool = False

    def build(self) -> tuple[Any, torch.nn.Module]:
        transformers = pytest.importorskip("transformers")
        package = f"transformers.models.{self.module}"
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"transformers {transformers.__version__} has no {self.module}")
        config = getattr(importlib.import_module(package), self.config)(hidden_size=E, **self.fields)
        modeling = importlib.import_module(f"{package}.modeling_{self.module}")
        return config, getattr(modeling, self.block)(config, *self.block_args).eval()


def _softmax(module: str, config: str, block: str, **fields: Any) -> Family:
    return Family(module, config, block, {"num_experts": E, "moe_intermediate_size": 8, **fields})


def _deepseek(module: str, config: str, block: str, **fields: Any) -> Family:
    sizes = {"n_routed_experts": E, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "n_shared_experts": 1}
    return Family(module, config, block, {**sizes, "routed_scaling_factor": 2.5, **fields}, biased=True)


GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
FAMILIES = {
    "qwen2_moe": Family(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {"num_experts": E, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "qwen3_moe": _softmax("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", norm_topk_prob=True),
    "qwen3_moe_raw": _softmax("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", norm_topk_prob=False),
    "qwen3_next": _softmax("qwen3_next", "Qwen3NextConfig", "Qwen3NextSparseMoeBlock"),
    "qwen3_5_moe": _softmax("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock"),
    "mixtral": Family(
        "mixtral", "MixtralConfig", "MixtralSparseMoeBlock", {"num_local_experts": E, "intermediate_size": 8}
    ),
    "gpt_oss": Family("gpt_oss", "GptOssConfig", "GptOssMLP", {"num_local_experts": E, "intermediate_size": 8}),
    "deepseek_v3": _deepseek("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", **GROUPS),
    "deepseek_v3_raw": _deepseek(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", **GROUPS | {"norm_topk_prob": False}
    ),
    "deepseek_v32": _deepseek("deepseek_v32", "DeepseekV32Config", "DeepseekV32MoE", **GROUPS),
    "glm4_moe": _deepseek("glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE"),
    "glm4_moe_lite": _deepseek("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteMoE"),
    "glm_moe_dsa": _deepseek("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaMoE"),
    "minimax_m2": Family(
        "minimax_m2",
        "MiniMaxM2Config",
        "MiniMaxM2SparseMoeBlock",
        {"num_local_experts": E, "intermediate_size": 8},
        biased=True,
    ),
    "deepseek_v4": Family(
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4SparseMoeBlock",
        {"n_routed_experts": E, "moe_intermediate_size": 8, "mlp_layer_types": ["moe"], "num_hidden_layers": 1},
        block_args=(0,),
        biased=True,
    ),
}


class Recorder(torch.nn.Module):
    """Stands where a block's experts were and keeps the routing that they were given."""

    def forward(self, hidden: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        self.routing = (topk_idx, topk_weights)
        return torch.zeros_like(hidden)


def route_with_block(
    block: Any, logits: torch.Tensor, bias: torch.Tensor | None, **inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing that a transformers block gives its experts where its router's logits are `logits`."""
    gate = block.router if hasattr(block, "router") else block.gate
    torch.nn.init.eye_(gate.weight)
    if getattr(gate, "bias", None) is not None:
        torch.nn.init.zeros_(gate.bias)
    if bias is not None:
        owner = gate if hasattr(gate, "e_score_correction_bias") else block
        owner.e_score_correction_bias.copy_(bias)
    block.experts = Recorder()
    with torch.no_grad():
        block(logits[None], **inputs)
    return block.experts.routing


def by_id(topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same routing with each token's slots in the order of ids: the modules promise no order of their own."""
    ids, order = topk_idx.long().sort(dim=-1)
    return ids, topk_weights.gather(1, order)


every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_routing_equals_transformers_on_random_scores(name: str, scale: float) -> None:
    family = FAMILIES[name]
    config, block = family.build()
    logits = random_logits(1, scale=scale)
    bias = random_bias(2) if family.biased else None

    expected_idx, expected_weights = by_id(*route_with_block(block, logits, bias))
    topk_idx, topk_weights = by_id(*Router.from_config(config).route(logits, bias))

    assert torch.equal(topk_idx, expected_idx)
    torch.testing.assert_close(topk_weights, expected_weights, rtol=WEIGHT_RTOL, atol=0)


@every_family
def test_routing_equals_transformers_up_to_the_choice_among_tied_scores(name: str) -> None:
    family = FAMILIES[name]
    config, block = family.build()
    logits = torch.randint(0, 3, (48, E), generator=torch.Generator().manual_seed(3)).float()
    # Equal within a group and far apart between groups: which groups are chosen is no tie, so that weights must agree.
    bias = torch.arange(4).float().repeat_interleave(E // 4) * 10 if family.biased else None

    _, expected = route_with_block(block, logits, bias)
    _, topk_weights = Router.from_config(config).route(logits, bias)

    torch.testing.assert_close(topk_weights.sort(dim=-1).values, expected.sort(dim=-1).values, rtol=WEIGHT_RTOL, atol=0)


def test_routing_equals_transformers_on_bf16_logits_up_to_their_rounding_of_the_weights() -> None:
    config, block = FAMILIES["qwen3_moe"].build()
    logits = random_logits(4).bfloat16()

    _, expected = route_with_block(block.bfloat16(), logits, None)
    _, topk_weights = Router.from_config(config).route(logits)

    assert topk_weights.dtype == torch.float32
    # BF16 logits tie often, so the multiset of weights is compared; the block rounds them to BF16, we do not.
    torch.testing.assert_close(
        topk_weights.sort(dim=-1).values, expected.float().sort(dim=-1).values, rtol=2**-8, atol=0
    )


def test_weights_for_equals_the_hash_layers_of_deepseek_v4() -> None:
    family = FAMILIES["deepseek_v4"]
    family = Family(**{**vars(family), "fields": {**family.fields, "mlp_layer_types": ["hash_moe"], "vocab_size": 50}})
    config, block = family.build()
    generator = torch.Generator().manual_seed(5)
    table = torch.stack([torch.randperm(E, generator=generator)[: config.num_experts_per_tok] for _ in range(50)])
    block.gate.tid2eid.copy_(table)
    input_ids = torch.randint(0, 50, (1, 48), generator=generator)
    logits = random_logits(6)

    expected_idx, expected = route_with_block(block, logits, None, input_ids=input_ids)
    weights = Router.from_config(config).weights_for(logits, table[input_ids[0]])

    assert torch.equal(expected_idx, table[input_ids[0]])
    torch.testing.assert_close(weights, expected, rtol=WEIGHT_RTOL, atol=0)
