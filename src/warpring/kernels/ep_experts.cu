// ep_experts.cu   role2: act = act_fn(w13[e] x), partial = w2[e] act, for the token blocks of the ring
//
// Grid     compute_ctas persistent CTAs, one or two an SM, which draw the tasks of the list in its order from a counter. A task is
//          128 rows of a matrix for one block: 64 neurons' gate and up rows, or 128 outputs. Two warpgroups consume, 64 rows each;
//          of the third one thread follows the plan, one requests weights, one tokens, and a warp publishes results:
//          a release waits for all stores of the SM that are on their way.
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

// ---- the three producing threads, and the warp that publishes -------------------------------------------------------

// What the counter was when this call began. Every call takes a ticket a task, and each of its CTAs one that finds the list
// at its end, so nothing is ever reset.
__device__ __forceinline__ uint32_t first_ticket(const EpParams& params, uint64_t generation, uint64_t block_base) {
    return uint32_t(block_base) * (kNeuronTasks + kOutputTasks) + uint32_t(generation - 1) * params.compute_ctas;
}

// Task `index` of the list. False: a wait has failed.
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

// The packed weights of a task: chunks that follow each other, and what their padding is.
__device__ __forceinline__ const uint8_t* task_weights(const EpWeights& weights, const Task& task,
                                                       uint32_t& chunk_bytes, uint32_t& unused_bytes) {
    const bool first = task.kind == kFirstGemm, shared = task.expert >= kLocalExperts;
    const int tasks = first ? kNeuronTasks : kOutputTasks, chunks = first ? kHiddenChunks : kIntermediateChunks;
    const uint8_t* gmem = shared  ? first ? weights.gmem_shared_w13 : weights.gmem_shared_w2
                          : first ? weights.gmem_w13
                                  : weights.gmem_w2;
    chunk_bytes = shared ? kWeightChunkBytes<Shared> : kWeightChunkBytes<Routed>;
    unused_bytes = shared ? Shared::kUnusedBytes : Routed::kUnusedBytes;
    const int64_t expert = shared ? task.expert - kLocalExperts : task.expert;
    return gmem + (expert * tasks + task.tile) * chunks * int64_t(chunk_bytes);
}

__device__ __forceinline__ int stage_columns(const Task& task) {
    return task.expert >= kLocalExperts ? kStageColumns<Shared> : kStageColumns<Routed>;
}

// Puts the CTA's tasks into the queue, so that nobody else waits for the plan.
__device__ __forceinline__ void produce_tasks(const EpParams& params, Smem& smem, const EpSync& sync,
                                              uint64_t block_base) {
    TaskRing tasks(smem_address(smem_start())), begun = tasks;
    const uint32_t first = first_ticket(params, sync.generation, block_base);
    int num_blocks = -1;
    for (int taken = 0;; ++taken) {
        if (taken >= kTasksAhead) {
            mbarrier_wait(begun.barrier() + kToBegun, begun.parity);
            begun.advance();
        }
        const int index = int(atom_add_relaxed_gpu_u32(&params.gmem_state->tickets, 1) - first);
        Task task{};
        if (has_failed(smem) || !next_task(params, sync, block_base, index, num_blocks, task)) {
            set_failed(smem);
            task.kind = kNoTask;
        }
        tasks.wait_empty();
        smem_object<QueuedTask>(tasks.stage()).task = task;
        mbarrier_arrive(tasks.barrier());
        tasks.advance();
        if (task.kind == kNoTask) return;
    }
}

__device__ __forceinline__ void produce_weights(const EpWeights& weights, Smem& smem) {
    TaskRing tasks(smem_address(smem_start()));
    StageRing ring(smem_address(smem_start()));
    for (;; tasks.advance()) {
        tasks.wait_full();
        const Task task = smem_object<QueuedTask>(tasks.stage()).task;
        const uint32_t begun = tasks.barrier() + kToBegun;
        tasks.arrive_empty();
        if (task.kind == kNoTask) return;
        uint32_t chunk_bytes, unused_bytes;
        const uint8_t* gmem = task_weights(weights, task, chunk_bytes, unused_bytes);
        const int chunks = task.kind == kFirstGemm ? kHiddenChunks : kIntermediateChunks;
        const int per_stage = stage_columns(task) / kChunkColumns;
        const int last_stages = max(0, (ceil_div(chunks, per_stage) - kStagesAhead) * per_stage);
#pragma unroll 1
        for (int c = 0; c < chunks; c += per_stage) {
            if (c == last_stages) mbarrier_arrive(begun);
            const uint32_t whole_bytes = min(chunks - c, per_stage) * chunk_bytes, bytes = whole_bytes - unused_bytes;
            ring.wait_empty();
            if (has_failed(smem)) {
                mbarrier_arrive(ring.barrier());
            } else {
                mbarrier_arrive_expect_tx(ring.barrier(), bytes);
                bulk_copy_once(ring.stage(), gmem, bytes, ring.barrier());
            }
            gmem += whole_bytes;
            ring.advance();
        }
    }
}

