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

__device__ __forceinline__ float load_scalar(const Tensor &t, int64_t at) {
    if (t.dtype == DType::F32) return reinterpret_cast<const float *>(t.data)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t *>(t.data)[at];
    return t.dtype == DType::BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Log2 of the decay from the gate input; amplitude = exp(A_log).
__device__ __forceinline__ float log2_decay(const DeltaParams &p, float x, float bias, float amplitude) {
    float log_decay = x;
    if (p.gate == Gate::Softplus) {
        x += bias;
        log_decay = -amplitude * (x > 20.0f ? x : log1pf(expf(x)));
    } else if (p.gate == Gate::Bounded) {
        log_decay = static_cast<float>(p.lower_bound) * sigmoid(amplitude * (x + bias));
    }
    const float log2 = log_decay * kLog2E;
    return log2 < kLeastLog2Decay ? kLeastLog2Decay : log2;  // NaN stays
}

// Factor 2^x of a difference that is <= 0 but for rounding.
__device__ __forceinline__ float decay_factor(float x) { return ptx::ex2_approx_ftz(x > 0.0f ? 0.0f : x); }

// 1 / sqrt(sum x^2 + 1e-6) of row `row` of a tile; eight lanes on eight rows that differ mod 8 read without bank conflicts.
template <class C>
__device__ __forceinline__ float inverse_norm(uint32_t tile, int row) {
    using Tile = typename Smem<C>::Tile;
    float sum = 0.0f;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
#pragma unroll 2
        for (int unit = 0; unit < 8; unit++) {
            const uint4 x =
                ptx::ld_shared_v4_u32(tile + panel * Tile::kPanelStrideBytes + row * 128 + ((unit ^ (row & 7)) * 16));
            const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float lo, hi;
                if constexpr (ptx::kIsBf16<typename C::T>) {
                    lo = __uint_as_float(word[i] << 16), hi = __uint_as_float(word[i] & 0xffff0000u);
                } else {
                    const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word[i]));
                    lo = pair.x, hi = pair.y;
                }
                sum = fmaf(lo, lo, fmaf(hi, hi, sum));
            }
        }
    return rsqrtf(sum + 1e-6f);
}

__device__ __forceinline__ void store2(float *s_table, int offset, int place, float a, float b) {
    *reinterpret_cast<float2 *>(s_table + offset + place) = make_float2(a, b);
}

// Lane l has tokens 2l and 2l + 1: x, y their log2 decays, bx, by their betas.
template <class C>
__device__ __forceinline__ void fill_table(float *t, uint32_t k, uint32_t q, float x, float y, float bx, float by,
                                           float scale) {
    const int lane = threadIdx.x % 32, token = 2 * lane, column = table::column_order(token);
    float sum = x + y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    const float before = __shfl_up_sync(~0u, sum, 1), G1 = sum, G0 = (lane == 0 ? 0.0f : before) + x;
    float rkx = 1.0f, rky = 1.0f, rqx = scale, rqy = scale;
    if constexpr (C::kL2Norm) {
        const int swap = (lane >> 2) & 1;
        float a = inverse_norm<C>(k, token + swap), b = inverse_norm<C>(k, token + 1 - swap);
        rkx = swap ? b : a, rky = swap ? a : b;
        if constexpr (C::kOutputs) {
            a = scale * inverse_norm<C>(q, token + swap), b = scale * inverse_norm<C>(q, token + 1 - swap);
            rqx = swap ? b : a, rqy = swap ? a : b;
        }
        store2(t, table::kColumnNormK, column, rkx, rky);
        store2(t, table::kNormK, token, rkx, rky);
        store2(t, table::kScaledNormQ, token, rqx, rqy);
    }
    store2(t, table::kNegBeta, token, -bx * rkx, -by * rky);
    store2(t, table::kG, token, G0, G1);
    store2(t, table::kColumnG, column, G0, G1);
    store2(t, table::kColumnBeta, column, bx * rkx, by * rky);
    store2(t, table::kBeta, token, bx, by);
    const float ref = __shfl_sync(~0u, G0, lane & ~7), row0 = decay_factor(G0 - ref), row1 = decay_factor(G1 - ref);
    store2(t, table::kRowDecay, token, row0, row1);
    store2(t, table::kRowDecayScaled, token, row0 * rqx, row1 * rqy);
#pragma unroll
    for (int w = 1; w < 4; w++) {
        const float G_ref = __shfl_sync(~0u, G0, 8 * w), c0 = decay_factor(G_ref - G0), c1 = decay_factor(G_ref - G1);
        store2(t, table::kColumnDecay + 64 * (w - 1), column, c0, c1);
        if constexpr (C::kL2Norm) store2(t, table::kColumnDecayNormK + 64 * (w - 1), column, c0 * rkx, c1 * rky);
    }
    const float last = __shfl_sync(~0u, G1, 31), gamma0 = decay_factor(G0), gamma1 = decay_factor(G1);
    store2(t, table::kBetaGamma, token, bx * gamma0 * rkx, by * gamma1 * rky);
    store2(t, table::kScaledGamma, token, gamma0 * rqx, gamma1 * rqy);
    store2(t, table::kRho, token, decay_factor(last - G0) * rkx, decay_factor(last - G1) * rky);
    if (lane == 31) t[table::kChunkDecay] = gamma1;
}

