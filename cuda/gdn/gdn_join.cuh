// gdn_join_kernel: the states through the segments of each sequence, S_{s+1} = M_s S_s + N_s (common/join.cuh), with (M_s, N_s) from
// gdn_fwd_kernel's Transition pass and S_1, the state before segment 1, from its First part; N_s lies where S_{s+1} goes.
// Grid: sequences x value heads x slices of 16 columns of V. Block: 2 D threads. Shared memory: 215 KB at D = 128.
#pragma once
#include "common/join.cuh"
#include "state.cuh"

namespace linattn::cuda::gdn {

template <int D>
__global__ void __launch_bounds__(2 * D) gdn_join_kernel(const __grid_constant__ KernelParams params) {
    extern __shared__ __align__(1024) char smem_bytes[];
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const int segment_tokens = *params.g_segment_tokens;
    if (segment_tokens == kUncut) return;
    constexpr int kSlices = D / kJoinColumns;
    const int HV = static_cast<int>(p.HV), slice = blockIdx.x % kSlices, pair = blockIdx.x / kSlices;
    const int head = pair % HV, sequence = pair / HV;
    if (read_row(p, sequence) < 0) return;
    int bos, length;
    sequence_range(p, sequence, bos, length);
    const int hops = segments_of(length, segment_tokens) - 2;
    if (hops <= 0) return;
    const int64_t step = p.HV * int64_t{kSlotFloats<D>};
    join_segments(*reinterpret_cast<JoinSmem<D> *>(smem_bytes),
                  params.g_segments + first_slot(p, segment_tokens, sequence) * step + head * int64_t{kSlotFloats<D>}, step,
                  hops, slice);
}

}  // namespace linattn::cuda::gdn
