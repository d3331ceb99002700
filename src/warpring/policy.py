"""Which path serves which batch.

Warp decode reads a weight row once for every token that wants it; the expert-centric path reads it once for
all of them, but pays for sorting, padding, gathering and scattering. So warp decode wins up to some batch, and
the library says where. The crossovers below are those of `docs/performance.md`.
"""

from __future__ import annotations

from warpring.experts import Experts

#: Largest decode batch that "auto" gives to warp decode on a GPU; beyond it the expert-centric path serves. Measured
#: on an H200, Qwen3-30B-A3B in MXFP8: at 64 tokens warp leads (504 to 623 us), at 96 the other (640 to 743 us).
MAX_WARP_TOKENS = 64
#: Largest batch that "auto" gives to the CPU cores' own decode path.
MAX_CORES_TOKENS = 16


def choose_path(experts: Experts, num_tokens: int) -> str:
    """The path that `path="auto"` takes: "warp" or "classical" on a GPU, "cores" or "classical" on a CPU."""
    if experts.device.type == "cuda":
        return "warp" if num_tokens <= MAX_WARP_TOKENS else "classical"
    return "cores" if num_tokens <= MAX_CORES_TOKENS else "classical"
