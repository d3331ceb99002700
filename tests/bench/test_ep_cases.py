"""The cases of `warpring ep-verify`: how many, what they cover, and that a wrong result is seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

from warpring.bench.ep_cases import (
    COMPARED_ROWS,
    FORMATS,
    SKEWED,
    TOKENS,
    Case,
    CaseInputs,
    Outcome,
    Verifier,
    cases,
    layer_shape,
    num_drawn,
)
from warpring.bench.ep_check import Rows
from warpring.bench.records import load
from warpring.bench.shapes import parse_shape
from warpring.cli import main
from warpring.errors import ArgumentError
from warpring.expert_parallel.engine import EARLY_TOKENS
from warpring.expert_parallel.problem import Problem

CPU = torch.device("cpu")


def test_cases_of_all_layers_are_more_than_the_published_ones() -> None:
    assert len(cases(256)) * len(FORMATS) >= 94
    assert TOKENS == (0, 1, 2, 3, 7, 8, 16, 31, 64, 128, 256)
    published = {"deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.2", "qwen3-235b-a22b", "gpt-oss-120b"}
    assert published < set(FORMATS)
    assert all(parse_shape(name).hidden % 128 for name in set(FORMATS) - published), "ragged"
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


class Instead:
    """A layer whose calls do something else: `act(right, x, topk_idx, weights, count, out)`."""

    def __init__(self, right: Any, act: Callable[..., object]) -> None:
        self.right, self.act = right, act

    def __call__(self, *args: torch.Tensor, out: torch.Tensor) -> None:
        self.act(self.right, *args, out)

    def check(self) -> None: ...


def run_instead(monkeypatch: pytest.MonkeyPatch, act: Callable[..., object], **counts: int) -> Outcome:
    """Eight tokens of a small layer, run by `act`."""
    verifier = Verifier("h288xi96xe24xk5", None, CPU)
    monkeypatch.setattr(verifier, "layer", Instead(verifier.layer, act))
    return verifier.run(Case(8), **{"replays": 1, "checked": 1, **counts})


def as_it_is(right: Any, *args: torch.Tensor) -> None:
    right(*args[:-1], out=args[-1])


def another_expert(right: Any, x: torch.Tensor, topk_idx: torch.Tensor, *args: torch.Tensor) -> None:
    ids = topk_idx.clone()
    ids[0, 0] = (ids[0, 0] + 1) % 24
    as_it_is(right, x, ids, *args)


def one_row_more(right: Any, *args: torch.Tensor) -> None:
    as_it_is(right, *args)
    args[-1][int(args[-2])] = 0


def nothing(*args: Any) -> None: ...


def test_a_right_result_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_instead(monkeypatch, as_it_is, replays=3, checked=2)
    assert outcome.met("fp8")
    assert (outcome.replays, outcome.tokens) == (3, 16)


@pytest.mark.parametrize("act", [another_expert, one_row_more, nothing])
def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]) -> None:
    outcome = run_instead(monkeypatch, act)
    assert not outcome.met("fp8")
    assert act is another_expert or outcome.cosine == outcome.exact_cosine == -1


@pytest.mark.parametrize("act", [one_row_more, nothing])
def test_a_call_that_is_not_compared_must_write_its_tokens_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]
) -> None:
    """Only the last of four calls is compared; the first one is wrong."""
    acts = iter([act, as_it_is, as_it_is, as_it_is])
    outcome = run_instead(monkeypatch, lambda *args: next(acts)(*args), replays=4, checked=1)
    assert (outcome.cosine, outcome.tokens) == (-1, 8)


def test_calls_of_few_rows_are_captured_as_such() -> None:
    """They have a form of their own on a GPU, which a call with room for 256 tokens would not show."""
    verifier = object.__new__(Verifier)
    verifier.problem = Problem(128, 64, 8, 2, 1, 256)
    found = {str(case): verifier.rows_of(case) for case in cases(256)}
    assert {found[f"{count} uniform"] for count in (0, 1, 8, 64)} == {64} == {EARLY_TOKENS}
    assert {found[name] for name in ("128 uniform", "256 zipf", "unequal uniform")} == {256}
    verifier.problem = replace(verifier.problem, max_tokens_per_rank=16)
    assert {verifier.rows_of(case) for case in cases(16)} == {16}


@pytest.mark.parametrize("kind", ["uniform", *SKEWED])
def test_inputs_are_what_their_case_says(kind: str) -> None:
    problem = Problem(64, 32, 24, 4, 2, 40)
    ranks = [CaseInputs(problem, CPU), CaseInputs(problem, CPU)]
    hits = torch.zeros(24)
    for call in range(8):
        for rank, inputs in enumerate(ranks):
            inputs.fill(kind, 39, 100 * rank + call, call if kind != "zipf" else 7)
            ids = inputs.topk_idx[:39]
            assert inputs.x[:39].isfinite().all()
            assert torch.equal(inputs.topk_weights[:39].isnan(), ids < 0)
            assert inputs.x[39:].isnan().all()
            assert inputs.topk_idx[39:].min() > 1000
            assert inputs.out.isnan().all()
            assert (ids < 0).any() == (kind == "unused")
            used = ids[ids >= 0]
            hits += torch.bincount(used, minlength=24)
            assert kind != "one rank" or used.max() < 12
            assert kind != "one expert" or used.min() == used.max() == 23
        assert not torch.equal(ranks[0].x, ranks[1].x)
    skew = float(hits.max() / hits.mean())
    assert {"uniform": skew < 1.4, "zipf": 3 < skew < 5, "one expert": skew == 24}.get(kind, True), skew


def test_compared_rows_are_other_ones_in_calls_that_follow() -> None:
    """Of 100 rows at most 32 are compared in a call, and all of them in any four."""
    inputs = CaseInputs(Problem(64, 32, 8, 2, 1, 100), CPU)
    inputs.x[:, 0] = torch.arange(100).bfloat16()
    step = -(-100 // COMPARED_ROWS)
    parts = [inputs.rows(slice(index % step, 100, step), index) for index in range(step)]
    assert max(len(part.x) for part in parts) <= COMPARED_ROWS
    assert sorted(Rows.joined(parts).x[:, 0].tolist()) == list(range(100))


def test_each_case_is_judged_by_its_own_rows() -> None:
    verifier = Verifier("h288xi96xe24xk5", None, CPU)
    inputs = verifier.inputs
    inputs.fill("uniform", 6, 1, 1)
    verifier.layer(inputs.x, inputs.topk_idx, inputs.topk_weights, 6, out=inputs.out)
    parts = [inputs.rows(slice(6), 0), inputs.rows(slice(2), 1), inputs.rows(slice(6), 3)]
    parts[1].y[1, :100] *= 1.5
    first, spoilt, absent, last = verifier.yardstick.judge(Rows.joined(parts), 4)
    assert first.met("fp8")
    assert last.met("fp8")
    assert (first.tokens, spoilt.tokens, last.tokens) == (6, 2, 6)
    assert absent == Outcome(1.0, 1.0, 0.0, 0, 0, 288)
    assert spoilt.cosine < 0.999
    assert spoilt.exact_error > 2 * first.exact_error
    parts[2].y[0, 0] = torch.nan
    assert verifier.yardstick.judge(parts[2], 4)[3].cosine == -1


def test_the_worse_outcome_is_taken_field_by_field() -> None:
    assert Outcome(1.0, 0.5, 0.1, 3).worse(Outcome(0.9, 0.6, 0.2, 1)) == Outcome(0.9, 0.5, 0.2, 3)


@pytest.mark.parametrize(("hidden", "least"), [(4096, 1 - 3e-7), (1024, 1 - 3e-7), (512, 1 - 6e-7), (128, 1 - 2.4e-6)])
def test_the_bound_allows_narrow_rows_one_rounding_more(hidden: int, least: float) -> None:
    assert Outcome(least + 1e-10, 1.0, 0.0, 1, 1, hidden).met("fp8")
    assert not Outcome(least - 1e-10, 1.0, 0.0, 1, 1, hidden).met("fp8")


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


def test_command_appends_a_record_of_every_case(tmp_path: Path) -> None:
    path = tmp_path / "verify.jsonl"
    options = ["--device", "cpu", "--model", "h160xi224xe24xk3", "--activation", "fp8", "--shared", "1"]
    assert main(["ep-verify", *options, "--replays", "2", "--max-tokens", "8", "--jsonl", str(path)]) == 0
    found = load(path)
    assert [rec["case"] for rec in found] == [str(case) for case in cases(8)]
    assert all(rec["met"] and rec["repeats"] == 2 and rec["max_tokens_per_rank"] == 8 for rec in found)
    assert {rec["case"]: rec["tokens"] for rec in found}["8 uniform"] == 16
    assert all(0 < rec["rms_rel_error"] < 0.1 for rec in found if rec["tokens"])


def test_command_verifies_every_model_in_one_form_before_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "h288xi96xe24xk5,h160xi224xe24xk3", "--shared", "0", "--replays", "1", "--max-tokens", "2"]
    assert main(["ep-verify", "--device", "cpu", *options]) == 0
    titles = re.findall(r"^(h\w+) \w+, activations (\w+), shared 0", capsys.readouterr().out, re.MULTILINE)
    assert [form for _, form in titles] == ["fp8", "fp8", "bf16", "bf16"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt-2"], "--model must hold"),
        (["--activation", "int8"], "--activation must hold fp8, bf16"),
        (["--shared", "9"], "--shared must hold"),
        (["--replays", "0"], "must be at least 1"),
        (["--max-tokens", "0"], "must be at least 1"),
    ],
)
def test_command_names_a_wrong_option(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ep-verify", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
