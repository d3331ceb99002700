// grouped_route.cu   (token, slot) pairs to rows of experts, and these to blocks (see grouped_plan.cuh)
//
// Grid     num_pairs / pairs_per_cta: a CTA counts all pairs, and gives rows to its own
// Reads    ids of all pairs in every CTA, its own twice, from L2 but for the first
// Writes   the places of its pairs; the first CTA the plan
// Bound    latency; in large batches the counting, each CTA's same
// Sync     waits for its predecessor before anything; publishes nothing, CTAs neither to each other
// Limits   at most 1024 experts, a thread for each; pairs of an expert are its rows in their order, whatever the schedule
//
// Compile-time parameters (macros set by kernels/grouped_gemm.py): WARPRING_INDEX, the type of expert ids; those of
// grouped_plan.cuh.
#include "grouped_plan.cuh"

using Index = WARPRING_INDEX;
constexpr int kThreads = 1024, kLanes = 32, kWarps = kThreads / kLanes, kAtOnce = 8;
constexpr uint32_t kFull = 0xffffffffu;

struct Pairs {
    const Index* gmem_idx;
    int64_t stride;
    int32_t topk, num_slots, num_routed;

    // The expert of a pair, of the shared ones behind the routed ones, or -1.
    __device__ __forceinline__ int expert(int token, int slot) const {
        if (slot >= topk) return num_routed + slot - topk;
        const int64_t id = ld_routing(gmem_idx + token * stride + slot);
        return id >= 0 && id < num_routed ? int(id) : -1;
    }
    __device__ __forceinline__ int expert(int pair) const { return expert(pair / num_slots, pair % num_slots); }

    // Adds the pairs [first, last) to the counts of their experts. The whole CTA calls it; loads of several pairs are on
    // their way at once, and no pair is divided by num_slots.
    __device__ __forceinline__ void count(int first, int last, int32_t* smem_counts) const {
        int token = (first + int(threadIdx.x)) / num_slots, slot = (first + int(threadIdx.x)) % num_slots;
        const int step_tokens = kThreads / num_slots, step_slots = kThreads % num_slots;
#pragma unroll 1
        for (int pair = first + threadIdx.x; pair < last; pair += kAtOnce * kThreads) {
            int experts[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                experts[i] = pair + i * kThreads < last ? expert(token, slot) : -1;
                token += step_tokens, slot += step_slots;
                if (slot >= num_slots) slot -= num_slots, ++token;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (experts[i] >= 0) atomicAdd(smem_counts + experts[i], 1);
        }
    }
};

// The sums of all threads before this one, and of all threads. The whole CTA calls it.
__device__ __forceinline__ int2 sums_before(int2 own, int2* smem_warps, int2& total) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const auto inclusive = [&](int2 v) {
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) {
            const int x = __shfl_up_sync(kFull, v.x, lanes), y = __shfl_up_sync(kFull, v.y, lanes);
            if (lane >= lanes) v.x += x, v.y += y;
        }
        return v;
    };
    const int2 in_warp = inclusive(own);
    if (lane == kLanes - 1) smem_warps[warp] = in_warp;
    __syncthreads();
    if (warp == 0) smem_warps[lane] = inclusive(smem_warps[lane]);
    __syncthreads();
    total = smem_warps[kWarps - 1];
    const int2 before = warp ? smem_warps[warp - 1] : int2{0, 0};
    return {before.x + in_warp.x - own.x, before.y + in_warp.y - own.y};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_route(const Index* gmem_idx, int64_t idx_stride, int32_t num_tokens, int32_t topk, int32_t num_routed,
                  int32_t num_shared, int32_t pairs_per_cta, int32_t* gmem_plan, PairPlace* gmem_places) {
    // Of each expert: counts of pairs before and behind this CTA's, later its first row and its number of rows; for each
    // warp the count of its pairs, later the next of them.
    extern __shared__ __align__(16) int32_t smem_counts[];
    __shared__ int2 smem_sums[kWarps];
    pdl_wait();
    pdl_launch_dependents();
    const int num_experts = num_routed + num_shared, num_slots = topk + num_shared, num_pairs = num_tokens * num_slots;
    const Pairs pairs{gmem_idx, idx_stride, topk, num_slots, num_routed};
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int begin = blockIdx.x * pairs_per_cta, end = min(begin + pairs_per_cta, num_pairs);
    const int warp_begin = begin + warp * (pairs_per_cta / kWarps), warp_end = min(warp_begin + pairs_per_cta / kWarps, end);
    int32_t *smem_before = smem_counts, *smem_behind = smem_before + num_experts, *smem_warps = smem_behind + num_experts;
    int32_t* smem_own = smem_warps + warp * num_experts;
    for (int i = threadIdx.x; i < (2 + kWarps) * num_experts; i += kThreads) smem_counts[i] = 0;
    __syncthreads();
#pragma unroll 2
    for (int pair = warp_begin + lane; pair < warp_end; pair += kLanes) {
        const int expert = pairs.expert(pair);
        if (expert >= 0) atomicAdd(smem_own + expert, 1);
    }
    pairs.count(0, begin, smem_before);
    pairs.count(end, num_pairs, smem_behind);
    __syncthreads();

    const int e = threadIdx.x;
    int count = 0;
    if (e < num_experts) {
        count = smem_before[e];
#pragma unroll 1
        for (int first = 0; first < kWarps; first += kAtOnce) {
            int of_warps[kAtOnce];  // loads that do not wait for each other's stores
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) of_warps[i] = smem_warps[(first + i) * num_experts + e];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                smem_warps[(first + i) * num_experts + e] = count;
                count += of_warps[i];
            }
        }
        count += smem_behind[e];
    }
    int2 total;
    const int2 before = sums_before({count, ceil_div(count, kBlockTokens)}, smem_sums, total);
    if (e < num_experts) smem_before[e] = before.x, smem_behind[e] = count;
    if (blockIdx.x == 0 && e == 0) *gmem_plan = total.y;
    if (blockIdx.x == 0 && e < num_experts) {
        const ExpertPairs of_expert{e, before.x, count, before.y};
        ExpertPairs* gmem_blocks = reinterpret_cast<ExpertPairs*>(gmem_plan) + 1;
        for (int b = 0; b < of_expert.num_blocks(); ++b) gmem_blocks[before.y + b] = of_expert;
    }
    __syncthreads();

#pragma unroll 1
    for (int first = warp_begin; first < warp_end; first += kLanes) {
        const int pair = first + lane, expert = pair < warp_end ? pairs.expert(pair) : -1;
        const uint32_t same = __match_any_sync(kFull, expert);
        const int rank = __popc(same & ((1u << lane) - 1));
        PairPlace place{-1, 0, 0, 0};
        if (expert >= 0) {
            const ExpertPairs of_expert{expert, smem_before[expert], smem_behind[expert], 0};
            const int index = smem_own[expert] + rank, rows = of_expert.block_rows(), in_blocks = index / rows * rows;
            place = {of_expert.first + index, of_expert.first + in_blocks, min(rows, of_expert.count - in_blocks), 0};
        }
        __syncwarp();  // all have read the next rows
        if (expert >= 0 && rank == 0) smem_own[expert] += __popc(same);
        __syncwarp();
        if (pair < warp_end) gmem_places[pair] = place;
    }
}
