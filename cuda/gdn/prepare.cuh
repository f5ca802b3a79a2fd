// gdn_fwd_prepare_kernel: of one chunk and value head of a cut sequence, what does not depend on the state: A^, P and the factors, to
// the workspace. It is AUX's work (aux.cuh, precise.cuh) and the gate warps' (gates.cuh), once instead of in each pass over the chunk
// and in each CTA that has columns of it; here 1/|q| goes into P and the factors of Q S.
// Grid: chunks of all sequences x groups of value heads of one key head, which are taken in turn. Block: four warps, three CTAs on an
// SM, since each is a chain of short steps. Shared memory: 72 KB.
#pragma once
#include "common/launch.h"
#include "gates.cuh"
#include "precise.cuh"
#include "prepared.cuh"

namespace linattn::cuda::gdn {

template <class C>
struct alignas(1024) PrepareSmem {
    using Tile = typename Smem<C>::Tile;
    using Product = typename Smem<C>::Product;
    uint8_t k[Tile::kBytes], q[Tile::kBytes];
    uint8_t a[Product::kBytes], p[Product::kBytes], a_second[Product::kBytes];  // second terms of P go where P was
    InverseScratch inverse;
    float query_norm[kChunk];
    float table[C::kL2Norm ? table::kFloatsL2Norm : table::kFloats];
    uint64_t landed;
    uint64_t meets[kWarpArrivals == 32 ? 1 : 0];
};

// All warps meet; in racecheck's build at an mbarrier, as those of an AUX group do (group_meets, aux.cuh).
template <class C>
__device__ __forceinline__ void warps_meet(PrepareSmem<C> &smem) {
#ifdef LINATTN_EVERY_LANE_ARRIVES
    ptx::mbarrier_arrive_and_wait(ptx::shared_address(smem.meets));
#else
    __syncthreads();
#endif
}

// The chunk with this number, counted through the sequences. By a converged warp; the same in every lane.
__device__ __forceinline__ bool find_chunk(const DeltaParams &p, int index, int &sequence, int &within) {
    const int N = static_cast<int>(p.N), lane = threadIdx.x % 32;
    if (!p.cu_seqlens) {
        const int each = (static_cast<int>(p.T) + kChunk - 1) / kChunk;
        sequence = index / each, within = index % each;
        return sequence < N;
    }
    int before = 0;
    for (int first = 0; first < N; first += 32) {
        int bos, length = 0;
        if (first + lane < N) sequence_range(p, first + lane, bos, length);
        const int count = (length + kChunk - 1) / kChunk;
        int through = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const uint32_t beyond = __ballot_sync(~0u, before + through > index);
        if (beyond != 0) {
            const int owner = __ffs(static_cast<int>(beyond)) - 1;
            sequence = first + owner;
            within = index - before - __shfl_sync(~0u, through - count, owner);
            return true;
        }
        before += __shfl_sync(~0u, through, 31);
    }
    return false;
}

// Blocks above the diagonal, of rows 16 w to 16 w + 15.
__device__ __forceinline__ void clear_above(uint32_t tile, int w, int lane) {
    for (int j = w + 1; j < 4; j++) ptx::stmatrix_x4(product_block(tile, w, j, lane), {0, 0, 0, 0});
}

// g and beta of the lane's two tokens of a chunk of `rows`, for one head after another.
struct ChunkGates {
    const KernelParams &params;
    Item &item;
    int left;
    uint32_t g[2], beta[2];
    float amplitude, bias;

