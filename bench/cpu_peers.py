"""The same MoE layer in other libraries on CPU cores, where they can be imported: onnxruntime and llama.cpp.

    onnxruntime   its contrib operators MoE (FP32 weights) and QMoE (8- and 4-bit integers, a scale for 32 columns)
    llama.cpp     ggml's mul_mat_id, as its MoE models build a layer, from BF16, Q8_0 and MXFP4 weights; the library is
                  that of the package llama-cpp-python

All but ggml's MXFP4, which holds the very codes of ours, quantise the layer's BF16 weights. ggml rounds activations to
8 bits for Q8_0 and MXFP4. Layers with biases, and activations other than SiLU, are left out.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from warpring import Experts
from warpring.activation import SILU

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Maker = Callable[[dict[str, Experts], int], Layer]
#: Columns under one scale, of all quantised forms.
BLOCK = 32


@dataclass(frozen=True)
class PeerForm:
    """A layer in another library.

    Attributes:
        run: the layer.
        like: our format whose numbers its weights come from.
        bits: bits of a stored weight, its share of a scale included.
    """

    run: Layer
    like: str
    bits: float


def peer_forms(layers: dict[str, Experts], topk: int) -> tuple[dict[str, PeerForm], dict[str, str]]:
    """The forms that run here, by name, and why the others do not.

    Args:
        layers: a layer's weights by format, "bf16" among them.
        topk: slots of a token.
    """
    forms: dict[str, PeerForm] = {}
    missing: dict[str, str] = {}
    for name, (make, like, bits) in _MAKERS.items():
        try:
            if layers["bf16"].activation != SILU or layers["bf16"].w13_bias is not None:
                raise ImportError("made for layers of SiLU without biases")
            if like not in layers:
                raise ImportError(f"needs {like} among the formats")
            forms[name] = PeerForm(make(layers, topk), like, bits)
        except (ImportError, OSError) as error:
            missing[name] = str(error)
    return forms, missing


# -- onnxruntime -----------------------------------------------------------------------------------------------------


def _moe(layers: dict[str, Experts], topk: int) -> Layer:
    experts = layers["bf16"]
    weights = {"fc1": _interleaved(experts).float(), "fc2": experts.w2.data.float()}
    return _session("MoE", experts, topk, ["x", "router", "fc1", "", "fc2"], weights)


def _qmoe(layers: dict[str, Experts], topk: int, *, bits: int) -> Layer:
    experts = layers["bf16"]
    weights: dict[str, torch.Tensor] = {}
    for name, matrix in (("fc1", _interleaved(experts)), ("fc2", experts.w2.data)):
        weights[name], weights[f"{name}_scale"] = _integers(matrix, bits)
    inputs = ["x", "router", "fc1", "fc1_scale", "", "fc2", "fc2_scale"]
    return _session("QMoE", experts, topk, inputs, weights, expert_weight_bits=bits, block_size=BLOCK)


def _interleaved(experts: Experts) -> torch.Tensor:
    """[experts, 2 intermediate, hidden]: gate and up rows in turns, as the operators' fused SwiGLU wants them."""
    return experts.w13.data.transpose(1, 2).flatten(1, 2)


