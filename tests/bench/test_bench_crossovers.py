"""Crossovers: where two measured curves cross, which records make the library's files, and the search on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring import moe_decode, pack_experts
from warpring.bench import crossovers, read_peak
from warpring.bench.crossovers import (
    PACKED_GROUPED,
    Crossing,
    crossing,
    from_records,
    main,
    merge,
    search,
    tuning_bench,
)
from warpring.bench.inputs import make_routing, random_experts
from warpring.bench.records import Record, append, record
from warpring.bench.shapes import LayerShape, parse_shape
from warpring.policy import Crossover, file_of, read

ROOT = Path(__file__).parents[2]
TINY = LayerShape("h64xi32xe6xk2", hidden=64, intermediate=32, num_experts=6, topk=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_read_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)


def rec(path: str, num_tokens: int, p50_us: float, **fields: Any) -> Record:
    return record(
        "decode", device="cpu", gpu="X1", driver="1", cuda="13.0", model="qwen3-30b-a3b", format="mxfp8",
        num_tokens=num_tokens, topk=8, routing="uniform", p50_us=p50_us, unique_bytes=1,
        **({"path": path} if path in ("warp", "tile", "grouped", "classical", "cores") else {"impl": path}), **fields,
    )  # fmt: skip


# -- curves ----------------------------------------------------------------------------------------------------------


def test_crossing_lies_where_the_lines_meet_on_logarithmic_scales() -> None:
    # 10 * B against 80 * sqrt(B): they meet at 64.
    batches = (1, 16, 256)
    found = crossing({b: 10.0 * b for b in batches}, {b: 80.0 * b**0.5 for b in batches})
    assert found is not None
    assert (found.max_tokens, found.below, found.above) in ((64, 16, 256), (63, 16, 256))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({1: 5, 2: 6}, {1: 4, 2: 9}, (0, 0, 1)),
        ({1: 4, 2: 4}, {1: 4, 2: 4}, (2, 2, None)),
        ({1: 1, 4: 1}, {1: 2, 4: 2, 8: 0.1}, (4, 4, None)),
        ({1: 1, 2: 3, 3: 1}, {1: 2, 2: 2, 3: 2}, (1, 1, 2)),
        ({1: 1}, {2: 1}, None),
        ({}, {}, None),
    ],
)
def test_crossing_is_the_first_and_within_what_both_measured(
    ours: dict[int, float], theirs: dict[int, float], expected: tuple[int, int, int | None] | None
) -> None:
    found = crossing(ours, theirs)
    assert (None if found is None else (found.max_tokens, found.below, found.above)) == expected


@pytest.mark.parametrize("lead", [1e-9, 0.5])
def test_crossing_stays_between_its_neighbours(lead: float) -> None:
    found = crossing({10: 1 - lead, 11: 1 + 1e-9}, {10: 1.0, 11: 1.0})
    assert found is not None
    assert found.max_tokens == 10


def test_a_rival_measured_only_where_it_leads_is_met_below_that() -> None:
    """Its time there stands for smaller batches: a path much faster there is not given up from one token on."""
    ours = {1: 20.0, 16: 200.0, 32: 325.0, 64: 574.0, 128: 1131.0}
    found = crossing(ours, {64: 481.0, 128: 483.0})
    assert found is not None
    assert (found.below, found.above) == (32, 64)
    assert 48 <= found.max_tokens <= 56
    assert crossing({64: 574.0, 128: 1131.0}, {64: 481.0}) == Crossing(0, 0, 64)
    assert crossing({32: 500.0, 64: 574.0}, {64: 481.0}) == Crossing(0, 0, 32)


# -- records ---------------------------------------------------------------------------------------------------------


def test_records_make_a_crossover_of_each_path_against_its_first_rival() -> None:
    recs = [rec(path, b, t * b) for path, t in (("warp", 10), ("tile", 2)) for b in (1, 64, 256)]
    recs += [rec("classical", b, 90.0) for b in (1, 64, 256)]
    (found,) = from_records(recs).values()
    by_path = {c.path: c for c in found}
    assert {c.against for c in found} == {"classical"}
    assert (by_path["warp"].max_tokens, by_path["warp"].open_end) == (8, False) or by_path["warp"].max_tokens == 9
    assert 40 <= by_path["tile"].max_tokens <= 45
    recs += [rec("grouped", b, 20.0) for b in (1, 64)]
    by_path = {c.path: c for c in from_records(recs)["X1"]}
    assert {path: (c.against, c.batches) for path, c in by_path.items()} == dict.fromkeys(
        ("warp", "tile"), ("grouped", (1, 64))
    )
    assert by_path["tile"].max_tokens in (9, 10)
    recs += [rec(PACKED_GROUPED, b, 1e6) for b in (1, 64)]
    by_path = {c.path: c for c in from_records(recs)["X1"]}
    assert (by_path["tile"].against, by_path["tile"].max_tokens) == (PACKED_GROUPED, 64)
    assert by_path["tile"].open_end
    assert by_path["warp"].against == "grouped"


def test_only_uniform_routing_on_gpus_counts_and_the_newest_record_wins() -> None:
    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    recs = [rec("warp", 4, 1.0, date=new, commit="new"), rec("warp", 4, 9.0, date=old)]
    recs += [rec("grouped", 4, 5.0, date=old), rec("grouped", 4, 0.1) | {"routing": "zipf"}]
    (found,) = from_records(recs)["X1"]
    assert (found.max_tokens, found.commit, found.date) == (4, "new", "2026-02-01")
    on_cpu = [{k: v for k, v in r.items() if k not in ("gpu", "driver", "cuda")} for r in recs]
    assert from_records(on_cpu) == {}


def test_files_of_the_library_are_what_the_records_say() -> None:
    assert main(["--root", str(ROOT), "--check"]) == 0


def test_command_writes_a_file_a_gpu_and_check_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, t in (("warp", 1.0), ("grouped", 2.0)):
        append(tmp_path / "bench" / "results" / "decode.jsonl", rec(path, 4, t))
    out = tmp_path / "out"
    argv = ["--root", str(tmp_path), "--output", str(out)]
    assert main([*argv, "--check"]) == 1
    assert not out.exists()
    assert main(argv) == 0
    assert [c.max_tokens for c in read(file_of(out, "X1"))] == [4]
    assert main([*argv, "--check"]) == 0
    assert "x1.json" in capsys.readouterr().out


def test_merging_replaces_the_same_layer_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "x1.json"

    def crossover(format: str, max_tokens: int) -> Crossover:
        return Crossover("warp", format, 64, 32, 6, 2, max_tokens, False, "grouped", (1,), "c", "2026-01-02")

    merge(path, "X1", [crossover("bf16", 1), crossover("mxfp8", 2)])
    merge(path, "X1", [crossover("mxfp8", 3)])
    assert {c.format: c.max_tokens for c in read(path)} == {"bf16": 1, "mxfp8": 3}


# -- search ----------------------------------------------------------------------------------------------------------


class Curves:
    """A bench whose layer takes given times."""

    device = CPU
    shape = parse_shape("h64xi32xe6xk2")
    format = "mxfp8"

    def __init__(self, times: dict[str, Any], pause: float = 0.0) -> None:
        self.times, self.pause, self.asked = times, pause, list[int]()

    def run(self, batches: Iterator[int], paths: Sequence[str], *, peers: Sequence[Any]) -> Iterator[list[Record]]:
        assert not peers
        for batch in batches:
            self.asked.append(batch)
            time.sleep(self.pause)
            yield [
                record(
                    "decode", device="cpu", model="h64xi32xe6xk2", format="mxfp8", path=path, num_tokens=batch, topk=2,
                    routing="uniform", p50_us=self.times[path](batch), unique_bytes=1,
                )
                for path in paths
            ]  # fmt: skip


def test_search_stops_at_the_bracket_and_halves_it() -> None:
    curves = Curves({"cores": lambda b: b, "grouped": lambda b: 100.0})
    told: list[int] = []
    (found,) = search(curves, 60, lambda batch, seconds: told.append(batch))  # type: ignore[arg-type]
    assert curves.asked == told == [1, 4, 16, 64, 256, 128, 91]
    assert found.batches == tuple(sorted(curves.asked))
    assert (found.path, found.against, found.open_end) == ("cores", "grouped", False)
    assert 98 <= found.max_tokens <= 100


def test_search_leaves_the_end_open_where_the_path_always_leads() -> None:
    curves = Curves({"cores": lambda b: 1.0, "grouped": lambda b: 2.0})
    (found,) = search(curves, 60)  # type: ignore[arg-type]
    assert (found.max_tokens, found.open_end) == (crossovers.COARSE[-1], True)


def test_search_of_a_path_that_never_leads_ends_at_one_token() -> None:
    curves = Curves({"cores": lambda b: 2.0, "grouped": lambda b: 1.0})
    (found,) = search(curves, 60)  # type: ignore[arg-type]
    assert (found.max_tokens, found.open_end, curves.asked) == (0, False, [1])


def test_search_keeps_to_its_time_and_measures_one_batch_at_least() -> None:
    curves = Curves({"cores": lambda b: 1.0, "grouped": lambda b: 2.0}, pause=0.05)
    start = time.monotonic()
    (found,) = search(curves, 0.3)  # type: ignore[arg-type]
    assert curves.asked == [1, 4]
    assert time.monotonic() - start < 0.3
    assert found.open_end
    curves.asked.clear()
    search(curves, 0.001)  # type: ignore[arg-type]
    assert curves.asked == [1]


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_search_measures_a_real_layer_on_a_cpu(format: str) -> None:
    (found,) = search(tuning_bench(TINY, format, CPU, 0), 0.5)
    assert (found.path, found.format, found.hidden, found.topk) == ("cores", format, 64, 2)
    assert found.max_tokens >= 1
    assert found.batches[0] == 1


def test_packed_grouped_peer_computes_the_layer() -> None:
    peer = crossovers.packed_grouped()
    experts = random_experts(TINY, "mxfp8", CPU, seed=1)
    routing, x = make_routing(TINY, 5, seed=2), torch.randn(5, 64).bfloat16()
    out = torch.full_like(x, torch.nan)
    assert peer.takes_packed
    peer.bind(peer.prepare(pack_experts(experts)), x, routing.topk_idx, routing.topk_weights, out)()
    assert torch.equal(out, moe_decode(x, experts, routing.topk_idx, routing.topk_weights, path="grouped"))


@pytest.mark.gpu
def test_search_measures_both_decode_paths_on_a_gpu() -> None:
    shape = parse_shape("h512xi256xe16xk4")
    found = search(tuning_bench(shape, "mxfp8", torch.device("cuda"), 0), 30)
    assert {c.path: c.against for c in found} == {"warp": "grouped", "tile": PACKED_GROUPED}
