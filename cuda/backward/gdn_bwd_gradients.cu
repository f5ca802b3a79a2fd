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
// A warpgroup per 64 channels of K. Per value head: do e^T (first warpgroup), dr e^T (last); S do, S dr; D e; then, while the sums of
// dg run, the products with P' and M. When all tiles of a head have been read, the next head's are asked for.
// Shared memory at D = 128: q, k 32 KB, do, e, dr 48, S, D 64, P', M 16, H 33, factors and sums 9: one CTA an SM.
// Registers: q . k or k . k 32, dq', dk' 64, sums of products 64.
#include "common/launch.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C>
struct alignas(1024) GradientsSmem {
    char q[C::Rows::kBytes], k[C::Rows::kBytes];  // last dq, dk on their way out
    char d_o[C::Rows::kBytes], e[C::Rows::kBytes], dr[C::Rows::kBytes];
    char state[C::State::kBytes], grad[C::State::kBytes];
    char pairs[C::Square::kBytes], erase[C::Square::kBytes];  // P', M
    float h[2][kC][kC + 1];                                   // H in two parts; later sums of its rows up to t
    Factors f[2];                                             // of this value head, of the next
    float c[2][kC], after[2][kC];                             // c_i, f_j, by warpgroup
    float along[2][2][kC];                                    // y . dq', y . dk', by warpgroup
    float dbeta[kC], sums[2][kC], norm[2][kC], product[8];    // sums: of A_log, of dt_bias; norm: 1 / |q|, 1 / |k|
    alignas(8) char barriers[4 * 8];
};

enum GradientsBarrier { kTilesOfKey, kTilesOfTokens, kTileOfState, kTileOfGrad };

template <class T, ptx::Major kA, class TileA, ptx::Major kB, class TileB, int kSteps, int kCount>
__device__ __forceinline__ void issue_ss(float (&d)[kCount], uint32_t a, uint32_t b, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const uint32_t of_a = (kA == ptx::Major::K ? TileA::offset(0, 16 * s) : TileA::offset(16 * s, 0)) >> 4;
        const uint32_t of_b = (kB == ptx::Major::K ? TileB::offset(0, 16 * s) : TileB::offset(16 * s, 0)) >> 4;
        ptx::wgmma_ss<T, kA, kB>(
            d, ptx::wgmma_descriptor(a + of_a, kA == ptx::Major::K ? TileA::k_major_high() : TileA::mn_major_high()),
            ptx::wgmma_descriptor(b + of_b, kB == ptx::Major::K ? TileB::k_major_high() : TileB::mn_major_high()),
            s > 0 || accumulate);
    }
    ptx::wgmma_commit_group();
}

template <class C>
struct Gradients {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    using State = typename C::State;
    static constexpr int D = C::D, kThreads = 128 * C::kHalves, kLast = C::kHalves - 1;
    static constexpr ptx::Major kK = ptx::Major::K, kMN = ptx::Major::MN;
    const Call &call;
    GradientsSmem<C> &smem;
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, q = lane % 4;
    const int row = 16 * warp + lane / 4;  // and row + 8: the thread's rows of all fragments
    const uint32_t s_q = ptx::shared_address(smem.q), s_k = ptx::shared_address(smem.k), s_do = ptx::shared_address(smem.d_o),
                   s_e = ptx::shared_address(smem.e), s_dr = ptx::shared_address(smem.dr),
                   s_state = ptx::shared_address(smem.state), s_grad = ptx::shared_address(smem.grad),
                   s_pairs = ptx::shared_address(smem.pairs), s_erase = ptx::shared_address(smem.erase);

    __device__ __forceinline__ uint32_t barrier(GradientsBarrier b) const { return ptx::shared_address(smem.barriers) + 8 * b; }
    static __device__ __forceinline__ void copy(uint32_t to, const void *from, int bytes, uint32_t bar) {
        ptx::cp_async_bulk_load(to, from, static_cast<uint32_t>(bytes), bar);
    }

