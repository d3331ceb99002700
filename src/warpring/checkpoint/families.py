"""What model families call things: their tensors' names, their layout, and the sizes and activation in config.json.

A family is one row of data. What rows share (where layers lie, how parts of a matrix are suffixed) is in the
tables below them; `docs/checkpoints.md` lists the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from warpring.activation import Activation, GateFn, clipped_swiglu, gpt_oss_swiglu
from warpring.errors import CheckpointError, UnsupportedError
from warpring.experts import MAX_EXPERTS

Config = Mapping[str, Any]

# config.json is untrusted: names of experts and layers are listed before they are looked for, so a number that no
# model has must not fill the memory.
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 31

#: The experts of a decoder layer, however the family calls the MoE block. What lies elsewhere (multi-token
#: prediction heads, vision towers) is no decoder layer and stays among the other tensors.
LAYER = re.compile(
    r"^(?P<block>(?:model\.|model\.language_model\.|language_model\.model\.)?layers\.(?P<layer>\d{1,9})\."
    r"(?:(?:mlp|block_sparse_moe|ffn)\.)?)(?P<kind>experts|shared_experts?)\.(?P<tail>.+)$"
)

#: Suffix of a tensor's name -> which part of a stored matrix it is. "ignored": describes activations, not weights.
PER_EXPERT_PARTS = {
    "weight": "data",
    "weight_packed": "data",
    "weight_scale_inv": "scale",
    "weight_scale": "scale",
    "scale": "scale",
    "weight_scale_2": "global_scale",
    "bias": "bias",
    "input_scale": "ignored",
}
STACKED_PARTS = {
    "": "data",
    "_blocks": "data",
    "_scale_inv": "scale",
    "_scales": "scale",
    "_scale": "scale",
    "_bias": "bias",
}
#: Checkpoints that warpring wrote.
OWN_PARTS = {"data": "data", "scale": "scale", "global_scale": "global_scale", "bias": "bias"}

#: Name of a projection -> its role.
GATE_UP_DOWN = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
W1_W3_W2 = {"w1": "gate", "w3": "up", "w2": "down"}
STACKED = {"gate_up_proj": "gate_up", "down_proj": "down"}
OWN = {"w13": "gate_up", "w2": "down"}


def glu(config: Config) -> Activation:
    """The gated activation of `hidden_act` (Gemma: `hidden_activation`), with `swiglu_limit` where a config has one."""
    name = config.get("hidden_act") or config.get("hidden_activation")
    gate_fns: dict[str, GateFn] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in gate_fns:
        raise UnsupportedError(
            f"Checkpoint: hidden_act must be one of {', '.join(gate_fns)}; config.json has {name!r}."
        )
    for key in ("swiglu_alpha", "swiglu_beta"):
        if config.get(key) is not None:
            raise UnsupportedError(
                f"Checkpoint: config.json has {key}={config[key]!r}, which this model_type is not known to use. "
                "Loading without it would change the activation silently."
            )
    return Activation(gate_fn=gate_fns[name], limit=_limit(config))


def _limit(config: Config) -> float | None:
    limit = config.get("swiglu_limit")
    return None if limit is None else float(limit)


def _gpt_oss(config: Config) -> Activation:
    limit = _limit(config)
    return gpt_oss_swiglu(alpha=float(config.get("swiglu_alpha", 1.702)), limit=7.0 if limit is None else limit)


def _deepseek_v4(config: Config) -> Activation:
    # Unlike gpt-oss its config need not spell the clip out: 10 is the model's default, and is never "no clip".
    activation = glu(config)
    return clipped_swiglu() if activation.limit is None else activation


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_step(value: object) -> bool:
    return _is_count(value) and value != 0


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, cast(list[object], value)))


_STRING = ("a string", _is_string)
_NUMBER = ("a positive number", _is_positive)
_STEP = ("a positive integer", _is_step)
#: Settings that decide what is loaded: key -> (what it must be, whether a value is). Sizes have rules of their own.
_SETTINGS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "model_type": _STRING,
    "hidden_act": _STRING,
    "hidden_activation": _STRING,
    "swiglu_limit": _NUMBER,
    "swiglu_alpha": _NUMBER,
    "num_hidden_layers": _STEP,
    "first_k_dense_replace": ("an integer of at least 0", _is_count),
    "moe_layer_freq": _STEP,
    "decoder_sparse_step": _STEP,
    "mlp_only_layers": ("a list of integers of at least 0", _list_of(_is_count)),
    "mlp_layer_types": ("a list of strings", _list_of(_is_string)),
}


@dataclass(frozen=True)
class Family:
    """How one group of models stores its experts.

    Attributes:
        model_types: values of config.json's `model_type`.
        leaves: per-expert projection names -> "gate", "up" or "down".
        interleaved: stacked gate_up holds gate and up rows by turns, not gate rows first.
        transposed: stacked dense matrices are [num_experts, cols, rows].
        intermediate: key of config.json with the experts' intermediate size.
        every_layer: all decoder layers have experts unless config.json says otherwise; False where transformers
            fills in defaults that config.json may leave out, so that only the tensors tell.
        activation: config -> Activation.
    """

    model_types: tuple[str, ...]
    leaves: Mapping[str, str]
    interleaved: bool = False
    transposed: bool = False
    intermediate: str = "moe_intermediate_size"
    every_layer: bool = True
    activation: Callable[[Config], Activation] = glu


FAMILIES = (
    Family(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        GATE_UP_DOWN,
    ),
    Family(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        GATE_UP_DOWN,
        every_layer=False,
    ),
    Family(("deepseek_v4",), W1_W3_W2, activation=_deepseek_v4),
    Family(("olmoe",), GATE_UP_DOWN, intermediate="intermediate_size"),
    Family(("mixtral", "minimax_m2"), W1_W3_W2, intermediate="intermediate_size"),
    Family(("gpt_oss",), {}, interleaved=True, transposed=True, intermediate="intermediate_size", activation=_gpt_oss),
    Family(("gemma4", "gemma4_text"), {}),
)
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


@dataclass(frozen=True)
class MoeSizes:
    """Sizes of the MoE layers as config.json states them."""

    num_experts: int
    intermediate: int
    hidden: int


def check_config(config: Config) -> None:
    """CheckpointError where a setting that is read from config.json is of another kind than models write it."""
    for part in (config, text_config(config)):
        for key, (wanted, fits) in _SETTINGS.items():
            value = part.get(key)
            if value is not None and not fits(value):
                raise CheckpointError(f"Checkpoint: config.json must have {key} as {wanted}; got {value!r}.")


def text_config(config: Config) -> Config:
    """The language model's part of a config: `text_config` of a multimodal model, else the whole."""
    inner = config.get("text_config")
    return cast(Config, inner) if isinstance(inner, dict) else config


