"""Layout flags, gates and number formats of experts modules: honoured exactly, or refused by name."""

from __future__ import annotations

import inspect
import itertools
import types

import hf_models as hf
import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import warpring.integrations.transformers as wrt
from warpring.activation import GELU_TANH, SILU, clipped_swiglu, gpt_oss_swiglu
from warpring.errors import UnsupportedError
from warpring.formats import QuantizedTensor, get_format
from warpring.integrations.transformers.gate import recognise_gate
from warpring.integrations.transformers.layout import pack
from warpring.reference import moe_exact

E, H, INTER = 4, 64, 96
CPU = torch.device("cpu")


def _make(seed: int = 0, hidden: int = H, intermediate: int = INTER, hidden_act: str = "silu", cls=None, **flags):
    """An experts module of the given layout, its logical weights, and a forward of transformers' own."""
    transposed, concatenated = flags.get("is_transposed", False), flags.get("is_concatenated", True)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).bfloat16()

    w13, w2 = randn(E, 2, intermediate, hidden), randn(E, hidden, intermediate)
    b13, b2 = randn(E, 2, intermediate), randn(E, hidden)

    class TinyExperts(cls or torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts = E
            self.act_fn = ACT2FN[hidden_act]

            def rows(t: torch.Tensor) -> torch.Tensor:
                return t.flatten(1, 2) if concatenated else t.transpose(1, 2).flatten(1, 2)

            def stored(t: torch.Tensor) -> torch.nn.Parameter:
                return torch.nn.Parameter((t.mT if transposed else t).contiguous(), requires_grad=False)

            self.gate_up_proj, self.down_proj = stored(rows(w13)), stored(w2)
            if flags.get("has_bias"):
                self.gate_up_proj_bias = torch.nn.Parameter(rows(b13).contiguous(), requires_grad=False)
                self.down_proj_bias = torch.nn.Parameter(b2, requires_grad=False)

        def forward(self, *args: object) -> None:
            raise NotImplementedError

    module = use_experts_implementation(TinyExperts, **flags)(types.SimpleNamespace(_experts_implementation="warpring"))
    biases = (b13, b2) if flags.get("has_bias") else (None, None)
    return module, (w13, w2, *biases)


def _inputs(seed: int = 5, num_tokens: int = 7, hidden: int = H):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    return x, torch.randint(0, E, (num_tokens, 2), generator=generator), torch.rand(num_tokens, 2, generator=generator)


class _Interleaved(torch.nn.Module):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize(("transposed", "concatenated", "bias"), list(itertools.product([False, True], repeat=3)))
def test_every_layout_packs_the_logical_weights(transposed: bool, concatenated: bool, bias: bool) -> None:
    cls = None if concatenated else _Interleaved
    module, (w13, w2, b13, b2) = _make(
        1, cls=cls, is_transposed=transposed, is_concatenated=concatenated, has_bias=bias
    )
    experts = pack(module, None)
    assert experts.format == "bf16"
    assert experts.activation == SILU
    assert torch.equal(experts.w13.data, w13)
    assert torch.equal(experts.w2.data, w2)
    if bias:
        assert torch.equal(experts.w13_bias, b13.float())
        assert torch.equal(experts.w2_bias, b2.float())
    else:
        assert experts.w13_bias is None
        assert experts.w2_bias is None


def test_usual_layout_shares_storage_with_the_parameters() -> None:
    module, _ = _make(2)
    experts = pack(module, None)
    assert experts.w13.data.data_ptr() == module.gate_up_proj.data_ptr()
    assert experts.w2.data.data_ptr() == module.down_proj.data_ptr()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "fp8_block", "fp8_channel"])
