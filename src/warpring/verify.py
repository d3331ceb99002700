"""Accuracy of every path against FP64.

The yardstick is `moe_exact`: the layer in FP64, from the weights as they are stored. So the error is that of a path's
own roundings: BF16 between the projections and at the output for warp decode and the reference, MXFP8 activations
besides for the classical path. `Result` gives the error against the weights before they were quantised as well: that is
what a model sees, and there the rounding of the weights, which no path can undo, covers much of the difference.

The bounds are those published for warp decode: a minimum cosine, and a largest absolute difference of 2^-9. Both
presuppose something. A token's cosine averages the roundings of its elements, so it scatters in narrow layers: it is
promised from the published width on. 2^-9 is one step of BF16 between 1/4 and 1/2, and beyond 1 the last rounding alone
can exceed it: it is applied where no output reaches 1/2, to which synthetic inputs are scaled. For layers of any width
and scale there is a third bound, on the RMS relative error: BF16's unit of rounding, 2^-8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from warpring.activation import SILU, Activation
from warpring.decode import moe_decode
from warpring.errors import ArgumentError
from warpring.experts import Experts
from warpring.formats import FORMATS, get_format
from warpring.layout import PackedExperts, pack_experts, unpack_experts
from warpring.reference import moe_exact
from warpring.runtime.device import has_grouped_gemms

BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: Bounds on warp decode, on a GPU and on CPU cores, and on the reference; the classical path has none. The grouped path
#: has them on packed weights where its own GEMMs run, see `promises_bounds`.
BOUNDED_PATHS = ("warp", "tile", "cores", "reference")
MIN_COSINE = 0.999996
MAX_ABS_DIFF = 2.0**-9
MAX_RMS_REL_ERROR = 2.0**-8
#: Paths that run on packed experts: what `moe_decode` calls them.
PACKED_PATHS = {"tile": "tile", "grouped_packed": "grouped"}
#: `MIN_COSINE` is promised for layers at least so wide.
COSINE_HIDDEN = 2048
#: `MAX_ABS_DIFF` applies where every exact output is smaller than this.
ABS_DIFF_SCALE = 0.5
#: RMS of the outputs of synthetic inputs: the largest of 10^5 normal values is then below `ABS_DIFF_SCALE`.
SYNTHETIC_RMS = 2.0**-4


@dataclass(frozen=True)
class Accuracy:
    """How far outputs are from exact ones.

    Attributes:
        cosine_min: smallest cosine similarity of a token's output with the exact one.
        max_abs_diff: largest absolute difference of an element.
        rms_rel_error: RMS of the difference / RMS of the exact outputs, over all tokens.
        output_max: largest magnitude of an exact output.
    """

    cosine_min: float
    max_abs_diff: float
    rms_rel_error: float
    output_max: float

    @property
    def cosine_met(self) -> bool:
        return self.cosine_min > MIN_COSINE

    @property
    def abs_diff_met(self) -> bool | None:
        """Whether `MAX_ABS_DIFF` holds; None where the outputs are too large for it to apply."""
        return self.max_abs_diff <= MAX_ABS_DIFF if self.output_max < ABS_DIFF_SCALE else None

    @property
    def rms_met(self) -> bool:
        return self.rms_rel_error <= MAX_RMS_REL_ERROR


@dataclass(frozen=True)
class LayerInputs:
    """One layer's experts before quantising (format bf16), and a batch that reaches them.

    Attributes:
        dense: the experts in bf16; `quantized` gives them in any format.
        x: [num_tokens, hidden] bf16.
        topk_idx: [num_tokens, topk] int64.
        topk_weights: [num_tokens, topk] float32.
    """

    dense: Experts
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def quantized(self, format: str) -> Experts:
        """The experts in `format`, quantised anew from bf16."""
        fmt = get_format(format)
        return replace(self.dense, w13=fmt.quantize(self.dense.w13.data), w2=fmt.quantize(self.dense.w2.data))

    def to(self, device: torch.device | str) -> LayerInputs:
        """The same layer and batch on another device."""
        return LayerInputs(
            self.dense.to(device), self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device)
        )


@dataclass(frozen=True)
class Inputs:
    """What a report runs on: `kind` "synthetic" or "recorded", the model's name, its layers."""

    kind: str
    model: str
    layers: tuple[LayerInputs, ...]

    def to(self, device: torch.device | str) -> Inputs:
        """The same layers on another device."""
        return replace(self, layers=tuple(layer.to(device) for layer in self.layers))

    @property
    def num_tokens(self) -> int:
        return min(layer.x.shape[0] for layer in self.layers)


