// The states of the segments in the workspace.
#pragma once
#include "common/states.cuh"
#include "items.cuh"

namespace linattn::cuda::gdn {

// The workspace's states as a tensor [slots][HV][K][V], V-first; which = 0: the state before the segment, or what the join adds
// M times the state before to make it; 1: M.
template <int D>
__device__ __forceinline__ Tensor segment_states(const KernelParams &params, int which) {
    Tensor t;
    t.data = reinterpret_cast<char *>(params.g_segments + which * (D * D));
    t.dtype = DType::F32;
    t.stride[0] = params.p.HV * (2 * D * D), t.stride[1] = 2 * D * D, t.stride[2] = 1, t.stride[3] = D;
    return t;
}

// store_state for what checkpoints usually are, contiguous and fp32: then offsets are constants.
template <int D>
__device__ __forceinline__ void store_checkpoint(const float (&s)[D / 2], const Tensor &t, int64_t row, int head, int v,
                                                 int k) {
    const int64_t step_k = t.stride[2], step_v = t.stride[3];
    float *to = reinterpret_cast<float *>(t.data) + (row * t.stride[0] + head * t.stride[1] + k * step_k + v * step_v);
    if (t.dtype == DType::F32 && step_k == D && step_v == 1) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) to[(i / 4 * 8 + i % 2) * D + i / 2 % 2 * 8] = s[i];
    } else if (t.dtype == DType::F32 && step_k == 1 && step_v == D && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
#pragma unroll
        for (int i = 0; i < D / 2; i += 2)
            *reinterpret_cast<float2 *>(to + i / 4 * 8 + i / 2 % 2 * 8 * D) = make_float2(s[i], s[i + 1]);
    } else {
        store_state(s, t, row, head, v, k);
    }
}

}  // namespace linattn::cuda::gdn
