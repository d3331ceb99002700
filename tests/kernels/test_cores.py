"""The CPU cores' path: values of every code, both kinds of kernels, threads, the disk cache, and what stands in."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
import warnings
from pathlib import Path

import pytest
import torch
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error

from warpring import ArgumentError, Experts, UnsupportedError, gpt_oss_swiglu, moe_decode
from warpring.activation import GELU_TANH, SILU, clipped_swiglu
from warpring.formats import FORMATS
from warpring.kernels import cores
from warpring.kernels.cores import engine, pool
from warpring.kernels.cores.formats import STORED
from warpring.policy import choose_path, device_name, limit
from warpring.reference import moe_reference

pytest.importorskip("llvmlite", reason="the CPU kernels are compiled by llvmlite: pip install 'warpring[cpu]'")
_names = itertools.count()


#: Features that kernels of older processors lack.
LACKING = {"this processor": set(), "no BF16 products": {"avx512bf16"}, "any processor": engine.features()}
_layers: dict[tuple[str, str, str], engine.Layer] = {}


@pytest.fixture(params=LACKING)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels as this processor gets them, and those that do without some or all of its special instructions."""
    there = engine.features()
    if request.param != "this processor":
        if not LACKING[request.param] & there:
            pytest.skip("this processor lacks them anyway")
        monkeypatch.setattr(engine, "features", lambda: there - LACKING[request.param])
        monkeypatch.setattr(cores, "load_layer", lambda format, gate_fn: _load(request.param, format, gate_fn))
    return request.param


def _load(kind: str, format: str, gate_fn: str) -> engine.Layer:
    if (kind, format, gate_fn) not in _layers:
        code = engine.compile_layer(format, gate_fn)
        _layers[kind, format, gate_fn] = engine.link(code, f"{kind}_{next(_names)}".replace(" ", "_"))
    return _layers[kind, format, gate_fn]


