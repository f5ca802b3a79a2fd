// Third kernel of the chunked GDN backward: all gradients of a chunk, from what the scans kept: S before it, D after it, e and dr of
// its tokens. One CTA per chunk and key head, whose value heads come one after another, so that dq and dk are summed in registers.
// With 1/|q|, 1/|k| and beta in factors (query, erase, write, pair_q, pair_k), q and k as given, F_ij = 2^(G_i - G_j):
//
//   P'_ij = pair_q_i F_ij pair_k_j do_i . e_j  (j <= i);    M_ij = -pair_k_i F_ij pair_k_j dr_i . e_j  (j < i)
//   dq' = query S do + P' k                                            dq = dq' - y (y . dq'), y = q / |q|, with l2norm; else dq'
//   dk' = erase S dr + write D e + P'^T q + (M + M^T) k                the same
//   dv = beta dr;   dbeta = dr . e
//   dg_t = sum_{j < t <= i} H_ij + sum_{i >= t} c_i + sum_{j < t} f_j + 2^G_last S . D,      H_ij = P'_ij q_i . k_j + M_ij k_i . k_j,
//          c_i = q_i . (query S do)_i + k_i . (erase S dr)_i,   f_j = k_j . (write D e)_j
//
// Every term of dg_t has the decay of t as a factor, so a steep gate gets a small gradient and nothing cancels that has not to.
//
// Roles: a warpgroup per 64 channels of K multiplies. Per value head: do e^T (first warpgroup), dr e^T (last); S do, S dr; D e; then
// the products with P' and M. One more warpgroup loads, writes dv, dbeta and dg, and has S . D and dr . e as diagonals of products:
// when all tiles of a head have been read it asks for the next head's, also those of the next chunk, and only then sums up dg.
// Shared memory at D = 128: q, k 32 KB, do, e, dr 48, S, D 64, P', M 16, H 34, factors and sums 9: one CTA an SM.
// Registers: 104 beside 2 x 200; q . k or k . k 32, dq', dk' 64, sums of products 64.
#include "common/launch.h"
#include "gdn_bwd_gradients.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C>
struct Gradients : GradientsParts<C> {
    using Parts = GradientsParts<C>;
    using Parts::call, Parts::smem, Parts::group, Parts::warp, Parts::lane, Parts::q, Parts::row, Parts::key;
    using Parts::D, Parts::kMultiply, Parts::kThreads, Parts::kK, Parts::kMN, Parts::multipliers, Parts::fetch_key;
    using Parts::s_q, Parts::s_k, Parts::s_do, Parts::s_e, Parts::s_dr, Parts::s_state, Parts::s_grad, Parts::s_pairs,
        Parts::s_erase;
    using Parts::tokens_ring, Parts::state_ring, Parts::grad_ring, Parts::sums_ring;
    using typename Parts::Rows, typename Parts::Square, typename Parts::State, typename Parts::T;

    using H = __nv_bfloat16;                         // its terms, whatever T is: H may leave the range of fp16
    static constexpr uint32_t kOnes = 0x3f803f80u;  // two of H

