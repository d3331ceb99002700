"""Benchmark records: one JSON object a measured point, one line each, appended and never edited.

`SCHEMA` is the whole vocabulary: which fields each bench may hold, their types, and which must be there.
A record that breaks it is refused before it is written, so that a table can trust what it reads.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from warpring.errors import ArgumentError

Record = dict[str, Any]

FORMATS = ("bf16", "fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4")
PATHS = ("reference", "classical", "cores", "warp", "tile", "grouped", "auto")
ROUTINGS = ("uniform", "zipf", "recorded")
#: What was measured when it was not one of our paths; a peer's name is free text in `impl`.
OWN_IMPL = "warpring"
#: The grouped path on packed weights, as records call it: what it does with them costs other than row-major ones do,
#: and on Hopper rounds otherwise. Timed beside the path on rows it is an `impl`; to `warpring verify` it is a path.
PACKED_GROUPED = "warpring_grouped_packed"
ACCURACY_PATHS = (*PATHS, "grouped_packed")

_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class Field:
    """One field: its type (float accepts int), the values it may take, the least number it may be."""

    type: type
    choices: tuple[str, ...] | None = None
    least: float = 0.0

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        accepted = (int, float) if self.type is float else (self.type,)
        if isinstance(value, bool) != (self.type is bool) or not isinstance(value, accepted):
            return f"must be {self.type.__name__}"
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= self.least):
            return f"must be finite and at least {self.least:g}"
        return None


_INT, _FLOAT, _STR = Field(int), Field(float), Field(str)
_PATH = Field(str, PATHS)
_COSINE = Field(float, least=-1.0)
_EP_FORM = Field(str, ("fp8", "bf16"))
#: What every bench of an expert-parallel layer says of it.
_EP_LAYER = {
    "num_ranks": _INT,
    "experts_per_rank": _INT,
    "topk": _INT,
    "activation": _EP_FORM,
    "comm_sms": _INT,
    "compute_sms": _INT,
}

COMMON: dict[str, Field] = {
    "bench": _STR,
    "impl": _STR,
    "model": _STR,
    "format": Field(str, FORMATS),
    "gpu": _STR,
    "driver": _STR,
    "cuda": _STR,
    "torch": _STR,
    "cpu": _STR,
    "python": _STR,
    "commit": _STR,
    "date": _STR,
    "seed": _INT,
    "repeats": _INT,
    "p10_us": _FLOAT,
    "p50_us": _FLOAT,
    "p90_us": _FLOAT,
    "read_peak_gbs": _FLOAT,
    "note": _STR,
}

SCHEMA: dict[str, dict[str, Field]] = {
    "decode": {
        "path": _PATH,
        "num_tokens": _INT,
        "topk": _INT,
        "routing": Field(str, ROUTINGS),
        "unique_bytes": _INT,
        "requested_bytes": _INT,
        "fraction_of_peak": _FLOAT,
        "launches": _INT,
    },
    "shared": {
        "path": _PATH,
        "num_tokens": _INT,
        "topk": _INT,
        "routing": Field(str, ROUTINGS),
        "num_shared": _INT,
        "shared_expert": Field(str, ("none", "fused", "separate")),
        "unique_bytes": _INT,
        "fraction_of_peak": _FLOAT,
        "launches": _INT,
    },
    "accuracy": {
        "path": Field(str, ACCURACY_PATHS),
        "num_tokens": _INT,
        "inputs": Field(str, ("synthetic", "recorded")),
        "cosine_min": _COSINE,
        "max_abs_diff": _FLOAT,
        "rms_rel_error": _FLOAT,
        "error_factor_vs_classical": _FLOAT,
    },
    "end_to_end": {
        "path": _PATH,
        "batch": _INT,
        "context": _INT,
        "tokens_per_s": _FLOAT,
        "experts_share": _FLOAT,
        "attention_share": _FLOAT,
        "other_share": _FLOAT,
    },
    "profile": {
        "path": _PATH,
        "num_tokens": _INT,
        "kernel": _STR,
        "dram_gbs": _FLOAT,
        "fraction_of_peak": _FLOAT,
        "issue_share": _FLOAT,
        "occupancy": _FLOAT,
        "registers": _INT,
        "smem_bytes": _INT,
        "spill_bytes": _INT,
        "stalls": _STR,
    },
    "resources": {
        "arch": _STR,
        "kernel": _STR,
        "form": _STR,
        "registers": _INT,
        "smem_bytes": _INT,
        "spill_bytes": _INT,
    },
    "expert_parallel": {
        **_EP_LAYER,
        "tokens_per_rank": _INT,
        "routing": Field(str, ROUTINGS),
        "skew": _FLOAT,
        "asked_skew": _FLOAT,
        "wire": _EP_FORM,
        "overlap": Field(bool),
        "ring_blocks": _INT,
        "block_m": _INT,
        "shared_expert": Field(str, ("none", "fused", "separate")),
        "weight_floor_us": _FLOAT,
        "wire_floor_us": _FLOAT,
        "tflops": _FLOAT,
        "hbm_gbs": _FLOAT,
        "cosine_min": _COSINE,
        "knob": _STR,
        "failed": _STR,
    },
    "ep_verify": {
        **_EP_LAYER,
        "max_tokens_per_rank": _INT,
        "shared_expert": Field(str, ("none", "fused")),
        "case": _STR,
        "tokens": _INT,
        "cosine_min": _COSINE,
        "exact_cosine_min": _COSINE,
        "rms_rel_error": _FLOAT,
        "met": Field(bool),
    },
    "soak": {
        **_EP_LAYER,
        "tokens_per_rank": _INT,
        "shared_expert": Field(str, ("none", "fused")),
        "calls": _INT,
        "checks": _INT,
        "cosine_min": _COSINE,
        "changed_values": _INT,
        "allocated_bytes": _INT,
        "device_bytes": _INT,
        "seconds": _FLOAT,
    },
    "perplexity": {
        "path": _PATH,
        "checkpoint": _STR,
        "held_out_tokens": _INT,
        "perplexity": _FLOAT,
    },
}

_REQUIRED_COMMON = ("bench", "impl", "torch", "commit", "date")
REQUIRED: dict[str, tuple[str, ...]] = {
    "decode": ("model", "format", "num_tokens", "topk", "routing", "p50_us", "unique_bytes"),
    "shared": ("model", "format", "path", "num_tokens", "num_shared", "shared_expert", "p50_us", "unique_bytes"),
    "accuracy": ("model", "format", "path", "num_tokens", "inputs", "cosine_min", "max_abs_diff", "rms_rel_error"),
    "end_to_end": ("model", "format", "batch", "tokens_per_s"),
    "profile": ("model", "format", "path", "num_tokens", "kernel", "p50_us", "dram_gbs", "registers", "spill_bytes"),
    "resources": ("model", "format", "arch", "kernel", "registers", "smem_bytes", "spill_bytes", "cuda"),
    "expert_parallel": ("model", "format", "num_ranks", "tokens_per_rank", "p50_us"),
    "ep_verify": ("model", "format", "num_ranks", "case", "repeats", "tokens", "cosine_min", "exact_cosine_min", "met"),
    "soak": ("model", "format", "num_ranks", "repeats", "checks", "cosine_min", "changed_values", "device_bytes"),
    "perplexity": ("checkpoint", "format", "held_out_tokens", "perplexity"),
}


def record(bench: str, *, device: torch.device | str | None = None, **fields: Any) -> Record:
    """One checked record: `fields` plus where and with what it was measured.

    Args:
        bench: a key of `SCHEMA`.
        device: where the work ran; None means the GPU if there is one. A GPU adds gpu, driver and cuda, a CPU
            adds cpu and python.
        fields: fields of that bench. `impl` is "warpring" unless given; fields that do not apply are left out.
            An environment field given here (`commit`, `date`, ...) wins over the one found.

    Raises:
        ArgumentError: an unknown bench, an unknown or missing field, a value of the wrong type or range.
    """
    rec: Record = {"bench": bench, "impl": OWN_IMPL, **environment(device)}
    rec["date"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rec.update(fields)
    validate(rec)
    return rec


def validate(rec: Record) -> None:
    """Raise ArgumentError unless `rec` follows the schema of its bench."""
    bench = rec.get("bench")
    if not isinstance(bench, str) or bench not in SCHEMA:
        raise ArgumentError(f"record: bench must be one of {', '.join(SCHEMA)}; got {bench!r}.")
    known = COMMON | SCHEMA[bench]
    for name, value in rec.items():
        if name not in known:
            raise ArgumentError(
                f"record: {name!r} is no field of bench {bench!r}. Known are {', '.join(sorted(known))}; "
                "put free remarks into 'note'."
            )
        problem = known[name].problem(value)
        if problem:
            raise ArgumentError(f"record: {name} {problem}; got {value!r} in bench {bench!r}.")
    required = _REQUIRED_COMMON + REQUIRED[bench]
    if bench == "decode" and rec.get("impl") == OWN_IMPL:
        required += ("path",)
    # A point that gave no time says why instead.
    missing = [name for name in required if name not in rec and not (name == "p50_us" and "failed" in rec)]
    if missing:
        raise ArgumentError(f"record: bench {bench!r} needs {', '.join(required)}; missing {', '.join(missing)}.")
    if "model" in rec and not _MODEL.fullmatch(rec["model"]):
        raise ArgumentError(
            f"record: model must be lower-case letters, digits and '._-', as in 'qwen3-30b-a3b' or "
            f"'h2048xi768xe128xk8'; got {rec['model']!r}."
        )


def append(path: str | os.PathLike[str], rec: Record) -> None:
    """Check `rec` and add it to the JSONL file `path` (made, with its folder, where missing)."""
    validate(rec)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(rec, allow_nan=False) + "\n")


def load(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a JSONL file, in file order, each checked; [] where the file is missing.

    Raises:
        ArgumentError: a line that is no JSON object or breaks the schema; the message names file and line.
    """
    path = Path(path)
    if not path.exists():
        return []
    found: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rec = json.loads(line)
            validate(rec)
        except (json.JSONDecodeError, AttributeError, ArgumentError) as error:
            raise ArgumentError(f"load: {path}:{number}: {error}") from error
        found.append(rec)
    return found


