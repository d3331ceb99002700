// ep_tokens.cuh   Tokens in the form that the tensor cores eat: BF16 rows of x to pieces of 16 bytes with their scale.
//
// A unit of work of a warp is 4 tokens x one chunk (128 bytes of each): lane / 8 is the token, lane % 8 the piece. The
// 8 lanes of a token read 128 or 256 contiguous bytes, and 4 tokens' pieces fill whole 32-byte sectors of a B image.
#pragma once
#include "ep_common.cuh"
#include "ep_quantize.cuh"

constexpr int kUnitTokens = 4;
constexpr int kPieceBytes = 16;
constexpr int kPieceColumns = kPieceBytes / kElementBytes;
constexpr int kChunkColumns = kChunkBytes / kElementBytes;

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

__device__ __forceinline__ uint4 encode_piece(const TokenPiece& piece, float multiplier) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (kFp8) {
            const float* v = piece.v + 4 * w;
            const uint32_t low = cvt_f32x2_e4m3x2(v[1] * multiplier, v[0] * multiplier);
            const uint32_t high = cvt_f32x2_e4m3x2(v[3] * multiplier, v[2] * multiplier);
            words[w] = low | high << 16;
        } else {
            words[w] = cvt_f32_f16x2(piece.v[2 * w + 1] * multiplier, piece.v[2 * w] * multiplier);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
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
        const int lane = threadIdx.x % kLanes, units = ceil_div(count, kUnitTokens) * kCodeChunks;
#pragma unroll 1
        for (int unit = threadIdx.x / kLanes; unit < units; unit += kUnitsInFlight * kWarps) {
            LoadedPiece loaded[kUnitsInFlight];
            int i[kUnitsInFlight], chunk[kUnitsInFlight];
#pragma unroll
            for (int u = 0; u < kUnitsInFlight; ++u) {
                i[u] = (unit + u * kWarps) / kCodeChunks * kUnitTokens + lane / 8;
                chunk[u] = (unit + u * kWarps) % kCodeChunks;
                const int column = chunk[u] * kChunkColumns + lane % 8 * kPieceColumns;
                loaded[u] = load_piece(gmem_x + (first + i[u] * step) * x_stride, column, i[u] < count);
            }
#pragma unroll
            for (int u = 0; u < kUnitsInFlight; ++u) use(i[u], chunk[u], piece_of(loaded[u]));
        }
    }
};

// Encodes them by the whole CTA: `emit_piece(i, chunk, piece, codes)` gets 16 bytes of codes of the i-th token,
// `emit_scale(i, s, scale)` each scale once. smem_amax: a word a token. Ends without a barrier.
template <int kThreads, class EmitPiece, class EmitScale>
__device__ __forceinline__ void encode_tokens(const Tokens<kThreads>& tokens, uint32_t* smem_amax, EmitPiece emit_piece,
                                              EmitScale emit_scale) {
    const int piece = threadIdx.x % 8, count = tokens.count;
    if constexpr (
        !kFp8) {  // one scale for the whole token: its largest magnitude first; the second pass reads x from L1
        __syncthreads();
        for (int t = threadIdx.x; t < count; t += kThreads) smem_amax[t] = 0;
        __syncthreads();
        tokens.for_each_unit([&](int i, int, const TokenPiece& values) {
            const uint32_t amax = chunk_amax(values);
            if (piece == 0 && i < count) atomicMax(&smem_amax[i], amax);
        });
        __syncthreads();
        for (int t = threadIdx.x; t < count; t += kThreads) emit_scale(t, 0, f16_scale(smem_amax[t]).scale);
    }
    tokens.for_each_unit([&](int i, int chunk, const TokenPiece& values) {
        QuantScale scale;
        if constexpr (kFp8)
            scale = e4m3_scale(chunk_amax(values));
        else
            scale = f16_scale(smem_amax[min(i, count - 1)]);
        if (i >= count) return;
        emit_piece(i, chunk, piece, encode_piece(values, scale.multiplier));
        if (kFp8 && piece == 0) emit_scale(i, chunk, scale.scale);
    });
}
