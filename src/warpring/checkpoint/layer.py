"""The expert tensors of one layer: sorted out, checked against config.json by their headers, read expert by expert."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from warpring.checkpoint.families import (
    OWN,
    OWN_PARTS,
    PER_EXPERT_PARTS,
    STACKED,
    STACKED_PARTS,
    Family,
    MoeSizes,
)
from warpring.checkpoint.shards import Shards
from warpring.checkpoint.storage import DENSE, Matrix, StoredMatrix, convert, locate
from warpring.errors import CheckpointError, UnsupportedError
from warpring.formats import Format, QuantizedTensor

_PER_EXPERT = re.compile(r"(?P<expert>\d{1,9})\.(?P<leaf>\w+)\.(?P<part>\w+)")

# (expert or None where all experts are stacked, role)
_Key = tuple[int | None, str]


@dataclass(frozen=True)
class Naming:
    """How a checkpoint spells the tensors of one expert: the family's way, or warpring's own."""

    leaves: Mapping[str, str]
    parts: Mapping[str, str]
    stacked: bool

    @classmethod
    def of(cls, family: Family, *, own: bool) -> Naming:
        return cls(OWN, OWN_PARTS, False) if own else cls(family.leaves, PER_EXPERT_PARTS, True)

    def parse(self, tail: str) -> tuple[_Key, str] | None:
        """What follows `experts.` -> ((expert, role), part); None where the name is unknown."""
        found = _PER_EXPERT.fullmatch(tail)
        if found and found["leaf"] in self.leaves and found["part"] in self.parts:
            return (int(found["expert"]), self.leaves[found["leaf"]]), self.parts[found["part"]]
        for leaf, role in STACKED.items():
            part = STACKED_PARTS.get(tail.removeprefix(leaf)) if tail.startswith(leaf) else None
            if self.stacked and part is not None:
                return (None, role), part
        return None

    def data_name(self, key: _Key) -> str:
        """The tail under which a matrix's data is looked for first."""
        expert, role = key
        leaves = STACKED if expert is None else self.leaves
        leaf = next(leaf for leaf, known in leaves.items() if known == role)
        return leaf if expert is None else f"{expert}.{leaf}.{next(iter(self.parts))}"


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: w13 [2, intermediate, hidden] and w2 [hidden, intermediate] in one format; biases FP32 or None."""

    w13: QuantizedTensor
    w2: QuantizedTensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None


class LayerTensors:
    """The expert tensors of one layer (or its shared expert, as a layer of one).

    Args:
        tails: name of each tensor -> what follows `experts.` in it.
        prefix: the names up to and including `experts.`.

    Raises:
        CheckpointError: a tensor is unknown, missing or misshapen.
        UnsupportedError: a block of scales that gate and up share.
    """

    def __init__(
        self, shards: Shards, family: Family, naming: Naming, sizes: MoeSizes, prefix: str, tails: Mapping[str, str]
    ) -> None:
        self._shards, self._family, self._naming, self._sizes, self._prefix = shards, family, naming, sizes, prefix
        parts = self._sort(tails)
        self._stacked = any(expert is None for expert, _ in parts)
        self._matrices = {key: self._locate(key, parts.get(key, {})) for key in self._expected(parts)}
        self._check_alike()

    @property
    def formats(self) -> dict[str, str]:
        """Stored formats ("dense" or a name of `FORMATS`), each with one tensor that has it."""
        return {matrix.format: matrix.parts["data"] for matrix in self._matrices.values()}

    def order(self) -> list[int]:
        """Experts, those of one file together, so that reading all of them opens each file as seldom as can be."""
        experts = range(self._sizes.num_experts)
        return list(experts) if self._stacked else sorted(experts, key=lambda expert: (self._file(expert), expert))

    def read(self, expert: int, fmt: Format | None) -> ExpertWeights:
        """One expert in `fmt` (None: as stored); temporaries are as large as this expert."""
        w13, w13_bias = self._gate_up(expert, fmt)
        down, index = self._find(expert, "down")
        return ExpertWeights(
            w13=w13,
            w2=convert(down.read(self._shards, index), fmt),
            w13_bias=w13_bias,
            w2_bias=down.read_bias(self._shards, index),
        )

    def _sort(self, tails: Mapping[str, str]) -> dict[_Key, dict[str, str]]:
        parts: dict[_Key, dict[str, str]] = defaultdict(dict)
        for name, tail in tails.items():
            parsed = self._naming.parse(tail)
            count = self._sizes.num_experts
            if parsed is None or (parsed[0][0] or 0) >= count:
                raise CheckpointError(
                    f"Checkpoint: tensor {name} in {self._shards.file_of(name)} is unknown: with {count} experts, "
                    f"names after {self._prefix} are {self._known_names()}. Check model_type and sizes in config.json."
                )
            key, part = parsed
            if part in parts[key]:
                raise CheckpointError(
                    f"Checkpoint: tensors {parts[key][part]} and {name} are both {part} of one matrix; "
                    "only one may be there."
                )
            if part != "ignored":
                parts[key][part] = name
        return parts

    def _known_names(self) -> str:
        names: list[str] = []
        if self._naming.leaves:
            names.append(f"<expert>.{{{','.join(self._naming.leaves)}}}.{{{','.join(self._naming.parts)}}}")
        if self._naming.stacked:
            names.append(f"{{{','.join(STACKED)}}}{{{','.join(STACKED_PARTS)}}}")
        return " or ".join(names)

    def _expected(self, parts: Iterable[_Key]) -> list[_Key]:
        found = set(parts)
        if not self._stacked:
            roles = dict.fromkeys(self._naming.leaves.values())
            return [(expert, role) for expert in range(self._sizes.num_experts) for role in roles]
        mixed = [key for key in found if key[0] is not None]
        if mixed:
            raise CheckpointError(
                f"Checkpoint: {self._prefix} holds stacked tensors ({self._naming.data_name((None, 'down'))}) beside "
                f"tensors of one expert ({self._naming.data_name(mixed[0])}); only one of the two may be there."
            )
        return [(None, role) for role in STACKED.values()]

    def _locate(self, key: _Key, parts: dict[str, str]) -> StoredMatrix:
        expert, role = key
        if "data" not in parts:
            raise self._shards.missing(self._prefix + self._naming.data_name(key))
        size = self._sizes
        shape = (size.hidden, size.intermediate) if role == "down" else (size.intermediate, size.hidden)
        if role == "gate_up":
            shape = (2 * shape[0], shape[1]) if expert is None else (2, *shape)
        if expert is None:
            shape = (size.num_experts, *shape)
        matrix = locate(self._shards, parts, shape, transposed=expert is None and self._family.transposed)
        if expert is None and role == "gate_up" and matrix.format == "fp8_block":
            self._check_blocks(matrix)
        return matrix

    def _check_blocks(self, matrix: StoredMatrix) -> None:
        if self._family.interleaved or self._sizes.intermediate % 128:
            raise UnsupportedError(
                f"Checkpoint: tensor {matrix.parts['data']} has FP8 blocks of 128 rows, and with intermediate "
                f"{self._sizes.intermediate} one block holds gate and up rows, whose scales warpring keeps apart. "
                "Save the checkpoint with one tensor an expert and projection (experts.0.gate_proj.weight) instead."
            )

    def _check_alike(self) -> None:
        biased: dict[str, str] = {}
        bare: dict[str, str] = {}
        for (_, role), matrix in self._matrices.items():
            group = "down" if role == "down" else "gate and up"
            (biased if "bias" in matrix.parts else bare)[group] = matrix.parts["data"]
        for group in biased.keys() & bare.keys():
            raise CheckpointError(
                f"Checkpoint: all {group} projections of a layer must have a bias, or none; {biased[group]} has one "
                f"and {bare[group]} has none."
            )

    def _find(self, expert: int, role: str) -> tuple[StoredMatrix, int | None]:
        return (self._matrices[None, role], expert) if self._stacked else (self._matrices[expert, role], None)

    def _file(self, expert: int) -> str:
        return self._shards.file_of(self._find(expert, "down")[0].parts["data"])

    def _gate_up(self, expert: int, fmt: Format | None) -> tuple[QuantizedTensor, torch.Tensor | None]:
        if (expert, "gate") in self._matrices:
            halves = [self._matrices[expert, role] for role in ("gate", "up")]
            biases = [half.read_bias(self._shards) for half in halves]
            w13 = _stack([convert(half.read(self._shards), fmt) for half in halves])
            return w13, None if biases[0] is None or biases[1] is None else torch.stack([biases[0], biases[1]])
        matrix, index = self._find(expert, "gate_up")
        stored, bias = matrix.read(self._shards, index), matrix.read_bias(self._shards, index)
        if not self._stacked:
            return convert(stored, fmt), bias
        return _stack([convert(self._half(stored, half), fmt) for half in (0, 1)]), (
            None if bias is None else torch.stack([self._rows(bias, 0), self._rows(bias, 1)])
        )

    def _rows(self, tensor: torch.Tensor, half: int) -> torch.Tensor:
        """Gate (0) or up (1) rows of a tensor that holds both in its first dimension."""
        return tensor[half::2] if self._family.interleaved else tensor.chunk(2)[half]

    def _half(self, matrix: Matrix, half: int) -> Matrix:
        if isinstance(matrix, torch.Tensor):
            return self._rows(matrix, half)
        rows, cols = matrix.shape
        return QuantizedTensor(
            format=matrix.format,
            shape=(rows // 2, cols),
            data=self._rows(matrix.data, half),
            scale=None if matrix.scale is None else self._rows(matrix.scale, half),
            global_scale=matrix.global_scale,
        )


def stored_format(layer: LayerTensors) -> str:
    """The one format of a layer's tensors, dense counted as "bf16"; CheckpointError where there are several."""
    formats = layer.formats
    if len(formats) > 1:
        named = ", ".join(f"{name} is {fmt}" for fmt, name in formats.items())
        raise CheckpointError(
            f"Checkpoint: the experts of a layer must have one format to be loaded as stored; {named}. Pass format=..."
        )
    only = next(iter(formats))
    return "bf16" if only == DENSE else only


def _stack(halves: list[QuantizedTensor]) -> QuantizedTensor:
    gate, up = halves
    pairs = [torch.stack(pair) for pair in zip(gate.tensors(), up.tensors(), strict=True)]
    return QuantizedTensor(gate.format, (2, *gate.shape), *pairs)
