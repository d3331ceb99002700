"""One call of a layer: its arguments, checked, and in the form that the engines take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpring.errors import ArgumentError
from warpring.expert_parallel.problem import Problem

_NAME = "ExpertParallelDecode"


@dataclass(frozen=True)
class Call:
    """Checked arguments.

    Attributes:
        x: BF16 [rows, hidden], rows dense and 16-byte aligned.
        topk_idx: int32 or int64 [rows, topk], dense rows.
        topk_weights: FP32 [rows, topk], dense rows.
        num_tokens: int32 scalar on a GPU that says how many of the rows count, or None.
        count: tokens as known on the host: all rows where a GPU knows how many.
        shared_weights: FP32 [rows, num_shared], dense rows, or None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens: torch.Tensor | None
    count: int
    shared_weights: torch.Tensor | None

    def shared_weights_of(self, count: int) -> torch.Tensor | None:
        """Weights of the shared experts of the first `count` tokens."""
        return None if self.shared_weights is None else self.shared_weights[:count]


def make_call(
    problem: Problem,
    device: torch.device,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: int | torch.Tensor | None,
    shared: torch.Tensor | None,
) -> Call:
    """Check the arguments of a call; nothing has been sent when this raises.

    Raises:
        ArgumentError: a rule of shape, dtype, device or range; ids and counts where they can be seen without waiting
            for a GPU.
    """
    rows = x.shape[0] if x.dim() == 2 else -1
    _rule(
        x.dtype == torch.bfloat16 and rows >= 0 and x.shape[1] == problem.hidden,
        f"x must be bfloat16 [num_tokens, hidden={problem.hidden}]; got {_is(x)}. Flatten batch and sequence; cast.",
    )
    _rule(
        rows <= problem.max_tokens_per_rank,
        f"x must have at most max_tokens_per_rank = {problem.max_tokens_per_rank} rows; got {rows}. Split the batch, "
        "or build the layer for more.",
    )
    _rule(
        topk_idx.dtype in (torch.int32, torch.int64) and tuple(topk_idx.shape) == (rows, problem.topk),
        f"topk_idx must be int32 or int64 [num_tokens={rows}, topk={problem.topk}]; got {_is(topk_idx)}. Fill unused "
        "slots with -1.",
    )
    _rule(
        topk_weights.dtype.is_floating_point and topk_weights.shape == topk_idx.shape,
        f"topk_weights must be floating point {list(topk_idx.shape)} like topk_idx; got {_is(topk_weights)}.",
    )
    _rule(
        shared is None or (problem.num_shared > 0 and tuple(shared.shape) == (rows, problem.num_shared)),
        f"shared must be None or the weights [num_tokens={rows}, num_shared={problem.num_shared}] of the layer's "
        f"shared experts; got {'None' if shared is None else _is(shared)}. Build the layer with shared experts.",
    )
    named = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "shared": shared, "num_tokens": num_tokens}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            _rule(
                value.device == device and value.layout is torch.strided,
                f"{name} must be a strided tensor on {device}, where the experts are; got {value.layout} on "
                f"{value.device}. Move it with .to({str(device)!r}).",
            )
    count = _check_count(rows, num_tokens)
    if device.type == "cpu":
        _check_ids(topk_idx[:count], problem.num_experts)
    return Call(
        _dense(x, aligned=True),
        _dense(topk_idx),
        _dense(topk_weights.float()),
        num_tokens if isinstance(num_tokens, torch.Tensor) and num_tokens.device.type != "cpu" else None,
        count,
        None if shared is None else _dense(shared.float()),
    )


def check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless `out` can take the result."""
    dense = out.layout is torch.strided and out.dim() == 2 and out.stride(1) == 1
    apart = dense and (out.shape[0] < 2 or out.stride(0) >= out.shape[1])
    _rule(
        apart and out.dtype == torch.bfloat16 and out.shape == x.shape and out.device == x.device,
        f"out must be bfloat16 {list(x.shape)} on {x.device} with dense rows; got {_is(out)} on {out.device}.",
    )


def _check_count(rows: int, num_tokens: int | torch.Tensor | None) -> int:
    """Tokens known on the host; a count on a GPU is checked by the kernels."""
    if num_tokens is None:
        return rows
    if isinstance(num_tokens, torch.Tensor):
        _rule(
            num_tokens.dtype == torch.int32 and num_tokens.numel() == 1,
            f"num_tokens must be an int32 tensor of one element, or an int; got {_is(num_tokens)}.",
        )
        if num_tokens.device.type != "cpu":
            return rows
        num_tokens = int(num_tokens)
    _rule(0 <= num_tokens <= rows, f"num_tokens must be 0 to {rows}, the rows of x; got {num_tokens}. Pass more rows.")
    return num_tokens


def _check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        _rule(
            False,
            f"topk_idx must be -1 (unused) or an expert of any rank, 0 to {num_experts - 1}; got "
            f"{int(topk_idx[token, slot])} at token {token}, slot {slot} ({int(bad.sum())} such ids).",
        )


def _dense(tensor: torch.Tensor, *, aligned: bool = False) -> torch.Tensor:
    """The tensor, or a copy of it with dense rows (at 16-byte addresses, if `aligned`)."""
    if tensor.shape[0] and (tensor.stride(1) != 1 or (aligned and (tensor.stride(0) % 8 or tensor.data_ptr() % 16))):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _is(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _rule(holds: bool, message: str) -> None:
    if not holds:
        raise ArgumentError(f"{_NAME}: {message}")