    // Of item.head.
    __device__ __forceinline__ void fetch() {
        const DeltaParams &p = params.p;
        TokenPair<false> from_g(p.g, item, 2 * opaque_lane()), from_beta(p.beta, item, 2 * opaque_lane());
        from_g.fetch(p.g, left);
        from_beta.fetch(p.beta, left);
        g[0] = from_g.bits[0], g[1] = from_g.bits[1], beta[0] = from_beta.bits[0], beta[1] = from_beta.bits[1];
        amplitude = p.A_log ? fminf(expf(load_scalar(p.A_log, item.head * p.A_log.stride[0])), 1e30f) : 1.0f;
        bias = p.dt_bias ? load_scalar(p.dt_bias, item.head * p.dt_bias.stride[0]) : 0.0f;
    }
    // By a warp.
    __device__ __forceinline__ void fill(float *s_table) const {
        const DeltaParams &p = params.p;
        float x[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // past the end: no decay, beta 0
            b[i] = TokenPair<false>::number(p.beta, beta[i]);
            if (p.beta_form != BetaForm::Weight) b[i] = sigmoid(b[i]);
            if (p.beta_form == BetaForm::LogitsX2) b[i] += b[i];
            b[i] = left > i ? b[i] : 0.0f;
            x[i] = left > i ? log2_decay(params, TokenPair<false>::number(p.g, g[i]), bias, amplitude) : 0.0f;
        }
        fill_table(s_table, x, b, params.scale);
    }
};

template <class C>
__global__ void __launch_bounds__(128, 3)
    gdn_fwd_prepare_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ CUtensorMap map_q,
                           const __grid_constant__ CUtensorMap map_k) {
    extern __shared__ __align__(1024) char smem_bytes[];
    PrepareSmem<C> &smem = *reinterpret_cast<PrepareSmem<C> *>(smem_bytes);
    using Tile = typename Smem<C>::Tile;
    const DeltaParams &p = params.p;
    ptx::griddepcontrol_launch_dependents();
    const int heads = params.prepare_heads, ctas = static_cast<int>(p.HV) / heads;  // of a chunk
    const int index = blockIdx.x / ctas;
    int sequence, within, length;
    Item item;
    if (!find_chunk(p, index, sequence, within)) return;
    if (read_row(p, sequence) < 0) return;  // padding
    sequence_range(p, sequence, item.bos, length);
    item.bos += within * kChunk, item.head = blockIdx.x % ctas * heads, item.batch = p.cu_seqlens ? 0 : sequence;
    const int left_of_it = length - within * kChunk, rows = left_of_it < kChunk ? left_of_it : kChunk;
    const int w = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);
    const uint32_t k = ptx::shared_address(smem.k), q = ptx::shared_address(smem.q), landed = ptx::shared_address(&smem.landed);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(landed, 1);
#ifdef LINATTN_EVERY_LANE_ARRIVES
        ptx::mbarrier_init(ptx::shared_address(smem.meets), 128);
#endif
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(landed, 2 * Tile::kBytes);
        const int head_qk = item.head / static_cast<int>(p.HV / p.H);
        load_tile<Tile>(k, &map_k, landed, 0, head_qk, item.bos, item.batch);
        load_tile<Tile>(q, &map_q, landed, 0, head_qk, item.bos, item.batch);
    }
    // Warp 3 fills the tables and sends off what is done.
    ChunkGates gates{params, item, rows - 2 * lane, {}, {}, 1.0f, 0.0f};
    if (w == 3) gates.fetch();
    const uint32_t A = ptx::shared_address(smem.a), P = ptx::shared_address(smem.p),
                   A_second = ptx::shared_address(smem.a_second);
    clear_above(A, w, lane), clear_above(P, w, lane), clear_above(A_second, w, lane);  // for good
    __syncthreads();
    ptx::mbarrier_wait_parity(landed, 0);
    if (rows < kChunk) {
        if (w == 0) clear_rows<Tile>(k, rows, lane);
        if (w == 1) clear_rows<Tile>(q, rows, lane);
        ptx::fence_proxy_async_shared_cta();
        warps_meet(smem);
    }
    InverseScratch &scratch = smem.inverse;
    const uint32_t tw = ptx::shared_address(smem.table) + 64 * w, row_sums = ptx::shared_address(scratch.weights[0]);
    const uint32_t M = ptx::shared_address(scratch.M[0]), X = ptx::shared_address(scratch.X[0]);
    if constexpr (C::kL2Norm) query_norms_of_warp<C>(smem.query_norm, q, w, lane);
    int64_t to = int64_t{index} * p.HV + item.head;
