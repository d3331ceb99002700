"""On real GPUs equal inputs give equal bits: run to run, whatever the grid, the ring, the blocks and who is first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks
from gpu_layers import PROBLEM, Buffers, bits, captured, device_of, experts_of

from warpring.bench.ep_cases import Verifier
from warpring.bench.ep_soak import CALLS, DrawnInputs
from warpring.expert_parallel.layer import ExpertParallelDecode
from warpring.expert_parallel.problem import Problem

pytestmark = pytest.mark.gpu
FORMS: list[dict[str, Any]] = [{}, {"num_shared": 1, "format": "fp8_block"}, {"activation": "bf16", "num_shared": 1}]
#: Other ways to run the same layer: options of the layer, fields of the problem.
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"partition": "green"}, {}),
    ({"partition": "streams"}, {}),
    ({"partition": "sequence"}, {}),
    ({"comm_sms": 8}, {}),
    ({"comm_sms": 32}, {}),
    ({"num_slots": 96}, {}),
    ({}, {"block_m": 8}),
    ({}, {"block_m": 64}),
]


def outputs(problem: Problem, options: dict[str, Any], replays: int) -> torch.Tensor:
    """The bits of one call, after seeing that every replay gives them."""
    experts, shared = experts_of(problem)
    buffers = Buffers(problem)
    buffers.fill(29, seed=11)
    with ExpertParallelDecode(problem, None, experts, shared=shared, timeout=5.0, **options) as layer:
        graph = captured(layer, buffers)
        graph.replay()
        first = bits(buffers.out)
        changed = torch.zeros((), dtype=torch.int64, device=first.device)
        for _ in range(replays):
            buffers.out.fill_(torch.nan)
            graph.replay()
            changed += (buffers.out.view(torch.int16) != first).sum()
        torch.cuda.synchronize()
        layer.check()
        buffers.check(experts, shared)
    assert int(changed) == 0
    assert buffers.out[29:].isnan().all()
    return first


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_bits_depend_neither_on_the_run_nor_on_how_the_layer_is_run(changes: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **changes)
    found = [outputs(replace(problem, **fields), options, replays=100) for options, fields in WAYS]
    differ = [way for way, other in zip(WAYS, found, strict=True) if not torch.equal(other, found[0])]
    assert differ == []


def test_a_tokens_bits_do_not_depend_on_who_is_in_the_batch() -> None:
    """Nor does a NaN in one token reach another one that has the same experts."""
    experts, _ = experts_of(PROBLEM)
    buffers = Buffers(PROBLEM)
    with ExpertParallelDecode(PROBLEM, None, experts, timeout=5.0) as layer:
        buffers.fill(32, seed=12)
        buffers.topk_idx[:] = buffers.topk_idx[0].clone()
        layer(*buffers.args(), out=buffers.out)
        everyone = bits(buffers.out)
        for alone in (1, 5):
            buffers.count.fill_(alone)
            buffers.out.fill_(torch.nan)
            layer(*buffers.args(), out=buffers.out)
            assert torch.equal(bits(buffers.out)[:alone], everyone[:alone])
        buffers.count.fill_(32)
        buffers.x[3, 100] = torch.nan
        layer(*buffers.args(), out=buffers.out)
        others = torch.arange(32, device=everyone.device) != 3
        assert torch.equal(bits(buffers.out)[others], everyone[others])
        assert buffers.out[3].isnan().all()


# Several GPUs

#: Replays, and clock cycles that a rank may come later than another: up to 100 us.
REPLAYS, MOST_CYCLES = 300, 200_000


def shuffle(rank: int, options: dict[str, Any]) -> tuple[int, float]:
    """Replays of the same calls with ranks that come at other times in each: values that change, least cosine."""
    device = device_of(rank)
    verifier = Verifier(
        "h512xi256xe16xk4", dist.group.WORLD, device, format="mxfp4", max_tokens=32, timeout=20.0, **options
    )
    inputs = DrawnInputs(verifier.problem, rank, device, seed=2)
    inputs.draw()
    late = torch.randint(0, MOST_CYCLES, (REPLAYS,), generator=torch.Generator().manual_seed(rank)).tolist()
    out = torch.full_like(inputs.x, torch.nan)
    with verifier.layer as layer:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(CALLS):
                args = (inputs.x[call], inputs.topk_idx[call], inputs.topk_weights[call])
                layer(*args, inputs.counts[call : call + 1], out=out[call])
        graph.replay()
        first = bits(out)
        changed = torch.zeros((), dtype=torch.int64, device=device)
        for cycles in late:
            torch.cuda._sleep(cycles)
            out.fill_(torch.nan)
            graph.replay()
            changed += (out.view(torch.int16) != first).sum()
        torch.cuda.synchronize()
        layer.check()
        least = 1.0
        for call, count in enumerate(inputs.counts.tolist()):
            args = (inputs.x[call, :count], inputs.topk_idx[call, :count], inputs.topk_weights[call, :count])
            least = min(least, verifier.compare(*args, out[call, :count]).cosine)
    return int(changed), least


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", [{}, {"activation": "bf16", "num_shared": 1}], ids=str)
def test_bits_do_not_depend_on_which_rank_is_first(options: dict[str, Any]) -> None:
    for changed, least in run_ranks(shuffle, 2, options):
        assert changed == 0
        assert least >= 0.9999997
