"""The cases of `warpring ep-verify`: how many, what they cover, and that a wrong result is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

from warpring.bench.ep_cases import FORMATS, SKEWED, TOKENS, Case, Outcome, Verifier, cases, layer_shape, num_drawn
from warpring.cli import main
from warpring.errors import ArgumentError

CPU = torch.device("cpu")


def test_cases_of_all_layers_are_more_than_the_published_ones() -> None:
    assert len(cases(256)) * len(FORMATS) >= 94
    assert {case.tokens for case in cases(256)} >= {*TOKENS, None}
    assert {case.routing for case in cases(256)} == {"uniform", "empty rank", *SKEWED}


def test_counts_that_come_out_equal_are_run_once() -> None:
    assert len(cases(24)) < len(cases(256))
    assert max(case.tokens or 0 for case in cases(24)) == 24


def test_unequal_counts_change_and_an_empty_rank_is_empty() -> None:
    unequal = Case(None)
    assert len({unequal.count(0, 2, 24, seed) for seed in range(20)}) > 5
    empty = Case(16, "empty rank")
    assert [empty.count(rank, 3, 24, 0) for rank in range(3)] == [16, 16, 0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_fit_any_number_of_ranks(name: str, num_ranks: int) -> None:
    for device in (CPU, torch.device("cuda", 0)):
        shape = layer_shape(name, num_ranks, device)
        assert shape.num_experts % num_ranks == 0
        assert shape.hidden % 32 == shape.intermediate % 32 == 0
    assert layer_shape(name, num_ranks, CPU).hidden <= 448


def test_experts_in_the_same_place_of_two_ranks_differ() -> None:
    assert all(share % num_drawn(share) for share in range(1, 1025))


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="name must be one of"):
        Verifier("gpt-2", None, CPU)


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier("h288xi96xe24xk5", None, CPU)
    good = verifier.run(Case(8), replays=2, checked=2)
    assert good.met("fp8")
    assert good.replays == 2
    right = verifier.layer

    def off_by_one(x: torch.Tensor, topk_idx: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = topk_idx.clone()
        ids[0, 0] = (ids[0, 0] + 1) % 24
        return right(x, ids, *args, **kwargs)

    monkeypatch.setattr(verifier, "layer", off_by_one)
    assert not verifier.run(Case(8), replays=1, checked=1).met("fp8")


def test_a_result_that_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier("h288xi96xe24xk5", None, CPU)
    monkeypatch.setattr(verifier, "layer", lambda *args, **kwargs: None)
    outcome = verifier.run(Case(3), replays=1, checked=1)
    assert outcome.cosine == outcome.exact_cosine == -1


def test_the_worse_outcome_is_taken_field_by_field() -> None:
    assert Outcome(1.0, 0.5, 0.1, 3).worse(Outcome(0.9, 0.6, 0.2, 1)) == Outcome(0.9, 0.5, 0.2, 3)


def verify(rank: int) -> list[tuple[str, bool]]:
    """Two cases that a rank makes alone would not show."""
    verifier = Verifier("h160xi224xe24xk3", dist.group.WORLD, CPU, num_shared=1, timeout=60.0)
    with verifier.layer:
        outcomes = [(case, verifier.run(case, replays=2, checked=2)) for case in (Case(None), Case(9, "empty rank"))]
    return [(str(case), outcome.met("fp8")) for case, outcome in outcomes]


def test_two_ranks_verify_together() -> None:
    assert run_ranks(verify, 2) == [[("unequal uniform", True), ("9 empty rank", True)]] * 2


# The command


def test_command_verifies_one_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--model", "h288xi96xe24xk5", "--activation", "bf16", "--shared", "1"]
    assert main(["ep-verify", *options, "--replays", "1"]) == 0
    output = capsys.readouterr().out
    assert "h288xi96xe24xk5 mxfp4, activations bf16, shared 1" in output
    assert output.count(" yes") == len(cases(24))
    assert "NO" not in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt-2"], "--model must hold"),
        (["--activation", "int8"], "--activation must hold fp8, bf16"),
        (["--shared", "9"], "--shared must hold"),
        (["--replays", "0"], "must be at least 1"),
    ],
)
def test_command_names_a_wrong_option(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep-verify", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
