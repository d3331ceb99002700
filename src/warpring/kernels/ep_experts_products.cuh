// ep_experts_products.cuh   128 rows of weights times up to 64 tokens: what the consumer warpgroups do with the stages.
//
// Sums are formed on the tensor cores over a group of columns that share a token's scale (128 or 64), then multiplied
// by the row's and the token's scale and added in FP32. The order of additions depends on nothing but the sizes of the layer.
#pragma once
#include "ep_experts_common.cuh"

struct Consumer {
    int warp, lane;  // of the 8 consumer warps
    StageRing ring;
};

// A stage in use: its address, and that of its barrier.
struct UsedStage {
    uint32_t address, barrier;
};

template <int N, class Format, bool kSecond>
struct Products {
    // Columns that share a token's scale have sums of their own. Two of the second GEMM's share all that goes with a group
    // where registers are left for both.
    static constexpr int kScaleColumns = kSecond ? 64 : 128;
    static constexpr int kParts = kSecond && N < (!kAlone ? 16 : kFp8 ? 64 : 32) ? 2 : 1;
    static constexpr int kGroupColumns = kParts * kScaleColumns;
    static constexpr int kSteps = kGroupColumns / 32, kPartSteps = kScaleColumns / 32;
    static constexpr int kGroupsOfChunk = kChunkColumns / kGroupColumns;
    static constexpr int kGroupsOfStage = kStageColumns / kGroupColumns;
    static constexpr int kAllParts = kSecond ? kNeuronTasks : kHiddenPadded / kScaleColumns;
    static constexpr int kGroups = ceil_div(kAllParts, kParts), kLastParts = kAllParts - (kGroups - 1) * kParts;
    static constexpr int kAtOnce = 4;  // groups that are code of their own
    // Registers are left to load codes and scales ahead; to decode a group while another one is multiplied.
    static constexpr bool kAhead = kAlone ? kFp8 || N < 64 : N < 16, kOverlaps = kAlone || N < 32;
    static constexpr int kBuffers = kOverlaps ? 2 : 1;
    static_assert(kAtOnce % kGroupsOfStage == 0, "a turn of the loop begins with a stage");

    // A group of columns from its stage to its sums. Indices are known when this is compiled, so a field takes registers
    // only while it is needed.
    struct Group {
        UsedStage stage;
        RowScales rows;
        typename Format::template Codes<kSteps> codes;
    };

    Consumer& me;
    float sum[N / 2];
    float part[kBuffers][kParts][N / 2];
    uint32_t a[kBuffers][kSteps][kStepRegisters];
    Group groups[kAtOnce];

