"""Expert weights in the order in which role2 streams them: one contiguous image a (expert, task, chunk).

A task is 128 rows: for the first GEMM the gate and up rows of 64 neurons, for the second 128 outputs. A chunk is its
next 128 columns. Eight warps own 16 rows each: for the first GEMM 8 gate rows and the up rows of the same neurons.

    lane l = 4 g + q of a warp holds rows g and g + 8 and, of every 32 columns,
    4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3               (A of one wgmma m64nNk32, E4M3)

An image holds the codes, [warp][step of 32 columns][lane], then the scales (`ep_weights.cuh` reads both):

    fp8_block    16 bytes a lane and step; FP32 scale of gate and up (of the block, twice, for w2), 120 bytes of padding
    fp8_channel  the same codes; an FP32 scale a row, [warp][g][g, g + 8]
    mxfp4        8 bytes a lane and step; a word a row of scales, likewise

MXFP4 codes become operands by masks: E2M1's sign and its other three bits are those of an E4M3 number 2^6 times
smaller, at bits 7 and 4 to 2. Of a lane's 16 codes of a step a part lie in its two words at these places. The others
share the bits between: two shifted words have their exclusive or at these places (`e2m1_words.py`). The scales of a
row's four blocks are exponents of FP32, a byte each, turned right by one bit so that the last lies where FP32 has it.
Two scales are no such exponent: NaN becomes infinity, on codes that are all zero; and 2^-127 becomes zero: `flushed`
counts the weights other than zero that this loses.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from warpring.activation import Activation
from warpring.errors import ArgumentError, UnsupportedError
from warpring.expert_parallel.problem import NEURONS
from warpring.experts import Experts
from warpring.formats import QuantizedTensor, ceil_div
from warpring.formats.e2m1_words import WORD, codes_of, signed, unsigned, words_of

#: Formats that role2 has a policy for, and the policy's name in ep_weights.cuh.
POLICIES = {"fp8_block": "EpFp8Block", "fp8_channel": "EpFp8Channel", "mxfp4": "EpMxfp4"}
TASK_ROWS = 128
CHUNK_COLUMNS = 128
#: Bytes of codes and of scales in an image; together whole lines of a GPU's cache, at which alone copies are fast.
CODE_BYTES = {"fp8_block": 16384, "fp8_channel": 16384, "mxfp4": 8192}
SCALE_BYTES = {"fp8_block": 128, "fp8_channel": 512, "mxfp4": 512}

_WARPS = 8
_MX_BLOCK = 32
_E8M0_NAN = 255


def image_bytes(format: str) -> int:
    """Bytes of one packed chunk; UnsupportedError for a format without a policy."""
    if format not in POLICIES:
        raise UnsupportedError(
            f"expert-parallel kernels have no policy for {format} weights; they have {', '.join(POLICIES)}. "
            "Requantise the experts to one of these."
        )
    return CODE_BYTES[format] + SCALE_BYTES[format]


def pack_matrix(stored: QuantizedTensor) -> tuple[torch.Tensor, int]:
    """Pack one projection: logical [E, 2, intermediate, hidden] (gate, up) or [E, hidden, intermediate].

    One expert at a time: what this needs beside its result is a few times one expert's matrix.

    Returns:
        images uint8 [E, tasks, chunks, image_bytes(format)], and how many weights were flushed to zero.

    Raises:
        UnsupportedError: a format without a policy.
    """
    num_bytes, code_bytes = image_bytes(stored.format), CODE_BYTES[stored.format]
    tasks = ceil_div(stored.shape[-2], _task_rows(len(stored.shape) == 4))
    chunks = ceil_div(stored.shape[-1], CHUNK_COLUMNS)
    shape = (stored.shape[0], tasks, chunks, num_bytes)
    images = torch.empty(shape, dtype=torch.uint8, device=stored.device)
    flushed = 0
    for index, image in enumerate(images):
        expert = stored[index]
        halves = expert if len(expert.shape) == 3 else _unsqueeze(expert)
        if stored.format == "mxfp4":
            codes, scales, lost = _pack_mxfp4(halves)
            flushed += lost
        else:
            codes, scales = _pack_e4m3(halves)
        image[..., :code_bytes] = codes
        image[..., code_bytes:] = scales
    return images, flushed


def unpack_matrix(images: torch.Tensor, format: str, shape: tuple[int, ...]) -> QuantizedTensor:
    """The inverse of `pack_matrix`: the weights that the kernel computes with, in their format's own layout.

    FP8 formats come back bit for bit. So does MXFP4, but for codes of blocks of scale 2^-127 or NaN, which come back as
    zeros.

    Args:
        images: uint8 [E, tasks, chunks, bytes].
        format: the weights' format.
        shape: their logical shape.
    """
    codes, scales = images.split((CODE_BYTES[format], SCALE_BYTES[format]), dim=-1)
    unpack_one = _unpack_mxfp4 if format == "mxfp4" else _unpack_e4m3
    halves = shape[1] if len(shape) == 4 else 1
    one = (halves, shape[-2], shape[-1])
    pieces = [unpack_one(c, s, format, one) for c, s in zip(codes, scales, strict=True)]
    data, scale = (torch.stack(parts) for parts in zip(*pieces, strict=True))
    if len(shape) == 3:
        data, scale = data.squeeze(1), scale.squeeze(1)
    return QuantizedTensor(format, shape, data, scale)


def _task_rows(is_gate_up: bool) -> int:
    """Rows of each half (gate, up) in a task."""
    return NEURONS if is_gate_up else TASK_ROWS


def _unsqueeze(stored: QuantizedTensor) -> QuantizedTensor:
    moved = stored.map(lambda t: t.unsqueeze(0))
    return QuantizedTensor(stored.format, (1, *stored.shape), moved.data, moved.scale)


def _split_rows(t: torch.Tensor) -> torch.Tensor:
    """[halves, rows, ...] -> [task, warp, 2, g, ...], rows padded with zeros to whole tasks."""
    per_task = _task_rows(t.shape[0] == 2)
    missing = -t.shape[1] % per_task
    t = pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
    if t.shape[0] == 2:
        return t.unflatten(1, (-1, _WARPS, 8)).movedim(0, 2)
    return t.squeeze(0).unflatten(0, (-1, _WARPS, 2, 8))


def _join_rows(t: torch.Tensor, halves: int, rows: int) -> torch.Tensor:
    """The inverse of `_split_rows`."""
    joined = t.movedim(2, 0).flatten(1, 3) if halves == 2 else t.flatten(0, 3).unsqueeze(0)
    return joined[:, :rows]


def _split_codes(codes: torch.Tensor) -> torch.Tensor:
    """One code a byte [halves, rows, cols] -> [task, warp, 2, g, chunk, step, half of its columns, q, 4 neighbours]."""
    rows = _split_rows(pad(codes, (0, -codes.shape[2] % CHUNK_COLUMNS)))
    return rows.unflatten(-1, (-1, 4, 2, 4, 4))


def _join_codes(split: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `_split_codes`."""
    return _join_rows(split.flatten(4), shape[0], shape[1])[..., : shape[2]].contiguous()


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """32-bit elements [.., n] as bytes [.., 4 n]."""
    return words.contiguous().view(torch.uint8)


