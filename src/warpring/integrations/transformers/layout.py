"""A transformers experts module -> `Experts`: its layout flags honoured, or refused by name."""

from __future__ import annotations

import inspect

import torch
from transformers.integrations.moe import use_experts_implementation

from warpring.activation import Activation
from warpring.errors import UnsupportedError
from warpring.experts import Experts
from warpring.formats import QuantizedTensor, get_format
from warpring.integrations.transformers.gate import recognise_gate

#: Everything of a module that its packed weights are made from; a module has some of them.
WEIGHT_NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
BIAS_NAMES = ("gate_up_proj_bias", "down_proj_bias")

# What the decorator of transformers 5.17 and 5.23 describes an experts class by.
_KNOWN_FLAGS = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
_FP8_BLOCK = (128, 128)
_ELSEWHERE = "Use another experts_implementation for this model."


def check_module(module: torch.nn.Module) -> Activation:
    """Whether warpring computes what this experts module does; no weight is read.

    Returns:
        The gated activation, recognised by `recognise_gate`.

    Raises:
        UnsupportedError: a layout flag, weight or gate that has no path here, by name, with the remedy.
    """
    _check_flags(module)
    gate_up, down = _weight(module, "gate_up_proj"), _weight(module, "down_proj")
    _check_sizes(module, gate_up, down)
    return recognise_gate(module, gate_up.device)


def pack(module: torch.nn.Module, format: str | None) -> Experts:
    """The module's weights as `Experts`.

    Dense BF16 weights in the usual layout and FP8 block weights keep their storage; others are copied.

    Args:
        module: an experts module of transformers.
        format: a name of `warpring.formats.FORMATS`; None keeps the weights as they are stored: BF16 as "bf16",
            FP8 blocks as "fp8_block", FP4 as "mxfp4".

    Raises:
        UnsupportedError: see `check_module`; or weights whose dtype is no format of ours and `format` is None.
    """
    activation = check_module(module)
    gate_up = _weight(module, "gate_up_proj")
    if gate_up.dtype == torch.float8_e4m3fn:
        experts = _pack_fp8(module, activation)
    elif gate_up.dtype == torch.int8:
        experts = _pack_fp4(module, activation)
    else:
        return _pack_dense(module, activation, format)
    if format is None or format == experts.format:
        return experts
    return Experts(_requantise(experts.w13, format), _requantise(experts.w2, format), activation)


def _check_flags(module: torch.nn.Module) -> None:
    name = type(module).__name__
    if not getattr(module, "has_gate", True):
        raise UnsupportedError(
            f"{name}: has_gate must be True; got False, so there is no gate projection. {_ELSEWHERE}"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{name}: has_post_expert_norm must be False; got True, a norm between the down projection and the "
            f"routing weight. {_ELSEWHERE}"
        )
    # A flag that a later transformers adds changes the layer in a way that we do not know.
    for parameter in inspect.signature(use_experts_implementation).parameters.values():
        flag = parameter.name
        if flag.startswith(("is_", "has_")) and flag not in _KNOWN_FLAGS:
            value = getattr(module, flag, parameter.default)
            if value != parameter.default:
                raise UnsupportedError(
                    f"{name}: {flag} must be {parameter.default}, the only value this warpring knows; got {value}. "
                    f"{_ELSEWHERE}"
                )
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        raise UnsupportedError(
            f"{name}: weights must stay on their device; they are offloaded. Load them with a device_map that fits."
        )


def _weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    weight = getattr(module, name, None)
    label = f"{type(module).__name__}.{name}"
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedError(f"{label}: must be a tensor of stacked expert weights; got {weight}. {_ELSEWHERE}")
    if hasattr(weight, "to_local"):
        raise UnsupportedError(
            f"{label}: must be a plain tensor; got a DTensor. Leave packing to the first forward call, which sees the "
            "local shard, instead of `install`."
        )
    if weight.is_meta:
        raise UnsupportedError(f"{label}: must hold data; got a meta tensor. Load the weights first.")
    if weight.numel() == 0:
        raise UnsupportedError(
            f"{label}: must hold data; it is empty, as `install(free=True)` leaves it. Reload the model."
        )
    return weight.detach()


