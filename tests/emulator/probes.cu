// probes.cu   Kernels that ask the emulator for one thing each; test_emulator.py knows the answers.
#include "sync_ptx.cuh"

// ---- warps ---------------------------------------------------------------------------------------------------------

extern "C" __global__ void shuffles(const int32_t* in, int32_t width, int32_t by, int32_t* out) {
    const int lane = threadIdx.x;
    const int32_t v = in[lane];
    out[lane] = __shfl_sync(0xffffffffu, v, by, width);
    out[32 + lane] = __shfl_up_sync(0xffffffffu, v, by, width);
    out[64 + lane] = __shfl_down_sync(0xffffffffu, v, by, width);
    out[96 + lane] = __shfl_xor_sync(0xffffffffu, v, by, width);
}

extern "C" __global__ void votes(const int32_t* in, uint32_t* out) {
    const int lane = threadIdx.x;
    const int32_t v = in[lane];
    const uint32_t half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane < 16) {
        out[lane] = __ballot_sync(half, v & 1);
        out[32 + lane] = __any_sync(half, v > 90);
    } else {
        out[lane] = __ballot_sync(half, v & 1);
        out[32 + lane] = __any_sync(half, v > 90);
    }
    out[64 + lane] = __all_sync(0xffffffffu, v >= 0);
    out[96 + lane] = __match_any_sync(0xffffffffu, v);
    out[128 + lane] = __reduce_add_sync(0xffffffffu, uint32_t(v));
    out[160 + lane] = __reduce_max_sync(0xffffffffu, v);
}

extern "C" __global__ void leaves_out_itself() { __shfl_sync(0xfffffffeu, 1, 0); }

extern "C" __global__ void reads_absent_lane(int32_t* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
}

extern "C" __global__ void diverges(float* out) {
    float d[4] = {};
    if (threadIdx.x < 16)
        mma_bf16(d, 0, 0, 0, 0, 0, 0);
    else
        mma_bf16(d, 1, 1, 1, 1, 1, 1);
    out[threadIdx.x] = d[0];
}

// ---- conversions ---------------------------------------------------------------------------------------------------

extern "C" __global__ void decodes_e4m3(uint32_t* halves, float* floats) {
    const uint32_t code = threadIdx.x;
    halves[code] = cvt_e4m3x2_f16x2_low(code << 8 | code);
    halves[256 + code] = cvt_e4m3x2_f16x2_high(code << 24 | code << 16);
    floats[code] = cvt_f16_f32_high(halves[code]);
}

extern "C" __global__ void decodes_f16(float* floats) {
    for (uint32_t code = threadIdx.x; code < 65536; code += blockDim.x) floats[code] = cvt_f16_f32_low(code);
}

extern "C" __global__ void encodes(const float* in, int32_t count, uint16_t* bf16, uint16_t* f16, uint16_t* e4m3,
                                   uint32_t* products) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        bf16[i] = cvt_f32_bf16(in[i]);
        f16[i] = cvt_f32_f16(in[i]);
        e4m3[i] = cvt_f32x2_e4m3x2(in[i], in[(i + 1) % count]);
        products[i] = mul_bf16x2(cvt_f32_bf16x2(in[i], in[(i + 1) % count]),
                                 cvt_f32_bf16x2(in[(i + 2) % count], in[(i + 3) % count]));
    }
}

// ---- tensor cores: row-major a [rows][k], b [columns][k]
// -------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint8_t* matrix, int row, int row_bytes, int byte) {
    return *reinterpret_cast<const uint32_t*>(matrix + row * row_bytes + byte);
}

extern "C" __global__ void multiplies_16x8(const uint8_t* a, const uint8_t* b, const float* c, int32_t kind,
                                           float* out) {
    const int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    const uint32_t a0 = word_of(a, g, 32, q * 4), a1 = word_of(a, g + 8, 32, q * 4);
    const uint32_t a2 = word_of(a, g, 32, 16 + q * 4), a3 = word_of(a, g + 8, 32, 16 + q * 4);
    const uint32_t b0 = word_of(b, g, 32, q * 4), b1 = word_of(b, g, 32, 16 + q * 4);
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = c[(g + i / 2 * 8) * 8 + q * 2 + i % 2];
    if (kind == 0) mma_bf16(d, a0, a1, a2, a3, b0, b1);
    if (kind == 1) mma_f16(d, a0, a1, a2, a3, b0, b1);
    if (kind == 2) mma_e4m3(d, a0, a1, a2, a3, b0, b1);
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + q * 2 + i % 2] = d[i];
}

