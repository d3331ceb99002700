"""The grouped path's own GEMMs on packed weights: in the emulator, compiled, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import compile_log
from emulator import Launch, emulated_gpu, guarded, load, unusable_reason, write_changed
from emulator import run as run_launches
from layer_checks import check_unused_slots_duplicates_and_foreign_ids, with_nan
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error, rows_of

from warpring import (
    GELU_TANH,
    SILU,
    Activation,
    CompileError,
    PackedExperts,
    clipped_swiglu,
    gpt_oss_swiglu,
    moe_exact,
    pack_experts,
)
from warpring.formats import FORMATS, ceil_div
from warpring.kernels import grouped_gemm
from warpring.kernels.grouped_gemm import ARCH, NARROW, WIDE, Config, all_specs, config_for, gemm_spec, moe_grouped_gemm
from warpring.kernels.tile import CTA_SMEM_BYTES
from warpring.runtime.jit import compile_kernel
from warpring.runtime.launch import int32

EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
GPU = pytest.mark.gpu
#: hidden, intermediate, num_experts, topk: half chunks of columns, tasks of fewer than 8 panels.
SHAPE = (160, 96, 6, 3)
#: Few and short stages: every ring goes round several times.
TIGHT = Config(block_tokens=16, stage_records=2, weight_stages=2, token_stages=2)
CONFIGS = pytest.mark.parametrize("config", [NARROW, WIDE, TIGHT], ids=["narrow", "wide", "tight"])
#: hidden, intermediate of Qwen3-30B-A3B, and of gpt-oss: no whole turns of chunks.
COMPILED = [(2048, 768), (2880, 2880)]


def guard_packed(packed: PackedExperts) -> PackedExperts:
    """A copy whose every tensor ends where the next access faults."""
    biases = {name: getattr(packed, name) for name in ("w13_bias", "w2_bias")}
    return replace(
        packed,
        w13=packed.w13.map(guarded),
        w2=packed.w2.map(guarded),
        **{name: None if bias is None else guarded(bias) for name, bias in biases.items()},
    )


def run(
    inputs: Inputs,
    config: Config | None = None,
    *,
    packed: PackedExperts | None = None,
    shared_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    kept = guard_packed(pack_experts(inputs.experts) if packed is None else packed)
    out = guarded(torch.full_like(inputs.x, torch.nan))
    x, topk_idx, topk_weights = (guarded(t) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    with emulated_gpu(grouped_gemm, **kwargs):
        moe_grouped_gemm(x, kept, topk_idx, topk_weights, out, shared_weights, config)
    return out


@EMULATED
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_bits(format: str) -> None:
    """The error is that of its roundings; no bit depends on the order of threads, the batch, the configuration."""
    inputs = make_inputs(21, *SHAPE, format=format, bias=True, seed=3)
    whole = run(inputs)
    check_against_exact(whole, inputs)
    for seed in range(1, 4):
        assert torch.equal(run(inputs, seed=seed, num_sms=seed), whole)
        assert torch.equal(run(inputs, TIGHT, seed=seed, num_sms=4 - seed), whole)
    if format != "fp8_block":
        assert torch.equal(run(inputs, WIDE, seed=4), whole)
    for rows in (slice(0, 1), slice(20, 21), slice(2, 9)):
        assert torch.equal(run(rows_of(inputs, rows), seed=rows.start), whole[rows])


@EMULATED
@pytest.mark.parametrize("shape", [(320, 192, 6, 3), (64, 64, 4, 2), (576, 320, 3, 2)], ids=str)
@pytest.mark.parametrize("config", [NARROW, WIDE, TIGHT], ids=["narrow", "wide", "tight"])
def test_slabs_give_the_bits_of_records(shape: tuple[int, int, int, int], config: Config) -> None:
    inputs = make_inputs(21, *shape, format="mxfp4", bias=True, seed=23)
    records = run(inputs, config)
    for seed in range(3):
        slabs = pack_experts(inputs.experts, in_slabs=True)
        assert torch.equal(run(inputs, config, packed=slabs, seed=seed, num_sms=1 + seed), records)


@EMULATED
@pytest.mark.parametrize("activation", [SILU, gpt_oss_swiglu(limit=0.8), clipped_swiglu(0.5), GELU_TANH], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_activation(activation: Activation, bias: bool) -> None:
    inputs = make_inputs(5, *SHAPE, activation=activation, bias=bias, seed=5)
    check_against_exact(run(inputs, seed=1), inputs)


@EMULATED
@pytest.mark.parametrize(
    "shape",
    [(5, 32, 32, 8, 2), (1, 256, 32, 4, 2), (2, 64, 160, 40, 32), (7, 96, 192, 5, 2), (3, 544, 288, 2, 1)],
    ids=str,
)
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "mxfp4"])
def test_other_shapes_and_int32_ids(shape: tuple[int, int, int, int, int], format: str) -> None:
    inputs = make_inputs(*shape, format=format, index_dtype=torch.int32, seed=sum(shape))
    check_against_exact(run(inputs, seed=2), inputs)


@EMULATED
@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_every_width_and_several_blocks_of_an_expert(format: str) -> None:
    """All tokens want one expert: 1 to 300 rows, products of every width full and not, blocks of unequal sizes."""
    inputs = make_inputs(300, 64, 64, 3, 2, format=format, seed=17)
    inputs.topk_idx[:, 0] = 2
    inputs.topk_idx[:, 1] = torch.arange(300) % 2
    whole = run(inputs, seed=1)
    check_against_exact(whole, inputs)
    for count in (1, 15, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 257):
        assert torch.equal(run(rows_of(inputs, slice(0, count)), NARROW, seed=count), whole[:count])
    for count in () if format == "fp8_block" else (2, 32, 128, 129, 160, 192, 193, 224, 225, 256, 257):
        assert torch.equal(run(rows_of(inputs, slice(0, count)), WIDE, seed=count), whole[:count])
    for block in (16, 32, 64):
        assert torch.equal(run(inputs, Config(block), seed=block), whole)


@EMULATED
@CONFIGS
def test_unused_slots_duplicates_and_foreign_ids(config: Config) -> None:
    inputs = make_inputs(5, *SHAPE, bias=True, seed=14)
    check_unused_slots_duplicates_and_foreign_ids(lambda inputs, seed: run(inputs, config, seed=seed), inputs)


@EMULATED
def test_nobody_wants_an_expert() -> None:
    inputs = make_inputs(40, *SHAPE, bias=True, seed=14)
    nobody = replace(
        inputs, topk_idx=inputs.topk_idx * 0 - 1, topk_weights=torch.full_like(inputs.topk_weights, torch.nan)
    )
    assert (run(nobody) == 0).all()


@EMULATED
def test_nan_in_a_weight_or_in_x_stays_where_it_belongs() -> None:
    inputs, expected = with_nan(make_inputs(9, *SHAPE, seed=15))
    inputs.experts.w2.data.view(torch.uint8)[1, 17, 5] = 0x7F
    assert torch.equal(run(inputs, seed=4).isnan(), expected)


@EMULATED
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
def test_shared_experts_are_slots_behind_the_routed_ones(gated: bool) -> None:
    """The same layer with the shared experts as routed ones of every token's last slots."""
    inputs = make_inputs(7, 96, 64, 6, 4, bias=True, seed=16)
    gate = torch.rand(7) if gated else None
    inputs.topk_idx[:, 2:] = torch.tensor([4, 5])
    inputs.topk_weights[:, 2:] = 1.0 if gate is None else gate[:, None]
    inputs.topk_idx[:, :2] %= 4
    inputs.topk_idx[3, 0] = -1
    expected = run(inputs)
    check_against_exact(expected, inputs)
    packed = replace(pack_experts(inputs.experts), num_experts=4, num_shared=2)
    routed = replace(
        inputs, topk_idx=inputs.topk_idx[:, :2].contiguous(), topk_weights=inputs.topk_weights[:, :2].contiguous()
    )
    routed.topk_idx[3, 0] = 4  # names no routed expert, and must not come to name a shared one
    assert torch.equal(run(routed, packed=packed, shared_weights=gate), expected)


