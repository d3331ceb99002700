"""The kernels of a problem, what each launch is handed, and what the kernels' reports become."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warpring import ArgumentError, UnsupportedError
from warpring.errors import PeerTimeoutError, PoisonedError, WorkspaceBusyError
from warpring.expert_parallel import roles
from warpring.expert_parallel.call import Call
from warpring.expert_parallel.experts_kernel import EXPERTS_THREADS
from warpring.expert_parallel.flags import COMBINE_THREADS, DISPATCH_THREADS, SHARED_THREADS, Code, Flag
from warpring.expert_parallel.packing import EpWeights
from warpring.expert_parallel.problem import Problem
from warpring.expert_parallel.roles import Roles, failure, role_specs
from warpring.expert_parallel.workspace import EpError, EpParams
from warpring.runtime.by_value import Launch
from warpring.runtime.jit import KERNEL_DIR, KernelSpec, compile_kernel

FLASH = Problem(4096, 2048, 256, 6, 2, 256, format="mxfp4", num_shared=1)
PLAIN = Problem(4096, 1536, 128, 8, 2, 64, activation="bf16", block_m=8)
RAGGED = Problem(288, 96, 6, 3, 3, 7, format="mxfp4", has_bias=True, num_shared=2)


def test_every_kernel_compiles_for_hopper() -> None:
    for spec in role_specs(RAGGED).all():
        assert compile_kernel(spec, "sm_90a").registers <= 168, spec.entry


def test_the_probe_of_the_gpu_tests_compiles() -> None:
    source = str(Path(__file__).parent / "partition_probe.cu")
    assert compile_kernel(KernelSpec(source, "partition_probe"), "sm_90a").spill_bytes == 0


def test_a_struct_of_another_size_does_not_compile() -> None:
    from warpring.errors import CompileError

    spec = role_specs(FLASH).combine[torch.int32]
    macros = tuple((name, "8" if name == "WARPRING_EP_PARAMS_BYTES" else value) for name, value in spec.macros)
    with pytest.raises(CompileError, match=r"workspace\.py computes the same size"):
        compile_kernel(replace(spec, macros=macros), "sm_90a")


def test_specs_follow_problem_and_index() -> None:
    specs = role_specs(FLASH)
    assert {spec.entry for spec in specs.all()} == {"ep_shared", "ep_dispatch", "ep_experts", "ep_combine"}
    for by_dtype in (specs.dispatch, specs.combine):
        names = {dtype: dict(spec.macros)["WARPRING_INDEX"] for dtype, spec in by_dtype.items()}
        assert names == {torch.int32: "int32_t", torch.int64: "int64_t"}
    assert role_specs(replace(FLASH, num_shared=0)).shared is None
    with pytest.raises(UnsupportedError, match="nvfp4"):
        role_specs(replace(FLASH, format="nvfp4"))


# Launches


def loaded(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> Roles:
    def load(spec: KernelSpec, device_index: int) -> str:
        return spec.entry

    monkeypatch.setattr(roles, "load", load)
    params = EpParams(comm_ctas=16, compute_ctas=116)
    return Roles(problem, params, 0, 132)


def call_of(problem: Problem, *, rows: int = 3) -> Call:
    x = torch.zeros(rows, problem.hidden + 8, dtype=torch.bfloat16)[:, : problem.hidden]
    ids = torch.zeros(rows, problem.topk, dtype=torch.int64)
    shared = torch.ones(rows, problem.num_shared) if problem.num_shared else None
    return Call(x, ids, torch.ones(rows, problem.topk), torch.tensor(2, dtype=torch.int32), rows, shared)


def values_of(launch: Launch) -> list[object]:
    return [getattr(value, "value", value) for value in launch.arguments.values]


def parameters_of(entry: str) -> list[str]:
    """Types of a kernel's parameters, from its source."""
    source = (KERNEL_DIR / f"{entry}.cu").read_text()
    text = re.search(rf"\b{entry}\((const.*?)\) \{{", source, re.DOTALL)
    assert text
    return [" ".join(part.split()[:-1]).removeprefix("const ") for part in text[1].split(",")]


SIZES = {"int32_t": 4, "int64_t": 8}


