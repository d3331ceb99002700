"""The command line as a whole: help, one line for what a user got wrong, exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from warpring import ArgumentError, UnsupportedError, __version__, cli
from warpring.cli import COMMANDS, main

SRC = Path(__file__).parents[2] / "src"


def test_help_names_every_command_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for command in COMMANDS:
        described = [line.split(maxsplit=1) for line in lines if line.startswith(f"    {command} ")]
        assert len(described) == 1, f"{command} has one line of its own"
        assert len(described[0][1]) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: warpring {command}" in capsys.readouterr().out


def test_examples_of_the_help_name_real_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  warpring ")]
    assert {words[1] for words in shown} >= set(COMMANDS)


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"warpring {__version__}"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["speed"],
        ["bench", "--fast"],
        ["bench", "--repeats", "many"],
        ["bench", "--routing", "skewed"],
        ["bench", "--model", "qwen3-30b-a3b", "--shape", "h32xi32xe1xk1"],
        ["bench", "--seed", "-1"],
        ["bench", "--seed", str(2**63)],
        ["verify", "--seed", "9" * 30],
        ["generate", "--seed", "9" * 30],
        ["generate", "--seed", "9" * 5000],
        ["doctor", "now"],
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warpring: ")
    assert captured.err.count("\n") == 1
    assert "--help" in captured.err


def with_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Replace the parser by one whose only command, `x`, does `run`."""
    parser = cli.Parser(prog="warpring")
    parser.add_subparsers().add_parser("x").set_defaults(run=run)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ArgumentError("f: a must be 1;\n got 2."), 2, "warpring: f: a must be 1; got 2."),
        (UnsupportedError("no such GPU"), 2, "warpring: no such GPU"),
        (UnsupportedError(), 2, "warpring: UnsupportedError"),
        (
            FileNotFoundError(2, "No such file or directory", "model.safetensors"),
            2,
            "warpring: model.safetensors: No such",
        ),
        (OSError("disk is gone"), 2, "warpring: disk is gone"),
        (MemoryError(), 2, "warpring: not enough memory: MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory:\n 9 bytes."), 2, "warpring: not enough memory: Def"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, "warpring: not enough memory: CUDA out of memory."),
        (KeyboardInterrupt(), 130, "warpring: interrupted"),
    ],
)
def test_error_of_a_command_is_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise error

    with_command(monkeypatch, run)
    assert main(["x"]) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_traceback_flag_lets_the_error_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: argparse.Namespace) -> int:
        raise ArgumentError("wrong")

    with_command(monkeypatch, run)
    with pytest.raises(ArgumentError, match="wrong"):
        main(["x", "--traceback"])


@pytest.mark.parametrize("bug", [ZeroDivisionError, RuntimeError])
def test_bug_is_not_hidden_as_bad_input(bug: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: argparse.Namespace) -> int:
        raise bug("shapes cannot be multiplied")

    with_command(monkeypatch, run)
    with pytest.raises(bug):
        main(["x"])


def test_exit_code_is_what_the_command_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, lambda _: 1)
    assert main(["x"]) == 1


def test_python_m_warpring_runs_and_a_closed_pipe_is_quiet() -> None:
    env = os.environ | {"PYTHONPATH": str(SRC)}
    wrong = subprocess.run([sys.executable, "-m", "warpring", "speed"], env=env, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    code = (
        "import sys, warpring.cli as cli, argparse\n"
        "p = cli.Parser(); p.add_subparsers().add_parser('x').set_defaults(run=lambda a: print('y' * 10**6) or 0)\n"
        "cli.build_parser = lambda: p\n"
        "sys.exit(cli.main(['x']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")
