"""A checkpoint that `warpring quantize` wrote, as a transformers model whose experts never become dense."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from typing import Any, Literal, overload

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from warpring.checkpoint import Checkpoint
from warpring.checkpoint.reader import CONFIG_FILE, OWN_METHOD, quantization_of
from warpring.checkpoint.shards import read_json
from warpring.errors import CheckpointError, UnsupportedError
from warpring.experts import Experts
from warpring.integrations.transformers.install import Layout, Progress, check_settings, install_packed
from warpring.layout import PackedExperts, pack_experts

#: The MoE block of a layer as files of Mixtral and MiniMax-M2 name it, and as transformers' modules do.
_BLOCK_IN_FILES, _BLOCK_IN_MODEL = ".block_sparse_moe.", ".mlp."


def is_quantized_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether config.json says that `warpring quantize` wrote this directory.

    Raises:
        CheckpointError: no readable config.json there.
    """
    return quantization_of(read_json(Path(directory) / CONFIG_FILE)).get("quant_method") == OWN_METHOD


@overload
def load_quantized(
    directory: str | os.PathLike[str],
    *,
    path: str = "auto",
    device: torch.device | str = "cpu",
    format: str | None = None,
    progress: Progress | None = None,
    layout: Literal["rows"] = "rows",
) -> tuple[PreTrainedModel, dict[str, Experts]]:
    """Layout "rows"."""


@overload
def load_quantized(
    directory: str | os.PathLike[str],
    *,
    path: str = "auto",
    device: torch.device | str = "cpu",
    format: str | None = None,
    progress: Progress | None = None,
    layout: Literal["tile"],
) -> tuple[PreTrainedModel, dict[str, PackedExperts]]:
    """Layout "tile"."""


def load_quantized(
    directory: str | os.PathLike[str],
    *,
    path: str = "auto",
    device: torch.device | str = "cpu",
    format: str | None = None,
    progress: Progress | None = None,
    layout: Layout = "rows",
) -> tuple[PreTrainedModel, dict[str, Experts] | dict[str, PackedExperts]]:
    """Load a checkpoint of `warpring quantize`: experts as they are stored, everything else in BF16.

    Args:
        directory: the checkpoint.
        path: as in `install`.
        device: where the model and its experts go.
        format: quantise the stored experts once more, to this format; None keeps them bit by bit.
        progress: called with (layers read, layers in all) after each layer.
        layout: as in `install`; each layer is packed as soon as it is read.

    Returns:
        The model, and its experts by module name. As after `install(free=True)`, it has no dense expert weights.

    Raises:
        CheckpointError, UnsupportedError: from `Checkpoint`; a tensor that the model lacks or misses; other tensors
            that are quantised themselves.
    """
    check_settings(path, layout)
    checkpoint = Checkpoint(directory)
    if quantization_of(checkpoint.config).get("other_tensors"):
        raise UnsupportedError(
            f"load_quantized: {directory}: tensors beside the experts must be dense; they are quantised as the source "
            "was. Quantise a BF16 source instead."
        )
    model = _empty_model(directory)
    modules = {name for name, _ in model.named_modules()}
    names = {
        _name_in_model(checkpoint.expert_prefix(layer).rstrip("."), modules): layer for layer in checkpoint.moe_layers
    }
    _load_others(model, checkpoint, tuple(f"{name}." for name in names))
    packed: dict[str, Any] = {}
    for name, layer in names.items():
        experts = checkpoint.load_experts(layer, device, format)
        packed[name] = pack_experts(experts) if layout == "tile" else experts
        if progress is not None:
            progress(len(packed), len(names))
    install_packed(model, packed, path=path)
    return model.to(torch.device(device)), packed


def _empty_model(directory: str | os.PathLike[str]) -> Any:
    """The model with uninitialised weights: pages of host memory that nobody touches are never taken."""
    configs: Any = AutoConfig
    models: Any = AutoModelForCausalLM
    config = configs.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights():
        model = models.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def _name_in_model(name: str, known: Container[str]) -> str:
    """What transformers calls a module or weight of that name in the files."""
    return name if name in known else name.replace(_BLOCK_IN_FILES, _BLOCK_IN_MODEL)


def _load_others(model: Any, checkpoint: Checkpoint, expert_prefixes: tuple[str, ...]) -> None:
    """Fill every weight that is no expert's; each must be in the checkpoint, or tied to one that is."""
    wanted: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith(expert_prefixes)
    }
    loaded: set[str] = set()
    for stored_name, tensor in checkpoint.other_tensors():
        name = _name_in_model(stored_name, wanted)
        if name not in wanted or wanted[name].shape != tensor.shape:
            have = list(wanted[name].shape) if name in wanted else "no such weight"
            raise CheckpointError(
                f"load_quantized: {checkpoint.path}: {stored_name} {list(tensor.shape)} must be a weight of "
                f"{type(model).__name__}, which has {have}. Run the source checkpoint with a format instead."
            )
        wanted[name].copy_(tensor)
        loaded.add(name)
    model.tie_weights()
    missing = wanted.keys() - loaded - set(getattr(model, "all_tied_weights_keys", {}))
    if missing:
        raise CheckpointError(f"load_quantized: {checkpoint.path} lacks {', '.join(sorted(missing))}.")
