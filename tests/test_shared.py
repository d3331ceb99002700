"""Shared experts beside the routed ones: cut exactly, packed behind them, added to every token's sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_inputs import Inputs, make_inputs, rms_rel_error

from warpring import (
    GELU_TANH,
    ArgumentError,
    Experts,
    gpt_oss_swiglu,
    moe_decode,
    moe_exact,
    pack_experts,
    precompile,
    unpack_experts,
    unpack_shared,
)
from warpring.activation import SILU
from warpring.arguments import MAX_TOPK
from warpring.decode import _flatten
from warpring.experts import MAX_EXPERTS
from warpring.formats import FORMATS
from warpring.grouped import moe_grouped
from warpring.layout import PackedExperts
from warpring.shared import MAX_SHARED, split_experts

GPU = pytest.mark.gpu
DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
#: Bound of the grouped path's RMS relative error, see test_grouped.py.
RMS = 10**0.5 * 2**-9
#: hidden, intermediate, num_experts, topk.
SHAPE = (160, 128, 6, 3)


def make_shared(num_shared: int = 1, wide: int = 2, *, seed: int, **kwargs: Any) -> Experts:
    """Shared experts `wide` times as wide as those of SHAPE."""
    hidden, intermediate = SHAPE[:2]
    return make_inputs(1, hidden, wide * intermediate, num_shared, 1, seed=seed, **kwargs).experts


def make_gate(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed)).sigmoid()


def exact_of(inputs: Inputs, shared: Experts, gate: torch.Tensor | None) -> torch.Tensor:
    """FP64, from the experts as they were given."""
    size = (len(inputs.x), shared.num_experts)
    every = torch.arange(size[1], device=inputs.x.device).expand(size)
    weight = torch.ones(size, device=inputs.x.device) if gate is None else gate.view(-1, 1).expand(size)
    return moe_exact(*inputs.args()) + moe_exact(inputs.x, shared, every, weight)


def decode(inputs: Inputs, packed: PackedExperts, gate: torch.Tensor | None = None, path: str = "auto") -> torch.Tensor:
    out = torch.full_like(inputs.x, torch.nan)
    x, _, idx, weights = inputs.args()
    return moe_decode(x, packed, idx, weights, shared_weights=gate, out=out, path=path)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("wide", [2, 3])
def test_pieces_of_an_expert_add_up_to_it(format: str, wide: int) -> None:
    shared = make_shared(2, wide, format=format, bias=True, seed=1)
    pieces = split_experts(shared, SHAPE[1])
    assert (pieces.num_experts, pieces.intermediate, pieces.hidden) == (2 * wide, SHAPE[1], SHAPE[0])
    w13, w2 = shared.dequantize(torch.float64)
    cut13, cut2 = pieces.dequantize(torch.float64)
    joined = cut13.view(2, wide, 2, SHAPE[1], SHAPE[0]).transpose(1, 2).flatten(1, 3)
    assert torch.equal(joined, w13)
    assert torch.equal(cut2.view(2, wide, SHAPE[0], SHAPE[1]).transpose(1, 2).flatten(2), w2)
    inputs = make_inputs(3, *SHAPE, seed=2)
    for expert in range(2):
        whole = moe_exact(inputs.x, shared, torch.full((3, 1), expert), torch.ones(3, 1))
        parts = torch.arange(expert * wide, (expert + 1) * wide).expand(3, wide)
        summed = moe_exact(inputs.x, pieces, parts, torch.ones(3, wide))
        torch.testing.assert_close(summed, whole, rtol=0, atol=1e-12)


def test_experts_of_the_routed_width_are_left_as_they_are() -> None:
    shared = make_shared(wide=1, seed=3)
    assert split_experts(shared, SHAPE[1]) is shared


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("gate", ["none", "vector", "column", "bf16"])
@DEVICE
def test_values_on_the_grouped_path(device: str, gate: str, wide: int) -> None:
    inputs = make_inputs(9, *SHAPE, seed=4).to(device)
    shared = make_shared(2, wide, seed=5).to(device)
    given = None if gate == "none" else make_gate(9, 6).to(device)
    if given is not None and gate != "vector":
        # Strided, as one column of a wider projection is.
        given = torch.stack((given, torch.full_like(given, torch.nan)), 1)[:, :1]
        given = given.bfloat16() if gate == "bf16" else given
    y = decode(inputs, pack_experts(inputs.experts, shared), given, "grouped")
    assert rms_rel_error(y, exact_of(inputs, shared, given)) < RMS


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_with_biases_and_another_activation(format: str) -> None:
    kwargs: dict[str, Any] = {"format": format, "activation": gpt_oss_swiglu(), "bias": True}
    inputs = make_inputs(5, *SHAPE, seed=7, **kwargs)
    shared, gate = make_shared(seed=8, **kwargs), make_gate(5, 9)
    y = decode(inputs, pack_experts(inputs.experts, shared), gate)
    assert rms_rel_error(y, exact_of(inputs, shared, gate)) < RMS


@pytest.mark.parametrize("which", ["w13_bias", "w2_bias"])
@pytest.mark.parametrize("owner", ["routed", "shared"])
def test_bias_of_one_side_alone(owner: str, which: str) -> None:
    inputs, shared = make_inputs(5, *SHAPE, bias=True, seed=10), make_shared(bias=True, seed=11)
    none: dict[str, Any] = {"w13_bias": None, "w2_bias": None}
    routed = replace(inputs.experts, **none | ({which: getattr(inputs.experts, which)} if owner == "routed" else {}))
    shared = replace(shared, **none | ({which: getattr(shared, which)} if owner == "shared" else {}))
    inputs = replace(inputs, experts=routed)
    y = decode(inputs, pack_experts(routed, shared))
    assert rms_rel_error(y, exact_of(inputs, shared, None)) < RMS


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_token_without_a_routed_expert_has_its_shared_ones(num_tokens: int) -> None:
    inputs, shared = make_inputs(num_tokens, *SHAPE, seed=12), make_shared(seed=13)
    inputs.topk_idx[:] = -1
    inputs.topk_weights[:] = torch.nan
    gate = make_gate(num_tokens, 14)
    y = decode(inputs, pack_experts(inputs.experts, shared), gate)
    assert rms_rel_error(y, exact_of(inputs, shared, gate)) < RMS


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_no_id_names_a_shared_expert(index_dtype: torch.dtype) -> None:
    inputs = make_inputs(3, *SHAPE, index_dtype=index_dtype, seed=15)
    packed = pack_experts(inputs.experts, make_shared(seed=16))
    inputs.topk_idx[1, 2] = SHAPE[2]
    with pytest.raises(ArgumentError, match=r"must be -1 \(unused\) or in \[0, 6\); got 6 at token 1, slot 2"):
        decode(inputs, packed)
    # Unchecked, as on a GPU, it is an unused slot.
    out = torch.full_like(inputs.x, torch.nan)
    moe_grouped(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out)
    inputs.topk_idx[1, 2] = -1
    assert torch.equal(out, decode(inputs, packed))


@pytest.mark.parametrize("format", FORMATS)
def test_unpacked_are_the_experts_that_were_packed(format: str) -> None:
    inputs, shared = make_inputs(1, *SHAPE, format=format, bias=True, seed=17), make_shared(format=format, seed=18)
    packed = pack_experts(inputs.experts, shared)
    pieces = split_experts(shared, SHAPE[1])
    found = unpack_shared(packed)
    assert found is not None
    for got, wanted in ((unpack_experts(packed), inputs.experts), (found, pieces)):
        for a, b in ((got.w13, wanted.w13), (got.w2, wanted.w2)):
            assert (a.format, a.shape) == (b.format, b.shape)
            for one, other in zip(a.tensors(), b.tensors(), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(unpack_experts(packed).w2_bias, inputs.experts.w2_bias)  # pyright: ignore[reportArgumentType]
    assert found.w2_bias is not None
    assert not found.w2_bias.any()
    assert unpack_shared(pack_experts(inputs.experts)) is None


def test_counts_and_bytes() -> None:
    inputs, shared = make_inputs(1, *SHAPE, format="mxfp8", seed=19), make_shared(format="mxfp8", seed=20)
    alone, packed = pack_experts(inputs.experts), pack_experts(inputs.experts, shared)
    assert (alone.num_shared, packed.num_experts, packed.num_shared) == (0, 6, 2)
    assert packed.bytes_per_expert == alone.bytes_per_expert
    assert packed.nbytes == alone.nbytes + 2 * alone.bytes_per_expert
    assert "(6 + 2 shared x 160 x 128" in repr(packed)
    assert packed.to("meta").num_shared == 2


@pytest.mark.parametrize(
    ("shape", "kwargs", "message"),
    [
        ((96, 128, 1), {}, "shared must have the hidden of the routed experts, 160; got 96"),
        ((160, 128, 1), {"format": "bf16"}, "shared must have the format of the routed experts, mxfp8; got bf16"),
        ((160, 128, 1), {"activation": GELU_TANH}, "shared must have the activation of the routed experts"),
        ((160, 160, 1), {}, r"must be a multiple of the routed experts' \(128\); got 160 .* Zero-pad it"),
        ((160, 64, 1), {}, r"must be a multiple of the routed experts' \(128\); got 64 .* Zero-pad it"),
        ((160, 128, MAX_SHARED + 1), {}, "at most 32 experts of the routed width.*; got 33 beside 6"),
    ],
)
def test_shared_experts_that_do_not_fit_are_refused_by_name(
    shape: tuple[int, int, int], kwargs: dict[str, Any], message: str
) -> None:
    routed = make_inputs(1, *SHAPE, seed=21).experts
    shared = make_inputs(1, *shape, 1, seed=22, **kwargs).experts
    with pytest.raises(ArgumentError, match=message):
        pack_experts(routed, shared)


def test_most_shared_experts_are_taken() -> None:
    assert (
        pack_experts(make_inputs(1, 32, 32, 3, 1).experts, make_inputs(1, 32, 32 * 32, 1, 1).experts).num_shared == 32
    )
    most = make_inputs(1, 32, 32, MAX_EXPERTS - 1, 1, format="bf16", seed=23).experts
    one, two = (make_inputs(1, 32, 32 * n, 1, 1, format="bf16", seed=24).experts for n in (1, 2))
    assert pack_experts(most, one).num_shared == 1
    with pytest.raises(ArgumentError, match="with the routed ones at most 1024; got 2 beside 1023"):
        pack_experts(most, two)


@pytest.mark.parametrize(("intermediate", "fits"), [(96, False), (128, True)])
def test_blocks_of_scales_are_never_cut(intermediate: int, fits: bool) -> None:
    routed = make_inputs(1, 160, intermediate, 2, 1, format="fp8_block", seed=25).experts
    shared = make_inputs(1, 160, 2 * intermediate, 1, 1, format="fp8_block", seed=26).experts
    if fits:
        assert pack_experts(routed, shared).num_shared == 2
    else:
        with pytest.raises(ArgumentError, match=r"blocks of 128 x 128\. Take another format"):
            pack_experts(routed, shared)
        # Of the routed width nothing is cut.
        assert pack_experts(routed, make_inputs(1, 160, 96, 2, 1, format="fp8_block").experts).num_shared == 2


def test_gate_is_checked() -> None:
    inputs = make_inputs(2, *SHAPE, seed=27)
    packed = pack_experts(inputs.experts, make_shared(seed=28))
    gate = make_gate(2, 29)
    for layer in (inputs.experts, pack_experts(inputs.experts)):
        with pytest.raises(ArgumentError, match=r"must be None where the layer has no shared experts.*pack_experts"):
            moe_decode(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, shared_weights=gate)
    for bad in (gate[:1], gate.view(1, 2), gate[:, None].expand(2, 2), gate.int()):
        with pytest.raises(ArgumentError, match=r"must be floating point \[num_tokens=2\] or \[2, 1\]"):
            decode(inputs, packed, bad)
    with pytest.raises(ArgumentError, match="shared_weights must be a strided tensor that holds data"):
        decode(inputs, packed, gate.to("meta"))
    out = torch.zeros(2, 160, dtype=torch.bfloat16)
    inside = out.view(torch.float32)[:, 0]
    with pytest.raises(ArgumentError, match="out must not overlap shared_weights"):
        moe_decode(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, shared_weights=inside, out=out)


@DEVICE
def test_compiles_without_a_graph_break(device: str) -> None:
    inputs = make_inputs(3, *SHAPE, seed=30).to(device)
    packed = pack_experts(inputs.experts, make_shared(seed=31).to(device))
    w_gate = torch.randn(160, 1, generator=torch.Generator().manual_seed(32)).bfloat16().to(device)

    def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_decode(x, packed, idx, weights, shared_weights=(x @ w_gate).sigmoid()) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    given = (inputs.x, inputs.topk_idx, inputs.topk_weights)
    assert torch.equal(compiled(*given), layer(*given))


def test_custom_op_passes_torchs_own_checks() -> None:
    inputs = make_inputs(2, *SHAPE, format="bf16", seed=33)
    packed = pack_experts(inputs.experts, make_shared(format="bf16", seed=34))
    given = (inputs.x, inputs.topk_idx, inputs.topk_weights, torch.empty_like(inputs.x), *_flatten(packed))
    torch.library.opcheck(torch.ops.warpring.moe_decode.default, (*given, "auto", False, make_gate(2, 35)))


# -- on a GPU, through moe_decode --------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_values_and_bits_on_a_gpu(format: str, num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, 1024, 256, 16, 4, format=format, bias=True, seed=36).to("cuda")
    shared = make_inputs(1, 1024, 512, 1, 1, format=format, bias=True, seed=37).experts.to("cuda")
    packed, gate = pack_experts(inputs.experts, shared), make_gate(num_tokens, 38).cuda()
    x, _, idx, weights = inputs.args()
    for given in (None, gate):
        y = decode(inputs, packed, given, "tile")
        assert rms_rel_error(y, exact_of(inputs, shared, given)) < 4e-3
        for token in {0, num_tokens // 2, num_tokens - 1}:
            one = slice(token, token + 1)
            alone = Inputs(x[one], inputs.experts, idx[one], weights[one])
            assert torch.equal(decode(alone, packed, None if given is None else given[one], "tile"), y[one])


@GPU
def test_most_slots_on_a_gpu() -> None:
    inputs = make_inputs(3, 64, 32, 40, MAX_TOPK, seed=39).to("cuda")
    shared = make_inputs(1, 64, 32 * MAX_SHARED, 1, 1, activation=SILU, seed=40).experts.to("cuda")
    y = decode(inputs, pack_experts(inputs.experts, shared), path="tile")
    assert rms_rel_error(y, exact_of(inputs, shared, None)) < 4e-3


@GPU
def test_graph_replays_with_changed_inputs() -> None:
    def fresh(seed: int) -> tuple[Inputs, torch.Tensor]:
        return make_inputs(4, *SHAPE, seed=seed).to("cuda"), make_gate(4, seed).cuda()

    inputs, gate = fresh(41)
    packed = pack_experts(inputs.experts, make_shared(seed=42).to("cuda"))
    precompile(packed, topk=3)
    out, graph = torch.full_like(inputs.x, torch.nan), torch.cuda.CUDAGraph()
    x, _, idx, weights = inputs.args()
    with torch.cuda.graph(graph):
        moe_decode(x, packed, idx, weights, shared_weights=gate, out=out, path="tile")
    for seed in (43, 44):
        other, other_gate = fresh(seed)
        for kept, new in ((x, other.x), (idx, other.topk_idx), (weights, other.topk_weights), (gate, other_gate)):
            kept.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, decode(inputs, packed, gate, "tile"))
