"""Checkpoints that transformers saves load as the very weights, activations and biases of the model that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    CONFIGS,
    INTERLEAVED,
    WITH_DENSE_FIRST_LAYER,
    all_tensors,
    assert_same_bits,
    bits,
    experts_modules,
    save_pretrained,
    tiny_model,
    write,
)
from safetensors.torch import load_file

from warpring import Experts, moe_exact
from warpring.checkpoint import Checkpoint

Saved = tuple[torch.nn.Module, Path]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model = tiny_model(request.param)
    return model, save_pretrained(model, tmp_path_factory.mktemp("saved") / request.param)


def gate_first(module: torch.nn.Module, model_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [E, 2I, H], w2 [E, H, I]) of a transformers module, gate rows first."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if model_type in INTERLEAVED:
        gate_up, down = gate_up.mT, down.mT
        gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
    return gate_up, down


def test_layers_with_experts_are_those_of_the_model(saved: Saved) -> None:
    model, path = saved
    checkpoint = Checkpoint(path)
    assert checkpoint.moe_layers == sorted(experts_modules(model))
    assert checkpoint.moe_layers == ([1] if path.name in WITH_DENSE_FIRST_LAYER else [0, 1])


def test_weights_are_those_of_the_model_bit_by_bit(saved: Saved) -> None:
    model, path = saved
    checkpoint = Checkpoint(path)
    for layer, module in experts_modules(model).items():
        experts = checkpoint.load_experts(layer)
        assert (experts.format, experts.num_experts, experts.intermediate, experts.hidden) == ("bf16", 5, 96, 64)
        w13, w2 = gate_first(module, path.name)
        loaded_w13, loaded_w2 = experts.dequantize()
        assert torch.equal(loaded_w13, w13)
        assert torch.equal(loaded_w2, w2)


def test_layer_computes_what_the_model_computes(saved: Saved) -> None:
    model, path = saved
    checkpoint = Checkpoint(path)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 64, generator=generator)
    topk_idx = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(7)])
    topk_weights = torch.rand(7, 3, generator=generator)
    for layer, module in experts_modules(model).items():
        experts = checkpoint.load_experts(layer)
        ours = moe_exact(x, experts, topk_idx, topk_weights)
        with torch.no_grad():
            theirs = module.double()(x.double(), topk_idx, topk_weights.double())
        module.float()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * theirs.abs().max().item())


def test_other_tensors_are_all_but_the_routed_experts_and_unchanged(saved: Saved) -> None:
    _, path = saved
    stored = {name: tensor for name, tensor in all_tensors(path).items() if ".experts." not in name}
    checkpoint = Checkpoint(path)
    others = dict(checkpoint.other_tensors())
    assert others.keys() == stored.keys()
    assert checkpoint.num_other_tensors == len(stored)
    for name, tensor in others.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(bits(tensor), bits(stored[name]))


def test_shared_expert_is_reported_apart(saved: Saved) -> None:
    model, path = saved
    checkpoint = Checkpoint(path)
    state = model.state_dict()
    for layer in checkpoint.moe_layers:
        names = [name for name in state if f"layers.{layer}." in name and ".shared_expert" in name]
        shared = checkpoint.load_shared_experts(layer)
        if not names:
            assert shared is None
            continue
        assert shared is not None
        weights = {name.split(".")[-2]: state[name] for name in names if name.endswith("_proj.weight")}
        w13, w2 = shared.dequantize()
        assert torch.equal(w13[0], torch.cat([weights["gate_proj"], weights["up_proj"]]))
        assert torch.equal(w2[0], weights["down_proj"])


def test_sharded_checkpoint_equals_the_single_file(saved: Saved, tmp_path: Path) -> None:
    model, path = saved
    sharded = save_pretrained(model, tmp_path / path.name, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    whole, parts = Checkpoint(path), Checkpoint(sharded)
    assert parts.moe_layers == whole.moe_layers
    for layer in whole.moe_layers:
        assert_same_bits(parts.load_experts(layer), whole.load_experts(layer))
    assert dict(parts.other_tensors()).keys() == dict(whole.other_tensors()).keys()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_stacked_naming_equals_the_naming_of_single_experts(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    single = save_pretrained(model, tmp_path / "single")
    stacked = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked)
    assert not any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(single / "model.safetensors"))
    config = Checkpoint(single).config
    half = len(stacked) // 2
    parts = [dict(list(stacked.items())[:half]), dict(list(stacked.items())[half:])]
    loaded = Checkpoint(write(tmp_path / "stacked", config, *parts))
    for layer in loaded.moe_layers:
        assert_same_bits(loaded.load_experts(layer), Checkpoint(single).load_experts(layer))


def test_older_mixtral_and_bare_prefixes_are_known(tmp_path: Path) -> None:
    path = save_pretrained(tiny_model("mixtral"), tmp_path / "saved")
    tensors = load_file(path / "model.safetensors")
    config = Checkpoint(path).config
    expected = Checkpoint(path).load_experts(1)
    for prefix in ("", "model.language_model.", "language_model.model."):
        renamed = {name.replace("model.layers.", f"{prefix}layers."): tensor for name, tensor in tensors.items()}
        nested = write(tmp_path / f"p{len(prefix)}", {"model_type": "wrapper", "text_config": config}, renamed)
        assert_same_bits(Checkpoint(nested).load_experts(1), expected)


def test_fp32_weights_are_rounded_once(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    module = experts_modules(model)[0]
    checkpoint = Checkpoint(tmp_path)
    w13, w2 = checkpoint.load_experts(0).dequantize()
    assert torch.equal(w13, module.gate_up_proj.bfloat16().float())
    assert torch.equal(w2, module.down_proj.bfloat16().float())
    # A format asked for is quantised from the FP32 values, not from a BF16 copy of them.
    direct = Experts.from_dense(module.gate_up_proj.detach(), module.down_proj.detach(), format="fp8_channel")
    assert_same_bits(checkpoint.load_experts(0, format="fp8_channel"), direct)


def test_multi_token_prediction_layer_stays_among_the_others(tmp_path: Path) -> None:
    path = save_pretrained(tiny_model("deepseek_v3"), tmp_path / "saved")
    tensors = load_file(path / "model.safetensors")
    extra = {name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if "layers.1." in name}
    extra["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.zeros(96, 64)
    checkpoint = Checkpoint(write(tmp_path / "mtp", Checkpoint(path).config, tensors | extra))
    assert checkpoint.moe_layers == [1]
    assert extra.keys() <= dict(checkpoint.other_tensors()).keys()
    assert_same_bits(checkpoint.load_experts(1), Checkpoint(path).load_experts(1))
