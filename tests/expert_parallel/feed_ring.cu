// feed_ring.cu   role1's half of the ring for tests of role2: blocks prepared by the host go into slots as these become
// free. The last num_blocks - num_fed of them never come.
#include "ep_common.cuh"

extern "C" __global__ void feed_ring(const EpParams params, const int32_t* gmem_blocks, const uint8_t* gmem_infos,
                                     const uint8_t* gmem_images, const float* gmem_scales, int32_t num_blocks,
                                     int32_t num_fed, int32_t plan_first) {
    const EpSync sync = ep_sync(params, params.gmem_state->generation + 1);
    const auto plan = [&](int b) {
        if (threadIdx.x == 0) write_plan_entry(params, sync.generation, b, gmem_blocks[2 * b], gmem_blocks[2 * b + 1]);
    };
    for (int b = 0; b < num_blocks && plan_first; ++b) plan(b);
    if (threadIdx.x == 0 && plan_first) write_plan_blocks(params, sync.generation, num_blocks);
    for (int b = 0; b < num_fed; ++b) {
        if (!plan_first) plan(b);
        const RingPlace place = ring_place(params, params.gmem_state->block_base, b);
        if (threadIdx.x == 0) {
            if (!wait_at_least_gpu(sync, kL1Empty, params.gmem_l1_empty + place.slot, place.use * kNeuronTasks))
                __trap();
            if (!wait_at_least_gpu(sync, kL2Empty, params.gmem_l2_empty + place.slot, place.use * kOutputTasks))
                __trap();
        }
        __syncthreads();
        const auto copy = [&](void* gmem_to, const void* gmem_from, int64_t bytes) {
            for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x)
                static_cast<uint8_t*>(gmem_to)[i] = static_cast<const uint8_t*>(gmem_from)[i];
        };
        copy(&ring_info(params, place.slot), gmem_infos + b * int64_t(sizeof(RingInfo)), sizeof(RingInfo));
        copy(ring_x(params, place.slot), gmem_images + b * kRingXSlotBytes, kRingXSlotBytes);
        copy(ring_x_scale(params, place.slot), gmem_scales + int64_t(b) * kScales * kBlockM, kScales * kBlockM * 4);
        __syncthreads();
        if (threadIdx.x == 0) st_release_gpu_u32(params.gmem_l1_full + place.slot, place.use + 1);
    }
    if (threadIdx.x == 0 && !plan_first) write_plan_blocks(params, sync.generation, num_blocks);
}
