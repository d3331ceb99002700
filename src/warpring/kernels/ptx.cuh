// ptx.cuh   The only inline assembly of the kernels: what an instruction does, and what it does not order.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

// 16-byte weight load: read-only path, not kept in L1 (a warp reads a weight once).
// It stays in L2 at normal priority: other tokens of the batch may want the same row a moment later.
__device__ __forceinline__ uint4 ld_weights(const void* gmem) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(gmem));
    return v;
}

// The same of 8 bytes.
__device__ __forceinline__ uint2 ld_weights_64(const void* gmem) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(gmem));
    return v;
}

// Scale loads through the read-only path; volatile so that they are issued where they are written,
// with the weights, and not sunk behind the dependency wait.
__device__ __forceinline__ uint32_t ld_scale_u8(const void* gmem) {
    uint32_t v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(gmem));
    return v;
}
__device__ __forceinline__ uint32_t ld_scale_u16(const void* gmem) {
    uint16_t v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(gmem));
    return v;
}
__device__ __forceinline__ float ld_scale_f32(const void* gmem) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(gmem));
    return v;
}

// 16 bytes of activations: an ordinary coherent load, since the previous kernel may have written them.
// The memory clobber keeps it behind pdl_wait(), which carries one too.
__device__ __forceinline__ uint4 ld_activations(const void* gmem) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(gmem)
                 : "memory");
    return v;
}

// Routing, likewise the previous kernel's output: coherent, and never moved across pdl_wait() (a `const __restrict__`
// pointer would let the compiler do that).
__device__ __forceinline__ int64_t ld_routing(const int32_t* gmem) {
    int32_t v;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(gmem) : "memory");
    return v;
}
__device__ __forceinline__ int64_t ld_routing(const int64_t* gmem) {
    int64_t v;
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(gmem) : "memory");
    return v;
}
__device__ __forceinline__ float ld_routing(const float* gmem) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(gmem) : "memory");
    return v;
}

// The value, of which the compiler knows nothing: a loop of so many rounds stays a loop. (The assembler unrolls some of known
// length whatever the pragma says: 56 units of down came out as 300 KB of straight code, 2.5 times as slow.)
__device__ __forceinline__ int opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Programmatic dependent launch. pdl_wait() returns once every kernel before this one in the stream has completed
// and its writes are visible; without the launch attribute it returns at once, the stream's order being enough.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start once every CTA of this one has come here or exited.
// It publishes nothing: what this kernel writes is visible only behind the next kernel's pdl_wait().
__device__ __forceinline__ void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Two E4M3 codes, the low or the high 16 bits, to two FP16 values, exact (FP16 holds every E4M3 value; NaN stays NaN).
__device__ __forceinline__ uint32_t cvt_e4m3x2_f16x2_low(uint32_t codes) {
    uint32_t halves;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }" : "=r"(halves) : "r"(codes));
    return halves;
}
__device__ __forceinline__ uint32_t cvt_e4m3x2_f16x2_high(uint32_t codes) {
    uint32_t halves;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi; }" : "=r"(halves) : "r"(codes));
    return halves;
}

__device__ __forceinline__ float cvt_f16_f32_low(uint32_t halves) {
    float v;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(v) : "r"(halves));
    return v;
}
__device__ __forceinline__ float cvt_f16_f32_high(uint32_t halves) {
    float v;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(v) : "r"(halves));
    return v;
}

// FP32 to BF16, round to nearest even, NaN stays NaN.
__device__ __forceinline__ uint16_t cvt_f32_bf16(float v) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

// Two FP32 values to FP16, round to nearest even; beyond FP16 becomes Inf, NaN stays NaN.
__device__ __forceinline__ uint32_t cvt_f32_f16x2(float high, float low) {
    uint32_t halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

// Two FP32 values to E4M3 codes, round to nearest even; beyond 448 becomes 448, NaN stays NaN.
__device__ __forceinline__ uint16_t cvt_f32x2_e4m3x2(float high, float low) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}
// The same of two FP16 values.
__device__ __forceinline__ uint16_t cvt_f16x2_e4m3x2(uint32_t halves) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(halves));
    return codes;
}

