"""The roles as kernels: which cubins serve a problem, and the launches of one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from warpring.errors import ArgumentError, PeerTimeoutError, PoisonedError, WarpringError, WorkspaceBusyError
from warpring.expert_parallel.call import Call
from warpring.expert_parallel.experts_kernel import EXPERTS_THREADS, experts_spec, problem_macros
from warpring.expert_parallel.flags import COMBINE_THREADS, DISPATCH_THREADS, SHARED_THREADS, Code, Flag
from warpring.expert_parallel.packing import EpWeights
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.workspace import EpError, EpParams
from warpring.runtime.by_value import KernelArguments, Launch
from warpring.runtime.jit import KernelSpec
from warpring.runtime.launch import load, pointer

_i32, _i64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64


#: CTAs of role3 on each SM of communication, where it waits for role2 there.
EARLY_COMBINE_CTAS = 4
#: What topk_idx may be; kernels for each are loaded.
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class RoleSpecs:
    """The kernels of one layer.

    Attributes:
        dispatch, combine: role1 and role3, for each dtype of topk_idx.
        experts: role2.
        shared: role4, where the problem has shared experts.
    """

    dispatch: dict[torch.dtype, KernelSpec]
    experts: KernelSpec
    combine: dict[torch.dtype, KernelSpec]
    shared: KernelSpec | None

    def all(self) -> tuple[KernelSpec, ...]:
        """Every kernel, to compile ahead."""
        shared = () if self.shared is None else (self.shared,)
        return (*shared, *self.dispatch.values(), self.experts, *self.combine.values())


@lru_cache(maxsize=256)
def role_specs(problem: Problem, ctas: int = 1) -> RoleSpecs:
    """The kernels for a problem, with `ctas` CTAs of role2 on a multiprocessor (see `ctas_per_sm`). Needs no GPU.

    Raises:
        UnsupportedError: the kernels have no policy for the weights' format.
    """
    common = (*problem_macros(problem), ("WARPRING_EP_PARAMS_BYTES", str(ctypes.sizeof(EpParams))))

    def by_index(entry: str) -> dict[torch.dtype, KernelSpec]:
        names = {torch.int32: "int32_t", torch.int64: "int64_t"}
        return {
            dtype: KernelSpec(f"{entry}.cu", entry, (*common, ("WARPRING_INDEX", names[dtype])))
            for dtype in INDEX_DTYPES
        }

    return RoleSpecs(
        dispatch=by_index("ep_dispatch"),
        experts=experts_spec(problem, ctas),
        combine=by_index("ep_combine"),
        shared=KernelSpec("ep_shared.cu", "ep_shared", common) if problem.num_shared else None,
    )


class Roles:
    """The loaded kernels of one layer on one GPU, and what each is handed.

    Attributes:
        params: what every kernel gets by value.
    """

    def __init__(
        self,
        problem: Problem,
        params: EpParams,
        device_index: int,
        combine_ctas: int,
        ctas_per_sm: int = 1,
    ) -> None:
        specs = role_specs(problem, ctas_per_sm)
        self.params = params
        self._specs = specs
        self._combine_ctas = combine_ctas
        self._kernels: dict[KernelSpec, Any] = {spec: load(spec, device_index) for spec in specs.all()}

    def shared(self, call: Call, *, programmatic: bool = False) -> Launch | None:
        """role4: the rank's own tokens for the shared experts; None where there are none. `programmatic`: loaded while
        the kernel before it in the stream still runs."""
        if self._specs.shared is None:
            return None
        weights = call.shared_weights
        stride = 0 if weights is None else weights.stride(0)
        rest = (_address(pointer(weights)), _i64(stride))
        arguments = KernelArguments(self.params, *_rows(call.x), *_count(call), *rest)
        return self._launch(self._specs.shared, self.params.comm_ctas, SHARED_THREADS, arguments, programmatic)

    def dispatch(self, call: Call, *, programmatic: bool = False) -> Launch:
        """role1. Behind role4 it starts as soon as that runs: they are made to share the communication SMs.
        `programmatic`: loaded while the kernel before it in the stream still runs, also where that is not role4."""
        rows = (*_rows(call.x), *_rows(call.topk_idx), *_rows(call.topk_weights))
        arguments = KernelArguments(self.params, *rows, *_count(call))
        spec = self._specs.dispatch[call.topk_idx.dtype]
        behind = programmatic or self._specs.shared is not None
        return self._launch(spec, self.params.comm_ctas, DISPATCH_THREADS, arguments, behind)

    def experts(self, weights: EpWeights, *, programmatic: bool = False) -> Launch:
        """role2, with a layer's weights; `programmatic`: as soon as all CTAs of role1 run, behind which it stands."""
        arguments = KernelArguments(self.params, weights)
        return self._launch(self._specs.experts, self.params.compute_ctas, EXPERTS_THREADS, arguments, programmatic)

    def combine(self, call: Call, out: torch.Tensor, *, early: bool = False, programmatic: bool = False) -> Launch:
        """role3, on all SMs, or with `early` on those of communication, a few CTAs each; `programmatic`: as soon as
        all CTAs of role2 run, behind which it stands."""
        arguments = KernelArguments(self.params, *_rows(out), *_rows(call.topk_idx), *_count(call))
        grid = EARLY_COMBINE_CTAS * self.params.comm_ctas if early else self._combine_ctas
        return self._launch(self._specs.combine[call.topk_idx.dtype], grid, COMBINE_THREADS, arguments, programmatic)

    def _launch(
        self, spec: KernelSpec, grid: int, block: int, arguments: KernelArguments, programmatic: bool = False
    ) -> Launch:
        return Launch(self._kernels[spec], grid, block, arguments, spec.dynamic_smem_bytes, programmatic)


