// A state warpgroup of gdn_fwd_kernel: 64 columns of V, S^T (64 x K) in fp32 accumulators.
//
//   U = beta (V - Gamma K S);  V' = U + A^ U;  O = scale Gamma Q S + P V';  S = gamma_C S + K^T D V'
//
// transposed, so that every left operand is in registers: the accumulator of one product packs into the A fragment of the next.
// S, U and V' never cross shared memory. A^ is strictly lower: its unit diagonal is the U that the accumulator of A^ U starts
// from, in fp32, so that the largest part of V' is rounded once, as the operand of P V' and K^T V''.
// Groups in issue order, per chunk:
//   pack S -> [K S] -> [Q S]; S *= gamma_C; V fragments, times beta; wait 1; U -> [A^ U]; wait 1; O *= scale gamma; wait 0;
//   V' -> [P V']; V'' = rho V' -> [K^T V'']; wait 1; O, times 1/|q| under l2norm, to shared memory where V was; wait 0
// Every group starts and ends inside one iteration: one left pending over the back edge makes ptxas serialise all of them.
// Two warpgroups would set out together whenever AUX has finished a chunk, and then want the tensor cores at the same time and
// leave them idle at the same time. So they take turns: one issues K S once the other has issued P V'.
#pragma once
#include <type_traits>

#include "common/fragments.cuh"
#include "items.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "states.cuh"
#include "terms.cuh"

namespace linattn::cuda::gdn {

constexpr uint32_t kTurnBarrier = 5;  // named barriers: turn of state warpgroup 0, of 1

// Which 64 columns of the CTA's.
__device__ __forceinline__ int state_group() { return threadIdx.x / 128 - 1; }

// Chunks of an item; S in and out.
template <class C>
struct StateLoop {
    using S = Smem<C>;
    using T = typename C::T;
    Smem<C> &smem;
    RingState<kTileStages> tile;
    RingState<kValueStages> value;
    RingState<C::kFactorStages> factors;
    RingState<C::kProductStages> product;

    __device__ __forceinline__ uint32_t product_low(const uint8_t *tile, int row) const {
        return S::Product::k_major_low(ptx::shared_address(tile), row, 0);
    }

