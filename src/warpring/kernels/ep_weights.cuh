// ep_weights.cuh   One policy a weight format: from a packed chunk in shared memory to A registers and scales.
//
// A chunk is 128 rows x 128 columns of one expert's matrix, packed by expert_parallel/packing.py: 8 warps own 16 rows
// each, lane l = 4 g + q of a warp rows g and g + 8. Codes come first, scales behind them; operands are E4M3, for the
// products with each term of the tokens. A policy has
//   kCodeBytes, kScaleBytes
//       of a chunk, a multiple of 128 together: a copy that begins within a line of the cache is slow
//   kUnusedBytes
//       of the scales, at their end: padding that need not be copied
//   kScaleColumns
//       columns of a row that share a scale: their products are summed on the tensor cores
//   kSumFactor
//       what sums of products of the A registers' values are short of, when scales have been applied
//   Scales
//       of a chunk: load(); of(step) multiplies the sums of rows g and g + 8 over that 32 columns
//   Codes<steps>
//       codes of `steps` times 32 columns: load() from the chunk, decode() to A registers
#pragma once
#include "e2m1_words.cuh"
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

constexpr int kStepRegisters = 4;  // A registers for 32 columns

// Scales of this lane's two rows.
struct RowScales {
    float low, high;  // rows g and g + 8
};

// What the formats with E4M3 codes share: a step is 16 bytes a lane.
struct EpE4m3Codes {
    static constexpr int kCodeBytes = 128 * 128, kScaleColumns = 128;
    static constexpr float kSumFactor = 1.f;
    // They are loaded where they are decoded: the operands are as large as the codes, and in use by the products
    // before.
    template <int steps>
    struct Codes {
        uint32_t smem_codes;
        __device__ __forceinline__ void load(uint32_t smem, int first_step, int warp, int lane) {
            smem_codes = smem + warp * 2048 + first_step * 512 + lane * 16;
        }
        __device__ __forceinline__ void decode(uint32_t (&a)[steps][kStepRegisters]) const {
#pragma unroll
            for (int s = 0; s < steps; ++s) {
                const uint4 codes = ld_shared_128(smem_codes + s * 512);
                a[s][0] = codes.x, a[s][1] = codes.y, a[s][2] = codes.z, a[s][3] = codes.w;
            }
        }
    };
};

// E4M3 with one FP32 scale a 128 x 128 block: a task lies within one block of rows, but gate and up are two matrices.
struct EpFp8Block : EpE4m3Codes {
    static constexpr int kScaleBytes = 128, kUnusedBytes = 96;
    struct Scales : RowScales {
        __device__ __forceinline__ void load(uint32_t smem, int, int) {
            const uint2 pair = ld_shared_64(smem + kCodeBytes);
            low = __uint_as_float(pair.x), high = __uint_as_float(pair.y);
        }
        __device__ __forceinline__ RowScales of(int) const { return *this; }
    };
};

// E4M3 with one FP32 scale a row.
struct EpFp8Channel : EpE4m3Codes {
    static constexpr int kScaleBytes = 512, kUnusedBytes = 0;
    struct Scales : RowScales {
        __device__ __forceinline__ void load(uint32_t smem, int warp, int lane) {
            const uint2 pair = ld_shared_64(smem + kCodeBytes + warp * 64 + lane / 4 * 8);
            low = __uint_as_float(pair.x), high = __uint_as_float(pair.y);
        }
        __device__ __forceinline__ RowScales of(int) const { return *this; }
    };
};

// E2M1 with a power of two for every 32 columns of a row. A code is an E4M3 number as it stands, sign and the three bits
// behind it at their places, times 2^-6: E2M1's subnormal and its binades are E4M3's first ones.
struct EpMxfp4 {
    static constexpr int kCodeBytes = 128 * 128 / 2, kScaleBytes = 512, kUnusedBytes = 0, kScaleColumns = 32;
    static constexpr float kSumFactor = 64.f;

    // A word a row: the exponent fields of four FP32 numbers, that of the last 32 columns where FP32 has it, those of
    // the others 8, 16 and 24 bits further right, round the word's end. 0 and 255 are 0 and infinity.
    struct Scales {
        uint32_t low, high;
        __device__ __forceinline__ void load(uint32_t smem, int warp, int lane) {
            const uint2 pair = ld_shared_64(smem + kCodeBytes + warp * 64 + lane / 4 * 8);
            low = pair.x, high = pair.y;
        }
        static __device__ __forceinline__ float of(uint32_t word, int step) {
            const uint32_t moved = step == 0 ? __byte_perm(word, 0, 0x0321) : word << (24 - 8 * step);
            return __uint_as_float(moved & 0x7f800000u);
        }
        __device__ __forceinline__ RowScales of(int step) const { return {of(low, step), of(high, step)}; }
    };

    // Logic is what decoding waits for, so the shift to the right is a multiplication, as those to the left become by
    // themselves.
    static __device__ __forceinline__ void operands(uint32_t low, uint32_t high, uint32_t (&a)[kStepRegisters]) {
        operands_of<multiplier_shift>(low, high, a);
    }

    template <int steps>
    struct Codes {
        static_assert(steps == 1 || steps % 2 == 0, "16 bytes of a lane are two steps");
        uint2 words[steps];

        __device__ __forceinline__ void load(uint32_t smem, int first_step, int warp, int lane) {
            const uint32_t at = smem + warp * 1024 + first_step / 2 * 512 + lane * 16;
            if constexpr (steps == 1) {
                words[0] = ld_shared_64(at + first_step % 2 * 8);
            } else {
#pragma unroll
                for (int s = 0; s < steps; s += 2) {
                    const uint4 pair = ld_shared_128(at + s * 256);
                    words[s] = make_uint2(pair.x, pair.y), words[s + 1] = make_uint2(pair.z, pair.w);
                }
            }
        }
        __device__ __forceinline__ void decode(uint32_t (&a)[steps][kStepRegisters]) const {
#pragma unroll
            for (int s = 0; s < steps; ++s) operands(words[s].x, words[s].y, a[s]);
        }
    };
};
