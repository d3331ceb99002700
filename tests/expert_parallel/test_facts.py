"""What doctor says of a machine's GPUs, over machines that this is not."""

from __future__ import annotations

import re

import pytest
import torch

from warpring import UnsupportedError
from warpring.cli import build_parser
from warpring.expert_parallel import facts
from warpring.runtime.green import SmLimits


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one that torchrun did not start."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (set[tuple[int, int]](), "all 3 GPUs reach each other"),
        ({(0, 2), (2, 0)}, "missing from 0 to 2, 2 to 0"),
        (
            {(a, b) for a in range(3) for b in range(3)} | {(9, 9)},
            "missing from 0 to 1, 0 to 2, 1 to 0, 1 to 2, 2 to 0, 2 to 1",
        ),
    ],
)
def test_peer_access_names_the_pairs_that_lack_it(
    cut: set[tuple[int, int]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in cut)
    assert facts.peer_access(3) == text
    assert facts.peer_access(1) == "one GPU alone; a layer of one rank"


def test_many_missing_pairs_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert facts.peer_access(8).endswith("0 to 6 and more")


def test_green_contexts_give_granularity_and_default_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "sm_limits", lambda index: SmLimits(132, 8, 8))
    for own in (False, True):
        monkeypatch.setattr(facts, "has_workqueues", lambda index, own=own: own)
        text = facts.green_contexts(0)
        assert text.startswith("yes, 132 SMs in steps of 8, at least 8; by default 16 + 116; work queues ")
        assert ("shared" in text) != own


def test_green_contexts_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(index: int) -> SmLimits:
        raise UnsupportedError("cuda:0 has no Green Contexts: driver 12.2.")

    monkeypatch.setattr(facts, "sm_limits", limits)
    assert facts.green_contexts(0) == "no: cuda:0 has no Green Contexts: driver 12.2. Two plain streams stand in."
    monkeypatch.setattr(facts, "sm_limits", lambda index: SmLimits(32, 8, 8))
    assert "compute SMs must be at least 32" in facts.green_contexts(0)


@pytest.mark.parametrize(
    ("environment", "num_gpus", "ranks", "start"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 0, 2, "torchrun --nproc-per-node 2 -m"),
        ({"WORLD_SIZE": "4"}, 8, 4, "torchrun --nproc-per-node 4 -m"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8, 16, "torchrun, with the options of this start, -m"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, 1, 2, "torchrun, with the options of this start, -m"),
        ({}, 8, 8, "torchrun --nproc-per-node 8 -m"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 2, 2, "torchrun --nproc-per-node 2 -m"),
        ({"WORLD_SIZE": "many"}, 2, 2, "torchrun --nproc-per-node 2 -m"),
    ],
)
def test_several_ranks_are_said_to_be_untried_and_what_tries_them(
    environment: dict[str, str], num_gpus: int, ranks: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = facts.rendezvous(num_gpus)
    assert text is not None
    assert text.startswith(f"not tried: whether {ranks} ranks meet ")
    assert start in text


def test_commands_that_doctor_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    quoted = re.findall(r"-m warpring ([^']+)'", facts.rendezvous(2) or "")
    assert [build_parser().parse_args(words.split()).command for words in quoted] == ["ep-verify", "ep-bench"]


def test_one_rank_has_no_one_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    for world in (None, "1", "", "-2"):
        if world is not None:
            monkeypatch.setenv("WORLD_SIZE", world)
        assert [facts.rendezvous(num_gpus) for num_gpus in (0, 1)] == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where no GPU is; found one")
def test_ranks_of_torchrun_need_no_gpu_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "whether 3 ranks meet" in dict(facts.facts())["rendezvous"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where no GPU is; found one")
def test_without_a_gpu_the_cpu_ranks_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    assert dict(facts.facts()) == {
        "CPU ranks": "yes, through gloo",
        "GPU ranks": "none: no GPU; the reference runs on CPU ranks",
    }