    __device__ __forceinline__ void load_values(uint32_t (&fv)[4][4], uint32_t v, bool has_values) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (C::kOutputs || has_values)
                ptx::ldmatrix_x4_trans(fv[i], v + i * 2048);
            else
                fv[i][0] = fv[i][1] = fv[i][2] = fv[i][3] = 0;
        }
    }

    // beta V.
    __device__ __forceinline__ static void weighted_values(float (&bv)[32], const uint32_t (&fv)[4][4], uint32_t t) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 beta = ptx::ld_shared_v2_f32(t + 4 * table::kBeta + j * 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 value = unpack(T(), fv[j / 2][2 * (j % 2) + r]);
                bv[4 * j + 2 * r] = beta.x * value.x, bv[4 * j + 2 * r + 1] = beta.y * value.y;
            }
        }
    }

    // U = beta V - beta Gamma K S, K S in x.
    __device__ __forceinline__ static void updates(float (&x)[32], const float (&bv)[32], uint32_t t) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 gamma = ptx::ld_shared_v2_f32(t + 4 * table::kBetaGamma + j * 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                x[4 * j + 2 * r] = fmaf(-gamma.x, x[4 * j + 2 * r], bv[4 * j + 2 * r]);
                x[4 * j + 2 * r + 1] = fmaf(-gamma.y, x[4 * j + 2 * r + 1], bv[4 * j + 2 * r + 1]);
            }
        }
    }

    // O = scale Gamma Q S, Q S in o.
    __device__ __forceinline__ static void scale_outputs(float (&o)[32], uint32_t t) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 gamma = ptx::ld_shared_v2_f32(t + 4 * table::kScaledGamma + j * 32);
            o[4 * j] *= gamma.x, o[4 * j + 1] *= gamma.y, o[4 * j + 2] *= gamma.x, o[4 * j + 3] *= gamma.y;
        }
    }

    // O to where V was; the products and the table are no longer needed.
    __device__ __forceinline__ void store_outputs(float (&o)[32], uint32_t v, int lane) const {
        if constexpr (!C::kPrepared) warp_arrive(smem.products().empty(product.stage), lane);
        if constexpr (C::kL2Norm) {
            if constexpr (C::kGatesNormQueries)
                ptx::mbarrier_wait_parity(ptx::shared_address(&smem.query_norm_ready[tile.stage]), tile.phase);
            const uint32_t norms = ptx::shared_address(smem.query_norm[tile.stage]) + (lane & 3) * 8;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float2 r = ptx::ld_shared_v2_f32(norms + j * 32);
                o[4 * j] *= r.x, o[4 * j + 1] *= r.y, o[4 * j + 2] *= r.x, o[4 * j + 3] *= r.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t r[4];
#pragma unroll
            for (int j = 0; j < 4; j++) r[j] = ptx::cvt_rn_x2<T>(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]);
            ptx::stmatrix_x4_trans(v + i * 2048, r);
        }
        ptx::fence_proxy_async_shared_cta();
        warp_arrive(ptx::shared_address(&smem.output_ready[value.stage]), lane);
    }

    __device__ __forceinline__ void finish(int lane) {
        __syncwarp();
        if (kWarpArrivals == 32 || lane == 0) {
            ptx::mbarrier_arrive(smem.tiles().empty(tile.stage));
            if constexpr (!C::kOutputs) {
                if constexpr (!C::kPrepared) ptx::mbarrier_arrive(smem.products().empty(product.stage));
                ptx::mbarrier_arrive(smem.values().empty(value.stage));
            }
        }
        tile.advance(), value.advance(), factors.advance(), product.advance();
    }

    __device__ __forceinline__ static void wait_for_turn() {
        if constexpr (C::kStateGroups == 2) ptx::bar_sync(kTurnBarrier + state_group(), 256);
    }

    // Gives the turn to the other warpgroup.
    __device__ __forceinline__ static void hand_over() {
        if constexpr (C::kStateGroups == 2) ptx::bar_arrive(kTurnBarrier + (state_group() ^ 1), 256);
    }

    // Waits for A^ and P (AUX waited for K, Q and the table, or all come together); chunk_decay: 2^G_last. The result is the first token that needs two
    // terms, or kChunk.
    __device__ __forceinline__ int begin(float &chunk_decay) const {
        if constexpr (C::kPrepared)
            smem.tiles().wait_full(tile);
        else
            smem.products().wait_full(product);
        const uint32_t t = ptx::shared_address(smem.table[factors.stage]);
        const float2 decay_first = ptx::ld_shared_v2_f32(t + 4 * table::kChunkDecay);  // and kFirstPrecise
        chunk_decay = decay_first.x;
        return __float_as_int(decay_first.y);
    }

    // S while a chunk of correlated keys is computed. In local memory at K = 128: else ptxas, short of registers there, keeps S
    // elsewhere than in the accumulators in the other chunks as well, and moves it to and fro.
    using Kept = std::conditional_t<C::D == 128 && C::kOutputs, volatile float, float>;

    // Addresses of the lane. v: 16 tokens of the warp's 16 columns of V, and of O, which takes its place: matrices of an ldmatrix in
    // the order of a fragment of V^T, (tokens, columns) = (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    struct Addresses {
        uint32_t k, t, v;
        __device__ __forceinline__ Addresses(const StateLoop &loop, int lane)
            : k(ptx::shared_address(loop.smem.k[loop.tile.stage])),
              t(ptx::shared_address(loop.smem.table[loop.factors.stage]) + (lane & 3) * 8),
              v(ptx::shared_address(loop.smem.v[loop.value.stage]) + state_group() * (kChunk * 128) +
                ((lane & 7) + (lane & 16) / 2) * 128 + ((threadIdx.x / 32 % 4 * 2 + (lane & 8) / 8) ^ (lane & 7)) * 16) {}
    };

    __device__ __forceinline__ static void decay(float (&s)[C::D / 2], float chunk_decay) {
        if (chunk_decay == 1.0f) return;
#pragma unroll
        for (int i = 0; i < C::D / 2; i++) s[i] *= chunk_decay;
    }

    __device__ __forceinline__ void chunk(float (&s)[C::D / 2], bool has_values, float chunk_decay) {
        const int lane = opaque_lane();
        const Addresses at(*this, lane);
        const uint32_t k = at.k, t = at.t, v = at.v;
        uint32_t fs[C::D / 16][4];
        float x[32], o[32];
        pack<T>(fs, s);
        register_fence(fs);
        wait_for_turn();
        ptx::register_fence(x), register_fence(fs);
        issue<T, ptx::Major::K, typename S::Tile>(x, fs, S::Tile::k_major_low(k, 0, 0), false);
        if constexpr (C::kOutputs) {
            ptx::register_fence(o);
            issue<T, ptx::Major::K, typename S::Tile>(
                o, fs, S::Tile::k_major_low(ptx::shared_address(smem.q[tile.stage]), 0, 0), false);
        }
        // Here the multiplications fill the wait for K S; among the instructions that issue A^ U they would hold it up.
        if constexpr (!C::kPrepared) decay(s, chunk_decay);
        smem.values().wait_full(value);
        uint32_t fv[4][4];
        load_values(fv, v, has_values);
        float bv[32];
        weighted_values(bv, fv, t);
        ptx::register_fence(bv);
        ptx::wgmma_wait_group<C::kOutputs ? 1 : 0>();
        ptx::register_fence(x);
        updates(x, bv, t);
        uint32_t fu[4][4];
        pack<T>(fu, x);
        ptx::register_fence(x), register_fence(fu);
        issue<T, ptx::Major::K, typename S::Product>(
            x, fu, S::Product::k_major_low(ptx::shared_address(smem.a[product.stage]), 0, 0), true);
        if constexpr (C::kOutputs) {
            ptx::wgmma_wait_group<1>();
            ptx::register_fence(o);
            scale_outputs(o, t);
        }
        // Without AUX in the kernel ptxas would wait for K S and Q S before the place above.
        if constexpr (C::kPrepared) decay(s, chunk_decay);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        uint32_t fd[4][4], fd2[4][4];
        if constexpr (C::kOutputs) {
            const uint32_t p = S::Product::k_major_low(ptx::shared_address(smem.p[product.stage]), 0, 0);
            uint32_t fw[4][4];
            pack<T>(fw, x);
            ptx::register_fence(o), register_fence(fw);
            issue<T, ptx::Major::K, typename S::Product>(o, fw, p, true);
            if constexpr (C::kValueTerms == 2) {
                uint32_t fw2[4][4];
#pragma unroll
                for (int i = 0; i < 16; i++) fw2[i / 4][i % 4] = second_term<T>(fw[i / 4][i % 4], x[2 * i], x[2 * i + 1]);
                ptx::register_fence(o), register_fence(fw2);
                issue<T, ptx::Major::K, typename S::Product>(o, fw2, p, true);
            }
        }
        hand_over();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 rho = ptx::ld_shared_v2_f32(t + 4 * table::kRho + j * 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float a = x[4 * j + 2 * r] * rho.x, b = x[4 * j + 2 * r + 1] * rho.y;
                fd[j / 2][2 * (j % 2) + r] = ptx::cvt_rn_x2<T>(a, b);
                if constexpr (C::kValueTerms == 2)
                    fd2[j / 2][2 * (j % 2) + r] = second_term<T>(fd[j / 2][2 * (j % 2) + r], a, b);
            }
        }
        ptx::register_fence(s), register_fence(fd);
        issue<T, ptx::Major::MN, typename S::Tile>(s, fd, S::Tile::mn_major_low(k, 0, 0), true);
        if constexpr (C::kValueTerms == 2) {
            register_fence(fd2);
            issue<T, ptx::Major::MN, typename S::Tile>(s, fd2, S::Tile::mn_major_low(k, 0, 0), true);
        }
        if constexpr (C::kOutputs) {
            ptx::wgmma_wait_group<C::kValueTerms>();
            ptx::register_fence(o);
            store_outputs(o, v, lane);
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(s);
        finish(lane);
    }

    // x = S X^T, 32 of the 64 tokens at once: fewer registers that must lie together.
    __device__ __forceinline__ static void state_product(float (&x)[32], const Kept (&s)[C::D / 2], uint32_t tile_x) {
        uint32_t fs[C::D / 16][4];
#pragma unroll
        for (int i = 0; i < C::D / 4; i++) fs[i / 4][i % 4] = ptx::cvt_rn_x2<T>(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float z[16];
            ptx::register_fence(z), register_fence(fs);
            issue<T, ptx::Major::K, typename S::Tile>(z, fs, S::Tile::k_major_low(tile_x, 32 * half, 0), false);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(z);
#pragma unroll
            for (int i = 0; i < 16; i++) x[16 * half + i] = z[i];
        }
    }

    // Tokens from `first` on: x += factor (A1 b0 + A0 b1 + A0 b0), factor by row of x; kFirst: with the last product, kSecond:
    // with the one before. In two halves, for want of registers.
    template <class Term, bool kFirst, bool kSecond = true>
    __device__ __forceinline__ void add_products(float (&x)[32], const uint32_t (&b0)[4][4], const uint32_t (&b1)[4][4],
                                                 const uint8_t *A0, const uint8_t *A1, float factor0, float factor1, int first,
                                                 int lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float z[16];
            ptx::register_fence(z);
            issue<Term, ptx::Major::K, typename S::Product>(z, b0, product_low(A1, 32 * half), false);
            if constexpr (kSecond) issue<Term, ptx::Major::K, typename S::Product>(z, b1, product_low(A0, 32 * half), true);
            if constexpr (kFirst) issue<Term, ptx::Major::K, typename S::Product>(z, b0, product_low(A0, 32 * half), true);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(z);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int token = 32 * half + 8 * (i / 4) + 2 * (lane & 3) + i % 2;
                float &to = x[16 * half + i];
                to = token < first ? to : fmaf(i % 4 < 2 ? factor0 : factor1, z[i], to);
            }
        }
    }

    __device__ __forceinline__ static void pack_kept(uint32_t (&fs)[C::D / 16][4], const Kept (&s)[C::D / 2]) {
#pragma unroll
        for (int i = 0; i < C::D / 4; i++) fs[i / 4][i % 4] = ptx::cvt_rn_x2<T>(s[2 * i], s[2 * i + 1]);
    }

    // Tokens from `first` on: x += (what packing left of S) X^T, X = K or Q.
    __device__ __forceinline__ void add_second_terms(float (&x)[32], const Kept (&s)[C::D / 2], uint32_t tile_x, int first,
                                                     int lane) const {
        uint32_t fs[C::D / 16][4];
#pragma unroll
        for (int i = 0; i < C::D / 4; i++) {
            const float a = s[2 * i], b = s[2 * i + 1];
            fs[i / 4][i % 4] = second_term<T>(ptx::cvt_rn_x2<T>(a, b), a, b);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float z[16];
            ptx::register_fence(z), register_fence(fs);
            issue<T, ptx::Major::K, typename S::Tile>(z, fs, S::Tile::k_major_low(tile_x, 32 * half, 0), false);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(z);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int token = 32 * half + 8 * (i / 4) + 2 * (lane & 3) + i % 2;
                x[16 * half + i] += token < first ? 0.0f : z[i];
            }
        }
    }

    // A chunk of correlated keys: sums over V' cancel, and with them must what rounding left. Tokens from `first` on take two terms
    // of each operand. U goes through A^ in fp16, because two terms in bf16 are too few where beta is 2, with a power of 2 for each
    // column of V that brings its largest element to 2^14 .. 2^15; V' in T.
    __device__ __forceinline__ void precise_chunk(float (&state)[C::D / 2], bool has_values, float chunk_decay, int first) {
        // Second terms of A^ and P.
        const uint8_t *A1, *P1 = nullptr;
        if constexpr (C::kPrepared) {
            A1 = smem.second[0], P1 = smem.second[1];
        } else {
            int second = product.stage + C::kAuxGroups;  // their stage
            second -= second >= C::kProductStages ? C::kProductStages : 0;
            A1 = smem.a[second];
            if constexpr (C::kOutputs) P1 = smem.p[second];
        }
        const int lane = opaque_lane();
        const Addresses at(*this, lane);
        const uint32_t k = at.k, t = at.t, v = at.v;
        const uint8_t *A0 = smem.a[product.stage];
        wait_for_turn();
        hand_over();  // neither warpgroup waits for the other's many products
        Kept kept[C::D / 2];
#pragma unroll
        for (int i = 0; i < C::D / 2; i++) kept[i] = state[i];
        float x[32], o[32], y[32];
        state_product(y, kept, k);
        add_second_terms(y, kept, k, first, lane);
        smem.values().wait_full(value);
        {
            uint32_t fv[4][4];
            load_values(fv, v, has_values);
            float bv[32];
            weighted_values(bv, fv, t);
            updates(y, bv, t);
        }
        {
            uint32_t fu[4][4];
            pack<T>(fu, y);
#pragma unroll
            for (int i = 0; i < 32; i++) x[i] = y[i];
            ptx::register_fence(x), register_fence(fu);
            issue<T, ptx::Major::K, typename S::Product>(x, fu, product_low(A0, 0), true);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(x);
        }
        uint32_t b0[4][4], b1[4][4];
        float back[2];  // from the scaled U
        {
            float forth[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(fabsf(y[4 * j + 2 * r]), fabsf(y[4 * j + 2 * r + 1])));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                int exponent = static_cast<int>(__float_as_uint(most) >> 23);
                exponent = exponent < 15 ? 15 : exponent;
                forth[r] = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
                back[r] = __uint_as_float(static_cast<uint32_t>(exponent - 14) << 23);
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float a = y[2 * i] * forth[i % 2], b = y[2 * i + 1] * forth[i % 2];
                b0[i / 4][i % 4] = ptx::cvt_rn_f16x2(a, b);
                b1[i / 4][i % 4] = second_term<__half>(b0[i / 4][i % 4], a, b);
                const int token = 8 * (i / 2) + 2 * (lane & 3);
                x[2 * i] = token < first ? x[2 * i] : y[2 * i];
                x[2 * i + 1] = token + 1 < first ? x[2 * i + 1] : y[2 * i + 1];
            }
        }
        register_fence(b0), register_fence(b1);
        add_products<__half, true>(x, b0, b1, A0, A1, back[0], back[1], first, lane);
