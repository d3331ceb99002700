// tile.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b2[e,h]),   e = topk_idx[t,k]
//            act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b13[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b13[e,1,i])
//
// The whole layer in one launch. Runs on sm_90a; compiled for sm_100a and sm_103a, never run there.
//
// Grid     one CTA a multiprocessor. Work is given out by tickets: first groups of gate_up panels, large ones first, then
//          panels of down. A CTA waits only for tickets that running CTAs hold, so the grid need not be resident as a whole.
// A CTA    producer warps take tickets and request weights, a unit of about 4 KB a bulk copy, as far ahead as the ring
//          allows: from gate_up into down without a gap. Stager warps fetch activations, those of down behind the flag of
//          their expert. Consumer warps multiply: of a gate_up panel each owns every kSplit-th unit, of down a panel each.
//          Finisher warps add the shares of gate_up up and apply the activation; a stager raises the flag.
// Reads    every wanted weight byte once for each kMaxColumns pairs of its expert, in the order of memory
// Bound    HBM: distinct experts * 3 * intermediate * hidden * bytes_per_weight
// Sync     waits for its predecessor before anything is read or written. Inside: gmem_shared->panels_done[entry] is added to
//          with release behind act, and acquired before act is fetched.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, pairs <= WARPRING_PAIRS; ids outside [0, num_experts) are skipped
#include "tile_smem.cuh"
#include "activation.cuh"
#include "sync_ptx.cuh"

constexpr int kConsumerBarrier = 1;
constexpr int kConsumerThreads = kConsumers * kLanes;
constexpr uint64_t kPatienceNs = 20'000'000'000;

// ---- producer: takes tickets, requests weights; a lane for each consumer -------------------------------------------------

// What a ticket stands for. gate_up's panels are given out in rounds of gridDim.x tickets, for three quarters of
// what the round before left, and at last for a panel each: few groups, and CTAs that end together.
struct Tickets {
    int num_panels, size, base_panel = 0;
    uint32_t base_ticket = 0;

    __device__ __forceinline__ explicit Tickets(int panels) : num_panels(panels) { resize(); }
    __device__ __forceinline__ void resize() { size = max(1, (num_panels - base_panel) * 3 / int(4 * gridDim.x)); }
    // Panels [first, last) of gate_up; or false, and the unit of down in `first`. Tickets of a caller grow.
    __device__ __forceinline__ bool range(uint32_t ticket, int& first, int& last) {
        while (ticket - base_ticket >= gridDim.x && base_panel + size * int(gridDim.x) < num_panels) {
            base_panel += size * int(gridDim.x);
            base_ticket += gridDim.x;
            resize();
        }
        const uint32_t in_round = ticket - base_ticket, left = ceil_div(num_panels - base_panel, size);
        first = base_panel + int(in_round) * size;
        last = min(first + size, num_panels);
        if (first < num_panels) return true;
        first = int(in_round - left);
        return false;
    }
};

struct Producer {
    Smem& smem;
    const Args& args;
    int producer, lane;
    Turn<kQueue> queue;
    int panels = 0, items = 0;  // of gate_up, of down, so far
    Turn<kStages> ring[kTeams];
    Turn<kStages> down_ring;
    bool in_down = false;

    __device__ __forceinline__ Producer(Smem& s, const Args& a, int p, int l) : smem(s), args(a), producer(p), lane(l) {}

