// ep_combine.cu   role3: out[t] = sum over slots, in their order, of the partial results that all ranks wrote here.
//
// Grid     any number of CTAs of 256 threads up to 2^16; a thread owns 8 columns of a token
// Reads    num_tokens * (topk + shared) rows of partials once: BF16 (FP8 activations) or FP32; unused slots not at all
// Bound    latency of `done`, then L2 and HBM
// Sync     waits done of all ranks; the last CTA to finish moves generation and block_base on
// Limits   a poisoned layer fills its rows with NaN and moves nothing on
#include "ep_common.cuh"

using Index = WARPRING_INDEX;

constexpr int kThreads = 256;
constexpr int kColumns = 8;
constexpr int kUnits = kHidden / kColumns;
constexpr int kSlotsInFlight = kFp8 ? 8 : 4;
constexpr int kPartialBytes = kFp8 ? 2 : 4;
constexpr int kLoads = kColumns * kPartialBytes / 16;  // of one thread and slot
constexpr uint32_t kNanPair = 0x7fff7fffu;             // BF16

__device__ __forceinline__ bool is_used(const Index* gmem_idx, int slot) {
    return slot >= kTopk || uint64_t(int64_t(ld_routing(gmem_idx + slot))) < uint64_t(kExperts);
}

struct Partial {
    uint4 bits[kLoads];
};

__device__ __forceinline__ void add_partial(float (&sum)[kColumns], const Partial& partial) {
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
        const uint32_t words[4] = {partial.bits[l].x, partial.bits[l].y, partial.bits[l].z, partial.bits[l].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (kFp8) {
                sum[2 * w] += __uint_as_float(words[w] << 16);
                sum[2 * w + 1] += __uint_as_float(words[w] & 0xffff0000u);
            } else {
                sum[4 * l + w] += __uint_as_float(words[w]);
            }
        }
    }
}

__device__ __forceinline__ uint4 combine_unit(const uint8_t* gmem_partials, const Index* gmem_idx) {
    float sum[kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < kSlotsPerToken; first += kSlotsInFlight) {
        Partial partial[kSlotsInFlight];
        bool used[kSlotsInFlight];
#pragma unroll
        for (int s = 0; s < kSlotsInFlight; ++s) {
            used[s] = first + s < kSlotsPerToken && is_used(gmem_idx, first + s);
#pragma unroll
            for (int l = 0; l < kLoads; ++l)
                if (used[s])
                    partial[s].bits[l] =
                        ld_activations(gmem_partials + int64_t(first + s) * kHidden * kPartialBytes + l * 16);
        }
#pragma unroll
        for (int s = 0; s < kSlotsInFlight; ++s)
            if (used[s]) add_partial(sum, partial[s]);
    }
    return make_uint4(cvt_f32_bf16x2(sum[1], sum[0]), cvt_f32_bf16x2(sum[3], sum[2]), cvt_f32_bf16x2(sum[5], sum[4]),
                      cvt_f32_bf16x2(sum[7], sum[6]));
}

// The last CTA to come here moves the layer's state on: all others have read it, and have finished. A call's CTAs add 2^16
// together, whatever the grid: the first of them what the others leave.
__device__ __forceinline__ void advance(const EpParams& params, uint64_t generation) {
    constexpr uint32_t kOfCall = 1 << 16;
    EpState& state = *params.gmem_state;
    const uint32_t own = blockIdx.x == 0 ? kOfCall - (gridDim.x - 1) : 1;
    const uint32_t finished = atom_add_acq_rel_gpu_u32(&state.combine_done, own) + own;
    if (finished != uint32_t(generation * kOfCall)) return;
    const uint64_t block_base = state.block_base + ld_relaxed_gpu_b128(plan_packet(params, 0)).y;
    // Launched before role2's end, this kernel may be here before CTAs of role1 that nobody waits for have read the state and
    // claimed the workspace.
    pdl_wait();
    state.block_base = block_base;
    state.generation = generation;
    state.busy = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    ep_combine(const __grid_constant__ EpParams params, uint16_t* gmem_out, int64_t out_stride,
               const Index* gmem_topk_idx, int64_t idx_stride, const int32_t* gmem_num_tokens, int32_t num_rows) {
    pdl_launch_dependents();  // whoever follows in a chain: it waits for the end of this kernel before it reads anything
    const uint64_t generation = params.gmem_state->generation + 1;
    const EpSync sync = ep_sync(params, generation);
    const TokenCount count(params, gmem_num_tokens, num_rows);
    uint8_t* region = own_region(params);
    // Looked at behind the wait, so that all loads up to the first look at `done` are under way together.
    const uint32_t poison = ld_relaxed_gpu_u32(&sync.gmem_state->poison);
    bool failed = false;
    if (threadIdx.x < params.peers.num_ranks)
        failed = !wait_at_least_sys(sync, kDone, threadIdx.x, done_of(params, region, threadIdx.x),
                                    generation * params.compute_ctas);
    const bool poisoned = __syncthreads_or(failed || poison != 0);
    const int num_written = count.is_refused() ? count.limit : count.given;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_written * kUnits; i += gridDim.x * kThreads) {
        const int64_t token = i / kUnits;
        const int column = i % kUnits * kColumns;
        const uint8_t* gmem_partials =
            region + params.partials_offset + (token * kSlotsPerToken * kHidden + column) * kPartialBytes;
        const uint4 bits = poisoned ? make_uint4(kNanPair, kNanPair, kNanPair, kNanPair)
                                    : combine_unit(gmem_partials, gmem_topk_idx + token * idx_stride);
        *reinterpret_cast<uint4*>(gmem_out + token * out_stride + column) = bits;
    }
    __syncthreads();
    if (threadIdx.x == 0 && !poisoned) advance(params, generation);
    pdl_wait();  // role2, where this kernel was launched before its end
}