def _integers(matrix: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned integers around 2^(bits - 1), two a byte where they have 4 bits, and FP32 scales."""
    codes: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    middle = 1 << (bits - 1)
    for expert in matrix:
        blocks = expert.float().unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1).clamp(min=1e-30) / (middle - 1)
        numbers = (blocks / scale[..., None]).round().add(middle).to(torch.uint8).flatten(-2)
        codes.append(numbers if bits == 8 else numbers[:, 0::2] | (numbers[:, 1::2] << 4))
        scales.append(scale)
    return torch.stack(codes), torch.stack(scales)


def _session(
    op: str, experts: Experts, topk: int, inputs: list[str], weights: dict[str, torch.Tensor], **attributes: int
) -> Layer:
    """The operator. MoE's FP32 weights are inputs of each call, uncopied: a model file could not hold them."""
    onnx, ort = (importlib.import_module(name) for name in ("onnx", "onnxruntime"))
    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.uint8: onnx.TensorProto.UINT8}
    swiglu = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
    common = {"k": topk, "normalize_routing_weights": 1, "swiglu_limit": 1e30}
    node = onnx.helper.make_node(op, inputs, ["y"], domain="com.microsoft", **swiglu, **common, **attributes)

    def described(name: str, kind: Any, *sizes: int | str) -> Any:
        return onnx.helper.make_tensor_value_info(name, kind, sizes)

    given = [
        described("x", onnx.TensorProto.FLOAT, "tokens", experts.hidden),
        described("router", onnx.TensorProto.FLOAT, "tokens", experts.num_experts),
    ]
    feeds: dict[str, Any] = {}
    constants: list[Any] = []
    for name, tensor in weights.items():
        if op == "MoE":
            given.append(described(name, kinds[tensor.dtype], *tensor.shape))
            feeds[name] = tensor.numpy()
        else:
            raw = tensor.numpy().tobytes()
            constants.append(onnx.helper.make_tensor(name, kinds[tensor.dtype], tensor.shape, raw, raw=True))
    result = described("y", onnx.TensorProto.FLOAT, "tokens", experts.hidden)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "layer", given, [result], constants)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(x: torch.Tensor, idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        # The operator takes a softmax over the largest scores: of logarithms that gives the weights back.
        router = torch.full((len(x), experts.num_experts), -1e4).scatter_(1, idx, topk_weights.log())
        return torch.from_numpy(session.run(None, {"x": x.float().numpy(), "router": router.numpy(), **feeds})[0])

    return run


# -- llama.cpp -------------------------------------------------------------------------------------------------------


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_F32, _I32 = 0, 26
#: ggml's numbers of its types, and bytes of BLOCK weights.
_GGML_TYPES = {"bf16": (30, 2 * BLOCK), "q8_0": (8, BLOCK + 2), "mxfp4": (39, BLOCK // 2 + 1)}


def _ggml() -> tuple[Any, Any]:
    """ggml's library, its functions declared, and the function that computes a graph."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("No module named 'llama_cpp'")
    folder = Path(found.origin).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "ggml_init": (_InitParams,),
        "ggml_new_tensor_2d": (pointer, ctypes.c_int, size, size),
        "ggml_new_tensor_3d": (pointer, ctypes.c_int, size, size, size),
        "ggml_get_data": (pointer,),
        "ggml_mul_mat_id": (pointer,) * 4,
        "ggml_swiglu": (pointer,) * 2,
        "ggml_mul": (pointer,) * 3,
        "ggml_add": (pointer,) * 3,
        "ggml_view_2d": (pointer, pointer, size, size, ctypes.c_size_t, ctypes.c_size_t),
        "ggml_cont": (pointer, pointer),
        "ggml_new_graph": (pointer,),
        "ggml_build_forward_expand": (pointer, pointer),
    }.items():
        function = getattr(base, name)
        function.argtypes, function.restype = arguments, pointer
    cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, ctypes.c_int)
    cpu.ggml_cpu_init()
    return base, cpu.ggml_graph_compute_with_ctx


def _llama_cpp(layers: dict[str, Experts], topk: int, *, kind: str) -> Layer:
    ggml, compute = _ggml()
    experts = layers["mxfp4" if kind == "mxfp4" else "bf16"]
    hidden, intermediate, count = experts.hidden, experts.intermediate, experts.num_experts
    number, block_bytes = _GGML_TYPES[kind]

    def context(num_bytes: int) -> tuple[int, torch.Tensor]:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return ggml.ggml_init(_InitParams(num_bytes, memory.data_ptr(), False)), memory

    weights_of, weights_memory = context(3 * hidden * intermediate * count // BLOCK * block_bytes + (1 << 20))

    def filled(content: torch.Tensor, cols: int, rows: int) -> int:
        tensor = ggml.ggml_new_tensor_3d(weights_of, number, cols, rows, count)
        ctypes.memmove(ggml.ggml_get_data(tensor), content.data_ptr(), content.numel() * content.element_size())
        return tensor

    w13 = filled(_GGML_BLOCKS[kind](experts.w13), hidden, 2 * intermediate)
    w2 = filled(_GGML_BLOCKS[kind](experts.w2), intermediate, hidden)

    @cache
    def build(num_tokens: int) -> Layer:
        here, memory = context(256 << 20)  # each computation takes work space from it
        x = ggml.ggml_new_tensor_3d(here, _F32, hidden, 1, num_tokens)
        ids = ggml.ggml_new_tensor_2d(here, _I32, topk, num_tokens)
        weights = ggml.ggml_new_tensor_3d(here, _F32, 1, topk, num_tokens)
        act = ggml.ggml_swiglu(here, ggml.ggml_mul_mat_id(here, w13, x, ids))
        scaled = ggml.ggml_mul(here, ggml.ggml_mul_mat_id(here, w2, act, ids), weights)
        sizes = hidden, num_tokens, 4 * hidden * topk
        y, *slots = (ggml.ggml_view_2d(here, scaled, *sizes, 4 * hidden * slot) for slot in range(topk))
        for slot in slots:
            y = ggml.ggml_add(here, y, slot)
        y = ggml.ggml_cont(here, y)
        graph = ggml.ggml_new_graph(here)
        ggml.ggml_build_forward_expand(graph, y)
        kept = memory, weights_memory

        def run(activations: torch.Tensor, idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
            for tensor, content in ((x, activations.float()), (ids, idx.int()), (weights, topk_weights)):
                ctypes.memmove(ggml.ggml_get_data(tensor), content.data_ptr(), 4 * content.numel())
            compute(here, graph, torch.get_num_threads())
            out = torch.empty(num_tokens, hidden, dtype=torch.float32, device=kept[0].device)
            ctypes.memmove(out.data_ptr(), ggml.ggml_get_data(y), 4 * out.numel())
            return out

        return run

    return lambda x, idx, topk_weights: build(len(x))(x, idx, topk_weights)


def _q8_0_blocks(stored: Any) -> torch.Tensor:
    """An FP16 scale and 32 signed bytes a block."""
    pieces: list[torch.Tensor] = []
    for expert in stored.data.flatten(0, -3):
        blocks = expert.float().unflatten(-1, (-1, BLOCK))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
        codes = (blocks / scale.float().clamp(min=1e-7)).round().clamp(-127, 127).to(torch.int8)
        pieces.append(torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), -1))
    return torch.stack(pieces)


def _mxfp4_blocks(stored: Any) -> torch.Tensor:
    """The scale's byte, then 16 bytes: columns 0 to 15 in the low halves, 16 to 31 in the high ones."""
    codes = stored.data.view(torch.uint8).unflatten(-1, (-1, BLOCK // 2))
    columns = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    low, high = columns.chunk(2, dim=-1)
    return torch.cat((stored.scale.view(torch.uint8)[..., None], low | (high << 4)), -1).contiguous()


_GGML_BLOCKS: dict[str, Callable[[Any], torch.Tensor]] = {
    "bf16": lambda stored: stored.data,
    "q8_0": _q8_0_blocks,
    "mxfp4": _mxfp4_blocks,
}
#: How a form is made, our format that it is made from, bits a weight.
_MAKERS: dict[str, tuple[Maker, str, float]] = {
    "onnxruntime_moe_fp32": (_moe, "bf16", 32),
    "onnxruntime_qmoe_int8": (partial(_qmoe, bits=8), "bf16", 8 + 32 / BLOCK),
    "onnxruntime_qmoe_int4": (partial(_qmoe, bits=4), "bf16", 4 + 32 / BLOCK),
    "llama.cpp_bf16": (partial(_llama_cpp, kind="bf16"), "bf16", 16),
    "llama.cpp_q8_0": (partial(_llama_cpp, kind="q8_0"), "bf16", 8 + 16 / BLOCK),
    "llama.cpp_mxfp4": (partial(_llama_cpp, kind="mxfp4"), "mxfp4", 4 + 8 / BLOCK),
}
