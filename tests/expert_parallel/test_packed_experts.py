"""Experts that were packed before: a layer takes them as they are, once they fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_layers import PROBLEM as GPU_PROBLEM
from gpu_layers import Buffers, experts_of
from moe_inputs import make_inputs

from warpring import ArgumentError, Experts, clipped_swiglu
from warpring.expert_parallel import engine as engine_module
from warpring.expert_parallel.layer import ExpertParallelDecode, check_packed
from warpring.expert_parallel.packing import EpPacked, pack_ep
from warpring.expert_parallel.problem import Problem


class FakeEngine:
    """In place of a GPU's engine: takes weights that are packed, and keeps what it is sent."""

    sm_counts = None

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(rank=0)
        self.sent: list[Any] = []

    def pack(self, experts: Any, shared: Any) -> str:
        return "packed here"

    def send(self, call: Any, weights: Any, *, whole: bool) -> None:
        self.sent.append(weights)

    def check(self) -> None: ...

    def close(self) -> None: ...


PROBLEM = Problem(128, 64, 4, 2, 1, 8, format="fp8_block")


def packed_for(problem: Problem, **changed: Any) -> tuple[Experts, EpPacked]:
    """Experts of a problem, some of it changed, and what `pack_ep` makes of them."""
    other = replace(problem, **changed)
    sizes = (other.hidden, other.intermediate)
    experts = make_inputs(1, *sizes, other.num_experts, 1, format=other.format, seed=1).experts
    shared = (
        make_inputs(1, *sizes, other.num_shared, 1, format="fp8_block", seed=2).experts if other.num_shared else None
    )
    return experts, pack_ep(experts, shared)


def test_packed_experts_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeEngine] = []

    def open_engine(*_: Any) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    monkeypatch.setattr(engine_module, "KernelEngine", open_engine)
    experts, packed = packed_for(PROBLEM)
    away = experts.to("meta")
    moved = replace(packed, routed=replace(packed.routed, w13=packed.routed.w13.to("meta")))
    x = torch.empty(1, 128, dtype=torch.bfloat16, device="meta")
    call = (x, torch.empty(1, 2, dtype=torch.int64, device="meta"), torch.empty(1, 2, device="meta"))
    for given, wanted in ((None, "packed here"), (moved, moved)):
        layer = ExpertParallelDecode(PROBLEM, None, away, packed=given)
        layer.send(*call)
        assert engines[-1].sent == [wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("num_shared", [0, 1])
def test_layers_on_one_set_of_packed_weights_give_the_bits_of_layers_that_pack(num_shared: int) -> None:
    problem = replace(GPU_PROBLEM, num_shared=num_shared)
    experts, shared = experts_of(problem)
    packed = pack_ep(experts, shared)
    buffers = Buffers(problem)
    buffers.fill(32, seed=4)
    outputs: list[torch.Tensor] = []
    for given in (None, packed, packed):
        with ExpertParallelDecode(problem, None, experts, shared=shared, packed=given, timeout=5.0) as layer:
            outputs.append(layer(buffers.x, buffers.topk_idx, buffers.topk_weights).clone())
            layer.check()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert bool(outputs[0].isfinite().all())


def test_packed_experts_on_a_cpu_are_refused() -> None:
    experts, packed = packed_for(PROBLEM)
    with pytest.raises(ArgumentError, match="packed must be None on a CPU"):
        ExpertParallelDecode(PROBLEM, None, experts, packed=packed)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"format": "fp8_channel"}, r"packed\.routed\.format must be fp8_block; got fp8_channel"),
        ({"num_experts": 5}, r"packed\.routed\.w13 must be \(4, 1, 1, 16512\); got \(5, 1, 1, 16512\)"),
        ({"hidden": 256}, r"packed\.routed\.w13 must be .* got \(4, 1, 2, 16512\)"),
        ({"intermediate": 96}, r"packed\.routed\.w13 must be .* got \(4, 2, 1, 16512\)"),
        ({"num_shared": 1}, r"packed\.num_shared must be 0; got 1"),
    ],
)
def test_packed_experts_must_fit_the_problem(changed: dict[str, Any], error: str) -> None:
    check_packed(PROBLEM, torch.device("cpu"), packed_for(PROBLEM)[1])
    with pytest.raises(ArgumentError, match=error):
        check_packed(PROBLEM, torch.device("cpu"), packed_for(PROBLEM, **changed)[1])
    with pytest.raises(ArgumentError, match=r"packed\.device must be meta; got cpu"):
        check_packed(PROBLEM, torch.device("meta"), packed_for(PROBLEM)[1])
    gate = replace(PROBLEM, gate=clipped_swiglu(3.0))
    with pytest.raises(ArgumentError, match=r"packed\.gate must be"):
        check_packed(gate, torch.device("cpu"), packed_for(PROBLEM)[1])
