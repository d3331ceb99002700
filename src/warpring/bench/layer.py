"""Bench of one MoE layer: any shape, format, batch and path, as checked records."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from warpring.bench.inputs import (
    Routing,
    Traffic,
    count_traffic,
    make_routing,
    one_expert,
    random_experts,
    random_packed,
)
from warpring.bench.peer import Peer
from warpring.bench.read_peak import read_peak_gbs
from warpring.bench.records import Record, record
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call, Measured, cache_bytes, measure
from warpring.classical import prepare
from warpring.decode import moe_decode
from warpring.errors import ArgumentError, WarpringError
from warpring.experts import Experts
from warpring.layout import PackedExperts
from warpring.reference import moe_exact

#: A replay touches at least this many times the cache, so that no layer finds its weights there.
CACHE_MULTIPLE = 3
#: (least, most) layers of a replay. A CPU has no launch gaps to average over and is slow enough without.
LAYERS = {"cuda": (16, 256), "cpu": (2, 4)}
#: Share of free memory that weights may take; the rest is for packed copies, graphs and the reference.
MEMORY_SHARE = 0.7
#: A timed path whose output has a lower cosine with the exact one is broken, and its time means nothing.
LEAST_COSINE = 0.99


@dataclass(frozen=True)
class WeightSet:
    """One layer's weights, as the paths and each peer, by its name, take them."""

    experts: Experts
    packed: PackedExperts | None
    of_peers: Mapping[str, object] = field(default_factory=dict[str, object])

    def of(self, path: str) -> Experts | PackedExperts:
        """What `moe_decode` gets for that path."""
        return self.packed if path == "tile" and self.packed is not None else self.experts


def refuse(said: str) -> None:
    """Raise WarpringError with these words."""
    raise WarpringError(said)


