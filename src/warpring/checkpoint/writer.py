"""Quantising a checkpoint to a new directory that `Checkpoint` loads again, bit by bit what quantising in memory gives.

The new directory is whole or absent: it is written beside its place and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from warpring.checkpoint.families import text_config
from warpring.checkpoint.layer import ExpertWeights
from warpring.checkpoint.reader import CONFIG_FILE, OWN_METHOD, OWN_VERSION, Checkpoint, quantization_of
from warpring.checkpoint.shards import INDEX_FILE, PICKLE_SUFFIXES
from warpring.errors import ArgumentError
from warpring.formats import get_format

DEFAULT_SHARD_BYTES = 5 * 10**9

# The same weights for other frameworks, unquantised.
_OTHER_WEIGHT_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx")

#: Called with (steps done, steps in all); a step is one tensor or one expert.
Progress = Callable[[int, int], None]


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write `source` with its routed experts in another format; every other tensor and file is copied unchanged.

    Args:
        source: a directory that `Checkpoint` opens.
        target: the directory to write; its parent must exist.
        format: a name of `FORMATS`.
        shard_bytes: most bytes of tensors in one file.
        overwrite: replace an existing checkpoint at `target`; nothing but a checkpoint is ever replaced.
        progress: called after every step.

    Raises:
        ArgumentError: an unknown format, a target that exists or overlaps the source, a tensor larger than a shard.
        CheckpointError, UnsupportedError: from reading `source`.
        OSError: the disk is full or not writable. On any error `target` is as it was, and nothing is left beside it.

    Host memory: one shard being filled, and one expert.
    """
    source, target = Path(source), Path(target)
    get_format(format)
    if shard_bytes <= 0:
        raise ArgumentError(f"quantize_checkpoint: shard_bytes must be positive; got {shard_bytes}.")
    checkpoint = Checkpoint(source)
    _check_target(source, target, overwrite=overwrite)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        shards = _ShardWriter(partial, shard_bytes)
        _write_tensors(checkpoint, shards, format, progress)
        shards.finish()
        _copy_other_files(source, partial)
        config = json.dumps(_config(checkpoint.config, format), indent=2) + "\n"
        (partial / CONFIG_FILE).write_text(config, encoding="utf-8")
        _finish_files(partial)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(checkpoint: Checkpoint, shards: _ShardWriter, format: str, progress: Progress | None) -> None:
    steps = checkpoint.num_other_tensors + len(checkpoint.moe_layers) * checkpoint.num_experts
    done = 0
    for name, tensor in _all_tensors(checkpoint, format):
        if name is not None:
            shards.add(name, tensor)
            continue
        done += 1
        if progress is not None:
            progress(done, steps)


def _all_tensors(checkpoint: Checkpoint, format: str) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Every tensor of the new checkpoint; a None name after each step."""
    step = (None, torch.empty(0))
    # The largest tensors (embeddings) come first, so that a shard size too small for them fails before the long work.
    for name, tensor in checkpoint.other_tensors():
        yield name, tensor
        yield step
    for layer in checkpoint.moe_layers:
        prefix = checkpoint.expert_prefix(layer)
        for expert, weights in checkpoint.iter_experts(layer, format):
            for tail, tensor in _own_tensors(weights):
                yield f"{prefix}{expert}.{tail}", tensor
            yield step


def _own_tensors(weights: ExpertWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert as `families.OWN` names it: the fields of its QuantizedTensors, and its biases."""
    pairs = (("w13", weights.w13, weights.w13_bias), ("w2", weights.w2, weights.w2_bias))
    for leaf, stored, bias in pairs:
        parts = {"data": stored.data, "scale": stored.scale, "global_scale": stored.global_scale, "bias": bias}
        for part, tensor in parts.items():
            if tensor is not None:
                yield f"{leaf}.{part}", tensor


class _ShardWriter:
    """Fills safetensors files up to a size, then gives them their final names and writes the index."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory, self._shard_bytes = directory, shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = self._num_shards = 0
        self._shard_of: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if size > self._shard_bytes:
            raise ArgumentError(
                f"quantize_checkpoint: shard_bytes must hold the largest tensor; {name} has {size} bytes, more than "
                f"{self._shard_bytes}. Give a larger shard size."
            )
        if self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self._shard_of[name] = self._num_shards + 1

    def finish(self) -> None:
        self._flush()
        for shard in range(1, self._num_shards + 1):
            (self._directory / self._draft(shard)).rename(self._directory / self._final(shard))
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {name: self._final(shard) for name, shard in sorted(self._shard_of.items())},
        }
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        self._num_shards += 1
        save_file(self._pending, self._directory / self._draft(self._num_shards), metadata={"format": "pt"})
        self._pending, self._pending_bytes = {}, 0

    def _draft(self, shard: int) -> str:
        return f"model-{shard:05}.safetensors"

    def _final(self, shard: int) -> str:
        return f"model-{shard:05}-of-{self._num_shards:05}.safetensors"


def _config(config: dict[str, Any], format: str) -> dict[str, Any]:
    """config.json of the new checkpoint: how the other tensors are quantised is kept, under `other_tensors`."""
    found = quantization_of(config)
    others = found.get("other_tensors") if found.get("quant_method") == OWN_METHOD else found
    ours: dict[str, Any] = {"quant_method": OWN_METHOD, "version": OWN_VERSION, "format": format}
    if others:
        ours["other_tensors"] = others
    new = {**config, "quantization_config": ours}
    inner = text_config(config)
    if inner is not config and "quantization_config" in inner:
        new["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    return new


def _copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, generation config, code, licence: every visible file that is neither weights nor written by us."""
    weights = (".safetensors", *PICKLE_SUFFIXES, *_OTHER_WEIGHT_SUFFIXES)
    for path in sorted(source.iterdir()):
        ours = path.name == CONFIG_FILE or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not ours and not path.name.endswith(weights):
            shutil.copyfile(path, target / path.name)


def _check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    if not target.resolve().parent.is_dir():
        raise ArgumentError(f"quantize_checkpoint: the parent of target must exist; got {target}. Make it first.")
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ArgumentError(
            f"quantize_checkpoint: target must lie outside source; got {target} and {source}. Choose another place."
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ArgumentError(
            f"quantize_checkpoint: target must not exist; {target} does. Choose another place, or pass overwrite "
            "(--overwrite)."
        )
    if target.is_symlink() or not target.is_dir() or not (target / CONFIG_FILE).is_file():
        raise ArgumentError(
            f"quantize_checkpoint: only a checkpoint (a directory with {CONFIG_FILE}) is overwritten; {target} is "
            "none. Remove it yourself."
        )


def _replace(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; an old target is put aside first, and put back if the rename fails."""
    if not target.exists():
        partial.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    old = aside / target.name
    try:
        target.rename(old)
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _finish_files(directory: Path) -> None:
    """Give files and directory the permissions of any new one, and force them to disk.

    mkdtemp and safetensors make theirs private. And a rename must not outlive a power cut that the contents do not.
    """
    mask = _umask()
    for path in (*directory.iterdir(), directory):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
