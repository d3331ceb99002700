"""The tile path's form for few tokens: the bits of `moe_tile`, its configurations, its order of launches.

What every path must do is in test_emulated.py, on a GPU in test_tile.py, whose small batches it serves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import emulated_gpu, guarded, unusable_reason, write_changed
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error, rows_of
from test_emulated import SHAPE, guard, run_panels, run_tile

from warpring import moe_exact, pack_experts
from warpring.formats import FORMATS
from warpring.kernels import panels, tile
from warpring.kernels.panels import Config, kernel_specs, moe_panels, panels_config, suits
from warpring.kernels.tile import Sizes, moe_tile
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import KERNEL_DIR, compile_kernel

EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
#: Teams, rounds, CTAs of a multiprocessor (which bound registers alone), warps of down: fewer and more than have work.
CONFIGS = [Config(1, 1, 1, 1, 1), Config(2, 3, 1, 2, 1), Config(3, 2, 1, 5, 1), Config(5, 9, 1, 16, 1)]
QWEN, QWEN3_NEXT, MIXTRAL = (2048, 768, 128, 8), (2048, 512, 512, 10), (4096, 14336, 8, 2)


@EMULATED
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_bits_are_those_of_the_tile_kernel(format: str, num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, *SHAPE, format=format, bias=True, seed=30 + num_tokens)
    expected = run_tile(inputs)
    for seed, config in enumerate((None, *CONFIGS)):
        assert torch.equal(run_panels(inputs, config, seed=seed), expected)


@EMULATED
def test_bits_of_several_units_a_warp_and_aligned_scales() -> None:
    """Four records a unit, two units a warp and panel, in rounds; and four units of down."""
    inputs = make_inputs(2, 1024, 512, 3, 2, format="bf16", seed=33)
    sizes = tile.sizes_of(pack_experts(inputs.experts), 2)
    assert sizes.hidden // 32 // sizes.gate_up_run // sizes.split == 1 < sizes.intermediate // 32 // sizes.down_run
    wide = make_inputs(2, 2048, 512, 3, 2, format="fp8_block", seed=34)
    long = make_inputs(1, 4096, 64, 3, 2, format="mxfp8", seed=35)
    assert panels_config(tile.sizes_of(pack_experts(long.experts), 2), 1).rounds > 1
    for each in (inputs, wide, long):
        assert torch.equal(run_panels(each, seed=2), run_tile(each))


@EMULATED
def test_shared_experts_and_their_gate() -> None:
    inputs = make_inputs(3, 160, 128, 6, 3, format="mxfp8", bias=True, seed=36)
    shared = make_inputs(1, 160, 256, 1, 1, format="mxfp8", bias=True, seed=37).experts
    gate = torch.rand(3, generator=torch.Generator().manual_seed(38))
    column = guarded(torch.stack((torch.full_like(gate, torch.nan), gate), 1))[:, 1]
    packed, kept = guard(pack_experts(inputs.experts, shared)), guard(inputs)
    results: list[torch.Tensor] = []
    for face, layer in ((panels, moe_panels), (tile, moe_tile)):
        for weights in (column, None):
            results.append(guarded(torch.full_like(inputs.x, torch.nan)))
            with emulated_gpu(face, seed=3):
                layer(kept.x, packed, kept.topk_idx, kept.topk_weights, results[-1], shared_weights=weights)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    exact = moe_exact(*inputs.args()) + moe_exact(inputs.x, shared, torch.zeros(3, 1, dtype=torch.int64), gate[:, None])
    assert rms_rel_error(results[0], exact) < 4e-3


@EMULATED
def test_nobody_wants_an_expert() -> None:
    inputs = make_inputs(2, *SHAPE, bias=True, seed=39)
    inputs.topk_idx[:] = -1
    inputs.topk_weights[:] = torch.nan
    for seed in range(3):
        assert (run_panels(inputs, seed=seed) == 0).all()


def layers(inputs: Inputs, config: Config | None, directory: Path = KERNEL_DIR, **kwargs: Any) -> torch.Tensor:
    """Three behind each other, of which each reads what the one before wrote, and all use the same scratch memory."""
    packed, kept = guard(pack_experts(inputs.experts)), guard(inputs)
    rows = [kept.x, *(guarded(torch.full_like(inputs.x, torch.nan)) for _ in range(3))]
    with emulated_gpu(panels, directory=directory, **kwargs):
        for x, out in pairwise(rows):
            moe_panels(x, packed, kept.topk_idx, kept.topk_weights, out, config)
    return torch.stack(rows[1:])


@EMULATED
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
def test_a_layer_reads_what_the_one_before_wrote(config: Config | None) -> None:
    inputs = make_inputs(2, *SHAPE, format="bf16", seed=40)
    inputs.topk_idx[1] = -1  # a token for whom down multiplies nothing
    expected = [inputs.x]
    for _ in range(3):
        expected.append(run_tile(replace(inputs, x=expected[-1])))
    for seed in range(4):
        assert torch.equal(layers(inputs, config, seed=seed), torch.stack(expected[1:]))


#: What is taken out of the sources (it is there once), and what takes its place.
MUTATIONS = {
    "gate_up reads before its predecessor has ended": (
        "    pdl_wait();\n    pdl_launch_dependents();",
        "    pdl_launch_dependents();",
    ),
    "down reads activations before they are there": ("    pdl_wait();\n    const int items", "    const int items"),
    "shares added up before all are there": ("sums, lane);\n        __syncthreads();", "sums, lane);"),
    "one place for the shares of all rounds": ("round ^= 1", "round ^= 0"),
    "outputs made before all sums are there": ("    __syncthreads();\n    const int row", "    const int row"),
}


@EMULATED
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernels with one barrier or wait taken out: some order of threads shows it."""
    write_changed(tmp_path, "panels", [MUTATIONS[mutation]])
    inputs = make_inputs(2, 512, *SHAPE[1:], format="mxfp4", seed=41)
    config = Config(1, 12, 1, 3, 1)
    expected = layers(inputs, config)
    for seed in range(12):
        try:
            y = layers(inputs, config, tmp_path, seed=seed, num_sms=4)
        except AssertionError:
            return
        if not torch.equal(y, expected):
            return
    pytest.fail(f"no order of threads shows it: {mutation}")


