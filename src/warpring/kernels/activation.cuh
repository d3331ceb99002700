// activation.cuh   act(gate, up), the formula of warpring/activation.py:
//   g = min(gate, limit), u = clamp(up, -limit, limit) + up_offset
//   act = g * sigmoid(alpha * g) * u     or     gelu_tanh(g) * u  (WARPRING_GELU_TANH)
#pragma once

struct ActivationArgs {
    float alpha, limit, up_offset;  // limit is +inf where the activation has none
};

// Comparisons, not fminf/fmaxf: those drop a NaN.
__device__ __forceinline__ float clamp_above(float v, float limit) { return v > limit ? limit : v; }
__device__ __forceinline__ float clamp_below(float v, float limit) { return v < limit ? limit : v; }

// With `exact` the sigmoid is rounded as torch rounds it, for results that become E4M3: a code's rounding turns an error
// of FP32's last place into one of a twelfth.
template <bool exact = false>
__device__ __forceinline__ float gated_activation(float gate, float up, ActivationArgs args) {
    const float g = clamp_above(gate, args.limit);
    const float u = clamp_below(clamp_above(up, args.limit), -args.limit) + args.up_offset;
#ifdef WARPRING_GELU_TANH
    const float inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return 0.5f * g * (1.f + tanhf(inner)) * u;
#else
    if constexpr (exact) {
        return g * __fdiv_rn(1.f, 1.f + expf(-args.alpha * g)) * u;
    } else {
        // Approximate exponential and division: a few units of FP32's last place, far below the BF16 that follows.
        return __fdividef(g, 1.f + __expf(-args.alpha * g)) * u;
    }
#endif
}
