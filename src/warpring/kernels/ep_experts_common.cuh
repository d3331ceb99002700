// ep_experts_common.cuh   Shared memory of a CTA of role2: a ring of stages, the queue of tasks, the order of tasks.
//
// Compile-time parameters beside those of ep_common.cuh:
//   WARPRING_FORMAT          a policy of ep_weights.cuh, for the routed experts
//   WARPRING_SHARED_FORMAT   the same for shared experts; WARPRING_FORMAT where it is not given
//   WARPRING_STAGES          stages of weights, with their tokens, that a CTA holds or has requested
//   WARPRING_STAGE_CHUNKS    chunks of routed weights in a stage: a copy takes the thread that asks for it some 180 cycles
//   WARPRING_CTAS_PER_SM     1 or 2: where decoding the weights takes longer than reading them, four warps a scheduler help
//   WARPRING_SMEM_BYTES      dynamic shared memory of a CTA
#pragma once
#include "ep_weights.cuh"

#ifndef WARPRING_SHARED_FORMAT
#define WARPRING_SHARED_FORMAT WARPRING_FORMAT
#endif
using Routed = WARPRING_FORMAT;
using Shared = WARPRING_SHARED_FORMAT;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int clamped(int a, int least, int most) { return smaller(larger(a, least), most); }

constexpr int kConsumerWarps = 8, kConsumers = kConsumerWarps * kLanes;
constexpr int kThreads = kConsumers + 128;  // one warpgroup of producers
constexpr int kCtasPerSm = WARPRING_CTAS_PER_SM;
constexpr bool kAlone = kCtasPerSm == 1;
// Registers a thread: the launch gives all of them 168 or 80, the producers' spare ones go to the consumers.
constexpr int kConsumerRegisters = kAlone ? 224 : 96, kProducerRegisters = kAlone ? 56 : 48;
constexpr int kConsumerBarrier = 1;  // the named barrier of the consumers; 0 is __syncthreads

constexpr int kChunkColumns = 128;
constexpr int kHiddenChunks = kHiddenPadded / kChunkColumns;
constexpr int kIntermediateChunks = ceil_div(kIntermediatePadded, kChunkColumns);
template <class Format>
constexpr int kWeightChunkBytes = Format::kCodeBytes + Format::kScaleBytes;
static_assert(kWeightChunkBytes<Routed> % 128 == 0 && kWeightChunkBytes<Shared> % 128 == 0, "whole lines of the cache");

// Chunks of weights in a stage: as many of the routed experts as are asked for, and as many of the shared experts, whose
// chunks may be larger, as their bytes hold.
template <class Format>
constexpr int kStageChunks = clamped(WARPRING_STAGE_CHUNKS * kWeightChunkBytes<Routed> / kWeightChunkBytes<Format>, 1,
                                     WARPRING_STAGE_CHUNKS);
template <class Format>
constexpr int kStageColumns = kStageChunks<Format> * kChunkColumns;
constexpr int kMostStageColumns = larger(kStageColumns<Routed>, kStageColumns<Shared>);

constexpr int64_t kRingActSlotBytes = int64_t(kBlockM) * kIntermediatePadded * kTerms;

// ---- shared memory -------------------------------------------------------------------------------------------------

constexpr int kStages = WARPRING_STAGES;
static_assert(kStages >= 3, "products of a group are under way while the next is loaded, of a chunk a stage each");
constexpr int kTasks = 8;  // of the queue
// A stage: chunks of weights; the same columns of the block's tokens as a B image; scales, one row a group of columns.
constexpr int kImageAt = larger(kStageChunks<Routed> * kWeightChunkBytes<Routed>,
                                kStageChunks<Shared> * kWeightChunkBytes<Shared>);
constexpr int kScalesAt = kImageAt + kBlockM * kMostStageColumns * kTerms;
constexpr int kStageBytes = round_up(kScalesAt + kMostStageColumns / 64 * kBlockM * 4, 128);

// Partial results are turned round in shared memory, some tokens at a time; so is the act chunk of a task.
constexpr int kPartialBytes = kFp8 ? 2 : 4;
constexpr int kTurnTokens = smaller(kBlockM, 64 / kPartialBytes);
constexpr int kTurnStride = 128 * kPartialBytes + 16;  // of a token: banks of neighbours differ
constexpr int kTurnBytes = larger(kTurnTokens * kTurnStride, kBlockM * 64 * kTerms);

struct Task {
    int32_t kind;  // kNoTask: the list is over
    int32_t expert, count, tile, slot;
    uint32_t use;
    int32_t reserved[2];
};
enum TaskKind : int32_t { kNoTask = 0, kFirstGemm = 1, kSecondGemm = 2 };

// A task in the queue. The info of its block comes with the task's first stage.
struct QueuedTask {
    Task task;
    RingInfo info;
};

// Byte offsets in a CTA's shared memory: the stages' barriers (full, then empty), the stages, the queue and its barriers
// (full, empty, done, begun), the rest. With stages from 0 on the compiler takes two instructions a chunk more.
constexpr uint32_t kStageBarriersAt = 0;
constexpr uint32_t kStagesAt = round_up(kStages * 16, 128);
constexpr uint32_t kTasksAt = kStagesAt + kStages * kStageBytes;
constexpr uint32_t kTaskBarriersAt = kTasksAt + kTasks * sizeof(QueuedTask);
constexpr uint32_t kRestAt = kTaskBarriersAt + kTasks * 32;
struct alignas(16) Smem {
    uint8_t turn[kTurnBytes];
    alignas(16) uint32_t amax[kBlockM][kConsumerWarps];
    int32_t failed;  // set before the stages that hold no data: what follows is not published
};
static_assert(kRestAt + sizeof(Smem) <= WARPRING_SMEM_BYTES, "experts_kernel.py asks for as much");

