// ep_weights.cuh   One policy a weight format: from a packed chunk in shared memory to A registers and scales.
//
// A chunk is 128 rows x 128 columns of one expert's matrix, packed by expert_parallel/packing.py: 8 warps own 16 rows
// each, lane l = 4 g + q of a warp rows g and g + 8. Codes come first, scales behind them. A policy has
//   kCodeBytes, kScaleBytes   of a chunk, a multiple of 128 together: a copy that begins within a line of the cache is slow
//   kUnusedBytes              of the scales, at their end: padding that need not be copied
//   scales(smem, warp, lane)  what multiplies the sums of rows g and g + 8 over this chunk, and whatever decode() needs
//   Codes<steps>              codes of `steps` times 32 columns: load() from the chunk, decode() to A registers
// WARPRING_ACTIVATION_FP8 chooses the operands: E4M3 (4 registers for 32 columns) or FP16 (8, for two products of 16).
#pragma once
#include "ep_common.cuh"
#include "ep_wgmma_ptx.cuh"

// What role2 is handed beside EpParams; mirrored by packing.py (ctypes).
struct EpWeights {
    const uint8_t* gmem_w13;     // [local experts][tasks of the first GEMM][hidden chunks][chunk]
    const uint8_t* gmem_w2;      // [local experts][tasks of the second GEMM][intermediate chunks][chunk]
    const float* gmem_w13_bias;  // [local experts][2][intermediate], or null
    const float* gmem_w2_bias;   // [local experts][hidden], or null
    // Shared experts, which are numbered behind the local ones.
    const uint8_t* gmem_shared_w13;
    const uint8_t* gmem_shared_w2;
    const float* gmem_shared_w13_bias;
    const float* gmem_shared_w2_bias;
    float alpha, limit, up_offset;  // activation.cuh
    uint32_t reserved;
};
static_assert(sizeof(EpWeights) == 80, "packing.py fills the same");

constexpr int kStepRegisters = kFp8 ? 4 : 8;  // A registers for 32 columns

// Entry i: the 8 magnitudes of E2M1 times 2^shift(i), as bytes of the operand's type. 14: zeros, 15: NaN.
constexpr int kLutEntries = 16, kLutBytes = 8 * kLutEntries;
constexpr int kLutZero = 14, kLutNan = 15;
constexpr int kLutExponent = kFp8 ? 7 : 13;  // entry i stands for 2^(i - kLutExponent)

// Scales of one chunk for this lane's two rows.
struct RowScales {
    float low, high;                   // rows g and g + 8
    uint32_t low_shifts, high_shifts;  // LUT entries of the four blocks of 32 columns, 4 bits each
};

__device__ __forceinline__ float e2m1_magnitude(int code) {
    return code < 2 ? 0.5f * code : __uint_as_float((126u + (code >> 1)) << 23 | (code & 1) << 22);
}

// One byte of the LUT: E4M3, or the high byte of FP16, whose low byte is 0 for these values.
__device__ __forceinline__ uint8_t lut_byte(int entry, int code) {
    if (entry == kLutZero) return 0;
    if (entry == kLutNan) return kFp8 ? 0x7f : 0x7e;
    const float value = e2m1_magnitude(code) * __uint_as_float((127u + entry - kLutExponent) << 23);
    return kFp8 ? uint8_t(cvt_f32x2_e4m3x2(0.f, value)) : uint8_t(cvt_f32_f16x2(0.f, value) >> 8);
}

// 16 codes of E4M3 of this lane for one step of 32 columns.
__device__ __forceinline__ void e4m3_operands(uint4 codes, uint32_t (&a)[kStepRegisters]) {
    if constexpr (kFp8) {
        a[0] = codes.x, a[1] = codes.y, a[2] = codes.z, a[3] = codes.w;
    } else {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = cvt_e4m3x2_f16x2_low(words[i]);
            a[2 * i + 1] = cvt_e4m3x2_f16x2_high(words[i]);
        }
    }
}

// What the formats with E4M3 codes share: a step is 16 bytes a lane.
struct EpE4m3Codes {
    static constexpr int kCodeBytes = 128 * 128;
    // They are loaded where they are decoded: the operands are as large as the codes, and in use by the products before.
    template <int steps>
    struct Codes {
        uint32_t smem_codes;
        __device__ __forceinline__ void load(uint32_t smem, int first_step, int warp, int lane) {
            smem_codes = smem + warp * 2048 + first_step * 512 + lane * 16;
        }
        __device__ __forceinline__ void decode(const uint8_t*, const RowScales&, int,
                                               uint32_t (&a)[steps][kStepRegisters]) const {
#pragma unroll
            for (int s = 0; s < steps; ++s) e4m3_operands(ld_shared_128(smem_codes + s * 512), a[s]);
        }
    };
};