    __device__ __forceinline__ void fetch_key(const Chunk &c) const {
        if (threadIdx.x != 0) return;
        const uint32_t bar = barrier(kTilesOfKey);
        const int64_t at = call.of_key(c.index, c.key_head);
        ptx::mbarrier_arrive_expect_tx(bar, 2 * Rows::kBytes);
        copy(s_q, tile_of<Rows>(call.q, at), Rows::kBytes, bar);
        copy(s_k, tile_of<Rows>(call.k, at), Rows::kBytes, bar);
    }
    __device__ __forceinline__ void fetch(const Chunk &c, int place) const {
        const int64_t at = call.of_value(c.index, c.head);
        if (threadIdx.x == 0) {
            const uint32_t tokens = barrier(kTilesOfTokens), state = barrier(kTileOfState), grad = barrier(kTileOfGrad);
            ptx::mbarrier_arrive_expect_tx(tokens, 2 * Rows::kBytes + sizeof(Factors));
            copy(ptx::shared_address(&smem.f[place]), call.factors + at, sizeof(Factors), tokens);
            copy(s_e, tile_of<Rows>(call.e, at), Rows::kBytes, tokens);
            copy(s_dr, tile_of<Rows>(call.dr, at), Rows::kBytes, tokens);
            ptx::mbarrier_arrive_expect_tx(state, State::kBytes);
            copy(s_state, call.state<C>(call.exact.w.states, at), State::kBytes, state);
            ptx::mbarrier_arrive_expect_tx(grad, State::kBytes);
            copy(s_grad, call.state<C>(call.exact.w.grads, at), State::kBytes, grad);
        }
        load_rows<Rows>(s_do, call.p().d_o, c, c.head, 0, threadIdx.x, kThreads);
        ptx::cp_async_mbarrier_arrive_noinc(barrier(kTilesOfTokens));
    }