def test_arguments_are_the_kernels_parameters_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, FLASH)
    call = call_of(FLASH)
    shared = made.shared(call)
    assert shared
    for launch in (shared, made.dispatch(call), made.combine(call, call.x)):
        types = parameters_of(launch.kernel)
        sizes = [SIZES.get(name, 8) for name in types[1:]]
        assert types[0].endswith("EpParams")
        assert [ctypes.sizeof(value) for value in launch.arguments.values] == [ctypes.sizeof(EpParams), *sizes]
    assert [name.split()[-1] for name in parameters_of("ep_experts")] == ["EpParams", "EpWeights"]


def test_launches_carry_addresses_strides_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, FLASH)
    call = call_of(FLASH)
    count = call.num_tokens
    assert count is not None
    assert call.shared_weights is not None
    tail = [count.data_ptr(), 3]
    x = [call.x.data_ptr(), FLASH.hidden + 8]
    ids, weights = [call.topk_idx.data_ptr(), 6], [call.topk_weights.data_ptr(), 6]
    dispatch, shared, combine = made.dispatch(call), made.shared(call), made.combine(call, call.x)
    assert shared
    assert values_of(dispatch)[1:] == [*x, *ids, *weights, *tail]
    assert values_of(shared)[1:] == [*x, *tail, call.shared_weights.data_ptr(), 1]
    assert values_of(combine)[1:] == [*x, *ids, *tail]
    assert (dispatch.grid, dispatch.block, dispatch.programmatic) == (16, DISPATCH_THREADS, True)
    assert (shared.grid, shared.block, shared.programmatic) == (16, SHARED_THREADS, False)
    chained = made.shared(call, programmatic=True)
    assert chained
    assert chained.programmatic
    assert (combine.grid, combine.block) == (132, COMBINE_THREADS)
    early = made.combine(call, call.x, early=True)
    assert (early.grid, early.block) == (4 * 16, COMBINE_THREADS)
    assert values_of(early)[1:] == values_of(combine)[1:]
    experts = made.experts(EpWeights(alpha=1.5))
    assert (experts.grid, experts.block) == (116, EXPERTS_THREADS)
    assert experts.smem_bytes > 0
    assert experts.arguments.values[1].alpha == 1.5


def test_without_shared_experts_nothing_stands_before_role1(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, PLAIN)
    call = call_of(PLAIN)
    assert made.shared(call) is None
    assert not made.dispatch(call).programmatic
    assert made.dispatch(call, programmatic=True).programmatic


def test_no_tokens_and_nothing_optional_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, FLASH)
    call = replace(call_of(FLASH, rows=0), num_tokens=None, shared_weights=None)
    shared = made.shared(call)
    assert shared
    assert values_of(shared)[1:] == [0, call.x.stride(0), 0, 0, 0, 0]


# Reports


def test_no_report_is_no_error() -> None:
    assert failure(EpError(), 1.0) is None


@pytest.mark.parametrize("flag", [flag for flag in Flag if flag is not Flag.NO_FLAG])
def test_a_timeout_names_rank_peer_flag_and_values(flag: Flag) -> None:
    error = failure(EpError(Code.TIMEOUT, 3, 1, flag, 2**40, 2**40 + 1, 7), 12.5)
    assert isinstance(error, PeerTimeoutError)
    assert (error.rank, error.peer, error.flag) == (3, 1, flag.heading)
    assert (error.generation, error.expected, error.seen) == (2**40, 2**40 + 1, 7)
    assert f"rank 3 waited 12.5 s for rank 1 (flag {flag.heading}" in str(error)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (Code.TOO_MANY_TOKENS, ArgumentError, "num_tokens must be 0 to 256; the device held -3"),
        (Code.PEER_TOO_MANY_TOKENS, PoisonedError, "rank 1 had a num_tokens beyond its limit"),
        (Code.OVERLAP, WorkspaceBusyError, "held the same workspace"),
    ],
)
def test_other_reports_have_their_own_class(code: Code, kind: type[Exception], words: str) -> None:
    error = failure(EpError(code, 0, 1, 0, 5, 256, 2**32 - 3), 1.0)
    assert type(error) is kind
    assert words in str(error)
    assert "call 5" in str(error)
