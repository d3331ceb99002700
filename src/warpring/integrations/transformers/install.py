"""Give a loaded model to warpring with settings of one's own, and ask what it did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, overload

import torch
from transformers import PreTrainedModel

from warpring.decode import PACKED_PATHS, PATHS, precompile
from warpring.errors import ArgumentError, UnsupportedError, WarpringError
from warpring.experts import Experts
from warpring.formats import get_format
from warpring.integrations.transformers.layout import check_module
from warpring.integrations.transformers.state import (
    IMPLEMENTATION,
    PathStats,
    State,
    find_state,
    is_freed,
    set_state,
)
from warpring.layout import PackedExperts

#: How `install` may hold weights: row-major as formats store them, or in the tile layout of `pack_experts`.
Layout = Literal["rows", "tile"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
#: Called with (layers done, layers in all).
Progress = Callable[[int, int], None]


@overload
def install(
    model: PreTrainedModel,
    format: str | None = None,
    path: str = "auto",
    free: bool = False,
    progress: Progress | None = None,
    *,
    layout: Literal["rows"] = "rows",
) -> dict[str, Experts]:
    """Layout "rows"."""


@overload
def install(
    model: PreTrainedModel,
    format: str | None = None,
    path: str = "auto",
    free: bool = False,
    progress: Progress | None = None,
    *,
    layout: Literal["tile"],
) -> dict[str, PackedExperts]:
    """Layout "tile"."""


def install(
    model: PreTrainedModel,
    format: str | None = None,
    path: str = "auto",
    free: bool = False,
    progress: Progress | None = None,
    *,
    layout: Layout = "rows",
) -> dict[str, Experts] | dict[str, PackedExperts]:
    """Run the routed experts of a loaded model with warpring, packing all their weights now.

    `from_pretrained(..., experts_implementation="warpring")` and `model.set_experts_implementation("warpring")` do
    the same with the default settings, packing each layer at its first call. Installing again replaces the settings,
    the packed weights and the counters; compiled graphs of the model must be compiled again.

    Args:
        model: any transformers model whose experts go through `ExpertsInterface` or `FP8ExpertsInterface`.
        format: a name of `warpring.formats.FORMATS`, to which weights are quantised; None keeps them as stored
            ("bf16", "fp8_block" or "mxfp4").
        path: "auto" serves each call by `warpring.policy`; the others force one path of `moe_decode`.
        free: give the memory of the model's own expert weights back, layer by layer. From then on the model cannot
            be saved, trained, copied or switched to another implementation.
        progress: called with (layers packed, layers in all) after each layer.
        layout: "rows" keeps weights as formats store them: the fastest for one to a few sequences. "tile" packs them
            for the tile path (`pack_experts`), layer by layer, which leads from 2 to 8 sequences on; a copy beside the
            model's own weights unless `free`. Either serves every batch.

    Returns:
        The experts by module name: `Experts`, or `PackedExperts` of layout "tile".

    Raises:
        ArgumentError: an unknown format, path or layout.
        UnsupportedError: a path that the layout does not have; the model has no experts that transformers dispatches,
            or a layer that warpring cannot serve. Every layer is checked before the first one changes.
    """
    if format is not None:
        get_format(format)
    modules = _take_over(model, path, layout)
    packed: dict[str, Any] = {}
    for name, module in modules.items():
        with _naming(name):
            packed[name] = _install_module(module, format, path, free, layout)
        if progress is not None:
            progress(len(packed), len(modules))
    return packed


def install_packed(
    model: PreTrainedModel, packed: Mapping[str, Experts] | Mapping[str, PackedExperts], path: str = "auto"
) -> None:
    """`install` with experts that exist already, such as those of a quantised checkpoint, and `free=True`.

    Args:
        packed: experts by module name, one for each experts module of the model, all on the device that will run them
            and all of one kind.

    Raises:
        ArgumentError: an unknown path, or other module names than the model's.
        UnsupportedError: as in `install`.
    """
    layout: Layout = "tile" if any(isinstance(experts, PackedExperts) for experts in packed.values()) else "rows"
    modules = _take_over(model, path, layout)
    if modules.keys() != packed.keys():
        raise ArgumentError(
            f"install_packed: packed must name the experts modules {', '.join(modules)}; got {', '.join(packed)}."
        )
    for name, module in modules.items():
        state = set_state(module, packed[name].format, path, layout)
        state.adopt(packed[name])
        _precompile(module, packed[name], path)
        _free(state)


def stats(model: torch.nn.Module) -> dict[str, PathStats]:
    """Calls of the model's experts by the path that served them, all layers together.

    The paths are those of `moe_decode`.
    Replays of a CUDA graph run no Python and are not counted.
    """
    total: dict[str, PathStats] = {}
    for state in _states(model):
        for path, calls in state.stats.items():
            total.setdefault(path, PathStats()).add(calls.calls, calls.tokens, calls.min_tokens, calls.max_tokens)
    return total


def reset_stats(model: torch.nn.Module) -> None:
    """Start counting anew."""
    for state in _states(model):
        state.stats.clear()


def check_settings(path: str, layout: str) -> None:
    """Raise unless both are known, and weights of that layout have that path."""
    for name, value, known in (("path", path, PATHS), ("layout", layout, LAYOUTS)):
        if value not in known:
            raise ArgumentError(f"install: {name} must be one of {', '.join(known)}; got {value!r}.")
    paths = PACKED_PATHS if layout == "tile" else tuple(name for name in PATHS if name != "tile")
    if path not in paths:
        raise UnsupportedError(
            f"install: weights in layout {layout!r} take path {', '.join(paths)}; got {path!r}. Take the other layout."
        )


def _take_over(model: PreTrainedModel, path: str, layout: str) -> dict[str, torch.nn.Module]:
    """The model's experts modules by name, all of them checked and switched to warpring."""
    check_settings(path, layout)
    modules = experts_modules(model)
    if not modules:
        raise UnsupportedError(
            f"install: {type(model).__name__} has no experts that transformers dispatches by experts_implementation. "
            "Load an MXFP4 gpt-oss checkpoint with quantization_config=Mxfp4Config(dequantize=True)."
        )
    for name, module in modules.items():
        with _naming(name):
            check_module(module)
    model.set_experts_implementation(IMPLEMENTATION)
    return modules


