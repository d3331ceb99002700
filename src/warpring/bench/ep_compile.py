"""Kernels of many expert-parallel layers, compiled ahead by as many processes as there are cores.

NVRTC compiles one kernel at a time in a process, and a layer has up to six: with an empty cache, the 28 layers of
`warpring ep-verify` would spend two minutes there.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.roles import role_specs
from warpring.runtime.jit import compile_kernel, is_cached


def compile_ahead(problems: Iterable[Problem], arch: str, *, part: int = 0, parts: int = 1) -> int:
    """Compile what the cache lacks of the kernels of these layers; ranks of one host divide the work.

    Args:
        problems: the layers, as they run in Green Contexts.
        arch: see `compile_kernel`.
        part, parts: this process compiles every `parts`-th kernel, from number `part` on.

    Returns:
        How many kernels were compiled here.

    Raises:
        CompileError, UnsupportedError: see `compile_kernel`.
    """
    specs = dict.fromkeys(spec for problem in problems for spec in role_specs(problem, ctas_per_sm(problem)).all())
    missing = [spec for spec in list(specs)[part::parts] if not is_cached(spec, arch)]
    if len(missing) < 2:  # a layer compiles one as fast itself
        return 0
    workers = max(1, min(len(missing), len(os.sched_getaffinity(0)) // parts))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for work in [pool.submit(compile_kernel, spec, arch) for spec in missing]:
            work.result()
    return len(missing)
