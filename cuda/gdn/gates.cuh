// The gate warps of gdn_fwd_kernel: from g, beta (and the norms of q and k) to the table of row and column factors of a chunk.
//
// Decays are differences of cumulative log2 decays. No difference of infinities arises: a token's log2 decay is raised to -128
// first. A factor over a span that holds a token below -128 is less than 2^-128 in truth and 0 in fp32 (ex2 flushes below
// 2^-126) either way, and a span that holds none is not touched. Sums stay above -64 * 128 = -8192, where half a unit in the
// last place is 2^-11: the error of a factor is below 2^-11 ln 2 even when every other token resets the state.
// Differences are limited to <= 0, since the tree sum is not monotone in the last place.
#pragma once
#include "items.cuh"
#include "ptx/math.cuh"

namespace linattn::cuda::gdn {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLeastLog2Decay = -128.0f;

// One number of a [B,T,HV] tensor of each of two neighbouring tokens of an item, fetched as it lies long before it is used.
struct TokenPair {
    uint32_t bits[2];

    __device__ __forceinline__ void fetch(const Tensor &t, const Item &item, int token) {
        const int64_t at = item.batch * t.stride[0] + (item.bos + token) * t.stride[1] + item.head * t.stride[2];
        const int left = item.length - token;
        bits[0] = bits[1] = 0;
        if (t.dtype == DType::F32) {
            const uint32_t *from = reinterpret_cast<const uint32_t *>(t.data) + at;
            if (left > 0) bits[0] = from[0];
            if (left > 1) bits[1] = from[t.stride[1]];
        } else {
            const uint16_t *from = reinterpret_cast<const uint16_t *>(t.data) + at;
            if (left > 0) bits[0] = from[0];
            if (left > 1) bits[1] = from[t.stride[1]];
        }
    }
    __device__ __forceinline__ float get(const Tensor &t, int i) const {
        if (t.dtype == DType::F32) return __uint_as_float(bits[i]);
        return t.dtype == DType::BF16 ? __uint_as_float(bits[i] << 16)
                                      : __half2float(__ushort_as_half(static_cast<uint16_t>(bits[i])));
    }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Log2 of the decay from the gate input; amplitude = exp(A_log).
__device__ __forceinline__ float log2_decay(const KernelParams &params, float x, float bias, float amplitude) {
    float log_decay = x;
    if (params.p.gate == Gate::Softplus) {
        x += bias;
        log_decay = -amplitude * (x > 20.0f ? x : log1pf(expf(x)));
    } else if (params.p.gate == Gate::Bounded) {
        log_decay = params.lower_bound * sigmoid(amplitude * (x + bias));
    }
    const float log2 = log_decay * kLog2E;
    return log2 < kLeastLog2Decay ? kLeastLog2Decay : log2;  // NaN stays
}

// Factor 2^x of a difference that is <= 0 but for rounding.
__device__ __forceinline__ float decay_factor(float x) { return ptx::ex2_approx_ftz(x > 0.0f ? 0.0f : x); }

// 1 / sqrt(sum x^2 + 1e-6) of row `row` of a tile; eight lanes on eight rows that differ mod 8 read without bank conflicts.
// Four sums, because a dependent addition beside the state warpgroups takes 11 cycles.
template <class C>
__device__ __forceinline__ float inverse_norm(uint32_t tile, int row) {
    using Tile = typename Smem<C>::Tile;
    float sum[4] = {};
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
#pragma unroll 2
        for (int unit = 0; unit < 8; unit++) {
            const uint4 x =
                ptx::ld_shared_v4_u32(tile + panel * Tile::kPanelStrideBytes + row * 128 + ((unit ^ (row & 7)) * 16));
            const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 pair;
                if constexpr (ptx::kIsBf16<typename C::T>)
                    pair = make_float2(__uint_as_float(word[i] << 16), __uint_as_float(word[i] & 0xffff0000u));
                else
                    pair = __half22float2(*reinterpret_cast<const __half2 *>(&word[i]));
                sum[i] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum[i]));
            }
        }
    return rsqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f);
}

__device__ __forceinline__ void store2(float *s_table, int offset, int place, float a, float b) {
    *reinterpret_cast<float2 *>(s_table + offset + place) = make_float2(a, b);
}

// The factors that take no gates: lane l has tokens 2l and 2l + 1, beta[0] and beta[1].
template <class C>
__device__ __forceinline__ void fill_norms(float *t, uint32_t k, uint32_t q, const float (&beta)[2], float scale) {
    const int lane = opaque_lane(), token = 2 * lane, column = table::column_order(token);
    store2(t, table::kBeta, token, beta[0], beta[1]);
    if constexpr (C::kL2Norm) {
        const int swap = (lane >> 2) & 1;
        if constexpr (C::kOutputs) {
            const float a = scale * inverse_norm<C>(q, token + swap), b = scale * inverse_norm<C>(q, token + 1 - swap);
            store2(t, table::kScaledNormQ, token, swap ? b : a, swap ? a : b);
        }
        const float even = inverse_norm<C>(k, token + swap), odd = inverse_norm<C>(k, token + 1 - swap);
        const float rk[2] = {swap ? odd : even, swap ? even : odd};
        store2(t, table::kColumnNormK, column, rk[0], rk[1]);
        store2(t, table::kNormK, token, rk[0], rk[1]);
        const float2 b = ptx::ld_shared_v2_f32(ptx::shared_address(t + table::kBeta + token));
        store2(t, table::kNegBeta, token, -b.x * rk[0], -b.y * rk[1]);
        store2(t, table::kColumnBeta, column, b.x * rk[0], b.y * rk[1]);
    } else {
        store2(t, table::kNegBeta, token, -beta[0], -beta[1]);
        store2(t, table::kColumnBeta, column, beta[0], beta[1]);
    }
}

