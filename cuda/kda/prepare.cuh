// The preparation: of one chunk and value head, everything that does not depend on the state, to the workspace.
//
//   K~_t = k_t prod_{r<=t} a_r;  Q~_t;  K^_s = k_s prod_{r>s} a_r;  A_ts, L_ts = beta_t M_ts (tree.cuh);  T^ = (I + L)^-1 (solve.cuh)
//
// Grid: persistent CTAs over the chunks of the slab x value heads. Block: four warps, D / 4 channels each, their sums joined in
// shared memory; matrices leave by bulk copies. Three CTAs on an SM: what counts here is latency, of loads, shared memory and
// barriers. The next item is found and its tiles are asked for while the diagonal blocks are inverted.
#pragma once
#include "common/launch.h"
#include "ptx/cta.cuh"
#include "ptx/tma.cuh"
#include "solve.cuh"
#include "tree.cuh"

namespace linattn::cuda::kda {

constexpr int kPrepareCtas = 3;  // on an SM

// Panels of 64 channels, `apart` bytes from one another.
template <int D>
__device__ __forceinline__ void load_tile(uint32_t tile, uint32_t apart, const CUtensorMap *map, uint32_t barrier, int head,
                                          int token, int batch) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        ptx::cp_async_bulk_tensor_4d_load(tile + panel * apart, map, barrier, 64 * panel, head, token, batch);
}

// Rows of k and q past the end of a sequence are another one's and may hold anything: selected away, not multiplied by zero.
template <int D>
__device__ __forceinline__ void clear_rows(uint32_t start, int rows, int thread) {
#pragma unroll
    for (int half = 0; half < D / 32; half++)
#pragma unroll 1
        for (int at = rows * 128 + thread * 16; at < kChunk * 128; at += 2048)
            ptx::st_shared_v4_u32(start + half * kQueries + at, make_uint4(0, 0, 0, 0));
}

// The first item of the CTA from `item` on that has tokens to work on; last: an earlier one, most often of the same sequence. By
// a converged warp.
__device__ __forceinline__ Work find_work(const KernelParams &params, int item, const Work &last) {
    const DeltaParams &p = params.p;
    const int HV = static_cast<int>(p.HV), end = params.slab_chunks * HV;
    Work work = last;
    for (; item < end; item += gridDim.x) {
        const int chunk = params.first_chunk + item / HV;
        int within = chunk - last.index;
        if (last.item < 0 || within >= chunks_of(last.length)) {
            if (!find_chunk(params, chunk, work.sequence, within)) break;
            if (read_row(p, work.sequence) < 0) continue;  // padding
            sequence_range(p, work.sequence, work.bos, work.length);
            work.index = chunk - within;
        }
        const int at = within * kChunk, left = work.length - at;
        work.item = item, work.token = work.bos + at, work.rows = left < kChunk ? left : kChunk;
        work.batch = p.cu_seqlens ? 0 : work.sequence;
        return work;
    }
    work.item = -1;
    return work;
}

// k, q and g on their way; by one thread.
template <int D>
__device__ __forceinline__ void fetch(const KernelParams &params, const TensorMaps &maps, PrepSmem<D> &smem, const Work &work) {
    const int HV = static_cast<int>(params.p.HV), head = work.item % HV, head_qk = head / (HV / static_cast<int>(params.p.H));
    const uint32_t landed = ptx::shared_address(&smem.landed), start = ptx::shared_address(smem.start);
    const bool wide = params.p.g.dtype == DType::F32;
    ptx::mbarrier_arrive_expect_tx(landed, Pair<D>::kBytes + kChunk * D * (wide ? 4 : 2));
    load_tile<D>(start, Pair<D>::kPanelStrideBytes, &maps.k, landed, head_qk, work.token, work.batch);
    load_tile<D>(start + kQueries, Pair<D>::kPanelStrideBytes, &maps.q, landed, head_qk, work.token, work.batch);
    const int width = wide ? 32 : 64;  // channels of a panel
    for (int panel = 0; panel < D / width; panel++)
        ptx::cp_async_bulk_tensor_4d_load(ptx::shared_address(smem.g) + panel * kChunk * 128, &maps.g, landed, panel * width, head,
                                          work.token, work.batch);
}

