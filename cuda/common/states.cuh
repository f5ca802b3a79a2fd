// States between global memory and the accumulators of a warpgroup, in either stride order and dtype.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "ops.h"

namespace linattn::cuda {

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

}  // namespace linattn::cuda
