// kda_fwd_join_kernel: the states through the segments of cut sequences, S_{s+1} = M_s S_s + N_s (common/join.cuh).
// Grid: persistent CTAs over sequences x value heads x slices of 8 columns of V. Block: 256 threads. Shared memory: 136 KB.
#pragma once
#include "common/join.cuh"
#include "plan.cuh"
#include "ptx/cta.cuh"

namespace linattn::cuda::kda {

struct SegmentJoinSmem {
    JoinSmem<kD> join;
    Cut cut;
};

__global__ void __launch_bounds__(2 * kD) kda_fwd_join_kernel(const __grid_constant__ KernelParams params) {
    extern __shared__ __align__(1024) char smem_bytes[];
    SegmentJoinSmem &smem = *reinterpret_cast<SegmentJoinSmem *>(smem_bytes);
    if (threadIdx.x < 32) smem.cut.make(params, true);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) join_begin(smem.join);
    __syncthreads();
    constexpr int kSlices = kD / kJoinColumns;
    const int HV = static_cast<int>(params.p.HV);
    const int64_t step = HV * int64_t{2 * kD * kD};
    int used = 0, index = blockIdx.x;  // among the slices of all heads of the sequences from the n-th on that have hops
    for (int n = 0; n < static_cast<int>(params.p.N); n++) {
        const int hops = smem.cut.segments[n] - 2;
        if (hops <= 0) continue;
        for (; index < HV * kSlices; index += gridDim.x) {
            const int head = index / kSlices;
            used = join_segments(smem.join, used,
                                 params.g_segments + (smem.cut.slots_before[n] + 1) * step + head * int64_t{2 * kD * kD}, step,
                                 hops, index % kSlices);
        }
        index -= HV * kSlices;
    }
}

}  // namespace linattn::cuda::kda
