"""The wheel: holds every source that runs, nothing else, and works in an environment that has only warpring."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MIN_SETUPTOOLS = 77  # the first that reads `license = "Apache-2.0"` in pyproject.toml

pytestmark = pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < MIN_SETUPTOOLS,
    reason=f"building needs setuptools >= {MIN_SETUPTOOLS}; found {version('setuptools')}",
)


def run(*command: object, **environment: str) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline, from a copy: setuptools leaves build/ and *.egg-info beside what it builds."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "--no-index", "-w", dist)
    (built,) = dist.iterdir()
    return built


def members(wheel: Path, folder: str) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith(folder)}


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_wheel_is_pure_and_whole(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Done testing" in run(sys.executable, "-m", "zipfile", "-t", wheel)


def test_wheel_holds_exactly_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "warpring"
    expected = {
        f"warpring/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert members(wheel, "warpring/") == expected
    assert "warpring/py.typed" in expected
    assert {Path(name).suffix for name in expected if name.startswith("warpring/kernels/")} >= {".cu", ".cuh", ".py"}


def test_wheel_brings_nothing_else(wheel: Path) -> None:
    names = members(wheel, "")
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names == members(wheel, "warpring/") | info


def test_metadata_names_version_python_licence_and_command(wheel: Path) -> None:
    metadata = email.message_from_string(read(wheel, "METADATA"))
    assert metadata["Name"] == "warpring"
    assert metadata["Version"] == wheel.name.split("-")[1]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"cuda", "transformers"} <= set(metadata.get_all("Provides-Extra"))
    assert "[console_scripts]\nwarpring = warpring.cli:main" in read(wheel, "entry_points.txt")
    assert "Apache License" in read(wheel, "licenses/LICENSE")


def test_wheel_installs_and_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    # torch and the other dependencies are lent from here; a folder on PYTHONPATH lends no checkout through .pth files.
    lent = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    find = "import importlib.util; print(importlib.util.find_spec('warpring').origin)"
    assert Path(run(python, "-c", find, PYTHONPATH=lent).strip()).is_relative_to(tmp_path)
    assert "usage: warpring" in run(tmp_path / "bin" / "warpring", "--help", PYTHONPATH=lent)
