"""Lines that say where a bench's time went."""

from __future__ import annotations

import re

import pytest
import torch

from warpring.bench import phases
from warpring.bench.phases import Phases


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(phases, "time", made)
    return made


def test_a_phase_does_not_count_those_within_it(clock: Clock) -> None:
    lines: list[str] = []
    phase = Phases(lines.append)
    with phase("built"):
        clock.now += 0.5
        with phase("packed fp8"):
            clock.now += 2.04
            with phase("experts"):
                clock.now += 3
        with phase("packed bf16"):
            clock.now += 1
        clock.now += 0.25
    with phase("timed"):
        clock.now += 4
    assert lines == ["experts 3.00 s", "packed fp8 2.04 s", "packed bf16 1.00 s", "built 0.75 s", "timed 4.00 s"]


def test_a_phase_that_fails_is_told_and_disturbs_no_other(clock: Clock) -> None:
    def fail() -> None:
        with phase("failed"):
            clock.now += 1
            raise ValueError("no")

    lines: list[str] = []
    phase = Phases(lines.append)
    with phase("all"):
        with pytest.raises(ValueError, match="no"):
            fail()
        clock.now += 2
    assert lines == ["failed 1.00 s", "all 2.00 s"]


def test_a_phase_ends_when_the_gpu_has_ended(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        clock.now += 7

    lines: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    with Phases(lines.append)("queued"):
        clock.now += 1
    with Phases()("nobody listens, nobody waits"):
        assert clock.now == 108
    assert clock.now == 108
    assert lines == ["queued 8.00 s"]


def test_seconds_are_real_ones() -> None:
    lines: list[str] = []
    with Phases(lines.append)("T=1 timed"):
        pass
    assert re.fullmatch(r"T=1 timed 0\.\d\d s", lines[0])
