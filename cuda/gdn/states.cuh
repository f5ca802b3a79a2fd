// The states of the segments in the workspace.
#pragma once
#include "common/states.cuh"
#include "items.cuh"

namespace linattn::cuda::gdn {

// The workspace's states as a tensor [slots][HV][K][V], V-first; which = 0: the state before the segment, or what the join adds
// M times the state before to make it; 1: M.
template <int D>
__device__ __forceinline__ Tensor segment_states(const KernelParams &params, int which) {
    Tensor t;
    t.data = reinterpret_cast<char *>(params.g_segments + which * (D * D));
    t.dtype = DType::F32;
    t.stride[0] = params.p.HV * (2 * D * D), t.stride[1] = 2 * D * D, t.stride[2] = 1, t.stride[3] = D;
    return t;
}

}  // namespace linattn::cuda::gdn
