"""Shared experts in the tile kernel, run on the CPU by tests/emulator."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from emulator import emulated_gpu, guarded, unusable_reason
from moe_inputs import Inputs, make_inputs, rms_rel_error, rows_of

from warpring import Experts, moe_exact, pack_experts
from warpring.formats import FORMATS
from warpring.kernels import tile
from warpring.runtime.jit import compile_kernel

pytestmark = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))

#: hidden, intermediate, num_experts, topk: 128 neurons, so that every format's blocks can be cut.
SHAPE = (160, 128, 6, 3)


def guard(value: Any) -> Any:
    """A copy of a dataclass (of dataclasses) with every tensor `guarded`."""
    if isinstance(value, torch.Tensor):
        return guarded(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: guard(getattr(value, field.name)) for field in fields(value)})
    return value


def run(inputs: Inputs, shared: Experts, gate: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    packed = guard(pack_experts(inputs.experts, shared))
    x, topk_idx, topk_weights = (guarded(t) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    # Of a wider projection, as a strided column; the rest of it is not to be read.
    column = None if gate is None else guarded(torch.stack((torch.full_like(gate, torch.nan), gate), 1))[:, 1]
    out = guarded(torch.full_like(inputs.x, torch.nan))
    with emulated_gpu(tile, **kwargs):
        tile.moe_tile(x, packed, topk_idx, topk_weights, out, shared_weights=column)
    return out


def make(num_tokens: int, *, wide: int = 2, num_shared: int = 1, seed: int, **kwargs: Any) -> tuple[Inputs, Experts]:
    """A call, and shared experts `wide` times as wide as the routed ones."""
    hidden, intermediate = SHAPE[:2]
    shared = make_inputs(1, hidden, wide * intermediate, num_shared, 1, seed=seed + 100, **kwargs).experts
    return make_inputs(num_tokens, *SHAPE, seed=seed, **kwargs), shared


def make_gate(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed)).sigmoid()


def check(y: torch.Tensor, inputs: Inputs, shared: Experts, gate: torch.Tensor | None) -> None:
    """Against FP64 and the experts as they were given; the bound is that of `check_against_exact`."""
    size = (len(inputs.x), shared.num_experts)
    weight = torch.ones(size) if gate is None else gate[:, None].expand(size)
    exact = moe_exact(*inputs.args()) + moe_exact(inputs.x, shared, torch.arange(size[1]).expand(size), weight)
    assert rms_rel_error(y, exact) < 4e-3


@pytest.mark.parametrize("num_shared", [1, 8])
def test_kernel_compiles_within_its_budget(num_shared: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for format in ("mxfp8", "mxfp4"):
        sizes = tile.Sizes(format, 2048, 512, 512, 10, num_shared)
        for num_pairs in (sizes.pairs_a_token, tile.MAX_PAIRS):
            spec = tile.kernel_spec(sizes, torch.int64, "silu", tile.config_for(sizes, num_pairs))
            cubin = compile_kernel(spec, "sm_90a")
            assert cubin.registers <= 128
            assert cubin.spill_bytes == 0
            assert cubin.smem_bytes + spec.dynamic_smem_bytes <= tile.CTA_SMEM_BYTES


@pytest.mark.parametrize("format", FORMATS)
def test_values_and_bits_of_a_gated_expert_cut_in_two(format: str) -> None:
    """No bit depends on the order of threads, the batch or the number of CTAs."""
    inputs, shared = make(9, format=format, bias=True, seed=1)
    gate = make_gate(9, 2)
    whole = run(inputs, shared, gate)
    check(whole, inputs, shared, gate)
    for seed in range(1, 3):
        assert torch.equal(run(inputs, shared, gate, seed=seed, num_sms=seed), whole)
    for rows in (slice(0, 1), slice(2, 7)):
        assert torch.equal(run(rows_of(inputs, rows), shared, gate[rows], seed=rows.start), whole[rows])


def test_without_a_gate_the_weight_is_one() -> None:
    inputs, shared = make(5, wide=1, num_shared=2, seed=3)
    y = run(inputs, shared)
    check(y, inputs, shared, None)
    assert torch.equal(run(inputs, shared, torch.ones(5), seed=2), y)


@pytest.mark.parametrize("num_tokens", [21, 40])
def test_more_tokens_than_columns_at_once(num_tokens: int) -> None:
    """Every token wants the shared expert: its weights are multiplied in several runs of columns."""
    inputs, shared = make(num_tokens, format="mxfp4", seed=4)
    gate = make_gate(num_tokens, 5)
    sizes = tile.sizes_of(pack_experts(inputs.experts, shared), SHAPE[3])
    assert tile.config_for(sizes, num_tokens * sizes.pairs_a_token, 3).max_columns(sizes) < num_tokens
    whole = run(inputs, shared, gate, seed=1)
    check(whole, inputs, shared, gate)
    for rows in (slice(3, 4), slice(num_tokens - 17, num_tokens)):
        assert torch.equal(run(rows_of(inputs, rows), shared, gate[rows], seed=3), whole[rows])


def test_more_tokens_than_one_launch_takes() -> None:
    """512 pairs are 102 tokens of 3 slots and 2 shared experts."""
    inputs, shared = make(110, format="mxfp4", seed=6)
    gate = make_gate(110, 7)
    whole = run(inputs, shared, gate, seed=1)
    check(whole, inputs, shared, gate)
    assert torch.equal(run(rows_of(inputs, slice(100, 105)), shared, gate[100:105]), whole[100:105])


def test_unused_and_foreign_ids_are_no_shared_experts() -> None:
    inputs, shared = make(4, seed=8)
    inputs.topk_idx[0, 1] = -1
    inputs.topk_idx[2] = -1
    inputs.topk_weights[inputs.topk_idx < 0] = torch.nan
    y = run(inputs, shared)
    check(y, inputs, shared, None)
    for foreign in (6, 7, 8, -2, 2**40):  # 6 and 7 are the numbers of the shared expert's halves
        other = replace(inputs, topk_idx=inputs.topk_idx.clone())
        other.topk_idx[0, 1] = foreign
        assert torch.equal(run(other, shared), y)


def test_nan_of_a_gate_stays_with_its_token() -> None:
    inputs, shared = make(4, seed=9)
    gate = make_gate(4, 10)
    expected = run(inputs, shared, gate)
    gate[2] = torch.nan
    y = run(inputs, shared, gate)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], expected[[0, 1, 3]])
