// ep_common.cuh   What the expert-parallel kernels share: sizes, addresses, packets, and the signals of the ring.
//
// Compile-time parameters (macros, one cubin each):
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE, WARPRING_TOPK
//   WARPRING_EXPERTS, WARPRING_LOCAL_EXPERTS   routed experts of all ranks, and of one
//   WARPRING_NUM_SHARED                        fused shared experts: slots topk, topk + 1, ... of each token
//   WARPRING_BLOCK_M                           capacity of a token block: 8, 16, 32 or 64
//   WARPRING_ACTIVATION_FP8                    1: a value is an E4M3 number, 0: the sum of two; with a scale per 128 columns
#pragma once
#include "sync.cuh"

constexpr int kHidden = WARPRING_HIDDEN;
constexpr int kIntermediate = WARPRING_INTERMEDIATE;
constexpr int kTopk = WARPRING_TOPK;
constexpr int kExperts = WARPRING_EXPERTS;
constexpr int kLocalExperts = WARPRING_LOCAL_EXPERTS;
constexpr int kNumShared = WARPRING_NUM_SHARED;
constexpr int kBlockM = WARPRING_BLOCK_M;
constexpr bool kFp8 = WARPRING_ACTIVATION_FP8;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

constexpr int kLanes = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kSlotsPerToken = kTopk + kNumShared;
constexpr int kHiddenPadded = round_up(kHidden, 128);
constexpr int kIntermediatePadded = round_up(kIntermediate, 64);
constexpr int kNeuronTasks = kIntermediatePadded / 64;  // tasks of a block's first GEMM
constexpr int kOutputTasks = kHiddenPadded / 128;       // and of its second
constexpr int kTerms = kFp8 ? 1 : 2;           // E4M3 numbers whose sum, times a scale, is a value
constexpr int kScales = kHiddenPadded / 128;   // of one token
constexpr int kChunkBytes = 128;               // of one token in one chunk of a B image: one term of as many columns
constexpr int kCodeChunks = kScales * kTerms;  // the terms of 128 columns follow each other
// A published row: codes, scales, routing weights.
constexpr int kRowChunks = kCodeChunks + ceil_div((kScales + kTopk) * 4, kChunkBytes);
constexpr int kRowBytes = kRowChunks * kChunkBytes;
constexpr int64_t kRingXSlotBytes = int64_t(kBlockM) * kHiddenPadded * kTerms;

static_assert(kHidden % 32 == 0 && kIntermediate % 32 == 0, "problem.py refuses others");
static_assert(kBlockM == 8 || kBlockM == 16 || kBlockM == 32 || kBlockM == 64, "widths of the tensor core");
static_assert(kNeuronTasks <= 64, "l2_full has one bit a task");
static_assert(kExperts < 0xffff, "a packet holds 16-bit ids, one of which stands for none");

// ---- peers ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint8_t* peer_region(const EpParams& params, int peer) {
    return reinterpret_cast<uint8_t*>(params.peers.base + params.peers.offset[peer]);
}
__device__ __forceinline__ uint8_t* own_region(const EpParams& params) {
    return peer_region(params, params.peers.rank);
}

// In `region`, what `source` keeps there: counters of arrivals and of completions, and routing.
__device__ __forceinline__ uint64_t* arrived_of(const EpParams& params, uint8_t* region, int source) {
    return reinterpret_cast<uint64_t*>(region + params.arrived_offset) + source;
}
__device__ __forceinline__ uint64_t* done_of(const EpParams& params, uint8_t* region, int source) {
    return reinterpret_cast<uint64_t*>(region + params.done_offset) + source;
}
// Two buffers: CTAs of role1 that have no block to fill may still read a generation's routing when the next one's comes.
__device__ __forceinline__ uint8_t* meta_of(const EpParams& params, uint8_t* region, int source, uint64_t generation) {
    const uint64_t buffer = (generation & 1) * params.peers.num_ranks + source;
    return region + params.meta_offset + buffer * params.meta_bytes;
}
__device__ __forceinline__ uint8_t* row_of(const EpParams& params, uint8_t* region, int token) {
    return region + params.rows_offset + int64_t(token) * kRowBytes;
}

