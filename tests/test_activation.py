"""Gated activations against formulas written anew in FP64, against transformers, and at their clamps."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import pytest
import torch

from warpring.activation import GELU_TANH, SILU, Activation, clipped_swiglu, gpt_oss_swiglu
from warpring.errors import ArgumentError

NAN, INF = math.nan, math.inf


def silu(gate: float, up: float) -> float:
    return gate / (1 + math.exp(-gate)) * up


def gelu_tanh(gate: float, up: float) -> float:
    return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def gpt_oss(gate: float, up: float) -> float:
    gate = min(gate, 7.0)
    return gate / (1 + math.exp(-1.702 * gate)) * (max(-7.0, min(up, 7.0)) + 1)


def clipped(gate: float, up: float) -> float:
    return silu(min(gate, 10.0), max(-10.0, min(up, 10.0)))


def every_option(gate: float, up: float) -> float:
    gate = min(gate, 2.5)
    return gate / (1 + math.exp(-0.5 * gate)) * (max(-2.5, min(up, 2.5)) - 0.75)


FORMULAS = [
    (SILU, silu),
    (GELU_TANH, gelu_tanh),
    (gpt_oss_swiglu(), gpt_oss),
    (clipped_swiglu(), clipped),
    (Activation(alpha=0.5, limit=2.5, up_offset=-0.75), every_option),
]
NAMES = ["silu", "gelu_tanh", "gpt_oss", "clipped", "every_option"]
every_activation = pytest.mark.parametrize(("activation", "formula"), FORMULAS, ids=NAMES)
CLAMPED = [gpt_oss_swiglu(), clipped_swiglu(), Activation(gate_fn="gelu_tanh", limit=3.0)]
every_clamp = pytest.mark.parametrize("activation", CLAMPED, ids=["gpt_oss", "clipped", "gelu_tanh"])


def random_pair(seed: int, scale: float = 6.0) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(seed)) * scale
    return gate, up


@every_activation
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-12), (torch.float32, 4e-6, 1e-6)])
def test_activation_follows_its_formula(
    activation: Activation, formula: Any, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    gate, up = random_pair(1)
    # Both sides of every clamp must be among the inputs.
    assert (gate.abs() > 10).any()
    assert (up.abs() > 10).any()
    expected = torch.tensor(
        [formula(g, u) for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)],
        dtype=torch.float64,
    ).reshape(gate.shape)
    actual = activation(gate.to(dtype), up.to(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("module", "config", "experts", "fields", "interleaved"),
    [
        ("gpt_oss", "GptOssConfig", "GptOssExperts", {"num_local_experts": 1, "intermediate_size": 33}, True),
        ("deepseek_v4", "DeepseekV4Config", "DeepseekV4Experts", {"n_routed_experts": 1}, False),
    ],
)
def test_clamped_activation_equals_the_gate_of_transformers(
    module: str, config: str, experts: str, fields: dict[str, Any], interleaved: bool
) -> None:
    pytest.importorskip("transformers")
    package = f"transformers.models.{module}"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"this transformers has no {module}")
    config_object = getattr(importlib.import_module(package), config)(hidden_size=8, **fields)
    theirs = getattr(importlib.import_module(f"{package}.modeling_{module}"), experts)(config_object)
    ours = gpt_oss_swiglu(theirs.alpha, theirs.limit) if interleaved else clipped_swiglu(theirs.limit)
    gate, up = random_pair(2)
    gate_up = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
    torch.testing.assert_close(ours(gate, up), theirs._apply_gate(gate_up), rtol=4e-6, atol=1e-6)


@every_clamp
def test_clamp_is_flat_beyond_the_limit_and_moves_before_it(activation: Activation) -> None:
    limit = activation.limit
    assert limit is not None
    at = torch.tensor([limit])
    below, above = at * 0.99, at * 1.5
    one = torch.ones(1)
    assert torch.equal(activation(above, one), activation(at, one))
    assert not torch.equal(activation(below, one), activation(at, one))
    assert torch.equal(activation(one, above), activation(one, at))
    assert not torch.equal(activation(one, below), activation(one, at))
    assert torch.equal(activation(one, -above), activation(one, -at))
    assert not torch.equal(activation(one, -below), activation(one, -at))


@every_clamp
def test_gate_has_no_clamp_from_below(activation: Activation) -> None:
    limit = activation.limit
    assert limit is not None
    gate = torch.tensor([-limit, -1.5 * limit], dtype=torch.float64)
    first, second = activation(gate, torch.full((2,), 0.5, dtype=torch.float64))
    assert first != second


@every_clamp
def test_clamped_activation_is_finite_on_infinities(activation: Activation) -> None:
    values = activation(torch.tensor([INF, INF, 1.0, 1.0]), torch.tensor([INF, -INF, INF, -INF]))
    assert values.isfinite().all()


def test_no_limit_means_no_clamp() -> None:
    gate, up = torch.tensor([2.0**20]), torch.tensor([-(2.0**20)])
    assert SILU(gate, up).item() == -(2.0**40)
    assert GELU_TANH(gate, up).item() == -(2.0**40)


@every_activation
@pytest.mark.parametrize(("gate", "up"), [(NAN, 1.0), (1.0, NAN), (NAN, NAN), (NAN, 0.0), (-1e4, NAN)])
def test_nan_passes_every_activation(activation: Activation, formula: Any, gate: float, up: float) -> None:
    assert activation(torch.tensor([gate]), torch.tensor([up])).isnan().all()


def test_presets_hold_the_numbers_of_their_models() -> None:
    assert gpt_oss_swiglu() == Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    assert clipped_swiglu() == Activation("silu", alpha=1.0, limit=10.0, up_offset=0.0)
    assert clipped_swiglu(3.0).limit == 3.0
    assert gpt_oss_swiglu(1.0, 5.0) == Activation(alpha=1.0, limit=5.0, up_offset=1.0)
    assert SILU.limit is None
    assert GELU_TANH.limit is None


def test_description_is_frozen_and_hashable() -> None:
    with pytest.raises(AttributeError):
        SILU.limit = 1.0  # pyright: ignore
    assert {gpt_oss_swiglu(), gpt_oss_swiglu(), SILU} == {SILU, gpt_oss_swiglu()}


@every_activation
def test_activation_leaves_its_inputs_alone(activation: Activation, formula: Any) -> None:
    gate, up = random_pair(3)
    kept = gate.clone(), up.clone()
    activation(gate, up)
    assert torch.equal(gate, kept[0])
    assert torch.equal(up, kept[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate_fn": "relu"}, "gate_fn must be 'silu' or 'gelu_tanh'; got 'relu'"),
        ({"gate_fn": "gelu_tanh", "alpha": 1.702}, "alpha belongs to gate_fn 'silu'; got alpha=1.702"),
        ({"limit": 0.0}, "limit must be > 0 or None; got 0.0"),
        ({"limit": -7.0}, "limit .* got -7.0"),
        ({"limit": NAN}, "limit .* got nan"),
        ({"alpha": INF}, "alpha and up_offset must be finite; got inf and 0.0"),
        ({"alpha": NAN}, "alpha and up_offset must be finite; got nan"),
        ({"up_offset": -INF}, "alpha and up_offset must be finite; got 1.0 and -inf"),
    ],
)
def test_description_that_breaks_a_rule_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^Activation: {message}"):
        Activation(**fields)


def test_smallest_limit_and_other_options_of_gelu_are_allowed() -> None:
    assert Activation(limit=1e-30).limit == 1e-30
    assert Activation(gate_fn="gelu_tanh", limit=3.0, up_offset=1.0).alpha == 1.0
