"""Text for the tiny model: what every Python installation carries, split by module name.

Training text is the standard library's own sources and the language reference that `pydoc` ships, in sorted order.
The modules of `VALIDATION` (they choose the snapshot) and of `HELD_OUT` (the figures of the model card) are never
trained on. All of them exist in Python 3.11 to 3.13.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

HELD_OUT = (
    "calendar.py",
    "cmd.py",
    "configparser.py",
    "csv.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)
VALIDATION = (
    "bisect.py",
    "fileinput.py",
    "getopt.py",
    "gettext.py",
    "pprint.py",
    "sched.py",
    "selectors.py",
    "shelve.py",
    "timeit.py",
    "zipapp.py",
)
#: Third-party packages and tests (absent from many installations), and tables of numbers rather than text.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "ensurepip",
}
_SUFFIXES = {".py", ".txt", ".rst"}
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What `encode_documents` needs; both `tokenizers.Tokenizer` and a wrapper of it qualify."""

    def encode_batch(self, input: list[str]) -> Sequence[object]: ...

    def token_to_id(self, token: str) -> int | None: ...


def stdlib() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_files(root: Path | None = None) -> list[Path]:
    """Every training file below `root` (default: the standard library), sorted by relative path."""
    root = stdlib() if root is None else root
    reserved = {root / name for name in (*HELD_OUT, *VALIDATION)}
    files = []
    for path in root.rglob("*"):
        folders = path.relative_to(root).parts[:-1]
        built_here = path.name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
        if path.suffix in _SUFFIXES and not built_here and not _SKIPPED_FOLDERS & set(folders):
            files.append(path)
    return sorted((p for p in files if p not in reserved and p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def read_document(path: Path) -> str:
    """Text of one file; of pydoc's topics, the prose inside the dictionary rather than its source form."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.parts[-2:] != ("pydoc_data", "topics.py"):
        return text
    (topics,) = (node.value for node in ast.parse(text).body if isinstance(node, ast.Assign))
    return "\n\n".join(ast.literal_eval(topics).values())


def read_modules(names: Sequence[str], root: Path | None = None) -> list[str]:
    """Texts of the named modules, e.g. `HELD_OUT`, in that order."""
    root = stdlib() if root is None else root
    return [read_document(root / name) for name in names]


def fingerprint(documents: Sequence[str]) -> str:
    """SHA-256 of a corpus, so that a model card says exactly what was read."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> list[int]:
    """Token ids of the documents, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        ids.extend(encoding.ids)
        ids.append(end)
    return ids
