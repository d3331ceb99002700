// tile_formats.cuh   One policy a number format: how a lane's part of a record (16 rows x 32 columns, see
// warpring/layout.py) becomes the A operands of two mma.m16n8k16.
//
// Lane 4 g + q holds rows g and g + 8, columns 8 q .. 8 q + 7. The first mma takes columns 8 q + {0, 1, 2, 3}, the
// second 8 q + {4, 5, 6, 7}: a permutation of the columns that the activations, read 16 bytes a lane, follow by
// themselves.
//
// A policy has
//   kRecordBytes       bytes of a record
//   Raw                a lane's codes and scales, as loaded
//   load(run, lane, i) record i of a run, in shared memory (an address) or in global memory (a pointer); what of the
//                      address differs by record is an immediate
//   unpack(raw, a)     a[0], a[1]: A operands of the first and second mma, values times block scale, exact in BF16
//   kBlockScale        FP32 scales of 128 x 128 blocks multiply the sums of every record (fp8_block)
//
// Records of a panel follow each other, but for slabs (warpring/slabs.py), where two records of each of four panels do.
#pragma once
#include "e2m1_words.cuh"
#include "ptx.cuh"

constexpr int kRecordCols = 32;

// A lane's part of a record, from either memory.
__device__ __forceinline__ uint4 ld_128(uint32_t smem) { return ld_shared_128(smem); }
__device__ __forceinline__ uint2 ld_64(uint32_t smem) { return ld_shared_64(smem); }
__device__ __forceinline__ uint32_t ld_u16(uint32_t smem) { return ld_shared_u16(smem); }
__device__ __forceinline__ uint4 ld_128(const uint8_t* gmem) { return ld_weights(gmem); }
__device__ __forceinline__ uint2 ld_64(const uint8_t* gmem) { return ld_weights_64(gmem); }
__device__ __forceinline__ uint32_t ld_u16(const uint8_t* gmem) { return ld_scale_u16(gmem); }

struct Operands {
    uint32_t a[2][4];  // [mma][a0..a3]: a0 (row g), a1 (row g + 8), a2 (row g), a3 (row g + 8)
};

// The block scales of rows g and g + 8 as a pair of BF16, from two bytes that are exponent fields.
__device__ __forceinline__ uint32_t scale_word(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140) << 7; }

// Multiplies a pair of row g, or of row g + 8, by its half of the scale word.
template <bool kHigh>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scales) {
    return kHigh ? mul_bf16x2_by_high(pair, scales) : mul_bf16x2_by_low(pair, scales);
}

// Four E4M3 codes of one row: BF16 fields sign 15, exponent 10..7, fraction 6..4. The first pair lies in place. Of the
// second, signs and exponents are in place after a rotation to the right by 4, fractions after a shift to the left
// by 4.
template <bool kHigh>
__device__ __forceinline__ void unpack_e4m3(uint32_t word, uint32_t scales, uint32_t& first, uint32_t& second) {
    first = scaled<kHigh>(word & 0x87f087f0u, scales);
    const uint32_t moved = (__funnelshift_r(word, word, 4) & 0x87808780u) | ((word << 4) & 0x00700070u);
    second = scaled<kHigh>(moved, scales);
}

// Eight E2M1 codes of one row: BF16 fields sign 15, exponent 8..7, fraction 6 of the pairs at left rotations of 0, 6,
// 10; of the last pair sign and the lower two bits at 12, the upper exponent bit at 4.
template <bool kHigh>
__device__ __forceinline__ void unpack_e2m1(uint32_t word, uint32_t scales, uint32_t (&pairs)[4]) {
    constexpr uint32_t kMask = 0x81c081c0u;
    pairs[0] = scaled<kHigh>(word & kMask, scales);
    pairs[1] = scaled<kHigh>((word << 6) & kMask, scales);
    pairs[2] = scaled<kHigh>(__funnelshift_l(word, word, 10) & kMask, scales);
    const uint32_t moved = (__funnelshift_l(word, word, 12) & 0x80c080c0u) | ((word << 4) & 0x01000100u);
    pairs[3] = scaled<kHigh>(moved, scales);
}

__device__ __forceinline__ void unpack_e2m1(uint2 w, uint32_t scales, Operands& out) {
    uint32_t pairs[4];
    unpack_e2m1<false>(w.x, scales, pairs);
    out.a[0][0] = pairs[0], out.a[0][2] = pairs[1], out.a[1][0] = pairs[2], out.a[1][2] = pairs[3];
    unpack_e2m1<true>(w.y, scales, pairs);
    out.a[0][1] = pairs[0], out.a[0][3] = pairs[1], out.a[1][1] = pairs[2], out.a[1][3] = pairs[3];
}

__device__ __forceinline__ void unpack_e4m3(uint4 w, uint32_t scales, Operands& out) {
    unpack_e4m3<false>(w.x, scales, out.a[0][0], out.a[0][2]);
    unpack_e4m3<false>(w.y, scales, out.a[1][0], out.a[1][2]);
    unpack_e4m3<true>(w.z, scales, out.a[0][1], out.a[0][3]);
    unpack_e4m3<true>(w.w, scales, out.a[1][1], out.a[1][3]);
}

struct TileBf16 {
    static constexpr int kRecordBytes = 1024;
    static constexpr bool kBlockScale = false;
    struct Raw {
        uint4 low, high;
    };
    template <class From>
    static __device__ __forceinline__ Raw load(From run, int lane, int i) {
        const From codes = run + lane * 16;
        return {ld_128(codes + i * kRecordBytes), ld_128(codes + i * kRecordBytes + 512)};
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        out.a[0][0] = raw.low.x, out.a[0][2] = raw.low.y, out.a[1][0] = raw.low.z, out.a[1][2] = raw.low.w;
        out.a[0][1] = raw.high.x, out.a[0][3] = raw.high.y, out.a[1][1] = raw.high.z, out.a[1][3] = raw.high.w;
    }
};

