// tile_wgmma_stager.cuh   Brings activations: rows of x become two E4M3 numbers a value, rows of act come as such.
#pragma once
#include "sync_ptx.cuh"
#include "tile_wgmma_smem.cuh"

// Rows of x as an image, by the warps worker, worker + workers, ... of `workers`. Lane 4 c + q has columns 8 q .. 8 q + 7
// of every 32, of pair c of the image. The rows are fetched to where their terms will be.
template <int kWorkers>
struct Image {
    uint32_t smem;  // of this lane's 16 bytes of the first 32 columns
    int worker, lane;
    bool exists;  // this lane's pair

    __device__ __forceinline__ void fetch(const uint16_t* gmem_row) const {
        if (!exists) return;
#pragma unroll 4
        for (int step = worker; step < kXSteps; step += kWorkers)
            cp_async_16(smem + step * kStepBytes + lane * 16, gmem_row + step * 32 + lane % 4 * 8);
    }
    // Once they are there: the largest magnitude of the row so far as this worker has it.
    __device__ __forceinline__ void find_largest(uint32_t* smem_largest) const {
        uint32_t largest = 0;
        if (exists) {
#pragma unroll 4
            for (int step = worker; step < kXSteps; step += kWorkers) {
                const uint4 bits = ld_shared_128(smem + step * kStepBytes + lane * 16);
                const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
                for (int w = 0; w < 4; ++w) largest = max(max(largest, words[w] << 16 & 0x7fffffffu), words[w] & 0x7fff0000u);
            }
        }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) largest = max(largest, __shfl_xor_sync(kFull, largest, d));
        if (lane % 4 == 0 && exists) atomicMax(smem_largest + lane / 4, largest);
    }
    __device__ __forceinline__ void encode(uint32_t largest, float* smem_scale) const {
        const TermScale scale = two_term_scale(largest);
        if (worker == 0 && lane % 4 == 0 && exists) smem_scale[lane / 4] = scale.scale;
        const uint32_t own = smem + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll 1
        for (int step = worker; step < kXSteps; step += kWorkers) {
            uint4 bits = {};
            if (exists) bits = ld_shared_128(smem + step * kStepBytes + lane * 16);
            __syncwarp();
            if (exists) {
                const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
                for (int piece = 0; piece < 2; ++piece) {
                    uint32_t high = 0, low = 0;
#pragma unroll
                    for (int w = 0; w < 2; ++w) {
                        const uint32_t pair = words[piece * 2 + w];
                        const TermPair terms = terms_of(__uint_as_float(pair << 16) * scale.multiplier,
                                                        __uint_as_float(pair & 0xffff0000u) * scale.multiplier);
                        high |= uint32_t(terms.high) << (16 * w), low |= uint32_t(terms.low) << (16 * w);
                    }
                    const uint32_t place = own + step * kStepBytes + piece * kPieceBytes;
                    st_shared_u32(place, high);
                    st_shared_u32(place + kTermBytes, low);
                }
            }
        }
        fence_proxy_async_shared();
    }
};

constexpr int kConvertBarrier = 2;

// Few tokens: all rows of x, by all warps but the producer's.
struct AllRows {
    Image<kWarps - 1> image;
    __device__ __forceinline__ AllRows(Smem& smem, const Args& args, int warp, int lane)
        : image{smem_address(smem.images), warp - (warp > kProducer), lane, lane / 4 < args.num_tokens} {}
    __device__ __forceinline__ void fetch(Smem& smem, const Args& args) const {
        image.fetch(args.gmem_x + image.lane / 4 * args.x_stride);
        cp_async_arrive(smem_address(&smem.barriers.x_fetched[0]));
    }
    __device__ __forceinline__ void encode(Smem& smem) const {
        constexpr int kConverting = (kWarps - 1) * kLanes;
        wait_warp(smem.barriers.x_fetched[0], 0);
        image.find_largest(smem.x_amax[0]);
        named_barrier_sync(kConvertBarrier, kConverting);
        image.encode(smem.x_amax[0][image.lane / 4], smem.x_scale[0]);
        named_barrier_sync(kConvertBarrier, kConverting);
    }
};

struct Stager {
    Smem& smem;
    const Args& args;
    int stager, lane;
    int groups = 0;  // so far

    __device__ __forceinline__ Stager(Smem& s, const Args& a, int i, int l) : smem(s), args(a), stager(i), lane(l) {}

