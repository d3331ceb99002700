// ep_dispatch.cu   role1: publish own tokens, hear the peers' routing, plan the token blocks, pull what own experts need.
//
// Grid     comm_ctas CTAs of 512 threads, all resident in the communication partition
// Owner    CTA 0 writes the plan; CTA c > 0: tokens c - 1, c - 1 + (C - 1), ... to publish; routed blocks b with
//          b % C == C - 1 - c to fill: few tokens' publishers are the last to get a block. Of a single CTA: everything
// Reads    x and own routing once; all ranks' routing in every CTA (4 bytes a pair); a wanted row once a pair, from its owner
// Bound    latency at decode sizes: routing to plan is one hop between GPUs, rows to l1_full one more, overlapping; then
//          NVLink: 512 threads x 6 loads of 16 bytes in flight a CTA
// Sync     meta, plan: packets that carry their tag; waits arrived of all ranks, l1_empty, l2_empty; signals arrived, l1_full
// Limits   num_ranks <= 72, any number of pairs; a token count beyond max_tokens poisons the layer
#include "ep_ring.cuh"
#include "ep_tokens.cuh"

using Index = WARPRING_INDEX;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kLanes;
// ep_shared must fit on the same multiprocessor: 512 threads x 96 registers here and 256 x 64 there are all of them.
constexpr int kThreadsOf96Registers = 640;
constexpr int kLoadsInFlight = 6;

struct Smem {
    uint32_t pairs_of[kLocalExperts];     // pairs of each local expert
    uint32_t first_block[kLocalExperts];  // routed blocks before it
    uint32_t warp_total[kLanes];          // one a warp; the rest stays 0
    uint16_t num_tokens[kMaxRanks];
    // The block that is being filled.
    int32_t expert, index;
    const uint8_t* row[kBlockM];
    uint32_t pair_id[kBlockM];
    uint8_t slot[kBlockM];
    float weight[kBlockM];
};

struct Inputs {
    const uint16_t* gmem_x;
    int64_t x_stride;
    const Index* gmem_topk_idx;
    int64_t idx_stride;
    const float* gmem_topk_weights;
    int64_t weights_stride;
    int num_tokens;
};

// The ids of a packet, of the first `num_rows` tokens.
__device__ __forceinline__ uint64_t load_ids(const Inputs& inputs, int packet, int num_rows) {
    uint64_t ids = 0;
#pragma unroll
    for (int i = 0; i < kPacketPairs; ++i) {
        const int pair = packet * kPacketPairs + i;
        int64_t id = -1;
        if (pair < num_rows * kTopk)
            id = ld_routing(inputs.gmem_topk_idx + pair / kTopk * inputs.idx_stride + pair % kTopk);
        ids |= uint64_t(uint64_t(id) < uint64_t(kExperts) ? uint32_t(id) : kNoExpert) << (16 * i);
    }
    return ids;
}

// Packets of own routing are dealt out by warps over all CTAs.
__device__ __forceinline__ int first_packet() {
    return (threadIdx.x / kLanes * gridDim.x + blockIdx.x) * kLanes + threadIdx.x % kLanes;
}

// Own routing to every rank, itself included. `ids` are those of this thread's first packet, loaded before the number of
// tokens was known.
__device__ __forceinline__ void push_routing(const EpParams& params, uint64_t tag, const Inputs& inputs, uint64_t ids) {
    const int pairs = inputs.num_tokens * kTopk, packets = num_packets(inputs.num_tokens);
#pragma unroll 1
    for (int packet = first_packet(); packet < packets; packet += kThreads * gridDim.x) {
        if (packet != first_packet()) ids = load_ids(inputs, packet, inputs.num_tokens);
#pragma unroll
        for (int i = 0; i < kPacketPairs; ++i)
            if (packet * kPacketPairs + i >= pairs) ids |= uint64_t(kNoExpert) << (16 * i);
#pragma unroll 1
        for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
            uint8_t* gmem_meta = meta_of(params, peer_region(params, peer), params.peers.rank, tag >> 16);
            st_relaxed_sys_b128(gmem_meta + packet * kPacketBytes, make_ulonglong2(tag, ids));
        }
    }
}

// Own rows of this CTA into own memory.
__device__ __forceinline__ void write_rows(const EpParams& params, const Inputs& inputs) {
    uint8_t* region = own_region(params);
    const int step = max(1, int(gridDim.x) - 1), first = int(blockIdx.x) + step - int(gridDim.x);
    if (first < 0) return;  // the CTA that plans
    const int count = inputs.num_tokens > first ? ceil_div(inputs.num_tokens - first, step) : 0;
    const auto scales_of = [&](int i) {
        return reinterpret_cast<float*>(row_of(params, region, first + i * step) + kCodeChunks * kChunkBytes);
    };
    encode_tokens(
        Tokens<kThreads>{inputs.gmem_x, inputs.x_stride, first, step, count},
        [&](int i, int chunk, int piece, uint4 codes) {
            uint8_t* row = row_of(params, region, first + i * step);
            *reinterpret_cast<uint4*>(row + chunk * kChunkBytes + piece * kPieceBytes) = codes;
        },
        [&](int i, int s, float scale) { scales_of(i)[s] = scale; });
#pragma unroll 1
    for (int j = threadIdx.x; j < count * kTopk; j += kThreads) {
        const int i = j / kTopk, slot = j % kTopk;
        const int64_t token = first + i * step;
        scales_of(i)[kScales + slot] = ld_routing(inputs.gmem_topk_weights + token * inputs.weights_stride + slot);
    }
}

// One increment of `arrived` at every rank: the rows of this CTA have been written.
__device__ __forceinline__ void publish_rows(const EpParams& params) {
    __syncthreads();
    if (threadIdx.x < params.peers.num_ranks)
        red_add_release_sys_u64(arrived_of(params, peer_region(params, threadIdx.x), params.peers.rank), 1);
}

// Which packets of whose routing a thread looks at: ranks are dealt out to groups of warps, a rank's packets to the lanes of
// its group. The order (warp, rank, packet) is the order of pairs within an expert, the same in every CTA.
struct Reader {
    int rank, rank_step;  // first rank of this warp's group; rank >= num_ranks: none
    int packet, packet_step;
    uint64_t first_ids;  // of (rank, packet), kept: with few tokens there are no others

    __device__ __forceinline__ explicit Reader(int num_ranks) : first_ids(~uint64_t(0)) {
        const int warp = threadIdx.x / kLanes;
        const int group = num_ranks >= kWarps ? 1 : kWarps / num_ranks;
        rank = warp / group;
        rank_step = kWarps / group;
        packet = warp % group * kLanes;  // of lane 0
        packet_step = group * kLanes;
    }
};

__device__ __forceinline__ int expert_at(uint64_t ids, int i) { return int(ids >> (16 * i) & 0xffff); }

// Waits for packet `packet` of `rank`, or to hear that it has fewer tokens.
__device__ __forceinline__ bool receive_packet(const EpParams& params, const EpSync& sync, int rank, int packet,
                                               int& num_tokens, uint64_t& ids) {
    const uint8_t* gmem_meta = meta_of(params, own_region(params), rank, sync.generation);
    ids = ~uint64_t(0);
    const bool came = wait_until(sync, kMeta, rank, sync.generation, [&](uint64_t& seen) {
        const ulonglong2 head = ld_relaxed_sys_b128(gmem_meta);
        const ulonglong2 own = ld_relaxed_sys_b128(gmem_meta + packet * kPacketBytes);
        seen = head.x >> 16;
        if (seen != sync.generation) return false;
        num_tokens = int(head.x & 0xffff);
        if (num_tokens == kRefusedTokens || packet >= num_packets(num_tokens)) return true;
        ids = own.y;
        return own.x == head.x;
    });
    if (!came || num_tokens != kRefusedTokens) return came;
    report_failure(sync, kPeerTooManyTokens, kMeta, rank, params.max_tokens, kRefusedTokens);
    return false;
}

// All ranks' routing: counts the pairs of each local expert.
__device__ __forceinline__ bool receive_routing(const EpParams& params, const EpSync& sync, Reader& reader,
                                                Smem& smem) {
    const int lane = threadIdx.x % kLanes;
    const int num_ranks = params.peers.num_ranks, base = params.peers.rank * kLocalExperts;
#pragma unroll 1
    for (int rank = reader.rank; rank < num_ranks; rank += reader.rank_step) {
        int num_tokens = 0, packet = reader.packet + lane;
        if (packet >= num_packets(params.max_tokens)) continue;
        do {
            uint64_t ids;
            if (!receive_packet(params, sync, rank, packet, num_tokens, ids)) return false;
            if (rank == reader.rank && packet == reader.packet + lane) reader.first_ids = ids;
#pragma unroll
            for (int i = 0; i < kPacketPairs; ++i) {
                const uint32_t expert = uint32_t(expert_at(ids, i) - base);
                if (expert < kLocalExperts) atomicAdd(&smem.pairs_of[expert], 1u);
            }
            packet += reader.packet_step;
        } while (packet < num_packets(num_tokens));
        if (reader.packet + lane == 0) smem.num_tokens[rank] = uint16_t(num_tokens);
    }
    return true;
}

