"""Adapters of other libraries' layers: a stand-in for each library computes the layer from what it is handed."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import stand_in

from warpring import ArgumentError, gpt_oss_swiglu
from warpring.bench import adapters
from warpring.bench.adapters import ADAPTERS, find_peers, logits_of, why_not
from warpring.bench.compared import PEER_LAYERS
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.peer import Peer
from warpring.bench.records import load
from warpring.bench.shapes import MODELS, LayerShape
from warpring.formats import QuantizedTensor, get_format
from warpring.reference import moe_exact

SHAPE = LayerShape("h256xi128xe8xk2", hidden=256, intermediate=128, num_experts=8, topk=2)
CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[2] / "bench" / "peers.py"


def dense(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """[E, rows, cols] FP32 from codes and one scale a block of 128 x 128."""
    weight = weight.float()
    if scale is None:
        return weight
    return weight * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : weight.shape[1], : weight.shape[2]]


def compute(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    up_first: bool = False,
) -> torch.Tensor:
    y = torch.zeros(x.shape[0], w2.shape[1])
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            first, second = (w13[expert] @ x[token].float()).chunk(2)
            gate, up = (second, first) if up_first else (first, second)
            y[token] += weights[token, slot] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return y.bfloat16()


def run_peer(
    monkeypatch: pytest.MonkeyPatch, name: str, format: str, shape: LayerShape = SHAPE
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The peer's result, the exact one, and the peer's note."""
    peer = ADAPTERS[name].make(shape, format)
    experts = random_experts(shape, format, CPU, seed=3)
    routing = make_routing(shape, 3, seed=4)
    x = torch.randn(3, shape.hidden).bfloat16()
    out = torch.full_like(x, torch.nan)
    given = peer.bind(peer.prepare(experts), x, routing.topk_idx, routing.topk_weights, out)()
    exact = moe_exact(x, experts, routing.topk_idx, routing.topk_weights, torch.float32)
    return (given if isinstance(given, torch.Tensor) else out), exact, peer.note