// ---- packets: 16 bytes that carry their own tag --------------------------------------------------------------------

// Routing: {generation << 16 | num_tokens, 4 expert ids of 16 bits}, pairs in the order token * topk + slot. Packet 0 is
// always written, so a rank without tokens is heard too.
constexpr int kPacketBytes = 16;
constexpr int kPacketPairs = 4;
constexpr uint32_t kNoExpert = 0xffff;
constexpr uint32_t kRefusedTokens = 0xffff;  // as num_tokens: the rank's count was beyond its limit

__device__ __forceinline__ int num_packets(int num_tokens) {
    return max(1, ceil_div(num_tokens * kTopk, kPacketPairs));
}
__device__ __forceinline__ uint64_t meta_tag(uint64_t generation, uint32_t num_tokens) {
    return generation << 16 | num_tokens;
}

// How many tokens this call has: x's rows, unless the device holds another number (so that a replayed graph can change it).
struct TokenCount {
    int32_t given, limit;
    __device__ __forceinline__ TokenCount(const EpParams& params, const int32_t* gmem_num_tokens, int32_t num_rows)
        : given(gmem_num_tokens == nullptr ? num_rows : *gmem_num_tokens), limit(min(num_rows, params.max_tokens)) {}
    __device__ __forceinline__ bool is_refused() const { return given < 0 || given > limit; }
};

// The plan: packet 0 {generation, number of blocks}, packet 1 + b {generation, expert | count << 32} of block b.
struct PlanEntry {
    int32_t expert;  // local; from kLocalExperts on: shared experts
    int32_t count;   // tokens, 1 to kBlockM; 0: there is no such block
};

__device__ __forceinline__ uint8_t* plan_packet(const EpParams& params, int packet) {
    return reinterpret_cast<uint8_t*>(params.gmem_plan) + int64_t(packet) * kPacketBytes;
}
__device__ __forceinline__ void write_plan_blocks(const EpParams& params, uint64_t generation, int num_blocks) {
    st_relaxed_gpu_b128(plan_packet(params, 0), make_ulonglong2(generation, uint64_t(num_blocks)));
}
__device__ __forceinline__ void write_plan_entry(const EpParams& params, uint64_t generation, int block, int expert,
                                                 int count) {
    st_relaxed_gpu_b128(plan_packet(params, 1 + block),
                        make_ulonglong2(generation, uint64_t(expert) | uint64_t(count) << 32));
}

// Waits until it is known what block `block` of this call is. An entry may be there before the number of blocks is: role4
// knows the shared blocks at once. Orders nothing: an entry says which weights to load, l1_full when the tokens are there.
__device__ __forceinline__ bool wait_plan(const EpParams& params, const EpSync& sync, int block, PlanEntry& entry) {
    return wait_until(sync, kPlan, -1, sync.generation, [&](uint64_t& seen) {
        const bool fits = block < params.max_blocks;
        const ulonglong2 total = ld_relaxed_gpu_b128(plan_packet(params, 0));
        const ulonglong2 own = ld_relaxed_gpu_b128(plan_packet(params, fits ? 1 + block : 0));
        seen = total.x;
        if (fits && own.x == sync.generation) {
            entry = {int32_t(own.y), int32_t(own.y >> 32)};
            return true;
        }
        entry = {0, 0};
        return total.x == sync.generation && uint64_t(block) >= total.y;
    });
}

// ---- the ring ------------------------------------------------------------------------------------------------------