// Routed blocks before each expert; returns how many there are. Begins and ends behind a barrier.
__device__ __forceinline__ int plan_blocks(Smem& smem) {
    constexpr int kPerThread = ceil_div(kLocalExperts, kThreads);
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        if (e < kLocalExperts) own += ceil_div(smem.pairs_of[e], kBlockM);
    }
    uint32_t upto = own;
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
        const uint32_t other = __shfl_up_sync(kFullWarp, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == kLanes - 1) smem.warp_total[warp] = upto;
    __syncthreads();
    const uint32_t total_of_lane = smem.warp_total[lane];
    uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? total_of_lane : 0u) + upto - own;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int e = threadIdx.x * kPerThread + i;
        if (e < kLocalExperts) {
            smem.first_block[e] = before;
            before += ceil_div(smem.pairs_of[e], kBlockM);
        }
    }
    __syncthreads();
    return int(__reduce_add_sync(kFullWarp, total_of_lane));
}

__device__ __forceinline__ void write_plan(const EpParams& params, uint64_t generation, int num_shared_blocks,
                                           int num_blocks, const Smem& smem) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll 1
    for (int e = threadIdx.x / kLanes; e < kLocalExperts; e += kWarps) {
        const int pairs = smem.pairs_of[e], first = num_shared_blocks + smem.first_block[e];
#pragma unroll 1
        for (int i = lane; i * kBlockM < pairs; i += kLanes)
            write_plan_entry(params, generation, first + i, e, min(pairs - i * kBlockM, kBlockM));
    }
    if (threadIdx.x == 0) write_plan_blocks(params, generation, num_shared_blocks + num_blocks);
}

// Calls use(rank, first pair, ids) for the packets of each lane, whole warps at a time; ids of lanes beyond the last packet
// are none.
template <class Use>
__device__ __forceinline__ void for_each_packet(const EpParams& params, uint64_t generation, const Reader& reader,
                                                const Smem& smem, Use use) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll 1
    for (int rank = reader.rank; rank < params.peers.num_ranks; rank += reader.rank_step) {
        const uint8_t* gmem_meta = meta_of(params, own_region(params), rank, generation);
        const int packets = num_packets(smem.num_tokens[rank]);
#pragma unroll 1
        for (int p = reader.packet; p < packets; p += reader.packet_step) {
            uint64_t ids = ~uint64_t(0);
            if (rank == reader.rank && p == reader.packet)
                ids = reader.first_ids;
            else if (p + lane < packets)
                ids = ld_relaxed_sys_b128(gmem_meta + (p + lane) * kPacketBytes).y;
            use(rank, (p + lane) * kPacketPairs, ids);
        }
    }
}

// The pairs of block smem.index of expert smem.expert: those whose rank among the expert's pairs is within the block.
__device__ __forceinline__ void select_pairs(const EpParams& params, uint64_t generation, const Reader& reader,
                                             Smem& smem) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int expert = params.peers.rank * kLocalExperts + smem.expert;
    const auto matches_of = [&](uint64_t ids) {
        uint32_t matches = 0;
#pragma unroll
        for (int i = 0; i < kPacketPairs; ++i) matches += expert_at(ids, i) == expert;
        return matches;
    };
    uint32_t own = 0;
    for_each_packet(params, generation, reader, smem, [&](int, int, uint64_t ids) { own += matches_of(ids); });
    const uint32_t warp_matches = __reduce_add_sync(kFullWarp, own);
    if (lane == 0) smem.warp_total[warp] = warp_matches;
    __syncthreads();
    const int begin = smem.index * kBlockM;
    int before = int(__reduce_add_sync(kFullWarp, lane < warp ? smem.warp_total[lane] : 0u)) - begin;
    if (warp_matches == 0 || before >= kBlockM || before + int(warp_matches) <= 0) return;
    for_each_packet(params, generation, reader, smem, [&](int rank, int pair, uint64_t ids) {
        const uint32_t matches = matches_of(ids);
        uint32_t upto = matches;
#pragma unroll
        for (int d = 1; d < kLanes; d *= 2) {
            const uint32_t other = __shfl_up_sync(kFullWarp, upto, d);
            if (lane >= d) upto += other;
        }
        int n = before + int(upto - matches);
#pragma unroll
        for (int i = 0; i < kPacketPairs; ++i) {
            if (expert_at(ids, i) != expert) continue;
            if (n >= 0 && n < kBlockM) {
                const int token = (pair + i) / kTopk, slot = (pair + i) % kTopk;
                smem.row[n] = row_of(params, peer_region(params, rank), token);
                smem.pair_id[n] = uint32_t((rank * params.max_tokens + token) * kSlotsPerToken + slot);
                smem.slot[n] = uint8_t(slot);
            }
            ++n;
        }
        before += int(__shfl_sync(kFullWarp, upto, kLanes - 1));
    });
}

