// tile_routing.cuh   Which experts a batch wants, and which (token, slot) pairs want each.
//
// Compile-time parameters (macros set by kernels/tile.py, one cubin each):
//   WARPRING_FORMAT        a policy of tile_formats.cuh
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE, WARPRING_TOPK, WARPRING_EXPERTS
//   WARPRING_SHARED        shared experts, which every token wants: ids and slots behind those of routed ones
//   WARPRING_INDEX         int32_t or int64_t, the type of topk_idx
//   WARPRING_PAIRS         (token, slot) pairs that a launch may have
//   WARPRING_MAX_COLUMNS   pairs of an expert that are multiplied at once
//   WARPRING_WARPS         warps of a CTA
// The last three change no bit of the result.
#pragma once
#include "ptx.cuh"

constexpr int kLanes = 32;
constexpr int kWarps = WARPRING_WARPS;
constexpr int kThreads = kWarps * kLanes;
constexpr int kTopk = WARPRING_TOPK;
constexpr int kRouted = WARPRING_EXPERTS;
constexpr int kShared = WARPRING_SHARED;
constexpr int kExperts = kRouted + kShared;
constexpr int kSlots = kTopk + kShared;
constexpr int kMaxPairs = WARPRING_PAIRS;
constexpr int kMaxColumns = WARPRING_MAX_COLUMNS;
using Index = WARPRING_INDEX;
constexpr uint32_t kFull = 0xffffffffu;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ constexpr int clamp(int v, int least, int most) {
    return v < least ? least : v > most ? most : v;
}

// The batch, sorted by expert in shared memory, by every CTA for itself. No bit depends on the order of an expert's
// pairs: each pair is a column of its own. An expert that more than kMaxColumns pairs want stands in the list once for
// every kMaxColumns of them; then the order is that of the pairs, since CTAs share the entries and must agree on what
// is in each.
constexpr int kMaxEntries = (kExperts < kMaxPairs ? kExperts : kMaxPairs) + kMaxPairs / kMaxColumns;
constexpr uint16_t kUnused = 0xffff;
struct Routing {
    alignas(16) uint16_t ids[kMaxPairs];  // expert of a pair, or kUnused
    uint16_t pairs[kMaxPairs];            // token * kSlots + slot, by entry
    uint16_t expert[kMaxEntries];         // of an entry, ascending
    uint16_t first[kMaxEntries + 1];      // where an entry's pairs start
    int32_t count[kExperts];              // pairs, then the next free place, of an expert
    int32_t warp_total[kWarps];
    int32_t num_entries;
    int32_t largest;  // pairs of an entry, at most
};

// The pairs of an entry.
struct Wanted {
    int expert, count;
    const uint16_t* smem_pairs;

    __device__ __forceinline__ Wanted(const Routing& routing, int entry)
        : expert(routing.expert[entry]),
          count(routing.first[entry + 1] - routing.first[entry]),
          smem_pairs(routing.pairs + routing.first[entry]) {}
};

// Before find_pairs, with a barrier of the CTA between.
__device__ __forceinline__ void clear_counts(Routing& smem) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kExperts; e += kThreads) smem.count[e] = 0;
    if (threadIdx.x == 0) smem.largest = 0;
}

__device__ __forceinline__ uint32_t expert_of(const Index* gmem_topk_idx, int64_t idx_stride, int pair) {
    const int token = pair / kSlots, slot = pair % kSlots;
    if (kShared > 0 && slot >= kTopk) return kRouted + slot - kTopk;
    const int64_t id = ld_routing(gmem_topk_idx + token * idx_stride + slot);
    return uint64_t(id) < uint64_t(kRouted) ? uint32_t(id) : kUnused;
}

// At most 32 pairs, by one warp without a barrier: experts in the order in which they first appear. True, and no
// result, where an expert has more than kMaxColumns. Other warps see the result behind a barrier of the CTA.
__device__ __forceinline__ bool find_few_pairs(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride,
                                               int num_pairs) {
    const int lane = threadIdx.x % kLanes;
    const uint32_t key = lane < num_pairs ? expert_of(gmem_topk_idx, idx_stride, lane) : kUnused;
    const bool used = key != kUnused;
    const uint32_t same = __match_any_sync(kFull, key), before = (1u << lane) - 1;
    const int first_lane = __ffs(int(same)) - 1;
    const bool leads = used && lane == first_lane;
    const uint32_t leaders = __ballot_sync(kFull, leads);
    int32_t upto = leads ? __popc(same) : 0;
    const int32_t own = upto, largest = __reduce_max_sync(kFull, own);
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
        const int32_t other = __shfl_up_sync(kFull, upto, d);
        if (lane >= d) upto += other;
    }
    const int32_t start = __shfl_sync(kFull, upto - own, first_lane);
    if (leads) {
        const int rank = __popc(leaders & before);
        smem.expert[rank] = uint16_t(key);
        smem.first[rank] = uint16_t(start);
    }
    if (lane < num_pairs) smem.ids[lane] = uint16_t(key);
    if (used) smem.pairs[start + __popc(same & before)] = uint16_t(lane);
    if (lane == kLanes - 1) {
        smem.num_entries = __popc(leaders);
        smem.largest = largest;
        smem.first[__popc(leaders)] = uint16_t(upto);
    }
    return used && __popc(same) > kMaxColumns;
}

