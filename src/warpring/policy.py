"""Which path serves which batch: crossovers that were measured, stored as data, looked up once a layer shape.

A decode path (warp, tile, cores) reads weights as they are stored and is bound by bytes; the grouped path pays for a
sort, and for expanding quantised weights (packed ones on Hopper it reads as they are), and is paid back by many tokens.
A crossover is the largest batch that a decode path serves at least as fast. For a layer it is, in this order,

1. one that `warpring tune` measured on this device for this shape and format, in `tuned_dir()`;
2. one of `warpring/data/crossovers`, written from `bench/results` by `python -m warpring.bench.crossovers`;
3. that of the known shape nearest in bytes an expert, of the same device, path and (where there is one) format;
4. a rule of thumb.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from warpring.errors import ArgumentError
from warpring.formats import get_format
from warpring.runtime.device import has_grouped_gemms, runs_kernels
from warpring.runtime.jit import cache_dir

#: Written into every file; a file of another schema is not read.
SCHEMA = 1
DATA_DIR = Path(__file__).parent / "data" / "crossovers"

#: (token, slot) pairs an expert up to which a path is taken to lead where nothing near was measured: for BF16 weights,
#: and for quantised ones, which the grouped path must expand first. Warp: on an H200, Qwen3-30B-A3B, it led up to 64
#: tokens of top-8 on 128 experts. Cores: on two cores with AVX-512 up to 8 to 40 pairs in BF16, 60 to 150 quantised.
_PAIRS_PER_EXPERT = {"warp": (4.0, 4.0), "cores": (8.0, 64.0)}
#: Pairs of one launch of the tile path, which reads all weights that they want; and how many launches cost what the
#: grouped path does. Where that expands packed weights, by bytes moved: 2 + 2 + 2 a BF16 weight against 2 at 80 % of
#: the peak, 1 + 2 + 2 an 8-bit one against 1 at 60 %. Where it multiplies them as they are, it reads them once in any
#: batch, and a second launch reads them again: on an H200, Qwen3-30B-A3B, one full launch takes 0.93 (BF16), 0.82
#: (MXFP8) and 0.67 (MXFP4) of its time, two take 1.8, 1.5 and 1.3 times as long as it.
_TILE_PAIRS = 512
_TILE_LAUNCHES = (2, 3)
_TILE_LAUNCHES_BEFORE_GEMMS = 1


class Layer(Protocol):
    """What a choice depends on: `Experts` and `PackedExperts` have it."""

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        ...

    @property
    def format(self) -> str:
        """Number format."""
        ...

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        ...

    @property
    def hidden(self) -> int:
        """Model width."""
        ...

    @property
    def intermediate(self) -> int:
        """Width inside an expert."""
        ...


@dataclass(frozen=True)
class Crossover:
    """Where one decode path stops being the fastest, for one shape and format on one device.

    Attributes:
        path: "warp", "tile" or "cores".
        format, hidden, intermediate, num_experts, topk: the layer.
        max_tokens: the largest batch that the path served at least as fast as `against`; 0 = none.
        open_end: the path still led at the largest batch measured, so the true crossover lies beyond.
        against: the path or peer that takes over: "grouped", or what stood in for it.
        batches: token counts that were measured.
        commit, date: of the code that was measured, and the day.
    """

    path: str
    format: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    max_tokens: int
    open_end: bool
    against: str
    batches: tuple[int, ...]
    commit: str
    date: str

    @property
    def key(self) -> tuple[str, str, int, int, int, int]:
        """What the crossover is of."""
        return self.path, self.format, self.hidden, self.intermediate, self.num_experts, self.topk


@dataclass(frozen=True)
class Limit:
    """The batch up to which a decode path serves, and where that number comes from, in words."""

    max_tokens: int
    source: str


def choose_path(layer: Layer, num_tokens: int, topk: int, *, packed: bool = False) -> str:
    """The path that `path="auto"` takes for a batch.

    Args:
        layer: the layer's weights.
        num_tokens: tokens of the batch.
        topk: slots a token.
        packed: whether the weights are in tile layout.

    Returns:
        On a GPU "tile" (packed) or "warp", on a CPU "cores", up to the crossover; beyond it, and for packed weights on
        a CPU or a GPU too old for our kernels, "grouped".
    """
    device, threads = layer.device, 0
    if device.type == "cuda":
        path = "tile" if packed else "warp"
    elif packed:
        return "grouped"
    else:
        path, threads = "cores", torch.get_num_threads()
    sizes = (layer.hidden, layer.intermediate, layer.num_experts, topk)
    return path if num_tokens <= _max_tokens(device, threads, path, layer.format, *sizes) else "grouped"


@lru_cache(maxsize=4096)
def _max_tokens(device: torch.device, threads: int, path: str, format: str, *sizes: int) -> int:
    """`limit` by what is at hand at every call, without a name made of it; a CPU's name holds torch's threads."""
    if device.type == "cuda" and not runs_kernels(device):
        return 0
    hidden, intermediate, num_experts, topk = sizes
    own_gemms = has_grouped_gemms(device)
    return limit(device_name(device), path, format, hidden, intermediate, num_experts, topk, own_gemms).max_tokens


def forget() -> None:
    """Look crossovers up anew from now on."""
    limit.cache_clear()
    _max_tokens.cache_clear()


@lru_cache(maxsize=4096)
def limit(
    device: str,
    path: str,
    format: str,
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    own_gemms: bool = False,
) -> Limit:
    """The largest batch for `path` on the device of that name; see the module for where it comes from.

    Args:
        own_gemms: whether the grouped path multiplies packed weights as they are there (`has_grouped_gemms`), which the
            rule of thumb goes by.
    """
    thumb = _rule_of_thumb(path, format, num_experts, topk, own_gemms)
    known = crossovers(device)
    wanted = (path, format, hidden, intermediate, num_experts, topk)
    if wanted in known:
        found, source = known[wanted]
        if found.open_end and found.max_tokens < thumb:
            return Limit(thumb, f"rule of thumb; {source} up to {found.max_tokens}")
        return Limit(found.max_tokens, source)
    near = [found for found, _ in known.values() if found.path == path]
    near = [found for found in near if found.format == format] or near
    if not near:
        return Limit(thumb, "rule of thumb")
    size = _bytes_of(format, hidden, intermediate)

    def distance(found: Crossover) -> float:
        return abs(math.log(_bytes_of(found.format, found.hidden, found.intermediate) / size))

    nearest = min(near, key=lambda found: (distance(found), found.key))
    # What decides is tokens an expert (tile: pairs a launch): twice the experts reach as many at twice the batch.
    scale = nearest.topk / topk
    if path != "tile":
        scale *= num_experts / nearest.num_experts
    tokens = max(1, round(nearest.max_tokens * scale)) if nearest.max_tokens else 0
    shape = f"h{nearest.hidden}xi{nearest.intermediate}xe{nearest.num_experts}xk{nearest.topk} {nearest.format}"
    return Limit(max(tokens, thumb) if nearest.open_end else tokens, f"nearest measured shape, {shape}")


def _rule_of_thumb(path: str, format: str, num_experts: int, topk: int, own_gemms: bool) -> int:
    quantised = format != "bf16"
    if path == "tile":
        launches = _TILE_LAUNCHES_BEFORE_GEMMS if own_gemms else _TILE_LAUNCHES[quantised]
        return launches * (_TILE_PAIRS // topk)
    return max(1, round(_PAIRS_PER_EXPERT[path][quantised] * num_experts / topk))


def _bytes_of(format: str, hidden: int, intermediate: int) -> float:
    """Bytes of an expert's codes, up to a constant factor."""
    return get_format(format).bits_per_weight * hidden * intermediate


