"""Routing: router logits -> (topk_idx, topk_weights), one frozen `Router` description a model.

    s = score_fn(logits)                                       sigmoid, or sqrt(softplus)
    e = the topk experts of largest s + correction_bias        where num_groups > 1, of the best groups only
    w = s[e] / sum(s[e]) * scaling_factor                      the division only where renormalize

For score_fn "softmax" experts are chosen by their logits: softmax is increasing, so this is the same choice, but
exact and equal on every device. With renormalize it is the softmax of the chosen logits, which is how gpt-oss
states it: `exp(l_i) / sum_all` over `sum_top / sum_all` cancels `sum_all`, so one description serves both.

Two rules make the choice reproducible where `torch.topk` promises nothing. Equal scores go to the lowest expert id
(and equal groups to the lowest group). A NaN ranks as +inf: the expert that made it is chosen, so that the NaN
reaches the token's weights and is seen, and ids stay distinct and in range whatever the logits hold.

Nothing here reads a tensor on the host: routing is asynchronous on a GPU and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch

from warpring.errors import ArgumentError, UnsupportedError

ScoreFn = Literal["softmax", "sigmoid", "sqrt_softplus"]

# Added to the sum of sigmoid and sqrt-softplus scores before dividing, as the models' own code does: where every
# chosen score underflowed to zero, the weights are zero and not NaN.
_RENORMALIZE_EPS = 1e-20


@dataclass(frozen=True)
class Router:
    """How a model turns router logits into experts and their weights.

    Attributes:
        topk: experts a token.
        score_fn: "softmax" over the experts, "sigmoid" or "sqrt_softplus" (`sqrt(log(1 + exp(logit)))`) of each.
        renormalize: divide the chosen scores by their sum.
        scaling_factor: multiplies the weights, after renormalising.
        num_groups: groups of consecutive experts, of equal size. A group's score is the sum of its two best
            experts' scores, correction bias included. Not with "softmax".
        topk_groups: groups a token may choose its experts from.
    """

    topk: int
    score_fn: ScoreFn = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        if self.score_fn not in ("softmax", "sigmoid", "sqrt_softplus"):
            raise ArgumentError(
                f"Router: score_fn must be 'softmax', 'sigmoid' or 'sqrt_softplus'; got {self.score_fn!r}. "
                "For the softmax of the top-k use 'softmax' with renormalize=True."
            )
        if self.topk < 1:
            raise ArgumentError(f"Router: topk must be at least 1; got {self.topk}.")
        if not (math.isfinite(self.scaling_factor) and self.scaling_factor > 0):
            raise ArgumentError(f"Router: scaling_factor must be finite and > 0; got {self.scaling_factor}.")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ArgumentError(
                f"Router: topk_groups must be 1 to num_groups = {self.num_groups}; got {self.topk_groups}. "
                "Without groups leave both at 1."
            )
        if self.score_fn == "softmax" and self.num_groups > 1:
            raise ArgumentError(
                f"Router: num_groups must be 1 with score_fn 'softmax'; got {self.num_groups}. "
                "Groups are ranked by sigmoid or sqrt-softplus scores."
            )

    @classmethod
    def from_config(cls, config: object) -> Router:
        """The router of a Hugging Face model.

        Args:
            config: a transformers config object, or the parsed `config.json`. A model that wraps its language
                model (`text_config`) is looked into.

        Raises:
            UnsupportedError: a model type, or a way of routing, that is not known here; the message names it.
            ArgumentError: a known model type that lacks a field.
        """
        text_config = _read(config, "text_config", None)
        if text_config is not None:
            config = text_config
        model_type = _read(config, "model_type", None)
        topk = _read_int(config, "num_experts_per_tok") if model_type in _MODEL_TYPES else 0
        if model_type in _SOFTMAX:
            return cls(topk, renormalize=bool(_read(config, "norm_topk_prob")))
        if model_type in _SOFTMAX_RENORMALIZED:
            return cls(topk)
        if model_type in _SIGMOID_GROUPED:
            _refuse_unless(config, "scoring_func", "sigmoid")
            _refuse_unless(config, "topk_method", "noaux_tc")
            return cls(
                topk,
                "sigmoid",
                renormalize=bool(_read(config, "norm_topk_prob")),
                scaling_factor=_read_float(config, "routed_scaling_factor"),
                num_groups=_read_int(config, "n_group"),
                topk_groups=_read_int(config, "topk_group"),
            )
        if model_type in _SIGMOID_RENORMALIZED:
            _refuse_unless(config, "scoring_func", "sigmoid")
            return cls(topk, "sigmoid")
        if model_type in _SQRT_SOFTPLUS:
            _refuse_unless(config, "scoring_func", "sqrtsoftplus")
            return cls(topk, "sqrt_softplus", scaling_factor=_read_float(config, "routed_scaling_factor"))
        raise UnsupportedError(
            f"Router.from_config: model_type must be one of {', '.join(sorted(_MODEL_TYPES))}; got {model_type!r}. "
            "Describe its router with Router(...)."
        )

    def route(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [num_tokens, num_experts], any float dtype, read as FP32.
            correction_bias: [num_experts] or None: added to the scores for the choice alone, never to the weights.
                Not with "softmax".

        Returns:
            topk_idx: [num_tokens, topk] int32, distinct, best first; equal scores by ascending id.
            topk_weights: [num_tokens, topk] FP32. NaN where the token's logits hold a NaN: with renormalize or
                "softmax" in every slot, otherwise in the slots of those experts.

        Asynchronous on the current stream; graph-capturable.

        Raises:
            ArgumentError: a shape, dtype or device that does not fit; fewer experts than topk or than the groups need.
        """
        self._check(logits, correction_bias)
        logits = logits.float()
        if self.score_fn == "softmax":
            topk_idx = _largest(logits, self.topk)
        else:
            choice = self._scores(logits)
            if correction_bias is not None:
                choice = choice + correction_bias.float()
            topk_idx = self._choose_in_groups(choice) if self.num_groups > 1 else _largest(choice, self.topk)
        return topk_idx.int(), self._weigh(logits, topk_idx)

    def weights_for(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """Weights of experts that were chosen elsewhere: DeepSeek-V4's hash layers look them up by token id.

        Args:
            logits: [num_tokens, num_experts], any float dtype, read as FP32.
            topk_idx: [num_tokens, any number] int32 or int64. An id outside [0, num_experts), so -1 too, is an
                unused slot: its weight is 0 and takes no part in the renormalising.

        Returns:
            [num_tokens, any number] FP32, as `route` gives them.

        Asynchronous on the current stream; graph-capturable.

        Raises:
            ArgumentError: a shape, dtype or device that does not fit.
        """
        _check_logits("Router.weights_for", logits)
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"Router.weights_for: topk_idx must be int32 or int64; got {topk_idx.dtype}.")
        if topk_idx.dim() != 2 or topk_idx.shape[0] != logits.shape[0] or topk_idx.device != logits.device:
            raise ArgumentError(
                f"Router.weights_for: topk_idx must be [num_tokens = {logits.shape[0]}, topk] on {logits.device}, as "
                f"logits are; got {list(topk_idx.shape)} on {topk_idx.device}."
            )
        num_experts = logits.shape[1]
        used = (topk_idx >= 0) & (topk_idx < num_experts)
        # Unused slots read one more column of -inf, whose score is zero under every score_fn.
        padded = torch.nn.functional.pad(logits.float(), (0, 1), value=-math.inf)
        weights = self._weigh(padded, topk_idx.long().where(used, num_experts))
        return weights.masked_fill(~used, 0.0)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.score_fn == "sigmoid":
            return logits.sigmoid()
        return torch.nn.functional.softplus(logits).sqrt()

    def _weigh(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        if self.score_fn == "softmax":
            if self.renormalize:
                weights = logits.gather(1, topk_idx).softmax(dim=-1)
            else:
                weights = logits.softmax(dim=-1).gather(1, topk_idx)
        else:
            weights = self._scores(logits.gather(1, topk_idx))
            if self.renormalize:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + _RENORMALIZE_EPS)
        return weights * self.scaling_factor

    def _choose_in_groups(self, choice: torch.Tensor) -> torch.Tensor:
        num_tokens, num_experts = choice.shape
        group_size = num_experts // self.num_groups
        best_two = choice.reshape(num_tokens, self.num_groups, group_size).topk(2, dim=-1).values
        groups = _largest(best_two.sum(dim=-1), self.topk_groups).sort(dim=-1).values
        # The experts of the chosen groups, ids ascending so that the tie rule holds across groups. Picking among
        # these alone, instead of lowering all others to -inf, holds for biases of -inf too.
        members = torch.arange(group_size, device=choice.device)
        candidates = (groups[:, :, None] * group_size + members).flatten(1)
        return candidates.gather(1, _largest(choice.gather(1, candidates), self.topk))

    def _check(self, logits: torch.Tensor, correction_bias: torch.Tensor | None) -> None:
        _check_logits("Router.route", logits)
        num_experts = logits.shape[1]
        if num_experts < self.topk:
            raise ArgumentError(
                f"Router.route: logits must have at least topk = {self.topk} experts; got {list(logits.shape)}."
            )
        if self.num_groups > 1:
            group_size = num_experts // self.num_groups
            if num_experts % self.num_groups or group_size < 2 or group_size * self.topk_groups < self.topk:
                raise ArgumentError(
                    f"Router.route: {num_experts} experts must divide into num_groups = {self.num_groups} groups of at "
                    f"least 2, and topk_groups = {self.topk_groups} of them hold topk = {self.topk}; "
                    f"got logits {list(logits.shape)}."
                )
        if correction_bias is None:
            return
        if self.score_fn == "softmax":
            raise ArgumentError(
                "Router.route: correction_bias must be None with score_fn 'softmax'; got a tensor. "
                "Add a bias of the router's projection to the logits."
            )
        if tuple(correction_bias.shape) != (num_experts,) or not correction_bias.is_floating_point():
            raise ArgumentError(
                f"Router.route: correction_bias must be floating point [num_experts = {num_experts}]; "
                f"got {correction_bias.dtype} {list(correction_bias.shape)}."
            )
        if correction_bias.device != logits.device:
            raise ArgumentError(
                f"Router.route: correction_bias must lie on {logits.device}, as logits do; "
                f"got {correction_bias.device}. Use .to()."
            )


