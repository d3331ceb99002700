"""Recording finds every family's experts, whatever their forward calls its arguments."""

from __future__ import annotations

import pytest
import torch
from hf_models import experts_of, make_model, run

from warpring.integrations.recording import _record


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next"])
def test_every_layer_is_recorded_as_the_experts_were_given_it(architecture: str) -> None:
    model = make_model(architecture, seed=3)
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(4))
    keep = torch.tensor([0, 5, 11])
    layers = _record(model, ids, keep)
    given = run(model, ids).inputs
    assert len(layers) == len(experts_of(model)) == len(given)
    for layer, (_, (x, topk_idx, topk_weights)) in zip(layers, given, strict=True):
        assert torch.equal(layer.x, x[keep])
        assert torch.equal(layer.topk_idx, topk_idx[keep])
        assert torch.equal(layer.topk_weights, topk_weights[keep].float())
