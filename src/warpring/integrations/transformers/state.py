"""What warpring keeps beside one experts module: its settings, its packed weights, its counters."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch

from warpring.errors import ArgumentError, UnsupportedError
from warpring.experts import Experts
from warpring.integrations.transformers.layout import BIAS_NAMES, WEIGHT_NAMES, pack
from warpring.layout import PackedExperts, pack_experts

#: The name that transformers knows us by.
IMPLEMENTATION = "warpring"

_ATTRIBUTE = "_warpring"
_numbers = itertools.count()
_states: weakref.WeakValueDictionary[str, State] = weakref.WeakValueDictionary()


@dataclass
class PathStats:
    """Calls that one path served.

    Attributes:
        calls: calls of one layer's experts.
        tokens: tokens over all calls.
        min_tokens, max_tokens: smallest and largest call.
    """

    calls: int = 0
    tokens: int = 0
    min_tokens: int = 0
    max_tokens: int = 0

    def add(self, calls: int, tokens: int, min_tokens: int, max_tokens: int) -> None:
        """Count further calls."""
        self.min_tokens = min(self.min_tokens, min_tokens) if self.calls else min_tokens
        self.max_tokens = max(self.max_tokens, max_tokens)
        self.calls += calls
        self.tokens += tokens


class State:
    """Lives in an attribute of its module, so it dies with it; a copy of the module starts without one.

    Attributes:
        handle: a process-wide name, by which compiled graphs find the state.
        format, path, layout: see `install`.
        stats: counters by path.
    """

    def __init__(self, module: torch.nn.Module, format: str | None, path: str, layout: str) -> None:
        self.handle = f"{type(module).__name__}-{next(_numbers)}"
        self.format = format
        self.path = path
        self.layout = layout
        self.stats: dict[str, PathStats] = {}
        self._module = weakref.ref(module)
        self._experts: Experts | PackedExperts | None = None
        # The tensors that `_experts` was made from: kept, so that their addresses cannot come back as other weights'.
        self._sources: tuple[torch.Tensor, ...] = ()
        self._source_names: tuple[str, ...] = ()
        self._fingerprint: list[tuple[int, int]] = []
        _states[self.handle] = self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies and pickles hold None: packed weights belong to one module alone, and are made again."""
        return type(None), ()

    @property
    def module(self) -> torch.nn.Module:
        """The experts module that this state belongs to."""
        module = self._module()
        if module is None:
            raise UnsupportedError(f"{self.handle}: the experts module no longer exists. Compile the model again.")
        return module

    def experts(self, device: torch.device) -> Experts | PackedExperts:
        """The packed weights on `device`: made at first use, and again whenever the module's weights changed.

        A change is a new storage, a new device, or an in-place operation that autograd's version counter sees.
        """
        module = self.module
        if self._experts is None or (self._fingerprint != self._fingerprint_of(module) and not is_freed(module)):
            self._pack(module)
        experts = self._experts
        if experts is None:
            raise UnsupportedError(f"{self.handle}: packing gave nothing.")
        if experts.device != device:
            if not is_freed(module):
                raise ArgumentError(
                    f"{type(module).__name__}: hidden_states must be on the weights' device {experts.device}; "
                    f"got {device}. Move one of them with .to()."
                )
            experts = self._experts = experts.to(device)
        return experts

    def adopt(self, experts: Experts | PackedExperts) -> None:
        """Serve these weights, which did not come from the module; `free` must follow, or the next call packs anew."""
        self._experts = experts

    def free(self) -> None:
        """Replace the module's dense weights by empty ones; the packed weights stay."""
        module = self.module
        for name in WEIGHT_NAMES:
            weight = getattr(module, name, None)
            if isinstance(weight, torch.Tensor):
                weight.data = weight.data.new_empty(0)
        self._sources = ()

    def record(self, path: str, num_tokens: int) -> None:
        """Count one call."""
        if path not in self.stats:
            self.stats[path] = PathStats()
        self.stats[path].add(1, num_tokens, num_tokens, num_tokens)

    def _pack(self, module: torch.nn.Module) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{type(module).__name__}: weights cannot be packed while a CUDA graph is captured. "
                "Call warpring.integrations.transformers.install(model) before the capture."
            )
        # The old weights go first: there may be no room for both.
        self._experts, self._sources = None, ()
        with torch.no_grad():
            experts = pack(module, self.format)
            self._experts = pack_experts(experts) if self.layout == "tile" else experts
        names = (*WEIGHT_NAMES, *BIAS_NAMES)
        self._source_names = tuple(name for name in names if isinstance(getattr(module, name, None), torch.Tensor))
        self._sources = tuple(getattr(module, name).detach() for name in self._source_names)
        self._fingerprint = self._fingerprint_of(module)

    def _fingerprint_of(self, module: torch.nn.Module) -> list[tuple[int, int]]:
        """Address and version of each source as it is now. Runs at every call: keep it short."""
        tensors = [getattr(module, name) for name in self._source_names]
        # Inference tensors have no version; they cannot change outside inference mode.
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def state_of(module: torch.nn.Module) -> State:
    """The module's state; made with default settings (weights as stored, path "auto") if it has none."""
    state = find_state(module)
    if state is None:
        state = set_state(module, None, "auto", "rows")
    return state


def find_state(module: torch.nn.Module) -> State | None:
    """The module's state, or None."""
    return getattr(module, _ATTRIBUTE, None)


def set_state(module: torch.nn.Module, format: str | None, path: str, layout: str) -> State:
    """Give the module a new state in place of any it has."""
    state = State(module, format, path, layout)
    setattr(module, _ATTRIBUTE, state)
    return state


def state_by_handle(handle: str) -> State:
    """The state of that handle."""
    state = _states.get(handle)
    if state is None:
        raise UnsupportedError(f"{handle}: the experts were installed anew or deleted. Compile the model again.")
    return state


def is_freed(module: torch.nn.Module) -> bool:
    """Whether the module's dense weights are gone."""
    weight = getattr(module, "gate_up_proj", None)
    return isinstance(weight, torch.Tensor) and weight.numel() == 0
