"""The grouped path's activation kernel, and the whole path with the emulator in place of a GPU."""

from __future__ import annotations

import pytest
import torch
from emulator import emulated_gpu, guarded, unusable_reason
from moe_inputs import make_inputs, rms_rel_error

from warpring import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu, grouped, moe_exact
from warpring.formats import FORMATS
from warpring.kernels import expand, grouped_activate
from warpring.kernels.grouped_activate import activate, kernel_spec
from warpring.layout import PackedMatrix, pack_experts
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import compile_kernel

emulated = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
EXPERTS, INTERMEDIATE = 5, 96
ACTIVATIONS = [SILU, GELU_TANH, gpt_oss_swiglu(limit=0.8), clipped_swiglu(0.5)]


def run(
    activation: Activation, index_dtype: torch.dtype, bias: bool, first: int, cols: int, *, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(act as the kernel leaves it, act in FP64) of 13 rows, the last 3 of no expert; unwritten places are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gate_up, biases = randn(13, 2, cols).bfloat16() * 3, randn(EXPERTS, 2, INTERMEDIATE)
    expert = torch.randint(0, EXPERTS, (13,), generator=generator).sort().values.to(index_dtype)
    expert[10:] = EXPERTS
    order, weights = torch.randperm(13, generator=generator), torch.rand(13, generator=generator)
    weights[order[10:]] = torch.nan
    act = guarded(torch.full((14, INTERMEDIATE), torch.nan).bfloat16())
    tensors = [guarded(t) for t in (gate_up, order, expert, weights, biases)]
    with emulated_gpu(grouped_activate, seed=seed):
        activate(*tensors[:4], tensors[4] if bias else None, EXPERTS, activation, first, act)
    exact = gate_up.double()
    if bias:
        exact = exact + biases[:, :, first : first + cols].double()[expert.long().clamp(max=EXPERTS - 1)]
    return act, activation(exact[:, 0], exact[:, 1]) * weights[order].double()[:, None]


@emulated
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_activated_weighted_and_rounded_once(
    activation: Activation, bias: bool, index_dtype: torch.dtype
) -> None:
    act, exact = run(activation, index_dtype, bias, 0, INTERMEDIATE, seed=3)
    error = (act[:10].double() - exact[:10]).abs()
    # Half a unit of BF16's last place, and what FP32 leaves uncertain of it.
    assert bool((error <= exact[:10].abs() * 2**-8 * 1.01 + 1e-6).all())
    assert act[10:].isnan().all(), "rows of no expert are not written"


@emulated
@pytest.mark.parametrize(("first", "cols"), [(0, 32), (32, 64), (64, 32)])
def test_a_slice_goes_to_its_own_columns(first: int, cols: int) -> None:
    act, exact = run(gpt_oss_swiglu(), torch.int64, True, first, cols, seed=4)
    assert rms_rel_error(act[:10, first : first + cols], exact[:10]) < 2**-9
    others = [column for column in range(INTERMEDIATE) if not first <= column < first + cols]
    assert act[:, others].isnan().all()


@emulated
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_whole_path_runs_through_its_kernels(format: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with the emulator in place of our kernels and torch's CPU form of the grouped GEMM."""
    activation = gpt_oss_swiglu() if packed else SILU
    inputs = make_inputs(21, 160, 288, 4, 3, format=format, activation=activation, bias=packed, seed=5)
    inputs.topk_idx[:, 0] = 1
    inputs.topk_idx[3:7, 1] = torch.tensor([-1, 4, -1, 1 << 20])
    inputs.topk_weights[3:7, 1] = torch.nan
    called: list[str] = []

    def emulate(name: str, face, function):
        def call(*args: object) -> object:
            called.append(name)
            with emulated_gpu(face):
                return function(*args)

        monkeypatch.setattr(grouped, name, call)

    emulate("expand_slice", expand, expand.expand_slice)
    emulate("activate", grouped_activate, activate)
    monkeypatch.setattr(grouped, "_products", grouped._products_by_library)
    monkeypatch.setattr(grouped, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(grouped, "_has_kernels", lambda device: True)
    monkeypatch.setattr(grouped, "_has_gemms", lambda device: False)  # a GPU without GEMMs of our own
    out = torch.full_like(inputs.x, torch.nan)
    layer = pack_experts(inputs.experts) if packed else inputs.experts
    grouped.moe_grouped(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, out)
    # Slices of 128 rows: 288 neurons make 3, 160 outputs 2.
    expected = {"activate": 1} if format == "bf16" and not packed else {"expand_slice": 5, "activate": 3}
    assert {name: called.count(name) for name in set(called)} == expected
    known = torch.where(inputs.topk_idx >= 4, -1, inputs.topk_idx)
    exact = moe_exact(inputs.x, inputs.experts, known, inputs.topk_weights)
    assert rms_rel_error(out, exact) < 10**0.5 * 2**-9
    assert isinstance(layer.w13, PackedMatrix) == packed


@pytest.mark.parametrize("arch", TESTED_ARCHS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("gate_fn", ["silu", "gelu_tanh"])
def test_kernel_compiles_without_spills(arch: str, index_dtype: torch.dtype, gate_fn: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    cubin = compile_kernel(kernel_spec(index_dtype, gate_fn), arch)
    assert cubin.spill_bytes == 0
    assert 0 < cubin.registers <= 64
    assert cubin.smem_bytes == 0
