// ep_experts_common.cuh   Shared memory of a CTA of role2: two rings of stages, the queue of tasks, the order of tasks.
//
// Compile-time parameters beside those of ep_common.cuh:
//   WARPRING_FORMAT          a policy of ep_weights.cuh, for the routed experts
//   WARPRING_SHARED_FORMAT   the same for shared experts; WARPRING_FORMAT where it is not given
//   WARPRING_WEIGHT_STAGES, WARPRING_TOKEN_STAGES   chunks of weights, and of tokens, that a CTA holds or has requested
//   WARPRING_SMEM_BYTES      dynamic shared memory of a CTA
#pragma once
#include "ep_weights.cuh"
#include "ep_wgmma_ptx.cuh"

#ifndef WARPRING_SHARED_FORMAT
#define WARPRING_SHARED_FORMAT WARPRING_FORMAT
#endif
using Routed = WARPRING_FORMAT;
using Shared = WARPRING_SHARED_FORMAT;

constexpr int kConsumerWarps = 8, kConsumers = kConsumerWarps * kLanes;
constexpr int kThreads = kConsumers + 128;  // one warpgroup of producers
// Registers a thread: the launch gives all of them 168, the producers' spare ones go to the consumers.
constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
constexpr int kConsumerBarrier = 1;         // the named barrier of the consumers; 0 is __syncthreads

constexpr int kChunkColumns = 128;
constexpr int kHiddenChunks = kHiddenPadded / kChunkColumns;
constexpr int kIntermediateChunks = ceil_div(kIntermediatePadded, kChunkColumns);
template <class Format>
constexpr int kWeightChunkBytes = Format::kCodeBytes + Format::kScaleBytes;

constexpr int64_t kRingActSlotBytes = int64_t(kBlockM) * kIntermediatePadded * kElementBytes;

// ---- shared memory -------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int kWeightStages = WARPRING_WEIGHT_STAGES, kTokenStages = WARPRING_TOKEN_STAGES;
constexpr int kTasks = 8;  // of the queue
constexpr int kWeightStageBytes = round_up(larger(kWeightChunkBytes<Routed>, kWeightChunkBytes<Shared>), 128);
// A stage of tokens: a chunk of the B image, scales of one or two groups of columns, and with the last chunk of a task the
// block's info.
constexpr int kTokenScales = kBlockM * kChunkColumns * kElementBytes;
constexpr int kTokenInfo = kTokenScales + 2 * kBlockM * 4;
constexpr int kTokenStageBytes = round_up(kTokenInfo + int(sizeof(RingInfo)), 128);

// Partial results are turned round in shared memory, up to 32 tokens at a time; so is the act chunk of a task.
constexpr int kPartialBytes = kFp8 ? 2 : 4;
constexpr int kTurnTokens = kBlockM < 32 ? kBlockM : 32;
constexpr int kTurnStride = 128 * kPartialBytes + 16;  // of a token: banks of neighbours differ
constexpr int kTurnBytes = larger(kTurnTokens * kTurnStride, kBlockM * 64 * kElementBytes);

struct Task {
    int32_t kind;  // kNoTask: the list is over
    int32_t expert, count, tile, slot;
    uint32_t use;
    int32_t reserved[2];
};
enum TaskKind : int32_t { kNoTask = 0, kFirstGemm = 1, kSecondGemm = 2 };

struct alignas(128) Smem {
    uint8_t weights[kWeightStages][kWeightStageBytes];
    uint8_t tokens[kTokenStages][kTokenStageBytes];
    alignas(16) uint8_t turn[kTurnBytes];
    alignas(16) uint32_t amax[kBlockM][kConsumerWarps];
    alignas(16) uint8_t lut[kLutEntries][8];
    Task tasks[kTasks];
    uint64_t weights_full[kWeightStages], weights_empty[kWeightStages];
    uint64_t tokens_full[kTokenStages], tokens_empty[kTokenStages];
    uint64_t tasks_full[kTasks], tasks_empty[kTasks];
    int32_t failed;  // set before the stages that hold no data: what follows is not published
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "experts_kernel.py asks for as much");

// Where a role stands in a ring of stages. `parity` is that of the phase which fills the stage.
template <int stages>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Waits inside a CTA end because every producer's own waits are bounded: after a failure they complete all stages empty.
__device__ __forceinline__ void wait_barrier(const uint64_t& smem_barrier, uint32_t parity) {
    mbarrier_wait(smem_address(&smem_barrier), parity);
}
__device__ __forceinline__ void arrive(const uint64_t& smem_barrier) { mbarrier_arrive(smem_address(&smem_barrier)); }
__device__ __forceinline__ void arrive_if(const uint64_t& smem_barrier, bool arrives) {
    mbarrier_arrive_if(smem_address(&smem_barrier), arrives);
}

// Whether a wait of this CTA has failed before the stage that this thread has waited for was filled.
__device__ __forceinline__ bool has_failed(const Smem& smem) { return *const_cast<const volatile int32_t*>(&smem.failed) != 0; }
__device__ __forceinline__ void set_failed(Smem& smem) { *const_cast<volatile int32_t*>(&smem.failed) = 1; }

// ---- the order of tasks --------------------------------------------------------------------------------------------

// Task i of the list: for b = 0, 1, ...: the first GEMM of block b, then the second of block b - lag; the remaining second
// GEMMs at the end. While the number of blocks is not known (-1) it is taken as unlimited: right as long as `needs` exists.
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
