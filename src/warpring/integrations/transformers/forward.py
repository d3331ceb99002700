"""The function that transformers calls in place of an experts module's forward."""

from __future__ import annotations

import torch

from warpring.decode import moe_decode
from warpring.errors import UnsupportedError
from warpring.integrations.transformers.state import State, find_state, state_by_handle, state_of
from warpring.layout import PackedExperts
from warpring.policy import choose_path


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run one layer's routed experts; `ExpertsInterface` and `FP8ExpertsInterface` call it by name.

    Args:
        self: the experts module.
        hidden_states: [num_tokens, hidden], any float dtype; BF16 inside.
        top_k_index: [num_tokens, topk] integer; num_experts marks a slot of another expert-parallel rank, skipped.
        top_k_weights: [num_tokens, topk], normalised and scaled by the router.

    Returns:
        [num_tokens, hidden] of hidden_states' dtype.

    Raises:
        UnsupportedError: gradients are wanted, or the module has no path here (see `check_module`).
    """
    _refuse_gradients(self, hidden_states, top_k_weights)
    if not torch.compiler.is_compiling():
        return _run(state_of(self), hidden_states, top_k_index, top_k_weights)
    state = find_state(self)
    if state is None:
        return _first_run(self, hidden_states, top_k_index, top_k_weights)
    return torch.ops.warpring.transformers_experts(hidden_states, top_k_index, top_k_weights, state.handle)


@torch.library.custom_op("warpring::transformers_experts", mutates_args=())
def transformers_experts(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, handle: str
) -> torch.Tensor:
    """`experts_forward` as one opaque node of a compiled graph: weight changes and batch size are seen at run time."""
    return _run(state_by_handle(handle), hidden_states, top_k_index, top_k_weights)


@transformers_experts.register_fake
def _fake(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, handle: str
) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _run(state: State, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    experts = state.experts(x.device)
    num_tokens, topk = topk_idx.shape
    path = state.path
    if path == "auto":
        path = choose_path(experts, num_tokens, topk, packed=isinstance(experts, PackedExperts))
    state.record(path, num_tokens)
    # Expert-parallel ranks mark the slots of others with the id num_experts. Only a CPU looks at ids and refuses it.
    if x.device.type == "cpu":
        topk_idx = torch.where(topk_idx == experts.num_experts, -1, topk_idx)
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            y = moe_decode(x.bfloat16(), experts, topk_idx, topk_weights, path=path)
    else:
        y = moe_decode(x.bfloat16(), experts, topk_idx, topk_weights, path=path)
    return y.to(x.dtype)


@torch.compiler.disable(  # pyright: ignore[reportUntypedFunctionDecorator]
    reason="warpring packs an experts module at its first call. For torch.compile(fullgraph=True), call "
    "warpring.integrations.transformers.install(model), or run the model once, before compiling."
)
def _first_run(
    module: torch.nn.Module, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The first call of a module inside a compiled model: outside the graph, which breaks here."""
    return _run(state_of(module), x, topk_idx, topk_weights)


def _refuse_gradients(module: torch.nn.Module, x: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """No path has a backward, and a result cut off from autograd would train nothing without a word."""
    if not torch.is_grad_enabled():
        return
    for tensor in (x, topk_weights, getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise UnsupportedError(
                f"{type(module).__name__}: warpring experts have no backward, and gradients are enabled. Run inference "
                "under torch.no_grad() or inference_mode(); train with model.set_experts_implementation('grouped_mm')."
            )
