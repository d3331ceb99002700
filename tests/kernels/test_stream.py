"""The stream kernels, candidates for the tile path: the same rules, compiled, emulated on the CPU, and on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulator import EmulationError, emulated_gpu, guarded, unusable_reason
from moe_inputs import Inputs, check_against_exact, make_inputs, rows_of

from warpring import Experts, PackedExperts
from warpring.errors import UnsupportedError
from warpring.formats import FORMATS
from warpring.kernels import stream
from warpring.kernels.stream import Config, alone, config_for, kernel_specs, run_of, shrink, split_of, together
from warpring.kernels.stream_layout import pack_stream_experts, to_stream, to_tile
from warpring.layout import RECORD_BYTES, pack_experts
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import KERNEL_DIR, compile_kernel

GPU = pytest.mark.gpu
EMULATED = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
#: What ptxas may keep in local memory, for experts that more than 8 pairs want; the loops of fewer hold none.
MAX_SPILL_BYTES = 96
QWEN = (2048, 768, 128)
#: hidden, intermediate, experts, topk of the emulated layers: 5 records a warp, partial blocks of 128.
SHAPE = (160, 96, 6, 3)
#: One staged column, the ring of one stage; and two tiles of staged columns.
TIGHT = Config(1, 128, 1, 1, 1, 128, 3, 1, 300, 1, 64)
WIDE = Config(2, 96, 3, 16, 1, 128, 5, 2, 5000, 8, 512, early=True)


# ---- layout and configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_layout_has_an_exact_inverse(format: str) -> None:
    packed = pack_experts(make_inputs(1, 64, 96, 3, 1, format=format, seed=1).experts)
    there = to_stream(packed)
    for before, moved, back in zip(
        (packed.w13, packed.w2), (there.w13, there.w2), (to_tile(there).w13, to_tile(there).w2), strict=True
    ):
        assert torch.equal(before.records, back.records)
        assert torch.equal(before.records, moved.records) == (format not in ("mxfp4", "nvfp4"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_records", [1, 2, 3, 5, 11, 13, 24, 64, 90, 128, 160, 224, 448])
def test_work_is_divided_evenly(format: str, num_records: int) -> None:
    record = RECORD_BYTES[format]
    split, chunks = split_of(num_records, record)
    run, left = divmod(num_records, split * chunks)
    assert left == 0
    assert 1 <= run <= 16
    assert split + 2 <= 16
    assert num_records % run_of(num_records, record, 4352) == 0
    if num_records >= 24:
        assert split >= 4


@pytest.mark.parametrize("hidden", [2048, 2880, 1408])
@pytest.mark.parametrize("format", FORMATS)
def test_what_shall_fit_a_multiprocessor_fits(format: str, hidden: int) -> None:
    """Both kernels of few pairs, two CTAs of gate_up of many; but never two where one is wanted."""
    sizes = format, hidden, 768, 128, 8
    split, _ = split_of(hidden // 32, RECORD_BYTES[format])
    threads = 32 * (split + 2)
    for num_tokens in (1, 2, 4, 16):
        config = together(*sizes, num_tokens)
        smem = stream.gate_up_smem(format, hidden, 128, config)
        assert smem + stream.down_smem(format, 768, 128, config) + 2048 <= stream.SM_SMEM_BYTES
        assert threads * config.gate_up_registers + 32 * config.down_warps * config.down_registers <= 65536
        assert 2 * (smem + 1024) > stream.SM_SMEM_BYTES  # one multiprocessor would have twice the work
        assert config_for(*sizes, num_tokens) == config
    config = config_for(*sizes, 64)
    assert config.gate_up_ctas == 2
    assert 2 * threads * config.gate_up_registers <= 65536
    assert 2 * (stream.gate_up_smem(format, hidden, 128, config) + 1024) <= stream.SM_SMEM_BYTES
    assert 32 * config.down_warps * config.down_ctas * config.down_registers <= 65536
    assert config.down_ctas * (stream.down_smem(format, 768, 128, config) + 1024) <= stream.SM_SMEM_BYTES


def test_configurations_shrink_until_they_fit_or_say_that_nothing_does() -> None:
    large = alone("bf16", 14336, 14336, 8, 2, 64)
    assert stream.gate_up_smem("bf16", 14336, 8, large) <= stream.SM_SMEM_BYTES // large.gate_up_ctas - 1024
    wanted = Config(1, 128, 6, 16, 1, 128, 16, 9, 70000, 8)
    with pytest.raises(UnsupportedError, match="fit shared memory"):
        shrink(wanted, "bf16", 32, 2176, 1024)


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_compile_within_their_budget(format: str, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    configs = [together(format, *QWEN, 8, 1)]
    if arch == "sm_90a":
        configs += [together(format, *QWEN, 8, 16), alone(format, *QWEN, 8, 32)]
    for config in configs:
        specs = kernel_specs(format, *QWEN, 8, torch.int64, "silu", config)
        for spec, registers in zip(specs.all(), (config.gate_up_registers, config.down_registers), strict=True):
            cubin = compile_kernel(spec, arch)
            assert cubin.registers <= registers
            assert cubin.spill_bytes <= MAX_SPILL_BYTES
            assert cubin.smem_bytes + spec.dynamic_smem_bytes <= stream.CTA_SMEM_BYTES


def test_odd_sizes_compile_and_agree_on_shared_memory() -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    for sizes in [(96, 192, 5, 2), (32, 32, 1, 1), (2880, 2880, 32, 4), (64, 96, 1024, 32), (7168, 2048, 256, 8)]:
        for num_tokens in (1, 16):
            config = config_for("mxfp4", *sizes, num_tokens)
            for spec in kernel_specs("mxfp4", *sizes, torch.int32, "gelu_tanh", config).all():
                assert compile_kernel(spec, "sm_90a").code[:4] == b"\x7fELF"


# ---- values, emulated ------------------------------------------------------------------------------------------------


def emulated(
    inputs: Inputs,
    config: Config | None = None,
    *,
    packed: PackedExperts | None = None,
    seed: int = 0,
    num_sms: int = 3,
    directory: Path = KERNEL_DIR,
) -> torch.Tensor:
    """The layer on CPU tensors that end where the next access faults."""
    packed = pack_stream_experts(inputs.experts) if packed is None else packed

    def guard(matrix: stream.PackedMatrix) -> stream.PackedMatrix:
        return matrix.map(guarded)

    packed = replace(packed, w13=guard(packed.w13), w2=guard(packed.w2))
    x, topk_idx, topk_weights = (guarded(t) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    out = guarded(torch.full_like(inputs.x, torch.nan))
    with emulated_gpu(stream, seed=seed, num_sms=num_sms, directory=directory):
        stream.moe_stream(x, packed, topk_idx, topk_weights, out, config)
    return out


@EMULATED
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_bits(format: str) -> None:
    """The error is that of its roundings; no bit depends on configuration, order of threads, batch, CTAs."""
    inputs = make_inputs(13, *SHAPE, format=format, bias=True, seed=3)
    whole = emulated(inputs)
    check_against_exact(whole, inputs)
    for seed in range(1, 4):
        assert torch.equal(emulated(inputs, seed=seed, num_sms=seed), whole)
    assert torch.equal(emulated(inputs, TIGHT, seed=5), whole)
    assert torch.equal(emulated(inputs, WIDE, seed=6), whole)
    for rows in (slice(0, 1), slice(12, 13), slice(2, 7)):
        assert torch.equal(emulated(rows_of(inputs, rows), seed=rows.start), whole[rows])


@EMULATED
def test_several_chunks_a_panel_and_runs_aligned_to_scale_blocks() -> None:
    """2048 columns of fp8_block are two chunks of four records a warp: scales are requested ahead of the weights."""
    inputs = make_inputs(3, 2048, 128, 3, 2, format="fp8_block", seed=6)
    assert split_of(64, RECORD_BYTES["fp8_block"]) == (8, 2)
    check_against_exact(emulated(inputs, seed=3), inputs)


@EMULATED
def test_the_same_expert_twice_in_the_only_token_and_no_expert_at_all() -> None:
    inputs = make_inputs(5, *SHAPE, bias=True, seed=14)
    one = Inputs(inputs.x[:1], inputs.experts, torch.tensor([[0, 3, 3]]), inputs.topk_weights[2:3])
    check_against_exact(emulated(one, together("mxfp8", *SHAPE[:3], 3, 1)), one)
    nobody = torch.full_like(inputs.topk_weights, torch.nan)
    assert (emulated(Inputs(inputs.x, inputs.experts, inputs.topk_idx * 0 - 1, nobody)) == 0).all()


@EMULATED
@pytest.mark.parametrize("format", ["nvfp4", "fp8_block"])
def test_tiles_of_every_width(format: str) -> None:
    """All tokens of a batch may want one expert: 8, 16, 32 and 64 columns at once, full and not, staged and not."""
    inputs = make_inputs(64, *SHAPE, format=format, seed=17)
    inputs.topk_idx[:, 0] = 4
    inputs.topk_idx[:, 1] = torch.arange(64) % 3
    inputs.topk_idx[:, 2] = 3 + 2 * (torch.arange(64) % 2)
    whole = emulated(inputs, seed=1)
    check_against_exact(whole, inputs)
    assert torch.equal(emulated(inputs, WIDE, seed=2), whole)
    for count in (8, 9, 16, 17, 33):
        some = rows_of(inputs, slice(0, count))
        assert torch.equal(emulated(some, seed=count), whole[:count])
        assert torch.equal(emulated(some, WIDE, seed=count), whole[:count])


@EMULATED
@pytest.mark.parametrize("num_tokens", [65, 172])
def test_more_pairs_of_an_expert_than_one_tile_and_than_one_launch(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, *SHAPE, format="mxfp4", seed=13)
    inputs.topk_idx[:] = torch.tensor([1, 2, 4])
    inputs.topk_idx[0] = 1  # with three pairs of one token
    whole = emulated(inputs, seed=1)
    check_against_exact(whole, inputs)
    assert torch.equal(emulated(rows_of(inputs, slice(1, 4))), whole[1:4])


#: File, what is taken out of it, and which of its occurrences.
MUTATIONS = {
    "weights of gate_up read before they have arrived": ("stream_gate_up.cu", "wait(smem_address(&smem.full", 0),
    "a stage of gate_up overwritten before it is read": ("stream_gate_up.cu", "wait(smem_address(&smem.empty", 0),
    "shares added before they are all there": ("stream_gate_up.cu", "wait(smem_address(&smem.parts_full", 0),
    "a slot of shares overwritten before it is read": ("stream_gate_up.cu", "wait(smem_address(&smem.parts_empty", 0),
    "staged x read before it is all there": ("stream_gate_up.cu", "__syncwarp();", 0),
    "routing read before it is there": ("stream_common.cuh", "__syncthreads();", 0),
    "weights of down read before they have arrived": ("stream_down.cu", "wait(ring.smem_full", 0),
    "activations read before gate_up has ended": ("stream_down.cu", "pdl_wait();", 0),
    "dot products read before they are all there": ("stream_down.cu", "__syncthreads();", 0),
}


@EMULATED
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_missing_synchronisation_does_not_pass(mutation: str, tmp_path: Path) -> None:
    """The real kernels with one barrier or wait taken out: some order of threads shows it."""
    name, removed, index = MUTATIONS[mutation]
    for path in (*KERNEL_DIR.glob("stream*.cu"), *KERNEL_DIR.glob("*.cuh")):
        (tmp_path / path.name).write_text(path.read_text())
    lines = re.sub(r"//.*", "", (KERNEL_DIR / name).read_text()).split("\n")
    found = [i for i, line in enumerate(lines) if removed in line]
    lines[found[index]] = lines[found[index]][: lines[found[index]].index(removed)]
    (tmp_path / name).write_text("\n".join(lines))
    inputs = make_inputs(9, 512, *SHAPE[1:], format="mxfp4", seed=18)  # two records a warp: lanes share what they stage
    config = replace(TIGHT, gate_up_columns=8, down_columns=8, gate_up_stages=2, down_stages=2)
    expected = emulated(inputs, config)
    for seed in range(16):
        try:
            y = emulated(inputs, config, seed=seed, num_sms=1, directory=tmp_path)
        except EmulationError:
            return
        if not torch.equal(y, expected):
            return
    pytest.fail(f"no order of threads shows it: {mutation}")


# ---- values, on a GPU ------------------------------------------------------------------------------------------------


def run(inputs: Inputs, config: Config | None = None, packed: PackedExperts | None = None) -> torch.Tensor:
    packed = pack_stream_experts(inputs.experts) if packed is None else packed
    out = torch.full_like(inputs.x, torch.nan)
    stream.moe_stream(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out, config)
    return out


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
def test_bits_depend_on_nothing_but_the_token(format: str) -> None:
    inputs = make_inputs(64, 160, 96, 3, 2, format=format, seed=12, device="cuda")
    packed = pack_stream_experts(inputs.experts)
    whole = run(inputs, packed=packed)
    for config in (None, TIGHT, WIDE):
        assert torch.equal(whole, run(inputs, config, packed))
    for size in (1, 7, 12, 30):
        rows = slice(64 - size, 64)
        assert torch.equal(run(rows_of(inputs, rows), packed=packed), whole[rows])


@GPU
def test_layers_chained_without_synchronising_see_each_others_results() -> None:
    inputs = make_inputs(3, 160, 160, 8, 3, seed=21, device="cuda")
    packed = pack_stream_experts(inputs.experts)

    def chain(synchronize: bool) -> torch.Tensor:
        x = inputs.x
        for _ in range(30):
            x = run(Inputs(x, inputs.experts, inputs.topk_idx, inputs.topk_weights), packed=packed)
            if synchronize:
                torch.cuda.synchronize()
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().bfloat16()
        return x

    expected = chain(synchronize=True)
    assert expected.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(synchronize=False), expected)


def test_experts_are_packed_for_the_stream_kernels_as_for_the_tile_kernels() -> None:
    experts: Experts = make_inputs(1, 64, 64, 2, 1, format="nvfp4", seed=2).experts
    assert torch.equal(pack_stream_experts(experts).w2.records, to_stream(pack_experts(experts)).w2.records)
