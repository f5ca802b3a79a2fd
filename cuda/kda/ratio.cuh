// The sums of tree.cuh where gates are bounded, so that 16 tokens decay by e^-80 at most, which the exponents of fp32 and tf32
// hold. With P_t = prod_{r<=t} a_r from the first token of t's half of the chunk on, and E of a whole half,
//
//   M_ts = sum_c (k_tc P_tc) (k_sc / P_sc)        both in one half, s < t
//   M_ts = sum_c (k_tc P_tc) (k_sc / P_sc E_c)    s in the first half, t in the second one
//   K~_t = k_t P_t (E);   K^_s = k_s / P_s (E) E;   A and Q~ the same with q_t
//
// What counts is at most 1 in size, and each operand is off by 2^-11, as in fp16; what lies above the diagonal may be as large
// as e^80 and is left out by its place, not multiplied by zero. P and 1 / P are powers of 2 of sums of log2 a. But for K^ and E
// nothing of a token depends on later ones.
//
// Lane (g, q) = (lane / 4, lane % 4) has tokens g + 8 i and channels 4 q + c of 16. In an m16n8k8 rows g and g + 8 are k and q of
// one of its tokens, column g is k of one, and q, q + 4 along the sum are two of its channels. Of 16 products of 8 x 8 tokens ten
// lie on the diagonal or below it: 40 accumulators, which stay in registers over all steps. The sums of log2 a are products with
// a triangle of ones: these take gates as lanes load them, tokens 8 m + 2 q + b and channels 2 g + j, to the tokens and channels
// above.
#pragma once
#include "solve.cuh"
#include "tree.cuh"

namespace linattn::cuda::kda {

// Can these gates be taken by the kernel for bounded ones?
inline bool ratios_fit(const DeltaParams &p) { return p.gate == Gate::Bounded && 16 * -p.lower_bound <= 80; }

// What an operand's token is multiplied by, a power of 2, and where it lies: a lane's four tokens side by side.
template <class T>
__device__ __forceinline__ uint32_t ratio_scale(float power) {
    const uint32_t bits = __float_as_uint(power);
    return ptx::kIsBf16<T> ? __byte_perm(bits, bits, 0x3232) : bits;
}
__device__ __forceinline__ int ratio_scale_place(int token) { return token % 8 * 4 + token / 8; }

__device__ __forceinline__ float2 scaled(__nv_bfloat16 type, uint32_t x, uint32_t scale) {
    return unpack(type, ptx::mul_rn_bf16x2(x, scale));
}
__device__ __forceinline__ float2 scaled(__half type, uint32_t x, uint32_t scale) {
    const float2 v = unpack(type, x);
    return make_float2(v.x * __uint_as_float(scale), v.y * __uint_as_float(scale));
}

// A lane's place among 16 channels, `channel` the first one.
struct RatioLanes {
    uint32_t group, quad, channel;

    template <int D>
    static __device__ __forceinline__ RatioLanes at(int w, int step) {
        const uint32_t lane = opaque_lane();
        return {lane / 4, lane % 4, static_cast<uint32_t>(w * (D / 4) + 16 * step)};
    }

    // Offset of token g of the quad's channels in a tile of tokens x D channels; token g + 8 i is i * 1024 further on.
    template <class TileOf>
    __device__ __forceinline__ uint32_t raw() const {
        return channel / 64 * TileOf::kPanelStrideBytes + group * 128 + ((channel % 64 * 2 + quad * 8) ^ group << 4);
    }
};

// A lane's four tokens of k and q.
struct RatioLoaded {
    Words k[4], q[4];

    template <int D>
    __device__ __forceinline__ RatioLoaded(const RatioLanes &at, const PrepSmem<D> &smem) {
        const uint32_t start = ptx::shared_address(smem.start) + at.raw<Pair<D>>();
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = load_words(start + i * 1024), q[i] = load_words(start + i * 1024 + kQueries);
    }
};

// Gate inputs, x[4 m + 2 b + j].
template <int D>
__device__ __forceinline__ void load_gate_pairs(float (&x)[16], const RatioLanes &at, uint32_t tile, DType dtype) {
    const uint32_t channel = at.channel;
    if (dtype == DType::F32) {
        const uint32_t raw =
            tile + channel / 32 * (kChunk * 128) + at.quad * 256 + ((channel % 32 * 4 + at.group * 8) ^ at.quad << 5);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 v = ptx::ld_shared_v2_f32((raw ^ i % 2 << 4) + i % 2 * 128 + i / 2 * 1024);
            x[2 * i] = v.x, x[2 * i + 1] = v.y;
        }
        return;
    }
    const uint32_t raw =
        tile + channel / 64 * Tile<D>::kPanelStrideBytes + at.quad * 256 + ((channel % 64 * 2 + at.group * 4) ^ at.quad << 5);
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = ptx::ld_shared_u32((raw ^ i % 2 << 4) + i % 2 * 128 + i / 2 * 1024);
    const auto as = [&](auto type) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 a = unpack(type, v[i]);
            x[2 * i] = a.x, x[2 * i + 1] = a.y;
        }
        ptx::register_fence(x);  // a branch, not both under predicates
    };
    if (dtype == DType::BF16)
        as(__nv_bfloat16());
    else
        as(__half());
}

