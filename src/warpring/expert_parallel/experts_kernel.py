"""role2's kernel as it is compiled: which policy, how many stages fit into shared memory."""

from __future__ import annotations

from warpring.expert_parallel.packing import CHUNK_COLUMNS, POLICIES, TASK_ROWS, image_bytes
from warpring.expert_parallel.problem import NEURONS, Problem
from warpring.formats import ceil_div
from warpring.runtime.jit import KernelSpec

#: Threads of a CTA: two warpgroups that consume, one whose threads request copies.
EXPERTS_THREADS = 384
#: Dynamic shared memory of all CTAs of a multiprocessor: what Hopper has, less 1 KiB of its own a CTA.
_SM_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
#: Chunks of routed weights in a stage: requests cost their thread more than bytes do.
STAGE_CHUNKS = 2
_CONSUMER_WARPS = 8
_QUEUED_TASKS = 8
_TASK_BYTES = 32
_BARRIER_PADDING = 112  # at most, before the stages


def ctas_per_sm(problem: Problem) -> int:
    """CTAs of a multiprocessor that role2 has to itself.

    MXFP4 takes longer to decode than to read with two warps a scheduler: two CTAs have four, and one's epilogue runs
    beside the other's products. Wider blocks need the registers of one.
    """
    narrow = problem.format == "mxfp4" and problem.tokens_per_block <= 32
    return 2 if narrow and num_stages(problem, 2) > 2 else 1


def smem_bytes(ctas: int) -> int:
    """Dynamic shared memory of each of `ctas` CTAs of a multiprocessor."""
    return _SM_BYTES // ctas - _RESERVED_BYTES


def num_stages(problem: Problem, ctas: int = 1) -> int:
    """Stages of a CTA: as many as fit into its shared memory, each some chunks of weights with their tokens."""
    formats = {problem.format} | ({problem.shared_format} if problem.num_shared else set())
    chunks = {format: _stage_chunks(problem.format, format) for format in formats}
    weights = max(chunks[format] * image_bytes(format) for format in formats)
    block, element = problem.tokens_per_block, problem.activation_bytes
    columns = max(chunks.values()) * CHUNK_COLUMNS
    stage = _up(weights + block * columns * element + columns // NEURONS * block * 4)
    partial_bytes = 2 if problem.activation == "fp8" else 4
    turn = max(min(block, 64 // partial_bytes) * (TASK_ROWS * partial_bytes + 16), block * NEURONS * element)
    queue = _QUEUED_TASKS * (_TASK_BYTES + 16 + 8 * block + 32)
    fixed = turn + block * _CONSUMER_WARPS * 4 + _BARRIER_PADDING + queue + 32
    return (smem_bytes(ctas) - fixed) // (stage + 16)


def _stage_chunks(routed: str, format: str) -> int:
    """Chunks of weights of `format` in a stage: of the routed ones STAGE_CHUNKS, of others what their bytes hold."""
    return max(1, min(STAGE_CHUNKS, STAGE_CHUNKS * image_bytes(routed) // image_bytes(format)))


def _up(num_bytes: int) -> int:
    return ceil_div(num_bytes, 128) * 128


def problem_macros(problem: Problem) -> tuple[tuple[str, str], ...]:
    """What every kernel of the layer has compiled in."""
    return (
        ("WARPRING_HIDDEN", str(problem.hidden)),
        ("WARPRING_INTERMEDIATE", str(problem.intermediate)),
        ("WARPRING_TOPK", str(problem.topk)),
        ("WARPRING_EXPERTS", str(problem.num_experts)),
        ("WARPRING_LOCAL_EXPERTS", str(problem.num_local_experts)),
        ("WARPRING_NUM_SHARED", str(problem.num_shared)),
        ("WARPRING_BLOCK_M", str(problem.tokens_per_block)),
        ("WARPRING_ACTIVATION_FP8", str(int(problem.activation == "fp8"))),
    )


def experts_spec(problem: Problem, ctas: int = 1) -> KernelSpec:
    """The kernel of role2 for this layer, for `ctas` CTAs a multiprocessor, on which no bit depends; it runs on sm_90a.

    Raises:
        UnsupportedError: a weight format without a policy.
    """
    stages = num_stages(problem, ctas)  # names a format without a policy
    macros = [
        *problem_macros(problem),
        ("WARPRING_FORMAT", POLICIES[problem.format]),
        ("WARPRING_STAGES", str(stages)),
        ("WARPRING_STAGE_CHUNKS", str(STAGE_CHUNKS)),
        ("WARPRING_CTAS_PER_SM", str(ctas)),
        ("WARPRING_SMEM_BYTES", str(smem_bytes(ctas))),
    ]
    if problem.num_shared:
        macros.append(("WARPRING_SHARED_FORMAT", POLICIES[problem.shared_format]))
    if problem.gate.gate_fn == "gelu_tanh":
        macros.append(("WARPRING_GELU_TANH", ""))
    return KernelSpec("ep_experts.cu", "ep_experts", tuple(macros), smem_bytes(ctas))
