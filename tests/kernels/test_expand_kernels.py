"""The expanding kernels: compiled for every GPU, and run by the emulator against `warpring.expand`, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator import emulated_gpu, guarded, unusable_reason
from moe_inputs import make_inputs

from warpring.expand import expand
from warpring.formats import FORMATS, QuantizedTensor
from warpring.kernels import expand as kernels
from warpring.kernels.expand import expand_slice, panels_spec, rows_spec
from warpring.layout import PackedMatrix, pack
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import compile_kernel

QUANTISED = [name for name in FORMATS if name != "bf16"]
emulated = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
#: hidden, intermediate: partial blocks of 128 columns and rows, records that fill no stage.
SIZES = (160, 288)
EXPERTS = 4


def stored_of(format: str, matrix: str, *, seed: int) -> QuantizedTensor:
    experts = make_inputs(1, SIZES[0], SIZES[1], EXPERTS, 1, format=format, seed=seed).experts
    return experts.w13 if matrix == "w13" else experts.w2


def run(
    weights: QuantizedTensor | PackedMatrix, format: str, rows: tuple[int, int, int], ends: list[int]
) -> torch.Tensor:
    """`expand_slice` on the emulator, every tensor guarded; what it leaves unwritten is NaN."""
    kept, counts = weights.map(guarded), guarded(torch.tensor(ends, dtype=torch.int32))
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(kernels):
        patch.setattr(torch, "empty", lambda *size, **kwargs: guarded(empty(*size, **kwargs).fill_(torch.nan)))
        out = expand_slice(kept, format, *rows, counts)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    keep = ~b.isnan()
    return bool((a.isnan() == b.isnan()).all()) and torch.equal(a.view(torch.int16)[keep], b.view(torch.int16)[keep])


@emulated
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_slices_have_the_bits_of_the_stored_weights(format: str, matrix: str, packed: bool) -> None:
    if format == "bf16" and not packed:
        pytest.skip("row-major BF16 is multiplied in place")
    stored = stored_of(format, matrix, seed=1)
    num_rows = stored.shape[-2]
    dense = expand(stored)
    weights = pack(stored) if packed else stored
    slices = [(0, num_rows), (128, num_rows)]
    for first, last in slices:
        out = run(weights, format, (num_rows, first, last), [1, 2, 3, 4])
        assert same_bits(out, dense[..., first:last, :].flatten(1, -2))


@emulated
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_experts_without_rows_are_left_unwritten(packed: bool) -> None:
    stored = stored_of("mxfp8", "w13", seed=2)
    out = run(pack(stored) if packed else stored, "mxfp8", (288, 0, 288), [0, 3, 3, 9])
    dense = expand(stored).flatten(1, -2)
    assert out[[0, 2]].isnan().all()
    assert same_bits(out[[1, 3]], dense[[1, 3]])


@emulated
@pytest.mark.parametrize("format", QUANTISED)
def test_every_code_and_scale_has_its_value(format: str) -> None:
    """NaN codes and scales too; the tile layout refuses or widens NaNs, see test_layout.py."""
    stored = stored_of(format, "w2", seed=3)
    codes = torch.arange(stored.data.numel()).to(torch.uint8)
    stored.data.view(torch.uint8).copy_(codes.view(stored.data.shape))
    if format in ("mxfp8", "mxfp4", "nvfp4"):
        scales = torch.arange(stored.scale.numel()).to(torch.uint8)
        stored.scale.view(torch.uint8).copy_(scales.view(stored.scale.shape))
    num_rows = stored.shape[-2]
    assert same_bits(run(stored, format, (num_rows, 0, num_rows), [1, 2, 3, 4]), expand(stored))


@emulated
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_nan_and_large_scales_of_packed_weights_keep_their_value(format: str) -> None:
    stored = stored_of(format, "w2", seed=4)
    moved = replace(stored, scale=(stored.scale.int() + 100).to(torch.uint8))
    moved.scale[1, 5, 2] = 255
    num_rows = stored.shape[-2]
    assert same_bits(run(pack(moved), format, (num_rows, 0, num_rows), [1, 2, 3, 4]), expand(moved))


@emulated
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_slabs_have_the_bits_of_the_stored_weights(matrix: str) -> None:
    """Blocks that fill no stage, rows that fill no CTA, NaN, and scales from one end to the other."""
    stored: QuantizedTensor = getattr(make_inputs(1, 320, 192, EXPERTS, 1, format="mxfp4", seed=5).experts, matrix)
    stored.scale[1, ..., 5, 1] = 255
    stored.scale[2, ..., 6, 0] = 253
    stored.scale[2, ..., 7, 1] = 0
    num_rows = stored.shape[-2]
    for first, last in ((0, num_rows), (128, num_rows), (128, 192)):
        out = run(pack(stored, in_slabs=True), "mxfp4", (num_rows, first, last), [1, 2, 3, 4])
        assert same_bits(out, expand(stored)[..., first:last, :].flatten(1, -2))


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("format", [*FORMATS, "mxfp4_slabs"])
@pytest.mark.parametrize("cols", [2048, 2880])
def test_kernels_compile_without_spills(arch: str, format: str, cols: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    specs = [panels_spec(format, cols, 1), panels_spec(format, cols, 2)]
    specs += [rows_spec(format, cols)] if format in QUANTISED else []
    for spec in specs:
        cubin = compile_kernel(spec, arch)
        assert cubin.spill_bytes == 0
        # Memory-bound: half of an SM's 2048 threads at the least.
        assert 0 < cubin.registers <= 64
        assert cubin.smem_bytes <= 48 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_gpu_gives_the_bits_of_the_stored_weights(format: str, packed: bool) -> None:
    if format == "bf16" and not packed:
        pytest.skip("row-major BF16 is multiplied in place")
    for matrix in ("w13", "w2"):
        stored = stored_of(format, matrix, seed=6)
        num_rows = stored.shape[-2]
        weights = (pack(stored) if packed else stored).map(lambda t: t.cuda())
        ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device="cuda")
        out = expand_slice(weights, format, num_rows, 128, num_rows, ends)
        assert same_bits(out.cpu(), expand(stored)[..., 128:, :].flatten(1, -2))
