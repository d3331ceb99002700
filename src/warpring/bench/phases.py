"""Where a bench's own time goes: one line a phase, so that the next run on a rented GPU can be made shorter."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


class Phases:
    """Tells how long each phase took, in seconds and without the phases within it.

    Args:
        say: gets a line like "packed fp8 2.04 s" at the end of each phase; None measures nothing.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say
        self._within = 0.0

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """The phase called `name`; its end waits for the GPU, so that no phase pays for what another queued."""
        if self._say is None:
            yield
            return
        start, before, self._within = time.monotonic(), self._within, 0.0
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            took = time.monotonic() - start
            self._say(f"{name} {took - self._within:.2f} s")
            self._within = before + took
