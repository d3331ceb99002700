// tile_wgmma_consumer.cuh   Warpgroups multiply: a quarter of the columns of each slab of gate_up, whole items of down.
#pragma once
#include "sync_ptx.cuh"
#include "tile_wgmma_products.cuh"

constexpr int kConsumerBarrier = 1;

__device__ __forceinline__ int32_t uniform(int32_t v) { return __shfl_sync(kFull, v, 0); }

struct Consumer {
    Smem& smem;
    const Args& args;
    int group, warp, lane;  // warpgroup, and warp of it
    Turn<kStages> ring;
    Turn<kShares> shares;
    int groups = 0;  // of gate_up, so far

    __device__ __forceinline__ Consumer(Smem& s, const Args& a, int w, int l)
        : smem(s), args(a), group(w / kGroupWarps), warp(w % kGroupWarps), lane(l) {}

    __device__ __forceinline__ void arrive(uint64_t& barrier) const {
        __syncwarp();
        mbarrier_arrive_if(smem_address(&barrier), lane == 0);
    }
    __device__ __forceinline__ int row() const { return warp * 16 + lane / 4; }
    __device__ __forceinline__ int column() const { return lane % 4 * 2; }

    __device__ __forceinline__ void gate_up(int count) {
        constexpr int kLeast = kGateUpBlocks / kGroups, kMost = ceil_div(kGateUpBlocks, kGroups);
        const int slot = groups % kXImages;
        if (!kHoldsAllRows) mbarrier_wait(smem_address(&smem.barriers.x_full[slot]), groups / kXImages & 1);
        const int first = first_block(group), blocks = first_block(group + 1) - first;
        const uint64_t image = b_descriptor(
            smem_address(smem.images) + slot * kXImageBytes + first * 2 * kStepBytes, kColumns);
        Products<false> products(ring, smem, args, group, warp, lane);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            products.clear();
            products.template run<kLeast, kMost>(blocks, image, 0);
            mbarrier_wait(smem_address(&smem.barriers.shares_empty[shares.stage]), shares.parity ^ 1);
            float (&share)[kColumns][kShareStride] = smem.shares[shares.stage][group];
#pragma unroll
            for (int s = 0; s < 4; ++s) share[column() + s % 2][row() + s / 2 * 8] = products.sum[s];
            arrive(smem.barriers.shares_full[shares.stage]);
            shares.next();
        }
        if (!kHoldsAllRows) arrive(smem.barriers.x_empty[slot]);
        ++groups;
    }

    // One entry of a slab of down.
    __device__ __forceinline__ void item(const Place& at, int image_slot) {
        const Wanted wanted(smem.routing, at.entry);
        const int first_column = smem.routing.first[at.entry] - at.first_pair;
        const int64_t first_row = int64_t(wanted.expert) * kHidden + at.slab * kSlabOutputs;
        const float scale = args.gmem_w2_matrix_scale[wanted.expert];
        float bias[2] = {0.f, 0.f};
        if (args.gmem_w2_bias != nullptr) {
            bias[0] = args.gmem_w2_bias[first_row + row()];
            bias[1] = args.gmem_w2_bias[first_row + row() + 8];
        }
        const uint64_t image =
            b_descriptor(smem_address(smem.images) + kActAt + image_slot * kActImageBytes, kColumns);
        Products<true> products(ring, smem, args, group, warp, lane);
        products.clear();
        products.template run<kDownBlocks, kDownBlocks>(kDownBlocks, image,
                                                        smem_address(smem.act_scale[image_slot][column()]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = column() + i % 2 - first_column;
            if (c < 0 || c >= wanted.count) continue;
            args.gmem_dots[int64_t(wanted.smem_pairs[c]) * kHidden + at.slab * kSlabOutputs + row() + i / 2 * 8] =
                fmaf(products.sum[i], scale, bias[i / 2]);
        }
    }

    // The dot products of `items` of a slab's entries are there. The CTA that has the last of them adds a token's slots up,
    // in their order.
    __device__ __forceinline__ void slab_done(int slab, int items) {
        named_barrier_sync(kConsumerBarrier, kConsumerThreads);
        if (threadIdx.x == 0) {
            uint32_t* gmem_done = &args.gmem_shared->items_done[slab];
            const bool last = int(atom_add_acq_rel_gpu_u32(gmem_done, items)) + items == smem.routing.num_entries;
            if (last) *gmem_done = 0;
            smem.completes = last;
        }
        named_barrier_sync(kConsumerBarrier, kConsumerThreads);
        if (smem.completes) sum_up(slab);
    }
    __device__ __forceinline__ void sum_up(int slab) const {
        constexpr int kQuads = kSlabOutputs / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < args.num_tokens * kQuads; i += kConsumerThreads) {
            const int token = i / kQuads, column = slab * kSlabOutputs + i % kQuads * 4;
            float y[4] = {0.f, 0.f, 0.f, 0.f};
            // No branch, so that the loads of several slots are on their way at once.
#pragma unroll 8
            for (int slot = 0; slot < kSlots; ++slot) {
                const int pair = token * kSlots + slot;
                const uint4 bits = ld_activations(args.gmem_dots + int64_t(pair) * kHidden + column);
                const float dots[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                       __uint_as_float(bits.w)};
                const bool used = smem.routing.ids[pair] != kUnused;
                const float weight = smem.weights[pair];
#pragma unroll
                for (int r = 0; r < 4; ++r) y[r] = used ? fmaf(weight, dots[r], y[r]) : y[r];
            }
            uint16_t* gmem_out = args.gmem_out + token * args.out_stride + column;
#pragma unroll
            for (int r = 0; r < 4; ++r) gmem_out[r] = cvt_f32_bf16(y[r]);
        }
    }

    __device__ __forceinline__ void down() {
        const Routing& routing = smem.routing;
        const Share share(routing);
        const int entries = uniform(routing.num_entries), count = uniform(share.count);
        Place at(routing, share);
        int image = -1, slot = 0, items = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (uniform(at.image) != image) {
                if (image >= 0) arrive(smem.barriers.act_empty[slot]);
                image = uniform(at.image);
                slot = image % kActImages;
                mbarrier_wait(smem_address(&smem.barriers.act_full[slot]), image / kActImages & 1);
                fence_proxy_async_shared();
            }
            if (i % kGroups == group) item(at, slot);
            ++items;
            const int slab = uniform(at.slab);
            at.next(routing);
            if (uniform(at.slab) != slab || i + 1 == count) {
                slab_done(slab, items);
                items = 0;
            }
        }
        // Without a pair nobody is the last: the first CTA writes zeros.
        if (entries == 0 && blockIdx.x == 0)
            for (int slab = 0; slab < kDownSlabs; ++slab) sum_up(slab);
    }

    __device__ __forceinline__ void run() {
        load_pair_weights<kConsumerThreads>(smem.weights, args);  // seen by all behind the barriers of slab_done()
        Turn<kQueue> queue;
        while (true) {
            mbarrier_wait(smem_address(&smem.barriers.posted[queue.stage]), queue.parity);
            const Group& next = smem.group[queue.stage];
            const int entry = uniform(next.entry), count = uniform(next.count);
            if (entry == kEnd) break;
            gate_up(count);
            arrive(smem.barriers.left[queue.stage]);
            queue.next();
        }
        arrive(smem.barriers.gate_up_over);
        down();
    }
};
