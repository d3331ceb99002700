// tile_consumer.cuh   Multiplies: shares of gate_up panels, whole panels of down.
#pragma once
#include "sync_ptx.cuh"
#include "tile_outputs.cuh"
#include "tile_stager.cuh"

constexpr int kConsumerBarrier = 1;
constexpr int kConsumerThreads = kConsumers * kLanes;

struct Consumer {
    Smem& smem;
    const Args& args;
    int warp, lane;
    Turn<kStages> ring;
    Turn<kShares> shares, other_shares;  // of the finisher of the next own panel, and of the one after that
    int panels = 0;                      // of gate_up so far
    Turn<kStages> down_ring;
    int items = 0;    // of down so far
    int at_once = 1;  // panels of a unit of down

    __device__ __forceinline__ Consumer(Smem& s, const Args& a, int w, int l) : smem(s), args(a), warp(w), lane(l) {}

    // Where a lane's activations start; `place_of` gives the place of a column, among those of `stride` bytes.
    template <int kTiles, class PlaceOf>
    __device__ __forceinline__ Columns<kTiles> columns(int count, int first_byte, int stride,
                                                       const PlaceOf& place_of) const {
        Columns<kTiles> found;
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            found.smem[t] = smem_address(smem.columns) + first_byte +
                            place_of(min(t * kColumns + lane / 4, count - 1)) * stride + lane % 4 * 16;
        return found;
    }

    __device__ __forceinline__ uint32_t unit_at(int stage) const {
        return smem_address(smem.ring[warp / kSplit][stage][warp % kSplit]);
    }

    // A unit that is behind another is loaded from before the one at hand is given back: not with a single stage.
    static constexpr bool kReadsAhead = kStages > 1;

    template <int kTiles>
    __device__ __forceinline__ void gate_up(const Group& group, const Wanted& wanted) {
        const int team = warp / kSplit, share = warp % kSplit;
        const Columns<kTiles> staged = columns<kTiles>(wanted.count, 0, kXStride, [&](int column) {
            if (holds_all_rows(args)) return wanted.smem_pairs[column] / kSlots;
            return ColumnRing::place(group.slot + column, kXSlots);
        });
        uint64_t (&full)[kStages] = smem.barriers.gate_up_full[team],
                 (&empty)[kStages] = smem.barriers.gate_up_empty[team];
        // Own panels of the group: all, or every kTeams-th.
        const int skipped = kTeams == 1 ? 0 : (team - panels % kTeams + kTeams) % kTeams;
        const int own = (group.count - skipped + kTeams - 1) / kTeams, own_units = own * kPasses;
        const auto scales_of = [&](int unit) {
            const int panel = group.first + skipped + unit / kPasses * kTeams;
            return gate_up_scales(args, wanted.expert, panel, (unit % kPasses * kSplit + share) * kGateUpRun);
        };
        int finisher = (panels + skipped) % kFinishers;
        panels += group.count;
        if (own_units == 0) return;

        BlockScales<kGateUpRun> next_scales = scales_of(0);
        using Records = Loaded<kGroupSize<kGateUpRun, kTiles>, kTiles>;
        Records loaded;
        const auto load_first = [&](Records& to, const Turn<kStages>& at, int record) {
            wait(full[at.stage], at.parity);
            to.load(unit_at(at.stage), staged, lane, 0, record);
        };
        load_first(loaded, ring, next_scales.record);
        Sums<kTiles> sums;
#pragma unroll 1
        for (int unit = 0, pass = 0; unit < own_units; ++unit) {
            const BlockScales<kGateUpRun> scales = next_scales;
            const bool more = unit + 1 < own_units;
            if (more) next_scales = scales_of(unit + 1);
            const int stage = ring.stage;
            ring.next();
            add_run<kGateUpRun, kTiles>(sums, loaded, unit_at(stage), staged, lane, scales, [&](Records& ahead) {
                if (kReadsAhead && more) load_first(ahead, ring, next_scales.record);
            });
            arrive_warp(empty[stage]);
            if (!kReadsAhead && more) load_first(loaded, ring, next_scales.record);
            if (++pass < kPasses) continue;
            pass = 0;
            hand_over(sums, finisher, share);
            sums = Sums<kTiles>();
            if (kTeams == 1) finisher = (finisher + 1) % kFinishers;
        }
    }

