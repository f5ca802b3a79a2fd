// segment_merge: S through the affine maps of the segments, from the first to the last, backward from the last to the first:
//
//   states[r] = S;   S = M[r] S + h[r]
//
// in float, one product after the other in a fixed order. One CTA per (sequence, value head, 32 columns of V), a thread has a row
// of K; S in shared memory, twice (read and written), and M in tiles of 32 columns: (2 x 128 x 32 + 128 x 33) x 4 bytes = 49 KB.
#include "common/device_guard.h"
#include "common/launch.h"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_bwd {

constexpr int kMergeColumns = 32, kMergeRows = 128;

struct MergeSmem {
    float S[2][kMergeRows][kMergeColumns];
    float M[kMergeRows][kMergeColumns + 1];
};

__global__ void __launch_bounds__(kMergeRows) segment_merge_kernel(const __grid_constant__ MergeParams p) {
    extern __shared__ __align__(16) char smem_bytes[];
    MergeSmem &smem = *reinterpret_cast<MergeSmem *>(smem_bytes);
    const int K = static_cast<int>(p.K), row = threadIdx.x, blocks = static_cast<int>(p.V) / kMergeColumns;
    for (int64_t i = blockIdx.x; i < p.N * p.HV * blocks; i += gridDim.x) {
        const int64_t n = i / blocks / p.HV, head = i / blocks % p.HV, first = i % blocks * kMergeColumns;
        const auto at = [&](const Tensor &t, int64_t r, int64_t k, int64_t column) {  // of [R,N,HV,K,V]
            return r * t.stride[0] + n * t.stride[1] + head * t.stride[2] + k * t.stride[3] + column * t.stride[4];
        };
        const auto at_state = [&](const Tensor &t, int64_t k, int64_t column) {  // of [N,HV,K,V]
            return n * t.stride[0] + head * t.stride[1] + k * t.stride[2] + column * t.stride[3];
        };
        __syncthreads();
        if (row < K)
            for (int c = 0; c < kMergeColumns; ++c)
                smem.S[0][row][c] =
                    p.initial_state ? load_float(p.initial_state, at_state(p.initial_state, row, first + c)) : 0.0f;
        for (int64_t step = 0; step < p.R; ++step) {
            const int64_t r = p.backward ? p.R - 1 - step : step;
            const auto &S = smem.S[step % 2];
            auto &next = smem.S[(step + 1) % 2];
            float sum[kMergeColumns];
            if (row < K)
                for (int c = 0; c < kMergeColumns; ++c) {
                    store_float(p.states, at(p.states, r, row, first + c), S[row][c]);
                    sum[c] = load_float(p.h, at(p.h, r, row, first + c));
                }
            if (step + 1 == p.R && !p.final_state) break;
            for (int tile = 0; tile < K; tile += kMergeColumns) {
                __syncthreads();
                for (int j = threadIdx.x; j < K * kMergeColumns; j += kMergeRows)
                    smem.M[j / kMergeColumns][j % kMergeColumns] =
                        load_float(p.M, at(p.M, r, j / kMergeColumns, tile + j % kMergeColumns));
                __syncthreads();
                if (row < K)
                    for (int j = 0; j < kMergeColumns; ++j) {
                        const float m = smem.M[row][j];
#pragma unroll
                        for (int c = 0; c < kMergeColumns; ++c) sum[c] = fmaf(m, S[tile + j][c], sum[c]);
                    }
            }
            if (row < K)
#pragma unroll
                for (int c = 0; c < kMergeColumns; ++c) next[row][c] = sum[c];
        }
        if (p.final_state && row < K)
            for (int c = 0; c < kMergeColumns; ++c)
                store_float(p.final_state, at_state(p.final_state, row, first + c), smem.S[p.R % 2][row][c]);
    }
}

}  // namespace delta_bwd

void launch_segment_merge(const MergeParams &p) {
    using namespace delta_bwd;
    DeviceGuard guard(p.device);
    LaunchConfig config;
    config.grid.x = p.N * p.HV * (p.V / kMergeColumns);
    if (config.grid.x > (int64_t{1} << 30)) config.grid.x = int64_t{1} << 30;
    config.block.x = kMergeRows;
    config.smem_bytes = sizeof(MergeSmem);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("segment_merge_kernel", segment_merge_kernel, config, p);
}

}  // namespace linattn::cuda