// A thread's share of the numbers that TMA does not bring.
template <int D>
struct Scalars {
    float amplitude = 1.0f, bias = 0.0f, beta = 0.0f;

    // Nothing of an item that is not there.
    __device__ __forceinline__ Scalars(const DeltaParams &p, const Work &work, int thread) {
        if (work.item < 0) return;
        const int head = work.item % static_cast<int>(p.HV);
        if (p.A_log) amplitude = load_scalar(p.A_log, head * p.A_log.stride[0]);
        if (p.dt_bias && thread < D) bias = load_scalar(p.dt_bias, head * p.dt_bias.stride[0] + thread * p.dt_bias.stride[1]);
        if (thread < work.rows)
            beta = load_scalar(p.beta, work.batch * p.beta.stride[0] + (work.token + thread) * p.beta.stride[1] +
                                           head * p.beta.stride[2]);
    }

    __device__ __forceinline__ void put(const DeltaParams &p, PrepSmem<D> &smem, int thread) const {
        // An infinite amplitude would make inf x 0.
        const float factor = p.A_log ? fminf(expf(amplitude), 1e30f) : 1.0f;
        if (thread < D) smem.bias[thread] = p.gate == Gate::Bounded ? bias * bounded_factor(factor) : bias;
        if (thread < kChunk) smem.beta[thread] = beta;
        if (thread == 0) smem.amplitude = factor;
    }
};

template <class T, int D>
__global__ void __launch_bounds__(128, kPrepareCtas)
    kda_fwd_prepare_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    PrepSmem<D> &smem = *reinterpret_cast<PrepSmem<D> *>(smem_bytes);
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_launch_dependents();
    const int w = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, thread = threadIdx.x;
    const bool copies = thread == 32;  // this one starts all copies and waits for those that read shared memory
    {
        Work none;
        none.item = -1;
        const Work first = find_work(params, blockIdx.x, none);
        if (first.item < 0) return;
        if (copies) {
            ptx::mbarrier_init(ptx::shared_address(&smem.landed), 1);
            ptx::fence_mbarrier_init();
            fetch(params, maps, smem, first);
            smem.work[0] = first;
        }
        Scalars<D>(p, first, thread).put(p, smem, thread);
        ptx::st_shared_v4_u32(ptx::shared_address(smem.a) + 16 * thread, make_uint4(0, 0, 0, 0));
    }
    const auto copy_out = [&](uint8_t *g_to, const uint8_t *s_from, uint32_t bytes) {
        ptx::cp_async_bulk_store(g_to, ptx::shared_address(s_from), bytes);
        ptx::cp_async_bulk_commit_group();
    };
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
        __syncthreads();
        const Work &work = smem.work[turn];
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.landed), turn);
        if (work.rows < kChunk) {
            clear_rows<D>(ptx::shared_address(smem.start), work.rows, thread);
            __syncthreads();
        }
        same_token<T, D>(w, smem);
        __syncthreads();
        token_factors(params, smem, w, lane, work.rows);
        __syncwarp();
        // Numbers that the tree's registers have no room for come from shared memory.
        const auto decays = [&](float (&a)[16], int step) {
            load_gates<D>(a, ptx::shared_address(smem.g), p.g.dtype, w, step);
            activate(a, params, smem.amplitude, ld4(&smem.bias[w * (D / 4) + 16 * step + lane % 4 * 4]));
            const int rows = work.rows, left = rows - (opaque_lane() & ~3);
            if (rows < kChunk) {
#pragma unroll
                for (int i = 0; i < 16; i++) a[i] = i / 4 < left ? a[i] : 1.0f;
                ptx::register_fence(a);
            }
        };
        Sums sums = {};
