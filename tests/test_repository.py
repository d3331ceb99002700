"""What a newcomer is told holds: commands, links, versions, the README's own example; and the tree is clean."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import warpring

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_FILE_BYTES = 2**20
MAX_MODEL_BYTES = 16 * 2**20
#: The tiny trained model, in the one format that models come in.
MODEL = re.compile(r"examples/[\w-]+/[\w.-]+\.safetensors")
#: Places that exist on one machine only, and package registries: pip and its settings know where to look.
PRIVATE = re.compile(
    r"(?<![\w./~-])/(?:home|root|wor[k]|Users|mnt|media)/\w|(?:files\.)?python[h]osted\.org|\bpypi\.o[r]g|npm[j]s\.|"
    r"deb\.debia[n]\.org"
)


def tracked() -> list[Path]:
    """Files of the checkout, those included that are about to be added."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout, so there is no list of what belongs to it")
    return [path for name in listing.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def grep(pattern: re.Pattern[str]) -> list[str]:
    """`file:line: text` of every match in the text files of the checkout."""
    hits: list[str] = []
    for path in tracked():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        hits += [f"{name}:{number}: {line[:160]}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    return hits


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# The tree


def test_no_file_is_large_but_the_models() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked()}
    limits = {name: MAX_MODEL_BYTES if MODEL.fullmatch(name) else MAX_FILE_BYTES for name in sizes}
    assert {name: size for name, size in sizes.items() if size > limits[name]} == {}


def test_nothing_names_a_machine_or_a_registry() -> None:
    assert grep(PRIVATE) == []


@pytest.mark.parametrize(
    "text", ["see /ro" + "ot/x", "(/ho" + "me/me/a)", "https://py" + "pi.org/simple", "'/wo" + "rk/a'"]
)
def test_the_search_for_private_names_finds_them(text: str) -> None:
    assert PRIVATE.search(text)


@pytest.mark.parametrize(
    "text", ["src/ho" + "me/x", "~/ro" + "ot/x", "a/wo" + "rk/b", "https://a.b/ro" + "ot/c", "python.org"]
)
def test_the_search_for_private_names_leaves_others_alone(text: str) -> None:
    assert not PRIVATE.search(text)


# Versions


def test_version_is_the_same_everywhere() -> None:
    version = PYPROJECT["project"]["version"]
    assert warpring.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_pin_is_exact_and_within_the_bounds_of_pyproject() -> None:
    requirements = pytest.importorskip("packaging.requirements", reason="packaging comes with pytest; it is missing")
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = {r.name: r.specifier for r in map(requirements.Requirement, lines)}
    files = list((ROOT / "requirements").glob("*.txt"))
    assert files
    for path in files:
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for pin in map(requirements.Requirement, pins):
            (specifier,) = pin.specifier
            assert specifier.operator == "==", f"{path.name}: {pin}"
            assert pin.name in bounds, f"{path.name}: {pin.name} has no bounds in pyproject.toml"
            assert bounds[pin.name].contains(specifier.version.removesuffix(".*")), f"{path.name}: {pin}"


# Commands


def test_ci_runs_make_test_and_the_workflow_runs_ci() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert script.stat().st_mode & 0o111
    assert "run: bash .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_make_targets_that_documents_name_exist(path: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
    assert named <= make_targets()


def test_documents_do_name_targets() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_warpring_commands_that_documents_show_parse(path: Path) -> None:
    parser = import_module("warpring.cli").build_parser()
    for block in code_blocks(path, "sh"):
        for line in re.findall(r"^(?:\.venv/bin/)?warpring (.*)", block, re.MULTILINE):
            arguments = re.findall(r'"[^"]*"|[^\s"]+', line.split(" #")[0])
            parser.parse_args([argument.strip('"') for argument in arguments])


def test_default_make_target_lists_every_documented_target() -> None:
    listing = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"^  make ([a-z-]+) ", listing, re.MULTILINE))
    assert {"demo", "test", "test-gpu", "lint", "bench", "wheel", "hooks", "clean"} <= listed


# Documents


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_readmes_example_runs() -> None:
    example = code_blocks(ROOT / "README.md", "python")[0]
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    y, x = names["y"], names["x"]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.isfinite().all()
