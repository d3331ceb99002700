// ep_ring.cuh   How role1 and role4 fill a block of the ring: the writer's side of its signals.
#pragma once
#include "ep_common.cuh"

// The fill of one block by one CTA. Order of calls, all by the whole CTA:
//   may_write()   tokens and scales of the slot may be overwritten
//   publish()     when they have been, and info has been staged in shared memory
// Both are false when the layer is poisoned, for all threads alike.
struct BlockFill {
    static constexpr int kInfoThread = kLanes;  // looks at l2_empty while thread 0 looks at l1_empty

    RingPlace place;
    int32_t expert, count;
    bool info_free;  // of kInfoThread: l2_empty was seen to be high enough already

    __device__ __forceinline__ BlockFill(const EpParams& params, uint64_t block_base, int block, int32_t e, int32_t n)
        : place(ring_place(params, block_base, block)), expert(e), count(n), info_free(false) {}

    // The first GEMM of the slot's previous use has read its tokens. Looks at l2_empty by the way: in almost every case it
    // saves publish() the latency of a load.
    __device__ __forceinline__ bool may_write(const EpParams& params, const EpSync& sync) {
        bool failed = false;
        if (threadIdx.x == 0)
            failed = !wait_at_least_gpu(sync, kL1Empty, params.gmem_l1_empty + place.slot, place.use * kNeuronTasks);
        if (threadIdx.x == kInfoThread)
            info_free = int32_t(ld_acquire_gpu_u32(params.gmem_l2_empty + place.slot) - second_gemm_target()) >= 0;
        return !__syncthreads_or(failed);
    }

    // Waits for the second GEMM of the slot's previous use, which reads info and act, then hands the block over: the barrier
    // lets thread 0 publish every thread's stores. The fence for the copy engine is the reader's, behind its acquire: one on
    // the way is enough, and here it would cost every thread a wait for its stores.
    __device__ __forceinline__ bool publish(const EpParams& params, const EpSync& sync, const uint32_t* smem_pair_id,
                                            const float* smem_weight) {
        bool failed = false;
        if (threadIdx.x == kInfoThread && !info_free)
            failed = !wait_at_least_gpu(sync, kL2Empty, params.gmem_l2_empty + place.slot, second_gemm_target());
        if (__syncthreads_or(failed)) return false;
        if (threadIdx.x / kLanes == 0) {
            RingInfo& info = ring_info(params, place.slot);
            if (threadIdx.x == 0) {
                info.expert = expert;
                info.count = count;
            }
#pragma unroll 1
            for (int n = threadIdx.x; n < count; n += kLanes) {
                info.pair_id[n] = smem_pair_id[n];
                info.weight[n] = smem_weight[n];
            }
            __syncwarp();
            if (threadIdx.x == 0) st_release_gpu_u32(params.gmem_l1_full + place.slot, place.use + 1);
        }
        return true;
    }

    __device__ __forceinline__ uint32_t second_gemm_target() const { return place.use * kOutputTasks; }
};