#pragma unroll
        for (int i = 0; i < 16; i++) {  // V' in two terms; they are all that is kept of it
            b0[i / 4][i % 4] = ptx::cvt_rn_x2<T>(x[2 * i], x[2 * i + 1]);
            b1[i / 4][i % 4] = second_term<T>(b0[i / 4][i % 4], x[2 * i], x[2 * i + 1]);
        }
        register_fence(b0), register_fence(b1);
        if constexpr (C::kOutputs) {
            {
                uint32_t fs[C::D / 16][4];
                pack_kept(fs, kept);
                ptx::register_fence(o), register_fence(fs);
                issue<T, ptx::Major::K, typename S::Tile>(
                    o, fs, S::Tile::k_major_low(ptx::shared_address(smem.q[tile.stage]), 0, 0), false);
                ptx::wgmma_wait_group<0>();
                ptx::register_fence(o);
            }
            if (first == 0) add_second_terms(o, kept, ptx::shared_address(smem.q[tile.stage]), first, lane);  // few tokens
            scale_outputs(o, t);
            ptx::register_fence(o), register_fence(b0), register_fence(b1);
            issue<T, ptx::Major::K, typename S::Product>(o, b0, product_low(smem.p[product.stage], 0), true);
            // What the plain chunk gives every token, they get here too: to the bit.
            if constexpr (C::kValueTerms == 2)
                issue<T, ptx::Major::K, typename S::Product>(o, b1, product_low(smem.p[product.stage], 0), true);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(o);
            add_products<T, false, C::kValueTerms == 1>(o, b0, b1, smem.p[product.stage], P1, 1.0f, 1.0f, first, lane);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 rho = ptx::ld_shared_v2_f32(t + 4 * table::kRho + (i / 2) * 32);
            const float2 v0 = unpack(T(), b0[i / 4][i % 4]), v1 = unpack(T(), b1[i / 4][i % 4]);
            const float a = (v0.x + v1.x) * rho.x, b = (v0.y + v1.y) * rho.y;
            b0[i / 4][i % 4] = ptx::cvt_rn_x2<T>(a, b);
            b1[i / 4][i % 4] = second_term<T>(b0[i / 4][i % 4], a, b);
        }
        float s[C::D / 2];
