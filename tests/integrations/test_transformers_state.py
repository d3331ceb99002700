"""Packed weights follow the module's weights, are freed on request, and every call is counted and checked."""

from __future__ import annotations

import copy
import gc
import weakref

import hf_models as hf
import pytest
import torch

import warpring.integrations.transformers as wrt
from warpring.errors import ArgumentError, UnsupportedError
from warpring.formats import get_format
from warpring.integrations.transformers.state import find_state
from warpring.layout import PackedExperts, pack_experts
from warpring.reference import moe_reference


@pytest.fixture
def model(device: torch.device):
    return hf.make_model("qwen3_moe", seed=1).to(device)


def _inputs(device: torch.device, num_tokens: int = 5, seed: int = 2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hf.HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.randint(0, hf.NUM_EXPERTS, (num_tokens, hf.TOPK), generator=generator)
    return x.to(device), topk_idx.to(device), torch.rand(num_tokens, hf.TOPK, generator=generator).to(device)


def _experts(model: torch.nn.Module) -> torch.nn.Module:
    return hf.experts_of(model)[0]


@pytest.mark.parametrize("format", [None, "mxfp8"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(0.5),
        lambda weight: setattr(weight, "data", weight.data + 0.5),
        lambda weight: weight.copy_(weight.roll(1, 0)),
    ],
    ids=["in_place", "new_storage", "copy_"],
)
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_changed_weights_are_packed_again(model, device: torch.device, format, change, name: str) -> None:
    wrt.install(model, format=format)
    module = _experts(model)
    with torch.no_grad():
        before = module(*_inputs(device))
        change(getattr(module, name))
        after = module(*_inputs(device))
        fresh = copy.deepcopy(model)
        wrt.install(fresh, format=format)
        assert not torch.equal(after, before)
        assert torch.equal(after, _experts(fresh)(*_inputs(device)))


def test_an_optimizer_step_is_seen(model, device: torch.device) -> None:
    wrt.install(model, format="mxfp8")
    module = _experts(model)
    with torch.no_grad():
        before = module(*_inputs(device))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(module(*_inputs(device)), before)


def test_unchanged_weights_are_packed_once(model, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    wrt.install(model, format="mxfp8")

    def never(*args: object) -> None:
        pytest.fail("packed again")

    monkeypatch.setattr("warpring.integrations.transformers.state.pack", never)
    with torch.no_grad():
        for num_tokens in (1, 3, 200):
            _experts(model)(*_inputs(device, num_tokens))


def test_copy_of_a_model_packs_its_own_weights(model, device: torch.device) -> None:
    wrt.install(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        _experts(twin).down_proj.zero_()
        assert not _experts(twin)(*_inputs(device)).any()
        assert _experts(model)(*_inputs(device)).any()
    assert sum(s.calls for s in wrt.stats(twin).values()) == 1


def test_packed_weights_die_with_the_model() -> None:
    model = hf.make_model("qwen3_moe", seed=3)
    packed = wrt.install(model, format="mxfp8")
    alive = [weakref.ref(experts) for experts in packed.values()]
    del packed
    assert all(ref() is not None for ref in alive)
    del model
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_install_leaves_the_state_dict_as_it_was(model) -> None:
    keys = list(model.state_dict())
    wrt.install(model, format="mxfp8")
    assert list(model.state_dict()) == keys


def test_installing_again_replaces_format_and_counters(model, device: torch.device) -> None:
    assert {e.format for e in wrt.install(model).values()} == {"bf16"}
    with torch.no_grad():
        _experts(model)(*_inputs(device))
    assert {e.format for e in wrt.install(model, format="mxfp4").values()} == {"mxfp4"}
    assert wrt.stats(model) == {}


def test_freed_model_still_runs_and_refuses_all_that_needs_dense_weights(model, device: torch.device, tmp_path) -> None:
    kept = copy.deepcopy(model)
    wrt.install(kept, format="mxfp8")
    wrt.install(model, format="mxfp8", free=True)
    assert all(module.gate_up_proj.numel() == module.down_proj.numel() == 0 for module in hf.experts_of(model))
    with torch.no_grad():
        for num_tokens in (3, 200):
            inputs = _inputs(device, num_tokens)
            assert torch.equal(_experts(model)(*inputs), _experts(kept)(*inputs))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.experts.*cannot be saved"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="Reload"):
        wrt.install(model, format="bf16")
    model.set_experts_implementation("eager")
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"'eager'.*Switch back to 'warpring'"):
        _experts(model)(*_inputs(device))
    model.set_experts_implementation("warpring")
    with torch.no_grad():
        _experts(model)(*_inputs(device))


def test_freed_bf16_model_serves_large_batches_from_the_packed_weights(model, device: torch.device) -> None:
    wrt.install(model, free=True)
    with torch.no_grad():
        _experts(model)(*_inputs(device, 300))
    assert set(wrt.stats(model)) == {"grouped"}


@pytest.mark.gpu
def test_freed_model_moves_with_its_inputs() -> None:
    model = hf.make_model("qwen3_moe", seed=4)
    wrt.install(model, format="mxfp8", free=True)
    model.cuda()
    x, topk_idx, topk_weights = _inputs(torch.device("cuda"))
    with torch.no_grad():
        on_gpu = _experts(model)(x, topk_idx, topk_weights).cpu()
        again = hf.make_model("qwen3_moe", seed=4)
        on_cpu = moe_reference(
            x.cpu(), next(iter(wrt.install(again, format="mxfp8").values())), topk_idx.cpu(), topk_weights.cpu()
        )
    assert hf.rms(on_gpu - on_cpu) <= 2**-8 * hf.rms(on_cpu)


@pytest.mark.parametrize("num_tokens", [4, 200])
def test_sentinel_ids_contribute_nothing(model, device: torch.device, num_tokens: int) -> None:
    wrt.install(model)
    module = _experts(model)
    module._is_expert_parallel = True
    x, topk_idx, topk_weights = _inputs(device, num_tokens)
    topk_idx[:, 1] = hf.NUM_EXPERTS
    topk_idx[0] = hf.NUM_EXPERTS
    topk_weights[topk_idx == hf.NUM_EXPERTS] = 0
    before = topk_idx.clone()
    with torch.no_grad():
        y = module(x, topk_idx, topk_weights)
        without = module(x[1:], topk_idx[1:, [0, 2]].contiguous(), topk_weights[1:, [0, 2]].contiguous())
    assert torch.equal(topk_idx, before)
    assert not y[0].any()
    assert hf.rms(y[1:] - without) <= 2**-8 * hf.rms(without)


def test_decode_sized_call_ignores_the_sentinels_weight(model, device: torch.device) -> None:
    wrt.install(model)
    x, topk_idx, topk_weights = _inputs(device, 4)
    topk_idx[:, 1], topk_weights[:, 1] = hf.NUM_EXPERTS, torch.nan
    with torch.no_grad():
        assert _experts(model)(x, topk_idx, topk_weights).isfinite().all()


def test_id_beyond_the_sentinel_is_an_error_on_the_host() -> None:
    model = hf.make_model("qwen3_moe", seed=5)
    wrt.install(model)
    x, topk_idx, topk_weights = _inputs(torch.device("cpu"))
    topk_idx[0, 0] = hf.NUM_EXPERTS + 1
    with torch.no_grad(), pytest.raises(ArgumentError, match="topk_idx"):
        _experts(model)(x, topk_idx, topk_weights)


@pytest.mark.parametrize("train", [False, True])
def test_gradients_are_refused_with_the_remedy(model, device: torch.device, train: bool) -> None:
    model.train(train)
    wrt.install(model)
    ids = torch.ones(1, 3, dtype=torch.int64, device=device)
    with pytest.raises(UnsupportedError, match=r"no backward.*torch\.no_grad\(\).*grouped_mm"):
        model(ids)
    with torch.no_grad():
        model(ids)
    with torch.inference_mode():
        model(ids)
    model.set_experts_implementation("grouped_mm")
    model(ids).logits.sum().backward()


def test_frozen_weights_and_inputs_run_with_gradients_enabled(model, device: torch.device) -> None:
    model.requires_grad_(False)
    wrt.install(model)
    assert not _experts(model)(*_inputs(device)).requires_grad


def test_stats_count_calls_and_token_ranges_by_path(model, device: torch.device) -> None:
    wrt.install(model)
    assert wrt.stats(model) == {}
    decode = "warp" if device.type == "cuda" else "cores"
    with torch.no_grad():
        for num_tokens in (3, 1, 200, 2):
            _experts(model)(*_inputs(device, num_tokens))
        hf.experts_of(model)[1](*_inputs(device, 4))
    assert wrt.stats(model) == {
        decode: wrt.PathStats(calls=4, tokens=10, min_tokens=1, max_tokens=4),
        "grouped": wrt.PathStats(calls=1, tokens=200, min_tokens=200, max_tokens=200),
    }
    wrt.reset_stats(model)
    assert wrt.stats(model) == {}


@pytest.mark.parametrize("path", ["reference", "classical", pytest.param("warp", marks=pytest.mark.gpu)])
def test_a_forced_path_serves_every_call(path: str) -> None:
    device = torch.device("cuda" if path == "warp" else "cpu")
    model = hf.make_model("qwen3_moe", seed=6).to(device)
    wrt.install(model, path=path)
    with torch.no_grad():
        for num_tokens in (2, 100):
            _experts(model)(*_inputs(device, num_tokens))
    assert wrt.stats(model) == {path: wrt.PathStats(calls=2, tokens=102, min_tokens=2, max_tokens=100)}


def test_quantised_model_serves_every_batch_from_the_quantised_weights(model, device: torch.device) -> None:
    """A prompt served by the dense weights would measure another model."""
    packed = wrt.install(model, format="mxfp4")
    experts = next(iter(packed.values()))
    x, topk_idx, topk_weights = _inputs(device, 200)
    with torch.no_grad():
        y = _experts(model)(x, topk_idx, topk_weights)
    want = moe_reference(x, experts, topk_idx, topk_weights)
    assert hf.rms(y - want) <= 2**-7 * hf.rms(want)
    w13 = get_format("mxfp4").dequantize(experts.w13).flatten(1, 2)
    assert hf.rms(w13 - _experts(model).gate_up_proj.float()) > 0.05 * hf.rms(w13)


@pytest.mark.parametrize("format", [None, "mxfp8", "mxfp4"])
@pytest.mark.parametrize("free", [False, True])
def test_tile_layout_serves_every_batch_from_packed_weights(
    model, device: torch.device, format: str | None, free: bool
) -> None:
    rows = copy.deepcopy(model)
    wrt.install(rows, format=format, path="grouped")
    packed = wrt.install(model, format=format, free=free, layout="tile")
    assert {type(experts) for experts in packed.values()} == {PackedExperts}
    with torch.no_grad():
        for num_tokens in (1, 5, 2000):
            inputs = _inputs(device, num_tokens)
            y, want = _experts(model)(*inputs), _experts(rows)(*inputs)
            assert hf.rms(y - want) <= 2**-7 * hf.rms(want)
    assert set(wrt.stats(model)) == ({"tile", "grouped"} if device.type == "cuda" else {"grouped"})
    assert all((module.gate_up_proj.numel() == 0) == free for module in hf.experts_of(model))


def test_tile_layout_is_packed_again_when_weights_change(model, device: torch.device) -> None:
    wrt.install(model, layout="tile")
    with torch.no_grad():
        assert _experts(model)(*_inputs(device)).any()
        _experts(model).down_proj.zero_()
        assert not _experts(model)(*_inputs(device)).any()


def test_freed_tile_layout_moves_with_its_inputs() -> None:
    model = hf.make_model("qwen3_moe", seed=9)
    wrt.install(model, layout="tile", free=True)
    moved = find_state(_experts(model)).experts(torch.device("meta"))
    assert isinstance(moved, PackedExperts)
    assert moved.device.type == "meta"


def test_experts_packed_elsewhere_are_taken_as_they_are() -> None:
    model = hf.make_model("qwen3_moe", seed=10)
    twin = copy.deepcopy(model)
    packed = {name: pack_experts(experts) for name, experts in wrt.install(twin, format="mxfp8").items()}
    wrt.install_packed(model, packed)
    inputs = _inputs(torch.device("cpu"))
    with torch.no_grad():
        y = _experts(model)(*inputs)
        wrt.install(twin, format="mxfp8", path="grouped")
        assert torch.equal(y, _experts(twin)(*inputs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "tile", "path": "warp"}, "weights in layout 'tile' take path auto, tile, grouped; got 'warp'"),
        ({"layout": "rows", "path": "tile"}, r"weights in layout 'rows' take path auto, warp, cores.*; got 'tile'"),
    ],
)
def test_path_that_a_layout_lacks_is_refused_before_anything_changes(settings: dict[str, str], message: str) -> None:
    model = hf.make_model("qwen3_moe", seed=11)
    with pytest.raises(UnsupportedError, match=message):
        wrt.install(model, **settings)
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_named_format_runs_in_models_of_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    model = hf.make_model("qwen3_moe", seed=7, dtype=dtype).to(device)
    module = _experts(model)
    x, topk_idx, topk_weights = _inputs(device)
    with torch.no_grad():
        want = module(x.to(dtype), topk_idx, topk_weights.to(dtype))
        wrt.install(model, format="bf16")
        got = module(x.to(dtype), topk_idx, topk_weights)
    assert got.dtype == dtype
    assert hf.rms(got - want) <= 2**-7 * hf.rms(want)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_autocast_changes_nothing(model, device: torch.device, path: str) -> None:
    """On CUDA, autocast would round the reference's FP32 products to BF16."""
    wrt.install(model, path=path)
    inputs = _inputs(device)
    with torch.no_grad():
        plain = _experts(model)(*inputs)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert torch.equal(_experts(model)(*inputs), plain)


def test_zero_tokens_give_an_empty_result(model, device: torch.device) -> None:
    wrt.install(model)
    x, topk_idx, topk_weights = _inputs(device)
    with torch.no_grad():
        assert _experts(model)(x[:0], topk_idx[:0], topk_weights[:0]).shape == (0, hf.HIDDEN)


@pytest.mark.parametrize(("argument", "value"), [("format", "int3"), ("path", "fastest"), ("layout", "cube")])
def test_unknown_settings_are_refused_before_anything_changes(argument: str, value: str) -> None:
    model = hf.make_model("qwen3_moe", seed=8)
    with pytest.raises(ArgumentError, match=f"{argument} must be one of.*{value}"):
        wrt.install(model, **{argument: value})
    assert model.config._experts_implementation == "eager"


def test_model_without_dispatched_experts_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has no experts.*Mxfp4Config\(dequantize=True\)"):
        wrt.install(LlamaForCausalLM(config))
