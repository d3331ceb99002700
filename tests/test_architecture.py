"""docs/architecture.md kept true: imports run one way and in no circle, files stay small, errors are never asserts."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 500


def name_of(path: Path) -> str:
    """src/warpring/formats/mx.py -> warpring.formats.mx; a package's __init__.py is the package."""
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


TREES = {name_of(path): ast.parse(path.read_text()) for path in SOURCES}


def layers_of(text: str) -> list[list[str]]:
    """The layers that the page states, lowest first: `cli -> (decode, verify) -> errors` gives errors first."""
    sentence = re.search(r"Imports run one way: (.*?)\.", text, re.DOTALL)
    assert sentence, "docs/architecture.md must hold the sentence 'Imports run one way: ... -> errors.'"
    return [re.findall(r"\w+", layer) for layer in reversed(sentence[1].split("->"))]


LAYERS = layers_of((ROOT / "docs/architecture.md").read_text())
# The package itself re-exports, and `python -m warpring` starts the CLI: above all others, and imported by none.
LEVELS = {part: level for level, parts in enumerate([*LAYERS, ["warpring", "__main__"]]) for part in parts}


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """Our modules that a module imports, wherever in it: `from warpring.kernels import warp` means kernels.warp."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{'.' * node.level}{node.module or ''}"
            full = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else base for name in full}
    return {name for name in found if name.startswith(".") or name.split(".")[0] == "warpring"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def wrong_ways(trees: dict[str, ast.Module]) -> list[str]:
    """Imports that do not go down: to a part of the same or a higher layer, other than the module's own part."""
    found: list[str] = []
    for module, tree in trees.items():
        for target in sorted(imports_of(tree, set(trees))):
            own = part_of(module) == part_of(target) != "warpring"
            if not own and LEVELS.get(part_of(target), len(LEVELS)) >= LEVELS[part_of(module)]:
                found.append(f"{module} imports {target}")
    return found


def test_every_part_has_its_layer_in_the_docs() -> None:
    assert {part_of(module) for module in TREES} <= set(LEVELS)


def test_imports_run_one_way() -> None:
    assert wrong_ways(TREES) == []


def test_no_circle_of_imports() -> None:
    graph = {module: imports_of(tree, set(TREES)) for module, tree in TREES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("warpring.experts", "from warpring.decode import moe_decode", False),
        ("warpring.experts", "def f():\n    import warpring.cli", False),
        ("warpring.formats.mx", "from warpring.routing import Router", False),
        ("warpring.formats.mx", "from warpring import SILU", False),
        ("warpring.formats.mx", "from .base import Format", False),
        ("warpring.formats.mx", "from warpring.formats.base import Format", True),
        ("warpring.decode", "from warpring.kernels import warp", True),
        ("warpring.errors", "from warpringly.cli import main", True),
    ],
)
def test_the_check_of_directions_tells_right_from_wrong(module: str, line: str, allowed: bool) -> None:
    assert (wrong_ways({module: ast.parse(line)}) == []) == allowed


def module_level_imports(tree: ast.Module) -> set[str]:
    """Names that merely importing the module imports: not those inside functions or `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_base_install_imports_without_extras() -> None:
    """The parts that live on transformers are imported inside functions, every other optional package too."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = sys.stdlib_module_names | {re.split(r"\W", requirement)[0] for requirement in required} | {"warpring"}
    extra_parts = {"integrations", "generation"}
    # The compiler of the CPU kernels: engine.py imports it inside a function, once it knows that llvmlite is there.
    built = ("layer", "matrix", "dots", "wide", "avx512", "avx512bf16", "elementwise", "emit")
    compiler = {f"warpring.kernels.cores.{name}" for name in built}
    for module, tree in TREES.items():
        if part_of(module) in extra_parts or module in compiler:
            continue
        for name in module_level_imports(tree):
            package, _, rest = name.partition(".")
            needs_extra = package not in known or (package == "warpring" and rest.split(".")[0] in extra_parts)
            needs_extra |= any(name == part or name.startswith(f"{part}.") for part in compiler)
            assert not needs_extra, f"{module} needs {name} merely to be imported"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_source_has_no_assert(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(TREES[name_of(path)]) if isinstance(node, ast.Assert)]
    assert lines == [], f"{path}: raise an error of warpring.errors instead of assert, lines {lines}"


def written_files() -> list[Path]:
    folders = ("src", "tests", "examples", "bench", "scripts", "docs")
    suffixes = {".py", ".cu", ".cuh", ".md", ".sh"}
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]


def test_files_stay_small() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in written_files() if path.suffix != ".md"}
    assert SOURCES[0] in sizes
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > MAX_LINES} == {}


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    paths = [path for path in written_files() if path != Path(__file__)]
    found = [f"{path}: {match[0]}" for path in paths for match in marks.finditer(path.read_text())]
    assert found == []
