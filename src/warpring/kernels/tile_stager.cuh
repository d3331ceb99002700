// tile_stager.cuh   Fetches activations. Few tokens' rows of x are fetched by all threads while the batch is being
// sorted, since every CTA needs all of them; else the stagers fetch those of each group together. Rows of act they take
// in turns.
#pragma once
#include "sync_ptx.cuh"
#include "tile_smem.cuh"

// Copies a column of kBytes; lanes share it.
template <int kBytes>
__device__ __forceinline__ void fetch_column(uint32_t smem_column, const uint16_t* gmem, int lane) {
#pragma unroll 4
    for (int byte = lane * 16; byte < kBytes; byte += kLanes * 16) cp_async_16(smem_column + byte, gmem + byte / 2);
}

// A ring of columns, taken in order and given back in order.
struct ColumnRing {
    int slots, free_slots, next_slot = 0;
    __device__ __forceinline__ explicit ColumnRing(int n) : slots(n), free_slots(n) {}
    __device__ __forceinline__ int take(int count) {
        const int slot = next_slot;
        free_slots -= count;
        next_slot += count;
        if (next_slot >= slots) next_slot -= slots;
        return slot;
    }
    __device__ __forceinline__ static int place(int slot, int slots) { return slot < slots ? slot : slot - slots; }
};

// Few tokens: all rows of x stay, each at the place of its token. Every CTA needs all of them, so all threads fetch
// them while the batch is being sorted, but for the first warps, which have ids to wait for.
__device__ __forceinline__ bool holds_all_rows(const Args& args) { return args.num_tokens <= kXSlots; }
__device__ __forceinline__ void fetch_all_rows(Smem& smem, const Args& args) {
    constexpr int kPieces = kXBytes / 16, kSorting = 4 * kLanes;
#pragma unroll 1
    for (int i = int(threadIdx.x) - kSorting; i < args.num_tokens * kPieces; i += kThreads - kSorting) {
        if (i < 0) return;
        const int token = i / kPieces, piece = i % kPieces;
        cp_async_16(smem_address(smem.columns) + token * kXStride + piece * 16,
                    args.gmem_x + token * args.x_stride + piece * 8);
    }
}

// Where rows of act are staged: behind those of x where there is room enough (four entries as large as most, and the
// largest), so that they come before the last product with x; else in the place of these.
struct ActPlace {
    int first_byte, own_slots;  // of each stager