// Where the tokens of a task lie, and how much of them a stage takes.
struct TaskTokens {
    const uint8_t* gmem_image;
    const float* gmem_scale;
    int columns;            // that are left
    int per_stage;          // columns
    uint32_t column_bytes;  // of the image
    int group_shift;        // columns of a group of scales, as a power of 2

    __device__ __forceinline__ TaskTokens(const EpParams& params, const Task& task) {
        const bool first = task.kind == kFirstGemm;
        gmem_image = first ? ring_x(params, task.slot) : params.gmem_ring_act + task.slot * kRingActSlotBytes;
        gmem_scale = first ? ring_x_scale(params, task.slot)
                           : params.gmem_ring_act_scale + int64_t(task.slot) * kNeuronTasks * kBlockM;
        columns = first ? kHiddenPadded : kIntermediatePadded;
        per_stage = stage_columns(task);
        column_bytes = block_width(task.count) * kTerms;
        group_shift = first ? 7 : 6;
    }
    // The next stage: image and scales. Bytes that the caller copies to it too are announced with them.
    __device__ __forceinline__ void copy(const StageRing& ring, uint32_t more_bytes) {
        const int now = min(columns, per_stage), groups = now >> group_shift;
        const uint32_t image_bytes = now * column_bytes, scale_bytes = groups * kBlockM * 4;
        mbarrier_arrive_expect_tx(ring.barrier(), image_bytes + scale_bytes + more_bytes);
        bulk_copy(ring.stage() + kImageAt, gmem_image, image_bytes, ring.barrier());
        bulk_copy(ring.stage() + kScalesAt, gmem_scale, scale_bytes, ring.barrier());
        gmem_image += image_bytes;
        gmem_scale += groups * kBlockM;
        columns -= now;
    }
};

// Which act chunks of a block are there, of those in `wanted` all.
__device__ __forceinline__ bool wait_act(const EpParams& params, const EpSync& sync, const Task& task, uint64_t wanted,
                                         uint64_t& there) {
    if ((there & wanted) == wanted) return true;
    if (!wait_l2_full(params, sync, {task.slot, task.use}, wanted, there)) return false;
    fence_proxy_async_global();
    return true;
}

__device__ __forceinline__ void produce_tokens(const EpParams& params, Smem& smem, const EpSync& sync) {
    TaskRing tasks(smem_address(smem_start()));
    StageRing ring(smem_address(smem_start()));
    for (;; tasks.advance()) {
        tasks.wait_full();
        QueuedTask& queued = smem_object<QueuedTask>(tasks.stage());
        const Task task = queued.task;
        if (task.kind == kNoTask) return;
        const bool first = task.kind == kFirstGemm;
        bool failed = has_failed(smem);
        // The second GEMM waits for them too: act chunks of two uses ago look like those of this one.
        if (!failed) failed = !wait_l1_full(params, sync, {task.slot, task.use});
        if (first) fence_proxy_async_global();
        TaskTokens tokens(params, task);
        const int acts = tokens.per_stage / 64;  // of a stage
        uint64_t there = 0, wanted = (uint64_t(1) << acts) - 1;
        const auto fill = [&](uint32_t more_bytes) {
            if (!first && !failed) failed = !wait_act(params, sync, task, wanted & kAllNeuronTasks, there);
            wanted <<= acts;
            if (failed) set_failed(smem);
            ring.wait_empty();
            if (failed)
                mbarrier_arrive(ring.barrier());
            else
                tokens.copy(ring, more_bytes);
        };
        // The block's info comes with the first stage. Code of its own, since what is not copied takes time too.
        int left = tokens.columns - tokens.per_stage;
        fill(sizeof(RingInfo));
        if (!failed)
            bulk_copy(smem_address(&queued.info), &ring_info(params, task.slot), sizeof(RingInfo), ring.barrier());
        ring.advance();
#pragma unroll 1
        for (; left > 0; left -= tokens.per_stage) {
            fill(0);
            ring.advance();
        }
        tasks.arrive_empty();
    }
}

