// A number as the sum of two of half precision: the second term holds what rounding the first one left.
#pragma once
#include "common/fragments.cuh"

namespace linattn::cuda::gdn {

// The second terms of (a, b), whose first terms are `first`.
template <class T>
__device__ __forceinline__ uint32_t second_term(uint32_t first, float a, float b) {
    const float2 rounded = unpack(T(), first);
    return ptx::cvt_rn_x2<T>(a - rounded.x, b - rounded.y);
}

}  // namespace linattn::cuda::gdn