    // P' (of_q) or M from do e^T or dr e^T, and what its part of H, with q k^T or k k^T, gives to dg: sums over the warp's rows.
    // Sums over columns before t are products with ones, of H in two terms; the ones are exact, so each sum is as good as its terms.
    __device__ __forceinline__ void scale_pairs(bool of_q, const float (&x)[32], const float (&similar)[32], const Factors &f,
                                                float (*sums)[kC]) const {
        const uint32_t tile = of_q ? s_pairs : s_erase;
        const int g = lane / 4;
        // Ones where row 2q or 2q + 1 of a block is above column g.
        const uint32_t above = (2 * q < g ? kOnes & 0xffffu : 0) | (2 * q + 1 < g ? kOnes & 0xffff0000u : 0);
        float before[4] = {}, column[8][2];  // of all columns so far, for any t; sums for t = 8 n + 2 q, + 1
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (s > warp) {
                column[2 * s][0] = column[2 * s][1] = column[2 * s + 1][0] = column[2 * s + 1][1] = 0.0f;
                continue;
            }
            uint32_t high[4], low[4];
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int half = part % 2, n = 2 * s + part / 2, i = row + 8 * half, j = 8 * n + 2 * q;
                const float own = of_q ? f.pair_q[i] : -f.pair_k[i], sum = f.log2[i];
                const float2 log2 = *reinterpret_cast<const float2 *>(&f.log2[j]),
                             other = *reinterpret_cast<const float2 *>(&f.pair_k[j]);
                float y[2];
                y[0] = own * other.x * ptx::ex2_approx_ftz(fminf(sum - log2.x, 0.0f)) * x[4 * n + 2 * half];
                y[1] = own * other.y * ptx::ex2_approx_ftz(fminf(sum - log2.y, 0.0f)) * x[4 * n + 2 * half + 1];
                float2 product = make_float2(y[0] * similar[4 * n + 2 * half], y[1] * similar[4 * n + 2 * half + 1]);
                if (s == warp) {  // at the diagonal
                    if (j >= i) product.x = 0.0f;
                    if (j + 1 >= i) product.y = 0.0f;
                    if (j > i || (!of_q && j == i)) y[0] = 0.0f;
                    if (j + 1 > i || (!of_q && j + 1 == i)) y[1] = 0.0f;
                }
                if constexpr (!ptx::kIsBf16<T>)
                    y[0] = fminf(fmaxf(y[0], -65504.0f), 65504.0f), y[1] = fminf(fmaxf(y[1], -65504.0f), 65504.0f);
                split<H>(product.x, product.y, high[part], low[part]);
                ptx::st_shared_u32(tile + Square::offset(i, j), ptx::cvt_rn_x2<T>(y[0], y[1]));
            }
            float first[4], second[4];
#pragma unroll
            for (int e = 0; e < 4; e++) first[e] = second[e] = before[e];
            ptx::mma_m16n8k16<H>(first, low, above, 0), ptx::mma_m16n8k16<H>(first, high, above, 0);
            ptx::mma_m16n8k16<H>(second, low, kOnes, above), ptx::mma_m16n8k16<H>(second, high, kOnes, above);
            ptx::mma_m16n8k16<H>(before, low, kOnes, kOnes), ptx::mma_m16n8k16<H>(before, high, kOnes, kOnes);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int t = 16 * s + 2 * q + e;  // and t + 8; rows i >= t alone have it
                const bool diagonal = s == warp;
                column[2 * s][e] = (!diagonal || row >= t ? first[e] : 0.0f) + (!diagonal || row + 8 >= t ? first[2 + e] : 0.0f);
                column[2 * s + 1][e] =
                    (!diagonal || row >= t + 8 ? second[e] : 0.0f) + (!diagonal || row + 8 >= t + 8 ? second[2 + e] : 0.0f);
            }
        }
        // Over the eight rows of a lane's column: each step leaves a lane half of the columns, the last those of n = g.
#pragma unroll
        for (int step = 4; step > 0; step /= 2)