def run(inputs: Inputs) -> torch.Tensor:
    out = torch.full_like(inputs.x, torch.nan)
    for buffer in cores.scratch_buffers():
        buffer.fill_(0xFF)
    return moe_decode(*inputs.args(), out=out, path="cores")


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "intermediate", "num_experts", "topk"),
    [(1, 32, 32, 3, 1), (3, 96, 160, 5, 2), (2, 224, 64, 4, 3), (7, 128, 288, 3, 2), (2, 64, 96, 40, 32)],
    ids=str,
)
def test_error_is_that_of_its_roundings(
    kernels: str, num_tokens: int, hidden: int, intermediate: int, num_experts: int, topk: int, format: str
) -> None:
    """Sizes that are and are not multiples of a step of 32, 64 or 128 columns."""
    shape = (num_tokens, hidden, intermediate, num_experts, topk)
    inputs = make_inputs(*shape, format=format, bias=num_tokens % 2 == 0, seed=sum(shape))
    check_against_exact(run(inputs), inputs)


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, gpt_oss_swiglu(), clipped_swiglu(0.5)], ids=str)
def test_every_activation(kernels: str, format: str, activation: object) -> None:
    inputs = make_inputs(3, 96, 64, 4, 2, format=format, activation=activation, bias=True, seed=5)
    check_against_exact(run(inputs), inputs)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_every_code_has_its_value(kernels: str, format: str) -> None:
    """A gate row of one code times x = one-hot gives that code's value; up and down are exact powers of two."""
    codes = 256 if STORED[format].codes == "e4m3" else 16
    hidden = intermediate = max(32, codes)
    dense = torch.ones(1, 2 * intermediate, hidden)
    experts = Experts.from_dense(dense, torch.eye(hidden)[None], format=format)
    data = experts.w13.data.view(torch.uint8)
    values = torch.arange(intermediate) % codes
    data[0, 0] = values[:, None] if codes == 256 else (values | values << 4)[:, None]
    w13 = dataclasses.replace(experts.w13, data=data.view(experts.w13.data.dtype))
    # SiLU of a huge-alpha gate is max(gate, 0), of a negative alpha min(gate, 0): both halves of the codes are seen.
    for alpha in (2.0**40, -(2.0**40)):
        activation = dataclasses.replace(SILU, alpha=alpha)
        layer = dataclasses.replace(experts, w13=w13, activation=activation)
        x = torch.zeros(1, hidden, dtype=torch.bfloat16)
        x[0, hidden // 2 + 1] = 1.0
        inputs = Inputs(x, layer, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        y, expected = run(inputs), moe_reference(*inputs.args())
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("code", [0, 1, 255, 127])
def test_every_kind_of_scale(kernels: str, format: str, code: int) -> None:
    """Zero, the smallest and the NaN codes of UE8M0 (0, 255) and of E4M3 (1, 127 and 255), in one block of one row."""
    inputs = make_inputs(2, 64, 96, 2, 1, format=format, seed=3)
    expert = int(inputs.topk_idx[0, 0])
    inputs.experts.w2.scale.view(torch.uint8)[expert, 17, 1] = code
    y, expected = run(inputs), moe_reference(*inputs.args())
    assert torch.equal(y.isnan(), expected.isnan())
    is_nan = code == 255 or (code == 127 and format == "nvfp4")
    assert y[0].isnan().sum() == y[0, 17].isnan() == is_nan
    assert rms_rel_error(y.nan_to_num(), expected.nan_to_num()) < 4e-3


def test_infinite_and_tiny_activations() -> None:
    inputs = make_inputs(3, 64, 64, 3, 1, format="bf16", seed=4)
    inputs.x[0] = torch.inf
    inputs.x[1] = 1e-39
    inputs.x[2] = 3e38
    y, expected = run(inputs), moe_reference(*inputs.args())
    assert not y[0].isfinite().any()
    assert y[1].abs().max() < 1e-37
    assert torch.equal(y[2].isfinite(), expected[2].isfinite())


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_threads_batch_or_run(format: str) -> None:
    inputs = make_inputs(9, 160, 224, 6, 3, format=format, seed=6)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results += [run(inputs), run(inputs)]
        for token in (0, 4, 8):
            rows = slice(token, token + 1)
            alone = Inputs(inputs.x[rows], inputs.experts, inputs.topk_idx[rows], inputs.topk_weights[rows])
            assert torch.equal(run(alone), results[0][rows])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_python_threads_give_the_same_bits_as_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(5, 256, 224, 6, 3, seed=7)
    expected = run(inputs)
    monkeypatch.setattr(pool, "_openmp", lambda: None)
    monkeypatch.setattr(cores, "_num_threads", lambda *_: 3)
    assert torch.equal(run(inputs), expected)


def test_calls_of_several_python_threads_do_not_share_scratch() -> None:
    layers = [make_inputs(4, 160, 96, 6, 3, seed=seed) for seed in range(4)]
    expected = [run(inputs) for inputs in layers]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(moe_decode(*layers[index].args(), path="cores"), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_scratch_made_in_inference_mode_serves_calls_outside_of_it() -> None:
    inputs = make_inputs(4, 96, 64, 6, 3, seed=9)
    vars(cores._local).clear()
    with torch.inference_mode():
        first = run(inputs)
    assert not cores._local.buffer.is_inference()
    assert torch.equal(run(inputs), first)


def test_no_memory_is_taken_with_out() -> None:
    inputs = make_inputs(4, 96, 64, 6, 3, seed=8)
    out = run(inputs)
    (before,) = cores.scratch_buffers()
    moe_decode(*inputs.args(), out=out, path="cores")
    (after,) = cores.scratch_buffers()
    assert after.data_ptr() == before.data_ptr()


# -- choice, cache, stand-in -----------------------------------------------------------------------------------------


def test_auto_takes_the_cores_up_to_its_limit_on_a_cpu() -> None:
    experts = make_inputs(1, 64, 64, 4, 2).experts
    most = limit(device_name(experts.device), "cores", experts.format, 64, 64, 4, 2).max_tokens
    assert choose_path(experts, 1, 2) == choose_path(experts, most, 2) == "cores"
    assert choose_path(experts, most + 1, 2) == "grouped"


@pytest.mark.gpu
def test_cuda_tensors_are_refused_by_name() -> None:
    inputs = make_inputs(1, 64, 64, 4, 2, device="cuda")
    with pytest.raises(UnsupportedError, match="path 'cores' needs CPU tensors; got cuda:0"):
        moe_decode(*inputs.args(), path="cores")


def test_id_of_no_expert_is_an_error() -> None:
    inputs = make_inputs(2, 64, 64, 6, 2, seed=1)
    inputs.topk_idx[1, 0] = 6
    with pytest.raises(ArgumentError, match=r"topk_idx must be -1 .*got 6 at token 1, slot 0"):
        moe_decode(*inputs.args(), path="cores")


def test_reference_stands_in_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(2, 64, 64, 4, 2, seed=9)
    monkeypatch.setattr(cores, "unusable_reason", lambda: "llvmlite is missing")
    cores._say_fallback.cache_clear()
    with pytest.warns(UserWarning, match="path 'cores' cannot run: llvmlite is missing"):
        y = moe_decode(*inputs.args())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(moe_decode(*inputs.args()), y)
    assert torch.equal(y, moe_decode(*inputs.args(), path="reference"))
    cores._say_fallback.cache_clear()


def test_missing_compiler_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'llvmlite'")

    monkeypatch.setattr(engine, "_llvm", missing)
    engine.unusable_reason.cache_clear()
    try:
        assert "pip install 'warpring[cpu]'" in str(engine.unusable_reason())
    finally:
        engine.unusable_reason.cache_clear()


def test_code_is_kept_on_disk_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path))
    compiled: list[str] = []
    compile_layer = engine.compile_layer

    def counted(format: str, gate_fn: str) -> bytes:
        compiled.append(format)
        return compile_layer(format, gate_fn)

    monkeypatch.setattr(engine, "compile_layer", counted)
    first = engine.machine_code("bf16", "silu")
    assert engine.machine_code("bf16", "silu") == first
    assert compiled == ["bf16"]
    (entry,) = tmp_path.glob("cores-bf16-silu-*.o")
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged"):
        assert engine.machine_code("bf16", "silu") == first
    assert compiled == ["bf16", "bf16"]


def test_arguments_fill_their_fields() -> None:
    from warpring.kernels.cores.arguments import FIELDS, PACKED

    assert PACKED.size == 8 * len(FIELDS)
    inputs = make_inputs(2, 64, 96, 4, 2)
    block, _ = cores._arguments(*inputs.args(), torch.empty_like(inputs.x), 3)
    fields = dict(zip(FIELDS, (ctypes.c_int64 * len(FIELDS)).from_buffer(block), strict=True))
    assert (fields["num_tokens"], fields["topk"], fields["num_experts"]) == (2, 2, 4)
    assert (fields["hidden"], fields["intermediate"], fields["num_threads"]) == (64, 96, 3)
    assert (fields["x"], fields["w2"]) == (inputs.x.data_ptr(), inputs.experts.w2.data.data_ptr())
