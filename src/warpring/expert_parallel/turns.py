"""Whose turn it is: one workspace serves one call at a time, and none after a failure."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from warpring.errors import ArgumentError, PoisonedError, WorkspaceBusyError
from warpring.expert_parallel.call import Call, check_out
from warpring.expert_parallel.partition import Split
from warpring.expert_parallel.rendezvous import Ranks
from warpring.experts import Experts

_NAME = "ExpertParallelDecode"


class Engine(Protocol):
    """What runs the roles of one rank: the kernels on a GPU (engine.py), or torch on a CPU (reference.py)."""

    ranks: Ranks
    memory: str

    @property
    def sm_counts(self) -> Split | None:
        """Granted SMs of each partition; None without a GPU."""
        ...

    def pack(self, experts: Experts, shared: Experts | None) -> Any:
        """Weights in the form that `send` and `receive` take."""
        ...

    def send(self, call: Call, weights: Any, *, whole: bool) -> None:
        """Start a call: publish the tokens, start the experts where that needs no wait on the host.

        `whole`: `receive` follows at once, with nothing of the caller's between them.
        """
        ...

    def receive(self, call: Call, weights: Any, out: torch.Tensor) -> None:
        """End the call that was started: write the outputs of its tokens to `out`."""
        ...

    def check(self) -> None:
        """Raise what went wrong in the background, if something did; waits for nothing."""
        ...

    def close(self) -> None:
        """Wait for one's own work and release everything."""
        ...


@dataclass(frozen=True)
class Handle:
    """A call between its two halves."""

    call: Call
    weights: Any
    number: int


class Turns:
    """An engine and who may use it: all layers that share a workspace share this object.

    Attributes:
        engine: None once closed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self._lock = threading.Lock()
        self._pending: Handle | None = None
        self._number = 0
        self._unusable: str | None = None

    @contextmanager
    def begin(self) -> Generator[Engine]:
        """The right to start a call, in this thread, while nothing is between its halves.

        Raises:
            WorkspaceBusyError, PoisonedError: no such right now, or ever again.
        """
        with self._turn():
            if self._pending is not None:
                raise WorkspaceBusyError(
                    f"{_NAME}: call {self._pending.number} is between send and receive, and a workspace serves one "
                    "call at a time. Receive it first, or build a second layer with a workspace of its own."
                )
            engine = self._usable_engine()
            self._check(engine)
            yield engine

    def send(self, engine: Engine, call: Call, weights: Any, *, whole: bool) -> Handle:
        """Start a call, within `begin`; see `Engine.send`."""
        with self._poisons():
            engine.send(call, weights, whole=whole)
        self._number += 1
        self._pending = Handle(call, weights, self._number)
        return self._pending

    def receive(self, handle: Handle, out: torch.Tensor | None) -> torch.Tensor:
        """End the call that is between its halves; on a failure `out` is filled with NaN.

        What the kernels have reported by then is raised behind the launch of role3, which does the filling on a GPU.
        """
        with self._turn():
            engine = self._usable_engine()
            if handle is not self._pending:
                raise ArgumentError(
                    f"{_NAME}.receive: handle must be the one that the last send returned; got that of call "
                    f"{handle.number}, received before. Receive each call once."
                )
            x = handle.call.x
            if out is None:
                out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
            check_out(out, x)
            try:
                with self._poisons():
                    engine.receive(handle.call, handle.weights, out)
                self._check(engine)
            except BaseException:
                if not x.is_cuda:
                    out.fill_(torch.nan)
                raise
            finally:
                self._pending = None
            return out

    def check(self) -> None:
        """Raise what went wrong in the background, if something did."""
        with self._turn():
            self._check(self._usable_engine())

    def close(self) -> None:
        """Close the engine; raises what failed in its last call, if nothing has said so yet. Again: does nothing."""
        with self._turn():
            engine, self.engine = self.engine, None
            self._pending = None
            failed, self._unusable = self._unusable, self._unusable or "it was closed"
            if engine is not None:
                engine.close()
                if failed is None:
                    engine.check()

    @contextmanager
    def _turn(self) -> Generator[None]:
        if not self._lock.acquire(blocking=False):
            raise WorkspaceBusyError(
                f"{_NAME}: another thread is in this layer, and its workspace serves one call at a time. Call it from "
                "one thread, or build a second layer with a workspace of its own."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _usable_engine(self) -> Engine:
        if self.engine is None or self._unusable is not None:
            raise PoisonedError(
                f"{_NAME}: this layer cannot run: {self._unusable}. Close it on every rank, and build it anew."
            )
        return self.engine

    def _check(self, engine: Engine) -> None:
        with self._poisons():
            engine.check()

    @contextmanager
    def _poisons(self) -> Generator[None]:
        """Whatever fails in here leaves ranks out of step: the workspace refuses to serve from then on."""
        try:
            yield
        except BaseException as error:
            self._unusable = f"it failed before ({' '.join(str(error).split()) or type(error).__name__})"
            raise
