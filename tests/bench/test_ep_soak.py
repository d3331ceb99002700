"""The soak of `warpring ep-verify --soak`: what it draws, and that it sees wrong values, drift and growing memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

from warpring.bench.ep_cases import Outcome, Verifier
from warpring.bench.ep_soak import CALLS, DrawnInputs, Soak, SoakOutcome, mixed, uniform
from warpring.bench.records import load
from warpring.cli import main
from warpring.errors import ArgumentError

CPU = torch.device("cpu")
SMALL = "h64xi32xe6xk3"
ROWS = 5
GOOD = SoakOutcome(100, 10, Outcome(1.0, 1.0, 0.0, 100), 0, 0, 0, 1.0)


def small(group: Any | None = None, device: torch.device = CPU, **options: Any) -> Verifier:
    return Verifier(SMALL, group, device, format="mxfp4", max_tokens=ROWS, timeout=60.0, **options)


def drawn(number: int, rank: int = 0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    verifier = small()
    inputs = DrawnInputs(verifier.problem, rank, CPU, seed)
    inputs.number.fill_(number)
    inputs.draw()
    assert int(inputs.number) == number + 1
    return inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.counts


# Inputs


def test_random_bits_are_one_to_one_and_even() -> None:
    bits = mixed(torch.arange(-5000, 5000))
    assert len(bits.unique()) == 10_000
    values = uniform(bits)
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=0.02)
    for bit in range(64):
        assert ((bits >> bit) & 1).float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_a_replays_inputs_are_those_of_its_number_rank_and_seed() -> None:
    first = drawn(7)
    for again, same in ((drawn(7), True), (drawn(8), False), (drawn(7, rank=1), False), (drawn(7, seed=1), False)):
        assert torch.equal(first[0].view(torch.int16), again[0].view(torch.int16)) == same
        assert torch.equal(first[1], again[1]) == same


def test_inputs_cover_counts_unused_slots_and_skew() -> None:
    problem = small().problem
    counts: set[int] = set()
    kinds: set[str] = set()
    for number in range(40):
        x, topk_idx, weights, num_tokens = drawn(number)
        for call, count in enumerate(num_tokens.tolist()):
            counts.add(count)
            assert x[call, :count].isfinite().all()
            assert x[call, count:].isnan().all()
            assert (topk_idx[call, count:] == 2**31 - 1).all()
            ids = topk_idx[call, :count]
            assert ((ids >= -1) & (ids < problem.num_experts)).all()
            assert torch.equal(weights[call, :count].isnan(), ids < 0)
            used = ids[ids >= 0]
            if (ids < 0).any():
                kinds.add("unused")
            if count > 2 and len(used.unique()) == 1:
                kinds.add("one expert")
            if count > 2 and len(used.unique()) == problem.num_experts:
                kinds.add("even")
    assert counts == set(range(ROWS + 1))
    assert kinds == {"unused", "one expert", "even"}


def test_skewed_calls_are_skewed_on_every_rank() -> None:
    """The same experts are hot on all ranks in the same call, or no expert would ever get much."""
    problem = replace(small().problem, num_ranks=2, max_tokens_per_rank=12)
    ranks = [DrawnInputs(problem, rank, CPU, 0) for rank in (0, 1)]
    both = one_rank = empty = 0
    for _ in range(40):
        for inputs in ranks:
            inputs.draw()
        for call in range(CALLS):
            used = torch.cat([i.topk_idx[call, : i.counts[call]] for i in ranks]).flatten()
            used = used[used >= 0]
            empty += not any(int(i.counts[call]) for i in ranks)
            if len(used) > 10:
                both += len(used.unique()) == 1
                one_rank += len(used.unique()) > 1 and len((used // 3).unique()) == 1
    assert both > 5
    assert one_rank > 5
    assert empty > 1


# The soak


@pytest.mark.parametrize("options", [{}, {"activation": "bf16", "num_shared": 1}], ids=["fp8", "bf16, shared"])
def test_a_right_layer_passes(options: dict[str, Any]) -> None:
    verifier = small(**options)
    outcome = Soak(verifier, seed=3).run(12, 4)
    assert (outcome.replays, outcome.checks, outcome.changed) == (12, 4, 0)
    assert outcome.worst.exact_cosine > 0.99
    assert outcome.met()


def soak(rank: int) -> tuple[bool, int]:
    verifier = small(dist.group.WORLD)
    with verifier.layer:
        outcome = Soak(verifier, seed=1).run(6, 3)
    return outcome.met(), outcome.changed


def test_two_ranks_soak_together() -> None:
    assert run_ranks(soak, 2) == [(True, 0)] * 2


class Wrong:
    """A layer whose output is spoilt from some call on: `spoil(out, count)`."""

    def __init__(self, right: Any, first: int, spoil: Any) -> None:
        self.right, self.first, self.spoil, self.calls = right, first, spoil, 0

    def __call__(self, *args: Any, out: torch.Tensor) -> None:
        self.right(*args, out=out)
        self.calls += 1
        if self.calls > self.first:
            self.spoil(out, int(args[3]))

    def check(self) -> None: ...


def soak_spoilt(monkeypatch: pytest.MonkeyPatch, first: int, spoil: Any) -> SoakOutcome:
    verifier = small()
    monkeypatch.setattr(verifier, "layer", Wrong(verifier.layer, first, spoil))
    return Soak(verifier, seed=0).run(10, 2)


def scale_a_row(out: torch.Tensor, count: int) -> None:
    out[:count] *= torch.linspace(0.9, 1.1, out.shape[1]).bfloat16()


def write_beyond(out: torch.Tensor, count: int) -> None:
    out[count:] = 0


def one_bit(out: torch.Tensor, count: int) -> None:
    out[:count].view(torch.int16)[:, 0] ^= 1


def nothing(out: torch.Tensor, count: int) -> None:
    out.fill_(torch.nan)


@pytest.mark.parametrize("spoil", [scale_a_row, write_beyond, nothing])
def test_wrong_values_are_seen(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    assert soak_spoilt(monkeypatch, CALLS * 9, spoil).worst.cosine < 0.9999997


def test_a_change_of_one_bit_between_the_first_replays_and_their_repetition_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = soak_spoilt(monkeypatch, CALLS * 10, one_bit)
    assert outcome.worst.cosine >= 0.9999997
    assert outcome.changed > 0
    assert not outcome.met()


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"changed": 1}, False),
        ({"allocated_bytes": 1}, False),
        ({"allocated_bytes": -512}, True),
        ({"device_bytes": 2 << 20}, True),
        ({"device_bytes": (2 << 20) + 1}, False),
        ({"worst": Outcome(0.9999997, 0.5, 1.0, 1)}, True),
        ({"worst": Outcome(0.9999996, 1.0, 0.0, 1)}, False),
    ],
    ids=str,
)
def test_every_bound_counts(changes: dict[str, Any], met: bool) -> None:
    assert replace(GOOD, **changes).met() == met


def test_the_worse_of_two_ranks() -> None:
    other = replace(GOOD, changed=2, device_bytes=5, worst=Outcome(0.5, 0.6, 0.7, 100))
    assert GOOD.worse(other) == other.worse(GOOD) == other


@pytest.mark.parametrize(("replays", "checks"), [(0, 1), (3, 0), (3, 4)])
def test_counts_that_cannot_be_are_refused(replays: int, checks: int) -> None:
    with pytest.raises(ArgumentError, match="needs 1 <= checks <= replays"):
        Soak(small(), seed=0).run(replays, checks)


# The command


def test_command_appends_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    options = ["--activation", "fp8", "--shared", "1", "--checked", "1"]
    assert main(["ep-verify", "--device", "cpu", "--soak", "2", *options, "--jsonl", str(path)]) == 0
    assert "2 replays in" in capsys.readouterr().out
    (rec,) = load(path)
    assert (rec["bench"], rec["model"], rec["repeats"], rec["calls"]) == ("soak", "h160xi224xe24xk3", 2, 2 * CALLS)
    assert (rec["shared_expert"], rec["changed_values"], rec["num_ranks"]) == ("fused", 0, 1)


def test_command_names_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep-verify", "--device", "cpu", "--soak", "0"]) == 2
    assert "--soak, --checked and --max-tokens must be at least 1" in capsys.readouterr().err


# GPUs


def soak_on(rank: int, replays: int, options: dict[str, Any], group: Any | None = None) -> SoakOutcome:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    verifier = Verifier("h512xi256xe16xk4", group, device, format="mxfp4", max_tokens=32, timeout=20.0, **options)
    with verifier.layer:
        # Other tests may use the same GPU: what the whole device holds says nothing here.
        return replace(Soak(verifier, seed=5).run(replays, 10), device_bytes=0)


OPTIONS: list[dict[str, Any]] = [
    *({}, {"num_shared": 1}, {"activation": "bf16"}),
    *({"partition": "green"}, {"partition": "green", "num_shared": 1}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_gpu_replays_without_a_pause(options: dict[str, Any]) -> None:
    outcome = soak_on(0, 500, options)
    assert outcome.met(), outcome


def soak_ranks(rank: int, options: dict[str, Any]) -> SoakOutcome:
    return soak_on(rank, 500, options, dist.group.WORLD)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_gpus_replay_without_a_pause(options: dict[str, Any]) -> None:
    for outcome in run_ranks(soak_ranks, 2, options):
        assert outcome.met(), outcome
