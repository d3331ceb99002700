"""bench/expert_parallel.py: which layers a run measures, and in which order."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "expert_parallel.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_parallel_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_layers_without_names(script: ModuleType) -> None:
    assert script.chosen(script.bar(2), []) == list(script.bar(2))


def test_named_layers_come_in_the_order_of_their_names(script: ModuleType) -> None:
    names = ["glm-5.2:mxfp4", "deepseek-v4-flash:fp8_block"]
    found = [f"{shape.name}:{format}" for shape, format, *_ in script.chosen(script.bar(2), names)]
    assert found == ["glm-5.2:mxfp4", "glm-5.2:mxfp4", "deepseek-v4-flash:fp8_block"]


def test_an_unknown_layer_is_refused_with_those_there_are(script: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"--layers: glm-5.2:int4 is none of deepseek-v4-flash:fp8_block, .*glm-5.2:mxfp4"
    ):
        script.chosen(script.bar(2), ["glm-5.2:mxfp4", "glm-5.2:int4"])
