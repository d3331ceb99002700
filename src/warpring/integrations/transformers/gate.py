"""Recognise an experts module's gate by what it computes, never by its name.

transformers' classes override `_apply_gate` at will (clamps before or after the activation, soft caps, FP32 inside).
So every description that the module's own numbers allow is compared with the module's `_apply_gate` on a grid that
reaches far past any clamp; a gate that matches none of them is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from warpring.activation import Activation, GateFn
from warpring.errors import UnsupportedError

# Probes run from 1e-3 to 2e4 in both signs: a clamp or cap anywhere below 2e4 shows.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _NUM_MAGNITUDES = -3.0, 4.3, 48
# Of the product (1 + |gate|) * (1 + |up|). FP32 rounding gives 1e-7 of it; the nearest other gate we know of, erf-GELU
# beside tanh-GELU, differs by 7e-5 of it.
_TOLERANCE = 2e-6
_GATE_FNS: tuple[GateFn, ...] = ("silu", "gelu_tanh")


def recognise_gate(module: torch.nn.Module, device: torch.device) -> Activation:
    """The `Activation` that the module's `_apply_gate` computes.

    Args:
        module: an experts module of transformers, with `_apply_gate` and `is_concatenated`.
        device: where its weights lie, and so where the probe runs.

    Raises:
        UnsupportedError: `_apply_gate` computes none of the gates of `warpring.activation`.
    """
    limits = _numbers(module, "limit", "swiglu_limit")
    gate, up = _grid(limits, device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        got = _apply(module, gate, up)
        for candidate in _candidates(limits, _numbers(module, "alpha", "swiglu_alpha")):
            allowed = _TOLERANCE * (1 + gate.abs()) * (1 + up.abs())
            if got.shape == gate.shape and bool(((got - candidate(gate, up)).abs() <= allowed).all()):
                return candidate
    raise UnsupportedError(
        f"{type(module).__name__}._apply_gate: the gate must be SiLU or tanh-GELU times up, with the clamps, slope and "
        "offset of warpring.Activation; on probes up to 2e4 this one computes something else. "
        "Use another experts_implementation for this model."
    )


def _candidates(limits: list[float], alphas: list[float]) -> Iterator[Activation]:
    for gate_fn, limit, alpha, up_offset in itertools.product(_GATE_FNS, [None, *limits], [1.0, *alphas], [0.0, 1.0]):
        if gate_fn == "silu" or alpha == 1.0:
            yield Activation(gate_fn, alpha=alpha, limit=limit, up_offset=up_offset)


def _numbers(module: torch.nn.Module, *names: str) -> list[float]:
    """The positive numbers that the module, or else its config, has under these names."""
    config = getattr(module, "config", None)
    found = [getattr(module, name, getattr(config, name, None)) for name in names]
    return sorted({float(value) for value in found if isinstance(value, (int, float)) and value > 0})


def _grid(limits: list[float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of probe values as FP32 (gate, up), each [n, n]."""
    magnitudes = torch.logspace(_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _NUM_MAGNITUDES)
    edges = torch.tensor([limit * factor for limit in limits for factor in (0.99, 1.0, 1.01)])
    magnitudes = torch.cat([torch.zeros(1), magnitudes, edges])
    values = torch.cat([-magnitudes, magnitudes]).to(device)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()


def _apply(module: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    concatenated = bool(getattr(module, "is_concatenated", True))
    gate_up = torch.cat([gate, up], dim=-1) if concatenated else torch.stack([gate, up], dim=-1).flatten(-2)
    apply_gate = getattr(module, "_apply_gate")  # noqa: B009 - no static type has it
    try:
        return apply_gate(gate_up)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(
            f"{type(module).__name__}._apply_gate: must take FP32 [tokens, 2 * intermediate]; it raised "
            f"{type(error).__name__}: {error}. Use another experts_implementation for this model."
        ) from error
