"""Several ranks in processes of their own, for tests: real deaths, real stalls, on any machine."""

from __future__ import annotations

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


def run_ranks(scenario: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`scenario(rank, *args)` on every rank of a new gloo group: what each returned, None for a rank that died.

    A scenario is a function of a module. Raises what a rank raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ends: list[Connection] = []
        processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(theirs, scenario, store, rank, num_ranks, args), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        deadline = time.monotonic() + _PATIENCE
        results = [_result(end, deadline) for end in ends]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _result(end: Connection, deadline: float) -> Any:
    if not end.poll(max(0.0, deadline - time.monotonic())):
        return TimeoutError(f"a rank gave no result within {_PATIENCE} s")
    try:
        return end.recv()
    except EOFError:
        return None


def _rank(
    end: Connection, scenario: Callable[..., Any], store: str, rank: int, num_ranks: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=_PATIENCE)
        )
        end.send(scenario(rank, *args))
    except BaseException as error:
        end.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
        raise
    finally:
        end.close()
