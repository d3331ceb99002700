"""What shared experts cost: in the launch of the routed ones, or as a layer of their own whose output is added.

Both read the same packed weights in memory, so what differs is launches: "fused" is one; "separate" is the routed
layer, the shared one with the gate as its routing weight, and torch's addition. "none" is the routed layer alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from warpring.bench.inputs import Routing, make_routing, one_expert, random_experts, random_packed
from warpring.bench.layer import CACHE_MULTIPLE, LAYERS, LEAST_COSINE, MEMORY_SHARE, free_bytes, least_cosine
from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, on_latest_gpu, provenance
from warpring.bench.read_peak import read_peak_gbs
from warpring.bench.records import Record, newest, record
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call, Measured, cache_bytes, measure
from warpring.decode import moe_decode
from warpring.errors import WarpringError
from warpring.layout import PackedExperts, unpack_experts, unpack_shared
from warpring.reference import moe_exact

KINDS = ("none", "fused", "separate")
MOST_SETS = 8


@dataclass(frozen=True)
class _Layer:
    """A layer of a replay: weights, input, routing, and where outputs go."""

    packed: PackedExperts
    x: torch.Tensor
    routing: Routing
    gate: torch.Tensor
    out: torch.Tensor
    out_shared: torch.Tensor

    def call(self, kind: str, path: str) -> Call:
        """The layer with its shared experts run in this way."""
        packed, idx, weights = self.packed, self.routing.topk_idx, self.routing.topk_weights
        if kind == "fused":
            return partial(moe_decode, self.x, packed, idx, weights, shared_weights=self.gate, out=self.out, path=path)
        num_experts, num_shared = packed.num_experts, packed.num_shared
        routed = partial(moe_decode, self.x, packed.some(0, num_experts), idx, weights, out=self.out, path=path)
        if kind == "none":
            return routed
        own = packed.some(num_experts, num_experts + num_shared)
        shared = partial(moe_decode, self.x, own, *self.shared_routing(), out=self.out_shared, path=path)

        def separate() -> None:
            routed()
            shared()
            self.out.add_(self.out_shared)

        return separate

    def shared_routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights that route every token to every shared expert, weighted by its gate."""
        size = (len(self.x), self.packed.num_shared)
        every = torch.arange(size[1], device=self.x.device).expand(size)
        return every.contiguous(), self.gate[:, None].expand(size).contiguous()

    def unique_bytes(self, kind: str) -> int:
        """Bytes that must move once: each expert that is wanted, x, out."""
        idx = self.routing.topk_idx
        wanted = int(idx[idx >= 0].unique().numel()) + (0 if kind == "none" else self.packed.num_shared)
        return wanted * self.packed.bytes_per_expert + self.x.nbytes + self.out.nbytes


