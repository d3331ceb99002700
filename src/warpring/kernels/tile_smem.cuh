// tile_smem.cuh   What a CTA of the tile kernel holds in shared memory, and what its CTAs share in global memory.
//
// Compile-time parameters beside those of tile_layer.cuh (macros set by kernels/tile.py):
//   WARPRING_STAGES         units in flight a consumer
//   WARPRING_COLUMN_BYTES   bytes of staged activations
//   WARPRING_PARTS          parts that the experts of a panel of down are dealt out in; 1: no CTA shares a panel
//   WARPRING_PANELS         panels of a unit of down, at most; 1 with parts
//   WARPRING_SMEM_BYTES     what the launch asks for
#pragma once
#include "tile_layer.cuh"
#include "tile_waits.cuh"

constexpr int kConsumers = kSplit * kTeams;
constexpr int kProducers = 2;  // serve the consumers of down
constexpr int kStagers = 3;    // take the panels of down in turns
constexpr int kFinishers = 2;  // take the panels of gate_up in turns
constexpr int kFirstStager = kConsumers + kProducers, kFirstFinisher = kFirstStager + kStagers;
constexpr int kFlagRaiser = kFirstFinisher + kFinishers;
static_assert(kTeams <= kFinishers, "a team's panels are one finisher's, or those of all");
static_assert(kWarps == kFlagRaiser + 1, "kernels/tile.py has as many");

// The ring: stages of a team, of a unit for each of its warps; in down the same places, so many for each warp alone.
constexpr int kStages = WARPRING_STAGES;
constexpr int kParts = WARPRING_PARTS;
constexpr int kMostPanels = WARPRING_PANELS;  // of a unit of down
static_assert(kMostPanels == 1 || kParts == 1, "a panel in parts is a unit of its own");

// Staged activations: a column is a row of x, or one of act, padded so that neighbours lie 64 bytes apart modulo 128.
__device__ __forceinline__ constexpr int padded(int bytes) { return bytes % 128 == 64 ? bytes : bytes + 64; }
constexpr int kXBytes = kHidden * 2, kXStride = padded(kXBytes);
constexpr int kActBytes = kIntermediate * 2, kActStride = padded(kActBytes);
constexpr int kXSlots = WARPRING_COLUMN_BYTES / kXStride, kActSlots = WARPRING_COLUMN_BYTES / kActStride;
static_assert(kMaxColumns <= 2 * kColumns && kMaxColumns <= kXSlots && kMaxColumns <= kActSlots / kStagers,
              "an entry's columns are staged");
constexpr int kMaxTiles = kMaxColumns > kColumns ? 2 : 1;

constexpr int kQueue = 8;   // groups of panels on their way through the CTA
constexpr int kShares = 2;  // tiles that wait for a finisher
// Panels of down on their way: the same consumer and the same stager come to the same place each time, or they would
// take the phase of one use of a barrier for that of another.
constexpr int kItems = kConsumers * kStagers;
constexpr int kOwnItems = kItems / kStagers;

// A group of gate_up: panels of one entry. A unit of down: entry kDown, the number of the unit in `first`.
struct Group {
    int32_t entry;
    int32_t slot;  // of its first column
    int32_t first;
    int32_t count;  // panels
};
constexpr int32_t kDown = -1, kEnd = -2;

struct Barriers {
    // More than one arrival a phase:
    uint64_t shares_full[kFinishers][kShares], gate_up_empty[kTeams][kStages];
    uint64_t left[kQueue];  // by the consumers
    uint64_t done[kQueue];  // by the others
    uint64_t activated[kQueue];
    uint64_t x_staged;
    uint64_t staged[kQueue];
    uint64_t item_staged[kItems];
    // One:
    uint64_t gate_up_full[kTeams][kStages], down_full[kConsumers][kStages], down_empty[kConsumers][kStages];
    uint64_t posted[kQueue];
    uint64_t item_done[kItems];
    uint64_t shares_empty[kFinishers][kShares];
};

// By the warps but the first and the producer's, which have more urgent things to do. A lane's barriers are made one
// after another, and so are those of the lanes of a warp: a few each.
__device__ __forceinline__ void init_barriers(Barriers& smem, int warp, int lane) {
    constexpr int kCount = sizeof(Barriers) / 8, kMakers = kWarps - 2;
    if (warp == 0 || warp == kConsumers) return;
    const int maker = warp - 1 - (warp > kConsumers);
    uint64_t* barriers = reinterpret_cast<uint64_t*>(&smem);
#pragma unroll 1
    for (int i = lane * kMakers + maker; i < kCount; i += kLanes * kMakers) {
        constexpr int kLeft = kFinishers * kShares + kTeams * kStages, kDone = kLeft + kQueue,
                      kActivated = kDone + kQueue, kX = kActivated + kQueue, kStaged = kX + 1,
                      kItemStaged = kStaged + kQueue, kOthers = kItemStaged + kItems;
        const int arrivals = i < kLeft         ? kSplit
                             : i < kDone       ? kConsumers
                             : i < kActivated  ? kWarps - kConsumers
                             : i < kX          ? kFinishers
                             : i < kStaged     ? kThreads
                             : i < kItemStaged ? 2 * kLanes * kStagers
                             : i < kOthers     ? 2 * kLanes
                                               : 1;
        mbarrier_init(smem_address(barriers + i), arrivals);
    }
    fence_mbarrier_init();
}

