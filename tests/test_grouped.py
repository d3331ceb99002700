"""The grouped path: every format and layout, its slices and passes, and what unused slots may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_inputs import Inputs, make_inputs, rms_rel_error
from torch.utils._python_dispatch import TorchDispatchMode

from warpring import GELU_TANH, SILU, Activation, Experts, clipped_swiglu, gpt_oss_swiglu, grouped, moe_exact
from warpring.formats import FORMATS
from warpring.grouped import moe_grouped
from warpring.layout import PackedExperts, pack_experts
from warpring.reference import moe_reference

#: A rounding to BF16 is off by less than 2^-9 of a value in the mean square. Those of gate, up, the activation, each
#: expert's row and the sum are independent; gate's counts 1.6 times in the square, as SiLU grows faster than its
#: argument: 5.6 in all. Weights with an FP32 scale are rounded too, in gate, up and down: 3.6 more.
BF16_RMS = 6**0.5 * 2**-9
SCALED_RMS = 10**0.5 * 2**-9
GPU = pytest.mark.gpu


def bound(format: str) -> float:
    return SCALED_RMS if format in ("fp8_block", "fp8_channel", "nvfp4") else BF16_RMS


def run(inputs: Inputs, experts: Experts | PackedExperts | None = None) -> torch.Tensor:
    out = torch.full_like(inputs.x, torch.nan)
    layer = inputs.experts if experts is None else experts
    assert moe_grouped(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, out) is out
    return out


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty gives NaN: a row that is read without having been written poisons what it touches."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(8).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, on the CPU: torch's grouped GEMM, and the smallest slices of expanded weights."""
    monkeypatch.setattr(grouped, "_products", grouped._products_by_library)
    monkeypatch.setattr(grouped, "WORKSPACE_BYTES", 1)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("way", ["expert by expert", "by library"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_error_is_that_of_its_roundings(
    request: pytest.FixtureRequest, way: str, packed: bool, format: str, bias: bool
) -> None:
    if way == "by library":
        request.getfixturevalue("by_library")
    activation = gpt_oss_swiglu() if bias else SILU
    inputs = make_inputs(41, 288, 160, 7, 3, format=format, activation=activation, bias=bias, seed=1)
    y = run(inputs, pack_experts(inputs.experts) if packed else None)
    assert rms_rel_error(y, moe_exact(*inputs.args())) < bound(format)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, gpt_oss_swiglu(limit=0.8), clipped_swiglu(0.5)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_activation_and_its_clamp_counts(activation: Activation, bias: bool) -> None:
    inputs = make_inputs(19, 128, 64, 4, 2, activation=activation, bias=bias, seed=2)
    assert rms_rel_error(run(inputs), moe_exact(*inputs.args())) < BF16_RMS


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (2880, 96), (96, 2304), (192, 2880)])
@pytest.mark.usefixtures("by_library")
def test_any_sizes_that_divide_by_32_work_in_slices(hidden: int, intermediate: int) -> None:
    inputs = make_inputs(9, hidden, intermediate, 3, 2, format="fp8_block", seed=3)
    y = run(inputs)
    assert rms_rel_error(y, moe_exact(*inputs.args())) < SCALED_RMS
    assert torch.equal(run(inputs, pack_experts(inputs.experts)), y)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("bad", [-1, -7, 6, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_unused_slot_ignores_nan_weight_and_unwritten_rows(bad: int, bias: bool) -> None:
    inputs = make_inputs(21, 64, 96, 6, 4, bias=bias, index_dtype=torch.int32, seed=4)
    expected = run(Inputs(inputs.x, inputs.experts, inputs.topk_idx[:, :2], inputs.topk_weights[:, :2]))
    inputs.topk_idx[:, 2:] = bad
    inputs.topk_weights[:, 2:] = torch.nan
    assert torch.equal(run(inputs), expected)
    assert expected.isfinite().all()


@pytest.mark.usefixtures("nan_in_fresh_memory")
def test_batch_with_every_slot_unused_is_zero_whatever_the_biases_hold() -> None:
    inputs = make_inputs(5, 64, 32, 6, 2, bias=True, seed=5)
    inputs.experts.w2_bias.fill_(torch.nan)
    inputs.topk_idx.fill_(-1)
    assert torch.equal(run(inputs), torch.zeros_like(inputs.x))


def test_nan_token_poisons_itself_only() -> None:
    inputs = make_inputs(18, 64, 64, 4, 2, seed=6)
    expected = run(inputs)
    inputs.x[3] = torch.nan
    y = run(inputs)
    assert y[3].isnan().all()
    others = torch.arange(18) != 3
    assert torch.equal(y[others], expected[others])


def test_duplicates_in_one_token_add_up() -> None:
    inputs = make_inputs(5, 64, 64, 4, 2, bias=True, seed=7)
    inputs.topk_idx[:] = 3
    once = Inputs(inputs.x, inputs.experts, inputs.topk_idx[:, :1], inputs.topk_weights.sum(-1, keepdim=True))
    assert rms_rel_error(run(inputs), moe_exact(*once.args())) < BF16_RMS


@pytest.mark.parametrize("num_tokens", [4, 5, 13])
def test_passes_of_a_large_batch_cover_every_token(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(num_tokens, 256, 128, 6, 2, seed=8)
    monkeypatch.setattr(grouped, "MAX_TOKENS", 4)
    assert rms_rel_error(run(inputs), moe_exact(*inputs.args())) < BF16_RMS


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_take_our_own_gemms_in_every_batch(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes of the most tokens, each with its rows of every argument."""
    passes: list[int] = []

    def record(
        x: torch.Tensor, packed: PackedExperts, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, gate: Any
    ) -> None:
        assert (len(idx), len(weights), len(out), len(gate)) == (len(x),) * 4
        assert packed.format == format
        assert weights.dtype == torch.float32
        out.copy_(x * gate[:, None])
        passes.append(len(x))

    monkeypatch.setattr(grouped, "_has_gemms", lambda device: device.type == "cpu")  # as on Hopper
    monkeypatch.setattr(grouped, "moe_grouped_gemm", record)
    monkeypatch.setattr(grouped, "MAX_TOKENS", 200)
    packed = pack_experts(make_inputs(1, 64, 32, 4, 2, format=format, seed=8).experts)
    for num_tokens, expected in ((1, [1]), (200, [200]), (401, [200, 200, 1])):
        inputs = make_inputs(num_tokens, 64, 32, 4, 2, format=format, seed=8)
        gate, out = torch.rand(num_tokens).bfloat16(), torch.full_like(inputs.x, torch.nan)
        moe_grouped(inputs.x, packed, inputs.topk_idx, inputs.topk_weights, out, gate)
        assert passes == expected
        assert torch.equal(out, inputs.x * gate[:, None])
        passes.clear()


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = make_inputs(200, 160, 96, 8, 3, format="mxfp4", seed=9)
    assert torch.equal(run(inputs), run(inputs))


def test_rounding_is_well_below_that_of_quantised_activations() -> None:
    inputs = make_inputs(64, 256, 128, 8, 4, format="mxfp8", seed=10)
    exact = moe_exact(*inputs.args())
    assert rms_rel_error(run(inputs), exact) < 2 * rms_rel_error(moe_reference(*inputs.args()), exact)


def test_cpu_expands_only_the_experts_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(2, 64, 32, 8, 2, seed=11)
    asked: list[int] = []
    expert = grouped._Weights.expert

    def note(self: grouped._Weights, index: int) -> torch.Tensor:
        asked.append(index)
        return expert(self, index)

    monkeypatch.setattr(grouped._Weights, "expert", note)
    inputs.topk_idx[:] = torch.tensor([[3, 5], [5, -1]])
    run(inputs)
    assert asked == [3, 5, 3, 5]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_slices_never_exceed_the_workspace(format: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_inputs(1, 128, 768, 4, 1, format=format, seed=12).experts
    weights = grouped._weights(pack_experts(experts) if packed else experts, "w13")
    limit = 2 * 4 * 2 * 256 * 128
    monkeypatch.setattr(grouped, "WORKSPACE_BYTES", limit)
    sizes: list[int] = []
    rows = grouped._Weights.rows

    def note(self: grouped._Weights, first: int, last: int, ends: torch.Tensor) -> torch.Tensor:
        dense = rows(self, first, last, ends)
        sizes.append(0 if self.in_place else dense.numel() * 2)
        return dense

    monkeypatch.setattr(grouped._Weights, "rows", note)
    ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    cols = [c for c, _ in grouped._products_by_library(torch.ones(4, 128).bfloat16(), weights, ends)]
    assert [c.start for c in cols] == [0, *(c.stop for c in cols[:-1])]
    assert cols[-1].stop == 768
    assert max(sizes) == (0 if weights.in_place else limit)


@pytest.mark.parametrize("num_experts", [1, 1023, 1024])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_no_step_away_from_the_cpu_reads_a_value_on_the_host(num_experts: int, packed: bool) -> None:
    # Tensors of the meta device hold no values: any operation that would wait for one raises.
    experts = make_inputs(1, 32, 32, num_experts, 1, bias=True, seed=13).experts
    layer = (pack_experts(experts) if packed else experts).to("meta")
    with torch.device("meta"):
        x, idx, weights = torch.empty(5, 32).bfloat16(), torch.empty(5, 1, dtype=torch.int64), torch.empty(5, 1)
    y = moe_grouped(x, layer, idx, weights, torch.empty_like(x))
    assert (y.shape, y.dtype, y.device.type) == ((5, 32), torch.bfloat16, "meta")


class Work(TorchDispatchMode):
    """Operations that do work on a device, counted by name: neither views nor allocations."""

    IDLE = ("view", "slice", "select", "transpose", "unsqueeze", "split", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not any(idle in name for idle in self.IDLE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_no_more_launches_than_transformers_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with our kernels, BF16 weights, SiLU without biases; counted on meta tensors, which hold no values."""
    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is an extra")
    module = SimpleNamespace(
        num_experts=8, has_gate=True, has_bias=False, has_post_expert_norm=False, is_transposed=False,
        _is_expert_parallel=False, act_fn=torch.nn.functional.silu,
    )  # fmt: skip
    module._apply_gate = partial(moe._default_apply_gate, module)
    experts = make_inputs(1, 64, 96, 8, 3, format="bf16", seed=17).experts.to("meta")
    module.gate_up_proj, module.down_proj = experts.w13.data.flatten(1, 2), experts.w2.data
    with torch.device("meta"):
        x, idx, weights = torch.empty(100, 64).bfloat16(), torch.empty(100, 3, dtype=torch.int64), torch.empty(100, 3)
        out = torch.empty_like(x)
    with Work() as theirs:
        moe.grouped_mm_experts_forward(module, x, idx, weights)
    monkeypatch.setattr(grouped, "_has_kernels", lambda device: True)
    monkeypatch.setattr(grouped, "activate", lambda *args: None)
    with Work() as ours:
        moe_grouped(x, experts, idx, weights, out)
    ours.counts["activate"] += 1
    for name in ("sort", "_grouped_mm"):
        assert ours.counts[name] == theirs.counts[name] > 0
    gathers = ("index", "index_select", "embedding_bag")
    assert sum(ours.counts[name] for name in gathers) <= sum(theirs.counts[name] for name in gathers)
    # Where theirs converts its result, ours copies it to where the caller wants it.
    assert ours.counts.total() <= theirs.counts.total()


@GPU
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_matches_exact_in_a_cuda_graph(format: str, packed: bool) -> None:
    inputs = make_inputs(200, 256, 160, 16, 4, format=format, activation=gpt_oss_swiglu(), bias=True, seed=14)
    inputs.topk_idx[5] = torch.tensor([-1, 16, -1, 3])
    inputs.topk_weights[5, :3] = torch.nan
    skipped = torch.where(inputs.topk_idx == 16, -1, inputs.topk_idx)
    exact = moe_exact(inputs.x, inputs.experts, skipped, inputs.topk_weights)
    inputs = inputs.to("cuda")
    layer = pack_experts(inputs.experts) if packed else inputs.experts
    eager = run(inputs, layer)
    out = torch.full_like(eager, torch.nan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_grouped(inputs.x, layer, inputs.topk_idx, inputs.topk_weights, out)
    graph.replay()
    assert torch.equal(out, eager)
    assert rms_rel_error(eager.cpu(), exact) < bound(format)


@GPU
def test_gpu_serves_1024_experts_and_a_long_prefill() -> None:
    for num_experts, num_tokens in ((1024, 9), (32, grouped.MAX_TOKENS + 1)):
        inputs = make_inputs(num_tokens, 128, 64, num_experts, 8, seed=15, device="cuda")
        inputs.topk_idx[0, 0] = num_experts - 1
        assert rms_rel_error(run(inputs), moe_exact(*inputs.args())) < BF16_RMS


@GPU
def test_gpu_slices_give_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(96, 512, 768, 8, 4, format="mxfp8", seed=16, device="cuda")
    whole = run(inputs)
    monkeypatch.setattr(grouped, "WORKSPACE_BYTES", 1)
    assert rms_rel_error(run(inputs), whole) < 2**-8