// What follows a row's codes: scales go beside the image, the pair's routing weight into shared memory.
struct TailTask {
    int n, f;
    __device__ __forceinline__ explicit TailTask(int task) : n(task / (kScales + 1)), f(task % (kScales + 1)) {}
    __device__ __forceinline__ float load(const Smem& smem) const {
        const int index = f < kScales ? f : kScales + smem.slot[n];
        return ld_routing(reinterpret_cast<const float*>(smem.row[n] + kCodeChunks * kChunkBytes) + index);
    }
    __device__ __forceinline__ void store(float* gmem_scale, Smem& smem, float value) const {
        if (f < kScales)
            gmem_scale[f * kBlockM + n] = value;
        else
            smem.weight[n] = value;
    }
};

// Pulls the rows of the block: a unit of a warp is 4 tokens x 128 bytes. The first loads are under way while the slot is
// waited for.
__device__ __forceinline__ bool pull_block(const EpParams& params, const EpSync& sync, BlockFill& fill, Smem& smem) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, piece = lane % 8;
    const int count = fill.count, width = block_width(count);
    const int units = ceil_div(count, kUnitTokens) * kCodeChunks, tails = count * (kScales + 1);
    uint8_t* image = ring_x(params, fill.place.slot);
    float* gmem_scale = ring_x_scale(params, fill.place.slot);
#pragma unroll 1
    for (int batch = 0; batch * kWarps * kLoadsInFlight < units || batch * kThreads < tails; ++batch) {
        const int first = batch * kWarps * kLoadsInFlight + warp, tail = batch * kThreads + threadIdx.x;
        const auto token_of = [&](int unit) { return unit / kCodeChunks * kUnitTokens + lane / 8; };
        uint4 bits[kLoadsInFlight];
        float tail_value;
        if (tail < tails) tail_value = TailTask(tail).load(smem);
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
            const int unit = first + i * kWarps, n = token_of(unit);
            if (n < count)
                bits[i] = ld_activations(smem.row[n] + unit % kCodeChunks * kChunkBytes + piece * kPieceBytes);
        }
        if (batch == 0 && !fill.may_write(params, sync)) return false;
        if (tail < tails) TailTask(tail).store(gmem_scale, smem, tail_value);
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
            const int unit = first + i * kWarps, n = token_of(unit);
            uint8_t* gmem_chunk = image + unit % kCodeChunks * width * kChunkBytes;
            if (n < count) *reinterpret_cast<uint4*>(gmem_chunk + image_offset(width, piece, n)) = bits[i];
        }
    }
    return fill.publish(params, sync, smem.pair_id, smem.weight);
}

// All ranks' rows can be read. By the whole CTA.
__device__ __forceinline__ bool rows_arrived(const EpParams& params, const EpSync& sync) {
    bool arrived = true;
    if (threadIdx.x < params.peers.num_ranks)
        arrived = wait_at_least_sys(sync, kArrived, threadIdx.x, arrived_of(params, own_region(params), threadIdx.x),
                                    sync.generation * params.comm_ctas);
    return !__syncthreads_or(!arrived);
}

// Sends own routing, unless the layer is poisoned. A wrong count is told to the peers, and nothing else of the call runs.
// The loads of ids are under way while the state and the count are.
__device__ __forceinline__ bool announce(const EpParams& params, const EpSync& sync, const TokenCount& count,
                                         Inputs& inputs) {
    const uint64_t ids = load_ids(inputs, first_packet(), count.limit);
    if (__syncthreads_or(is_poisoned(sync))) return false;
    inputs.num_tokens = count.is_refused() ? 0 : count.given;
    push_routing(params, meta_tag(sync.generation, count.is_refused() ? kRefusedTokens : count.given), inputs, ids);
    if (count.is_refused() && threadIdx.x == 0)
        report_failure(sync, kTooManyTokens, kNoFlag, -1, count.limit, uint32_t(count.given));
    return !count.is_refused();
}

