// ep_experts_products.cuh   128 rows of weights times up to 64 tokens: what the consumer warpgroups do with the stages.
//
// Sums are formed on the tensor cores over the columns that share a row's and a token's scale (128, 64 or 32) and
// multiplied by the scales and added in FP32: by both at once, or where the row's scale reaches less far than the
// token's (128 or 64 columns) by the row's first, and the sum of these by the token's. The order of additions depends
// on nothing but the sizes of the layer.
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
    static constexpr int kTokenColumns = kSecond ? 64 : 128;  // that share a token's scale
    static constexpr int kPartColumns = smaller(kTokenColumns, Format::kScaleColumns);
    static constexpr bool kFine = kPartColumns < kTokenColumns;
    // Columns whose products are begun together: several parts share all that goes with a group where registers are
    // left.
    static constexpr bool kTwice = kSecond && N < (kAlone ? 64 : 16);
    static constexpr bool kWhole = kAlone && N < 32, kHalf = kAlone ? N < 64 : N < 32;
    static constexpr int kGroupColumns = kFine ? kWhole ? 128 : kHalf ? 64 : 32 : kTokenColumns * (kTwice ? 2 : 1);
    static constexpr int kParts = kGroupColumns / kPartColumns;
    static constexpr int kTokenGroups = ceil_div(kGroupColumns, kTokenColumns);  // that have columns in a group
    static constexpr int kSteps = kGroupColumns / 32, kPartSteps = kPartColumns / 32;
    static constexpr int kGroupsOfChunk = kChunkColumns / kGroupColumns;
    static constexpr int kGroupsOfStage = kStageColumns<Format> / kGroupColumns;
    static constexpr int kAllParts = (kSecond ? kIntermediatePadded : kHiddenPadded) / kPartColumns;
    static constexpr int kGroups = ceil_div(kAllParts, kParts), kLastParts = kAllParts - (kGroups - 1) * kParts;
    static constexpr int kAtOnce = larger(4, kGroupsOfStage);  // groups that are code of their own
    // Registers are left to load codes and scales while the group before is decoded.
    static constexpr bool kAhead = kAlone || N < 32;
    // And to decode it at all.
    static constexpr bool kOverlap = kAlone || kFine || N < 32;
    static_assert(kAtOnce % kGroupsOfStage == 0, "a turn of the loop begins with a stage");

    // A group of columns from its stage to its sums. Indices are known when this is compiled, so a field takes
    // registers only while it is needed.
    struct Group {
        UsedStage stage;
        typename Format::Scales scales;
        typename Format::template Codes<kSteps> codes;
    };

    Consumer& me;
    float sum[N / 2];
    float within[N / 2];  // of the columns that share a token's scale, where parts are fewer
    float part[2][kParts][N / 2];
    uint32_t a[2][kSteps][kStepRegisters];
    Group groups[kAtOnce];

    __device__ __forceinline__ explicit Products(Consumer& consumer) : me(consumer) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sum[i] = 0.f;
