// grouped_gemm.cu   act = activation(w13[e] x), or dots = w2[e] act, for the pairs of every expert, from the tile layout
//
// Grid     as many CTAs as multiprocessors, which take the tasks of grouped_gemm_smem.cuh in turns. Two warpgroups
//          consume, 64 rows of weights each: weights are operand A, decoded into registers, tokens are operand B. Of the
//          third one three warps request weights, and one the tokens, chunks of images (grouped_plan.cuh)
// Reads    weights once a block of pairs, from HBM once; tokens once for every 128 rows of weights, from L2
// Bound    HBM: the weights of every expert that has pairs; with many pairs L2 and the tensor cores
// Sync     weights wait for nothing: the plan was there before the kernel ahead began to make what this one reads as
//          tokens, which waits for that kernel. Publishes nothing
// Limits   rows and columns multiples of 32; sm_90a
//
// Compile-time parameters: see grouped_gemm_smem.cuh; WARPRING_GELU_TANH, see activation.cuh.
#include "grouped_gemm_epilogue.cuh"
#include "grouped_gemm_products.cuh"

// The panels of a task that this warp requests: `producer`, and every kWeightWarps-th behind it, a lane for each; in slabs
// as many panels as lie together.
__device__ __forceinline__ void produce_weights(const Args& args, int producer, int lane) {
    WeightRing ring(smem_address(smem_start()));
    Tasks tasks(args.gmem_plan);
    Task task;
    while (tasks.next(task)) {
        const int copies = ceil_div(max(task.num_panels() / kTogether - producer, 0), kWeightWarps);
        const int own = (producer + lane * kWeightWarps) * kTogether;
        const int64_t panel = int64_t(task.expert) * kPanels + task.tile * kTaskPanels + own;
        const uint8_t* gmem = args.gmem_records + panel * (kRecords * Format::kRecordBytes);
        const uint32_t to = own * kPanelStageBytes;
#pragma unroll 1
        for (int s = 0; s < kStagesOfTask; ++s) {
            const uint32_t bytes = min(kStageRecords, kRecords - s * kStageRecords) * Format::kRecordBytes * kTogether;
            ring.wait_empty();
            __syncwarp();  // a stage may be used again before a lane that lags has seen that it was empty
            if (lane == 0) mbarrier_arrive_expect_tx(ring.full(), copies * bytes);
            if (lane < copies) bulk_copy(ring.stage() + to, gmem, bytes, ring.full());
            gmem += kTogether * kPanelStageBytes;
            ring.advance();
        }
    }
}

__device__ __forceinline__ void produce_tokens(const Args& args, int lane) {
    TokenRing ring(smem_address(smem_start()));
    Tasks tasks(args.gmem_plan);
    Task task;
    pdl_wait();
    fence_proxy_async_global();
    while (tasks.next(task)) {
        const uint8_t* gmem = args.gmem_image + int64_t(task.first) * image_row_bytes(kCols);
        const uint32_t bytes = task.count * kChunkRowBytes;
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c) {
            ring.wait_empty();
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive_expect_tx(ring.full(), bytes);
                bulk_copy(ring.stage(), gmem, bytes, ring.full());
            }
            gmem += bytes;
            ring.advance();
        }
    }
}

template <int N>
__device__ __forceinline__ void do_task(const Args& args, const Task& task, Consumer& me) {
    // On their way while products are formed, where registers are left.
    RowConstants rows;
    if constexpr (!Format::kBlockScale) rows.load(args, task, me.warp, me.lane / 4);
    Products<N> products(me, args, task);
    products.run();
    if constexpr (Format::kBlockScale) rows.load(args, task, me.warp, me.lane / 4);
    if constexpr (kFirst)
        finish_first<N>(args, task, rows, me.warp, me.lane, products.sum);
    else
        finish_second<N>(args, task, rows, me.warp, me.lane, products.sum);
}

// By the narrowest products that take the task's rows.
template <int N>
__device__ __forceinline__ void do_task_of_width(const Args& args, const Task& task, Consumer& me) {
    if constexpr (N < kBlockTokens) {
        constexpr int kWider = N < 32 ? 32 : N < 64 ? 64 : N + 32;
        if (task.count > N) return do_task_of_width<(kWider < kBlockTokens ? kWider : kBlockTokens)>(args, task, me);
    }
    do_task<N>(args, task, me);
}

// With the compiler's knowledge that all lanes hold the same: products must not lie in a branch that it takes for
// divergent.
__device__ __forceinline__ int32_t uniform(int32_t v) { return __shfl_sync(kFullWarp, v, 0); }

__device__ __forceinline__ void consume(const Args& args) {
    const uint32_t base = smem_address(smem_start());
    Consumer me{int(threadIdx.x) / kLanes, int(threadIdx.x) % kLanes, WeightRing(base), TokenRing(base)};
    Tasks tasks(args.gmem_plan);
    Task task;
    while (uniform(tasks.next(task))) {
        task = {uniform(task.expert), uniform(task.tile), uniform(task.first), uniform(task.count)};
        do_task_of_width<16>(args, task, me);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const uint8_t* gmem_records, const float* gmem_matrix_scale, const float* gmem_row_scale,
                 const float* gmem_block_scale, const float* gmem_bias, const int32_t* gmem_plan,
                 const uint8_t* gmem_image, void* gmem_out, float alpha, float limit, float up_offset) {
    const Args args{gmem_records, gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias, gmem_plan,
                    gmem_image,   gmem_out,          alpha,          limit,            up_offset};
    if (threadIdx.x == 0) {
        const uint32_t base = smem_address(smem_start());
        WeightRing(base).init(kWeightWarps, kConsumerWarps);
        TokenRing(base).init(1, kConsumerWarps);
        fence_mbarrier_init();
    }
    __syncthreads();
    // A CTA of the next kernel finds room where one of this has ended: it then requests weights while others go on here.
    pdl_launch_dependents();
    const int warp = uniform(threadIdx.x / kLanes), lane = threadIdx.x % kLanes;
    if (warp < kConsumerWarps) {
        registers_more<kConsumerRegisters>();
        consume(args);
    } else {
        registers_fewer<kProducerRegisters>();
        if (warp < kConsumerWarps + kWeightWarps)
            produce_weights(args, warp - kConsumerWarps, lane);
        else
            produce_tokens(args, lane);
    }
}