// Claims the workspace for this call. Another one has it that began from the same state, or whose role3 still reads partial
// results. By a CTA other than the one that plans: the answer takes as long as a load.
__device__ __forceinline__ void claim(const EpParams& params, const EpSync& sync) {
    if (blockIdx.x != gridDim.x - 1 || threadIdx.x != 0) return;
    EpState& state = *params.gmem_state;
    const uint32_t finished = ld_relaxed_gpu_u32(&state.combine_done), call = uint32_t(sync.generation);
    const uint32_t last = atomicExch(&state.claimed, call);
    if (last == call || finished != (call - 1) << 16) report_failure(sync, kOverlap, kNoFlag, -1, 0, 1);
}

__device__ __forceinline__ void dispatch(const EpParams& params, const EpSync& sync, const TokenCount& token_count,
                                         Inputs& inputs, Smem& smem) {
    const uint64_t generation = sync.generation, block_base = params.gmem_state->block_base;
#pragma unroll 1
    for (int e = threadIdx.x; e < kLocalExperts; e += kThreads) smem.pairs_of[e] = 0;
    if (threadIdx.x < kLanes) smem.warp_total[threadIdx.x] = 0;
    if (!announce(params, sync, token_count, inputs)) return;
    // The plan is what everybody waits for: before it, its CTA does not even wait for its own stores.
    const bool plans = blockIdx.x == 0;
    write_rows(params, inputs);
    if (!plans) publish_rows(params);
    claim(params, sync);

    Reader reader(params.peers.num_ranks);
    const bool heard = receive_routing(params, sync, reader, smem);
    if (__syncthreads_or(!heard)) return;
    const int num_blocks = plan_blocks(smem);
    const int num_shared_blocks = kNumShared * ceil_div(inputs.num_tokens, kBlockM);
    if (plans) {
        write_plan(params, generation, num_shared_blocks, num_blocks, smem);
        publish_rows(params);
    }

    bool arrived = false;
#pragma unroll 1
    for (int block = gridDim.x - 1 - blockIdx.x; block < num_blocks; block += gridDim.x) {
#pragma unroll 1
        for (int e = threadIdx.x; e < kLocalExperts; e += kThreads) {
            const uint32_t index = uint32_t(block) - smem.first_block[e];
            if (index * kBlockM < smem.pairs_of[e] && uint32_t(block) >= smem.first_block[e]) {
                smem.expert = e;
                smem.index = int32_t(index);
            }
        }
        __syncthreads();
        select_pairs(params, generation, reader, smem);
        const int expert = smem.expert;
        const int count = min(int(smem.pairs_of[expert]) - smem.index * kBlockM, kBlockM);
        BlockFill fill(params, block_base, num_shared_blocks + block, expert, count);
        if (!arrived && !rows_arrived(params, sync)) return;
        arrived = true;
        __syncthreads();
        if (!pull_block(params, sync, fill, smem)) return;
    }
}

extern "C" __global__ void __launch_bounds__(kThreadsOf96Registers, 1)
    ep_dispatch(const __grid_constant__ EpParams params, const uint16_t* gmem_x, int64_t x_stride,
                const Index* gmem_topk_idx, int64_t idx_stride, const float* gmem_topk_weights, int64_t weights_stride,
                const int32_t* gmem_num_tokens, int32_t num_rows) {
    // In a chain: the kernel before, which may have written what this call reads. Behind role4 that one has waited for it.
    if constexpr (kNumShared == 0) pdl_wait();
    pdl_launch_dependents();  // role2 where it shares the stream: it may start when every CTA of this kernel runs
    __shared__ Smem smem;
    const EpSync sync = ep_sync(params, params.gmem_state->generation + 1);
    Inputs inputs{gmem_x, x_stride, gmem_topk_idx, idx_stride, gmem_topk_weights, weights_stride, 0};
    dispatch(params, sync, TokenCount(params, gmem_num_tokens, num_rows), inputs, smem);
    pdl_wait();  // role4, where it was launched before: the end of this kernel is the end of both
}
