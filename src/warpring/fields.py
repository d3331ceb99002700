"""Codes of panels as bit fields, which a mask and few shifts turn into pairs of BF16 (`tile_formats.cuh`).

Codes are one a byte, as `warpring.layout` has them: uint8 [E, panel, record, g, half of the panel, q, 8 weights].
"""

from __future__ import annotations

import torch

#: The upper exponent bit of both E2M1 codes of a pair, as BF16 fields.
_TOP_EXPONENT = 0x01000100


def _words(fields: torch.Tensor) -> torch.Tensor:
    """int64 fields [E, panel, record, g, half, q, words] of 32 bits -> bytes [E, panel, record, lane, bytes]."""
    order = fields.permute(0, 1, 2, 3, 5, 4, 6).flatten(5)  # g, q, (half, words)
    return (
        order.to(torch.int64)
        .bitwise_and(0xFFFFFFFF)
        .sub((order >> 31 & 1) << 32)
        .to(torch.int32)
        .contiguous()
        .view(torch.uint8)
        .flatten(3, 4)
    )


def fields_e4m3(panels: torch.Tensor) -> torch.Tensor:
    """Four codes a word. In each half-word: the first pair at BF16's own places; of the second in the bits between the
    exponent above, the fraction below, and the sign of the other half-word's. One rotation by 4 brings signs and
    exponents into place, one shift by 4 fractions."""
    c = panels.to(torch.int64).unflatten(-1, (2, 2, 2))  # words, pairs, (low, high half-word)
    first, second = c[..., 0, :], c[..., 1, :]
    half = (first >> 7) << 15 | (first & 0x7F) << 4
    half = half | (second >> 3 & 15) << 11 | second & 7 | (second.flip(-1) >> 7) << 3
    return _words(half[..., 0] | half[..., 1] << 16)


def fields_e2m1(panels: torch.Tensor) -> torch.Tensor:
    """Eight codes a word: pairs in one mask at left rotations of 0, 6 and 10; of the last pair sign and the lower two
    bits at 12, the upper exponent bit at 4. No other placing of four pairs takes fewer shifts to find them again."""
    c = panels.to(torch.int64).unflatten(-1, (1, 4, 2))
    placed = (c >> 3) << 15 | (c & 7) << 6
    pairs = (placed[..., 0] | placed[..., 1] << 16).unbind(-1)
    word = pairs[0] | _rotate(pairs[1], -6) | _rotate(pairs[2], -10)
    return _words(word | _rotate(pairs[3] & ~_TOP_EXPONENT, -12) | _rotate(pairs[3] & _TOP_EXPONENT, -4))


def _rotate(words: torch.Tensor, left: int) -> torch.Tensor:
    """32-bit words in int64, rotated left."""
    left %= 32
    return (words << left | words >> (32 - left)) & 0xFFFFFFFF


def _half_words(codes: torch.Tensor, words: int) -> torch.Tensor:
    """Bytes [E, panel, record, bytes] -> contiguous int16 [E, panel, record, g, q, half, words, 2]."""
    return codes.contiguous().view(torch.int16).unflatten(-1, (8, 4, 2, words, 2))


def _interleaved(pairs: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `_words`: int16 codes of each pair of a word, as `_half_words` has them -> uint8 of `_panels`."""
    codes = torch.stack([pair.to(torch.uint8) for pair in pairs], -2)
    return codes.flatten(-3).transpose(4, 5)


def codes_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `fields_e4m3`: uint8 codes as panels have them."""
    half = _half_words(codes, words=2)
    first = (half >> 8 & 0x80) | (half >> 4 & 0x7F)
    second = (half.flip(-1) << 4 & 0x80) | (half >> 8 & 0x78) | half & 7
    return _interleaved([first, second])


def codes_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `fields_e2m1`: uint8 codes, one a byte, as panels have them."""
    words = codes.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    pairs = [_rotate(words, left) for left in (0, 6, 10)]
    pairs.append((_rotate(words, 12) & ~_TOP_EXPONENT) | (_rotate(words, 4) & _TOP_EXPONENT))
    halves = [torch.stack((pair & 0xFFFF, pair >> 16), -1).unflatten(-2, (8, 4, 2, 1)) for pair in pairs]
    return _interleaved([(half >> 12 & 8) | (half >> 6 & 7) for half in halves])
