"""The layer on a GPU: partitions, workspace and kernels of one rank, and the launches of a call.

A call in two halves forks and joins:

    caller's stream   ──┬──────────────────────────────┬── role3 ──
    communication       ├── (role4) ── role1 ──────────┤
    compute             └── role2 ─────────────────────┘

The fork and the join are events, so inside a capture they become edges: role1 and role2 are nodes without an edge
between them, each in its own Green Context. With few tokens role3 follows role1 in the communication partition and
waits for role2's `done` itself: a launch behind role2 would cost 3 us.

A call in one is a chain on the caller's stream, by programmatic launches: role1 (or role4) is loaded while the kernel
before it ends, and each further role starts when all CTAs of the one before run. So role1 has the SMs that it would own
before role2 takes the others, and no edge leads from one context into another, which would cost 5 to 10 us. The Green
Contexts take such calls too with `partition="green"` or in a child graph.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from warpring.errors import UnsupportedError
from warpring.expert_parallel.call import Call
from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.packing import EpPacked, EpWeights, pack_ep
from warpring.expert_parallel.partition import PartitionMode, Split, open_partition
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.rendezvous import Ranks
from warpring.expert_parallel.roles import INDEX_DTYPES, Roles, failure, role_specs
from warpring.expert_parallel.simulate import choose_comm_sms
from warpring.expert_parallel.workspace import make_params, pinned_error, plan_layout, plan_schedule, read_error
from warpring.experts import Experts
from warpring.runtime.device import arch_of, index_of
from warpring.runtime.graph import Node, add_child_graph, capture_id, primary_context
from warpring.runtime.symmetric import allocate

#: Architectures that role2 has instructions for.
KERNEL_ARCHS = ("sm_90a",)
#: Tokens up to which role3 runs in the SMs of communication: more take longer to add there than a launch behind role2.
EARLY_TOKENS = 64


@dataclass(frozen=True)
class Options:
    """What a user may choose on a GPU; see `ExpertParallelDecode`."""

    comm_sms: int | None = None
    num_slots: int | None = None
    partition: PartitionMode = "auto"
    child_graph: bool = False


class KernelEngine:
    """role1 to role4 of one rank on its GPU. See `Engine` in turns.py for the methods."""

    def __init__(
        self, problem: Problem, group: Any | None, device: torch.device, timeout: float, options: Options
    ) -> None:
        index = index_of(device)
        if (arch := arch_of(index)) not in KERNEL_ARCHS:
            raise UnsupportedError(
                f"ExpertParallelDecode: the kernels run on {', '.join(KERNEL_ARCHS)}; got {arch} "
                f"({torch.cuda.get_device_name(index)}). Put the experts on the CPU for the reference."
            )
        role_specs(problem)  # a format without kernels is refused before anything is asked of the others
        self._problem = problem
        self._device = device
        self._timeout = timeout
        self._options = options
        self.ranks = Ranks(group, timeout)
        try:
            with torch.cuda.device(index):
                comm_sms = options.comm_sms
                if comm_sms is None:
                    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
                    comm_sms = choose_comm_sms(problem, torch.cuda.get_device_name(index), num_sms)
                self._partition = open_partition(index, comm_sms, options.partition)
                try:
                    self._build(problem, group, index)
                except BaseException:
                    self._partition.close()
                    raise
        except BaseException:
            self.ranks.close()
            raise

    def _build(self, problem: Problem, group: Any | None, index: int) -> None:
        split = self._partition.split
        sequence = self._partition.streams is None
        # Two CTAs of role2 leave no multiprocessor to role1 unless role1 owns some.
        per_sm = ctas_per_sm(problem) if self._partition.contexts is not None else 1
        grids = (split.comm_sms, split.compute_sms * per_sm)
        schedule = plan_schedule(problem, *grids, self._options.num_slots, sequence=sequence)
        self.ranks.check_agreement({**problem.description(), **asdict(schedule), "device": "cuda"})
        layout = plan_layout(problem, schedule)
        self.memory = layout.report()
        self._symmetric = allocate(layout.symmetric_bytes, self._device, group)
        self._local = torch.zeros(layout.local_bytes, dtype=torch.uint8, device=self._device)
        self._error = pinned_error()
        params = make_params(
            problem,
            schedule,
            layout,
            rank=self.ranks.rank,
            addresses=self._symmetric.addresses,
            local_address=self._local.data_ptr(),
            error_address=self._error.data_ptr(),
            timeout_ns=int(self._timeout * 1e9),
        )
        combine_ctas = torch.cuda.get_device_properties(index).multi_processor_count
        self._roles = Roles(problem, params, index, combine_ctas, per_sm)
        self._fork, self._join_comm, self._join_compute, self._end = (torch.cuda.Event() for _ in range(4))
        #: Whether the call that was started is a chain.
        self._chained = False
        #: In which capture `_end` was recorded (None outside of one, -1 before the first call), and on which stream.
        self._end_capture: int | None = -1
        self._end_stream = 0
        torch.cuda.synchronize(self._device)
        self.ranks.barrier()
        self._warm_up(problem)

    def _warm_up(self, problem: Problem) -> None:
        """Calls without tokens: kernels are loaded in their contexts, and peers seen, before a capture needs it.

        As many on every rank, whatever `partition` and `child_graph` are there, with role3 in each of its places.
        """
        no_weights = EpWeights()
        empty = torch.empty(0, problem.hidden, dtype=torch.bfloat16, device=self._device)
        weights = torch.empty(0, problem.topk, device=self._device)
        for dtype in INDEX_DTYPES:
            for few, chained in product((False, True), (False, self._chains)):
                call = Call(empty, weights.to(dtype), weights, None, 0, None)
                self._start_roles(call, no_weights, chained=chained)
                self._join_roles(call, no_weights, empty, few=few)
        torch.cuda.synchronize(self._device)
        self.check()

    @property
    def _chains(self) -> bool:
        """Whether a call without anything between its halves may be a chain of launches on one stream."""
        return self._options.partition == "auto" and not self._options.child_graph

    @property
    def sm_counts(self) -> Split | None:
        """Granted SMs, or the CTAs of role1 and role2 where they own none."""
        return self._partition.split

    def pack(self, experts: Experts, shared: Experts | None) -> EpPacked:
        """The experts in the order in which role2 streams them, on this GPU."""
        return pack_ep(experts, shared)

    def send(self, call: Call, weights: EpPacked, *, whole: bool) -> None:
        """Start role1 (and role4) and role2: of a whole call in a chain, else each on its partition's stream."""
        self._start_roles(call, weights.arguments(), chained=whole and self._chains)

    def _start_roles(self, call: Call, weights: EpWeights, *, chained: bool) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._follow_last_call(current)
            self._chained = chained
            if chained:
                self._chain_roles(call, weights, current)
            elif not self._captures_child(current):
                self._fork_roles(call, weights, current)

    def _chain_roles(self, call: Call, weights: EpWeights, current: torch.cuda.Stream) -> None:
        """role4, role1 and role2 on the caller's stream, each launched as soon as all CTAs of the one before run."""
        if (shared := self._roles.shared(call, programmatic=True)) is not None:
            shared.on(current)
        self._roles.dispatch(call, programmatic=True).on(current)
        self._roles.experts(weights, programmatic=True).on(current)

    def _fork_roles(self, call: Call, weights: EpWeights, current: torch.cuda.Stream) -> None:
        """role4 and role1 on the communication stream, role2 on the compute stream."""
        comm, compute = self._partition.streams or (current, current)
        self._fork.record(current)
        comm.wait_event(self._fork)
        compute.wait_event(self._fork)
        # role1 first: a kernel that is not loaded yet is loaded when nothing runs, and role2 waits for role1.
        if (shared := self._roles.shared(call)) is not None:
            shared.on(comm)
        self._roles.dispatch(call).on(comm)
        self._roles.experts(weights).on(compute)
        self._join_comm.record(comm)
        self._join_compute.record(compute)

    def receive(self, call: Call, weights: EpPacked, out: torch.Tensor) -> None:
        """role3 behind both partitions, on the caller's stream; of few tokens it is launched before role2 ends."""
        self._join_roles(call, weights.arguments(), out, few=call.count <= EARLY_TOKENS)

    def _join_roles(self, call: Call, weights: EpWeights, out: torch.Tensor, *, few: bool) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            if self._captures_child(current):
                add_child_graph(self._nodes(call, weights, out), current)
            elif self._chained:
                self._roles.combine(call, out, early=few, programmatic=few).on(current)
            elif few and self._partition.contexts and self._partition.streams:
                self._combine_early(call, out, current, self._partition.streams[0])
            else:
                current.wait_event(self._join_comm)
                current.wait_event(self._join_compute)
                self._roles.combine(call, out).on(current)
            self._end.record(current)
            self._end_capture, self._end_stream = capture_id(current), current.cuda_stream

    def _combine_early(
        self, call: Call, out: torch.Tensor, current: torch.cuda.Stream, comm: torch.cuda.Stream
    ) -> None:
        """role3 behind role1 in the SMs of communication, where it is launched long before role2 ends. It depends on
        role2 all the same: every CTA waits for `done` of all ranks, its own included. The caller waits for both."""
        self._fork.record(current)  # what the caller did between the halves may still use the memory of `out`
        comm.wait_event(self._fork)
        self._roles.combine(call, out, early=True).on(comm)
        self._join_comm.record(comm)
        current.wait_event(self._join_comm)
        current.wait_event(self._join_compute)

    def _follow_last_call(self, current: torch.cuda.Stream) -> None:
        """Make a call wait for the one before on whatever stream that was, where events can say so: both outside of a
        capture, or in the same one. Across captures the kernels themselves refuse an overlap (Code.OVERLAP). A stream
        keeps its own order, and an event between its kernels would keep the next one from being loaded early."""
        if self._end_stream != current.cuda_stream and self._end_capture == capture_id(current):
            current.wait_event(self._end)

    def _captures_child(self, current: torch.cuda.Stream) -> bool:
        """Whether this call becomes an explicit child graph of the graph that is being captured."""
        return self._options.child_graph and self._partition.contexts is not None and capture_id(current) is not None

    def _nodes(self, call: Call, weights: EpWeights, out: torch.Tensor) -> list[Node]:
        """The call as an explicit graph: role1 and role2 without an edge between them, role3 behind both."""
        comm, compute = self._partition.contexts or (0, 0)
        nodes: list[Node] = []
        if (shared := self._roles.shared(call)) is not None:
            nodes.append(Node(shared, comm))
        dispatch = len(nodes)
        nodes.append(Node(self._roles.dispatch(call), comm, tuple(range(dispatch))))
        nodes.append(Node(self._roles.experts(weights), compute))
        nodes.append(Node(self._roles.combine(call, out), primary_context(self._device), (dispatch, dispatch + 1)))
        return nodes

    def check(self) -> None:
        """Raise what the kernels reported; reads pinned host memory, and waits for nothing."""
        if (error := failure(read_error(self._error), self._timeout)) is not None:
            raise error

    def close(self) -> None:
        """Wait for this rank's kernels (each wait in them is bounded), then release streams and connections."""
        try:
            torch.cuda.synchronize(self._device)
            self._partition.close()
        finally:
            self.ranks.close()