    // The share of a panel's sums, tile by tile.
    template <int kTiles>
    __device__ __forceinline__ void hand_over(const Sums<kTiles>& sums, int finisher, int share) {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            wait(smem.barriers.shares_empty[finisher][shares.stage], shares.parity ^ 1);
            float (&part)[16][kColumns] = smem.partial.shares[finisher][shares.stage][share];
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

    template <int kTiles>
    __device__ __forceinline__ void down_panel(int stager, int slot, const Wanted& wanted, int panel,
                                               int panel_of_unit) {
        const int g = lane / 4, q = lane % 4;
        const OutputRow low(args, wanted.expert, panel * 16 + g), high(args, wanted.expert, panel * 16 + g + 8);
        const ActPlace act(args, smem.routing);
        const Columns<kTiles> staged = columns<kTiles>(wanted.count, act.first_byte, kActStride, [&](int column) {
            return stager * act.own_slots + ColumnRing::place(slot + column, act.own_slots);
        });
        BlockScales<kDownRun> next_scales = down_scales(args, wanted.expert, panel, 0);
        using Records = Loaded<kGroupSize<kDownRun, kTiles>, kTiles>;
        Records loaded;
        const auto load_first = [&](Records& to, const Turn<kStages>& at, int record) {
            wait(smem.barriers.down_full[warp][at.stage], at.parity);
            to.load(unit_at(at.stage), staged, lane, 0, record);
        };
        load_first(loaded, down_ring, 0);
        Totals<kTiles> totals;
        const int units = opaque(kDownUnits);
#pragma unroll 1
        for (int unit = 0; unit < units; ++unit) {
            Sums<kTiles> sums;
            const BlockScales<kDownRun> scales = next_scales;
            const bool more = unit + 1 < units;
            if (more) next_scales = down_scales(args, wanted.expert, panel, (unit + 1) * kDownRun);
            const int stage = down_ring.stage;
            down_ring.next();
            add_run<kDownRun, kTiles>(sums, loaded, unit_at(stage), staged, lane, scales, [&](Records& ahead) {
                if (kReadsAhead && more) load_first(ahead, down_ring, next_scales.record);
            });
            arrive_warp(smem.barriers.down_empty[warp][stage]);
            if (!kReadsAhead && more) load_first(loaded, down_ring, next_scales.record);
            totals.add(sums);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = t * kColumns + q * 2 + c;
                if (column >= wanted.count) continue;
                const int pair = wanted.smem_pairs[column];
                float* dots = kParts == 1 ? smem.partial.dots[panel_of_unit * kMaxPairs + pair]
                                          : args.gmem_dots + int64_t(pair) * kHidden + panel * 16;
                dots[g] = fmaf(totals.d[t][c], low.scale, low.bias);
                dots[g + 8] = fmaf(totals.d[t][2 + c], high.scale, high.bias);
            }
        }
    }

    __device__ __forceinline__ void down(int first) {
        const Unit unit(smem.routing, first, at_once);
        const int skipped = (warp - items % kConsumers + kConsumers) % kConsumers;
#pragma unroll 1
        for (Item at(unit, skipped); at.is_of(unit); at.skip(unit, kConsumers)) {
            const int number = items + at.number(unit), item = number % kItems;
            const Wanted wanted(smem.routing, unit.first_entry + at.entry);
            wait(smem.barriers.item_staged[item], number / kItems & 1);
            const int slot = smem.item_slot[item], stager = number % kStagers;
            if (kMaxTiles == 1 || wanted.count <= kColumns)
                down_panel<1>(stager, slot, wanted, unit.first_panel + at.panel, at.panel);
            else
                down_panel<kMaxTiles>(stager, slot, wanted, unit.first_panel + at.panel, at.panel);
            arrive_warp(smem.barriers.item_done[item]);
        }
        items += unit.num_items();
        // With parts a finisher adds the panel up, and its consumers go on with the next unit.
        if constexpr (kParts == 1) {
            named_barrier_sync(kConsumerBarrier, kConsumerThreads);
            sum_up<16 / kQuad>(smem, args, unit.first_panel, unit.num_panels, 0, threadIdx.x, kConsumerThreads);
            named_barrier_sync(kConsumerBarrier, kConsumerThreads);
        }
    }

    __device__ __forceinline__ void run() {
        // Seen by all consumers behind the barrier that ends a panel of down, and by finishers behind `left`.
        load_pair_weights<kConsumerThreads>(smem.weights, args);
        at_once = panels_at_once(smem.routing);
        Turn<kQueue> queue;
        while (true) {
            wait(smem.barriers.posted[queue.stage], queue.parity);
            if (smem.group[queue.stage].entry == kEnd) return;
            if (!kDotsApart || !holds_all_rows(args)) wait(smem.barriers.staged[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry >= 0) {
                if (holds_all_rows(args)) wait(smem.barriers.x_staged, 0);
                const Wanted wanted(smem.routing, group.entry);
                if (kMaxTiles == 1 || wanted.count <= kColumns)
                    gate_up<1>(group, wanted);
                else
                    gate_up<kMaxTiles>(group, wanted);
            } else {
                down(group.first);
            }
            arrive_warp(smem.barriers.left[queue.stage]);
            queue.next();
        }
    }
};
