"""Make .venv ready for one of the Makefile's targets; silent and quick when it already is.

    python3 scripts/setup_env.py demo | test | test-gpu | hooks

What goes in is decided once and remembered in .venv/setup.json:

- A torch >= 2.11 that this Python already has is kept (with a GPU: a CUDA build only). .venv then sees that
  Python's packages, and pip is asked only for those that are missing or older than pyproject.toml allows, so that
  a machine that has everything needs no network at all.
- Otherwise the pinned torch is installed: the CPU build where no GPU is found, PyPI's own build where one is.
- Everything else comes from the pins in requirements/*.txt.

.venv is made afresh when Python, the torch to keep, the GPU's presence or this folder's path changed. The standard
library is all that this file needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Requirement files of each target, beside torch.txt. On a GPU every target compiles kernels.
TARGETS = {
    "demo": ["demo"],
    "test": ["demo", "cuda", "test", "dev"],
    "test-gpu": ["demo", "cuda", "test"],
    "hooks": ["dev", "hooks"],
}


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[1] not in TARGETS:
        print(f"usage: {argv[0]} {' | '.join(TARGETS)}", file=sys.stderr)
        return 2
    try:
        with open(__file__) as lock:  # two makes at once take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            prepare(argv[1])
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def prepare(target: str) -> None:
    """Bring .venv to what `target` needs."""
    if sys.version_info < MIN_PYTHON:
        raise SetupError(
            f"warpring needs Python >= {'.'.join(map(str, MIN_PYTHON))}; {sys.executable} is {sys.version.split()[0]}. "
            f"Name a newer one: make PYTHON=python3.12 {target}"
        )
    if VENV.exists() and not STAMP.exists():
        raise SetupError(f"{VENV} is not this script's work, so it is left alone. Move it away and run again.")
    gpu = has_gpu()
    names = TARGETS[target] + (["cuda"] if gpu and target == "demo" else [])
    machine = {
        "python": f"{sys.executable} {sys.version}",
        "folder": str(ROOT),
        "gpu": str(gpu),
        "torch": str(installed_torch()),
    }
    stamp = read_stamp()
    if stamp is None or stamp.machine != machine or not VENV_PYTHON.exists():
        stamp = Stamp(machine, keep_torch=torch_suits(gpu), files={})
        create_venv(stamp.keep_torch)
        write_stamp(stamp)
    if not stamp.keep_torch:
        names = ["torch", *names]
    digests = {name: digest(name, with_bounds=stamp.keep_torch) for name in names}
    stale = [name for name in names if stamp.files.get(name) != digests[name]]
    if "torch" in stale:
        install_torch(gpu)
        stamp.files["torch"] = digests["torch"]
        write_stamp(stamp)
        stale.remove("torch")
    if stale:
        (install_missing if stamp.keep_torch else install_pins)(stale)
        stamp.files.update({name: digests[name] for name in stale})
        write_stamp(stamp)


# What the machine has


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used: a device node, or a driver that lists one (WSL has no node)."""
    if os.path.exists("/dev/nvidia0"):
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and b"GPU" in subprocess.run([smi, "-L"], capture_output=True).stdout


