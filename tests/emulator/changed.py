"""Kernels' sources with something changed: what a test must find, or what a GPU may do and the emulator does not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from warpring.runtime.jit import KERNEL_DIR


def write_changed(directory: Path, names: str, changes: Iterable[tuple[str, str]]) -> None:
    """All kernels' sources to `directory`, with each of the changes in those whose names match.

    Args:
        directory: for `emulated_gpu` and `load`.
        names: a regular expression for the beginning of the files' names.
        changes: what is taken out, which must be there once in all of them together, and what takes its place.
    """
    found = dict.fromkeys(changes, 0)
    for path in (*KERNEL_DIR.glob("*.cu"), *KERNEL_DIR.glob("*.cuh")):
        source = path.read_text()
        if re.match(names, path.name):
            for removed, instead in found:
                found[removed, instead] += source.count(removed)
                source = source.replace(removed, instead)
        (directory / path.name).write_text(source)
    assert all(count == 1 for count in found.values()), found
