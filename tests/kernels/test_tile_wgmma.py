"""The tile kernel for MXFP4 in slabs: compiled, and its sources run on the CPU by tests/emulator.

Every tensor ends where the next access faults, shared memory starts as NaN, and seeds decide the order of threads.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import compile_log
from emulator import EmulationError, emulated_gpu, guarded, unusable_reason, write_changed
from layer_checks import check_unused_slots_duplicates_and_foreign_ids, with_nan
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error, rows_of

from warpring import GELU_TANH, SILU, Activation, Experts, clipped_swiglu, gpt_oss_swiglu, moe_exact, pack_experts
from warpring.errors import CompileError, UnsupportedError
from warpring.kernels import tile_wgmma
from warpring.kernels.tile import CTA_SMEM_BYTES, Sizes
from warpring.kernels.tile_wgmma import ARCH, Config, all_specs, config_for, kernel_spec, most_tokens
from warpring.runtime.device import is_hopper
from warpring.runtime.jit import compile_kernel
from warpring.slabs import SLAB_MOST_COLS

EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
#: hidden, intermediate, num_experts, topk: warpgroups with one and with two blocks of gate_up, units that are not full.
SHAPE = (320, 192, 6, 3)
#: One of each; two of each, images apart; more than there is work for.
TIGHT, APART, WIDE = Config(1, 1, 1, False, 512), Config(2, 2, 2, True, 512), Config(5, 2, 9, False, 512)
#: The same with the rows of up to 8 tokens held.
HELD = (Config(2, 0, 1, True, 64), Config(1, 0, 3, False, 64))
CONFIGS = pytest.mark.parametrize("config", [TIGHT, APART, WIDE], ids=["tight", "apart", "wide"])


def guard(value: Any) -> Any:
    """A copy of a dataclass (of dataclasses) with every tensor `guarded`."""
    if isinstance(value, torch.Tensor):
        return guarded(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: guard(getattr(value, field.name)) for field in fields(value)})
    return value


def make(num_tokens: int, shape: tuple[int, int, int, int] = SHAPE, **kwargs: Any) -> Inputs:
    return make_inputs(num_tokens, *shape, format="mxfp4", **kwargs)


def run(
    inputs: Inputs,
    config: Config | None = None,
    *,
    shared: Experts | None = None,
    gate: torch.Tensor | None = None,
    layers: int = 1,
    **kwargs: Any,
) -> torch.Tensor:
    """The last of so many layers behind each other, which must all give the same."""
    packed = guard(pack_experts(inputs.experts, shared, in_slabs=True))
    outs = [guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(layers)]
    x, topk_idx, topk_weights = (
        guarded(t) if t.is_contiguous() else t for t in (inputs.x, inputs.topk_idx, inputs.topk_weights)
    )
    with emulated_gpu(tile_wgmma, **kwargs):
        for out in outs:
            tile_wgmma.moe_tile_wgmma(x, packed, topk_idx, topk_weights, out, config, gate)
    for out in outs:
        assert torch.equal(out.isnan(), outs[-1].isnan())
        assert torch.equal(out.nan_to_num(), outs[-1].nan_to_num())
    return outs[-1]


@EMULATED
@pytest.mark.parametrize("num_tokens", [5, 20])
def test_values_and_bits(num_tokens: int) -> None:
    """The error is that of its roundings; no bit depends on the order of threads, the batch or the number of CTAs."""
    inputs = make(num_tokens, bias=True, seed=3)
    whole = run(inputs)
    check_against_exact(whole, inputs)
    for seed in range(1, 5):
        assert torch.equal(run(inputs, seed=seed, num_sms=seed), whole)
    for rows in (slice(0, 1), slice(num_tokens - 1, num_tokens), slice(1, 4)):
        assert torch.equal(run(rows_of(inputs, rows), seed=rows.start), whole[rows])


@EMULATED
@pytest.mark.parametrize("activation", [SILU, gpt_oss_swiglu(), clipped_swiglu(0.5), GELU_TANH], ids=str)
def test_every_activation(activation: Activation) -> None:
    inputs = make(3, activation=activation, bias=True, seed=5)
    check_against_exact(run(inputs, seed=1), inputs)


@EMULATED
@pytest.mark.parametrize(
    "shape", [(64, 64, 3, 2), (64, 192, 1, 1), (1088, 64, 4, 2), (128, 640, 40, 32), (576, 320, 5, 2)], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 11])
def test_other_shapes_and_int32_ids(num_tokens: int, shape: tuple[int, int, int, int]) -> None:
    inputs = make(num_tokens, shape, index_dtype=torch.int32, seed=sum(shape))
    check_against_exact(run(inputs, seed=2 + num_tokens), inputs)


@EMULATED
def test_sizes_of_a_model() -> None:
    inputs = make(5, (2048, 768, 4, 2), bias=True, seed=3)
    whole = run(inputs, seed=0, num_sms=2)
    check_against_exact(whole, inputs)
    assert torch.equal(run(inputs, seed=1, num_sms=3), whole)


@EMULATED
@pytest.mark.parametrize("num_tokens", [5, 12])
def test_unused_slots_duplicates_and_foreign_ids(num_tokens: int) -> None:
    check_unused_slots_duplicates_and_foreign_ids(run, make(num_tokens, bias=True, seed=14))


@EMULATED
@pytest.mark.parametrize("num_tokens", [7, 12])
def test_nan_in_a_weight_or_in_x_stays_where_it_belongs(num_tokens: int) -> None:
    inputs, expected = with_nan(make(num_tokens, seed=15))
    inputs.experts.w2.scale[1, 17, 5] = 255
    inputs.x[2, 300] = torch.inf
    y = run(inputs, seed=4)
    finite = torch.arange(num_tokens) != 2
    assert torch.equal(y.isnan()[finite], expected[finite])
    assert not y[2].isfinite().any()


@EMULATED
@pytest.mark.parametrize("shift", [-60, 60])
def test_activations_and_scales_of_any_size(shift: int) -> None:
    """Small activations with large weights, and the other way round: terms and scales reach as far as BF16."""
    inputs = make(9, seed=19)
    reference = run(inputs)
    inputs.x.mul_(2.0**shift)
    inputs.experts.w13.scale.sub_(shift)
    assert torch.equal(run(inputs, seed=2), reference)


@EMULATED
def test_columns_of_a_row_that_are_tiny_beside_its_largest() -> None:
    """What the terms lose of a value is bounded by the largest of its row: 2^-18 of it."""
    inputs = make(3, seed=20)
    inputs.x[:, 0] = 2.0**14
    check_against_exact(run(inputs), inputs)


@EMULATED
def test_strided_rows_give_the_same_bits() -> None:
    inputs = make(5, seed=16)
    x, topk_idx, topk_weights = (torch.nn.functional.pad(t, (0, 8))[:, :-8] for t in (inputs.x, *inputs.args()[2:]))
    packed = guard(pack_experts(inputs.experts, in_slabs=True))
    out = torch.full((5, 328), torch.nan, dtype=torch.bfloat16)
    with emulated_gpu(tile_wgmma):
        tile_wgmma.moe_tile_wgmma(x, packed, topk_idx, topk_weights, out[:, :320])
    assert torch.equal(out[:, :320], run(inputs))
    assert out[:, 320:].isnan().all()


@EMULATED
@CONFIGS
@pytest.mark.parametrize("num_tokens", [6, 13])
def test_no_bit_depends_on_the_configuration(num_tokens: int, config: Config) -> None:
    inputs = make(num_tokens, bias=True, seed=3)
    whole = run(inputs)
    configs = (config, *HELD) if num_tokens <= 8 else (config,)
    for seed, num_sms, resident_ctas in ((0, 1, 4), (1, 5, 1), (2, 3, 2), (3, 7, 4), (4, 2, 1)):
        for one in configs:
            y = run(inputs, one, seed=seed, num_sms=num_sms, resident_ctas=resident_ctas, layers=2)
            assert torch.equal(y, whole)


@EMULATED
@CONFIGS
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_nobody_wants_an_expert(num_tokens: int, config: Config) -> None:
    inputs = make(num_tokens, bias=True, seed=14)
    nobody = replace(
        inputs, topk_idx=inputs.topk_idx * 0 - 1, topk_weights=torch.full_like(inputs.topk_weights, torch.nan)
    )
    for seed in range(3):
        assert (run(nobody, config, seed=seed) == 0).all()
    if num_tokens <= 8:
        assert (run(nobody) == 0).all()


@EMULATED
def test_columns_of_every_number() -> None:
    """All tokens of a batch may want one expert: 1 to 64 columns, entries full and not, several of an expert."""
    inputs = make(64, (128, 64, 6, 3), seed=17)
    inputs.topk_idx[:, 0] = 4
    inputs.topk_idx[:, 1] = torch.arange(64) % 3
    inputs.topk_idx[:, 2] = 3 + 2 * (torch.arange(64) % 2)
    whole = run(inputs, seed=1)
    check_against_exact(whole, inputs)
    for count in (1, 7, 8, 9, 10, 11, 16, 17, 33):
        some = rows_of(inputs, slice(0, count))
        assert torch.equal(run(some, seed=count), whole[:count])
        for config in (TIGHT, WIDE):
            assert torch.equal(run(some, config, seed=count, num_sms=1 + count % 5), whole[:count])


@EMULATED
def test_more_pairs_than_one_launch_takes() -> None:
    inputs = make(180, (64, 64, 6, 3), seed=13)
    inputs.topk_idx[:100] = torch.tensor([1, 2, 4])
    inputs.topk_idx[0] = 1
    whole = run(inputs, seed=1)
    check_against_exact(whole, inputs)
    assert torch.equal(run(rows_of(inputs, slice(1, 4))), whole[1:4])


@EMULATED
@pytest.mark.parametrize("num_tokens", [4, 12])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts(num_tokens: int, gated: bool) -> None:
    inputs = make(num_tokens, bias=True, seed=22)
    shared = make_inputs(1, SHAPE[0], 2 * SHAPE[1], 1, 1, format="mxfp4", seed=122).experts
    gate = torch.rand(num_tokens) if gated else None
    inputs.topk_idx[1] = -1
    column = None if gate is None else guarded(torch.stack((torch.full_like(gate, torch.nan), gate), 1))[:, 1]
    y = run(inputs, shared=shared, gate=column, seed=3)
    weight = torch.ones(num_tokens, 1) if gate is None else gate[:, None]
    exact = moe_exact(*inputs.args()) + moe_exact(inputs.x, shared, torch.zeros(num_tokens, 1).long(), weight)
    assert rms_rel_error(y, exact) < 4e-3
    for seed in (1, 2):
        assert torch.equal(run(inputs, shared=shared, gate=column, seed=seed, num_sms=1 + 3 * seed), y)


@EMULATED
@CONFIGS
def test_a_layer_reads_what_the_one_before_wrote(config: Config) -> None:
    inputs = make(5, seed=9)
    second = run(replace(inputs, x=run(inputs)))
    packed, kept = guard(pack_experts(inputs.experts, in_slabs=True)), guard(inputs)
    for seed in range(3):
        between, out = (guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(2))
        with emulated_gpu(tile_wgmma, seed=seed):
            for source, to in ((kept.x, between), (between, out)):
                tile_wgmma.moe_tile_wgmma(source, packed, kept.topk_idx, kept.topk_weights, to, config)
        assert torch.equal(out, second)


#: What is taken out of the sources (it is there once), and what takes its place.
MUTATIONS = {
    "weights read before they have arrived": ("mbarrier_wait(smem_full + ring.stage * 8, ring.parity);", ""),
    "weights requested over those that are not read": (
        "wait(smem.barriers.empty[group][at.stage], at.parity ^ 1);",
        "",
    ),
    "sums read before products are done": ("warpgroup_wait<0>();", ""),
    "a group read before it is posted, by consumers": (
        "mbarrier_wait(smem_address(&smem.barriers.posted[queue.stage]), queue.parity);",
        "",
    ),
    "a group read before it is posted, by finishers": (
        "wait_warp(smem.barriers.posted[queue.stage], queue.parity);\n            const Group group = "
        "smem.group[queue.stage];\n            if (group.entry == kEnd) return;",
        "const Group group = smem.group[queue.stage];\n            if (group.entry == kEnd) return;",
    ),
    "a group read before it is posted, by stagers": (
        "wait_warp(smem.barriers.posted[queue.stage], queue.parity);\n            const Group group = "
        "smem.group[queue.stage];\n            if (group.entry == kEnd) break;",
        "const Group group = smem.group[queue.stage];\n            if (group.entry == kEnd) break;",
    ),
    "a group posted over one that is not read": ("wait(smem.barriers.left[queue.stage], queue.parity ^ 1);", ""),
    "rows of x encoded before they are fetched": ("wait_warp(fetched, parity);", ""),
    "rows of all tokens encoded before they are fetched": ("wait_warp(smem.barriers.x_fetched[0], 0);", ""),
    "rows of x encoded by what one warp has seen": ("named_barrier_sync(kConvertBarrier, kStagers * kLanes);", ""),
    "rows of all tokens encoded by what one warp has seen": (
        "image.find_largest(smem.x_amax[0]);\n        named_barrier_sync(kConvertBarrier, kConverting);",
        "image.find_largest(smem.x_amax[0]);",
    ),
    "rows of all tokens multiplied before all are encoded": (
        "smem.x_scale[0]);\n        named_barrier_sync(kConvertBarrier, kConverting);",
        "smem.x_scale[0]);",
    ),
    "terms written over columns that are not read": (
        "lane * 16);\n            __syncwarp();\n            if (exists) {",
        "lane * 16);\n            if (exists) {",
    ),
    "the largest of a row before kept": (
        "if (stager == 0 && lane < kColumns) smem.x_amax[(groups + 2) % 3][lane] = 0;",
        "",
    ),
    "rows of x multiplied before they are there": (
        "mbarrier_wait(smem_address(&smem.barriers.x_full[slot]), groups / kXImages & 1);",
        ";",
    ),
    "rows of x fetched over those that are not multiplied": ("wait_warp(smem.barriers.x_empty[slot], parity ^ 1);", ""),
    "shares added before they are there": ("wait_warp(smem.barriers.shares_full[turn.stage], turn.parity);", ""),
    "shares written over those that are not added": (
        "mbarrier_wait(smem_address(&smem.barriers.shares_empty[shares.stage]), shares.parity ^ 1);",
        "",
    ),
    "a barrier arrived at before all lanes of a consumer have written": (
        "__syncwarp();\n        mbarrier_arrive_if(smem_address(&barrier), lane == 0);",
        "mbarrier_arrive_if(smem_address(&barrier), lane == 0);",
    ),
    "a barrier arrived at before all lanes have read": (
        "__syncwarp();\n    if (threadIdx.x % kLanes == 0) mbarrier_arrive",
        "if (threadIdx.x % kLanes == 0) mbarrier_arrive",
    ),
    "act fetched before it is there": ("wait_for_act(first, last);", ""),
    "act fetched by lanes that have not seen its flag": (
        "kGateUpSlabs * kFinishers);\n        __syncwarp();",
        "kGateUpSlabs * kFinishers);",
    ),
    "act fetched over that which is not multiplied": (
        "wait_warp(smem.barriers.act_empty[slot], (image / kActImages & 1) ^ 1);",
        "",
    ),
    "act fetched over rows of x": (
        "if (!kActApart && share.count > 0) wait_warp(smem.barriers.gate_up_over, 0);",
        "",
    ),
    "act multiplied before it is there": (
        "mbarrier_wait(smem_address(&smem.barriers.act_full[slot]), image / kActImages & 1);",
        "",
    ),
    "dot products added by a warp that does not know whether they are there": (
        "}\n        named_barrier_sync(kConsumerBarrier, kConsumerThreads);\n        if (smem.completes)",
        "}\n        if (smem.completes)",
    ),
    "flags cleared while others look at them": ("== gridDim.x * kStagers - 1", ">= 0"),
    "tickets started anew while others take them": ("if (first == int(gridDim.x) - 1) *gmem_ticket", "*gmem_ticket"),
    "the layer before not waited for": ("pdl_wait();", ""),
}

#: Mutations of more than one place, or that only CTAs which share slabs show.
SHARED_MUTATIONS = {
    "dot products counted before all warps have theirs": {
        "named_barrier_sync(kConsumerBarrier, kConsumerThreads);\n        if (threadIdx.x == 0) {": (
            "if (threadIdx.x == 0) {"
        ),
    },
    "dot products added by the first CTA, not the last": {
        "+ items == smem.routing.num_entries;": "== 0;",
        "if (last) *gmem_done = 0;": "if (int(*gmem_done) == smem.routing.num_entries) *gmem_done = 0;",
    },
}


def shows(places: dict[str, str], tmp_path: Path, cases: dict[tuple[int, Config], int], seeds: int) -> bool:
    """Whether some order of threads fails, or gives other bits, in a case: (tokens, configuration) -> CTAs."""
    write_changed(tmp_path, "tile_(wgmma|waits)", places.items())
    inputs = make(13, (512, 128, 6, 3), seed=18)
    inputs.x.mul_(2.0 ** (torch.arange(13) % 3 * 12)[:, None])  # a scale of another token's would lose bits
    whole = run(inputs)
    for seed in range(seeds):
        for (tokens, config), num_sms in cases.items():
            some = rows_of(inputs, slice(0, tokens))
            try:
                y = run(some, config, seed=seed, num_sms=num_sms, layers=2, directory=tmp_path)
            except AssertionError:  # an EmulationError, or zeros that are none
                return True
            if not torch.equal(y, whole[:tokens]):
                return True
    return False


@EMULATED
@pytest.mark.parametrize("mutation", SHARED_MUTATIONS)
def test_sums_of_slabs_that_ctas_share_wait_for_all(mutation: str, tmp_path: Path) -> None:
    cases = {(13, APART): 11, (6, HELD[0]): 7}
    assert shows(SHARED_MUTATIONS[mutation], tmp_path, cases, 12), f"no order of threads shows it: {mutation}"


@EMULATED
def test_rings_that_hold_less_than_an_item_of_down(tmp_path: Path) -> None:
    inputs = make(13, (192, 1344, 3, 2), bias=True, seed=3)  # units in turns would stop these layers
    whole = run(inputs)
    check_against_exact(whole, inputs)
    write_changed(tmp_path, "tile_wgmma", [("if (!kDownInTurns && !has_room<group>()) return true;", "")])
    for config, num_sms in ((TIGHT, 1), (TIGHT, 3), (APART, 2), (HELD[1], 5)):
        some = rows_of(inputs, slice(0, 5 if config in HELD else 13))
        assert torch.equal(run(some, config, seed=num_sms, num_sms=num_sms), whole[: len(some.x)])
        with pytest.raises(EmulationError, match="deadlock"):
            run(some, config, seed=num_sms, num_sms=num_sms, directory=tmp_path)


CASES = {(13, TIGHT): 1, (13, APART): 3, (6, HELD[0]): 4, (6, HELD[1]): 2}


@EMULATED
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernel with one barrier or wait taken out: some order of threads shows it."""
    assert shows(dict([MUTATIONS[mutation]]), tmp_path, CASES, 8), f"no order of threads shows it: {mutation}"


