"""The safetensors files of one checkpoint directory: which file holds a tensor, its dtype and shape, its bytes.

Files are memory-mapped and one is open at a time, so that resident memory is bounded by one shard, whatever the
size of the checkpoint. Only safetensors is read: pickle files can run code when they are opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from warpring.errors import CheckpointError, UnsupportedError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's header entry: dtype as safetensors spells it ("BF16", "F8_E4M3"), shape, and the file it is in."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Shards:
    """Tensors of a checkpoint directory by name, read lazily.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names. Where both
            are there the single file counts, as in transformers.

    Raises:
        CheckpointError: no such directory, no weights, a broken index, a shard missing or damaged.
        UnsupportedError: only pickle weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: tuple[str, Any] | None = None
        self._headers: dict[str, dict[str, TensorSpec]] = {}
        if not directory.is_dir():
            raise CheckpointError(
                f"Checkpoint: path must be a local checkpoint directory; got {str(directory)!r}, which is none. "
                "Download the model first."
            )
        if (directory / SINGLE_FILE).is_file():
            self.source = SINGLE_FILE
            self._files = dict.fromkeys(self._header(SINGLE_FILE), SINGLE_FILE)
        elif (directory / INDEX_FILE).is_file():
            self.source = INDEX_FILE
            self._files = _read_index(directory)
        else:
            raise _no_weights(directory)

    @property
    def names(self) -> list[str]:
        """Every tensor's name, those of one file together, so that a pass over all opens each file once."""
        return sorted(self._files, key=lambda name: (self._files[name], name))

    def file_of(self, name: str) -> str:
        """Name of the file that holds (or, for an unknown tensor, should list) the tensor."""
        return self._files.get(name, self.source)

    def spec(self, name: str) -> TensorSpec:
        """Header entry of a tensor; reads no weights. CheckpointError where the checkpoint lacks the tensor."""
        if name not in self._files:
            raise self.missing(name)
        header = self._header(self._files[name])
        if name not in header:
            raise CheckpointError(
                f"Checkpoint: tensor {name} is missing: {INDEX_FILE} places it in {self._files[name]}, "
                "which does not hold it. Download the shard again, or mend the index."
            )
        return header[name]

    def missing(self, name: str) -> CheckpointError:
        """The error that tells of a tensor that no file holds."""
        return CheckpointError(
            f"Checkpoint: tensor {name} is missing: {self.directory / self.source} does not list it. "
            "The checkpoint is incomplete, or config.json is of another model; download it again."
        )

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor, or entry `index` of its first dimension: a view of the mapped file, not to be written to."""
        file = self.spec(name).file
        handle = self._handle(file)
        try:
            return handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except (OSError, SafetensorError) as error:
            raise self._damaged(file, error) from error

    def close(self) -> None:
        """Unmap the open file. Tensors that were read stay valid; the next `read` opens again."""
        self._open = None

    def _handle(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                self._open = (file, safe_open(self.directory / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise self._damaged(file, error) from error
        return self._open[1]

    def _header(self, file: str) -> dict[str, TensorSpec]:
        if file not in self._headers:
            handle = self._handle(file)
            entries = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            self._headers[file] = {
                name: TensorSpec(entry.get_dtype(), tuple(entry.get_shape()), file) for name, entry in entries.items()
            }
        return self._headers[file]

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint: {self.directory / file} cannot be read as safetensors ({error}). "
            "The file is truncated or corrupt; download it again."
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"Checkpoint: {path} is missing. A checkpoint directory needs config.json beside its weights."
        ) from None
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number too long or lists too deep for Python
        raise CheckpointError(f"Checkpoint: {path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"Checkpoint: {path} must hold a JSON object; got {type(value).__name__}.")
    return cast(dict[str, Any], value)


def _read_index(directory: Path) -> dict[str, str]:
    weight_map: Any = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"Checkpoint: {directory / INDEX_FILE} must hold a non-empty object `weight_map`.")
    files: dict[str, str] = {}
    for name, file in cast(dict[str, Any], weight_map).items():
        # An index is untrusted input: it may name files of its own directory only.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"Checkpoint: {directory / INDEX_FILE} must map each tensor to the plain name of a .safetensors file "
                f"beside it; got {file!r} for {name}."
            )
        files[name] = file
    for file in sorted(set(files.values())):
        if not (directory / file).is_file():
            raise CheckpointError(
                f"Checkpoint: {INDEX_FILE} names shard {file}, which {directory} does not hold. Download the shard."
            )
    return files


def _no_weights(directory: Path) -> CheckpointError | UnsupportedError:
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        return UnsupportedError(
            f"Checkpoint: weights must be safetensors; {directory} holds pickle files only ({pickles[0]} ...), which "
            "can run code when opened. Convert them on an isolated machine: load with transformers, save_pretrained()."
        )
    return CheckpointError(f"Checkpoint: {directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}.")
