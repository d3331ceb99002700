// tile_finisher.cuh   The shares of gate_up become activations, and flags say so; parts of down become outputs.
#pragma once
#include "sync_ptx.cuh"
#include "tile_outputs.cuh"

struct Finisher {
    Smem& smem;
    const Args& args;
    int finisher, lane;
    Turn<kShares> turn;

    __device__ __forceinline__ Finisher(Smem& s, const Args& a, int f, int l)
        : smem(s), args(a), finisher(f), lane(l) {}

    // Lane 8 p + r has neuron r of the panel, columns 2 p and 2 p + 1 of a tile.
    __device__ __forceinline__ void panel(const Wanted& wanted, const Neuron& constants, int neuron) {
        const int row = lane % 8, column = lane / 8 * 2;
#pragma unroll 1
        for (int base = 0; base < wanted.count; base += kColumns) {
            wait(smem.barriers.shares_full[finisher][turn.stage], turn.parity);
            float2 gate = {0.f, 0.f}, up = {0.f, 0.f};
#pragma unroll
            for (int w = 0; w < kSplit; ++w) {
                const float (&share)[16][kColumns] = smem.partial.shares[finisher][turn.stage][w];
                const float2 g = *reinterpret_cast<const float2*>(&share[row][column]);
                const float2 u = *reinterpret_cast<const float2*>(&share[row + 8][column]);
                gate.x += g.x, gate.y += g.y;
                up.x += u.x, up.y += u.y;
            }
            arrive_warp(smem.barriers.shares_empty[finisher][turn.stage]);
            turn.next();
            activate(wanted, constants, neuron, base + column, gate.x, up.x);
            activate(wanted, constants, neuron, base + column + 1, gate.y, up.y);
        }
    }
    __device__ __forceinline__ void activate(const Wanted& wanted, const Neuron& constants, int neuron, int column,
                                             float gate, float up) {
        if (column >= wanted.count) return;
        args.gmem_act[int64_t(wanted.smem_pairs[column]) * kIntermediate + neuron] =
            constants.activation(args, gate, up);
    }

    // Its panels of a group; `panels` came before the group.
    __device__ __forceinline__ void gate_up(const Group& group, int panels) {
        const Wanted wanted(smem.routing, group.entry);
        const int skipped = (finisher - panels % kFinishers + kFinishers) % kFinishers;
        const int end = (group.first + group.count) * 8;
        int neuron = (group.first + skipped) * 8 + lane % 8;
        if (neuron >= end) return;
        Neuron next(args, wanted.expert, neuron);
#pragma unroll 1
        for (; neuron < end; neuron += kFinishers * 8) {
            const Neuron constants = next;
            next =
                Neuron(args, wanted.expert, min(neuron + kFinishers * 8, kIntermediate - 1));  // on its way meanwhile
            panel(wanted, constants, neuron);
        }
    }

    // A unit of a panel that other CTAs have parts of too. Who comes last adds all up: each finisher half of the rows,
    // with a counter of its own, so that they need not wait for each other.
    __device__ __forceinline__ void down(int panel, const Turn<kQueue>& queue) {
        constexpr int kRows = 16 / kFinishers;
        wait_warp(smem.barriers.left[queue.stage], queue.parity);  // the dot products of all consumers
        uint32_t before = 0;
        if (lane == 0) {
            uint32_t* gmem_parts_done = &args.gmem_shared->parts_done[panel][finisher];
            before = atom_add_acq_rel_gpu_u32(gmem_parts_done, 1);
            if (before == kParts - 1) *gmem_parts_done = 0;
        }
        __syncwarp();  // all lanes see what the first has acquired
        if (__shfl_sync(kFull, before, 0) == kParts - 1)
            sum_up<kRows / kQuad>(smem, args, panel, 1, finisher * kRows, lane, kLanes);
    }

    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        int panels = 0;
        while (true) {
            wait(smem.barriers.posted[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry == kEnd) return;
            if (group.entry >= 0)
                gate_up(group, panels);
            else if (kParts > 1)
                down(group.first % kDownPanels, queue);
            panels += group.count;
            arrive_warp(smem.barriers.activated[queue.stage]);
            arrive_warp(smem.barriers.done[queue.stage]);
            queue.next();
        }
    }
};

// Raises the flags for the finishers: these go on, while a release waits for all that was written before it.
__device__ __forceinline__ void raise_flags(Smem& smem, const Args& args) {
    Turn<kQueue> queue;
    while (true) {
        wait_warp(smem.barriers.posted[queue.stage], queue.parity);
        const Group group = smem.group[queue.stage];
        if (group.entry == kEnd) return;
        wait_warp(smem.barriers.activated[queue.stage], queue.parity);
        if (threadIdx.x % kLanes == 0 && group.entry >= 0)
            red_add_release_gpu_u32(&args.gmem_shared->panels_done[group.entry], group.count);
        arrive_warp(smem.barriers.done[queue.stage]);
        queue.next();
    }
}
