"""`warpring ep-plan`: a row a token count, and errors that name the option."""

from __future__ import annotations

import pytest

from warpring.cli import main


def test_prints_a_row_for_each_token_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep-plan", "--model", "deepseek-v4-flash", "--format", "fp8_block", "--tokens", "1,64"]) == 0
    out = capsys.readouterr().out
    assert "deepseek-v4-flash, fp8_block weights" in out
    assert "8 + 124" in out
    assert "Predicted, not measured" in out


def test_machine_and_partition_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ep-plan", "--shape", "h2048xi768xe128xk8", "--tokens", "8", "--sms", "100", "--comm-sms", "20"]
    assert main(argv) == 0
    assert "20 + 80" in capsys.readouterr().out


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
