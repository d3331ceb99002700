// tile_wgmma.cu   The layer of tile.cu for MXFP4 on warpgroup products of E4M3. sm_90a.
#include "tile_wgmma_consumer.cuh"
#include "tile_wgmma_finisher.cuh"
#include "tile_wgmma_producer.cuh"
#include "tile_wgmma_stager.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_tile_wgmma(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride,
                   const float* gmem_topk_weights, int64_t weights_stride, const float* gmem_shared_weights,
                   int64_t shared_weights_stride, int32_t num_tokens, const uint8_t* gmem_w13,
                   const float* gmem_w13_matrix_scale, const float* gmem_w13_bias, const uint8_t* gmem_w2,
                   const float* gmem_w2_matrix_scale, const float* gmem_w2_bias, float alpha, float limit,
                   float up_offset, uint8_t* gmem_act, float* gmem_act_scale, float* gmem_dots, uint16_t* gmem_out,
                   int64_t out_stride, Shared* gmem_shared) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = uniform(threadIdx.x / kLanes), lane = threadIdx.x % kLanes;
    const bool produces = warp == kProducer;
    init_barriers(smem.barriers);
    clear_counts(smem.routing);
    if (threadIdx.x < 3 * kColumns) smem.x_amax[threadIdx.x / kColumns][threadIdx.x % kColumns] = 0;
    __syncthreads();
    pdl_launch_dependents();
    pdl_wait();
    uint32_t ticket = 0;
    if (produces && lane == 0) ticket = atom_add_relaxed_gpu_u32(&gmem_shared->ticket, 1);
    const Args args{gmem_x,
                    x_stride,
                    gmem_topk_weights,
                    weights_stride,
                    gmem_shared_weights,
                    shared_weights_stride,
                    num_tokens,
                    gmem_w13,
                    gmem_w2,
                    gmem_w13_matrix_scale,
                    gmem_w13_bias,
                    gmem_w2_matrix_scale,
                    gmem_w2_bias,
                    alpha,
                    limit,
                    up_offset,
                    gmem_act,
                    gmem_act_scale,
                    gmem_dots,
                    gmem_out,
                    out_stride,
                    gmem_shared};
    // The producer goes on to its first request.
    const AllRows rows(smem, args, warp, lane);
    const bool encodes = kHoldsAllRows && !produces;
    if (encodes) rows.fetch(smem, args);
    find_pairs(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kSlots);
    if (encodes) rows.encode(smem);
    if (warp < kConsumers) {
        registers_more<kConsumerRegisters>();
        Consumer(smem, args, warp, lane).run();
    } else {
        registers_fewer<kOtherRegisters>();
        if (produces) {
            if (lane == 0) Producer(smem, args).run(ticket);
        } else if (warp < kFirstStager) {
            Finisher(smem, args, warp - kFirstFinisher, lane).run();
        } else {
            Stager(smem, args, warp - kFirstStager, lane).run();
        }
    }
}