#pragma unroll
        for (int i = 0; i < C::D / 2; i++) s[i] = kept[i] * chunk_decay;
        register_fence(b0), register_fence(b1);
        if constexpr (C::kOutputs) store_outputs(o, v, lane);
        ptx::register_fence(s), register_fence(b0), register_fence(b1);
        issue<T, ptx::Major::MN, typename S::Tile>(s, b0, S::Tile::mn_major_low(k, 0, 0), true);
        issue<T, ptx::Major::MN, typename S::Tile>(s, b1, S::Tile::mn_major_low(k, 0, 0), true);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(s);
        finish(lane);
        if constexpr (C::kPrepared) warp_arrive(smem.seconds().empty(0), lane);
#pragma unroll
        for (int i = 0; i < C::D / 2; i++) state[i] = s[i];
    }
};

template <class C>
__device__ __forceinline__ void state(const KernelParams &params, Smem<C> &smem) {
    const DeltaParams &p = params.p;
    const int lane = threadIdx.x % 32;
    const int row = 64 * state_group() + 16 * (threadIdx.x / 32 % 4) + lane / 4, k = 2 * (lane % 4);
    StateLoop<C> loop{smem, {}, {}, {}, {}};
    float s[C::D / 2];
    if (C::kStateGroups == 2 && state_group() == 1) ptx::bar_arrive(kTurnBarrier, 256);
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        if (item.read_row < 0 || (!C::kOutputs && item.length == 0)) continue;
        const int v = row + (C::kOutputs ? item.piece * C::kColumns : 0);
        const bool transition_M = !C::kOutputs && item.piece == 1;
        if (C::kOutputs && !item.first) {
            load_state(s, segment_states<C::D>(params, 0), item.slot, item.head, v, k);
        } else if (C::kOutputs && p.state_in) {
            load_state(s, p.state_in, item.read_row, item.head, v, k);
        } else {
#pragma unroll
            for (int i = 0; i < C::D / 2; i++)
                s[i] = transition_M && v + 8 * (i / 2 % 2) == 8 * (i / 4) + k + i % 2 ? 1.0f : 0.0f;
        }
        int left = item.length;
        Checkpoints checkpoints(p, item);
        while (true) {
            // Chunks of one term are a loop of their own: where both ways meet inside one, ptxas moves S to and fro in each chunk.
            float chunk_decay;
            int first = kChunk;
#pragma unroll 1
            for (; true; left -= kChunk) {
                if constexpr (C::kOutputs) {
                    const int number = checkpoints.number(p, item, left);
                    if (number >= 0) {
                        const int64_t to = checkpoint_row(p, item.sequence, number);
                        if (to >= 0) store_checkpoint<C>(s, p.checkpoints, to, item.head, v, k);
                    }
                }
                if (left <= 0) break;
                first = loop.begin(chunk_decay);
                if (__any_sync(~0u, first < kChunk)) break;
                loop.chunk(s, !transition_M, chunk_decay);
            }
            if (left <= 0) break;
            loop.precise_chunk(s, !transition_M, chunk_decay, first);
            left -= kChunk;
        }
        if constexpr (C::kOutputs) {
            if (!item.last) {
                if (item.first) store_state(s, segment_states<C::D>(params, 0), item.slot, item.head, v, k);
                continue;
            }
            if (!p.state_out) continue;
            const int to = pool_row(p.write_indices, item.sequence, p.F);
            if (to >= 0) store_state(s, p.state_out, to, item.head, v, k);
        } else {
            // N is what the next segment starts from but for M S.
            store_state(s, segment_states<C::D>(params, item.piece), item.slot + (transition_M ? 0 : 1), item.head, v, k);
        }
    }
    if (C::kStateGroups == 2 && state_group() == 0) ptx::bar_sync(kTurnBarrier, 256);  // the other's last hand-over
}

}  // namespace linattn::cuda::gdn