@pytest.mark.parametrize("shape", [(2048, 768, 128, 8), (2880, 2880, 128, 4)], ids=str)
def test_products_overlap_with_decoding_and_nothing_is_spilled(shape: tuple[int, int, int, int]) -> None:
    """The assembler warns where it has to run products one at a time."""
    sizes = Sizes("mxfp4", *shape)
    for tokens in (8, most_tokens(sizes)):
        log = compile_log(kernel_spec(sizes, torch.int64, "silu", config_for(sizes, tokens)))
        assert "Used 80 registers" in log
        assert "0 bytes spill stores, 0 bytes spill loads" in log
        assert "warning" not in log.lower(), log
        assert "serializ" not in log.lower(), log


def test_every_batch_of_every_shape_has_a_kernel_that_fits() -> None:
    most = SLAB_MOST_COLS
    for hidden, intermediate in ((64, 64), (most, 64), (64, most), (most, most)):
        for experts, topk, shared in ((1, 1, 0), (1024, 32, 8)):
            specs = all_specs(Sizes("mxfp4", hidden, intermediate, experts, topk, shared), torch.int32, "silu")
            assert 0 < len(specs) <= 8
            assert all(spec.dynamic_smem_bytes <= CTA_SMEM_BYTES for spec in specs)
    with pytest.raises(UnsupportedError, match="in_slabs=False"):
        config_for(Sizes("mxfp4", 16384, 64, 8, 2), 1)


