// Third kernel of the chunked GDN backward: all gradients of a chunk, from what the scans kept: S before it, D after it, e and dr of
// its tokens. One CTA per chunk and key head, whose value heads come one after another, so that dq and dk are summed in registers.
// With 1/|q|, 1/|k| and beta in factors (query, erase, write, pair_q, pair_k), q and k as given, F_ij = 2^(G_i - G_j):
//
//   P'_ij = pair_q_i F_ij pair_k_j do_i . e_j  (j <= i);    M_ij = -pair_k_i F_ij pair_k_j dr_i . e_j  (j < i)
//   dq' = fall query S do + P' k                                       dq = dq' - y (y . dq'), y = q / |q|, with l2norm; else dq'
//   dk' = fall erase S dr + write D e + P'^T q + (M + M^T) k                the same
//   dv = beta dr;   dbeta = dr . e
//   dg_t = sum_{j < t <= i} H_ij + sum_{i >= t} c_i + sum_{j < t} f_j + 2^G_last S . D,      H_ij = P'_ij q_i . k_j + M_ij k_i . k_j,
//          c_i = fall (q_i . (query S do)_i + k_i . (erase S dr)_i),   f_j = k_j . (write D e)_j
//
// Every term of dg_t has the decay of t as a factor, so a steep gate gets a small gradient and nothing cancels that has not to.
//
// Roles: a warpgroup per 64 channels of K multiplies. Per value head: do e^T (first warpgroup), dr e^T (last); S do, S dr; D e; then
// the products with P' and M. One more warpgroup writes dv, dbeta and dg, and has S . D and dr . e as diagonals of products. Two more
// warps load: do, e and dr of the next head beside this one's, S and D as soon as those before have been read; q and k.
// Shared memory at D = 128: q, k 32 KB, do, e, dr 2 x 48, S, D 64, P', M 16, factors and sums 12: one CTA an SM.
// Registers: 2 x 200 + 56 + 56; q . k or k . k 32, dq', dk' 64, sums of products 64.
#include "common/launch.h"
#include "gdn_bwd_gradients.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C>
struct Gradients : GradientsParts<C> {
    using Parts = GradientsParts<C>;
    using Parts::call, Parts::smem, Parts::group, Parts::warp, Parts::lane, Parts::q, Parts::row, Parts::heads;
    using Parts::D, Parts::kMultiply, Parts::kThreads, Parts::kK, Parts::kMN, Parts::multipliers;
    using Parts::key_ring, Parts::tokens_ring, Parts::state_ring, Parts::grad_ring, Parts::sums_ring;
    using Parts::s_q, Parts::s_k, Parts::s_do, Parts::s_e, Parts::s_dr, Parts::s_state, Parts::s_grad, Parts::s_pairs,
        Parts::s_erase;
    using typename Parts::Rows, typename Parts::Square, typename Parts::State, typename Parts::T;

    // P' (of_q) or M from do e^T or dr e^T, and what its part of H, with q k^T or k k^T, gives to dg: sums over the warp's rows.
    // Sums over columns before t are products with ones, of H in tf32: the ones are exact, and each sum is as good as its terms.
    __device__ __forceinline__ void scale_pairs(bool of_q, const float (&x)[32], const float (&similar)[32], const Factors &f,
                                                float (*sums)[kC]) const {
        const uint32_t tile = of_q ? s_pairs : s_erase;
        const int g = lane / 4;
        constexpr uint32_t kOne = 0x3f800000u;
        // Column 2q of a block of eight takes the place of q in the product, 2q + 1 that of q + 4. Is it before column g?
        const uint32_t even = 2 * q < g ? kOne : 0, odd = 2 * q + 1 < g ? kOne : 0;
        const float own[2] = {of_q ? f.pair_q[row] : -f.pair_k[row], of_q ? f.pair_q[row + 8] : -f.pair_k[row + 8]};
        const float sum[2] = {f.log2[row], f.log2[row + 8]};
        float before[4] = {}, column[8][2];  // of all columns so far, for any t; sums for t = 8 n + 2 q, + 1
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) {
                column[n][0] = column[n][1] = 0.0f;
                continue;
            }
            const int j = 8 * n + 2 * q;
            const float2 log2 = *reinterpret_cast<const float2 *>(&f.log2[j]),
                         other = *reinterpret_cast<const float2 *>(&f.pair_k[j]);
            float y[2][2], h[2][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float a = ptx::ex2_approx_ftz(fminf(sum[half] - log2.x, 0.0f)),
                            b = ptx::ex2_approx_ftz(fminf(sum[half] - log2.y, 0.0f));
                y[half][0] = own[half] * other.x * a * x[4 * n + 2 * half];
                y[half][1] = own[half] * other.y * b * x[4 * n + 2 * half + 1];
                h[half][0] = y[half][0] * similar[4 * n + 2 * half], h[half][1] = y[half][1] * similar[4 * n + 2 * half + 1];
            }
            if (n >= 2 * warp) {  // at the diagonal
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int apart = row + 8 * half - (j + e);
                        if (apart <= 0) h[half][e] = 0.0f;
                        if (apart < 0 || (!of_q && apart == 0)) y[half][e] = 0.0f;
                    }
            }
            uint32_t terms[4];  // rounded to nearest, ties away
