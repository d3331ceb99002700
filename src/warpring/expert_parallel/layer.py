"""`ExpertParallelDecode`: one MoE layer whose experts are spread over the ranks of a group."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from warpring.errors import ArgumentError, PoisonedError, WorkspaceBusyError
from warpring.expert_parallel.call import Call, check_out, make_call
from warpring.expert_parallel.partition import PartitionMode, Split
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.reference import GlooEngine
from warpring.expert_parallel.rendezvous import Ranks
from warpring.experts import Experts

#: Seconds that a rank waits for its peers: a peer may compile kernels, load weights or capture graphs for minutes.
DEFAULT_TIMEOUT = 300.0
_NAME = "ExpertParallelDecode"


class Engine(Protocol):
    """What runs the roles of one rank: the kernels on a GPU (roles.py), or torch on a CPU (reference.py)."""

    ranks: Ranks
    memory: str

    @property
    def sm_counts(self) -> Split | None:
        """Granted SMs of each partition; None without a GPU."""
        ...

    def send(self, call: Call) -> None:
        """Start a call: publish the tokens, start the experts where that needs no wait on the host."""
        ...

    def receive(self, call: Call, out: torch.Tensor) -> None:
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
    number: int


class ExpertParallelDecode:
    """One MoE layer's experts, spread over the ranks of a group, for batches of decode.

    Every rank brings its own tokens and gets its own outputs:

        y[t] = sum_k topk_weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e]),  e = topk_idx[t, k]

    with the expert wherever it lives, plus the shared experts' outputs. All ranks make the same calls in the same
    order, each with as many tokens as it likes, also none. On CPUs the same semantics run through gloo.

    One workspace, one user at a time: a call that comes while another is between its halves, or in another thread, is
    refused. On a GPU, calls on different streams wait for each other; replays of captured graphs must be ordered by the
    caller, like calls that share a buffer.

    A context manager: leaving it closes the layer.

    Attributes:
        problem: what the layer is.
        rank: of this process in the group.
    """

    def __init__(
        self,
        problem: Problem,
        group: Any | None,
        experts: Experts,
        *,
        shared: Experts | None = None,
        comm_sms: int | None = None,
        num_slots: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        partition: PartitionMode = "auto",
        child_graph: bool = False,
    ) -> None:
        """Meet the other ranks, compare what is to be built, and build it; a collective of the group.

        Args:
            problem: the same on every rank.
            group: the ranks' process group of torch.distributed, or None for one rank alone.
            experts: this rank's own experts (see `local_experts`), on the device where the layer shall run.
            shared: the shared experts, the same on every rank, where the problem has some.
            comm_sms: SMs for communication (see `plan_split`); None chooses.
            num_slots: ring slots (see `plan_schedule`); None chooses.
            timeout: seconds that a rank waits for another, here and in every call.
            partition: how a GPU is shared between communication and compute, see `open_partition`.
            child_graph: in a capture, add the call as one explicit child graph, instead of capturing its launches.

        Raises:
            ArgumentError: experts that do not fit the problem.
            RanksDisagreeError: on every rank, where their problems or grids differ.
            PeerTimeoutError: a rank did not come.
            UnsupportedError: this device, format or group has no such path.
        """
        self.problem = problem
        self._check_group(group)
        self._device = experts.device
        check_experts(problem, experts, shared)
        self._lock = threading.Lock()
        self._pending: Handle | None = None
        self._number = 0
        self._unusable: str | None = None
        if self._device.type == "cpu":
            engine = GlooEngine(problem, group, experts, shared, timeout)
        else:
            from warpring.expert_parallel.engine import KernelEngine, Options

            options = Options(comm_sms, num_slots, partition, child_graph)
            engine = KernelEngine(problem, group, experts, shared, timeout, options)
        self._engine: Engine | None = engine
        self.rank = engine.ranks.rank

    def _check_group(self, group: Any | None) -> None:
        size = 1 if group is None else group.size()
        if size != self.problem.num_ranks:
            raise ArgumentError(
                f"{_NAME}: group must have num_ranks = {self.problem.num_ranks} ranks; got {size}. Pass the group of "
                "exactly these ranks, or None for one rank alone."
            )

    @property
    def sm_counts(self) -> Split | None:
        """SMs that the driver granted to communication and compute; None on a CPU."""
        return None if self._engine is None else self._engine.sm_counts

    @property
    def memory(self) -> str:
        """The workspace's regions and their bytes, for people; empty on a CPU, and once closed."""
        return "" if self._engine is None else self._engine.memory

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        *,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer; a collective.

        Args:
            x: BF16 [rows, hidden], at most max_tokens_per_rank rows.
            topk_idx: int32 or int64 [rows, topk], experts of all ranks; -1 is an unused slot, and its weight is ignored
                (may be NaN). On a GPU, other ids that name no expert are skipped too; on a CPU they are an error.
            topk_weights: [rows, topk], already normalised and scaled.
            num_tokens: how many of the rows count, from the first on; an int, or an int32 tensor of one element on the
                device, so that a captured graph can be replayed with other counts. None: all.
            shared: [rows, num_shared] weights of the shared experts; None weighs each by 1.
            out: BF16 [rows, hidden] with dense rows, overwritten up to num_tokens.

        Returns:
            out, or a new BF16 [rows, hidden] tensor. Rows beyond num_tokens are not written.

        On a GPU: asynchronous on the current stream, and it can be captured in a CUDA graph.

        Raises:
            ArgumentError: an argument broke a rule; nothing was sent, and the layer stays usable. Peers that made the
                call wait until this rank makes it too, at most `timeout`.
            WorkspaceBusyError: another call is not over.
            PeerTimeoutError: a peer did not do its part in time; on a GPU raised by a later call, `check` or `close`.
            PoisonedError: the layer failed earlier, or is closed.
        """
        return self.receive(self._send(x, topk_idx, topk_weights, num_tokens, shared, out), out=out)

    def send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        *,
        shared: torch.Tensor | None = None,
    ) -> Handle:
        """The first half of a call: publish the tokens and start the experts. Arguments and errors as in `__call__`.

        What runs between the halves overlaps with them. The arguments must stay unchanged until `receive`.
        """
        return self._send(x, topk_idx, topk_weights, num_tokens, shared, None)

    def _send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        shared: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> Handle:
        """`send`; every argument is checked before anything is sent, `out` included where it is known already."""
        with self._turn():
            if self._pending is not None:
                raise WorkspaceBusyError(
                    f"{_NAME}: call {self._pending.number} is between send and receive, and a workspace serves one "
                    "call at a time. Receive it first, or build a second layer."
                )
            engine = self._usable_engine()
            call = make_call(self.problem, self._device, x, topk_idx, topk_weights, num_tokens, shared)
            if out is not None:
                check_out(out, x)
            with self._poisons():
                engine.send(call)
            self._number += 1
            self._pending = Handle(call, self._number)
            return self._pending

    def receive(self, handle: Handle, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of a call: the outputs. On a failure, `out` is filled with NaN."""
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
                    engine.receive(handle.call, out)
            except BaseException:
                if not x.is_cuda:
                    out.fill_(torch.nan)
                raise
            finally:
                self._pending = None
            return out

    def check(self) -> None:
        """Raise what went wrong in the background (see `PeerTimeoutError`), if something did; waits for nothing."""
        with self._turn():
            self._usable_engine()

    def close(self) -> None:
        """Wait for this rank's own work and release everything. Closing again does nothing.

        Raises:
            PeerTimeoutError: the last call failed in the background, and nothing has said so yet.
        """
        with self._turn():
            engine, self._engine = self._engine, None
            self._pending = None
            failed, self._unusable = self._unusable, self._unusable or "it was closed"
            if engine is not None:
                try:
                    engine.close()
                    if failed is None:
                        engine.check()
                finally:
                    del engine

    def __enter__(self) -> ExpertParallelDecode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Generator[None]:
        if not self._lock.acquire(blocking=False):
            raise WorkspaceBusyError(
                f"{_NAME}: another thread is in this layer, and its workspace serves one call at a time. Call it from "
                "one thread, or build a second layer."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _usable_engine(self) -> Engine:
        if self._engine is None or self._unusable is not None:
            raise PoisonedError(
                f"{_NAME}: this layer cannot run: {self._unusable}. Close it on every rank, and build it anew."
            )
        with self._poisons():
            self._engine.check()
        return self._engine

    @contextmanager
    def _poisons(self) -> Generator[None]:
        """Whatever fails in here leaves ranks out of step: the layer refuses to run from then on."""
        try:
            yield
        except BaseException as error:
            self._unusable = f"it failed before ({' '.join(str(error).split()) or type(error).__name__})"
            raise


def check_experts(problem: Problem, experts: Experts, shared: Experts | None) -> None:
    """Raise ArgumentError unless a rank's routed and shared experts are those of the problem."""
    _check_layer(problem, "experts", experts, problem.num_local_experts, problem.format, problem.has_bias)
    if (shared is not None) != (problem.num_shared > 0):
        raise ArgumentError(
            f"{_NAME}: shared must be the problem's num_shared = {problem.num_shared} shared experts; got "
            f"{shared}. Set Problem.num_shared to their number."
        )
    if shared is not None:
        _check_layer(problem, "shared", shared, problem.num_shared, problem.shared_format, False)
        if shared.device != experts.device:
            raise ArgumentError(
                f"{_NAME}: shared must be on the device of experts, {experts.device}; got {shared.device}. Use .to()."
            )


def _check_layer(problem: Problem, name: str, experts: Experts, count: int, format: str, has_bias: bool) -> None:
    wanted = {
        "num_experts": count,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "format": format,
        "activation": problem.gate,
    }
    for field, value in wanted.items():
        if (got := getattr(experts, field)) != value:
            raise ArgumentError(
                f"{_NAME}: {name}.{field} must be {value} as the problem says; got {got}. Each rank passes its own "
                "experts (see local_experts)."
            )
    biases = experts.w13_bias is not None, experts.w2_bias is not None
    if biases != (has_bias, has_bias):
        raise ArgumentError(
            f"{_NAME}: {name} must have {'both biases' if has_bias else 'no biases'} as the problem says; got w13_bias "
            f"{'set' if biases[0] else 'None'}, w2_bias {'set' if biases[1] else 'None'}. Set Problem.has_bias."
        )
