// The preparation: of one chunk and value head, everything that does not depend on the state, to the workspace.
//
//   K~_t = k_t prod_{r<=t} a_r;  Q~_t;  K^_s = k_s prod_{r>s} a_r;  A_ts, L_ts = beta_t M_ts (tree.cuh);  T^ = (I + L)^-1 (solve.cuh)
//
// Grid: chunks of the slab x value heads, one CTA each. Block: four warps, 32 channels each, their sums joined in shared
// memory. Three CTAs on an SM: what counts here is latency, of loads, shared memory and barriers.
#pragma once
#include "common/launch.h"
#include "ptx/cta.cuh"
#include "ptx/tma.cuh"
#include "solve.cuh"
#include "tree.cuh"

namespace linattn::cuda::kda {

__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap *map, uint32_t barrier, int head, int token,
                                          int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
        ptx::cp_async_bulk_tensor_4d_load(tile + panel * Tile::kPanelStrideBytes, map, barrier, 64 * panel, head, token, batch);
}

// Rows past the end of a sequence are another one's and may hold anything: selected away, not multiplied by zero.
__device__ __forceinline__ void clear_rows(uint32_t tile, int rows, int thread) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
#pragma unroll 1
        for (int at = rows * 128 + thread * 16; at < kChunk * 128; at += 2048)
            ptx::st_shared_v4_u32(tile + panel * Tile::kPanelStrideBytes + at, make_uint4(0, 0, 0, 0));
}

template <class T>
__global__ void __launch_bounds__(128, 3)
    kda_fwd_prepare_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    PrepSmem &smem = *reinterpret_cast<PrepSmem *>(smem_bytes);
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_launch_dependents();
    const int HV = static_cast<int>(p.HV), index = static_cast<int>(blockIdx.x) / HV, head = static_cast<int>(blockIdx.x) % HV;
    int sequence, within, bos, length;
    if (!find_chunk(params, params.first_chunk + index, sequence, within)) return;
    if (read_row(p, sequence) < 0) return;  // padding
    sequence_range(p, sequence, bos, length);
    const int at = within * kChunk, rows = length - at < kChunk ? length - at : kChunk;
    const int token = bos + at, batch = p.cu_seqlens ? 0 : sequence;
    const uint32_t landed = ptx::shared_address(&smem.landed), k = ptx::shared_address(smem.k);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        const int head_qk = head / (HV / static_cast<int>(p.H));
        ptx::mbarrier_arrive_expect_tx(landed,
                                       2 * Tile::kBytes + kChunk * kD * static_cast<uint32_t>(p.g.dtype == DType::F32 ? 4 : 2));
        load_tile(k, &maps.k, landed, head_qk, token, batch);
        load_tile(k + Tile::kBytes, &maps.q, landed, head_qk, token, batch);
        const int width = p.g.dtype == DType::F32 ? 32 : 64;  // channels of a panel
        for (int panel = 0; panel < kD / width; panel++)
            ptx::cp_async_bulk_tensor_4d_load(ptx::shared_address(smem.g) + panel * kChunk * 128, &maps.g, landed,
                                              panel * width, head, token, batch);
    }
    const int w = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, thread = threadIdx.x;
    // An infinite amplitude would make inf x 0.
    const float amplitude = p.A_log ? fminf(expf(load_scalar(p.A_log, head * p.A_log.stride[0])), 1e30f) : 1.0f;
    float bias = 0.0f;
    if (p.dt_bias) bias = load_scalar(p.dt_bias, head * p.dt_bias.stride[0] + thread * p.dt_bias.stride[1]);
    smem.bias[thread] = p.gate == Gate::Bounded ? bias * bounded_factor(amplitude) : bias;
    if (thread == 0) smem.amplitude = amplitude, smem.rows = rows;
    float beta = 0.0f;
    if (w == 3 && lane < rows)
        beta = load_scalar(p.beta, batch * p.beta.stride[0] + (token + lane) * p.beta.stride[1] + head * p.beta.stride[2]);
    __syncthreads();
    ptx::mbarrier_wait_parity(landed, 0);
    if (rows < kChunk) {
        clear_rows(k, rows, thread);
        clear_rows(k + Tile::kBytes, rows, thread);
        __syncthreads();
    }
    same_token<T>(k, w, smem);
    __syncthreads();
    token_factors(params, smem, w, lane, rows, beta);
    __syncwarp();
    // Numbers that the tree's registers have no room for come from shared memory.
    const auto decays = [&](float (&a)[16], int step) {
        load_gates(a, ptx::shared_address(smem.g), p.g.dtype, w, step);
        activate(a, params, smem.amplitude, ld4(&smem.bias[32 * w + 16 * step + lane % 4 * 4]));
        const int left = smem.rows - (opaque_lane() & ~3);
        if (smem.rows < kChunk) {
#pragma unroll
            for (int i = 0; i < 16; i++) a[i] = i / 4 < left ? a[i] : 1.0f;
        }
    };
    Sums sums = {};
#pragma unroll 1
    for (int step = 0; step < 2; step++) {
        float a[16];
        decays(a, step);
        k_step<T>(a, sums, smem, w, step, params.g_operands);
    }
    __syncwarp();
    store_all(sums, smem.warp[w].partial);
    __syncthreads();
    float x[8];
    add_partials(x, smem, thread);
    Operands &to = params.g_operands[blockIdx.x];
    const uint32_t a_at = Square::offset(thread / 4, 8 * (thread % 4));
    put8<__half>(to.a + a_at, x);
    __syncthreads();
    if (w == 0) invert_diagonal(smem, lane);
    if (w == 1) find_precise(smem, lane);
    __syncthreads();
    const bool precise = smem.factors.first_precise < kChunk;
    if (precise) put8_low<__half>(to.a_low + a_at, x);
    lower_left_first<T>(to, precise, smem, thread);
    __syncthreads();
    lower_left_second<T>(to, precise, smem, thread);
    constexpr int kUsed = offsetof(Factors, first_precise) + sizeof(int);
    if (thread < (kUsed + 15) / 16)
        reinterpret_cast<uint4 *>(&to.factors)[thread] = reinterpret_cast<const uint4 *>(&smem.factors)[thread];
    if (thread == 0) params.g_precise[blockIdx.x] = smem.factors.first_precise;
    if (!precise) return;
#pragma unroll 1
    for (int step = 0; step < 2; step++) {
        float a[16];
        decays(a, step);
        k_end_second_terms<T>(a, smem, w, step, to);
    }
}

template <class T>
void launch_prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks) {
    LaunchConfig config;
    config.grid.x = chunks * params.p.HV;
    config.block.x = 128;
    config.smem_bytes = sizeof(PrepSmem);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    launch("kda_fwd_prepare_kernel", kda_fwd_prepare_kernel<T>, config, params, maps);
}

}  // namespace linattn::cuda::kda