#pragma unroll
            for (int half = 0; half < 2; half++) {
                ptx::st_shared_u32(tile + Square::offset(row + 8 * half, j), ptx::cvt_rn_x2<Operand>(y[half][0], y[half][1]));
                terms[half] = __float_as_uint(h[half][0]) + 0x1000u, terms[2 + half] = __float_as_uint(h[half][1]) + 0x1000u;
            }
            float here[4] = {before[0], before[1], before[2], before[3]};
            ptx::mma_m16n8k8_tf32(here, terms, even, odd);
            ptx::mma_m16n8k8_tf32(before, terms, kOne, kOne);
            if (n >= 2 * warp) {  // t beyond row i has no part in it
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j + e % 2 > row + e / 2 * 8) here[e] = 0.0f;
            }
            column[n][0] = here[0] + here[2], column[n][1] = here[1] + here[3];
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

    // f(element of the thread's fragments 16 x 16 n, that of a tile's rows and columns of the warpgroup) in pairs.
    template <class F>
    __device__ __forceinline__ void each_pair(uint32_t tile, F f) const {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            uint32_t word[4];
            ptx::ldmatrix_x4(word, tile + Rows::block16_offset(16 * warp, 64 * group + 16 * block, lane));
#pragma unroll
            for (int i = 0; i < 4; i++) f(8 * block + i / 2 * 4 + i % 2 * 2, i % 2, unpack(Operand{}, word[i]));
        }
    }
    // sum += f x, rows, f = factor times another; adds to `dots` the rows' dot products of f x with the tile's channels.
    __device__ __forceinline__ void add_scaled(float (&sum)[32], const float (&x)[32], const float *factor, float of_all,
                                               uint32_t tile, float (&dots)[2]) const {
        const float f[2] = {factor[row] * of_all, factor[row + 8] * of_all};
        float own[2] = {};
        each_pair(tile, [&](int i, int half, float2 other) {
            sum[i] = fmaf(f[half], x[i], sum[i]), sum[i + 1] = fmaf(f[half], x[i + 1], sum[i + 1]);
            own[half] = fmaf(x[i], other.x, fmaf(x[i + 1], other.y, own[half]));
        });
        dots[0] = fmaf(f[0], own[0], dots[0]), dots[1] = fmaf(f[1], own[1], dots[1]);
    }
    __device__ __forceinline__ void put_rows(float *to, const float (&x)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = sum_quad(x[half]);
            if (q == 0) to[row + 8 * half] = sum;
        }
    }

    // One value head: adds to dq' and dk'. With the key head's first, q and k arrive beside its first product, and `similar` is made.
    __device__ __forceinline__ void value_head(const RingState<2> &at, const RingState<1> &states, const RingState<2> &sums_at,
                                               bool first, uint32_t phase_of_key, float (&similar)[32], float (&dq)[32],
                                               float (&dk)[32]) const {
        float x[32], y[32], c_dots[2] = {}, after[2] = {};
        const int place = at.stage;
        const Factors &f = smem.f[place];
        typename GradientsSmem<C>::Sums &sums = smem.sums[sums_at.stage];
        issue_ss<Operand, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(group == 0 ? s_do(place) : s_dr(place), 0, 0),
                                                      Rows::k_major_low(s_e(place), 0, 0), false);
        if (C::kHalves == 1)
            issue_ss<Operand, kK, Rows, kK, Rows, D / 16>(y, Rows::k_major_low(s_dr(place), 0, 0),
                                                          Rows::k_major_low(s_e(place), 0, 0), false);
        multipliers();  // P' and M of the head before are read
        sums_ring.wait_empty(sums_at);
        if (first) {
            ptx::mbarrier_wait_parity(key_ring.full(0), phase_of_key);
            issue_ss<Operand, kK, Rows, kK, Rows, D / 16>(similar, Rows::k_major_low(group == 0 ? s_q : s_k, 0, 0),
                                                          Rows::k_major_low(s_k, 0, 0), false);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(similar);
        }
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
        issue_ss<Operand, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_do(place), 0, 0), state, false);
        issue_ss<Operand, kK, Rows, kMN, State, D / 16>(y, Rows::k_major_low(s_dr(place), 0, 0), state, false);
        grad_ring.wait_full(states);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(x);
        add_scaled(dq, x, f.query, f.fall, s_q, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(y), ptx::register_fence(x);
        warp_arrive(state_ring.empty(0), lane);
        issue_ss<Operand, kK, Rows, kMN, State, D / 16>(x, Rows::k_major_low(s_e(place), 0, 0), grad, false);
        add_scaled(dk, y, f.erase, f.fall, s_k, c_dots);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        warp_arrive(grad_ring.empty(0), lane);
        add_scaled(dk, x, f.write, smem.head[place].grad, s_k, after);
        warp_arrive(tokens_ring.empty(place), lane);
        put_rows(sums.c[group], c_dots), put_rows(sums.after[group], after);
        warp_arrive(sums_ring.full(sums_at.stage), lane);
        ptx::fence_proxy_async_shared_cta();
        multipliers();  // P' and M are written
        const uint32_t of_q = Rows::mn_major_low(s_q, 0, 64 * group), of_k = Rows::mn_major_low(s_k, 0, 64 * group);
        ptx::register_fence(dq), ptx::register_fence(dk);
        issue_ss<Operand, kK, Square, kMN, Rows, kC / 16>(dq, Square::k_major_low(s_pairs, 0, 0), of_k, true);
        issue_ss<Operand, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_pairs, 0, 0), of_q, true);
        issue_ss<Operand, kK, Square, kMN, Rows, kC / 16>(dk, Square::k_major_low(s_erase, 0, 0), of_k, true);
        issue_ss<Operand, kMN, Square, kMN, Rows, kC / 16>(dk, Square::mn_major_low(s_erase, 0, 0), of_k, true);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(dq), ptx::register_fence(dk);
    }

    __device__ __forceinline__ void key_similarities(float (&x)[32]) const {
        issue_ss<Operand, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(s_k, 0, 0), Rows::k_major_low(s_k, 0, 0), false);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
    }

    // What the kernels in float gave for a value head. unit: from the caller's.
    __device__ __forceinline__ void add_exact(const Chunk &c, float (&sum)[32], const float *from, const float *norm,
                                              float unit) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            if (t >= c.length) continue;
            const float *const at = from + ((c.row + t) * call.p().HV + c.head) * D + 64 * group + 2 * q;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    sum[4 * n + 2 * half + e] = fmaf(norm[t] * unit, at[8 * n + e], sum[4 * n + 2 * half + e]);
        }
    }

    // y . dx' of the warpgroup's channels.
    __device__ __forceinline__ void dots(const float (&x)[32], uint32_t tile, const float *norm, float *to) const {
        float sum[2] = {};
        each_pair(tile,
                  [&](int i, int half, float2 other) { sum[half] = fmaf(x[i], other.x, fmaf(x[i + 1], other.y, sum[half])); });
        sum[0] *= norm[row], sum[1] *= norm[row + 8];
        put_rows(to, sum);
    }
    // dx = dx' - y (y . dx').
    __device__ __forceinline__ void through_norm(float (&x)[32], uint32_t tile, const float *norm, const float (*along)[2][kC],
                                                 int which) const {
        float dot[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + 8 * half;
            dot[half] = -norm[i] * (along[0][which][i] + (C::kHalves > 1 ? along[1][which][i] : 0.0f));
        }
        each_pair(tile, [&](int i, int half, float2 raw) {
            x[i] = fmaf(dot[half], raw.x, x[i]), x[i + 1] = fmaf(dot[half], raw.y, x[i + 1]);
        });
    }
    // dq or dk from fragments: the four lanes of a row change theirs for eight channels in a row each.
    __device__ __forceinline__ void give(const Chunk &c, const Tensor &t, const float (&x)[32], const float *back) const {
        uint16_t *const to =
            reinterpret_cast<uint16_t *>(t.data) + delta_bwd::element(t, c.b, c.token, c.key_head, 64 * group + 8 * q);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = back[row + 8 * half];
#pragma unroll
            for (int part = 0; part < 2; part++) {
                uint32_t word[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int at = 4 * (4 * part + n) + 2 * half;
                    word[n] = ptx::cvt_rn_x2<T>(factor * x[at], factor * x[at + 1]);
                }
                transpose_quad(word);
                const int token = row + 8 * half;
                if (token < c.length)
                    *reinterpret_cast<uint4 *>(to + token * t.stride[1] + 32 * part) =
                        make_uint4(word[0], word[1], word[2], word[3]);
            }
        }
    }
    // Of a lane's four words, each becomes that with this lane's number (of the four) of another lane.
    __device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) const {
#pragma unroll
        for (int step = 2; step > 0; step /= 2)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n & step) continue;
                const bool up = q & step;
                const uint32_t other = __shfl_xor_sync(~0u, up ? word[n] : word[n + step], step);
                (up ? word[n] : word[n + step]) = other;
            }
    }

    __device__ __forceinline__ void multiply() const {
        const BwdParams &p = call.p();
        const int group_size = static_cast<int>(p.HV / p.H);
        // Of value heads: all that were seen, and those not flagged; of key heads. Rings of two and of one stage go by them.
        int seen = 0, done = 0;
        uint32_t phase_of_key = 0;  // and the place of what is of the key head
        const auto place = [](int count) { return RingState<2>{count % 2, static_cast<uint32_t>(count / 2 % 2)}; };
#pragma unroll 1
        for (int all = heads(); seen < all;) {
            float similar[32], dq[32], dk[32];
#pragma unroll
            for (int j = 0; j < 32; j++) similar[j] = dq[j] = dk[j] = 0.0f;
            RingState<2> at = place(seen);
            tokens_ring.wait_full(at);
            typename GradientsSmem<C>::Key &key = smem.key[phase_of_key];
            if (threadIdx.x == 0) key.chunk = smem.head[at.stage].chunk;
            if (threadIdx.x < kC) {
                const Factors &f = smem.f[at.stage];
                const float unit = smem.head[at.stage].forwards * smem.head[at.stage].in_reverse;
                key.norm[0][threadIdx.x] = f.norm_q[threadIdx.x], key.norm[1][threadIdx.x] = f.norm_k[threadIdx.x];
                key.back[0][threadIdx.x] = unit * f.power_q[threadIdx.x],
                key.back[1][threadIdx.x] = unit * f.power_k[threadIdx.x];
            }
            bool first = true;
#pragma unroll 1
            for (const int end = seen + group_size; seen < end; seen++) {
                at = place(seen);
                tokens_ring.wait_full(at);
                if (smem.head[at.stage].flagged) {
                    const typename GradientsSmem<C>::Head &head = smem.head[at.stage];
                    const float unit = inverse_power(head.forwards) * inverse_power(head.in_reverse);
                    add_exact(head.chunk, dq, call.exact.w.dq, smem.f[at.stage].norm_q, unit);
                    add_exact(head.chunk, dk, call.exact.w.dk, smem.f[at.stage].norm_k, unit);
                    warp_arrive(tokens_ring.empty(at.stage), lane);
                } else {
                    value_head(at, RingState<1>{0, static_cast<uint32_t>(done % 2)}, place(done), first, phase_of_key, similar,
                               dq, dk);
                    done++, first = false;
                }
            }
            if (first) ptx::mbarrier_wait_parity(key_ring.full(0), phase_of_key);  // all were flagged
            multipliers();                                                         // norm and chunk are known
            const Chunk c = key.chunk;
            if (p.qk_l2norm) {
                dots(dq, s_q, key.norm[0], key.along[group][0]);
                dots(dk, s_k, key.norm[1], key.along[group][1]);
                multipliers();
                through_norm(dq, s_q, key.norm[0], key.along, 0);
                through_norm(dk, s_k, key.norm[1], key.along, 1);
            }
            warp_arrive(key_ring.empty(0), lane);  // q and k have been read
            give(c, p.dq, dq, key.back[0]), give(c, p.dk, dk, key.back[1]);
            phase_of_key ^= 1;
        }
    }
};

