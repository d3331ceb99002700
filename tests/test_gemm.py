"""Grouped matrix products: by the library and expert by expert."""

from __future__ import annotations

import pytest
import torch

from warpring import gemm
from warpring.gemm import gemm_by_expert, gemm_by_library, row_chunks


def inputs(num_experts: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 7 experts at most, some of them without any, and 3 rows past the end that hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 40, (num_experts,), generator=generator)
    counts[1] = 0
    ends = counts.cumsum(0).int()
    rows = torch.randn(int(ends[-1]) + 3, 64, generator=generator).bfloat16()
    rows[-3:] = torch.nan
    return rows, torch.randn(num_experts, 32, 64, generator=generator).bfloat16(), ends


def exact(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    expert = torch.bucketize(torch.arange(int(ends[-1])), ends, right=True)
    return torch.einsum("rc,rnc->rn", rows[: ends[-1]].double(), weights.double()[expert])


def check(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> None:
    want = exact(rows, weights, ends)
    assert y.shape == (rows.shape[0], 32)
    assert float((y[: ends[-1]].double() - want).norm() / want.norm()) < 2**-8


@pytest.mark.parametrize("num_experts", [2, 7])
def test_both_ways_give_each_group_its_experts_product(num_experts: int) -> None:
    rows, weights, ends = inputs(num_experts, seed=1)
    check(gemm_by_library(rows, weights, ends), rows, weights, ends)
    check(gemm_by_expert(rows, lambda e: weights[e], 32, ends), rows, weights, ends)


def test_more_groups_than_one_call_takes_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    # The split that 1024 experts need on CUDA, with the limit lowered and torch's own grouped GEMM on the CPU.
    rows, weights, ends = inputs(6, seed=2)
    expected = gemm_by_library(rows, weights, ends)
    monkeypatch.setattr(gemm, "_MAX_CUDA_GROUPS", 6)
    used = int(ends[-1])
    assert torch.equal(gemm_by_library(rows, weights, ends)[:used], expected[:used])


@pytest.mark.parametrize("step", [1, 16, 1000, None])
def test_steps_cover_every_row_and_ask_only_for_experts_with_rows(step: int | None) -> None:
    rows, weights, ends = inputs(7, seed=3)
    asked: list[int] = []

    def weight(expert: int) -> torch.Tensor:
        asked.append(expert)
        return weights[expert]

    check(gemm_by_expert(rows, weight, 32, ends, step), rows, weights, ends)
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert asked == [expert for expert in range(7) if sizes[expert]]


@pytest.mark.parametrize(("num_rows", "cols"), [(1, 1 << 20), (1000, 100), (0, 32)])
def test_row_chunks_cover_every_row_once(num_rows: int, cols: int) -> None:
    rows = list(range(num_rows))
    chunks = list(row_chunks(num_rows, cols, torch.device("cpu")))
    assert [row for chunk in chunks for row in rows[chunk]] == rows
    assert all((chunk.stop - chunk.start) * cols <= max(cols, gemm._CPU_ELEMENTS) for chunk in chunks)
