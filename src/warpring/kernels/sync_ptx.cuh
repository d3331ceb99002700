// sync_ptx.cuh   Flags between CTAs and GPUs: what each instruction orders, and what it does not. Waits are in sync.cuh.
//
// Three things hold for all of them. Scope: `gpu` reaches the threads of this GPU, `sys` those of every GPU and the host; a
// flag that a peer writes or reads needs sys on both sides. Cumulativity: after a barrier of the CTA, one thread's release
// also publishes what the other threads wrote before the barrier, and after one thread's acquire a barrier hands what it
// saw to the others. Proxies: only generic loads and stores are ordered; data that a bulk copy (TMA) will read need
// fence_proxy_async_global() before it as well.
#pragma once
#include "ptx.cuh"

// ---- loads ---------------------------------------------------------------------------------------------------------

// Acquire: what the releasing thread wrote before its flag is visible to loads behind this one. Pairs with st_release_*,
// red_*_release_* and atom_*_acq_rel_*.
__device__ __forceinline__ uint32_t ld_acquire_sys_u32(const uint32_t* gmem_flag) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(gmem_flag) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t ld_acquire_sys_u64(const uint64_t* gmem_flag) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(gmem_flag) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ld_acquire_gpu_u32(const uint32_t* gmem_flag) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(gmem_flag) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t ld_acquire_gpu_u64(const uint64_t* gmem_flag) {
    uint64_t v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(gmem_flag) : "memory");
    return v;
}

// Relaxed: the value alone, never from L1 and never torn. Orders nothing: no other location may be read on its strength.
__device__ __forceinline__ uint32_t ld_relaxed_gpu_u32(const uint32_t* gmem) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(gmem) : "memory");
    return v;
}

// 16 bytes as one access (address a multiple of 16): a packet that carries its own tag is whole when the tag is right, and
// needs no order with anything else.
__device__ __forceinline__ ulonglong2 ld_relaxed_sys_b128(const void* gmem) {
    ulonglong2 v;
    asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(gmem)
                 : "memory");
    return v;
}
__device__ __forceinline__ ulonglong2 ld_relaxed_gpu_b128(const void* gmem) {
    ulonglong2 v;
    asm volatile("{ .reg .b128 v; ld.relaxed.gpu.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(gmem)
                 : "memory");
    return v;
}

// ---- stores and updates --------------------------------------------------------------------------------------------

// Relaxed stores of a packet, see ld_relaxed_*_b128. They publish nothing but themselves.
__device__ __forceinline__ void st_relaxed_sys_b128(void* gmem, ulonglong2 v) {
    asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }" ::"l"(gmem), "l"(v.x),
                 "l"(v.y)
                 : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu_b128(void* gmem, ulonglong2 v) {
    asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(gmem), "l"(v.x),
                 "l"(v.y)
                 : "memory");
}

// Release: every write of this thread before it (and of its CTA, if a barrier lies between) is visible to whoever acquires
// the value. Later writes may still move ahead of it.
__device__ __forceinline__ void st_release_gpu_u32(uint32_t* gmem_flag, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem_flag), "r"(v) : "memory");
}
__device__ __forceinline__ void st_release_sys_u32(uint32_t* gmem_flag, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(gmem_flag), "r"(v) : "memory");
}

// Additions with release and without a result. Several writers' additions form one release sequence: who acquires the sum
// sees what all of them published. Over NVLink these are remote atomics, performed where the memory is.
__device__ __forceinline__ void red_add_release_gpu_u32(uint32_t* gmem_flag, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(gmem_flag), "r"(v) : "memory");
}
__device__ __forceinline__ void red_add_release_sys_u64(uint64_t* gmem_flag, uint64_t v) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(gmem_flag), "l"(v) : "memory");
}

// Toggles bits, with release: a mask that is never reset means the opposite in every second use.
__device__ __forceinline__ void red_xor_release_gpu_u64(uint64_t* gmem_mask, uint64_t bits) {
    asm volatile("red.release.gpu.global.xor.b64 [%0], %1;" ::"l"(gmem_mask), "l"(bits) : "memory");
}

// Adds and gives the old value, with release of what came before and acquire of what the earlier adders released: the
// last of several CTAs to arrive may read what the others wrote.
__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu_u32(uint32_t* gmem_counter, uint32_t v) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(gmem_counter), "r"(v) : "memory");
    return old;
}

// Adds and gives the old value; orders nothing: tickets, of which each is given out once.
__device__ __forceinline__ uint32_t atom_add_relaxed_gpu_u32(uint32_t* gmem_counter, uint32_t v) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(gmem_counter), "r"(v) : "memory");
    return old;
}

// Compare and swap that orders nothing: it only picks one winner. Gives the old value.
__device__ __forceinline__ uint32_t atom_cas_relaxed_gpu_u32(uint32_t* gmem, uint32_t expected, uint32_t desired) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(gmem), "r"(expected), "r"(desired)
                 : "memory");
    return old;
}

// ---- fences and clocks ---------------------------------------------------------------------------------------------

// Orders generic accesses to global memory before bulk copies (async proxy) out of it that start later. One on the way from
// the write to the copy is enough: for data behind a flag, the reader's, between its acquire and its copy. Without the state
// space in its name it would also wait for all of this thread's stores.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The same for shared memory: what generic stores and cp_async_16() have written, as far as this thread knows of it, is
// there for warpgroup products behind this.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Nanoseconds of the GPU's clock; its steps can be as coarse as a microsecond. Good for bounds, not for timing a wait.
__device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v)::"memory");
    return v;
}

// Lets the multiprocessor do something else for between 0 and 2 * ns nanoseconds.
__device__ __forceinline__ void nanosleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }
