// ep_experts.cu   role2: act = act_fn(w13[e] x), partial = w2[e] act, for the token blocks of the ring
//
// Grid     compute_ctas persistent CTAs, one an SM: task i of the list belongs to CTA i mod grid. A task is 128 rows of
//          a matrix for one block: 64 neurons' gate and up rows, or 128 outputs. Two warpgroups consume, 64 rows each;
//          of the third one thread follows the plan, one requests weights, one tokens.
// Reads    weights once a block, by bulk copies that run ahead over the borders of tasks and wait only for the plan;
//          tokens, activations and scales from L2, once a task
// Writes   partial results straight to the memory of the tokens' owners
// Bound    HBM: the weights of every expert that some block names
// Sync     weights: the plan. Tokens: l1_full of the block (first GEMM), or the bits of l2_full of a chunk (second).
//          Publishes l2_full and l1_empty behind a first-GEMM task, l2_empty behind a second, `done` at every peer
//          behind its last. A wait that fails poisons the layer; the CTA then completes what it has begun without data
//          and publishes nothing.
// Limits   hidden, intermediate multiples of 32, intermediate <= 4096; sm_90a
#include "ep_experts_epilogue.cuh"
#include "ep_experts_products.cuh"

// ---- the three producing threads ------------------------------------------------------------------------------------

// The next task of this CTA. False: a wait has failed.
__device__ __forceinline__ bool next_task(const EpParams& params, const EpSync& sync, uint64_t block_base, int index,
                                          int& num_blocks, Task& task) {
    ListItem item = list_item(index, params.lag, num_blocks);
    PlanEntry entry{};
    if (item.kind != kNoTask && !wait_plan(params, sync, item.needs, entry)) return false;
    if (item.kind != kNoTask && entry.count == 0) {
        // The list is shorter than was taken for granted.
        num_blocks = int32_t(ld_relaxed_gpu_b128(plan_packet(params, 0)).y);
        item = list_item(index, params.lag, num_blocks);
        if (item.kind != kNoTask && !wait_plan(params, sync, item.block, entry)) return false;
    } else if (item.kind != kNoTask && item.needs != item.block && !wait_plan(params, sync, item.block, entry)) {
        return false;
    }
    const RingPlace place = ring_place(params, block_base, item.block);
    task = {item.kind, entry.expert, entry.count, item.tile, place.slot, place.use, {0, 0}};
    return true;
}

// One thread: the next task of the queue.
__device__ __forceinline__ Task take_task(TaskRing& tasks) {
    tasks.wait_full();
    const Task task = smem_object<Task>(tasks.stage());
    tasks.arrive_empty_if(true);
    tasks.advance();
    return task;
}

// The packed weights of a task: chunks that follow each other.
__device__ __forceinline__ const uint8_t* task_weights(const EpWeights& weights, const Task& task,
                                                       uint32_t& chunk_bytes) {
    const bool first = task.kind == kFirstGemm, shared = task.expert >= kLocalExperts;
    const int tasks = first ? kNeuronTasks : kOutputTasks, chunks = first ? kHiddenChunks : kIntermediateChunks;
    const uint8_t* gmem = shared  ? first ? weights.gmem_shared_w13 : weights.gmem_shared_w2
                          : first ? weights.gmem_w13
                                  : weights.gmem_w2;
    chunk_bytes = shared ? kWeightChunkBytes<Shared> : kWeightChunkBytes<Routed>;
    const int64_t expert = shared ? task.expert - kLocalExperts : task.expert;
    return gmem + (expert * tasks + task.tile) * chunks * int64_t(chunk_bytes);
}

// Puts the CTA's tasks into the queue, so that nobody else waits for the plan.
__device__ __forceinline__ void produce_tasks(const EpParams& params, Smem& smem, const EpSync& sync,
                                              uint64_t block_base) {
    TaskRing tasks(smem_address(smem_start()));
    int num_blocks = -1;
    for (int index = blockIdx.x;; index += gridDim.x) {
        Task task{};
        if (has_failed(smem) || !next_task(params, sync, block_base, index, num_blocks, task)) {
            set_failed(smem);
            task.kind = kNoTask;
        }
        tasks.wait_empty();
        smem_object<Task>(tasks.stage()) = task;
        mbarrier_arrive(tasks.barrier());
        tasks.advance();
        if (task.kind == kNoTask) return;
    }
}

