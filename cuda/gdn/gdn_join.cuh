// Joins the segments of each sequence: with (M_s, N_s) the transition of segment s, from gdn_fwd_kernel's Transition pass, and
// S_1, the state before segment 1, from its First part,
//
//   S_{s+1} = M_s S_s + N_s,  s = 1, 2 ..
//
// in fp32; N_s lies where S_{s+1} goes. Grid: sequences x value heads x slices of 8 columns of V, which do not depend on each
// other. Thread (i, half) has row i of 4 columns. Bulk copies bring each M to shared memory two segments ahead, so that a hop
// costs its products alone (D rows x D x 8 columns), not the way to L2.
// Shared memory: 2 M of 64 KB, 2 slices of 4 KB at D = 128.
#pragma once
#include "state.cuh"

namespace linattn::cuda::gdn {

constexpr int kSlice = 8;

template <int D>
struct JoinSmem {
    float transition[2][D][D];  // M[i][j] at [j][i]
    float4 state[2][D][2];      // S_s[j][columns]
    uint64_t landed[2];
};

template <int D>
__global__ void __launch_bounds__(2 * D) gdn_join_kernel(const __grid_constant__ KernelParams params) {
    extern __shared__ __align__(1024) char smem_bytes[];
    JoinSmem<D> &smem = *reinterpret_cast<JoinSmem<D> *>(smem_bytes);
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const int segment_tokens = *params.g_segment_tokens;
    if (segment_tokens == kUncut) return;
    const int slice = blockIdx.x % (D / kSlice), pair = blockIdx.x / (D / kSlice);
    const int head = pair % static_cast<int>(p.HV), sequence = pair / static_cast<int>(p.HV);
    if (read_row(p, sequence) < 0) return;
    int bos, length;
    sequence_range(p, sequence, bos, length);
    const int hops = segments_of(length, segment_tokens) - 2;
    if (hops <= 0) return;

    const int i = threadIdx.x % D, half = threadIdx.x / D, v = slice * kSlice + 4 * half;
    const int64_t step = p.HV * (2 * D * D);
    float *g_first = params.g_segments + first_slot(p, segment_tokens, sequence) * step + head * (2 * D * D);
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

}  // namespace linattn::cuda::gdn
