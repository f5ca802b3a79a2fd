// The preparation: of one chunk and value head, everything that does not depend on the state, to the workspace.
//
//   K~_t = k_t prod_{r<=t} a_r;  Q~_t;  K^_s = k_s prod_{r>s} a_r;  A_ts, L_ts = beta_t M_ts (tree.cuh, where gates
//   are bounded ratio.cuh);  T^ = (I + L)^-1 (solve.cuh)
//
// Grid: value heads x chunks of the slab, the last ones first, one CTA each; where sequences are cut, before them a CTA a head
// that plans the launches to come (cut.cuh). Block: four warps, D / 4 channels each, their sums
// joined in shared memory; matrices leave by bulk copies but K^, which has no place there. Four CTAs on an SM: what counts here is
// latency, of loads, shared memory and barriers.
#pragma once
#include "common/launch.h"
#include "cut.cuh"
#include "ptx/cta.cuh"
#include "ptx/tma.cuh"
#include "ratio.cuh"
#include "solve.cuh"
#include "tree.cuh"

namespace linattn::cuda::kda {

// Panels of 64 channels, `apart` bytes from one another.
template <int D>
__device__ __forceinline__ void load_tile(uint32_t tile, uint32_t apart, const CUtensorMap *map, uint32_t barrier, int head,
                                          int token, int batch) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        ptx::cp_async_bulk_tensor_4d_load(tile + panel * apart, map, barrier, 64 * panel, head, token, batch);
}

template <int D>
__device__ __forceinline__ void load_gate_tile(uint32_t tile, bool wide, const CUtensorMap *map, uint32_t barrier, int head,
                                               int token, int batch) {
    const int width = wide ? 32 : 64;  // channels of a panel
    for (int panel = 0; panel < D / width; panel++)
        ptx::cp_async_bulk_tensor_4d_load(tile + panel * kChunk * 128, map, barrier, panel * width, head, token, batch);
}

// Rows of k and q past the end of a sequence are another one's and may hold anything: selected away, not multiplied by zero.
template <int D>
__device__ __forceinline__ void clear_rows(uint32_t start, int rows, int thread) {
#pragma unroll
    for (int half = 0; half < D / 32; half++)
#pragma unroll 1
        for (int at = rows * 128 + thread * 16; at < kChunk * 128; at += 512 * kPrepWarps)
            ptx::st_shared_v4_u32(start + half * kQueries + at, make_uint4(0, 0, 0, 0));
}

