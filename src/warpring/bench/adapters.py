"""Other libraries' MoE layers as peers of the bench: used where they can be imported, left out by name elsewhere.

Nothing of theirs is in here: each adapter hands our stored weights and routings to a library's public function, in the
layout that it wants. What a library's own router would hand over (the dtype of ids and weights) is made ahead.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpring.activation import SILU, Activation, gpt_oss_swiglu
from warpring.bench.inputs import one_expert
from warpring.bench.peer import Peer
from warpring.bench.shapes import LayerShape
from warpring.bench.timing import Call
from warpring.errors import ArgumentError, UnsupportedError
from warpring.experts import Experts

#: transformers' batched_mm copies the weights of every slot: left out where that would take more than this.
MOST_COPIED_BYTES = 8 << 30
#: Rows and columns of a block of FP8 weights.
BLOCK = 128
#: The one shape that FlashInfer's mono_moe is built for: hidden, intermediate, experts; and its largest batch.
MONO_SHAPE, MONO_TOKENS = (2048, 512, 256), 8
#: A logit of an expert that must not be chosen: its share of the softmax is 0.
NEVER = -1e4


@dataclass(frozen=True)
class Adapter:
    """How to come by a peer.

    Attributes:
        name: the peer's.
        formats: weight formats that it can take bit for bit.
        needs_gpu: whether it has no CPU form.
        make: the peer for a shape and format; raises ImportError where the library is missing, UnsupportedError where
            it does not serve them.
        activation: the gated activation that it is compared on; gpt-oss's comes with biases, no other does.
    """

    name: str
    formats: tuple[str, ...]
    needs_gpu: bool
    make: Callable[[LayerShape, str], Peer]
    activation: Activation = SILU


def find_peers(
    names: Sequence[str], shape: LayerShape, format: str, device: torch.device
) -> tuple[list[Peer], dict[str, str]]:
    """The peers of `names` that serve this layer here, and why each other one does not, by name.

    Raises:
        ArgumentError: a name that is no key of `ADAPTERS`.
    """
    peers: list[Peer] = []
    left_out: dict[str, str] = {}
    for name in names:
        reason = why_not(name, shape, format, device)
        if reason is None:
            try:
                peers.append(ADAPTERS[name].make(shape, format))
            except UnsupportedError as error:
                reason = str(error)
            except (ImportError, OSError, AttributeError, RuntimeError) as error:
                # A library that does not fit this torch or driver fails to load in any of these ways.
                reason = f"cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if reason is not None:
            left_out[name] = reason
    return peers, left_out


def why_not(name: str, shape: LayerShape, format: str, device: torch.device) -> str | None:
    """Why a peer cannot serve this layer here, as far as can be told without importing it; None if it may.

    Raises:
        ArgumentError: a name that is no key of `ADAPTERS`.
    """
    if name not in ADAPTERS:
        raise ArgumentError(f"find_peers: names must hold {', '.join(ADAPTERS)}; got {name!r}.")
    adapter = ADAPTERS[name]
    if format not in adapter.formats:
        return f"takes {', '.join(adapter.formats)}, not {format}"
    if adapter.needs_gpu and device.type != "cuda":
        return "needs a GPU"
    if shape.activation != adapter.activation or shape.has_bias != (adapter.activation == gpt_oss_swiglu()):
        named = "SiLU without biases" if adapter.activation == SILU else "gpt-oss's activation with biases"
        return f"compared on {named} only"
    return None


def _transformers(implementation: str, shape: LayerShape, format: str) -> Peer:
    transformers: Any = importlib.import_module("transformers")
    forward = getattr(importlib.import_module("transformers.integrations.moe"), f"{implementation}_experts_forward")
    modeling: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.topk,
    )

    def prepare(experts: Experts) -> torch.nn.Module:
        with torch.device("meta"):
            module = modeling.Qwen3MoeExperts(config)
        module.gate_up_proj = torch.nn.Parameter(experts.w13.data.flatten(1, 2), requires_grad=False)
        module.down_proj = torch.nn.Parameter(experts.w2.data, requires_grad=False)
        return module

    def bind(
        module: torch.nn.Module, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        return functools.partial(forward, module, x, idx, weights.to(x.dtype))

    most_tokens = 1 << 30
    if implementation == "batched_mm":
        most_tokens = MOST_COPIED_BYTES // (shape.topk * one_expert(shape, format).bytes_per_expert)
    note = f"transformers {transformers.__version__}"
    return Peer(f"transformers_{implementation}", note, prepare, bind, most_tokens=most_tokens)


def fp8_scales(experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of FP8 blocks as the field stores them: [E, 2I / 128, H / 128] and [E, H / 128, I / 128]."""
    w13, w2 = experts.w13.scale, experts.w2.scale
    if w13 is None or w2 is None:
        raise ArgumentError(f"fp8_scales: experts must be stored in fp8_block; got {experts.format}.")
    return w13.flatten(1, 2), w2


