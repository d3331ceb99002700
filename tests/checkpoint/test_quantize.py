"""`quantize_checkpoint` writes what quantising in memory gives, changes nothing else, and is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    INTERLEAVED,
    all_tensors,
    assert_same_bits,
    bits,
    edit_config,
    experts_modules,
    per_expert,
    qwen3_config,
    save_pretrained,
    tiny_model,
    write,
)
from safetensors.torch import load_file

from warpring import ArgumentError, CheckpointError, Experts
from warpring.checkpoint import Checkpoint, quantize_checkpoint, writer
from warpring.formats import FORMATS

MODELS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma4_text")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.nn.Module, Path]]:
    root = tmp_path_factory.mktemp("models")
    built = {name: tiny_model(name, seed=7) for name in MODELS}
    return {name: (model, save_pretrained(model, root / name, "60KB")) for name, model in built.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint of 2 layers, 3 experts, in 2 shards, with the files that lie beside real ones."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(48, 64, generator=generator).bfloat16()}
    for layer in (0, 1):
        for expert in range(3):
            stem = f"model.layers.{layer}.mlp.experts.{expert}."
            for leaf, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
                tensors[f"{stem}{leaf}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    config = qwen3_config(num_experts=3, intermediate=96, hidden=64, layers=2)
    names = list(tensors)
    path = write(tmp_path / "source", config, {n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]})
    (path / "tokenizer.json").write_text('{"tokens": []}')
    (path / "LICENSE").write_text("terms")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    (path / ".cache").write_text("hidden")
    return path


def left_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name not in ("source", target.name))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", MODELS)
def test_experts_are_those_quantised_in_memory_bit_by_bit(
    models: dict[str, tuple[torch.nn.Module, Path]], model_type: str, format: str, tmp_path: Path
) -> None:
    model, path = models[model_type]
    quantize_checkpoint(path, tmp_path / "q", format, shard_bytes=150_000)
    written, before = Checkpoint(tmp_path / "q"), Checkpoint(path)
    assert written.moe_layers == before.moe_layers
    for layer, module in experts_modules(model).items():
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        biases = {}
        if model_type in INTERLEAVED:
            gate_up, down = gate_up.mT, down.mT
            gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
            bias = module.gate_up_proj_bias.detach()
            biases = {
                "w13_bias": torch.cat([bias[:, ::2], bias[:, 1::2]], 1),
                "w2_bias": module.down_proj_bias.detach(),
            }
        in_memory = Experts.from_dense(gate_up, down, format=format, activation=before.activation, **biases)
        assert written.stored_format(layer) == format
        assert_same_bits(written.load_experts(layer), in_memory)
        assert_same_bits(before.load_experts(layer, format=format), in_memory)


@pytest.mark.parametrize("model_type", MODELS)
def test_other_tensors_are_unchanged(
    models: dict[str, tuple[torch.nn.Module, Path]], model_type: str, tmp_path: Path
) -> None:
    _, path = models[model_type]
    quantize_checkpoint(path, tmp_path / "q", "mxfp4")
    before = {name: tensor for name, tensor in all_tensors(path).items() if ".experts." not in name}
    after = {name: tensor for name, tensor in all_tensors(tmp_path / "q").items() if ".experts." not in name}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.shape == after[name].shape
        assert torch.equal(bits(tensor), bits(after[name]))


def test_shards_stay_below_their_size_and_the_index_names_every_tensor(source: Path, tmp_path: Path) -> None:
    limit = 30_000
    quantize_checkpoint(source, tmp_path / "q", "mxfp8", shard_bytes=limit)
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "q").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    total, found = 0, {}
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert 0 < size <= limit
        total += size
        found |= dict.fromkeys(tensors, file.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total


def test_a_tensor_as_large_as_a_shard_fits_and_one_byte_less_is_refused(source: Path, tmp_path: Path) -> None:
    largest = 2 * 96 * 64 * 2  # w13 of one expert in BF16
    quantize_checkpoint(source, tmp_path / "q", "bf16", shard_bytes=largest)
    assert_same_bits(Checkpoint(tmp_path / "q").load_experts(1), Checkpoint(source).load_experts(1))
    with pytest.raises(ArgumentError, match=rf"experts\.0\.w13\.data has {largest} bytes.*larger shard size"):
        quantize_checkpoint(source, tmp_path / "r", "bf16", shard_bytes=largest - 1)
    assert not (tmp_path / "r").exists()
    assert left_beside(tmp_path / "q") == []


def test_files_beside_the_weights_are_copied_but_no_pickle(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "q", "mxfp8")
    names = {path.name for path in (tmp_path / "q").iterdir() if path.suffix != ".safetensors"}
    assert names == {"config.json", "model.safetensors.index.json", "tokenizer.json", "LICENSE"}
    assert (tmp_path / "q" / "tokenizer.json").read_text() == '{"tokens": []}'


def test_config_names_the_format_and_keeps_the_rest(source: Path, tmp_path: Path) -> None:
    edit_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    before = json.loads((source / "config.json").read_text())
    quantize_checkpoint(source, tmp_path / "q", "nvfp4")
    after = json.loads((tmp_path / "q" / "config.json").read_text())
    ours = after.pop("quantization_config")
    others = before.pop("quantization_config")
    assert after == before
    assert ours == {"quant_method": "warpring", "version": 1, "format": "nvfp4", "other_tensors": others}


def test_quantised_checkpoint_can_be_quantised_again(source: Path, tmp_path: Path) -> None:
    edit_config(source, quantization_config={"quant_method": "fp8"})
    quantize_checkpoint(source, tmp_path / "q", "mxfp8")
    quantize_checkpoint(tmp_path / "q", tmp_path / "r", "fp8_block")
    first, second = Checkpoint(tmp_path / "q"), Checkpoint(tmp_path / "r")
    w13, w2 = first.load_experts(1).dequantize()
    assert_same_bits(second.load_experts(1), Experts.from_dense(w13, w2, format="fp8_block"))
    assert second.config["quantization_config"]["other_tensors"] == {"quant_method": "fp8"}


def test_same_format_keeps_every_bit(source: Path, tmp_path: Path) -> None:
    stored = Experts.from_dense(torch.randn(2, 320, 288), torch.randn(2, 288, 160), format="fp8_block")
    tensors = per_expert(stored.w13, stored.w2, names={"data": "weight", "scale": "weight_scale_inv"})
    path = write(tmp_path / "fp8", qwen3_config(num_experts=2, intermediate=160, hidden=288), tensors)
    quantize_checkpoint(path, tmp_path / "q", "fp8_block")
    assert_same_bits(Checkpoint(tmp_path / "q").load_experts(0), stored)


def test_existing_target_is_refused_and_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q"
    target.mkdir()
    (target / "mine").write_text("precious")
    with pytest.raises(ArgumentError, match=r"target must not exist"):
        quantize_checkpoint(source, target, "mxfp8")
    with pytest.raises(ArgumentError, match=r"only a checkpoint .* is overwritten"):
        quantize_checkpoint(source, target, "mxfp8", overwrite=True)
    assert (target / "mine").read_text() == "precious"
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ArgumentError, match=r"only a checkpoint .* is overwritten"):
        quantize_checkpoint(source, file, "mxfp8", overwrite=True)
    assert file.read_text() == "precious"


def test_overwrite_replaces_the_whole_checkpoint(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q"
    quantize_checkpoint(source, target, "mxfp8", shard_bytes=30_000)
    (target / "stale").write_text("")
    quantize_checkpoint(source, target, "mxfp4", overwrite=True)
    assert not (target / "stale").exists()
    assert Checkpoint(target).load_experts(0).format == "mxfp4"
    assert left_beside(target) == []


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_target_that_overlaps_the_source_is_refused(source: Path, place: str) -> None:
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ArgumentError, match=r"must lie outside source"):
        quantize_checkpoint(source, source / place, "mxfp8", overwrite=True)
    assert sorted(path.name for path in source.iterdir()) == before


def test_target_reached_through_a_link_is_still_the_source(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ArgumentError, match=r"must lie outside source"):
        quantize_checkpoint(source, tmp_path / "link", "mxfp8", overwrite=True)
    assert Checkpoint(source).load_experts(0).format == "bf16"


def break_off_at(step: int):
    def progress(done: int, steps: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("step", [1, 4, 7])
def test_interrupted_run_leaves_nothing(source: Path, tmp_path: Path, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "q", "mxfp8", shard_bytes=30_000, progress=break_off_at(step))
    assert not (tmp_path / "q").exists()
    assert left_beside(tmp_path / "q") == []


def test_full_disk_leaves_the_old_checkpoint(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "q"
    quantize_checkpoint(source, target, "mxfp8")
    kept = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", "shard")

    monkeypatch.setattr(writer, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        quantize_checkpoint(source, target, "mxfp4", overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == kept
    assert left_beside(target) == []


def test_failing_rename_puts_the_old_checkpoint_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "q"
    quantize_checkpoint(source, target, "mxfp8")
    kept = {path.name: path.read_bytes() for path in target.iterdir()}
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error", str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        quantize_checkpoint(source, target, "mxfp4", overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == kept
    assert left_beside(target) == []


def test_damaged_source_leaves_nothing(source: Path, tmp_path: Path) -> None:
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors .*truncated or corrupt"):
        quantize_checkpoint(source, tmp_path / "q", "mxfp8")
    assert left_beside(tmp_path / "q") == []


def test_progress_counts_every_tensor_and_expert(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize_checkpoint(source, tmp_path / "q", "mxfp8", progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(done, 7) for done in range(1, 8)]


def test_directory_and_files_have_the_permissions_of_any_other(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "q", "mxfp8")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    assert (tmp_path / "q").stat().st_mode == (tmp_path / "plain").stat().st_mode
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "q").iterdir()}
    assert modes == dict.fromkeys(modes, (tmp_path / "plain" / "file").stat().st_mode)


def test_bad_arguments_are_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"format must be one of .*mxfp8.*'int4'"):
        quantize_checkpoint(source, tmp_path / "q", "int4")
    with pytest.raises(ArgumentError, match=r"shard_bytes must be positive; got 0"):
        quantize_checkpoint(source, tmp_path / "q", "mxfp8", shard_bytes=0)
    with pytest.raises(ArgumentError, match=r"parent of target must exist"):
        quantize_checkpoint(source, tmp_path / "no" / "q", "mxfp8")
