"""Several ranks in processes of their own, for tests: real deaths, real stalls, on any machine."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: A server that has imported torch forks every rank: no import a rank, and no threads of the test's process in it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["warpring.expert_parallel.layer", "ep_ranks"])
#: Seconds after which a test's ranks are given up.
_PATIENCE = 120
#: Scenarios that the same processes run one after the other, before others take their place.
_MOST_SCENARIOS = 40
_crews: dict[int, _Crew] = {}


def run_ranks(scenario: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`scenario(rank, *args)` on every rank of a gloo group: what each returned, None for a rank that died.

    A scenario is a function of a module. Raises what a rank raised. Scenarios share processes and their group, since a
    process that has not used its GPU yet needs seconds for that; where one ends otherwise than by returning on every
    rank, the next gets new ones.
    """
    crew = _crews.pop(num_ranks, None)
    if crew is None or not crew.is_whole():
        if crew is not None:
            crew.dismiss()
        crew = _Crew(num_ranks)
    results = crew.run(scenario, args)
    if crew.is_whole() and crew.scenarios < _MOST_SCENARIOS:
        _crews[num_ranks] = crew
    else:
        crew.dismiss()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _Crew:
    """Processes that are the ranks of one group.

    Attributes:
        scenarios: how many they have run.
    """

    def __init__(self, num_ranks: int) -> None:
        self.scenarios = 0
        self._whole = True
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_rank, args=(theirs, store, rank, num_ranks), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, scenario: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """What each rank returned, None for one that died, an error for one that raised or gave nothing."""
        self.scenarios += 1
        for end in self._ends:
            end.send((scenario, args))
        deadline = time.monotonic() + _PATIENCE
        return [self._result(end, deadline) for end in self._ends]

    def _result(self, end: Connection, deadline: float) -> Any:
        if not end.poll(max(0.0, deadline - time.monotonic())):
            self._whole = False
            return TimeoutError(f"a rank gave no result within {_PATIENCE} s")
        try:
            result = end.recv()
        except (EOFError, ConnectionResetError):
            self._whole = False
            return None
        self._whole &= not isinstance(result, BaseException)
        return result

    def is_whole(self) -> bool:
        """Whether every rank lives, and ended every scenario by returning."""
        return self._whole and all(process.is_alive() for process in self._processes)

    def dismiss(self) -> None:
        """End the processes: those that wait for a scenario by themselves."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10 if self._whole else 1)
            if process.is_alive():
                process.kill()
                process.join(10)
        self._folder.cleanup()


def _dismiss_all() -> None:
    while _crews:
        _crews.popitem()[1].dismiss()


atexit.register(_dismiss_all)


def _rank(end: Connection, store: str, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=_PATIENCE)
        )
        while True:
            scenario, args = end.recv()
            end.send(scenario(rank, *args))
            del scenario, args
            gc.collect()  # a layer of the last scenario gives its streams and memory back before the next begins
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    except EOFError:
        return
    except BaseException as error:
        end.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
        raise
    finally:
        end.close()
