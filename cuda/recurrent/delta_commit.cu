// Fold accepted drafted tokens into the states, in place or to another row:  S = exp(g) S + k u^T  for each, in order.
//
// Grid: one CTA of 4 warps per (sequence, value head, block of 64 columns of V). A warp owns all of K and 16 columns of V
// (tile.cuh) and replays the tokens with the roundings of delta_recurrent_kernel, so the result is what decode gives, in bits.
// k, u and g are a few KB a head and come straight from the cache; the states are read and written once.
// Registers: state 64; no shared memory.
#include "common/device_guard.h"
#include "common/launch.h"
#include "recurrent.h"
#include "tile.cuh"

namespace linattn::cuda {
namespace delta_commit_kernels {  // named: an anonymous one would put the path of this file into the kernels' names

constexpr int kWarps = 4, kThreads = 32 * kWarps;

template <int D>
__global__ void __launch_bounds__(kThreads, 4) delta_commit_kernel(const __grid_constant__ CommitParams p) {
    constexpr int kBlocksV = D / (kTileV * kWarps);
    int lane = threadIdx.x & 31, lk = lane & 7;
    auto at = [](const Tensor &t, int64_t b, int64_t token, int64_t head) {
        return reinterpret_cast<const float *>(t.data) + b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
    };
    for (int64_t i = blockIdx.x; i < p.N * p.HV * kBlocksV; i += gridDim.x) {
        int v_warp = static_cast<int>(i % kBlocksV) * kTileV * kWarps + (threadIdx.x / 32) * kTileV;
        int64_t head = i / kBlocksV % p.HV, n = i / kBlocksV / p.HV;
        int64_t read_row = pool_row(p.read_indices, n, p.P), write_row = pool_row(p.write_indices, n, p.P);
        if (read_row < 0 || write_row < 0) continue;
        int64_t accepted = load_int(p.accepted, n * p.accepted.stride[0]);
        accepted = accepted < p.T ? accepted : p.T;
        if (accepted <= 0 && read_row == write_row) continue;
        StateTile<D> S;
        S.load(p.state, read_row, head, v_warp);
        for (int64_t j = 0; j < accepted; ++j) {
            int64_t t = p.path ? load_int(p.path, n * p.path.stride[0] + j * p.path.stride[1]) : j;
            if (t < 0 || t >= p.T) break;
            const float *k = at(p.k, n, t, head / (p.HV / p.H)) + 4 * lk, *g = at(p.g, n, t, head);
            float4 w = *reinterpret_cast<const float4 *>(at(p.u, n, t, head) + v_warp + 4 * (lane >> 3));
            const float u[4] = {w.x, w.y, w.z, w.w};
            float gamma = p.per_channel ? 0.0f : expf(*g);
            float4 gamma4 = make_float4(gamma, gamma, gamma, gamma);
#pragma unroll
            for (int kk = 0; kk < D / 8; kk += 4) {  // rows 8 kk + 4 lk + i of K
                if (p.per_channel) {
                    float4 y = *reinterpret_cast<const float4 *>(g + 8 * kk + 4 * lk);
                    gamma4 = make_float4(expf(y.x), expf(y.y), expf(y.z), expf(y.w));
                }
                S.decay4(kk, gamma4);
                S.update4(kk, *reinterpret_cast<const float4 *>(k + 8 * kk), u);
            }
        }
        S.store(p.state, write_row, head, v_warp);
    }
}

template <int D>
void launch(const CommitParams &p) {
    int64_t items = p.N * p.HV * (D / (kTileV * kWarps));
    LaunchConfig config;
    config.grid.x = items < kMaxGrid ? items : kMaxGrid;
    config.block.x = kThreads;
    config.stream = static_cast<cudaStream_t>(p.stream);
    linattn::cuda::launch("delta_commit_kernel", delta_commit_kernel<D>, config, p);
}

}  // namespace delta_commit_kernels

void launch_delta_commit(const CommitParams &p) {
    DeviceGuard guard(p.device);
    p.K == 128 ? delta_commit_kernels::launch<128>(p) : delta_commit_kernels::launch<64>(p);
}

}  // namespace linattn::cuda