// -log2 of a bounded decay at its largest, and what that makes of a channel's bias: see RatioDecays.
__device__ __forceinline__ float log2_bound(const KernelParams &params) { return -params.lower_bound * kLog2E; }
__device__ __forceinline__ float ratio_bias(const KernelParams &params, float bias, float amplitude) {
    return bias * bounded_factor(amplitude) - ptx::lg2_approx_ftz(log2_bound(params));
}

__device__ __forceinline__ void add_tf32(float (&sums)[4], const uint32_t (&left)[4], float x, float y) {
    ptx::mma_m16n8k8_tf32(sums, left, __float_as_uint(x), __float_as_uint(y));
}

// Of the lane's tokens and channels.
struct RatioDecays {
    float sums[4][4];  // -log2 P, token i and channel c

    template <int D>
    __device__ __forceinline__ RatioDecays(const RatioLanes &at, const KernelParams &params, const PrepSmem<D> &smem) {
        float x[16];
        load_gate_pairs<D>(x, at, ptx::shared_address(smem.g), params.p.g.dtype);
        // bound sigmoid(y) = 1 / (1 / bound + e^-y / bound), its last term with the bound in the exponent.
        const float2 bias = ptx::ld_shared_v2_f32(ptx::shared_address(&smem.bias[at.channel + 2 * at.group]));
        const float factor = bounded_factor(smem.amplitude), inverse = ptx::rcp_approx_ftz(log2_bound(params));
#pragma unroll
        for (int i = 0; i < 16; i++)
            x[i] = ptx::rcp_approx_ftz(inverse + ptx::ex2_approx_ftz(fmaf(factor, x[i], i % 2 ? bias.y : bias.x)));
        if (smem.rows < kChunk) {
            const int left = smem.rows - 2 * static_cast<int>(at.quad);
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = i / 4 * 8 + i / 2 % 2 < left ? x[i] : 0.0f;
            ptx::register_fence(x);
        }
        // Rows g: a triangle, the sums over eight tokens up to each one; rows g + 8: all of them.
        const uint32_t one = __float_as_uint(1.0f);
        const uint32_t triangle[4] = {2 * at.quad <= at.group ? one : 0, one, 2 * at.quad < at.group ? one : 0, one};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float eight[2][4] = {};
#pragma unroll
                for (int m = 0; m < 2; m++) {  // in two terms, 21 bits
                    const float u = x[8 * half + 4 * m + j], v = x[8 * half + 4 * m + 2 + j];
                    add_tf32(eight[m], triangle, beyond_tf32(u), beyond_tf32(v));
                    add_tf32(eight[m], triangle, u, v);
                }
#pragma unroll
                for (int r = 0; r < 2; r++)
                    sums[2 * half][2 * r + j] = eight[0][r], sums[2 * half + 1][2 * r + j] = eight[0][2 + r] + eight[1][r];
            }
    }

    __device__ __forceinline__ float product(int i, int c) const { return ptx::ex2_approx_ftz(-sums[i][c]); }
    __device__ __forceinline__ float inverse(int i, int c) const { return ptx::ex2_approx_ftz(sums[i][c]); }
    // E of a half: P of its last token.
    __device__ __forceinline__ float whole(int half, int c, const RatioLanes &at) const {
        return __shfl_sync(~0u, product(2 * half + 1, c), 28 | at.quad);
    }
};

