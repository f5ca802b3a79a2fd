// kda_fwd_join_kernel: the states through the segments of cut sequences, S_{s+1} = M_s S_s + N_s (common/join.cuh).
// Grid: sequences x value heads x slices of 8 columns of V. Block: 2 D threads. Shared memory: 136 KB with D = 128.
#pragma once
#include "common/join.cuh"
#include "plan.cuh"
#include "ptx/cta.cuh"

namespace linattn::cuda::kda {

template <int D>
struct SegmentJoinSmem {
    JoinSmem<D> join;
    Cut cut;
};

template <int D>
__global__ void __launch_bounds__(2 * D) kda_fwd_join_kernel(const __grid_constant__ KernelParams params) {
    extern __shared__ __align__(1024) char smem_bytes[];
    SegmentJoinSmem<D> &smem = *reinterpret_cast<SegmentJoinSmem<D> *>(smem_bytes);
    if (threadIdx.x < 32) smem.cut.make(params, true);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    __syncthreads();
    constexpr int kSlices = D / kJoinColumns;
    const int HV = static_cast<int>(params.p.HV), slice = blockIdx.x % kSlices, pair = blockIdx.x / kSlices;
    const int sequence = pair / HV, head = pair % HV, hops = smem.cut.segments[sequence] - 2;
    if (hops <= 0) return;
    const int64_t step = HV * int64_t{2 * D * D};
    join_segments(smem.join, params.g_segments + (smem.cut.slots_before[sequence] + 1) * step + head * int64_t{2 * D * D}, step,
                  hops, slice);
}

}  // namespace linattn::cuda::kda
