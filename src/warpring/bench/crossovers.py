"""Crossovers between paths: from bench records into the library's data, or measured here for `warpring tune`.

    python -m warpring.bench.crossovers [--root CHECKOUT] [--check]

writes `src/warpring/data/crossovers/*.json` from `bench/results/*.jsonl` of GPUs; with --check nothing is written and
the exit code is 1 if a file is not what the records say.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from warpring.bench.data_files import main_of
from warpring.bench.layer import LayerBench
from warpring.bench.peer import Peer
from warpring.bench.records import OWN_IMPL, PACKED_GROUPED, Record, newest
from warpring.bench.shapes import LayerShape, parse_shape
from warpring.bench.tables import read_results
from warpring.bench.timing import Call
from warpring.decode import moe_decode
from warpring.layout import PackedExperts
from warpring.policy import DATA_DIR, Crossover, file_of, read, write

#: path -> what takes over from it, the first that was measured; the classical path stands in where nothing else was.
RIVALS = {"warp": ("grouped", "classical"), "tile": (PACKED_GROUPED, "grouped", "classical"), "cores": ("grouped",)}
#: Batches of a coarse search, then a bracket is halved (on a logarithmic scale) so many times.
COARSE = (1, 4, 16, 64, 256, 1024, 4096)
REFINEMENTS = 2
#: Paths and repeats of a search, by kind of device.
PATHS = {"cuda": ("warp", "tile", "grouped"), "cpu": ("cores", "grouped")}
REPEATS = {"cuda": 10, "cpu": 3}

#: batch -> microseconds.
Times = Mapping[int, float]


def packed_grouped() -> Peer:
    """The grouped path on packed weights, as the bench takes what is no path of plain `Experts`."""

    def bind(
        weights: PackedExperts, x: torch.Tensor, idx: torch.Tensor, scores: torch.Tensor, out: torch.Tensor
    ) -> Call:
        return partial(moe_decode, x, weights, idx, scores, out=out, path="grouped")

    def prepare(packed: PackedExperts) -> PackedExperts:
        return packed

    return Peer(PACKED_GROUPED, "path grouped on packed weights", prepare, bind, takes_packed=True)


@dataclass(frozen=True)
class Crossing:
    """Where `ours` stops to lead: between the batches `below` (it led, 0 = never) and `above` (it did not, None = it
    led wherever it was measured); `max_tokens` is the crossing of the lines through both, on logarithmic scales."""

    max_tokens: int
    below: int
    above: int | None


def crossing(ours: Times, theirs: Times) -> Crossing | None:
    """The first crossing of two measured curves, None where they share no batch.

    Where the rival leads at the first shared batch, and `ours` has smaller ones, the rival's time there stands for
    these: no layer takes longer for fewer tokens, so that `ours` loses no later than this says.
    """
    led = 0
    for batch in sorted(ours.keys() & theirs.keys()):
        if ours[batch] > theirs[batch]:
            if led:
                return Crossing(_between(led, batch, ours, theirs), led, batch)
            smaller = [other for other in ours if other < batch]
            if not smaller:
                return Crossing(0, 0, batch)
            return crossing(ours, dict.fromkeys((*smaller, batch), theirs[batch]))
        led = batch
    return Crossing(led, led, None) if led else None


def _between(low: int, high: int, ours: Times, theirs: Times) -> int:
    lead, lag = (math.log(ours[batch] / theirs[batch]) for batch in (low, high))
    share = -lead / (lag - lead)
    return min(high - 1, int(low * (high / low) ** share))


def from_records(records: Iterable[Record]) -> dict[str, list[Crossover]]:
    """GPU -> the crossovers that its decode records show (uniform routing; of equal points the newest counts)."""
    decode = [rec for rec in records if rec["bench"] == "decode" and "gpu" in rec and rec["routing"] == "uniform"]
    points: dict[tuple[str, str, str], list[Record]] = {}
    for rec in newest(decode, ("gpu", "model", "format", "impl", "path", "num_tokens")):
        points.setdefault((rec["gpu"], rec["model"], rec["format"]), []).append(rec)
    found: dict[str, list[Crossover]] = {}
    for (gpu, model, format), recs in points.items():
        crossovers = [c for path in RIVALS if (c := _of_path(path, parse_shape(model), format, recs)) is not None]
        if crossovers:
            found.setdefault(gpu, []).extend(crossovers)
    return found


def _of_path(path: str, shape: LayerShape, format: str, recs: Sequence[Record]) -> Crossover | None:
    by_name: dict[str, dict[int, Record]] = {}
    for rec in recs:
        name = rec["path"] if rec["impl"] == OWN_IMPL else rec["impl"]
        by_name.setdefault(name, {})[rec["num_tokens"]] = rec
    for rival in RIVALS[path]:
        ours, theirs = (
            {batch: float(rec["p50_us"]) for batch, rec in by_name.get(name, {}).items()} for name in (path, rival)
        )
        found = crossing(ours, theirs)
        if found is not None:
            batches = tuple(sorted(ours.keys() & theirs.keys()))
            last = max((by_name[path][batch] for batch in batches), key=lambda rec: rec["date"])
            return Crossover(
                path,
                format,
                shape.hidden,
                shape.intermediate,
                shape.num_experts,
                shape.topk,
                found.max_tokens,
                found.above is None,
                rival,
                batches,
                last["commit"],
                last["date"][:10],
            )
    return None


def search(
    bench: LayerBench, seconds: float, on_batch: Callable[[int, float], None] = lambda _, __: None
) -> list[Crossover]:
    """Measure the crossovers of one layer here, in about `seconds`.

    Args:
        bench: the layer, the device and the seed.
        seconds: no batch is started that the last ones make look too long; at least one is measured.
        on_batch: told the next batch and the seconds that have passed.

    Returns:
        A crossover for each decode path of the device; its end is open where time ran out before the path lost.
    """
    start = time.monotonic()
    rivals = [("cores", "grouped")] if bench.device.type == "cpu" else [("warp", "grouped"), ("tile", PACKED_GROUPED)]
    times: dict[str, dict[int, float]] = {name: {} for pair in rivals for name in pair}
    measured: list[Record] = []

    def plan() -> Iterator[int]:
        durations: list[float] = []
        at = 0.0

        def fits(growth: float) -> bool:
            passed = time.monotonic() - start
            if len(durations) < 2:
                # The first batch took the making of weights with it, and says nothing of the second one's time.
                return not durations or passed <= 0.8 * seconds
            return passed + durations[-1] * growth <= seconds

        for batch in _batches(rivals, times):
            # A batch four times as large takes four times as long at the most.
            if not fits(4.0 if batch in COARSE and batch > 1 else 1.0):
                return
            at = time.monotonic()
            on_batch(batch, at - start)
            yield batch
            durations.append(time.monotonic() - at)

    peers = [packed_grouped()] if bench.device.type == "cuda" else []
    for records in bench.run(plan(), PATHS[bench.device.type], peers=peers):
        measured += records
        for rec in records:
            name = rec["path"] if rec["impl"] == OWN_IMPL else rec["impl"]
            if name in times:
                times[name][rec["num_tokens"]] = float(rec["p50_us"])
    found = (_of_path(path, bench.shape, bench.format, measured) for path, _ in rivals)
    return [crossover for crossover in found if crossover is not None]


def _batches(rivals: Sequence[tuple[str, str]], times: Mapping[str, Times]) -> Iterator[int]:
    """Batches worth measuring next, from what is in `times` by then."""

    def brackets() -> list[Crossing | None]:
        return [crossing(times[path], times[rival]) for path, rival in rivals]

    for batch in COARSE:
        yield batch
        if all(found is not None and found.above is not None for found in brackets()):
            break
    for _ in range(REFINEMENTS):
        for found in brackets():
            if found is None or found.above is None:
                continue
            middle = round(math.sqrt(max(found.below, 1) * found.above))
            if found.below < middle < found.above and middle not in times[rivals[0][0]]:
                yield middle


def merge(path: Path, device: str, found: Iterable[Crossover]) -> None:
    """Write crossovers of a device into its file, in place of older ones of the same layers and paths."""
    kept = {crossover.key: crossover for crossover in read(path)}
    write(path, device, (kept | {crossover.key: crossover for crossover in found}).values())


def stale(root: Path, directory: Path) -> dict[str, list[Crossover]]:
    """Devices whose file in `directory` is not what the records under `root` say, with what they do say."""
    found = from_records(read_results(root))
    in_order = {gpu: sorted(crossovers, key=lambda c: c.key) for gpu, crossovers in found.items()}
    return {gpu: crossovers for gpu, crossovers in in_order.items() if read(file_of(directory, gpu)) != crossovers}


def tuning_bench(shape: LayerShape, format: str, device: torch.device, seed: int) -> LayerBench:
    """A bench made for `search`: few repeats; on a CPU few layers, which has no gaps between launches to average."""
    bench = LayerBench(shape, format, device=device, repeats=REPEATS[device.type], seed=seed)
    return replace(bench, layers=(1, 2)) if device.type == "cpu" else bench


def main(argv: Sequence[str] | None = None) -> int:
    """Write the library's crossovers, or with --check only say which file is stale."""
    return main_of("warpring.bench.crossovers", DATA_DIR, stale, write, argv)


if __name__ == "__main__":
    sys.exit(main())
