// Products whose left operand is in registers, and its packing.
#pragma once
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace linattn::cuda::gdn {

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

}  // namespace linattn::cuda::gdn
