// What all passes of the backward share: where a sequence and a chunk lie, and single values of the caller's arrays.
#pragma once
#include "delta_bwd.h"
#include "recurrent/tokens.cuh"

namespace linattn::cuda::delta_bwd {

// Element [row of T][token][head][column].
__device__ __forceinline__ int64_t element(const Tensor &t, int64_t b, int64_t token, int64_t head, int64_t column = 0) {
    return b * t.stride[0] + token * t.stride[1] + head * t.stride[2] + column * t.stride[3];
}

__device__ __forceinline__ float load_float(const Tensor &t, int64_t at) { return float_of(t, load_bits(t, at)); }

__device__ __forceinline__ void store_float(const Tensor &t, int64_t at, float x) {
    if (t.dtype == DType::F32)
        reinterpret_cast<float *>(t.data)[at] = x;
    else
        reinterpret_cast<uint16_t *>(t.data)[at] =
            t.dtype == DType::BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

// exp(A_log), bounded so that it times 0 is 0.
__device__ __forceinline__ float amplitude_of(const DeltaParams &p, int64_t head) {
    return p.A_log ? fminf(expf(load_float(p.A_log, head * p.A_log.stride[0])), 1e30f) : 1.0f;
}

// Raw gate input with its bias. `channel` is 0 for GDN.
__device__ __forceinline__ float gate_input(const DeltaParams &p, int64_t at, int64_t head, int64_t channel) {
    const float x = load_float(p.g, at);
    return p.dt_bias ? x + load_float(p.dt_bias, head * p.dt_bias.stride[0] + channel * p.dt_bias.stride[1]) : x;
}

// The state arrays of the workspace as a tensor [chunks][HV][K][V] whose columns of K are contiguous.
template <int D>
__device__ __forceinline__ Tensor chunk_states(float *data, int64_t HV) {
    Tensor t;
    t.data = reinterpret_cast<char *>(data);
    t.dtype = DType::F32;
    t.stride[0] = HV * D * D, t.stride[1] = D * D, t.stride[2] = 1, t.stride[3] = D;
    return t;
}

}  // namespace linattn::cuda::delta_bwd