__device__ __forceinline__ void produce_weights(const EpWeights& weights, Smem& smem) {
    TaskRing tasks(smem_address(smem_start()));
    StageRing ring(smem_address(smem_start()));
    while (true) {
        const Task task = take_task(tasks);
        if (task.kind == kNoTask) return;
        uint32_t bytes;
        const uint8_t* gmem = task_weights(weights, task, bytes);
        const int chunks = task.kind == kFirstGemm ? kHiddenChunks : kIntermediateChunks;
        for (int c = 0; c < chunks; ++c) {
            ring.wait_empty();
            if (has_failed(smem)) {
                mbarrier_arrive(ring.barrier());
            } else {
                mbarrier_arrive_expect_tx(ring.barrier(), bytes);
                bulk_copy_once(ring.stage(), gmem + c * int64_t(bytes), bytes, ring.barrier());
            }
            ring.advance();
        }
    }
}

// One chunk of a task's tokens: image, scales, and behind the last chunk the block's info.
__device__ __forceinline__ void copy_tokens(const EpParams& params, const Task& task, int chunk, bool last,
                                            const StageRing& ring) {
    const int width = block_width(task.count);
    const bool first = task.kind == kFirstGemm;
    const bool half = !first && 2 * chunk + 1 == kNeuronTasks;  // the last chunk of an odd number of act chunks
    const uint32_t chunk_bytes = width * kChunkColumns * kElementBytes;
    const uint8_t* gmem_image =
        (first ? ring_x(params, task.slot) : params.gmem_ring_act + task.slot * kRingActSlotBytes) +
        chunk * int64_t(chunk_bytes);
    const float* gmem_scale =
        first ? ring_x_scale(params, task.slot) + (kFp8 ? chunk : 0) * kBlockM
              : params.gmem_ring_act_scale + (int64_t(task.slot) * kNeuronTasks + 2 * chunk) * kBlockM;
    const uint32_t image_bytes = half ? chunk_bytes / 2 : chunk_bytes;
    const uint32_t scale_bytes = (first || half ? 1 : 2) * kBlockM * 4;
    const uint32_t info_bytes = last ? sizeof(RingInfo) : 0;
    mbarrier_arrive_expect_tx(ring.barrier(), image_bytes + scale_bytes + info_bytes);
    bulk_copy(ring.stage() + kImageAt, gmem_image, image_bytes, ring.barrier());
    bulk_copy(ring.stage() + kScalesAt, gmem_scale, scale_bytes, ring.barrier());
    if (last) bulk_copy(ring.stage() + kInfoAt, &ring_info(params, task.slot), info_bytes, ring.barrier());
}

// Which act chunks of a block are there, of those in `wanted` all.
__device__ __forceinline__ bool wait_act(const EpParams& params, const EpSync& sync, const Task& task, uint64_t wanted,
                                         uint64_t& there) {
    if ((there & wanted) == wanted) return true;
    if (!wait_l2_full(params, sync, {task.slot, task.use}, wanted)) return false;
    const uint64_t bits = ld_acquire_gpu_u64(params.gmem_l2_full + task.slot);
    there = task.use % 2 == 0 ? bits : ~bits;
    fence_proxy_async();
    return true;
}

__device__ __forceinline__ void produce_tokens(const EpParams& params, Smem& smem, const EpSync& sync) {
    TaskRing tasks(smem_address(smem_start()));
    StageRing ring(smem_address(smem_start()));
    while (true) {
        const Task task = take_task(tasks);
        if (task.kind == kNoTask) return;
        const bool first = task.kind == kFirstGemm;
        bool failed = has_failed(smem);
        if (first && !failed) {
            failed = !wait_l1_full(params, sync, {task.slot, task.use});
            fence_proxy_async();
        }
        uint64_t there = 0;
        const int chunks = first ? kHiddenChunks : kIntermediateChunks;
        for (int c = 0; c < chunks; ++c) {
            if (!first && !failed)
                failed = !wait_act(params, sync, task, uint64_t(3) << 2 * c & kAllNeuronTasks, there);
            if (failed) set_failed(smem);
            ring.wait_empty();
            if (failed)
                mbarrier_arrive(ring.barrier());
            else
                copy_tokens(params, task, c, c == chunks - 1, ring);
            ring.advance();
        }
    }
}

// ---- the consumers -------------------------------------------------------------------------------------------------