extern "C" __global__ void loads_matrices(const uint4* in, uint32_t* out) {
    __shared__ __align__(16) uint4 rows[32];
    const int lane = threadIdx.x;
    rows[lane] = in[lane];
    __syncwarp();
    // The lanes give the rows in reverse order.
    const uint4 plain = ldmatrix_x4(smem_address(&rows[31 - lane])),
                turned = ldmatrix_x4_trans(smem_address(&rows[31 - lane]));
    const uint2 two = ldmatrix_x2(smem_address(&rows[lane % 16]));
    const uint32_t words[10] = {plain.x,  plain.y,  plain.z,  plain.w, turned.x,
                                turned.y, turned.z, turned.w, two.x,   two.y};
    for (int i = 0; i < 10; ++i) out[i * 32 + lane] = words[i];
}

// ---- shared memory and barriers
// --------------------------------------------------------------------------------------

// out[i] = in[n - 1 - i], through shared memory.
extern "C" __global__ void reverses(const int32_t* in, int32_t synchronise, int32_t* out) {
    __shared__ int32_t staged[256];
    __shared__ __align__(16) int32_t twice[2][256];
    const int i = threadIdx.x, n = blockDim.x;
    staged[i] = in[i];
    if (synchronise) __syncthreads();
    twice[1][i] = staged[n - 1 - i];
    twice[0][i] = 0;
    out[i] = twice[1][i];
}

extern "C" __global__ void reads_poison(uint32_t* out) {
    extern __shared__ uint32_t dynamic[];
    __shared__ uint32_t fixed[4];
    if (threadIdx.x < 4)
        out[threadIdx.x] = fixed[threadIdx.x];
    else if (threadIdx.x < 8)
        out[threadIdx.x] = dynamic[threadIdx.x - 4];
}

extern "C" __global__ void touches_dynamic(int64_t byte, int32_t how, uint32_t* out) {
    extern __shared__ __align__(128) uint8_t bytes[];
    if (how == 0) out[0] = bytes[byte];
    if (how == 1) bytes[byte] = 0;
    if (how == 2) out[0] = ld_shared_128(smem_address(bytes) + byte).x;
    if (how == 3) out[0] = reinterpret_cast<const uint4*>(bytes + byte)->x;
}

// A ring of two stages, filled by lane 0: out = sum of all, by lane.
extern "C" __global__ void streams(const uint4* in, int32_t rounds, int32_t mistake, uint32_t* out) {
    extern __shared__ __align__(128) uint8_t smem[];
    uint4* ring = reinterpret_cast<uint4*>(smem);
    uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + 2 * 512);
    const int lane = threadIdx.x;
    if (lane < 2 && mistake != 1) mbarrier_init(smem_address(&barriers[lane]), 1);
    fence_mbarrier_init();
    __syncwarp();
    const auto request = [&](int round) {
        if (lane == 0 && round < rounds)
            bulk_load(smem_address(ring + round % 2 * 32), in + round * 32, 512, smem_address(&barriers[round % 2]));
    };
    request(0);
    request(1);
    uint32_t total = 0;
    for (int round = 0; round < rounds; ++round) {
        if (mistake != 2)
            while (!mbarrier_try_wait(smem_address(&barriers[round % 2]), round / 2 % 2)) {
            }
        total += ring[round % 2 * 32 + lane].x;
        if (mistake != 3) __syncwarp();
        request(round + 2);
    }
    if (mistake == 4) request(0);
    out[lane] = total;
}

extern "C" __global__ void mbarrier_phases(uint32_t* out) {
    __shared__ uint64_t barrier;
    const uint32_t at = smem_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(at, 2);
        out[0] = mbarrier_test_wait(at, 1);  // the phase before the first counts as complete
        out[1] = mbarrier_test_wait(at, 0);
        mbarrier_arrive(at);
        out[2] = mbarrier_test_wait(at, 0);
        mbarrier_arrive(at);
        out[3] = mbarrier_test_wait(at, 0);
        out[4] = mbarrier_test_wait(at, 1);
    }
}

