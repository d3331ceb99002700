// ep_experts_epilogue.cuh   What follows the sums of a task: activation and requantisation, or partial results.
//
// Both are the same for every width N and any other tokens in the block: a token is a column. Columns behind the
// block's count hold old bytes; nothing of theirs is looked at. What they write is published by another warp.
#pragma once
#include "activation.cuh"
#include "ep_experts_common.cuh"
#include "ep_quantize.cuh"

// Where a consumer stands: its sums are those of rows row() and row() + 8 of the task, in columns column() and
// column() + 1 of every 8.
struct Place {
    int warp, lane, thread;  // of the consumers
    // The same place, whose addresses are computed for each task anew.
    __device__ __forceinline__ Place anew() const {
        int32_t place[3] = {warp, lane, thread};
        hold(place);
        return {place[0], place[1], place[2]};
    }
    __device__ __forceinline__ int row() const { return warp * 16 + lane / 4; }
    __device__ __forceinline__ int column() const { return 2 * (lane % 4); }
    __device__ __forceinline__ int neuron() const { return warp * 8 + lane / 4; }  // of a task of the first GEMM
};

__device__ __forceinline__ void consumers_sync() { named_barrier_sync(kConsumerBarrier, kConsumers); }

// Bias of one row, 0 where there is none or the row is padding.
__device__ __forceinline__ float bias_of(const float* gmem_bias, int64_t offset, bool exists) {
    return gmem_bias != nullptr && exists ? __ldg(gmem_bias + offset) : 0.f;
}

// First GEMM: sums -> act(gate, up), times the routing weight where an activation is one E4M3 number; then one scale a token
// over the task's 64 neurons; codes as a chunk of the B image, term behind term, to ring_act.
template <int N>
__device__ __forceinline__ void finish_first(const EpParams& params, const EpWeights& weights, Smem& smem,
                                             const Task& task, const RingInfo& info, const Place& consumer,
                                             const float (&sum)[N / 2]) {
    const Place at = consumer.anew();
    const bool shared = task.expert >= kLocalExperts;
    const float* gmem_bias = shared ? weights.gmem_shared_w13_bias : weights.gmem_w13_bias;
    const int neuron = task.tile * 64 + at.neuron();
    const int64_t gate_row = int64_t(shared ? task.expert - kLocalExperts : task.expert) * 2 * kIntermediate + neuron;
    const float gate_bias = bias_of(gmem_bias, gate_row, neuron < kIntermediate);
    const float up_bias = bias_of(gmem_bias, gate_row + kIntermediate, neuron < kIntermediate);
    const ActivationArgs args{weights.alpha, weights.limit, weights.up_offset};

    float act[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const int n = i / 2 * 8 + at.column() + i % 2;
        const float gate = sum[i / 2 * 4 + i % 2] + gate_bias, up = sum[i / 2 * 4 + 2 + i % 2] + up_bias;
        act[i] = gated_activation<true>(gate, up, args);
        if constexpr (kFp8) act[i] *= info.weight[n];
        uint32_t amax = magnitude_bits(act[i]);
#pragma unroll
        for (int d = 4; d < kLanes; d *= 2) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, d));
        if (at.lane < 4) smem.amax[n][at.warp] = amax;
    }
    consumers_sync();

    const bool publish = !has_failed(smem);
    float* gmem_scale = params.gmem_ring_act_scale + (int64_t(task.slot) * kNeuronTasks + task.tile) * kBlockM;
    uint8_t* const codes = smem.turn + image_offset(N, at.neuron() / 16, at.column()) + at.neuron() % 16;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const int n = i / 2 * 8 + at.column() + i % 2;
        const uint4 low = ld_shared_128(smem_address(&smem.amax[n][0])),
                    high = ld_shared_128(smem_address(&smem.amax[n][4]));
        const uint32_t amax =
            max(max(max(low.x, low.y), max(low.z, low.w)), max(max(high.x, high.y), max(high.z, high.w)));
        uint8_t* code = codes + image_offset(N, 0, i / 2 * 8 + i % 2);  // that of n: a constant more, one register for all
        const QuantScale scale = quant_scale(amax);
        const E4m3Pair pair = e4m3_pair(0.f, act[i] * scale.multiplier);
