"""Kernel sources made ready for a C++ compiler: inline assembly out, shared memory where the emulator keeps it.

Everything else stays as it is, line by line, so that reports name the lines of the real files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Comments, strings and preprocessor lines: braces and semicolons in them structure nothing.
_OPAQUE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M
)
_FUNCTION_HEAD = re.compile(r"\)\s*(?:const|noexcept|->[\s\w:<>,&*]+)*$|^\s*namespace\s+\w+\s*$")
_EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+((?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)*)([\w:]+)\s+((?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)*)(\w+)\s*\[\s*\]\s*;"
)
_SHARED = re.compile(
    r"(?:static\s+)?__shared__\s+((?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)*)([\w:]+(?:<[^;{}]*?>)?)\s+(\w+)\s*((?:\[(?:[^\[\]]|\[[^\]]*\])*\]\s*)*);"
)


@dataclass(frozen=True)
class Function:
    """One function definition that holds inline assembly.

    Attributes:
        name: without its namespace.
        returns: its result type.
        parameters: their types.
        is_template: whether template parameters come first.
    """

    name: str
    returns: str
    parameters: tuple[str, ...]
    is_template: bool


def _blank(text: str) -> str:
    """The text with everything opaque replaced by spaces; positions and lines stay."""
    return _OPAQUE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _definitions(text: str) -> list[tuple[int, int]]:
    """(start, end) of every top-level declaration or definition."""
    code = _blank(text)
    found: list[tuple[int, int]] = []
    depth = start = 0
    is_function = False
    for at, char in enumerate(code):
        if char == "{":
            if depth == 0:
                is_function = _FUNCTION_HEAD.search(code[start:at]) is not None
            depth += 1
        elif char == "}":
            depth -= 1
        # A function ends at its brace, everything else at a semicolon.
        if depth == 0 and (char == ";" or (char == "}" and is_function)):
            found.append((start, at + 1))
            start, is_function = at + 1, False
    return found


def _function(definition: str) -> Function:
    """From the text of a definition."""
    head = " ".join(_blank(definition).split("{")[0].split())
    is_template = head.startswith("template")
    head = re.sub(r"__launch_bounds__\s*\([^)]*\)|__align__\s*\([^)]*\)|^template\s*<[^>]*>", "", head)
    head = re.sub(r"__device__|__forceinline__|__noinline__|\b(?:inline|static|constexpr)\b", "", head)
    found = re.match(r"\s*(.+?)(\w+)\s*\((.*)\)[^)]*$", head)
    if found is None:
        raise ValueError(f"no function in: {head}")
    parameters = [_type_of(part) for part in re.split(r",(?![^<(]*[>)])", found[3]) if part.strip()]
    return Function(found[2], found[1].strip(), tuple(parameters), is_template)


def _type_of(parameter: str) -> str:
    """`const float (&d)[4] = x` -> `const float (&)[4]`, `int n` -> `int`."""
    parameter = parameter.split("=")[0].strip()
    if "(&" in parameter:
        return re.sub(r"\(&\s*\w+\)", "(&)", parameter)
    return re.sub(r"(?<=[\s*&])\w+$", "", parameter).strip()


def assembly_functions(text: str) -> list[Function]:
    """Every function of `text` whose body holds an asm statement."""
    definitions = [text[start:end] for start, end in _definitions(text)]
    return [_function(definition) for definition in definitions if _has_assembly(definition)]


def _has_assembly(text: str) -> bool:
    return re.search(r"\b(?:asm|__asm__)\b", _blank(text)) is not None


def emulated(text: str, path: str) -> str:
    """`text` of the file `path`, ready to compile with cuda_on_cpu.hpp."""
    definitions = [text[start:end] for start, end in _definitions(text)]
    kept = " ".join(_blank(definition) for definition in definitions if not _has_assembly(definition))
    out: list[str] = []
    last = 0
    for start, end in _definitions(text):
        definition = text[start:end]
        if not _has_assembly(definition):
            continue
        head = _blank(definition).split("{")[0]
        if re.match(r"\s*(?:struct|class|union|namespace)\b", head):
            raise ValueError(f"{path}: inline assembly inside `{head.strip()}`; put it into a function of its own")
        name = _function(definition).name
        # An overload that stays would hide the emulated ones.
        using = f"using ::cuda_on_cpu::{name};" if re.search(rf"\b{name}\s*\([^;{{]*\)\s*\{{", kept) else ""
        first = start + len(head) - len(head.lstrip())
        out += [text[last:first], using, "\n" * text[first:end].count("\n")]
        last = end
    text = "".join([*out, text[last:]])
    text = _EXTERN_SHARED.sub(_extern_shared, text)
    text = _SHARED.sub(_shared, text)
    if "__shared__" in _blank(text):
        line = _blank(text)[: _blank(text).index("__shared__")].count("\n") + 1
        raise ValueError(
            f"{path}:{line}: a declaration of shared memory in a form that tests/emulator/sources.py does not know"
        )
    return text


def _extern_shared(match: re.Match[str]) -> str:
    lines = "\n" * match[0].count("\n")
    return f"{match[2]}* const {match[4]} = reinterpret_cast<{match[2]}*>(::cuda_on_cpu::current->dynamic_smem);{lines}"


def _shared(match: re.Match[str]) -> str:
    kind = f"{match[2]}{''.join(match[4].split())}"
    alignment = re.search(r"\(\s*(\w+)\s*\)", match[1])
    lines = "\n" * match[0].count("\n")
    storage = f"::cuda_on_cpu::StaticShared<{kind}, __COUNTER__, {alignment[1] if alignment else 1}>"
    return f"auto& {match[3]} = {storage}::get();{lines}"


def smem_alignment(texts: list[str]) -> int:
    """The largest alignment that a kernel declares for its dynamic shared memory."""
    declared = [
        number
        for text in texts
        for match in _EXTERN_SHARED.finditer(_blank(text))
        for number in re.findall(r"\(\s*(\d+)\s*\)", match[0])
    ]
    return max([16, *map(int, declared)])


def write_emulated(sources: list[Path], into: Path) -> None:
    """Copies of `sources`, ready to compile, in the folder `into`."""
    for source in sources:
        (into / source.name).write_text(emulated(source.read_text(), str(source)))
