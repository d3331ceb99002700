"""The table of what each kernel takes of a multiprocessor, as its compiler says: registers, shared memory, spills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warpring.bench.markdown import DASH, NOT_MEASURED, markdown
from warpring.bench.records import FORMATS, Record

_LAYER = ("model", "format", "arch")


def resources(records: Sequence[Record]) -> str:
    """A row a kernel of each layer, one for all formats in which it takes the same: how many forms of it there are, and
    the least and most that these take."""
    forms: dict[tuple[str, str, str], list[Record]] = {}
    found = _latest([rec for rec in records if rec["bench"] == "resources"])
    for rec in sorted(found, key=lambda rec: (rec["model"], FORMATS.index(rec["format"]))):
        forms.setdefault((rec["model"], rec["kernel"], rec["format"]), []).append(rec)
    alike: dict[tuple[str, ...], list[str]] = {}
    for (model, kernel, format), recs in forms.items():
        alike.setdefault((model, kernel, *_taken(recs)), []).append(format)
    kernels = list(dict.fromkeys(key[:2] for key in alike))
    rows = [
        [key[0], key[1], ", ".join(formats), *key[2:]]
        for key, formats in sorted(alike.items(), key=lambda item: kernels.index(item[0][:2]))
    ] or [[NOT_MEASURED] + [DASH] * 6]
    header = ("model", "kernel", "formats", "forms", "registers", "shared KiB", "spilled bytes")
    return markdown(header, rows) + _compiled(found)


def _taken(recs: Sequence[Record]) -> list[str]:
    registers, smem = (sorted(rec[name] for rec in recs) for name in ("registers", "smem_bytes"))
    spilled = max(rec["spill_bytes"] for rec in recs)
    return [str(len(recs)), _range(map(str, registers)), _range(f"{size / 1024:.1f}" for size in smem), str(spilled)]


def _latest(records: Sequence[Record]) -> list[Record]:
    """Those of the run that compiled a layer last: an older one's forms may not exist any more."""
    last: dict[tuple[str, ...], Record] = {}
    for rec in records:
        key = tuple(rec[name] for name in _LAYER)
        if key not in last or rec["date"] >= last[key]["date"]:
            last[key] = rec
    return [rec for rec in records if rec["date"] == last[tuple(rec[name] for name in _LAYER)]["date"]]


def _range(sorted_words: Iterable[str]) -> str:
    words = list(sorted_words)
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def _compiled(records: Sequence[Record]) -> str:
    if not records:
        return ""
    archs, compilers, days, commits = (
        ", ".join(sorted({rec[name][:length] for rec in records}))
        for name, length in (("arch", 16), ("cuda", 16), ("date", 10), ("commit", 64))
    )
    return f"\nCompiled for {archs} by NVRTC {compilers}; {days}; commit {commits}.\n"