template <class C>
__global__ void __launch_bounds__(Gradients<C>::kThreads, 1) gdn_bwd_gradients_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    GradientsSmem<C> &smem = *reinterpret_cast<GradientsSmem<C> *>(smem_bytes);
    using G = Gradients<C>;
    const G own{{call, smem}};
    if (threadIdx.x == 0) own.init();
    for (int i = threadIdx.x; i < 2 * C::Square::kBytes / 4; i += G::kThreads) ptx::st_shared_u32(own.s_pairs + 4 * i, 0);
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    delta_bwd::after_those_before();
    if (own.group > C::kHalves) {
        C::kHalves > 1 ? ptx::setmaxnreg_dec<56>() : ptx::setmaxnreg_dec<96>();
        if (own.warp == 0) own.load();
        if (own.warp == 1) own.load_keys();
        if (own.warp >= 2) own.convert();
    } else if (own.group == C::kHalves) {
        C::kHalves > 1 ? ptx::setmaxnreg_dec<56>() : ptx::setmaxnreg_dec<152>();
        own.help();
    } else {
        C::kHalves > 1 ? ptx::setmaxnreg_inc<200>() : ptx::setmaxnreg_inc<240>();
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
        launch_config.programmatic = true;
        launch("gdn_bwd_gradients_kernel", gdn_bwd_gradients_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
