"""The layer kernels' sources, run on the CPU by tests/emulator: the rules of the GPU tests, without a GPU.

Every tensor ends where the next access faults, shared memory starts as NaN, and seeds decide the order of threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulator import EmulationError, emulated_gpu, guarded, unusable_reason
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error, rows_of

from warpring import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu, moe_exact, pack_experts
from warpring.formats import FORMATS
from warpring.kernels import stream, tile, warp
from warpring.kernels.stream_layout import pack_stream_experts
from warpring.runtime.jit import KERNEL_DIR

pytestmark = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))

#: hidden, intermediate, num_experts, topk: partial blocks of 128 columns and rows, an odd number of records, lanes
#: without work. One shape for most tests: each is a compilation.
SHAPE = (160, 96, 6, 3)
Runner = Callable[..., torch.Tensor]


def guard(value: Any) -> Any:
    """A copy of a dataclass (of dataclasses) with every tensor `guarded`."""
    if isinstance(value, torch.Tensor):
        return guarded(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: guard(getattr(value, field.name)) for field in fields(value)})
    return value


def run_warp(inputs: Inputs, **kwargs: Any) -> torch.Tensor:
    return _run(warp, warp.moe_warp, inputs, inputs.experts, **kwargs)


def run_tile(inputs: Inputs, **kwargs: Any) -> torch.Tensor:
    return _run(tile, tile.moe_tile, inputs, pack_experts(inputs.experts), **kwargs)


def run_stream(inputs: Inputs, **kwargs: Any) -> torch.Tensor:
    return _run(stream, stream.moe_stream, inputs, pack_stream_experts(inputs.experts), **kwargs)


def _run(
    face: ModuleType,
    layer: Callable[..., None],
    inputs: Inputs,
    experts: Any,
    *,
    out: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    kept, result = guard(experts), guarded(torch.full_like(inputs.x, torch.nan)) if out is None else out
    x, topk_idx, topk_weights = (
        guarded(t) if t.is_contiguous() else t for t in (inputs.x, inputs.topk_idx, inputs.topk_weights)
    )
    with emulated_gpu(face, **kwargs):
        layer(x, kept, topk_idx, topk_weights, result)
    return result


PATHS = pytest.mark.parametrize("run", [run_warp, run_tile], ids=["warp", "tile"])
#: The stream kernels have tests of their own where configurations matter (test_stream.py).
ALL_KERNELS = pytest.mark.parametrize("run", [run_warp, run_tile, run_stream], ids=["warp", "tile", "stream"])


@PATHS
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_bits(run: Runner, format: str) -> None:
    """The error is that of its roundings; no bit depends on the order of threads, the batch or the number of CTAs."""
    inputs = make_inputs(9, *SHAPE, format=format, bias=True, seed=3)
    whole = run(inputs)
    check_against_exact(whole, inputs)
    for seed in range(1, 4):
        assert torch.equal(run(inputs, seed=seed, num_sms=seed), whole)
    for rows in (slice(0, 1), slice(8, 9), slice(2, 7)):
        assert torch.equal(run(rows_of(inputs, rows), seed=rows.start), whole[rows])


@ALL_KERNELS
@pytest.mark.parametrize("activation", [SILU, gpt_oss_swiglu(), clipped_swiglu(0.5), GELU_TANH], ids=str)
def test_every_activation(run: Runner, activation: Activation) -> None:
    inputs = make_inputs(3, *SHAPE, activation=activation, bias=True, seed=5)
    check_against_exact(run(inputs, seed=1), inputs)


@ALL_KERNELS
@pytest.mark.parametrize(
    "shape", [(5, 64, 32, 8, 2), (1, 256, 32, 4, 2), (2, 32, 160, 40, 32), (7, 96, 192, 5, 2)], ids=str
)
def test_other_shapes_and_int32_ids(run: Runner, shape: tuple[int, int, int, int, int]) -> None:
    format = "fp8_block" if shape[1] == 256 else "mxfp4"
    inputs = make_inputs(*shape, format=format, index_dtype=torch.int32, seed=sum(shape))
    check_against_exact(run(inputs, seed=2), inputs)


@ALL_KERNELS
def test_unused_slots_duplicates_and_foreign_ids(run: Runner) -> None:
    inputs = make_inputs(5, *SHAPE, bias=True, seed=14)
    inputs.topk_idx[0, 1] = -1
    inputs.topk_idx[1] = -1
    inputs.topk_idx[2] = 3
    inputs.topk_weights[inputs.topk_idx < 0] = torch.nan
    y = run(inputs, seed=3)
    assert rms_rel_error(y, moe_exact(*inputs.args())) < 4e-3
    assert (y[1] == 0).all()
    for bad in (6, 2**31 - 1, 2**40, -2, -(2**40)):
        foreign = Inputs(inputs.x, inputs.experts, inputs.topk_idx.clone(), inputs.topk_weights)
        foreign.topk_idx[0, 1] = bad
        assert torch.equal(run(foreign), y)


@ALL_KERNELS
def test_nan_in_a_weight_or_in_x_stays_where_it_belongs(run: Runner) -> None:
    inputs = make_inputs(9, *SHAPE, seed=15)
    inputs.topk_idx[:] = torch.arange(9)[:, None] % 2 + torch.tensor([0, 2, 4])
    inputs.experts.w2.data.view(torch.uint8)[1, 17, 5] = 0x7F
    inputs.x[4, 3] = torch.nan
    y = run(inputs, seed=4)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[1::2, 17] = True
    expected[4] = True
    assert torch.equal(y.isnan(), expected)


@PATHS
def test_strided_rows_give_the_same_bits(run: Runner) -> None:
    inputs = make_inputs(5, *SHAPE, seed=16)
    x, topk_idx, topk_weights = (torch.nn.functional.pad(t, (0, 8))[:, :-8] for t in (inputs.x, *inputs.args()[2:]))
    out = torch.full((5, 168), torch.nan, dtype=torch.bfloat16)
    run(Inputs(x, inputs.experts, topk_idx, topk_weights), out=out[:, :160])
    assert torch.equal(out[:, :160], run(inputs))
    assert out[:, 160:].isnan().all()


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block"])
def test_tiles_of_every_width(format: str) -> None:
    """All tokens of a batch may want one expert: 8, 16, 32 and 64 columns at once, full and not."""
    inputs = make_inputs(64, *SHAPE, format=format, seed=17)
    inputs.topk_idx[:, 0] = 4
    inputs.topk_idx[:, 1] = torch.arange(64) % 3
    inputs.topk_idx[:, 2] = 3 + 2 * (torch.arange(64) % 2)
    whole = run_tile(inputs, seed=1)
    check_against_exact(whole, inputs)
    for count in (8, 9, 16, 17, 33):
        assert torch.equal(run_tile(rows_of(inputs, slice(0, count)), seed=count), whole[:count])


@pytest.mark.parametrize("num_tokens", [65, 172])
def test_more_pairs_of_an_expert_than_one_tile_and_than_one_launch(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, *SHAPE, format="mxfp4", seed=13)
    inputs.topk_idx[:] = torch.tensor([1, 2, 4])
    inputs.topk_idx[0] = 1  # with three pairs of one token
    whole = run_tile(inputs, seed=1)
    check_against_exact(whole, inputs)
    assert torch.equal(run_tile(rows_of(inputs, slice(1, 4))), whole[1:4])


#: File, what is taken out of it, and which of its occurrences.
MUTATIONS = {
    "weights read before they have arrived": (
        "tile_common.cuh",
        "!mbarrier_try_wait(smem_barriers + stage * 8, parity)",
        0,
    ),
    "counts read before they are all there": ("tile_common.cuh", "__syncthreads();", 1),
    "sorted pairs read before they are all there": ("tile_common.cuh", "__syncthreads();", 3),
    "partial sums read before they are all there": ("tile_gate_up.cu", "__syncthreads();", 0),
    "dot products read before they are all there": ("tile_down.cu", "__syncthreads();", 0),
    "activations read before gate_up has ended": ("tile_down.cu", "pdl_wait();", 0),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernels with one barrier or wait taken out: some order of threads shows it."""
    name, removed, index = MUTATIONS[mutation]
    for path in (*KERNEL_DIR.glob("tile*.cu"), *KERNEL_DIR.glob("*.cuh")):
        (tmp_path / path.name).write_text(path.read_text())
    code = re.sub(r"//.*", "", (KERNEL_DIR / name).read_text()).split(removed)
    kept = "false" if removed.startswith("!") else ""
    (tmp_path / name).write_text(removed.join(code[: index + 1]) + kept + removed.join(code[index + 1 :]))
    inputs = make_inputs(9, *SHAPE, format="mxfp4", seed=18)
    expected = run_tile(inputs)
    for seed in range(12):
        try:
            y = run_tile(inputs, seed=seed, directory=tmp_path)
        except EmulationError:
            return
        if not torch.equal(y, expected):
            return
    pytest.fail(f"no order of threads shows it: {mutation}")