// Each lane copies its 16 bytes; a second warp reads them behind the barrier that counts the lanes.
extern "C" __global__ void copies_by_lanes(const uint4* in, int32_t wait, uint32_t* out) {
    __shared__ __align__(16) uint4 staged[64];
    __shared__ uint64_t barrier;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mbarrier_init(smem_address(&barrier), 32);
    __syncthreads();
    if (threadIdx.x < 32) {
        cp_async_16(smem_address(&staged[lane]), in + lane);
        cp_async_16(smem_address(&staged[32 + lane]), in + 32 + lane);
        cp_async_arrive(smem_address(&barrier));
        while (wait && !mbarrier_try_wait(smem_address(&barrier), 0)) {
        }
    } else {
        while (wait && !mbarrier_try_wait(smem_address(&barrier), 0)) {
        }
        out[lane] = staged[31 - lane].x + staged[63 - lane].x;
    }
}

extern "C" __global__ void stores_in_bulk(const uint4* in, uint4* out) {
    __shared__ __align__(128) uint4 staged[32];
    staged[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, smem_address(staged), 512);
        bulk_commit();
        bulk_wait_read<0>();
    }
    __syncthreads();
    staged[threadIdx.x] = uint4{};
}

// Warps 1.. arrive, warp 0 waits; then the other way round.
extern "C" __global__ void hands_over(int32_t* out) {
    __shared__ int32_t value[2];
    const int warp = threadIdx.x / 32, threads = blockDim.x;
    if (warp == 1 && threadIdx.x == 32) value[0] = 7;
    if (warp == 0) {
        named_barrier_sync(1, threads);
        if (threadIdx.x == 0) value[1] = value[0] + 1;
        named_barrier_arrive(2, threads);
    } else {
        named_barrier_arrive(1, threads);
        named_barrier_sync(2, threads);
        out[threadIdx.x] = value[1];
    }
}

extern "C" __global__ void waits_for_more_than_come() {
    if (threadIdx.x < 32) named_barrier_sync(3, 64);
}

extern "C" __global__ void barrier_after_exit(int32_t* out) {
    if (threadIdx.x % 2) return;
    __syncthreads();
    out[threadIdx.x] = 1 + __syncthreads_count(threadIdx.x % 4 == 0);
}

// ---- between CTAs and grids
// ------------------------------------------------------------------------------------------

// Every CTA adds one and waits for all: needs all of them at once.
extern "C" __global__ void waits_for_all_ctas(uint32_t* flag, uint32_t* out) {
    if (threadIdx.x == 0) {
        red_add_release_gpu_u32(flag, 1);
        while (ld_acquire_gpu_u32(flag) < gridDim.x) nanosleep(100);
        out[blockIdx.x] = 1;
    }
}

extern "C" __global__ void waits_at_most(const uint32_t* flag, int64_t limit_ns, uint32_t* out) {
    const uint64_t start = globaltimer_ns();
    while (ld_acquire_sys_u32(flag) == 0)
        if (globaltimer_ns() - start > uint64_t(limit_ns)) {
            out[threadIdx.x] = 1;
            return;
        }
    out[threadIdx.x] = 2;
}

extern "C" __global__ void first_of_two(int32_t* data, int32_t value) {
    pdl_launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) data[blockIdx.x] = value;
}

extern "C" __global__ void second_of_two(const int32_t* data, int32_t wait, int32_t* out) {
    if (wait) pdl_wait();
    if (threadIdx.x == 0) out[blockIdx.x] = data[blockIdx.x];
}

extern "C" __global__ void takes_tickets(uint32_t* counter, uint32_t* out) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1u);
}

// ---- mistakes that end a launch
// ----------------------------------------------------------------------------------------

extern "C" __global__ void traps(int32_t thread) {
    if (threadIdx.x == thread) __trap();
}

extern "C" __global__ void runs_without_end(volatile int32_t* data) {
    while (data[0] == 0) data[1] += 1;
}

extern "C" __global__ void loads_weights(const uint8_t* in, uint32_t* out) {
    out[threadIdx.x] = ld_weights(in + threadIdx.x * 16).x;
}

extern "C" __global__ void divides(int32_t by, int32_t* out) { out[0] = 7 / by; }

__device__ __noinline__ int32_t descends(int32_t depth) {
    volatile int32_t frame[64];
    frame[0] = depth;
    return depth ? descends(depth - 1) + frame[0] : 0;
}
extern "C" __global__ void overflows_its_stack(int32_t depth, int32_t* out) { out[0] = descends(depth); }
