"""The engine of a GPU, without one: fork, join and the order of calls, recorded on fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpring import UnsupportedError
from warpring.expert_parallel import engine
from warpring.expert_parallel.engine import EARLY_TOKENS, KernelEngine, Options
from warpring.expert_parallel.partition import Partition, PartitionMode, Split
from warpring.expert_parallel.problem import Problem

CALL: Any = SimpleNamespace(count=EARLY_TOKENS + 1)
FEW: Any = SimpleNamespace(count=EARLY_TOKENS)
OUT: Any = SimpleNamespace()
WEIGHTS: Any = SimpleNamespace(arguments=lambda: None)


class Recorder:
    """Streams, events and launches that write down what was done with them."""

    def __init__(self, *, shared: bool, capture: int | None = None) -> None:
        self.log: list[str] = []
        self.capture = capture
        self.caller = "caller"
        self.has_shared = shared

    def stream(self, name: str) -> Any:
        waits = lambda event: self.log.append(f"{name} waits {event.name}")  # noqa: E731
        return SimpleNamespace(name=name, cuda_stream=hash(name), wait_event=waits)

    def event(self, name: str) -> Any:
        return SimpleNamespace(name=name, record=lambda stream: self.log.append(f"{name} on {stream.name}"))

    def launch(self, name: str) -> Any:
        return SimpleNamespace(name=name, on=lambda stream: self.log.append(f"{name} on {stream.name}"))

    def shared(self, call: object, *, programmatic: bool = False) -> Any:
        return self.launch("programmatic role4" if programmatic else "role4") if self.has_shared else None

    def dispatch(self, call: object, *, programmatic: bool = False) -> Any:
        return self.launch("programmatic role1" if programmatic else "role1")

    def experts(self, weights: object, *, programmatic: bool = False) -> Any:
        return self.launch("programmatic role2" if programmatic else "role2")

    def combine(self, call: object, out: object, *, early: bool = False, programmatic: bool = False) -> Any:
        return self.launch(f"{'programmatic ' if programmatic else ''}{'early ' if early else ''}role3")


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,
    *,
    child_graph: bool = False,
    sequence: bool = False,
    partition: PartitionMode = "green",
) -> KernelEngine:
    """An engine whose device is a recorder."""
    made = object.__new__(KernelEngine)
    made._device = torch.device("cuda", 0)
    made._options = Options(child_graph=child_graph, partition=partition)
    made._chained = False
    made._roles = recorder  # pyright: ignore[reportAttributeAccessIssue]
    green: Any = (SimpleNamespace(context=11), SimpleNamespace(context=22))
    streams = None if sequence else (recorder.stream("comm"), recorder.stream("compute"))
    made._partition = Partition("green", Split(16, 116), streams, _green=green)
    made._fork, made._join_comm = recorder.event("fork"), recorder.event("comm end")
    made._join_compute, made._end = recorder.event("compute end"), recorder.event("end")
    made._end_capture, made._end_stream = -1, 0

    class Guard:
        def __init__(self, device: torch.device) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: recorder.stream(recorder.caller))
    monkeypatch.setattr(engine, "capture_id", lambda stream: recorder.capture)
    monkeypatch.setattr(engine, "primary_context", lambda device: 33)
    monkeypatch.setattr(engine, "add_child_graph", lambda nodes, stream: recorder.log.append(("child", nodes, stream)))
    return made


def test_roles_fork_from_the_callers_stream_and_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=True)
    made = recorded(monkeypatch, recorder)
    made.send(CALL, WEIGHTS, whole=False)
    assert recorder.log == [
        "fork on caller",
        "comm waits fork",
        "compute waits fork",
        "role4 on comm",
        "role1 on comm",
        "role2 on compute",
        "comm end on comm",
        "compute end on compute",
    ]
    recorder.log.clear()
    made.receive(CALL, WEIGHTS, OUT)
    assert recorder.log == ["caller waits comm end", "caller waits compute end", "role3 on caller", "end on caller"]


def test_with_few_tokens_role3_follows_role1_and_the_caller_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=False)
    made = recorded(monkeypatch, recorder)
    made.send(FEW, WEIGHTS, whole=False)
    recorder.log.clear()
    made.receive(FEW, WEIGHTS, OUT)
    assert recorder.log == [
        "fork on caller",
        "comm waits fork",
        "early role3 on comm",
        "comm end on comm",
        "caller waits comm end",
        "caller waits compute end",
        "end on caller",
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_a_whole_call_is_a_chain_of_launches_on_the_callers_stream(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    recorder = Recorder(shared=shared)
    made = recorded(monkeypatch, recorder, partition="auto")
    before = ["programmatic role4 on caller"] if shared else []
    for call, last in ((CALL, "role3"), (FEW, "programmatic early role3")):
        recorder.log.clear()
        made.send(call, WEIGHTS, whole=True)
        made.receive(call, WEIGHTS, OUT)
        launches = [line for line in recorder.log if "role" in line]
        own = ("programmatic role1 on caller", "programmatic role2 on caller", f"{last} on caller")
        assert launches == [*before, *own]
        assert "waits" not in "".join(recorder.log)
        assert not any("comm" in line or "compute" in line or "fork" in line for line in recorder.log)


@pytest.mark.parametrize("partition", ["auto", "green", "streams"])
def test_a_call_in_two_halves_forks_whatever_the_last_one_did(
    monkeypatch: pytest.MonkeyPatch, partition: PartitionMode
) -> None:
    recorder = Recorder(shared=False)
    made = recorded(monkeypatch, recorder, partition=partition)
    made.send(CALL, WEIGHTS, whole=True)
    made.receive(CALL, WEIGHTS, OUT)
    assert ("programmatic role2 on caller" in recorder.log) == (partition == "auto")
    recorder.log.clear()
    made.send(CALL, WEIGHTS, whole=False)
    made.receive(CALL, WEIGHTS, OUT)
    launches = [line for line in recorder.log if "role" in line]
    assert launches == ["role1 on comm", "role2 on compute", "role3 on caller"]


@pytest.mark.parametrize("sequence", [False, True])
def test_building_a_layer_launches_every_kernel_where_it_will_run(
    monkeypatch: pytest.MonkeyPatch, sequence: bool
) -> None:
    """role1 before role2 in each call: role2 waits for role1, and a kernel is loaded only when none runs."""
    recorder = Recorder(shared=False)
    made = recorded(monkeypatch, recorder, sequence=sequence)
    made._device = torch.device("cpu")
    made._error, made._timeout = torch.zeros(40, dtype=torch.uint8), 1.0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made._warm_up(Problem(128, 64, 4, 2, 1, 8))
    launches = [line.split(" on ") for line in recorder.log if "role" in line]
    assert [name for name, _ in launches if "role3" not in name] == ["role1", "role2"] * 8
    late, early = [("role3", "caller")] * 2, [("early role3", "comm")] * 2
    places = late * 4 if sequence else [*late, *early] * 2
    assert [(name, where) for name, where in launches if "role3" in name] == places


def test_building_a_layer_that_chains_launches_every_kernel_in_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=False)
    made = recorded(monkeypatch, recorder, partition="auto")
    made._device = torch.device("cpu")
    made._error, made._timeout = torch.zeros(40, dtype=torch.uint8), 1.0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made._warm_up(Problem(128, 64, 4, 2, 1, 8))
    launches = {line for line in recorder.log if "role" in line}
    assert launches == {
        *("role1 on comm", "role2 on compute", "role3 on caller", "early role3 on comm"),
        *("programmatic role1 on caller", "programmatic role2 on caller", "programmatic early role3 on caller"),
    }


def test_building_a_layer_makes_as_many_calls_whatever_a_rank_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one rank's first calls would meet another's calls without weights."""
    counts: list[int] = []
    choices: list[tuple[PartitionMode, bool]] = [("auto", False), ("auto", True), ("green", False), ("streams", False)]
    for partition, child_graph in choices:
        recorder = Recorder(shared=False)
        made = recorded(monkeypatch, recorder, partition=partition, child_graph=child_graph)
        made._device = torch.device("cpu")
        made._error, made._timeout = torch.zeros(40, dtype=torch.uint8), 1.0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        made._warm_up(Problem(128, 64, 4, 2, 1, 8))
        counts.append(sum("role1" in line for line in recorder.log))
    assert len(set(counts)) == 1


