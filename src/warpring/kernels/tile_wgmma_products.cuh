// tile_wgmma_products.cuh   64 rows of E2M1 weights times 8 columns of two E4M3 terms each, unit by unit.
//
// A code is an E4M3 number as it stands, times 2^-6. The products of 32 columns, which share a row's scale, are summed on the
// tensor cores and multiplied and added in FP32.
#pragma once
#include "e2m1_words.cuh"
#include "ep_wgmma_ptx.cuh"
#include "tile_wgmma_smem.cuh"

// Exponent fields of the scales of a block, those of row g and of row g + 8, of its first and second 32 columns: in place,
// or 8, 16 or 24 bits further right, round the word's end. 0 and 255 are 0 and infinity.
__device__ __forceinline__ float scale_of(uint32_t word, int place) {
    const uint32_t moved = place == 3 ? __byte_perm(word, 0, 0x0321) : word << (8 * place);
    return __uint_as_float(moved & 0x7f800000u);
}

template <bool kDown>
struct Products {
    Turn<kStages>& ring;
    uint32_t smem_ring, smem_full, smem_empty;  // of this warpgroup; the first of this lane's codes
    uint32_t smem_block_scales;                 // of this lane's rows, from the codes on
    uint32_t nothing;                           // 0, which the compiler does not know
    int lane;
    float sum[4];
    float part[2][2][4];  // of the block at hand and the one before, of each 32 columns
    uint32_t a[2][2][4];
    uint4 codes;
    uint32_t scales[2];
    float2 column_scale[2][2];  // of this lane's columns, each of two 32 columns of the matrix

    __device__ __forceinline__ Products(Turn<kStages>& r, Smem& smem, const Args& args, int group, int warp, int l)
        : ring(r), nothing(uint32_t(args.num_tokens) >> 16), lane(l) {
        const uint32_t panel = smem_address(smem.ring[group][0]) + warp * kPanelBytes;
        smem_ring = panel + lane * 16;
        smem_block_scales = 512 + lane / 4 * 4 - lane * 16;
        smem_full = smem_address(&smem.barriers.full[group][0]);
        smem_empty = smem_address(&smem.barriers.empty[group][0]);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 0.f;
    }

    template <int b>
    __device__ __forceinline__ void fetch(uint32_t unit, uint32_t smem_column_scales) {
        codes = ld_shared_128(unit + b * kBlockBytes);
        scales[b % 2] = ld_shared_u32(unit + smem_block_scales + b * kBlockBytes);
        if constexpr (kDown) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const uint2 bits = ld_shared_64(smem_column_scales + (c * kActScaleStride + b * 2) * 4);
                column_scale[b % 2][c] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
            }
        }
    }
    template <int b>
    __device__ __forceinline__ void start(uint64_t image) {
        uint32_t (&own)[2][4] = a[b % 2];
        // Logic is what decoding waits for, so the shift to the right is a multiplication, as those to the left become by
        // themselves.
        operands_of<multiplier_shift>(codes.x, codes.y, own[0]);
        operands_of<multiplier_shift>(codes.z, codes.w, own[1]);
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const uint64_t step = image + (b * 2 + s) * (kStepBytes / 16);
            // The tensor cores keep more of a sum to which the larger term comes last.
            wgmma_e4m3<8>(part[b % 2][s], own[s][0], own[s][1], own[s][2], own[s][3], step + kTermBytes / 16, 0);
            wgmma_e4m3<8>(part[b % 2][s], own[s][0], own[s][1], own[s][2], own[s][3], step, 1);
        }
        warpgroup_commit();
    }
    template <int b>
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            float (&own)[4] = part[b % 2][s];
            hold(own);
            const float low = scale_of(scales[b % 2], s), high = scale_of(scales[b % 2], 2 + s);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float scale = i < 2 ? low : high;
                if constexpr (kDown) {
                    const float2 column = column_scale[b % 2][i % 2];
                    scale *= s == 0 ? column.x : column.y;
                }
                sum[i] = fmaf(own[i], scale, sum[i]);
            }
        }
    }
    // `count` blocks of a unit: while one is on the tensor cores the next is decoded. At the end none is: products in flight
    // over the end of a loop are beyond what the compiler follows, it would run all of them one at a time.
    template <int count, int b = 0>
    __device__ __forceinline__ void run_unit(uint32_t unit, uint32_t empty, uint64_t image, uint32_t smem_column_scales) {
        if constexpr (b == 0) fetch<0>(unit, smem_column_scales);
        start<b>(image);
        if constexpr (b + 1 < count) {
            if constexpr (b > 0) {
                warpgroup_wait<1>();
                finish<b - 1>();
            }
            fetch<b + 1>(unit, smem_column_scales);
            run_unit<count, b + 1>(unit, empty, image, smem_column_scales);
        } else {
            // Codes are in products that have started, but scales may still be on their way: an arrival overtakes loads, which
            // would then read what the next copy wrote. So the barrier's address depends on them.
            const uint32_t last = b > 0 ? scales[0] | scales[1] : scales[0];
            __syncwarp();
            mbarrier_arrive_if(empty + (last & nothing), lane == 0);
            if constexpr (b > 0) {
                warpgroup_wait<1>();
                finish<b - 1>();
            }
            warpgroup_wait<0>();
            finish<b>();
        }
    }
    template <int count>
    __device__ __forceinline__ void next_unit(uint64_t& image, uint32_t& smem_column_scales) {
        mbarrier_wait(smem_full + ring.stage * 8, ring.parity);
        run_unit<count>(smem_ring + ring.stage * kUnitBytes, smem_empty + ring.stage * 8, image, smem_column_scales);
        image += count * 2 * (kStepBytes / 16);
        smem_column_scales += count * 2 * 4;
        ring.next();
    }
    // `blocks` of them, the same number in all lanes.
    template <int kLeast, int kMost>
    __device__ __forceinline__ void run(int blocks, uint64_t image, uint32_t smem_column_scales) {
        if constexpr (kLeast == kMost) {
#pragma unroll 1
            for (int unit = 0; unit < kMost / kUnitBlocks; ++unit) next_unit<kUnitBlocks>(image, smem_column_scales);
            if constexpr (kMost % kUnitBlocks != 0) next_unit<kMost % kUnitBlocks>(image, smem_column_scales);
        } else {
#pragma unroll 1
            for (; blocks >= kUnitBlocks; blocks -= kUnitBlocks) next_unit<kUnitBlocks>(image, smem_column_scales);
            if (blocks == 1) next_unit<1>(image, smem_column_scales);
            if (blocks == 2) next_unit<2>(image, smem_column_scales);
            if (blocks == 3) next_unit<3>(image, smem_column_scales);
        }
    }
};
