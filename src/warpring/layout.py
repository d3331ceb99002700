"""Tile layout: expert weights in the order in which the tile kernels stream them.

A panel is 16 rows of one expert: 8 gate rows and the 8 up rows of the same neurons (w13), or 16 output rows (w2). A
record is a panel's next 32 columns: for each lane of a warp the codes that it feeds to two `mma.m16n8k16`, then the
block scales of the 16 rows. Records of a panel follow each other, so any run of them is one contiguous copy.

    lane l = 4 g + q holds rows g and g + 8, columns 8 q .. 8 q + 7 of the record

Codes are stored as bit fields that a mask and few shifts turn into pairs of BF16 (see `tile_formats.cuh`), and block
scales as BF16 exponents. Packing moves every bit and loses none, so `unpack` gives the stored weights back, with one
exception: a block of an MX format that holds a NaN becomes a block of NaNs, which no output can tell apart (one NaN in
a row makes the row's dot product NaN).

MXFP4 on Hopper has an order of its own, slabs (`warpring.slabs`), for a kernel that multiplies on warpgroups. A layer
is packed in one of the two, by the GPU that its weights lie on; every reader of packed weights takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from warpring.activation import Activation
from warpring.errors import ArgumentError, UnsupportedError
from warpring.experts import Experts, LayerBytes
from warpring.fields import codes_e2m1, codes_e4m3, fields_e2m1, fields_e4m3
from warpring.formats import QuantizedTensor, ceil_div, e2m1
from warpring.runtime.device import is_hopper
from warpring.shared import join_biases, shared_beside
from warpring.slabs import BLOCK_COLS, SLAB_MOST_COLS, SLAB_PANELS, has_slabs, panels_of, slabs_of, suits_slabs

PANEL_ROWS = 16
RECORD_COLS = 32
#: Bytes of a record: codes of 16 x 32 weights, then scales; by format, or by format and order.
RECORD_BYTES = {"bf16": 1024, "fp8_block": 512, "fp8_channel": 512, "mxfp8": 528, "mxfp4": 272, "nvfp4": 288}
RECORD_BYTES["mxfp4_slabs"] = RECORD_BYTES["mxfp4"]

_E8M0_NAN = 255
# A code placed as a BF16 bit field is its value times 2^-120 (E4M3) or 2^-126 (E2M1): that much is in the stored scale.
_FIELD_EXPONENT = {"mxfp8": 120, "mxfp4": 126}
_MAX_EXPONENT_FIELD = 254
#: A code of a slab is an E4M3 number, its value times 2^-6, its scale an FP32 exponent that moves up by 1 at most.
_SLAB_EXPONENT, _SLAB_UP = 6, 1


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One projection of all experts in tile layout.

    Attributes:
        records: uint8 [num_experts, panels, cols / 32, RECORD_BYTES]; in slabs [num_experts, panels / 4, cols / 64,
            4, PIECE_BYTES].
        matrix_scale: FP32 [num_experts, halves], multiplies every dot product of a matrix.
        row_scale: FP32 [num_experts, halves, rows] (fp8_channel) or None.
        block_scale: FP32 [num_experts, halves, ceil(rows / 128), ceil(cols / 128)] (fp8_block) or None.
    """

    records: torch.Tensor
    matrix_scale: torch.Tensor
    row_scale: torch.Tensor | None = None
    block_scale: torch.Tensor | None = None

    @property
    def num_halves(self) -> int:
        """2 for w13 (gate, up), 1 for w2."""
        return self.matrix_scale.shape[1]

    @property
    def in_slabs(self) -> bool:
        """Whether the order is that of `warpring.slabs`."""
        return self.records.dim() == 5

    def order(self, format: str) -> str:
        """Format and order in a word, for kernels that read both orders."""
        return f"{format}_slabs" if self.in_slabs else format

    @property
    def cols(self) -> int:
        """Columns of each matrix."""
        return self.records.shape[2] * (BLOCK_COLS if self.in_slabs else RECORD_COLS)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The stored tensors that exist."""
        return tuple(t for t in (self.records, self.matrix_scale, self.row_scale, self.block_scale) if t is not None)

    def expert(self, expert: int) -> PackedMatrix:
        """One expert, as a matrix of num_experts 1 that shares storage."""
        return self.map(lambda t: t[expert : expert + 1])

    def rows(self, first: int, last: int) -> PackedMatrix:
        """Rows [first, last) of every half of every expert, sharing storage.

        `first` divides by 128; `last` by 16, in slabs by 64.
        """
        together = PANEL_ROWS * (SLAB_PANELS if self.in_slabs else 1) // self.num_halves
        return PackedMatrix(
            self.records[:, first // together : last // together],
            self.matrix_scale,
            None if self.row_scale is None else self.row_scale[:, :, first:last],
            None if self.block_scale is None else self.block_scale[:, :, first // 128 : ceil_div(last, 128)],
        )

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> PackedMatrix:
        """The same matrix with `fn` applied to each stored tensor."""
        return PackedMatrix(
            fn(self.records),
            fn(self.matrix_scale),
            None if self.row_scale is None else fn(self.row_scale),
            None if self.block_scale is None else fn(self.block_scale),
        )


def pack(stored: QuantizedTensor, in_slabs: bool = False) -> PackedMatrix:
    """Pack one projection: logical [E, 2, intermediate, hidden] (gate, up) or [E, hidden, intermediate].

    Args:
        stored: its weights.
        in_slabs: in slabs, for which `has_slabs` holds.

    Raises:
        UnsupportedError: a NaN code in fp8_block weights, whose scales span many rows.
    """
    halves = stored if len(stored.shape) == 4 else _unsqueeze(stored)
    fmt = stored.format
    panels = _panels(halves)
    num_experts, num_halves = halves.shape[:2]
    matrix_scale = torch.ones(num_experts, num_halves, device=stored.device)
    if fmt == "bf16":
        # Two planes, row g then row g + 8, each 16 bytes a lane.
        records = panels.permute(0, 1, 2, 4, 3, 5, 6).contiguous().view(torch.uint8)
        return PackedMatrix(records.flatten(3), matrix_scale)
    if fmt in ("fp8_block", "fp8_channel"):
        nan = (panels & 0x7F) == 0x7F
        if bool(nan.any()):
            raise UnsupportedError(f"pack: {fmt} weights with NaN codes have no tile layout. Use path='warp'.")
        codes = fields_e4m3(panels).flatten(3)
        scale = halves.scale
        if fmt == "fp8_block":
            return PackedMatrix(codes, matrix_scale, block_scale=scale)
        return PackedMatrix(codes, matrix_scale, row_scale=None if scale is None else scale.squeeze(-1).contiguous())
    if fmt == "nvfp4":
        block_scale, global_scale = halves.scale, halves.global_scale
        if block_scale is None or global_scale is None:
            raise UnsupportedError("pack: nvfp4 weights need both levels of scales.")
        scales = _panel_scales(block_scale.view(torch.uint8), cols_per_record=2)
        # [.., record, half/row g+8, g, 16-column group] -> groups, rows g, halves
        scales = scales.permute(0, 1, 2, 5, 4, 3).flatten(3)
        return PackedMatrix(torch.cat((fields_e2m1(panels).flatten(3), scales), -1), global_scale.float() * 2.0**8)
    return _pack_mx(halves, panels, in_slabs)


def _pack_mx(halves: QuantizedTensor, panels: torch.Tensor, in_slabs: bool) -> PackedMatrix:
    if halves.scale is None:
        raise UnsupportedError(f"pack: {halves.format} weights need scales.")
    field, most_up, unit = (0, _SLAB_UP, _SLAB_EXPONENT) if in_slabs else (_FIELD_EXPONENT[halves.format], 0, 0)
    scale = halves.scale.to(torch.int16)
    # The largest scale of a matrix decides how far all of them move down to fit; matrix_scale gives it back. In slabs
    # they move up, where there is room: a field of 0 is no power of two.
    largest = torch.where(scale == _E8M0_NAN, 0, scale).amax((-1, -2))
    down = (largest + field - _MAX_EXPONENT_FIELD).clamp(min=-most_up)
    exponents = (scale + field - down[..., None, None]).clamp(min=0)
    scales = _panel_scales(torch.where(scale == _E8M0_NAN, 255, exponents).to(torch.uint8), cols_per_record=1)
    nan = _panel_scales(scale, cols_per_record=1) == _E8M0_NAN  # [E, P, record, 2, 8, 1]
    if halves.format == "mxfp8":
        is_nan = ((panels & 0x7F) == 0x7F).any(-1).any(-1).movedim(-1, 3)[..., None] | nan
        scales = torch.where(is_nan, 255, scales)
        panels = torch.where(is_nan.squeeze(-1).movedim(3, 4)[..., None, None], 0, panels)
        codes = fields_e4m3(panels)
    else:
        panels = torch.where(nan.squeeze(-1).movedim(3, 4)[..., None, None], 0, panels)
        codes = panels if in_slabs else fields_e2m1(panels)
    matrix_scale = torch.ldexp(torch.ones_like(down, dtype=torch.float32), down + unit)
    if in_slabs:
        return PackedMatrix(slabs_of(codes, scales.squeeze(-1)), matrix_scale)
    scales = scales.squeeze(-1).permute(0, 1, 2, 4, 3).flatten(3)  # rows g, then g + 8, side by side
    return PackedMatrix(torch.cat((codes.flatten(3), scales), -1), matrix_scale)


def _unsqueeze(stored: QuantizedTensor) -> QuantizedTensor:
    moved = stored.map(lambda t: t.unsqueeze(1))
    return QuantizedTensor(
        stored.format, (stored.shape[0], 1, *stored.shape[1:]), moved.data, moved.scale, moved.global_scale
    )


def _split_rows(t: torch.Tensor, num_halves: int) -> torch.Tensor:
    """[E, halves, rows, cols] -> [E, panel, half of the panel (rows g, g + 8), g, cols]."""
    if num_halves == 2:
        return t.unflatten(2, (-1, 8)).transpose(1, 2)
    return t.squeeze(1).unflatten(1, (-1, 2, 8))


def _panels(halves: QuantizedTensor) -> torch.Tensor:
    """Codes as [E, panel, record, g, half, q, 8 weights]: int16 bits (bf16), else uint8 codes, one a byte."""
    data = halves.data
    if halves.format == "bf16":
        codes = data.view(torch.int16)
    elif halves.format in ("mxfp4", "nvfp4"):
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    else:
        codes = data.view(torch.uint8)
    rows = _split_rows(codes, halves.shape[1]).unflatten(-1, (-1, 4, 8))
    return rows.permute(0, 1, 4, 3, 2, 5, 6)


def _panel_scales(scale: torch.Tensor, cols_per_record: int) -> torch.Tensor:
    """[E, halves, rows, blocks] -> [E, panel, record, half, g, blocks of a record]."""
    rows = _split_rows(scale, scale.shape[1]).unflatten(-1, (-1, cols_per_record))
    return rows.permute(0, 1, 4, 2, 3, 5)


def unpack(packed: PackedMatrix, format: str) -> QuantizedTensor:
    """The inverse of `pack`: logical [E, 2, intermediate, hidden] of two halves, [E, hidden, intermediate] of one.

    Temporaries take some 10 bytes a weight; take a piece of a layer with `PackedMatrix.expert` or `rows`.
    """
    if packed.in_slabs:
        return _unpack_slabs(packed, format)
    scale = global_scale = None
    if format == "bf16":
        panels = packed.records.view(torch.int16).unflatten(-1, (2, 8, 4, 8)).permute(0, 1, 2, 4, 3, 5, 6)
        data = _rows_of(panels, packed.num_halves).view(torch.bfloat16)
    elif format in ("mxfp4", "nvfp4"):
        data = e2m1.pack(_rows_of(codes_e2m1(packed.records[..., :256]), packed.num_halves))
    else:
        data = _rows_of(codes_e4m3(packed.records[..., :512]), packed.num_halves).view(torch.float8_e4m3fn)
    if format in _FIELD_EXPONENT:
        stored = packed.records[..., -16:].unflatten(-1, (8, 2)).permute(0, 1, 2, 4, 3).unsqueeze(-1)
        scale = _rows_of_scales(stored, packed.num_halves)
        down = packed.matrix_scale.frexp().exponent[..., None, None] - 1
        exponents = scale.int() - _FIELD_EXPONENT[format] + down
        scale = torch.where(scale == _E8M0_NAN, _E8M0_NAN, exponents).to(torch.uint8)
    elif format == "nvfp4":
        stored = packed.records[..., 256:].unflatten(-1, (2, 8, 2)).permute(0, 1, 2, 5, 4, 3)
        scale = _rows_of_scales(stored, packed.num_halves).view(torch.float8_e4m3fn)
        global_scale = packed.matrix_scale * 2.0**-8
    elif format == "fp8_channel":
        scale = None if packed.row_scale is None else packed.row_scale[..., None]
    elif format == "fp8_block":
        scale = packed.block_scale
    return _logical(QuantizedTensor(format, (*data.shape[:3], packed.cols), data, scale, global_scale))


def _unpack_slabs(packed: PackedMatrix, format: str) -> QuantizedTensor:
    codes, fields = panels_of(packed.records)
    data = e2m1.pack(_rows_of(codes, packed.num_halves))
    field = _rows_of_scales(fields.unsqueeze(-1), packed.num_halves)
    down = packed.matrix_scale.frexp().exponent[..., None, None] - 1 - _SLAB_EXPONENT
    scale = torch.where(field == _E8M0_NAN, _E8M0_NAN, field + down).to(torch.uint8)
    return _logical(QuantizedTensor(format, (*data.shape[:3], packed.cols), data, scale))


def _logical(halves: QuantizedTensor) -> QuantizedTensor:
    """[E, halves, rows, cols] as `pack` takes it: a single half has no dimension of its own."""
    if halves.shape[1] == 2:
        return halves
    shape = (halves.shape[0], *halves.shape[2:])
    return replace(halves.map(lambda t: t.squeeze(1)), shape=shape)


def _rows_of(panels: torch.Tensor, num_halves: int) -> torch.Tensor:
    """The inverse of `_panels`: [E, panel, record, g, half, q, 8 weights] -> [E, halves, rows, cols]."""
    return _join_rows(panels.permute(0, 1, 4, 3, 2, 5, 6).flatten(4), num_halves)


def _rows_of_scales(scales: torch.Tensor, num_halves: int) -> torch.Tensor:
    """The inverse of `_panel_scales`: [E, panel, record, half, g, blocks of a record] -> [E, halves, rows, blocks]."""
    return _join_rows(scales.permute(0, 1, 3, 4, 2, 5).flatten(4), num_halves)


def _join_rows(t: torch.Tensor, num_halves: int) -> torch.Tensor:
    """The inverse of `_split_rows`."""
    if num_halves == 2:
        return t.transpose(1, 2).flatten(2, 3)
    return t.flatten(1, 3).unsqueeze(1)


#: Experts packed at a time: bounds the temporaries, which take some 20 bytes a weight.
_PACKED_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class PackedExperts(LayerBytes):
    """One layer's experts in tile layout: what `moe_decode` runs on the tile path, and on the grouped one.

    The row-major codes are not kept: drop the `Experts` it was made from, and the layer is in memory once.

    Attributes:
        w13: gate and up projections; of the shared experts behind those of the routed ones, like all that follows.
        w2: down projection.
        format: name of the number format.
        num_experts: routed experts, the ids that topk_idx may hold.
        hidden, intermediate: sizes of each expert.
        activation: the gated activation between the projections.
        w13_bias: FP32 [num_experts + num_shared, 2, intermediate] or None.
        w2_bias: FP32 [num_experts + num_shared, hidden] or None.
        num_shared: shared experts, of the routed ones' width.
    """

    w13: PackedMatrix
    w2: PackedMatrix
    format: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    num_shared: int = 0

    @property
    def device(self) -> torch.device:
        return self.w13.records.device

    @property
    def in_slabs(self) -> bool:
        """Whether the weights are in slabs."""
        return self.w13.in_slabs

    @property
    def order(self) -> str:
        """Format and order in a word, see `PackedMatrix.order`."""
        return self.w13.order(self.format)

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that one expert's work must read at least once, routed or shared: codes, scales, biases."""
        return self.nbytes // (self.num_experts + self.num_shared)

    def some(self, first: int, last: int) -> PackedExperts:
        """Experts [first, last), the shared ones counted behind the routed ones, as routed ones that share storage."""
        return replace(
            self,
            w13=self.w13.map(lambda t: t[first:last]),
            w2=self.w2.map(lambda t: t[first:last]),
            num_experts=last - first,
            w13_bias=None if self.w13_bias is None else self.w13_bias[first:last],
            w2_bias=None if self.w2_bias is None else self.w2_bias[first:last],
            num_shared=0,
        )

    def to(self, device: torch.device | str) -> PackedExperts:
        """The same experts on another device; a GPU that has no kernel for slabs gets them packed anew."""
        target = torch.device(device)
        if self.in_slabs and target.type == "cuda" and not is_hopper(target):
            return self._in_panels().to(device)
        return replace(
            self,
            w13=self.w13.map(lambda t: t.to(device)),
            w2=self.w2.map(lambda t: t.to(device)),
            w13_bias=None if self.w13_bias is None else self.w13_bias.to(device),
            w2_bias=None if self.w2_bias is None else self.w2_bias.to(device),
        )

    def _in_panels(self) -> PackedExperts:
        """From slabs, a few experts at a time."""

        def anew(matrix: PackedMatrix) -> PackedMatrix:
            return _pack_in_pieces([_unpack_in_pieces(matrix, self.format)], in_slabs=False)

        return replace(self, w13=anew(self.w13), w2=anew(self.w2))

    def __repr__(self) -> str:
        shared = f" + {self.num_shared} shared" if self.num_shared else ""
        return (
            f"PackedExperts({self.num_experts}{shared} x {self.hidden} x {self.intermediate}, {self.format}, "
            f"{self.activation}, {self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def pack_experts(experts: Experts, shared: Experts | None = None, *, in_slabs: bool | None = None) -> PackedExperts:
    """Pack a layer for the tile path, a few experts at a time.

    Args:
        experts: the routed experts.
        shared: experts that every token wants, run in the same launch: of the same hidden size, format and activation,
            m times as wide as the routed ones. Wider ones are cut into m of the routed width, which changes no value.
        in_slabs: which order the weights get, see `warpring.slabs`; None for slabs where the GPU that they lie on has
            the kernel for these (Hopper) and the shape gains by it (`suits_slabs`), else records of panels, which every
            GPU reads. Slabs decode 1 to 64 sequences faster, and larger batches slower.

    Raises:
        ArgumentError: shared experts that do not fit the routed ones, see `warpring.shared.shared_beside`; slabs of a
            shape or format that has none.
        UnsupportedError: see `pack`.
    """
    slabs = has_slabs(experts.format, experts.hidden, experts.intermediate)
    if in_slabs is None:
        suits = suits_slabs(experts.format, experts.hidden, experts.intermediate)
        in_slabs = suits and is_hopper(experts.device)
    elif in_slabs and not slabs:
        raise ArgumentError(
            f"pack_experts: in_slabs takes mxfp4 whose sizes divide by {BLOCK_COLS} and are at most {SLAB_MOST_COLS}; "
            f"got {experts.format}, hidden {experts.hidden}, intermediate {experts.intermediate}. Leave it None."
        )
    parts = [experts]
    w13_bias, w2_bias = experts.w13_bias, experts.w2_bias
    num_shared = 0
    if shared is not None:
        shared = shared_beside(experts, shared)
        parts.append(shared)
        num_shared = shared.num_experts
        counts = (experts.num_experts, num_shared)
        w13_bias = join_biases(w13_bias, shared.w13_bias, counts)
        w2_bias = join_biases(w2_bias, shared.w2_bias, counts)
    return PackedExperts(
        w13=_pack_in_pieces([part.w13 for part in parts], in_slabs),
        w2=_pack_in_pieces([part.w2 for part in parts], in_slabs),
        format=experts.format,
        num_experts=experts.num_experts,
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        activation=experts.activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        num_shared=num_shared,
    )


def unpack_experts(packed: PackedExperts) -> Experts:
    """The routed `Experts` that `pack_experts` was given, bit for bit (a NaN in an MX block aside); a few at a time.

    Where only the shared experts had a bias, these have one of zeros.
    """
    return _unpack(packed.some(0, packed.num_experts) if packed.num_shared else packed)


def unpack_shared(packed: PackedExperts) -> Experts | None:
    """The shared experts in the same way, cut to the routed experts' width as `pack_experts` did; None without any."""
    if not packed.num_shared:
        return None
    return _unpack(packed.some(packed.num_experts, packed.num_experts + packed.num_shared))


def _unpack(packed: PackedExperts) -> Experts:
    return Experts(
        _unpack_in_pieces(packed.w13, packed.format),
        _unpack_in_pieces(packed.w2, packed.format),
        packed.activation,
        packed.w13_bias,
        packed.w2_bias,
    )


def _unpack_in_pieces(packed: PackedMatrix, format: str) -> QuantizedTensor:
    num_experts = packed.records.shape[0]
    pieces = [
        unpack(packed.map(lambda t, first=first: t[first : first + _PACKED_AT_ONCE]), format)
        for first in range(0, num_experts, _PACKED_AT_ONCE)
    ]
    tensors = [torch.cat(parts) for parts in zip(*(piece.tensors() for piece in pieces), strict=True)]
    return QuantizedTensor(format, (num_experts, *pieces[0].shape[1:]), *tensors)


def _experts_of(stored: QuantizedTensor, which: slice) -> QuantizedTensor:
    some = stored.map(lambda t: t[which])
    return replace(some, shape=(some.data.shape[0], *stored.shape[1:]))


def _pack_in_pieces(parts: Sequence[QuantizedTensor], in_slabs: bool) -> PackedMatrix:
    """The experts of all parts behind each other."""
    num_experts = sum(part.shape[0] for part in parts)
    out: PackedMatrix | None = None
    place = 0
    for stored in parts:
        for first in range(0, stored.shape[0], _PACKED_AT_ONCE):
            piece = pack(_experts_of(stored, slice(first, first + _PACKED_AT_ONCE)), in_slabs)
            if out is None:
                out = piece.map(lambda t: t.new_empty(num_experts, *t.shape[1:]))
            count = piece.records.shape[0]
            for whole, part in zip(out.tensors(), piece.tensors(), strict=True):
                whole[place : place + count] = part
            place += count
    if out is None:
        raise UnsupportedError("pack_experts: a layer without experts has no tile layout.")
    return out