// Shares of gate_up, [..][slot][warp][row][column], and dot products of down, [pair][row]: beside each other where
// these are few, so that down begins while shares are still being added up.
using Shares = float[kFinishers][kShares][kSplit][16][kColumns];
using Dots = float[kParts == 1 ? kMostPanels * kMaxPairs : 1][16];
constexpr bool kDotsApart = sizeof(Dots) <= 8 * 1024;
template <bool kApart>
struct SharesAndDots {
    alignas(16) Shares shares;
    alignas(16) Dots dots;
};
template <>
struct SharesAndDots<false> {
    union {
        alignas(16) Shares shares;
        alignas(16) Dots dots;
    };
};

struct Smem {
    alignas(128) uint8_t ring[kTeams][kStages][kSplit][kUnitBytes];
    alignas(16) uint8_t columns[WARPRING_COLUMN_BYTES];
    SharesAndDots<kDotsApart> partial;
    float weights[kMaxPairs];
    Barriers barriers;
    Group group[kQueue];
    int32_t columns_of_group[kStagers][kQueue], item_slot[kItems], columns_of_item[kItems];
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/tile.py computes the same size");

// What the CTAs of a launch share. All zero before it, and again behind it.
struct Shared {
    uint32_t ticket;                               // next piece of work
    uint32_t finished;                             // CTAs that look at `done` no longer
    uint32_t panels_done[kMaxEntries];             // of gate_up, by entry
    uint32_t parts_done[kDownPanels][kFinishers];  // with kParts > 1
};
static_assert(sizeof(Shared) <= WARPRING_SHARED_BYTES, "kernels/tile.py reserves the same size");

struct Args {
    const uint16_t* gmem_x;
    int64_t x_stride;
    const float* gmem_topk_weights;
    int64_t weights_stride;
    const float* gmem_shared_weights;  // [token], of every shared expert, or null: 1
    int64_t shared_weights_stride;
    int32_t num_tokens;
    const uint8_t *gmem_w13, *gmem_w2;
    const float *gmem_w13_matrix_scale, *gmem_w13_row_scale, *gmem_w13_block_scale, *gmem_w13_bias;
    const float *gmem_w2_matrix_scale, *gmem_w2_row_scale, *gmem_w2_block_scale, *gmem_w2_bias;
    float alpha, limit, up_offset;
    uint16_t* gmem_act;  // [pair][intermediate]
    float* gmem_dots;    // [pair][hidden], with kParts > 1
    uint16_t* gmem_out;
    int64_t out_stride;
    Shared* gmem_shared;
};

// Panels that a unit of down has: where entries are few several, so that there is work for all consumers, but no more
// than leave every CTA a unit.
__device__ __forceinline__ int panels_at_once(const Routing& routing) {
    if (kMostPanels == 1) return 1;
    return clamp(min(kConsumers / max(1, routing.num_entries), ceil_div(kDownPanels, int(gridDim.x))), 1, kMostPanels);
}

// A unit of down: all entries, or a part of them, for each of its panels. An item is one entry of one panel; with
// several, items go through the entries panel by panel.
struct Unit {
    int first_entry, num_entries, first_panel, num_panels;
    __device__ __forceinline__ Unit(const Routing& routing, int unit, int at_once) {
        const int part = unit / kDownPanels;
        first_entry = routing.num_entries * part / kParts;
        num_entries = routing.num_entries * (part + 1) / kParts - first_entry;
        first_panel = unit % kDownPanels * at_once;
        num_panels = min(at_once, kDownPanels - first_panel);
    }
    __device__ __forceinline__ int num_items() const { return num_entries * num_panels; }
};
struct Item {
    int entry, panel = 0;  // of those of the unit
    __device__ __forceinline__ Item(const Unit& unit, int number) : entry(number) { wrap(unit); }
    __device__ __forceinline__ void skip(const Unit& unit, int items) {
        entry += items;
        wrap(unit);
    }
    __device__ __forceinline__ void wrap(const Unit& unit) {
        if (kMostPanels == 1) return;
#pragma unroll 1
        for (; entry >= unit.num_entries && panel < unit.num_panels; ++panel) entry -= unit.num_entries;
    }
    __device__ __forceinline__ bool is_of(const Unit& unit) const {
        return kMostPanels == 1 ? entry < unit.num_entries : panel < unit.num_panels;
    }
    __device__ __forceinline__ int number(const Unit& unit) const { return panel * unit.num_entries + entry; }
};
