"""An end for what may never answer.

A kernel of another library that waits for ever cannot be taken off a GPU while its process lives, and nothing else runs
there any more. So the process ends, and says why: what was measured before is written by then.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

#: Seconds that a peer may take for anything that is waited for.
PATIENCE = 30.0
#: Exit status of a process that ended because a peer gave no answer.
UNANSWERED = 75


def leave(what: str) -> None:
    """Say on standard error what happened, and end the process at once: an orderly end would wait for the GPU."""
    print(f"{what}; its kernel cannot be taken off the GPU, so this process ends here", file=sys.stderr, flush=True)
    os._exit(UNANSWERED)


@dataclass(frozen=True)
class Watchdog:
    """Gives up what takes too long, even while the process waits in a library that listens to nobody.

    Attributes:
        seconds: that a step may take; infinity watches nothing.
        give_up: called from another thread, once a step, with what gave no answer; the default ends the process.
    """

    seconds: float = PATIENCE
    give_up: Callable[[str], object] = leave

    @contextmanager
    def __call__(self, what: str) -> Generator[None]:
        """Watch a step; `what` names it, as in "glm-5.2: a peer at 8 tokens"."""
        if self.seconds == float("inf"):
            yield
            return
        timer = threading.Timer(self.seconds, self.give_up, [f"{what} gave no answer in {self.seconds:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