@EMULATED
def test_down_may_start_only_when_the_routing_is_known(tmp_path: Path) -> None:
    """Routing weights that the predecessor writes, here as another layer's outputs, would else come too late."""
    late = ("    pdl_wait();\n    pdl_launch_dependents();", "    pdl_launch_dependents();\n    pdl_wait();")
    write_changed(tmp_path, "panels", [late])
    first, second = (guard(make_inputs(2, 64, 32, 4, 2, format="bf16", seed=seed)) for seed in (42, 43))
    packs = [guard(pack_experts(inputs.experts)) for inputs in (first, second)]

    def run(directory: Path, seed: int) -> torch.Tensor:
        written, out = (guarded(torch.full((2, 64), -1.0, dtype=torch.bfloat16)) for _ in range(2))
        weights = written.view(torch.float32)[:, :2]
        with emulated_gpu(panels, seed=seed, directory=directory, concurrent=True):
            moe_panels(first.x, packs[0], first.topk_idx, first.topk_weights, written)
            moe_panels(second.x, packs[1], second.topk_idx, weights, out)
        return out

    expected = run(KERNEL_DIR, 0)
    assert expected.isfinite().all()
    assert all(torch.equal(run(KERNEL_DIR, seed), expected) for seed in range(1, 6))
    assert any(not torch.equal(run(tmp_path, seed), expected) for seed in range(12))


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_compile_within_their_budget(format: str, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for shape in (QWEN, (2048, 512, 256, 8)):
        for num_tokens in (1, 2):
            sizes = Sizes(format, *shape)
            config = panels_config(sizes, num_tokens)
            specs = kernel_specs(sizes, torch.int64, "silu", config)
            for spec, ctas in ((specs.gate_up, config.gate_up_ctas), (specs.down, config.down_ctas)):
                cubin = compile_kernel(spec, arch)
                threads = 32 * int(dict(spec.macros)["WARPRING_WARPS"])
                assert -(-cubin.registers // 8) * 8 * threads * ctas <= 65536
                assert cubin.spill_bytes == 0


@pytest.mark.parametrize(
    "sizes", [(32, 32, 1, 1, 0), (96, 192, 5, 2, 1), (64, 96, 1024, 32, 0), (1312, 96, 3, 1, 2)], ids=str
)
def test_odd_sizes_compile(sizes: tuple[int, int, int, int, int]) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for format in ("bf16", "nvfp4"):
        specs = panels.all_specs(Sizes(format, *sizes), torch.int32, "gelu_tanh")
        assert len(specs) == len({spec.entry for spec in specs}) + 1  # of down one for one token and one for more
        assert all(compile_kernel(spec, "sm_90a").code[:4] == b"\x7fELF" for spec in specs)


@pytest.mark.parametrize(
    ("format", "shape", "most"),
    [
        *((format, QWEN, 2) for format in FORMATS),
        ("mxfp8", QWEN3_NEXT, 2),
        ("mxfp8", (2048, 1024, 64, 8), 2),
        ("mxfp8", (2048, 1056, 64, 8), 1),  # more weights than two tokens gain by
        ("bf16", (2048, 896, 64, 8), 2),
        ("bf16", (2048, 928, 64, 8), 0),  # several units a warp: more weights than one token gains by
        ("mxfp8", (4096, 1536, 128, 8), 0),
        ("fp8_channel", (2880, 2880, 32, 4), 1),
        ("mxfp8", MIXTRAL, 4),
        ("bf16", MIXTRAL, 4),
        ("mxfp8", (64, 32, 64, 33), 0),  # more slots than a lane each
        ("mxfp4", (64, 16384, 64, 32), 0),  # sums of more units than fit shared memory
    ],
    ids=str,
)
def test_which_batches_it_serves(format: str, shape: tuple[int, int, int, int], most: int) -> None:
    sizes = Sizes(format, *shape)
    assert [suits(sizes, tokens) for tokens in (1, 2, 3, 4, 5)] == [tokens <= most for tokens in (1, 2, 3, 4, 5)]
    assert bool(panels.all_specs(sizes, torch.int64, "silu")) == (most > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_bits_are_those_of_the_tile_kernel(format: str, num_tokens: int) -> None:
    for shape in ((2048, 768, 5, 4), (4096, 128, 4, 2), (576, 288, 6, 4), (160, 96, 6, 3)):
        inputs = make_inputs(num_tokens, *shape, format=format, bias=True, seed=44, device="cuda")
        packed = pack_experts(inputs.experts, in_slabs=False)
        outs = [torch.full_like(inputs.x, torch.nan) for _ in range(2)]
        for layer, out in zip((moe_panels, moe_tile), outs, strict=True):
            layer(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out)
        assert torch.equal(*outs)
        check_against_exact(outs[0], inputs)
        last = torch.full_like(inputs.x[-1:], torch.nan)
        one = rows_of(inputs, slice(num_tokens - 1, num_tokens))
        moe_panels(one.x, packed, one.topk_idx, one.topk_weights, last)
        assert torch.equal(last, outs[0][-1:])