// All of the warp's 16 channels of this step: their part of the sums, K~, Q~, K^, gamma. sums: products of tokens 8 i + g and
// 8 j + n, number i (i + 1) / 2 + j; rows k and q.
template <class T, int D>
__device__ __forceinline__ void ratios(float (&sums)[10][4], const RatioLanes &at, const RatioLoaded &loaded,
                                       const RatioDecays &decays, PrepSmem<D> &smem, Operands<D> &g_to) {
    const uint4 k4 = ptx::ld_shared_v4_u32(ptx::shared_address(smem.inverse_k + 4 * at.group));
    const uint4 q4 = ptx::ld_shared_v4_u32(ptx::shared_address(smem.inverse_q + 4 * at.group));
    const uint32_t scale_k[4] = {k4.x, k4.y, k4.z, k4.w}, scale_q[4] = {q4.x, q4.y, q4.z, q4.w};
    float *gamma = &smem.factors.gamma[gamma_place(at.channel + 4 * at.quad)];
    Words k[4], q[4], end[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first[2] = {decays.whole(0, 2 * h, at), decays.whole(0, 2 * h + 1, at)};
        const float second[2] = {decays.whole(1, 2 * h, at), decays.whole(1, 2 * h + 1, at)};
        if (at.group == 0) *reinterpret_cast<float2 *>(gamma + 4 * h) = make_float2(first[0] * second[0], first[1] * second[1]);
        uint32_t left[4][4], right[4][2], across[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 k2 = scaled(T(), h ? loaded.k[i].y : loaded.k[i].x, scale_k[i]);
            const float2 q2 = scaled(T(), h ? loaded.q[i].y : loaded.q[i].x, scale_q[i]);
            float to_k[2], to_q[2], to_end[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int c = 2 * h + j;
                const float down = decays.product(i, c), up = decays.inverse(i, c);
                const float x = j ? k2.y : k2.x;
                to_k[j] = x * down, to_q[j] = (j ? q2.y : q2.x) * down, to_end[j] = x * up;
                left[i][2 * j] = round_tf32(to_k[j]), left[i][2 * j + 1] = round_tf32(to_q[j]);
                right[i][j] = round_tf32(to_end[j]);
                if (i < 2) {
                    to_end[j] *= first[j];
                    across[i][j] = round_tf32(to_end[j]);
                } else {
                    to_k[j] *= first[j], to_q[j] *= first[j];
                }
                to_end[j] *= second[j];
            }
            (h ? k[i].y : k[i].x) = ptx::cvt_rn_x2<T>(to_k[0], to_k[1]);
            (h ? q[i].y : q[i].x) = ptx::cvt_rn_x2<T>(to_q[0], to_q[1]);
            (h ? end[i].y : end[i].x) = ptx::cvt_rn_f16x2(to_end[0], to_end[1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j <= i; j++) {
                const uint32_t (&b)[2] = i >= 2 && j < 2 ? across[j % 2] : right[j];
                ptx::mma_m16n8k8_tf32(sums[i * (i + 1) / 2 + j], left[i], b[0], b[1]);
            }
    }
    // Each lane where it has read.
    const uint32_t start = ptx::shared_address(smem.start) + at.raw<Pair<D>>();
    uint8_t *g_end = g_to.k_end + at.raw<Tile<D>>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store_words(start + i * 1024, k[i]), store_words(start + i * 1024 + kQueries, q[i]);
        *reinterpret_cast<uint2 *>(g_end + i * 1024) = make_uint2(end[i].x, end[i].y);
    }
}

// K^'s second terms. k's own place is K~'s by now: it comes from global memory, of the warp's 16 channels in the chunk's first
// token, `stride` bytes a token.
template <class T, int D>
__device__ __forceinline__ void ratio_second_terms(const RatioLanes &at, const RatioDecays &decays, PrepSmem<D> &smem,
                                                   const char *g_k, int64_t stride, Operands<D> &g_to) {
    float first[4], second[4];
#pragma unroll
    for (int c = 0; c < 4; c++) first[c] = decays.whole(0, c, at), second[c] = decays.whole(1, c, at);
    uint8_t *g_end = g_to.k_end_low + at.raw<Tile<D>>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = static_cast<int>(at.group) + 8 * i;
        uint2 k = make_uint2(0, 0);
        if (token < smem.rows) k = *reinterpret_cast<const uint2 *>(g_k + token * stride + 8 * at.quad);
        const uint32_t scale = __float_as_uint(smem.inverse_k[ratio_scale_place(token)]);
        const float2 a = scaled(T(), k.x, scale), b = scaled(T(), k.y, scale);
        float x[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            x[c] *= decays.inverse(i, c);
            if (i < 2) x[c] *= first[c];
            x[c] *= second[c];
        }
        const Words v = f16_words(x);
        const float2 v0 = unpack(__half(), v.x), v1 = unpack(__half(), v.y);
        const float low[4] = {x[0] - v0.x, x[1] - v0.y, x[2] - v1.x, x[3] - v1.y};
        const Words second_terms = f16_words(low);
        *reinterpret_cast<uint2 *>(g_end + i * 1024) = make_uint2(second_terms.x, second_terms.y);
    }
}

