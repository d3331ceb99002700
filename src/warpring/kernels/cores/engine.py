"""LLVM IR -> machine code of this processor: compiled once by llvmlite, kept on disk, loaded in a few milliseconds.

Entries lie beside the CUDA kernels' (see `warpring.runtime.jit.cache_dir`) and are keyed by all that decides their
bytes: our sources, the versions of llvmlite and LLVM, the processor and its features, the format, the gate function.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from warpring.errors import CompileError, UnsupportedError
from warpring.runtime.jit import cache_dir

FUNCTIONS = ("plan", "gate_up", "down")
_SCHEMA = b"warpring-cores-1\n"
#: What the kernels need of an x86 processor: Haswell (2013) and Zen have all of it.
_X86_FEATURES = ("avx2", "fma", "f16c")


@dataclass(frozen=True)
class Layer:
    """Machine code of one format and gate function: the addresses of its functions."""

    plan: int
    gate_up: int
    down: int


@cache
def unusable_reason() -> str | None:
    """Why the kernels cannot run here, with the remedy; None where they can."""
    try:
        llvm = _llvm()
    except ImportError as error:
        return f"llvmlite is missing ({error}); install it with: pip install 'warpring[cpu]'"
    machine = platform.machine().lower()
    if sys.byteorder != "little" or machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"there are no kernels for {machine}"
    if machine in ("x86_64", "amd64"):
        features = llvm.get_host_cpu_features()
        missing = [name for name in _X86_FEATURES if not features.get(name)]
        if missing:
            return f"this processor lacks {', '.join(missing)}"
    return None


def compiler_version() -> str:
    """llvmlite's and LLVM's version."""
    llvm = _llvm()
    return (
        f"llvmlite {importlib.import_module('llvmlite').__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"
    )


def processor() -> str:
    """The processor that kernels are compiled for, and the widest instructions that they use."""
    llvm = _llvm()
    return f"{llvm.get_host_cpu_name()} ({'AVX-512' if llvm.get_host_cpu_features().get('avx512f') else 'no AVX-512'})"


@cache
def load_layer(format: str, gate_fn: str) -> Layer:
    """The functions of a format and gate function, from the disk or compiled now.

    Raises:
        UnsupportedError: they cannot run here.
        CompileError: LLVM refused them.
    """
    if (reason := unusable_reason()) is not None:
        raise UnsupportedError(f"path 'cores': {reason}. Use path 'reference'.")
    return link(machine_code(format, gate_fn), f"warpring_{format}_{gate_fn}")


def machine_code(format: str, gate_fn: str) -> bytes:
    """Object code for this processor, from the disk or compiled now."""
    path = cache_dir() / f"cores-{format}-{gate_fn}-{_key(format, gate_fn)[:32]}.o"
    code = _read(path)
    if code is None:
        code = compile_layer(format, gate_fn)
        _write(path, code)
    return code


def link(code: bytes, name: str) -> Layer:
    """Load object code, under a name that no other has."""
    builder = _llvm().JITLibraryBuilder().add_object_img(code)
    for function in FUNCTIONS:
        builder.export_symbol(function)
    try:
        library = builder.link(_jit(), name)
    except RuntimeError as error:
        raise CompileError(f"path 'cores': {name} does not load: {error}. Empty {cache_dir()}.") from error
    _libraries.append(library)
    return Layer(*(library[function] for function in FUNCTIONS))


def features() -> frozenset[str]:
    """LLVM's names of this processor's features."""
    return frozenset(name for name, there in _llvm().get_host_cpu_features().items() if there)


def compile_layer(format: str, gate_fn: str, *, assembly: bool = False) -> Any:
    """Object code for this processor (bytes), or its assembly (str)."""
    from warpring.kernels.cores.layer import build

    llvm = _llvm()
    say = sys.stderr.isatty()
    if say:
        print(f"warpring: compiling the CPU kernels of {format} (once) ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    machine = _target_machine()
    try:
        module = llvm.parse_assembly(str(build(format, gate_fn, features())))
        module.verify()
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        result = machine.emit_assembly(module) if assembly else machine.emit_object(module)
    except RuntimeError as error:
        raise CompileError(f"path 'cores': the kernels of {format} do not compile: {error}") from error
    if say:
        print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return result


#: Loaded code must outlive its callers.
_libraries: list[Any] = []


@cache
def _llvm() -> Any:
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def _jit() -> Any:
    return _llvm().create_lljit_compiler(_target_machine())


@cache
def _target_machine() -> Any:
    llvm = _llvm()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def _key(format: str, gate_fn: str) -> str:
    llvm = _llvm()
    digest = hashlib.sha256(_SCHEMA)
    parts = (format, gate_fn, compiler_version(), llvm.get_process_triple(), llvm.get_host_cpu_name())
    for part in (*parts, llvm.get_host_cpu_features().flatten()):
        digest.update(part.encode() + b"\0")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """The entry; None where there is none, or where it is damaged (with a warning)."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    header, _, code = blob.partition(b"\n\n")
    if header != _SCHEMA + hashlib.sha256(code).hexdigest().encode():
        warnings.warn(f"warpring: cache entry {path} is damaged; compiling it again", stacklevel=4)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Put the entry in place at once; a cache that cannot be written costs a warning, not the result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
            handle.write(_SCHEMA + hashlib.sha256(code).hexdigest().encode() + b"\n\n" + code)
        os.replace(handle.name, path)
    except OSError as error:
        warnings.warn(
            f"warpring: cannot keep the CPU kernels at {path} ({error}); they will be compiled again next time. "
            "Set WARPRING_CACHE to a writable folder.",
            stacklevel=4,
        )
