"""Whole tiny models through warpring against their own eager code.

The yardstick is the same model in FP32 (experts alone: FP64). BF16 eager is off by its own roundings; warpring's
experts keep FP32 sums, so they must not be farther off than eager is, and everything around them is the same code.
"""

from __future__ import annotations

import copy

import hf_models as hf
import pytest
import torch
import transformers

import warpring.integrations.transformers as wrt
from warpring.policy import choose_path

ARCHITECTURES = list(hf.CONFIGS)
DECODE, PREFILL = (8, 1), (4, 64)


def _ids(shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, hf.VOCAB, shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_are_at_least_as_close_to_fp64_as_eager(architecture: str, device: torch.device) -> None:
    model = hf.make_model(architecture, seed=11).to(device)
    inputs = hf.run(model, _ids(DECODE, 12, device)).inputs
    assert len(inputs) == len(hf.experts_of(model)) >= 1
    with torch.no_grad():
        for module, (x, topk_idx, topk_weights) in inputs:
            eager = module(x, topk_idx, topk_weights).double()
            truth = copy.deepcopy(module).double()(x.double(), topk_idx, topk_weights.double())
            ours = wrt.experts_forward(module, x, topk_idx, topk_weights).double()
            assert hf.rms(ours - truth) <= hf.rms(eager - truth)
            # Three BF16 roundings (act, out, x's own none) of 2^-9 each, at most 2^-7 of the result's size.
            assert hf.rms(ours - truth) <= 2**-7 * hf.rms(truth)


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_eager(architecture: str, shape: tuple[int, int], device: torch.device) -> None:
    model = hf.make_model(architecture, seed=21).to(device)
    ids = _ids(shape, 22, device)
    truth, eager = hf.run(hf.truth_of(model), ids), hf.run(model, ids)
    model.set_experts_implementation("warpring")
    ours = hf.run(model, ids)
    same = hf.same_routes(truth, eager, ours)
    assert same.float().mean() > 0.25
    ours_error = hf.rms((ours.logits - truth.logits)[same])
    eager_error = hf.rms((eager.logits - truth.logits)[same])
    assert ours_error <= 1.25 * eager_error
    # Swapped halves, a lost clamp or bias move the logits by 10 % and more; eager's own error is near 1 %.
    assert ours_error <= 0.03 * hf.rms(truth.logits[same])
    path = choose_path(next(iter(wrt.install(copy.deepcopy(model)).values())), ids.numel(), hf.TOPK)
    assert set(wrt.stats(model)) == {path}
    assert (path == "grouped") == (shape == PREFILL)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_wrong_layout_would_show_in_the_logits(architecture: str) -> None:
    """The bounds above are tight enough to see gate and up exchanged."""
    model = hf.make_model(architecture, seed=31)
    ids = _ids(DECODE, 32, torch.device("cpu"))
    truth = hf.run(model, ids)
    for module in hf.experts_of(model):
        module.is_concatenated = not module.is_concatenated
        # The module's own code ignores the flag; ours follows it, so it must refuse or differ.
    model.set_experts_implementation("warpring")
    with pytest.raises(NotImplementedError, match="_apply_gate"):
        hf.run(model, ids)
    for module in hf.experts_of(model):
        module.is_concatenated = not module.is_concatenated
        flipped = module.gate_up_proj.flip(-1 if module.is_transposed else 1)
        module.gate_up_proj.data.copy_(flipped)
    wrong = hf.run(model, ids)
    assert hf.rms(wrong.logits - truth.logits) > 0.1 * hf.rms(truth.logits)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_generate_takes_eagers_token_wherever_eager_is_sure(architecture: str, device: torch.device) -> None:
    model = hf.make_model(architecture, seed=41).to(device)
    prompt = _ids((1, 40), 42, device)
    wrt.install(model)
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False)
    stats = wrt.stats(model)
    layers = len(hf.experts_of(model))
    # One call a layer for the prompt, then one a layer for each further token.
    assert {s.calls for s in stats.values()} == {layers, 11 * layers}
    decode = max(stats.values(), key=lambda s: s.calls)
    assert (decode.min_tokens, decode.max_tokens, decode.tokens) == (1, 1, 11 * layers)

    model.set_experts_implementation("eager")
    eager = hf.run(model, generated[:, :-1]).logits[0, prompt.shape[1] - 1 :]
    chosen = generated[0, prompt.shape[1] :]
    top = eager.max(-1).values
    # Both are off by about 1 % of the logits' size; a lead of 6 % cannot turn around.
    lead = 0.06 * hf.rms(eager)
    assert (top - eager.gather(1, chosen[:, None])[:, 0] <= lead).all()
    assert (chosen == eager.argmax(-1)).float().mean() >= 0.75