def family_of(config: Config) -> Family:
    """The family of config.json's `model_type`; UnsupportedError names the known ones."""
    tried = [config.get("model_type"), text_config(config).get("model_type")]
    for model_type in tried:
        if model_type in BY_MODEL_TYPE:
            return BY_MODEL_TYPE[model_type]
    raise UnsupportedError(
        f"Checkpoint: model_type must be one of {', '.join(sorted(BY_MODEL_TYPE))}; config.json has {tried[0]!r}."
    )


def sizes_of(config: Config, family: Family) -> MoeSizes:
    """Expert count and sizes; CheckpointError names the missing key."""
    config = text_config(config)
    return MoeSizes(
        num_experts=_positive(config, "num_experts", "n_routed_experts", "num_local_experts", most=MAX_EXPERTS),
        intermediate=_positive(config, family.intermediate),
        hidden=_positive(config, "hidden_size"),
    )


def moe_layers_of(config: Config, family: Family) -> list[int] | None:
    """Decoder layers that must have experts, or None where config.json leaves it open."""
    config = text_config(config)
    layers = range(_positive(config, "num_hidden_layers", most=MAX_LAYERS))
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return [layer for layer, kind in zip(layers, cast(list[Any], kinds), strict=False) if kind != "dense"]
    if config.get("first_k_dense_replace") is not None:
        frequency = int(config.get("moe_layer_freq") or 1)
        return [layer for layer in layers if layer >= int(config["first_k_dense_replace"]) and layer % frequency == 0]
    if not family.every_layer:
        return None
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def _positive(config: Config, *keys: str, most: int = MAX_SIZE) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise CheckpointError(f"Checkpoint: config.json must have {key} as an integer, 1 to {most}; got {value!r}.")
        return value
    raise CheckpointError(f"Checkpoint: config.json must have {' or '.join(keys)}; it has none.")
