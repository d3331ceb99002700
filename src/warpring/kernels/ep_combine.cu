// ep_combine.cu   role3: out[t] = sum over slots, in their order, of the partial results that all ranks wrote here.
//
// Grid     any number of CTAs of 256 threads up to 2^16; a thread owns 8 columns of a token
// Reads    num_tokens * (topk + shared) rows of partials once: BF16 (FP8 activations) or FP32; unused slots not at all
// Bound    latency of `done`, then L2 and HBM
// Sync     waits done of all ranks; the last CTA to begin moves generation and block_base on
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

// A token's slots that some rank has written: a bit each.
template <bool wide> struct SlotBits { using Type = uint32_t; };
template <> struct SlotBits<true> { using Type = uint64_t; };
using Slots = SlotBits<(kSlotsPerToken > 32)>::Type;
static_assert(kSlotsPerToken <= 64, "problem.py refuses more");
__device__ __forceinline__ Slots used_slots(const Index* gmem_idx) {
    Slots used = Slots(((uint64_t(1) << kNumShared) - 1) << kTopk);
#pragma unroll
    for (int slot = 0; slot < kTopk; ++slot)
        used |= Slots(uint64_t(int64_t(ld_routing(gmem_idx + slot))) < uint64_t(kExperts)) << slot;
    return used;
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

__device__ __forceinline__ uint4 combine_unit(const uint8_t* gmem_partials, Slots slots) {
    float sum[kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < kSlotsPerToken; first += kSlotsInFlight, slots >>= kSlotsInFlight) {
        Partial partial[kSlotsInFlight];
        bool used[kSlotsInFlight];
#pragma unroll
        for (int s = 0; s < kSlotsInFlight; ++s) {
            used[s] = slots >> s & 1;
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

// A call's CTAs add 2^16 together to a counter of the state, whatever the grid: the first of them what the others leave.
constexpr uint32_t kOfCall = 1 << 16;
__device__ __forceinline__ uint32_t own_share() { return blockIdx.x == 0 ? kOfCall - (gridDim.x - 1) : 1; }

// This CTA has read the state; true of the last one, which has to move it on.
__device__ __forceinline__ bool is_last_to_read(EpState& state, uint64_t generation) {
    return atom_add_acq_rel_gpu_u32(&state.combine_begun, own_share()) + own_share() == uint32_t(generation * kOfCall);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    ep_combine(const __grid_constant__ EpParams params, uint16_t* gmem_out, int64_t out_stride,
               const Index* gmem_topk_idx, int64_t idx_stride, const int32_t* gmem_num_tokens, int32_t num_rows) {
    pdl_launch_dependents();  // whoever follows in a chain: it waits for the end of this kernel before it reads anything
    const uint64_t generation = params.gmem_state->generation + 1;
    const EpSync sync = ep_sync(params, generation);
    const TokenCount count(params, gmem_num_tokens, num_rows);
    uint8_t* region = own_region(params);
    EpState& state = *params.gmem_state;
    const uint32_t poison = ld_relaxed_gpu_u32(&state.poison);
    const auto slots_of = [&](int unit) { return used_slots(gmem_topk_idx + unit / kUnits * idx_stride); };
    // While role2 runs: what slots the first unit has, and the state read by all, so that little is left behind `done`.
    int unit = blockIdx.x * kThreads + threadIdx.x;
    Slots used = unit < count.limit * kUnits ? slots_of(unit) : 0;
    // One thread speaks for all of its CTA, who read the state each for itself: what they read goes into the barrier.
    const bool was_poisoned = __syncthreads_or(poison != 0 || generation == 0);
    const bool advances = threadIdx.x == kThreads - 1 && !was_poisoned && is_last_to_read(state, generation);
    bool failed = was_poisoned;
    // This rank's own kernels are waited for twice as long: what keeps them back is a peer that is missing.
    const int peer = int(threadIdx.x) == params.peers.rank ? -1 : int(threadIdx.x);
    if (threadIdx.x < params.peers.num_ranks)
        failed = !wait_at_least_sys(sync, kDone, peer, done_of(params, region, threadIdx.x),
                                    generation * params.compute_ctas);
    const bool poisoned = __syncthreads_or(failed);
    const int num_units = (count.is_refused() ? count.limit : count.given) * kUnits;
    const uint64_t num_blocks = advances ? ld_relaxed_gpu_b128(plan_packet(params, 0)).y : 0;
    while (unit < num_units) {
        const int64_t token = unit / kUnits;
        const int column = unit % kUnits * kColumns;
        const uint8_t* gmem_partials =
            region + params.partials_offset + (token * kSlotsPerToken * kHidden + column) * kPartialBytes;
        const uint4 bits = poisoned ? make_uint4(kNanPair, kNanPair, kNanPair, kNanPair)
                                    : combine_unit(gmem_partials, used);
        *reinterpret_cast<uint4*>(gmem_out + token * out_stride + column) = bits;
        unit += gridDim.x * kThreads;
        if (unit < num_units) used = slots_of(unit);
    }
    __syncthreads();
    // role2, where this kernel was launched before its end; and CTAs of role1 that nobody waits for, which may come to read the
    // state and claim the workspace late.
    pdl_wait();
    if (threadIdx.x == 0 && !poisoned) red_add_release_gpu_u32(&state.combine_done, own_share());
    if (advances && !poisoned) {
        state.block_base += num_blocks;
        state.generation = generation;
    }
}