def device_name(device: torch.device) -> str:
    """The name that crossovers are stored under: torch's of a GPU; of a CPU its own, with torch's threads."""
    return _gpu_name(device) if device.type == "cuda" else f"{_cpu_name()}, {torch.get_num_threads()} threads"


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return match[1].strip() if match else platform.processor() or platform.machine()


def tuned_dir() -> Path:
    """Where `warpring tune` keeps what it measured: beside the kernel cache, see `warpring.runtime.jit.cache_dir`."""
    return cache_dir() / "crossovers"


def file_of(directory: Path, device: str) -> Path:
    """The file of a device in a directory of crossovers."""
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


Known = dict[tuple[str, str, int, int, int, int], tuple[Crossover, str]]


def crossovers(device: str) -> Known:
    """key -> (crossover, source in words) of a device: the library's own, and over them those tuned here."""
    known: Known = {}
    for directory, source in ((DATA_DIR, "measured, in the library"), (tuned_dir(), "tuned on this machine")):
        known |= {found.key: (found, source) for found in read(file_of(directory, device))}
    return known


def read(path: Path) -> list[Crossover]:
    """The crossovers of a file; [] where it is missing, or (with a warning) where it cannot be used."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {held['schema']}, this version reads {SCHEMA}")
        return [_crossover(entry) for entry in held["crossovers"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"warpring: {path} is not used ({type(error).__name__}: {error}). Run 'warpring tune' anew.", stacklevel=3
        )
        return []


def _crossover(entry: dict[str, Any]) -> Crossover:
    """An entry of a file; ValueError, KeyError or TypeError where it is none."""
    found = Crossover(**entry)
    for name, least in (("max_tokens", 0), ("hidden", 1), ("intermediate", 1), ("num_experts", 1), ("topk", 1)):
        if type(entry[name]) is not int or entry[name] < least:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {entry[name]!r}")
    get_format(found.format)
    return replace(found, batches=tuple(map(int, entry["batches"])))


def write(path: Path, device: str, found: Iterable[Crossover]) -> None:
    """Write a file of crossovers in one step, sorted, and forget what was looked up before.

    Raises:
        ArgumentError: the file is another device's whose name gives the same file name.
    """
    if path.exists():
        owner = json.loads(path.read_text(encoding="utf-8")).get("device", device)
        if owner != device:
            raise ArgumentError(f"write: {path} holds the crossovers of {owner!r}, not of {device!r}. Move it away.")
    ordered = sorted(found, key=lambda crossover: crossover.key)
    lines = ",\n".join(f"    {json.dumps(asdict(crossover))}" for crossover in ordered)
    text = f'{{\n  "schema": {SCHEMA},\n  "device": {json.dumps(device)},\n  "crossovers": [\n{lines}\n  ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
        handle.write(text)
    os.replace(handle.name, path)
    forget()
