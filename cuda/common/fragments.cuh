// Small things around wgmma with left operands in registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace linattn::cuda {

// The lane's number, as the compiler cannot know it: what is derived from it is computed again where it is used, instead of
// occupying registers from one phase or chunk to the next.
__device__ __forceinline__ int opaque_lane() {
    uint32_t lane[1] = {threadIdx.x % 32};
    ptx::register_fence(lane);
    return static_cast<int>(lane[0]);
}

__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(__half, uint32_t x) { return __half22float2(*reinterpret_cast<__half2 *>(&x)); }

// To the nearest tf32 by an mma, which ignores the lower bits: cvt.rna is three instructions.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }
// What tf32 leaves out.
__device__ __forceinline__ float beyond_tf32(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// d (+)= a B for the fragments a of a 64 x 16 n matrix and B^T (K-major) or B (MN-major) in shared memory.
template <class T, ptx::Major kMajor, class Tile, int kSteps, int kCount>
__device__ __forceinline__ void issue(float (&d)[kCount], const uint32_t (&a)[kSteps][4], uint32_t low, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const uint32_t step = (kMajor == ptx::Major::K ? Tile::offset(0, 16 * s) : Tile::offset(16 * s, 0)) >> 4;
        const uint32_t high = kMajor == ptx::Major::K ? Tile::k_major_high() : Tile::mn_major_high();
        ptx::wgmma_rs<T, kMajor>(d, a[s], ptx::wgmma_descriptor(low + step, high), s > 0 || accumulate);
    }
    ptx::wgmma_commit_group();
}

template <class T, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&a)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[s][i] = ptx::cvt_rn_x2<T>(d[8 * s + 2 * i], d[8 * s + 2 * i + 1]);
}

template <int kSteps>
__device__ __forceinline__ void register_fence(uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) ptx::register_fence(a[s]);
}

}  // namespace linattn::cuda
