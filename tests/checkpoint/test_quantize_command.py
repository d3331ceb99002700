"""`warpring quantize`: its options, its one line of output, and what it makes of bad ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from checkpoint_files import all_tensors, qwen3_config, write

from warpring import ArgumentError, CheckpointError
from warpring.checkpoint import Checkpoint
from warpring.cli import quantize
from warpring.formats import FORMATS


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quantize.add_parser(parser.add_subparsers())
    return parser.parse_args(["quantize", *arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {"lm_head.weight": torch.randn(32, 64)}
    for expert in range(4):
        stem = f"model.layers.0.mlp.experts.{expert}."
        tensors[f"{stem}gate_proj.weight"], tensors[f"{stem}up_proj.weight"] = torch.randn(2, 32, 64).bfloat16()
        tensors[f"{stem}down_proj.weight"] = torch.randn(64, 32).bfloat16()
    return write(tmp_path / "source", qwen3_config(num_experts=4, intermediate=32, hidden=64), tensors)


def test_formats_offered_are_the_registered_ones() -> None:
    assert list(FORMATS) == list(quantize.FORMAT_NAMES)


@pytest.mark.parametrize("format", FORMATS)
def test_command_writes_a_checkpoint_that_loads(
    source: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(str(source), str(tmp_path / "q"), "--format", format)
    assert args.run(args) == 0
    assert Checkpoint(tmp_path / "q").load_experts(0).format == format
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'q'}: experts in {format}\n"
    # No terminal, no progress bar: logs and pipes stay clean.
    assert captured.err == ""


def test_shard_size_and_overwrite_reach_the_writer(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q"
    args = parse(str(source), str(target), "--format", "mxfp8", "--shard-size", "9KB")
    assert args.run(args) == 0
    files = list(target.glob("*.safetensors"))
    assert len(files) > 2
    assert sum(t.nbytes for t in all_tensors(target).values()) > 2 * 9000
    args = parse(str(source), str(target), "--format", "mxfp4")
    with pytest.raises(ArgumentError, match="target must not exist"):
        args.run(args)
    args = parse(str(source), str(target), "--format", "mxfp4", "--overwrite")
    assert args.run(args) == 0
    assert Checkpoint(target).load_experts(0).format == "mxfp4"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("1.5 kib", 1536),
        ("10B", 10),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert quantize.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "0.1", "-5GB", "5XB", "5 G B", "nan", "1e9", "9" * 400, "9" * 19])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--shard-size must be a positive size"):
        quantize.parse_size(text)


def test_format_is_required_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("a", "b"), ("a", "b", "--format", "int4")):
        with pytest.raises(SystemExit):
            parse(*arguments)
        assert "--format" in capsys.readouterr().err


def test_missing_source_is_an_error_of_ours(tmp_path: Path) -> None:
    args = parse(str(tmp_path / "none"), str(tmp_path / "q"), "--format", "mxfp8")
    with pytest.raises(CheckpointError, match="local checkpoint directory"):
        args.run(args)
