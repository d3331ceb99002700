"""One MoE layer on several ranks: torchrun --nproc-per-node 2 examples/expert_parallel.py (GPUs, or CPU ranks)."""

import torch
import torch.distributed as dist

from warpring import Experts
from warpring.expert_parallel import ExpertParallelDecode, Problem, local_experts
from warpring.routing import Router

gpu = torch.cuda.is_available()
dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if gpu else torch.device("cpu")

torch.manual_seed(0)  # the same 16 experts everywhere, of which each rank keeps its own
experts = Experts.from_dense(torch.randn(16, 2 * 256, 512) / 22, torch.randn(16, 512, 256) / 16, format="mxfp4")
problem = Problem(512, 256, num_experts=16, topk=4, num_ranks=ranks, max_tokens_per_rank=8, format="mxfp4")
with ExpertParallelDecode(problem, dist.group.WORLD, local_experts(experts, rank, ranks).to(device)) as layer:
    tokens = 3 + rank % 2  # each rank brings as many as it has
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device=device)
    topk_idx, topk_weights = Router(topk=4).route(torch.randn(tokens, 16, device=device))
    y = layer(x, topk_idx, topk_weights)  # [tokens, 512] bf16
print(f"rank {rank}: {tokens} tokens, |y| = {y.float().norm().item():.3f}")
dist.destroy_process_group()
