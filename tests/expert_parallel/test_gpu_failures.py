"""What goes wrong on real GPUs: every live rank hears of it by name, within the bound, and can build anew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks
from gpu_layers import CUDA, PROBLEM, Buffers, device_of, experts_of

from warpring import ArgumentError
from warpring.bench.ep_cases import Case, Verifier
from warpring.errors import PeerTimeoutError
from warpring.expert_parallel.layer import ExpertParallelDecode

pytestmark = pytest.mark.gpu
NAME = "h288xi96xe24xk5"


# One GPU


def test_more_rows_than_the_layer_takes_are_refused_and_send_nothing() -> None:
    experts, _ = experts_of(PROBLEM)
    buffers = Buffers(PROBLEM)
    buffers.fill(32, seed=0)
    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as layer:
        x = torch.zeros(33, PROBLEM.hidden, dtype=torch.bfloat16, device=CUDA)
        ids = torch.zeros(33, PROBLEM.topk, dtype=torch.int64, device=CUDA)
        with pytest.raises(ArgumentError, match="at most max_tokens_per_rank = 32 rows; got 33"):
            layer(x, ids, ids.float())
        with pytest.raises(ArgumentError, match="num_tokens must be 0 to 32"):
            layer(*buffers.args()[:3], 33)
        layer(*buffers.args(), out=buffers.out)
        torch.cuda.synchronize()
        layer.check()
        buffers.check(experts, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_name_no_expert_are_unused_slots_whatever_their_weight(dtype: torch.dtype) -> None:
    experts, _ = experts_of(PROBLEM)
    buffers = Buffers(PROBLEM, dtype)
    buffers.fill(12, seed=3)
    foreign = [-1, PROBLEM.num_experts, -PROBLEM.num_experts, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:  # the low half of the last one names an expert
        foreign += [2**63 - 1, -(2**63), 2**32 + 3]
    for token, value in enumerate(foreign):
        buffers.topk_idx[token, token % PROBLEM.topk] = value
        buffers.topk_weights[token, token % PROBLEM.topk] = torch.nan
    buffers.topk_idx[11] = -1
    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as layer:
        layer(*buffers.args(), out=buffers.out)
        torch.cuda.synchronize()
        layer.check()
    assert not buffers.out[11].any()
    buffers.count.fill_(11)
    buffers.check(experts, None)


# Several GPUs


def outcome(work: Callable[[], Any]) -> tuple[str, Any, float]:
    """What a call raised by name, the error's ranks and flag or text, and the seconds until then."""
    start = time.monotonic()
    try:
        work()
    except PeerTimeoutError as error:
        return "PeerTimeoutError", (error.rank, error.peer, error.flag), time.monotonic() - start
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", None, time.monotonic() - start


def verifier_of(rank: int, **options: Any) -> Verifier:
    return Verifier(NAME, dist.group.WORLD, device_of(rank), **{"timeout": 60.0, **options})


def works(verifier: Verifier) -> bool:
    """Whether one call gives the right values; a collective."""
    return verifier.run(Case(8), replays=1, checked=1).met("fp8")


#: Bound of a wait in which nobody comes.
BOUND = 3.0


