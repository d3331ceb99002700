"""Every public module, class, function and method says what it is; every exported name exists."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT / "src"))


def undocumented(tree: ast.Module) -> list[str]:
    """Public top-level definitions, and public methods of public classes, that lack a docstring.

    An override says by its base class what it is, a property of a documented class by the class and its type: both
    may stay bare.
    """
    found = [] if ast.get_docstring(tree) or not tree.body else ["the module itself"]
    definitions = [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]
    for node in definitions:
        if not ast.get_docstring(node):
            found.append(node.name)
        if isinstance(node, ast.ClassDef) and not node.bases:
            methods = [m for m in node.body if isinstance(m, Definition) and not m.name.startswith("_")]
            found += [f"{node.name}.{m.name}" for m in methods if not m.decorator_list and not ast.get_docstring(m)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_definitions_have_docstrings(path: Path) -> None:
    assert undocumented(ast.parse(path.read_text())) == []


def test_the_check_of_docstrings_tells_documented_from_bare() -> None:
    bare = "def f(): ...\nclass C:\n    def m(self): ...\n    def _private(self): ...\ndef _hidden(): ..."
    assert undocumented(ast.parse(bare)) == ["the module itself", "f", "C", "C.m"]
    documented = '"""M."""\ndef f():\n    """F."""\nclass C:\n    """C."""\n    def m(self):\n        """m."""'
    assert undocumented(ast.parse(documented)) == []


def exporting_packages() -> list[str]:
    """Packages whose __init__.py states what they export, by `__all__`."""
    packages = [path for path in SOURCES if path.name == "__init__.py" and "__all__" in path.read_text()]
    return [".".join(path.relative_to(ROOT / "src").parent.parts) for path in packages]


@pytest.mark.parametrize("package", exporting_packages())
def test_exported_names_exist_and_are_documented(package: str) -> None:
    if package.startswith("warpring.integrations"):
        pytest.importorskip("transformers")
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        exported = getattr(module, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            assert inspect.getdoc(exported), f"{package}.{name} has no docstring"


def test_the_package_exports_its_main_names() -> None:
    assert "warpring" in exporting_packages()
    module = importlib.import_module("warpring")
    assert {"Experts", "moe_decode", "precompile"} <= set(module.__all__)
