"""scripts/setup_env.py: what it keeps, what it installs, and that a second run costs nothing."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def setup_env() -> ModuleType:
    """The script as a module of its own."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_calls(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Arguments of every pip call, none of which is made; a call succeeds if it asks for what is in `works`."""
    calls: list[list[str]] = []

    def pip_install(label: str, arguments: list[str]) -> bool:
        calls.append(arguments)
        return any(" ".join(arguments).endswith(ending) for ending in setup_env.works)

    setup_env.works = ["torch==2.13.0"]
    monkeypatch.setattr(setup_env, "pip_install", pip_install)
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "setup.log")
    (tmp_path / "setup.log").write_text("$ pip install a\nERROR: old\n$ pip install b\nERROR: new\n")
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a CPU build of torch beside PyPI's CUDA build")
def test_without_gpu_the_cpu_build_is_tried_before_pypis(setup_env: ModuleType, pip_calls: list[list[str]]) -> None:
    setup_env.install_torch(gpu=False)
    assert [call[-1] for call in pip_calls] == ["torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch==2.13.0"]
    assert [setup_env.TORCH_CPU_INDEX in call for call in pip_calls] == [False, True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a CPU build of torch beside PyPI's CUDA build")
def test_the_first_torch_that_installs_ends_the_search(setup_env: ModuleType, pip_calls: list[list[str]]) -> None:
    setup_env.works = ["torch==2.13.0+cpu"]
    setup_env.install_torch(gpu=False)
    assert len(pip_calls) == 1


def test_with_gpu_only_the_cuda_build_is_tried(setup_env: ModuleType, pip_calls: list[list[str]]) -> None:
    setup_env.install_torch(gpu=True)
    assert pip_calls == [["torch==2.13.0"]]


def test_failure_quotes_only_the_last_pips_complaint(setup_env: ModuleType, pip_calls: list[list[str]]) -> None:
    setup_env.works = []
    with pytest.raises(setup_env.SetupError, match="ERROR: new") as caught:
        setup_env.install_torch(gpu=False)
    assert "old" not in str(caught.value)


def test_old_python_is_refused_by_name(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "MIN_PYTHON", (99, 0))
    with pytest.raises(setup_env.SetupError, match=r"Python >= 99\.0.*make PYTHON="):
        setup_env.prepare("demo")


def checkout(folder: Path) -> Path:
    """What the script reads, without the library."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "scripts" / "setup_env.py"


def run_offline(script: Path, target: str) -> subprocess.CompletedProcess[str]:
    """The script under this Python, with a pip that finds no package anywhere."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run([sys.executable, str(script), target], capture_output=True, text=True, env=environment)


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    script = checkout(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "mine").touch()
    done = run_offline(script, "demo")
    assert done.returncode == 1
    assert "Move it away" in done.stderr
    assert (tmp_path / ".venv" / "mine").exists()


def test_a_machine_that_has_everything_needs_no_network_and_a_second_run_no_time(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"  # a `#!` line could not hold the space
    folder.mkdir()
    script = checkout(folder)
    package = folder / "src" / "warpring"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(
        "from importlib.util import find_spec\ndef main():\n    print(find_spec('torch').origin)\n    return 7\n"
    )

    first = run_offline(script, "test-gpu")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "keeping" in first.stdout
    assert "installing" not in first.stdout
    command = subprocess.run([folder / ".venv" / "bin" / "warpring"], capture_output=True, text=True)
    assert (command.returncode, command.stdout.strip()) == (7, importlib.util.find_spec("torch").origin)
    # NVRTC is a library, not a module, and cuda.bindings looks for it in a way of its own.
    version = "from cuda.bindings import nvrtc; print(nvrtc.nvrtcVersion()[1])"
    nvrtc = subprocess.run([folder / ".venv" / "bin" / "python", "-c", version], capture_output=True, text=True)
    assert (nvrtc.returncode, nvrtc.stdout.strip()) == (0, "13"), nvrtc.stderr

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    second = run_offline(script, "test-gpu")
    assert (second.returncode, second.stdout) == (0, "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1

    with open(folder / "requirements" / "demo.txt", "a") as pins:
        pins.write("pre-commit==0.0.1\n")  # a package that pyproject.toml bounds and this environment lacks
    missing = run_offline(script, "demo")
    assert missing.returncode == 1
    assert "this machine lacks pre-commit==0.0.1" in missing.stderr
    assert "Traceback" not in missing.stderr
