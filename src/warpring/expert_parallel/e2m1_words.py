"""Words of E2M1 codes that role2 decodes by masks and shifts (`EpMxfp4` in ep_weights.cuh).

Sign and the other three bits of a code are those of an E4M3 or FP16 number, at the bits that a mask keeps. Half of a
word's bits are codes in their place. The bits between are such that two shifted words have their exclusive or where the
mask wants the other codes: each of these equations has one bit that no other needs, so they are solved one by one.
"""

from __future__ import annotations

import torch

from warpring.expert_parallel.problem import ActivationForm

#: Bits of a word.
WORD = 0xFFFFFFFF
#: The bits of operands that E2M1 codes are, in every byte or half of a word.
_E4M3_BITS, _F16_BITS = 0x9C9C9C9C, 0x8E008E00


def words_of(codes: torch.Tensor, activation: ActivationForm) -> torch.Tensor:
    """One lane's codes of 32 columns as its two words.

    Args:
        codes: uint8 [.., 2, 8], of rows g and g + 8, in the order of the operand's registers.
        activation: the operand's type: E4M3 for "fp8", FP16 for "bf16".

    Returns:
        int32 [.., 2].
    """
    return signed(_solve_e4m3(codes) if activation == "fp8" else _solve_f16(codes))


def codes_of(words: torch.Tensor, activation: ActivationForm) -> torch.Tensor:
    """The inverse of `words_of`, by the kernel's steps."""
    return _codes_of_e4m3(unsigned(words)) if activation == "fp8" else _codes_of_f16(unsigned(words))


def unsigned(words: torch.Tensor) -> torch.Tensor:
    """int32 [..] to int64 from 0 to 2^32 - 1."""
    return words.long() & WORD


def signed(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `unsigned`."""
    return torch.where(words > WORD // 2, words - WORD - 1, words).int()


def _every_byte(bits: int) -> int:
    return bits * 0x01010101


def _solve_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Codes [.., 2 rows, 8] -> words [.., 2] whose decoding (`_codes_of_e4m3`) they are."""
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
    return torch.stack((a0 | low0 | low1 | low5 | low6, a1 | high0 | high1 | high56), -1)


def _codes_of_e4m3(words: torch.Tensor) -> torch.Tensor:
    """Words [.., 2] -> codes [.., 2, 8] by the kernel's steps (EpMxfp4::e4m3)."""
    low, high = words.unbind(-1)
    a = [w & _E4M3_BITS for w in (low, high, low << 1 ^ high >> 2, low << 2 ^ high << 3)]
    operands = signed(torch.stack((a[0], a[2], a[1], a[3]), -1)).view(torch.uint8).unflatten(-1, (2, 8))
    return operands >> 4 & 8 | operands >> 2 & 7


def _solve_f16(codes: torch.Tensor) -> torch.Tensor:
    """Codes [.., 2 rows, 8] -> words [.., 2] whose decoding (`_codes_of_f16`) they are."""
    halves = ((codes.short() & 8) << 12 | (codes.short() & 7) << 9).contiguous()
    a0, a2, a4, a6 = unsigned(halves.view(torch.int32)).unbind(-1)
    own = a0 | a2 >> 8

    def bit(n: int, moved: torch.Tensor) -> torch.Tensor:
        return moved & (1 << n | 1 << n + 16)

    # a4 is word << 5 ^ word << 7, a6 word >> 3 ^ word << 15, at the bits of a0.
    own |= bit(4, a4 >> 5 ^ own << 2) | bit(5, a4 >> 5 ^ own << 2)
    own |= bit(6, a4 >> 5 ^ own << 2) | bit(8, a4 >> 7 ^ own >> 2)
    for half in (0xFFFF, 0xFFFF0000):  # the upper one's bits depend on the lower one's
        for n in (12, 13, 14):
            own |= bit(n, a6 << 3 ^ own << 18) & half
    return own | bit(0, a6 >> 15 ^ own >> 18)


def _codes_of_f16(words: torch.Tensor) -> torch.Tensor:
    """Words [.., 2] -> codes [.., 2, 8] by the kernel's steps (EpMxfp4::f16)."""
    views = (words, words << 8, words << 5 ^ words << 7, words >> 3 ^ words << 15)
    a = [moved & _F16_BITS for moved in views]
    operands = signed(torch.stack(a, -1)).view(torch.int16)
    return (operands >> 12 & 8 | operands >> 9 & 7).to(torch.uint8)