__device__ __forceinline__ uint8_t* smem_start() {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    return smem_bytes;
}
__device__ __forceinline__ Smem& smem_of_cta() { return *reinterpret_cast<Smem*>(smem_start() + kRestAt); }
// What lies at an address of shared memory.
template <class T>
__device__ __forceinline__ T& smem_object(uint32_t address) {
    return *reinterpret_cast<T*>(smem_start() + (address - smem_address(smem_start())));
}

// Where a role stands in a ring: addresses in shared memory, so that a step costs few instructions. `parity` is that of
// the phase in which the stage is filled. Waits inside a CTA end because every producer's own waits are bounded: after
// a failure they complete all stages empty.
template <int stages, uint32_t bytes, uint32_t first, uint32_t full>
struct Ring {
    static constexpr uint32_t kToEmpty = 8 * stages;
    uint32_t base;  // of the CTA's shared memory
    uint32_t index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit Ring(uint32_t smem) : base(smem) {}
    __device__ __forceinline__ uint32_t stage() const { return base + first + index * bytes; }
    __device__ __forceinline__ uint32_t barrier() const { return base + full + index * 8; }
    // One thread, before anyone uses it.
    __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(barrier() + 8 * s, full_arrivals);
            mbarrier_init(barrier() + kToEmpty + 8 * s, empty_arrivals);
        }
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(barrier(), parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(barrier() + kToEmpty, parity ^ 1); }
    __device__ __forceinline__ void arrive_empty() const { mbarrier_arrive(barrier() + kToEmpty); }
    // The stage whose "full" is at `barrier` has been read.
    static __device__ __forceinline__ void release(uint32_t barrier, bool arrives) {
        mbarrier_arrive_if(barrier + kToEmpty, arrives);
    }
    // The same where `loaded`, which words of all recent loads make up, may not have come yet.
    static __device__ __forceinline__ void release_behind(uint32_t barrier, bool arrives, uint32_t loaded) {
        mbarrier_arrive_behind(barrier + kToEmpty, arrives, loaded);
    }
    __device__ __forceinline__ void advance() {
        index = index + 1 == stages ? 0 : index + 1;
        parity ^= index == 0;
    }
};
using StageRing = Ring<kStages, kStageBytes, kStagesAt, kStageBarriersAt>;
using TaskRing = Ring<kTasks, sizeof(QueuedTask), kTasksAt, kTaskBarriersAt>;
// From a task's barrier "full" to that of the consumers being done with it, and of most of its weights being asked for.
constexpr uint32_t kToDone = 16 * kTasks, kToBegun = 24 * kTasks;

// A CTA takes a task when it has that many stages of another one's weights to ask for; and further ones where a task has
// fewer: as few as hide the trips to the counter and to the plan, so that a CTA which gets less of the memory takes fewer.
constexpr int kHiddenBytes = 48 << 10;
constexpr int kStagesAhead = ceil_div(kHiddenBytes, kStageChunks<Routed> * kWeightChunkBytes<Routed>);
constexpr int kTaskBytes = kWeightChunkBytes<Routed> *
                           (kHiddenChunks < kIntermediateChunks ? kHiddenChunks : kIntermediateChunks);
constexpr int kTasksAhead = ceil_div(kHiddenBytes, kTaskBytes) < kTasks - 2 ? ceil_div(kHiddenBytes, kTaskBytes)
                                                                            : kTasks - 2;

// Whether a wait of this CTA has failed before the stage that this thread has waited for was filled.
__device__ __forceinline__ bool has_failed(const Smem& smem) {
    return *const_cast<const volatile int32_t*>(&smem.failed) != 0;
}
__device__ __forceinline__ void set_failed(Smem& smem) { *const_cast<volatile int32_t*>(&smem.failed) = 1; }

// ---- the order of tasks --------------------------------------------------------------------------------------------

// Task i of the list: for b = 0, 1, ...: the first GEMM of block b, then the second of block b - lag; the remaining
// second GEMMs at the end. While the number of blocks is not known (-1) it is taken as unlimited: right as long as
// `needs` exists.
struct ListItem {
    int32_t kind, block, tile;
    int32_t needs;  // the block whose existence makes this right
};
__device__ __forceinline__ ListItem list_item(int index, int lag, int num_blocks) {
    constexpr int kBoth = kNeuronTasks + kOutputTasks;
    const int head = num_blocks < 0 ? lag : min(lag, num_blocks);
    if (index < head * kNeuronTasks) {
        const int block = index / kNeuronTasks;
        return {kFirstGemm, block, index - block * kNeuronTasks, block};
    }
    index -= head * kNeuronTasks;
    if (num_blocks < 0 || index < (num_blocks - head) * kBoth) {
        const int block = head + index / kBoth, rest = index % kBoth;
        if (rest < kNeuronTasks) return {kFirstGemm, block, rest, block};
        return {kSecondGemm, block - head, rest - kNeuronTasks, block};
    }
    index -= (num_blocks - head) * kBoth;
    const int block = num_blocks - head + index / kOutputTasks;
    return {block < num_blocks ? kSecondGemm : kNoTask, block, index % kOutputTasks, block};
}
