"""The table of what a record may hold, made of the schema itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warpring.bench.markdown import DASH, markdown
from warpring.bench.records import COMMON, REQUIRED, SCHEMA, Record

#: What one record of each bench stands for.
ABOUT: dict[str, str] = {
    "decode": "one MoE layer, one path or peer, one batch",
    "shared": "a layer with shared experts: none of them, fused into its launch, or as a layer of their own",
    "accuracy": "a path's output against FP64, one batch",
    "end_to_end": "a whole model's step, one batch and context",
    "profile": "one kernel of a layer under Nsight Compute",
    "resources": "one form of a kernel as `cuda`'s compiler left it, without a GPU; `smem_bytes` of a CTA in all",
    "expert_parallel": "a layer over several ranks, one variant or peer, one count of tokens a rank; the "
    "slowest rank's time",
    "ep_verify": "one case of an expert-parallel layer against the same arithmetic done rank-locally (`cosine_min`) "
    "and FP64 (`exact_cosine_min`, `rms_rel_error`): `repeats` replays, `tokens` compared tokens in all, `met` if "
    "within bounds",
    "soak": "`repeats` replays back to back, each of `calls` calls: outputs at `checks` of them, values that changed "
    "when inputs came again, growth of memory as torch and the device see it",
    "perplexity": "a checkpoint on held-out text, one format",
}


def vocabulary(records: Sequence[Record]) -> str:
    """A row a bench: what a record of it is, what it must hold beside what all do, and what it may."""
    rows = [
        [f"`{bench}`", ABOUT[bench], _listed(REQUIRED[bench]), _listed(n for n in fields if n not in REQUIRED[bench])]
        for bench, fields in SCHEMA.items()
    ]
    table = markdown(("bench", "a record is", "must hold", "may hold"), rows)
    table = table.replace("---:", "---")  # words, not figures
    return f"{table}\nAll may hold {_listed(COMMON)}.\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or DASH
