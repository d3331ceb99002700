"""Other libraries' expert-parallel layers in the bench: used where they can be imported, left out by name elsewhere.

Nothing of theirs is in here: each adapter hands our stored weights and routings to a library's functions, in the layout
that it wants. All take FP8 weights in blocks of 128 x 128 and quantise activations to FP8.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from warpring.activation import Activation
from warpring.bench.adapters import BLOCK, fp8_scales
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call
from warpring.errors import UnsupportedError, WarpringError
from warpring.experts import Experts

_PULL = "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel"
_PULL_GLUE = "flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_fp8_bf16_pull_cutedsl"
_PUSH = "flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe"


@dataclass(frozen=True)
class Session:
    """A library's layer for one count of tokens a rank, by which it chooses its kernels and buffers.

    Attributes:
        bind: (x [T, hidden] bf16, topk_idx int64 over all ranks' experts, topk_weights fp32) -> a call that gives
            BF16 [T, hidden], valid until the next call. All ranks bind and call alike. When it has returned on all
            ranks, and their GPUs have done what it queued, every buffer that other ranks write to is ready.
        close: frees its buffers; a collective.
    """

    bind: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Call]
    close: Callable[[], object]


@dataclass(frozen=True)
class Ranks:
    """Who takes part: the process group, its size, and this process's place in it."""

    group: Any
    size: int
    rank: int


#: The library's name and version and what to know of its figures, and how to open a session for so many tokens.
Prepared = tuple[str, Callable[[int], Session]]


class PeerLayer:
    """Another library's layer on this rank. A collective of the group, like every call of it.

    Args:
        name: one of `EP_PEERS`.
        shape: the layer; num_experts over all ranks.
        experts: this rank's, in fp8_block.
        group: the ranks.

    Raises:
        UnsupportedError: a library that is not here or does not serve this layer; says why.
    """

    def __init__(self, name: str, shape: LayerShape, experts: Experts, group: Any) -> None:
        if (reason := why_not(name, shape, experts.format, experts.device, group)) is not None:
            raise UnsupportedError(reason)
        self.note, self._open = _guarded(
            name, functools.partial(EP_PEERS[name], shape, experts, Ranks(group, group.size(), group.rank()))
        )
        self._name = name
        self._count = 0
        self._session: Session | None = None

    def bind(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
        """Everything about one call's inputs that is done ahead and not timed; the call that it gives is timed.

        Raises:
            WarpringError: whatever the library raised.
        """
        session = self._session
        if session is None or self._count != x.shape[0]:
            self.close()
            session = self._session = _guarded(self._name, functools.partial(self._open, x.shape[0]))
            self._count = x.shape[0]
        return _guarded(self._name, functools.partial(session.bind, x, topk_idx, topk_weights))

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The layer's output, BF16 [T, hidden]."""
        result: Any = _guarded(self._name, self.bind(x, topk_idx, topk_weights))
        return result.clone()

    def close(self) -> None:
        """Free the library's buffers; a later call opens a session anew."""
        session, self._session = self._session, None
        if session is not None:
            _guarded(self._name, session.close)


def _guarded(name: str, step: Callable[[], Any]) -> Any:
    """The step's result. Libraries fail in ways of their own; the bench knows but ours."""
    try:
        return step()
    except WarpringError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or ["no message"])[0]
        raise WarpringError(f"{name}: {type(error).__name__}: {first}") from error


def why_not(name: str, shape: LayerShape, format: str, device: torch.device, group: Any) -> str | None:
    """Why a peer cannot serve this layer here, as far as can be told without running it; None if it may.

    Args:
        name: one of `EP_PEERS` or `NOT_TIMED`.
    """
    if name in NOT_TIMED:
        return NOT_TIMED[name]
    if format != "fp8_block":
        return f"takes fp8_block, not {format}"
    if device.type != "cuda" or group is None or group.size() < 2:
        return "needs two GPUs or more"
    if shape.hidden % BLOCK or shape.intermediate % BLOCK or shape.has_bias:
        return f"takes sizes in multiples of {BLOCK} and no biases"
    if shape.activation != Activation(limit=shape.activation.limit):
        return "computes SwiGLU with or without a clip alone"
    try:
        importlib.import_module(_MODULES[name])
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # A library that does not fit this torch or driver fails to load in any of these ways.
        return f"cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _flashinfer_pull(timed_staging: bool, shape: LayerShape, experts: Experts, ranks: Ranks) -> Prepared:
    """The CuTe DSL megakernel: each rank pulls the tokens that its experts want.

    Its gate and up rows take turns, eight by eight, and share blocks of scales: FlashInfer quantises the weights anew.
    """
    pull, shim = importlib.import_module(_PULL), importlib.import_module(f"{_PULL}.shim")
    staging: Any = importlib.import_module(f"{_PULL_GLUE}.staging")
    pack: Any = importlib.import_module("flashinfer.moe_ep.weights")
    form = {"kind": "fp8_e4m3", "fp8_scale_mode": "blockwise"}
    w13, w2 = experts.dequantize(torch.bfloat16)
    legs: tuple[Any, Any] = importlib.import_module(f"{_PULL_GLUE}.weights").preprocess_mega_weights(
        pack.MoEWeightPack(w13=w13, w2=w2), intermediate_size=shape.intermediate, hidden_size=shape.hidden, **form
    )

    def open_session(count: int) -> Session:
        sizes = (shape.num_experts, count, shape.topk, shape.hidden, shape.intermediate, ranks.rank, ranks.size)
        buffers: Any = pull.get_symm_buffer_for_hopper_fp8_mega_moe(
            *sizes, **form, gate_up_clamp=shape.activation.limit
        )
        extra: list[torch.Tensor] = []

        def symmetric(like: torch.Tensor) -> torch.Tensor:
            as_bytes = like.element_size() == 1
            extra.append(shim.sym_zeros(tuple(like.shape), torch.uint8 if as_bytes else like.dtype))
            return extra[-1].view(like.dtype)

        def stage(own: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
            staging.stage_mega_moe_inputs(
                x, topk_weights, topk_idx, own.x, own.x_sf, own.topk_idx, own.topk_weights, **form
            )

        def ready(own: Any) -> None:
            """Make and clear the workspace, which the first call would do otherwise: other ranks' first calls write to
            it, and a signal that is cleared is waited for for ever."""
            pull.hopper_fp8_mega_launch_thunk(*legs, own)

        def bind(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
            if timed_staging:
                ready(buffers)
                return lambda: (
                    stage(buffers, x, topk_idx, topk_weights),
                    pull.hopper_fp8_mega_moe(None, *legs, buffers),
                )[1]
            inputs = ("x", "x_sf", "topk_idx", "topk_weights")
            own = replace(buffers, **{name: symmetric(getattr(buffers, name)) for name in inputs})
            stage(own, x, topk_idx, topk_weights)
            ready(own)
            return functools.partial(pull.hopper_fp8_mega_moe, None, *legs, own)

        def close() -> None:
            for root in extra:
                shim.free_sym_tensor(root)
            buffers.destroy()

        return Session(bind, close)

    how = "its staging of BF16 inputs included" if timed_staging else "inputs quantised ahead, not timed"
    return f"FlashInfer {_version('flashinfer')}, SM90 pull MegaMoE, {how}", open_session


def _flashinfer_push(shape: LayerShape, experts: Experts, ranks: Ranks) -> Prepared:
    """Dispatch that pushes rows, two grouped GEMMs, combine. It knows no clip: inputs that reach one show in the check.

    With deduplicated dispatch and grouped combine, as its own configuration has it.
    """
    push: Any = importlib.import_module(_PUSH)
    comm: Any = importlib.import_module("flashinfer.comm.mnnvl")
    w13_scale, w2_scale = fp8_scales(experts)
    weights: Any = push.Sm90PushWeights(
        experts.w13.data.flatten(1, 2), w13_scale.contiguous(), experts.w2.data, w2_scale.contiguous()
    )

    def open_session(count: int) -> Session:
        pipe: Any = push.Sm90PushPipe(
            ep_size=ranks.size,
            rank=ranks.rank,
            num_local_experts=experts.num_experts,
            hidden_size=shape.hidden,
            top_k=shape.topk,
            token_capacity=count,
            device_index=experts.device.index,
            config=push.Sm90PushConfig(dedup_dispatch=True, grouped_combine=True),
            comm_backend=comm.TorchDistBackend(group=ranks.group),
            out_dtype=torch.bfloat16,
        )
        runner: Any = push.Sm90PushMoERunner(pipe, weights)

        def bind(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
            return functools.partial(runner.forward, x, topk_idx.int(), topk_weights, output=torch.empty_like(x))

        return Session(bind, runner.destroy)

    return f"FlashInfer {_version('flashinfer')}, SM90 push MegaMoE", open_session


def _deepgemm_mega(shape: LayerShape, experts: Experts, ranks: Ranks) -> Prepared:
    """DeepGEMM's Mega MoE for SM90, with its kernel before it that quantises the inputs."""
    library: Any = importlib.import_module("deep_gemm")
    if not hasattr(library, "transform_weights_for_mega_moe_sm90"):
        raise UnsupportedError("this DeepGEMM has no Mega MoE for SM90")
    w13_scale, w2_scale = fp8_scales(experts)
    legs: tuple[Any, Any] = library.transform_weights_for_mega_moe_sm90(
        (experts.w13.data.flatten(1, 2), w13_scale.contiguous()), (experts.w2.data, w2_scale.contiguous())
    )

    def open_session(count: int) -> Session:
        sizes = (shape.num_experts, count, shape.topk, shape.hidden, shape.intermediate)
        buffer: Any = library.get_symm_buffer_for_mega_moe(ranks.group, *sizes)
        inputs = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)

        def bind(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
            ids, y = topk_idx.int(), torch.empty_like(x)

            def call() -> torch.Tensor:
                library.mega_moe_pre_dispatch_sm90(x, ids, topk_weights, *inputs, num_tokens=count)
                library.fp8_mega_moe(y, *legs, buffer, activation_clamp=shape.activation.limit)
                return y

            return call

        return Session(bind, buffer.destroy)

    return f"DeepGEMM {_version('deep_gemm')}, SM90 Mega MoE", open_session


def _version(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", "of unknown version"))


#: Every peer that has an adapter, by the name that records hold in `impl`.
EP_PEERS: dict[str, Callable[[LayerShape, Experts, Ranks], Prepared]] = {
    "flashinfer_pull": functools.partial(_flashinfer_pull, False),
    "flashinfer_pull_staged": functools.partial(_flashinfer_pull, True),
    "flashinfer_push": _flashinfer_push,
    "deepgemm_mega": _deepgemm_mega,
}
_MODULES = {
    "flashinfer_pull": _PULL, "flashinfer_pull_staged": _PULL, "flashinfer_push": _PUSH, "deepgemm_mega": "deep_gemm",
}  # fmt: skip
#: Peers that are left out everywhere, and why.
NOT_TIMED: dict[str, str] = {
    "deepep_deepgemm": "has no adapter: DeepEP's extension fits but the torch that it was built for, and NVSHMEM",
}