// a - b, two FP16 values.
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// ---- tensor cores --------------------------------------------------------------------------------------------------

// d += a * b, one 16 x 8 tile over 16 columns, BF16 in, FP32 sums.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two BF16 products, subnormals kept.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// The same with one half of `b` for both products; a modifier of the multiplication, not an instruction.
__device__ __forceinline__ uint32_t mul_bf16x2_by_low(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("{ .reg .b16 lo, hi; .reg .b32 both; mov.b32 {lo, hi}, %2; mov.b32 both, {lo, lo}; mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(v)
        : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ uint32_t mul_bf16x2_by_high(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("{ .reg .b16 lo, hi; .reg .b32 both; mov.b32 {lo, hi}, %2; mov.b32 both, {hi, hi}; mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(v)
        : "r"(a), "r"(b));
    return v;
}

__device__ __forceinline__ uint32_t cvt_f32_bf16x2(float high, float low) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// ---- shared memory and bulk copies ---------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t smem_address(const void* smem) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

__device__ __forceinline__ void mbarrier_init(uint32_t smem_barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Copies `bytes` (a multiple of 16, both addresses too) into shared memory and counts them on the barrier, which this call
// tells what to expect and arrives at. Complete when the barrier's phase flips; orders nothing else.
__device__ __forceinline__ void bulk_load(uint32_t smem_dst, const void* gmem_src, uint32_t bytes, uint32_t smem_barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_dst),
                 "l"(gmem_src), "r"(bytes), "r"(smem_barrier)
                 : "memory");
}

// Whether the phase of that parity has completed; the hardware may suspend the thread for a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t smem_barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(smem_barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// The same at once: never suspends the thread.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t smem_barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(smem_barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// One arrival on a barrier of this CTA. Releases what this thread wrote before it, and what other lanes wrote before a
// __syncwarp() ahead of it, to threads that see the phase flip.
__device__ __forceinline__ void mbarrier_arrive(uint32_t smem_barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_barrier) : "memory");
}

// Copies 16 bytes into shared memory for this lane, past L1. Ordered by nothing but cp_async_arrive() and the wait on its
// barrier.
__device__ __forceinline__ void cp_async_16(uint32_t smem_dst, const void* gmem_src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_dst), "l"(gmem_src) : "memory");
}

// One arrival, counted among those the barrier was initialised with, once all earlier cp_async_16() of this lane are complete.
__device__ __forceinline__ void cp_async_arrive(uint32_t smem_barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_barrier) : "memory");
}

__device__ __forceinline__ uint4 ld_shared_128(uint32_t smem) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
    return v;
}
__device__ __forceinline__ uint2 ld_shared_64(uint32_t smem) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem));
    return v;
}
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t smem) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem));
    return v;
}
__device__ __forceinline__ void st_shared_u32(uint32_t smem, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t smem) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem));
    return v;
}

// ---- barriers of parts of a CTA ------------------------------------------------------------------------------------

// Waits for `threads` threads of the CTA, a multiple of 32; orders what they wrote before.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One arrival that also tells the barrier to expect `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t smem_barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_barrier), "r"(bytes) : "memory");
}

// A bulk copy into shared memory whose bytes were announced by mbarrier_arrive_expect_tx. Read through the async proxy:
// what generic stores of other threads wrote needs fence_proxy_async_global() behind the acquire.
__device__ __forceinline__ void bulk_copy(uint32_t smem_dst, const void* gmem_src, uint32_t bytes,
                                          uint32_t smem_barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_dst),
        "l"(gmem_src), "r"(bytes), "r"(smem_barrier)
        : "memory");
}
