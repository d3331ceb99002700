// grouped_plan.cuh   What the kernels of the grouped path on packed weights agree on: blocks of an expert's pairs, and
// images of their rows.
//
// The (token, slot) pairs that want an expert are rows behind each other, cut into blocks of at most kBlockTokens. The
// plan in global memory: its first word is the number of blocks; from int4 1 on, one `ExpertPairs` a block.
// An image of a block of n rows holds, for every chunk of 64 columns in turn, n rows of 128 bytes as the tensor cores
// read them: each record of 32 columns as a 4 x 4 transposition of its 4-byte words, which puts the columns in the order
// of the tile layout's A operands; the 16-byte units of a row at their place XOR the row modulo 8.
//
// Compile-time parameter: WARPRING_TOKENS, the most rows of a block, a multiple of 16.
#pragma once
#include "formats.cuh"

constexpr int kBlockTokens = WARPRING_TOKENS;
constexpr int kChunkColumns = 64, kChunkRowBytes = 128, kUnitBytes = 16;
static_assert(kBlockTokens % 16 == 0, "blocks of one expert are of equal sizes, multiples of 16, but the last");

// Of a block's expert: its rows, and the first of its blocks.
struct ExpertPairs {
    int32_t expert, first, count, first_block;

    __device__ __forceinline__ int num_blocks() const { return ceil_div(count, kBlockTokens); }
    // Rows of each block but the last: as equal as multiples of 16 are.
    __device__ __forceinline__ int block_rows() const {
        return min(kBlockTokens, ceil_div(ceil_div(count, num_blocks()), 16) * 16);
    }
};

// Of a pair: its row, -1 where it has no expert; the rows of its block.
struct PairPlace {
    int32_t row, block_first, block_count, reserved;
};

// Bytes of a row in all chunks of an image.
__device__ __forceinline__ constexpr int image_row_bytes(int columns) {
    return ceil_div(columns, kChunkColumns) * kChunkRowBytes;
}

// Where unit `unit` of row `row` of a block's chunk lies, from the chunk's begin.
__device__ __forceinline__ int unit_offset(int row, int unit) {
    return row * kChunkRowBytes + ((unit ^ (row & 7)) * kUnitBytes);
}