@dataclass(frozen=True)
class LayerBench:
    """What to bench.

    Attributes:
        shape: the layer.
        format: number format of the weights.
        routing: "uniform", "zipf" or "recorded" (which needs `load`, see `make_routing`).
        device: where.
        repeats: replays that count.
        seed: of weights, inputs and routings.
        load: relative load of each expert for routing "recorded".
        layers: (least, most) layers of a replay; None takes those of `LAYERS`.
    """

    shape: LayerShape
    format: str
    routing: str = "uniform"
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    repeats: int = 30
    seed: int = 0
    load: Sequence[float] | None = None
    layers: tuple[int, int] | None = None

    def run(
        self,
        batches: Iterable[int],
        paths: Sequence[str],
        *,
        peers: Sequence[Peer] = (),
        most_tokens: Mapping[str, int] | None = None,
        on_stage: Callable[[str], None] = lambda _: None,
        on_wrong: Callable[[str], object] = refuse,
    ) -> Iterator[list[Record]]:
        """Measure; yields the records of one batch (one a path or peer, timed in turns) as soon as it is done.

        Args:
            batches: token counts, each at least 1; each is asked for when the one before it has been yielded.
            paths: values of `moe_decode`'s `path`.
            peers: other libraries' layers, on the same weights and routings; left out of batches beyond their
                `most_tokens`.
            most_tokens: path -> the largest batch that it is measured at (default: any).
            on_stage: is told in words what goes on now.
            on_wrong: is told in words of a peer whose output is wrong; if it returns, the batch has no record of that
                peer. By default it raises.

        Raises:
            ArgumentError: bad batches, or weights that memory cannot hold.
            UnsupportedError: a path that does not run here.
            WarpringError: a path whose output is wrong, or a peer unless `on_wrong` returns.
        """
        if not paths or (isinstance(batches, Sequence) and (not batches or min(batches) < 1)):
            raise ArgumentError(
                f"LayerBench.run: needs batches of at least 1 token and at least one path; got {batches} "
                f"and {list(paths)}."
            )
        on_stage("read peak")
        peak_gbs = read_peak_gbs(self.device)
        sets: list[WeightSet] = []
        reserve = (1 - MEMORY_SHARE) * free_bytes(self.device)
        for num_tokens in batches:
            layers = self._layers(num_tokens)
            on_stage(f"weights of {len(layers)} layers")
            self._grow(sets, len(layers), paths, reserve, peers)
            on_stage(f"B={num_tokens}")
            able = [peer for peer in peers if num_tokens <= peer.most_tokens]
            some = [path for path in paths if num_tokens <= (most_tokens or {}).get(path, num_tokens)]
            yield self._measure(num_tokens, layers, sets, some, peak_gbs, able, on_wrong)

    def _layers(self, num_tokens: int) -> list[Routing]:
        """A routing of its own for every layer of a replay, as many as make the replay outgrow the cache."""
        least, most = self.layers or LAYERS[self.device.type]
        expert_bytes = one_expert(self.shape, self.format).nbytes
        routings: list[Routing] = []
        touched = 0
        while len(routings) < most and (len(routings) < least or touched < CACHE_MULTIPLE * cache_bytes(self.device)):
            seed = self.seed * most + len(routings)
            routing = make_routing(self.shape, num_tokens, self.routing, seed=seed, load=self.load)
            touched += routing.topk_idx[routing.topk_idx >= 0].unique().numel() * expert_bytes
            routings.append(routing.to(self.device))
        return routings

    def _grow(
        self, sets: list[WeightSet], wanted: int, paths: Sequence[str], reserve: float, peers: Sequence[Peer]
    ) -> None:
        """Add weight sets until there are `wanted`, or less than `reserve` bytes would stay free."""
        set_bytes = self.shape.num_experts * one_expert(self.shape, self.format).nbytes
        if "classical" in paths and self.format != "bf16":
            set_bytes += self.shape.num_experts * one_expert(self.shape, "bf16").nbytes
        packed = "tile" in paths or any(peer.takes_packed for peer in peers)
        own_copies = packed + sum(peer.copies_weights for peer in peers)
        set_bytes += own_copies * self.shape.num_experts * one_expert(self.shape, self.format).nbytes
        while len(sets) < wanted:
            free = free_bytes(self.device)
            if free - set_bytes < reserve:
                if sets:
                    return
                raise ArgumentError(
                    f"LayerBench.run: a layer {self.shape.size} in {self.format} needs {set_bytes / 1e9:.1f} GB, "
                    f"and {self.device} has {free / 1e9:.1f} GB free. Take a narrower format or fewer experts."
                )
            which = (self.shape, self.format, self.device, self.seed + len(sets))
            experts = random_experts(*which)
            in_tiles = random_packed(*which) if packed else None
            if "classical" in paths:
                prepare(experts)
            of_peers = {peer.name: peer.prepare(in_tiles if peer.takes_packed else experts) for peer in peers}
            sets.append(WeightSet(experts, in_tiles, of_peers))

    def _measure(
        self,
        num_tokens: int,
        layers: list[Routing],
        sets: list[WeightSet],
        paths: Sequence[str],
        peak_gbs: float,
        peers: Sequence[Peer],
        on_wrong: Callable[[str], object],
    ) -> list[Record]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        size = (len(layers), num_tokens, self.shape.hidden)
        x = torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        chosen = [sets[i % len(sets)] for i in range(len(layers))]
        variants: dict[str, list[Call]] = {
            path: [
                partial(moe_decode, x[i], chosen[i].of(path), r.topk_idx, r.topk_weights, out=out[i], path=path)
                for i, r in enumerate(layers)
            ]
            for path in paths
        }
        for peer in peers:
            variants[peer.name] = [
                peer.bind(chosen[i].of_peers[peer.name], x[i], r.topk_idx, r.topk_weights, out[i])
                for i, r in enumerate(layers)
            ]
        for name, said in self._wrong(variants, x, out, chosen, layers).items():
            (refuse if name in paths else on_wrong)(said)
            del variants[name]
        peers = [peer for peer in peers if peer.name in variants]
        measured = measure(variants, self.device, self.repeats, eager=[p.name for p in peers if not p.capturable])
        traffic = [count_traffic(weights.experts, r.topk_idx) for weights, r in zip(chosen, layers, strict=True)]
        note = f"{len(layers)} layers a replay, {min(len(sets), len(layers))} weight sets"
        if sum(t.unique_bytes for t in traffic) < CACHE_MULTIPLE * cache_bytes(self.device):
            note += "; all of them fit in the cache"
        named: dict[str, Peer | None] = {path: None for path in paths} | {peer.name: peer for peer in peers}
        return [self._record(p, num_tokens, measured[p], traffic, peak_gbs, note, peer) for p, peer in named.items()]

    def _wrong(
        self,
        variants: dict[str, list[Call]],
        x: torch.Tensor,
        out: torch.Tensor,
        chosen: list[WeightSet],
        layers: list[Routing],
    ) -> dict[str, str]:
        """The paths and peers whose first layer is not the exact one, and what is to be said of each."""
        wrong: dict[str, str] = {}
        exact = moe_exact(x[0], chosen[0].experts, layers[0].topk_idx, layers[0].topk_weights, torch.float32)
        for path, calls in variants.items():
            out.fill_(math.nan)
            given = calls[0]()
            # A peer may give a tensor of its own instead of writing `out`: a copy would be timed as its work.
            y = given if isinstance(given, torch.Tensor) else out[0]
            cosine = least_cosine(exact, y.float())
            if not cosine > LEAST_COSINE:
                wrong[path] = (
                    f"LayerBench.run: {path!r} gives a wrong result for {self.shape.size} {self.format}, "
                    f"B={x.shape[1]} (cosine {cosine:.4f} with the exact one); it was not timed. Please report this."
                )
        return wrong

    def _record(
        self,
        path: str,
        num_tokens: int,
        measured: Measured,
        traffic: list[Traffic],
        peak_gbs: float,
        note: str,
        peer: Peer | None,
    ) -> Record:
        unique = statistics.fmean(t.unique_bytes for t in traffic)
        fields = asdict(measured.timing)
        fields |= {"path": path} if peer is None else {"impl": peer.name}
        if peer is not None:
            note += f"; {peer.note}" + ("" if peer.capturable else "; called one by one, for no CUDA graph can hold it")
        if measured.launches is not None:
            fields["launches"] = measured.launches
        if path == "classical" and self.format != "bf16":
            note += "; reads a BF16 copy of the weights"
        if path in ("warp", "reference"):
            fields["requested_bytes"] = round(statistics.fmean(t.requested_bytes for t in traffic))
        return record(
            "decode",
            device=self.device,
            model=self.shape.name,
            format=self.format,
            num_tokens=num_tokens,
            topk=self.shape.topk,
            routing=self.routing,
            seed=self.seed,
            unique_bytes=round(unique),
            read_peak_gbs=round(peak_gbs, 1),
            fraction_of_peak=round(unique / measured.timing.p50_us / 1e3 / peak_gbs, 4),
            note=note,
            **fields,
        )


def least_cosine(exact: torch.Tensor, y: torch.Tensor) -> float:
    """The least cosine of any token's output with the exact one, [num_tokens, hidden] both.

    A token whose experts are all on other ranks has the exact output 0; then any other output counts as -1.
    """
    none = (exact == 0).all(dim=1)
    cosine = torch.nn.functional.cosine_similarity(exact, y, dim=1)
    cosine = torch.where(none, torch.where((y == 0).all(dim=1), 1.0, -1.0), cosine)
    return float(cosine.min())


def free_bytes(device: torch.device) -> int:
    """Memory that `device` can still give; all of the host's where the system does not tell what is available."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
