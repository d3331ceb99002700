"""Steps that give no answer end the process; those that do end nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warpring.bench.watchdog import UNANSWERED, Watchdog

ROOT = Path(__file__).parents[2]
#: Blocks the main thread where no signal and no exception reaches Python, as a wait for a GPU does.
_STUCK = """
import ctypes, sys
from warpring.bench.watchdog import Watchdog
print("measured before")
sys.stdout.flush()
with Watchdog(0.3)("a peer at T=1"):
    ctypes.CDLL(None).pause()
"""


def test_what_takes_too_long_is_given_up_once() -> None:
    said: list[str] = []
    with Watchdog(0.02, said.append)("glm: a peer"):
        time.sleep(0.2)
    assert said == ["glm: a peer gave no answer in 0.02 s"]


def test_what_answers_in_time_is_left_alone() -> None:
    said: list[str] = []
    with Watchdog(0.2, said.append)("a peer"):
        pass
    with pytest.raises(ValueError, match="theirs"), Watchdog(0.2, said.append)("a peer"):
        raise ValueError("theirs")
    with Watchdog(float("inf"), said.append)("a peer"):
        pass
    time.sleep(0.4)
    assert not said


def test_a_stuck_process_ends_and_says_why() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == UNANSWERED
    assert done.stdout == "measured before\n"
    assert "a peer at T=1 gave no answer in 0.3 s; its kernel cannot be taken off the GPU" in done.stderr
