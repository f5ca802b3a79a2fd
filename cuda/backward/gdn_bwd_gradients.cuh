// What both roles of gdn_bwd_gradients_kernel know, and the work of the helpers: tiles, dv, dbeta, dg. See gdn_bwd_gradients.cu.
#pragma once
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kHelpers = 128, kHalfC = kC / 2, kPitchH = kC + 4;

template <class C>
struct alignas(1024) GradientsSmem {
    char q[C::Rows::kBytes], k[C::Rows::kBytes];  // last dq, dk on their way out
    char d_o[C::Rows::kBytes], e[C::Rows::kBytes], dr[C::Rows::kBytes];
    char state[C::State::kBytes], grad[C::State::kBytes];
    char pairs[C::Square::kBytes], erase[C::Square::kBytes];  // P', M; 0 above the diagonal from the start
    alignas(16) float h[2][kC][kPitchH];                      // H in two parts, above the diagonal 0; later sums of its rows
    Factors f[2];                                             // of this value head, of the next
    float c[2][kC], after[2][kC];                             // c_i, f_j, by warpgroup
    float along[2][2][kC];                                    // y . dq', y . dk', by warpgroup
    float dbeta[kC], sums[2][kC], norm[2][kC], product[4];    // sums: of A_log, of dt_bias; norm: 1 / |q|, 1 / |k|
    alignas(8) char barriers[4 * 8];
};

enum GradientsBarrier { kTilesOfKey, kTilesOfTokens, kTileOfState, kTileOfGrad };
// Named barriers: the warpgroups that multiply; the helpers; all tiles of a head and H have been read and written; H has been read.
enum GradientsMeeting { kMultipliers = 1, kHelpersOnly, kTilesRead, kSumsRead };

