"""`Checkpoint`: a Hugging Face MoE checkpoint directory, opened lazily and loaded layer by layer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from warpring.activation import Activation
from warpring.checkpoint.families import LAYER, check_config, family_of, moe_layers_of, sizes_of, text_config
from warpring.checkpoint.layer import ExpertWeights, LayerTensors, Naming, stored_format
from warpring.checkpoint.shards import Shards, read_json
from warpring.errors import ArgumentError, CheckpointError, UnsupportedError
from warpring.experts import Experts
from warpring.formats import FORMATS, Format, QuantizedTensor, get_format

CONFIG_FILE = "config.json"
#: config.json's quantization_config of the checkpoints that `warpring quantize` writes.
OWN_METHOD = "warpring"
OWN_VERSION = 1


class Checkpoint:
    """A MoE checkpoint in Hugging Face layout: config.json and safetensors. Opening it reads headers only.

    Args:
        path: the directory.

    Attributes:
        config: config.json as a dictionary.
        activation: the experts' gated activation, clamps included.
        moe_layers: decoder layers that have routed experts, ascending.
        num_experts, intermediate, hidden: sizes of the routed experts.

    Raises:
        CheckpointError: config.json or weights missing, damaged or contradictory.
        UnsupportedError: an unknown model_type, activation or block size; pickle weights.

    Every load streams: files are memory-mapped, one at a time, and go through expert by expert, so that the host
    holds at most one shard and one layer. Not thread-safe: use one Checkpoint a thread.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._shards = Shards(Path(path))
        self.config = read_json(Path(path) / CONFIG_FILE)
        check_config(self.config)
        self._family = family_of(self.config)
        self._sizes = sizes_of(self.config, self._family)
        self.activation: Activation = self._family.activation(text_config(self.config))
        self._own_format = _own_format(quantization_of(self.config))
        self._naming = Naming.of(self._family, own=self._own_format is not None)
        self._sort_names()
        self.moe_layers = sorted(self._experts)
        self._check_layers()
        self._opened: tuple[int, LayerTensors] | None = None

    @property
    def path(self) -> Path:
        return self._shards.directory

    @property
    def num_experts(self) -> int:
        return self._sizes.num_experts

    @property
    def intermediate(self) -> int:
        return self._sizes.intermediate

    @property
    def hidden(self) -> int:
        return self._sizes.hidden

    def stored_format(self, layer: int) -> str:
        """The format that `load_experts(layer)` gives; CheckpointError where one layer mixes several."""
        return stored_format(self._layer(layer))

    def load_experts(self, layer: int, device: torch.device | str = "cpu", format: str | None = None) -> Experts:
        """The routed experts of one layer.

        Args:
            layer: one of `moe_layers`.
            device: where the weights go; each expert is moved as soon as it is read.
            format: a name of `FORMATS` to quantise to, expert by expert, from the stored values. None keeps the
                stored format, bit by bit; dense weights become "bf16" (FP32 and FP16 ones are rounded to nearest even).

        Raises:
            ArgumentError: no such layer or format.
            CheckpointError: a tensor of the layer is missing, misshapen, unknown or damaged.
            UnsupportedError: stacked FP8 blocks that straddle gate and up.
        """
        fmt = None if format is None else get_format(format)
        return self._assemble(self._layer(layer), self.num_experts, fmt, torch.device(device))

    def load_shared_experts(
        self, layer: int, device: torch.device | str = "cpu", format: str | None = None
    ) -> Experts | None:
        """The shared expert of a layer as `Experts` of one expert, which every token takes; None where it has none.

        Several shared experts are stored as one wider MLP, and loaded so. Qwen's `shared_expert_gate` is not part of
        it; it and the tensors read here are among `other_tensors()` too. Arguments and errors as in `load_experts`.
        """
        fmt = None if format is None else get_format(format)
        self._check_layer(layer)
        if layer not in self._shared:
            return None
        prefix, tails = self._shared[layer]
        naming = Naming.of(self._family, own=False)
        gates = [name for name, tail in tails.items() if naming.parse(tail) == ((0, "gate"), "data")]
        gate = gates[0] if gates else prefix + naming.data_name((0, "gate")).removeprefix("0.")
        sizes = replace(self._sizes, num_experts=1, intermediate=self._shards.spec(gate).shape[0])
        tensors = LayerTensors(self._shards, self._family, naming, sizes, prefix, tails)
        return self._assemble(tensors, 1, fmt, torch.device(device))

    def iter_experts(self, layer: int, format: str | None = None) -> Iterator[tuple[int, ExpertWeights]]:
        """(expert, weights) of one layer, in the order of the files: what `load_experts` is made of."""
        tensors = self._layer(layer)
        fmt = None if format is None else get_format(format)
        if fmt is None:
            stored_format(tensors)
        for expert in tensors.order():
            yield expert, tensors.read(expert, fmt)

    def other_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all that is no routed expert of a decoder layer: attention, norms, routers, shared experts.

        Tensors are views of the mapped file, exactly as stored; clone one to keep or to write to it.
        """
        for name in self._others:
            yield name, self._shards.read(name)
        self._shards.close()

    @property
    def num_other_tensors(self) -> int:
        """How many tensors `other_tensors()` gives."""
        return len(self._others)

    def expert_prefix(self, layer: int) -> str:
        """What the names of a layer's routed experts start with, e.g. "model.layers.0.mlp.experts."."""
        self._check_layer(layer)
        return self._experts[layer][0]

    def _sort_names(self) -> None:
        num_layers = text_config(self.config).get("num_hidden_layers")
        self._others: list[str] = []
        self._experts: dict[int, tuple[str, dict[str, str]]] = {}
        self._shared: dict[int, tuple[str, dict[str, str]]] = {}
        for name in self._shards.names:
            found = LAYER.match(name)
            # Layers past the last decoder layer are multi-token prediction heads (DeepSeek-V3's layer 61).
            decoder = found is not None and (num_layers is None or int(found["layer"]) < num_layers)
            if found is None or not decoder or found["kind"] != "experts":
                self._others.append(name)
            if found is None or not decoder:
                continue
            routed = found["kind"] == "experts"
            group, tail = (self._experts, found["tail"]) if routed else (self._shared, "0." + found["tail"])
            prefix, tails = group.setdefault(int(found["layer"]), (f"{found['block']}{found['kind']}.", {}))
            if name != prefix + found["tail"]:
                raise CheckpointError(
                    f"Checkpoint: layer {found['layer']} has experts under two names, {prefix} and {name}; "
                    "only one may be there."
                )
            tails[name] = tail

    def _check_layers(self) -> None:
        expected = moe_layers_of(self.config, self._family)
        if not self.moe_layers:
            raise CheckpointError(
                f"Checkpoint: {self.path / self._shards.source} lists no expert tensor such as "
                "model.layers.0.mlp.experts.*; config.json and the weights do not belong together."
            )
        if expected is not None and expected != self.moe_layers:
            lacking, extra = set(expected) - set(self.moe_layers), set(self.moe_layers) - set(expected)
            raise CheckpointError(
                f"Checkpoint: by config.json the layers with experts must be {expected}; "
                f"{self.path / self._shards.source} lists no expert tensor for layers {sorted(lacking)}, and "
                f"unexpected ones for {sorted(extra)}."
            )

    def _check_layer(self, layer: int) -> None:
        if layer not in self._experts:
            raise ArgumentError(
                f"Checkpoint: layer must be one of moe_layers, {self.moe_layers[0]} to {self.moe_layers[-1]}; "
                f"got {layer}."
            )

    def _layer(self, layer: int) -> LayerTensors:
        self._check_layer(layer)
        if self._opened is None or self._opened[0] != layer:
            prefix, tails = self._experts[layer]
            tensors = LayerTensors(self._shards, self._family, self._naming, self._sizes, prefix, tails)
            if self._own_format is not None and stored_format(tensors) != self._own_format:
                raise CheckpointError(
                    f"Checkpoint: quantization_config in config.json has format {self._own_format}, but layer {layer} "
                    f"is stored as {stored_format(tensors)}. config.json and the weights do not belong together."
                )
            self._opened = layer, tensors
        return self._opened[1]

    def _assemble(self, tensors: LayerTensors, num_experts: int, fmt: Format | None, device: torch.device) -> Experts:
        if fmt is None:
            stored_format(tensors)
        out: _Stack | None = None
        for expert in tensors.order():
            weights = tensors.read(expert, fmt)
            out = out or _Stack(weights, num_experts, device)
            out.put(expert, weights)
        self._shards.close()
        return cast(_Stack, out).experts(self.activation)


