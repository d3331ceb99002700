"""What the host hands to the compiled functions: one array of 8-byte fields."""

from __future__ import annotations

import struct

_INTEGERS = (
    *("next_gate_up", "next_down", "num_active"),
    *("x", "x_stride", "idx", "idx_stride", "idx_bytes", "weights", "weights_stride", "out", "out_stride"),
    *("num_tokens", "topk", "num_experts", "hidden", "intermediate", "num_threads"),
    *("w13", "w13_scale", "w13_global", "w13_bias", "w2", "w2_scale", "w2_global", "w2_bias"),
    *("arranged_x", "act", "y", "cursor", "active", "first", "pair_token", "pair_weight"),
)
_FLOATS = ("alpha", "limit", "up_offset")
#: Names in order. Strides are bytes. The first three are written by the functions, and start at 0. Floats are FP32 in
#: the low half of their field.
FIELDS = (*_INTEGERS, *_FLOATS)
PACKED = struct.Struct(f"={len(_INTEGERS)}q" + "f4x" * len(_FLOATS))
#: Output rows that a thread takes at a time; divides hidden and intermediate.
ROWS = 16
#: Columns that vectors are padded to, with zeros.
PADDING = 128
