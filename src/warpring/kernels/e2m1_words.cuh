// e2m1_words.cuh   Words of E2M1 codes (warpring/formats/e2m1_words.py) become E4M3 operands.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ uint32_t plain_shift(uint32_t v, int bits) { return v >> bits; }

// Two words are the 16 codes of 32 columns, of rows g and g + 8 together: some codes lie where the mask wants them, others
// are the exclusive or of two shifted words there. `shift` is one to the right, by whichever instruction has room.
template <uint32_t (*shift)(uint32_t, int)>
__device__ __forceinline__ void operands_of(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    constexpr uint32_t kMask = 0x9c9c9c9cu;
    a[0] = low & kMask;
    a[1] = high & kMask;
    a[2] = (low << 1 ^ shift(high, 2)) & kMask;
    a[3] = (low << 2 ^ high << 3) & kMask;
}
