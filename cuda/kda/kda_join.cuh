// kda_fwd_join_kernel: the states through the segments of cut sequences, S_{s+1} = M_s S_s + N_s (common/join.cuh), with M_s, N_s
// the transition of segment s and S_1 the state before segment 1.
// Grid: sequences x value heads x slices of 16 columns of V. Block: 2 D threads. Shared memory: 215 KB with D = 128.
#pragma once
#include "common/join.cuh"
#include "ptx/cta.cuh"
#include "shared.cuh"

namespace linattn::cuda::kda {

template <int D>
__global__ void __launch_bounds__(2 * D) kda_fwd_join_kernel(const __grid_constant__ KernelParams params) {
    extern __shared__ __align__(1024) char smem_bytes[];
    constexpr int kSlices = D / kJoinColumns;
    const int HV = static_cast<int>(params.p.HV), slice = blockIdx.x % kSlices, pair = blockIdx.x / kSlices;
    const int head = pair % HV;
    const Joined joined = params.g_joins[pair / HV];  // of the preparation, which had ended when this launch could begin
    const int64_t step = HV * int64_t{kSlotFloats<D>};
    float *g_first = params.g_segments + joined.slot * step + head * int64_t{kSlotFloats<D>};
    ptx::griddepcontrol_wait();  // by every CTA: the next launch takes its end for that of the transitions, too
    ptx::griddepcontrol_launch_dependents();
    if (joined.hops > 0) join_segments(*reinterpret_cast<JoinSmem<D> *>(smem_bytes), g_first, step, joined.hops, slice);
}

}  // namespace linattn::cuda::kda
