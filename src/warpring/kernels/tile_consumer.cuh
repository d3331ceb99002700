// tile_consumer.cuh   Multiplies: shares of gate_up panels, whole panels of down, and the sum over slots.
#pragma once
#include "sync_ptx.cuh"
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
