"""`warpring doctor`: what this machine has, which paths run on it, and why the others do not."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from warpring.cli import version
from warpring.errors import UnsupportedError, WarpringError

if TYPE_CHECKING:
    import torch

#: The oldest torch and transformers that the library is tested with.
LEAST_TORCH = (2, 11)
LEAST_TRANSFORMERS = (5, 17)
#: The check of each path: a layer so small that all of them take a moment.
CHECK_SHAPE = "h128xi64xe8xk2"
#: Cosine with the exact result that a path must reach; rounding to BF16 and MXFP8 stays well above.
LEAST_COSINE = 0.995


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what runs on this machine, and why not",
        description="Show GPU, driver, CUDA, torch, NVRTC and the kernel cache, then run a tiny layer through every "
        "path and format. Exit code 1 if one that should work does not.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts, then the outcome of each path and format: once a machine, whoever starts a process a GPU."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    for label, text in facts():
        print(f"{label:<16}{text}")
    print()
    broken = False
    for path, format, outcome, ok in checks():
        print(f"{path:<16}{format:<14}{outcome}")
        broken |= not ok
    return 1 if broken else 0


def facts() -> Iterator[tuple[str, str]]:
    """(label, text) of everything that decides what runs."""
    import torch

    from warpring.bench.records import commit, driver_version
    from warpring.expert_parallel.facts import facts as expert_parallel_facts

    yield (
        "warpring",
        f"{version()}{'' if _version('warpring') else ', not installed, run from source'} (commit {commit()})",
    )
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    yield "torch", f"{torch.__version__} ({build}){_too_old(torch.__version__, LEAST_TORCH)}"
    yield "NVIDIA driver", "none found" if driver_version() == "unknown" else driver_version()
    yield from _gpu_facts()
    yield from expert_parallel_facts()
    yield "NVRTC", _nvrtc()
    for package in ("cuda-core", "cuda-bindings"):
        yield package, _version(package) or "missing; install with: pip install 'warpring[cuda]'"
    yield "CPU kernels", _cpu_kernels()
    yield "kernel cache", _cache()
    yield from _crossovers()
    found = _version("transformers")
    yield (
        "transformers",
        f"{found}{_too_old(found, LEAST_TRANSFORMERS)}" if found else "missing; pip install 'warpring[transformers]'",
    )
    yield "matplotlib", _version("matplotlib") or "missing, only for plots; pip install 'warpring[plots]'"


def _gpu_facts() -> Iterator[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        yield "GPU", no_gpu_reason()
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs",
        )


def no_gpu_reason() -> str:
    """Why torch has no GPU here."""
    import torch

    if shutil.which("nvidia-smi") is None and not os.path.exists("/dev/nvidia0"):
        return "none: no NVIDIA driver on this machine"
    if torch.version.cuda is None:
        return f"not usable: torch {torch.__version__} is a CPU build; install a CUDA build of torch"
    return f"not usable: torch finds no device; the driver may be too old for CUDA {torch.version.cuda}"


def checks() -> Iterator[tuple[str, str, str, bool]]:
    """(path, format, outcome in words, whether that is as it should be) for every path and format."""
    import torch

    from warpring.bench.records import FORMATS
    from warpring.kernels.cores import unusable_reason

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for path in ("warp", "tile", "cores", "grouped", "classical", "reference"):
        place = torch.device("cpu") if path == "cores" else device
        for format in FORMATS:
            if path == "cores" and (missing := unusable_reason()) is not None:
                yield path, format, f"no: {missing}; the reference stands in for it", True
                continue
            try:
                cosine = run_tiny(path, format, place)
            except UnsupportedError as error:
                yield path, format, f"no: {reason(path, device) or error}", True
            except (WarpringError, RuntimeError) as error:
                yield path, format, f"BROKEN: {' '.join(str(error).split())}", False
            else:
                good = cosine > LEAST_COSINE
                yield path, format, f"{'runs' if good else 'WRONG RESULT'} on {place.type}, cosine {cosine:.6f}", good


def run_tiny(path: str, format: str, device: torch.device) -> float:
    """Run a tiny layer through one path; the least cosine of a token with the exact result."""
    import torch

    from warpring.bench.inputs import make_routing, random_experts
    from warpring.bench.shapes import parse_shape
    from warpring.decode import moe_decode
    from warpring.layout import pack_experts
    from warpring.reference import moe_exact

    shape = parse_shape(CHECK_SHAPE)
    experts = random_experts(shape, format, device, seed=0)
    routing = make_routing(shape, 2, seed=0).to(device)
    x = torch.randn(2, shape.hidden, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    layer = pack_experts(experts) if path == "tile" else experts
    y = moe_decode(x, layer, routing.topk_idx, routing.topk_weights, path=path)
    exact = moe_exact(x, experts, routing.topk_idx, routing.topk_weights)
    return torch.nn.functional.cosine_similarity(exact, y.double(), dim=1).min().item()


def reason(path: str, device: torch.device) -> str | None:
    """Why a path cannot run where there is no GPU, and whether its kernels at least compile here."""
    if path not in ("warp", "tile") or device.type == "cuda":
        return None
    return f"no GPU; {'its kernels compile here' if not _nvrtc_problem() else 'nor a compiler for its kernels'}"


def _nvrtc() -> str:
    from warpring.runtime.jit import compiler_version

    return _nvrtc_problem() or compiler_version()


def _nvrtc_problem() -> str | None:
    """What keeps kernels from being compiled, or None."""
    from warpring.runtime.jit import compiler_version

    try:
        compiler_version()
    except WarpringError as error:
        return f"missing; {error}"
    return None if _version("cuda-core") else "cuda-core is missing; install with: pip install 'warpring[cuda]'"


def _cpu_kernels() -> str:
    """What compiles the CPU cores' path and for which processor, or why it cannot."""
    import torch

    from warpring.kernels.cores.engine import compiler_version, processor, unusable_reason

    if (missing := unusable_reason()) is not None:
        return f"not usable: {missing}"
    return f"{compiler_version()}, for {processor()}, {torch.get_num_threads()} threads"


def _cache() -> str:
    from warpring.runtime.jit import cache_dir

    folder = cache_dir()
    kernels = [*folder.glob("*.cubin"), *folder.glob("*.o")]
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    access = "" if os.access(nearest, os.W_OK) else "; NOT writable, set WARPRING_CACHE to a folder that is"
    return f"{folder} ({len(kernels)} kernels, {sum(k.stat().st_size for k in kernels) / 2**20:.1f} MiB){access}"


def _crossovers() -> Iterator[tuple[str, str]]:
    """What path="auto" goes by: the library's measured devices, and each file that `warpring tune` left here."""
    import torch

    from warpring.policy import DATA_DIR, device_name, file_of, read, tuned_dir

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = read(file_of(DATA_DIR, device_name(device)))
    yield (
        "crossovers",
        f"{len(own)} in the library for {device_name(device)}"
        + ("" if own else "; a rule of thumb serves, or 'warpring tune'"),
    )
    for path in sorted(tuned_dir().glob("*.json")):
        found = read(path)
        shapes = {(c.hidden, c.intermediate, c.num_experts, c.topk, c.format) for c in found}
        listed = ", ".join("h{}xi{}xe{}xk{} {}".format(*shape) for shape in sorted(shapes))
        yield "tuned", f"{path}: {listed or 'nothing that can be used'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _too_old(found: str, least: tuple[int, int]) -> str:
    """A remark where version `found` is older than `least`, else nothing."""
    parts = tuple(int(part) for part in found.split(".")[:2])
    return "" if parts >= least else f"; too old, {least[0]}.{least[1]} or newer is needed"
