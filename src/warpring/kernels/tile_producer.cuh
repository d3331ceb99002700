// tile_producer.cuh   Takes tickets and requests weights: the first producer leads and streams gate_up, all of them
// serve the consumers of down, a lane for each.
#pragma once
#include "sync_ptx.cuh"
#include "tile_smem.cuh"
#include "tile_tickets.cuh"

struct Producer {
    Smem& smem;
    const Args& args;
    int producer, lane;
    int at_once;  // panels of a unit of down
    Turn<kQueue> queue;
    int panels = 0, items = 0;  // of gate_up, of down, so far
    Turn<kStages> ring[kTeams];
    Turn<kStages> down_ring;
    bool in_down = false;

    __device__ __forceinline__ Producer(Smem& s, const Args& a, int p, int l)
        : smem(s), args(a), producer(p), lane(l), at_once(panels_at_once(s.routing)) {}

    // A pass of a panel: a unit for each warp of a team.
    __device__ __forceinline__ void request_pass(int team, Turn<kStages>& turn, const uint8_t* gmem) {
        const uint32_t full = smem_address(&smem.barriers.gate_up_full[team][turn.stage]);
        if (lane == 0) {
            // The first pass over the ring waits for the phase before the first, which counts as complete.
            wait(smem.barriers.gate_up_empty[team][turn.stage], turn.parity ^ 1);
            // Units of a pass follow each other on both sides.
            bulk_load(smem_address(smem.ring[team][turn.stage]), gmem, kSplit * kUnitBytes, full);
        }
        __syncwarp();
        turn.next();
    }
    __device__ __forceinline__ void gate_up(const Group& group) {
        if (producer > 0) {
            panels += group.count;
            return;
        }
        const int64_t place = int64_t(smem.routing.expert[group.entry]) * kGateUpPanels + group.first;
        const uint8_t* gmem = args.gmem_w13 + place * (kGateUpUnits * kUnitBytes);
#pragma unroll 1
        for (int i = 0; i < group.count; ++i, ++panels) {
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass, gmem += kSplit * kUnitBytes) {
                if (kTeams == 1 || panels % kTeams == 0)
                    request_pass(0, ring[0], gmem);
                else
                    request_pass(kTeams - 1, ring[kTeams - 1], gmem);
            }
        }
    }
    // A unit of down takes the place of units of gate_up, once these are read. They were all requested before this is
    // called.
    __device__ __forceinline__ void wait_for_gate_up(int team, int stage) {
        const int used = (panels + kTeams - 1 - team) / kTeams * kPasses, uses = (used + kStages - 1 - stage) / kStages;
        if (uses > 0) wait(smem.barriers.gate_up_empty[team][stage], (uses - 1) & 1);
    }
    // Weights of an item of down, for its consumer alone: a lane does it.
    __device__ __forceinline__ void down(int number) {
        const Unit unit(smem.routing, number, at_once);
        const int consumer = lane * kProducers + producer;
        if (consumer < kConsumers) {
            const int team = consumer / kSplit, share = consumer % kSplit;
            const int skipped = (consumer - items % kConsumers + kConsumers) % kConsumers;
#pragma unroll 1
            for (Item item(unit, skipped); item.is_of(unit); item.skip(unit, kConsumers)) {
                const int expert = smem.routing.expert[unit.first_entry + item.entry];
                const int64_t place = int64_t(expert) * kDownPanels + unit.first_panel + item.panel;
                const uint8_t* gmem = args.gmem_w2 + place * (kDownUnits * kDownUnitBytes);
#pragma unroll 1
                for (int i = 0; i < kDownUnits; ++i) {
                    const int stage = down_ring.stage;
                    if (!in_down) wait_for_gate_up(team, stage);
                    wait(smem.barriers.down_empty[consumer][stage], down_ring.parity ^ 1);
                    bulk_load(smem_address(smem.ring[team][stage][share]), gmem + i * kDownUnitBytes, kDownUnitBytes,
                              smem_address(&smem.barriers.down_full[consumer][stage]));
                    down_ring.next();
                    in_down = in_down || down_ring.stage == 0;
                }
            }
        }
        items += unit.num_items();
        __syncwarp();
    }
    __device__ __forceinline__ void serve(const Group& group) {
        if (group.entry >= 0)
            gate_up(group);
        else if (group.entry == kDown)
            down(group.first);
        arrive_warp(smem.barriers.done[queue.stage]);
        queue.next();
    }

    // The first producer posts what all serve.
    __device__ __forceinline__ void post(const Group& group) {
        if (lane == 0) {
            wait(smem.barriers.left[queue.stage], queue.parity ^ 1);
            wait(smem.barriers.done[queue.stage], queue.parity ^ 1);
            smem.group[queue.stage] = group;
            mbarrier_arrive(smem_address(&smem.barriers.posted[queue.stage]));
        }
        __syncwarp();
        serve(group);
    }
    __device__ __forceinline__ void lead(uint32_t ticket) {
        Tickets tickets(smem.routing.num_entries * kGateUpPanels);
        const int units = ceil_div(kDownPanels, at_once) * kParts;
        uint32_t* gmem_ticket = &args.gmem_shared->ticket;
        while (true) {
            int first, last;
            uint32_t next = 0;
            if (tickets.range(ticket, first, last)) {
                if (lane == 0) next = atom_add_relaxed_gpu_u32(gmem_ticket, 1);  // on its way while this one is served
                while (first < last) {
                    const int entry = first / kGateUpPanels, panel = first % kGateUpPanels;
                    const int count = min(kGateUpPanels - panel, last - first);
                    post({entry, 0, panel, count});
                    first += count;
                }
            } else if (first < units) {
                post({kDown, 0, first, 0});
                if (lane == 0)
                    next = atom_add_relaxed_gpu_u32(gmem_ticket, 1);  // no sooner: others may be free by then
            } else {
                post({kEnd, 0, 0, 0});
                // Every CTA takes one ticket that stands for nothing; who takes the last of these cleans up.
                if (lane == 0 && first == units + int(gridDim.x) - 1) *gmem_ticket = 0;
                return;
            }
            ticket = __shfl_sync(kFull, next, 0);
        }
    }
    __device__ __forceinline__ void follow() {
        while (true) {
            wait(smem.barriers.posted[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            __syncwarp();
            serve(group);
            if (group.entry == kEnd) return;
        }
    }
};