class _Stack:
    """Room for all experts of a layer, laid out like the first one that comes."""

    def __init__(self, like: ExpertWeights, num_experts: int, device: torch.device) -> None:
        def room(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty((num_experts, *tensor.shape), dtype=tensor.dtype, device=device)

        def stack(stored: QuantizedTensor) -> QuantizedTensor:
            return replace(stored.map(room), shape=(num_experts, *stored.shape))

        self.w13, self.w2 = stack(like.w13), stack(like.w2)
        self.w13_bias = None if like.w13_bias is None else room(like.w13_bias)
        self.w2_bias = None if like.w2_bias is None else room(like.w2_bias)

    def put(self, expert: int, weights: ExpertWeights) -> None:
        pairs = [
            *zip(self.w13.tensors(), weights.w13.tensors(), strict=True),
            *zip(self.w2.tensors(), weights.w2.tensors(), strict=True),
            (self.w13_bias, weights.w13_bias),
            (self.w2_bias, weights.w2_bias),
        ]
        for room, tensor in pairs:
            if room is not None and tensor is not None:
                room[expert].copy_(tensor)

    def experts(self, activation: Activation) -> Experts:
        return Experts(self.w13, self.w2, activation, self.w13_bias, self.w2_bias)


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """config.json's quantization_config, {} where there is none; refused where no format of ours is like it."""
    found: Any = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"Checkpoint: quantization_config in config.json must be an object; got {found!r}.")
    quantization = cast(dict[str, Any], found)
    block = quantization.get("weight_block_size")
    if block is not None and block != [128, 128]:
        raise UnsupportedError(f"Checkpoint: weight_block_size must be [128, 128]; config.json has {block}.")
    return quantization


def _own_format(quantization: dict[str, Any]) -> str | None:
    """The format of a checkpoint that warpring wrote, None for any other."""
    if quantization.get("quant_method") != OWN_METHOD:
        return None
    if quantization.get("version") != OWN_VERSION or quantization.get("format") not in tuple(FORMATS):
        raise UnsupportedError(
            f"Checkpoint: this warpring reads version {OWN_VERSION} and formats {', '.join(FORMATS)}; config.json has "
            f"version {quantization.get('version')!r}, format {quantization.get('format')!r}. Update warpring, or "
            "quantise again."
        )
    return str(quantization["format"])