// Pairs before p that want the expert `id`; all of smem.ids up to p is there.
__device__ __forceinline__ int count_earlier(const Routing& smem, int p, uint16_t id) {
    const uint4* smem_ids = reinterpret_cast<const uint4*>(smem.ids);
    int n = 0;
#pragma unroll 1
    for (int base = 0; base < p; base += 8) {
        const uint4 eight = smem_ids[base / 8];
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            n += base + 2 * w < p && (words[w] & 0xffffu) == id;
            n += base + 2 * w + 1 < p && words[w] >> 16 == id;
        }
    }
    return n;
}

// Any number of pairs: a counting sort by the whole CTA.
__device__ __forceinline__ void find_many_pairs(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride,
                                                int num_pairs) {
    constexpr int kPerThread = ceil_div(kExperts, kThreads);
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
#pragma unroll 1
    for (int p = threadIdx.x; p < num_pairs; p += kThreads) {
        const uint32_t id = expert_of(gmem_topk_idx, idx_stride, p);
        smem.ids[p] = uint16_t(id);
        if (id != kUnused) atomicAdd(&smem.count[id], 1);
    }
    __syncthreads();
    // One scan for both: entries in the high half, pairs in the low half of a word.
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        const int32_t n = e < kExperts ? smem.count[e] : 0;
        own += n + ceil_div(n, kMaxColumns) * 0x10000;
    }
    int32_t upto = own;
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
        const int32_t other = __shfl_up_sync(kFull, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == kLanes - 1) smem.warp_total[warp] = upto;
    __syncthreads();
    int32_t before = upto - own, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const int32_t t = smem.warp_total[w];
        if (w < warp) before += t;
        total += t;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        const int32_t n = e < kExperts ? smem.count[e] : 0;
        // The next free place; negative, as its complement, where the order must be that of the pairs.
        if (n > smem.largest) atomicMax(&smem.largest, min(n, kMaxColumns));
        if (n > 0) smem.count[e] = n > kMaxColumns ? ~(before & 0xffff) : before & 0xffff;
#pragma unroll 1
        for (int left = n; left > 0; left -= kMaxColumns) {
            smem.expert[before >> 16] = uint16_t(e);
            smem.first[before >> 16] = uint16_t(before & 0xffff);
            before += min(left, kMaxColumns) + 0x10000;
        }
    }
    if (threadIdx.x == 0) {
        smem.num_entries = total >> 16;
        smem.first[total >> 16] = uint16_t(total & 0xffff);
    }
    __syncthreads();
#pragma unroll 1
    for (int p = threadIdx.x; p < num_pairs; p += kThreads) {
        const uint16_t id = smem.ids[p];
        if (id == kUnused) continue;
        const int32_t place = smem.count[id];
        if (place < 0)
            smem.pairs[~place + count_earlier(smem, p, id)] = uint16_t(p);
        else
            smem.pairs[atomicAdd(&smem.count[id], 1)] = uint16_t(p);
    }
    __syncthreads();
}

// All warps of the CTA call it; all see the result.
__device__ __forceinline__ void find_pairs(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride,
                                           int num_pairs) {
    bool sorts = num_pairs > kLanes;
    if (!sorts) {
        bool crowds = false;
        if (threadIdx.x < kLanes) crowds = find_few_pairs(smem, gmem_topk_idx, idx_stride, num_pairs);
        sorts = __syncthreads_or(crowds);
    }
    if (sorts) find_many_pairs(smem, gmem_topk_idx, idx_stride, num_pairs);
}

// A pair's routing weight; of a shared expert the token's gate, or 1.
__device__ __forceinline__ float pair_weight(const float* gmem_topk_weights, int64_t weights_stride,
                                             const float* gmem_shared_weights, int64_t shared_weights_stride, int pair) {
    const int token = pair / kSlots, slot = pair % kSlots;
    if (kShared == 0 || slot < kTopk) return ld_routing(gmem_topk_weights + token * weights_stride + slot);
    return gmem_shared_weights != nullptr ? ld_routing(gmem_shared_weights + token * shared_weights_stride) : 1.f;
}

// Those of all pairs, by the first `threads` of the CTA.
template <int threads, class Args>
__device__ __forceinline__ void load_pair_weights(float* smem_weights, const Args& args) {
#pragma unroll 1
    for (int p = threadIdx.x; p < args.num_tokens * kSlots; p += threads)
        smem_weights[p] = pair_weight(args.gmem_topk_weights, args.weights_stride, args.gmem_shared_weights,
                                      args.shared_weights_stride, p);
}
