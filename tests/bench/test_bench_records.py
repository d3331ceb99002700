"""Records: what may be written, what is refused, and which record of several counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring.bench.records import COMMON, REQUIRED, SCHEMA, append, load, newest, record
from warpring.errors import ArgumentError

SRC = Path(__file__).parents[2] / "src"

DECODE: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "format": "mxfp8",
    "path": "warp",
    "num_tokens": 4,
    "topk": 8,
    "routing": "uniform",
    "p50_us": 12.5,
    "unique_bytes": 1000,
}
ACCURACY: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "format": "bf16",
    "path": "classical",
    "num_tokens": 1,
    "inputs": "recorded",
    "cosine_min": 0.99,
    "max_abs_diff": 0.01,
    "rms_rel_error": 0.02,
}


def test_record_says_where_it_was_measured() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    rec = record("decode", device="cpu", **DECODE)
    assert rec["bench"] == "decode"
    assert rec["impl"] == "warpring"
    assert rec["torch"] == torch.__version__
    assert rec["python"] == ".".join(map(str, sys.version_info[:3]))
    assert rec["cpu"]
    assert rec["commit"]
    assert not {"gpu", "driver", "cuda"} & set(rec)
    when = datetime.strptime(rec["date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert before <= when <= datetime.now(UTC)
    assert DECODE.items() <= rec.items()


@pytest.mark.gpu
def test_record_of_a_gpu_names_gpu_driver_and_cuda() -> None:
    rec = record("decode", device="cuda", **DECODE)
    assert rec["gpu"] == torch.cuda.get_device_name()
    assert rec["cuda"] == torch.version.cuda
    assert rec["driver"].split(".")[0].isdigit()
    assert not {"cpu", "python"} & set(rec)


@pytest.mark.parametrize("bench", sorted(SCHEMA))
def test_required_fields_are_known_fields(bench: str) -> None:
    assert set(REQUIRED[bench]) <= set(COMMON) | set(SCHEMA[bench])


@pytest.mark.parametrize("missing", sorted(DECODE))
def test_missing_field_is_refused_by_name(missing: str) -> None:
    fields = {name: value for name, value in DECODE.items() if name != missing}
    with pytest.raises(ArgumentError, match=f"missing {missing}"):
        record("decode", device="cpu", **fields)


def test_peer_needs_no_path() -> None:
    fields = {name: value for name, value in DECODE.items() if name != "path"}
    assert record("decode", device="cpu", impl="some-peer", **fields)["impl"] == "some-peer"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 4.0),
        ("num_tokens", "4"),
        ("num_tokens", True),
        ("num_tokens", -1),
        ("p50_us", float("nan")),
        ("p50_us", float("inf")),
        ("p50_us", -0.5),
        ("p50_us", None),
        ("format", "fp8"),
        ("path", "tile2"),
        ("routing", "skewed"),
        ("model", "Qwen3-30B-A3B"),
        ("model", "two words"),
        ("commit", 7),
        ("batch", 4),
        ("cosine_min", 0.9),
        ("speedup", 2.0),
    ],
)
def test_wrong_value_or_unknown_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=field):
        record("decode", device="cpu", **(DECODE | {field: value}))


def test_grouped_path_on_packed_weights_is_a_path_of_accuracy_alone() -> None:
    assert record("accuracy", device="cpu", **(ACCURACY | {"path": "grouped_packed"}))["path"] == "grouped_packed"
    with pytest.raises(ArgumentError, match="path must be one of"):
        record("decode", device="cpu", **(DECODE | {"path": "grouped_packed"}))


def test_unknown_bench_is_refused() -> None:
    with pytest.raises(ArgumentError, match="bench must be one of"):
        record("speed", device="cpu")


@pytest.mark.parametrize(("cosine", "good"), [(-1.0, True), (-1.001, False), (1.0, True)])
def test_cosine_may_be_negative_but_not_below_minus_one(cosine: float, good: bool) -> None:
    fields = ACCURACY | {"cosine_min": cosine}
    if good:
        assert record("accuracy", device="cpu", **fields)["cosine_min"] == cosine
    else:
        with pytest.raises(ArgumentError, match="cosine_min must be finite and at least -1"):
            record("accuracy", device="cpu", **fields)


def test_int_is_accepted_where_a_float_is_meant() -> None:
    assert record("decode", device="cpu", **(DECODE | {"p50_us": 12}))["p50_us"] == 12


def test_file_gives_back_what_was_appended_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "decode.jsonl"
    written = [record("decode", device="cpu", **(DECODE | {"num_tokens": n})) for n in (1, 2, 4)]
    for rec in written:
        append(path, rec)
    assert load(path) == written
    assert [json.loads(line)["num_tokens"] for line in path.read_text().splitlines()] == [1, 2, 4]


def test_missing_file_holds_no_records(tmp_path: Path) -> None:
    assert load(tmp_path / "none.jsonl") == []


def test_append_refuses_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "decode.jsonl"
    with pytest.raises(ArgumentError, match="num_tokens"):
        append(path, record("decode", device="cpu", **DECODE) | {"num_tokens": "four"})
    assert not path.exists()


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", "3", '{"bench": "decode"}', '{"bench": ["decode"]}'])
def test_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decode.jsonl"
    append(path, record("decode", device="cpu", **DECODE))
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ArgumentError, match=r"decode\.jsonl:3"):
        load(path)


def test_newest_date_wins_wherever_it_stands_and_the_later_line_breaks_a_tie() -> None:
    def point(date: str, p50: float, num_tokens: int = 1) -> dict[str, Any]:
        return record("decode", device="cpu", **(DECODE | {"date": date, "p50_us": p50, "num_tokens": num_tokens}))

    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    found = newest([point(new, 1.0), point(old, 2.0), point(new, 3.0), point(old, 4.0, num_tokens=2)], ("num_tokens",))
    assert [(rec["num_tokens"], rec["p50_us"]) for rec in found] == [(1, 3.0), (2, 4.0)]


def test_newest_counts_a_missing_field_as_a_value_of_its_own() -> None:
    peer = {name: value for name, value in DECODE.items() if name != "path"}
    both = [record("decode", device="cpu", **DECODE), record("decode", device="cpu", impl="peer", **peer)]
    assert newest(both, ("path",)) == both


def run_commit(root: Path, **environment: str) -> str:
    """`commit()` of the package in root/src, in a process of its own; with an empty torch, which it does not need."""
    code = "from warpring.bench.records import commit; print(commit())"
    path = f"{root / 'src'}:{root.parent / 'stubs'}"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def git(*args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", *identity, *args], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def records_alone(tmp_path: Path) -> Path:
    """A package with only what `records` needs, in tmp_path/checkout/src."""
    package = tmp_path / "checkout" / "src" / "warpring"
    (package / "bench").mkdir(parents=True)
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "torch.py").touch()
    (package / "__init__.py").touch()
    (package / "bench" / "__init__.py").touch()
    for name in ("errors.py", "bench/records.py"):
        (package / name).write_text((SRC / "warpring" / name).read_text())
    return tmp_path / "checkout"


def test_commit_is_of_the_checkout_and_dirty_only_where_code_changed(records_alone: Path) -> None:
    root = str(records_alone)
    git("init", "-q", root)
    git("-C", root, "add", ".")
    git("-C", root, "commit", "-q", "-m", "all")
    head = git("-C", root, "rev-parse", "--short=12", "HEAD")
    assert run_commit(records_alone, WARPRING_COMMIT="elsewhere") == head
    (records_alone / "bench" / "results").mkdir(parents=True)
    (records_alone / "bench" / "results" / "decode.jsonl").write_text("{}\n")
    (records_alone / "notes.txt").touch()
    assert run_commit(records_alone) == head
    (records_alone / "src" / "warpring" / "new.py").touch()
    assert run_commit(records_alone) == f"{head}-dirty"


def test_commit_outside_a_checkout_is_what_the_environment_says(records_alone: Path) -> None:
    # A package inside somebody else's repository, as a virtual environment often is.
    git("init", "-q", str(records_alone.parent))
    (records_alone.parent / "theirs").touch()
    git("-C", str(records_alone.parent), "add", "theirs")
    git("-C", str(records_alone.parent), "commit", "-q", "-m", "theirs")
    assert run_commit(records_alone, WARPRING_COMMIT="abc123") == "abc123"
    assert run_commit(records_alone).startswith(("v", "unknown"))


def test_every_committed_record_is_valid() -> None:
    for path in sorted((SRC.parent / "bench" / "results").glob("*.jsonl")):
        assert load(path), f"{path} is empty"
