"""Whatever is wrong with a checkpoint, the error names the tensor and the file, what was expected and what came."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, qwen3_config, write

from warpring import Activation, ArgumentError, CheckpointError, UnsupportedError, WarpringError, clipped_swiglu
from warpring.checkpoint import Checkpoint
from warpring.checkpoint.families import BY_MODEL_TYPE

Tensors = dict[str, torch.Tensor]
STEM = "model.layers.{}.mlp.experts.{}."


def layer_tensors(layer: int, num_experts: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(layer)
    tensors: Tensors = {f"model.layers.{layer}.mlp.gate.weight": torch.zeros(num_experts, 64)}
    for expert in range(num_experts):
        for leaf, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
            values = torch.randn(shape, generator=generator).bfloat16()
            tensors[f"{STEM.format(layer, expert)}{leaf}.weight"] = values
    return tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = qwen3_config(num_experts=3, intermediate=96, hidden=64, layers=2)
    return write(tmp_path / "checkpoint", config, layer_tensors(0) | layer_tensors(1))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    config = qwen3_config(num_experts=3, intermediate=96, hidden=64, layers=2)
    return write(tmp_path / "sharded", config, layer_tensors(0), layer_tensors(1))


def edit_index(path: Path, edit: Callable[[dict[str, object]], object]) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    edit(index)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


def set_tensor(name: str, value: torch.Tensor | None) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_tensor(UP, None), rf"tensor {UP} is missing: .*model\.safetensors does not list it"),
        (
            set_tensor(UP, torch.zeros(64, 96).bfloat16()),
            rf"tensor {UP} in model\.safetensors must be BF16/F16/F32 \[96, 64\]; got BF16 \[64, 96\]",
        ),
        (set_tensor(UP, torch.zeros(95, 64)), rf"tensor {UP} .* \[96, 64\]; got F32 \[95, 64\]"),
        (set_tensor(UP, torch.zeros(96 * 64)), rf"tensor {UP} .* \[96, 64\]; got F32 \[6144\]"),
        (
            set_tensor(UP, torch.zeros(96, 64, dtype=torch.int32)),
            rf"tensor {UP} .* must be BF16/F16/F32/F8_E4M3/.*; got I32",
        ),
        (set_tensor(UP, torch.zeros(96, 64, dtype=torch.float8_e5m2)), rf"tensor {UP} .*; got F8_E5M2"),
        (
            set_tensor(UP, torch.zeros(96, 64, dtype=torch.float8_e4m3fn)),
            rf"tensor {UP} .* its scale is missing: no tensor {UP}_scale_inv",
        ),
        (
            set_tensor(UP.replace("weight", "qweight"), torch.zeros(1)),
            r"2\.up_proj\.qweight in model\.safetensors is unknown",
        ),
        (
            set_tensor(UP.replace("up_proj", "w3"), torch.zeros(1)),
            r"2\.w3\.weight .* is unknown: .*gate_proj,up_proj,down_proj",
        ),
        (
            set_tensor(STEM.format(1, 3) + "up_proj.weight", torch.zeros(1)),
            r"3\.up_proj\.weight .* is unknown: with 3 experts",
        ),
        (set_tensor(STEM.format(1, 0) + "down_proj.bias", torch.zeros(64)), r"all down projections .* bias, or none"),
        (
            set_tensor(STEM.format(1, 0) + "up_proj.bias", torch.zeros(96)),
            r"all gate and up projections .* bias, or none",
        ),
        (
            set_tensor(STEM.format(1, 0) + "up_proj.bias", torch.zeros(95)),
            r"0\.up_proj\.bias .* \[96\]; got F32 \[95\]",
        ),
        (
            set_tensor(UP.replace("weight", "weight_packed"), torch.zeros(1)),
            r"up_proj\.weight and .*up_proj\.weight_packed are both data",
        ),
        (
            set_tensor("model.layers.1.mlp.experts.down_proj", torch.zeros(3, 64, 96)),
            r"layers\.1\.mlp\.experts\. holds stacked tensors \(down_proj\) beside tensors of one expert",
        ),
        (
            set_tensor("model.layers.1.block_sparse_moe.experts.0.w1.weight", torch.zeros(96, 64)),
            r"layer 1 has experts under two names",
        ),
    ],
)
def test_wrong_tensor_is_named(path: Path, edit: Callable[[Tensors], None], message: str) -> None:
    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path).load_experts(1)


def test_other_layers_of_a_damaged_checkpoint_still_load(path: Path) -> None:
    edit_tensors(path, set_tensor(UP, None))
    assert Checkpoint(path).load_experts(0).num_experts == 3


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            torch.zeros(1, 2),
            r"F32/BF16/F8_E8M0 \[1, 1\] \(fp8_block\).*\[96, 1\] or \[96\].*\(fp8_channel\).*got F32 \[1, 2\]",
        ),
        (torch.zeros(96, 3, dtype=torch.uint8), r"U8/F8_E8M0 \[96, 2\] \(mxfp8\).*got U8 \[96, 3\]"),
        (torch.zeros(96, 1, dtype=torch.int32), r"got I32 \[96, 1\]"),
    ],
)
def test_misfitting_scale_names_every_form_that_would_fit(path: Path, scale: torch.Tensor, message: str) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[UP] = torch.zeros(96, 64, dtype=torch.float8_e4m3fn)
        tensors[f"{UP}_scale"] = scale

    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=rf"{UP}_scale in model\.safetensors must be .*{message}"):
        Checkpoint(path).load_experts(1)


def test_global_scale_belongs_to_nvfp4_alone(path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[UP] = torch.zeros(96, 32, dtype=torch.uint8)
        tensors[f"{UP}_scale"] = torch.zeros(96, 4, dtype=torch.float8_e4m3fn)

    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=rf"{UP} .* is nvfp4, which needs a global scale"):
        Checkpoint(path).load_experts(1)
    edit_tensors(path, set_tensor(f"{UP}_scale", torch.zeros(96, 2, dtype=torch.uint8)))
    edit_tensors(path, set_tensor(f"{UP}_scale_2", torch.tensor(1.0)))
    with pytest.raises(CheckpointError, match=rf"{UP} .* is mxfp4, which has no global scale"):
        Checkpoint(path).load_experts(1)


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_truncated_shard_is_named(sharded: Path, cut: int) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    checkpoint = Checkpoint(sharded)
    assert checkpoint.load_experts(0).num_experts == 3
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors .*truncated or corrupt"):
        checkpoint.load_experts(1)


def test_corrupt_header_is_named(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*truncated or corrupt"):
        Checkpoint(path)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x.bin", 5]
)
def test_index_may_name_files_of_its_own_directory_only(sharded: Path, file: object) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({UP: file}))
    with pytest.raises(CheckpointError, match=rf"plain name of a \.safetensors file.*{re.escape(repr(file))} for {UP}"):
        Checkpoint(sharded)


def test_index_that_names_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names shard model-00001-of-00002\.safetensors, which .* does not hold"):
        Checkpoint(sharded)


def test_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({UP: "model-00001-of-00002.safetensors"}))
    with pytest.raises(CheckpointError, match=rf"{UP} is missing: .* places it in model-00001-of-00002\.safetensors"):
        Checkpoint(sharded).load_experts(1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\xff"])
def test_broken_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(sharded)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.pth", "pytorch_model-00001-of-00002.bin"])
def test_pickle_is_refused_with_the_remedy(path: Path, file: str) -> None:
    (path / "model.safetensors").rename(path / file)
    with pytest.raises(UnsupportedError, match=rf"must be safetensors.*{re.escape(file)}.*save_pretrained"):
        Checkpoint(path)


def test_directory_without_weights_is_refused(path: Path, tmp_path: Path) -> None:
    (path / "model.safetensors").rename(path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(path)
    with pytest.raises(CheckpointError, match=r"local checkpoint directory.*Download"):
        Checkpoint("Qwen/Qwen3-30B-A3B")
    with pytest.raises(CheckpointError, match=r"local checkpoint directory"):
        Checkpoint(path / "config.json")


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_broken_config_is_refused(path: Path, text: str | None) -> None:
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(path)


def test_unknown_model_type_names_the_known_ones(path: Path) -> None:
    edit_config(path, model_type="llama")
    with pytest.raises(UnsupportedError) as caught:
        Checkpoint(path)
    assert "'llama'" in str(caught.value)
    for known in BY_MODEL_TYPE:
        assert known in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "relu"}, UnsupportedError, r"hidden_act must be one of silu.*'relu'"),
        ({"hidden_act": None}, UnsupportedError, r"hidden_act must be one of silu.*None"),
        ({"swiglu_alpha": 1.7}, UnsupportedError, r"swiglu_alpha=1\.7"),
        ({"swiglu_limit": 0.0}, CheckpointError, r"swiglu_limit as a positive number"),
        ({"num_experts": None}, CheckpointError, r"num_experts or n_routed_experts or num_local_experts"),
        ({"num_experts": "3"}, CheckpointError, r"must have num_experts as an integer, 1 to [0-9]+; got '3'"),
        (
            {"moe_intermediate_size": 0},
            CheckpointError,
            r"must have moe_intermediate_size as an integer, 1 to [0-9]+; got 0",
        ),
        ({"hidden_size": True}, CheckpointError, r"must have hidden_size as an integer, 1 to [0-9]+; got True"),
        ({"quantization_config": [1]}, CheckpointError, r"quantization_config .* must be an object"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, UnsupportedError, r"\[128, 128\].*\[64, 64\]"),
        (
            {"quantization_config": {"quant_method": "warpring", "version": 2, "format": "mxfp8"}},
            UnsupportedError,
            r"reads version 1 .*has version 2",
        ),
        (
            {"quantization_config": {"quant_method": "warpring", "version": 1, "format": "int4"}},
            UnsupportedError,
            r"formats bf16.*'int4'",
        ),
        ({"num_hidden_layers": 3}, CheckpointError, r"must be \[0, 1, 2\]; .* no expert tensor for layers \[2\]"),
        ({"mlp_only_layers": [0]}, CheckpointError, r"must be \[1\]; .* unexpected ones for \[0\]"),
        ({"decoder_sparse_step": 2}, CheckpointError, r"must be \[1\]; .* unexpected ones for \[0\]"),
    ],
)
def test_config_that_does_not_fit_is_refused(
    path: Path, changes: dict[str, object], error: type[WarpringError], message: str
) -> None:
    edit_config(path, **changes)
    with pytest.raises(error, match=message):
        Checkpoint(path)


HOSTILE_SETTINGS = {
    "num_experts": (0, True, 1025, 10**12, 2**70),
    "hidden_size": (0, 2**60, "a"),
    "num_hidden_layers": (0, "q", 10**9),
    "model_type": ([], {}),
    "hidden_act": (["silu"],),
    "swiglu_limit": ("x", [1], -1, float("nan")),
    "mlp_only_layers": (5, "x", [[1]], ["a"]),
    "mlp_layer_types": ("dense", [1]),
    "decoder_sparse_step": ("x", 0, -1),
    "first_k_dense_replace": ("x", [], -1),
    "moe_layer_freq": ("x", [0, 1], 0),
    "quantization_config": ({"quant_method": "warpring", "version": 1, "format": []},),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in HOSTILE_SETTINGS.items() for value in values]
)
def test_setting_of_another_kind_is_refused_by_name(path: Path, key: str, value: object) -> None:
    edit_config(path, **{key: value})
    with pytest.raises((CheckpointError, UnsupportedError), match=rf"config\.json (must have {key}|has )"):
        Checkpoint(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_experts": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_json_beyond_what_python_reads_is_refused(path: Path, text: str) -> None:
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        Checkpoint(path)


def test_expert_id_too_long_for_a_number_is_unknown(path: Path) -> None:
    edit_tensors(path, set_tensor(f"model.layers.1.mlp.experts.{'9' * 5000}.up_proj.weight", torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"9\.up_proj\.weight .* is unknown"):
        Checkpoint(path).load_experts(1)


def test_clamp_in_the_config_is_never_dropped(path: Path) -> None:
    edit_config(path, swiglu_limit=10.0)
    assert Checkpoint(path).activation == clipped_swiglu(10.0)
    edit_config(path, swiglu_limit=None)
    assert Checkpoint(path).activation == Activation()


def test_own_checkpoint_whose_weights_are_of_another_format_is_refused(path: Path, tmp_path: Path) -> None:
    from warpring.checkpoint import quantize_checkpoint

    quantize_checkpoint(path, tmp_path / "q", "mxfp8")
    edit_config(tmp_path / "q", quantization_config={"quant_method": "warpring", "version": 1, "format": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"has format mxfp4, but layer 0 is stored as mxfp8"):
        Checkpoint(tmp_path / "q").load_experts(0)


def test_checkpoint_without_experts_is_refused(path: Path) -> None:
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    with pytest.raises(CheckpointError, match=r"lists no expert tensor such as"):
        Checkpoint(path)


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_layer_out_of_range_is_refused(path: Path, layer: int) -> None:
    checkpoint = Checkpoint(path)
    for load in (checkpoint.load_experts, checkpoint.load_shared_experts, checkpoint.stored_format):
        with pytest.raises(ArgumentError, match=rf"layer must be one of moe_layers, 0 to 1; got {layer}"):
            load(layer)


def test_unknown_format_is_refused(path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"format must be one of .*'fp6'"):
        Checkpoint(path).load_experts(0, format="fp6")


def test_documented_models_are_the_known_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    table = text.split("| `model_type` |")[1].split("\n\n")[0]
    documented = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == set(BY_MODEL_TYPE)
