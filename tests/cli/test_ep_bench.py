"""`warpring ep-bench` on one CPU rank: a line and a record for each variant and count."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpring.bench.records import load
from warpring.cli import main

TINY = ["ep-bench", "--shape", "h64xi64xe4xk2", "--device", "cpu", "--windows", "1"]


def test_prints_and_records_each_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    assert main([*TINY, "--tokens", "1,3", "--activation", "fp8,bf16", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    records = load(output)
    assert [(rec["activation"], rec["tokens_per_rank"]) for rec in records] == [
        ("fp8", 1), ("bf16", 1), ("fp8", 3), ("bf16", 3),
    ]  # fmt: skip
    assert len(lines) == 4
    assert all("h64xi64xe4xk2 mxfp4 warpring" in line and " us [" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens must be counts of 1 to 256"),
        (["--impl", "deepep"], "--impl must hold"),
        (["--activation", "int8"], "--activation must hold"),
        (["--format", "int4"], "--format must hold"),
        (["--windows", "0"], "--windows must be at least 1"),
        (["--comm-sms", "x"], "--comm-sms must be counts"),
    ],
)
def test_wrong_options_end_in_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *options]) == 2
    assert words in capsys.readouterr().err
