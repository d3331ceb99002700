"""`ExpertParallelDecode`: one MoE layer whose experts are spread over the ranks of a group."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from warpring.errors import ArgumentError
from warpring.expert_parallel.call import check_out, make_call
from warpring.expert_parallel.packing import EpPacked, image_bytes
from warpring.expert_parallel.partition import PartitionMode, Split
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.reference import GlooEngine
from warpring.expert_parallel.turns import Engine, Handle, Turns
from warpring.experts import Experts

__all__ = ["DEFAULT_TIMEOUT", "ExpertParallelDecode", "Handle", "check_experts", "check_packed"]

#: Seconds that a rank waits for its peers: a peer may compile kernels, load weights or capture graphs for minutes.
DEFAULT_TIMEOUT = 300.0
_NAME = "ExpertParallelDecode"


class ExpertParallelDecode:
    """One MoE layer's experts, spread over the ranks of a group, for batches of decode.

    Every rank brings its own tokens and gets its own outputs:

        y[t] = sum_k topk_weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e]),  e = topk_idx[t, k]

    with the expert wherever it lives, plus the shared experts' outputs. All ranks make the same calls in the same
    order, each with as many tokens as it likes, also none. On CPUs the same semantics run through gloo.

    One workspace, one user at a time: a call that comes while another is between its halves, or in another thread, is
    refused. On a GPU, calls on different streams wait for each other; replays of captured graphs must be ordered by the
    caller, like calls that share a buffer.

    A model's layers follow each other, so they need one workspace between them: build the first, and make the others
    from it with `with_experts`. A context manager: leaving it closes the layer, and all that share its workspace.

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
        packed: EpPacked | None = None,
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
            packed: experts and shared, packed by `pack_ep` before, for layers that share the packed weights; on a GPU
                alone. None packs them.
            comm_sms: SMs for communication (see `plan_split`); None lets `choose_comm_sms` choose.
            num_slots: ring slots (see `plan_schedule`); None chooses.
            timeout: seconds that a rank waits for another, here and in every call.
            partition: how a GPU is shared between communication and compute, see `open_partition`.
            child_graph: in a capture, add the call as one explicit child graph, instead of capturing its launches; such
                calls are never a chain.

        Raises:
            ArgumentError: experts, packed or not, that do not fit the problem.
            RanksDisagreeError: on every rank, where their problems or grids differ.
            PeerTimeoutError: a rank did not come.
            UnsupportedError: this device, format or group has no such path.
        """
        self.problem = problem
        self._check_group(group)
        self._device = experts.device
        check_experts(problem, experts, shared)
        if packed is not None:
            check_packed(problem, self._device, packed)
            if self._device.type == "cpu":
                raise ArgumentError(
                    f"{_NAME}: packed must be None on a CPU, which takes experts as they are; got some."
                )
        engine: Engine
        if self._device.type == "cpu":
            engine = GlooEngine(problem, group, timeout)
        else:
            from warpring.expert_parallel.engine import KernelEngine, Options

            engine = KernelEngine(
                problem, group, self._device, timeout, Options(comm_sms, num_slots, partition, child_graph)
            )
        self.rank = engine.ranks.rank
        self._turns = Turns(engine)
        try:
            self._weights = engine.pack(experts, shared) if packed is None else packed
        except BaseException:
            self._turns.close()
            raise

    def with_experts(self, experts: Experts, shared: Experts | None = None) -> ExpertParallelDecode:
        """Another layer of the same problem with weights of its own, on this layer's workspace, streams and peers.

        Not a collective; but all ranks call the layers that share a workspace in the same order.

        Args:
            experts, shared: as in the constructor, on the same device.

        Raises:
            ArgumentError: experts that do not fit the problem, or on another device.
            PoisonedError: this layer failed, or is closed.
        """
        check_experts(self.problem, experts, shared)
        if experts.device != self._device:
            raise ArgumentError(
                f"{_NAME}.with_experts: experts must be on {self._device}, where the workspace is; got "
                f"{experts.device}. Use .to()."
            )
        layer = object.__new__(ExpertParallelDecode)
        layer.problem, layer.rank = self.problem, self.rank
        layer._device, layer._turns = self._device, self._turns
        with self._turns.begin() as engine:
            layer._weights = engine.pack(experts, shared)
        return layer

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
        return None if self._turns.engine is None else self._turns.engine.sm_counts

    @property
    def memory(self) -> str:
        """The workspace's regions and their bytes, for people; empty on a CPU, and once closed."""
        return "" if self._turns.engine is None else self._turns.engine.memory

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
            PeerTimeoutError: a peer did not do its part in time; on a GPU mostly raised by a later call, `check` or
                `close`.
            PoisonedError: the layer failed earlier, or is closed.
        """
        handle = self._send(x, topk_idx, topk_weights, num_tokens, shared, out, whole=True)
        return self.receive(handle, out=out)

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
        return self._send(x, topk_idx, topk_weights, num_tokens, shared, None, whole=False)

    def _send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        shared: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        whole: bool,
    ) -> Handle:
        """`send`; every argument is checked before anything is sent, `out` included where it is known already."""
        with self._turns.begin() as engine:
            call = make_call(self.problem, self._device, x, topk_idx, topk_weights, num_tokens, shared)
            if out is not None:
                check_out(out, x)
            return self._turns.send(engine, call, self._weights, whole=whole)

    def receive(self, handle: Handle, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The second half of a call: the outputs. On a failure, `out` is filled with NaN."""
        return self._turns.receive(handle, out)

    def check(self) -> None:
        """Raise what went wrong in the background (see `PeerTimeoutError`), if something did; waits for nothing."""
        self._turns.check()

    def close(self) -> None:
        """Wait for this rank's own work and release everything. Closing again does nothing.

        Raises:
            PeerTimeoutError: the last call failed in the background, and nothing has said so yet.
        """
        self._turns.close()

    def __enter__(self) -> ExpertParallelDecode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def check_packed(problem: Problem, device: torch.device, packed: EpPacked) -> None:
    """Raise ArgumentError unless a rank's packed experts are those of the problem on `device`, as far as sizes tell."""
    images = (problem.num_local_experts, problem.num_neuron_tasks, problem.num_output_tasks)
    wanted = {
        "device": (packed.routed.w13.device, device),
        "gate": (packed.gate, problem.gate),
        "routed.format": (packed.routed.format, problem.format),
        "routed.w13": (tuple(packed.routed.w13.shape), (*images, image_bytes(problem.format))),
        "num_shared": (0 if packed.shared is None else len(packed.shared.w13), problem.num_shared),
    }
    for field, (got, value) in wanted.items():
        if got != value:
            raise ArgumentError(
                f"{_NAME}: packed.{field} must be {value}; got {got}. Pack this rank's experts for "
                "this problem (pack_ep), or leave packed out."
            )
