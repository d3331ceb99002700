"""What every kernel of a whole layer must do with ids that are no experts and with NaN, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from moe_inputs import Inputs, rms_rel_error

from warpring import moe_exact


def check_unused_slots_duplicates_and_foreign_ids(run: Callable[..., torch.Tensor], inputs: Inputs) -> None:
    """A layer of six experts: -1 and foreign ids are skipped whatever their weights, and an expert
    may be wanted twice. `run(inputs, seed=...)` is the layer."""
    inputs.topk_idx[0, 1] = -1
    inputs.topk_idx[1] = -1
    inputs.topk_idx[2] = 3
    inputs.topk_weights[inputs.topk_idx < 0] = torch.nan
    y = run(inputs, seed=3)
    assert rms_rel_error(y, moe_exact(*inputs.args())) < 4e-3
    assert (y[1] == 0).all()
    for bad in (6, 2**31 - 1, 2**40, -2, -(2**40)):
        foreign = replace(inputs, topk_idx=inputs.topk_idx.clone())
        foreign.topk_idx[0, 1] = bad
        assert torch.equal(run(foreign, seed=3), y)


def with_nan(inputs: Inputs) -> tuple[Inputs, torch.Tensor]:
    """Inputs that hold a NaN in x of token 4, and which outputs are NaN where row 17 of expert 1's w2 holds one too.

    Even tokens want experts 0, 2 and 4, odd ones 1, 3 and 5.
    """
    count = len(inputs.x)
    inputs.topk_idx[:] = torch.arange(count)[:, None] % 2 + torch.tensor([0, 2, 4])
    inputs.x[4, 3] = torch.nan
    expected = torch.zeros(inputs.x.shape, dtype=torch.bool)
    expected[1::2, 17] = True
    expected[4] = True
    return inputs, expected