def test_named_format_quantises_the_dense_weights(format: str) -> None:
    module, (w13, w2, *_) = _make(3)
    experts = pack(module, format)
    assert experts.format == format
    for got, weight in ((experts.w13, w13), (experts.w2, w2)):
        want = get_format(format).quantize(weight)
        for a, b in zip(got.tensors(), want.tensors(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("low_codes", [0xFF, 0x33, 0x99], ids=["all", "up_to_1.5", "only_halves"])
def test_values_that_came_from_mxfp4_pack_back_exactly(low_codes: int) -> None:
    """A dequantised gpt-oss checkpoint loses nothing, whatever share of its range each block uses."""
    module, _ = _make(13, cls=_Interleaved, is_transposed=True, is_concatenated=False)
    fmt, generator = get_format("mxfp4"), torch.Generator().manual_seed(14)

    def values(*shape: int) -> torch.Tensor:
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
        scale = torch.randint(100, 140, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
        return fmt.dequantize(QuantizedTensor("mxfp4", shape, codes & low_codes, scale))

    w13, w2 = values(E, 2, INTER, H), values(E, H, INTER)
    module.gate_up_proj.data = w13.transpose(1, 2).flatten(1, 2).mT.bfloat16()
    module.down_proj.data = w2.mT.bfloat16()
    experts = pack(module, "mxfp4")
    assert torch.equal(experts.dequantize()[0], w13.flatten(1, 2))
    assert torch.equal(experts.dequantize()[1], w2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_no_format_need_a_named_one(dtype: torch.dtype) -> None:
    module, (w13, *_) = _make(4)
    module.to(dtype)
    with pytest.raises(UnsupportedError, match=r"must be bfloat16.*dtype=torch\.bfloat16"):
        pack(module, None)
    assert torch.equal(pack(module, "bf16").w13.data, w13)


def test_absent_gate_projection_is_refused_by_name() -> None:
    module, _ = _make(6, has_gate=False)
    with pytest.raises(UnsupportedError, match="has_gate"):
        module(*_inputs())


def test_post_expert_norm_is_refused_by_name() -> None:
    module, _ = _make(7)
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedError, match="has_post_expert_norm"):
        module(*_inputs())


def test_flag_of_a_later_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = _make(8)

    def later(experts_class=None, *, is_transposed: bool = False, has_moon_phase: bool = False) -> None: ...

    monkeypatch.setattr("warpring.integrations.transformers.layout.use_experts_implementation", later)
    pack(module, None)
    module.has_moon_phase = True
    with pytest.raises(UnsupportedError, match="has_moon_phase"):
        pack(module, None)


@pytest.mark.parametrize(("hidden", "intermediate", "name"), [(48, 96, "hidden"), (64, 80, "intermediate")])
def test_sizes_that_do_not_divide_by_32_are_refused_at_packing(hidden: int, intermediate: int, name: str) -> None:
    module, _ = _make(9, hidden=hidden, intermediate=intermediate)
    with pytest.raises(UnsupportedError, match=f"{name} must be a multiple of 32"):
        pack(module, None)


def test_shapes_that_contradict_is_transposed_are_refused() -> None:
    module, _ = _make(10)
    module.is_transposed = True
    with pytest.raises(UnsupportedError, match="is_transposed=True"):
        pack(module, None)


def test_offloaded_and_meta_and_distributed_weights_are_refused() -> None:
    module, _ = _make(11)
    module._hf_hook = types.SimpleNamespace(offload=True)
    with pytest.raises(UnsupportedError, match="offloaded"):
        pack(module, None)
    module._hf_hook = types.SimpleNamespace(offload=False)
    pack(module, None)
    module.gate_up_proj.to_local = None
    with pytest.raises(UnsupportedError, match="DTensor"):
        pack(module, None)
    del module.gate_up_proj.to_local
    module.to_empty(device="meta")
    with pytest.raises(UnsupportedError, match="meta tensor"):
        pack(module, None)


def _gate_module(apply_gate, hidden_act: str = "silu", **attributes: object) -> torch.nn.Module:
    module = torch.nn.Module()
    module.act_fn = ACT2FN[hidden_act]
    module.is_concatenated = True
    module._apply_gate = lambda gate_up: apply_gate(module, *gate_up.chunk(2, -1))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _plain(m, gate, up):
    return m.act_fn(gate) * up


def _clipped(m, gate, up):
    return m.act_fn(gate.clamp(max=m.limit)) * up.clamp(min=-m.limit, max=m.limit)


def _gpt_oss(m, gate, up):
    gate, up = gate.clamp(max=m.limit), up.clamp(min=-m.limit, max=m.limit)
    return (up + 1) * gate * torch.sigmoid(gate * m.alpha)


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (_gate_module(_plain), SILU),
        (_gate_module(lambda m, g, u: (m.act_fn(g.float()) * u.float()).to(g.dtype)), SILU),
        (_gate_module(_plain, "gelu_pytorch_tanh"), GELU_TANH),
        (_gate_module(_plain, "gelu_new"), GELU_TANH),
        (_gate_module(_plain, limit=7.0), SILU),
        (_gate_module(_clipped, limit=10.0), clipped_swiglu(10.0)),
        (_gate_module(_clipped, limit=7), clipped_swiglu(7.0)),
        (_gate_module(_gpt_oss, alpha=1.702, limit=7.0), gpt_oss_swiglu()),
        (_gate_module(_gpt_oss, alpha=1.5, limit=5.0), gpt_oss_swiglu(1.5, 5.0)),
    ],
    ids=[
        "silu",
        "fp32_inside",
        "gelu_tanh",
        "gelu_new",
        "unused_limit",
        "clip",
        "int_limit",
        "gpt_oss",
        "other_gpt_oss",
    ],
)
def test_gate_is_recognised_by_what_it_computes(module: torch.nn.Module, activation) -> None:
    assert recognise_gate(module, CPU) == activation


UNKNOWN_GATES = {
    "erf_gelu": _gate_module(_plain, "gelu"),
    "relu2": _gate_module(_plain, "relu2"),
    "swapped": _gate_module(lambda m, g, u: m.act_fn(u) * g),
    "clamp_after": _gate_module(lambda m, g, u: m.act_fn(g).clamp(max=7.0) * u.clamp(-7.0, 7.0), limit=7.0),
    "gate_clamp_only": _gate_module(lambda m, g, u: m.act_fn(g.clamp(max=7.0)) * u, limit=7.0),
    "up_clamp_only": _gate_module(lambda m, g, u: m.act_fn(g) * u.clamp(-7.0, 7.0), limit=7.0),
    "clamped_below": _gate_module(lambda m, g, u: m.act_fn(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0), limit=7.0),
    "hidden_limit": _gate_module(lambda m, g, u: m.act_fn(g.clamp(max=50.0)) * u.clamp(-50.0, 50.0)),
    "far_limit": _gate_module(lambda m, g, u: m.act_fn(g.clamp(max=1e4)) * u),
    "near_limit": _gate_module(lambda m, g, u: m.act_fn(g.clamp(max=7.05)) * u.clamp(-7.05, 7.05), limit=7.0),
    "slope": _gate_module(lambda m, g, u: g * torch.sigmoid(1.01 * g) * u),
    "offset": _gate_module(lambda m, g, u: m.act_fn(g) * (u + 0.5)),
    "softcap": _gate_module(lambda m, g, u: torch.tanh(g / 20) * 20 * torch.sigmoid(g) * u),
    "shape": _gate_module(lambda m, g, u: (m.act_fn(g) * u)[:, :1]),
    "signature": _gate_module(lambda m, g, u: m.act_fn(g, u)),
}


@pytest.mark.parametrize("module", UNKNOWN_GATES.values(), ids=UNKNOWN_GATES.keys())
def test_gate_of_another_kind_is_refused_by_name(module: torch.nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="_apply_gate"):
        recognise_gate(module, CPU)


def test_model_whose_gate_differs_is_never_run() -> None:
    model = hf.make_model("deepseek_v3", seed=12)
    for module in hf.experts_of(model):
        module._apply_gate = lambda gate_up: functional.relu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]
    with pytest.raises(UnsupportedError, match=r"install: model\.layers\.1\.mlp\.experts: .*_apply_gate"):
        wrt.install(model)
    assert model.config._experts_implementation == "eager"


