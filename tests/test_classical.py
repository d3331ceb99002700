"""The classical path: its stages, its agreement with FP64, and the semantics that every path shares."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from warpring import classical
from warpring.activation import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu
from warpring.classical import BLOCK_ROWS, moe_classical, pad, prepare, quantize_activations, release
from warpring.experts import Experts
from warpring.formats import FORMATS, QuantizedTensor
from warpring.reference import moe_exact

# Two MXFP8 round trips bound the path's error. E4M3 keeps 4 significant bits: half a unit is at most 2^-4 of a value,
# and the RMS over evenly spread values is 2^-4 / sqrt(3) = 3.6 %; two independent ones make 5.1 %.
MXFP8_RMS = 0.051


def make_experts(
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    seed: int,
    format: str = "bf16",
    activation: Activation = SILU,
    biases: bool = False,
) -> Experts:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Experts.from_dense(
        randn(num_experts, 2 * intermediate, hidden) / hidden**0.5,
        randn(num_experts, hidden, intermediate) / intermediate**0.5,
        format=format,
        activation=activation,
        w13_bias=randn(num_experts, 2 * intermediate) if biases else None,
        w2_bias=randn(num_experts, hidden) if biases else None,
    )


def make_batch(num_tokens: int, experts: Experts, topk: int, *, seed: int) -> tuple[torch.Tensor, ...]:
    """(x, topk_idx, topk_weights) with distinct experts a token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, experts.hidden, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, experts.num_experts, generator=generator)
    return x, scores.argsort(-1)[:, :topk], torch.rand(num_tokens, topk, generator=generator)


def rms_rel_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty gives NaN: a row that is read without having been written poisons what it touches."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(8).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_there_are_eight_stages_five_of_them_bookkeeping() -> None:
    assert len(set(classical.STAGES)) == 8
    names = [stage.__name__ for stage in classical.BOOKKEEPING]
    assert names == ["pad", "quantize_activations", "gather", "scatter", "combine"]
    assert set(classical.BOOKKEEPING) < set(classical.STAGES)


def test_a_call_runs_every_stage() -> None:
    experts = make_experts(4, 64, 32, seed=0)
    batch = make_batch(3, experts, 2, seed=1)
    codes = {stage.__code__: stage for stage in classical.STAGES}
    seen = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            seen.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        moe_classical(batch[0], experts, *batch[1:])
    finally:
        sys.setprofile(None)
    # Stage 2's round trip is taken before both GEMMs, the second time inside stage 5.
    pad_, quantize, gather, gate_up, activate, *rest = classical.STAGES
    assert seen == [pad_, quantize, gather, gate_up, activate, quantize, *rest]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("biases", [False, True])
def test_error_is_that_of_two_mxfp8_round_trips(format: str, biases: bool) -> None:
    experts = make_experts(8, 96, 160, seed=2, format=format, biases=biases)
    batch = make_batch(33, experts, 3, seed=3)
    y = moe_classical(batch[0], experts, *batch[1:])
    error = rms_rel_error(y, moe_exact(batch[0], experts, *batch[1:]))
    assert y.dtype == torch.bfloat16
    assert 0.01 < error < MXFP8_RMS


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, gpt_oss_swiglu(limit=0.8), clipped_swiglu(limit=0.5)])
def test_every_activation_and_its_clamp_counts(activation: Activation) -> None:
    experts = make_experts(4, 128, 64, seed=4, activation=activation, biases=True)
    batch = make_batch(19, experts, 2, seed=5)
    y = moe_classical(batch[0], experts, *batch[1:])
    assert rms_rel_error(y, moe_exact(batch[0], experts, *batch[1:])) < MXFP8_RMS


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (2880, 96), (96, 2304), (192, 2880)])
def test_any_sizes_that_divide_by_32_work(hidden: int, intermediate: int) -> None:
    experts = make_experts(3, hidden, intermediate, seed=6, format="fp8_block")
    batch = make_batch(7, experts, 2, seed=7)
    y = moe_classical(batch[0], experts, *batch[1:])
    assert rms_rel_error(y, moe_exact(batch[0], experts, *batch[1:])) < MXFP8_RMS


