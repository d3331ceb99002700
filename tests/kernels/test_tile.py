"""The tile path: the same rules as every path, from experts in tile layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error

from warpring import (
    GELU_TANH,
    SILU,
    Activation,
    PackedExperts,
    UnsupportedError,
    clipped_swiglu,
    gpt_oss_swiglu,
    moe_decode,
    moe_exact,
    pack_experts,
    precompile,
)
from warpring.formats import FORMATS
from warpring.kernels.tile import MAX_PAIRS, kernel_specs
from warpring.runtime import workspace
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import compile_kernel

GPU = pytest.mark.gpu
#: ptxas may keep a few registers of the widest tiles (over 32 tokens of one expert) in local memory; no more than this.
MAX_SPILL_BYTES = 96


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_compile_within_their_budget(format: str, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for spec in kernel_specs(format, 2048, 768, 128, 8, torch.int64, "silu").all():
        cubin = compile_kernel(spec, arch)
        assert cubin.registers <= 128
        assert cubin.spill_bytes <= MAX_SPILL_BYTES
        assert cubin.smem_bytes + spec.dynamic_smem_bytes <= 227 * 1024


def test_odd_sizes_compile_and_agree_on_shared_memory() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for sizes in [(96, 192, 5, 2), (32, 32, 1, 1), (2880, 2880, 32, 4), (64, 96, 1024, 32)]:
        for spec in kernel_specs("mxfp4", *sizes, torch.int32, "gelu_tanh").all():
            assert compile_kernel(spec, "sm_90a").code[:4] == b"\x7fELF"


def test_tile_needs_packed_experts_and_packed_experts_need_tile() -> None:
    inputs = make_inputs(1, 64, 64, 4, 2)
    packed = pack_experts(inputs.experts)
    for experts, path in ((inputs.experts, "tile"), (packed, "warp"), (packed, "reference")):
        with pytest.raises(UnsupportedError, match="pack_experts"):
            moe_decode(inputs.x, experts, inputs.topk_idx, inputs.topk_weights, path=path)
    with pytest.raises(UnsupportedError, match="path 'tile' needs CUDA tensors; got cpu"):
        moe_decode(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, path="tile")


def run(inputs: Inputs, packed: PackedExperts | None = None, **kwargs: object) -> torch.Tensor:
    """The layer through the tile path, with out and the scratch between the kernels poisoned first."""
    packed = pack_experts(inputs.experts) if packed is None else packed
    for buffer in workspace._buffers.values():
        buffer.fill_(0xFF)  # BF16 NaN
    out = torch.full_like(inputs.x, torch.nan)
    return moe_decode(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out=out, **kwargs)


@GPU
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [(1, 2048, 768, 16, 8), (5, 2880, 2880, 8, 4), (7, 96, 192, 5, 2), (2, 192, 96, 64, 32), (64, 160, 96, 4, 3)],
    ids=str,
)
def test_error_is_that_of_its_roundings(shape: tuple[int, int, int, int, int], format: str) -> None:
    inputs = make_inputs(*shape, format=format, seed=sum(shape), device="cuda")
    check_against_exact(run(inputs), inputs)


@GPU
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, gpt_oss_swiglu(), clipped_swiglu(0.5)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_every_format_activation_bias_and_index_type(
    format: str, activation: Activation, index_dtype: torch.dtype
) -> None:
    inputs = make_inputs(
        3,
        160,
        96,
        9,
        4,
        format=format,
        activation=activation,
        bias=True,
        index_dtype=index_dtype,
        seed=5,
        device="cuda",
    )
    check_against_exact(run(inputs), inputs)


@GPU
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200])
def test_all_tokens_of_a_batch_may_want_one_expert(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, 96, 160, 6, 2, seed=num_tokens, device="cuda")
    inputs.topk_idx[:, 0] = 4
    inputs.topk_idx[:, 1] = torch.arange(num_tokens, device="cuda") % 4
    check_against_exact(run(inputs), inputs)


@GPU
@pytest.mark.parametrize("format", FORMATS)
def test_token_bits_do_not_depend_on_batch_tile_width_or_run(format: str) -> None:
    inputs = make_inputs(64, 160, 96, 3, 2, format=format, seed=12, device="cuda")
    packed = pack_experts(inputs.experts)
    whole = run(inputs, packed)
    assert torch.equal(whole, run(inputs, packed))
    for size in (1, 7, 12, 30):
        rows = slice(64 - size, 64)
        some = Inputs(inputs.x[rows], inputs.experts, inputs.topk_idx[rows], inputs.topk_weights[rows])
        assert torch.equal(run(some, packed), whole[rows])


@GPU
def test_batches_beyond_one_launch_are_served_in_pieces() -> None:
    num_tokens = MAX_PAIRS // 4 * 2 + 3
    inputs = make_inputs(num_tokens, 64, 64, 16, 4, seed=13, device="cuda")
    check_against_exact(run(inputs), inputs)


@GPU
def test_unused_slots_duplicates_and_foreign_ids() -> None:
    inputs = make_inputs(5, 96, 64, 6, 3, bias=True, seed=14, device="cuda")
    inputs.topk_idx[0, 1] = -1
    inputs.topk_idx[1] = -1
    inputs.topk_idx[2] = 3
    inputs.topk_weights[inputs.topk_idx < 0] = torch.nan
    y = run(inputs)
    assert rms_rel_error(y, moe_exact(*inputs.args())) < 4e-3
    assert (y[1] == 0).all()
    for bad in (6, 2**31 - 1, 2**40, -2, -(2**40)):
        foreign = Inputs(inputs.x, inputs.experts, inputs.topk_idx.clone(), inputs.topk_weights)
        foreign.topk_idx[0, 1] = bad
        assert torch.equal(run(foreign), y)


@GPU
def test_nan_in_a_weight_or_in_x_stays_where_it_belongs() -> None:
    inputs = make_inputs(9, 64, 64, 2, 1, seed=15)
    inputs.topk_idx[:] = torch.arange(9)[:, None] % 2
    inputs.experts.w2.data.view(torch.uint8)[1, 17, 5] = 0x7F
    inputs.x[4, 3] = torch.nan
    y = run(inputs.to("cuda"))
    expected = torch.zeros(9, 64, dtype=torch.bool, device="cuda")
    expected[1::2, 17] = True
    expected[4] = True
    assert torch.equal(y.isnan(), expected)


@GPU
def test_strided_inputs_give_the_same_bits() -> None:
    inputs = make_inputs(5, 96, 64, 6, 3, seed=16, device="cuda")
    packed = pack_experts(inputs.experts)
    expected = run(inputs, packed)
    wide = torch.zeros(5, 104, dtype=torch.bfloat16, device="cuda")
    wide[:, 8:].copy_(inputs.x)
    assert torch.equal(moe_decode(wide[:, 8:], packed, inputs.topk_idx, inputs.topk_weights), expected)
    assert torch.equal(moe_decode(inputs.x.t().contiguous().t(), packed, *inputs.args()[2:]), expected)


@GPU
def test_graph_replays_with_changed_inputs_and_compiles() -> None:
    inputs = make_inputs(4, 160, 96, 8, 3, seed=18, device="cuda")
    packed = pack_experts(inputs.experts)
    precompile(packed, topk=3)
    out = torch.full_like(inputs.x, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_decode(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out=out)
    for seed in (19, 20):
        fresh = make_inputs(4, 160, 96, 8, 3, seed=seed, device="cuda")
        inputs.x.copy_(fresh.x)
        inputs.topk_idx.copy_(fresh.topk_idx)
        inputs.topk_weights.copy_(fresh.topk_weights)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run(inputs, packed))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return moe_decode(x * 2, packed, inputs.topk_idx, inputs.topk_weights) + 1

    assert torch.equal(torch.compile(layer, fullgraph=True)(inputs.x), layer(inputs.x))


@GPU
def test_layers_chained_without_synchronising_see_each_others_results() -> None:
    inputs = make_inputs(3, 160, 160, 8, 3, seed=21, device="cuda")
    packed = pack_experts(replace(inputs.experts))

    def chain(synchronize: bool) -> torch.Tensor:
        x = inputs.x
        for _ in range(30):
            x = moe_decode(x, packed, inputs.topk_idx, inputs.topk_weights)
            if synchronize:
                torch.cuda.synchronize()
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().bfloat16()
        return x

    expected = chain(synchronize=True)
    assert expected.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(synchronize=False), expected)