def kill_within(seconds: float) -> None:
    """Kill this process from outside of Python's reach, whatever it does by then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def replay_until(work: Callable[[], Any], seconds: float) -> tuple[str, Any, float]:
    """Call again and again, and what the call raised that raised something; the seconds are of that call alone."""
    end = time.monotonic() + seconds
    found = ("", None, 0.0)
    while not found[0] and time.monotonic() < end:
        found = outcome(work)
    return found


def fail(rank: int, how: str, partition: str) -> tuple[Any, Any, bool]:
    """After a good call rank 1 dies, is killed while it replays, or is stopped until rank 0 has given up: then it calls
    all the same, or never does. Those that live build the layer again.

    Returns what this rank's call raised, what its next one raised, and whether the new layer works.
    """
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    verifier_of(rank).layer.close()  # kernels are compiled now: ranks come together from here on
    verifier = verifier_of(rank, timeout=BOUND, partition=partition)
    verifier.run(Case(8), replays=2, checked=1)
    failed = again = ("", None, 0.0)
    if rank == 1 and how == "dies":
        os._exit(1)
    if how == "is killed while it replays":
        if rank == 1:
            kill_within(0.7)
        failed = replay_until(lambda: verifier.run(Case(8), replays=50, checked=1), 30.0)
        again = outcome(lambda: works(verifier))
        verifier.layer.close()
        return failed, again, False
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 or how == "comes late":
        failed = outcome(lambda: works(verifier))
        again = outcome(lambda: works(verifier))
    verifier.layer.close()
    if rank == 0 and how != "dies":
        os.kill(pids[1], signal.SIGCONT)
    if how == "dies":
        return failed, again, False
    rebuilt = verifier_of(rank, partition=partition)
    with rebuilt.layer:
        return failed, again, works(rebuilt)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("partition", ["auto", "green"])
@pytest.mark.parametrize("how", ["dies", "is killed while it replays", "comes late", "never calls"])
def test_a_peer_that_is_gone_is_named_within_the_bound_and_the_layer_can_be_rebuilt(how: str, partition: str) -> None:
    first, second = run_ranks(fail, 2, how, partition)
    (kind, fields, seconds), again, rebuilt = first
    assert (kind, fields[:2]) == ("PeerTimeoutError", (0, 1))
    assert BOUND - 0.5 < seconds < 20
    assert again[0] == "PoisonedError"
    if how in ("dies", "is killed while it replays"):
        assert second is None
        return
    assert rebuilt
    assert second[2]
    late = (second[0][0], second[1][0])
    assert late == (("PeerTimeoutError", "PoisonedError") if how == "comes late" else ("", ""))


def late_within_bound(rank: int, seconds: float) -> tuple[bool, float]:
    verifier = verifier_of(rank)
    with verifier.layer:
        works(verifier)
        if rank == 1:
            time.sleep(seconds)
        start = time.monotonic()
        return works(verifier), time.monotonic() - start


@pytest.mark.multi_gpu
def test_a_rank_that_is_late_within_the_bound_is_waited_for() -> None:
    """9 s are more than 2^33 ns: a clock or a bound of 32 bits would show."""
    (right, waited), (right_too, _) = run_ranks(late_within_bound, 2, 9.0)
    assert right
    assert right_too
    assert waited > 8.5


def never_build(rank: int) -> Any:
    return None if rank == 1 else outcome(lambda: verifier_of(rank, timeout=2.0))


@pytest.mark.multi_gpu
def test_a_rank_that_never_builds_the_layer_is_named() -> None:
    (kind, fields, seconds), _ = run_ranks(never_build, 2)
    assert (kind, fields) == ("PeerTimeoutError", (0, 1, "rendezvous"))
    assert 1.5 < seconds < 40


def disagree(rank: int, options: list[dict[str, Any]]) -> tuple[Any, bool]:
    """Ranks build the layer differently, then alike."""
    failed = outcome(lambda: verifier_of(rank, **options[rank]))
    verifier = verifier_of(rank)
    with verifier.layer:
        return failed, works(verifier)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"max_tokens": 16}, {"max_tokens": 24}], "max_tokens_per_rank is 16 on rank 0; 24 on rank 1"),
        ([{"comm_sms": 8}, {"comm_sms": 16}], "comm_ctas is 8 on rank 0; 16 on rank 1"),
    ],
    ids=["problem", "grids"],
)
def test_ranks_that_disagree_all_hear_in_what(options: list[dict[str, Any]], words: str) -> None:
    for (kind, text, seconds), works_after in run_ranks(disagree, 2, options):
        assert kind == "RanksDisagreeError"
        assert words in text
        assert seconds < 40, "told by comparing, not found out by waiting"
        assert works_after


def too_many(rank: int) -> tuple[Any, bool]:
    """Rank 1's device holds a count beyond its rows."""
    verifier = verifier_of(rank)
    problem, device = verifier.problem, verifier.device
    rows = problem.max_tokens_per_rank
    x = torch.ones(rows, problem.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.arange(problem.topk, device=device).expand(rows, -1).contiguous()
    count = torch.full((1,), rows + rank, dtype=torch.int32, device=device)
    out = torch.zeros_like(x)

    def call() -> None:
        verifier.layer(x, ids, torch.ones_like(ids, dtype=torch.float32), count, out=out)
        torch.cuda.synchronize(device)
        verifier.layer.check()

    failed = outcome(call)
    verifier.layer.close()
    return failed, bool(out.isnan().all())


@pytest.mark.multi_gpu
def test_a_count_beyond_one_ranks_rows_ends_the_call_on_all_at_once() -> None:
    (peer, peer_nan), (own, own_nan) = run_ranks(too_many, 2)
    assert peer[0] == "PoisonedError"
    assert "rank 1 had a num_tokens beyond its limit" in peer[1]
    assert own[0] == "ArgumentError"
    assert "num_tokens must be 0 to 256; the device held 257" in own[1]
    assert max(peer[2], own[2]) < 15, "told by the peer, not found out by waiting"
    assert peer_nan
    assert own_nan
