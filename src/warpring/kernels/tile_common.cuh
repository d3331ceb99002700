// tile_common.cuh   What both tile kernels share: who wants which expert, and the stream of records through shared memory.
//
// Compile-time parameters (macros set by kernels/tile.py, one cubin each):
//   WARPRING_FORMAT        a policy of tile_formats.cuh
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE, WARPRING_TOPK, WARPRING_EXPERTS
//   WARPRING_INDEX         int32_t or int64_t, the type of topk_idx
//   WARPRING_WARPS         warps of a CTA; changes no bit of the result of the down kernel
#pragma once
#include "tile_formats.cuh"

constexpr int kWarps = WARPRING_WARPS;
constexpr int kLanes = 32;
constexpr int kThreads = kWarps * kLanes;
constexpr int kHidden = WARPRING_HIDDEN;
constexpr int kIntermediate = WARPRING_INTERMEDIATE;
constexpr int kTopk = WARPRING_TOPK;
constexpr int kExperts = WARPRING_EXPERTS;
using Format = WARPRING_FORMAT;
using Index = WARPRING_INDEX;

constexpr int kColumns = 8;       // tokens of one mma
constexpr int kMaxPairs = 512;    // (token, slot) pairs of a launch
#ifdef WARPRING_MAX_COLUMNS
constexpr int kMaxColumns = WARPRING_MAX_COLUMNS;
#else
constexpr int kMaxColumns = 64;   // pairs of one expert that are multiplied at once
#endif
constexpr int kStages = 2;           // copies in flight a warp, about 4 KB each
constexpr int kStageRecords = Format::kRecordBytes >= 1024 ? 4 : Format::kRecordBytes >= 512 ? 8 : 16;
constexpr int kStageBytes = kStageRecords * Format::kRecordBytes;
constexpr uint32_t kFull = 0xffffffffu;

static_assert(kHidden % 32 == 0 && kIntermediate % 32 == 0, "rows are whole records");
static_assert(kStageBytes % 16 == 0, "bulk copies move multiples of 16 bytes");

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Which experts the batch wants, and which (token, slot) pairs want each: a counting sort by expert in shared memory, done
// by every CTA for itself. No bit depends on the order of an expert's pairs: each pair is a column of its own. An expert that
// more than kMaxColumns pairs want stands in the list once for every kMaxColumns of them; then the order is that of the
// pairs, since CTAs share the entries and must agree on what is in each. Otherwise it is not fixed.
constexpr int kMaxEntries = (kExperts < kMaxPairs ? kExperts : kMaxPairs) + kMaxPairs / kMaxColumns;
struct Routing {
    uint16_t expert[kMaxEntries];        // wanted experts, ascending
    uint16_t first[kMaxEntries + 1];     // where an entry's pairs start
    uint16_t pairs[kMaxPairs];                                           // token * topk + slot
    uint16_t ids[kMaxPairs];                                             // expert of a pair, or kUnused
    int32_t count[kExperts];                                             // pairs, then the next free place, of an expert
    int32_t warp_total[kWarps];
    int32_t num_distinct;  // entries
};
constexpr uint16_t kUnused = 0xffff;

__device__ __forceinline__ void find_pairs(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride, int num_pairs) {
    constexpr int kPerThread = ceil_div(kExperts, kThreads);
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    for (int e = threadIdx.x; e < kExperts; e += kThreads) smem.count[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < num_pairs; p += kThreads) {
        const int64_t id = ld_routing(gmem_topk_idx + (p / kTopk) * idx_stride + p % kTopk);
        const bool used = uint64_t(id) < uint64_t(kExperts);
        smem.ids[p] = used ? uint16_t(id) : kUnused;
        if (used) atomicAdd(&smem.count[id], 1);
    }
    __syncthreads();
    // One scan for both: entries in the high half, pairs in the low half of a word.
    int32_t own = 0;
    bool crowds = false;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        const int32_t n = e < kExperts ? smem.count[e] : 0;
        own += n + ceil_div(n, kMaxColumns) * 0x10000;
        crowds = crowds || n > kMaxColumns;
    }
    int32_t upto = own;
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
        const int32_t other = __shfl_up_sync(kFull, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == kLanes - 1) smem.warp_total[warp] = upto;
    __syncthreads();
    int32_t before = upto - own;
    int32_t total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const int32_t t = smem.warp_total[w];
        if (w < warp) before += t;
        total += t;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        const int32_t n = e < kExperts ? smem.count[e] : 0;
        if (n > 0) smem.count[e] = before & 0xffff;
        for (int left = n; left > 0; left -= kMaxColumns) {
            smem.expert[before >> 16] = uint16_t(e);
            smem.first[before >> 16] = uint16_t(before & 0xffff);
            before += min(left, kMaxColumns) + 0x10000;
        }
    }
    if (threadIdx.x == 0) {
        smem.num_distinct = total >> 16;
        smem.first[total >> 16] = uint16_t(total & 0xffff);
    }
    const bool crowded = __syncthreads_or(crowds);
    for (int p = threadIdx.x; p < num_pairs; p += kThreads) {
        const uint16_t id = smem.ids[p];
        if (id == kUnused) continue;
        int place;
        if (crowded) {
            place = smem.count[id];
            for (int earlier = 0; earlier < p; ++earlier) place += smem.ids[earlier] == id;
        } else {
            place = atomicAdd(&smem.count[id], 1);
        }
        smem.pairs[place] = uint16_t(p);
    }
    __syncthreads();
}