    __device__ __forceinline__ ActPlace(const Args& args, const Routing& routing) {
        const int x_bytes = args.num_tokens * kXStride;
        own_slots = (WARPRING_COLUMN_BYTES - x_bytes) / (kActStride * kStagers);
        const bool is_enough =
            own_slots >= routing.largest && own_slots * routing.num_entries >= 4 * args.num_tokens * kSlots;
        first_byte = is_enough && holds_all_rows(args) ? x_bytes : 0;
        if (first_byte == 0) own_slots = kActSlots / kStagers;
    }
    __device__ __forceinline__ bool is_apart() const { return first_byte > 0; }
};

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
    ColumnRing x_ring;
    ActPlace act;
    ColumnRing act_ring;
    int at_once;                          // panels of a unit of down
    int num_groups = 0, groups_back = 0;  // so far, and those that gave their columns back
    int num_items = 0, items_back = 0;    // the same of this stager's panels of down

    __device__ __forceinline__ Stager(Smem& s, const Args& a, int i, int l)
        : smem(s),
          args(a),
          stager(i),
          lane(l),
          x_ring(kXSlots),
          act(a, s.routing),
          act_ring(act.own_slots),
          at_once(panels_at_once(s.routing)) {}

    __device__ __forceinline__ void take_group_back() {
        wait_warp(smem.barriers.left[groups_back % kQueue], groups_back / kQueue & 1);
        // The finishers have read the shares, in whose place the consumers will put dot products.
        if (!kDotsApart) wait_warp(smem.barriers.activated[groups_back % kQueue], groups_back / kQueue & 1);
        x_ring.free_slots += smem.columns_of_group[stager][groups_back % kQueue];
        // Only now may another group take this one's place, and complete the phase after the one that was waited for.
        arrive_warp(smem.barriers.done[groups_back % kQueue]);
        ++groups_back;
    }
    __device__ __forceinline__ void gate_up(Group& group, uint64_t& staged) {
        if (holds_all_rows(args)) {
            if (lane == 0) smem.columns_of_group[stager][num_groups % kQueue] = 0;
            arrive_fetched(staged);
            return;
        }
        const Wanted wanted(smem.routing, group.entry);
        while (x_ring.free_slots < wanted.count) take_group_back();
        const int slot = x_ring.take(wanted.count);
        if (lane == 0) {
            if (stager == 0) group.slot = slot;
            smem.columns_of_group[stager][num_groups % kQueue] = wanted.count;
        }
#pragma unroll 1
        for (int c = stager; c < wanted.count; c += kStagers)
            fetch_column<kXBytes>(smem_address(smem.columns) + ColumnRing::place(slot + c, kXSlots) * kXStride,
                                  args.gmem_x + wanted.smem_pairs[c] / kSlots * args.x_stride, lane);
        arrive_fetched(staged);
    }
    // Waits for the activations of `entry`; gives how many entries from it on have theirs.
    __device__ __forceinline__ int wait_for_act(int entry) {
        const uint32_t* gmem_done = args.gmem_shared->panels_done + entry;
        if (lane == 0) wait_for_count(gmem_done, kGateUpPanels);
        __syncwarp();
        const bool exists = entry + lane < smem.routing.num_entries;
        const bool there = exists && ld_acquire_gpu_u32(gmem_done + lane) == kGateUpPanels;
        const uint32_t missing = ~__ballot_sync(kFull, there);
        __syncwarp();
        return missing == 0 ? kLanes : __ffs(int(missing)) - 1;
    }
    // Every kStagers-th item, in a part of the columns that is this stager's own.
    __device__ __forceinline__ void down(int number, int& items) {
        const Unit unit(smem.routing, number, at_once);
        const int skipped = (stager - items % kStagers + kStagers) % kStagers;
        int ready = unit.first_entry, panel = 0;
#pragma unroll 1
        for (Item at(unit, skipped); at.is_of(unit); at.skip(unit, kStagers), ++num_items) {
            const int entry = unit.first_entry + at.entry, item = (items + at.number(unit)) % kItems,
                      own = num_items % kOwnItems;
            const Wanted wanted(smem.routing, entry);
            while (act_ring.free_slots < wanted.count || num_items - items_back == kOwnItems) {
                const int back = items_back % kOwnItems;
                wait_warp(smem.barriers.item_done[back * kStagers + stager], items_back / kOwnItems & 1);
                act_ring.free_slots += smem.columns_of_item[back * kStagers + stager];
                ++items_back;
            }
            // The entries in between are other stagers', until this one meets them in the next panel.
            if (at.panel != panel) ready = unit.first_entry, panel = at.panel;
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
                    smem_address(smem.columns) + act.first_byte +
                        (stager * act.own_slots + ColumnRing::place(slot + c, act.own_slots)) * kActStride,
                    args.gmem_act + int64_t(wanted.smem_pairs[c]) * kIntermediate, lane);
            arrive_fetched(smem.barriers.item_staged[item]);
        }
        items += unit.num_items();
    }
    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        int items = 0;
        while (true) {
            uint64_t& staged = smem.barriers.staged[queue.stage];
            if (num_groups - groups_back == kQueue) take_group_back();
            wait_warp(smem.barriers.posted[queue.stage], queue.parity);
            Group& group = smem.group[queue.stage];
            const int entry = group.entry, unit = group.first;
            if (entry >= 0) {
                gate_up(group, staged);
            } else {
                // Rows of act may take the place of rows of x, and dot products that of shares: all are done with both.
                if (items == 0 && holds_all_rows(args)) wait_warp(smem.barriers.x_staged, 0);
                if (items == 0 && !(kDotsApart && act.is_apart()))
                    while (groups_back < num_groups) take_group_back();
                if (lane == 0) smem.columns_of_group[stager][num_groups % kQueue] = 0;
                arrive_fetched(staged);
            }
            ++num_groups;
            if (entry == kEnd) break;
            if (entry == kDown) down(unit, items);
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