def test_gemms_add_no_error_beyond_bf16_where_the_round_trip_is_exact() -> None:
    # Integers up to 4 times a power of two survive MXFP8; an identity gate/up with huge gates makes act = up exactly.
    hidden = 32
    eye = torch.eye(hidden)
    experts = Experts.from_dense(torch.cat([eye * 64, eye])[None], eye[None] * 2, format="mxfp8")
    x = torch.randint(1, 5, (5, hidden), generator=torch.Generator().manual_seed(8)).bfloat16()
    y = moe_classical(x, experts, torch.zeros(5, 1, dtype=torch.int64), torch.full((5, 1), 0.5))
    assert torch.equal(y.float(), 64 * x.float() ** 2)


def test_weight_products_of_power_of_two_scales_are_exact_in_bf16() -> None:
    for format in ("bf16", "mxfp8", "mxfp4"):
        experts = make_experts(2, 64, 64, seed=9, format=format)
        dense, exact = prepare(experts), experts.dequantize(torch.float64)
        assert torch.equal(dense.w13.double(), exact[0])
        assert torch.equal(dense.w2.double(), exact[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_take_the_mxfp8_formats_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    mxfp8 = FORMATS["mxfp8"]
    # Every exponent down to where BF16's own subnormals would round, and blocks whose largest value sits at the edges
    # of a scale: 448 times a power of two, its neighbours, 0.
    random = torch.randn(200, 96, generator=generator) * torch.logspace(-30, 30, 200)[:, None]
    edges = torch.zeros(6, 96)
    edges[:, 5] = torch.tensor([448.0, 449.0, 446.0, 0.875, 0.876, 0.0])
    edges[:5, 6:32] = torch.rand(5, 26, generator=generator) * 0.8
    x = torch.cat([random, edges, edges.roll(40, 1) * 2.0**-100]).to(dtype)
    assert torch.equal(quantize_activations(x).double(), mxfp8.dequantize(mxfp8.quantize(x), torch.float64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_stays_in_its_block_and_does_not_pass_for_a_number(bad: float) -> None:
    x = torch.ones(2, 64)
    x[0, 7] = bad
    y = quantize_activations(x)
    assert not y[0, 7].abs() < 1e38
    assert torch.equal(y[0, 32:], torch.ones(32, dtype=torch.bfloat16))
    assert torch.equal(y[1], torch.ones(64, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 519])
def test_padding_keeps_every_pair_in_its_experts_group(num_tokens: int) -> None:
    num_experts, topk = 11, 4
    generator = torch.Generator().manual_seed(num_tokens)
    idx = torch.randint(-2, num_experts + 2, (num_tokens, topk), generator=generator)
    groups = pad(idx, num_experts)
    assert (groups.ends % BLOCK_ROWS == 0).all()
    assert groups.slot_row.unique().numel() == idx.numel()
    assert groups.slot_row.max() < groups.row_token.numel()
    tokens = torch.arange(num_tokens)[:, None].expand_as(idx)
    assert torch.equal(groups.row_token[groups.slot_row], tokens)
    assert torch.equal(groups.used, (idx >= 0) & (idx < num_experts))
    begins = torch.cat([torch.zeros(1, dtype=torch.int32), groups.ends[:-1]])
    for expert in range(num_experts):
        rows = groups.slot_row[idx == expert]
        # No more than the last block of a group is padding.
        assert groups.ends[expert] - begins[expert] == -(-rows.numel() // BLOCK_ROWS) * BLOCK_ROWS
        assert ((rows >= begins[expert]) & (rows < groups.ends[expert])).all()
    assert (groups.slot_row[~groups.used] >= groups.ends[-1]).all()


def test_buffer_holds_the_worst_routing() -> None:
    # Each expert with one row more than a whole block, and unused slots besides.
    num_experts = 5
    ids = torch.arange(-1, num_experts).repeat_interleave(BLOCK_ROWS + 1)
    groups = pad(ids[:, None], num_experts)
    assert groups.slot_row.max() < groups.row_token.numel()


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("biases", [False, True])
def test_unused_slot_ignores_nan_weight_and_unwritten_rows(biases: bool) -> None:
    experts = make_experts(6, 64, 96, seed=11, biases=biases)
    x, idx, weights = make_batch(21, experts, 4, seed=12)
    expected = moe_classical(x, experts, idx[:, :2], weights[:, :2])
    idx[:, 2:] = torch.tensor([-1, 6])
    weights[:, 2:] = torch.nan
    assert torch.equal(moe_classical(x, experts, idx, weights), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("bad", [-1, -7, 6, 1 << 30])
def test_unused_slot_ignores_nan_in_every_experts_bias(bad: int) -> None:
    experts = make_experts(6, 64, 32, seed=13)
    poisoned = Experts(experts.w13, experts.w2, w2_bias=torch.full((6, 64), torch.nan))
    x, _, weights = make_batch(3, experts, 2, seed=14)
    idx = torch.full((3, 2), bad, dtype=torch.int32)
    assert torch.equal(moe_classical(x, poisoned, idx, weights), torch.zeros(3, 64, dtype=torch.bfloat16))


def test_nan_token_poisons_itself_only() -> None:
    experts = make_experts(4, 64, 64, seed=15)
    x, idx, weights = make_batch(18, experts, 2, seed=16)
    expected = moe_classical(x, experts, idx, weights)
    x[0] = torch.nan  # padding rows copy token 0
    y = moe_classical(x, experts, idx, weights)
    assert y[0].isnan().all()
    assert torch.equal(y[1:], expected[1:])


def test_duplicates_in_one_token_add_up() -> None:
    experts = make_experts(4, 64, 64, seed=17, biases=True)
    x, _, weights = make_batch(5, experts, 2, seed=18)
    weights[:] = torch.tensor([0.25, 0.5])
    twice = moe_classical(x, experts, torch.full((5, 2), 3), weights)
    once = moe_classical(x, experts, torch.full((5, 1), 3), weights.sum(1, keepdim=True))
    assert torch.equal(twice, once)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_work_gives_zeros(shape: tuple[int, int]) -> None:
    experts = make_experts(4, 64, 32, seed=19)
    x = torch.ones(shape[0], 64, dtype=torch.bfloat16)
    out = torch.full((shape[0], 64), torch.nan, dtype=torch.bfloat16)
    y = moe_classical(x, experts, torch.zeros(shape, dtype=torch.int64), torch.ones(shape), out)
    assert y is out
    assert torch.equal(y, torch.zeros_like(x))


def test_strided_inputs_int32_ids_and_bf16_weights_give_the_same_bits() -> None:
    experts = make_experts(4, 64, 32, seed=20)
    x, idx, weights = make_batch(9, experts, 2, seed=21)
    weights = weights.bfloat16()
    expected = moe_classical(x, experts, idx, weights.float())
    strided = torch.stack([x, x], 1)[:, 1]
    out = torch.empty(64, 9, dtype=torch.bfloat16).T
    assert moe_classical(strided, experts, idx.int().T.contiguous().T, weights, out) is out
    assert torch.equal(out, expected)


def test_out_may_be_x() -> None:
    experts = make_experts(4, 64, 32, seed=22)
    x, idx, weights = make_batch(9, experts, 2, seed=23)
    expected = moe_classical(x, experts, idx, weights)
    assert torch.equal(moe_classical(x, experts, idx, weights, out=x), expected)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (96, 2880)])
def test_token_bits_do_not_depend_on_batch(threads: int, hidden: int, intermediate: int) -> None:
    torch.set_num_threads(threads)
    experts = make_experts(3, hidden, intermediate, seed=24, biases=True)
    x, idx, weights = make_batch(67, experts, 2, seed=25)
    whole = moe_classical(x, experts, idx, weights)
    assert torch.equal(whole, moe_classical(x, experts, idx, weights))
    order = torch.randperm(67, generator=torch.Generator().manual_seed(26))
    assert torch.equal(moe_classical(x[order], experts, idx[order], weights[order]), whole[order])
    for tokens in (slice(0, 1), slice(30, 38), slice(3, 20)):
        assert torch.equal(moe_classical(x[tokens], experts, idx[tokens], weights[tokens]), whole[tokens])


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "bf16"])
def test_prepared_weights_give_the_same_bits(format: str) -> None:
    experts = make_experts(5, 64, 96, seed=27, format=format)
    x, idx, weights = make_batch(12, experts, 2, seed=28)
    expected = moe_classical(x, experts, idx, weights)
    assert prepare(experts) is prepare(experts)
    assert torch.equal(moe_classical(x, experts, idx, weights), expected)
    release(experts)
    assert torch.equal(moe_classical(x, experts, idx, weights), expected)


def test_prepared_weights_die_with_their_experts() -> None:
    experts = make_experts(2, 64, 32, seed=29, format="mxfp8")
    held = len(classical._prepared)
    prepare(experts)
    assert len(classical._prepared) == held + 1
    del experts
    gc.collect()
    assert len(classical._prepared) == held


def test_cpu_dequantises_only_the_experts_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(8, 64, 32, seed=30, format="mxfp8")
    shapes = []
    dequantize = classical._dequantize

    def note(stored: QuantizedTensor) -> torch.Tensor:
        shapes.append(stored.shape)
        return dequantize(stored)

    monkeypatch.setattr(classical, "_dequantize", note)
    x, _, weights = make_batch(2, experts, 2, seed=31)
    moe_classical(x, experts, torch.tensor([[3, 5], [5, -1]]), weights)
    assert shapes == [(2, 32, 64)] * 2 + [(64, 32)] * 2


@pytest.mark.parametrize("num_experts", [1, 1023, 1024])
def test_no_step_away_from_the_cpu_reads_a_value_on_the_host(num_experts: int) -> None:
    # Tensors of the meta device hold no values: any operation that would wait for one raises.
    experts = make_experts(num_experts, 32, 32, seed=32, format="mxfp8", biases=True).to("meta")
    with torch.device("meta"):
        batch = torch.empty(5, 32, dtype=torch.bfloat16), torch.empty(5, 1, dtype=torch.int64), torch.empty(5, 1)
    y = moe_classical(batch[0], experts, *batch[1:])
    assert (y.shape, y.dtype, y.device.type) == ((5, 32), torch.bfloat16, "meta")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_matches_cpu_in_a_cuda_graph(format: str) -> None:
    cpu = make_experts(16, 256, 96, seed=34, format=format, biases=True)
    batch = make_batch(33, cpu, 4, seed=35)
    batch[1][5] = torch.tensor([-1, 16, -1, 3])
    batch[2][5, :3] = torch.nan
    exact = moe_exact(batch[0], cpu, torch.where(batch[1] == 16, -1, batch[1]), batch[2])
    experts = cpu.to("cuda")
    x, idx, weights = (tensor.cuda() for tensor in batch)
    eager = moe_classical(x, experts, idx, weights)
    out = torch.full_like(eager, torch.nan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_classical(x, experts, idx, weights, out)
    graph.replay()
    assert torch.equal(out, eager)
    assert rms_rel_error(eager.cpu(), exact) < MXFP8_RMS


@pytest.mark.gpu
def test_gpu_token_bits_do_not_depend_on_a_decode_batch() -> None:
    experts = make_experts(16, 512, 256, seed=36, format="mxfp8").to("cuda")
    x, idx, weights = (tensor.cuda() for tensor in make_batch(64, experts, 4, seed=37))
    whole = moe_classical(x, experts, idx, weights)
    assert torch.equal(whole, moe_classical(x, experts, idx, weights))
    for tokens in (slice(0, 1), slice(30, 38), slice(3, 20)):
        assert torch.equal(moe_classical(x[tokens], experts, idx[tokens], weights[tokens]), whole[tokens])


@pytest.mark.gpu
def test_gpu_serves_1024_experts_and_a_long_prefill() -> None:
    for num_experts, num_tokens in ((1024, 9), (32, 8192)):
        experts = make_experts(num_experts, 128, 64, seed=38).to("cuda")
        x, idx, weights = (tensor.cuda() for tensor in make_batch(num_tokens, experts, 8, seed=39))
        idx[0, 0] = num_experts - 1
        y = moe_classical(x, experts, idx, weights)
        assert rms_rel_error(y, moe_exact(x, experts, idx, weights)) < MXFP8_RMS
