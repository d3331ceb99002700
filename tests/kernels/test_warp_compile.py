"""Every warp kernel compiles for every GPU we name, without a GPU, within its register budget and without a spill."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from warpring import GELU_TANH, SILU, Experts
from warpring.formats import FORMATS, QuantizedTensor, get_format
from warpring.kernels.warp import kernel_specs
from warpring.runtime.device import TESTED_ARCHS
from warpring.runtime.jit import compile_kernel

pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")

# (hidden, intermediate, topk): the shapes of docs/performance.md, and sizes that fill no lane evenly.
SHAPES = [(2048, 768, 8), (2880, 2880, 4), (96, 192, 2), (2048, 512, 32)]
HOPPER_SHAPES = [(7168, 2048, 8), (4096, 14336, 2)]
# 256 threads a CTA; at 128 registers two CTAs still fit an SM.
MAX_REGISTERS = 128


def empty_experts(hidden: int, intermediate: int, format: str, activation=SILU) -> Experts:
    """Experts without values: what the kernel is compiled for is in their shape alone."""
    fmt = get_format(format)

    def stored(*shape: int) -> QuantizedTensor:
        probe = fmt.quantize(torch.zeros(1, 32, 32))
        scale_shape = fmt.scale_shape(shape)
        return QuantizedTensor(
            format,
            shape,
            torch.empty(fmt.data_shape(shape), dtype=probe.data.dtype),
            None if probe.scale is None else torch.empty(scale_shape, dtype=probe.scale.dtype),
            None if probe.global_scale is None else torch.empty(shape[:-2]),
        )

    return Experts(stored(1, 2, intermediate, hidden), stored(1, hidden, intermediate), activation)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "arch"), [*product(SHAPES, TESTED_ARCHS), *product(HOPPER_SHAPES, ["sm_90a"])], ids=str
)
def test_kernels_compile_without_spills(shape: tuple[int, int, int], format: str, arch: str) -> None:
    hidden, intermediate, topk = shape
    experts = empty_experts(hidden, intermediate, format)
    for spec in kernel_specs(experts, topk, torch.int64).all():
        cubin = compile_kernel(spec, arch)
        assert cubin.code[:4] == b"\x7fELF"
        assert cubin.spill_bytes == 0
        assert 0 < cubin.registers <= MAX_REGISTERS
        assert cubin.smem_bytes == 0  # neither staging nor reduction through shared memory


def test_index_type_and_gate_function_are_part_of_the_kernel() -> None:
    silu = kernel_specs(empty_experts(64, 64, "bf16"), 2, torch.int64)
    assert silu != kernel_specs(empty_experts(64, 64, "bf16"), 2, torch.int32)
    gelu = kernel_specs(empty_experts(64, 64, "bf16", GELU_TANH), 2, torch.int64)
    assert silu.gate_up != gelu.gate_up
    assert silu.down_deep == gelu.down_deep  # the down projection has no activation
    for spec in gelu.all():
        assert compile_kernel(spec, "sm_90a").spill_bytes == 0
