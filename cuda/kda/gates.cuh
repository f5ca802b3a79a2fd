// Decays of one chunk from its gate inputs: a = exp(g), in (0, 1], one for each token and channel.
#pragma once
#include "common/fragments.cuh"
#include "prep_smem.cuh"
#include "ptx/math.cuh"

namespace linattn::cuda::kda {

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// log(1 + e^x) log2(e) to 2^-15 of itself: the series where 1 + e^x would round what matters away.
__device__ __forceinline__ float softplus_log2(float x) {
    const float e = ptx::ex2_approx_ftz(x * kLog2E);
    const float series = e * fmaf(e, fmaf(e, fmaf(e, -0.25f, 0.333333333f), -0.5f), 1.0f) * kLog2E;
    const float log2 = ptx::lg2_approx_ftz(1.0f + e);
    return x > 20.0f ? x * kLog2E : e < 0.0625f ? series : log2;
}

// What the exponent of a bounded gate is multiplied by before its bias, multiplied by the same, is added.
__device__ __forceinline__ float bounded_factor(float amplitude) { return -amplitude * kLog2E; }

// Gate inputs to decays. b: of four channels, dt_bias, times bounded_factor for a bounded gate.
__device__ __forceinline__ void activate(float (&a)[16], const KernelParams &params, float amplitude, const float4 &bias) {
    const float b[4] = {bias.x, bias.y, bias.z, bias.w};
    if (params.p.gate == Gate::None) {
#pragma unroll
        for (int i = 0; i < 16; i++) a[i] = ptx::ex2_approx_ftz(a[i] * kLog2E);
    } else if (params.p.gate == Gate::Softplus) {
#pragma unroll
        for (int i = 0; i < 16; i++) a[i] = ptx::ex2_approx_ftz(-amplitude * softplus_log2(a[i] + b[i % 4]));
    } else {  // lower_bound sigmoid; an overflow of e^-x gives sigmoid 0
        const float factor = bounded_factor(amplitude), bound = params.lower_bound * kLog2E;
#pragma unroll
        for (int i = 0; i < 16; i++)
            a[i] = ptx::ex2_approx_ftz(bound * ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(factor, a[i], b[i % 4]))));
    }
}

}  // namespace linattn::cuda::kda
