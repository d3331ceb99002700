"""`warpring precompile --ranks`: the kernels of expert-parallel layers, compiled ahead without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from warpring import ArgumentError
from warpring.bench.shapes import parse_shape
from warpring.cli import build_parser, main
from warpring.cli.precompile import layer_problems, layer_specs_of, layer_work
from warpring.expert_parallel.experts_kernel import ctas_per_sm
from warpring.expert_parallel.problem import BLOCK_SIZES, Problem
from warpring.expert_parallel.roles import role_specs
from warpring.runtime.jit import KernelSpec, is_cached

ARCH = "sm_90a"
TINY = ["--shape", "h64xi32xe8xk2", "--format", "mxfp4", "--ranks", "2"]
DEEPSEEK = ["--model", "deepseek-v4-flash", "--format", "mxfp4", "--ranks", "8"]


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["precompile", "--arch", ARCH, *words])


def problems(*words: str) -> list[Problem]:
    args = parsed(*words)
    return layer_problems(args, parse_shape(args.shape or args.model))


def specs(*words: str) -> list[KernelSpec]:
    args = parsed(*words)
    return [spec for _, _, spec in layer_work(args, parse_shape(args.shape or args.model))]


def deepseek(tokens: int, num_shared: int = 0) -> Problem:
    """A layer as a user builds it."""
    gate = parse_shape("deepseek-v4-flash").activation
    return Problem(4096, 2048, 256, 6, 8, tokens, format="mxfp4", gate=gate, num_shared=num_shared)


def test_every_kernel_that_a_layer_loads_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda.core and NVRTC")
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path))
    assert main(["precompile", *TINY, "--tokens", "3", "--arch", ARCH]) == 0
    problem = Problem(64, 32, 8, 2, 2, 3, format="mxfp4")
    assert ctas_per_sm(problem) == 2
    for ctas in (2, 1):
        assert all(is_cached(spec, ARCH) for spec in role_specs(problem, ctas).all())
    lines = capsys.readouterr().out.splitlines()
    assert len(list(tmp_path.glob("*.cubin"))) == len(lines) - 1 == 6, "role1 and role3 by index type, role2 by form"
    assert all("registers, 0 bytes spilled" in line and ARCH in line for line in lines[:-1])
    assert {line.split()[-1] for line in lines if "ep_dispatch" in line} == {"INDEX=int32_t", "INDEX=int64_t"}
    assert sum("CTAS_PER_SM=2" in line for line in lines) == sum("CTAS_PER_SM=1" in line for line in lines) == 1


def test_both_forms_are_there_only_where_they_differ() -> None:
    two, one = Problem(64, 32, 8, 2, 2, 3, format="mxfp4"), Problem(64, 32, 8, 2, 2, 3, format="fp8_block")
    assert (ctas_per_sm(two), ctas_per_sm(one)) == (2, 1)
    assert set(layer_specs_of(two)) == {*role_specs(two, 2).all(), *role_specs(two, 1).all()}
    assert len(layer_specs_of(two)) == 6
    assert layer_specs_of(one) == list(role_specs(one).all())


def test_options_combine() -> None:
    words = ("--tokens", "8,64", "--activation", "fp8,bf16", "--shared", "0,2", "--shared-format", "mxfp4,fp8_channel")
    found = problems("--shape", "h64xi32xe8xk2", "--format", "mxfp4,fp8_block", "--ranks", "2,4", *words)
    seen = {(p.format, p.num_ranks, p.max_tokens_per_rank, p.activation, p.num_shared, p.shared_format) for p in found}
    assert len(seen) == len(found) == 2**6
    assert {p.num_shared for p in found} == {0, 2}
    assert {p.shared_format for p in found} == {"mxfp4", "fp8_channel"}
    assert all((p.hidden, p.intermediate, p.num_experts, p.topk) == (64, 32, 8, 2) for p in found)


def test_kernels_that_several_layers_share_are_compiled_once() -> None:
    words = ("--tokens", "1,2,3", "--shared", "0", "--shared-format", "mxfp4,fp8_block")
    assert len(specs(*TINY, *words)) == len(specs(*TINY, "--tokens", "3", "--shared", "0")) == 6


def test_defaults_are_those_of_a_layer_of_the_model() -> None:
    """One that a user builds for a model loads what was compiled: any number of tokens, shared expert fused or not."""
    compiled = set(specs(*DEEPSEEK))
    built = [deepseek(tokens, num_shared) for tokens in range(1, 257) for num_shared in (0, 1)]
    assert {problem.block_m for problem in built} == set(BLOCK_SIZES)
    assert all(compiled >= set(layer_specs_of(problem)) for problem in built)
    assert compiled == {spec for problem in built for spec in layer_specs_of(problem)}, "and nothing beside"


@pytest.mark.parametrize("shape", ["h64xi32xe1024xk1", "h64xi32xe8xk8", "h64xi32xe384xk7"])
def test_default_tokens_meet_every_block_size(shape: str) -> None:
    for ranks in (1, 2, 8):
        given = (parse_shape(shape).num_experts, parse_shape(shape).topk, ranks)
        wanted = {Problem(64, 32, *given, tokens, format="mxfp4").block_m for tokens in range(1, 257)}
        found = problems("--shape", shape, "--format", "mxfp4", "--ranks", str(ranks))
        assert {problem.block_m for problem in found} == wanted


def test_a_model_keeps_its_gate_biases_and_shared_experts() -> None:
    (gpt_oss,) = problems("--model", "gpt-oss-120b", "--format", "mxfp4", "--ranks", "8", "--tokens", "64")
    assert (gpt_oss.gate, gpt_oss.has_bias) == (parse_shape("gpt-oss-120b").activation, True)
    assert gpt_oss.num_shared == 0
    assert [p.num_shared for p in problems(*DEEPSEEK, "--tokens", "64")] == [0, 1]
    assert [p.num_shared for p in problems(*DEEPSEEK, "--tokens", "64", "--shared", "1")] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks must be counts of 1 to 72, as in 1,2,4; got '0'."),
        (["--ranks", "73"], "--ranks must be counts of 1 to 72"),
        (["--ranks", "two"], "--ranks must be counts of 1 to 72"),
        (["--ranks", "3"], "num_experts must be a multiple of num_ranks = 3; got 8. Pad with experts"),
        (["--ranks", "2", "--tokens", "0"], "--tokens must be counts of 1 to 256"),
        (["--ranks", "2", "--tokens", "257"], "--tokens must be counts of 1 to 256"),
        (["--ranks", "2", "--activation", "int8"], "--activation must hold fp8, bf16; got 'int8'."),
        (["--ranks", "2", "--shared", "9"], "--shared must hold 0, 1, 2, 3, 4, 5, 6, 7, 8; got '9'."),
        (["--ranks", "2", "--shared-format", "nvfp4"], "--shared-format must hold fp8_block, fp8_channel, mxfp4;"),
        (["--ranks", "2", "--format", "mxfp8"], "--format (with --ranks) must hold fp8_block, fp8_channel, mxfp4; got"),
        (["--ranks", "2", "--index", "int32"], "--index must be left out with --ranks"),
        (["--ranks", "2", "--arch", "sm_100a"], "--arch must be sm_90a with --ranks"),
        (["--tokens", "8"], "--tokens must come with --ranks"),
        (["--activation", "fp8"], "--activation must come with --ranks"),
        (["--shared", "0"], "--shared must come with --ranks"),
        (["--shared-format", "mxfp4"], "--shared-format must come with --ranks"),
    ],
)
def test_wrong_options_end_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile", "--shape", "h64xi32xe8xk2", "--format", "mxfp4", "--arch", ARCH, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_the_share_of_one_rank_is_no_layer() -> None:
    with pytest.raises(ArgumentError, match="got deepseek-v3-ep8, which holds 32 of 256"):
        problems("--model", "deepseek-v3-ep8", "--format", "fp8_block", "--ranks", "8")


def test_the_largest_limits_are_taken() -> None:
    (problem,) = problems("--shape", "h64xi32xe72xk2", "--format", "mxfp4", "--ranks", "72", "--tokens", "256")
    assert (problem.num_ranks, problem.max_tokens_per_rank) == (72, 256)


@pytest.mark.parametrize("gpu", [False, True])
def test_architecture_without_arch_is_the_gpus_or_all_that_the_kernels_run_on(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def arch_of(index: int) -> str:
        return "sm_103a"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("warpring.runtime.device.arch_of", arch_of)
    args = build_parser().parse_args(["precompile", *TINY])
    if gpu:
        with pytest.raises(ArgumentError, match=r"got 'sm_103a'\. Name it, as in --arch sm_90a"):
            layer_work(args, parse_shape(args.shape))
    else:
        assert {arch for _, arch, _ in layer_work(args, parse_shape(args.shape))} == {"sm_90a"}
