// grouped_activate.cu   act[r,first + i] = bf16(weight[r] * activation(gate[r,i] + b[e,0,first + i], up[r,i] +
// b[e,1,first + i]))
//
// Grid     (rows * cols / 8 / 256); a thread owns 8 columns of one (token, slot) pair, the rows sorted by expert
// Reads    gate and up, 16 bytes each; the pair's place, expert and weight from L1; biases from L2
// Bound    HBM: 6 bytes an element
// Sync     waits for its predecessor before anything: it wrote gate and up; publishes nothing
// Limits   cols % 8 == 0; rows of no expert (id num_experts) stay unwritten
//
// Compile-time parameters (macros set by kernels/grouped_activate.py): WARPRING_INDEX, the type of expert ids;
// WARPRING_GELU_TANH, see activation.cuh.
#include "activation.cuh"
#include "formats.cuh"

using Index = WARPRING_INDEX;

__device__ __forceinline__ void to_floats(uint4 v, float (&out)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = bf16_low(words[i]), out[2 * i + 1] = bf16_high(words[i]);
}

extern "C" __global__ void __launch_bounds__(256)
    grouped_activate(const uint16_t* gmem_gate_up, const int64_t* gmem_order, const Index* gmem_expert,
                     const float* gmem_weight, const float* gmem_bias, int32_t num_experts, int32_t rows, int32_t cols,
                     int32_t first, int32_t intermediate, float alpha, float limit, float up_offset,
                     uint16_t* gmem_act) {
    pdl_wait();
    const int pieces = cols / 8;
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= int64_t(rows) * pieces) return;
    const int64_t row = index / pieces;
    const int col = (index % pieces) * 8;
    const int64_t expert = ld_routing(gmem_expert + row);
    if (expert >= num_experts) return;
    const float weight = ld_routing(gmem_weight + ld_routing(gmem_order + row));
    const uint16_t* gmem_row = gmem_gate_up + row * 2 * cols + col;
    float gate[8], up[8];
    to_floats(ld_activations(gmem_row), gate);
    to_floats(ld_activations(gmem_row + cols), up);
    if (gmem_bias) {
        const float* gmem_gate_bias = gmem_bias + expert * 2 * intermediate + first + col;
#pragma unroll
        for (int i = 0; i < 8; ++i) gate[i] += gmem_gate_bias[i], up[i] += gmem_gate_bias[intermediate + i];
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = weight * gated_activation(gate[2 * i], up[2 * i], {alpha, limit, up_offset});
        const float high = weight * gated_activation(gate[2 * i + 1], up[2 * i + 1], {alpha, limit, up_offset});
        words[i] = cvt_f32_bf16x2(high, low);
    }
    *reinterpret_cast<uint4*>(gmem_act + row * intermediate + first + col) = {words[0], words[1], words[2], words[3]};
}
