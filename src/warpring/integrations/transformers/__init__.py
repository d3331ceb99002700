"""transformers: run the routed experts of Hugging Face models with warpring.

Importing this module registers `experts_implementation="warpring"` for dense and for FP8 experts:

    import warpring.integrations.transformers as warpring_transformers

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="warpring")

`install` does the same to a loaded model, with a number format, a forced path or the dense weights freed.
`docs/transformers.md` says which models work, what is refused, and what runs where.
"""

from __future__ import annotations

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        "warpring.integrations.transformers needs transformers >= 5.17; install warpring[transformers]."
    ) from error

from warpring.integrations.transformers.forward import experts_forward
from warpring.integrations.transformers.install import install, install_packed, reset_stats, stats
from warpring.integrations.transformers.quantized import is_quantized_checkpoint, load_quantized
from warpring.integrations.transformers.state import IMPLEMENTATION, PathStats

for _interface in (ExpertsInterface, FP8ExpertsInterface):
    _interface.register(IMPLEMENTATION, experts_forward)

__all__ = [
    "IMPLEMENTATION",
    "PathStats",
    "experts_forward",
    "install",
    "install_packed",
    "is_quantized_checkpoint",
    "load_quantized",
    "reset_stats",
    "stats",
]