template <class C>
struct GradientsParts {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    using State = typename C::State;
    static constexpr int D = C::D, kMultiply = 128 * C::kHalves, kThreads = kMultiply + kHelpers;
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
        if (call.as_given(c)) {
            load_given<Rows>(s_q, call.map_q, c, bar), load_given<Rows>(s_k, call.map_k, c, bar);
            return;
        }
        copy(s_q, tile_of<Rows>(call.q, at), Rows::kBytes, bar);
        copy(s_k, tile_of<Rows>(call.k, at), Rows::kBytes, bar);
    }
    // By the helpers.
    __device__ __forceinline__ void fetch(const Chunk &c, int place) const {
        const int64_t at = call.of_value(c.index, c.head);
        const int thread = threadIdx.x % kHelpers;
        if (thread == 0) {
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
        load_rows<Rows>(s_do, call.p().d_o, c, c.head, 0, thread, kHelpers);
        ptx::cp_async_mbarrier_arrive_noinc(barrier(kTilesOfTokens));
    }
    // Asks for the tiles of a head early, to L2: shared memory has no room for two.
    __device__ __forceinline__ void prefetch(const Chunk &c) const {
        const int64_t at = call.of_value(c.index, c.head);
        const int thread = threadIdx.x % kHelpers;
        const auto ask = [](const void *from, int bytes) { ptx::cp_async_bulk_prefetch(from, static_cast<uint32_t>(bytes)); };
        const auto ask_row = [&](const Tensor &t, int64_t head) {
            ask(reinterpret_cast<const uint16_t *>(t.data) + delta_bwd::element(t, c.b, c.token + thread, head), 2 * D);
        };
        if (thread < c.length) {
            ask_row(call.p().d_o, c.head);
            if (c.head % (call.p().HV / call.p().H) == 0 && call.as_given(c))
                ask_row(call.p().q, c.key_head), ask_row(call.p().k, c.key_head);
        }
        if (thread != kHelpers - 1) return;
        ask(tile_of<Rows>(call.e, at), Rows::kBytes);
        ask(tile_of<Rows>(call.dr, at), Rows::kBytes);
        ask(call.state<C>(call.exact.w.states, at), State::kBytes);
        ask(call.state<C>(call.exact.w.grads, at), State::kBytes);
    }
    static __device__ __forceinline__ void multipliers() { ptx::bar_sync(kMultipliers, kMultiply); }
    static __device__ __forceinline__ void helpers() { ptx::bar_sync(kHelpersOnly, kHelpers); }

    // The helpers' work. dv:
    __device__ __forceinline__ void values(const Chunk &c, const Factors &f) const {
        constexpr int kUnits = D / 8;
        const BwdParams &p = call.p();
        uint16_t *const dv = reinterpret_cast<uint16_t *>(p.dv.data) + delta_bwd::element(p.dv, c.b, c.token, c.head);
#pragma unroll 2
        for (int i = threadIdx.x % kHelpers; i < kC * kUnits; i += kHelpers) {
            const int t = i / kUnits, unit = i % kUnits * 8;
            if (t >= c.length) break;
            const uint4 from = ptx::ld_shared_v4_u32(s_dr + Rows::offset(t, unit));
            const uint32_t dr[4] = {from.x, from.y, from.z, from.w};
            uint32_t out[4];
            const float beta = f.beta[t];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 y = unpack(T{}, dr[j]);
                out[j] = ptx::cvt_rn_x2<T>(beta * y.x, beta * y.y);
            }
            *reinterpret_cast<uint4 *>(dv + t * p.dv.stride[1] + unit) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }

    // Adds to the diagonal of A B^T for 16 rows of two tiles, kCount columns.
    template <class Tile, int kCount>
    __device__ __forceinline__ void diagonal(float (&upper)[4], float (&lower)[4], uint32_t a, uint32_t b, int first) const {
#pragma unroll 4
        for (int s = 0; s < kCount / 16; s++) {
            uint32_t x[4], y[4];
            ptx::ldmatrix_x4(x, a + Tile::block16_offset(first, 16 * s, lane));
            ptx::ldmatrix_x4(y, b + Tile::block16_offset(first, 16 * s, lane));
            ptx::mma_m16n8k16<T>(upper, x, y[0], y[2]);
            ptx::mma_m16n8k16<T>(lower, x, y[1], y[3]);
        }
    }
    // The thread's element of the diagonals: upper[0] or [1] at (g, 2q ..), lower[2] or [3] at (g + 8, 2q ..).
    __device__ __forceinline__ bool on_diagonal() const { return lane / 8 == q; }

    // dbeta before the form of beta, and S . D.
    __device__ __forceinline__ void diagonals() const {
        float upper[4] = {}, lower[4] = {};
        const int odd = lane / 4 % 2;
        diagonal<Rows, D>(upper, lower, s_dr, s_e, 16 * warp);
        if (on_diagonal()) smem.dbeta[row] = odd ? upper[1] : upper[0], smem.dbeta[row + 8] = odd ? lower[3] : lower[2];
    }
    __device__ __forceinline__ void state_product() const {
        float upper[4] = {}, lower[4] = {};
        const int odd = lane / 4 % 2;
#pragma unroll 1
        for (int block = warp; block < D / 16; block += 4) diagonal<State, D>(upper, lower, s_state, s_grad, 16 * block);
        float sum = odd ? upper[1] + lower[3] : upper[0] + lower[2];
        sum = sum_over<32>(on_diagonal() ? sum : 0.0f);
        if (lane == 0) smem.product[warp] = sum;
    }

    // dg, dbeta and the chunk's sums, two threads a token.
    __device__ __forceinline__ void gates(const Chunk &c, const Factors &f) const {
        const BwdParams &p = call.p();
        const int thread = threadIdx.x % kHelpers, own = thread / 2, part = thread % 2;
        const bool used = part == 0 && own < c.length;
        float gate = 0.0f, form = 0.0f;
        if (used) {
            if (p.gate != Gate::None)
                gate = delta_bwd::gate_input(p, delta_bwd::element(p.g, c.b, c.token + own, c.head), c.head, 0);
            form = delta_bwd::load_float(p.beta, delta_bwd::element(p.beta, c.b, c.token + own, c.head));
        }
        float x[kHalfC], before = 0.0f;
#pragma unroll
        for (int j = 0; j < kHalfC; j += 4) {
            const float4 a = *reinterpret_cast<const float4 *>(&smem.h[0][own][part * kHalfC + j]),
                         b = *reinterpret_cast<const float4 *>(&smem.h[1][own][part * kHalfC + j]);
            x[j] = a.x + b.x, x[j + 1] = a.y + b.y, x[j + 2] = a.z + b.z, x[j + 3] = a.w + b.w;
        }
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < kHalfC; j++) total += x[j];
        const float other = __shfl_xor_sync(~0u, total, 1);
        if (part == 1) before = other;
#pragma unroll
        for (int j = 0; j < kHalfC; j++) {
            const float next = before + x[j];
            x[j] = before, before = next;
        }
#pragma unroll
        for (int j = 0; j < kHalfC; j += 4)
            *reinterpret_cast<float4 *>(&smem.h[1][own][part * kHalfC + j]) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
        helpers();
        float dg = 0.0f;
#pragma unroll 8
        for (int i = part * kHalfC; i < (part + 1) * kHalfC; i++) {
            float y = i < own ? smem.after[0][i] : smem.c[0][i];
            if (C::kHalves > 1) y += i < own ? smem.after[1][i] : smem.c[1][i];
            if (i >= own) y += smem.h[1][i][own];
            dg += y;
        }
        dg += __shfl_xor_sync(~0u, dg, 1);
        helpers();  // H is read; above the diagonal it has to be 0 again
#pragma unroll
        for (int j = 0; j < kHalfC; j += 4) {
            const int first = part * kHalfC + j;
            if (first / 16 > own / 16)
                *reinterpret_cast<float4 *>(&smem.h[1][own][first]) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        if (part == 0) {
            dg = fmaf(f.decay, smem.product[0] + smem.product[1] + smem.product[2] + smem.product[3], dg);
            float dA = 0.0f, dbias = 0.0f;
            if (used) {
                if (p.gate != Gate::None)
                    dg = delta_bwd::through_gate(p, gate, dg, delta_bwd::amplitude_of(p, c.head), dA, dbias);
                delta_bwd::store_float(p.dg, delta_bwd::element(p.dg, c.b, c.token + own, c.head), dg);
                delta_bwd::store_float(p.dbeta, delta_bwd::element(p.dbeta, c.b, c.token + own, c.head),
                                       delta_bwd::through_beta(p, form, smem.dbeta[own]));
            }
            smem.sums[0][own] = dA, smem.sums[1][own] = dbias;
        }
        if (p.gate == Gate::None) return;
        helpers();
        if (thread >= 2) return;
        float sum = 0.0f;
        for (int i = 0; i < kC; i++) sum += smem.sums[thread][i];
        (thread == 0 ? call.exact.w.dA : call.exact.w.dbias)[call.of_value(c.index, c.head)] = sum;
    }

    // The value heads of this CTA that are not left to the kernels in float, one after another.
    struct Cursor {
        const Call &call;
        int64_t item;
        int r;
        Chunk c;
        __device__ __forceinline__ explicit Cursor(const Call &of)
            : call(of), item(int64_t{blockIdx.x} - gridDim.x), r(INT32_MAX - 1) {}
        __device__ __forceinline__ bool advance() {
            const BwdParams &p = call.p();
            const int group_size = static_cast<int>(p.HV / p.H);
            while (true) {
                if (++r >= group_size) {
                    item += gridDim.x;
                    if (item >= call.chunks() * p.H) return false;
                    c = delta_bwd::find_chunk(p, call.exact.w.chunk_start, item / p.H, 0);
                    c.key_head = item % p.H;
                    r = 0;
                }
                c.head = c.key_head * group_size + r;
                if (!call.flagged(c.n, c.head)) return true;
            }
        }
    };

    __device__ __forceinline__ void help() const {
        Cursor cursor(call);  // of the head after this one
        bool more = cursor.advance();
        Chunk next = cursor.c;
        if (more) fetch(next, 0);
        uint32_t phase = 0;
        for (int place = 0; more; place ^= 1, phase ^= 1) {
            const Chunk c = next;
            more = cursor.advance();
            next = cursor.c;
            if (more) prefetch(next);
            const Factors &f = smem.f[place];
            ptx::mbarrier_wait_parity(barrier(kTilesOfTokens), phase);
            diagonals();
            values(c, f);
            ptx::mbarrier_wait_parity(barrier(kTileOfState), phase);
            ptx::mbarrier_wait_parity(barrier(kTileOfGrad), phase);
            state_product();
            ptx::fence_proxy_async_shared_cta();
            ptx::barrier_sync(kTilesRead, kThreads);
            if (more) fetch(next, place ^ 1);
            gates(c, f);
            if (more) ptx::bar_arrive(kSumsRead, kThreads);
        }
    }
};

}  // namespace linattn::cuda::gdn_bwd