def assert_close(found: tuple[torch.Tensor, torch.Tensor, str]) -> None:
    cosine = torch.nn.functional.cosine_similarity(found[0].float(), found[1], dim=1).min()
    assert cosine > 0.9999
    assert found[0].float().norm() == pytest.approx(float(found[1].norm()), rel=1e-2)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_transformers_computes_our_layer(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    pytest.importorskip("transformers")
    found = run_peer(monkeypatch, f"transformers_{implementation}", "bf16")
    assert_close(found)
    assert found[2].startswith("transformers 5.")


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_vllm_is_handed_our_layer(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def fused_experts(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        quant_config: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert topk_ids.dtype == torch.int32
        assert (quant_config is None) == (format == "bf16")
        scales = (quant_config.w1_scale, quant_config.w2_scale) if quant_config else (None, None)
        return compute(x, dense(w1, scales[0]), dense(w2, scales[1]), topk_weights, topk_ids)

    module = "vllm.model_executor.layers.fused_moe"
    stand_in(monkeypatch, f"{module}.fused_moe", fused_experts=fused_experts)
    stand_in(monkeypatch, f"{module}.config", fp8_w8a8_moe_quant_config=lambda **settings: SimpleNamespace(**settings))
    found = run_peer(monkeypatch, "vllm_triton", format)
    assert_close(found)
    assert ("activations quantised" in found[2]) == (format == "fp8_block")


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_sglang_is_handed_our_layer(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def fused_experts(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, moe_runner_config: Any,
        use_fp8_w8a8: bool = False, w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None,
        block_shape: list[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        weights, ids, _ = topk_output
        assert use_fp8_w8a8 == (format == "fp8_block")
        assert not moe_runner_config.inplace
        return compute(x, dense(w1, w1_scale), dense(w2, w2_scale), weights, ids)

    base = "sglang.srt.layers.moe"
    stand_in(monkeypatch, f"{base}.moe_runner.triton_utils.fused_moe", fused_experts=fused_experts)
    stand_in(monkeypatch, f"{base}.moe_runner", MoeRunnerConfig=lambda **settings: SimpleNamespace(**settings))
    stand_in(monkeypatch, f"{base}.topk", StandardTopKOutput=lambda *fields: fields)
    assert_close(run_peer(monkeypatch, "sglang_triton", format))


def test_mono_moe_is_handed_our_layer_and_logits_of_our_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    def mono_moe(
        x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, up_scale: torch.Tensor, down: torch.Tensor,
        down_scale: torch.Tensor, top_k: int, scoring_func: str, renormalize: bool, *, out: torch.Tensor,
        scratchpad: str, interleave_up: bool,
    ) -> None:  # fmt: skip
        assert (scoring_func, renormalize, interleave_up, scratchpad) == ("softmax", True, False, "pad of cpu")
        weights, ids = logits.float().softmax(1).topk(top_k)
        weights = weights / weights.sum(1, keepdim=True)
        out.copy_(compute(x, dense(up.flip(1), up_scale), dense(down, down_scale), weights, ids))

    contents = {
        "mono_moe": mono_moe,
        "has_monomoe": lambda: True,
        "alloc_scratchpad": lambda device: f"pad of {device}",
        "interleave_for_tma_wgmma_up": lambda w: w.view(torch.uint8).flip(1).view(w.dtype),
    }
    stand_in(monkeypatch, "flashinfer.fused_moe", **contents)
    monkeypatch.setattr(adapters, "MONO_SHAPE", (SHAPE.hidden, SHAPE.intermediate, SHAPE.num_experts))
    monkeypatch.setattr(torch.Tensor, "flip", flip_bytes(torch.Tensor.flip))
    assert_close(run_peer(monkeypatch, "flashinfer_mono_moe", "fp8_block"))
    assert ADAPTERS["flashinfer_mono_moe"].make(SHAPE, "fp8_block").most_tokens == 8


def flip_bytes(flip: Any) -> Any:
    """torch cannot flip FP8 tensors everywhere."""

    def flipped(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
        if tensor.element_size() == 1:
            return flip(tensor.view(torch.uint8), *dims).view(tensor.dtype)
        return flip(tensor, *dims)

    return flipped


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_flashinfer_cutlass_is_handed_the_up_rows_first(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def cutlass_fused_moe(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype, quant_scales: list[torch.Tensor],
        output: torch.Tensor, use_deepseek_fp8_block_scale: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert use_deepseek_fp8_block_scale == (format == "fp8_block") == bool(quant_scales)
        scales = quant_scales or [None, None]
        w13, w2 = dense(fc1_expert_weights, scales[0]), dense(fc2_expert_weights, scales[1])
        return output.copy_(compute(x, w13, w2, weights, ids, up_first=True))

    stand_in(monkeypatch, "flashinfer.fused_moe", cutlass_fused_moe=cutlass_fused_moe)
    assert_close(run_peer(monkeypatch, "flashinfer_cutlass", format))


def test_triton_kernels_is_handed_gpt_oss_with_gate_and_up_rows_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape("x", 96, 64, num_experts=8, topk=2, activation=gpt_oss_swiglu(), has_bias=True)

    def dense(weight: Any, config: Any) -> torch.Tensor:
        codes, scale = weight.mT.contiguous(), config.weight_scale.mT
        assert scale.shape[-1] % 4 == 0, "padded for the layout of the scales"
        cols = 2 * codes.shape[-1]
        stored = QuantizedTensor("mxfp4", (*codes.shape[:-1], cols), codes, scale[..., : cols // 32].contiguous())
        return get_format("mxfp4").dequantize(stored)

    def matmul_ogs(
        x: torch.Tensor, w: Any, bias: torch.Tensor, data: Any, gather_indx: Any = None, scatter_indx: Any = None,
        precision_config: Any = None, fused_activation: Any = None, gammas: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        ids = data.ids.flatten()
        rows = x.repeat_interleave(2, 0) if gather_indx == "gather" else x
        out = (dense(w, precision_config)[ids] @ rows.float()[:, :, None])[:, :, 0] + bias[ids]
        if fused_activation is not None:
            (_, (alpha, limit), halves) = fused_activation
            assert halves == 2
            return gpt_oss_swiglu(alpha, limit)(out[:, 0::2], out[:, 1::2])
        assert scatter_indx == "scatter"
        return (out * gammas.flatten()[:, None]).unflatten(0, (-1, 2)).sum(1).bfloat16()

    def routing(logits: torch.Tensor, topk: int) -> tuple[Any, str, str]:
        values, ids = logits.float().topk(topk)
        return SimpleNamespace(ids=ids, gate_scal=values.softmax(1)), "gather", "scatter"

    library = "triton_kernels"
    parts = {"FnSpecs": lambda *a: a, "FusedActivation": lambda *a: a, "PrecisionConfig": SimpleNamespace}
    stand_in(monkeypatch, f"{library}.matmul_ogs", matmul_ogs=matmul_ogs, **parts)
    constraints: list[dict[str, int]] = []
    stand_in(monkeypatch, f"{library}.matmul_ogs_details.opt_flags", update_opt_flags_constraints=constraints.append)
    stand_in(monkeypatch, f"{library}.routing", routing=routing)
    stand_in(monkeypatch, f"{library}.swiglu", swiglu_fn="swiglu")
    tensors = {"FP4": "fp4", "wrap_torch_tensor": lambda t, dtype=None: t, "convert_layout": lambda t, layout: t}
    stand_in(monkeypatch, f"{library}.tensor", **tensors)
    layouts = ("make_default_matmul_mxfp4_w_layout", "make_default_matmul_mxfp4_w_scale_layout")
    stand_in(monkeypatch, f"{library}.tensor_details.layout", **dict.fromkeys(layouts, lambda **_: ("layout", {})))
    assert_close(run_peer(monkeypatch, "triton_kernels", "mxfp4", shape))
    assert constraints == [{"split_k": 1}]


def test_logits_give_the_routing_back() -> None:
    routing = make_routing(SHAPE, 5, seed=1)
    weights, ids = logits_of(8, routing.topk_idx, routing.topk_weights).float().softmax(1).topk(2)
    ours = routing.topk_weights.gather(1, routing.topk_weights.argsort(1, descending=True))
    torch.testing.assert_close(weights / weights.sum(1, keepdim=True), ours, atol=0.01, rtol=0)
    assert torch.equal(ids.sort(1).values, routing.topk_idx.sort(1).values)


def test_batched_mm_sits_out_where_its_copies_would_not_fit() -> None:
    pytest.importorskip("transformers")
    most = ADAPTERS["transformers_batched_mm"].make(MODELS["qwen3-30b-a3b"], "bf16").most_tokens
    assert most == (8 << 30) // (8 * 3 * 2048 * 768 * 2)


@pytest.mark.parametrize(
    ("name", "model", "format", "device", "reason"),
    [
        ("transformers_grouped_mm", "qwen3-30b-a3b", "mxfp8", "cpu", "takes bf16, not mxfp8"),
        ("vllm_triton", "qwen3-30b-a3b", "bf16", "cpu", "needs a GPU"),
        ("vllm_triton", "gpt-oss-20b", "bf16", "cuda", "SiLU without biases"),
        ("triton_kernels", "deepseek-v4-flash", "mxfp4", "cuda", "gpt-oss's activation with biases"),
    ],
)
def test_peers_that_do_not_serve_a_layer_say_why(name: str, model: str, format: str, device: str, reason: str) -> None:
    said = why_not(name, MODELS[model], format, torch.device(device))
    assert said is not None
    assert reason in said
    assert find_peers([name], MODELS[model], format, torch.device(device)) == ([], {name: said})


def test_missing_and_broken_libraries_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    stand_in(monkeypatch, "flashinfer.fused_moe", has_monomoe=lambda: False)
    names = ["sglang_triton", "flashinfer_mono_moe", "flashinfer_cutlass"]
    peers, left_out = find_peers(names, MODELS["qwen3-30b-a3b"], "fp8_block", torch.device("cuda"))
    assert peers == []
    assert left_out["sglang_triton"].startswith("cannot be imported: ModuleNotFoundError")
    assert left_out["flashinfer_mono_moe"] == "is built for 256 experts of 2048 x 512 alone"
    assert left_out["flashinfer_cutlass"] == "is not part of this FlashInfer"


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"must hold transformers_batched_mm.*got 'tensorrt'"):
        find_peers(["tensorrt"], SHAPE, "bf16", CPU)


def test_script_records_the_peers_that_are_there_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "peers.jsonl"
    argv = [
        "peers.py", "--device", "cpu", "--models", "h64xi32xe4xk2", "--formats", "bf16", "--batches", "2",
        "--repeats", "1", "--paths", "reference,warp", "--peers", "transformers_grouped_mm,vllm_triton",
        "--output", str(output),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [rec["impl"] for rec in load(output)] == ["warpring", "transformers_grouped_mm"]
    said = capsys.readouterr().out
    assert "moe_decode: path 'warp' needs CUDA tensors" in said, "a path of ours that fails costs its own records alone"
    assert "vllm_triton               h64xi32xe4xk2 bf16: left out, needs a GPU" in said
    assert "transformers_grouped_mm   h64xi32xe4xk2 bf16: timed in a CUDA graph, cosine 0.99" in said


@pytest.mark.gpu
def test_transformers_on_a_gpu_passes_its_trial() -> None:
    pytest.importorskip("transformers")
    script = runpy.run_path(str(SCRIPT))
    layer = ("transformers_batched_mm", "h256xi128xe8xk2", "bf16")
    *said, last = script["try_peer"](*layer, [1, 9], torch.device("cuda"))
    assert [each["most_tokens"] for each in said] == [1, 9]
    assert last["capturable"]
    assert last["cosine"] > 0.9999


def test_trial_of_a_dying_peer_is_told_not_suffered(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPT))
    popen = script["subprocess"].Popen
    pipes = {"stdout": -1, "stderr": -1, "text": True}
    dead = popen([sys.executable, "-c", "import os, sys; print('bad luck', file=sys.stderr); os._exit(3)"], **pipes)
    assert script["outcome"](dead, 60) == {"error": "died with exit code 3: bad luck"}
    fine = popen(
        [sys.executable, "-c", f"print('trial: ' + {json.dumps(json.dumps({'cosine': 1.0}))}); print('bye')"], **pipes
    )
    assert script["outcome"](fine, 60) == {"cosine": 1.0}
    sleeper = "import sys, time; print('compiling', file=sys.stderr); {}; sys.stdout.flush(); time.sleep(600)"
    slow = popen([sys.executable, "-c", sleeper.format("pass")], **pipes)
    assert script["outcome"](slow, 3) == {"error": "gave no answer in the time for trials: compiling"}
    assert slow.returncode is not None, "it does not run on beside what is timed"
    tried = "trial: " + json.dumps({"cosine": 0.5, "most_tokens": 4})
    slow = popen([sys.executable, "-c", sleeper.format(f"print({json.dumps(tried)})")], **pipes)
    assert script["outcome"](slow, 3) == {"cosine": 0.5, "most_tokens": 4}


def test_a_peer_that_is_wrong_in_the_run_costs_its_own_row_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = runpy.run_path(str(SCRIPT))

    class Bench:
        def __init__(self, *_: Any, **__: Any) -> None:
            """Of any layer."""

        def run(self, batches: list[int], paths: list[str], *, peers: Any, on_wrong: Any) -> Iterator[list[Any]]:
            on_wrong("'other' gives a wrong result, B=2")
            yield [{"impl": "warpring", "num_tokens": 2}]

    written: list[Any] = []
    names = script["measure"].__globals__
    monkeypatch.setitem(names, "LayerBench", Bench)
    monkeypatch.setitem(names, "append", lambda _, rec: written.append(rec))
    for shown in ("describe", "row"):
        monkeypatch.setitem(names, shown, str)
    args = argparse.Namespace(
        device=CPU, repeats=1, batches=["2"], time_budget=None, output=tmp_path / "out", paths=["warp"]
    )
    assert script["measure_layer"](args, "gpt-oss-120b", "mxfp4", [], 0.0) == ["'other' gives a wrong result, B=2"]
    assert [rec["impl"] for rec in written] == ["warpring"]


def test_peer_that_fails_only_where_it_is_timed_costs_our_paths_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPT))
    tried: list[tuple[list[str], int]] = []

    def measure(
        args: argparse.Namespace, paths: list[str], model: str, format: str, peers: list[Peer], start: float
    ) -> list[str]:
        tried.append((paths, len(peers)))
        if peers:
            raise AssertionError("no such layout")
        return ["B=8: left out"]

    monkeypatch.setitem(script["measure_layer"].__globals__, "measure", measure)
    args = argparse.Namespace(paths=["warp", "tile"])
    peer = Peer("other", "", lambda experts: experts, lambda *_: lambda: None)
    said = script["measure_layer"](args, "gpt-oss-120b", "mxfp4", [peer], 0.0)
    assert tried == [(["warp", "tile"], 1), (["warp"], 1), (["warp", "tile"], 0)]
    assert said == [
        "warp, tile, other: AssertionError: no such layout",
        "warp, other: AssertionError: no such layout",
        "B=8: left out",
    ]


def test_layers_that_are_measured_without_a_choice_are_those_of_the_page() -> None:
    chosen_layers = runpy.run_path(str(SCRIPT))["chosen_layers"]
    assert chosen_layers(None, None) == list(PEER_LAYERS)
    assert chosen_layers(["a", "b"], ["bf16"]) == [("a", "bf16"), ("b", "bf16")]