    // Rows of x of a group's pairs.
    __device__ __forceinline__ void gate_up(const Group& group) {
        const Wanted wanted(smem.routing, group.entry);
        const int slot = groups % kXImages, parity = groups / kXImages & 1;
        wait_warp(smem.barriers.x_empty[slot], parity ^ 1);
        const int column = lane / 4;
        const Image<kStagers> image{smem_address(smem.images) + slot * kXImageBytes, stager, lane, column < wanted.count};
        image.fetch(args.gmem_x + wanted.smem_pairs[min(column, wanted.count - 1)] / kSlots * args.x_stride);
        uint64_t& fetched = smem.barriers.x_fetched[slot];
        cp_async_arrive(smem_address(&fetched));
        wait_warp(fetched, parity);
        image.find_largest(smem.x_amax[groups % 3]);
        named_barrier_sync(kConvertBarrier, kStagers * kLanes);
        // Read by all before this barrier, added to by none before the next.
        if (stager == 0 && lane < kColumns) smem.x_amax[(groups + 2) % 3][lane] = 0;
        image.encode(smem.x_amax[groups % 3][column], smem.x_scale[slot]);
        arrive_warp(smem.barriers.x_full[slot]);
        ++groups;
    }

    // Until the activations of entries [first, last), 32 at most, are there.
    __device__ __forceinline__ void wait_for_act(int first, int last) const {
        if (first + lane < last)
            wait_for_count(args.gmem_shared->slabs_done + first + lane, kGateUpSlabs * kFinishers);
        __syncwarp();
    }

    __device__ __forceinline__ void down() {
        const Routing& routing = smem.routing;
        const Share share(routing);
        if (!kActApart && share.count > 0) wait_warp(smem.barriers.gate_up_over, 0);
        Place at(routing, share);
#pragma unroll 1
        for (int item = 0; item < share.count;) {
            const int image = at.image, first = at.entry, first_pair = at.first_pair;
            int last_pair;
            int last;
            do {
                last = at.entry + 1;
                last_pair = routing.first[last];
                at.next(routing);
                ++item;
            } while (item < share.count && at.image == image);
            const int slot = image % kActImages;
            wait_warp(smem.barriers.act_empty[slot], (image / kActImages & 1) ^ 1);
            wait_for_act(first, last);
            const int count = last_pair - first_pair;
            const uint32_t smem_image = smem_address(smem.images) + kActAt + slot * kActImageBytes;
#pragma unroll 1
            for (int i = stager * kLanes + lane; i < kActPieces * kColumns; i += kStagers * kLanes) {
                const int column = i % kColumns, piece = i / kColumns;
                if (column < count)
                    cp_async_16(smem_image + piece * kPieceBytes + column * 16,
                                args.gmem_act + int64_t(routing.pairs[first_pair + column]) * kActRowBytes + piece * 16);
            }
            const uint32_t smem_scale = smem_address(smem.act_scale[slot]);
#pragma unroll 1
            for (int i = stager * kLanes + lane; i < kActScales / 4 * kColumns; i += kStagers * kLanes) {
                const int column = i % kColumns, piece = i / kColumns;
                if (column < count)
                    cp_async_16(smem_scale + (column * kActScaleStride + piece * 4) * 4,
                                args.gmem_act_scale + int64_t(routing.pairs[first_pair + column]) * kActScales + piece * 4);
            }
            cp_async_arrive(smem_address(&smem.barriers.act_full[slot]));
        }
        __syncwarp();
        uint32_t before = 0;
        if (lane == 0) before = atom_add_acq_rel_gpu_u32(&args.gmem_shared->finished, 1);
        if (__shfl_sync(kFull, before, 0) == gridDim.x * kStagers - 1) {
            // Nobody looks at the flags again, and each was seen complete.
#pragma unroll 1
            for (int i = lane; i < routing.num_entries; i += kLanes) args.gmem_shared->slabs_done[i] = 0;
            if (lane == 0) args.gmem_shared->finished = 0;
        }
    }

    __device__ __forceinline__ void run() {
        Turn<kQueue> queue;
        while (true) {
            wait_warp(smem.barriers.posted[queue.stage], queue.parity);
            const Group group = smem.group[queue.stage];
            if (group.entry == kEnd) break;
            if (!kHoldsAllRows) gate_up(group);
            arrive_warp(smem.barriers.left[queue.stage]);
            queue.next();
        }
        down();
    }
};
