// The states of the segments in the workspace.
#pragma once
#include "common/join.cuh"
#include "common/states.cuh"
#include "items.cuh"

namespace linattn::cuda::gdn {

// The workspace's states as a tensor [slots][HV][K][V]; which = 0: the state before the segment, or what the join adds M times the
// state before to make it, V-first; 1: M, K-first, for what multiplies by it.
template <int D>
__device__ __forceinline__ Tensor segment_states(const KernelParams &params, int which) {
    Tensor t;
    t.data = reinterpret_cast<char *>(params.g_segments + which * (D * D));
    t.dtype = DType::F32;
    t.stride[0] = params.p.HV * int64_t{kSlotFloats<D>}, t.stride[1] = kSlotFloats<D>;
    t.stride[2] = which == 0 ? 1 : kTransitionPitch<D>, t.stride[3] = which == 0 ? D : 1;
    return t;
}

// Is the state now a checkpoint? Tokens to the next one are counted down.
struct Checkpoints {
    int next = INT32_MIN;  // tokens of the item left at the next one

    __device__ __forceinline__ Checkpoints(const DeltaParams &p, const Item &item) {
        if (!p.checkpoint_every) return;
        const int every = static_cast<int>(p.checkpoint_every);
        next = item.length - (every - item.before % every);
    }
    // The number of the checkpoint, or -1. left: tokens left, negative after a short last chunk.
    __device__ __forceinline__ int number(const DeltaParams &p, const Item &item, int left) {
        if (left != next) return -1;
        const int every = static_cast<int>(p.checkpoint_every);
        next -= every;
        return left < 0 ? -1 : (item.before + item.length - left) / every - 1;
    }
};

// store_state for what checkpoints usually are, contiguous and fp32: then offsets are constants.
template <class C>
__device__ __forceinline__ void store_checkpoint(const float (&s)[C::D / 2], const Tensor &t, int64_t row, int head, int v,
                                                 int k) {
    constexpr int D = C::D;
    const int64_t step_k = t.stride[2], step_v = t.stride[3];
    const int64_t first = row * t.stride[0] + head * t.stride[1] + k * step_k + v * step_v;
    float *to = reinterpret_cast<float *>(t.data) + first;
    const bool constant = t.dtype == DType::F32;
    if (constant && step_k == D && step_v == 1) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) to[(i / 4 * 8 + i % 2) * D + i / 2 % 2 * 8] = s[i];
    } else if (constant && step_k == 1 && step_v == D && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
#pragma unroll
        for (int i = 0; i < D / 2; i += 2)
            *reinterpret_cast<float2 *>(to + i / 4 * 8 + i / 2 % 2 * 8 * D) = make_float2(s[i], s[i + 1]);
    } else {
        store_state(s, t, row, head, v, k);
    }
}

}  // namespace linattn::cuda::gdn
