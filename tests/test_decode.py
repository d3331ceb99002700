"""`moe_decode`: one set of rules for every path, on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import Inputs, check_against_exact, make_inputs, rms_rel_error

import warpring
from warpring import ArgumentError, UnsupportedError, WarpringError, gpt_oss_swiglu, moe_decode, moe_exact, precompile
from warpring.activation import GELU_TANH, SILU, clipped_swiglu
from warpring.bench.inputs import random_experts
from warpring.bench.shapes import LayerShape
from warpring.decode import _flatten
from warpring.formats import FORMATS
from warpring.kernels import cores
from warpring.layout import pack_experts
from warpring.runtime import workspace

GPU = pytest.mark.gpu
#: (path, device): every rule below holds for each.
PLACES = [
    pytest.param(("reference", "cpu"), id="reference-cpu"),
    pytest.param(("classical", "cpu"), id="classical-cpu"),
    pytest.param(("cores", "cpu"), id="cores-cpu"),
    pytest.param(("grouped", "cpu"), id="grouped-cpu"),
    pytest.param(("warp", "cuda"), id="warp-cuda", marks=GPU),
    pytest.param(("classical", "cuda"), id="classical-cuda", marks=GPU),
    pytest.param(("grouped", "cuda"), id="grouped-cuda", marks=GPU),
]
Place = tuple[str, str]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


def run(inputs: Inputs, path: str, **kwargs: object) -> torch.Tensor:
    """The layer with every byte it could read without writing poisoned first: out, and the scratch between kernels."""
    with torch.inference_mode():  # another test may have made them so
        for buffer in (*workspace._buffers.values(), *cores.scratch_buffers()):
            buffer.fill_(0xFF)  # BF16 NaN
    out = torch.full_like(inputs.x, torch.nan)
    assert moe_decode(*inputs.args(), out=out, path=path, **kwargs) is out
    return out


def tolerance(path: str) -> float:
    """Bound of the RMS relative error: the classical path rounds its activations to E4M3 (2^-4 steps), twice;
    what the grouped path rounds to BF16 is counted in test_grouped.py."""
    return {"classical": 0.06, "grouped": 10**0.5 * 2**-9}.get(path, 4e-3)


# -- values ----------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "intermediate", "num_experts", "topk"),
    [
        (1, 2048, 768, 16, 8),
        (3, 2880, 2880, 8, 4),
        (7, 96, 192, 5, 2),
        (2, 192, 96, 64, 32),
        (5, 32, 32, 3, 1),
        (4, 2304, 160, 12, 6),
        (2, 7168, 2048, 4, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_warp_error_is_that_of_its_roundings(
    num_tokens: int, hidden: int, intermediate: int, num_experts: int, topk: int, format: str, index_dtype: torch.dtype
) -> None:
    shape = (num_tokens, hidden, intermediate, num_experts, topk)
    inputs = make_inputs(*shape, format=format, index_dtype=index_dtype, seed=sum(shape), device="cuda")
    check_against_exact(run(inputs, "warp"), inputs)


@GPU
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, gpt_oss_swiglu(), clipped_swiglu(0.5)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_warp_serves_every_format_activation_and_bias(format: str, activation: warpring.Activation, bias: bool) -> None:
    inputs = make_inputs(3, 160, 96, 9, 4, format=format, activation=activation, bias=bias, seed=5, device="cuda")
    check_against_exact(run(inputs, "warp"), inputs)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_path_computes_the_layer(place: Place, format: str, bias: bool) -> None:
    path, device = place
    activation = gpt_oss_swiglu() if bias else SILU
    inputs = make_inputs(5, 96, 160, 7, 3, format=format, activation=activation, bias=bias, seed=11).to(device)
    assert rms_rel_error(run(inputs, path), moe_exact(*inputs.args())) < tolerance(path)


def test_e4m3_nan_in_a_weight_reaches_its_output_only(place: Place) -> None:
    path, device = place
    inputs = make_inputs(1, 64, 64, 2, 1, format="fp8_channel", seed=3)
    expert = int(inputs.topk_idx[0, 0])
    inputs.experts.w2.data.view(torch.uint8)[expert, 17, 5] = 0x7F
    y = run(inputs.to(device), path)
    assert y[0, 17].isnan()
    assert y[0].isnan().sum() == 1


def test_nan_in_x_stays_in_its_token(place: Place) -> None:
    path, device = place
    inputs = make_inputs(3, 64, 96, 4, 2, activation=clipped_swiglu(1.0), seed=4)
    inputs.x[1, 7] = torch.nan
    y = run(inputs.to(device), path)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


# -- routing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_unused_slot_ignores_nan_weight(place: Place, index_dtype: torch.dtype) -> None:
    path, device = place
    inputs = make_inputs(4, 96, 64, 6, 3, index_dtype=index_dtype, bias=True, seed=6)
    inputs.topk_idx[1, 2] = -1
    inputs.topk_idx[2, 0] = -1
    zeroed = Inputs(inputs.x, inputs.experts, inputs.topk_idx, inputs.topk_weights.clone())
    unused = inputs.topk_idx < 0
    inputs.topk_weights[unused] = torch.nan
    zeroed.topk_weights[unused] = 0
    y = run(inputs.to(device), path)
    assert torch.equal(y, run(zeroed.to(device), path))
    assert rms_rel_error(y, moe_exact(*inputs.to(device).args())) < tolerance(path)


def test_token_with_every_slot_unused_is_zero(place: Place) -> None:
    path, device = place
    inputs = make_inputs(3, 96, 64, 6, 2, bias=True, seed=7)
    inputs.topk_idx[1] = -1
    y = run(inputs.to(device), path)
    assert (y[1] == 0).all()
    assert (y[0] != 0).any()


def test_batch_with_every_slot_unused_is_zero(place: Place) -> None:
    path, device = place
    inputs = make_inputs(2, 64, 64, 4, 2, seed=8)
    inputs.topk_idx.fill_(-1)
    assert (run(inputs.to(device), path) == 0).all()


def test_duplicates_in_one_token_add_up(place: Place) -> None:
    path, device = place
    inputs = make_inputs(2, 96, 64, 6, 2, seed=9)
    inputs.topk_idx[:] = 3
    once = Inputs(inputs.x, inputs.experts, inputs.topk_idx[:, :1], inputs.topk_weights.sum(-1, keepdim=True))
    y, expected = run(inputs.to(device), path), moe_exact(*once.to(device).args())
    assert rms_rel_error(y, expected) < tolerance(path)


@pytest.mark.parametrize("bad", [6, 7, 2**31 - 1, -2, -(2**31)])
def test_id_of_no_expert_is_an_error_on_the_host(bad: int) -> None:
    inputs = make_inputs(2, 64, 64, 6, 2, seed=1)
    inputs.topk_idx[1, 0] = bad
    for path in ("reference", "classical", "grouped"):
        with pytest.raises(ArgumentError, match=rf"topk_idx must be -1 .*got {bad} at token 1, slot 0"):
            moe_decode(*inputs.args(), path=path)


@GPU
@pytest.mark.parametrize("path", ["warp", "classical", "grouped"])
@pytest.mark.parametrize("bad", [6, 2**31 - 1, 2**40, -2, -(2**40)])
def test_id_of_no_expert_is_skipped_on_the_device_and_reported_on_request(path: str, bad: int) -> None:
    inputs = make_inputs(2, 64, 64, 6, 2, seed=1, device="cuda")
    inputs.topk_idx[1, 0] = bad
    unused = Inputs(inputs.x, inputs.experts, inputs.topk_idx.clone(), inputs.topk_weights)
    unused.topk_idx[1, 0] = -1
    assert torch.equal(run(inputs, path), run(unused, path))
    with pytest.raises(ArgumentError, match="token 1, slot 0"):
        moe_decode(*inputs.args(), path=path, validate=True)


# -- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "mxfp4"])
def test_token_bits_do_not_depend_on_batch_or_run(place: Place, format: str) -> None:
    path, device = place
    inputs = make_inputs(33, 160, 96, 8, 3, format=format, seed=12).to(device)
    whole = run(inputs, path)
    assert torch.equal(whole, run(inputs, path))
    if path == "grouped":
        return  # a library's sums: equal from run to run, their order may depend on the batch
    for token in (0, 7, 32):
        rows = slice(token, token + 1)
        alone = Inputs(inputs.x[rows], inputs.experts, inputs.topk_idx[rows], inputs.topk_weights[rows])
        assert torch.equal(run(alone, path), whole[rows])


# -- layouts ---------------------------------------------------------------------------------------------------------


def test_zero_tokens_return_an_empty_result(place: Place) -> None:
    path, device = place
    inputs = make_inputs(1, 64, 64, 4, 2, seed=2).to(device)
    y = moe_decode(inputs.x[:0], inputs.experts, inputs.topk_idx[:0], inputs.topk_weights[:0], path=path)
    assert y.shape == (0, 64)
    assert y.dtype == torch.bfloat16


def test_strided_and_sliced_inputs_give_the_same_bits(place: Place) -> None:
    path, device = place
    inputs = make_inputs(5, 96, 64, 6, 3, seed=13).to(device)
    expected = run(inputs, path)

    def padded(t: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
        wide = torch.zeros(t.shape[0], t.shape[1] + pad, dtype=t.dtype, device=t.device)
        view = wide[:, offset : offset + t.shape[1]]
        view.copy_(t)
        return view

    variants = {
        "padded rows": padded(inputs.x, 8, 0),
        "unaligned": padded(inputs.x, 3, 1),
        "odd stride": padded(inputs.x, 1, 0),
        "transposed": inputs.x.t().contiguous().t(),
        "odd address": padded(inputs.x, 8, 1),
    }
    for name, x in variants.items():
        y = moe_decode(x, inputs.experts, inputs.topk_idx, inputs.topk_weights, path=path)
        assert torch.equal(y, expected), name
    idx, weights = padded(inputs.topk_idx, 2, 1), padded(inputs.topk_weights, 2, 1)
    assert torch.equal(moe_decode(inputs.x, inputs.experts, idx, weights, path=path), expected)
    idx, weights = inputs.topk_idx.t().contiguous().t(), inputs.topk_weights.t().contiguous().t()
    assert torch.equal(moe_decode(inputs.x, inputs.experts, idx, weights, path=path), expected)
    out = padded(torch.zeros_like(inputs.x), 8, 4)
    assert torch.equal(moe_decode(*inputs.args(), out=out, path=path), expected)


def test_weights_of_another_float_type_are_converted(place: Place) -> None:
    path, device = place
    inputs = make_inputs(2, 64, 64, 4, 2, seed=14).to(device)
    half = inputs.topk_weights.bfloat16()
    y = moe_decode(inputs.x, inputs.experts, inputs.topk_idx, half, path=path)
    same = Inputs(inputs.x, inputs.experts, inputs.topk_idx, half.float())
    assert torch.equal(y, run(same, path))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"x": a["x"].float()}, r"x must be bfloat16; got torch.float32"),
        (lambda a: a | {"x": a["x"][:, :32]}, r"x must be \[num_tokens, hidden=64\]; got \[2, 32\]"),
        (lambda a: a | {"x": a["x"][None]}, r"x must be \[num_tokens, hidden=64\]"),
        (lambda a: a | {"topk_idx": a["topk_idx"][:1]}, r"topk_idx must be int32 or int64 \[num_tokens=2, topk\]"),
        (lambda a: a | {"topk_idx": a["topk_idx"].float()}, r"topk_idx must be int32 or int64"),
        (lambda a: a | {"topk_idx": a["topk_idx"][:, :0]}, r"topk must be 1 to 32; got 0"),
        (lambda a: a | {"topk_idx": a["topk_idx"].repeat(1, 17)}, r"topk must be 1 to 32; got 34"),
        (
            lambda a: a | {"topk_weights": a["topk_weights"][:, :1]},
            r"topk_weights must be floating point of topk_idx's",
        ),
        (lambda a: a | {"topk_weights": a["topk_weights"].int()}, r"topk_weights must be floating point"),
        (lambda a: a | {"out": torch.empty(2, 64)}, r"out must be bfloat16 \[2, 64\]"),
        (lambda a: a | {"out": torch.empty(64, 2, dtype=torch.bfloat16).t()}, r"out must be .* dense rows"),
        (lambda a: a | {"out": a["x"]}, r"out must not overlap x"),
        (lambda a: a | {"out": _over(a["topk_weights"])}, r"out must not overlap topk_weights"),
        (lambda a: a | {"out": _over(a["topk_idx"])}, r"out must not overlap topk_idx"),
        (lambda a: a | {"out": torch.zeros(1, 64).bfloat16().expand(2, 64)}, r"out must be .* memory of its own"),
        (lambda a: a | {"out": torch.zeros(99).bfloat16().as_strided((2, 64), (8, 1))}, r"out must be .* of its own"),
        (lambda a: a | {"out": torch.zeros(2, 64).bfloat16().to_sparse()}, r"out must be .* dense rows"),
        (lambda a: a | {"x": a["x"].to_sparse()}, r"x must be a strided tensor that holds data; got torch.sparse_coo"),
        (lambda a: a | {"topk_idx": a["topk_idx"].to_sparse()}, r"topk_idx must be a strided tensor"),
        (lambda a: a | {"topk_weights": a["topk_weights"].to_sparse()}, r"topk_weights must be a strided tensor"),
        (lambda a: a | {"x": a["x"].to("meta")}, r"x must be a strided tensor that holds data; got .* on meta"),
        (lambda a: a | {"path": "fast"}, r"path must be one of auto, warp, tile, cores, .*; got 'fast'"),
    ],
)
def test_broken_rule_is_named(change, message: str) -> None:
    inputs = make_inputs(2, 64, 64, 4, 2)
    arguments = {"x": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    with pytest.raises(ArgumentError, match=message):
        moe_decode(**change(arguments), experts=inputs.experts)


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """A BF16 [2, 64] tensor in the memory of a small one, which is moved into its last bytes."""
    memory = torch.zeros(2 * 64 * 2, dtype=torch.uint8)
    held = memory[-tensor.nbytes :].view(tensor.dtype).view(tensor.shape)
    tensor.set_(held.copy_(tensor))
    return memory.view(torch.bfloat16).view(2, 64)


def test_out_in_the_memory_of_the_weights_is_refused() -> None:
    inputs = make_inputs(2, 64, 64, 4, 2, format="bf16")
    for name, stored in (("experts", inputs.experts.w13), ("experts.w2", inputs.experts.w2)):
        with pytest.raises(ArgumentError, match=f"out must not overlap {name},"):
            moe_decode(*inputs.args(), out=stored.data.view(-1)[:128].view(2, 64))


def test_experts_whose_weights_are_on_meta_are_refused() -> None:
    inputs = make_inputs(2, 64, 64, 4, 2)
    with pytest.raises(ArgumentError, match="experts must be a strided tensor that holds data"):
        moe_decode(inputs.x, inputs.experts.to("meta"), inputs.topk_idx, inputs.topk_weights)


def test_topk_of_32_is_served_and_33_is_not(place: Place) -> None:
    path, device = place
    inputs = make_inputs(2, 64, 32, 40, 32, seed=15).to(device)
    assert rms_rel_error(run(inputs, path), moe_exact(*inputs.args())) < tolerance(path)
    with pytest.raises(ArgumentError, match="topk must be 1 to 32; got 33"):
        precompile(inputs.experts, topk=33)


def test_warp_path_on_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="path 'warp' needs CUDA tensors; got cpu"):
        moe_decode(*make_inputs(1, 64, 64, 4, 2).args(), path="warp")


def test_gradient_is_refused_by_name() -> None:
    inputs = make_inputs(1, 64, 64, 4, 2)
    with pytest.raises(UnsupportedError, match="no backward"):
        moe_decode(inputs.x.requires_grad_(), inputs.experts, inputs.topk_idx, inputs.topk_weights)
    compiled = torch.compile(moe_decode, backend="eager")
    with pytest.raises(UnsupportedError, match="no backward"):
        compiled(inputs.x, inputs.experts, inputs.topk_idx, inputs.topk_weights)
    with torch.no_grad():
        assert moe_decode(*inputs.args()).shape == (1, 64)


@GPU
def test_tensors_on_two_devices_are_refused_by_name() -> None:
    inputs = make_inputs(1, 64, 64, 4, 2)
    with pytest.raises(ArgumentError, match="x on cuda:0 and topk_idx on cpu"):
        moe_decode(inputs.x.cuda(), inputs.experts, inputs.topk_idx, inputs.topk_weights)


# -- torch.compile, CUDA graphs, memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_compiles_without_a_graph_break(device: str, packed: bool) -> None:
    inputs = make_inputs(3, 64, 96, 6, 2, seed=16).to(device)
    experts = pack_experts(inputs.experts) if packed else inputs.experts

    def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_decode(x * 2, experts, idx, weights) + 1

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    expected = layer(inputs.x, inputs.topk_idx, inputs.topk_weights)
    assert torch.equal(compiled(inputs.x, inputs.topk_idx, inputs.topk_weights), expected)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_custom_op_passes_torchs_own_checks(packed: bool) -> None:
    # BF16, since torch's checker cannot clone the 8-bit float types.
    inputs = make_inputs(2, 64, 64, 4, 2, format="bf16", bias=True, seed=17)
    layer = pack_experts(inputs.experts) if packed else inputs.experts
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, torch.empty_like(inputs.x), *_flatten(layer))
    torch.library.opcheck(torch.ops.warpring.moe_decode.default, (*arguments, "auto", False))


@GPU
@pytest.mark.parametrize("path", ["warp", "classical", "grouped"])
def test_graph_replays_with_changed_inputs(path: str) -> None:
    inputs = make_inputs(4, 160, 96, 8, 3, seed=18, device="cuda")
    precompile(inputs.experts, topk=3)
    out = torch.full_like(inputs.x, torch.nan)
    if path != "warp":  # grouped_mm's library makes its handles at the first call
        run(inputs, path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_decode(*inputs.args(), out=out, path=path)
    for seed in (19, 20):
        fresh = make_inputs(4, 160, 96, 8, 3, seed=seed, device="cuda")
        inputs.x.copy_(fresh.x)
        inputs.topk_idx.copy_(fresh.topk_idx)
        inputs.topk_weights.copy_(fresh.topk_weights)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run(inputs, path))


@GPU
def test_two_graphs_and_eager_calls_do_not_share_scratch() -> None:
    inputs = [make_inputs(8, 2048, 768, 16, 8, seed=seed, device="cuda") for seed in (21, 22, 23)]
    expected = [run(i, "warp") for i in inputs]
    outs = [torch.empty_like(i.x) for i in inputs]
    graphs = []
    for i, out in zip(inputs[:2], outs, strict=False):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe_decode(*i.args(), out=out, path="warp")
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            moe_decode(*inputs[2].args(), out=outs[2], path="warp")
        torch.cuda.synchronize()
        for out, y in zip(outs, expected, strict=True):
            assert torch.equal(out, y)


@GPU
def test_capture_before_precompile_is_refused_by_name() -> None:
    inputs = make_inputs(1, 64, 224, 4, 2, seed=24, device="cuda")  # a shape no other test uses
    with pytest.raises(WarpringError, match="precompile"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        moe_decode(*inputs.args(), path="warp")
    assert run(inputs, "warp").isfinite().all()


@GPU
def test_nothing_is_allocated_when_out_is_given() -> None:
    inputs = make_inputs(4, 160, 96, 8, 3, seed=25, device="cuda")
    out = run(inputs, "warp")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        moe_decode(*inputs.args(), out=out, path="warp")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@GPU
def test_calls_chained_without_synchronising_see_each_others_results() -> None:
    inputs = make_inputs(2, 160, 160, 8, 3, seed=26, device="cuda")
    outs = [torch.empty_like(inputs.x) for _ in range(2)]

    def chain(synchronize: bool) -> torch.Tensor:
        x = inputs.x
        for step in range(40):
            x = moe_decode(x, inputs.experts, inputs.topk_idx, inputs.topk_weights, out=outs[step % 2], path="warp")
            if synchronize:
                torch.cuda.synchronize()
            x.div_(x.float().square().mean(-1, keepdim=True).sqrt().bfloat16())
        return x.clone()

    expected = chain(synchronize=True)
    assert expected.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(synchronize=False), expected)


# -- size ------------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize(
    ("format", "num_experts", "hidden", "intermediate"),
    [("bf16", 128, 4096, 4096), ("mxfp8", 256, 7168, 2048), ("mxfp4", 384, 7168, 2048)],
)
def test_offsets_past_4_gib(format: str, num_experts: int, hidden: int, intermediate: int) -> None:
    shape = LayerShape("offsets", hidden, intermediate, num_experts, topk=2)
    experts = random_experts(shape, format, "cuda", seed=27)
    assert experts.w13.data.nbytes > 2**32
    assert 2 * num_experts * hidden * intermediate > 2**31
    x = torch.randn(2, hidden, device="cuda", dtype=torch.bfloat16)
    idx = torch.tensor([[0, num_experts - 1], [num_experts - 1, num_experts // 2]], device="cuda")
    inputs = Inputs(x, experts, idx, torch.rand(2, 2, device="cuda"))
    check_against_exact(run(inputs, "warp"), inputs)
