// ep_shared.cu   role4: the rank's own tokens into the first blocks of the ring, for the fused shared experts.
//
// Grid     comm_ctas CTAs of 256 threads, small enough to run beside role1's on the same multiprocessors
// Owner    CTA c: shared blocks c, c + C, ...; block s * ceil(T / BM) + i holds tokens i * BM, ... for shared expert s
// Reads    its tokens of x; quantised as role1 publishes them, so the bits are the same
// Sync     needs no peer; waits l1_empty, l2_empty; writes plan entries; signals l1_full
// Limits   those of role1, which reports a wrong token count
#include "ep_ring.cuh"
#include "ep_tokens.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    ep_shared(const __grid_constant__ EpParams params, const uint16_t* gmem_x, int64_t x_stride,
              const int32_t* gmem_num_tokens, int32_t num_rows, const float* gmem_shared_weights,
              int64_t shared_stride) {
    pdl_wait();  // in a chain: the kernel before, which may have written what this call reads
    pdl_launch_dependents();  // role1 needs nothing of this kernel
    __shared__ uint32_t smem_pair_id[kBlockM];
    __shared__ float smem_weight[kBlockM];
    const uint64_t generation = params.gmem_state->generation + 1, block_base = params.gmem_state->block_base;
    const EpSync sync = ep_sync(params, generation);
    const TokenCount token_count(params, gmem_num_tokens, num_rows);
    if (__syncthreads_or(is_poisoned(sync) || token_count.is_refused())) return;

    const int num_tokens = token_count.given;
    const int per_expert = ceil_div(num_tokens, kBlockM);
    const int num_blocks = kNumShared * per_expert;
    const auto count_of = [&](int block) { return min(num_tokens - block % per_expert * kBlockM, kBlockM); };
    if (blockIdx.x == 0)
        for (int b = threadIdx.x; b < num_blocks; b += kThreads)
            write_plan_entry(params, generation, b, kLocalExperts + b / per_expert, count_of(b));

    for (int block = blockIdx.x; block < num_blocks; block += gridDim.x) {
        const int shared = block / per_expert, first = block % per_expert * kBlockM, count = count_of(block);
        const int width = block_width(count);
        BlockFill fill(params, block_base, block, kLocalExperts + shared, count);
        if (!fill.may_write(params, sync)) return;  // a barrier too: warp 0 has read the last block's pair ids
        for (int n = threadIdx.x; n < count; n += kThreads) {
            const int64_t token = first + n;
            smem_pair_id[n] =
                uint32_t((params.peers.rank * params.max_tokens + token) * kSlotsPerToken + kTopk + shared);
            smem_weight[n] =
                gmem_shared_weights == nullptr ? 1.f : ld_routing(gmem_shared_weights + token * shared_stride + shared);
        }
        uint8_t* image = ring_x(params, fill.place.slot);
        float* gmem_scale = ring_x_scale(params, fill.place.slot);
        encode_tokens(
            Tokens<kThreads>{gmem_x, x_stride, first, 1, count},
            [&](int n, int chunk, int piece, uint4 codes) {
                uint8_t* gmem_chunk = image + chunk * width * kChunkBytes;
                *reinterpret_cast<uint4*>(gmem_chunk + image_offset(width, piece, n)) = codes;
            },
            [&](int n, int s, float scale) { gmem_scale[s * kBlockM + n] = scale; });
        if (!fill.publish(params, sync, smem_pair_id, smem_weight)) return;
    }
}