def _fp8_module(seed: int, intermediate: int = 256, hidden: int = 160, expert_dtype: str = "fp8", **arguments):
    """An FP8Experts of transformers, filled with weights that our own quantiser made, and those as dense tensors."""
    config = types.SimpleNamespace(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_local_experts=E,
        hidden_act="silu",
        expert_dtype=expert_dtype,
        _experts_implementation="warpring",
    )

    class TinyFP8Experts(finegrained_fp8.FP8Experts):
        pass

    if "expert_dtype" in inspect.signature(finegrained_fp8.FP8Experts.__init__).parameters:
        arguments["expert_dtype"] = expert_dtype
    decorated = use_experts_implementation(TinyFP8Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    module = decorated(config, **{"block_size": (128, 128), **arguments})
    fmt = get_format("fp8_block" if expert_dtype == "fp8" else "mxfp4")
    generator = torch.Generator().manual_seed(seed)
    dense = []
    for name, shape in (("gate_up_proj", (E, 2 * intermediate, hidden)), ("down_proj", (E, hidden, intermediate))):
        stored = fmt.quantize(torch.randn(*shape, generator=generator) * 0.2)
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        weight.data = stored.data.view(weight.dtype)
        ue8m0 = scale.dtype == torch.float8_e8m0fnu and expert_dtype == "fp8"
        scale.data = stored.scale.log2().round().exp2().to(scale.dtype) if ue8m0 else stored.scale.view(scale.dtype)
        blocks = scale.data.float().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : shape[1], : shape[2]]
        dense.append(stored.data.float() * blocks if expert_dtype == "fp8" else fmt.dequantize(stored))
    return module.requires_grad_(False), dense


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("activation_scheme", ["dynamic", "static"])
def test_fp8_block_experts_run_as_stored(scale_fmt: str, activation_scheme: str) -> None:
    module, (gate_up, down) = _fp8_module(20, scale_fmt=scale_fmt, activation_scheme=activation_scheme)
    x, topk_idx, topk_weights = _inputs(21, hidden=160)
    with torch.no_grad():
        y = module(x, topk_idx, topk_weights)
    experts = pack(module, None)
    assert experts.format == "fp8_block"
    assert experts.w13.data.data_ptr() == module.gate_up_proj.data_ptr()
    assert experts.w2.data.data_ptr() == module.down_proj.data_ptr()
    w13, w2 = experts.dequantize()
    assert torch.equal(w13, gate_up)
    assert torch.equal(w2, down)
    truth = moe_exact(x, experts, topk_idx, topk_weights)
    # BF16 between the projections and BF16 out, each 2^-9 relative; activations are not quantised to FP8.
    assert hf.rms(y - truth) <= 2**-8 * hf.rms(truth)