#pragma unroll
            for (int p = 0; p < kParts; ++p) part[0][p][i] = part[1][p][i] = 0.f;
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
        group.scales.load(chunk, me.warp, me.lane);
        group.codes.load(chunk, kPlace % kGroupsOfChunk * kSteps, me.warp, me.lane);
        if (kPlace == kGroupsOfStage - 1 || last) me.ring.advance();
    }

    // Starts the products of `parts` parts of group g.
    template <int g, int parts>
    __device__ __forceinline__ void start() {
        constexpr int kPlace = g % kGroupsOfStage, b = g % 2;
        groups[g].codes.decode(a[b]);
        const uint64_t image = b_descriptor(groups[g].stage.address + kImageAt, N);
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < parts * kPartSteps; ++s)
            multiply(part[b][s / kPartSteps], a[b][s], image, kPlace * kSteps + s, s % kPartSteps > 0);
        warpgroup_commit();
    }

    // 32 columns, step `step` of the stage, of each term; the tensor cores keep more of a sum to which the larger term
    // comes last. A product reads 32 bytes of every token, 2 N units of 16 bytes; the terms of the columns that share a
    // token's scale follow each other.
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[kStepRegisters],
                                                    uint64_t image, int step, int adds) {
        constexpr int kTokenSteps = kTokenColumns / 32;
#pragma unroll
        for (int t = kTerms - 1; t >= 0; --t) {
            const int place = (step / kTokenSteps * kTerms + t) * kTokenSteps + step % kTokenSteps;
            wgmma_e4m3<N>(d, a[0], a[1], a[2], a[3], image + place * 2 * N, t < kTerms - 1 ? 1 : adds);
        }
    }

    // What the tokens of group g are multiplied by, if columns that share a scale end there: those of this lane's
    // columns.
    template <int g, int parts>
    __device__ __forceinline__ void load_scales(float (&x)[kTokenGroups][N / 4]) const {
        if constexpr ((g + 1) * kGroupColumns % kTokenColumns != 0) return;
        constexpr int kFirst = g % kGroupsOfStage * kGroupColumns / kTokenColumns;
        const uint32_t scales = groups[g].stage.address + kScalesAt + kFirst * kBlockM * 4;
#pragma unroll
        for (int p = 0; p < ceil_div(parts * kPartColumns, kTokenColumns); ++p)
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const uint2 bits = ld_shared_64(scales + (p * kBlockM + 8 * j + 2 * (me.lane % 4)) * 4);
                x[p][2 * j] = __uint_as_float(bits.x), x[p][2 * j + 1] = __uint_as_float(bits.y);
            }
    }

    // Adds the finished sums of group g.
    template <int g, int parts, bool kMayBeLast>
    __device__ __forceinline__ void finish(const float (&x)[kTokenGroups][N / 4], bool last) {
        const Group& group = groups[g];
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            const int first_column = g * kGroupColumns + p * kPartColumns, last_column = first_column + kPartColumns;
            const RowScales rows = group.scales.of(first_column % kChunkColumns / 32);
            const float (&tokens)[N / 4] = x[p * kPartColumns / kTokenColumns];
            float (&own)[N / 2] = part[g % 2][p];
            hold(own);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                const float row = i % 4 < 2 ? rows.low : rows.high;
                const int column = i / 4 * 2 + i % 2;
                if constexpr (kFine) {
                    within[i] = first_column % kTokenColumns == 0 ? own[i] * row : fmaf(own[i], row, within[i]);
                    if (last_column % kTokenColumns == 0) sum[i] = fmaf(within[i], tokens[column], sum[i]);
                } else {
                    sum[i] = fmaf(own[i], row * tokens[column], sum[i]);
                }
            }
        }
        // No branch on what is known at run time: behind one the compiler takes the lanes for being at different
        // stages.
        constexpr bool kEnd = g % kGroupsOfStage == kGroupsOfStage - 1;
        if constexpr (kEnd || kMayBeLast) {
            __syncwarp();
            // The codes have come: products took them. The tokens' scales may not have, in whatever order they do.
            uint32_t loaded = 0;
#pragma unroll
            for (int p = 0; p < ceil_div(parts * kPartColumns, kTokenColumns); ++p)
#pragma unroll
                for (int j = 0; j < N / 8; ++j) loaded |= __float_as_uint(x[p][2 * j]);
            StageRing::release_behind(group.stage.barrier, me.lane == 0 && (kEnd || last), loaded);
        }
    }

    // `count` groups, one behind the other: while one is on the tensor cores the next is decoded, and where registers
    // allow the one behind that is loaded. At the end none is: products in flight over the end of a loop are beyond
    // what the compiler follows, it would run all of them one at a time.
    template <int count, int last_parts, int g = 0>
    __device__ __forceinline__ void run_some(bool last) {
        constexpr bool kLast = g + 1 == count;
        constexpr int kOwnParts = kLast ? last_parts : kParts;
        float x[kTokenGroups][N / 4];
        if constexpr (g == 0 || !kAhead) fetch<g>(last && kLast);
        if constexpr (g > 0 && kAhead) load_scales<g - 1, kParts>(x);
        start<g, kOwnParts>();
        if constexpr (g + 1 < count && kAhead) fetch<g + 1>(last && g + 2 == count);
        if constexpr (g > 0 && kOverlap) {
            warpgroup_wait<1>();
            if constexpr (!kAhead) load_scales<g - 1, kParts>(x);
            finish<g - 1, kParts, false>(x, false);
        }
        if constexpr (kLast || !kOverlap) {
            warpgroup_wait<0>();
            load_scales<g, kOwnParts>(x);
            finish<g, kOwnParts, kLast>(x, last && kLast);
        }
        if constexpr (!kLast) run_some<count, last_parts, g + 1>(last);
    }

    // All of the task's groups, and what the sums are short of. The last groups are code of their own, unless they fill
    // a turn of the loop and a register is left for its counter.
    __device__ __forceinline__ void run() {
        constexpr bool kAllInLoop = kGroups % kAtOnce == 0 && kLastParts == kParts && N < 64;
        constexpr int kRest = kAllInLoop ? 0 : (kGroups - 1) % kAtOnce + 1, kInLoop = kGroups - kRest;
#pragma unroll 1
        for (int i = 0; i < kInLoop; i += kAtOnce) run_some<kAtOnce, kParts>(kAllInLoop && i == kInLoop - kAtOnce);
        if constexpr (!kAllInLoop) run_some<kRest, kLastParts>(true);
        if constexpr (Format::kSumFactor != 1.f) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum[i] *= Format::kSumFactor;
        }
    }
};
