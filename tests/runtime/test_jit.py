"""The cubin cache: what decides a key, and that neither damage nor company nor a full disk can hurt."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from warpring.errors import CompileError
from warpring.runtime import jit

pytest.importorskip("cuda.core", reason="needs cuda.core and NVRTC to compile kernels")

SOURCE = """
extern "C" __global__ void add_one(int* data) { data[threadIdx.x] += STEP; }
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder and an empty cache of the test's own."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "add.cu").write_text(SOURCE)
    (folder / "other.cuh").write_text("#pragma once\n")
    monkeypatch.setattr(jit, "KERNEL_DIR", folder)
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path / "cache"))
    return folder


def spec(step: str = "1") -> jit.KernelSpec:
    return jit.KernelSpec("add.cu", "add_one", (("STEP", step),))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compilations that really ran."""
    ran: list[str] = []
    compile_now = jit._compile

    def counted(spec: jit.KernelSpec, arch: str) -> jit.Cubin:
        ran.append(arch)
        return compile_now(spec, arch)

    monkeypatch.setattr(jit, "_compile", counted)
    return ran


def entries() -> list[Path]:
    return sorted(jit.cache_dir().glob("*.cubin"))


def test_second_compilation_comes_from_the_cache(kernels: Path, compiles: list[str]) -> None:
    first = jit.compile_kernel(spec(), "sm_90a")
    second = jit.compile_kernel(spec(), "sm_90a")
    assert first == second
    assert first.code[:4] == b"\x7fELF"
    assert first.registers > 0
    assert compiles == ["sm_90a"]


def test_key_depends_on_source_headers_macros_and_arch(kernels: Path, compiles: list[str]) -> None:
    jit.compile_kernel(spec(), "sm_90a")
    jit.compile_kernel(spec("2"), "sm_90a")
    jit.compile_kernel(spec(), "sm_100a")
    (kernels / "other.cuh").write_text("#pragma once\n// changed\n")
    jit.compile_kernel(spec(), "sm_90a")
    (kernels / "add.cu").write_text(SOURCE + "// changed\n")
    jit.compile_kernel(spec(), "sm_90a")
    assert len(compiles) == 5
    assert len(entries()) == 5


@pytest.mark.parametrize(
    "damage", [b"", b"junk", b"warpring-cubin-1\n{}\n", None], ids=["empty", "junk", "no-meta", "cut"]
)
def test_damaged_entry_is_compiled_again_with_a_warning(
    kernels: Path, compiles: list[str], damage: bytes | None
) -> None:
    good = jit.compile_kernel(spec(), "sm_90a")
    (entry,) = entries()
    entry.write_bytes(entry.read_bytes()[:-7] if damage is None else damage)
    with pytest.warns(UserWarning, match="damaged"):
        assert jit.compile_kernel(spec(), "sm_90a") == good
    assert jit.compile_kernel(spec(), "sm_90a") == good
    assert len(compiles) == 2


def test_cache_that_cannot_be_written_costs_a_warning_only(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("WARPRING_CACHE", str(blocked / "cache"))
    with pytest.warns(UserWarning, match="WARPRING_CACHE"):
        assert jit.compile_kernel(spec(), "sm_90a").code


def test_no_temporary_file_stays_behind(kernels: Path) -> None:
    jit.compile_kernel(spec(), "sm_90a")
    assert {path.suffix for path in jit.cache_dir().iterdir()} == {".cubin", ".lock"}


def test_compiler_error_shows_the_compilers_words(kernels: Path) -> None:
    (kernels / "add.cu").write_text('extern "C" __global__ void add_one() { undeclared_name; }')
    with pytest.raises(CompileError, match="undeclared_name"):
        jit.compile_kernel(spec(), "sm_90a")
    assert entries() == []


def test_the_compilers_own_cache_is_not_asked(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU's driver at hand NVRTC would find what another process compiled, and report nothing of it."""
    import cuda.core

    asked: list[bytes] = []

    def program(source: str, language: str, options: cuda.core.ProgramOptions) -> cuda.core.Program:
        asked.extend(options.as_bytes("nvrtc"))
        return made(source, language, options)

    made = cuda.core.Program
    monkeypatch.setattr(cuda.core, "Program", program)
    assert jit.compile_kernel(spec(), "sm_90a").registers > 0
    assert b"--no-cache" in asked


@pytest.mark.parametrize(
    ("log", "resources"),
    [
        ("ptxas info : Used 40 registers\n8 bytes spill stores, 4 bytes spill loads\n", (40, 12, 0)),
        ("0 bytes spill stores, 0 bytes spill loads\nptxas info : Used 9 registers, 64 bytes smem\n", (9, 0, 64)),
    ],
)
def test_resources_are_read_from_the_log(log: str, resources: tuple[int, int, int]) -> None:
    assert jit._resources(spec(), "sm_90a", log) == resources


@pytest.mark.parametrize("log", ["", "ptxas info : Used 40 registers", "0 bytes spill stores, 0 bytes spill loads"])
def test_a_log_without_resources_is_an_error_with_a_remedy(log: str) -> None:
    with pytest.raises(CompileError, match="CUDA_CACHE_DISABLE=1"):
        jit._resources(spec(), "sm_90a", log)


def _compile_in_process(folder: str, cache: str, queue: multiprocessing.Queue) -> None:
    os.environ["WARPRING_CACHE"] = cache
    jit.KERNEL_DIR = Path(folder)
    ran = []
    compile_now = jit._compile
    jit._compile = lambda spec, arch: (ran.append(1), compile_now(spec, arch))[1]
    code = jit.compile_kernel(spec(), "sm_90a").code
    queue.put((len(ran), code))


def test_processes_that_start_together_compile_once(kernels: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (str(kernels), str(tmp_path / "cache"), queue)
    processes = [context.Process(target=_compile_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert sum(ran for ran, _ in results) == 1
    assert len({code for _, code in results}) == 1


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WARPRING_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_dir() == tmp_path / "warpring"
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path / "own"))
    assert jit.cache_dir() == tmp_path / "own"
    shutil.rmtree(tmp_path, ignore_errors=True)
