// Joins the segments of a cut sequence: with M_s, N_s the transition of segment s and S_1 the state before segment 1,
//
//   S_{s+1} = M_s S_s + N_s,  s = 1, 2 ..
//
// as products of tf32, each operand with what rounding it leaves (x = h + l; h h + h l + l h), which keeps fp32's digits but two.
// A slot holds the state before a segment, V-first (before the join: what its predecessor left when it started from 0), then the
// segment's M, K-first; slots of a sequence and head lie `step` floats apart, segment 1's first. By one CTA of 2 D threads, 16
// rows a warp, for 16 columns of V, which do not depend on other columns. A hop waits for its M, which every CTA reads as a whole:
// bulk copies bring three of them ahead.
// Shared memory: 3 M of 66 KB, two terms of S of 8 KB: 215 KB with D = 128.
#pragma once
#include "common/fragments.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda {

constexpr int kJoinColumns = 16;  // of V, a CTA
constexpr int kJoinStages = 3;

// Floats of a slot. M's rows lie 16 bytes further on in the banks of shared memory.
template <int D>
constexpr int kTransitionPitch = D + 4;
template <int D>
constexpr int kSlotFloats = D * D + D * kTransitionPitch<D>;

template <int D>
struct JoinSmem {
    float transition[kJoinStages][D][kTransitionPitch<D>];
    float state[2][kJoinColumns][kTransitionPitch<D>];  // S_s[j][column] at [column][j]; what its upper bits leave
    uint64_t landed[kJoinStages];
};

template <int D>
__device__ __forceinline__ void join_segments(JoinSmem<D> &smem, float *g_first, int64_t step, int hops, int slice) {
    const int w = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const auto landed = [&](int stage) { return ptx::shared_address(&smem.landed[stage]); };
    const auto fetch = [&](int s) {  // M of the s-th hop
        if (s >= hops) return;
        const int stage = s % kJoinStages;
        ptx::mbarrier_arrive_expect_tx(landed(stage), sizeof(smem.transition[0]));
        ptx::cp_async_bulk_load(ptx::shared_address(smem.transition[stage]), g_first + s * step + D * D,
                                sizeof(smem.transition[0]), landed(stage));
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < kJoinStages; i++) ptx::mbarrier_init(landed(i), 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async_global();  // the transitions were stored by ordinary stores
        for (int i = 0; i < kJoinStages; i++) fetch(i);
    }
    // A lane's elements of a state, 4 t + 2 r + e: row 16 w + g + 8 r, column 8 t + 2 q + e.
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 8; i++) f(i, 16 * w + g + i / 2 % 2 * 8, i / 4 * 8 + 2 * q + i % 2);
    };
    float *g_state = g_first + slice * kJoinColumns * D;
    float carry[8], next[8];
    for_each(
        [&](int i, int row, int column) { carry[i] = g_state[column * D + row], next[i] = g_state[step + column * D + row]; });
    // ldmatrix, 4 numbers a row: rows 0-7, 8-15 of M, then the next four columns; four columns of S and the next four, of
    // columns of V 0-7, then 8-15.
    const int row = lane % 8, matrix = lane / 8;
    const uint32_t from = ptx::shared_address(&smem.transition[0][16 * w + matrix % 2 * 8 + row][matrix / 2 * 4]);
    const uint32_t from_state = ptx::shared_address(&smem.state[0][matrix / 2 * 8 + row][matrix % 2 * 4]);
    int stage = 0;
    uint32_t phase = 0;
    for (int s = 0; s < hops; s++) {
        for_each([&](int i, int row, int column) {
            smem.state[0][column][row] = carry[i], smem.state[1][column][row] = beyond_tf32(carry[i]);
        });
        __syncthreads();  // S, and before the first hop the barriers, are there
        g_state += step;
        for_each([&](int i, int row, int column) {
            carry[i] = next[i];
            if (s + 1 < hops) next[i] = g_state[step + column * D + row];
        });
        ptx::mbarrier_wait_parity(landed(stage), phase);
        float sum[3][2][4] = {};  // h h, h l, l h; of eight columns of V
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            uint32_t m[4], m_low[4], x[4], x_low[4];
            ptx::ldmatrix_x4(m, from + stage * static_cast<uint32_t>(sizeof(smem.transition[0])) + 32 * k);
            ptx::ldmatrix_x4(x, from_state + 32 * k);
            ptx::ldmatrix_x4(x_low, from_state + static_cast<uint32_t>(sizeof(smem.state[0])) + 32 * k);
#pragma unroll
            for (int i = 0; i < 4; i++) m_low[i] = __float_as_uint(beyond_tf32(__uint_as_float(m[i])));
#pragma unroll
            for (int t = 0; t < 2; t++) {
                ptx::mma_m16n8k8_tf32(sum[0][t], m, x[2 * t], x[2 * t + 1]);
                ptx::mma_m16n8k8_tf32(sum[1][t], m, x_low[2 * t], x_low[2 * t + 1]);
                ptx::mma_m16n8k8_tf32(sum[2][t], m_low, x[2 * t], x[2 * t + 1]);
            }
        }
        for_each([&](int i, int row, int column) {
            carry[i] += sum[0][i / 4][i % 4] + (sum[1][i / 4][i % 4] + sum[2][i / 4][i % 4]);
            g_state[column * D + row] = carry[i];
        });
        __syncthreads();  // M and S are used up
        if (threadIdx.x == 0) fetch(s + kJoinStages);
        if (++stage == kJoinStages) stage = 0, phase ^= 1;
    }
}

}  // namespace linattn::cuda