@dataclass(frozen=True)
class Result:
    """One path at one batch; of several layers the worst figures.

    Attributes:
        inputs, model, hidden, format, path, num_tokens: what ran.
        accuracy: against FP64 from the stored weights.
        accuracy_dense: against FP64 from the weights before quantising.
        error_factor_vs_classical: the classical path's RMS relative error / this one's, against the stored weights.
        error_factor_dense: the same, both against the weights before quantising.
        bounded: whether the path promises bounds where it ran.
    """

    inputs: str
    model: str
    hidden: int
    format: str
    path: str
    num_tokens: int
    accuracy: Accuracy
    accuracy_dense: Accuracy
    error_factor_vs_classical: float
    error_factor_dense: float
    bounded: bool

    @property
    def bounds_met(self) -> bool:
        """Whether every bound that the path promises here is met."""
        if not self.bounded:
            return True
        found = self.accuracy
        cosine = found.cosine_met or self.hidden < COSINE_HIDDEN
        return cosine and found.abs_diff_met is not False and found.rms_met


def promises_bounds(path: str, device: torch.device) -> bool:
    """Whether a path promises bounds on its error there.

    On packed weights the grouped path does on Hopper, where its own GEMMs keep sums in FP32; elsewhere torch's give
    gate, up and each expert's output in BF16.
    """
    return path in BOUNDED_PATHS or (path == "grouped_packed" and has_grouped_gemms(device))


def compare(y: torch.Tensor, exact: torch.Tensor) -> Accuracy:
    """Accuracy of outputs `y` [num_tokens, hidden]; a NaN in `y` gives NaN figures, which meet no bound.

    Raises:
        ArgumentError: shapes that differ, no token, or exact outputs that are all zero or not finite: no error is
            relative to them.
    """
    y, exact = y.double(), exact.double()
    if y.shape != exact.shape or y.dim() != 2 or not y.shape[0]:
        raise ArgumentError(
            f"compare: y and exact must both be [num_tokens >= 1, hidden]; got {list(y.shape)} and {list(exact.shape)}."
        )
    norm = math.sqrt(float(exact.square().sum()))
    if not 0 < norm < math.inf:
        raise ArgumentError(
            f"compare: exact outputs must be finite and not all zero; got a norm of {norm}. Take other inputs."
        )
    # A token without any expert has output zero, and no angle: it counts as equal or as opposite.
    products = y.square().sum(1).sqrt() * exact.square().sum(1).sqrt()
    both_zero = (y == 0).all(1) & (exact == 0).all(1)
    cosine = torch.where(products == 0, torch.where(both_zero, 1.0, -1.0), (y * exact).sum(1) / products)
    diff = (y - exact).abs()
    return Accuracy(
        cosine_min=float(cosine.min()),
        max_abs_diff=float(diff.max()),
        rms_rel_error=math.sqrt(float(diff.square().sum())) / norm,
        output_max=float(exact.abs().max()),
    )


def accuracy(
    x: torch.Tensor, experts: Experts | PackedExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor, path: str
) -> Accuracy:
    """Accuracy of one path of `moe_decode` against FP64 from the stored weights; arguments and errors are its own.

    `PackedExperts` are unpacked for FP64, and for every path but "tile" and "grouped_packed": "grouped" on packed ones.
    """
    rows = unpack_experts(experts) if isinstance(experts, PackedExperts) else experts
    y = moe_decode(
        x, experts if path in PACKED_PATHS else rows, topk_idx, topk_weights, path=PACKED_PATHS.get(path, path)
    )
    return compare(y, moe_exact(x, rows, topk_idx, topk_weights))


