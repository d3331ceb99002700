// tile_neuron.cuh   What a gate_up kernel over packed weights is handed, and what finishing one neuron takes of it.
#pragma once
#include "tile_common.cuh"

struct Args {
    const uint16_t* gmem_x;
    int64_t x_stride;
    const float* gmem_matrix_scale;
    const float* gmem_row_scale;
    const float* gmem_block_scale;
    const float* gmem_bias;
    float alpha, limit, up_offset;
    uint16_t* gmem_act;
};

// What one thread needs to finish one neuron.
struct Neuron {
    float gate_scale, up_scale, gate_bias, up_bias;

    __device__ __forceinline__ void load(const Args& args, int64_t expert, int neuron) {
        const int64_t gate = expert * 2 * kIntermediate + neuron, up = gate + kIntermediate;
        gate_scale = args.gmem_matrix_scale[expert * 2];
        up_scale = args.gmem_matrix_scale[expert * 2 + 1];
        if (args.gmem_row_scale != nullptr) {
            gate_scale *= args.gmem_row_scale[gate];
            up_scale *= args.gmem_row_scale[up];
        }
        gate_bias = args.gmem_bias != nullptr ? args.gmem_bias[gate] : 0.f;
        up_bias = args.gmem_bias != nullptr ? args.gmem_bias[up] : 0.f;
    }
};