@EMULATED
def test_the_most_experts() -> None:
    """A thread for each."""
    inputs = make_inputs(30, 32, 32, 1024, 3, format="bf16", seed=18)
    inputs.topk_idx[:3, 0] = torch.tensor([0, 511, 1023])
    check_against_exact(run(inputs), inputs)


@EMULATED
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "num_shared", "per_cta"),
    [(1, 1, 1, 0, 1024), (700, 3, 40, 0, 1024), (700, 3, 5, 2, 2048), (1024, 2, 1024, 0, 1024), (171, 5, 6, 1, 1024)],
)
def test_pairs_are_rows_in_their_order(
    num_tokens: int, topk: int, num_experts: int, num_shared: int, per_cta: int
) -> None:
    """Rows of an expert follow each other as its pairs do, whatever the order of threads and CTAs; the rest follows."""
    idx = torch.randint(-1, num_experts + 1, (num_tokens, topk))
    shared = torch.arange(num_shared).expand(num_tokens, -1) + num_experts
    expert = torch.cat((idx.masked_fill(idx == num_experts, -1), shared), 1).flatten()
    pairs, block = len(expert), 16
    spec = grouped_gemm.specs_for("bf16", 64, 32, "silu", torch.int64, Config(block)).route
    smem = grouped_gemm._route_smem_bytes(num_experts + num_shared)
    count = expert[expert >= 0].bincount(minlength=num_experts + num_shared)
    blocks = (count + block - 1) // block
    first, first_block = count.cumsum(0) - count, blocks.cumsum(0) - blocks
    expected = torch.full((pairs, 4), -1, dtype=torch.int32)
    expected[:, 1:] = 0
    order = expert.argsort(stable=True)
    order = order[expert[order] >= 0]
    of = expert[order]
    row = torch.arange(len(order))
    begin = (row - first[of]) // block * block
    expected[order, :3] = torch.stack((row, first[of] + begin, (count[of] - begin).clamp(max=block)), 1).int()
    for seed in range(3):
        plan = guarded(torch.full((1 + int(blocks.sum()), 4), -1, dtype=torch.int32))
        places = guarded(torch.full((pairs, 4), -2, dtype=torch.int32))
        sizes = map(int32, (num_tokens, topk, num_experts, num_shared, per_cta))
        args = (guarded(idx), topk, *sizes, plan, places)
        run_launches([Launch(load(spec), (ceil_div(pairs, per_cta), 1, 1), 1024, args, smem)], seed=seed)
        assert torch.equal(places, expected)
        assert plan[0, 0] == blocks.sum()
        entries = torch.stack((torch.arange(len(count)), first, count, first_block), 1).int()
        assert torch.equal(plan[1:], entries.repeat_interleave(blocks, 0))


