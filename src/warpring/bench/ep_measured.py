"""Measured expert-parallel layers beside what the simulation says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warpring.bench.ep_bar import p50_us
from warpring.bench.ep_points import BAR_FORMATS, BAR_MODELS, NUM_RANKS, Key, layer_of, points
from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, provenance
from warpring.bench.records import Record
from warpring.expert_parallel.machines import DEVICE_NAMES, H200, Machine, calibration_of
from warpring.expert_parallel.partition import DEFAULT_COMM_SMS
from warpring.expert_parallel.simulate import Workload, predict, usual_block_m

#: Points that the fit does not see: a model, and token counts of the other ones.
HELD_OUT_MODEL, HELD_OUT_TOKENS = "glm-5.2", (4, 32)
HELD_OUT = f"{HELD_OUT_MODEL} of any size, and {HELD_OUT_TOKENS[0]} and {HELD_OUT_TOKENS[1]} tokens a rank of others"
#: Rows of the table of predictions.
PREDICTED_TOKENS = (1, 8, 32, 128, 256)
_NOT_FITTED = "Not fitted to measured layers: rates are from probes and data sheets, shares and costs are estimates."


@dataclass(frozen=True)
class Point:
    """A measured layer: its load, its partition, its time."""

    model: str
    load: Workload
    comm_sms: int
    measured_us: float

    @property
    def held_out(self) -> bool:
        """Whether the fit must not see it."""
        return self.model.startswith(HELD_OUT_MODEL) or self.load.tokens_per_rank in HELD_OUT_TOKENS


def load_of(key: Key, rec: Record) -> Workload | None:
    """What the simulation is asked for a record; None where it has no model of the layer."""
    layer = layer_of(key.model, rec["num_ranks"])
    if (
        layer is None
        or key.impl != "warpring"
        or key.shared == "separate"
        or key.knob not in ("", "comm_sms", "block_m")
    ):
        return None
    num_shared = layer.shared_experts if key.shared == "fused" else 0
    block_m = rec.get("block_m") or usual_block_m(layer.num_experts, layer.topk, rec["num_ranks"])
    return Workload(
        layer.hidden, layer.intermediate, layer.num_experts, layer.topk, rec["num_ranks"], key.tokens, key.format,
        key.activation, key.skew, block_m, num_shared,
    )  # fmt: skip


def points_of(records: Iterable[Record], num_ranks: int) -> list[Point]:
    """The measured layers among the records that the simulation is a model of: ours, in partitions."""
    found: list[Point] = []
    for key, rec in points(records, num_ranks).items():
        load, time = load_of(key, rec), p50_us(rec)
        if load is not None and time is not None and "comm_sms" in rec and rec.get("overlap", True):
            found.append(Point(key.model, load, rec["comm_sms"], time))
    return found


def ep_predicted(records: Sequence[Record]) -> str:
    """A row a point of the bar: predicted and measured time, and whether the fit has seen it; below, how good it is."""
    found = points(records)
    calibration = calibration_of(DEVICE_NAMES["h200"])
    machine = H200 if calibration is None else calibration.machine
    used: list[Record] = []
    rows: list[list[str]] = []
    for model in BAR_MODELS:
        for format, activation in (*((format, "fp8") for format in BAR_FORMATS), (BAR_FORMATS[-1], "bf16")):
            for tokens in PREDICTED_TOKENS:
                key = Key(model, format, tokens, activation=activation)
                rec = found.get(key)
                used += [rec] if rec else []
                rows.append([model, format, activation, str(tokens), *_compared(machine, key, rec)])
    header = (
        "model",
        "weights",
        "activations",
        "tokens a rank",
        "comm SMs",
        "predicted µs",
        "measured µs",
        "off by",
        "fitted to it",
    )
    words = _NOT_FITTED if calibration is None else calibration.statement
    return markdown(header, rows) + provenance(used) + f"\n{words}\n"


def _compared(machine: Machine, key: Key, rec: Record | None) -> list[str]:
    """Partition, predicted and measured time, the difference, and whether the fit has seen the point."""
    measured = p50_us(rec)
    comm_sms = DEFAULT_COMM_SMS if rec is None else rec.get("comm_sms", DEFAULT_COMM_SMS)
    load = load_of(key, {"num_ranks": NUM_RANKS} if rec is None else rec)
    if load is None:
        return [str(comm_sms), DASH, NOT_MEASURED, DASH, DASH]
    predicted = predict(machine, load, comm_sms).total_us
    if measured is None:
        return [str(comm_sms), f"{predicted:.0f}", NOT_MEASURED, DASH, DASH]
    seen = "no" if Point(key.model, load, comm_sms, measured).held_out else "yes"
    return [str(comm_sms), f"{predicted:.0f}", f"{measured:.1f}", f"{100 * (predicted / measured - 1):+.1f} %", seen]
