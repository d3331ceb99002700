"""Hugging Face MoE checkpoints (safetensors) to `Experts`, streamed layer by layer; and back, quantised.

    checkpoint = Checkpoint("Qwen3-30B-A3B")
    experts = checkpoint.load_experts(checkpoint.moe_layers[0], device="cuda", format="mxfp8")

`docs/checkpoints.md` lists the models, the layouts and what each error means.
"""

from __future__ import annotations

from warpring.checkpoint.reader import Checkpoint
from warpring.checkpoint.writer import quantize_checkpoint

__all__ = ["Checkpoint", "quantize_checkpoint"]