def installed_torch() -> str | None:
    """Version and place of the torch that this Python has, without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution("torch")
    except PackageNotFoundError:
        return None
    return f"{found.version} {found.locate_file('torch')}"


def torch_suits(gpu: bool) -> bool:
    """Whether that torch imports, is new enough, and is built for CUDA where a GPU is."""
    if installed_torch() is None:
        return False
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if probe.returncode:
        say(f"leaving aside {sys.executable}'s torch: it does not import")
        return False
    version, cuda = probe.stdout.split()
    suits = tuple(int(part) for part in version.split(".")[:2]) >= MIN_TORCH and (not gpu or cuda != "None")
    say(f"{'keeping' if suits else 'leaving aside'} {sys.executable}'s torch {version} (CUDA: {cuda})")
    return suits


# .venv and its record


class Stamp(NamedTuple):
    """What .venv was made for and holds.

    Attributes:
        machine: what makes an environment of another machine useless.
        keep_torch: whether the machine's own torch is used.
        files: digest of each requirement file whose packages are there.
    """

    machine: dict[str, str]
    keep_torch: bool
    files: dict[str, str]


def read_stamp() -> Stamp | None:
    """The record; None where .venv is not finished, or not there."""
    try:
        return Stamp(**json.loads(STAMP.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(stamp: Stamp) -> None:
    STAMP.write_text(json.dumps(stamp._asdict(), indent=1) + "\n")


def digest(name: str, with_bounds: bool) -> str:
    """What the record keeps of requirements/<name>.txt, and of the bounds that kept packages are held to."""
    text = requirements_file(name).read_bytes()
    if with_bounds:
        text += (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def requirements_file(name: str) -> Path:
    return ROOT / "requirements" / f"{name}.txt"


def create_venv(keep_torch: bool) -> None:
    """A fresh .venv that imports warpring from src, with a `warpring` command."""
    say(f"making .venv with Python {sys.version.split()[0]}")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.touch()  # from here on it is this script's
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(
            f"python -m venv: {(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu: apt-get install python3-venv (or python3.X-venv for another Python)."
        )
    paths = [str(ROOT / "src")]
    if keep_torch:
        # Not --system-site-packages: where this Python is itself a virtual environment, that would show the
        # packages of the Python below it. Last on the path, so that what pip puts into .venv wins.
        folders = [path for path in sys.path if path.endswith("-packages")]
        paths += [f"import site; site.addsitedir({path!r})" for path in folders]
        # cuda.bindings looks for NVRTC in the packages of the prefixes alone.
        paths.append(f"import site; site.PREFIXES.append({sys.prefix!r})")
        # Python < 3.12 gives a new environment an old setuptools, which would hide the kept one.
        subprocess.run([str(VENV_PYTHON), "-m", "pip", "uninstall", "--yes", "setuptools"], capture_output=True)
    site_packages = next(VENV.glob("lib/python*/site-packages"))
    (site_packages / "warpring-checkout.pth").write_text("\n".join(paths) + "\n")
    command = VENV / "bin" / "warpring"
    # sh starts Python: a path with spaces, or a long one, breaks a `#!` line.
    command.write_text(
        "#!/bin/sh\n"
        f'\'\'\'exec\' "{VENV_PYTHON}" "$0" "$@"\n'
        "' '''\n"
        "from warpring.cli import main\n\n"
        "raise SystemExit(main())\n"
    )
    command.chmod(0o755)


# pip


def install_torch(gpu: bool) -> None:
    """The pinned torch: the first of a few ways that works."""
    (pin,) = pins(["torch"])
    attempts: list[tuple[str, list[str]]] = [(pin, [])]
    if not gpu and sys.platform == "linux":
        # PyPI's Linux build brings CUDA along, some GB. First the CPU build from wherever pip is set up to look,
        # then from PyTorch's index; both give up soon, so that a closed network costs seconds.
        quick = ["--retries", "1", "--timeout", "15"]
        cpu = f"{pin}+cpu"
        attempts = [(cpu, quick), (cpu, [*quick, "--extra-index-url", TORCH_CPU_INDEX]), *attempts]
    for requirement, options in attempts:
        label = f"installing {requirement}" + (" from PyTorch's CPU index" if "--extra-index-url" in options else "")
        if pip_install(label, [*options, requirement]):
            return
    raise SetupError(f"pip could not install {pin}; {where_log()}")


def install_pins(names: list[str]) -> None:
    """Everything in the requirement files `names`."""
    files = [argument for name in names for argument in ("-r", str(requirements_file(name)))]
    if not pip_install(f"installing {', '.join(f'requirements/{name}.txt' for name in names)}", files):
        raise SetupError(f"pip could not install requirements/{{{','.join(names)}}}.txt; {where_log()}")


def install_missing(names: list[str]) -> None:
    """Of the pins in `names`, those whose package is absent or older than pyproject.toml allows."""
    command = [str(VENV_PYTHON), "-c", MISSING, str(ROOT / "pyproject.toml"), *pins(names)]
    check = subprocess.run(command, capture_output=True, text=True)
    if check.returncode:
        raise SetupError(f"looking for installed packages: {check.stderr.strip()}")
    missing = check.stdout.split()
    if missing and not pip_install(f"installing {' '.join(missing)}", missing):
        raise SetupError(f"this machine lacks {' '.join(missing)}, and pip could not install them; {where_log()}")


#: Runs in .venv. Arguments: pyproject.toml, then pins; prints the pins whose package does not meet the bounds.
MISSING = """
import sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = [line for extra in project["optional-dependencies"].values() for line in extra]
bounds = {}
for line in [*project["dependencies"], *extras]:
    bound = Requirement(line)
    bounds[canonicalize_name(bound.name)] = bound.specifier
for pin in sys.argv[2:]:
    name = canonicalize_name(Requirement(pin).name)
    try:
        if not bounds[name].contains(version(name), prereleases=True):
            print(pin)
    except PackageNotFoundError:
        print(pin)
"""


def pins(names: list[str]) -> list[str]:
    """The requirement lines of the files `names`."""
    lines = (line.strip() for name in names for line in requirements_file(name).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pip_install(label: str, arguments: list[str]) -> bool:
    """Run pip with one line of progress; its output goes to the log. True if it succeeded."""
    # --no-compile: half of pip's time on torch would go into byte code of modules that are never imported.
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--no-compile", "--no-input", *arguments]
    start = time.monotonic()
    if not sys.stdout.isatty():
        say(f"{label} ...")
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while True:
                show(f"\r[setup] {label} ... {time.monotonic() - start:.0f} s")
                try:
                    code = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
    show("\r\033[K")
    say(f"{label}: {'done' if code == 0 else 'no'} ({time.monotonic() - start:.0f} s)")
    return code == 0


def where_log() -> str:
    """The log's place, and what the last pip complained of."""
    last = LOG.read_text().rpartition("\n$ ")[2]
    errors = [line for line in last.splitlines() if line.startswith("ERROR")]
    return "\n".join([f"the whole output is in {LOG}", *errors])


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def show(text: str) -> None:
    """A line that the next one replaces; only where somebody watches."""
    if sys.stdout.isatty():
        print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