    __device__ __forceinline__ explicit Products(Consumer& consumer) : me(consumer) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sum[i] = 0.f;
#pragma unroll
            for (int p = 0; p < kParts; ++p) part[0][p][i] = part[kBuffers - 1][p][i] = 0.f;
        }
    }

    // Loads the codes of group g, if registers are left while the one before is multiplied.
    template <int g>
    __device__ __forceinline__ void fetch(bool last) {
        constexpr int kPlace = g % kGroupsOfStage;
        if (kPlace == 0) me.ring.wait_full();
        Group& group = groups[g];
        group.stage = {me.ring.stage(), me.ring.barrier()};
        const uint32_t chunk = group.stage.address + kPlace / kGroupsOfChunk * kWeightChunkBytes<Format>;
        group.rows = Format::scales(chunk, me.warp, me.lane);
        group.codes.load(chunk, kPlace % kGroupsOfChunk * kSteps, me.warp, me.lane);
        if (kPlace == kGroupsOfStage - 1 || last) me.ring.advance();
    }

    // Starts the products of `parts` parts of group g.
    template <int g, int parts>
    __device__ __forceinline__ void start() {
        constexpr int kPlace = g % kGroupsOfStage, b = g % kBuffers;
        groups[g].codes.decode(smem_start(), groups[g].rows, g % kGroupsOfChunk * kSteps, a[b]);
        const uint64_t image = b_descriptor(groups[g].stage.address + kImageAt, N);
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < parts * kPartSteps; ++s)
            multiply(part[b][s / kPartSteps], a[b][s], image, kPlace * kSteps + s, s % kPartSteps > 0);
        warpgroup_commit();
    }

    // 32 columns, step `step` of the stage: one product of E4M3, or two of FP16. A product reads 32 bytes of every
    // token, 2 N units of 16 bytes.
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[kStepRegisters],
                                                    uint64_t image, int step, int adds) {
        if constexpr (kFp8) {
            wgmma_e4m3<N>(d, a[0], a[1], a[2], a[3], image + step * 2 * N, adds);
        } else {
            wgmma_f16<N>(d, a[0], a[1], a[2], a[3], image + step * 4 * N, adds);
            wgmma_f16<N>(d, a[4], a[5], a[6], a[7], image + (step * 4 * N + 2 * N), 1);
        }
    }

    // What the tokens of group g are multiplied by: those of this lane's columns.
    template <int g, int parts>
    __device__ __forceinline__ void load_scales(float (&x)[kParts][N / 4]) const {
        constexpr int kFirst = kFp8 || kSecond ? g % kGroupsOfStage * kParts : 0;
        const uint32_t scales = groups[g].stage.address + kScalesAt + kFirst * kBlockM * 4;
#pragma unroll
        for (int p = 0; p < parts; ++p)
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const uint2 bits = ld_shared_64(scales + (p * kBlockM + 8 * j + 2 * (me.lane % 4)) * 4);
                x[p][2 * j] = __uint_as_float(bits.x), x[p][2 * j + 1] = __uint_as_float(bits.y);
            }
    }

    // Adds the finished sums of group g.
    template <int g, int parts, bool kMayBeLast>
    __device__ __forceinline__ void finish(const float (&x)[kParts][N / 4], bool last) {
        const Group& group = groups[g];
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            float(&own)[N / 2] = part[g % kBuffers][p];
            hold(own);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                const float row = i % 4 < 2 ? group.rows.low : group.rows.high;
                sum[i] = fmaf(own[i], row * x[p][i / 4 * 2 + i % 2], sum[i]);
            }
        }
        // No branch on what is known at run time: behind one the compiler takes the lanes for being at different stages.
        constexpr bool kEnd = g % kGroupsOfStage == kGroupsOfStage - 1;
        if constexpr (kEnd || kMayBeLast) {
            __syncwarp();
            StageRing::release(group.stage.barrier, me.lane == 0 && (kEnd || last));
        }
    }

    // `count` groups, one behind the other: where registers allow, while one is on the tensor cores the next is decoded, and
    // the one behind that is loaded. At the end none is: products in flight over the end of a loop are beyond what the compiler follows, it
    // would run all of them one at a time.
    template <int count, int last_parts, int g = 0>
    __device__ __forceinline__ void run_some(bool last) {
        constexpr int kOwnParts = g + 1 == count ? last_parts : kParts;
        float x[kParts][N / 4];
        if constexpr (g == 0 || !kAhead) fetch<g>(last && g + 1 == count);
        if constexpr (g > 0 && kAhead) load_scales<g - 1, kParts>(x);
        start<g, kOwnParts>();
        if constexpr (g + 1 < count && kAhead) fetch<g + 1>(last && g + 2 == count);
        if constexpr (g > 0 && kOverlaps) {
            warpgroup_wait<1>();
            if constexpr (!kAhead) load_scales<g - 1, kParts>(x);
            finish<g - 1, kParts, false>(x, false);
        }
        constexpr bool kLast = g + 1 == count;
        if constexpr (kLast || !kOverlaps) {
            warpgroup_wait<0>();
            load_scales<g, kOwnParts>(x);
            finish<g, kOwnParts, kLast>(x, last);
        }
        if constexpr (!kLast) run_some<count, last_parts, g + 1>(last);
    }

    // All of the task's groups. The last ones are code of their own, unless they fill a turn of the loop and a register
    // is left for its counter.
    __device__ __forceinline__ void run() {
        constexpr bool kAllInLoop = kGroups % kAtOnce == 0 && kLastParts == kParts && N < 64;
        constexpr int kRest = kAllInLoop ? 0 : (kGroups - 1) % kAtOnce + 1, kInLoop = kGroups - kRest;
#pragma unroll 1
        for (int i = 0; i < kInLoop; i += kAtOnce) run_some<kAtOnce, kParts>(kAllInLoop && i == kInLoop - kAtOnce);
        if constexpr (!kAllInLoop) run_some<kRest, kLastParts>(true);
    }
};