def test_pairs_are_divided_among_ctas() -> None:
    """Whole rounds of a CTA's threads, no CTA without a pair, never more than the most CTAs."""
    most, threads = grouped_gemm._MOST_ROUTE_CTAS, grouped_gemm._ROUTE_THREADS
    for pairs in (1, threads, threads + 1, most * threads, most * threads + 1, 9 * most * threads - 5):
        per_cta = grouped_gemm._pairs_per_route_cta(pairs)
        ctas = ceil_div(pairs, per_cta)
        assert per_cta % threads == 0
        assert ctas <= most
        assert (ctas - 1) * per_cta < pairs
    assert grouped_gemm._pairs_per_route_cta(most * threads) == threads


@EMULATED
def test_output_of_any_alignment() -> None:
    """Rows that start at 8 bytes are stored in as many, others column by column."""
    inputs = make_inputs(5, *SHAPE, bias=True, seed=22)
    expected = run(inputs)
    for offset, stride in ((0, 164), (1, 164), (4, 162), (2, 163)):
        out = torch.full((5 * stride + offset,), torch.nan, dtype=torch.bfloat16)
        view = out[offset:].as_strided((5, SHAPE[0]), (stride, 1))
        packed = pack_experts(inputs.experts)
        with emulated_gpu(grouped_gemm):
            moe_grouped_gemm(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, view)
        assert torch.equal(view, expected)
        assert int(out.isnan().sum()) == out.numel() - 5 * SHAPE[0]


