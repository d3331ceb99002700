// sync.cuh   The only waits between CTAs and between GPUs: bounded in nanoseconds, left at once when the layer is poisoned,
// and what went wrong is reported to the host before anyone gives up.
//
// EpCode and EpFlag are mirrored by warpring/expert_parallel/flags.py, which also has the words for them.
#pragma once
#include "ep_params.cuh"
#include "sync_ptx.cuh"

// What went wrong (EpError::code).
enum EpCode : uint32_t {
    kOk = 0,
    kTimeout = 1,            // a flag did not come: peer, flag, expected, seen
    kTooManyTokens = 2,      // this rank's token count: expected = the limit, seen = the count
    kPeerTooManyTokens = 3,  // a peer's token count was refused by the peer
    kOverlap = 4,            // a call began while another one held the same workspace
};

// Which flag was waited for (EpError::flag). docs/sync.md has a record of each.
enum EpFlag : uint32_t {
    kNoFlag = 0,
    kMeta = 1,
    kArrived = 2,
    kDone = 3,
    kPlan = 4,
    kL1Full = 5,
    kL1Empty = 6,
    kL2Full = 7,
    kL2Empty = 8,
};

// What a wait needs to know beside its flag.
struct EpSync {
    EpState* gmem_state;
    EpError* pinned_error;
    uint64_t timeout_ns;
    uint64_t generation;  // of this call, for the report
    int32_t rank;
};

__device__ __forceinline__ EpSync ep_sync(const EpParams& params, uint64_t generation) {
    return {params.gmem_state, params.pinned_error, params.timeout_ns, generation, params.peers.rank};
}

__device__ __forceinline__ bool is_poisoned(const EpSync& sync) {
    return ld_relaxed_gpu_u32(&sync.gmem_state->poison) != 0;
}

// Poisons the layer and reports why; of several threads that fail, only the first reports. The record's code is written
// last, with release at system scope: a host that reads a code reads the rest too.
__device__ __noinline__ void report_failure(const EpSync& sync, EpCode code, EpFlag flag, int peer, uint64_t expected,
                                            uint64_t seen) {
    if (atom_cas_relaxed_gpu_u32(&sync.gmem_state->poison, 0, 1) != 0) return;
    EpError& error = *sync.pinned_error;
    error.rank = sync.rank;
    error.peer = peer;
    error.flag = flag;
    error.generation = sync.generation;
    error.expected = expected;
    error.seen = seen;
    st_release_sys_u32(&error.code, code);
}

// Calls `try_once(seen)` until it returns true, which makes the result true; `seen` is what a report would show. Gives up
// with false when the layer is poisoned, or after sync.timeout_ns, which it reports. Waits for this rank's own kernels
// (peer -1) last twice as long: those kernels wait for peers, and the report should name the peer that is missing. The clock
// and the poison are looked at every kPollsPerCheck polls. What a true result orders is what try_once's load orders.
template <class TryOnce>
__device__ __forceinline__ bool wait_until(const EpSync& sync, EpFlag flag, int peer, uint64_t expected,
                                           TryOnce try_once) {
    constexpr int kPollsPerCheck = 32;
    uint64_t seen = 0;
    if (try_once(seen)) return true;
    const uint64_t start = globaltimer_ns(), bound = peer < 0 ? 2 * sync.timeout_ns : sync.timeout_ns;
    int polls = 0;
#pragma unroll 1
    while (!try_once(seen)) {
        if (++polls % kPollsPerCheck != 0) continue;
        if (is_poisoned(sync)) return false;
        if (globaltimer_ns() - start > bound) {
            report_failure(sync, kTimeout, flag, peer, expected, seen);
            return false;
        }
    }
    return true;
}

// Until a monotonic counter has come to `target`, modulo its width; acquire at GPU scope.
__device__ __forceinline__ bool wait_at_least_gpu(const EpSync& sync, EpFlag flag, const uint32_t* gmem_flag,
                                                  uint32_t target) {
    return wait_until(sync, flag, -1, target, [&](uint64_t& seen) {
        const uint32_t value = ld_acquire_gpu_u32(gmem_flag);
        seen = value;
        return int32_t(value - target) >= 0;
    });
}

// Until a counter that a peer adds to has come to `target`; acquire at system scope.
__device__ __forceinline__ bool wait_at_least_sys(const EpSync& sync, EpFlag flag, int peer, const uint64_t* gmem_flag,
                                                  uint64_t target) {
    return wait_until(sync, flag, peer, target, [&](uint64_t& seen) {
        seen = ld_acquire_sys_u64(gmem_flag);
        return int64_t(seen - target) >= 0;
    });
}