def test_sources_refuse_less_shared_memory_than_they_use() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    sizes = Sizes("mxfp4", *SHAPE)
    spec = kernel_spec(sizes, torch.int64, "silu", config_for(sizes, 8))
    for name, message in (("SMEM_BYTES", "computes the same size"), ("SHARED_BYTES", "reserves the same size")):
        size = int(dict(spec.macros)[f"WARPRING_{name}"])
        less = size - (256 if name == "SMEM_BYTES" else 4)
        macros = tuple((n, str(less) if n == f"WARPRING_{name}" else v) for n, v in spec.macros)
        with pytest.raises(CompileError, match=message):
            compile_kernel(replace(spec, macros=macros), ARCH)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPE, (2048, 768, 16, 4), (2880, 2880, 8, 4), (64, 64, 512, 10)], ids=str)
def test_gpu_values_bits_and_graphs(shape: tuple[int, int, int, int]) -> None:
    """Small layers lie in L2: weights come fast, and a stage that is given back is soon written over."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("the kernel is Hopper's")
    inputs = make(150, shape, activation=gpt_oss_swiglu(), bias=True, seed=30)
    inputs.topk_idx[:, 1] = torch.where(torch.arange(150) % 3 > 0, shape[2] - 1, inputs.topk_idx[:, 1])
    inputs.topk_idx[5, :2] = -1
    inputs.topk_weights[5, :2] = torch.nan
    exact = moe_exact(*inputs.args())
    on_gpu = inputs.to("cuda")
    packed = pack_experts(on_gpu.experts, in_slabs=True)

    def layer(rows: slice = slice(None)) -> torch.Tensor:
        x, topk_idx, topk_weights = (t[rows] for t in (on_gpu.x, on_gpu.topk_idx, on_gpu.topk_weights))
        out = torch.full_like(x, torch.nan)
        tile_wgmma.moe_tile_wgmma(x, packed, topk_idx, topk_weights, out)
        return out

    whole = layer()
    assert rms_rel_error(whole.cpu(), exact) < 4e-3
    for _ in range(20):
        for rows in (slice(0, 1), slice(3, 11), slice(20, 36), slice(40, 104), slice(None)):
            assert torch.equal(layer(rows), whole[rows])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, whole)
