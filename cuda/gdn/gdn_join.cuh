// Joins the segments of each sequence: with (M_s, N_s) the transition of segment s, from gdn_fwd_kernel's Transition pass,
//
//   S_1 = N_0 (which started from the initial state);  S_{s+1} = M_s S_s + N_s
//
// in fp32, and leaves S_s, the state before segment s, where N_s was. Grid: sequences x value heads x slices of 8 columns of V.
// Thread (i, half) has row i of 4 columns; S_s lies in shared memory, M_s is read once per slice, in order of i.
#pragma once
#include "state.cuh"

namespace linattn::cuda::gdn {

constexpr int kSlice = 8;

template <int D>
__global__ void __launch_bounds__(2 * D) gdn_join_kernel(const __grid_constant__ KernelParams params) {
    __shared__ float4 s_state[2][D][2];
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const int segment_tokens = choose_segment_tokens(params);
    if (segment_tokens == kUncut) return;
    const int i = threadIdx.x % D, half = threadIdx.x / D;
    const int slice = blockIdx.x % (D / kSlice), pair = blockIdx.x / (D / kSlice);
    const int head = pair % static_cast<int>(p.HV), sequence = pair / static_cast<int>(p.HV);
    if (read_row(p, sequence) < 0) return;
    int before = 0, bos, length;
    for (int n = 0; n < sequence; n++) {
        sequence_range(p, n, bos, length);
        before += segments_of(length, segment_tokens);
    }
    sequence_range(p, sequence, bos, length);
    const int segments = segments_of(length, segment_tokens);
    if (segments == 1) return;

    const int v = slice * kSlice + 4 * half;
    const int64_t step = p.HV * (2 * D * D);
    float *g_state = params.g_segments + before * step + head * (2 * D * D) + v * D + i;             // column c at + c D
    const float *g_transition = params.g_segments + before * step + head * (2 * D * D) + D * D + i;  // M[i][j] at + j D
    float carry[4] = {};
    if (p.state_in) {
        const Tensor &t = p.state_in;
        const int64_t at = read_row(p, sequence) * t.stride[0] + head * t.stride[1] + i * t.stride[2] + v * t.stride[3];
        for (int c = 0; c < 4; c++)
            carry[c] = t.dtype == DType::F32
                           ? reinterpret_cast<const float *>(t.data)[at + c * t.stride[3]]
                           : __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(t.data)[at + c * t.stride[3]]);
    }
    for (int s = 0; s < segments; s++) {
        float next[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (s + 1 < segments) next[c] = g_state[c * D];
            g_state[c * D] = carry[c];
        }
        if (s + 1 == segments) break;
        if (s > 0) {
            float4(&state)[D][2] = s_state[s % 2];
            state[i][half] = make_float4(carry[0], carry[1], carry[2], carry[3]);
            __syncthreads();
#pragma unroll 16
            for (int j = 0; j < D; j++) {
                const float m = g_transition[j * D];
                const float4 x = state[j][half];
                next[0] = fmaf(m, x.x, next[0]), next[1] = fmaf(m, x.y, next[1]);
                next[2] = fmaf(m, x.z, next[2]), next[3] = fmaf(m, x.w, next[3]);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) carry[c] = next[c];
        g_state += step;
        g_transition += step;
    }
}

}  // namespace linattn::cuda::gdn