#pragma unroll
            for (int n = 0; n < step; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const bool up = g & step;
                    const float other = __shfl_xor_sync(~0u, up ? column[n][e] : column[n + step][e], 4 * step);
                    column[n][e] = (up ? column[n + step][e] : column[n][e]) + other;
                }
        *reinterpret_cast<float2 *>(&sums[warp][2 * lane]) = make_float2(column[0][0], column[0][1]);
    }

    // sum += f x, rows; returns (adds to `dots`) the rows' dot products of f x with the tile's channels.
    __device__ __forceinline__ void add_scaled(float (&sum)[32], const float (&x)[32], const float *factor, uint32_t tile,
                                               float (&dots)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float f = factor[row + 8 * half];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 other = load_pair<T, Rows>(tile, row + 8 * half, 64 * group + 8 * n + 2 * q);
                const float a = f * x[4 * n + 2 * half], b = f * x[4 * n + 2 * half + 1];
                sum[4 * n + 2 * half] += a, sum[4 * n + 2 * half + 1] += b;
                dots[half] = fmaf(a, other.x, fmaf(b, other.y, dots[half]));
            }
        }
    }
    __device__ __forceinline__ void put_rows(float *to, const float (&x)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = sum_quad(x[half]);
            if (q == 0) to[row + 8 * half] = sum;
        }
    }

    // One value head: adds to dq' and dk'.
    __device__ __forceinline__ void value_head(const RingState<2> &at, const RingState<1> &states, const float (&similar)[32],
                                               float (&dq)[32], float (&dk)[32]) const {
        float x[32], y[32], c_dots[2] = {}, after[2] = {};
        const int place = at.stage;
        const Factors &f = smem.f[place];
        typename GradientsSmem<C>::Sums &sums = smem.sums[place];
        tokens_ring.wait_full(at);
        ptx::fence_proxy_async_shared_cta();  // do may have come by ordinary copies
        issue_ss<T, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(group == 0 ? s_do(place) : s_dr(place), 0, 0),
                                                Rows::k_major_low(s_e(place), 0, 0), false);
        if (C::kHalves == 1)
            issue_ss<T, kK, Rows, kK, Rows, D / 16>(y, Rows::k_major_low(s_dr(place), 0, 0), Rows::k_major_low(s_e(place), 0, 0),
                                                    false);
        multipliers();  // P' and M of the head before are read
        sums_ring.wait_empty(at);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x), ptx::register_fence(y);
        scale_pairs(group == 0, x, similar, f, sums.pairs[group]);
        if (C::kHalves == 1) {
            float own[32];
            key_similarities(own);
            scale_pairs(false, y, own, f, sums.pairs[1]);
        }
        state_ring.wait_full(states);
        const uint32_t state = State::mn_major_low(s_state, 0, 64 * group), grad = State::mn_major_low(s_grad, 0, 64 * group);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_do(place), 0, 0), state, false);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(y, Rows::k_major_low(s_dr(place), 0, 0), state, false);
        grad_ring.wait_full(states);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(x);
        add_scaled(dq, x, f.query, s_q, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(y), ptx::register_fence(x);
        warp_arrive(state_ring.empty(0), lane);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_e(place), 0, 0), grad, false);
        add_scaled(dk, y, f.erase, s_k, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        warp_arrive(grad_ring.empty(0), lane);
        add_scaled(dk, x, f.write, s_k, after);
        warp_arrive(tokens_ring.empty(place), lane);
        put_rows(sums.c[group], c_dots), put_rows(sums.after[group], after);
        warp_arrive(sums_ring.full(place), lane);
        ptx::fence_proxy_async_shared_cta();
        multipliers();  // P' and M are written
        const uint32_t of_q = Rows::mn_major_low(s_q, 0, 64 * group), of_k = Rows::mn_major_low(s_k, 0, 64 * group);
        ptx::register_fence(dq), ptx::register_fence(dk);
        issue_ss<T, kK, Square, kMN, Rows, kC / 16>(dq, Square::k_major_low(s_pairs, 0, 0), of_k, true);
        issue_ss<T, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_pairs, 0, 0), of_q, true);
        issue_ss<T, kK, Square, kMN, Rows, kC / 16>(dk, Square::k_major_low(s_erase, 0, 0), of_k, true);
        issue_ss<T, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_erase, 0, 0), of_k, true);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(dq), ptx::register_fence(dk);
    }

    __device__ __forceinline__ void key_similarities(float (&x)[32]) const {
        issue_ss<T, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(s_k, 0, 0), Rows::k_major_low(s_k, 0, 0), false);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
    }

    // What the kernels in float gave for a value head.
    __device__ __forceinline__ void add_exact(const Chunk &c, float (&sum)[32], const float *from, const float *norm) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            if (t >= c.length) continue;
            const float *const at = from + ((c.row + t) * call.p().HV + c.head) * D + 64 * group + 2 * q;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) sum[4 * n + 2 * half + e] = fmaf(norm[t], at[8 * n + e], sum[4 * n + 2 * half + e]);
        }
    }

    // y . dx' of the warpgroup's channels.
    __device__ __forceinline__ void dots(const float (&x)[32], uint32_t tile, const float *norm, float *to) const {
        float sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 other = load_pair<T, Rows>(tile, row + 8 * half, 64 * group + 8 * n + 2 * q);
                sum[half] = fmaf(x[4 * n + 2 * half], other.x, fmaf(x[4 * n + 2 * half + 1], other.y, sum[half]));
            }
            sum[half] *= norm[row + 8 * half];
        }
        put_rows(to, sum);
    }
    // dx = dx' - y (y . dx'), to where q or k was.
    __device__ __forceinline__ void project(const float (&x)[32], uint32_t tile, const float *norm, const float (*along)[2][kC],
                                            int which) const {
        const bool l2norm = call.p().qk_l2norm;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            float dot = 0.0f;
            if (l2norm) dot = norm[t] * (along[0][which][t] + (C::kHalves > 1 ? along[1][which][t] : 0.0f));
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int column = 64 * group + 8 * n + 2 * q;
                const float2 raw = load_pair<T, Rows>(tile, t, column);
                ptx::st_shared_u32(tile + Rows::offset(t, column),
                                   ptx::cvt_rn_x2<T>(x[4 * n + 2 * half] - dot * raw.x, x[4 * n + 2 * half + 1] - dot * raw.y));
            }
        }
    }
    __device__ __forceinline__ void store_rows(const Chunk &c, const Tensor &t, uint32_t tile) const {
        constexpr int kUnits = D / 8;
        uint16_t *const to = reinterpret_cast<uint16_t *>(t.data) + delta_bwd::element(t, c.b, c.token, c.key_head);
#pragma unroll 2
        for (int i = threadIdx.x; i < kC * kUnits; i += kMultiply) {
            const int token = i / kUnits, unit = i % kUnits * 8;
            if (token < c.length)
                *reinterpret_cast<uint4 *>(to + token * t.stride[1] + unit) =
                    ptx::ld_shared_v4_u32(tile + Rows::offset(token, unit));
        }
    }

    __device__ __forceinline__ void multiply() const {
        const BwdParams &p = call.p();
        const int group_size = static_cast<int>(p.HV / p.H);
        uint32_t phase_of_key = 0;
        RingState<2> at;
        RingState<1> states;
#pragma unroll 1
        for (int64_t i = blockIdx.x; i < call.chunks() * p.H; i += gridDim.x) {
            Chunk c = delta_bwd::find_chunk(p, call.exact.w.chunk_start, i / p.H, 0);
            c.key_head = i % p.H;
            fetch_key(c);
            const Factors *const norms = call.factors + call.of_value(c.index, c.key_head * group_size);
            if (threadIdx.x < kC) {
                smem.norm[0][threadIdx.x] = norms->norm_q[threadIdx.x];
                smem.norm[1][threadIdx.x] = norms->norm_k[threadIdx.x];
            }
            float similar[32], dq[32], dk[32];
#pragma unroll
            for (int j = 0; j < 32; j++) dq[j] = dk[j] = 0.0f;
            ptx::mbarrier_wait_parity(key, phase_of_key);
            phase_of_key ^= 1;
            issue_ss<T, kK, Rows, kK, Rows, D / 16>(similar, Rows::k_major_low(group == 0 ? s_q : s_k, 0, 0),
                                                    Rows::k_major_low(s_k, 0, 0), false);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(similar);
#pragma unroll 1
            for (int r = 0; r < group_size; r++) {
                c.head = c.key_head * group_size + r;
                if (call.flagged(c.n, c.head)) continue;
                value_head(at, states, similar, dq, dk);
                at.advance(), states.advance();
            }
            for (int r = 0; r < group_size; r++) {
                c.head = c.key_head * group_size + r;
                if (!call.flagged(c.n, c.head)) continue;
                multipliers();  // smem.norm
                add_exact(c, dq, call.exact.w.dq, smem.norm[0]);
                add_exact(c, dk, call.exact.w.dk, smem.norm[1]);
            }
            multipliers();  // smem.norm; q and k have been read
            if (p.qk_l2norm) {
                dots(dq, s_q, smem.norm[0], smem.along[group][0]);
                dots(dk, s_k, smem.norm[1], smem.along[group][1]);
                multipliers();
            }
            project(dq, s_q, smem.norm[0], smem.along, 0);
            project(dk, s_k, smem.norm[1], smem.along, 1);
            multipliers();
            store_rows(c, p.dq, s_q);
            store_rows(c, p.dk, s_k);
            ptx::fence_proxy_async_shared_cta();
            multipliers();
        }
    }
};

template <class C>
__global__ void __launch_bounds__(128 * C::kHalves + kHelpers, 1) gdn_bwd_gradients_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    GradientsSmem<C> &smem = *reinterpret_cast<GradientsSmem<C> *>(smem_bytes);
    using G = Gradients<C>;
    const G own{{call, smem}};
    if (threadIdx.x == 0) own.init();
    for (int i = threadIdx.x; i < 2 * C::Square::kBytes / 4; i += G::kThreads) ptx::st_shared_u32(own.s_pairs + 4 * i, 0);
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    if (own.group == C::kHalves) {
        if constexpr (C::kHalves > 1) ptx::setmaxnreg_dec<104>();
        own.help();
    } else {
        if constexpr (C::kHalves > 1) ptx::setmaxnreg_inc<200>();
        own.multiply();
    }
}

void launch_gradients(const Call &call) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        const int64_t items = call.exact.w.chunks * call.exact.p.H;
        launch_config.grid.x = items < call.multiprocessors ? items : call.multiprocessors;
        launch_config.block.x = Gradients<C>::kThreads;
        launch_config.smem_bytes = sizeof(GradientsSmem<C>);
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch("gdn_bwd_gradients_kernel", gdn_bwd_gradients_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
