// grouped_gemm_products.cuh   128 rows of weights times up to 256 tokens: what the consumer warpgroups do with the stages.
//
// Sums are formed on the tensor cores over all columns in their order; where blocks of 128 columns have an FP32 scale,
// over these, and multiplied and added in FP32. The order depends on nothing but the sizes of the layer.
#pragma once
#include "grouped_gemm_smem.cuh"

struct Consumer {
    int warp, lane;  // of the 8 consumer warps
    WeightRing weights;
    TokenRing tokens;
};

// Scales of blocks of 128 x 128 weights, of a panel's rows g and g + 8.
struct BlockRows {
    const float *gmem_low, *gmem_high;

    __device__ __forceinline__ BlockRows(const Args& args, const Task& task) {
        constexpr int kScaleCols = ceil_div(kCols, 128), kScaleRows = ceil_div(kRows, 128);
        const int64_t row = int64_t(task.expert) * kHalves * kScaleRows + task.tile * kTaskRows / 128;
        gmem_low = args.gmem_block_scale + row * kScaleCols;
        gmem_high = gmem_low + (kFirst ? kScaleRows * kScaleCols : 0);
    }
};

template <int N>
struct Products {
    static constexpr bool kBlocks = Format::kBlockScale;
    // Chunks that are code of their own: products in flight over the end of a loop are beyond what the compiler follows,
    // it would run all of them one at a time.
    static constexpr int kAtOnce = kStageChunks > 4 ? kStageChunks : 4;
    static constexpr int kRest = (kChunks - 1) % kAtOnce + 1, kInLoop = kChunks - kRest;
    // Registers are left to load a chunk's weights while two chunks before it are multiplied, not one.
    static constexpr bool kAhead = N < 128;
    static constexpr bool kHalfAtEnd = kRecords % 2 == 1;
    static_assert(kAtOnce % kStageChunks == 0 && kAtOnce % 2 == 0, "whole stages and blocks of scales");

    Consumer& me;
    BlockRows scales;
    float sum[N / 2];
    float part[kBlocks ? N / 2 : 1];  // of a block of 128 columns
    float low_scale, high_scale;      // of this block
    typename Format::Raw raw[2];      // a chunk's records
    uint32_t weights_empty;           // of the stage that they are the last of

    __device__ __forceinline__ Products(Consumer& consumer, const Args& args, const Task& task)
        : me(consumer), scales(args, task) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[i] = 0.f;
    }

    // Whether a stage of weights ends with chunk `chunk` of a turn of `count` chunks.
    static __device__ __forceinline__ constexpr bool ends_stage(int chunk, int count) {
        return chunk % kStageChunks == kStageChunks - 1 || chunk == count - 1;
    }

    // Loads the weights of that chunk. Its stage is not given back yet: the loads are on their way.
    __device__ __forceinline__ void fetch(int chunk, int count, bool half) {
        const int place = chunk % kStageChunks;
        if (place == 0) me.weights.wait_full();
        const uint32_t run = me.weights.stage() + me.warp / kTogether * kTogether * kPanelStageBytes +
                             me.warp % kTogether * kPieceBytes<Format>;
        raw[0] = Format::load(run, me.lane, 2 * place);
        if (!half) raw[1] = Format::load(run, me.lane, 2 * place + 1);
        if (ends_stage(chunk, count)) {
            weights_empty = me.weights.empty();
            me.weights.advance();
        }
    }

    // Starts the products of the chunk whose weights are loaded, and gives their stage back if it ends there: an arrival
    // overtakes loads that the warp issued before it, and where shared memory is busy these would read what the next
    // copy wrote; products that have started have their operands. `adds`: not the first of a block of scales.
    __device__ __forceinline__ void start(bool half, int adds, bool ends_stage) {
        Operands in[2];
        Format::unpack(raw[0], in[0]);
        if (!half) Format::unpack(raw[1], in[1]);
        me.tokens.wait_full();
        int32_t image[1] = {int32_t(me.tokens.stage())};
        hold(image);  // descriptors of other chunks that lie in the same stage would be kept
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < (half ? 2 : 4); ++step) {
            const uint32_t (&a)[4] = in[step / 2].a[step % 2];
            if constexpr (kBlocks)
                wgmma_bf16<N>(part, a[0], a[1], a[2], a[3], b_descriptor_swizzled(image[0], step), adds || step > 0);
            else
                wgmma_bf16<N>(sum, a[0], a[1], a[2], a[3], b_descriptor_swizzled(image[0], step), 1);
        }
        warpgroup_commit();
        if (ends_stage) mbarrier_arrive_if(weights_empty, me.lane == 0);
    }

    // The products that read the stage whose "empty" this is are done.
    __device__ __forceinline__ void release(uint32_t empty) {
        __syncwarp();
        mbarrier_arrive_if(empty, me.lane == 0);
    }

    __device__ __forceinline__ void load_scales(int block) {
        low_scale = ld_scale_f32(scales.gmem_low + block);
        high_scale = kFirst ? ld_scale_f32(scales.gmem_high + block) : low_scale;
    }
    __device__ __forceinline__ void add_part() {
        if constexpr (kBlocks) {
            hold(part);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum[i] = fmaf(part[i], i % 4 < 2 ? low_scale : high_scale, sum[i]);
        }
    }

    // `count` chunks, one behind the other, from chunk `first` on: while one is on the tensor cores the next is loaded
    // and decoded. At the end none is.
    template <int count, bool half_at_end>
    __device__ __forceinline__ void run_some(int first) {
        uint32_t empty[count];
        fetch(0, count, half_at_end && count == 1);
#pragma unroll
        for (int c = 0; c < count; ++c) {
            const bool last = c == count - 1;
            if (kBlocks && c % 2 == 0) load_scales((first + c) / 2);
            start(half_at_end && last, c % 2, ends_stage(c, count));
            empty[c] = me.tokens.empty();
            me.tokens.advance();
            const bool drains = last || (kBlocks && c % 2 == 1);
            const auto fetch_next = [&] { fetch(c + 1, count, half_at_end && c + 1 == count - 1); };
            if (!last && kAhead) fetch_next();
            if (drains) {
                warpgroup_wait<0>();
                if (c > 0 && (!kBlocks || c % 2 == 1)) release(empty[c - 1]);
                release(empty[c]);
                add_part();
            } else if (c > 0 && !kBlocks) {
                warpgroup_wait<1>();
                release(empty[c - 1]);
            }
            if (!last && !kAhead) fetch_next();
        }
    }

    // All of the task's chunks.
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (int first = 0; first < kInLoop; first += kAtOnce) run_some<kAtOnce, false>(first);
        run_some<kRest, kHalfAtEnd>(kInLoop);
        hold(sum);
    }
};
