// tile_wgmma_producer.cuh   One thread takes tickets of gate_up and requests all weights, as far ahead as the rings allow.
#pragma once
#include "sync_ptx.cuh"
#include "tile_tickets.cuh"
#include "tile_wgmma_smem.cuh"

// Whether warpgroups get units of down in turns: all of an item are requested by the time that the ring of a warpgroup
// which cannot start its own is full.
constexpr bool kDownInTurns = ceil_div(kDownBlocks, kUnitBlocks) <= kStages + 1;
constexpr uint32_t kMostIdle = 1u << 26;  // looks at full rings: seconds

struct Producer {
    Smem& smem;
    const Args& args;
    Turn<kQueue> queue;
    Turn<kStages> ring[kGroups];

    __device__ __forceinline__ Producer(Smem& s, const Args& a) : smem(s), args(a) {}

    template <int group>
    __device__ __forceinline__ bool has_room() const {
        const Turn<kStages>& at = ring[group];
        return mbarrier_test_wait(smem_address(&smem.barriers.empty[group][at.stage]), at.parity ^ 1);
    }
    // Blocks [block, block + count) of a slab for a warpgroup.
    template <int group>
    __device__ __forceinline__ void request(const uint8_t* gmem_slab, int block, int count) {
        Turn<kStages>& at = ring[group];
        wait(smem.barriers.empty[group][at.stage], at.parity ^ 1);
        bulk_load(smem_address(smem.ring[group][at.stage]), gmem_slab + block * kBlockBytes, count * kBlockBytes,
                  smem_address(&smem.barriers.full[group][at.stage]));
        at.next();
    }
    template <int group>
    __device__ __forceinline__ void request_quarter(const uint8_t* gmem_slab, int unit) {
        constexpr int kFirst = first_block(group), kLast = first_block(group + 1);
        const int block = kFirst + unit * kUnitBlocks;
        if (block < kLast) request<group>(gmem_slab, block, min(kUnitBlocks, kLast - block));
    }
    __device__ __forceinline__ void gate_up(const Group& group) {
        constexpr int kUnits = ceil_div(ceil_div(kGateUpBlocks, kGroups), kUnitBlocks);
        const int64_t place = int64_t(smem.routing.expert[group.entry]) * kGateUpSlabs + group.first;
        const uint8_t* gmem = args.gmem_w13 + place * (kGateUpBlocks * kBlockBytes);
#pragma unroll 1
        for (int i = 0; i < group.count; ++i, gmem += kGateUpBlocks * kBlockBytes) {
#pragma unroll 1
            for (int unit = 0; unit < kUnits; ++unit) {
                request_quarter<0>(gmem, unit);
                request_quarter<1>(gmem, unit);
                request_quarter<2>(gmem, unit);
                request_quarter<3>(gmem, unit);
            }
        }
    }
    // A warpgroup's way through the CTA's items of down, of which it has every fourth.
    struct Way {
        int item, block = 0;
        const uint8_t* gmem_slab = nullptr;
    };
    // The next unit of a warpgroup, if it has room for one. False where all are requested.
    template <int group>
    __device__ __forceinline__ bool serve(Way& way, const Share& share, bool& moves) {
        if (way.item >= share.count) return false;
        if (!kDownInTurns && !has_room<group>()) return true;
        if (way.block == 0) {
            const int number = share.first + way.item, entries = smem.routing.num_entries;
            const int64_t expert = smem.routing.expert[number % entries];
            way.gmem_slab = args.gmem_w2 + (expert * kDownSlabs + number / entries) * (kDownBlocks * kBlockBytes);
        }
        request<group>(way.gmem_slab, way.block, min(kUnitBlocks, kDownBlocks - way.block));
        way.block += kUnitBlocks;
        if (way.block >= kDownBlocks) way.block = 0, way.item += kGroups;
        moves = true;
        return true;
    }
    // A warpgroup starts its item when the others are through the slab before and have left enough images. So its ring may
    // stay full until they have *all* units of theirs: where rings hold less, this thread waits for none of them.
    __device__ __forceinline__ void down() {
        const Share share(smem.routing);
        Way ways[kGroups] = {{0}, {1}, {2}, {3}};
        uint32_t idle = 0;
        while (true) {
            bool moves = false;
            bool more = serve<0>(ways[0], share, moves);
            more |= serve<1>(ways[1], share, moves);
            more |= serve<2>(ways[2], share, moves);
            more |= serve<3>(ways[3], share, moves);
            if (!more) return;
            idle = moves ? 0 : idle + 1;
            if (idle > kMostIdle) __trap();
        }
    }
    __device__ __forceinline__ void post(const Group& group) {
        wait(smem.barriers.left[queue.stage], queue.parity ^ 1);
        smem.group[queue.stage] = group;
        mbarrier_arrive(smem_address(&smem.barriers.posted[queue.stage]));
        queue.next();
    }
    __device__ __forceinline__ void run(uint32_t ticket) {
        Tickets tickets(smem.routing.num_entries * kGateUpSlabs);
        uint32_t* gmem_ticket = &args.gmem_shared->ticket;
        int first, last;
        while (tickets.range(ticket, first, last)) {
            ticket = atom_add_relaxed_gpu_u32(gmem_ticket, 1);  // on its way while this one is served
            while (first < last) {
                const int entry = first / kGateUpSlabs, slab = first % kGateUpSlabs;
                const Group group{entry, slab, min(kGateUpSlabs - slab, last - first)};
                post(group);
                gate_up(group);
                first += group.count;
            }
        }
        post({kEnd, 0, 0});
        // Every CTA takes one ticket that stands for nothing; who takes the last of these cleans up.
        if (first == int(gridDim.x) - 1) *gmem_ticket = 0;
        down();
    }
};