def _check_sizes(module: torch.nn.Module, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """The two projections fit each other, and divide as the op needs."""
    name = type(module).__name__
    transposed = bool(getattr(module, "is_transposed", False))
    got = f"gate_up_proj {list(gate_up.shape)}, down_proj {list(down.shape)}, is_transposed={transposed}"
    wanted = (
        f"{name}: gate_up_proj must be [num_experts, 2 * intermediate, hidden] and down_proj [num_experts, hidden, "
        f"intermediate], or both transposed; got {got}. {_ELSEWHERE}"
    )
    if gate_up.dim() != 3 or down.dim() != 3:
        raise UnsupportedError(wanted)
    codes_per_element = 2 if gate_up.dtype == torch.int8 else 1
    in_dim, out_dim = (1, 2) if transposed else (2, 1)
    hidden, intermediate = (weight.shape[in_dim] * codes_per_element for weight in (gate_up, down))
    if (gate_up.shape[out_dim], down.shape[out_dim]) != (2 * intermediate, hidden):
        raise UnsupportedError(wanted)
    for size_name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % 32:
            raise UnsupportedError(f"{name}: {size_name} must be a multiple of 32; got {size} ({got}). {_ELSEWHERE}")


def _pack_dense(module: torch.nn.Module, activation: Activation, format: str | None) -> Experts:
    gate_up, down = _weight(module, "gate_up_proj"), _weight(module, "down_proj")
    if format is None and (gate_up.dtype, down.dtype) != (torch.bfloat16, torch.bfloat16):
        raise UnsupportedError(
            f"{type(module).__name__}: weights kept as stored must be bfloat16, FP8 or FP4; got {gate_up.dtype}. "
            "Load the model with dtype=torch.bfloat16, or name what to round to: install(model, format='bf16')."
        )
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.mT, down.mT
    concatenated = bool(getattr(module, "is_concatenated", True))
    w13_bias = w2_bias = None
    if getattr(module, "has_bias", False):
        w13_bias = _halves(_weight(module, "gate_up_proj_bias").float(), concatenated).contiguous()
        w2_bias = _weight(module, "down_proj_bias").float().contiguous()
    fmt = get_format(format or "bf16")
    return Experts(
        w13=fmt.quantize(_halves(gate_up, concatenated)),
        w2=fmt.quantize(down),
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )


def _halves(rows: torch.Tensor, concatenated: bool) -> torch.Tensor:
    """[num_experts, 2 * intermediate, ...] in the module's row order as [num_experts, 2, intermediate, ...], a view."""
    num_experts, num_rows, *cols = rows.shape
    if concatenated:
        return rows.view(num_experts, 2, num_rows // 2, *cols)
    return rows.view(num_experts, num_rows // 2, 2, *cols).transpose(1, 2)


def _pack_fp8(module: torch.nn.Module, activation: Activation) -> Experts:
    """FP8 codes share storage; the scales too, unless they are UE8M0 (exactly representable in FP32)."""
    name = type(module).__name__
    block = getattr(module, "block_size", None)
    if block is None or tuple(block) != _FP8_BLOCK:
        raise UnsupportedError(f"{name}: block_size of FP8 experts must be {_FP8_BLOCK}; got {block}. {_ELSEWHERE}")
    gate_up = _stored_rows(module, "gate_up_proj")
    intermediate = gate_up.shape[1] // 2
    if intermediate % _FP8_BLOCK[0]:
        raise UnsupportedError(
            f"{name}: intermediate of FP8 experts must be a multiple of {_FP8_BLOCK[0]}; got {intermediate}, so one "
            "block of gate_up_proj_scale_inv straddles gate and up. Load the model with dequantize=True."
        )
    return Experts(
        w13=_stored("fp8_block", _halves(gate_up, True), _halves(_scale(module, "gate_up_proj").float(), True)),
        w2=_stored("fp8_block", _stored_rows(module, "down_proj"), _scale(module, "down_proj").float()),
        activation=activation,
    )


def _pack_fp4(module: torch.nn.Module, activation: Activation) -> Experts:
    """Two E2M1 codes a byte, even column low, and UE8M0 scales per 32 columns: our MXFP4, byte for byte."""
    codes: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    for projection in ("gate_up_proj", "down_proj"):
        scale = _scale(module, projection)
        if scale.dtype != torch.float8_e8m0fnu:
            raise UnsupportedError(
                f"{type(module).__name__}.{projection}_scale_inv: scales of FP4 experts must be float8_e8m0fnu; got "
                f"{scale.dtype}. {_ELSEWHERE}"
            )
        codes.append(_stored_rows(module, projection).view(torch.uint8))
        scales.append(scale.view(torch.uint8))
    return Experts(
        w13=_stored("mxfp4", _halves(codes[0], True), _halves(scales[0], True), codes_per_element=2),
        w2=_stored("mxfp4", codes[1], scales[1], codes_per_element=2),
        activation=activation,
    )


def _stored_rows(module: torch.nn.Module, projection: str) -> torch.Tensor:
    """Quantised codes [num_experts, rows, cols]. transformers quantises in the usual layout only."""
    for flag, usual in (("is_transposed", False), ("is_concatenated", True), ("has_bias", False)):
        if bool(getattr(module, flag, usual)) != usual:
            raise UnsupportedError(
                f"{type(module).__name__}: {flag} of quantised experts must be {usual}; got {not usual}. {_ELSEWHERE}"
            )
    return _weight(module, projection).contiguous()


def _scale(module: torch.nn.Module, projection: str) -> torch.Tensor:
    return _weight(module, f"{projection}_scale_inv").contiguous()


def _stored(format: str, data: torch.Tensor, scale: torch.Tensor, codes_per_element: int = 1) -> QuantizedTensor:
    shape = (*data.shape[:-1], data.shape[-1] * codes_per_element)
    stored = QuantizedTensor(format=format, shape=shape, data=data, scale=scale)
    get_format(format).check(stored)
    return stored


def _requantise(stored: QuantizedTensor, format: str) -> QuantizedTensor:
    """The same weights in another format, an expert at a time: a whole layer in FP32 may not fit."""
    old, new = get_format(stored.format), get_format(format)
    experts = [new.quantize(old.dequantize(stored[expert])) for expert in range(stored.shape[0])]
    tensors = [torch.stack(parts) for parts in zip(*(expert.tensors() for expert in experts), strict=True)]
    return QuantizedTensor(format, stored.shape, *tensors)