#pragma unroll
        for (int t = 0; t < kTerms; ++t) code[t * N * 64] = uint8_t(pair.term[t]);
        if (at.warp == 0 && at.lane < 4 && publish) gmem_scale[n] = scale.scale;
    }
    consumers_sync();

    constexpr int kBytes = N * 64 * kTerms;
    uint8_t* gmem_chunk = params.gmem_ring_act + task.slot * kRingActSlotBytes + task.tile * kBytes;
    for (int o = at.thread * 16; o < kBytes && publish; o += kConsumers * 16)
        *reinterpret_cast<uint4*>(gmem_chunk + o) = ld_shared_128(smem_address(smem.turn + o));
}

// Where the partial result of a pair lies: a row of `hidden` values in its owner's memory.
__device__ __forceinline__ uint8_t* partial_row(const EpParams& params, uint32_t pair_id) {
    const uint32_t pairs = params.max_tokens * kSlotsPerToken;
    const uint32_t owner = pair_id / pairs;
    return peer_region(params, owner) + params.partials_offset +
           int64_t(pair_id - owner * pairs) * kHidden * kPartialBytes;
}

// Second GEMM: sums + bias, times the routing weight where that has not been done, to the owners of the tokens: BF16
// where an activation is one E4M3 number, else FP32. Turned round in shared memory, so that a token's 128 values leave as one run.
template <int N>
__device__ __forceinline__ void finish_second(const EpParams& params, const EpWeights& weights, Smem& smem,
                                              const Task& task, const RingInfo& info, const Place& consumer,
                                              const float (&sum)[N / 2]) {
    constexpr int kTurned = N < kTurnTokens ? N : kTurnTokens;
    constexpr int kPieces = 128 * kPartialBytes / 16;  // of 16 bytes, of one token
    const Place at = consumer.anew();
    const bool shared = task.expert >= kLocalExperts;
    const float* gmem_bias = shared ? weights.gmem_shared_w2_bias : weights.gmem_w2_bias;
    const int64_t bias_row = int64_t(shared ? task.expert - kLocalExperts : task.expert) * kHidden;
    const int first_row = task.tile * 128;
    float bias[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + at.row() + 8 * r;
        bias[r] = bias_of(gmem_bias, bias_row + row, row < kHidden);
    }
    const bool publish = !has_failed(smem);
#pragma unroll
    for (int first = 0; first < N; first += kTurned) {
        consumers_sync();  // the columns or the act chunk before have left
#pragma unroll
        for (int i = 0; i < kTurned / 2; ++i) {
            const int n = i / 4 * 8 + at.column() + i % 2, row = at.row() + i % 4 / 2 * 8;
            const float weight = info.weight[first + n];
            const float own = sum[first / 2 + i], own_bias = bias[i % 4 / 2];
            uint8_t* value = smem.turn + n * kTurnStride + row * kPartialBytes;
            if constexpr (kFp8) {
                *reinterpret_cast<uint16_t*>(value) = cvt_f32_bf16(fmaf(own_bias, weight, own));
            } else {
                *reinterpret_cast<float*>(value) = (own + own_bias) * weight;
            }
        }
        consumers_sync();
        for (int p = at.thread; p < kTurned * kPieces && publish; p += kConsumers) {
            const int n = p / kPieces, piece = p % kPieces;
            if (first + n >= task.count || first_row + piece * (16 / kPartialBytes) >= kHidden) continue;
            uint8_t* gmem_row = partial_row(params, info.pair_id[first + n]) + first_row * kPartialBytes;
            *reinterpret_cast<uint4*>(gmem_row + piece * 16) =
                ld_shared_128(smem_address(smem.turn + n * kTurnStride + piece * 16));
        }
    }
}
