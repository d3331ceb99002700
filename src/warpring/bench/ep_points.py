"""Which expert-parallel record stands for which point: of what was measured again, the newest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warpring.bench.markdown import on_latest_gpu
from warpring.bench.records import Record
from warpring.bench.shapes import MODELS, LayerShape

#: The ranks that the bar is set for, and what bench/expert_parallel.py measures.
NUM_RANKS = 2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BAR_MODELS = ("deepseek-v4-flash", "glm-5.2")
BAR_FORMATS = ("fp8_block", "mxfp4")
#: Experts a rank, and the end of the model's name, of the load of one rank of eight.
EIGHTH, EIGHTH_NAME = 32, "-ep8"
#: One knob at a time is turned on this layer.
ABLATION_MODEL, ABLATION_FORMAT, ABLATION_TOKENS = BAR_MODELS[0], "mxfp4", (1, 8, 32, 256)
#: An H200's driver grants 8 multiprocessors at least, and multiples of 8: of 4 it makes 8, of 12 16.
COMM_SMS, BLOCK_SIZES, RING_BLOCKS, SKEWS = (8, 16, 24, 32), (8, 16, 32, 64), (16, 32, 64, 128), (1.25, 1.5, 2.0)
#: What is no peer: the layer, and the baselines of the same process.
OWN = ("warpring", "shared", "nccl")
#: Field of a record that holds the value of a knob.
_FIELDS = {"comm_sms": "comm_sms", "num_slots": "ring_blocks", "block_m": "block_m", "partition": "note"}


@dataclass(frozen=True)
class Key:
    """A point. `knob` names what was not left to the layer, and `value` is what it was set to.

    `format` is that of the weights, but for NCCL's all-to-all baseline always "bf16".
    """

    model: str
    format: str
    tokens: int
    impl: str = "warpring"
    activation: str = "fp8"
    shared: str = "none"
    skew: float = 1.0
    knob: str = ""
    value: float | str | None = None


Points = dict[Key, Record]


def points(records: Iterable[Record], num_ranks: int = NUM_RANKS) -> Points:
    """The newest record of each point with uniform routing, on the GPU that was measured last."""
    ours = [rec for rec in records if rec["bench"] == "expert_parallel" and "gpu" in rec]
    found: Points = {}
    for rec in on_latest_gpu(ours):
        if rec["num_ranks"] != num_ranks or rec.get("routing", "uniform") != "uniform":
            continue
        key = key_of(rec)
        if key not in found or rec["date"] >= found[key]["date"]:
            found[key] = rec
    return found


def key_of(rec: Record) -> Key:
    """The point of a record."""
    knob = rec.get("knob", "")
    return Key(
        rec["model"],
        rec["format"],
        rec["tokens_per_rank"],
        rec["impl"],
        rec.get("activation", "fp8"),
        rec.get("shared_expert", "none"),
        float(rec.get("asked_skew", 1.0)),
        knob,
        rec.get(_FIELDS[knob]) if knob in _FIELDS else None,
    )


def floor_us(rec: Record) -> float | None:
    """Unique weight bytes at the read peak, or bytes over the link at its peak where that is more."""
    return max(rec["weight_floor_us"], rec.get("wire_floor_us", 0.0)) if "weight_floor_us" in rec else None


def layer_of(model: str, num_ranks: int = NUM_RANKS) -> LayerShape | None:
    """The whole layer that a record's model names; None where the name is unknown."""
    base = MODELS.get(model.removesuffix(EIGHTH_NAME))
    if base is None or not model.endswith(EIGHTH_NAME):
        return base
    return eighth(base, num_ranks)


def eighth(shape: LayerShape, num_ranks: int) -> LayerShape:
    """The layer of which each rank holds as many experts as one of eight ranks would."""
    return replace(shape, name=f"{shape.name}{EIGHTH_NAME}", num_experts=EIGHTH * num_ranks)