def test_without_shared_experts_there_is_no_role4(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=False)
    recorded(monkeypatch, recorder).send(CALL, WEIGHTS, whole=False)
    assert not any("role4" in line for line in recorder.log)


def test_in_a_sequence_all_roles_follow_each_other_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=True)
    made = recorded(monkeypatch, recorder, sequence=True)
    made.send(CALL, WEIGHTS, whole=False)
    made.receive(CALL, WEIGHTS, OUT)
    launches = [line for line in recorder.log if line.startswith("role")]
    assert launches == [f"role{role} on caller" for role in (4, 1, 2, 3)]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [(None, None, True), (7, 7, True), (None, 7, False), (7, None, False), (7, 8, False)],
    ids=["eager, eager", "one capture", "eager, capture", "capture, eager", "two captures"],
)
def test_a_call_follows_the_last_one_where_events_can_say_so(
    monkeypatch: pytest.MonkeyPatch, first: int | None, second: int | None, waits: bool
) -> None:
    recorder = Recorder(shared=False, capture=first)
    made = recorded(monkeypatch, recorder)
    made.send(CALL, WEIGHTS, whole=False)
    assert "caller waits end" not in recorder.log
    made.receive(CALL, WEIGHTS, OUT)
    for caller in ("caller", "other"):
        recorder.log.clear()
        recorder.capture, recorder.caller = second, caller
        made._follow_last_call(torch.cuda.current_stream())
        # On its own stream a call follows the last one without an event.
        assert recorder.log == (["other waits end"] if waits and caller == "other" else [])