def test_from_pretrained_takes_the_name(tmp_path, device: torch.device) -> None:
    hf.make_model("qwen3_moe", seed=51).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = _ids(DECODE, 52, device)
    eager = hf.run(load(tmp_path, dtype=torch.bfloat16, experts_implementation="eager").to(device), ids)
    model = load(tmp_path, dtype=torch.bfloat16, experts_implementation="warpring").to(device)
    ours = hf.run(model, ids)
    same = hf.same_routes(eager, ours)
    assert hf.rms((ours.logits - eager.logits)[same]) <= 0.03 * hf.rms(eager.logits)
    assert sum(s.calls for s in wrt.stats(model).values()) == 2


def test_both_interfaces_know_the_name() -> None:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    assert "warpring" in ExpertsInterface()
    assert "warpring" in FP8ExpertsInterface()


def test_model_compiles_to_one_graph_that_runs_the_experts(device: torch.device) -> None:
    model = hf.make_model("qwen3_moe", seed=61).to(device)
    wrt.install(model)
    ids = _ids(DECODE, 62, device)
    plain = hf.run(model, ids).logits
    wrt.reset_stats(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    assert sum(s.calls for s in wrt.stats(model).values()) == 2
    assert hf.rms(compiled - plain) <= 0.03 * hf.rms(plain)


def _call(seed: int, device: torch.device, num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hf.HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.randint(0, hf.NUM_EXPERTS, (num_tokens, hf.TOPK), generator=generator)
    return x.to(device), topk_idx.to(device), torch.rand(num_tokens, hf.TOPK, generator=generator).to(device)


def test_compiled_experts_give_the_same_bits_and_see_changed_weights(device: torch.device) -> None:
    model = hf.make_model("gpt_oss", seed=65).to(device)
    wrt.install(model)
    module, call = hf.experts_of(model)[0], _call(66, device)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        plain = module(*call)
        assert torch.equal(compiled(*call), plain)
        module.down_proj.mul_(-1)
        changed = compiled(*call)
        assert not torch.equal(changed, plain)
        assert torch.equal(changed, module(*call))


def test_compile_before_any_packing_breaks_the_graph_and_names_the_remedy() -> None:
    model = hf.make_model("qwen3_moe", seed=63)
    model.set_experts_implementation("warpring")
    module, call = hf.experts_of(model)[0], _call(64, torch.device("cpu"))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"install\(model\)"):
            torch.compile(module, fullgraph=True, backend="aot_eager")(*call)
        torch.compiler.reset()
        assert torch.equal(torch.compile(module, backend="aot_eager")(*call), module(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_installed_experts_can_be_captured_in_a_cuda_graph(architecture: str) -> None:
    model = hf.make_model(architecture, seed=71).cuda()
    wrt.install(model)
    module = hf.experts_of(model)[0]
    x, topk_idx, topk_weights = _call(73, torch.device("cuda"))
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            module(x, topk_idx, topk_weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = module(x, topk_idx, topk_weights)
        x.copy_(torch.randn_like(x))
        topk_idx.copy_((topk_idx + 1) % hf.NUM_EXPERTS)
        graph.replay()
        assert torch.equal(y, module(x, topk_idx, topk_weights))


@pytest.mark.gpu
def test_packing_inside_a_capture_is_refused() -> None:
    model = hf.make_model("qwen3_moe", seed=72).cuda()
    model.set_experts_implementation("warpring")
    module = hf.experts_of(model)[0]
    call, graph = _call(74, torch.device("cuda")), torch.cuda.CUDAGraph()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="captured"), torch.cuda.graph(graph):
        module(*call)