def synthetic_inputs(
    num_tokens: int,
    *,
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    activation: Activation = SILU,
    model: str | None = None,
    seed: int = 0,
) -> Inputs:
    """One layer of normal weights and activations, outputs of RMS `SYNTHETIC_RMS`.

    x ~ N(0, 1) as after an RMS norm, w13 ~ N(0, 1 / hidden), routing uniform, weights a softmax of normal scores; all
    drawn on the CPU, so that equal seeds give equal inputs everywhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    topk_weights = normal(num_tokens, topk).softmax(1)
    act_rms = activation(normal(1 << 16), normal(1 << 16)).square().mean().sqrt()
    combined = topk_weights.square().sum(1).mean().sqrt()
    w2_std = SYNTHETIC_RMS / (act_rms * combined) / intermediate**0.5
    dense = Experts.from_dense(
        normal(num_experts, 2 * intermediate, hidden) / hidden**0.5,
        normal(num_experts, hidden, intermediate) * w2_std,
        activation=activation,
    )
    layer = LayerInputs(
        dense,
        x=normal(num_tokens, hidden).bfloat16(),
        topk_idx=torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :topk],
        topk_weights=topk_weights,
    )
    return Inputs("synthetic", model or f"h{hidden}xi{intermediate}xe{num_experts}xk{topk}", (layer,))


def report(
    inputs: Inputs,
    *,
    paths: Sequence[str],
    formats: Sequence[str] = tuple(FORMATS),
    batches: Sequence[int] = BATCHES,
) -> Iterator[Result]:
    """Every path at every batch in every format; a batch of B is the first B tokens of the inputs.

    Args:
        inputs: on the device that is to run.
        paths: of `moe_decode`, or of `PACKED_PATHS`. The classical path runs in any case, as the factors need it.
        formats: names of `warpring.formats.FORMATS`.
        batches: token counts, each at least 1 and at most `inputs.num_tokens`.

    Raises:
        ArgumentError, UnsupportedError: a batch beyond the inputs; and what `moe_decode` raises.
    """
    if not batches or min(batches) < 1 or max(batches) > inputs.num_tokens:
        raise ArgumentError(
            f"report: batches must be 1 to {inputs.num_tokens} tokens, as many as the inputs hold; got {list(batches)}."
        )
    most = max(batches)
    layers = [
        replace(layer, x=layer.x[:most], topk_idx=layer.topk_idx[:most], topk_weights=layer.topk_weights[:most])
        for layer in inputs.layers
    ]
    dense = [moe_exact(layer.x, layer.dense, layer.topk_idx, layer.topk_weights) for layer in layers]
    for format in formats:
        experts = [layer.quantized(format) for layer in layers]
        exact = [
            moe_exact(layer.x, stored, layer.topk_idx, layer.topk_weights)
            for layer, stored in zip(layers, experts, strict=True)
        ]
        for batch in batches:
            found = {
                path: _run(path, layers, experts, (exact, dense), batch)
                for path in dict.fromkeys([*paths, "classical"])
            }
            classical, classical_dense = found["classical"]
            for path in paths:
                ours, ours_dense = found[path]
                yield Result(
                    inputs.kind,
                    inputs.model,
                    layers[0].dense.hidden,
                    format,
                    path,
                    batch,
                    ours,
                    ours_dense,
                    _ratio(classical.rms_rel_error, ours.rms_rel_error),
                    _ratio(classical_dense.rms_rel_error, ours_dense.rms_rel_error),
                    promises_bounds(path, layers[0].x.device),
                )


def _run(
    path: str,
    layers: Sequence[LayerInputs],
    experts: Sequence[Experts],
    yardsticks: Sequence[Sequence[torch.Tensor]],
    batch: int,
) -> tuple[Accuracy, ...]:
    """Accuracy of one path over all layers against each yardstick (one exact output a layer)."""
    outputs = [
        moe_decode(
            layer.x[:batch],
            pack_experts(stored) if path in PACKED_PATHS else stored,
            layer.topk_idx[:batch],
            layer.topk_weights[:batch],
            path=PACKED_PATHS.get(path, path),
        )
        for layer, stored in zip(layers, experts, strict=True)
    ]
    return tuple(
        worst([compare(y, exact[:batch]) for y, exact in zip(outputs, exacts, strict=True)]) for exacts in yardsticks
    )


def worst(found: Sequence[Accuracy]) -> Accuracy:
    """The worst of each figure; a NaN is worse than any number."""
    figures = torch.tensor(
        [(-a.cosine_min, a.max_abs_diff, a.rms_rel_error, a.output_max) for a in found], dtype=torch.float64
    )
    cosine, diff, rms, output = map(float, figures.amax(0))
    return Accuracy(-cosine, diff, rms, output)


def _ratio(classical: float, ours: float) -> float:
    return classical / ours if ours else math.inf
