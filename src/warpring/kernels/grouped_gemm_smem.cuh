// grouped_gemm_smem.cuh   Tasks of the grouped GEMMs, their sizes, and what a CTA holds in shared memory.
//
// A task is 8 panels of one expert (128 rows of weights: 64 neurons' gate and up rows, or 128 outputs) times one block of
// its pairs. Tasks of the same panels follow each other, so that weights come from HBM once, then from L2.
//
// Compile-time parameters beside those of grouped_plan.cuh (macros set by kernels/grouped_gemm.py):
//   WARPRING_FORMAT           a policy of tile_formats.cuh
//   WARPRING_COLS             columns of the weights
//   WARPRING_ROWS             rows of the weights, of each half
//   WARPRING_HALVES           2: gate and up, a panel's rows g and g + 8 of the same neuron; 1: down
//   WARPRING_STAGE_RECORDS    records of a panel in a stage of weights, a power of 2
//   WARPRING_WEIGHT_STAGES    stages of weights
//   WARPRING_TOKEN_STAGES     chunks of an image
//   WARPRING_SMEM_BYTES       what the launch asks for
#pragma once
#include "grouped_plan.cuh"
#include "grouped_wgmma_ptx.cuh"
#include "sync_ptx.cuh"
#include "tile_formats.cuh"

using Format = WARPRING_FORMAT;
constexpr int kLanes = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kConsumerWarps = 8, kWarpgroupThreads = 128, kConsumers = kConsumerWarps * kLanes;
constexpr int kThreads = kConsumers + kWarpgroupThreads;  // one warpgroup of producers
constexpr int kWeightWarps = 3;                           // of the producers; the last one fetches tokens
// Registers a thread: the launch gives all of them 168, the producers' spare ones go to the consumers.
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

constexpr int kCols = WARPRING_COLS, kRows = WARPRING_ROWS, kHalves = WARPRING_HALVES;
constexpr bool kFirst = kHalves == 2;
static_assert(kCols % kRecordCols == 0 && kRows % 32 == 0, "whole records, whole panels");
constexpr int kRecords = kCols / kRecordCols;
constexpr int kTaskPanels = kConsumerWarps, kPanels = kRows * kHalves / 16;  // of an expert
constexpr int kTasks = ceil_div(kPanels, kTaskPanels);                       // of an expert's block
constexpr int kTaskRows = kTaskPanels * 16 / kHalves;                        // neurons or outputs

// Columns go in chunks of two records, as tokens do; the last one may be half.
constexpr int kChunks = ceil_div(kRecords, 2);
constexpr int kStageRecords = WARPRING_STAGE_RECORDS, kStageChunks = kStageRecords / 2;
constexpr int kStagesOfTask = ceil_div(kRecords, kStageRecords);
static_assert(kStageRecords % 2 == 0, "a stage of weights is whole chunks");

// Panels whose records lie together are copied together.
constexpr int kTogether = kPanelsTogether<Format>;
static_assert(kTaskPanels % kTogether == 0 && kPanels % kTogether == 0, "tasks are whole slabs");
static_assert(kTogether == 1 || kRecords % 2 == 0, "blocks of slabs are two records");

constexpr int kWeightStages = WARPRING_WEIGHT_STAGES, kTokenStages = WARPRING_TOKEN_STAGES;
constexpr uint32_t kPanelStageBytes = kStageRecords * Format::kRecordBytes;
constexpr uint32_t kWeightStageBytes = kTaskPanels * kPanelStageBytes;
constexpr uint32_t kTokenStageBytes = kBlockTokens * kChunkRowBytes;
static_assert(kTokenStageBytes % 1024 == 0, "images are swizzled in steps of 1024 bytes");

// Byte offsets: chunks of images, a chunk of the image that the first GEMM makes, weights, barriers (full, then empty).
constexpr uint32_t kTokensAt = 0, kTurnAt = kTokenStages * kTokenStageBytes;
constexpr uint32_t kWeightsAt = kTurnAt + (kFirst ? kTokenStageBytes : 0);
constexpr uint32_t kTokenBarriersAt = kWeightsAt + kWeightStages * kWeightStageBytes;
constexpr uint32_t kWeightBarriersAt = kTokenBarriersAt + kTokenStages * 16;
static_assert(kWeightBarriersAt + kWeightStages * 16 <= WARPRING_SMEM_BYTES, "grouped_gemm.py asks for as much");

__device__ __forceinline__ uint8_t* smem_start() {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    return smem_bytes;
}

// Where a role stands in a ring. `parity` is that of the phase in which the stage is filled.
template <int stages, uint32_t bytes, uint32_t first, uint32_t barriers>
struct Ring {
    uint32_t base;  // of the CTA's shared memory
    uint32_t index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit Ring(uint32_t smem) : base(smem) {}
    __device__ __forceinline__ uint32_t stage() const { return base + first + index * bytes; }
    __device__ __forceinline__ uint32_t full() const { return base + barriers + index * 8; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8 * stages; }
    // One thread, before anyone uses it.
    __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(full() + 8 * s, full_arrivals);
            mbarrier_init(empty() + 8 * s, empty_arrivals);
        }
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), parity ^ 1); }
    __device__ __forceinline__ void advance() {
        index = index + 1 == stages ? 0 : index + 1;
        parity ^= index == 0;
    }
};
using TokenRing = Ring<kTokenStages, kTokenStageBytes, kTokensAt, kTokenBarriersAt>;
using WeightRing = Ring<kWeightStages, kWeightStageBytes, kWeightsAt, kWeightBarriersAt>;

struct Args {
    const uint8_t* gmem_records;
    const float* gmem_matrix_scale;
    const float* gmem_row_scale;    // or null
    const float* gmem_block_scale;  // or null
    const float* gmem_bias;         // or null
    const int32_t* gmem_plan;
    const uint8_t* gmem_image;  // of the activations
    void* gmem_out;             // the image of act, or FP32 dot products [row][kRows]
    float alpha, limit, up_offset;
};

struct Task {
    int32_t expert, tile;  // panels [8 * tile, 8 * tile + 8)
    int32_t first, count;  // rows of the block

    __device__ __forceinline__ int num_panels() const { return min(kTaskPanels, kPanels - tile * kTaskPanels); }
};

// The tasks of this CTA. The plan is read a task ahead.
struct Tasks {
    const int32_t* gmem_plan;
    int index, end;
    uint4 ahead;

    __device__ __forceinline__ explicit Tasks(const int32_t* plan)
        : gmem_plan(plan), index(blockIdx.x), end(int(ld_routing(plan)) * kTasks) {
        fetch();
    }
    __device__ __forceinline__ void fetch() {
        if (index < end) ahead = ld_activations(gmem_plan + 4 * (1 + index / kTasks));
    }
    __device__ __forceinline__ bool next(Task& task) {
        if (index >= end) return false;
        const ExpertPairs of_expert{int(ahead.x), int(ahead.y), int(ahead.z), int(ahead.w)};
        const int in_expert = index - of_expert.first_block * kTasks, blocks = of_expert.num_blocks();
        const int tile = in_expert / blocks, before = (in_expert - tile * blocks) * of_expert.block_rows();
        task = {of_expert.expert, tile, of_expert.first + before,
                min(of_expert.block_rows(), of_expert.count - before)};
        index += gridDim.x;
        fetch();
        return true;
    }
};