def _rows(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Address and row stride (in elements) of a matrix with dense rows; no rows may have any address."""
    return _address(tensor.data_ptr() if tensor.numel() else 0), _i64(tensor.stride(0))


def _count(call: Call) -> tuple[Any, Any]:
    """Where the device finds the number of tokens (or null), and what the host knows."""
    return _address(pointer(call.num_tokens)), _i32(call.count)


def failure(error: EpError, timeout: float) -> WarpringError | None:
    """What the error record of the kernels says, as an exception; None where it says nothing."""
    if error.code == Code.OK:
        return None
    call = f"rank {error.rank}, call {error.generation}"
    if error.code == Code.TOO_MANY_TOKENS:
        seen = ctypes.c_int32(error.seen & 0xFFFFFFFF).value
        return ArgumentError(
            f"ExpertParallelDecode: num_tokens must be 0 to {error.expected}; the device held {seen} ({call}). The "
            "peers were told, and every rank must build the layer anew."
        )
    if error.code == Code.PEER_TOO_MANY_TOKENS:
        return PoisonedError(
            f"ExpertParallelDecode: rank {error.peer} had a num_tokens beyond its limit, so that no rank could finish "
            f"({call}). Close the layer on every rank, and build it anew."
        )
    if error.code == Code.OVERLAP:
        return WorkspaceBusyError(
            f"ExpertParallelDecode: a call began while another one held the same workspace ({call}): two replays, or a "
            "replay and a call, on streams that do not wait for each other. Order them, or build a second layer."
        )
    flag = Flag(error.flag).heading
    whom = f"rank {error.peer}" if error.peer >= 0 else "its own kernels"
    return PeerTimeoutError(
        f"ExpertParallelDecode: rank {error.rank} waited {timeout:g} s for {whom} (flag {flag}, call "
        f"{error.generation}: expected {error.expected}, seen {error.seen}): dead, late, or not making this call.",
        rank=error.rank,
        peer=error.peer,
        flag=flag,
        generation=error.generation,
        expected=error.expected,
        seen=error.seen,
    )
