// Joins the segments of a cut sequence of the backward, in fp32: with M_s, N_s the transition of segment s and S_1 the state before
// segment 1,
//
//   S_{s+1} = M_s S_s + N_s,  s = 1, 2 ..
//
// A slot holds, V-first, the state before a segment (before the join: what its predecessor left when it started from 0), then the
// segment's M, V-first too; slots of a sequence and head lie `step` floats apart, segment 1's first. (The forward's, common/join.cuh,
// has products of tf32 and another order of M.) By one CTA of 2 D threads for
// 8 columns of V, which do not depend on other columns: thread (i, half) has row i of 4 columns. Bulk copies bring each M to
// shared memory two segments ahead, so that a hop costs its products alone (D x D x 8), not the way to L2.
// Shared memory: 2 M of 64 KB, 2 slices of 4 KB at D = 128.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kJoinColumns = 8;  // of V, a CTA

template <int D>
struct JoinSmem {
    float transition[2][D][D];  // M[i][j] at [j][i]
    float4 state[2][D][2];      // S_s[j][columns]
    uint64_t landed[2];
};

template <int D>
__device__ __forceinline__ void join_segments(JoinSmem<D> &smem, float *g_first, int64_t step, int hops, int slice) {
    const int i = threadIdx.x % D, half = threadIdx.x / D, v = slice * kJoinColumns + 4 * half;
    const auto landed = [&](int s) { return ptx::shared_address(&smem.landed[s % 2]); };
    const auto fetch = [&](int s) {  // M of the s-th hop
        if (s >= hops) return;
        ptx::mbarrier_arrive_expect_tx(landed(s), sizeof(smem.transition[0]));
        ptx::cp_async_bulk_load(ptx::shared_address(smem.transition[s % 2]), g_first + s * step + D * D,
                                sizeof(smem.transition[0]), landed(s));
    };
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(landed(0), 1);
        ptx::mbarrier_init(landed(1), 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async_global();  // the transitions were stored by ordinary stores
        fetch(0);
        fetch(1);
    }
    float *g_state = g_first + v * D + i, carry[4], next[4];  // column c at c D
#pragma unroll
    for (int c = 0; c < 4; c++) carry[c] = g_state[c * D], next[c] = g_state[step + c * D];
    __syncthreads();  // the barriers are there
    for (int s = 0; s < hops; s++) {
        g_state += step;
        float sum[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            sum[c] = next[c];
            if (s + 1 < hops) next[c] = g_state[step + c * D];
        }
        smem.state[s % 2][i][half] = make_float4(carry[0], carry[1], carry[2], carry[3]);
        __syncthreads();
        ptx::mbarrier_wait_parity(landed(s), s / 2 & 1);
#pragma unroll 16
        for (int j = 0; j < D; j++) {
            const float m = smem.transition[s % 2][j][i];
            const float4 x = smem.state[s % 2][j][half];
            sum[0] = fmaf(m, x.x, sum[0]), sum[1] = fmaf(m, x.y, sum[1]);
            sum[2] = fmaf(m, x.z, sum[2]), sum[3] = fmaf(m, x.w, sum[3]);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) g_state[c * D] = carry[c] = sum[c];
        __syncthreads();  // M is used up
        if (threadIdx.x == 0) fetch(s + 2);
    }
}

}  // namespace linattn::cuda::gdn_bwd
