// tile_wgmma_smem.cuh   What a CTA of the warpgroup tile kernel holds in shared memory, and what its CTAs share.
//
// Compile-time parameters beside those of tile_routing.cuh (macros set by kernels/tile_wgmma.py):
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE
//   WARPRING_STAGES         units of weights in flight a warpgroup
//   WARPRING_X_IMAGES       groups of gate_up whose columns of x are staged; 0: all tokens' rows stay, 8 at most
//   WARPRING_ACT_IMAGES     images of act that are staged
//   WARPRING_ACT_APART      1: behind those of x, 0: in their place
//   WARPRING_SMEM_BYTES     what the launch asks for
//   WARPRING_SHARED_BYTES   what is reserved for `Shared`
#pragma once
#include "tile_waits.cuh"
#include "two_terms.cuh"

constexpr int kHidden = WARPRING_HIDDEN;
constexpr int kIntermediate = WARPRING_INTERMEDIATE;
static_assert(kHidden % 64 == 0 && kIntermediate % 64 == 0, "rows are whole blocks");

constexpr int kGroups = 4;       // warpgroups that multiply
constexpr int kGroupWarps = 4;   // a panel of 16 rows each
constexpr int kConsumers = kGroups * kGroupWarps;
constexpr int kConsumerThreads = kConsumers * kLanes;
constexpr int kFinishers = 2;    // take the columns of a slab of gate_up in turns
constexpr int kProducer = kConsumers, kFirstFinisher = kProducer + 1, kFirstStager = kFirstFinisher + kFinishers;
constexpr int kStagers = kWarps - kFirstStager;
static_assert(kStagers == 5 && kWarps % 4 == 0, "kernels/tile_wgmma.py has as many warps");
constexpr int kConsumerRegisters = 96, kOtherRegisters = 48;

// A slab is four panels, 64 rows: 32 neurons' gate and up rows, or 64 outputs. It streams in blocks of 64 columns.
constexpr int kBlockCols = 64, kSlabNeurons = 32, kSlabOutputs = 64;
constexpr int kPanelBytes = 544, kBlockBytes = 4 * kPanelBytes;
constexpr int kUnitBlocks = 4, kUnitBytes = kUnitBlocks * kBlockBytes;
constexpr int kStages = WARPRING_STAGES;
constexpr int kGateUpSlabs = kIntermediate / kSlabNeurons, kGateUpBlocks = kHidden / kBlockCols;
constexpr int kDownSlabs = kHidden / kSlabOutputs, kDownBlocks = kIntermediate / kBlockCols;
// Of a slab of gate_up each warpgroup multiplies a quarter of the blocks.
__device__ __forceinline__ constexpr int first_block(int group) { return kGateUpBlocks * group / kGroups; }

// Columns as operands: [32 columns of the matrix][term][16 of them][8 pairs][16 bytes]. Bytes 4 q + i of the two pieces
// of 16 are columns 8 q + i and 8 q + 4 + i, as lanes hold the codes.
constexpr int kColumns = 8;
constexpr int kStepBytes = 512, kTermBytes = 256, kPieceBytes = 128;
constexpr int kXSteps = kHidden / 32, kActSteps = kIntermediate / 32;
constexpr int kXImageBytes = kXSteps * kStepBytes, kActImageBytes = kActSteps * kStepBytes;
constexpr int kActPieces = kActSteps * 4;                    // 16 bytes each, of a pair
constexpr int kActRowBytes = kActPieces * 16;                // of a pair in global memory
constexpr int kActScales = (kActSteps + 3) / 4 * 4;          // floats of a pair, with padding
constexpr int kActScaleStride = kActScales + 4;              // and of a column: neighbours meet other banks
constexpr bool kHoldsAllRows = WARPRING_X_IMAGES == 0;
constexpr int kXImages = kHoldsAllRows ? 1 : WARPRING_X_IMAGES;
constexpr int kActImages = WARPRING_ACT_IMAGES;
constexpr bool kActApart = WARPRING_ACT_APART;
constexpr int kXBytes = kXImages * kXImageBytes, kActBytes = kActImages * kActImageBytes;
constexpr int kActAt = kActApart ? kXBytes : 0;
constexpr int kImageBytes = kActApart ? kXBytes + kActBytes : kXBytes > kActBytes ? kXBytes : kActBytes;
static_assert(kMaxColumns <= kColumns, "an entry is one product wide");

constexpr int kQueue = 8;        // groups of slabs on their way through the CTA
constexpr int kShares = 2;       // slabs that wait for the finishers
constexpr int kShareStride = 68; // floats of a column of 64 rows: neighbours meet other banks

// Slabs [first, first + count) of an entry.
struct Group {
    int32_t entry, first, count;
};
constexpr int32_t kEnd = -1;

