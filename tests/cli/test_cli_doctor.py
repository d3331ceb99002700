"""`warpring doctor` and `warpring precompile`, with and without a GPU."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import pytest
import torch

from warpring import WarpringError
from warpring.cli import doctor, main
from warpring.cli.precompile import architectures
from warpring.formats import FORMATS
from warpring.policy import Crossover, file_of, write
from warpring.runtime import jit

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where no GPU is; found one")


def table(out: str) -> dict[tuple[str, str], str]:
    """(path, format) -> outcome."""
    rows = [line.split(maxsplit=2) for line in out.split("\n\n")[1].splitlines()]
    return {(path, format): outcome for path, format, outcome in rows}


def test_doctor_names_versions_and_every_path_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    facts = dict(
        line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines() if not line.startswith(("NV", "k"))
    )
    assert facts["torch"].startswith(torch.__version__)
    assert facts["python"].startswith(platform.python_version())
    assert "kernel cache" in out
    assert str(jit.cache_dir()) in out
    found = table(out)
    paths = ("warp", "tile", "cores", "grouped", "classical", "reference")
    assert set(found) == {(path, format) for path in paths for format in FORMATS}
    for format in FORMATS:
        for path in ("cores", "reference"):
            assert found[path, format].startswith("runs on cpu" if path == "cores" else "runs on")
        assert found["grouped", format].startswith("runs on")
        assert found["classical", format].startswith("runs on")


@pytest.mark.parametrize(("local_rank", "rank", "lines"), [("1", "1", 0), ("0", "8", 3), (None, None, 3)])
def test_one_process_a_machine_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str | None, rank: str | None,
    lines: int,
) -> None:  # fmt: skip
    for name, value in (("LOCAL_RANK", local_rank), ("RANK", rank)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "facts", lambda: iter([("warpring", "1")]))
    monkeypatch.setattr(doctor, "checks", lambda: iter([("tile", "bf16", "BROKEN: by a test", False)]))
    assert main(["doctor"]) == (1 if lines else 0)
    assert len(capsys.readouterr().out.splitlines()) == lines


@without_gpu
def test_doctor_says_why_warp_does_not_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "GPU             none" in out or "GPU             not usable" in out
    assert all(table(out)[path, format].startswith("no: no GPU; ") for path in ("warp", "tile") for format in FORMATS)


@pytest.mark.gpu
def test_doctor_runs_warp_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name(0) in out
    assert all(table(out)[path, format].startswith("runs on cuda") for path in ("warp", "tile") for format in FORMATS)


def test_doctor_fails_where_a_path_that_should_run_is_broken_or_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_tiny(path: str, format: str, device: torch.device) -> float:
        if (path, format) == ("classical", "bf16"):
            raise WarpringError("it\nbroke")
        return float("nan") if (path, format) == ("reference", "nvfp4") else 0.9999

    monkeypatch.setattr(doctor, "run_tiny", run_tiny)
    assert main(["doctor"]) == 1
    found = table(capsys.readouterr().out)
    assert found["classical", "bf16"] == "BROKEN: it broke"
    assert found["reference", "nvfp4"].startswith("WRONG RESULT")
    assert found["reference", "mxfp8"].startswith("runs on")


def test_doctor_lists_what_was_tuned_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: iter(()))
    assert main(["doctor"]) == 0
    assert "tuned" not in capsys.readouterr().out.replace("untuned", "")
    monkeypatch.setattr("warpring.policy.tuned_dir", lambda: tmp_path)
    found = Crossover("cores", "mxfp4", 64, 32, 8, 2, 9, False, "grouped", (1, 16), "abc", "2026-01-02")
    write(file_of(tmp_path, "Some CPU, 2 threads"), "Some CPU, 2 threads", [found])
    (tmp_path / "broken.json").write_text("{")
    with pytest.warns(UserWarning, match=r"broken\.json is not used"):
        assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"tuned           {tmp_path / 'some-cpu-2-threads.json'}: h64xi32xe8xk2 mxfp4" in lines
    assert f"tuned           {tmp_path / 'broken.json'}: nothing that can be used" in lines
    assert any(line.startswith("crossovers") for line in lines)


def test_doctor_names_missing_and_old_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package in ("cuda-core", "matplotlib"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "4.57.1" if package == "transformers" else real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "checks", lambda: iter(()))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "missing; install with: pip install 'warpring[cuda]'" in out
    assert "missing, only for plots" in out
    assert "4.57.1; too old, 5.17 or newer is needed" in out


def test_doctor_tells_a_cpu_build_of_torch_from_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os.path, "exists", lambda _: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert "no NVIDIA driver" in doctor.no_gpu_reason()
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build" in doctor.no_gpu_reason()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "too old for CUDA 13.0" in doctor.no_gpu_reason()


def test_precompile_needs_no_gpu_and_fills_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda.core and NVRTC")
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path))
    argv = ["precompile", "--shape", "h64xi32xe6xk2", "--format", "mxfp8", "--arch", "sm_90a,sm_100a"]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    kernels = sorted(path.name for path in tmp_path.glob("*.cubin"))
    assert len(out) == len(kernels) + 1
    for arch in ("sm_90a", "sm_100a"):
        for entry in ("moe_gate_up_3d_batched", "moe_down_3d_batched"):
            assert any(name.startswith(f"{entry}-{arch}-") for name in kernels)
            assert any(entry in line and arch in line and "registers, 0 bytes spilled" in line for line in out)
    assert len(set(" ".join(line.split()[:4] + line.split()[10:]) for line in out)) == len(out), "each line is distinct"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")}
    assert main(argv) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")} == before, "the cache serves a rerun"


@pytest.mark.parametrize("arch", ["", "90", "sm_80", "sm_90x", "compute_90", "sm_90a,"])
def test_architecture_that_is_none_is_refused(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile", "--arch", arch]) == 2
    assert "--arch must name architectures from sm_90a on" in capsys.readouterr().err


@without_gpu
def test_precompile_without_gpu_and_arch_asks_for_the_arch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile"]) == 2
    assert "Name it, as in --arch sm_90a" in capsys.readouterr().err


@pytest.mark.gpu
def test_precompile_takes_the_architecture_of_the_gpu() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert architectures(None) == [f"sm_{major}{minor}a"]