// The factors with gates; x: the log2 decays of the lane's tokens. Norms and betas come back from the table, which keeps
// them out of this warp's few registers.
template <class C>
__device__ __forceinline__ void fill_decays(float *t, const float (&x)[2], float scale) {
    const int lane = opaque_lane(), token = 2 * lane, column = table::column_order(token);
    const uint32_t own = ptx::shared_address(t + token);
    float sum = x[0] + x[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    const float before = __shfl_up_sync(~0u, sum, 1), G1 = sum, G0 = (lane == 0 ? 0.0f : before) + x[0];
    store2(t, table::kG, token, G0, G1);
    store2(t, table::kColumnG, column, G0, G1);
    float2 rk = {1.0f, 1.0f};
    if constexpr (C::kL2Norm) rk = ptx::ld_shared_v2_f32(own + 4 * table::kNormK);
#pragma unroll
    for (int w = 1; w < 4; w++) {
        const float G_ref = __shfl_sync(~0u, G0, 8 * w), c0 = decay_factor(G_ref - G0), c1 = decay_factor(G_ref - G1);
        store2(t, table::kColumnDecay + 64 * (w - 1), column, c0, c1);
        if constexpr (C::kL2Norm) store2(t, table::kColumnDecayNormK + 64 * (w - 1), column, c0 * rk.x, c1 * rk.y);
    }
    const float last = __shfl_sync(~0u, G1, 31);
    store2(t, table::kRho, token, decay_factor(last - G0) * rk.x, decay_factor(last - G1) * rk.y);
    const float gamma0 = decay_factor(G0), gamma1 = decay_factor(G1);
    if (lane == 31) t[table::kChunkDecay] = gamma1;
    const float2 beta = ptx::ld_shared_v2_f32(own + 4 * table::kBeta);
    store2(t, table::kBetaGamma, token, beta.x * gamma0 * rk.x, beta.y * gamma1 * rk.y);
    float2 rq = {scale, scale};
    if constexpr (C::kL2Norm && C::kOutputs) rq = ptx::ld_shared_v2_f32(own + 4 * table::kScaledNormQ);
    store2(t, table::kScaledGamma, token, gamma0 * rq.x, gamma1 * rq.y);
    const float ref = __shfl_sync(~0u, G0, lane & ~7), row0 = decay_factor(G0 - ref), row1 = decay_factor(G1 - ref);
    store2(t, table::kRowDecay, token, row0, row1);
    store2(t, table::kRowDecayScaled, token, row0 * rq.x, row1 * rq.y);
}

// Two warps take turns: warp `which` has the chunks whose number in the CTA is which mod 2.
template <class C>
__device__ __forceinline__ void gates(const KernelParams &params, Smem<C> &smem, int which) {
    const DeltaParams &p = params.p;
    int first = 0;  // chunks of the items before
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        TokenPair g, betas;
        int at = ((first ^ which) & 1) * kChunk;  // first token of the chunk
        g.fetch(p.g, item, at + 2 * opaque_lane());
        betas.fetch(p.beta, item, at + 2 * opaque_lane());
#pragma unroll 1
        for (; at < item.length; at += 2 * kChunk) {
            const int n = first + at / kChunk;
            const RingState<kTableStages> factors{n % kTableStages, static_cast<uint32_t>(n / kTableStages) & 1};
            uint32_t k = 0, q = 0;
            if constexpr (C::kL2Norm) {
                const RingState<kTileStages> tile{n % kTileStages, static_cast<uint32_t>(n / kTileStages) & 1};
                smem.tiles().wait_full(tile);
                k = ptx::shared_address(smem.k[tile.stage]);
                if constexpr (C::kOutputs) q = ptx::shared_address(smem.q[tile.stage]);
            }
            smem.tables().wait_empty(factors);
            float *t = smem.table[factors.stage];
            {
                float beta[2];
                const int left = item.length - at - 2 * opaque_lane();
#pragma unroll
                for (int i = 0; i < 2; i++) {  // past the end: no decay, beta 0
                    beta[i] = betas.get(p.beta, i);
                    if (p.beta_form != BetaForm::Weight) beta[i] = left > i ? sigmoid(beta[i]) : 0.0f;
                    if (p.beta_form == BetaForm::LogitsX2) beta[i] += beta[i];
                }
                fill_norms<C>(t, k, q, beta, params.scale);
            }
            float x[2];
            const int token = at + 2 * opaque_lane();
#pragma unroll
            for (int i = 0; i < 2; i++)
                x[i] = item.length - token > i ? log2_decay(params, g.get(p.g, i), item.bias, item.amplitude) : 0.0f;
            g.fetch(p.g, item, token + 2 * kChunk);
            betas.fetch(p.beta, item, token + 2 * kChunk);
            fill_decays<C>(t, x, params.scale);
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tables().full(factors.stage));
        }
        first += item.chunks();
    }
}

}  // namespace linattn::cuda::gdn
