"""Slabs: MXFP4 weights in the order in which the warpgroup form of the tile kernel streams them (tile_wgmma.cu).

A slab is four panels of `warpring.layout`, 64 rows of one expert. It is cut into blocks of 64 columns, and those of a
slab follow each other, so any run of them is one contiguous copy. Of each of a block's panels 544 bytes:

    512    16 of lane l = 4 g + q: rows g and g + 8, columns 8 q .. 8 q + 7 of the first 32 columns, then of the second,
           two words each (formats/e2m1_words.py)
     32    a word of each g: the FP32 exponent fields of the scales of row g at bits 30 .. 23 (first 32 columns) and
           22 .. 15 (second), those of row g + 8 at 14 .. 7, and at 6 .. 0 with the lowest bit at 31

The same bytes a weight as records of panels. Nothing here depends on how rows become panels.
"""

from __future__ import annotations

import torch

from warpring.formats.e2m1_words import codes_of, signed, unsigned, words_of

SLAB_PANELS = 4
BLOCK_COLS = 64
#: Bytes of a panel of a block: codes of 16 x 64 weights, then scales.
PIECE_BYTES = 544
_CODE_BYTES = 512
#: Widths of a layer, at most: an activation's row has a place in shared memory beside the weights.
SLAB_MOST_COLS = 7168
#: Hidden times intermediate of a layer that gains by slabs, at least.
SLAB_LEAST_WEIGHTS = 8_000_000
#: Where the last scale's field is: one bit of it round the word's end.
_SHIFTS = (23, 15, 7)


def has_slabs(format: str, hidden: int, intermediate: int) -> bool:
    """Whether layers of this shape can be packed in slabs."""
    fits = max(hidden, intermediate) <= SLAB_MOST_COLS and not (hidden % BLOCK_COLS or intermediate % BLOCK_COLS)
    return format == "mxfp4" and fits


def suits_slabs(format: str, hidden: int, intermediate: int) -> bool:
    """Whether every batch up to 64 tokens is decoded faster from slabs: that of large experts.

    With small ones the start and the end of a layer take longer than slabs save (docs/kernels.md has the figures).
    """
    return has_slabs(format, hidden, intermediate) and hidden * intermediate >= SLAB_LEAST_WEIGHTS


def slabs_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Slabs of panels.

    Args:
        codes: uint8 [E, panels, records of 32 columns, g, half of the panel, q, 8 weights], E2M1, one a byte.
        scales: int [E, panels, records, half, g], exponent fields.

    Returns:
        uint8 [E, panels / 4, records / 2, 4, PIECE_BYTES].
    """
    words = words_of(codes.transpose(-3, -2).contiguous())  # [E, P, record, g, q, 2]
    lanes = words.flatten(3, 4).unflatten(2, (-1, 2)).transpose(3, 4)  # [E, P, block, lane, record, 2]
    fields = scales.long().unflatten(2, (-1, 2)).permute(0, 1, 2, 5, 4, 3).flatten(4)  # [.., g, (half, record)]
    word = sum((fields[..., i] << shift for i, shift in enumerate(_SHIFTS)), fields[..., 3] >> 1)
    word = word | (fields[..., 3] & 1) << 31
    piece = torch.cat([part.contiguous().view(torch.uint8).flatten(3) for part in (lanes, signed(word))], -1)
    return piece.unflatten(1, (-1, SLAB_PANELS)).transpose(2, 3).contiguous()


def panels_of(slabs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `slabs_of`: codes, and int64 scales."""
    piece = slabs.transpose(2, 3).flatten(1, 2)  # [E, P, block, bytes]
    words = piece[..., :_CODE_BYTES].contiguous().view(torch.int32).unflatten(-1, (8, 4, 2, 2))  # g, q, record, 2
    codes = codes_of(words).permute(0, 1, 2, 5, 3, 6, 4, 7).flatten(2, 3)
    word = unsigned(piece[..., _CODE_BYTES:].contiguous().view(torch.int32))
    fields = [word >> shift & 0xFF for shift in _SHIFTS] + [(word & 0x7F) << 1 | word >> 31]
    scales = torch.stack(fields, -1).unflatten(-1, (2, 2))  # [E, P, block, g, half, record]
    return codes, scales.permute(0, 1, 2, 5, 4, 3).flatten(2, 3)
