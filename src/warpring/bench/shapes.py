"""Shapes of the models that people serve, and free shapes, for benchmarks and for compiling ahead."""

from __future__ import annotations

import re
from dataclasses import dataclass

from warpring.activation import SILU, Activation, clipped_swiglu, gpt_oss_swiglu
from warpring.errors import ArgumentError


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer's routed experts.

    Attributes:
        name: lower-case name as records hold it.
        hidden: model width.
        intermediate: width inside an expert.
        num_experts: routed experts of the layer.
        topk: experts a token.
        activation: the gated activation between the projections.
        has_bias: whether both projections have biases.
        shared_experts: experts that see every token (outside the routed layer, not benched here).
        router: how scores become weights, in words.
        published: number formats in which checkpoints are published, in words.
        routed_over: experts that the router chooses from, where the layer holds but the first `num_experts` of them:
            one rank of expert parallelism. 0 means `num_experts`.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    activation: Activation = SILU
    has_bias: bool = False
    shared_experts: int = 0
    router: str = "softmax"
    published: str = "BF16"
    routed_over: int = 0

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate"):
            size = getattr(self, field)
            if size < 32 or size % 32:
                raise ArgumentError(
                    f"LayerShape: {field} must be a positive multiple of 32; got {size} in {self.name!r}. "
                    f"The next size that works is {max(32, -(-size // 32) * 32)}."
                )
        if not 1 <= self.num_experts <= 1024:
            raise ArgumentError(f"LayerShape: num_experts must be 1 to 1024; got {self.num_experts} in {self.name!r}.")
        if self.routed_over and self.routed_over < self.num_experts:
            raise ArgumentError(
                f"LayerShape: routed_over must be 0 or at least num_experts={self.num_experts}; got {self.routed_over} "
                f"in {self.name!r}."
            )
        if not 1 <= self.topk <= min(32, self.num_experts):
            raise ArgumentError(
                f"LayerShape: topk must be 1 to {min(32, self.num_experts)} (at most 32 and at most num_experts); "
                f"got {self.topk} in {self.name!r}."
            )

    @property
    def size(self) -> str:
        """The shape in the notation that `parse_shape` reads."""
        return f"h{self.hidden}xi{self.intermediate}xe{self.num_experts}xk{self.topk}"


def _gpt_oss(name: str, num_experts: int) -> LayerShape:
    act = gpt_oss_swiglu()
    return LayerShape(name, 2880, 2880, num_experts, 4, act, True, router="softmax of the top-k", published="MXFP4")


def _deepseek_v4(name: str, hidden: int, intermediate: int, num_experts: int, router: str) -> LayerShape:
    act = clipped_swiglu()
    return LayerShape(name, hidden, intermediate, num_experts, 6, act, False, 1, router, published="MXFP4")


def _models() -> tuple[LayerShape, ...]:
    renormalised, both = "softmax, renormalised", "BF16, FP8"
    groups = "sigmoid + bias, 4 of 8 groups, x2.5"
    return (
        LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8, router=renormalised, published=both),
        LayerShape("qwen3-235b-a22b", 4096, 1536, 128, 8, router=renormalised, published=both),
        LayerShape("qwen3-next-80b", 2048, 512, 512, 10, shared_experts=1, published=both),
        _gpt_oss("gpt-oss-20b", 32),
        _gpt_oss("gpt-oss-120b", 128),
        LayerShape("mixtral-8x7b", 4096, 14336, 8, 2),
        LayerShape("deepseek-v3", 7168, 2048, 256, 8, shared_experts=1, router=groups, published="FP8 128x128"),
        LayerShape("deepseek-v3-ep8", 7168, 2048, 32, 8, router=groups, published="FP8 128x128", routed_over=256),
        _deepseek_v4("deepseek-v4-flash", 4096, 2048, 256, "sqrt-softplus, x1.5"),
        _deepseek_v4("deepseek-v4.1-flash", 5120, 2304, 384, "sqrt-softplus + bias, x1.5"),
        LayerShape("glm-5.2", 6144, 2048, 256, 8, shared_experts=1, router="sigmoid + bias, x2.5", published=both),
        LayerShape("kimi-k2", 7168, 2048, 384, 8, shared_experts=1, router="sigmoid, x2.827", published="FP8, INT4"),
        LayerShape("minimax-m2", 3072, 1536, 256, 8, router="sigmoid + bias", published="FP8"),
    )


#: Every named shape. DeepSeek-V4.1-Flash and GLM-5.2 are second-hand figures; deepseek-v3-ep8 is what one of eight
#: ranks holds of DeepSeek-V3.
MODELS: dict[str, LayerShape] = {shape.name: shape for shape in _models()}

_FREE = re.compile(r"h(\d+)xi(\d+)xe(\d+)xk(\d+)")


def parse_shape(text: str) -> LayerShape:
    """The shape of a model name ("qwen3-30b-a3b") or of free sizes ("h2048xi768xe128xk8").

    Raises:
        ArgumentError: neither of both, or sizes that the library does not serve.
    """
    name = text.strip().lower()
    if name in MODELS:
        return MODELS[name]
    match = _FREE.fullmatch(name)
    if match is None:
        raise ArgumentError(
            f"parse_shape: a shape must be one of {', '.join(MODELS)}, or sizes like h2048xi768xe128xk8 "
            f"(hidden, intermediate, experts, top-k); got {text!r}."
        )
    hidden, intermediate, num_experts, topk = map(int, match.groups())
    return LayerShape(name, hidden, intermediate, num_experts, topk)
