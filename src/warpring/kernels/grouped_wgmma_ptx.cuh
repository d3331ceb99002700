// grouped_wgmma_ptx.cuh   Warpgroup matrix products of BF16, A in registers, B in shared memory in rows of 128 bytes.
//
// Registers of A and of the sums, and what must lie between products and uses of them: see ep_wgmma_ptx.cuh.
#pragma once
#include "ep_wgmma_ptx.cuh"

#define WARPRING_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WARPRING_SUMS16(i) WARPRING_SUMS4(i), WARPRING_SUMS4(i + 4), WARPRING_SUMS4(i + 8), WARPRING_SUMS4(i + 12)

// d = a * b, or d += a * b with scale_d != 0: 64 rows of A, 16 columns of K, N columns of B.
template <int N>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint64_t b_desc, int scale_d) {
    static_assert(N == 16 || (N % 32 == 0 && N <= 256), "columns of one product");
    if constexpr (N == 16) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
            : WARPRING_SUMS4(0), WARPRING_SUMS4(4)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 32) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 64) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 96) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "{%48, %49, %50, %51}, %52, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 128) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32), WARPRING_SUMS16(48)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 160) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %85, 0; wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
            " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
            "{%80, %81, %82, %83}, %84, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32), WARPRING_SUMS16(48), WARPRING_SUMS16(64)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 192) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
            " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
            " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
            "{%96, %97, %98, %99}, %100, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32), WARPRING_SUMS16(48), WARPRING_SUMS16(64),
              WARPRING_SUMS16(80)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 224) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %117, 0; wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
            " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
            " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
            " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111}, "
            "{%112, %113, %114, %115}, %116, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32), WARPRING_SUMS16(48), WARPRING_SUMS16(64),
              WARPRING_SUMS16(80), WARPRING_SUMS16(96)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
            " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
            " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
            " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
            " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
            "{%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
            : WARPRING_SUMS16(0), WARPRING_SUMS16(16), WARPRING_SUMS16(32), WARPRING_SUMS16(48), WARPRING_SUMS16(64),
              WARPRING_SUMS16(80), WARPRING_SUMS16(96), WARPRING_SUMS16(112)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    }
}

#undef WARPRING_SUMS16
#undef WARPRING_SUMS4

// Descriptor of an operand B, K-major in rows of 128 bytes, whose 16-byte units lie at their place XOR the row modulo 8:
// of columns [16 step, 16 step + 16) of BF16. `smem` divides by 1024.
__device__ __forceinline__ uint64_t b_descriptor_swizzled(uint32_t smem, int step) {
    constexpr uint64_t kNextRows = 1024 >> 4, kSwizzle128 = 1;
    // The lower word by itself: additions carry nothing into the upper one.
    const uint32_t low = ((smem >> 4) + 2 * step) | 1 << 16;
    return low | kNextRows << 32 | kSwizzle128 << 62;
}
