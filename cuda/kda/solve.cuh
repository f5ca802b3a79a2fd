// From the warps' sums to what the scan needs: A, and T^ = (I + L)^-1 below its diagonal, with L = diag(beta) M, in fp32
// up to its last rounding.
//
// The two diagonal blocks of 16 are solved by forward substitution, a column a lane; the block below is -T11 (L10 T00), two
// products of one warp.
#pragma once
#include "common/fragments.cuh"
#include "gates.cuh"
#include "ptx/mma.cuh"

namespace linattn::cuda::kda {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// A power of 2 that brings a vector with this sum of squares to a length of 1 to 2.
__device__ __forceinline__ float inverse_length(float squares) {
    const int exponent = static_cast<int>(__float_as_uint(squares) >> 23) - 127;
    const int half = exponent < -100 ? -50 : exponent > 100 ? 50 : exponent >> 1;
    return __uint_as_float(static_cast<uint32_t>(127 - half) << 23);
}

__device__ __forceinline__ float inverse_of_power(float power) {
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// Of one token, over all channels.
__device__ __forceinline__ float all_channels(const float (&s_sums)[kPrepWarps][kChunk], int token) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPrepWarps; i++) sum += s_sums[i][token];
    return sum;
}

// What a k or q of the operands is to be multiplied by.
__device__ __forceinline__ float length_of(const KernelParams &params, float squares, float inverse) {
    return (params.p.qk_l2norm ? rsqrtf(squares + 1e-6f) : 1.0f) * inverse_of_power(inverse);
}

// By a warp each, lane = token. Of the lengths of k and q only a power of 2 goes into the operands, which loses nothing.
// put: where the tokens' powers go, in the form that the products want.
template <int D, class Put>
__device__ __forceinline__ void query_factors(const KernelParams &params, PrepSmem<D> &smem, int token, Put put) {
    const float qq = all_channels(smem.qq, token), inverse = inverse_length(qq);
    put(smem.inverse_q, token, inverse);
    smem.diagonal[token] = all_channels(smem.qk, token) * inverse_length(all_channels(smem.kk, token)) * inverse;
    smem.factors.scale_q[token] = params.scale * length_of(params, qq, inverse);
}

template <int D, class Put>
__device__ __forceinline__ void key_factors(const KernelParams &params, PrepSmem<D> &smem, int token, int rows, float beta,
                                            Put put) {
    const float kk = all_channels(smem.kk, token), inverse = inverse_length(kk), length = length_of(params, kk, inverse);
    put(smem.inverse_k, token, inverse);
    if (params.p.beta_form != BetaForm::Weight) beta = sigmoid(beta);
    if (params.p.beta_form == BetaForm::LogitsX2) beta += beta;
    beta = token < rows ? beta : 0.0f;
    float *to = &smem.factors.beta[token / 2].x + token % 2;
    to[0] = beta * length, to[2] = smem.beta_k[token] = beta * length * length;
}

__device__ __forceinline__ float4 ld4(const float *s_from) { return ptx::ld_shared_v4_f32(ptx::shared_address(s_from)); }