#: What is taken out of the sources (it is there once), and what takes its place.
Change = tuple[str, str]
#: Loads of weights as late as a GPU may perform them: when their values are wanted, not when they are issued.
LATE_LOADS: tuple[Change, ...] = (
    ("typename Format::Raw raw[2];", "uint32_t late_run; int late_place; typename Format::Raw raw[2];"),
    ("raw[0] = Format::load(run, me.lane, 2 * place);", "late_run = run, late_place = place;"),
    ("if (!half) raw[1] = Format::load(run, me.lane, 2 * place + 1);", ""),
    (
        "Operands in[2];",
        "raw[0] = Format::load(late_run, me.lane, 2 * late_place);"
        "if (!half) raw[1] = Format::load(late_run, me.lane, 2 * late_place + 1);"
        "Operands in[2];",
    ),
)
#: As the first run on a GPU had it: every load is issued before the stage is given back.
GIVEN_BACK_ON_ISSUE: tuple[Change, ...] = (
    ("if (ends_stage) mbarrier_arrive_if(weights_empty, me.lane == 0);", ""),
    (
        "weights_empty = me.weights.empty();",
        "__syncwarp(); mbarrier_arrive_if(me.weights.empty(), me.lane == 0);",
    ),
)
MUTATIONS: dict[str, tuple[Change, ...]] = {
    "weights read before they have arrived": (("if (place == 0) me.weights.wait_full();", ""),),
    "tokens read before they have arrived": (("me.tokens.wait_full();", ""),),
    "weights requested over those that are not read": (
        ("ring.wait_empty();\n            __syncwarp();  // a stage", "__syncwarp();  // a stage"),
    ),
    "tokens requested over those that are not multiplied": (
        ("ring.wait_empty();\n            __syncwarp();\n", "__syncwarp();\n"),
    ),
    "weights requested by lanes that lag a use behind": (("__syncwarp();  // a stage", "// a stage"),),
    "weights given back before all lanes have read": (
        GIVEN_BACK_ON_ISSUE[0],
        ("weights_empty = me.weights.empty();", "mbarrier_arrive_if(me.weights.empty(), me.lane == 0);"),
    ),
    "weights given back while loads of them are on their way": (*LATE_LOADS, *GIVEN_BACK_ON_ISSUE),
    "act read before all warps have written": (
        ("    named_barrier_sync(1 + warpgroup, kWarpgroupThreads);\n    if (warpgroup", "    if (warpgroup"),
    ),
    "act written over what is not copied": (
        ("named_barrier_sync(1 + warpgroup, kWarpgroupThreads);  // the chunk", "// the chunk"),
    ),
    "sums read before products are done": (("warpgroup_wait<0>();", ""),),
    "tokens given back while they are multiplied": (("warpgroup_wait<1>();", ""),),
    "rows given out before all lanes have read the next": (
        ("__syncwarp();  // all have read the next rows", "// all have read the next rows"),
    ),
    "rows of the tokens read before they are given out": (
        ("    pdl_wait();\n    pdl_launch_dependents();\n    const int chunk", "    const int chunk"),
    ),
    "the kernel that makes the tokens not waited for": (("    pdl_wait();\n    fence_proxy", "    fence_proxy"),),
}


@EMULATED
@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_loads_may_be_late(format: str, tmp_path: Path) -> None:
    """An arrival can overtake loads: BF16 came out wrong on a GPU when stages were given back behind their issue.

    Several blocks an expert, as there: weights then come fast, and a stage that is given back is soon written over.
    """
    write_changed(tmp_path, "grouped_gemm", LATE_LOADS)
    inputs = make_inputs(70, 288, 160, 3, 2, format=format, seed=19)
    expected = run(inputs)
    check_against_exact(expected, inputs)
    for seed in range(6):
        for config in (TIGHT, replace(TIGHT, block_tokens=32, weight_stages=3)):
            assert torch.equal(run(inputs, config, seed=seed, num_sms=1 + seed % 3, directory=tmp_path), expected)