struct Barriers {
    uint64_t full[kGroups][kStages], empty[kGroups][kStages];
    uint64_t posted[kQueue], left[kQueue];
    uint64_t x_fetched[kXImages], x_full[kXImages], x_empty[kXImages];
    uint64_t shares_full[kShares], shares_empty[kShares];
    uint64_t act_full[kActImages], act_empty[kActImages];
    uint64_t gate_up_over;
};

struct Smem {
    alignas(128) uint8_t ring[kGroups][kStages][kUnitBytes];
    alignas(128) uint8_t images[kImageBytes];
    alignas(16) float shares[kShares][kGroups][kColumns][kShareStride];
    alignas(16) float act_scale[kActImages][kColumns][kActScaleStride];
    float x_scale[kXImages][kColumns];
    uint32_t x_amax[3][kColumns];
    float weights[kMaxPairs];
    Barriers barriers;
    Group group[kQueue];
    int32_t completes;  // this CTA's part of a slab of down was the last
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/tile_wgmma.py computes the same size");

// What the CTAs of a launch share. All zero before it, and again behind it.
struct Shared {
    uint32_t ticket;                    // next groups of gate_up
    uint32_t finished;                  // stagers that look at `slabs_done` no longer
    uint32_t slabs_done[kMaxEntries];   // of gate_up, by entry, once by each finisher
    uint32_t items_done[kDownSlabs];    // of down: entries whose dot products are there
};
static_assert(sizeof(Shared) <= WARPRING_SHARED_BYTES, "kernels/tile_wgmma.py reserves the same size");

struct Args {
    const uint16_t* gmem_x;
    int64_t x_stride;
    const float* gmem_topk_weights;
    int64_t weights_stride;
    const float* gmem_shared_weights;
    int64_t shared_weights_stride;
    int32_t num_tokens;
    const uint8_t *gmem_w13, *gmem_w2;
    const float *gmem_w13_matrix_scale, *gmem_w13_bias, *gmem_w2_matrix_scale, *gmem_w2_bias;
    float alpha, limit, up_offset;
    uint8_t* gmem_act;      // [pair][32 neurons][term][32 bytes]
    float* gmem_act_scale;  // [pair][kActScales]
    float* gmem_dots;       // [pair][hidden]
    uint16_t* gmem_out;
    int64_t out_stride;
    Shared* gmem_shared;
};

__device__ __forceinline__ void init_barriers(Barriers& smem) {
    constexpr int kCount = sizeof(Barriers) / 8;
    uint64_t* barriers = reinterpret_cast<uint64_t*>(&smem);
    const auto at = [&](const uint64_t* first) { return int(first - barriers); };
#pragma unroll 1
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        int arrivals = 1;
        if (i >= at(&smem.empty[0][0])) arrivals = kGroupWarps;
        if (i >= at(smem.posted)) arrivals = 1;
        if (i >= at(smem.left)) arrivals = kConsumers + kFinishers + kStagers;
        if (i >= at(smem.x_fetched)) arrivals = kHoldsAllRows ? (kWarps - 1) * kLanes : kStagers * kLanes;
        if (i >= at(smem.x_full)) arrivals = kStagers;
        if (i >= at(smem.x_empty)) arrivals = kConsumers + kFinishers;
        if (i >= at(smem.shares_full)) arrivals = kConsumers;
        if (i >= at(smem.shares_empty)) arrivals = kFinishers;
        if (i >= at(smem.act_full)) arrivals = kStagers * kLanes;
        if (i >= at(smem.act_empty)) arrivals = kConsumers;
        mbarrier_init(smem_address(barriers + i), arrivals);
    }
    fence_mbarrier_init();
}

// The CTA's part of down: items [first, first + count) of all, an entry of a slab each, slab by slab. The same number for every
// CTA, but for one.
struct Share {
    int first, count;
    __device__ __forceinline__ explicit Share(const Routing& routing) {
        const int items = kDownSlabs * routing.num_entries, cta = blockIdx.x, ctas = gridDim.x;
        first = int(int64_t(items) * cta / ctas);
        count = int(int64_t(items) * (cta + 1) / ctas) - first;
    }
};

// Where someone stands in it. Consecutive entries of a slab share an image, as many as fit its columns.
struct Place {
    int entry, slab, image = 0, first_pair;
    __device__ __forceinline__ Place(const Routing& routing, const Share& share)
        : entry(share.first % max(routing.num_entries, 1)), slab(share.first / max(routing.num_entries, 1)) {
        first_pair = routing.first[entry];
    }
    // The next item. Of the last one too, whose successor does not exist.
    __device__ __forceinline__ void next(const Routing& routing) {
        const bool wraps = ++entry == routing.num_entries;
        if (wraps) entry = 0, ++slab;
        if (wraps || routing.first[entry + 1] - first_pair > kColumns) {
            ++image;
            first_pair = routing.first[entry];
        }
    }
};
