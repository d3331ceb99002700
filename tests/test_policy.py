"""Which path serves which batch: where crossovers come from, in which order, and what a file may hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from warpring import policy
from warpring.errors import ArgumentError
from warpring.formats import FORMATS
from warpring.policy import Crossover, choose_path, file_of, limit, read, write

GPU_NAME = "NVIDIA Test"
SIZES = (2048, 768, 128, 8)


def crossover(path: str = "warp", max_tokens: int = 40, *, open_end: bool = False, format: str = "mxfp8") -> Crossover:
    return Crossover(path, format, *SIZES, max_tokens, open_end, "grouped", (1, 64, 128), "abc", "2026-01-02")


@dataclass(frozen=True)
class Layer:
    """A layer that is nowhere in memory."""

    device: torch.device
    format: str = "mxfp8"
    hidden: int = 2048
    intermediate: int = 768
    num_experts: int = 128


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the library and this machine know of GPU_NAME."""
    monkeypatch.setattr(policy, "DATA_DIR", tmp_path / "library")
    monkeypatch.setattr(policy, "tuned_dir", lambda: tmp_path / "tuned")
    monkeypatch.setattr(policy, "_gpu_name", lambda device: GPU_NAME)
    monkeypatch.setattr(policy, "runs_kernels", lambda device: True)
    monkeypatch.setattr(policy, "has_grouped_gemms", lambda device: False)
    policy.forget()

    def put(library: list[Crossover] | None = None, tuned: list[Crossover] | None = None) -> None:
        for folder, found in (("library", library), ("tuned", tuned)):
            if found is not None:
                write(file_of(tmp_path / folder, GPU_NAME), GPU_NAME, found)

    return put


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What one test looked up is nothing to the next."""
    policy.forget()
    yield
    policy.forget()


def warp_limit(**sizes: int) -> int:
    layer = dict(zip(("hidden", "intermediate", "num_experts", "topk"), SIZES, strict=True)) | sizes
    return limit(GPU_NAME, "warp", "mxfp8", **layer).max_tokens


@pytest.mark.parametrize(("packed", "path"), [(False, "warp"), (True, "tile")])
def test_gpu_switches_to_grouped_right_after_the_crossover(known: Callable[..., None], packed: bool, path: str) -> None:
    known([crossover("warp", 40), crossover("tile", 300)])
    layer, most = Layer(torch.device("cuda", 0)), {"warp": 40, "tile": 300}[path]
    assert choose_path(layer, 1, 8, packed=packed) == choose_path(layer, most, 8, packed=packed) == path
    assert choose_path(layer, most + 1, 8, packed=packed) == "grouped"


def test_path_that_never_leads_is_never_taken(known: Callable[..., None]) -> None:
    known([crossover("warp", 0)])
    assert choose_path(Layer(torch.device("cuda", 0)), 1, 8) == "grouped"


@pytest.mark.parametrize("packed", [False, True])
def test_gpu_too_old_for_our_kernels_is_grouped_at_every_batch(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    known([crossover("warp", 40), crossover("tile", 300)])
    monkeypatch.setattr(policy, "runs_kernels", lambda device: False)
    layer = Layer(torch.device("cuda", 0))
    assert {choose_path(layer, tokens, 8, packed=packed) for tokens in (1, 16, 1000)} == {"grouped"}


def test_packed_weights_on_a_cpu_are_grouped_at_every_batch() -> None:
    layer = Layer(torch.device("cpu"))
    assert {choose_path(layer, tokens, 8, packed=True) for tokens in (1, 16, 1000)} == {"grouped"}
    assert choose_path(layer, 1, 8) == "cores"


def test_what_was_tuned_here_wins_over_the_library(known: Callable[..., None]) -> None:
    known([crossover(max_tokens=40)])
    assert warp_limit() == 40
    known(tuned=[crossover(max_tokens=50)])
    assert warp_limit() == 50
    assert limit(GPU_NAME, "warp", "mxfp8", *SIZES).source == "tuned on this machine"


def test_open_end_gives_way_to_a_rule_of_thumb_that_lies_beyond(known: Callable[..., None]) -> None:
    thumb = limit("unknown", "warp", "mxfp8", *SIZES)
    assert thumb.source == "rule of thumb"
    known([crossover(max_tokens=thumb.max_tokens - 1, open_end=True)])
    assert warp_limit() == thumb.max_tokens
    known([crossover(max_tokens=thumb.max_tokens + 1, open_end=True)])
    assert warp_limit() == thumb.max_tokens + 1
    known([crossover(max_tokens=3)])
    assert warp_limit() == 3


def test_unknown_shape_takes_the_nearest_by_bytes_of_its_own_format(known: Callable[..., None]) -> None:
    small = crossover(max_tokens=10)
    large = replace(small, hidden=7168, intermediate=2048, max_tokens=20)
    other = replace(small, format="bf16", hidden=3000, intermediate=1500, max_tokens=99)
    known([small, large, other])
    assert warp_limit(hidden=2048, intermediate=1024) == 10
    assert warp_limit(hidden=6144, intermediate=2048) == 20
    assert limit(GPU_NAME, "warp", "nvfp4", *SIZES).max_tokens in (10, 20, 99), "another format is better than none"


def test_limit_of_a_neighbour_is_scaled_to_tokens_an_expert(known: Callable[..., None]) -> None:
    known([crossover(max_tokens=40), crossover("tile", 300)])
    assert warp_limit(num_experts=256) == 80
    assert warp_limit(topk=4) == 80
    # The tile path reads all weights once a launch of so many pairs, however many experts there are.
    assert limit(GPU_NAME, "tile", "mxfp8", 2048, 768, 256, 4).max_tokens == 600


@pytest.mark.parametrize("path", ["warp", "tile", "cores"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("num_experts", "topk"), [(1, 1), (8, 2), (128, 8), (1024, 32), (32, 32)])
def test_rule_of_thumb_serves_one_token_by_the_decode_path(path: str, format: str, num_experts: int, topk: int) -> None:
    found = limit("a device that nobody measured", path, format, 4096, 1536, num_experts, topk)
    assert found.max_tokens >= 1
    assert found.source == "rule of thumb"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("topk", "one_launch"), [(8, 64), (10, 51), (1, 512)])
def test_tile_rule_counts_launches_that_the_grouped_path_is_worth(
    known: Callable[..., None], monkeypatch: pytest.MonkeyPatch, format: str, topk: int, one_launch: int
) -> None:
    """One launch where the grouped path reads packed weights once, as they are; more where it expands them first."""
    known()
    layer = Layer(torch.device("cuda", 0), format=format)
    for own_gemms, launches in ((True, 1), (False, 2 if format == "bf16" else 3)):
        policy.forget()
        monkeypatch.setattr(policy, "has_grouped_gemms", lambda device, own=own_gemms: own)
        most = launches * one_launch
        assert choose_path(layer, most, topk, packed=True) == "tile"
        assert choose_path(layer, most + 1, topk, packed=True) == "grouped"


def test_where_packed_weights_are_multiplied_as_they_are_says_nothing_of_rows() -> None:
    for path in ("warp", "cores"):
        of_rows = (limit("unknown", path, "mxfp8", *SIZES, own_gemms=own) for own in (True, False))
        assert len(set(of_rows)) == 1


def test_files_hold_what_was_written_sorted_and_one_a_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "new", GPU_NAME)
    assert path.name == "nvidia-test.json"
    assert read(path) == []
    found = [crossover("warp"), crossover("tile", open_end=True), crossover("tile", format="bf16")]
    write(path, GPU_NAME, found)
    assert read(path) == sorted(found, key=lambda c: c.key)
    assert sum(line.lstrip().startswith('{"path"') for line in path.read_text().splitlines()) == 3
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "device": "x", "crossovers": []}',
        '{"schema": 1, "device": "x", "crossovers": [{"path": "warp"}]}',
        '{"schema": 1, "device": "x", "crossovers": [{"unknown": 1}]}',
        json.dumps({"schema": 1, "crossovers": [{**asdict(crossover()), "batches": 3}]}),
        json.dumps({"schema": 1, "crossovers": [{**asdict(crossover()), "max_tokens": "64"}]}),
        json.dumps({"schema": 1, "crossovers": [{**asdict(crossover()), "max_tokens": -1}]}),
        json.dumps({"schema": 1, "crossovers": [{**asdict(crossover()), "topk": 0}]}),
        json.dumps({"schema": 1, "crossovers": [{**asdict(crossover()), "format": "int3"}]}),
    ],
)
def test_file_that_cannot_be_used_is_a_warning_not_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nvidia-test.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"nvidia-test\.json is not used .* Run 'warpring tune' anew"):
        assert read(path) == []


def test_file_of_another_device_is_never_overwritten(tmp_path: Path) -> None:
    path = file_of(tmp_path, "NVIDIA-Test")
    write(path, "NVIDIA-Test", [crossover()])
    with pytest.raises(ArgumentError, match="holds the crossovers of 'NVIDIA-Test', not of 'NVIDIA Test'"):
        write(file_of(tmp_path, GPU_NAME), GPU_NAME, [])


def test_tuned_files_lie_beside_the_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fresh copy of the module: tests otherwise see no tuned files.
    spec = importlib.util.spec_from_file_location("fresh_policy", policy.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fresh_policy", fresh)
    spec.loader.exec_module(fresh)
    monkeypatch.setenv("WARPRING_CACHE", str(tmp_path))
    assert fresh.tuned_dir() == tmp_path / "crossovers"


def test_library_serves_qwen3_on_an_h200_by_measurement() -> None:
    for path in ("warp", "tile"):
        for format in ("bf16", "mxfp8", "mxfp4"):
            found = {c.key: c for c in read(file_of(policy.DATA_DIR, "NVIDIA H200"))}[path, format, *SIZES]
            # Literal warp decode of BF16 loses to the grouped path between 32 and 64 tokens, every other one later.
            assert found.max_tokens >= (32 if (path, format) == ("warp", "bf16") else 64)


def test_choice_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(torch.device("cpu"))
    choose_path(layer, 3, 8)
    monkeypatch.setattr(policy, "crossovers", lambda device: pytest.fail("read again"))
    assert choose_path(layer, 1, 8) == "cores"
    assert choose_path(layer, 1 << 20, 8) == "grouped"


def test_device_is_named_with_what_its_speed_depends_on() -> None:
    threads = torch.get_num_threads()
    assert policy.device_name(torch.device("cpu")).endswith(f", {threads} threads")
    torch.set_num_threads(threads + 1)
    try:
        assert policy.device_name(torch.device("cpu")).endswith(f", {threads + 1} threads")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
def test_gpu_is_named_as_records_name_it() -> None:
    assert policy.device_name(torch.device("cuda", 0)) == torch.cuda.get_device_name(0)
