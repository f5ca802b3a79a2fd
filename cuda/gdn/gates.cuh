// The gate warps of gdn_fwd_kernel: from g and beta to the table of row and column factors of a chunk; and, under
// l2norm with 128 columns of V, the norms of q, which nobody wants before O is stored. The others are AUX's (norms.cuh).
//
// Decays are differences of cumulative log2 decays. No difference of infinities arises: a token's log2 decay is raised to -128
// first. A factor over a span that holds a token below -128 is less than 2^-128 in truth and 0 in fp32 (ex2 flushes below
// 2^-126) either way, and a span that holds none is not touched. Sums stay above -64 * 128 = -8192, where half a unit in the
// last place is 2^-11: the error of a factor is below 2^-11 ln 2 even when every other token resets the state.
// Differences are limited to <= 0, since the tree sum is not monotone in the last place.
#pragma once
#include "norms.cuh"

namespace linattn::cuda::gdn {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLeastLog2Decay = -128.0f;

// The numbers of a [B,T,HV] tensor for the lane's two tokens of a chunk, fetched as they lie long before they are used.
// kF32: they are known to be fp32.
template <bool kF32>
struct TokenPair {
    const char *from;
    uint32_t bits[2];

    static __device__ __forceinline__ bool is_f32(const Tensor &t) { return kF32 || t.dtype == DType::F32; }
    static __device__ __forceinline__ int64_t bytes(const Tensor &t, int64_t elements) {
        return elements * (is_f32(t) ? 4 : 2);
    }
    __device__ __forceinline__ TokenPair(const Tensor &t, const Item &item, int token)
        : from(t.data + bytes(t, item.batch * t.stride[0] + (item.bos + token) * t.stride[1] + item.head * t.stride[2])) {}

    // Of `left` tokens from the first of the two on; then goes on to the warp's next chunk.
    __device__ __forceinline__ void fetch(const Tensor &t, int left) {
        const char *second = from + bytes(t, t.stride[1]);
        bits[0] = bits[1] = 0;
        if (is_f32(t)) {
            if (left > 0) bits[0] = *reinterpret_cast<const uint32_t *>(from);
            if (left > 1) bits[1] = *reinterpret_cast<const uint32_t *>(second);
        } else {
            if (left > 0) bits[0] = *reinterpret_cast<const uint16_t *>(from);
            if (left > 1) bits[1] = *reinterpret_cast<const uint16_t *>(second);
        }
        from += bytes(t, 2 * kChunk * t.stride[1]);
    }
    __device__ __forceinline__ static float number(const Tensor &t, uint32_t bits) {
        if (is_f32(t)) return __uint_as_float(bits);
        return t.dtype == DType::BF16 ? __uint_as_float(bits << 16)
                                      : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    }
    __device__ __forceinline__ float get(const Tensor &t, int i) const { return number(t, bits[i]); }
};

__device__ __forceinline__ float sigmoid(float x) { return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2E * x)); }

// log2(1 + e^x), relative error below 2^-17: lg2 is accurate relative to 1 + e^x only, so small e^x take the series of log(1 + y).
__device__ __forceinline__ float softplus_log2(float x) {
    const float y = ptx::ex2_approx_ftz(kLog2E * x);
    const float series = kLog2E * y * fmaf(y, fmaf(y, fmaf(y, -0.25f, 1.0f / 3.0f), -0.5f), 1.0f);
    return x > 20.0f ? kLog2E * x : y < 0.0625f ? series : ptx::lg2_approx_ftz(1.0f + y);
}

// Log2 of the decay from the gate input; amplitude = exp(A_log).
__device__ __forceinline__ float log2_decay(const KernelParams &params, float x, float bias, float amplitude) {
    float log2 = kLog2E * x;
    if (params.p.gate == Gate::Softplus)
        log2 = -amplitude * softplus_log2(x + bias);
    else if (params.p.gate == Gate::Bounded)
        log2 = kLog2E * params.lower_bound * sigmoid(amplitude * (x + bias));
    return log2 < kLeastLog2Decay ? kLeastLog2Decay : log2;  // NaN stays
}

// Factor 2^x of a difference that is <= 0 but for rounding.
__device__ __forceinline__ float decay_factor(float x) { return ptx::ex2_approx_ftz(x > 0.0f ? 0.0f : x); }

__device__ __forceinline__ void store2(float *s_table, int offset, int place, float a, float b) {
    *reinterpret_cast<float2 *>(s_table + offset + place) = make_float2(a, b);
}

// 1/|q_i| of the tile's rows: lane l has rows 2l and 2l + 1.
template <class C>
__device__ __forceinline__ void query_norms(float *norms, uint32_t q) {
    using Tile = typename Smem<C>::Tile;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int lane = opaque_lane(), row = 2 * lane + (i ^ (lane >> 2 & 1));
        float sum = 0.0f;
#pragma unroll 1
        for (int panel = 0; panel < Tile::kPanels; panel++)
            sum += squares<typename C::T, 4>(q + panel * Tile::kPanelStrideBytes, row);
        norms[row] = inverse_norm(sum);
    }
}

