"""Peers of the expert-parallel bench: a stand-in for each library computes the layer from what it is handed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks
from stand_ins import stand_in

from warpring import Experts, UnsupportedError, WarpringError, gpt_oss_swiglu
from warpring.activation import clipped_swiglu
from warpring.bench import ep_peers, expert_parallel
from warpring.bench.ep_inputs import Inputs
from warpring.bench.ep_peers import EP_PEERS, NOT_TIMED, PeerLayer, why_not
from warpring.bench.ep_variants import Variant, bind, close_layer
from warpring.bench.expert_parallel import EpBench, describe
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.records import Record
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call
from warpring.bench.watchdog import Watchdog
from warpring.cli import main
from warpring.expert_parallel.baseline import AllToAllExpertParallel
from warpring.reference import moe_exact

SHAPE = LayerShape("h256xi128xe8xk2", 256, 128, 8, 2, clipped_swiglu(0.5))
CPU = torch.device("cpu")
GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
PULL = "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel"
GLUE = "flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_fp8_bf16_pull_cutedsl"


@dataclass(frozen=True)
class Buffers:
    """What a stand-in's session holds, as the library names it."""

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    limit: float | None
    destroy: Callable[[], None]


def buffers(count: int, columns: int, limit: float | None, destroy: Callable[[], None]) -> Buffers:
    """Poisoned: nothing may be read that was not staged."""
    x = torch.full((count, SHAPE.hidden), torch.nan).to(torch.float8_e4m3fn)
    ids = torch.full((count, SHAPE.topk), 1 << 40)
    return Buffers(x, torch.full((count, columns), torch.nan), ids, torch.full(ids.shape, torch.nan), limit, destroy)


def stage(x: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor, into: Buffers) -> None:
    blocks = x.float().unflatten(1, (-1, 128))
    scale = blocks.abs().amax(2) / 448
    into.x.copy_((blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn))
    into.x_sf[:, : scale.shape[1]].copy_(scale)
    into.topk_idx.copy_(topk_idx)
    into.topk_weights.copy_(topk_weights)


