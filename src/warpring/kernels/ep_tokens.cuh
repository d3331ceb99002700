// ep_tokens.cuh   Tokens in the form that the tensor cores eat: BF16 rows of x to pieces of 16 bytes with their scale.
//
// A unit of work of a warp is 4 tokens x 128 columns: lane / 8 is the token, lane % 8 the piece, of each term. The 8 lanes
// of a token read 256 contiguous bytes, and 4 tokens' pieces fill whole 32-byte sectors of a B image.
#pragma once
#include "ep_common.cuh"
#include "ep_quantize.cuh"

constexpr int kUnitTokens = 4;
constexpr int kPieceBytes = 16;
constexpr int kPieceColumns = kPieceBytes;  // of one term
constexpr int kChunkColumns = kChunkBytes;

// Columns [column, column + kPieceColumns) of a token: as they are loaded, BF16, and FP32.
struct LoadedPiece {
    uint4 bits[kPieceColumns / 8];
};
struct TokenPiece {
    float v[kPieceColumns];
};

// Zeros beyond hidden (pieces do not straddle it: hidden is a multiple of 32) and where `exists` is false.
__device__ __forceinline__ LoadedPiece load_piece(const uint16_t* gmem_row, int column, bool exists) {
    LoadedPiece loaded;
    exists = exists && column < kHidden;
#pragma unroll
    for (int i = 0; i < kPieceColumns / 8; ++i)
        loaded.bits[i] = exists ? ld_activations(gmem_row + column + 8 * i) : make_uint4(0, 0, 0, 0);
    return loaded;
}

__device__ __forceinline__ TokenPiece piece_of(const LoadedPiece& loaded) {
    TokenPiece piece;
#pragma unroll
    for (int i = 0; i < kPieceColumns / 8; ++i) {
        const uint32_t words[4] = {loaded.bits[i].x, loaded.bits[i].y, loaded.bits[i].z, loaded.bits[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            piece.v[8 * i + 2 * w] = __uint_as_float(words[w] << 16);
            piece.v[8 * i + 2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
        }
    }
    return piece;
}

// Largest magnitude of one token's chunk: over the 8 lanes that hold it.
__device__ __forceinline__ uint32_t chunk_amax(const TokenPiece& piece) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kPieceColumns; ++i) amax = max(amax, magnitude_bits(piece.v[i]));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, lanes));
    return amax;
}

// The piece of each term.
struct EncodedPiece {
    uint4 term[kTerms];
};
__device__ __forceinline__ EncodedPiece encode_piece(const TokenPiece& piece, float multiplier) {
    uint32_t words[kTerms][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float* v = piece.v + 4 * w;
        const E4m3Pair low = e4m3_pair(v[1] * multiplier, v[0] * multiplier),
                       high = e4m3_pair(v[3] * multiplier, v[2] * multiplier);
#pragma unroll
        for (int t = 0; t < kTerms; ++t) words[t][w] = low.term[t] | uint32_t(high.term[t]) << 16;
    }
    EncodedPiece encoded;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) encoded.term[t] = make_uint4(words[t][0], words[t][1], words[t][2], words[t][3]);
    return encoded;
}

// Tokens first, first + step, ... (`count` of them) of x, dealt out to the warps of a CTA.
template <int kThreads>
struct Tokens {
    const uint16_t* gmem_x;
    int64_t x_stride;
    int first, step, count;

    // Calls use(i, chunk, values) for every unit, whole warps at a time, with zeros where i >= count.
    template <class Use>
    __device__ __forceinline__ void for_each_unit(const Use& use) const {
        constexpr int kWarps = kThreads / kLanes;
        constexpr int kUnitsInFlight = kThreads / 128;  // as registers allow: role4 has fewer, to fit beside role1
        const int lane = threadIdx.x % kLanes, units = ceil_div(count, kUnitTokens) * kScales;
#pragma unroll 1
        for (int unit = threadIdx.x / kLanes; unit < units; unit += kUnitsInFlight * kWarps) {
            LoadedPiece loaded[kUnitsInFlight];
            int i[kUnitsInFlight], chunk[kUnitsInFlight];
#pragma unroll
            for (int u = 0; u < kUnitsInFlight; ++u) {
                i[u] = (unit + u * kWarps) / kScales * kUnitTokens + lane / 8;
                chunk[u] = (unit + u * kWarps) % kScales;
                const int column = chunk[u] * kChunkColumns + lane % 8 * kPieceColumns;
                loaded[u] = load_piece(gmem_x + (first + i[u] * step) * x_stride, column, i[u] < count);
            }
#pragma unroll
            for (int u = 0; u < kUnitsInFlight; ++u) use(i[u], chunk[u], piece_of(loaded[u]));
        }
    }
};

// Encodes them by the whole CTA: `emit_piece(i, chunk, piece, codes)` gets 16 bytes of codes of the i-th token (chunks of
// codes: the terms of 128 columns follow each other), `emit_scale(i, s, scale)` each scale once. Ends without a barrier.
template <int kThreads, class EmitPiece, class EmitScale>
__device__ __forceinline__ void encode_tokens(const Tokens<kThreads>& tokens, EmitPiece emit_piece,
                                              EmitScale emit_scale) {
    const int piece = threadIdx.x % 8;
    tokens.for_each_unit([&](int i, int chunk, const TokenPiece& values) {
        const QuantScale scale = quant_scale(chunk_amax(values));
        if (i >= tokens.count) return;
        const EncodedPiece encoded = encode_piece(values, scale.multiplier);
#pragma unroll
        for (int t = 0; t < kTerms; ++t) emit_piece(i, chunk * kTerms + t, piece, encoded.term[t]);
        if (piece == 0) emit_scale(i, chunk, scale.scale);
    });
}
