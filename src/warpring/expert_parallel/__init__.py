"""Expert-parallel decode: several GPUs, or CPU ranks, share the experts of a layer.

with ExpertParallelDecode(problem, group, local_experts(experts, rank, num_ranks)) as layer:
    y = layer(x, topk_idx, topk_weights)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warpring.expert_parallel.layer import ExpertParallelDecode, Handle
    from warpring.expert_parallel.problem import Problem, local_experts

__all__ = ["ExpertParallelDecode", "Handle", "Problem", "local_experts"]

_HOMES = {"layer": ("ExpertParallelDecode", "Handle"), "problem": ("Problem", "local_experts")}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"warpring.expert_parallel.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'warpring.expert_parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