template <bool kBlocks>
struct TileFp8 {
    static constexpr int kRecordBytes = 512;
    static constexpr bool kBlockScale = kBlocks;
    struct Raw {
        uint4 codes;
    };
    template <class From>
    static __device__ __forceinline__ Raw load(From run, int lane, int i) {
        const From codes = run + lane * 16;
        return {ld_128(codes + i * kRecordBytes)};
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        unpack_e4m3(raw.codes, 0x7b807b80u, out);  // 2^120
    }
};
using TileFp8Block = TileFp8<true>;
using TileFp8Channel = TileFp8<false>;

struct TileMxfp8 {
    static constexpr int kRecordBytes = 528;
    static constexpr bool kBlockScale = false;
    struct Raw {
        uint4 codes;
        uint32_t scales;
    };
    template <class From>
    static __device__ __forceinline__ Raw load(From run, int lane, int i) {
        const From codes = run + lane * 16, scales = run + 512 + (lane >> 2) * 2;
        return {ld_128(codes + i * kRecordBytes), ld_u16(scales + i * kRecordBytes)};
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        unpack_e4m3(raw.codes, scale_word(raw.scales), out);
    }
};

struct TileMxfp4 {
    static constexpr int kRecordBytes = 272;
    static constexpr bool kBlockScale = false;
    struct Raw {
        uint2 codes;
        uint32_t scales;
    };
    template <class From>
    static __device__ __forceinline__ Raw load(From run, int lane, int i) {
        const From codes = run + lane * 8, scales = run + 256 + (lane >> 2) * 2;
        return {ld_64(codes + i * kRecordBytes), ld_u16(scales + i * kRecordBytes)};
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        unpack_e2m1(raw.codes, scale_word(raw.scales), out);
    }
};

// MXFP4 in slabs. The codes become E4M3 operands first, then BF16 fields; scales are exponent fields of FP32, 2^6 of which
// matrix_scale gives back. Values are those of the formats above times 2^-6.
struct TileMxfp4Slabs {
    static constexpr int kRecordBytes = 272, kPieceBytes = 2 * kRecordBytes, kBlockBytes = 4 * kPieceBytes;
    static constexpr bool kBlockScale = false;
    struct Raw {
        uint2 codes;
        uint32_t scales;  // fields of rows g and g + 8 at the bits of BF16 exponents, g in the high half
    };
    static __device__ __forceinline__ Raw load(uint32_t run, int lane, int i) {
        const uint32_t codes = run + lane * 16, scales = run + 512 + (lane >> 2) * 4, block = i / 2 * kBlockBytes;
        const uint32_t word = ld_shared_u32(scales + block);
        return {ld_shared_64(codes + block + i % 2 * 8), i % 2 ? __funnelshift_l(word, word, 8) : word};
    }
    // Codes 2 n and 2 n + 1 of four: sign and the other bits as fields, 2^-126 of their value; then 2^-6 of it, and the scale.
    template <int n, bool kHigh>
    static __device__ __forceinline__ uint32_t pair(uint32_t codes, uint32_t scales) {
        const uint32_t apart = __byte_perm(codes, 0, n ? 0x3424 : 0x1404);
        const uint32_t fields = (apart & 0x80008000u) | (apart >> 4 & 0x01c001c0u);
        return scaled<kHigh>(mul_bf16x2(fields, 0x7b807b80u), scales);
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        uint32_t a[4];
        operands_of<plain_shift>(raw.codes.x, raw.codes.y, a);
        const uint32_t scales = raw.scales & 0x7f807f80u;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            out.a[i][0] = pair<0, true>(a[2 * i], scales), out.a[i][2] = pair<1, true>(a[2 * i], scales);
            out.a[i][1] = pair<0, false>(a[2 * i + 1], scales), out.a[i][3] = pair<1, false>(a[2 * i + 1], scales);
        }
    }
};

// Panels whose records lie together, and bytes that one has there before the next one's.
template <class Format>
constexpr int kPanelsTogether = 1;
template <>
constexpr int kPanelsTogether<TileMxfp4Slabs> = 4;
template <class Format>
constexpr int kPieceBytes = 0;
template <>
constexpr int kPieceBytes<TileMxfp4Slabs> = TileMxfp4Slabs::kPieceBytes;

// E4M3 scales of 16 columns: lanes q = 0, 1 have the first group of a record, q = 2, 3 the second. The multiplier is
// the scale times 2^118: its product with a field times 2^-126 leaves 2^-8, which matrix_scale gives back.
struct TileNvfp4 {
    static constexpr int kRecordBytes = 288;
    static constexpr bool kBlockScale = false;
    struct Raw {
        uint2 codes;
        uint32_t scales;
    };
    template <class From>
    static __device__ __forceinline__ Raw load(From run, int lane, int i) {
        const From codes = run + lane * 8, scales = run + 256 + (lane & 2) * 8 + (lane >> 2) * 2;
        return {ld_64(codes + i * kRecordBytes), ld_u16(scales + i * kRecordBytes)};
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        constexpr float kUnit = 0x1p118f;
        const uint32_t halves = cvt_e4m3x2_f16x2_low(raw.scales);
        unpack_e2m1(raw.codes, cvt_f32_bf16x2(cvt_f16_f32_high(halves) * kUnit, cvt_f16_f32_low(halves) * kUnit), out);
    }
};
