// States in global memory, as the state warpgroups of gdn_fwd_kernel read and write them.
#pragma once
#include "items.cuh"

namespace linattn::cuda::gdn {

// The thread's elements of S^T: s[4j + 2r + i] is (v = row + 8r, k = 8j + column + i).
template <int kCount>
struct StatePlace {
    int64_t first, step_k, step_v;  // element offsets of (row, column), to the next k, to the next v
    __device__ __forceinline__ StatePlace(const Tensor &t, int64_t row, int head, int v, int k)
        : first(row * t.stride[0] + head * t.stride[1] + k * t.stride[2] + v * t.stride[3]),
          step_k(t.stride[2]),
          step_v(t.stride[3]) {}

    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int j = 0; j < kCount / 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int64_t at = first + (8 * j + i) * step_k;
                f(4 * j + i, at);
                f(4 * j + 2 + i, at + 8 * step_v);
            }
    }
};

template <int kCount>
__device__ __forceinline__ void load_state(float (&s)[kCount], const Tensor &t, int64_t row, int head, int v, int k) {
    const StatePlace<kCount> place(t, row, head, v, k);
    if (t.dtype == DType::F32) {
        const float *from = reinterpret_cast<const float *>(t.data);
        place.for_each([&](int i, int64_t at) { s[i] = from[at]; });
    } else {
        const __nv_bfloat16 *from = reinterpret_cast<const __nv_bfloat16 *>(t.data);
        place.for_each([&](int i, int64_t at) { s[i] = __bfloat162float(from[at]); });
    }
}

template <int kCount>
__device__ __forceinline__ void store_state(const float (&s)[kCount], const Tensor &t, int64_t row, int head, int v, int k) {
    const StatePlace<kCount> place(t, row, head, v, k);
    if (t.dtype == DType::F32) {
        float *to = reinterpret_cast<float *>(t.data);
        place.for_each([&](int i, int64_t at) { to[at] = s[i]; });
    } else {
        __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(t.data);
        place.for_each([&](int i, int64_t at) { to[at] = __float2bfloat16_rn(s[i]); });
    }
}

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

// Row of `checkpoints` for the i-th checkpoint of a sequence, -1 for none. By a converged warp.
__device__ __forceinline__ int64_t checkpoint_row(const DeltaParams &p, int sequence, int i) {
    const int every = static_cast<int>(p.checkpoint_every);
    int64_t row;
    if (p.checkpoint_indices) {
        if (i >= p.M) return -1;
        row = load_index(p.checkpoint_indices, sequence * p.checkpoint_indices.stride[0] + i * p.checkpoint_indices.stride[1]);
    } else if (!p.cu_seqlens) {
        row = sequence * (p.T / every) + i;
    } else {
        int before = 0;
        for (int m = threadIdx.x % 32; m < sequence; m += 32) {
            int bos, length;
            sequence_range(p, m, bos, length);
            before += length / every;
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
        row = int64_t{before} + i;
    }
    return row >= 0 && row < p.C ? row : -1;
}

}  // namespace linattn::cuda::gdn
