"""The tile path: the same rules as every path, from experts in tile layout."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error

from warpring import (
    GELU_TANH,
    SILU,
    Activation,
    CompileError,
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
from warpring.kernels.tile import (
    CTA_SMEM_BYTES,
    MAX_PAIRS,
    Config,
    Sizes,
    all_specs,
    config_for,
    kernel_spec,
    moe_tile,
    most_pairs,
    shared_bytes,
    smem_bytes,
)
from warpring.layout import RECORD_BYTES
from warpring.runtime import workspace
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import compile_kernel

GPU = pytest.mark.gpu
#: Layers of Qwen3-30B-A3B.
QWEN = (2048, 768, 128, 8)
#: hidden, intermediate, num_experts, topk: few records, sizes that only odd numbers divide, most experts and slots,
#: rows of x and of act so long that few columns of them fit.
ODD_SIZES = [
    (32, 32, 1, 1),
    (96, 192, 5, 2),
    (1312, 96, 3, 1),
    (64, 96, 1024, 32),
    (2880, 2880, 32, 4),
    (7168, 2048, 256, 8),
    (28672, 1024, 8, 2),
    (14336, 14336, 8, 2),
]
#: Both sides of what each kernel takes.
PAIRS = [1, 32, 33, 128, 129, 256, 257, MAX_PAIRS]


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_compile_within_their_budget(format: str, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    sizes = Sizes(format, *QWEN)
    for num_pairs in (32, 128, 256, MAX_PAIRS):
        spec = kernel_spec(sizes, torch.int64, "silu", config_for(sizes, num_pairs))
        cubin = compile_kernel(spec, arch)
        assert cubin.registers <= 128
        assert cubin.spill_bytes == 0
        assert cubin.smem_bytes + spec.dynamic_smem_bytes <= CTA_SMEM_BYTES


@pytest.mark.parametrize("sizes", ODD_SIZES, ids=str)
def test_odd_sizes_compile_and_agree_on_shared_memory(sizes: tuple[int, int, int, int]) -> None:
    """The sources compare their sizes with those of `smem_bytes` and `shared_bytes` when they are compiled."""
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for format in ("bf16", "mxfp4"):
        layer = Sizes(format, *sizes)
        for num_pairs in (1, MAX_PAIRS):
            spec = kernel_spec(layer, torch.int32, "gelu_tanh", config_for(layer, num_pairs))
            assert compile_kernel(spec, "sm_90a").code[:4] == b"\x7fELF"


@pytest.mark.parametrize(("macro", "less"), [("SMEM_BYTES", 256), ("SHARED_BYTES", 4)])
def test_sources_refuse_a_size_that_is_too_small_for_them(macro: str, less: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    layer = Sizes("mxfp8", 64, 32, 4, 2)
    config = config_for(layer, 1)
    spec = kernel_spec(layer, torch.int64, "silu", config)
    size = {"SMEM_BYTES": smem_bytes, "SHARED_BYTES": shared_bytes}[macro](layer, config)
    assert (f"WARPRING_{macro}", str(size)) in spec.macros
    macros = tuple((name, str(size - less) if name == f"WARPRING_{macro}" else value) for name, value in spec.macros)
    with pytest.raises(CompileError, match="the same size"):
        compile_kernel(replace(spec, macros=macros), "sm_90a")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [QWEN, *ODD_SIZES], ids=str)
def test_configuration_serves_its_pairs_and_fits(shape: tuple[int, int, int, int], format: str) -> None:
    sizes = Sizes(format, *shape)
    for num_pairs, most in zip(PAIRS, (32, 32, 128, 128, 256, 256, MAX_PAIRS, MAX_PAIRS), strict=True):
        config = config_for(sizes, num_pairs)
        assert config.pairs == most
        assert smem_bytes(sizes, config) <= CTA_SMEM_BYTES
        assert 1 <= config.max_columns(sizes) <= 16
        assert 1 <= config.stages <= 16
        assert 1 <= config.parts <= 8
    assert config_for(sizes, 32, 132) == config_for(sizes, 32)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_records", [1, 2, 3, 5, 11, 13, 24, 41, 64, 90, 128, 160, 224, 448])
def test_panels_are_divided_evenly_into_runs(format: str, num_records: int) -> None:
    for sizes in (Sizes(format, num_records * 32, 1024, 4, 2), Sizes(format, 1024, num_records * 32, 4, 2)):
        assert sizes.hidden // 32 % (sizes.split * sizes.gate_up_run) == 0
        assert sizes.intermediate // 32 % sizes.down_run == 0
        assert sizes.down_run <= sizes.gate_up_run
        assert sizes.gate_up_run * RECORD_BYTES[format] <= max(4896, RECORD_BYTES[format])
        assert sizes.split * (2 if sizes.has_4_bit_codes else 1) <= 24


@pytest.mark.parametrize(
    ("hidden", "of_8_bits", "of_4_bits"), [(2048, 8, 4), (512, 4, 4), (256, 4, 4), (128, 4, 4), (96, 1, 1), (416, 1, 1)]
)
def test_narrow_layers_keep_four_warps_a_panel_where_any_divide_it(hidden: int, of_8_bits: int, of_4_bits: int) -> None:
    """Larger units alone would leave the panel of a narrow layer to one warp or two."""
    splits = [Sizes(format, hidden, 256, 8, 2).split for format in ("mxfp8", "mxfp4")]
    assert splits == [of_8_bits, of_4_bits]


def test_sums_are_ordered_by_sizes_alone() -> None:
    """What decides the order of sums is no part of a configuration, so that batches of any size agree in every bit."""
    assert {f.name for f in fields(Config)} == {"teams", "columns", "stages", "pairs", "parts", "panels"}


@pytest.mark.parametrize("shape", [(32, 57344, 8, 2), (131072, 32, 2, 1), (16384, 53248, 8, 2)], ids=str)
def test_rows_that_do_not_fit_shared_memory_are_refused_by_name(shape: tuple[int, int, int, int]) -> None:
    message = rf"path 'tile': bf16 with hidden {shape[0]}, intermediate {shape[1]}.*path='warp'"
    with pytest.raises(UnsupportedError, match=message):
        config_for(Sizes("bf16", *shape), 1)


def test_long_rows_take_fewer_pairs_at_once() -> None:
    """What no kernel of the largest class has shared memory for goes in more launches, and is precompiled so."""
    ordinary, long_rows = Sizes("mxfp8", 2048, 768, 128, 8), Sizes("mxfp8", 2048, 16384, 8, 2)
    assert (most_pairs(ordinary), most_pairs(long_rows)) == (MAX_PAIRS, 256)
    with pytest.raises(UnsupportedError, match="fit shared memory"):
        config_for(long_rows, 257)
    assert len(all_specs(ordinary, torch.int64, "silu")) == 4
    assert len(all_specs(long_rows, torch.int64, "silu")) == 3
    with pytest.raises(UnsupportedError, match="fit shared memory"):
        most_pairs(Sizes("mxfp8", 8192, 28672, 8, 2))


@pytest.mark.parametrize(
    ("sizes", "classes"),
    [
        (Sizes("bf16", 2048, 17920, 8, 2), [32, 256]),  # dot products of 128 pairs lie apart from shares, of 256 do not
        (Sizes("fp8_block", 10240, 18432, 8, 2), [256]),
        (Sizes("bf16", 4096, 17920, 8, 2), [32, 256, MAX_PAIRS]),
        (Sizes("nvfp4", 12288, 22528, 512, 8), [32, 128, MAX_PAIRS]),  # those of panels in parts take no room
    ],
    ids=str,
)
def test_a_class_that_does_not_fit_is_served_by_the_next_that_does(sizes: Sizes, classes: list[int]) -> None:
    assert most_pairs(sizes) == classes[-1]
    for num_pairs in range(1, classes[-1] + 1):
        config = config_for(sizes, num_pairs)
        assert config.pairs == next(pairs for pairs in classes if num_pairs <= pairs)
        assert smem_bytes(sizes, config) <= CTA_SMEM_BYTES
    specs = all_specs(sizes, torch.int64, "silu")
    assert [int(dict(spec.macros)["WARPRING_PAIRS"]) for spec in specs] == classes


@pytest.mark.parametrize(
    ("hidden", "num_sms", "parts"),
    [
        (2048, 132, 1),
        (2112, 132, 1),
        (2144, 132, 4),
        (7168, 132, 1),
        (2560, 132, 2),
        (2880, 132, 2),
        (64, 132, 8),
        (160, 3, 1),
    ],
)
def test_experts_of_a_panel_are_dealt_out_where_panels_alone_leave_multiprocessors_idle(
    hidden: int, num_sms: int, parts: int
) -> None:
    sizes = Sizes("mxfp8", hidden, 64, 8, 2)
    assert {config_for(sizes, pairs, num_sms).parts for pairs in (1, 32, 33, 256)} == {parts}


@pytest.mark.parametrize(("hidden", "parts"), [(2048, 1), (2112, 1), (2144, 4), (4096, 2), (7168, 2), (64, 8)])
def test_the_largest_launches_cut_panels_where_a_multiprocessor_has_several(hidden: int, parts: int) -> None:
    assert config_for(Sizes("mxfp8", hidden, 64, 8, 2), 257).parts == parts


@pytest.mark.parametrize(
    ("hidden", "pairs", "panels"),
    [(2048, 32, 1), (4096, 32, 2), (7168, 32, 4), (7168, 33, 1), (2880, 32, 1), (16384, 1, 4)],
)
def test_units_have_several_panels_where_a_multiprocessor_has(hidden: int, pairs: int, panels: int) -> None:
    """Small launches alone: the dot products of all panels of a unit have shared memory of their own."""
    assert config_for(Sizes("mxfp8", hidden, 64, 8, 2), pairs).panels == panels


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
@pytest.mark.parametrize("format", FORMATS)
def test_no_bit_depends_on_the_configuration(format: str) -> None:
    inputs = make_inputs(64, 160, 96, 3, 2, format=format, seed=22, device="cuda")
    packed = pack_experts(inputs.experts)
    whole = run(inputs, packed)
    for config in (Config(1, 1, 1, MAX_PAIRS, 1), Config(2, 9, 3, 128, 3), Config(2, 32, 16, MAX_PAIRS, 8)):
        out = torch.full_like(inputs.x, torch.nan)
        moe_tile(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out, config)
        assert torch.equal(out, whole)


@GPU
@pytest.mark.parametrize("num_pairs", [*PAIRS[1:], MAX_PAIRS + 1])
def test_batches_on_both_sides_of_what_each_kernel_takes(num_pairs: int) -> None:
    inputs = make_inputs(num_pairs, 96, 64, 40, 1, format="mxfp4", seed=num_pairs, device="cuda")
    check_against_exact(run(inputs), inputs)


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