#pragma unroll 1
    for (int h = 0; h < heads; h++, to++) {
        float d[32], e[6];
        Diagonal diagonal;
        Weights weights;
        float2 scale = {params.scale, params.scale};
        issue_product<C>(d, k, k);
        if (w == 3) {
            if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();  // of the head before
            __syncwarp();
            gates.fill(smem.table);
            item.head++;
            if (h + 1 < heads) gates.fetch();
        }
        warps_meet(smem);
        KeyNorms norms;
        if constexpr (C::kL2Norm) {
            if (lane < 16) {
                const float norm = smem.query_norm[16 * w + lane];
                smem.table[table::kScaledGamma + 16 * w + lane] *= norm;
                smem.table[table::kRowDecayScaled + 16 * w + lane] *= norm;
            }
            scale.x *= smem.query_norm[16 * w + lane / 4], scale.y *= smem.query_norm[16 * w + 8 + lane / 4];
            norms.read(tw, lane);
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(d);
        if constexpr (C::kL2Norm) {
            for_warp(w, [&](auto warp) { norms.choose(d + 8 * decltype(warp)::value, lane); });
            norms.write(tw, lane);
            warps_meet(smem);
        }
        for_warp_or_all<C>(w, [&](auto warp) { scale_kk<C, false>(d, diagonal, weights, tw, M, warp, lane); });
        issue_product<C>(d, q, k);
        DiagonalDecays(tw, lane).get(e, lane);
        decay_diagonal(diagonal, e, lane);
        const uint32_t left = pack_f16(diagonal.left[0], diagonal.left[1]);
        store_weights(diagonal, weights, left, row_sums + 128 * w + 4 * Lane(lane).lane);
        invert_diagonal<C>(diagonal, left, X, A, w, lane);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(d);
        warps_meet(smem);
        const Substitution<C> substitution{
            tw,          M + 16 * lane, X + 16 * lane, ptx::shared_address(scratch.X10[0]) + 16 * lane, A, P, row_sums,
            kX10Barrier, scale,         lane};
        int weight, first = kChunk;
        for_warp_or_all<C>(w, [&](auto warp) { weight = substitution.run(d, e, warp); });
        Prepared &g_to = params.g_prepared[to];
        const bool sends = threadIdx.x == 96;  // in warp 3, which waits for it before it fills the next table
        if (weight > kMostWhole<C> || rows <= kFewTokens) {
            first = rows <= kFewTokens ? 0 : first_precise<C>(row_sums, lane);
            ptx::fence_proxy_async_shared_cta();
            warps_meet(smem);  // the first pass is over in all warps
            if (sends) {
                ptx::cp_async_bulk_store(g_to.p, P, sizeof(g_to.p));
                ptx::cp_async_bulk_commit_group();
                ptx::cp_async_bulk_wait_group_read<0>();
            }
            warps_meet(smem);
            for_warp_or_all<C>(w, [&](auto warp) { store_p<C, true>(d, e, tw, P, scale, warp, lane); });
            issue_product<C>(d, k, k);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(d);
            const PreciseInverse inverse{ptx::shared_address(&scratch) + 16 * lane, 0, A, A_second, kX10Barrier, first, lane};
            Weights ignored;
            for_warp_or_all<C>(w, [&](auto warp) {
                scale_kk<C, true>(d, diagonal, ignored, tw, ptx::shared_address(scratch.M[1]), warp, lane);
            });
            decay_diagonal(diagonal, e, lane);
            inverse.invert_diagonal(diagonal, w);
            warps_meet(smem);
            for_warp(w, [&](auto warp) { inverse.template run<decltype(warp)::value>(); });
        }
        if (sends) ptx::st_shared_u32(ptx::shared_address(&smem.table[table::kFirstPrecise]), first);
        ptx::fence_proxy_async_shared_cta();
        warps_meet(smem);
        if (sends) {
            ptx::cp_async_bulk_store(g_to.a, A, sizeof(g_to.a));
            if (first < kChunk) {
                ptx::cp_async_bulk_store(g_to.a_second, A_second, sizeof(g_to.a_second));
                ptx::cp_async_bulk_store(g_to.p_second, P, sizeof(g_to.p_second));
            } else {
                ptx::cp_async_bulk_store(g_to.p, P, sizeof(g_to.p));
            }
            ptx::cp_async_bulk_store(g_to.factors, ptx::shared_address(&smem.table[table::kBeta]), sizeof(g_to.factors));
            ptx::cp_async_bulk_commit_group();
            params.g_precise[to] = first;
        }
    }
    if (threadIdx.x == 96) ptx::cp_async_bulk_wait_group_read<0>();
}

// chunks: of all sequences, at most.
template <class C>
void launch_prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks) {
    static_assert(3 * (sizeof(PrepareSmem<C>) + 1024) <= 228 * 1024, "CTAs of an SM fit");
    LaunchConfig config;
    config.grid.x = chunks * (params.p.HV / params.prepare_heads);
    config.block.x = 128;
    config.smem_bytes = sizeof(PrepareSmem<C>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    launch("gdn_fwd_prepare_kernel", gdn_fwd_prepare_kernel<C>, config, params, maps.q, maps.k);
}

}  // namespace linattn::cuda::gdn