    // P' (of_q) or M and its part of H, from do e^T or dr e^T and q k^T or k k^T.
    __device__ __forceinline__ void scale_pairs(bool of_q, const float (&x)[32], const float (&similar)[32], const Factors &f,
                                                float (*h)[kC + 1]) const {
        const uint32_t tile = of_q ? s_pairs : s_erase;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + 8 * half;
            const float own = of_q ? f.pair_q[i] : -f.pair_k[i], sum = f.log2[i];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int j = 8 * n + 2 * q;
                float y[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const bool kept = of_q ? j + e <= i : j + e < i;
                    const float decay = ptx::ex2_approx_ftz(fminf(sum - f.log2[j + e], 0.0f));
                    y[e] = kept ? own * decay * f.pair_k[j + e] * x[4 * n + 2 * half + e] : 0.0f;
                    if constexpr (!ptx::kIsBf16<T>) y[e] = fminf(fmaxf(y[e], -65504.0f), 65504.0f);
                    h[i][j + e] = j + e < i ? y[e] * similar[4 * n + 2 * half + e] : 0.0f;
                }
                ptx::st_shared_u32(tile + Square::offset(i, j), ptx::cvt_rn_x2<T>(y[0], y[1]));
            }
        }
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

    // dv, and dbeta before the form of beta.
    __device__ __forceinline__ void values(const Chunk &c, const Factors &f) const {
        constexpr int kUnits = D / 8;
        const BwdParams &p = call.p();
        uint16_t *const dv = reinterpret_cast<uint16_t *>(p.dv.data) + delta_bwd::element(p.dv, c.b, c.token, c.head);
#pragma unroll 2
        for (int i = threadIdx.x; i < kC * kUnits; i += kThreads) {
            const int t = i / kUnits, unit = i % kUnits * 8;
            const uint4 e4 = ptx::ld_shared_v4_u32(s_e + Rows::offset(t, unit)),
                        dr4 = ptx::ld_shared_v4_u32(s_dr + Rows::offset(t, unit));
            const uint32_t e[4] = {e4.x, e4.y, e4.z, e4.w}, dr[4] = {dr4.x, dr4.y, dr4.z, dr4.w};
            uint32_t out[4];
            const float beta = f.beta[t];
            float dot = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 x = unpack(T{}, e[j]), y = unpack(T{}, dr[j]);
                dot = fmaf(x.x, y.x, fmaf(x.y, y.y, dot));
                out[j] = ptx::cvt_rn_x2<T>(beta * y.x, beta * y.y);
            }
#pragma unroll
            for (int mask = kUnits / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(~0u, dot, mask);
            if (unit == 0) smem.dbeta[t] = dot;
            if (t < c.length)
                *reinterpret_cast<uint4 *>(dv + t * p.dv.stride[1] + unit) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }

    // The warp's part of S . D.
    __device__ __forceinline__ void state_product() const {
        float sum = 0.0f;
#pragma unroll 4
        for (int i = threadIdx.x; i < State::kBytes / 16; i += kThreads) {
            const uint4 a4 = ptx::ld_shared_v4_u32(s_state + 16 * i), b4 = ptx::ld_shared_v4_u32(s_grad + 16 * i);
            const uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 x = unpack(T{}, a[j]), y = unpack(T{}, b[j]);
                sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
            }
        }
        sum = sum_over<32>(sum);
        if (lane == 0) smem.product[threadIdx.x / 32] = sum;
    }

    // dg, dbeta and the chunk's sums, kParts threads a token.
    __device__ __forceinline__ void gates(const Chunk &c, const Factors &f) const {
        constexpr int kParts = kThreads / kC, kWidth = kC / kParts;
        const BwdParams &p = call.p();
        const int own = threadIdx.x / kParts, part = threadIdx.x % kParts;
        float total = 0.0f;
        for (int j = part * kWidth; j < (part + 1) * kWidth; j++) total += smem.h[0][own][j] + smem.h[1][own][j];
        float before = 0.0f;
#pragma unroll
        for (int other = 0; other < kParts; other++) {
            const float sum = __shfl_sync(~0u, total, lane / kParts * kParts + other);
            if (other < part) before += sum;
        }
        for (int j = part * kWidth; j < (part + 1) * kWidth; j++) {
            const float x = smem.h[0][own][j] + smem.h[1][own][j];
            smem.h[0][own][j] = before;
            before += x;
        }
        __syncthreads();
        float dg = 0.0f;
        for (int i = part * kWidth; i < (part + 1) * kWidth; i++) {
            float x = i < own ? smem.after[0][i] : smem.c[0][i];
            if (C::kHalves > 1) x += i < own ? smem.after[1][i] : smem.c[1][i];
            if (i >= own) x += smem.h[0][i][own];
            dg += x;
        }
#pragma unroll
        for (int mask = kParts / 2; mask > 0; mask /= 2) dg += __shfl_xor_sync(~0u, dg, mask);
        if (part == 0) {
            float both = 0.0f;
            for (int i = 0; i < kThreads / 32; i++) both += smem.product[i];
            dg = fmaf(f.decay, both, dg);
            float dA = 0.0f, dbias = 0.0f;
            if (own < c.length) {
                if (p.gate != Gate::None) {
                    const float x = delta_bwd::gate_input(p, delta_bwd::element(p.g, c.b, c.token + own, c.head), c.head, 0);
                    dg = delta_bwd::through_gate(p, x, dg, delta_bwd::amplitude_of(p, c.head), dA, dbias);
                }
                delta_bwd::store_float(p.dg, delta_bwd::element(p.dg, c.b, c.token + own, c.head), dg);
                const float x = delta_bwd::load_float(p.beta, delta_bwd::element(p.beta, c.b, c.token + own, c.head));
                delta_bwd::store_float(p.dbeta, delta_bwd::element(p.dbeta, c.b, c.token + own, c.head),
                                       delta_bwd::through_beta(p, x, smem.dbeta[own]));
            }
            smem.sums[0][own] = dA, smem.sums[1][own] = dbias;
        }
        __syncthreads();
        if (p.gate == Gate::None || threadIdx.x >= 2) return;
        float sum = 0.0f;
        for (int i = 0; i < kC; i++) sum += smem.sums[threadIdx.x][i];
        (threadIdx.x == 0 ? call.exact.w.dA : call.exact.w.dbias)[call.of_value(c.index, c.head)] = sum;
    }

    // One value head: adds to dq' and dk'. next() asks for the next head's tiles.
    template <class Next>
    __device__ __forceinline__ void value_head(const Chunk &c, const Factors &f, uint32_t phase, const float (&similar)[32],
                                               float (&dq)[32], float (&dk)[32], Next next) const {
        float x[32], y[32], c_dots[2] = {}, after[2] = {};
        ptx::mbarrier_wait_parity(barrier(kTilesOfTokens), phase);
        ptx::fence_proxy_async_shared_cta();  // do came by ordinary copies
        __syncthreads();
        issue_ss<T, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(group == 0 ? s_do : s_dr, 0, 0),
                                                Rows::k_major_low(s_e, 0, 0), false);
        if (C::kHalves == 1)
            issue_ss<T, kK, Rows, kK, Rows, D / 16>(y, Rows::k_major_low(s_dr, 0, 0), Rows::k_major_low(s_e, 0, 0), false);
        values(c, f);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x), ptx::register_fence(y);
        scale_pairs(group == 0, x, similar, f, smem.h[group]);
        if (C::kHalves == 1) {
            float own[32];
            key_similarities(own);
            scale_pairs(false, y, own, f, smem.h[1]);
        }
        ptx::mbarrier_wait_parity(barrier(kTileOfState), phase);
        const uint32_t state = State::mn_major_low(s_state, 0, 64 * group), grad = State::mn_major_low(s_grad, 0, 64 * group);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_do, 0, 0), state, false);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(y, Rows::k_major_low(s_dr, 0, 0), state, false);
        ptx::mbarrier_wait_parity(barrier(kTileOfGrad), phase);
        state_product();
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(x);
        add_scaled(dq, x, f.query, s_q, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(y);
        issue_ss<T, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_e, 0, 0), grad, false);
        add_scaled(dk, y, f.erase, s_k, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        add_scaled(dk, x, f.write, s_k, after);
        put_rows(smem.c[group], c_dots), put_rows(smem.after[group], after);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        next();
        const uint32_t of_q = Rows::mn_major_low(s_q, 0, 64 * group), of_k = Rows::mn_major_low(s_k, 0, 64 * group);
        ptx::register_fence(dq), ptx::register_fence(dk);
        issue_ss<T, kK, Square, kMN, Rows, kC / 16>(dq, Square::k_major_low(s_pairs, 0, 0), of_k, true);
        issue_ss<T, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_pairs, 0, 0), of_q, true);
        issue_ss<T, kK, Square, kMN, Rows, kC / 16>(dk, Square::k_major_low(s_erase, 0, 0), of_k, true);
        issue_ss<T, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_erase, 0, 0), of_k, true);
        gates(c, f);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(dq), ptx::register_fence(dk);
        __syncthreads();  // P', M and the sums have been read
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
        for (int i = threadIdx.x; i < kC * kUnits; i += kThreads) {
            const int token = i / kUnits, unit = i % kUnits * 8;
            if (token < c.length)
                *reinterpret_cast<uint4 *>(to + token * t.stride[1] + unit) =
                    ptx::ld_shared_v4_u32(tile + Rows::offset(token, unit));
        }
    }
};

