// What a chunked kernel reads of a call on the device: where its sequences lie, and which rows of the states are theirs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops.h"

namespace linattn::cuda {

__device__ __forceinline__ int load_index(const Tensor &t, int64_t at) {
    const int64_t value =
        t.dtype == DType::I32 ? reinterpret_cast<const int32_t *>(t.data)[at] : reinterpret_cast<const int64_t *>(t.data)[at];
    return value < -1 ? -1 : value > INT32_MAX ? INT32_MAX : static_cast<int>(value);
}

__device__ __forceinline__ float load_scalar(const Tensor &t, int64_t at) {
    if (t.dtype == DType::F32) return reinterpret_cast<const float *>(t.data)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t *>(t.data)[at];
    return t.dtype == DType::BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Bound n of cu_seqlens, clamped to [0,T].
__device__ __forceinline__ int sequence_start(const DeltaParams &p, int n) {
    const int at = load_index(p.cu_seqlens, n * p.cu_seqlens.stride[0]), T = static_cast<int>(p.T);
    return at < 0 ? 0 : at > T ? T : at;
}

__device__ __forceinline__ void sequence_range(const DeltaParams &p, int n, int &bos, int &length) {
    bos = 0;
    length = static_cast<int>(p.T);
    if (!p.cu_seqlens) return;
    bos = sequence_start(p, n);
    length = sequence_start(p, n + 1) - bos;
    length = length > 0 ? length : 0;
}

// Row of a pool; -1 where there is nothing to read or write.
__device__ __forceinline__ int pool_row(const Tensor &table, int n, int64_t rows) {
    const int row = table ? load_index(table, n * table.stride[0]) : n;
    return row < rows ? row : -1;
}

__device__ __forceinline__ int read_row(const DeltaParams &p, int n) {
    return pool_row(p.read_indices, n, p.state_in ? p.P : p.N);
}

// Row of `checkpoints` for the i-th checkpoint of a sequence, -1 for none. By a converged warp.
__device__ __forceinline__ int64_t checkpoint_row(const DeltaParams &p, int sequence, int i) {
    const int every = static_cast<int>(p.checkpoint_every);
    int64_t row;
    if (p.checkpoint_indices) {
        if (i >= p.M) return -1;
        row = load_index(p.checkpoint_indices, sequence * p.checkpoint_indices.stride[0] + i * p.checkpoint_indices.stride[1]);
    } else if (!p.cu_seqlens) {
        row = sequence * (p.T / every) + i;
    } else {
        int before = 0;
        for (int m = threadIdx.x % 32; m < sequence; m += 32) {
            int bos, length;
            sequence_range(p, m, bos, length);
            before += length / every;
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
        row = int64_t{before} + i;
    }
    return row >= 0 && row < p.C ? row : -1;
}

// Rows of `checkpoints` that no sequence has, where they are ours; by all CTAs, whole warps of each.
template <int D>
__device__ __forceinline__ void clear_checkpoints(const DeltaParams &p, int cta, int ctas, int thread, int threads) {
    if (!p.zero_checkpoints) return;
    const int every = static_cast<int>(p.checkpoint_every), HV = static_cast<int>(p.HV);
    int rows = 0;
    for (int n = threadIdx.x % 32; n < static_cast<int>(p.N); n += 32) {
        int bos, length;
        sequence_range(p, n, bos, length);
        rows += length / every;
    }
    rows = __reduce_add_sync(~0u, rows);
    const Tensor &t = p.checkpoints;
    const bool fp32 = t.dtype == DType::F32;
    const int inner = t.stride[2] == 1 ? 2 : 3;  // the contiguous axis
#pragma unroll 1
    for (int64_t pair = int64_t{rows} * HV + cta; pair < p.C * HV; pair += ctas) {
        const int64_t at = pair / HV * t.stride[0] + pair % HV * t.stride[1];
#pragma unroll 1
        for (int i = thread; i < D * D; i += threads) {
            const int64_t of = at + i / D * t.stride[5 - inner] + i % D * t.stride[inner];
            if (fp32)
                reinterpret_cast<float *>(t.data)[of] = 0.0f;
            else
                reinterpret_cast<uint16_t *>(t.data)[of] = 0;
        }
    }
}

}  // namespace linattn::cuda