def newest(records: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """The newest record of each distinct combination of `keys`, in order of first appearance.

    A field that a record lacks counts as None. Newest is by date; of one date, the later in the file.
    """
    latest: dict[tuple[Any, ...], Record] = {}
    for rec in records:
        key = tuple(rec.get(name) for name in keys)
        if key not in latest or rec["date"] >= latest[key]["date"]:
            latest[key] = rec
    return list(latest.values())


def environment(device: torch.device | str | None = None) -> dict[str, str]:
    """Fields that say where the code runs: commit, torch, and gpu, driver, cuda or cpu, python."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    env = {"torch": torch.__version__, "commit": commit()}
    if device.type == "cuda":
        env |= {"gpu": torch.cuda.get_device_name(device), "driver": driver_version(), "cuda": str(torch.version.cuda)}
    else:
        env |= {"cpu": _cpu_name(), "python": platform.python_version()}
    return env


@functools.cache
def commit() -> str:
    """Commit of the code that runs: of the checkout, "-dirty" where src/ or bench/ has changes (results aside).

    Outside a checkout it is the environment variable WARPRING_COMMIT, else the installed version.
    """
    root = Path(__file__).resolve().parents[3]
    toplevel = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    # An installed wheel may lie inside somebody else's checkout: that one's commit says nothing about us.
    if toplevel and head and Path(toplevel).resolve() == root:
        changes = _output("git", "-C", str(root), "status", "--porcelain", "--", "src", "bench", ":!bench/results")
        return f"{head}-dirty" if changes else head
    if named := os.environ.get("WARPRING_COMMIT"):
        return named
    try:
        return f"v{importlib.metadata.version('warpring')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def driver_version() -> str:
    """Version of the NVIDIA driver, e.g. "580.159", or "unknown"."""
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if told:
        return told.splitlines()[0].strip()
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.exists() else "unknown"


@functools.cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return f"{match[1].strip()} ({os.cpu_count()} cores)"
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


def _output(*command: str) -> str:
    """Standard output of a command, stripped; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