template <class C>
__global__ void __launch_bounds__(128 * C::kHalves, 1) gdn_bwd_gradients_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    const Gradients<C> own{call, *reinterpret_cast<GradientsSmem<C> *>(smem_bytes)};
    using G = Gradients<C>;
    const BwdParams &p = call.p();
    const int group_size = static_cast<int>(p.HV / p.H);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(own.barrier(kTilesOfKey), 1);
        ptx::mbarrier_init(own.barrier(kTilesOfTokens), 1 + G::kThreads);
        ptx::mbarrier_init(own.barrier(kTileOfState), 1);
        ptx::mbarrier_init(own.barrier(kTileOfGrad), 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    uint32_t phase_of_key = 0, phase = 0;
    for (int64_t i = blockIdx.x; i < call.chunks() * p.H; i += gridDim.x) {
        Chunk c = delta_bwd::find_chunk(p, call.exact.w.chunk_start, i / p.H, 0);
        c.key_head = i % p.H;
        // The first value head from r on that is not left to the kernels in float.
        const auto next_of = [&](int r) {
            while (r < group_size && call.flagged(c.n, c.key_head * group_size + r)) r++;
            return r;
        };
        const auto fetch = [&](int r, int place) {
            if (r >= group_size) return;
            Chunk other = c;
            other.head = c.key_head * group_size + r;
            own.fetch(other, place);
        };
        own.fetch_key(c);
        int r = next_of(0), place = 0;
        fetch(r, place);
        const Factors *const norms = call.factors + call.of_value(c.index, c.key_head * group_size);
        if (threadIdx.x < kC) {
            own.smem.norm[0][threadIdx.x] = norms->norm_q[threadIdx.x];
            own.smem.norm[1][threadIdx.x] = norms->norm_k[threadIdx.x];
        }
        float similar[32], dq[32] = {}, dk[32] = {};
        ptx::mbarrier_wait_parity(own.barrier(kTilesOfKey), phase_of_key);
        phase_of_key ^= 1;
        __syncthreads();
        issue_ss<typename C::T, G::kK, typename C::Rows, G::kK, typename C::Rows, C::D / 16>(
            similar, C::Rows::k_major_low(own.group == 0 ? own.s_q : own.s_k, 0, 0), C::Rows::k_major_low(own.s_k, 0, 0), false);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(similar);
#pragma unroll 1
        for (; r < group_size; place ^= 1) {
            c.head = c.key_head * group_size + r;
            const int next = next_of(r + 1);
            own.value_head(c, own.smem.f[place], phase, similar, dq, dk, [&] { fetch(next, place ^ 1); });
            phase ^= 1;
            r = next;
        }
        for (r = 0; r < group_size; r++) {
            c.head = c.key_head * group_size + r;
            if (!call.flagged(c.n, c.head)) continue;
            own.add_exact(c, dq, call.exact.w.dq, own.smem.norm[0]);
            own.add_exact(c, dk, call.exact.w.dk, own.smem.norm[1]);
        }
        if (p.qk_l2norm) {
            own.dots(dq, own.s_q, own.smem.norm[0], own.smem.along[own.group][0]);
            own.dots(dk, own.s_k, own.smem.norm[1], own.smem.along[own.group][1]);
        }
        __syncthreads();
        own.project(dq, own.s_q, own.smem.norm[0], own.smem.along, 0);
        own.project(dk, own.s_k, own.smem.norm[1], own.smem.along, 1);
        __syncthreads();
        own.store_rows(c, p.dq, own.s_q);
        own.store_rows(c, p.dk, own.s_k);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
    }
}

void launch_gradients(const Call &call) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        const int64_t items = call.exact.w.chunks * call.exact.p.H;
        launch_config.grid.x = items < call.multiprocessors ? items : call.multiprocessors;
        launch_config.block.x = 128 * C::kHalves;
        launch_config.smem_bytes = sizeof(GradientsSmem<C>);
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch("gdn_bwd_gradients_kernel", gdn_bwd_gradients_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