def _check_blocks(shape: LayerShape, format: str) -> None:
    if format == "fp8_block" and shape.intermediate % BLOCK:
        raise UnsupportedError(f"blocks of {BLOCK} rows would straddle gate and up of {shape.intermediate} rows")


def _vllm(shape: LayerShape, format: str) -> Peer:
    _check_blocks(shape, format)
    vllm: Any = importlib.import_module("vllm")
    module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    config: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.config")

    def prepare(experts: Experts) -> dict[str, Any]:
        weights: dict[str, Any] = {"w1": experts.w13.data.flatten(1, 2), "w2": experts.w2.data}
        if format == "fp8_block":
            w1_scale, w2_scale = fp8_scales(experts)
            settings = config.fp8_w8a8_moe_quant_config(
                w1_scale=w1_scale, w2_scale=w2_scale, block_shape=[BLOCK, BLOCK]
            )
            weights["quant_config"] = settings
        return weights

    def bind(
        layer: dict[str, Any], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        return functools.partial(module.fused_experts, x, topk_weights=weights, topk_ids=idx.int(), **layer)

    return Peer("vllm_triton", f"vLLM {vllm.__version__}, Triton fused MoE{_quantised(format)}", prepare, bind)


def _quantised(format: str) -> str:
    return ", activations quantised to FP8" if format == "fp8_block" else ""


def _sglang(shape: LayerShape, format: str) -> Peer:
    _check_blocks(shape, format)
    sglang: Any = importlib.import_module("sglang")
    module: Any = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")
    runner: Any = importlib.import_module("sglang.srt.layers.moe.moe_runner")
    topk: Any = importlib.import_module("sglang.srt.layers.moe.topk")
    config = runner.MoeRunnerConfig(
        num_experts=shape.num_experts, num_local_experts=shape.num_experts, top_k=shape.topk, inplace=False
    )

    def prepare(experts: Experts) -> dict[str, Any]:
        weights: dict[str, Any] = {"w1": experts.w13.data.flatten(1, 2), "w2": experts.w2.data}
        if format == "fp8_block":
            w1_scale, w2_scale = fp8_scales(experts)
            weights |= {
                "use_fp8_w8a8": True, "w1_scale": w1_scale, "w2_scale": w2_scale, "block_shape": [BLOCK, BLOCK],
            }  # fmt: skip
        return weights

    def bind(
        layer: dict[str, Any], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        logits = torch.empty(x.shape[0], shape.num_experts, device=x.device)
        chosen = topk.StandardTopKOutput(weights, idx.int(), logits)
        return functools.partial(module.fused_experts, x, topk_output=chosen, moe_runner_config=config, **layer)

    return Peer("sglang_triton", f"SGLang {sglang.__version__}, Triton fused MoE{_quantised(format)}", prepare, bind)


def _flashinfer_mono(shape: LayerShape, format: str) -> Peer:
    if (shape.hidden, shape.intermediate, shape.num_experts) != MONO_SHAPE or shape.topk > MONO_TOKENS:
        raise UnsupportedError(f"is built for {MONO_SHAPE[2]} experts of {MONO_SHAPE[0]} x {MONO_SHAPE[1]} alone")
    flashinfer: Any = importlib.import_module("flashinfer")
    fused_moe: Any = importlib.import_module("flashinfer.fused_moe")
    if not fused_moe.has_monomoe():
        raise UnsupportedError("cannot be built here: it needs a Hopper GPU, and nvcc or a compiled module")
    scratchpad = functools.cache(fused_moe.alloc_scratchpad)

    def prepare(experts: Experts) -> tuple[torch.Tensor, ...]:
        w13_scale, w2_scale = fp8_scales(experts)
        up = fused_moe.interleave_for_tma_wgmma_up(experts.w13.data.flatten(1, 2))
        return up, w13_scale.contiguous(), experts.w2.data, w2_scale.contiguous()

    def bind(
        layer: tuple[torch.Tensor, ...], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        logits = logits_of(shape.num_experts, idx, weights)
        settings = {"out": out, "scratchpad": scratchpad(x.device), "interleave_up": False}
        return functools.partial(fused_moe.mono_moe, x, logits, *layer, shape.topk, "softmax", True, **settings)

    note = f"FlashInfer {flashinfer.__version__}, activations quantised to FP8, its own routing included"
    return Peer("flashinfer_mono_moe", note, prepare, bind, copies_weights=True, most_tokens=MONO_TOKENS)


def logits_of(num_experts: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """BF16 router logits [num_tokens, num_experts] whose renormalised top-k softmax is this routing, BF16's way."""
    logits = torch.full((topk_idx.shape[0], num_experts), NEVER, device=topk_idx.device)
    return logits.scatter(1, topk_idx.long(), topk_weights.float().log()).bfloat16()


def _up_first(rows: torch.Tensor) -> torch.Tensor:
    """A copy of [E, gate rows then up rows, ...] with the up rows first, as FlashInfer's CUTLASS kernels read them."""
    as_bytes = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    return as_bytes.unflatten(1, (2, -1)).flip(1).flatten(1, 2).view(rows.dtype)


def _flashinfer_cutlass(shape: LayerShape, format: str) -> Peer:
    _check_blocks(shape, format)
    flashinfer: Any = importlib.import_module("flashinfer")
    fused_moe: Any = importlib.import_module("flashinfer.fused_moe")
    if not hasattr(fused_moe, "cutlass_fused_moe"):
        raise UnsupportedError("is not part of this FlashInfer")

    def prepare(experts: Experts) -> dict[str, Any]:
        weights: dict[str, Any] = {
            "fc1_expert_weights": _up_first(experts.w13.data.flatten(1, 2)),
            "fc2_expert_weights": experts.w2.data,
            "quant_scales": [],
        }
        if format == "fp8_block":
            w13_scale, w2_scale = fp8_scales(experts)
            weights |= {"quant_scales": [_up_first(w13_scale), w2_scale], "use_deepseek_fp8_block_scale": True}
        return weights

    def bind(
        layer: dict[str, Any], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        return functools.partial(
            fused_moe.cutlass_fused_moe, x, idx.int(), weights, output_dtype=torch.bfloat16, output=out, **layer
        )

    note = f"FlashInfer {flashinfer.__version__}, CUTLASS fused MoE{_quantised(format)}"
    return Peer("flashinfer_cutlass", note, prepare, bind, copies_weights=True)


def _triton_kernels(shape: LayerShape, format: str) -> Peer:
    library: Any = importlib.import_module("triton_kernels")
    matmul: Any = importlib.import_module("triton_kernels.matmul_ogs")
    routing: Any = importlib.import_module("triton_kernels.routing")
    swiglu: Any = importlib.import_module("triton_kernels.swiglu")
    tensor: Any = importlib.import_module("triton_kernels.tensor")
    layout: Any = importlib.import_module("triton_kernels.tensor_details.layout")
    flags: Any = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
    # What vLLM sets on Hopper; without it the layout of the scales does not fit.
    flags.update_opt_flags_constraints({"split_k": 1})
    act = shape.activation
    gate = matmul.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"))
    fused = matmul.FusedActivation(gate, (act.alpha, act.limit), 2)

    def swizzle(codes: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
        """[E, rows, K / 2] codes and [E, rows, K / 32] scales in the layouts that this GPU's kernel reads."""
        value_layout, value_settings = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_settings = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % 4))
        values = tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4)
        values = tensor.convert_layout(values, value_layout, **value_settings)
        scales = tensor.convert_layout(tensor.wrap_torch_tensor(scale.mT), scale_layout, **scale_settings)
        return values, matmul.PrecisionConfig(weight_scale=scales)

    def prepare(experts: Experts) -> tuple[Any, ...]:
        w13_scale, w2_scale = experts.w13.scale, experts.w2.scale
        if w13_scale is None or w2_scale is None or experts.w13_bias is None or experts.w2_bias is None:
            raise ArgumentError("_triton_kernels: experts must have scales and biases.")
        # Its gate and up rows take turns.
        w13, w13_scale, b13 = (t.transpose(1, 2).flatten(1, 2) for t in (experts.w13.data, w13_scale, experts.w13_bias))
        return *swizzle(w13, w13_scale), b13.float(), *swizzle(experts.w2.data, w2_scale), experts.w2_bias.float()

    def bind(
        layer: tuple[Any, ...], x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Call:
        w13, config13, b13, w2, config2, b2 = layer
        logits = logits_of(shape.num_experts, idx, weights)

        def call() -> torch.Tensor:
            data, gather, scatter = routing.routing(logits, shape.topk)
            settings: dict[str, Any] = {"precision_config": config13, "fused_activation": fused}
            h = matmul.matmul_ogs(x, w13, b13, data, gather_indx=gather, **settings)
            settings = {"precision_config": config2, "gammas": data.gate_scal}
            return matmul.matmul_ogs(h, w2, b2, data, scatter_indx=scatter, **settings)

        return call

    note = f"triton_kernels {getattr(library, '__version__', 'of unknown version')}, its own routing included"
    return Peer("triton_kernels", note, prepare, bind, copies_weights=True)


def _adapters() -> tuple[Adapter, ...]:
    both = ("bf16", "fp8_block")
    return (
        Adapter("transformers_batched_mm", ("bf16",), False, functools.partial(_transformers, "batched_mm")),
        Adapter("transformers_grouped_mm", ("bf16",), False, functools.partial(_transformers, "grouped_mm")),
        Adapter("vllm_triton", both, True, _vllm),
        Adapter("sglang_triton", both, True, _sglang),
        Adapter("flashinfer_mono_moe", ("fp8_block",), True, _flashinfer_mono),
        Adapter("flashinfer_cutlass", both, True, _flashinfer_cutlass),
        Adapter("triton_kernels", ("mxfp4",), True, _triton_kernels, gpt_oss_swiglu()),
    )


#: Every peer that has an adapter, by name.
ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in _adapters()}
