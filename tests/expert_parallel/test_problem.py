"""Rules of a problem, each on both sides of its limit; the hash; what ranks are told when they disagree."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from moe_inputs import make_inputs

from warpring import ArgumentError, clipped_swiglu
from warpring.errors import RanksDisagreeError
from warpring.expert_parallel.problem import BLOCK_SIZES, Problem, check_agreement, config_hash, local_experts

SMALL = Problem(hidden=256, intermediate=128, num_experts=8, topk=2, num_ranks=2, max_tokens_per_rank=16)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("hidden", (32, 2880, 7168), (0, -32, 16, 100)),
        ("intermediate", (32, 2880, 4096), (0, 48, 4128, 14336)),
        ("num_experts", (2, 256, 1024), (0, 7, 1026)),
        ("topk", (1, 32), (0, 33)),
        ("num_ranks", (1, 2, 8), (0, 3, 73, -1)),
        ("max_tokens_per_rank", (1, 256), (0, 257)),
        ("num_shared", (0, 8), (-1, 9)),
        ("format", ("mxfp4", "bf16"), ("fp8", "")),
        ("shared_format", ("mxfp8",), ("int8",)),
        ("activation", ("fp8", "bf16"), ("fp16", "")),
        ("block_m", (*BLOCK_SIZES, None), (0, 7, 128)),
    ],
)
def test_rule_holds_on_both_sides_of_its_limit(field: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    for value in good:
        assert getattr(replace(SMALL, **{field: value}), field) in (value, *BLOCK_SIZES)
    for value in bad:
        with pytest.raises(ArgumentError, match=r"Problem: \w+ must be .*; got .*\. \w") as error:
            replace(SMALL, **{field: value})
        assert field in str(error.value)


def test_ranks_up_to_72() -> None:
    assert replace(SMALL, num_experts=72, num_ranks=72).num_local_experts == 1
    with pytest.raises(ArgumentError, match="num_ranks must be 1 to 72; got 73"):
        replace(SMALL, num_experts=73, num_ranks=73)


def test_intermediate_beyond_the_mask_names_the_rule() -> None:
    with pytest.raises(ArgumentError, match="one mask of 64 bits"):
        replace(SMALL, intermediate=4128)


def test_padded_sizes() -> None:
    ragged = replace(SMALL, hidden=2880, intermediate=2912)
    assert (ragged.hidden_padded, ragged.num_output_tasks) == (2944, 23)
    assert (ragged.intermediate_padded, ragged.num_neuron_tasks) == (2944, 46)
    assert replace(SMALL, intermediate=32).intermediate_padded == 64
    assert (ragged.scales_per_token, replace(ragged, activation="bf16").scales_per_token) == (23, 23)


@pytest.mark.parametrize(("topk", "expected"), [(1, 8), (2, 8), (3, 16), (6, 32), (12, 64), (32, 64)])
def test_default_block_is_twice_the_average_load(topk: int, expected: int) -> None:
    problem = replace(SMALL, num_experts=8, topk=topk, num_ranks=2, max_tokens_per_rank=8, block_m=None)
    assert problem.block_m == expected


def test_max_blocks_bounds_every_way_to_spread_the_pairs() -> None:
    problem = Problem(64, 64, num_experts=3, topk=1, num_ranks=1, max_tokens_per_rank=20, block_m=8)
    most = 0
    for first, second in itertools.product(range(21), repeat=2):
        if first + second <= 20:
            loads = (first, second, 20 - first - second)
            most = max(most, sum(-(-load // 8) for load in loads))
    assert most <= problem.max_blocks <= most + 1
    shared = replace(problem, num_shared=2)
    assert shared.max_blocks == problem.max_blocks + 2 * 3


def test_hash_is_stable_and_sees_every_field() -> None:
    assert config_hash(SMALL.description()) == config_hash(replace(SMALL).description())
    others: dict[str, Any] = {
        "hidden": 512,
        "intermediate": 64,
        "num_experts": 16,
        "topk": 1,
        "num_ranks": 4,
        "max_tokens_per_rank": 15,
        "format": "mxfp4",
        "activation": "bf16",
        "gate": clipped_swiglu(9.0),
        "num_shared": 1,
        "shared_format": "mxfp8",
        "has_bias": True,
        "block_m": 64,
    }
    assert set(others) == {field.name for field in fields(Problem)}
    hashes = {config_hash(replace(SMALL, **{field: value}).description()) for field, value in others.items()}
    assert len(hashes) == len(others)
    assert config_hash(SMALL.description()) not in hashes


def test_agreement_names_field_values_and_ranks() -> None:
    descriptions = [SMALL.description() for _ in range(4)]
    check_agreement(descriptions)
    descriptions[2] = replace(SMALL, hidden=512, gate=clipped_swiglu(9.0)).description()
    with pytest.raises(RanksDisagreeError) as error:
        check_agreement(descriptions)
    assert "hidden is 256 on rank 0, 1, 3; 512 on rank 2" in str(error.value)
    assert "gate is" in str(error.value)
    assert "topk" not in str(error.value)


def test_agreement_of_many_ranks_stays_short() -> None:
    descriptions = [SMALL.description() for _ in range(72)]
    descriptions[5] = replace(SMALL, topk=1).description()
    with pytest.raises(RanksDisagreeError, match="and 63 more; 1 on rank 5"):
        check_agreement(descriptions)


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block", "nvfp4"])
def test_local_experts_are_the_ranks_consecutive_share(format: str) -> None:
    experts = make_inputs(1, 64, 64, 6, 2, format=format, bias=True, seed=1).experts
    w13, w2 = experts.dequantize()
    parts = [local_experts(experts, rank, 3) for rank in range(3)]
    assert [part.num_experts for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part.dequantize()[0] for part in parts]), w13)
    assert torch.equal(torch.cat([part.dequantize()[1] for part in parts]), w2)
    assert all(part.w13_bias is not None and part.w13_bias.shape[0] == 2 for part in parts)
    for rank, num_ranks in ((0, 4), (3, 3), (-1, 3)):
        with pytest.raises(ArgumentError, match="local_experts"):
            local_experts(experts, rank, num_ranks)