__device__ __forceinline__ void ld8(float (&x)[8], const float *s_from) {
    const float4 a = ld4(s_from), b = ld4(s_from + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Eight numbers of a row to a square in global memory; and what that leaves.
template <class T>
__device__ __forceinline__ void put8(uint8_t *g_to, const float (&x)[8]) {
    *reinterpret_cast<uint4 *>(g_to) = make_uint4(ptx::cvt_rn_x2<T>(x[0], x[1]), ptx::cvt_rn_x2<T>(x[2], x[3]),
                                                  ptx::cvt_rn_x2<T>(x[4], x[5]), ptx::cvt_rn_x2<T>(x[6], x[7]));
}
template <class T>
__device__ __forceinline__ void put8_low(uint8_t *g_to, const float (&x)[8]) {
    float low[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 rounded = unpack(T(), ptx::cvt_rn_x2<T>(x[2 * j], x[2 * j + 1]));
        low[2 * j] = x[2 * j] - rounded.x, low[2 * j + 1] = x[2 * j + 1] - rounded.y;
    }
    put8<T>(g_to, low);
}

// Whose sums a piece holds: M_ts of two pairs of tokens in x and y, A_ts of the same in z and w. Pieces 0 to 127 are level 16
// of the tree, 128 to 191 level 8, 192 to 223 level 4, by product and lane; the rest are levels 2 and 1, by pairs and group of
// four tokens. See tree.cuh.
struct Place {
    uint32_t t[2], s[2];

    // Of a product over groups that are h apart, the elements of row g and columns n, n + 1.
    __device__ __forceinline__ void across(uint32_t h, uint32_t product, uint32_t g, uint32_t n) {
        t[0] = t[1] = 4 * (g | h) + product / 2 * 2 + ((g & h) == 0);
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) s[j] = 4 * ((n + j) & ~h) + product % 2 * 2 + (((n + j) & h) != 0);
    }

    // Piece 32 of + lane. `of` is the same in a warp.
    static __device__ __forceinline__ Place piece(uint32_t of, uint32_t lane) {
        Place at;
        if (of < 4) {
            at.across(4, of, lane / 4, 2 * (lane % 4));
        } else if (of < 6) {
            const uint32_t g = lane / 2 % 8;
            at.across(2, 2 * (of - 4) + lane / 16, g, g & 4 | lane % 2 * 2);
        } else if (of == 6) {
            at.across(1, lane / 8, lane % 8, lane & 6);
        } else {
            const uint32_t j = lane / 8, first = lane % 8 * 4;
            at.t[0] = first + (j < 2 ? 2 + j : 1), at.t[1] = first + (j < 2 ? 2 + j : 3);
            at.s[0] = first, at.s[1] = first + (j < 2 ? 1 : 2);
        }
        return at;
    }
};

// An element of A, in fp16.
template <int D>
__device__ __forceinline__ void put_a(PrepSmem<D> &smem, uint32_t t, uint32_t s, float a) {
    *reinterpret_cast<__half *>(smem.a + Square::offset(t, s)) = __float2half_rn(a);
}

// Pieces of a thread: 32 (w + kPrepWarps i) + lane.
constexpr int kOwnPieces = 8 / kPrepWarps;

// Adds up the thread's pieces of all warps: M to L, A to its square. a: A's sums. All loads stand before all stores: none
// passes one.
template <int D>
__device__ __forceinline__ void add_pieces(float (&a)[kOwnPieces][2], PrepSmem<D> &smem, int w, int lane) {
    constexpr int kWarps = kPrepWarps, kOwn = kOwnPieces;
    Place at[kOwn];
    float4 x[kOwn][kWarps];
    float beta[kOwn][2];
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
        const int of = w + kWarps * i, piece = 32 * of + lane;
        at[i] = Place::piece(of, lane);
#pragma unroll
        for (int from = 0; from < kWarps; from++) x[i][from] = ld4(&smem.partial[from][piece < kPieces ? piece : 0].x);
#pragma unroll
        for (int j = 0; j < 2; j++) beta[i][j] = smem.beta_k[at[i].t[j]];
    }
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
        float4 sum = x[i][0];
#pragma unroll
        for (int from = 1; from < kWarps; from++)
            sum.x += x[i][from].x, sum.y += x[i][from].y, sum.z += x[i][from].z, sum.w += x[i][from].w;
        a[i][0] = sum.z, a[i][1] = sum.w;
        if (32 * (w + kWarps * i) + lane >= kPieces) return;
        smem.l[at[i].t[0] * kPitch + at[i].s[0]] = sum.x * beta[i][0];
        smem.l[at[i].t[1] * kPitch + at[i].s[1]] = sum.y * beta[i][1];
        put_a(smem, at[i].t[0], at[i].s[0], a[i][0]), put_a(smem, at[i].t[1], at[i].s[1], a[i][1]);
    }
}

// What rounding left of A, in its square.
template <int D>
__device__ __forceinline__ void put_low(const float (&a)[kOwnPieces][2], PrepSmem<D> &smem, int w, int lane) {
#pragma unroll
    for (int i = 0; i < kOwnPieces; i++) {
        const int of = w + kPrepWarps * i;
        if (32 * of + lane >= kPieces) return;
        const Place at = Place::piece(of, lane);
#pragma unroll
        for (int j = 0; j < 2; j++) put_a(smem, at.t[j], at.s[j], a[i][j] - __half2float(__float2half_rn(a[i][j])));
    }
}

// Sums over U cancel where keys are alike: rounding each operand once is then not enough. By one warp, lane = token: the first
// one whose row of L is not small. It does not depend on later tokens. Independent keys of 128 channels with beta 1 stay below
// 32 / 128.
constexpr float kAlike = 0.4f;

template <int D>
__device__ __forceinline__ void find_precise(PrepSmem<D> &smem, int lane) {
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < kChunk; s += 4) {
        const float4 l = ld4(&smem.l[lane * kPitch + s]);  // garbage from the diagonal on
        sum[0] = s < lane ? fmaf(l.x, l.x, sum[0]) : sum[0], sum[1] = s + 1 < lane ? fmaf(l.y, l.y, sum[1]) : sum[1];
        sum[2] = s + 2 < lane ? fmaf(l.z, l.z, sum[2]) : sum[2], sum[3] = s + 3 < lane ? fmaf(l.w, l.w, sum[3]) : sum[3];
    }
    const uint32_t precise = __ballot_sync(~0u, (sum[0] + sum[1]) + (sum[2] + sum[3]) > kAlike);
    if (lane == 0) smem.factors.first_precise = precise != 0 ? __ffs(static_cast<int>(precise)) - 1 : kChunk;
}

