"""Kernel sources on their way to a C++ compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulator import load, sources
from emulator.probes import HERE, needs_compiler
from warpring.runtime.jit import KERNEL_DIR, KernelSpec

TWINS = "".join((HERE / name).read_text() for name in ("ptx.hpp", "sync_ptx.hpp"))
pytestmark = needs_compiler


def test_assembly_goes_and_lines_stay() -> None:
    text = (
        "#pragma once\n// asm { }\nconstexpr int k[2] = {1, 2};\n"
        'template <int N>\n__device__ void f(int a = 3) {\n    asm volatile("x { ;");\n}\n'
        "struct S {\n    int g() { return 1; }\n};\n__device__ int f(float v) { return 2; }\n"
        "__shared__ float table[4][k[1]];\n"
    )
    made = sources.emulated(text, "x.cuh")
    assert made.count("\n") == text.count("\n")
    assert "asm volatile" not in made
    assert "using ::cuda_on_cpu::f;" in made  # an overload stays, and would hide the emulated one
    assert "struct S" in made
    assert "StaticShared<float[4][k[1]]" in made
    assert [function.name for function in sources.assembly_functions(text)] == ["f"]


def test_sources_that_cannot_be_emulated_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x\.cuh: inline assembly inside `struct S`"):
        sources.emulated('struct S {\n    void f() { asm("x"); }\n};\n', "x.cuh")
    with pytest.raises(ValueError, match=r"x.cuh:2: a declaration of shared memory"):
        sources.emulated("\n__shared__ int a, b;\n", "x.cuh")


def test_every_assembly_function_has_a_twin_of_its_signature(tmp_path: Path) -> None:
    checks: list[str] = []
    for header in sorted(KERNEL_DIR.glob("*.cuh")):
        functions = sources.assembly_functions(header.read_text())
        if functions:
            checks.append(f'#include "{header.name}"')
        for function in functions:
            if function.is_template:
                assert re.search(rf"\b{function.name}\b", TWINS), f"{header.name}: {function.name} has no twin"
                continue
            values = ", ".join(f"std::declval<{kind}>()" for kind in function.parameters)
            call = f"::cuda_on_cpu::{function.name}({values})"
            checks.append(f'static_assert(std::is_same_v<decltype({call}), {function.returns}>, "{header.name}");')
    assert len(checks) > 50
    (tmp_path / "twins.cu").write_text("\n".join([*checks, 'extern "C" __global__ void nothing() {}\n']))
    load(KernelSpec("twins.cu", "nothing"), tmp_path)


def test_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing.cu").write_text('extern "C" __global__ void nothing() {}\n')
    monkeypatch.setenv("WARPRING_EMULATOR_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(RuntimeError, match="must be yours"):
        load(KernelSpec("nothing.cu", "nothing"), tmp_path)
    tmp_path.chmod(0o700)
    load(KernelSpec("nothing.cu", "nothing"), tmp_path)
    assert len(list(tmp_path.glob("nothing-*.so"))) == 1
