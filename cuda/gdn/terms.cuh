// A number as the sum of two of half precision: the second term holds what rounding the first one left.
#pragma once
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace linattn::cuda::gdn {

__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(__half, uint32_t x) { return __half22float2(*reinterpret_cast<__half2 *>(&x)); }

// The second terms of (a, b), whose first terms are `first`.
template <class T>
__device__ __forceinline__ uint32_t second_term(uint32_t first, float a, float b) {
    const float2 rounded = unpack(T(), first);
    return ptx::cvt_rn_x2<T>(a - rounded.x, b - rounded.y);
}

}  // namespace linattn::cuda::gdn
