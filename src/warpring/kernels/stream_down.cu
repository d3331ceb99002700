// stream_down.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b[e,h]),  e = topk_idx[t,k]
//
// Compiled for sm_90a, not yet run on a GPU.
//
// Grid     (hidden / 16) CTAs; a CTA owns 16 output rows of every token. Its warps deal out the experts that the batch wants
//          among them, whole rows each.
// Reads    every wanted weight byte once for each 32 pairs of its expert, through a ring of bulk copies a warp; act through
//          the same ring, each lane's own pieces by asynchronous copies, where an expert's columns fit, else through L1
// Bound    HBM: distinct experts * hidden * intermediate * bytes_per_weight
// Sync     before the wait it reads topk_idx and topk_weights and requests the first weights: complete by then, since gate_up
//          let this kernel start only after its own wait; then waits for act. One barrier, between the dot products of
//          all (token, slot) pairs in shared memory and the threads that add them up in the order of the slots.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, num_tokens * topk <= WARPRING_PAIRS; ids outside [0, num_experts) are
//          skipped
//
// Compile-time parameter of its own: WARPRING_RUN, records of a stage. It changes no bit either.
#include "stream_common.cuh"

constexpr int kPanels = kHidden / 16;
constexpr int kRecords = kIntermediate / kRecordCols;
constexpr int kRun = WARPRING_RUN;
constexpr int kRuns = kRecords / kRun;
constexpr int kRunBytes = kRun * Format::kRecordBytes;
constexpr int64_t kPanelBytes = int64_t(kRecords) * Format::kRecordBytes;
static_assert(kRun * kRuns == kRecords, "kernels/stream.py splits a row evenly");
static_assert(kStaged <= kColumns, "one tile is staged");

struct Smem {
    alignas(128) uint8_t ring[kWarps][kRing][kRunBytes];
    alignas(16) uint8_t act[kWarps][kRing][kRun * kStaged * 64 + (kStaged == 0 ? 16 : 0)];  // [record][column][32 values]
    alignas(16) float dots[kMostPairs][16];                                                 // [pair][row]
    float weights[kMostPairs];
    uint64_t full[kWarps][kRing];
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/stream.py computes the same size");

struct Args {
    const uint16_t* gmem_act;
    const float* gmem_matrix_scale;
    const float* gmem_row_scale;
    const float* gmem_block_scale;
    const float* gmem_bias;
};

// Where a warp's next run comes from: this CTA's panel of every kWarps-th expert. All lanes keep it alike, but for the
// activations that each fetches for itself.
struct Source {
    const uint8_t* gmem_panel;
    const uint16_t* gmem_act;
    const Routing* smem_routing;
    int rank, num_ranks, run = 0;
    const uint8_t* gmem_next;
    const uint16_t* gmem_column;
    bool fetches;

    __device__ __forceinline__ Source(const uint8_t* panel, const uint16_t* act, const Routing* routing, int first)
        : gmem_panel(panel), gmem_act(act), smem_routing(routing), rank(first), num_ranks(routing->num_distinct) {
        enter();
    }
    __device__ __forceinline__ bool more() const { return rank < num_ranks; }
    __device__ __forceinline__ void enter() {
        if (!more()) return;
        gmem_next = gmem_panel + smem_routing->expert[rank] * (kPanels * kPanelBytes);
        const int lane = threadIdx.x % kLanes, g = lane / 4, q = lane % 4;
        const int first = smem_routing->first[rank], count = smem_routing->first[rank + 1] - first;
        fetches = g < count && count <= kStaged;
        if (fetches) gmem_column = gmem_act + int64_t(smem_routing->pairs[first + g]) * kIntermediate + q * 8;
    }
    __device__ __forceinline__ void advance() {
        gmem_next += kRunBytes;
        gmem_column += kRun * kRecordCols;
        if (++run == kRuns) {
            run = 0;
            rank += kWarps;
            enter();
        }
    }
};

// A warp's ring. A stage is full after the arrival of lane 0 with the weights, and one of each lane with its activations.
struct Ring {
    uint32_t smem_weights, smem_act, smem_full;
    Turn<kRing> turn;
    int lane;