def compute(staged: Buffers, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The layer from dense weights [E, 2I, H] (gate first) and [E, H, I]."""
    scale = staged.x_sf[:, : SHAPE.hidden // 128].repeat_interleave(128, 1)
    x, y = staged.x.float() * scale, torch.zeros(staged.x.shape)
    limit = torch.inf if staged.limit is None else staged.limit
    for token, expert_ids in enumerate(staged.topk_idx.tolist()):
        for slot, expert in enumerate(expert_ids):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            act = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            y[token] += staged.topk_weights[token, slot] * (w2[expert] @ act)
    return y.bfloat16()


def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


def as_tuple(*given: Any) -> tuple[Any, ...]:
    return given


def nothing(*_: Any) -> None:
    """No reason, no result."""


class Pull:
    """FlashInfer's pull layer: weights in its own pack, inputs in symmetric buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[Any, ...]] = []
        self.alive: list[torch.Tensor] = []
        self.destroyed = 0
        self.made_ready = 0
        contents = {
            "get_symm_buffer_for_hopper_fp8_mega_moe": self.open,
            "hopper_fp8_mega_launch_thunk": self.make_ready,
            "hopper_fp8_mega_moe": self.run,
        }
        stand_in(monkeypatch, PULL, **contents)
        stand_in(monkeypatch, f"{PULL}.shim", sym_zeros=self.sym_zeros, free_sym_tensor=self.free)
        stand_in(monkeypatch, f"{GLUE}.staging", stage_mega_moe_inputs=self.stage)
        stand_in(monkeypatch, f"{GLUE}.weights", preprocess_mega_weights=self.preprocess)
        stand_in(monkeypatch, "flashinfer.moe_ep.weights", MoEWeightPack=SimpleNamespace)

    def preprocess(self, pack: Any, *, intermediate_size: int, hidden_size: int, **form: str) -> tuple[Any, Any]:
        assert pack.w13.dtype == pack.w2.dtype == torch.bfloat16
        assert form == {"kind": "fp8_e4m3", "fp8_scale_mode": "blockwise"}
        assert pack.w13.shape[1:] == (2 * intermediate_size, hidden_size)
        return (pack.w13.float(),), (pack.w2.float(),)

    def open(self, *sizes: int, gate_up_clamp: float | None, **form: str) -> Buffers:
        self.opened.append((*sizes, gate_up_clamp))
        assert form == {"kind": "fp8_e4m3", "fp8_scale_mode": "blockwise"}
        return buffers(sizes[1], 4, gate_up_clamp, self.destroy)

    def make_ready(self, l1: Any, l2: Any, staged: Buffers) -> Callable[[], None]:
        """The library clears the workspace here, or else in the first call, when others may have written to it."""
        self.made_ready = len(self.opened)
        return nothing

    def destroy(self) -> None:
        self.destroyed += 1

    def sym_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert dtype.itemsize > 1 or dtype == torch.uint8, "the heap knows no 8-bit floats"
        self.alive.append(torch.zeros(shape, dtype=dtype))
        return self.alive[-1]

    def free(self, root: torch.Tensor) -> None:
        self.alive = [tensor for tensor in self.alive if tensor is not root]

    def stage(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *into: torch.Tensor, **_: str) -> None:
        stage(x, weights, ids, Buffers(*into, limit=None, destroy=self.destroy))

    def run(self, y: None, l1: Any, l2: Any, staged: Buffers) -> torch.Tensor:
        assert self.made_ready == len(self.opened), "called with a workspace that is still to be cleared"
        return compute(staged, *l1, *l2)


def stand_in_push(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """FlashInfer's push layer; gives what happened to its runners."""
    seen: list[str] = []

    class Runner:
        def __init__(self, pipe: Any, weights: Any) -> None:
            assert (pipe.ep_size, pipe.rank, pipe.num_local_experts, pipe.top_k) == (2, 0, 4, 2)
            assert pipe.comm_backend.group is GROUP
            self.pipe, self.weights = pipe, weights

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, output: torch.Tensor) -> Any:
            assert ids.dtype == torch.int32
            assert x.shape[0] == self.pipe.token_capacity
            staged = buffers(x.shape[0], 2, SHAPE.activation.limit, lambda: None)
            stage(x, weights, ids, staged)
            w13, w13_scale, w2, w2_scale = self.weights
            return output.copy_(compute(staged, dense(w13, w13_scale), dense(w2, w2_scale)))

        def destroy(self) -> None:
            seen.append(f"destroyed {self.pipe.token_capacity}")

    stand_in(
        monkeypatch, ep_peers._PUSH, Sm90PushWeights=as_tuple, Sm90PushPipe=SimpleNamespace,  # pyright: ignore[reportPrivateUsage]
        Sm90PushConfig=SimpleNamespace, Sm90PushMoERunner=Runner,
    )  # fmt: skip
    stand_in(monkeypatch, "flashinfer.comm.mnnvl", TorchDistBackend=SimpleNamespace)
    return seen


def stand_in_deepgemm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def symmetric(group: Any, num_experts: int, count: int, *sizes: int) -> Buffers:
        assert (group, num_experts, *sizes) == (GROUP, 8, 2, 256, 128)
        return buffers(count, 2, None, lambda: seen.append(f"destroyed {count}"))

    def pre_dispatch(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *into: torch.Tensor, num_tokens: int
    ) -> None:
        assert ids.dtype == torch.int32
        assert num_tokens == x.shape[0]
        stage(x, weights, ids, Buffers(*into, limit=None, destroy=lambda: None))

    def mega(y: torch.Tensor, l1: Any, l2: Any, staged: Buffers, *, activation_clamp: float | None) -> None:
        limited = Buffers(*(getattr(staged, n) for n in ("x", "x_sf", "topk_idx", "topk_weights")),
                          limit=activation_clamp, destroy=staged.destroy)  # fmt: skip
        y.copy_(compute(limited, dense(*l1), dense(*l2)))

    stand_in(
        monkeypatch, "deep_gemm", transform_weights_for_mega_moe_sm90=as_tuple,
        get_symm_buffer_for_mega_moe=symmetric, mega_moe_pre_dispatch_sm90=pre_dispatch, fp8_mega_moe=mega,
    )  # fmt: skip
    return seen


STAND_INS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "flashinfer_pull": Pull,
    "flashinfer_pull_staged": Pull,
    "flashinfer_push": stand_in_push,
    "deepgemm_mega": stand_in_deepgemm,
}