// Block b of a call lies at sequence number block_base + b: a slot, and how often that slot was used before.
struct RingPlace {
    int32_t slot;
    uint32_t use;  // modulo 2^32
};
__device__ __forceinline__ RingPlace ring_place(const EpParams& params, uint64_t block_base, int block) {
    const uint64_t sequence = block_base + block;
    const uint64_t use = sequence / params.num_slots;
    return {int32_t(sequence - use * params.num_slots), uint32_t(use)};
}

// Columns of the tensor core for a block of `count` tokens.
__device__ __forceinline__ int block_width(int count) {
    return count <= 8 ? 8 : count <= 16 ? 16 : count <= 32 ? 32 : 64;
}

// Where the 16 bytes `piece` (0 to 7) of token n lie in a chunk of a B image of that width.
__device__ __forceinline__ int image_offset(int width, int piece, int n) {
    return (piece * (width / 8) + n / 8) * 128 + n % 8 * 16;
}

struct RingInfo {
    int32_t expert, count, reserved[2];
    uint32_t pair_id[kBlockM];
    float weight[kBlockM];
};
__device__ __forceinline__ RingInfo& ring_info(const EpParams& params, int slot) {
    return reinterpret_cast<RingInfo*>(params.gmem_ring_info)[slot];
}
__device__ __forceinline__ uint8_t* ring_x(const EpParams& params, int slot) {
    return params.gmem_ring_x + slot * kRingXSlotBytes;
}
__device__ __forceinline__ float* ring_x_scale(const EpParams& params, int slot) {
    return params.gmem_ring_x_scale + int64_t(slot) * kScales * kBlockM;
}

// ---- role2's side of the signals (role1's is in ep_ring.cuh); docs/sync.md has a record of each ----------------------

// Tokens, scales and info of the block are there, and its act may be overwritten. Follow it with
// fence_proxy_async_global() in the thread that starts bulk copies.
__device__ __forceinline__ bool wait_l1_full(const EpParams& params, const EpSync& sync, RingPlace place) {
    return wait_at_least_gpu(sync, kL1Full, params.gmem_l1_full + place.slot, place.use + 1);
}

// The act chunks of `tasks` (a mask of first-GEMM tasks) are there; `there` are all that were seen. A task toggles its bit
// once a use: ones mean that in even uses, zeros in odd ones.
__device__ __forceinline__ bool wait_l2_full(const EpParams& params, const EpSync& sync, RingPlace place, uint64_t tasks,
                                             uint64_t& there) {
    const uint64_t turned = place.use % 2 == 0 ? 0 : ~uint64_t(0);
    return wait_until(sync, kL2Full, -1, (tasks ^ turned) & tasks, [&](uint64_t& seen) {
        const uint64_t bits = ld_acquire_gpu_u64(params.gmem_l2_full + place.slot);
        seen = bits & tasks;
        there = bits ^ turned;
        return (there & tasks) == tasks;
    });
}
constexpr uint64_t kAllNeuronTasks = ~uint64_t(0) >> (64 - kNeuronTasks);

// One thread, behind a barrier that the task's readers or writers have passed: a first-GEMM task has read tokens and scales;
// has written its act chunk; a second-GEMM task has read act and info.
__device__ __forceinline__ void signal_l1_empty(const EpParams& params, RingPlace place) {
    red_add_release_gpu_u32(params.gmem_l1_empty + place.slot, 1);
}
__device__ __forceinline__ void signal_l2_full(const EpParams& params, RingPlace place, int task) {
    red_xor_release_gpu_u64(params.gmem_l2_full + place.slot, uint64_t(1) << task);
}
__device__ __forceinline__ void signal_l2_empty(const EpParams& params, RingPlace place) {
    red_add_release_gpu_u32(params.gmem_l2_empty + place.slot, 1);
}

// Threads 0 to num_ranks - 1, behind a barrier: all partial results of this CTA of role2 are written.
__device__ __forceinline__ void signal_done(const EpParams& params, int peer) {
    red_add_release_sys_u64(done_of(params, peer_region(params, peer), params.peers.rank), 1);
}