// By one warp: lane = column of block lane / 16.
template <int D>
__device__ __forceinline__ void invert_diagonal(PrepSmem<D> &smem, int lane) {
    const int first = lane & 16, column = lane & 15;
    float l[16][16], x[16];
#pragma unroll
    for (int r = 1; r < 16; r++)
#pragma unroll
        for (int s = 0; s < r; s += 4) {
            const float4 v = ld4(&smem.l[(first + r) * kPitch + first + s]);
            l[r][s] = v.x, l[r][s + 1] = v.y, l[r][s + 2] = v.z, l[r][s + 3] = v.w;
        }
#pragma unroll
    for (int r = 0; r < 16; r++) x[r] = r == column ? 1.0f : 0.0f;
    // Column by column of L: what does not depend on one another stands side by side.
#pragma unroll
    for (int s = 0; s < 15; s++)
#pragma unroll
        for (int r = s + 1; r < 16; r++) x[r] = fmaf(-l[r][s], x[s], x[r]);
#pragma unroll
    for (int r = 0; r < 16; r++) smem.t[(first + r) * kPitch + first + column] = x[r];
}

// sum += left right, in tf32 with second terms: two bits less than fp32.
__device__ __forceinline__ void add_product(float (&sum)[4], const float (&left)[4], float right0, float right1) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) high[i] = __float_as_uint(left[i]), low[i] = __float_as_uint(beyond_tf32(left[i]));
    ptx::mma_m16n8k8_tf32(sum, low, __float_as_uint(right0), __float_as_uint(right1));
    ptx::mma_m16n8k8_tf32(sum, high, __float_as_uint(beyond_tf32(right0)), __float_as_uint(beyond_tf32(right1)));
    ptx::mma_m16n8k8_tf32(sum, high, __float_as_uint(right0), __float_as_uint(right1));
}

// T10 = -T11 Y with Y = L10 T00, by one warp. Y^T is computed, whose accumulators are the right operands of the other product:
// along both sums elements 2 q and 2 q + 1 are in the places q and q + 4.
template <class T, int D>
__device__ __forceinline__ void lower_left(Operands<D> &g_to, bool precise, const PrepSmem<D> &smem) {
    const uint32_t lane = opaque_lane(), g = lane / 4, q = lane % 4;
    float y[2][4] = {}, x[2][4] = {};  // rows and columns: g, g + 8 of T00's columns, L10's rows 8 n + 2 q ..; of T10
#pragma unroll
    for (int step = 0; step < 2; step++) {
        const float *s_t = &smem.t[(8 * step + 2 * q) * kPitch + g];
        const float left[4] = {s_t[0], s_t[8], s_t[kPitch], s_t[kPitch + 8]};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 l = *reinterpret_cast<const float2 *>(&smem.l[(16 + 8 * n + g) * kPitch + 8 * step + 2 * q]);
            add_product(y[n], left, l.x, l.y);
        }
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
        const float *s_t = &smem.t[(16 + g) * kPitch + 16 + 8 * step + 2 * q];
        const float2 upper = *reinterpret_cast<const float2 *>(s_t);
        const float2 lower = *reinterpret_cast<const float2 *>(s_t + 8 * kPitch);
        const float left[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
        for (int n = 0; n < 2; n++) add_product(x[n], left, y[step][2 * n], y[step][2 * n + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float a = -x[n][2 * r], b = -x[n][2 * r + 1];
            const uint32_t high = ptx::cvt_rn_x2<T>(a, b), at = Square::offset(16 + g + 8 * r, 8 * n + 2 * q);
            *reinterpret_cast<uint32_t *>(g_to.t + at) = high;
            const float2 rounded = unpack(T(), high);
            if (precise) *reinterpret_cast<uint32_t *>(g_to.t_low + at) = ptx::cvt_rn_x2<T>(a - rounded.x, b - rounded.y);
        }
}

// The diagonal blocks, without the diagonal, and the block above them to T^: eight numbers of a row each for 96 threads.
template <class T, int D>
__device__ __forceinline__ void store_diagonal_blocks(Operands<D> &g_to, bool precise, const PrepSmem<D> &smem, int piece) {
    const int row = piece < 64 ? piece / 4 : piece / 2 - 16, column = 8 * (piece < 64 ? piece % 4 : 2 + piece % 2);
    float x[8] = {};
    if (column < 16 || row >= 16) {
        ld8(x, &smem.t[row * kPitch + column]);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = column + j < row ? x[j] : 0.0f;
    }
    const uint32_t at = Square::offset(row, column);
    put8<T>(g_to.t + at, x);
    if (precise) put8_low<T>(g_to.t_low + at, x);
}

}  // namespace linattn::cuda::kda
