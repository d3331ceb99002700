"""The command line of modules that write the package's data from bench records, or check that it is what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from warpring.policy import file_of

T = TypeVar("T")


def main_of(
    module: str,
    data_dir: Path,
    stale: Callable[[Path, Path], Mapping[str, T]],
    write: Callable[[Path, str, T], None],
    argv: Sequence[str] | None,
    say: Callable[[T], str] = lambda _: "",
) -> int:
    """Write what is stale, one file a device, or with --check only say which file is; gives the exit code.

    Args:
        module: its name, for the help.
        data_dir: where the package has these files.
        stale: (checkout, folder) -> device -> what the records of the checkout say and the folder's file does not.
        write: (file, device, what to say) -> None.
        argv: arguments; None takes the process's.
        say: what to add to a file's line.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=f"Write src/warpring/data/{data_dir.name} from bench/results."
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the current folder)")
    parser.add_argument("--output", type=Path, default=data_dir, help="default: the package's own data")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is stale")
    args = parser.parse_args(argv)
    changed = stale(args.root, args.output)
    for device, said in changed.items():
        target = file_of(args.output, device)
        print(f"{'stale' if args.check else 'wrote'}: {target}{say(said)}")
        if not args.check:
            write(target, device, said)
    return 1 if args.check and changed else 0
