"""The table of what records may hold says something of every bench and field."""

from __future__ import annotations

from warpring.bench.records import COMMON, REQUIRED, SCHEMA
from warpring.bench.vocabulary import ABOUT, vocabulary


def test_every_bench_and_field_is_in_the_table() -> None:
    assert list(ABOUT) == list(SCHEMA), "a new bench needs a line of its own"
    *head, blank, common = vocabulary([]).splitlines()
    rows = {line.split("`")[1]: line for line in head[2:]}
    assert list(rows) == list(SCHEMA)
    assert not blank
    for bench, fields in SCHEMA.items():
        must, may = rows[bench].split(" | ")[2:]
        assert all(f"`{name}`" in must for name in REQUIRED[bench])
        assert [name for name in fields if f"`{name}`" not in must + may] == []
        assert not [name for name in REQUIRED[bench] if f"`{name}`" in may]
    assert all(f"`{name}`" in common for name in COMMON)


def test_what_is_said_of_a_bench_names_fields_of_it() -> None:
    for bench, text in ABOUT.items():
        named = text.split("`")[1::2]
        unknown = [name for name in named if name not in SCHEMA[bench] | COMMON]
        assert not unknown, f"{bench} has no field {unknown}"