def _install_module(
    module: torch.nn.Module, format: str | None, path: str, free: bool, layout: str
) -> Experts | PackedExperts:
    state = set_state(module, format, path, layout)
    experts = state.experts(next(module.parameters()).device)
    _precompile(module, experts, path)
    if free:
        _free(state)
    return experts


def _precompile(module: torch.nn.Module, experts: Experts | PackedExperts, path: str) -> None:
    topk = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    if experts.device.type == "cuda" and path in ("auto", "warp", "tile") and isinstance(topk, int):
        precompile(experts, topk=topk)


def _free(state: State) -> None:
    state.free()
    state.module.register_state_dict_pre_hook(_refuse_saving)
    state.module.register_forward_pre_hook(_refuse_other_implementation)


def _refuse_saving(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    if is_freed(module):
        raise UnsupportedError(
            f"{prefix.rstrip('.') or type(module).__name__}: its expert weights were freed by install(free=True), so "
            "the model cannot be saved or copied. Reload it, and install it with free=False."
        )


def _refuse_other_implementation(module: torch.nn.Module, args: object) -> None:
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if is_freed(module) and implementation != IMPLEMENTATION:
        raise UnsupportedError(
            f"{type(module).__name__}: experts_implementation {implementation!r} needs the expert weights that "
            "install(free=True) freed. Switch back to 'warpring', or reload the model."
        )


def _states(model: torch.nn.Module) -> list[State]:
    states = (find_state(module) for module in model.modules())
    return [state for state in states if state is not None]


def experts_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that `use_experts_implementation` decorated; its flags are their mark."""
    named: dict[str, torch.nn.Module] = dict(model.named_modules())
    return {name: m for name, m in named.items() if hasattr(m, "is_concatenated") and hasattr(m, "_apply_gate")}


@contextmanager
def _naming(name: str) -> Generator[None]:
    """Errors inside name the module."""
    try:
        yield
    except WarpringError as error:
        raise type(error)(f"install: {name}: {error}") from error