// One warp: tells the ring what the consumers have finished, and at the end the peers.
__device__ __forceinline__ void publish_tasks(const EpParams& params, Smem& smem) {
    const int lane = threadIdx.x % kLanes;
    TaskRing tasks(smem_address(smem_start()));
    bool over = false;  // the peers have been told
    const auto tell_peers = [&] {
        over = true;
        if (has_failed(smem)) return;
#pragma unroll 1
        for (int peer = lane; peer < params.peers.num_ranks; peer += kLanes) signal_done(params, peer);
    };
    while (true) {
        tasks.wait_full();
        const Task task = smem_object<QueuedTask>(tasks.stage()).task;
        if (task.kind == kNoTask) break;
        const uint32_t barrier = tasks.barrier();
        mbarrier_wait(barrier + kToDone, tasks.parity);
        __syncwarp();  // before one lane frees the entry: it may then be used again, and both barriers flip under the others
        tasks.advance();
        // The last task's peers do not wait until the ring knows.
        if (task.kind == kSecondGemm && mbarrier_try_wait(tasks.barrier(), tasks.parity) &&
            smem_object<QueuedTask>(tasks.stage()).task.kind == kNoTask)
            tell_peers();
        if (lane == 0) {
            const RingPlace place{task.slot, task.use};
            if (!has_failed(smem)) {
                if (task.kind == kFirstGemm) {
                    signal_l2_full(params, place, task.tile);
                    signal_l1_empty(params, place);
                } else {
                    signal_l2_empty(params, place);
                }
            }
            TaskRing::release(barrier, true);
        }
    }
    if (!over) tell_peers();
}

// ---- the consumers -------------------------------------------------------------------------------------------------

template <int N, class Format>
__device__ __forceinline__ void do_task(const EpParams& params, const EpWeights& weights, Smem& smem, Consumer& me,
                                        const Task& task, const RingInfo& info, const Place& at) {
    if (task.kind == kFirstGemm) {
        Products<N, Format, false> products(me);
        products.run();
        finish_first<N>(params, weights, smem, task, info, at, products.sum);
    } else {
        Products<N, Format, true> products(me);
        products.run();
        finish_second<N>(params, weights, smem, task, info, at, products.sum);
    }
}

template <class Format>
__device__ __forceinline__ void do_task_of_width(const EpParams& params, const EpWeights& weights, Smem& smem,
                                                 Consumer& me, const Task& task, const RingInfo& info, const Place& at) {
    const int width = block_width(task.count);
    if (width == 8) do_task<8, Format>(params, weights, smem, me, task, info, at);
    if constexpr (kBlockM >= 16) {
        if (width == 16) do_task<16, Format>(params, weights, smem, me, task, info, at);
    }
    if constexpr (kBlockM >= 32) {
        if (width == 32) do_task<32, Format>(params, weights, smem, me, task, info, at);
    }
    if constexpr (kBlockM >= 64) {
        if (width == 64) do_task<64, Format>(params, weights, smem, me, task, info, at);
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
    for (;; tasks.advance()) {
        tasks.wait_full();
        const QueuedTask& queued = smem_object<QueuedTask>(tasks.stage());
        const Task task = uniform(queued.task);
        if (task.kind == kNoTask) return;
        if (kNumShared > 0 && task.expert >= kLocalExperts)
            do_task_of_width<Shared>(params, weights, smem, me, task, queued.info, at);
        else
            do_task_of_width<Routed>(params, weights, smem, me, task, queued.info, at);
        __syncwarp();
        mbarrier_arrive_if(tasks.barrier() + kToDone, at.lane == 0);
    }
}

__device__ __forceinline__ void set_up(Smem& smem) {
    const uint32_t base = smem_address(smem_start());
    if (threadIdx.x == 0) {
        StageRing(base).init(2, kConsumerWarps);  // one arrival for the weights, one for the tokens
        fence_mbarrier_init();
        smem.failed = 0;
    }
    if (threadIdx.x == kConsumers) {
        const TaskRing tasks(base);
        tasks.init(1, 3);  // read by two producers and by the warp that publishes, which waits for the consumers
        for (int t = 0; t < kTasks; ++t) {
            mbarrier_init(tasks.barrier() + kToDone + 8 * t, kConsumerWarps);
            mbarrier_init(tasks.barrier() + kToBegun + 8 * t, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    ep_experts(const __grid_constant__ EpParams params, const __grid_constant__ EpWeights weights) {
    pdl_launch_dependents();  // role3 where it shares the stream: it waits for `done`
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
        if (thread == 0) {
            produce_tasks(params, smem, sync, block_base);
            // role1, where it shares the stream: the end of this kernel is the end of both. By a thread that publishes nothing: role1
            // may be waiting for slots that this CTA's last tasks free.
            pdl_wait();
        }
        if (thread == kLanes) produce_weights(weights, smem);
        if (thread == 2 * kLanes) produce_tokens(params, smem, sync);
        if (thread >= 3 * kLanes) publish_tasks(params, smem);
    }
}
