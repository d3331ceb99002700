// fake_experts.cu   role2's part on the ring without its arithmetic, for tests of the other roles: an "expert" multiplies a
// token by its number + 1. Signals, order of tasks and who writes what are those of the real one.
#include "ep_common.cuh"

constexpr int kThreads = 64;
constexpr int kPartialBytes = kFp8 ? 2 : 4;
static_assert(kHiddenPadded <= kIntermediatePadded, "act holds the tokens here");

struct Ring {
    const EpParams& params;
    const EpSync& sync;
    uint64_t block_base;

    __device__ uint8_t* act(int slot, int task, int n) const {
        return params.gmem_ring_act + ((int64_t(slot) * kNeuronTasks + task) * kBlockM + n) * 64 * kTerms;
    }
    __device__ float& act_scale(int slot, int task, int n) const {
        return params.gmem_ring_act_scale[(int64_t(slot) * kNeuronTasks + task) * kBlockM + n];
    }

    // "First GEMM": 64 columns of the tokens to act.
    __device__ bool first(int block, int task) const {
        const RingPlace place = ring_place(params, block_base, block);
        if (__syncthreads_or(threadIdx.x == 0 && !wait_l1_full(params, sync, place))) return false;
        const int count = ring_info(params, place.slot).count, width = block_width(count);
        for (int i = threadIdx.x; i < count * 64 * kTerms; i += kThreads) {
            const int n = i / (64 * kTerms), byte = i % (64 * kTerms), term = byte / 64;
            const int column = task * 64 + byte % 64, piece = column % 128 / 16;
            if (column >= kHiddenPadded) continue;
            const uint8_t* chunk = ring_x(params, place.slot) + (column / 128 * kTerms + term) * width * kChunkBytes;
            act(place.slot, task, n)[byte] = chunk[image_offset(width, piece, n) + column % 16];
            if (byte == 0) act_scale(place.slot, task, n) = ring_x_scale(params, place.slot)[task / 2 * kBlockM + n];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            signal_l1_empty(params, place);
            signal_l2_full(params, place, task);
        }
        return true;
    }

    // "Second GEMM": 128 columns to the tokens' owners.
    __device__ bool second(int block, int task) const {
        const RingPlace place = ring_place(params, block_base, block);
        uint64_t there = 0;
        const bool failed = threadIdx.x == 0 && !wait_l2_full(params, sync, place, kAllNeuronTasks, there);
        if (__syncthreads_or(failed)) return false;
        const RingInfo& info = ring_info(params, place.slot);
        const int per_rank = params.max_tokens * kSlotsPerToken;
        for (int i = threadIdx.x; i < info.count * 128; i += kThreads) {
            const int n = i / 128, column = task * 128 + i % 128;
            if (column >= kHidden) continue;
            const uint8_t* code = act(place.slot, column / 64, n) + column % 64;
            float sum = 0.f;
            for (int t = 0; t < kTerms; ++t) sum += cvt_f16_f32_low(cvt_e4m3x2_f16x2_low(code[64 * t]));
            const int expert = info.expert < kLocalExperts ? params.peers.rank * kLocalExperts + info.expert
                                                           : kExperts + info.expert - kLocalExperts;
            const float x = sum * act_scale(place.slot, column / 64, n);
            const float y = x * info.weight[n] * float(expert + 1);
            const int owner = info.pair_id[n] / per_rank, row = info.pair_id[n] % per_rank;
            uint8_t* gmem_out =
                peer_region(params, owner) + params.partials_offset + (int64_t(row) * kHidden + column) * kPartialBytes;
            if constexpr (kFp8)
                *reinterpret_cast<uint16_t*>(gmem_out) = cvt_f32_bf16(y);
            else
                *reinterpret_cast<float*>(gmem_out) = y;
        }
        __syncthreads();
        if (threadIdx.x == 0) signal_l2_empty(params, place);
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) fake_experts(const __grid_constant__ EpParams params) {
    const EpSync sync = ep_sync(params, params.gmem_state->generation + 1);
    __shared__ PlanEntry entry;
    const Ring ring{params, sync, params.gmem_state->block_base};
    int num_blocks = -1, task = 0;  // unknown as long as blocks come
    const auto is_mine = [&] { return task++ % gridDim.x == blockIdx.x; };
    for (int step = 0; num_blocks < 0 || step < num_blocks + params.lag; ++step) {
        if (num_blocks < 0) {
            if (__syncthreads_or(threadIdx.x == 0 && !wait_plan(params, sync, step, entry))) return;
            if (entry.count == 0) num_blocks = step;
        }
        for (int j = 0; num_blocks < 0 && j < kNeuronTasks; ++j)
            if (is_mine() && !ring.first(step, j)) return;
        const int block = step - params.lag;
        for (int j = 0; block >= 0 && (num_blocks < 0 || block < num_blocks) && j < kOutputTasks; ++j)
            if (is_mine() && !ring.second(block, j)) return;
    }
    __syncthreads();
    if (threadIdx.x < params.peers.num_ranks) signal_done(params, threadIdx.x);
}

// Holds a stream until the layer has completed `generation` calls: the edge of the graph from role3 to the next call.
extern "C" __global__ void after_generation(const __grid_constant__ EpParams params, uint64_t generation) {
    while (ld_relaxed_gpu_b128(params.gmem_state).x < generation && !is_poisoned(ep_sync(params, generation)))
        nanosleep(100);
}
