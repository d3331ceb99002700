"""Loading and quantising stream: resident memory grows by one shard and one layer, not by the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import qwen3_config, write

MIB = 2**20
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 12, 4, 512, 1024
LAYER_BYTES = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2  # 12 MiB in BF16
SHARD_BYTES = 2 * LAYER_BYTES
CHECKPOINT_BYTES = LAYERS * LAYER_BYTES
# Interpreter noise, page-table rounding, and the FP32 temporaries of one expert.
SLACK_BYTES = 16 * MIB

# VmHWM is the high-water mark of resident memory, mapped files included; 5 in clear_refs resets it.
_MEASURE = """
import re, sys
from pathlib import Path
import torch
from warpring.checkpoint import Checkpoint, quantize_checkpoint
from warpring.formats import get_format

source, only_first, target, shard_bytes = sys.argv[1:]

def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(format=None):
    checkpoint = Checkpoint(source)
    for layer in checkpoint.moe_layers:
        checkpoint.load_experts(layer, format=format)

def others():
    for name, tensor in Checkpoint(only_first).other_tensors():
        tensor.sum()

works = {
    "load": load,
    "load quantised": lambda: load("mxfp8"),
    "other tensors": others,
    "quantize": lambda: quantize_checkpoint(source, target, "mxfp8", shard_bytes=int(shard_bytes)),
}
get_format("mxfp8").quantize(torch.randn(64, 64))
for name, work in works.items():
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    print(name, resident("VmHWM") - before, sep="=")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards: list[dict[str, torch.Tensor]] = []
    for layer in range(LAYERS):
        # Each layer lies across the border of two shards.
        for half in (0, 1):
            tensors = {f"model.layers.{layer}.other{half}": torch.ones(256, 256)}
            for expert in range(half * EXPERTS // 2, (half + 1) * EXPERTS // 2):
                stem = f"model.layers.{layer}.mlp.experts.{expert}."
                tensors[f"{stem}gate_proj.weight"] = torch.ones(INTERMEDIATE, HIDDEN).bfloat16()
                tensors[f"{stem}up_proj.weight"] = torch.ones(INTERMEDIATE, HIDDEN).bfloat16()
                tensors[f"{stem}down_proj.weight"] = torch.ones(HIDDEN, INTERMEDIATE).bfloat16()
            shards.append(tensors)
    # Shards of two layers, cut in the middle of every other one.
    merged = [shards[0]]
    for start in range(1, len(shards), 4):
        merged.append({name: t for shard in shards[start : start + 4] for name, t in shard.items()})
    config = qwen3_config(num_experts=EXPERTS, intermediate=INTERMEDIATE, hidden=HIDDEN, layers=LAYERS)
    return write(tmp_path_factory.mktemp("memory") / "source", config, *merged)


@pytest.fixture(scope="module")
def growth(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Most bytes that each piece of work added to the resident memory of one fresh process."""
    root = tmp_path_factory.mktemp("measured")
    # The same shards, links as in a hub cache, under a config of one layer: the others are no experts then.
    only_first = root / "first"
    only_first.mkdir()
    for path in source.iterdir():
        (only_first / path.name).symlink_to(path)
    (only_first / "config.json").unlink()
    config = qwen3_config(num_experts=EXPERTS, intermediate=INTERMEDIATE, hidden=HIDDEN, layers=1)
    (only_first / "config.json").write_text(json.dumps(config))
    arguments = [source, only_first, root / "target", LAYER_BYTES // 2]
    command = [sys.executable, "-c", _MEASURE, *map(str, arguments)]
    # glibc keeps freed blocks for reuse, more or fewer of them from run to run, unless the limit is fixed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 8)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return {name: int(grown) for name, grown in (line.split("=") for line in done.stdout.splitlines())}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("work", "layers"), [("load", 1), ("load quantised", 1), ("other tensors", 0), ("quantize", 1)]
)
def test_peak_is_one_shard_and_one_layer(growth: dict[str, int], work: str, layers: int) -> None:
    limit = SHARD_BYTES + layers * LAYER_BYTES + SLACK_BYTES
    assert limit < CHECKPOINT_BYTES / 2
    assert growth[work] <= limit, f"grew by {growth[work] / MIB:.1f} MiB, allowed {limit / MIB:.1f}"
