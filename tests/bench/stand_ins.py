"""Stand-ins for libraries that are not installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of that name, and its parents, in sys.modules."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        parent = ".".join(parts[:count])
        if parent not in sys.modules or not hasattr(sys.modules[parent], "stand_in"):
            module = ModuleType(parent)
            vars(module).update(stand_in=True, __version__="1.2", __path__=[])
            monkeypatch.setitem(sys.modules, parent, module)
    vars(sys.modules[name]).update(contents)
