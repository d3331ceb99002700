"""Processes that tests share as ranks: one crew after another where one was lost, and nobody's group but its own."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks


def who(rank: int) -> tuple[int, int]:
    """The process, and the sum of all ranks as the group gives it."""
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return os.getpid(), int(total)


def die(rank: int, which: int) -> int:
    if rank == which:
        os._exit(1)
    return rank


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("as asked")


def leave(rank: int) -> None:
    """Rank 1 waits for nobody any more, rank 0 later returns."""
    if rank == 0:
        time.sleep(0.2)


def pids() -> set[int]:
    found = run_ranks(who, 2)
    assert [total for _, total in found] == [1, 1]
    return {pid for pid, _ in found}


def test_scenarios_share_their_processes() -> None:
    first = pids()
    assert len(first) == 2
    assert os.getpid() not in first
    run_ranks(leave, 2)
    assert pids() == first


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_died_is_none_and_others_take_the_places_of_all(which: int) -> None:
    first = pids()
    assert run_ranks(die, 2, which) == [None if rank == which else rank for rank in (0, 1)]
    assert not pids() & first


def test_what_a_rank_raised_is_raised_and_others_take_the_places_of_all() -> None:
    first = pids()
    with pytest.raises(RuntimeError, match="rank 1: ValueError: as asked"):
        run_ranks(fail, 2)
    assert not pids() & first
