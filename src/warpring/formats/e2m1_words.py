"""Words of E2M1 codes that tensor cores take after masks and shifts, as E4M3 (`operands_of` in e2m1_words.cuh).

Sign and the other three bits of a code are those of an E4M3 number, at the bits that a mask keeps. Half of a
word's bits are codes in their place. The bits between are such that two shifted words have their exclusive or where the
mask wants the other codes: each of these equations has one bit that no other needs, so they are solved one by one.
"""

from __future__ import annotations

import torch

#: Bits of a word.
WORD = 0xFFFFFFFF
#: The bits of operands that E2M1 codes are, in every byte of a word.
_E4M3_BITS = 0x9C9C9C9C


def words_of(codes: torch.Tensor) -> torch.Tensor:
    """One lane's codes of 32 columns as its two words, whose decoding (`codes_of`) they are.

    Args:
        codes: uint8 [.., 2, 8], of rows g and g + 8, in the order of the operand's registers.

    Returns:
        int32 [.., 2].
    """
    operands = ((codes & 8) << 4 | (codes & 7) << 2).contiguous().view(torch.int32)
    (a0, a2), (a1, a3) = (unsigned(operands[..., row, :]).unbind(-1) for row in (0, 1))
    # Bit n of every byte of low and high; what is moved to it from beyond the word's end is zero.
    low1 = (a2 ^ a1 >> 2) >> 1 & _every_byte(1 << 1)
    low5 = (a3 >> 2 ^ a1 << 1) & _every_byte(1 << 5)
    low0 = (a3 >> 2 ^ a1 << 1) & _every_byte(1 << 0)
    high1 = (a3 >> 3 ^ a0 >> 1) & _every_byte(1 << 1)
    high0 = (a3 >> 3 ^ low1 >> 1) & _every_byte(1 << 0)
    high56 = (a2 ^ a0 << 1) << 2 & _every_byte(1 << 5 | 1 << 6)
    low6 = (a2 >> 1 ^ high1 >> 3) & _every_byte(1 << 6)
    return signed(torch.stack((a0 | low0 | low1 | low5 | low6, a1 | high0 | high1 | high56), -1))


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `words_of`, by the kernel's steps (EpMxfp4::operands)."""
    low, high = unsigned(words).unbind(-1)
    a = [w & _E4M3_BITS for w in (low, high, low << 1 ^ high >> 2, low << 2 ^ high << 3)]
    operands = signed(torch.stack((a[0], a[2], a[1], a[3]), -1)).view(torch.uint8).unflatten(-1, (2, 8))
    return operands >> 4 & 8 | operands >> 2 & 7


def unsigned(words: torch.Tensor) -> torch.Tensor:
    """int32 [..] to int64 from 0 to 2^32 - 1."""
    return words.long() & WORD


def signed(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `unsigned`."""
    return torch.where(words > WORD // 2, words - WORD - 1, words).int()


def _every_byte(bits: int) -> int:
    return bits * 0x01010101
