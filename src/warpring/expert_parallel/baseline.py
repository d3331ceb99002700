"""What expert parallelism costs without kernels of its own: two all-to-alls of a library around a grouped GEMM.

    1 sort       pairs by expert, which is by rank too
    2 counts     how many rows go from each rank to each: one all-to-all of R integers, read by the host
    3 dispatch   BF16 rows and the expert of each: all-to-all
    4 experts    the grouped path on the local experts
    5 return     BF16 rows: all-to-all
    6 combine    each token's rows times their weights, in FP32, in slot order

A yardstick for benchmarks, correct but not fast: the host waits for the counts, so nothing of it can be captured.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpring.errors import ArgumentError
from warpring.experts import Experts
from warpring.grouped import moe_grouped


class AllToAllExpertParallel:
    """An expert-parallel layer through `torch.distributed` all-to-alls (NCCL on GPUs, gloo on a CPU).

    Args:
        experts: this rank's experts: ids [rank * n, (rank + 1) * n) for n = experts.num_experts on every rank.
        group: the ranks; None for all.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup | None = None) -> None:
        self.experts = experts
        self.group = group
        self.num_ranks = dist.get_world_size(group)

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The layer's output for this rank's tokens.

        Args:
            x: BF16 [num_tokens, hidden]; num_tokens may be 0 and differ between ranks.
            topk_idx: int32 or int64 [num_tokens, topk], ids over all ranks' experts; others are unused slots.
            topk_weights: float32 [num_tokens, topk]; an unused slot's is ignored.

        Returns:
            BF16 [num_tokens, hidden]. Blocks the host until the counts are known.

        Raises:
            ArgumentError: x is not [num_tokens, hidden] BF16.
        """
        hidden, local = self.experts.hidden, self.experts.num_experts
        if x.ndim != 2 or x.shape[1] != hidden or x.dtype != torch.bfloat16:
            raise ArgumentError(
                f"AllToAllExpertParallel: x must be bfloat16 [num_tokens, {hidden}]; got {x.dtype} {list(x.shape)}."
            )
        num_experts = local * self.num_ranks
        used = (topk_idx >= 0) & (topk_idx < num_experts)
        expert, order = torch.where(used, topk_idx, num_experts).flatten().sort(stable=True)
        sends = torch.bincount(expert // local, minlength=self.num_ranks + 1)[: self.num_ranks]
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)
        send_sizes, receive_sizes = sends.tolist(), receives.tolist()
        order = order[: sum(send_sizes)]
        rows = self._exchange(x[order // max(1, topk_idx.shape[1])], send_sizes, receive_sizes)
        ids = self._exchange(expert[: sum(send_sizes)] % local, send_sizes, receive_sizes)
        if rows.shape[0]:
            one = torch.ones(rows.shape[0], 1, device=x.device)
            rows = moe_grouped(rows, self.experts, ids[:, None], one, torch.empty_like(rows))
        results = x.new_zeros(topk_idx.numel(), hidden, dtype=torch.float32)
        results[order] = self._exchange(rows, receive_sizes, send_sizes).float()
        weights = torch.where(used, topk_weights, 0.0)
        total = x.new_zeros(x.shape[0], hidden, dtype=torch.float32)
        for slot, result in enumerate(results.view(*topk_idx.shape, hidden).unbind(1)):
            total.addcmul_(weights[:, slot, None], result)
        return total.to(x.dtype)

    def _exchange(self, rows: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=self.group)
        return received
