"""Compiles the emulator and kernels for it, once each: libraries stay on disk under a hash of all that decides them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from emulator.sources import smem_alignment, write_emulated
from warpring.runtime.jit import KERNEL_DIR, KernelSpec

HERE = Path(__file__).parent
_RUNTIME = ("scheduler.cpp", "faults.cpp", "instructions.cpp", "wgmma.cpp")
#: No contraction: a product is rounded unless the kernel says fmaf, whatever the processor. Uninitialised locals get a
#: pattern, and what C++ leaves undefined but a GPU refuses (misaligned vectors) traps.
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-U_FORTIFY_SOURCE",
)
_KERNEL_FLAGS = (
    "-w",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
)


_ENTRY_HEAD = r'extern\s+"C"\s+__global__[^({;]*?(?:__(?:launch_bounds|maxnreg)__\s*\([^)]*\)\s*)?(\w+)\s*\('
_ENTRY = """\
extern "C" void cuda_on_cpu_entry_{0}(void* const* arguments) {{
    cuda_on_cpu::call_kernel(&cuda_on_cpu::kernel::{0}, arguments);
}}
extern "C" size_t cuda_on_cpu_argument_sizes_{0}(const size_t** sizes) {{
    return cuda_on_cpu::argument_sizes(&cuda_on_cpu::kernel::{0}, sizes);
}}
"""


@cache
def unusable_reason() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    if shutil.which("g++") is None:
        return "the emulator compiles kernels with g++, which is not installed"
    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    if not version or int(version.split(".")[0]) < 12:  # clang, which may go by that name, gives none
        return f"the emulator needs GNU g++ 12 or newer; g++ says {version or 'no version'}"
    return None


def cache_dir() -> Path:
    """Where libraries are kept: $WARPRING_EMULATOR_CACHE, else a folder of this user's in the temporary folder."""
    if override := os.environ.get("WARPRING_EMULATOR_CACHE"):
        return Path(override)
    return Path(tempfile.gettempdir()) / f"warpring-emulator-{os.getuid()}"


def _make_private(folder: Path) -> None:
    """Make the folder, and refuse one in which others could leave us code to load."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(
            f"{folder} must be yours, and writable by you alone. Set WARPRING_EMULATOR_CACHE to another."
        )


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for the emulator.

    Attributes:
        spec: what was compiled.
        library: the shared library; it holds line tables, so that faults can be placed.
        argument_sizes: bytes of each argument.
        static_smem_bytes: what its `__shared__` variables take.
        smem_alignment: what its dynamic shared memory is declared with.
    """

    spec: KernelSpec
    library: Path
    argument_sizes: tuple[int, ...]
    static_smem_bytes: int
    smem_alignment: int
    address: int = field(repr=False)


def _library(name: str, flags: list[str], files: list[Path], folder: str = "") -> Path:
    """What `g++ flags` makes, from the cache or compiled now.

    Args:
        name: of the file in the cache.
        flags: of the compiler; with `files`, they decide the result.
        files: sources and headers, as they are in the checkout.
        folder: a temporary folder that flags may name; its own name decides nothing.
    """
    digest = hashlib.sha256(_compiler().encode())
    for flag in flags:
        digest.update(flag.replace(folder, "").encode() + b"\0" if folder else flag.encode() + b"\0")
    for path in [*files, *sorted(HERE.glob("*.hpp"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    _make_private(cache_dir())
    library = cache_dir() / f"{name}-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=cache_dir()) as made_in:
        made = Path(made_in) / library.name
        done = subprocess.run(["g++", *flags, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ did not compile {name}:\n{done.stderr[:8000]}")
        os.replace(made, library)
    return library


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


@cache
def runtime() -> ctypes.CDLL:
    """The emulator itself."""
    sources = [HERE / name for name in _RUNTIME]
    library = _library("runtime", [*_FLAGS, "-Wall", "-Wextra", "-pthread", *map(str, sources), "-ldl"], sources)
    handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    handle.cuda_on_cpu_take_static_bytes.restype = ctypes.c_size_t
    return handle


def _needed(directory: Path, source: str) -> list[Path]:
    """The source and every header that it includes, directly or not; a header beside it comes before the project's."""
    found: list[Path] = []
    todo = [source]
    while todo:
        name = todo.pop()
        path = next((path for path in (directory / name, KERNEL_DIR / name) if path.exists()), None)
        if path is None or path in found:
            continue  # one that is missing is the compiler's to report, if the macros ask for it
        found.append(path)
        todo += re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M)
    return found


def _unit(source: Path, entry: str) -> str:
    """What the compiler gets: the source in a namespace, and ways into its kernels: those that no macro hides."""
    depth, visible = 0, ""
    for line in source.read_text().splitlines(keepends=True):
        depth += bool(re.match(r"\s*#\s*if", line)) - bool(re.match(r"\s*#\s*endif", line))
        visible += line if depth == 0 else ""
    entries = {*re.findall(_ENTRY_HEAD, visible), entry}
    return "\n".join(
        [
            '#include "sync_ptx.hpp"',
            "namespace cuda_on_cpu::kernel {",
            f'#include "{source.name}"',
            "}",
            *(_ENTRY.format(name) for name in sorted(entries)),
        ]
    )


@cache
def _open(library: Path) -> tuple[ctypes.CDLL, int]:
    """The library, loaded, and the bytes of its `__shared__` variables.

    Kept for good: a library stays loaded, and says but once, when it is, what it takes.
    """
    handle = ctypes.CDLL(str(library))
    return handle, int(runtime().cuda_on_cpu_take_static_bytes())


@lru_cache(maxsize=256)
def load(spec: KernelSpec, directory: Path = KERNEL_DIR) -> Kernel:
    """The kernel of `spec`, compiled from its source in `directory`, together with others of the file."""
    runtime()
    sources = _needed(directory, spec.source)
    with tempfile.TemporaryDirectory() as folder:
        write_emulated(sources, Path(folder))
        unit = Path(folder) / "emulated_unit.cpp"
        unit.write_text(_unit(sources[0], spec.entry))
        defines = [f"-D{name}={value}" for name, value in spec.macros]
        flags = [*_FLAGS, *_KERNEL_FLAGS, *defines, f"-I{HERE}", f"-I{folder}", str(unit)]
        library = _library(Path(spec.source).stem, flags, [*sources, HERE / "sources.py", HERE / "build.py"], folder)
    handle, static_smem = _open(library)
    sizes = ctypes.POINTER(ctypes.c_size_t)()
    sizes_of = getattr(handle, f"cuda_on_cpu_argument_sizes_{spec.entry}")
    sizes_of.restype = ctypes.c_size_t
    count = sizes_of(ctypes.byref(sizes))
    address = ctypes.cast(getattr(handle, f"cuda_on_cpu_entry_{spec.entry}"), ctypes.c_void_p).value
    assert address is not None
    alignment = smem_alignment([path.read_text() for path in sources])
    return Kernel(spec, library, tuple(sizes[:count]), static_smem, alignment, address)
