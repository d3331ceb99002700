"""Kernel source -> cubin: NVRTC through `cuda.core`, with a disk cache that is safe to share.

Compiling needs no GPU and no nvcc. A cache entry is keyed by everything that decides its bytes: the source, every
header beside it, the macros, the architecture, the options and the compiler's version. Entries are written to a
temporary file and renamed, under a lock a key, so that processes that start together compile once; an entry whose
checksum does not match is compiled again, with a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import tempfile
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from warpring.errors import CompileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

#: Held while cuda.core is imported: two threads that import it at once find a half-made module.
IMPORT_LOCK = threading.Lock()

KERNEL_DIR = Path(__file__).parent.parent / "kernels"
_SCHEMA = b"warpring-cubin-1\n"
_PTXAS_OPTIONS = ("-v", "--warn-on-spills")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile: a source file, its entry point and the macros that specialise it.

    Attributes:
        source: file name in `warpring/kernels`, e.g. "warp_gate_up.cu".
        entry: the `extern "C"` kernel in it.
        macros: (name, value) pairs; an empty value defines the name alone.
        dynamic_smem_bytes: shared memory a CTA that the launch asks for, beside what the kernel declares.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, str], ...] = ()
    dynamic_smem_bytes: int = 0


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel and what ptxas said of it.

    Attributes:
        spec: what was compiled.
        arch: e.g. "sm_90a".
        code: the cubin.
        registers: registers a thread.
        spill_bytes: bytes of spill stores and loads; docs/kernels.md has a table of them.
        smem_bytes: static shared memory a CTA.
    """

    spec: KernelSpec
    arch: str
    code: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    smem_bytes: int


def cache_dir() -> Path:
    """Where cubins are kept: $WARPRING_CACHE, else $XDG_CACHE_HOME/warpring, else ~/.cache/warpring."""
    if override := os.environ.get("WARPRING_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warpring"


@cache
def compiler_version() -> str:
    """Version of the NVRTC library that compiles, e.g. "13.0.88"; UnsupportedError where there is none."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"compiling kernels needs NVRTC and cuda.core; {error}. Install them with: pip install 'warpring[cuda]'"
        ) from error
    if int(result):
        raise CompileError(f"nvrtcVersion failed with {result}. Reinstall nvidia-cuda-nvrtc.")
    return f"{major}.{minor}"


def compile_kernel(spec: KernelSpec, arch: str) -> Cubin:
    """The cubin of `spec` for `arch`, from the cache or compiled now.

    Args:
        spec: what to compile.
        arch: "sm_90a", "sm_100a", "sm_103a" or another that NVRTC knows.

    Raises:
        CompileError: the compiler refused; the message holds its log.
        UnsupportedError: no NVRTC or cuda.core is installed.
    """
    path = _path(spec, arch)
    if (found := _read(path, spec, arch)) is not None:
        return found
    with _locked(path):
        if (found := _read(path, spec, arch)) is None:
            found = _compile(spec, arch)
            _write(path, found)
    return found


def is_cached(spec: KernelSpec, arch: str) -> bool:
    """Whether `compile_kernel` would find a whole cubin in the cache."""
    return _read(_path(spec, arch), spec, arch) is not None


def _path(spec: KernelSpec, arch: str) -> Path:
    """Where the cache keeps a cubin."""
    return cache_dir() / f"{spec.entry}-{arch}-{_key(spec, arch)[:32]}.cubin"


def _sources(spec: KernelSpec) -> list[Path]:
    """The source and every header it can include, in a fixed order."""
    return [KERNEL_DIR / spec.source, *sorted(KERNEL_DIR.glob("*.cuh"))]


def _key(spec: KernelSpec, arch: str) -> str:
    digest = hashlib.sha256(_SCHEMA)
    parts = [spec.source, spec.entry, arch, compiler_version(), repr(_PTXAS_OPTIONS), repr(sorted(spec.macros))]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in _sources(spec):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(spec: KernelSpec, arch: str) -> Cubin:
    compiler_version()  # names the missing package before cuda.core's own ImportError would
    with IMPORT_LOCK:
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=spec.source,
        arch=arch,
        std="c++17",
        include_path=str(KERNEL_DIR),
        define_macro=[(name, value) if value else name for name, value in spec.macros] or None,
        ptxas_options=list(_PTXAS_OPTIONS),
        no_cache=True,  # NVRTC keeps code with the driver's, and says nothing of what it finds there
    )
    source = (KERNEL_DIR / spec.source).read_text()
    try:
        program = Program(source, "c++", options)
        code = bytes(program.compile("cubin", logs=log).code)
        program.close()
    except Exception as error:  # cuda.core raises its own types, which differ between its versions
        raise CompileError(f"{spec.entry} ({spec.source}, {arch}) did not compile: {error}") from error
    return Cubin(spec, arch, code, *_resources(spec, arch, log.getvalue()))


def _resources(spec: KernelSpec, arch: str, log: str) -> tuple[int, int, int]:
    """(registers, spill bytes, static shared memory) from the log of `ptxas -v`."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise CompileError(
            f"{spec.entry} ({arch}): the compiler did not report registers and spills. If its log, below, is empty, it "
            f"found the code in a cache of its own: set CUDA_CACHE_DISABLE=1.\n{log}"
        )
    smem = re.search(r"(\d+) bytes smem", log)
    return int(registers[1]), int(spills[1]) + int(spills[2]), int(smem[1]) if smem else 0


def _read(path: Path, spec: KernelSpec, arch: str) -> Cubin | None:
    """The entry at `path`; None where there is none, or where it is damaged (with a warning)."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    try:
        if not blob.startswith(_SCHEMA):
            raise ValueError("wrong header")
        header, code = blob[len(_SCHEMA) :].split(b"\n", 1)
        meta = json.loads(header)
        if hashlib.sha256(code).hexdigest() != meta["sha256"]:
            raise ValueError("wrong checksum")
        return Cubin(spec, arch, code, meta["registers"], meta["spill_bytes"], meta["smem_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        warnings.warn(f"warpring: cache entry {path} is damaged ({error}); compiling it again", stacklevel=3)
        return None


def _write(path: Path, cubin: Cubin) -> None:
    """Put the entry in place at once; a cache that cannot be written costs a warning, not the result."""
    meta = {
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "smem_bytes": cubin.smem_bytes,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
            handle.write(_SCHEMA + json.dumps(meta).encode() + b"\n" + cubin.code)
        os.replace(handle.name, path)
    except OSError as error:
        warnings.warn(
            f"warpring: cannot keep the compiled kernel at {path} ({error}); it will be compiled again next time. "
            "Set WARPRING_CACHE to a writable folder.",
            stacklevel=3,
        )


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the key's lock file, where the folder can be written at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below, after the yield)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        handle.close()
