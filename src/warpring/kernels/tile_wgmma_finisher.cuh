// tile_wgmma_finisher.cuh   The shares of a slab of gate_up become activations, as two E4M3 numbers each, and flags say so.
#pragma once
#include "activation.cuh"
#include "sync_ptx.cuh"
#include "tile_wgmma_smem.cuh"

struct Finisher {
    Smem& smem;
    const Args& args;
    int finisher, lane;
    Turn<kShares> turn;
    int groups = 0;  // so far

    __device__ __forceinline__ Finisher(Smem& s, const Args& a, int f, int l)
        : smem(s), args(a), finisher(f), lane(l) {}

    // Lane n has neuron n of the slab: row n % 8 of panel n / 8 is its gate row, the eighth behind that its up row.
    __device__ __forceinline__ float total(int column, int half) const {
        const int row = lane / 8 * 16 + lane % 8 + half * 8;
        float sum = 0.f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) sum += smem.shares[turn.stage][g][column][row];
        return sum;
    }
    __device__ __forceinline__ void store(int pair, int slab, float act) const {
        // What warp decode would round to.
        const float v = __uint_as_float(uint32_t(cvt_f32_bf16(act)) << 16);
        const TermScale scale = two_term_scale(__reduce_max_sync(kFull, magnitude_bits(v)));
        const TermPair terms = terms_of(v * scale.multiplier, 0.f);
        uint8_t* gmem_step = args.gmem_act + int64_t(pair) * kActRowBytes + slab * 64;
        const int byte = lane / 4 % 2 * 16 + lane / 8 * 4 + lane % 4;
        gmem_step[byte] = uint8_t(terms.high);
        gmem_step[32 + byte] = uint8_t(terms.low);
        if (lane == 0) args.gmem_act_scale[int64_t(pair) * kActScales + slab] = scale.scale;
    }
    __device__ __forceinline__ void gate_up(const Group& group) {
        const Wanted wanted(smem.routing, group.entry);
        const int64_t expert = wanted.expert;
        const float gate_scale = args.gmem_w13_matrix_scale[expert * 2],
                    up_scale = args.gmem_w13_matrix_scale[expert * 2 + 1];
        const float* x_scale = smem.x_scale[groups % kXImages];
#pragma unroll 1
        for (int slab = group.first; slab < group.first + group.count; ++slab) {
            const int64_t gate_row = expert * 2 * kIntermediate + slab * kSlabNeurons + lane;
            float gate_bias = 0.f, up_bias = 0.f;
            if (args.gmem_w13_bias != nullptr) {
                gate_bias = args.gmem_w13_bias[gate_row];
                up_bias = args.gmem_w13_bias[gate_row + kIntermediate];
            }
            wait_warp(smem.barriers.shares_full[turn.stage], turn.parity);
#pragma unroll 1
            for (int c = finisher; c < wanted.count; c += kFinishers) {
                const int pair = wanted.smem_pairs[c], column = kHoldsAllRows ? pair / kSlots : c;
                const float scale = x_scale[column];
                const float gate = fmaf(total(column, 0) * scale, gate_scale, gate_bias);
                const float up = fmaf(total(column, 1) * scale, up_scale, up_bias);
                store(pair, slab, gated_activation(gate, up, {args.alpha, args.limit, args.up_offset}));
            }
            arrive_warp(smem.barriers.shares_empty[turn.stage]);
            turn.next();
        }
        // Behind what all lanes have written, since they arrived there.
        if (lane == 0) red_add_release_gpu_u32(&args.gmem_shared->slabs_done[group.entry], group.count);
        if (!kHoldsAllRows) arrive_warp(smem.barriers.x_empty[groups % kXImages]);
        ++groups;
    }
    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        while (true) {
            wait_warp(smem.barriers.posted[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry == kEnd) return;
            gate_up(group);
            arrive_warp(smem.barriers.left[queue.stage]);
            queue.next();
        }
    }
};
