// From the warps' sums to what the scan needs: A, and T^ = (I + L)^-1 below its diagonal, with L = diag(beta) M, in fp32
// up to its last rounding.
//
// The two diagonal blocks of 16 are solved by forward substitution, a column a lane; the block below is -T11 (L10 T00), two
// plain products spread over all threads.
#pragma once
#include "common/fragments.cuh"
#include "gates.cuh"

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

// Rows r, r + 16 / kRows .. (of 0-15) of X times column c of Y: X from row r on, kPitch floats a row; Y from column c on, kYPitch.
template <int kYPitch, int kRows>
__device__ __forceinline__ void dot16(float (&result)[kRows], const float *s_x, const float *s_y) {
    float sum[kRows][2] = {}, y[16];
    float4 x[kRows][4];
#pragma unroll
    for (int s = 0; s < 16; s++) y[s] = s_y[s * kYPitch];
#pragma unroll
    for (int i = 0; i < kRows; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[i][j] = ld4(s_x + 16 / kRows * i * kPitch + 4 * j);
#pragma unroll
    for (int s = 0; s < 16; s += 4)
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            const float4 v = x[i][s / 4];
            sum[i][0] = fmaf(v.x, y[s], sum[i][0]), sum[i][1] = fmaf(v.y, y[s + 1], sum[i][1]);
            sum[i][0] = fmaf(v.z, y[s + 2], sum[i][0]), sum[i][1] = fmaf(v.w, y[s + 3], sum[i][1]);
        }
#pragma unroll
    for (int i = 0; i < kRows; i++) result[i] = sum[i][0] + sum[i][1];
}

// y = L10 T00, and the diagonal blocks and the block above them to T^.
template <class T, int D>
__device__ __forceinline__ void lower_left_first(Operands<D> &g_to, bool precise, PrepSmem<D> &smem, int thread) {
    constexpr int kRows = kOwnPieces;
    const int r = thread / 16, c = thread % 16;
    float y[kRows];
    dot16<kPitch>(y, &smem.l[(16 + r) * kPitch], &smem.t[c]);
#pragma unroll
    for (int i = 0; i < kRows; i++) smem.y[(r + 16 / kRows * i) * 16 + c] = y[i];
    const int row = thread / 4, column = 8 * (thread % 4);
    if (row >= 16 && column < 16) return;
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

template <class T, int D>
__device__ __forceinline__ void lower_left_second(Operands<D> &g_to, bool precise, PrepSmem<D> &smem, int thread) {
    constexpr int kRows = kOwnPieces;
    const int r = thread / 16, c = thread % 16;
    float product[kRows];
    dot16<16>(product, &smem.t[(16 + r) * kPitch + 16], &smem.y[c]);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        const int row = 16 + r + 16 / kRows * i;
        const float x = -product[i];
        const uint32_t high = ptx::cvt_rn_x2<T>(x, 0.0f), at = Square::offset(row, c);
        *reinterpret_cast<uint16_t *>(g_to.t + at) = static_cast<uint16_t>(high);
        if (precise)
            *reinterpret_cast<uint16_t *>(g_to.t_low + at) =
                static_cast<uint16_t>(ptx::cvt_rn_x2<T>(x - unpack(T(), high).x, 0.0f));
    }
}

}  // namespace linattn::cuda::kda
