"""Layout of the stream kernels: tile layout (`warpring.layout`), E2M1 codes in another order of bits.

A word holds eight codes as four pairs of BF16 bit fields. The stream kernels find them at left rotations of 0, 6, 10,
and for the last pair of 12 and 4 (`stream_formats.cuh`): two shifts a word less than in tile layout. Other formats are
unchanged. Every bit moves, none is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from warpring.experts import Experts
from warpring.layout import PackedExperts, PackedMatrix, pack_experts

#: Bytes of codes at the front of a record of 16 x 32 E2M1 weights; block scales follow.
_CODE_BYTES = 256
_FORMATS = ("mxfp4", "nvfp4")
_WORD = 0xFFFFFFFF
# Bits of a pair: sign, exponent, fraction of both halves. Of the last pair, those that move together.
_FIELDS, _TOP_EXPONENT = 0x81C081C0, 0x01000100
_Words = Callable[[torch.Tensor], torch.Tensor]


def to_stream(packed: PackedExperts) -> PackedExperts:
    """Experts in tile layout, brought into the layout of the stream kernels; shares what does not change."""
    return _map_words(packed, _stream_of_tile)


def to_tile(packed: PackedExperts) -> PackedExperts:
    """The inverse of `to_stream`."""
    return _map_words(packed, _tile_of_stream)


def pack_stream_experts(experts: Experts) -> PackedExperts:
    """Pack a layer for the stream kernels. Arguments and errors as in `warpring.layout.pack_experts`."""
    return to_stream(pack_experts(experts))


def _map_words(packed: PackedExperts, move: _Words) -> PackedExperts:
    if packed.format not in _FORMATS:
        return packed
    return replace(packed, w13=_map_matrix(packed.w13, move), w2=_map_matrix(packed.w2, move))


def _map_matrix(matrix: PackedMatrix, move: _Words) -> PackedMatrix:
    records = torch.empty_like(matrix.records)
    for out, one in zip(records, matrix.records, strict=True):  # an expert at a time: words take 16 times the bytes
        words = one[..., :_CODE_BYTES].contiguous().view(torch.int32).to(torch.int64) & _WORD
        moved = move(words)
        out[..., :_CODE_BYTES] = (moved - ((moved >> 31) << 32)).to(torch.int32).view(torch.uint8)
        out[..., _CODE_BYTES:] = one[..., _CODE_BYTES:]
    return replace(matrix, records=records)


def _rotate(words: torch.Tensor, left: int) -> torch.Tensor:
    """32-bit words in int64, rotated left."""
    left %= 32
    return (words << left | words >> (32 - left)) & _WORD


def _stream_of_tile(words: torch.Tensor) -> torch.Tensor:
    pairs = [words & _FIELDS, words << 3 & _FIELDS, words << 6 & _FIELDS]
    last = (words << 1 & 0x80008000) | (words >> 5 & _TOP_EXPONENT) | (words >> 4 & 0x00C000C0)
    moved = pairs[0] | _rotate(pairs[1], -6) | _rotate(pairs[2], -10)
    return moved | _rotate(last & ~_TOP_EXPONENT & _WORD, -12) | _rotate(last & _TOP_EXPONENT, -4)


def _tile_of_stream(words: torch.Tensor) -> torch.Tensor:
    pairs = [words & _FIELDS, _rotate(words, 6) & _FIELDS, _rotate(words, 10) & _FIELDS]
    last = (_rotate(words, 12) & (_FIELDS & ~_TOP_EXPONENT)) | (_rotate(words, 4) & _TOP_EXPONENT)
    moved = pairs[0] | pairs[1] >> 3 | pairs[2] >> 6
    return moved | (last & 0x80008000) >> 1 | (last & _TOP_EXPONENT) << 5 | (last & 0x00C000C0) << 4