// Two warps take turns: warp `which` has the chunks whose number in the CTA is which mod 2.
template <class C>
__device__ __forceinline__ void gates(const KernelParams &params, Smem<C> &smem, uint32_t items, int which) {
    const DeltaParams &p = params.p;
    const int lane = threadIdx.x % 32;
    RingState<kTableStages> state;
    RingState<kTileStages> tile;
    for (uint32_t index = blockIdx.x; index < items; index += gridDim.x) {
        const Item item = make_item<C>(params, smem.segment_tokens, index);
        if (item.length == 0) continue;
        float amplitude = 1.0f, bias = 0.0f;
        if (p.A_log)
            amplitude = fminf(expf(load_scalar(p.A_log, item.head * p.A_log.stride[0])), 1e30f);  // inf would make inf x 0
        if (p.dt_bias) bias = load_scalar(p.dt_bias, item.head * p.dt_bias.stride[0]);
        for (int at = 0; at < item.length; at += kChunk) {
            if ((state.stage & 1) == which) {
                float x[2], beta[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {  // past the end: no decay, beta 0
                    const int token = at + 2 * lane + i;
                    x[i] = beta[i] = 0.0f;
                    if (token < item.length) {
                        x[i] = load_scalar(
                            p.g, item.batch * p.g.stride[0] + (item.bos + token) * p.g.stride[1] + item.head * p.g.stride[2]);
                        beta[i] = load_scalar(p.beta, item.batch * p.beta.stride[0] + (item.bos + token) * p.beta.stride[1] +
                                                          item.head * p.beta.stride[2]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const bool valid = at + 2 * lane + i < item.length;
                    x[i] = valid ? log2_decay(p, x[i], bias, amplitude) : 0.0f;
                    if (p.beta_form != BetaForm::Weight)
                        beta[i] = valid ? (p.beta_form == BetaForm::LogitsX2 ? 2.0f : 1.0f) * sigmoid(beta[i]) : 0.0f;
                }
                uint32_t k = 0, q = 0;
                if constexpr (C::kL2Norm) {
                    smem.tiles().wait_full(tile);
                    k = ptx::shared_address(smem.k[tile.stage]);
                    if constexpr (C::kOutputs) q = ptx::shared_address(smem.q[tile.stage]);
                }
                smem.tables().wait_empty(state);
                fill_table<C>(smem.table[state.stage], k, q, x[0], x[1], beta[0], beta[1], params.scale);
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(smem.tables().full(state.stage));
            }
            state.advance();
            tile.advance();
        }
    }
}

}  // namespace linattn::cuda::gdn