def test_fp8_experts_can_be_requantised() -> None:
    module, (gate_up, down) = _fp8_module(22)
    experts = pack(module, "nvfp4")
    fmt = get_format("nvfp4")
    want = fmt.dequantize(fmt.quantize(gate_up.unflatten(1, (2, -1)))).flatten(1, 2)
    assert torch.equal(experts.dequantize()[0], want)
    assert torch.equal(experts.dequantize()[1], fmt.dequantize(fmt.quantize(down)))


def test_fp8_block_that_straddles_gate_and_up_is_refused_by_name() -> None:
    module, _ = _fp8_module(23, intermediate=192)
    with pytest.raises(UnsupportedError, match=r"multiple of 128; got 192.*straddles gate and up"):
        pack(module, None)


def test_fp8_block_of_another_size_is_refused_by_name() -> None:
    module, _ = _fp8_module(24)
    module.block_size = (64, 128)
    with pytest.raises(UnsupportedError, match=r"block_size.*\(64, 128\)"):
        pack(module, None)


def test_fp8_gate_with_a_limit_keeps_its_clamp() -> None:
    module, _ = _fp8_module(25)
    module.limit = 7.0
    assert pack(module, None).activation == clipped_swiglu(7.0)


def test_fp4_experts_are_mxfp4_byte_for_byte() -> None:
    module, (gate_up, down) = _fp8_module(26, intermediate=96, hidden=64, expert_dtype="fp4", scale_fmt="ue8m0")
    experts = pack(module, None)
    assert experts.format == "mxfp4"
    assert experts.w13.data.data_ptr() == module.gate_up_proj.data_ptr()
    w13, w2 = experts.dequantize()
    assert torch.equal(w13, gate_up)
    assert torch.equal(w2, down)
    # transformers' own reading of the same bytes.
    dequantize = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    read = dequantize(module.gate_up_proj, module.gate_up_proj_scale_inv, torch.float32)
    assert torch.equal(w13, read)


def test_fp4_experts_with_fp32_scales_are_refused_by_name() -> None:
    module, _ = _fp8_module(27, intermediate=96, hidden=64, expert_dtype="fp4", scale_fmt="ue8m0")
    module.down_proj_scale_inv.data = module.down_proj_scale_inv.data.float()
    with pytest.raises(UnsupportedError, match=r"down_proj_scale_inv.*float8_e8m0fnu"):
        pack(module, None)