// A warp's stream of records: a ring of kStages stages in shared memory, filled by bulk copies that lane 0 requests, read by
// the whole warp. `Source` says what comes next: next(gmem, records) gives the next run of at most kStageRecords records,
// false when the stream is over. Stages are refilled in the order in which they were read.
template <class Source>
struct Stream {
    uint32_t smem_ring, smem_barriers;
    Source source;
    int stage = 0;
    uint32_t parity = 0;
    int lane;

    __device__ __forceinline__ Stream(uint32_t ring, uint32_t barriers, const Source& s)
        : smem_ring(ring), smem_barriers(barriers), source(s), lane(threadIdx.x % kLanes) {}

    // Requests the first kStages runs.
    __device__ __forceinline__ void fill() {
        if (lane == 0)
            for (int i = 0; i < kStages; ++i) request(i);
    }

    __device__ __forceinline__ void request(int into) {
        const uint8_t* gmem;
        int records;
        if (source.next(gmem, records))
            bulk_load(smem_ring + into * kStageBytes, gmem, records * Format::kRecordBytes, smem_barriers + into * 8);
    }

    // Waits for the next run; its records start at the address returned. A copy that never completes traps rather than hangs.
    __device__ __forceinline__ uint32_t acquire() {
        for (uint32_t tries = 0; !mbarrier_try_wait(smem_barriers + stage * 8, parity); ++tries)
            if (tries > (1u << 20)) __trap();
        return smem_ring + stage * kStageBytes;
    }

    // The run has been read by every lane: its stage is refilled.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (lane == 0) request(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

template <int kTiles>
struct Accumulators {
    float d[kTiles][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[t][i] = 0.f;
    }
};

// One record times the 8 columns of one tile. x are 16 bytes of this lane's column: 8 BF16 values at columns 8 q.
__device__ __forceinline__ void multiply(float (&sum)[4], const Operands& w, uint4 x) {
    mma_bf16(sum, w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3], x.x, x.y);
    mma_bf16(sum, w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3], x.z, x.w);
}

// The columns of up to kTiles x 8 pairs: where each lane reads its activations. A lane beyond the last pair reads the last
// one's again: columns are independent of each other, and nobody looks at the sums of those that stand for no pair.
template <int kTiles>
struct Columns {
    const uint16_t* gmem[kTiles];
};

// Sums the records [begin, end) of one panel over kTiles x 8 columns, in groups: the activations of the next group are on
// their way while a group is multiplied. With block scales, `gmem_low` and `gmem_high` are the FP32 scales of the panel's two
// halves, one per 128 columns.
template <int kTiles, class Source>
__device__ __forceinline__ void sum_records(Accumulators<kTiles>& sum, Stream<Source>& stream, const Columns<kTiles>& columns,
                                            int begin, int end, const float* gmem_low, const float* gmem_high) {
    constexpr int kGroup = kTiles == 1 ? 4 : kTiles == 2 ? 2 : 1;
    constexpr bool kPrefetch = kTiles <= 2;  // beyond that the registers are needed
    static_assert(kStageRecords % kGroup == 0, "a group lies in one stage");
    const int lane = threadIdx.x % kLanes;
    uint4 x[kGroup][kTiles], x_next[kGroup][kTiles];
    // Records beyond the end are read as the last one: their products are not added.
    const auto load_x = [&](uint4 (&into)[kGroup][kTiles], int record) {
        if (record + kGroup <= end) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int i = 0; i < kGroup; ++i) into[i][t] = ld_activations(columns.gmem[t] + record * kRecordCols + i * kRecordCols);
        } else {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int i = 0; i < kGroup; ++i) into[i][t] = ld_activations(columns.gmem[t] + min(record + i, end - 1) * kRecordCols);
        }
    };
    const auto add_record = [&](const typename Format::Raw& raw, const uint4 (&x_record)[kTiles], int record) {
        Operands w;
        Format::unpack(raw, w);
        float low = 1.f, high = 1.f;
        if constexpr (Format::kBlockScale) {
            low = ld_scale_f32(gmem_low + record / 4);
            high = ld_scale_f32(gmem_high + record / 4);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const uint4 x_tile = kPrefetch ? x_record[t] : ld_activations(columns.gmem[t] + record * kRecordCols);
            if constexpr (Format::kBlockScale) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};
                multiply(part, w, x_tile);
                sum.d[t][0] = fmaf(low, part[0], sum.d[t][0]);
                sum.d[t][1] = fmaf(low, part[1], sum.d[t][1]);
                sum.d[t][2] = fmaf(high, part[2], sum.d[t][2]);
                sum.d[t][3] = fmaf(high, part[3], sum.d[t][3]);
            } else {
                multiply(sum.d[t], w, x_tile);
            }
        }
    };
    sum.clear();
    if (begin >= end) return;
    if (kPrefetch) load_x(x, begin);
    uint32_t smem = 0;
    int in_stage = 0;
#pragma unroll 1
    for (int record = begin; record < end; record += kGroup) {
        if (in_stage == 0) smem = stream.acquire();
        if (kPrefetch) load_x(x_next, record + kGroup);
        const uint32_t smem_group = smem + in_stage * Format::kRecordBytes;
        if (record + kGroup <= end) {
            typename Format::Raw raw[kGroup];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) raw[i] = Format::load(smem_group + i * Format::kRecordBytes, lane);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) add_record(raw[i], x[i], record + i);
        } else {
#pragma unroll
            for (int i = 0; i < kGroup - 1; ++i)
                if (record + i < end) add_record(Format::load(smem_group + i * Format::kRecordBytes, lane), x[i], record + i);
        }
        in_stage += kGroup;
        if (in_stage == kStageRecords || record + kGroup >= end) {
            stream.release();
            in_stage = 0;
        }
        if (kPrefetch) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
#pragma unroll
                for (int t = 0; t < kTiles; ++t) x[i][t] = x_next[i][t];
        }
    }
}