def _pack_row_words(words: torch.Tensor) -> torch.Tensor:
    """32-bit [halves, rows, chunks], one a row and chunk -> bytes [task, chunk, 512], ordered [warp][g][g, g + 8]."""
    return _bytes(_split_rows(words).permute(0, 4, 1, 3, 2).flatten(2))


def _unpack_row_words(scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `_pack_row_words`, [halves, rows, chunks] of a 32-bit type."""
    words = scales.contiguous().view(dtype).unflatten(-1, (_WARPS, 8, 2))
    return _join_rows(words.permute(0, 2, 4, 3, 1), shape[0], shape[1])


# ---- E4M3 codes ------------------------------------------------------------------------------------------------------


def _pack_e4m3(halves: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of codes and of scales, [task, chunk, bytes]."""
    split = _split_codes(halves.data.view(torch.uint8))
    # [task, chunk, warp, step, g, q, group, 2, neighbour]
    codes = split.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).flatten(2)
    scale = _scale_of(halves)
    if halves.format == "fp8_channel":
        return codes, _pack_row_words(scale.expand(-1, -1, codes.shape[1]))
    # A task lies within one block of rows: 64 neurons, or 128 outputs.
    tasks = torch.arange(codes.shape[0], device=scale.device) * _task_rows(scale.shape[0] == 2) // TASK_ROWS
    of_task = scale[:, tasks].movedim(0, -1)
    pair = of_task if scale.shape[0] == 2 else of_task.expand(-1, -1, 2)
    return codes, _bytes(pad(pair, (0, SCALE_BYTES["fp8_block"] // 4 - 2)))


def _unpack_e4m3(
    codes: torch.Tensor, scales: torch.Tensor, format: str, shape: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    lanes = codes.unflatten(-1, (_WARPS, 4, 8, 4, 2, 2, 4))
    data = _join_codes(lanes.permute(0, 2, 7, 4, 1, 3, 6, 5, 8), shape).view(torch.float8_e4m3fn)
    if format == "fp8_channel":
        return data, _unpack_row_words(scales, torch.float32, shape)[..., :1].contiguous()
    pair = scales.contiguous().view(torch.float32)[..., : shape[0]].movedim(-1, 0)
    every = TASK_ROWS // _task_rows(shape[0] == 2)
    return data, pair[:, ::every].contiguous()


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------


def _pack_mxfp4(halves: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Bytes of codes and of scales, [task, chunk, bytes], and how many weights were flushed."""
    scale = _scale_of(halves)
    codes = torch.stack((halves.data & 15, halves.data >> 4), -1).flatten(-2)
    flushed = int(((codes & 7 != 0) & _of_columns(scale == 0)).sum())
    codes = torch.where(_of_columns(scale == _E8M0_NAN), 0, codes)
    split = _split_codes(codes).unflatten(5, (2, 2))
    # [task, chunk, warp, two steps, g, q, step of them, 2, the lane's 8 codes]
    lanes = split.permute(0, 4, 1, 5, 3, 8, 6, 2, 7, 9).flatten(-2)
    exponents = pad(scale, (0, -scale.shape[-1] % 4)).unflatten(-1, (-1, 4))
    whole = unsigned(exponents.contiguous().view(torch.int32).squeeze(-1))
    return (
        _bytes(words_of(lanes).flatten(2)),
        _pack_row_words(signed(whole >> 1 | (whole & 1) << 31)),
        flushed,
    )


def _of_columns(of_blocks: torch.Tensor) -> torch.Tensor:
    """What is known of blocks of 32 columns, for each column."""
    return of_blocks.repeat_interleave(_MX_BLOCK, -1)


def _unpack_mxfp4(
    codes: torch.Tensor, scales: torch.Tensor, format: str, shape: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    words = codes.contiguous().view(torch.int32).unflatten(-1, (_WARPS, 2, 8, 4, 2, 2))
    lanes = codes_of(words).unflatten(-1, (2, 4))
    values = _join_codes(lanes.permute(0, 2, 7, 4, 1, 3, 6, 8, 5, 9).flatten(5, 6), shape)
    rows = unsigned(_unpack_row_words(scales, torch.int32, shape))
    whole = signed((rows << 1 | rows >> 31) & WORD)
    scale = whole.unsqueeze(-1).contiguous().view(torch.uint8).flatten(-2)[..., : shape[2] // _MX_BLOCK]
    values = torch.where(_of_columns(scale == 0), 0, values)
    return values[..., 0::2] | values[..., 1::2] << 4, scale.contiguous()


def _scale_of(stored: QuantizedTensor) -> torch.Tensor:
    if stored.scale is None:
        raise ArgumentError(f"pack_matrix: {stored.format} weights must have scales; got none. Requantise them.")
    return stored.scale


# ---- a layer ---------------------------------------------------------------------------------------------------------


class EpWeights(ctypes.Structure):
    """What role2 is handed by value beside EpParams (ep_weights.cuh)."""

    _fields_ = (
        ("gmem_w13", ctypes.c_void_p),
        ("gmem_w2", ctypes.c_void_p),
        ("gmem_w13_bias", ctypes.c_void_p),
        ("gmem_w2_bias", ctypes.c_void_p),
        ("gmem_shared_w13", ctypes.c_void_p),
        ("gmem_shared_w2", ctypes.c_void_p),
        ("gmem_shared_w13_bias", ctypes.c_void_p),
        ("gmem_shared_w2_bias", ctypes.c_void_p),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up_offset", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
    )


@dataclass(frozen=True, eq=False)
class PackedForRole2:
    """One set of experts, packed.

    Attributes:
        w13: uint8 [E, intermediate_padded / 64, hidden_padded / 128, image_bytes(format)].
        w2: uint8 [E, hidden_padded / 128, ceil(intermediate_padded / 128), image_bytes(format)].
        format: of the weights.
        flushed: weights that became zero (MXFP4 blocks of the least scale; see the module).
        w13_bias: FP32 [E, 2, intermediate] or None.
        w2_bias: FP32 [E, hidden] or None.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    format: str
    flushed: int = 0
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of images and biases."""
        tensors = (t for t in (self.w13, self.w2, self.w13_bias, self.w2_bias) if t is not None)
        return sum(t.numel() * t.element_size() for t in tensors)

    def pointers(self) -> tuple[int, int, int, int]:
        """Addresses of w13, w2 and the two biases (0 where there is none)."""
        w13_bias, w2_bias = (0 if t is None else t.data_ptr() for t in (self.w13_bias, self.w2_bias))
        return self.w13.data_ptr(), self.w2.data_ptr(), w13_bias, w2_bias


@dataclass(frozen=True, eq=False)
class EpPacked:
    """One rank's experts as role2 takes them. The `Experts` they were made from are not kept.

    Attributes:
        routed: the rank's own routed experts.
        shared: the fused shared experts, or None.
        gate: the activation between the projections.
    """

    routed: PackedForRole2
    shared: PackedForRole2 | None
    gate: Activation

    @property
    def flushed(self) -> int:
        """Weights that became zero, routed and shared."""
        return self.routed.flushed + (0 if self.shared is None else self.shared.flushed)

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + (0 if self.shared is None else self.shared.nbytes)

    def arguments(self) -> EpWeights:
        """The struct for a launch; the tensors must live until it has run."""
        shared = (0, 0, 0, 0) if self.shared is None else self.shared.pointers()
        limit = math.inf if self.gate.limit is None else self.gate.limit
        return EpWeights(*self.routed.pointers(), *shared, self.gate.alpha, limit, self.gate.up_offset, 0)


def pack_ep(experts: Experts, shared: Experts | None = None) -> EpPacked:
    """Pack one rank's experts for role2.

    Args:
        experts: the rank's own routed experts (`problem.local_experts`).
        shared: shared experts that are fused, with the same sizes and activation, or None.

    Raises:
        ArgumentError: shared experts of other sizes or another activation.
        UnsupportedError: a format without a policy.
    """
    if shared is not None:
        ours = (experts.hidden, experts.intermediate, experts.activation)
        if (shared.hidden, shared.intermediate, shared.activation) != ours:
            raise ArgumentError(
                f"pack_ep: shared experts must have the routed ones' hidden, intermediate and activation {ours}; got "
                f"{(shared.hidden, shared.intermediate, shared.activation)}. Run them outside the fused kernel."
            )
    return EpPacked(_pack_experts(experts), None if shared is None else _pack_experts(shared), experts.activation)


def _pack_experts(experts: Experts) -> PackedForRole2:
    (w13, lost13), (w2, lost2) = (pack_matrix(stored) for stored in (experts.w13, experts.w2))
    return PackedForRole2(w13, w2, experts.format, lost13 + lost2, experts.w13_bias, experts.w2_bias)
