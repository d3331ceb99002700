"""Kernels compiled ahead: by several processes, what the cache lacks alone, divided between ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warpring.bench import ep_compile
from warpring.bench.ep_compile import compile_ahead
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.roles import role_specs
from warpring.runtime.jit import KernelSpec, cache_dir, is_cached

ARCH = "sm_90a"
PROBLEMS = [Problem(128, 64, 4, topk, 1, 8) for topk in (1, 2, 1)]


def quick(problem: Problem, ctas: int = 1) -> Any:
    """role3 alone, which takes a moment."""
    combine = [*role_specs(problem).combine.values()]
    return SimpleNamespace(all=lambda: combine)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[KernelSpec]:
    """The kernels of all problems, and an empty cache."""
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path))
    monkeypatch.setattr(ep_compile, "role_specs", quick)
    return list(dict.fromkeys(spec for problem in PROBLEMS for spec in quick(problem).all()))


def test_missing_kernels_are_compiled_once(specs: list[KernelSpec]) -> None:
    assert not any(is_cached(spec, ARCH) for spec in specs)
    assert compile_ahead(PROBLEMS, ARCH) == len(specs) == 4
    assert all(is_cached(spec, ARCH) for spec in specs)
    assert compile_ahead(PROBLEMS, ARCH) == 0
    assert len(list(cache_dir().glob("*.cubin"))) == 4


def test_ranks_divide_the_work(specs: list[KernelSpec]) -> None:
    assert compile_ahead(PROBLEMS, ARCH, part=1, parts=2) == 2
    assert [is_cached(spec, ARCH) for spec in specs] == [False, True] * 2


def test_one_kernel_is_left_to_its_layer(specs: list[KernelSpec]) -> None:
    assert compile_ahead(PROBLEMS, ARCH, part=3, parts=4) == 0
    assert not is_cached(specs[3], ARCH)