// Sums of one warp as pieces of M_ts, M_t,s+1, A_ts, A_t,s+1, 32 of each set: products (2, 0), (2, 1), (3, 0), (3, 1), (1, 0),
// (3, 2), one a set; of those on the diagonal, (0, 0) and (1, 1), then (2, 2) and (3, 3), half the lanes count, and the second
// one lies in the first one's other places, from the end.
struct RatioPlace {
    int t, s;

    // Of set 4 round + w.
    __device__ __forceinline__ RatioPlace(int round, int w, int lane) {
        const bool above = lane % 4 * 2 >= lane / 4, diagonal = round > 0 && w >= 2;
        const int from = diagonal && above ? 31 - lane : lane;
        const int i = round == 0 ? 2 + w / 2 : diagonal ? 2 * w - 4 + above : 2 * w + 1;
        const int j = round == 0 ? w % 2 : diagonal ? i : 2 * w;
        t = 8 * i + from / 4, s = 8 * j + from % 4 * 2;
    }
};

__device__ __forceinline__ void store_ratio_sums(const float (&sums)[10][4], float4 *s_pieces) {
    const int lane = opaque_lane();
    const auto put = [&](int piece, const float (&x)[4]) { store_piece(s_pieces, piece, x[0], x[1], x[2], x[3]); };
    put(lane, sums[3]), put(32 + lane, sums[4]), put(64 + lane, sums[6]), put(96 + lane, sums[7]);
    put(128 + lane, sums[1]), put(160 + lane, sums[8]);
    if (lane % 4 * 2 >= lane / 4) return;
    put(192 + lane, sums[0]), put(192 + 31 - lane, sums[2]), put(224 + lane, sums[5]), put(224 + 31 - lane, sums[9]);
}

// Two neighbouring elements of A, in fp16, where they are rounded or what that leaves of them.
template <int D>
__device__ __forceinline__ void put_a_pair(PrepSmem<D> &smem, const RatioPlace &at, float x, float y) {
    ptx::st_shared_u32(ptx::shared_address(smem.a) + Square::offset(at.t, at.s), ptx::cvt_rn_f16x2(x, y));
}

// As add_pieces and put_low. On the diagonal, which no sum has, an odd token's element is the second one of its last piece.
template <int D>
__device__ __forceinline__ void add_ratio_pieces(float (&a)[kOwnPieces][2], PrepSmem<D> &smem, int w, int lane) {
    float4 x[kOwnPieces][kPrepWarps];
    float beta[kOwnPieces], diagonal[kOwnPieces];
#pragma unroll
    for (int i = 0; i < kOwnPieces; i++) {
        const int t = RatioPlace(i, w, lane).t;
#pragma unroll
        for (int from = 0; from < kPrepWarps; from++)
            x[i][from] = ld4(&smem.ratio_partial[from][32 * (w + kPrepWarps * i) + lane].x);
        beta[i] = smem.beta_k[t], diagonal[i] = smem.diagonal[t];
    }
#pragma unroll
    for (int i = 0; i < kOwnPieces; i++) {
        const RatioPlace at(i, w, lane);
        float4 sum = x[i][0];
#pragma unroll
        for (int from = 1; from < kPrepWarps; from++)
            sum.x += x[i][from].x, sum.y += x[i][from].y, sum.z += x[i][from].z, sum.w += x[i][from].w;
        a[i][0] = sum.z, a[i][1] = at.s + 1 < at.t ? sum.w : diagonal[i];
        *reinterpret_cast<float2 *>(&smem.l[at.t * kPitch + at.s]) = make_float2(sum.x * beta[i], sum.y * beta[i]);
        put_a_pair(smem, at, a[i][0], a[i][1]);
    }
    if (32 * w + lane < kChunk && lane % 2 == 0) put_a(smem, lane, lane, smem.diagonal[lane]);
}

template <int D>
__device__ __forceinline__ void put_ratio_low(const float (&a)[kOwnPieces][2], PrepSmem<D> &smem, int w, int lane) {
    const auto low = [](float x) { return x - __half2float(__float2half_rn(x)); };
#pragma unroll
    for (int i = 0; i < kOwnPieces; i++) put_a_pair(smem, RatioPlace(i, w, lane), low(a[i][0]), low(a[i][1]));
    if (32 * w + lane < kChunk && lane % 2 == 0) put_a(smem, lane, lane, low(smem.diagonal[lane]));
}

}  // namespace linattn::cuda::kda