def _check_logits(function: str, logits: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"{function}: logits must be floating point [num_tokens, num_experts]; "
            f"got {logits.dtype} {list(logits.shape)}. Flatten leading dimensions."
        )


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest scores of each row, best first, ties to the lowest id, NaN ranked as +inf."""
    # A NaN's sign bit decides where a radix sort puts it, hence the replacement.
    ranked = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf)
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :count]


# Model types by their router. `norm_topk_prob` decides for the first; the others' code renormalises always, save
# DeepSeek-V3's kin, who state everything.
_SOFTMAX = frozenset({"qwen2_moe", "qwen3_moe", "qwen3_next"})
_SOFTMAX_RENORMALIZED = frozenset({"qwen3_5_moe_text", "mixtral", "gpt_oss"})
_SIGMOID_GROUPED = frozenset({"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"})
_SIGMOID_RENORMALIZED = frozenset({"minimax_m2"})
_SQRT_SOFTPLUS = frozenset({"deepseek_v4"})
_MODEL_TYPES = _SOFTMAX | _SOFTMAX_RENORMALIZED | _SIGMOID_GROUPED | _SIGMOID_RENORMALIZED | _SQRT_SOFTPLUS

_REQUIRED = object()


def _read(config: object, name: str, default: object = _REQUIRED) -> object:
    """A field of a config object or of a parsed config.json; None counts as absent."""
    value = _field(config, name)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise ArgumentError(
            f"Router.from_config: a config of model_type {_field(config, 'model_type')!r} must have {name!r}; "
            "got none. Complete the config, or describe the router with Router(...)."
        )
    return default


def _field(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return cast("Mapping[str, object]", config).get(name)
    return getattr(config, name, None)


def _read_int(config: object, name: str) -> int:
    value = _read(config, name)
    if isinstance(value, int):
        return value
    raise ArgumentError(f"Router.from_config: {name!r} must be an integer; got {value!r}.")


def _read_float(config: object, name: str) -> float:
    value = _read(config, name)
    if isinstance(value, (int, float)):
        return float(value)
    raise ArgumentError(f"Router.from_config: {name!r} must be a number; got {value!r}.")


def _refuse_unless(config: object, name: str, known: str) -> None:
    value = _read(config, name, known)
    if value != known:
        raise UnsupportedError(
            f"Router.from_config: {name!r} must be {known!r} for model_type {_read(config, 'model_type')!r}; "
            f"got {value!r}. Describe its router with Router(...)."
        )
