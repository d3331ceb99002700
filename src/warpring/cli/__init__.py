"""The `warpring` command: one file a subcommand, each with `add_parser(subparsers)` and a `run(args) -> int`.

What a user can get wrong ends in one line on stderr and exit code 2; `--traceback` shows where it came from.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from warpring.errors import ArgumentError, WarpringError

#: Modules of this package that register a subcommand, in the order in which help lists them.
COMMANDS = (
    "generate",
    "verify",
    "bench",
    "tune",
    "quantize",
    "doctor",
    "precompile",
    "ep-plan",
    "ep-verify",
    "ep-bench",
)

_DESCRIPTION = "Mixture-of-experts decode at the speed of memory."

_EXAMPLES = """\
run a model
  warpring generate examples/tiny-qwen3-moe --prompt "def main("
  warpring quantize examples/tiny-qwen3-moe tiny-mxfp8 --format mxfp8

check and measure
  warpring doctor                              what runs on this machine, and why not
  warpring verify                              accuracy of every path against FP64
  warpring bench --model qwen3-30b-a3b --format mxfp8 --batches 1,2,4,8
  warpring tune --model qwen3-30b-a3b --format mxfp8      which path serves which batch here

ahead of time
  warpring precompile --model qwen3-30b-a3b --format mxfp8 --arch sm_90a

several GPUs
  warpring ep-plan --model deepseek-v4-flash --ranks 8        predicted time and partition
  warpring ep-verify         one rank; two: torchrun --nproc-per-node 2 -m warpring ep-verify
  warpring ep-bench          likewise

warpring COMMAND --help explains one command.
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage: the caller prints one line."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. Try '{self.prog} --help'.")


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="warpring",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20),
    )
    parser.add_argument("-V", "--version", action="version", version=f"warpring {version()}")
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name in COMMANDS:
        importlib.import_module(f"warpring.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name; None reads sys.argv).

    Returns:
        Exit code: 0, what the command gives, 2 for a bad input or a missing file, 130 when interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    show_traceback = "--traceback" in argv
    try:
        args = build_parser().parse_args([arg for arg in argv if arg != "--traceback"])
        return args.run(args)
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("warpring: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (WarpringError, OSError, MemoryError, RuntimeError) as error:
        if show_traceback or not _is_users(error):
            raise
        print(f"warpring: {_one_line(error)}", file=sys.stderr)
        return 2


def seed(text: str) -> int:
    """The value of a --seed: what every generator here takes."""
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be 0 to 2^63 - 1; got {text}")
    return value


def read_text(path: str) -> str:
    """The text of a file that the command line names; ArgumentError where it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: must be UTF-8 text; {error}.") from error


def _is_users(error: Exception) -> bool:
    """Whether a command line can cause this error; torch says only in words that it asked for too much memory."""
    if not isinstance(error, RuntimeError) or isinstance(error, WarpringError):
        return True
    return any(words in str(error).lower() for words in ("out of memory", "can't allocate memory"))


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (WarpringError, OSError)):
        return text
    return f"not enough memory: {text} Take a smaller shape, batch or format."


def version() -> str:
    """The version of this package, installed or not; read from the module, which is above this one in the layers."""
    return sys.modules["warpring"].__version__