@pytest.mark.parametrize("shared", [False, True])
def test_the_explicit_graph_has_two_roots_that_no_edge_joins(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    recorder: Any = Recorder(shared=shared, capture=5)
    made = recorded(monkeypatch, recorder, child_graph=True)
    made.send(CALL, WEIGHTS, whole=False)
    assert recorder.log == []
    made.receive(CALL, WEIGHTS, OUT)
    kind, nodes, stream = recorder.log[0]
    assert (kind, stream.name, recorder.log[1]) == ("child", "caller", "end on caller")
    named = {node.launch.name: node for node in nodes}
    assert len(nodes) == (4 if shared else 3)
    assert [named[role].context for role in ("role1", "role2", "role3")] == [11, 22, 33]
    place = {node.launch.name: index for index, node in enumerate(nodes)}
    assert named["role2"].after == ()
    assert named["role1"].after == ((place["role4"],) if shared else ())
    assert sorted(named["role3"].after) == sorted((place["role1"], place["role2"]))
    assert not shared or (named["role4"].context, named["role4"].after) == (11, ())


def test_outside_of_a_capture_the_streams_serve_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(shared=False)
    made = recorded(monkeypatch, recorder, child_graph=True)
    made.send(CALL, WEIGHTS, whole=False)
    made.receive(CALL, WEIGHTS, OUT)
    assert "role1 on comm" in recorder.log
    assert "role3 on caller" in recorder.log


def test_a_gpu_without_the_instructions_is_refused_before_anyone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "arch_of", lambda index: "sm_100a")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "B200")
    nothing: Any = None
    with pytest.raises(UnsupportedError, match=r"the kernels run on sm_90a; got sm_100a \(B200\)"):
        KernelEngine(nothing, nothing, torch.device("cuda", 0), 1.0, Options())