@EMULATED
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernels with one barrier or wait taken out: some order of threads shows it."""
    write_changed(tmp_path, "grouped_", MUTATIONS[mutation])
    # A warp that lags holds the others up at the next task's third chunk, if it has one.
    hidden = 64 if mutation == "act written over what is not copied" else 352
    inputs = make_inputs(21, hidden, *SHAPE[1:], format="mxfp4", seed=18)
    expected = run(inputs, TIGHT)
    for seed in range(12):
        try:
            y = run(inputs, TIGHT, seed=seed, num_sms=1 + seed % 2, directory=tmp_path)
        except AssertionError:  # an EmulationError
            return
        if not torch.equal(y, expected):
            return
    pytest.fail(f"no order of threads shows it: {mutation}")


@pytest.mark.parametrize("format", [*FORMATS, "mxfp4_slabs"])
def test_products_overlap_with_decoding_and_nothing_is_spilled(format: str) -> None:
    """The assembler warns where it has to run products one at a time."""
    for (hidden, intermediate), num_pairs in zip(COMPILED, (97, 96), strict=True):
        for cols, rows, halves in ((hidden, intermediate, 2), (intermediate, hidden, 1)):
            for config in {NARROW, config_for(format, num_pairs, 1)}:
                spec = gemm_spec(format, cols, rows, halves, "silu", config)
                log = compile_log(spec)
                assert "Used 168 registers" in log
                assert "0 bytes spill stores, 0 bytes spill loads" in log
                assert "warning" not in log.lower(), log
                assert "serializ" not in log.lower(), log
                assert spec.dynamic_smem_bytes <= CTA_SMEM_BYTES


def test_all_kernels_of_a_layer_compile() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for index_dtype in (torch.int32, torch.int64):
        for spec in all_specs("mxfp8", *SHAPE[:2], "gelu_tanh", index_dtype):
            assert compile_kernel(spec, ARCH).spill_bytes == 0


def test_sources_refuse_less_shared_memory_than_they_use() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for halves in (1, 2):
        spec = gemm_spec("mxfp8", 96, 64, halves, "silu", NARROW)
        size = ("WARPRING_SMEM_BYTES", str(spec.dynamic_smem_bytes))
        assert size in spec.macros
        less = ("WARPRING_SMEM_BYTES", str(spec.dynamic_smem_bytes - 8))
        with pytest.raises(CompileError, match="asks for as much"):
            compile_kernel(replace(spec, macros=tuple(less if macro == size else macro for macro in spec.macros)), ARCH)


@pytest.mark.parametrize("format", FORMATS)
def test_stages_are_deep_enough_to_keep_the_memory_busy(format: str) -> None:
    """Some 64 KiB on their way on every multiprocessor are what the memory's latency asks for."""
    for halves in (1, 2):
        for config in (NARROW, WIDE, Config(64)):
            bytes_ = config.stages(format, halves) * config.records(format)
            assert bytes_ * 8 * grouped_gemm.RECORD_BYTES[format] >= 64 << 10
            assert config.smem_bytes(format, halves) <= CTA_SMEM_BYTES


@GPU
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_values_bits_and_graphs(format: str) -> None:
    inputs = make_inputs(300, 288, 352, 16, 4, format=format, activation=gpt_oss_swiglu(), bias=True, seed=14)
    inputs.topk_idx[:, 1] = torch.where(torch.arange(300) % 3 > 0, 7, inputs.topk_idx[:, 1])
    inputs.topk_idx[5] = torch.tensor([-1, 16, -1, 3])
    inputs.topk_weights[5, :3] = torch.nan
    skipped = replace(inputs, topk_idx=torch.where(inputs.topk_idx == 16, -1, inputs.topk_idx))
    exact = moe_exact(*skipped.args())
    assert exact.isfinite().all()
    on_gpu = inputs.to("cuda")
    packed = pack_experts(on_gpu.experts)

    def layer(rows: slice = slice(None), config: Config | None = None) -> torch.Tensor:
        out = torch.full_like(on_gpu.x[rows], torch.nan)
        moe_grouped_gemm(on_gpu.x[rows], packed, on_gpu.topk_idx[rows], on_gpu.topk_weights[rows], out, None, config)
        return out

    whole = layer()
    assert rms_rel_error(whole.cpu(), exact) < 4e-3
    for rows in (slice(0, 1), slice(290, 300), slice(3, 150)):
        assert torch.equal(layer(rows), whole[rows])
    for config in (NARROW, Config(64), *([WIDE] if format != "fp8_block" else [])):
        assert torch.equal(layer(config=config), whole)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, whole)


@GPU
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_bits_where_weights_come_fast(format: str) -> None:
    """Weights in L2 and blocks that keep the tensor cores busy: a stage that is given back is soon written over."""
    inputs = make_inputs(2048, 1024, 768, 8, 2, format=format, seed=20).to("cuda")
    packed = pack_experts(inputs.experts)

    def layer(rows: slice = slice(None), config: Config | None = None) -> torch.Tensor:
        x, topk_idx, topk_weights = (t[rows] for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
        out = torch.full_like(x, torch.nan)
        moe_grouped_gemm(x, packed, topk_idx, topk_weights, out, None, config)
        return out

    few = [slice(first, first + 64) for first in range(0, 2048, 64)]
    expected = torch.cat([layer(rows) for rows in few])
    exact = moe_exact(*inputs.args())
    assert rms_rel_error(expected, exact) < 4e-3
    configs = [None, NARROW, Config(64), Config(96)] + ([WIDE] if format != "fp8_block" else [])
    for _ in range(10):
        for config in configs:
            assert torch.equal(layer(config=config), expected), config