#pragma unroll 1
        for (int step = 0; step < D / 64; step++) {
            float a[16];
            decays(a, step);
            k_step<T>(a, sums, smem, w, step);
        }
        store_sums(sums, smem.partial[w]);
        if (copies) ptx::cp_async_bulk_wait_group_read<0>();  // the A of the item before
        ptx::fence_proxy_async_shared_cta();  // K~, Q~ and K^ are copied out of shared memory
        __syncthreads();
        Operands<D> &to = reinterpret_cast<Operands<D> *>(params.g_operands)[work.item];
        if (copies) copy_out(to.start, smem.start, sizeof(smem.start) + sizeof(smem.k_end));
        float a[2][2];
        add_piece<false>(a[0], smem, w, lane);
        add_piece<true>(a[1], smem, w, lane);
        if (thread < kChunk) put_a(smem, thread, thread, smem.diagonal[thread]);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (w == 0) invert_diagonal(smem, lane);
        if (w == 1) {
            if (copies) copy_out(to.a, smem.a, sizeof(smem.a));
            const int first = find_precise(smem, lane);
            const Work next = find_work(params, work.item + gridDim.x, work);
            if (copies) {
                params.g_precise[work.item] = first;
                smem.work[turn ^ 1] = next;
                ptx::cp_async_bulk_wait_group_read<1>();  // all but A
                if (first >= kChunk && next.item >= 0) fetch(params, maps, smem, next);
            }
            __syncwarp();
        }
        __syncthreads();
        const Work next = smem.work[turn ^ 1];
        const Scalars<D> scalars(p, next, thread);
        const bool precise = smem.factors.first_precise < kChunk;
        lower_left_first<T>(to, precise, smem, thread);
        __syncthreads();
        lower_left_second<T>(to, precise, smem, thread);
        constexpr int kUsed = offsetof(Factors<D>, first_precise) + sizeof(int);
        if (thread < (kUsed + 15) / 16)
            reinterpret_cast<uint4 *>(&to.factors)[thread] = reinterpret_cast<const uint4 *>(&smem.factors)[thread];
        if (precise) {
            if (copies) ptx::cp_async_bulk_wait_group_read<0>();
            __syncthreads();
            put_low<false>(a[0], smem, w, lane);
            put_low<true>(a[1], smem, w, lane);
            if (thread < kChunk) {
                const float x = smem.diagonal[thread];
                put_a(smem, thread, thread, x - __half2float(__float2half_rn(x)));
            }
            ptx::fence_proxy_async_shared_cta();
            __syncthreads();
            if (copies) copy_out(to.a_low, smem.a, sizeof(smem.a));
            const int HV = static_cast<int>(p.HV), head_qk = work.item % HV / (HV / static_cast<int>(p.H));
            const int64_t stride = 2 * p.k.stride[1];
            const char *g_k =
                p.k.data + 2 * (work.batch * p.k.stride[0] + head_qk * p.k.stride[2]) + work.token * stride;
#pragma unroll 1
            for (int step = 0; step < D / 64; step++) {
                float a[16];
                decays(a, step);
                k_end_second_terms<T>(a, smem, w, step, work.rows, g_k + 2 * (w * (D / 4) + 16 * step), stride, to);
            }
            __syncthreads();
            if (copies) {
                ptx::cp_async_bulk_wait_group_read<0>();
                if (next.item >= 0) fetch(params, maps, smem, next);
            }
        }
        if (next.item < 0) break;
        scalars.put(p, smem, thread);
    }
    if (copies) ptx::cp_async_bulk_wait_group_read<0>();
}

template <class T, int D>
void launch_prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks, int multiprocessors) {
    const int64_t items = chunks * params.p.HV, most = int64_t{kPrepareCtas} * multiprocessors;
    LaunchConfig config;
    config.grid.x = items < most ? items : most;
    config.block.x = 128;
    config.smem_bytes = sizeof(PrepSmem<D>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    launch("kda_fwd_prepare_kernel", kda_fwd_prepare_kernel<T, D>, config, params, maps);
}

}  // namespace linattn::cuda::kda