def peer_layer(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[PeerLayer, Experts]:
    """A peer on rank 0 of 2, which holds experts 0 to 3, as if there were GPUs."""
    monkeypatch.setattr(ep_peers, "why_not", nothing)
    local = LayerShape("local", 256, 128, 4, 2, SHAPE.activation)
    experts = random_experts(local, "fp8_block", CPU, seed=3)
    return PeerLayer(name, SHAPE, experts, GROUP), experts


def inputs(count: int, seed: int) -> Inputs:
    """For experts of rank 0 alone, so that one rank has the whole result."""
    routing = make_routing(LayerShape("local", 256, 128, 4, 2), count, seed=seed)
    x = torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Inputs(x, routing.topk_idx, routing.topk_weights)


def assert_right(y: torch.Tensor, experts: Experts, call: Inputs) -> None:
    exact = moe_exact(call.x, experts, call.topk_idx, call.topk_weights, torch.float32)
    assert y.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact, y.float(), dim=1).min() > 0.998
    torch.testing.assert_close(y.float().norm(dim=1), exact.norm(dim=1), rtol=0.05, atol=0)


def test_every_peer_is_tried_here() -> None:
    assert set(STAND_INS) == set(EP_PEERS)


@pytest.mark.parametrize("name", list(EP_PEERS))
def test_peer_computes_the_layer_for_each_call_and_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    STAND_INS[name](monkeypatch)
    layer, experts = peer_layer(monkeypatch, name)
    assert "1.2" in layer.note
    for count in (3, 1):
        calls = [inputs(count, seed) for seed in (count, count + 10)]
        bound = [bind(layer, call) for call in calls]
        for index in (0, 1, 0):
            y: Any = bound[index]()
            assert_right(y, experts, calls[index])
    assert_right(layer(calls[0].x, calls[0].topk_idx, calls[0].topk_weights), experts, calls[0])


def test_pull_session_fits_its_count_and_frees_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = Pull(monkeypatch)
    layer, _ = peer_layer(monkeypatch, "flashinfer_pull")
    for count in (3, 3, 5):
        bind(layer, inputs(count, seed=1))
    assert pull.opened == [(8, 3, 2, 256, 128, 0, 2, 0.5), (8, 5, 2, 256, 128, 0, 2, 0.5)]
    assert (pull.destroyed, len(pull.alive)) == (1, 4)
    close_layer(layer)
    assert (pull.destroyed, len(pull.alive)) == (2, 0)
    close_layer(layer)
    assert pull.destroyed == 2


@pytest.mark.parametrize(("name", "restages"), [("flashinfer_pull", False), ("flashinfer_pull_staged", True)])
def test_staging_is_timed_only_where_it_says_so(monkeypatch: pytest.MonkeyPatch, name: str, restages: bool) -> None:
    Pull(monkeypatch)
    layer, _ = peer_layer(monkeypatch, name)
    call = inputs(2, seed=5)
    bound = bind(layer, call)
    first: Any = bound()
    call.x.neg_()
    second: Any = bound()
    assert bool((first != second).any()) == restages
    assert ("included" in layer.note) == restages


@pytest.mark.parametrize(("name", "make"), [("flashinfer_push", stand_in_push), ("deepgemm_mega", stand_in_deepgemm)])
def test_other_sessions_end_with_their_count(
    monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[pytest.MonkeyPatch], list[str]]
) -> None:
    seen = make(monkeypatch)
    layer, _ = peer_layer(monkeypatch, name)
    for count in (2, 4):
        bind(layer, inputs(count, seed=1))
    assert seen == ["destroyed 2"]
    layer.close()
    assert seen == ["destroyed 2", "destroyed 4"]


def test_what_a_library_raises_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    Pull(monkeypatch)
    layer, _ = peer_layer(monkeypatch, "flashinfer_pull")

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no kernel\nlong story")

    stand_in(monkeypatch, PULL, hopper_fp8_mega_moe=fail)
    call = inputs(2, seed=1)
    with pytest.raises(WarpringError, match=r"^flashinfer_pull: ZeroDivisionError: no kernel$"):
        layer(call.x, call.topk_idx, call.topk_weights)


def test_a_deepgemm_without_the_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "deep_gemm")
    with pytest.raises(UnsupportedError, match="no Mega MoE for SM90"):
        peer_layer(monkeypatch, "deepgemm_mega")


