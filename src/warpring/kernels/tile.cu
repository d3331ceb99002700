// tile.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b2[e,h]),   e = topk_idx[t,k]
//            act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b13[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b13[e,1,i])
//
// The whole layer in one launch. Runs on sm_90a; compiled for sm_100a and sm_103a, never run there.
//
// Grid     one CTA a multiprocessor. Work is given out by tickets: first groups of gate_up panels, the large ones
//          first, then units of down. A CTA waits only for tickets that running CTAs hold, so the grid need not be
//          resident as a whole.
// A CTA    producer warps take tickets and request weights, a unit of about 4 KB a bulk copy, as far ahead as the ring
//          allows: from gate_up into down without a gap. Stager warps fetch activations, those of down behind the flag
//          of their expert. Consumer warps multiply: of a gate_up panel each owns every kSplit-th unit, of down a panel
//          each. Finisher warps add the shares of gate_up up and apply the activation, and add the parts of a panel of
//          down up; one more warp raises the flags.
// Reads    every wanted weight byte once for each kMaxColumns pairs of its expert, in the order of memory
// Bound    HBM: distinct experts * 3 * intermediate * hidden * bytes_per_weight
// Sync     waits for its predecessor before anything is read or written. Inside: panels_done[entry] is added to with
//          release behind act, and acquired before act is fetched; parts_done[panel], with parts, is added to behind a
//          part's dot products, and whose addition is the last acquires all of them and clears it.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, pairs <= WARPRING_PAIRS; ids outside [0, num_experts) are skipped
#include "tile_consumer.cuh"
#include "tile_finisher.cuh"
#include "tile_producer.cuh"
#include "tile_stager.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_tile(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride,
             const float* gmem_topk_weights, int64_t weights_stride, const float* gmem_shared_weights,
             int64_t shared_weights_stride, int32_t num_tokens, const uint8_t* gmem_w13,
             const float* gmem_w13_matrix_scale, const float* gmem_w13_row_scale, const float* gmem_w13_block_scale,
             const float* gmem_w13_bias, const uint8_t* gmem_w2, const float* gmem_w2_matrix_scale,
             const float* gmem_w2_row_scale, const float* gmem_w2_block_scale, const float* gmem_w2_bias, float alpha,
             float limit, float up_offset, uint16_t* gmem_act, float* gmem_dots, uint16_t* gmem_out, int64_t out_stride,
             Shared* gmem_shared) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const bool produces = warp == kConsumers;
    init_barriers(smem.barriers, warp, lane);
    clear_counts(smem.routing);
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
                    gmem_w13_row_scale,
                    gmem_w13_block_scale,
                    gmem_w13_bias,
                    gmem_w2_matrix_scale,
                    gmem_w2_row_scale,
                    gmem_w2_block_scale,
                    gmem_w2_bias,
                    alpha,
                    limit,
                    up_offset,
                    gmem_act,
                    gmem_dots,
                    gmem_out,
                    out_stride,
                    gmem_shared};
    if (holds_all_rows(args)) fetch_all_rows(smem, args);
    find_pairs(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kSlots);
    cp_async_arrive(smem_address(&smem.barriers.x_staged));
    if (warp < kConsumers)
        Consumer(smem, args, warp, lane).run();
    else if (produces)
        Producer(smem, args, 0, lane).lead(__shfl_sync(kFull, ticket, 0));
    else if (warp < kFirstStager)
        Producer(smem, args, warp - kConsumers, lane).follow();
    else if (warp < kFirstFinisher)
        Stager(smem, args, warp - kFirstStager, lane).run();
    else if (warp < kFlagRaiser)
        Finisher(smem, args, warp - kFirstFinisher, lane).run();
    else
        raise_flags(smem, args);
}