    __device__ __forceinline__ Ring(Smem& smem, int warp, int lane_)
        : smem_weights(smem_address(smem.ring[warp])),
          smem_act(smem_address(smem.act[warp])),
          smem_full(smem_address(smem.full[warp])),
          lane(lane_) {}
    __device__ __forceinline__ uint32_t act_of(int stage) const { return smem_act + stage * uint32_t(sizeof(Smem::act[0][0])); }
    __device__ __forceinline__ void request_weights(const Source& source, int stage) const {
        if (lane == 0) bulk_load(smem_weights + stage * kRunBytes, source.gmem_next, kRunBytes, smem_full + stage * 8);
    }
    __device__ __forceinline__ void request_act(const Source& source, int stage) const {
        if (source.fetches) {
            const uint32_t smem = act_of(stage) + lane * 16;
#pragma unroll
            for (int i = 0; i < kRun; ++i) cp_async_16(smem + i * (kStaged * 64), source.gmem_column + i * kRecordCols);
        }
        cp_async_arrive(smem_full + stage * 8);
    }
    // The run has been read by every lane: its stage takes the next one.
    __device__ __forceinline__ void refill(Source& source) {
        __syncwarp();
        if (source.more()) {
            request_weights(source, turn.stage);
            request_act(source, turn.stage);
            source.advance();
        }
        turn.next();
    }
};

template <int kTiles, bool kInShared>
__device__ __forceinline__ void do_expert(Smem& smem, Ring& ring, Source& source, const Args& args, int64_t expert,
                                          const uint16_t* smem_pairs, int count) {
    const int lane = ring.lane, g = lane / 4, q = lane % 4;
    const int row = blockIdx.x * 16 + g;
    float low_scale = args.gmem_matrix_scale[expert], high_scale = low_scale, low_bias = 0.f, high_bias = 0.f;
    if (args.gmem_row_scale != nullptr) {
        low_scale *= args.gmem_row_scale[expert * kHidden + row];
        high_scale *= args.gmem_row_scale[expert * kHidden + row + 8];
    }
    if (args.gmem_bias != nullptr) {
        low_bias = args.gmem_bias[expert * kHidden + row];
        high_bias = args.gmem_bias[expert * kHidden + row + 8];
    }
    const float* gmem_scale = nullptr;
    constexpr int kScaleCols = ceil_div(kIntermediate, 128), kScaleRows = ceil_div(kHidden, 128);
    if constexpr (Format::kBlockScale)  // 16 rows lie in one block of 128
        gmem_scale = args.gmem_block_scale + (expert * kScaleRows + blockIdx.x * 16 / 128) * kScaleCols;
    constexpr int kOwn = kStaged == 0 ? 1 : kStaged;
    Sums<kTiles> sums;
#pragma unroll 1
    for (int record = 0; record < kRecords; record += kRun) {
        const int stage = ring.turn.stage;
        const uint32_t smem_run = ring.smem_weights + stage * kRunBytes;
        const BlockScales<kRun> scales(gmem_scale, gmem_scale, record);
        wait(ring.smem_full + stage * 8, ring.turn.parity);
        if constexpr (kInShared) {
            const StagedColumns staged{ring.act_of(stage) + g % kOwn * 64 + q * 16};
            add_run<kRun, 0, kTiles>(sums, smem_run, staged, lane, scales, record);
        } else {
            const uint16_t* gmem_act = args.gmem_act + record * kRecordCols + q * 8;
            add_global<kRun, kTiles>(sums, smem_run, lane, scales, record, [&](int column) {
                return gmem_act + int64_t(smem_pairs[min(column, count - 1)]) * kIntermediate;
            });
        }
        ring.refill(source);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = t * kColumns + q * 2 + c;
            if (column < count) {
                float(&dots)[16] = smem.dots[smem_pairs[column]];
                dots[g] = fmaf(sums.total(t, c), low_scale, low_bias);
                dots[g + 8] = fmaf(sums.total(t, 2 + c), high_scale, high_bias);
            }
        }
    }
}

extern "C" __global__ void __maxnreg__(WARPRING_REGISTERS)
moe_down_stream(const uint16_t* gmem_act, const Index* gmem_topk_idx, int64_t idx_stride, const float* gmem_topk_weights,
                int64_t weights_stride, int32_t num_tokens, const uint8_t* __restrict__ gmem_records,
                const float* __restrict__ gmem_matrix_scale, const float* __restrict__ gmem_row_scale,
                const float* __restrict__ gmem_block_scale, const float* __restrict__ gmem_bias, uint16_t* gmem_out,
                int64_t out_stride) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int num_pairs = num_tokens * kTopk;
    pdl_launch_dependents();
    if (lane < kRing) mbarrier_init(smem_address(&smem.full[warp][lane]), 1 + kLanes);
    fence_mbarrier_init();
    find(smem.routing, gmem_topk_idx, idx_stride, num_pairs);

    Ring ring(smem, warp, lane);
    Source source(gmem_records + blockIdx.x * kPanelBytes, gmem_act, &smem.routing, warp);
    Source behind = source;
    for (int i = 0; i < kRing && source.more(); ++i, source.advance()) ring.request_weights(source, i);
    for (int p = threadIdx.x; p < num_pairs; p += kThreads)
        smem.weights[p] = ld_routing(gmem_topk_weights + p / kTopk * weights_stride + p % kTopk);
    pdl_wait();
    for (int i = 0; i < kRing && behind.more(); ++i, behind.advance()) ring.request_act(behind, i);

    const Args args{gmem_act, gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias};
#pragma unroll 1
    for (int rank = warp; rank < source.num_ranks; rank += kWarps) {
        const int64_t expert = smem.routing.expert[rank];
        const uint16_t* pairs = smem.routing.pairs + smem.routing.first[rank];
        const int count = smem.routing.first[rank + 1] - smem.routing.first[rank];
        if (count <= kStaged) do_expert<1, true>(smem, ring, source, args, expert, pairs, count);
        else if (count <= 8) do_expert<1, false>(smem, ring, source, args, expert, pairs, count);
        else if (count <= 16) do_expert<2, false>(smem, ring, source, args, expert, pairs, count);
        else do_expert<4, false>(smem, ring, source, args, expert, pairs, count);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * 16; i += kThreads) {
        const int token = i / 16, row = i % 16;
        float y = 0.f;
#pragma unroll 4
        for (int slot = 0; slot < kTopk; ++slot) {
            const int pair = token * kTopk + slot;
            if (smem.routing.ids[pair] != kUnused) y = fmaf(smem.weights[pair], smem.dots[pair][row], y);
        }
        gmem_out[token * out_stride + blockIdx.x * 16 + row] = cvt_f32_bf16(y);
    }
}
