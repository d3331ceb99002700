"""What the assembler says of a kernel."""

from __future__ import annotations

import io

import pytest

from warpring.runtime.device import HOPPER
from warpring.runtime.jit import KERNEL_DIR, KernelSpec


def compile_log(spec: KernelSpec) -> str:
    """Its log of a kernel for Hopper, compiled anew."""
    core = pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")
    log = io.StringIO()
    options = core.ProgramOptions(
        arch=HOPPER, std="c++17", include_path=str(KERNEL_DIR),
        define_macro=[(n, v) if v else n for n, v in spec.macros],
        ptxas_options=["-v", "--warn-on-spills"], no_cache=True,
    )  # fmt: skip
    core.Program((KERNEL_DIR / spec.source).read_text(), "c++", options).compile("cubin", logs=log)
    return log.getvalue()
