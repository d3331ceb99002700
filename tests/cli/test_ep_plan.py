"""`warpring ep-plan`: a row a token count, roles, the error where layers were measured, errors that name the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpring.cli import main
from warpring.expert_parallel import machines
from warpring.expert_parallel.machines import H200, Calibration, calibration_of, write
from warpring.policy import file_of


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without constants of any GPU."""
    monkeypatch.setattr(machines, "DATA_DIR", tmp_path)
    calibration_of.cache_clear()
    return tmp_path


def out_of(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command prints, with its line breaks gone."""
    assert main(["ep-plan", *options]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_prints_a_row_for_each_token_count(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, "--model", "deepseek-v4-flash", "--format", "fp8_block", "--tokens", "1,64")
    assert "deepseek-v4-flash, fp8_block weights" in out
    assert out.count("+ 124") + out.count("+ 116") == 2
    assert all(f"role{role}" in out for role in (1, 2, 3))
    assert "no layer was measured on H200, so the error is not known" in out


def test_machine_and_partition_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, "--shape", "h2048xi768xe128xk8", "--tokens", "8", "--sms", "100", "--comm-sms", "20")
    assert "20 + 80" in out


def test_error_of_the_prediction_is_stated_and_splits_are_measured_ones(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Calibration(H200, (), (24,), 40, 12, "glm", 0.01, 0.023, 0.057, 0.0, "abc", "2026-05-01")
    write(file_of(data, "NVIDIA H200"), "NVIDIA H200", known)
    out = out_of(capsys, "--tokens", "8")
    assert "24 + 108" in out
    assert "on 12 others (glm) predictions are off by 2.3 % on average, 5.7 % at worst." in out
    assert "as it is" not in out
    assert "not for changed figures" in out_of(capsys, "--tokens", "8", "--read-gbs", "4000")
    assert "8 + 92" in out_of(capsys, "--tokens", "8", "--sms", "100")
    assert "no layer was measured on B300" in out_of(capsys, "--tokens", "8", "--machine", "b300")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens must be counts of 1 to 256, as"),
        (["--tokens", "x"], "--tokens must be counts"),
        (["--machine", "h20"], "--machine must be one of h200, b300"),
        (["--read-gbs", "-1"], "read_gbs must be positive"),
        (["--ranks", "7"], "num_ranks must be 1 to 72 and divide"),
        (["--comm-sms", "120"], "comm_sms must leave"),
        (["--format", "int4"], "format must be one of"),
    ],
)
def test_wrong_options_end_in_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep-plan", *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
