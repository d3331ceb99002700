"""What the bench of a layer must know of another library's layer to time it in turns with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warpring.bench.timing import Call

#: (weights, x [num_tokens, hidden] bf16, topk_idx int64, topk_weights fp32, out like x) -> a call that writes `out`
#: or gives a tensor of its own.
Bind = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Call]


@dataclass(frozen=True)
class Peer:
    """Another library's routed experts.

    Attributes:
        name: as records hold it, in `impl`.
        note: its version and what to know of its figures, for the records' `note`.
        prepare: `Experts` -> one layer's weights as the peer takes them, made once and not timed; shares memory where
            it can.
        bind: everything about one layer's inputs that is done ahead and not timed; the call that it gives is timed.
        takes_packed: whether `prepare` is given `PackedExperts`, the tile path's own, instead.
        copies_weights: whether `prepare` holds weights of its own, as large as ours.
        capturable: whether a CUDA graph can hold its calls.
        most_tokens: the largest batch that it serves.
    """

    name: str
    note: str
    prepare: Callable[[Any], Any]
    bind: Bind
    takes_packed: bool = False
    copies_weights: bool = False
    capturable: bool = True
    most_tokens: int = 1 << 30
