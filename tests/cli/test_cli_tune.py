"""`warpring tune`: measures, keeps what it found where the library looks, and refuses what it cannot measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warpring.bench import read_peak
from warpring.cli import main
from warpring.policy import device_name, file_of, forget, limit, read

TINY_MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr("warpring.policy.tuned_dir", lambda: tmp_path)
    forget()
    yield tmp_path
    forget()


def test_what_was_tuned_decides_from_then_on(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = device_name(torch.device("cpu"))
    layer = (name, "cores", "mxfp4", 64, 32, 6, 2)
    assert limit(*layer).source == "rule of thumb"
    argv = ["tune", "--shape", "h64xi32xe6xk2", "--format", "bf16,mxfp4", "--device", "cpu", "--seconds", "0.3"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    kept = file_of(tuned, name)
    assert f"kept in {kept}" in out
    found = {crossover.format: crossover for crossover in read(kept)}
    assert set(found) == {"bf16", "mxfp4"}
    for format, crossover in found.items():
        assert f"{format:<12}cores  leads up to {crossover.max_tokens} tokens" in out
    assert "tuned on this machine" in limit(*layer).source


def test_checkpoint_gives_shape_and_format(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(TINY_MODEL), "--device", "cpu", "--seconds", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("h160xi96xe32xk4 on ")
    (found,) = read(file_of(tuned, device_name(torch.device("cpu"))))
    assert (found.format, found.hidden, found.intermediate, found.num_experts, found.topk) == ("bf16", 160, 96, 32, 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--format", "int3"], "--format must hold bf16"),
        (["--shape", "h64"], "a shape must be one of"),
        (["--seconds", "0"], "--seconds must be above 0; got 0"),
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_command_line_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