// kRatios: gates are bounded (ratios_fit).
template <class T, int D, bool kRatios>
__global__ void __launch_bounds__(32 * kPrepWarps, 4)
    kda_fwd_prepare_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    PrepSmem<D> &smem = *reinterpret_cast<PrepSmem<D> *>(smem_bytes);
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_launch_dependents();
    // The first chunks last: the scan begins with them, and finds them in L2.
    const int index = static_cast<int>(gridDim.y - 1 - blockIdx.y);
    if (index == params.slab_chunks) {
        plan_cut(*reinterpret_cast<Cut *>(smem_bytes), params);
        return;
    }
    const int head = static_cast<int>(blockIdx.x);
    const int w = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, thread = threadIdx.x;
    const uint32_t landed = ptx::shared_address(&smem.landed), start = ptx::shared_address(smem.start);
    const int head_qk = static_cast<int>(static_cast<uint32_t>(head) / params.group);
    if (w == 0) {  // the others learn it from shared memory
        ChunkPlace place;
        const bool exists = find_chunk(params, params.first_chunk + index, place) && read_row(p, place.sequence) >= 0;
        const int at = place.within * kChunk, token = place.bos + at, batch = p.cu_seqlens ? 0 : place.sequence;
        if (lane == 0) {
            smem.rows = !exists ? 0 : place.length - at < kChunk ? place.length - at : kChunk;
            smem.token = token, smem.batch = batch;
            ptx::mbarrier_init(landed, 1);
            ptx::fence_mbarrier_init();
        }
        if (lane == 0 && exists) {
            const bool wide = p.g.dtype == DType::F32;
            ptx::mbarrier_arrive_expect_tx(landed, Pair<D>::kBytes + kChunk * D * (wide ? 4 : 2));
            load_tile<D>(start, Pair<D>::kPanelStrideBytes, &maps.k, landed, head_qk, token, batch);
            load_tile<D>(start + kQueries, Pair<D>::kPanelStrideBytes, &maps.q, landed, head_qk, token, batch);
            load_gate_tile<D>(ptx::shared_address(smem.g), wide, &maps.g, landed, head, token, batch);
        }
        __syncwarp();
    } else {
        // An infinite amplitude would make inf x 0.
        const float amplitude = p.A_log ? fminf(expf(load_scalar(p.A_log, head * p.A_log.stride[0])), 1e30f) : 1.0f;
#pragma unroll
        for (int channel = thread - 32; channel < D; channel += 32 * (kPrepWarps - 1)) {
            float bias = 0.0f;
            if (p.dt_bias) bias = load_scalar(p.dt_bias, head * p.dt_bias.stride[0] + channel * p.dt_bias.stride[1]);
            if constexpr (kRatios)
                smem.bias[channel] = ratio_bias(params, bias, amplitude);
            else
                smem.bias[channel] = p.gate == Gate::Bounded ? bias * bounded_factor(amplitude) : bias;
        }
        if (thread == 32) smem.amplitude = amplitude;
    }
    ptx::st_shared_v4_u32(ptx::shared_address(smem.a) + 16 * thread, make_uint4(0, 0, 0, 0));
    __syncthreads();
    const int rows = smem.rows;
    if (rows == 0) return;  // no such chunk, or padding
    float beta = 0.0f;
    if (w == 3 && lane < rows)
        beta = load_scalar(p.beta,
                           smem.batch * p.beta.stride[0] + (smem.token + lane) * p.beta.stride[1] + head * p.beta.stride[2]);
    ptx::mbarrier_wait_parity(landed, 0);
    if (rows < kChunk) {
        clear_rows<D>(start, rows, thread);
        __syncthreads();
    }
    same_token<T, D>(w, smem);
    __syncthreads();
    // Numbers that the tree's registers have no room for come from shared memory.
    const auto decays = [&](float (&a)[16], int step) {
        load_gates<D>(a, ptx::shared_address(smem.g), p.g.dtype, w, step);
        activate(a, params, smem.amplitude, ld4(&smem.bias[w * (D / 4) + 16 * step + lane % 4 * 4]));
        const int left = smem.rows - (opaque_lane() & ~3);
        if (smem.rows < kChunk) {
#pragma unroll
            for (int i = 0; i < 16; i++) a[i] = i / 4 < left ? a[i] : 1.0f;
            ptx::register_fence(a);
        }
    };
    const uint32_t item = static_cast<uint32_t>(index) * gridDim.x + head;
    Operands<D> &to = reinterpret_cast<Operands<D> *>(params.g_operands)[item];
    const auto put_power = [](float *to, int token, float power) {
        if constexpr (kRatios)
            to[ratio_scale_place(token)] = __uint_as_float(ratio_scale<T>(power));
        else
            to[token] = power;
    };
    if (w == 2) query_factors(params, smem, lane, put_power);
    if (w == 3) key_factors(params, smem, lane, rows, beta, put_power);
    if constexpr (kRatios) {
        float sums[10][4] = {};
#pragma unroll 1
        for (int step = 0; step < kPrepSteps<D>; step++) {
            const RatioLanes at = RatioLanes::at<D>(w, step);
            const RatioLoaded loaded(at, smem);
            const RatioDecays ratio_decays(at, params, smem);
            if (step == 0) __syncthreads();
            ratios<T>(sums, at, loaded, ratio_decays, smem, to);
        }
        store_ratio_sums(sums, smem.ratio_partial[w]);
    } else {
#pragma unroll 1
        for (int step = 0; step < kPrepSteps<D>; step++) {
            const Loaded loaded(smem, w, step);
            float a[16];
            decays(a, step);
            if (step == 0) __syncthreads();
            tree<T>(loaded, a, smem, w, step, to);
        }
    }
    ptx::fence_proxy_async_shared_cta();  // K~, Q~ and K^ are copied out of shared memory
    __syncthreads();
    const auto copy_out = [&](uint8_t *g_to, const uint8_t *s_from, uint32_t bytes) {
        ptx::cp_async_bulk_store(g_to, ptx::shared_address(s_from), bytes);
        ptx::cp_async_bulk_commit_group();
    };
    if (thread == 0) copy_out(to.start, smem.start, sizeof(smem.start));
    float a[kOwnPieces][2];
    if constexpr (kRatios) {
        add_ratio_pieces(a, smem, w, lane);
    } else {
        add_pieces(a, smem, w, lane);
        if (thread < kChunk) put_a(smem, thread, thread, smem.diagonal[thread]);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    if (thread == 0) copy_out(to.a, smem.a, sizeof(smem.a));
    if (w == 0) invert_diagonal(smem, lane);
    if (w == 1) find_precise(smem, lane);
    __syncthreads();
    const bool precise = smem.factors.first_precise < kChunk;
    lower_left_first<T>(to, precise, smem, thread);
    __syncthreads();
    lower_left_second<T>(to, precise, smem, thread);
    constexpr int kUsed = offsetof(Factors<D>, first_precise) + sizeof(int);
    if (thread < (kUsed + 15) / 16)
        reinterpret_cast<uint4 *>(&to.factors)[thread] = reinterpret_cast<const uint4 *>(&smem.factors)[thread];
    if (thread == 0) {
        params.g_precise[item] = smem.factors.first_precise;
        ptx::cp_async_bulk_wait_group_read<0>();
    }
    if (!precise) return;
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    if (thread == 0) {  // the gates once more: L was in their place
        const bool wide = p.g.dtype == DType::F32;
        ptx::mbarrier_arrive_expect_tx(landed, kChunk * D * (wide ? 4 : 2));
        load_gate_tile<D>(ptx::shared_address(smem.g), wide, &maps.g, landed, head, smem.token, smem.batch);
    }
    if constexpr (kRatios) {
        put_ratio_low(a, smem, w, lane);
    } else {
        put_low(a, smem, w, lane);
        if (thread < kChunk) {
            const float x = smem.diagonal[thread];
            put_a(smem, thread, thread, x - __half2float(__float2half_rn(x)));
        }
    }
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    if (thread == 0) copy_out(to.a_low, smem.a, sizeof(smem.a));
    const int64_t stride = 2 * p.k.stride[1];
    const char *g_k = p.k.data + 2 * (smem.batch * p.k.stride[0] + head_qk * p.k.stride[2]) + smem.token * stride;
    ptx::mbarrier_wait_parity(landed, 1);
#pragma unroll 1
    for (int step = 0; step < kPrepSteps<D>; step++) {
        const char *g_from = g_k + 2 * (w * (D / 4) + 16 * step);
        if constexpr (kRatios) {
            const RatioLanes at = RatioLanes::at<D>(w, step);
            const RatioDecays ratio_decays(at, params, smem);
            ratio_second_terms<T>(at, ratio_decays, smem, g_from, stride, to);
        } else {
            float decay[16];
            decays(decay, step);
            k_end_second_terms<T>(decay, smem, w, step, g_from, stride, to);
        }
    }
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
}

template <class T, int D>
void launch_prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks) {
    LaunchConfig config;
    config.grid.x = params.p.HV, config.grid.y = chunks + (params.cut != 0);
    config.block.x = 32 * kPrepWarps;
    config.smem_bytes = sizeof(PrepSmem<D>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    const bool ratios = ratios_fit(params.p);
    launch("kda_fwd_prepare_kernel", ratios ? kda_fwd_prepare_kernel<T, D, true> : kda_fwd_prepare_kernel<T, D, false>, config,
           params, maps);
}

}  // namespace linattn::cuda::kda