@dataclass(frozen=True)
class SharedBench:
    """What to bench.

    Attributes:
        shape: the routed experts.
        format: number format of all weights.
        num_shared: shared experts of the routed ones' width; one that is m times as wide counts m.
        path: of `moe_decode`; "tile", or "grouped" on a CPU.
        device: where.
        repeats: replays that count.
        seed: of weights, inputs and routings.
    """

    shape: LayerShape
    format: str
    num_shared: int = 1
    path: str = "tile"
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    repeats: int = 30
    seed: int = 0

    def run(self, batches: Sequence[int]) -> Iterator[list[Record]]:
        """Yields the records of one batch, one for each of `KINDS`, timed in turns.

        Raises:
            WarpringError: a wrong output; it is not timed.
        """
        peak_gbs = read_peak_gbs(self.device)
        sets = self._weight_sets()
        for num_tokens in batches:
            layers = self._layers(num_tokens, sets)
            self._check(layers[0])
            variants = {kind: [layer.call(kind, self.path) for layer in layers] for kind in KINDS}
            measured = measure(variants, self.device, self.repeats)
            yield [self._record(kind, layers, len(sets), measured[kind], peak_gbs) for kind in KINDS]

    def _weight_sets(self) -> list[PackedExperts]:
        """Some, or as many as memory holds: a shared expert is read anew only after those of all other sets."""
        expert_bytes = one_expert(self.shape, self.format).nbytes
        wanted = min(MOST_SETS, LAYERS[self.device.type][0])
        set_bytes = (self.shape.num_experts + self.num_shared) * expert_bytes
        # The check unpacks one of them.
        held = int(MEMORY_SHARE * free_bytes(self.device)) // set_bytes - 1
        return [self._weight_set(self.seed + number) for number in range(max(1, min(wanted, held)))]

    def _weight_set(self, seed: int) -> PackedExperts:
        shared = replace(self.shape, num_experts=self.num_shared, topk=1, routed_over=0)
        beside = random_experts(shared, self.format, self.device, seed + (1 << 20))
        return random_packed(self.shape, self.format, self.device, seed, beside)

    def _layers(self, num_tokens: int, sets: Sequence[PackedExperts]) -> list[_Layer]:
        """As many as make the replay outgrow the cache, each with a routing of its own."""
        least, most = LAYERS[self.device.type]
        generator = torch.Generator().manual_seed(self.seed)
        layers: list[_Layer] = []
        touched = 0
        while len(layers) < most and (len(layers) < least or touched < CACHE_MULTIPLE * cache_bytes(self.device)):
            routing = make_routing(self.shape, num_tokens, seed=self.seed * most + len(layers))
            packed = sets[len(layers) % len(sets)]
            x = torch.randn(num_tokens, self.shape.hidden, generator=generator).to(self.device, torch.bfloat16)
            gate = torch.randn(num_tokens, generator=generator).sigmoid().to(self.device)
            out = torch.full_like(x, math.nan)
            layers.append(_Layer(packed, x, routing.to(self.device), gate, out, out.clone()))
            touched += layers[-1].unique_bytes("none")
        return layers

    def _check(self, layer: _Layer) -> None:
        """Raise unless layer and shared experts give what FP32 gives, in one launch and in two."""
        idx, weights = layer.routing.topk_idx, layer.routing.topk_weights
        exact = moe_exact(layer.x, unpack_experts(layer.packed), idx, weights, torch.float32)
        shared = unpack_shared(layer.packed)
        if shared is not None:
            exact += moe_exact(layer.x, shared, *layer.shared_routing(), torch.float32)
        for kind in KINDS[1:]:
            layer.out.fill_(math.nan)
            layer.call(kind, self.path)()
            cosine = least_cosine(exact, layer.out.float())
            if not cosine > LEAST_COSINE:
                raise WarpringError(
                    f"SharedBench.run: {kind} shared experts give a wrong result for {self.shape.size} {self.format}, "
                    f"B={len(layer.x)} (cosine {cosine:.4f} with the exact one); nothing was timed. Please report this."
                )

    def _record(
        self, kind: str, layers: Sequence[_Layer], num_sets: int, measured: Measured, peak_gbs: float
    ) -> Record:
        unique = statistics.fmean(layer.unique_bytes(kind) for layer in layers)
        fields = asdict(measured.timing)
        if measured.launches is not None:
            fields["launches"] = measured.launches
        return record(
            "shared",
            device=self.device,
            model=self.shape.name,
            format=self.format,
            path=self.path,
            num_tokens=len(layers[0].x),
            topk=self.shape.topk,
            routing="uniform",
            num_shared=self.num_shared,
            shared_expert=kind,
            seed=self.seed,
            unique_bytes=round(unique),
            read_peak_gbs=round(peak_gbs, 1),
            fraction_of_peak=round(unique / measured.timing.p50_us / 1e3 / peak_gbs, 4),
            note=f"{len(layers)} layers a replay, {min(num_sets, len(layers))} weight sets; gated",
            **fields,
        )


def shared_table(records: Sequence[Record]) -> str:
    """Microseconds a layer with shared experts in the same launch and apart, on the GPU that was measured last."""
    ours = on_latest_gpu([rec for rec in records if rec["bench"] == "shared" and "gpu" in rec])
    found = {tuple(rec[name] for name in _KEYS): rec for rec in newest(ours, _KEYS)}
    points = list(dict.fromkeys(key[:-1] for key in found))
    rows: list[list[str]] = []
    for point in sorted(points):
        none, fused, separate = (found.get((*point, kind)) for kind in KINDS)
        model, format, num_shared, num_tokens = point
        times = [NOT_MEASURED if rec is None else f"{rec['p50_us']:.1f}" for rec in (none, fused, separate)]
        faster = f"{separate['p50_us'] / fused['p50_us']:.2f}" if fused and separate else DASH
        share = f"{100 * fused['fraction_of_peak']:.0f} %" if fused and "fraction_of_peak" in fused else DASH
        rows.append([f"{model}, {format}", str(num_shared), str(num_tokens), *times, faster, share])
    header = (
        "layer",
        "shared",
        "tokens",
        "without, µs",
        "fused, µs",
        "separate, µs",
        "separate ÷ fused",
        "fused, of peak",
    )
    return markdown(header, rows or [[NOT_MEASURED] + [DASH] * 7]) + provenance(list(found.values()))


_KEYS = ("model", "format", "num_shared", "num_tokens", "shared_expert")