def test_who_is_left_out_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = partial(why_not, device=torch.device("cuda", 0), group=GROUP)
    for name, reason in NOT_TIMED.items():
        assert gpus(name, SHAPE, "fp8_block") == reason
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    missing = gpus("flashinfer_pull", SHAPE, "fp8_block")
    assert missing is not None
    assert missing.startswith("cannot be imported: ModuleNotFoundError")
    Pull(monkeypatch)
    assert gpus("flashinfer_pull", SHAPE, "fp8_block") is None
    assert gpus("flashinfer_pull", SHAPE, "mxfp4") == "takes fp8_block, not mxfp4"
    for sizes in ((256, 96), (96, 256)):
        assert "multiples of 128" in str(gpus("flashinfer_pull", LayerShape("odd", *sizes, 8, 2), "fp8_block"))
    gated = LayerShape("gated", 256, 128, 8, 2, gpt_oss_swiglu())
    assert "SwiGLU" in str(gpus("flashinfer_pull", gated, "fp8_block"))
    for device, group in ((CPU, GROUP), (torch.device("cuda", 0), None)):
        assert why_not("flashinfer_pull", SHAPE, "fp8_block", device, group) == "needs two GPUs or more"


def test_a_peer_that_cannot_run_costs_the_others_nothing() -> None:
    bench = EpBench(SHAPE, "fp8_block", None, CPU, windows=1)
    ours, theirs = next(bench.run([2], [Variant(), Variant("flashinfer_pull")]))
    assert ours["p50_us"] > 0
    assert theirs["failed"] == "needs two GPUs or more"
    assert {"overlap", "note", "p50_us"}.isdisjoint(theirs)
    assert "flashinfer_pull" in describe(theirs)


def test_ep_bench_takes_peers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ep-bench", "--shape", SHAPE.size, "--format", "fp8_block", "--tokens", "1", "--device", "cpu"]
    assert main([*command, "--windows", "1", "--impl", "flashinfer_push,deepgemm_mega"]) == 0
    said = capsys.readouterr().out
    assert said.count("failed: needs two GPUs or more") == 2
    assert main([*command, "--impl", "nobody"]) != 0


class Slow(PeerLayer):
    """A peer on a CPU: the all-to-all baseline, whose sessions open late on rank 1, and whose calls take `seconds`."""

    opened: Path
    seconds = 0.0

    def __init__(self, name: str, shape: LayerShape, experts: Experts, group: Any) -> None:
        self.note, self._rank, self._size = "slow", group.rank(), group.size()
        self._layer = AllToAllExpertParallel(experts, group)

    def bind(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
        mark = self.opened / f"{x.shape[0]} {self._rank}"
        if not mark.exists():
            time.sleep(0.3 * self._rank)
            mark.touch()
        return partial(self, x, topk_idx, topk_weights)

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        assert all((self.opened / f"{x.shape[0]} {rank}").exists() for rank in range(self._size))
        time.sleep(self.seconds)
        return self._layer(x, topk_idx, topk_weights)

    def close(self) -> None:
        """Nothing to free."""


def measure_slow_peer(rank: int, opened: Path, tokens: list[int], seconds: float) -> tuple[list[Record], list[str]]:
    """Records of our layer and a slow peer, and what the watchdog, which waits for 0.5 s, gave up."""
    said: list[str] = []
    Slow.opened, Slow.seconds = opened, seconds
    true_layer, expert_parallel.PeerLayer = expert_parallel.PeerLayer, Slow
    try:
        bench = EpBench(SHAPE, "fp8_block", dist.group.WORLD, CPU, windows=1, watchdog=Watchdog(0.5, said.append))
        runs = bench.run(tokens, [Variant(), Variant("flashinfer_pull")])
        return [rec for measured in runs for rec in measured], said
    finally:
        expert_parallel.PeerLayer = true_layer


def test_no_rank_calls_a_peer_before_all_have_opened_their_sessions(tmp_path: Path) -> None:
    for records, _ in run_ranks(measure_slow_peer, 2, tmp_path, [2, 3], 0.0):
        assert [(rec["impl"], rec["tokens_per_rank"]) for rec in records] == [
            (impl, count) for count in (2, 3) for impl in ("warpring", "flashinfer_pull")
        ]
        assert all("p50_us" in rec for rec in records)


def test_every_step_of_a_peer_is_watched_on_every_rank_and_none_of_ours(tmp_path: Path) -> None:
    for rank, (_, said) in enumerate(run_ranks(measure_slow_peer, 2, tmp_path, [2], 0.6)):
        assert set(said) == {f"{SHAPE.name} fp8_block: flashinfer_pull on rank {rank}, T=2, gave no answer in 0.5 s"}
        assert len(said) >= 3, "the check, the windows that count and that do not"
