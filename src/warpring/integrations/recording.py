"""Record what reaches the experts of a real model: hidden states, expert ids and routing weights, layer by layer."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers

from warpring.errors import ArgumentError, CheckpointError
from warpring.integrations.transformers.install import experts_modules
from warpring.integrations.transformers.layout import pack
from warpring.verify import Inputs, LayerInputs

# Recorded tokens are this far apart in the text on average, so that they see contexts of many lengths.
_STRIDE = 8


def held_out_text() -> str:
    """Text that the example model has never seen: a standard library module that its training leaves out."""
    return inspect.getsource(textwrap)


def recorded_inputs(model_dir: str | os.PathLike[str], num_tokens: int, *, text: str | None = None) -> Inputs:
    """Run a Hugging Face causal LM over a text in BF16 on the CPU and keep what its expert layers are given.

    Args:
        model_dir: a folder with config, safetensors weights and tokenizer; nothing is downloaded, no code in it is run.
        num_tokens: tokens to keep, at evenly spaced positions of the text's first 8 * num_tokens tokens.
        text: what to read; `held_out_text()` by default.

    Returns:
        Inputs of kind "recorded", a layer for each MoE layer, on the CPU.

    Raises:
        CheckpointError: the folder is missing, or holds no such model or no MoE layer.
        ArgumentError: fewer tokens in the text than asked for.
        UnsupportedError: an experts module that warpring does not compute, by name.
    """
    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"recorded_inputs: {folder} must be a folder with a Hugging Face model; it has no config.json."
        )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    auto: Any = transformers  # its loaders have no types
    try:
        tokenizer = auto.AutoTokenizer.from_pretrained(folder, **options)
        model = auto.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation="eager", use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"recorded_inputs: cannot load {folder}: {error}") from error
    ids: list[int] = tokenizer(held_out_text() if text is None else text)["input_ids"][: _STRIDE * num_tokens]
    if len(ids) < num_tokens:
        raise ArgumentError(
            f"recorded_inputs: text must have num_tokens={num_tokens} tokens or more; got {len(ids)}. Take another."
        )
    keep = torch.linspace(0, len(ids) - 1, num_tokens).round().long()
    layers = _record(model.eval(), torch.tensor([ids]), keep)
    if not layers:
        raise CheckpointError(
            f"recorded_inputs: {folder} must hold a model with MoE layers; {type(model).__name__} has none."
        )
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._")
    return Inputs("recorded", name or "model", tuple(layers))


def _record(model: torch.nn.Module, ids: torch.Tensor, keep: torch.Tensor) -> list[LayerInputs]:
    layers: list[LayerInputs] = []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By position, however they are passed: models name them differently (gpt-oss: router_indices).
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        x, idx, weights = list(given.values())[:3]
        x = x.reshape(-1, x.shape[-1])
        layers.append(LayerInputs(pack(module, "bf16"), x[keep], idx[keep].long(), weights[keep].float()))

    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in experts_modules(model).values()]
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return layers