    // A pass of a panel: a unit for each warp of a team.
    __device__ __forceinline__ void request_pass(int team, Turn<kStages>& turn, const uint8_t* gmem) {
        const uint32_t full = smem_address(&smem.barriers.gate_up_full[team][turn.stage]);
        if (lane == 0) {
            // The first pass over the ring waits for the phase before the first, which counts as complete.
            wait(smem.barriers.gate_up_empty[team][turn.stage], turn.parity ^ 1);
            mbarrier_arrive_expect_tx(full, kSplit * kUnitBytes);
        }
        __syncwarp();
        if (lane < kSplit) bulk_copy(smem_address(smem.ring[team][turn.stage][lane]), gmem + lane * kUnitBytes, kUnitBytes, full);
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
    // A unit of down takes the place of units of gate_up, once these are read. They were all requested before this is called.
    __device__ __forceinline__ void wait_for_gate_up(int team, int stage) {
        const int used = (panels + kTeams - 1 - team) / kTeams * kPasses, uses = (used + kStages - 1 - stage) / kStages;
        if (uses > 0) wait(smem.barriers.gate_up_empty[team][stage], (uses - 1) & 1);
    }
    // Units of a panel of down, for its consumer alone: a lane does it.
    __device__ __forceinline__ void down(int unit) {
        const Part part(smem.routing, unit / kDownPanels);
        const int consumer = lane * kProducers + producer;
        if (consumer < kConsumers) {
            const int team = consumer / kSplit, share = consumer % kSplit;
            const int skipped = (consumer - items % kConsumers + kConsumers) % kConsumers;
#pragma unroll 1
            for (int entry = part.first + skipped; entry < part.last; entry += kConsumers) {
                const int64_t place = int64_t(smem.routing.expert[entry]) * kDownPanels + unit % kDownPanels;
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
        items += part.last - part.first;
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
            wait(smem.barriers.done[queue.stage], queue.parity ^ 1);
            smem.group[queue.stage] = group;
            mbarrier_arrive(smem_address(&smem.barriers.posted[queue.stage]));
        }
        __syncwarp();
        serve(group);
    }
    __device__ __forceinline__ void lead(uint32_t ticket) {
        Tickets tickets(smem.routing.num_entries * kGateUpPanels);
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
            } else if (first < kDownPanels * kParts) {
                post({kDown, 0, first, 0});
                if (lane == 0) next = atom_add_relaxed_gpu_u32(gmem_ticket, 1);  // no sooner: others may be free by then
            } else {
                post({kEnd, 0, 0, 0});
                // Every CTA takes one ticket that stands for nothing; who takes the last of these cleans up.
                if (lane == 0 && first == kDownPanels * kParts + int(gridDim.x) - 1) *gmem_ticket = 0;
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

// ---- stagers: fetch activations; a warp each ---------------------------------------------------------------------------

// Copies a column of kBytes; lanes share it.
template <int kBytes>
__device__ __forceinline__ void fetch_column(uint32_t smem_column, const uint16_t* gmem, int lane) {
#pragma unroll 4
    for (int byte = lane * 16; byte < kBytes; byte += kLanes * 16) cp_async_16(smem_column + byte, gmem + byte / 2);
}

// A ring of columns, taken in order and given back in order.
template <int kSlotsOfRing>
struct ColumnRing {
    int next_slot = 0, free_slots = kSlotsOfRing;
    __device__ __forceinline__ int take(int count) {
        const int slot = next_slot;
        free_slots -= count;
        next_slot += count;
        if (next_slot >= kSlotsOfRing) next_slot -= kSlotsOfRing;
        return slot;
    }
    __device__ __forceinline__ static int place(int slot) { return slot < kSlotsOfRing ? slot : slot - kSlotsOfRing; }
};

// Few tokens: all rows of x stay, each at the place of its token.
__device__ __forceinline__ bool holds_all_rows(const Args& args) { return args.num_tokens <= kXSlots; }

// Says for the whole warp that what its lanes fetched, and lane 0 wrote, is there once the copies have come.
__device__ __forceinline__ void arrive_fetched(uint64_t& barrier) {
    const uint32_t smem_barrier = smem_address(&barrier);
    cp_async_arrive(smem_barrier);
    mbarrier_arrive(smem_barrier);
}

struct Stager {
    Smem& smem;
    const Args& args;
    int stager, lane;
    ColumnRing<kXSlots> x_ring;
    ColumnRing<kOwnActSlots> act_ring;
    int num_groups = 0, groups_back = 0;  // so far, and those that gave their columns back
    int num_items = 0, items_back = 0;    // the same of this stager's panels of down

    __device__ __forceinline__ Stager(Smem& s, const Args& a, int i, int l) : smem(s), args(a), stager(i), lane(l) {}

    __device__ __forceinline__ void take_group_back() {
        wait_warp(smem.barriers.done[groups_back % kQueue], groups_back / kQueue & 1);
        x_ring.free_slots += smem.columns_of_group[groups_back % kQueue];
        ++groups_back;
    }
    __device__ __forceinline__ void fetch_all_rows() const {
#pragma unroll 1
        for (int t = 0; t < args.num_tokens; ++t)
            fetch_column<kXBytes>(smem_address(smem.columns) + t * kXStride, args.gmem_x + t * args.x_stride, lane);
    }
    __device__ __forceinline__ void gate_up(Group& group, uint64_t& staged) {
        if (holds_all_rows(args)) {
            if (lane == 0) smem.columns_of_group[num_groups % kQueue] = 0;
            if (num_groups == 0) fetch_all_rows();
            arrive_fetched(staged);
            return;
        }
        const Wanted wanted(smem.routing, group.entry);
        while (x_ring.free_slots < wanted.count) take_group_back();
        const int slot = x_ring.take(wanted.count);
        if (lane == 0) {
            group.slot = slot;
            smem.columns_of_group[num_groups % kQueue] = wanted.count;
        }
#pragma unroll 1
        for (int c = 0; c < wanted.count; ++c)
            fetch_column<kXBytes>(smem_address(smem.columns) + x_ring.place(slot + c) * kXStride,
                                  args.gmem_x + wanted.smem_pairs[c] / kSlots * args.x_stride, lane);
        arrive_fetched(staged);
    }
    // Waits for the activations of `entry`; gives how many entries from it on have theirs.
    __device__ __forceinline__ int wait_for_act(int entry) {
        const uint32_t* gmem_done = args.gmem_shared->panels_done + entry;
        if (lane == 0) {
            uint64_t start = 0;
            for (uint32_t tries = 0; ld_acquire_gpu_u32(gmem_done) != kGateUpPanels; ++tries) {
                if (tries % 1024 != 0) continue;
                const uint64_t now = globaltimer_ns();
                if (tries == 0) start = now;
                if (now - start > kPatienceNs) __trap();
            }
        }
        __syncwarp();
        const bool exists = entry + lane < smem.routing.num_entries;
        const bool there = exists && ld_acquire_gpu_u32(gmem_done + lane) == kGateUpPanels;
        const uint32_t missing = ~__ballot_sync(kFull, there);
        __syncwarp();
        return missing == 0 ? kLanes : __ffs(int(missing)) - 1;
    }
    // Every kStagers-th panel, in a part of the columns that is this stager's own.
    __device__ __forceinline__ void down(int unit, int& items) {
        const Part part(smem.routing, unit / kDownPanels);
        const int skipped = (stager - items % kStagers + kStagers) % kStagers;
        int ready = part.first;
#pragma unroll 1
        for (int entry = part.first + skipped; entry < part.last; entry += kStagers, ++num_items) {
            const Wanted wanted(smem.routing, entry);
            const int item = (items + entry - part.first) % kItems, own = num_items % kOwnItems;
            while (act_ring.free_slots < wanted.count || num_items - items_back == kOwnItems) {
                const int back = items_back % kOwnItems;
                wait_warp(smem.barriers.item_done[back * kStagers + stager], items_back / kOwnItems & 1);
                act_ring.free_slots += smem.columns_of_item[back * kStagers + stager];
                ++items_back;
            }
            if (entry >= ready) ready = entry + wait_for_act(entry);
            const int slot = act_ring.take(wanted.count);
            __syncwarp();
            if (lane == 0) {
                smem.item_slot[item] = slot;
                smem.columns_of_item[own * kStagers + stager] = wanted.count;
            }
#pragma unroll 1
            for (int c = 0; c < wanted.count; ++c)
                fetch_column<kActBytes>(
                    smem_address(smem.columns) + (stager * kOwnActSlots + act_ring.place(slot + c)) * kActStride,
                    args.gmem_act + int64_t(wanted.smem_pairs[c]) * kIntermediate, lane);
            arrive_fetched(smem.barriers.item_staged[item]);
        }
        items += part.last - part.first;
    }
    // The first stager fetches for all groups of gate_up; the others wait for down.
    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        int items = 0;
        while (true) {
            uint64_t& staged = smem.barriers.staged[queue.stage];
            wait_warp(stager == 0 ? smem.barriers.posted[queue.stage] : staged, queue.parity);
            Group& group = smem.group[queue.stage];
            const int entry = group.entry, unit = group.first;
            if (stager == 0) {
                // Behind by kQueue at most: the producer has waited for these.
                if (num_groups - groups_back == kQueue) take_group_back();
                if (entry >= 0) {
                    gate_up(group, staged);
                } else {
                    // Rows of act take the place of rows of x, and dot products that of shares: all are done with both.
                    if (items == 0)
                        while (groups_back < num_groups) take_group_back();
                    if (lane == 0) smem.columns_of_group[num_groups % kQueue] = 0;
                    arrive_fetched(staged);
                }
                ++num_groups;
            }
            if (entry == kEnd) break;
            if (entry >= 0 && stager == kStagers - 1) {
                // The flag, for the finishers: they go on, while a release waits for all that was written before it.
                wait_warp(smem.barriers.activated[queue.stage], queue.parity);
                if (lane == 0) red_add_release_gpu_u32(&args.gmem_shared->panels_done[entry], group.count);
            }
            if (entry == kDown) down(unit, items);
            arrive_warp(smem.barriers.done[queue.stage]);
            queue.next();
        }
        uint32_t before = 0;
        if (lane == 0) before = atom_add_acq_rel_gpu_u32(&args.gmem_shared->finished, 1);
        if (__shfl_sync(kFull, before, 0) == gridDim.x * kStagers - 1) {
            // Nobody looks at the flags again, and each was seen complete.
#pragma unroll 1
            for (int i = lane; i < smem.routing.num_entries; i += kLanes) args.gmem_shared->panels_done[i] = 0;
            if (lane == 0) args.gmem_shared->finished = 0;
        }
    }
};

// ---- finishers: shares become activations; a warp each --------------------------------------------------------------------

// What finishing one neuron takes.
struct Neuron {
    float gate_scale, up_scale, gate_bias, up_bias;

    __device__ __forceinline__ Neuron(const Args& args, int64_t expert, int neuron) {
        const int64_t gate = expert * 2 * kIntermediate + neuron, up = gate + kIntermediate;
        gate_scale = args.gmem_w13_matrix_scale[expert * 2];
        up_scale = args.gmem_w13_matrix_scale[expert * 2 + 1];
        if (args.gmem_w13_row_scale != nullptr) {
            gate_scale *= args.gmem_w13_row_scale[gate];
            up_scale *= args.gmem_w13_row_scale[up];
        }
        gate_bias = args.gmem_w13_bias != nullptr ? args.gmem_w13_bias[gate] : 0.f;
        up_bias = args.gmem_w13_bias != nullptr ? args.gmem_w13_bias[up] : 0.f;
    }
};

struct Finisher {
    Smem& smem;
    const Args& args;
    int finisher, lane;
    Turn<kShares> turn;

    __device__ __forceinline__ Finisher(Smem& s, const Args& a, int f, int l) : smem(s), args(a), finisher(f), lane(l) {}

    // Lane 8 p + r has neuron r of the panel, columns 2 p and 2 p + 1 of a tile.
    __device__ __forceinline__ void panel(const Wanted& wanted, const Neuron& constants, int neuron) {
        const int row = lane % 8, column = lane / 8 * 2;
#pragma unroll 1
        for (int base = 0; base < wanted.count; base += kColumns) {
            wait(smem.barriers.shares_full[finisher][turn.stage], turn.parity);
            float2 gate = {0.f, 0.f}, up = {0.f, 0.f};
#pragma unroll
            for (int w = 0; w < kSplit; ++w) {
                const float(&share)[16][kColumns] = smem.shares[finisher][turn.stage][w];
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
    __device__ __forceinline__ void activate(const Wanted& wanted, const Neuron& constants, int neuron, int column, float gate,
                                             float up) {
        if (column >= wanted.count) return;
        const float g = fmaf(gate, constants.gate_scale, constants.gate_bias);
        const float u = fmaf(up, constants.up_scale, constants.up_bias);
        args.gmem_act[int64_t(wanted.smem_pairs[column]) * kIntermediate + neuron] =
            cvt_f32_bf16(gated_activation(g, u, {args.alpha, args.limit, args.up_offset}));
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
            next = Neuron(args, wanted.expert, min(neuron + kFinishers * 8, kIntermediate - 1));  // on its way meanwhile
            panel(wanted, constants, neuron);
        }
    }

    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        int panels = 0;
        while (true) {
            wait(smem.barriers.staged[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry == kEnd) return;
            if (group.entry >= 0) gate_up(group, panels);
            panels += group.count;
            arrive_warp(smem.barriers.activated[queue.stage]);
            arrive_warp(smem.barriers.done[queue.stage]);
            queue.next();
        }
    }
};

// ---- consumers ---------------------------------------------------------------------------------------------------------

struct Consumer {
    Smem& smem;
    const Args& args;
    int warp, lane;
    Turn<kStages> ring;
    Turn<kShares> shares, other_shares;  // of the finisher of the next own panel, and of the one after that
    int panels = 0;                      // of gate_up so far
    Turn<kStages> down_ring;
    int items = 0;                       // panels of down so far

    __device__ __forceinline__ Consumer(Smem& s, const Args& a, int w, int l) : smem(s), args(a), warp(w), lane(l) {}

    // Where a lane's activations start; `place_of` gives the place of a column, among those of `stride` bytes.
    template <int kTiles, class PlaceOf>
    __device__ __forceinline__ Columns<kTiles> columns(int count, int stride, const PlaceOf& place_of) const {
        Columns<kTiles> found;
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            found.smem[t] =
                smem_address(smem.columns) + place_of(min(t * kColumns + lane / 4, count - 1)) * stride + lane % 4 * 16;
        return found;
    }

    // One unit: waits, multiplies, gives its place back.
    template <int kRun, int kTiles>
    __device__ __forceinline__ void add_unit(Sums<kTiles>& sums, int stage, uint64_t& full, uint64_t& empty, uint32_t parity,
                                             const Columns<kTiles>& staged, const float* gmem_low, const float* gmem_high,
                                             int record) {
        const BlockScales<kRun> scales(gmem_low, gmem_high, record);
        wait(full, parity);
        add_run<kRun, kTiles>(sums, smem_address(smem.ring[warp / kSplit][stage][warp % kSplit]), staged, lane, scales, record);
        arrive_warp(empty);
    }

    template <int kTiles>
    __device__ __forceinline__ void gate_up(const Group& group, const Wanted& wanted) {
        const int g = lane / 4, q = lane % 4, team = warp / kSplit, share = warp % kSplit;
        const Columns<kTiles> staged = columns<kTiles>(wanted.count, kXStride, [&](int column) {
            if (holds_all_rows(args)) return wanted.smem_pairs[column] / kSlots;
            return ColumnRing<kXSlots>::place(group.slot + column);
        });
        constexpr int kScaleCols = ceil_div(kHidden, 128), kScaleRows = ceil_div(kIntermediate, 128);
#pragma unroll 1
        for (int panel = group.first; panel < group.first + group.count; ++panel) {
            const int finisher = panels++ % kFinishers;
            if (kTeams > 1 && finisher != team) continue;
            const float *gmem_low = nullptr, *gmem_high = nullptr;
            if constexpr (Format::kBlockScale) {
                gmem_low = args.gmem_w13_block_scale + (int64_t(wanted.expert) * 2 * kScaleRows + panel * 8 / 128) * kScaleCols;
                gmem_high = gmem_low + kScaleRows * kScaleCols;
            }
            Sums<kTiles> sums;
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass, ring.next())
                add_unit<kGateUpRun, kTiles>(sums, ring.stage, smem.barriers.gate_up_full[team][ring.stage],
                                             smem.barriers.gate_up_empty[team][ring.stage], ring.parity, staged, gmem_low,
                                             gmem_high, (pass * kSplit + share) * kGateUpRun);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                wait(smem.barriers.shares_empty[finisher][shares.stage], shares.parity ^ 1);
                float(&part)[16][kColumns] = smem.shares[finisher][shares.stage][share];
                *reinterpret_cast<float2*>(&part[g][q * 2]) = {sums.total(t, 0), sums.total(t, 1)};
                *reinterpret_cast<float2*>(&part[g + 8][q * 2]) = {sums.total(t, 2), sums.total(t, 3)};
                arrive_warp(smem.barriers.shares_full[finisher][shares.stage]);
                shares.next();
            }
            if (kTeams == 1) {
                const Turn<kShares> used = shares;
                shares = other_shares;
                other_shares = used;
            }
        }
    }

    template <int kTiles>
    __device__ __forceinline__ void down_panel(int stager, int slot, const Wanted& wanted, int panel) {
        const int g = lane / 4, q = lane % 4, row = panel * 16 + g;
        float low_scale = args.gmem_w2_matrix_scale[wanted.expert], high_scale = low_scale, low_bias = 0.f, high_bias = 0.f;
        const int64_t first_row = int64_t(wanted.expert) * kHidden;
        if (args.gmem_w2_row_scale != nullptr) {
            low_scale *= args.gmem_w2_row_scale[first_row + row];
            high_scale *= args.gmem_w2_row_scale[first_row + row + 8];
        }
        if (args.gmem_w2_bias != nullptr) {
            low_bias = args.gmem_w2_bias[first_row + row];
            high_bias = args.gmem_w2_bias[first_row + row + 8];
        }
        const float* gmem_scale = nullptr;
        constexpr int kScaleCols = ceil_div(kIntermediate, 128), kScaleRows = ceil_div(kHidden, 128);
        if constexpr (Format::kBlockScale)  // 16 rows lie in one block of 128
            gmem_scale = args.gmem_w2_block_scale + (int64_t(wanted.expert) * kScaleRows + panel * 16 / 128) * kScaleCols;
        const Columns<kTiles> staged = columns<kTiles>(wanted.count, kActStride, [&](int column) {
            return stager * kOwnActSlots + ColumnRing<kOwnActSlots>::place(slot + column);
        });
        Sums<kTiles> sums;
#pragma unroll 1
        for (int unit = 0; unit < kDownUnits; ++unit, down_ring.next())
            add_unit<kDownRun, kTiles>(sums, down_ring.stage, smem.barriers.down_full[warp][down_ring.stage],
                                       smem.barriers.down_empty[warp][down_ring.stage], down_ring.parity, staged, gmem_scale,
                                       gmem_scale, unit * kDownRun);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = t * kColumns + q * 2 + c;
                if (column >= wanted.count) continue;
                const int pair = wanted.smem_pairs[column];
                float* dots = kParts == 1 ? smem.dots[pair] : args.gmem_dots + int64_t(pair) * kHidden + panel * 16;
                dots[g] = fmaf(sums.total(t, c), low_scale, low_bias);
                dots[g + 8] = fmaf(sums.total(t, 2 + c), high_scale, high_bias);
            }
        }
    }

    __device__ __forceinline__ void down(int unit) {
        const int panel = unit % kDownPanels;
        const Part part(smem.routing, unit / kDownPanels);
        const int skipped = (warp - items % kConsumers + kConsumers) % kConsumers;
#pragma unroll 1
        for (int entry = part.first + skipped; entry < part.last; entry += kConsumers) {
            const int number = items + entry - part.first, item = number % kItems;
            const Wanted wanted(smem.routing, entry);
            wait(smem.barriers.item_staged[item], number / kItems & 1);
            const int slot = smem.item_slot[item], stager = number % kStagers;
            if (kMaxTiles == 1 || wanted.count <= kColumns)
                down_panel<1>(stager, slot, wanted, panel);
            else
                down_panel<kMaxTiles>(stager, slot, wanted, panel);
            arrive_warp(smem.barriers.item_done[item]);
        }
        items += part.last - part.first;
        named_barrier_sync(kConsumerBarrier, kConsumerThreads);
        bool sums_up = true;
        if constexpr (kParts > 1) {
            if (threadIdx.x == 0) {
                uint32_t* gmem_parts_done = &args.gmem_shared->parts_done[panel];
                smem.is_last = atom_add_acq_rel_gpu_u32(gmem_parts_done, 1) == kParts - 1;
                if (smem.is_last) *gmem_parts_done = 0;
            }
            named_barrier_sync(kConsumerBarrier, kConsumerThreads);
            sums_up = smem.is_last;
        }
        if (sums_up) sum_up(panel);
        named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    }

    // The outputs of a panel, slot by slot.
    __device__ __forceinline__ void sum_up(int panel) {
#pragma unroll 1
        for (int i = threadIdx.x; i < args.num_tokens * 16; i += kConsumerThreads) {
            const int token = i / 16, row = i % 16;
            float y = 0.f;
#pragma unroll 4
            for (int slot = 0; slot < kSlots; ++slot) {
                const int pair = token * kSlots + slot;
                if (smem.routing.ids[pair] == kUnused) continue;
                const float dot =
                    kParts == 1 ? smem.dots[pair][row] : ld_routing(args.gmem_dots + int64_t(pair) * kHidden + panel * 16 + row);
                y = fmaf(smem.weights[pair], dot, y);
            }
            args.gmem_out[token * args.out_stride + panel * 16 + row] = cvt_f32_bf16(y);
        }
    }

    __device__ __forceinline__ void load_weights() {
#pragma unroll 1
        for (int p = threadIdx.x; p < args.num_tokens * kSlots; p += kConsumerThreads) {
            const int token = p / kSlots, slot = p % kSlots;
            float weight = 1.f;
            if (kShared == 0 || slot < kTopk)
                weight = ld_routing(args.gmem_topk_weights + token * args.weights_stride + slot);
            else if (args.gmem_shared_weights != nullptr)
                weight = ld_routing(args.gmem_shared_weights + token * args.shared_weights_stride);
            smem.weights[p] = weight;
        }
        // Seen by all consumers behind the barrier that ends a panel of down.
    }

    __device__ __forceinline__ void run() {
        load_weights();
        Turn<kQueue> queue;
        while (true) {
            wait(smem.barriers.staged[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry == kEnd) return;
            if (group.entry >= 0) {
                const Wanted wanted(smem.routing, group.entry);
                if (kMaxTiles == 1 || wanted.count <= kColumns)
                    gate_up<1>(group, wanted);
                else
                    gate_up<kMaxTiles>(group, wanted);
            } else {
                down(group.first);
            }
            arrive_warp(smem.barriers.done[queue.stage]);
            queue.next();
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_tile(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride,
          const float* gmem_topk_weights, int64_t weights_stride, const float* gmem_shared_weights,
          int64_t shared_weights_stride, int32_t num_tokens, const uint8_t* gmem_w13, const float* gmem_w13_matrix_scale,
          const float* gmem_w13_row_scale, const float* gmem_w13_block_scale, const float* gmem_w13_bias,
          const uint8_t* gmem_w2, const float* gmem_w2_matrix_scale, const float* gmem_w2_row_scale,
          const float* gmem_w2_block_scale, const float* gmem_w2_bias, float alpha, float limit, float up_offset,
          uint16_t* gmem_act, float* gmem_dots, uint16_t* gmem_out, int64_t out_stride, Shared* gmem_shared) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const bool produces = warp == kConsumers;
    init_barriers(smem.barriers, warp, lane);
    pdl_launch_dependents();
    pdl_wait();
    uint32_t ticket = 0;
    if (produces && lane == 0) ticket = atom_add_relaxed_gpu_u32(&gmem_shared->ticket, 1);
    find_pairs(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kSlots);
    const Args args{gmem_x, x_stride, gmem_topk_idx, idx_stride, gmem_topk_weights, weights_stride, gmem_shared_weights,
                    shared_weights_stride, num_tokens, gmem_w13, gmem_w2, gmem_w13_matrix_scale, gmem_w13_row_scale,
                    gmem_w13_block_scale, gmem_w13_bias, gmem_w2_matrix_scale, gmem_w2_row_scale, gmem_w2_block_scale,
                    gmem_w2_bias, alpha, limit, up_offset, gmem_act, gmem_dots, gmem_out, out_stride, gmem_shared};
    constexpr int kStager = kConsumers + kProducers, kFinisher = kStager + kStagers;
    if (warp < kConsumers)
        Consumer(smem, args, warp, lane).run();
    else if (produces)
        Producer(smem, args, 0, lane).lead(__shfl_sync(kFull, ticket, 0));
    else if (warp < kStager)
        Producer(smem, args, warp - kConsumers, lane).follow();
    else if (warp < kFinisher)
        Stager(smem, args, warp - kStager, lane).run();
    else
        Finisher(smem, args, warp - kFinisher, lane).run();
}