template <int N, class Format>
__device__ __forceinline__ void do_task(const EpParams& params, const EpWeights& weights, Smem& smem, Consumer& me,
                                        const Task& task, const Place& at) {
    UsedStage kept;
    if (task.kind == kFirstGemm) {
        Products<N, Format, false> products(me);
        kept = products.run();
        finish_first<N>(params, weights, smem, task, smem_object<RingInfo>(kept.address + kInfoAt), at, products.sum);
    } else {
        Products<N, Format, true> products(me);
        kept = products.run();
        finish_second<N>(params, weights, smem, task, smem_object<RingInfo>(kept.address + kInfoAt), at, products.sum);
    }
    __syncwarp();
    StageRing::release(kept.barrier, me.lane == 0);
}

template <class Format>
__device__ __forceinline__ void do_task_of_width(const EpParams& params, const EpWeights& weights, Smem& smem,
                                                 Consumer& me, const Task& task, const Place& at) {
    const int width = block_width(task.count);
    if (width == 8) do_task<8, Format>(params, weights, smem, me, task, at);
    if constexpr (kBlockM >= 16) {
        if (width == 16) do_task<16, Format>(params, weights, smem, me, task, at);
    }
    if constexpr (kBlockM >= 32) {
        if (width == 32) do_task<32, Format>(params, weights, smem, me, task, at);
    }
    if constexpr (kBlockM >= 64) {
        if (width == 64) do_task<64, Format>(params, weights, smem, me, task, at);
    }
}

// The same task with the compiler's knowledge that all lanes hold the same: products must not lie in a branch that it
// takes for divergent.
__device__ __forceinline__ int32_t uniform(int32_t v) { return __shfl_sync(kFullWarp, v, 0); }
__device__ __forceinline__ Task uniform(const Task& task) {
    return {uniform(task.kind),
            uniform(task.expert),
            uniform(task.count),
            uniform(task.tile),
            uniform(task.slot),
            uint32_t(uniform(int32_t(task.use))),
            {0, 0}};
}

__device__ __forceinline__ void consume(const EpParams& params, const EpWeights& weights, Smem& smem) {
    const Place at{int(threadIdx.x) / kLanes, int(threadIdx.x) % kLanes, int(threadIdx.x)};
    const uint32_t base = smem_address(smem_start());
    Consumer me{at.warp, at.lane, StageRing(base)};
    TaskRing tasks(base);
    while (true) {
        tasks.wait_full();
        const Task task = uniform(smem_object<Task>(tasks.stage()));
        tasks.arrive_empty_if(at.lane == 0);
        tasks.advance();
        if (task.kind == kNoTask) break;
        if constexpr (kNumShared > 0) {
            if (task.expert >= kLocalExperts) {
                do_task_of_width<Shared>(params, weights, smem, me, task, at);
                continue;
            }
        }
        do_task_of_width<Routed>(params, weights, smem, me, task, at);
    }
    consumers_sync();
    if (at.thread < params.peers.num_ranks && !has_failed(smem)) signal_done(params, at.thread);
}

__device__ __forceinline__ void set_up(Smem& smem) {
    if (threadIdx.x == 0) {
        const uint32_t base = smem_address(smem_start());
        StageRing(base).init(2, kConsumerWarps);     // one arrival for the weights, one for the tokens
        TaskRing(base).init(1, kConsumerWarps + 2);  // read by the consumers and two producers
        fence_mbarrier_init();
        smem.failed = 0;
    }
    for (int i = threadIdx.x; i < kLutBytes; i += kThreads) smem_start()[i] = lut_byte(i / 8, i % 8);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    ep_experts(const __grid_constant__ EpParams params, const __grid_constant__ EpWeights weights) {
    Smem& smem = smem_of_cta();
    set_up(smem);
    if (uniform(threadIdx.x / kLanes) < kConsumerWarps) {
        registers_more<kConsumerRegisters>();
        consume(params, weights, smem);
    } else {
        registers_fewer<kProducerRegisters>();
        const uint64_t generation = params.gmem_state->generation + 1, block_base = params.gmem_state->block_base;
        const EpSync sync = ep_sync(params, generation);
        const int thread = threadIdx.x - kConsumers;
        if (thread == 0) produce_tasks(params, smem, sync, block_base);
        if (thread == kLanes) produce_weights(weights, smem);
        if (thread == 2 * kLanes) produce_tokens(params, smem, sync);
    }
}
