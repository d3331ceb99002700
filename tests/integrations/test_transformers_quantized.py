"""A checkpoint of `warpring quantize` as a transformers model: equal to quantising in memory, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from warpring.checkpoint import quantize_checkpoint
from warpring.errors import ArgumentError, CheckpointError, UnsupportedError
from warpring.formats import FORMATS
from warpring.integrations.transformers import (
    IMPLEMENTATION,
    install,
    install_packed,
    is_quantized_checkpoint,
    load_quantized,
    stats,
)
from warpring.layout import PackedExperts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with an edge-case size, a layer without experts, and untied embeddings."""
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
    )
    target = tmp_path_factory.mktemp("dense")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(target)
    return target


def quantized(source: Path, target: Path, format: str = "mxfp8") -> Path:
    quantize_checkpoint(source, target, format)
    return target


def rewrite(directory: Path, change: Any) -> None:
    """Apply `change` to the tensors of a checkpoint of one file."""
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_quantising_in_memory(
    source: Path, tmp_path: Path, format: str, device: torch.device
) -> None:
    model, packed = load_quantized(quantized(source, tmp_path / "q", format), device=device)
    dense = Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()
    install(dense, format=format, free=True)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    assert {experts.format for experts in packed.values()} == {format}
    assert model.config._experts_implementation == IMPLEMENTATION


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_tile_layout_is_packed_layer_by_layer(source: Path, tmp_path: Path, format: str) -> None:
    model, packed = load_quantized(quantized(source, tmp_path / "q", format), layout="tile")
    rows, stored = load_quantized(tmp_path / "q", path="grouped")
    assert {type(experts) for experts in packed.values()} == {PackedExperts}
    assert packed.keys() == stored.keys()
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, rows(ids).logits)
    with pytest.raises(UnsupportedError, match="layout 'tile' take path auto, tile, grouped; got 'cores'"):
        load_quantized(tmp_path / "q", layout="tile", path="cores")


def test_experts_never_become_dense(source: Path, tmp_path: Path) -> None:
    model, packed = load_quantized(quantized(source, tmp_path / "q"))
    assert list(packed) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    for name in packed:
        assert model.get_submodule(name).gate_up_proj.numel() == 0
        assert model.get_submodule(name).down_proj.numel() == 0
    with pytest.raises(UnsupportedError, match="freed"):
        model.state_dict()


def test_tied_embeddings_are_tied_again(source: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**(json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}))
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "tied")
    model, _ = load_quantized(quantized(tmp_path / "tied", tmp_path / "q"))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("model_type", ["mixtral", "minimax_m2"])
def test_blocks_that_files_name_otherwise_than_transformers_are_found(tmp_path: Path, model_type: str) -> None:
    torch.manual_seed(8)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(model_type, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(tmp_path / "dense")
    names = load_file(tmp_path / "dense/model.safetensors")
    assert {"gate", "experts"} <= {name.split(".")[4] for name in names if ".block_sparse_moe." in name}
    loaded, packed = load_quantized(quantized(tmp_path / "dense", tmp_path / "q"))
    assert list(packed) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).eval()
    install(dense, format="mxfp8", free=True)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, dense(ids).logits)


def test_path_is_forced_and_progress_counts_layers(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    model, _ = load_quantized(
        quantized(source, tmp_path / "q"), path="classical", progress=lambda *done: steps.append(done)
    )
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]))
    assert set(stats(model)) == {"classical"}
    assert steps == [(1, 2), (2, 2)]


def test_format_requantises(source: Path, tmp_path: Path) -> None:
    _, packed = load_quantized(quantized(source, tmp_path / "q", "mxfp8"), format="mxfp4")
    assert {experts.format for experts in packed.values()} == {"mxfp4"}


def test_only_our_checkpoints_are_quantised(source: Path, tmp_path: Path) -> None:
    assert not is_quantized_checkpoint(source)
    assert is_quantized_checkpoint(quantized(source, tmp_path / "q"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        is_quantized_checkpoint(tmp_path)


def test_missing_weight_is_named(source: Path, tmp_path: Path) -> None:
    target = quantized(source, tmp_path / "q")
    rewrite(target, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.q_norm\.weight"):
        load_quantized(target)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("model.odd.weight", (2, 2), "no such weight"), ("model.norm.weight", (95,), r"\[95\] must be .* has \[96\]")],
)
def test_weight_that_does_not_fit_the_model_is_named(
    source: Path, tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    target = quantized(source, tmp_path / "q")
    rewrite(target, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=f"{name}.*{said}"):
        load_quantized(target)


def test_quantised_other_tensors_are_refused(source: Path, tmp_path: Path) -> None:
    target = quantized(source, tmp_path / "q")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["other_tensors"] = {"quant_method": "fp8"}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="tensors beside the experts must be dense"):
        load_quantized(target)


def test_packed_experts_must_name_the_models_modules(source: Path, tmp_path: Path) -> None:
    model, packed = load_quantized(quantized(source, tmp_path / "q"))
    other = Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="packed must name the experts modules"):
        install_packed(other, {name.upper(): experts for name, experts in packed.items()})
    with pytest.raises(ArgumentError, match="path must be one of"):
        install_packed(other, packed, path="fast")
    del model
