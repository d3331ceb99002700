"""The layer kernels' sources, run on the CPU by tests/emulator: the rules of the GPU tests, without a GPU.

Every tensor ends where the next access faults, shared memory starts as NaN, and seeds decide the order of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulator import emulated_gpu, guarded, unusable_reason, write_changed
from layer_checks import check_unused_slots_duplicates_and_foreign_ids, with_nan
from moe_inputs import Inputs, check_against_exact, make_inputs, rows_of

from warpring import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu, pack_experts
from warpring.formats import FORMATS
from warpring.kernels import panels, tile, warp
from warpring.kernels.tile import Config
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


def run_tile(inputs: Inputs, config: Config | None = None, **kwargs: Any) -> torch.Tensor:
    return _run(tile, partial(tile.moe_tile, config=config), inputs, pack_experts(inputs.experts), **kwargs)


def run_panels(inputs: Inputs, config: panels.Config | None = None, **kwargs: Any) -> torch.Tensor:
    return _run(panels, partial(panels.moe_panels, config=config), inputs, pack_experts(inputs.experts), **kwargs)


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


PATHS = pytest.mark.parametrize("run", [run_warp, run_tile, run_panels], ids=["warp", "tile", "panels"])


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


@PATHS
@pytest.mark.parametrize("activation", [SILU, gpt_oss_swiglu(), clipped_swiglu(0.5), GELU_TANH], ids=str)
def test_every_activation(run: Runner, activation: Activation) -> None:
    inputs = make_inputs(3, *SHAPE, activation=activation, bias=True, seed=5)
    check_against_exact(run(inputs, seed=1), inputs)


@PATHS
@pytest.mark.parametrize(
    "shape", [(5, 64, 32, 8, 2), (1, 256, 32, 4, 2), (2, 32, 160, 40, 32), (7, 96, 192, 5, 2)], ids=str
)
def test_other_shapes_and_int32_ids(run: Runner, shape: tuple[int, int, int, int, int]) -> None:
    format = "fp8_block" if shape[1] == 256 else "mxfp4"
    inputs = make_inputs(*shape, format=format, index_dtype=torch.int32, seed=sum(shape))
    check_against_exact(run(inputs, seed=2), inputs)


@PATHS
def test_unused_slots_duplicates_and_foreign_ids(run: Runner) -> None:
    check_unused_slots_duplicates_and_foreign_ids(run, make_inputs(5, *SHAPE, bias=True, seed=14))


@PATHS
def test_nan_in_a_weight_or_in_x_stays_where_it_belongs(run: Runner) -> None:
    inputs, expected = with_nan(make_inputs(9, *SHAPE, seed=15))
    inputs.experts.w2.data.view(torch.uint8)[1, 17, 5] = 0x7F
    assert torch.equal(run(inputs, seed=4).isnan(), expected)


@PATHS
def test_strided_rows_give_the_same_bits(run: Runner) -> None:
    inputs = make_inputs(5, *SHAPE, seed=16)
    x, topk_idx, topk_weights = (torch.nn.functional.pad(t, (0, 8))[:, :-8] for t in (inputs.x, *inputs.args()[2:]))
    out = torch.full((5, 168), torch.nan, dtype=torch.bfloat16)
    run(Inputs(x, inputs.experts, topk_idx, topk_weights), out=out[:, :160])
    assert torch.equal(out[:, :160], run(inputs))
    assert out[:, 160:].isnan().all()


# ---- the tile kernel's configurations --------------------------------------------------------------------------------

#: One column, one stage a ring; three of each; two tiles, and more stages than a warp has units.
TIGHT, NARROW, WIDE = Config(1, 1, 1, 300, 1), Config(2, 3, 3, 300, 3), Config(2, 40, 16, 512, 8)
CONFIGS = pytest.mark.parametrize("config", [TIGHT, NARROW, WIDE], ids=["tight", "narrow", "wide"])


@CONFIGS
@pytest.mark.parametrize("format", FORMATS)
def test_no_bit_depends_on_the_configuration(format: str, config: Config) -> None:
    inputs = make_inputs(9, *SHAPE, format=format, bias=True, seed=3)
    whole = run_tile(inputs)
    for seed, num_sms in ((0, 1), (1, 5), (2, 3)):
        assert torch.equal(run_tile(inputs, config, seed=seed, num_sms=num_sms), whole)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("teams", [1, 2])
def test_no_bit_depends_on_teams_and_parts(teams: int, parts: int) -> None:
    inputs = make_inputs(9, *SHAPE, format="nvfp4", seed=4)
    whole = run_tile(inputs)
    for seed in (1, 2):
        assert torch.equal(run_tile(inputs, Config(teams, 8, 2, 128, parts), seed=seed, num_sms=4), whole)


@pytest.mark.parametrize(("teams", "num_sms"), [(1, 1), (1, 4), (2, 3), (2, 9)])
def test_no_bit_depends_on_how_many_panels_a_unit_has(teams: int, num_sms: int) -> None:
    """Where entries are few a unit of down has several panels, up to as many as the configuration says."""
    inputs = make_inputs(3, *SHAPE, format="mxfp4", bias=True, seed=6)
    inputs.topk_idx[0] = torch.tensor([4, -1, 2])
    inputs.topk_idx[1] = -1
    inputs.topk_idx[2] = torch.tensor([2, 4, 2])
    whole = run_tile(inputs, Config(1, 8, 2, 128, 1), num_sms=4)
    check_against_exact(whole, inputs)
    for seed in range(4):
        assert torch.equal(run_tile(inputs, Config(teams, 8, 2, 32, 1, 4), seed=seed, num_sms=num_sms), whole)
    one = rows_of(inputs, slice(0, 1))  # a single token, with one expert left
    one.topk_idx[0, 0] = -1
    expected = run_tile(one, Config(1, 8, 2, 128, 1), num_sms=4)
    for seed in range(4):
        assert torch.equal(run_tile(one, Config(teams, 8, 2, 32, 1, 4), seed=seed, num_sms=num_sms), expected)


@pytest.mark.parametrize("pairs", [32, 300], ids=["apart", "in_place_of_shares"])
def test_units_of_several_panels_behind_rows_of_x_that_are_not_held(pairs: int) -> None:
    """The last unit is not full, more tokens than columns, two layers on one state, a grid that is not resident."""
    inputs = make_inputs(9, *SHAPE, format="fp8_block", bias=True, seed=21)
    inputs.topk_idx[:] = -1
    inputs.topk_idx[1:8:3, 1] = torch.tensor([5, 2, 5])
    whole = run_tile(inputs)
    check_against_exact(whole, inputs)
    packed, kept = guard(pack_experts(inputs.experts)), guard(inputs)
    config = Config(2, 4, 2, pairs, 1, 3)
    for seed in range(4):
        results = [guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(2)]
        with emulated_gpu(tile, seed=seed, num_sms=seed + 1, resident_ctas=1 + seed % 2):
            for out in results:
                tile.moe_tile(kept.x, packed, kept.topk_idx, kept.topk_weights, out, config)
        assert all(torch.equal(out, whole) for out in results)


@CONFIGS
@pytest.mark.parametrize("resident_ctas", [1, 2, 5])
def test_the_grid_need_not_be_resident(resident_ctas: int, config: Config) -> None:
    """A CTA waits only for what CTAs that run, or have run, took."""
    inputs = make_inputs(9, *SHAPE, format="mxfp4", seed=7)
    whole = run_tile(inputs)
    for seed in (0, 1, 2):
        y = run_tile(inputs, config, seed=seed, num_sms=7, resident_ctas=resident_ctas)
        assert torch.equal(y, whole)


def test_several_chunks_a_panel_and_runs_aligned_to_scale_blocks() -> None:
    """2048 columns of fp8_block are two units of four records a warp: scales are requested ahead of the weights."""
    inputs = make_inputs(3, 2048, 128, 3, 2, format="fp8_block", seed=6)
    sizes = tile.sizes_of(pack_experts(inputs.experts), 2)
    assert (sizes.split, sizes.gate_up_run) == (8, 8)
    check_against_exact(run_tile(inputs, seed=3), inputs)


@CONFIGS
def test_layers_behind_each_other_share_one_state(config: Config) -> None:
    """Each leaves the zeros that it found; the next starts before it has ended, and waits."""
    inputs = make_inputs(9, *SHAPE, format="mxfp8", seed=8)
    whole, packed = run_tile(inputs), guard(pack_experts(inputs.experts))
    kept = guard(inputs)
    for seed in range(4):
        results = [guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(3)]
        with emulated_gpu(tile, seed=seed, num_sms=seed + 1) as launches:
            for out in results:
                tile.moe_tile(kept.x, packed, kept.topk_idx, kept.topk_weights, out, config)
        assert len({launch.args[-1] for launch in launches}) == 1
        assert all(torch.equal(out, whole) for out in results)


@CONFIGS
def test_a_layer_reads_what_the_one_before_wrote(config: Config) -> None:
    inputs = make_inputs(5, *SHAPE, format="bf16", seed=9)
    first = run_tile(inputs)
    second = run_tile(replace(inputs, x=first))
    packed, kept = guard(pack_experts(inputs.experts)), guard(inputs)
    for seed in range(4):
        between, out = (guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(2))
        with emulated_gpu(tile, seed=seed):
            tile.moe_tile(kept.x, packed, kept.topk_idx, kept.topk_weights, between, config)
            tile.moe_tile(between, packed, kept.topk_idx, kept.topk_weights, out, config)
        assert torch.equal(out, second)


@CONFIGS
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_nobody_wants_an_expert(num_tokens: int, config: Config) -> None:
    inputs = make_inputs(num_tokens, *SHAPE, bias=True, seed=14)
    nobody = replace(
        inputs, topk_idx=inputs.topk_idx * 0 - 1, topk_weights=torch.full_like(inputs.topk_weights, torch.nan)
    )
    for seed in range(3):
        assert (run_tile(nobody, config, seed=seed) == 0).all()


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block"])
def test_columns_of_every_number(format: str) -> None:
    """All tokens of a batch may want one expert: 1 to 64 columns, tiles of 8 and 16, full and not, several entries."""
    inputs = make_inputs(64, *SHAPE, format=format, seed=17)
    inputs.topk_idx[:, 0] = 4
    inputs.topk_idx[:, 1] = torch.arange(64) % 3
    inputs.topk_idx[:, 2] = 3 + 2 * (torch.arange(64) % 2)
    whole = run_tile(inputs, seed=1)
    check_against_exact(whole, inputs)
    for count in (1, 8, 9, 10, 11, 16, 17, 33):
        some = rows_of(inputs, slice(0, count))
        assert torch.equal(run_tile(some, seed=count), whole[:count])
        assert torch.equal(run_tile(some, WIDE, seed=count), whole[:count])
        assert torch.equal(run_tile(some, TIGHT, seed=count), whole[:count])


@pytest.mark.parametrize("num_tokens", [2, 10, 11, 30])
def test_an_expert_that_more_pairs_want_than_fit_at_once_is_read_in_parts(num_tokens: int) -> None:
    """Up to 32 pairs one warp sorts, unless an expert has too many; beyond them the CTA does."""
    inputs = make_inputs(num_tokens, *SHAPE, format="mxfp4", seed=num_tokens)
    inputs.topk_idx[:] = torch.tensor([5, 2, 5])
    whole = run_tile(inputs, seed=1)
    check_against_exact(whole, inputs)
    for columns in (1, 2, 3, 7, 8, 16):
        for parts in (1, 2):
            y = run_tile(inputs, Config(1, columns, 2, 128, parts), seed=columns, num_sms=4)
            assert torch.equal(y, whole)


@pytest.mark.parametrize("num_tokens", [65, 172])
def test_more_pairs_of_an_expert_than_one_tile_and_than_one_launch(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, *SHAPE, format="mxfp4", seed=13)
    inputs.topk_idx[:] = torch.tensor([1, 2, 4])
    inputs.topk_idx[0] = 1  # with three pairs of one token
    whole = run_tile(inputs, seed=1)
    check_against_exact(whole, inputs)
    assert torch.equal(run_tile(inputs, NARROW, seed=2), whole)
    assert torch.equal(run_tile(rows_of(inputs, slice(1, 4))), whole[1:4])


#: What is taken out of the sources (it is there once), and what takes its place.
MUTATIONS = {
    "weights of gate_up read before they have arrived": ("wait(full[at.stage], at.parity);", ""),
    "weights of down read before they have arrived": (
        "wait(smem.barriers.down_full[warp][at.stage], at.parity);",
        "",
    ),
    "rows of x read before they are there": ("if (holds_all_rows(args)) wait(smem.barriers.x_staged, 0);", ""),
    "weights of gate_up requested over those that are not read": (
        "wait(smem.barriers.gate_up_empty[team][turn.stage], turn.parity ^ 1);",
        "",
    ),
    "weights of down requested over those that are not read": (
        "wait(smem.barriers.down_empty[consumer][stage], down_ring.parity ^ 1);",
        "",
    ),
    "weights of down requested over those of gate_up": ("if (!in_down) wait_for_gate_up(team, stage);", ""),
    "rows of x fetched over those that are not read": (
        "while (x_ring.free_slots < wanted.count) take_group_back();",
        "",
    ),
    "rows of act fetched over those of x": ("while (groups_back < num_groups) take_group_back();", ";"),
    "rows of act fetched over those that are not read": (
        "wait_warp(smem.barriers.item_done[back * kStagers + stager], items_back / kOwnItems & 1);",
        "",
    ),
    "rows of act fetched before all of their panels are there": (
        "if (entry >= ready) ready = entry + wait_for_act(entry);",
        "",
    ),
    "a flag raised before its activations are there": (
        "wait_warp(smem.barriers.activated[queue.stage], queue.parity);",
        "",
    ),
    "rows of act read before they are there": (
        "wait(smem.barriers.item_staged[item], number / kItems & 1);",
        "",
    ),
    "shares added before they are there": (
        "wait(smem.barriers.shares_full[finisher][turn.stage], turn.parity);",
        "",
    ),
    "shares written over those that are not added": (
        "wait(smem.barriers.shares_empty[finisher][shares.stage], shares.parity ^ 1);",
        "",
    ),
    "dot products added before they are there": (
        "named_barrier_sync(kConsumerBarrier, kConsumerThreads);\n            sum_up",
        "sum_up",
    ),
    "dot products written over those that are not added": (
        "kConsumerThreads);\n            named_barrier_sync(kConsumerBarrier, kConsumerThreads);",
        "kConsumerThreads);",
    ),
    "a part counted before its dot products are there": (
        "wait_warp(smem.barriers.left[queue.stage], queue.parity);",
        "",
    ),
    "parts added up by the first, not the last": (
        "__shfl_sync(kFull, before, 0) == kParts - 1",
        "__shfl_sync(kFull, before, 0) == 0",
    ),
    "flags cleared while others look at them": ("== gridDim.x * kStagers - 1", ">= 0"),
    "a barrier arrived at before all lanes have read": (
        "__syncwarp();\n    if (threadIdx.x % kLanes == 0) mbarrier_arrive",
        "if (threadIdx.x % kLanes == 0) mbarrier_arrive",
    ),
    "the layer before not waited for": ("pdl_wait();", ""),
}


#: Mutations of more than one place, or that only special shapes and grids show: places; tokens and shape; how it runs.
SPECIAL_MUTATIONS: dict[str, tuple[dict[str, str], tuple[int, int, int, int, int], Config, int]] = {
    "places of the queue given back by stagers that have not waited for the consumers": (
        {
            "arrive_warp(smem.barriers.done[groups_back % kQueue]);": "",
            "++num_groups;\n": "++num_groups;\n            arrive_warp(smem.barriers.done[queue.stage]);\n",
        },
        (13, 160, 96, 6, 3),
        Config(1, 16, 2, 300, 1),
        1,
    ),
    "dot products written over shares that are not added": (
        {
            "if (!kDotsApart) wait_warp(smem.barriers.activated[groups_back % kQueue], groups_back / kQueue & 1);": "",
        },
        (40, 160, 32, 6, 3),
        Config(1, 2, 4, 300, 1),
        2,
    ),
    "a CTA without work that ends before its rows of x have come": (
        {"if (items == 0 && holds_all_rows(args)) wait_warp(smem.barriers.x_staged, 0);": ""},
        (4, 512, 32, 1, 1),
        Config(1, 4, 4, 300, 1),
        40,
    ),
    "more items of down on their way than there are barriers for": (
        {" || num_items - items_back == kOwnItems": ""},
        (2, 160, 32, 6, 3),
        Config(1, 40, 16, 300, 1),
        1,
    ),
    "rows of act of a unit's next panel fetched by a stager that has looked at later entries alone": (
        {"if (at.panel != panel) ready = unit.first_entry, panel = at.panel;": ""},
        (1, 160, 32, 6, 4),
        Config(2, 8, 2, 32, 1, 4),
        2,
    ),
}


@pytest.mark.parametrize("mutation", SPECIAL_MUTATIONS)
def test_what_only_special_shapes_and_grids_show_does_not_pass(mutation: str, tmp_path: Path) -> None:
    places, shape, config, num_sms = SPECIAL_MUTATIONS[mutation]
    write_changed(tmp_path, "tile(?!_wgmma)", places.items())
    inputs = make_inputs(*shape, format="mxfp4", seed=18)
    expected = run_tile(inputs, config, num_sms=num_sms)
    for seed in range(1, 16):
        try:
            y = run_tile(inputs, config, seed=seed, num_sms=num_sms, directory=tmp_path)
        except AssertionError:  # an EmulationError, or zeros that are none
            return
        if not torch.equal(y, expected):
            return
    pytest.fail(f"no order of threads shows it: {mutation}")


def test_threads_that_poll_let_others_go_on() -> None:
    """Stagers that run first whenever they can, and look at flags, do not hold up those who raise these."""
    inputs = make_inputs(13, 512, *SHAPE[1:], format="mxfp4", seed=18)
    config = Config(2, 16, 2, 128, 2)
    whole = run_tile(inputs, config)
    for seed in (5, 9, 11):
        assert torch.equal(run_tile(inputs, config, seed=seed), whole)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernel with one barrier or wait taken out: some order of threads shows it."""
    write_changed(tmp_path, "tile(?!_wgmma)", [MUTATIONS[mutation]])
    inputs = make_inputs(13, 512, *SHAPE[1:], format="mxfp4", seed=18)  # two records a unit, several lanes of x
    packed, kept = guard(pack_experts(inputs.experts)), guard(inputs)

    def layers(config: Config, directory: Path = KERNEL_DIR, **kwargs: Any) -> torch.Tensor:
        """Two, behind each other."""
        outs = [guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(2)]
        with emulated_gpu(tile, directory=directory, **kwargs):
            for out in outs:
                tile.moe_tile(kept.x, packed, kept.topk_idx, kept.topk_weights, out, config)
        return torch.stack(outs)

    configs = {Config(2, 16, 2, 128, 2): 3, Config(2, 2, 1, 300, 1): 1}
    expected = layers(next(iter(configs)))
    for seed in range(8):
        for config, num_sms in configs.items():
            try:
                y = layers(config, tmp_path, seed=seed, num_sms=num_sms)
            except AssertionError:  # an EmulationError, or zeros that are none
                return
            if not torch.equal(y, expected):
                return
    pytest.fail(f"no order of threads shows it: {mutation}")
