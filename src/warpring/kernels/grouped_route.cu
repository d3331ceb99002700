// grouped_route.cu   (token, slot) pairs to rows of experts, and these to blocks (see grouped_plan.cuh)
//
// Grid     one CTA
// Reads    ids twice, from L2 the second time
// Writes   the plan; the place of every pair
// Bound    latency
// Sync     waits for its predecessor before anything; publishes nothing
// Limits   at most 1024 experts, a thread for each; which row of its expert a pair becomes depends on the order of threads, and no result on the row
//
// Compile-time parameters (macros set by kernels/grouped_gemm.py): WARPRING_INDEX, the type of expert ids; those of
// grouped_plan.cuh.
#include "grouped_plan.cuh"

using Index = WARPRING_INDEX;
constexpr int kThreads = 1024, kLanes = 32, kAtOnce = 4;
constexpr uint32_t kFull = 0xffffffffu;

struct Pairs {
    const Index* gmem_idx;
    int64_t stride;
    int32_t topk, num_slots, num_routed, num_pairs;

    // The expert of a pair, of the shared ones behind the routed ones, or -1.
    __device__ __forceinline__ int expert(int pair) const {
        if (pair >= num_pairs) return -1;
        const int token = pair / num_slots, slot = pair - token * num_slots;
        if (slot >= topk) return num_routed + slot - topk;
        const int64_t id = ld_routing(gmem_idx + token * stride + slot);
        return id >= 0 && id < num_routed ? int(id) : -1;
    }
    // Calls use(pair, expert) for all pairs of this thread; expert is -1 where a pair has none. Loads of several pairs
    // are on their way at once.
    template <class Use>
    __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll 1
        for (int first = threadIdx.x; first < num_pairs; first += kAtOnce * kThreads) {
            int experts[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) experts[i] = expert(first + i * kThreads);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + i * kThreads < num_pairs) use(first + i * kThreads, experts[i]);
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
    total = smem_warps[kThreads / kLanes - 1];
    const int2 before = warp ? smem_warps[warp - 1] : int2{0, 0};
    return {before.x + in_warp.x - own.x, before.y + in_warp.y - own.y};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_route(const Index* gmem_idx, int64_t idx_stride, int32_t num_tokens, int32_t topk, int32_t num_routed,
                  int32_t num_shared, int32_t* gmem_plan, PairPlace* gmem_places) {
    extern __shared__ __align__(16) int32_t smem_counts[];  // of each expert; then its first rows, then its next ones
    __shared__ int2 smem_warps[kThreads / kLanes];
    pdl_wait();
    pdl_launch_dependents();
    const int num_experts = num_routed + num_shared, num_slots = topk + num_shared;
    const Pairs pairs{gmem_idx, idx_stride, topk, num_slots, num_routed, num_tokens * num_slots};
    int32_t *smem_first = smem_counts + num_experts, *smem_next = smem_first + num_experts;
    if (threadIdx.x < num_experts) smem_counts[threadIdx.x] = 0;
    __syncthreads();
    pairs.for_each([&](int, int expert) {
        if (expert >= 0) atomicAdd(smem_counts + expert, 1);
    });
    __syncthreads();

    const int e = threadIdx.x, count = e < num_experts ? smem_counts[e] : 0;
    int2 total;
    const int2 before = sums_before({count, ceil_div(count, kBlockTokens)}, smem_warps, total);
    if (e == 0) *gmem_plan = total.y;
    if (e < num_experts) {
        const ExpertPairs of_expert{e, before.x, count, before.y};
        smem_first[e] = smem_next[e] = before.x;
        ExpertPairs* gmem_blocks = reinterpret_cast<ExpertPairs*>(gmem_plan) + 1;
        for (int b = 0; b < of_expert.num_blocks(); ++b) gmem_blocks[before.y + b] = of_expert;
    }
    __syncthreads();
    pairs.for_each([&](int pair, int expert) {
        PairPlace place{-1, 0, 0, 0};
        if (expert >= 0) {
            const ExpertPairs of_expert{expert, smem_first[expert], smem_counts[expert], 0};
            const int row = atomicAdd(smem_next + expert, 1), rows = of_expert.block_rows();
            const int before = (row - of_expert.first) / rows * rows;
            place = {row, of_expert.first + before, min(rows, of_expert.count - before), 0};
        }
        gmem_places[pair] = place;
    });
}
