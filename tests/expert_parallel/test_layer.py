"""The layer object alone on one rank: arguments, who may call when, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_inputs import Inputs, make_inputs

from warpring import ArgumentError, clipped_swiglu
from warpring.errors import PeerTimeoutError, PoisonedError, WorkspaceBusyError
from warpring.expert_parallel.arithmetic import run_layer
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import Problem

PROBLEM = Problem(
    hidden=128, intermediate=64, num_experts=4, topk=2, num_ranks=1, max_tokens_per_rank=8, format="mxfp8"
)


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(8, 128, 64, 4, 2, seed=21)


@pytest.fixture
def layer(inputs: Inputs) -> ExpertParallelDecode:
    return ExpertParallelDecode(PROBLEM, None, inputs.experts)


def args(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.x, inputs.topk_idx, inputs.topk_weights


def test_one_rank_needs_no_group(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    assert torch.equal(layer(*args(inputs)), run_layer(PROBLEM, *inputs.args()))
    assert (layer.rank, layer.sm_counts, layer.memory) == (0, None, "")


@pytest.mark.parametrize(
    "num_tokens", [0, 1, 8, torch.tensor(3, dtype=torch.int32), torch.tensor([0], dtype=torch.int32)]
)
def test_rows_beyond_the_count_are_neither_read_nor_written(
    layer: ExpertParallelDecode, inputs: Inputs, num_tokens: int | torch.Tensor
) -> None:
    count = int(num_tokens)
    expected = layer(inputs.x[:count], inputs.topk_idx[:count], inputs.topk_weights[:count])
    inputs.x[count:] = torch.nan
    inputs.topk_idx[count:] = 77
    out = torch.full_like(inputs.x, 5.0)
    assert layer(*args(inputs), num_tokens, out=out) is out
    assert torch.equal(out[:count], expected)
    assert (out[count:] == 5).all()


def test_any_layout_of_the_arguments_gives_the_same_bits(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    expected = layer(*args(inputs))
    wide = torch.full((8, 131), torch.nan, dtype=torch.bfloat16)
    wide[:, 3:] = inputs.x
    x = wide[:, 3:]
    ids, weights = inputs.topk_idx.int().T.contiguous().T, inputs.topk_weights.double().T.contiguous().T
    out = torch.zeros(8, 160, dtype=torch.bfloat16)
    layer(x, ids, weights, out=out[:, :128])
    assert torch.equal(out[:, :128], expected)
    assert not out[:, 128:].any()


WRONG: dict[str, tuple[Callable[[Inputs], dict[str, Any]], str]] = {
    "x's dtype": (lambda i: {"x": i.x.float()}, r"x must be bfloat16 \[num_tokens, hidden=128\]; got float32"),
    "x's width": (lambda i: {"x": i.x[:, :96]}, r"x must be .*; got bfloat16 \[8, 96\]"),
    "x's rank": (lambda i: {"x": i.x[None]}, "x must be"),
    "ids' width": (lambda i: {"topk_idx": i.topk_idx[:, :1]}, r"topk_idx must be .* \[num_tokens=8, topk=2\]"),
    "ids' dtype": (lambda i: {"topk_idx": i.topk_idx.float()}, "topk_idx must be int32 or int64"),
    "weights' shape": (lambda i: {"topk_weights": i.topk_weights[:4]}, "topk_weights must be"),
    "weights' dtype": (lambda i: {"topk_weights": i.topk_idx}, "topk_weights must be floating point"),
    "id too large": (lambda i: {"topk_idx": i.topk_idx + 4}, "topk_idx must be -1 .* 0 to 3; got"),
    "id too small": (lambda i: {"topk_idx": i.topk_idx - 6}, "topk_idx must be"),
    "count too large": (lambda i: {"num_tokens": 9}, "num_tokens must be 0 to 8, the rows of x; got 9"),
    "count below 0": (lambda i: {"num_tokens": torch.tensor(-1, dtype=torch.int32)}, "num_tokens must be 0 to 8"),
    "count's dtype": (lambda i: {"num_tokens": torch.tensor(1)}, "num_tokens must be an int32 tensor"),
    "counts": (lambda i: {"num_tokens": torch.ones(2, dtype=torch.int32)}, "num_tokens must be an int32 tensor"),
    "no shared": (lambda i: {"shared": torch.ones(8, 1)}, "shared must be None"),
    "device": (lambda i: {"x": i.x.to("meta")}, "x must be a strided tensor on cpu"),
    "out's shape": (lambda i: {"out": i.x[:4]}, r"out must be bfloat16 \[8, 128\]"),
    "out's dtype": (lambda i: {"out": i.x.float()}, "out must be bfloat16"),
    "out's rows": (lambda i: {"out": i.x[:1].expand(8, 128)}, "out must be .* with dense rows"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_broken_rule_is_named_and_the_layer_stays_usable(
    layer: ExpertParallelDecode, inputs: Inputs, change: Callable[[Inputs], dict[str, Any]], message: str
) -> None:
    good = dict(zip(("x", "topk_idx", "topk_weights"), args(inputs), strict=True))
    with pytest.raises(ArgumentError, match=f"^ExpertParallelDecode: {message}"):
        layer(**{**good, **change(inputs)})
    assert layer(**good).isfinite().all()


@pytest.mark.parametrize("rows", [8, 9])
def test_capacity_on_both_sides(layer: ExpertParallelDecode, rows: int) -> None:
    more = make_inputs(rows, 128, 64, 4, 2, seed=2)
    if rows == 8:
        layer(*args(more))
    else:
        with pytest.raises(ArgumentError, match="at most max_tokens_per_rank = 8 rows; got 9"):
            layer(*args(more))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "experts.num_experts must be 8"),
        ({"hidden": 256}, "experts.hidden must be 256"),
        ({"intermediate": 128}, "experts.intermediate must be 128"),
        ({"format": "mxfp4"}, "experts.format must be mxfp4"),
        ({"gate": clipped_swiglu()}, "experts.activation must be"),
        ({"has_bias": True}, "experts must have both biases"),
        ({"num_shared": 1}, "shared must be the problem's num_shared = 1"),
        ({"num_ranks": 2}, "group must have num_ranks = 2 ranks; got 1"),
    ],
)
def test_experts_that_do_not_fit_the_problem(inputs: Inputs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ExpertParallelDecode(replace(PROBLEM, **changes), None, inputs.experts)


def test_shared_experts_are_checked_too(inputs: Inputs) -> None:
    problem = replace(PROBLEM, num_shared=1, shared_format="fp8_block")
    shared = make_inputs(1, 128, 64, 1, 1, format="mxfp8").experts
    with pytest.raises(ArgumentError, match=r"shared\.format must be fp8_block"):
        ExpertParallelDecode(problem, None, inputs.experts, shared=shared)
    with pytest.raises(ArgumentError, match="shared must be the problem's num_shared = 0"):
        ExpertParallelDecode(PROBLEM, None, inputs.experts, shared=shared)


# Who may call when


def test_a_second_send_and_a_second_receive_are_refused(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    handle = layer.send(*args(inputs))
    with pytest.raises(WorkspaceBusyError, match="call 1 is between send and receive"):
        layer(*args(inputs))
    layer.receive(handle)
    with pytest.raises(ArgumentError, match="handle must be the one that the last send returned"):
        layer.receive(handle)
    layer(*args(inputs))


class FakeEngine:
    """Does what a test says."""

    sm_counts = None

    def __init__(self, on_receive: Callable[[], None], on_check: Callable[[], None] = lambda: None) -> None:
        self.receive_now = on_receive
        self.check = on_check
        self.closed = 0

    def send(self, call: object, weights: object, *, whole: bool) -> None: ...

    def receive(self, call: object, weights: object, out: torch.Tensor) -> None:
        self.receive_now()

    def close(self) -> None:
        self.closed += 1


def timeout() -> None:
    raise PeerTimeoutError("peer 1", rank=0, peer=1, flag="done", generation=1, expected=2, seen=1)


def test_a_call_from_another_thread_is_refused_while_one_runs(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert leave.wait(10)

    layer._turns.engine = FakeEngine(wait)  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=lambda: layer(*args(inputs)))
    thread.start()
    assert inside.wait(10)
    for act in (lambda: layer(*args(inputs)), layer.check, layer.close):
        with pytest.raises(WorkspaceBusyError, match="another thread is in this layer"):
            act()
    leave.set()
    thread.join()
    layer(*args(inputs))


def test_a_failure_poisons_until_the_layer_is_built_anew(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    engine = FakeEngine(timeout)
    layer._turns.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    out = torch.zeros_like(inputs.x)
    with pytest.raises(PeerTimeoutError):
        layer(*args(inputs), out=out)
    assert out.isnan().all()
    for act in (lambda: layer(*args(inputs)), layer.check):
        with pytest.raises(PoisonedError, match=r"it failed before \(peer 1\).*build it anew"):
            act()
    layer.close()
    layer.close()
    assert engine.closed == 1
    with ExpertParallelDecode(PROBLEM, None, inputs.experts) as rebuilt:
        assert rebuilt(*args(inputs)).isfinite().all()


def test_what_failed_in_the_background_is_raised_by_the_next_call_or_close(
    layer: ExpertParallelDecode, inputs: Inputs
) -> None:
    for act in (lambda: layer(*args(inputs)), layer.close):
        engine = FakeEngine(lambda: None, timeout)
        layer._turns._unusable = None
        layer._turns.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(PeerTimeoutError):
            act()
    assert engine.closed == 1


def test_what_the_kernels_report_within_a_call_is_raised_behind_its_last_kernel(
    layer: ExpertParallelDecode, inputs: Inputs
) -> None:
    launched: list[bool] = []

    def check() -> None:
        if launched:
            timeout()

    layer._turns.engine = FakeEngine(lambda: launched.append(True), check)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(PeerTimeoutError):
        layer(*args(inputs))
    assert launched == [True]
    with pytest.raises(PoisonedError, match="it failed before"):
        layer(*args(inputs))


def test_an_interrupt_in_the_middle_poisons_too(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    layer._turns.engine = FakeEngine(interrupt)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        layer(*args(inputs))
    with pytest.raises(PoisonedError, match="it failed before"):
        layer(*args(inputs))


def test_a_closed_layer_says_so(inputs: Inputs) -> None:
    with ExpertParallelDecode(PROBLEM, None, inputs.experts) as layer:
        layer(*args(inputs))
    with pytest.raises(PoisonedError, match="it was closed"):
        layer(*args(inputs))
    assert layer.sm_counts is None


# One workspace for many layers


def test_layers_share_a_workspace_and_each_has_its_own_weights(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    others = make_inputs(1, 128, 64, 4, 2, seed=22).experts
    second = layer.with_experts(others)
    first_y, second_y = layer(*args(inputs)), second(*args(inputs))
    assert torch.equal(first_y, run_layer(PROBLEM, *inputs.args()))
    assert torch.equal(second_y, run_layer(PROBLEM, inputs.x, others, inputs.topk_idx, inputs.topk_weights))
    assert not torch.equal(first_y, second_y)


def test_layers_that_share_a_workspace_take_turns(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    second = layer.with_experts(inputs.experts)
    handle = layer.send(*args(inputs))
    with pytest.raises(WorkspaceBusyError):
        second(*args(inputs))
    layer.receive(handle)
    second(*args(inputs))


def test_layers_that_share_a_workspace_are_closed_together(layer: ExpertParallelDecode, inputs: Inputs) -> None:
    second = layer.with_experts(inputs.experts)
    second.close()
    for act in (lambda: layer(*args(inputs)), lambda: layer.with_experts(inputs.experts)):
        with pytest.raises(PoisonedError, match="it was closed"):
            act()


def test_other_experts_must_fit_the_problem_too(layer: ExpertParallelDecode) -> None:
    with pytest.raises(ArgumentError, match=r"experts\.hidden must be 128"):
        layer.with_experts(make_inputs(1, 256, 64, 4, 2).experts)
    elsewhere = make_inputs(1, 128, 64, 4, 2).experts.to("meta")
    with pytest.raises(ArgumentError, match="experts must be on cpu, where the workspace is; got meta"):
        layer.with_experts(elsewhere)