// E4M3 with one FP32 scale a 128 x 128 block: a task lies within one block of rows, but gate and up are two matrices.
struct EpFp8Block : EpE4m3Codes {
    static constexpr int kScaleBytes = 128, kUnusedBytes = 96;
    static __device__ __forceinline__ RowScales scales(uint32_t smem, int, int) {
        const uint2 pair = ld_shared_64(smem + kCodeBytes);
        return {__uint_as_float(pair.x), __uint_as_float(pair.y), 0, 0};
    }
};

// E4M3 with one FP32 scale a row.
struct EpFp8Channel : EpE4m3Codes {
    static constexpr int kScaleBytes = 512, kUnusedBytes = 0;
    static __device__ __forceinline__ RowScales scales(uint32_t smem, int warp, int lane) {
        const uint2 pair = ld_shared_64(smem + kCodeBytes + warp * 64 + lane / 4 * 8);
        return {__uint_as_float(pair.x), __uint_as_float(pair.y), 0, 0};
    }
};

// E2M1 with a power of two a row and window of 128 columns, and a LUT entry a block of 32 of them. A word a row: the
// entries in the low half, the power of two as BF16 in the high one.
struct EpMxfp4 {
    static constexpr int kCodeBytes = 128 * 128 / 2, kScaleBytes = 512, kUnusedBytes = 0;

    static __device__ __forceinline__ RowScales scales(uint32_t smem, int warp, int lane) {
        const uint2 pair = ld_shared_64(smem + kCodeBytes + warp * 64 + lane / 4 * 8);
        return {__uint_as_float(pair.x & 0xffff0000u), __uint_as_float(pair.y & 0xffff0000u), pair.x, pair.y};
    }

    // 8 codes of a row: the magnitudes of the first four in nibbles 0 - 3, of the others in nibbles 4 - 7, all as
    // selectors of bytes of the LUT; the signs in the nibbles' high bits, of the first four where the bytes want them,
    // of the others four bits lower.
    static __device__ __forceinline__ void bytes(uint32_t word, uint2 lut, uint32_t& first, uint32_t& second) {
        const uint32_t magnitudes = word & 0x77777777u;
        first = pick_bytes(lut.x, lut.y, magnitudes) | (word & 0x80808080u);
        second = pick_bytes(lut.x, lut.y, multiplier_shift(magnitudes, 16)) | ((word << 4) & 0x80808080u);
    }
    static __device__ __forceinline__ uint2 lut_entry(const uint8_t* smem_lut, uint32_t shifts, int step) {
        const uint32_t offset = step == 0 ? shifts << 3 : multiplier_shift(shifts, 4 * step - 3);
        return *reinterpret_cast<const uint2*>(smem_lut + (offset & 0x78u));
    }

    template <int steps>
    struct Codes {
        static_assert(steps % 2 == 0, "16 bytes of a lane are two steps");
        uint4 pairs[steps / 2];

        __device__ __forceinline__ void load(uint32_t smem, int first_step, int warp, int lane) {
#pragma unroll
            for (int p = 0; p < steps / 2; ++p)
                pairs[p] = ld_shared_128(smem + warp * 1024 + (first_step + 2 * p) * 256 + lane * 16);
        }
        __device__ __forceinline__ void decode(const uint8_t* smem_lut, const RowScales& rows, int first_step,
                                               uint32_t (&a)[steps][kStepRegisters]) const {
#pragma unroll
            for (int s = 0; s < steps; ++s) {
                const uint4& codes = pairs[s / 2];
                uint32_t low[2], high[2];
                bytes(s % 2 ? codes.z : codes.x, lut_entry(smem_lut, rows.low_shifts, first_step + s), low[0], low[1]);
                bytes(s % 2 ? codes.w : codes.y, lut_entry(smem_lut, rows.high_shifts, first_step + s), high[0],
                      high[1]);
                uint32_t (&out)[kStepRegisters] = a[s];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if constexpr (kFp8) {
                        out[2 * i] = low[i], out[2 * i + 1] = high[i];
                    } else {  // bytes 0, 1 and 2, 3 become the high bytes of two FP16 values
                        out[4 * i] = __byte_perm(low[i], 0, 0x1404), out[4 * i + 1] = __byte_perm(high[i], 0, 0x1404);
                        out[4 * i + 2] = __byte_perm(low[i], 0, 0x3424),
                                    out[4 * i + 3] = __byte_perm(high[i], 0, 0x3424);
                    }
                }
            }
        }
    };
};