// The table of a chunk. Lane l has tokens 2l and 2l + 1; x: their log2 decays.
__device__ __forceinline__ void fill_table(float *t, const float (&x)[2], const float (&beta)[2], float scale) {
    const int lane = opaque_lane(), token = 2 * lane, column = table::column_order(token);
    store2(t, table::kBeta, token, beta[0], beta[1]);
    store2(t, table::kNegBeta, token, -beta[0], -beta[1]);
    float sum = x[0] + x[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    const float before = __shfl_up_sync(~0u, sum, 1), G1 = sum, G0 = (lane == 0 ? 0.0f : before) + x[0];
    const float ref = __shfl_sync(~0u, G0, lane & ~7), last = __shfl_sync(~0u, G1, 31);
    store2(t, table::kG, token, G0, G1);
    store2(t, table::kColumnG, column, G0, G1);
#pragma unroll
    for (int w = 1; w < 4; w++) {
        const float G_ref = __shfl_sync(~0u, G0, 8 * w);
        store2(t, table::kColumnDecay + 64 * (w - 1), column, decay_factor(G_ref - G0), decay_factor(G_ref - G1));
    }
    store2(t, table::kRho, token, decay_factor(last - G0), decay_factor(last - G1));
    const float gamma0 = decay_factor(G0), gamma1 = decay_factor(G1);
    if (lane == 31) t[table::kChunkDecay] = gamma1;
    store2(t, table::kBetaGamma, token, beta[0] * gamma0, beta[1] * gamma1);
    store2(t, table::kScaledGamma, token, gamma0 * scale, gamma1 * scale);
    const float row0 = decay_factor(G0 - ref), row1 = decay_factor(G1 - ref);
    store2(t, table::kRowDecay, token, row0, row1);
    store2(t, table::kRowDecayScaled, token, row0 * scale, row1 * scale);
}

// The place of the CTA's chunk n in a ring.
template <int kStages>
__device__ __forceinline__ RingState<kStages> at_chunk(uint32_t n) {
    return {static_cast<int>(n % kStages), n / kStages & 1};
}

// Every second chunk of an item: n, its number in the CTA, of those with tokens from `at` on. kPlain: g and beta are fp32 and
// need no arithmetic. Beside the state loop every branch and every dependent instruction costs several times its time.
template <class C, bool kPlain>
__device__ __forceinline__ void gate_item(const KernelParams &params, Smem<C> &smem, const Item &item, uint32_t n, int at) {
    // With 24 registers there is no room for them beside the norms.
    constexpr bool kFetchEarly = !C::kGatesNormQueries;
    const DeltaParams &p = params.p;
    int remaining = item.length - at;
    TokenPair<kPlain> g(p.g, item, at + 2 * opaque_lane()), betas(p.beta, item, at + 2 * opaque_lane());
    g.fetch(p.g, remaining - 2 * opaque_lane());
    betas.fetch(p.beta, remaining - 2 * opaque_lane());
#pragma unroll 1
    for (; remaining > 0; remaining -= 2 * kChunk, n += 2) {
        // Only AUX says when it is done with a table: when it ends chunk m, the state loop has left m - C::kProductStages.
        const uint32_t stage = n % kTableStages;
        smem.tables().wait_empty(at_chunk<kTableStages>(n + C::kProductStages));
        const int left = remaining - 2 * opaque_lane();
        float x[2], beta[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // past the end: no decay, beta 0
            beta[i] = betas.get(p.beta, i);
            x[i] = g.get(p.g, i);
            if constexpr (kPlain) {
                x[i] *= kLog2E;
                x[i] = x[i] < kLeastLog2Decay ? kLeastLog2Decay : x[i];
            } else {
                if (p.beta_form != BetaForm::Weight) beta[i] = left > i ? sigmoid(beta[i]) : 0.0f;
                if (p.beta_form == BetaForm::LogitsX2) beta[i] += beta[i];
                x[i] = left > i ? log2_decay(params, x[i], item.bias, item.amplitude) : 0.0f;
            }
        }
        if constexpr (kFetchEarly) {
            g.fetch(p.g, left - 2 * kChunk);
            betas.fetch(p.beta, left - 2 * kChunk);
        }
        fill_table(smem.table[stage], x, beta, params.scale);
        warp_arrive(smem.tables().full(stage), threadIdx.x % 32);
        if constexpr (C::kGatesNormQueries) {
            // That AUX has left chunk n - kTileStages means that its tile landed; else the parity of its phase, which this warp
            // did not wait for, would pass for that of chunk n.
            smem.tables().wait_empty(at_chunk<kTableStages>(n + kTableStages - kTileStages));
            const RingState<kTileStages> tile = at_chunk<kTileStages>(n);
            smem.tiles().wait_full(tile);
            query_norms<C>(smem.query_norm[tile.stage], ptx::shared_address(smem.q[tile.stage]));
            warp_arrive(ptx::shared_address(&smem.query_norm_ready[tile.stage]), threadIdx.x % 32);
        }
        if constexpr (!kFetchEarly) {
            g.fetch(p.g, remaining - 2 * kChunk - 2 * opaque_lane());
            betas.fetch(p.beta, remaining - 2 * kChunk - 2 * opaque_lane());
        }
    }
}

// Two warps take turns: warp `which` has the chunks whose number in the CTA is which mod 2.
template <class C>
__device__ __forceinline__ void gates(const KernelParams &params, Smem<C> &smem, int which) {
    const DeltaParams &p = params.p;
    const bool plain =
        p.gate == Gate::None && p.beta_form == BetaForm::Weight && p.g.dtype == DType::F32 && p.beta.dtype == DType::F32;
    uint32_t first = 0;  // chunks of the items before
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        const uint32_t skip = (first ^ which) & 1;
        if (plain)
            gate_item<C, true>(params, smem, item, first + skip, skip * kChunk);
        else
            gate_item<C, false>(params, smem, item, first + skip, skip * kChunk);
        first += item.chunks();
    }
}

}  // namespace linattn::cuda::gdn
