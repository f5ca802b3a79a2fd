// The AUX warpgroup of gdn_fwd_kernel: the 64x64 matrices of a chunk.
//
//   L_ij = beta_i 2^(G_i - G_j) k_i . k_j, i > j;  A^ = (I + L)^-1 - I;  P_ij = scale 2^(G_i - G_j) q_i . k_j, i >= j
//
// The gates enter in L: then nothing grows where keys longer than one and decays belong together.
// In blocks of 16 tokens. Warp w computes block row w of K K^T and Q K^T by wgmma; M = -L below the diagonal goes to shared
// memory in fp16. Diagonal blocks are inverted in fp32: two 8x8 halves, whose columns lanes solve for, joined by two m16n8k8. The
// rest is block substitution with m16n8k16, fp32 accumulation, fp16 operands:
//   X10 = X11 M10 X00;  X32 = X33 M32 X22;  Y2j = X22 M2j;  Y3j = X33 M3j + X32 M2j;
//   X21 = Y21 X11;  X31 = Y31 X11;  X20 = Y20 X00 + Y21 X10;  X30 = Y30 X00 + Y31 X10
// dealt out so that no warp passes more than four dependent products: warp 0 has block 30, warp 1 has 21 and 20, warp 2 has 32
// and 31, warp 3 (the longest row of P) has 10, which warps 0 and 1 need and get through shared memory and a named barrier.
// Decays of block row w against column blocks before it are products 2^(G_i - G_ref) 2^(G_ref - G_j), ref its first token, both
// <= 1; only the diagonal block takes exponentials here. Blocks above the diagonal are cleared once and never written.
//
// Correlated keys: sums over V' cancel, and what rounding its operands left does not. From the first row on where the weights
// of L, in the row or in all rows up to it, add up to more than the constants below, the chunk is computed in two terms
// (precise.cuh, state.cuh). What a token gets depends on the tokens up to it alone.
//
// l2norm: q and k stay as they are. The diagonal of K K^T holds |k_i|^2; 1/|k| goes into row and column factors, 1/|q| into O in
// the state loop, so nothing is rounded once more (norms.cuh).
//
// The warp number is a template parameter of each phase, and lane-derived values are taken through an opaque copy of the lane
// in each phase, so that they do not stay in registers from one phase to the next: 72 registers then suffice without spills.
// Under l2norm that is too much code: the loops overflow the instruction cache, and the SMs of a GPC wait for each other's
// instructions (docs/gdn.md). There the warps share the code that scales K K^T and Q K^T (Config::kSharedCode).
#pragma once
#include "norms.cuh"
#include "ptx/cta.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "terms.cuh"

namespace linattn::cuda::gdn {

// Named barriers, one a group: block 10 of the inverse is in place (warps 0, 1 wait for 3); the four warps together.
constexpr uint32_t kX10Barrier = 1, kGroupBarrier = 3;

// The four warps of a group meet. compute-sanitizer's racecheck loses some meetings at a named barrier: in a build for it
// (common/pipeline.cuh) they meet at an mbarrier, in the same places.
template <class C>
__device__ __forceinline__ void group_meets(Smem<C> &smem, int group) {
#ifdef LINATTN_EVERY_LANE_ARRIVES
    ptx::mbarrier_arrive_and_wait(ptx::shared_address(&smem.group_meets[group]));
#else
    ptx::bar_sync(kGroupBarrier + group, 128);
#endif
}

// What one term in bf16, two of V' or one in fp16 stand: the sum of the squares of a row of L, of the rows up to it, and one
// element. See docs/gdn.md, Accuracy.
template <class C>
constexpr bool kStandsMore = C::kValueTerms == 2 || !C::kBf16;
template <class C>
constexpr float kMostInRow = kStandsMore<C> ? 1.75f : 1.0f;
template <class C>
constexpr float kMostWeight = kStandsMore<C> ? 24.0f : 10.0f;
constexpr float kMostElement = 0.75f;
// Chunks of so few tokens are computed in two terms, S included: what few queries find may be small beside what rounding left.
constexpr int kFewTokens = 8;

// Sums of squares and largest elements of rows g and g + 8, two columns at once.
struct Weights {
    __half2 sum[2] = {}, most[2] = {};
    __device__ __forceinline__ void add(int row, uint32_t x) {
        const __half2 m = *reinterpret_cast<const __half2 *>(&x);
        sum[row] = __hfma2(m, m, sum[row]);
        most[row] = __hmax2(most[row], __habs2(m));
    }
};

// A diagonal block of -L at the places of an accumulator: its two 8x8 diagonal blocks, strictly lower, and its lower left one.
struct Diagonal {
    float a[2], e[2], left[2];
};

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) { return ptx::cvt_rn_f16x2(lo, hi); }

template <int w>
struct WarpNumber {
    static constexpr int value = w;
    constexpr __host__ __device__ __forceinline__ operator int() const { return w; }
};

// Calls f with the warp's number as a constant.
template <class F>
__device__ __forceinline__ void for_warp(int w, F f) {
    if (w < 2) {
        if (w == 0)
            f(WarpNumber<0>{});
        else
            f(WarpNumber<1>{});
    } else {
        if (w == 2)
            f(WarpNumber<2>{});
        else
            f(WarpNumber<3>{});
    }
}
template <int w, class F>
__device__ __forceinline__ void for_warp(WarpNumber<w> warp, F f) {
    f(warp);
}

// The same, or with the number as it is where the warps share code.
template <class C, class F>
__device__ __forceinline__ void for_warp_or_all(int w, F f) {
    if constexpr (C::kSharedCode)
        f(w);
    else
        for_warp(w, f);
}

// One row of 64 x 64 products X Y^T, all K.
template <class C>
__device__ __forceinline__ void issue_product(float (&d)[32], uint32_t x, uint32_t y) {
    using Tile = typename Smem<C>::Tile;
    const uint32_t x_low = Tile::k_major_low(x, 0, 0), y_low = Tile::k_major_low(y, 0, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::D / 16; s++) {
        const uint32_t step = Tile::offset(0, 16 * s) >> 4;
        const uint64_t a = ptx::wgmma_descriptor(x_low + step, Tile::k_major_high());
        const uint64_t b = ptx::wgmma_descriptor(y_low + step, Tile::k_major_high());
        if (s == 0)
            ptx::wgmma_ss_first<typename C::T, ptx::Major::K, ptx::Major::K>(d, a, b);
        else
            ptx::wgmma_ss<typename C::T, ptx::Major::K, ptx::Major::K>(d, a, b, true);
    }
    ptx::wgmma_commit_group();
}

// Decays from column block j < w to the first row of block w, times 1/|k| under l2norm. t: table at row 16 w.
template <class C>
__device__ __forceinline__ float4 column_factors(uint32_t t, int w, int j, int q) {
    float4 c = ptx::ld_shared_v4_f32(t + 192 * w + 4 * (table::kColumnDecay - 64 + 16 * j) + q * 16);
    if constexpr (C::kL2Norm) {
        const float4 r = ptx::ld_shared_v4_f32(t - 64 * w + 4 * (table::kColumnNormK + 16 * j) + q * 16);
        c.x *= r.x, c.y *= r.y, c.z *= r.z, c.w *= r.w;
    }
    return c;
}

// Row w of K K^T -> M (or its second terms), and the diagonal block without its decays. t: table at the warp's first row. w: a
// WarpNumber, or an int where warps share code.
template <class C, bool kSecond, class W>
__device__ __forceinline__ void scale_kk(const float (&d)[32], Diagonal &n, Weights &weights, uint32_t t, uint32_t M, W w,
                                         int l) {
    const LaneOf<C::kSharedCode> at(l);
    float n0 = ptx::ld_shared_f32(t + 4 * (table::kNegBeta + at.g)),
          n1 = ptx::ld_shared_f32(t + 4 * (table::kNegBeta + 8 + at.g));
    if constexpr (C::kL2Norm)
        n0 *= ptx::ld_shared_f32(t + 4 * (table::kNormK + at.g)), n1 *= ptx::ld_shared_f32(t + 4 * (table::kNormK + 8 + at.g));
    if (w > 0) {
        const float f0 = n0 * ptx::ld_shared_f32(t + 4 * (table::kRowDecay + at.g));
        const float f1 = n1 * ptx::ld_shared_f32(t + 4 * (table::kRowDecay + 8 + at.g));
        const uint32_t to = M + at.lane * 16 + w * (w - 1) / 2 * 512;
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (j >= w) break;
            const float *b = d + 8 * j;
            const float4 c = column_factors<C>(t, w, j, at.q);
            const float m[8] = {b[0] * f0 * c.x, b[1] * f0 * c.y, b[2] * f1 * c.x, b[3] * f1 * c.y,
                                b[4] * f0 * c.z, b[5] * f0 * c.w, b[6] * f1 * c.z, b[7] * f1 * c.w};
            uint32_t block[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                block[i] = pack_f16(m[2 * i], m[2 * i + 1]);
                if constexpr (kSecond)
                    block[i] = second_term<__half>(block[i], m[2 * i], m[2 * i + 1]);
                else
                    weights.add(i % 2, block[i]);
            }
            ptx::stmatrix_x4(to + j * 512, block);
        }
    }
    float4 r = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (C::kL2Norm) r = ptx::ld_shared_v4_f32(t + 4 * table::kColumnNormK + at.q * 16);
    for_warp(w, [&](auto warp) {
        const float *b = d + 8 * decltype(warp)::value;
        n.a[0] = b[0] * n0 * r.x, n.a[1] = b[1] * n0 * r.y;
        n.e[0] = b[6] * n1 * r.z, n.e[1] = b[7] * n1 * r.w;
        n.left[0] = b[2] * n1 * r.x, n.left[1] = b[3] * n1 * r.y;
    });
}

// Decays inside a diagonal block, at the places of an accumulator without its upper right 8x8; read long before they are used.
struct DiagonalDecays {
    float G0, G1;
    float4 c;

    __device__ __forceinline__ DiagonalDecays(uint32_t t, int l) {
        const Lane at(l);
        G0 = ptx::ld_shared_f32(t + 4 * (table::kG + at.g)), G1 = ptx::ld_shared_f32(t + 4 * (table::kG + 8 + at.g));
        c = ptx::ld_shared_v4_f32(t + 4 * table::kColumnG + at.q * 16);
    }
    __device__ __forceinline__ void get(float (&e)[6], int l) const {
        const Lane at(l);
        const auto factor = [](float x) { return ptx::ex2_approx_ftz(fminf(x, 0.0f)); };
        e[0] = at.g >= 2 * at.q ? factor(G0 - c.x) : 0.0f;
        e[1] = at.g > 2 * at.q ? factor(G0 - c.y) : 0.0f;
        e[2] = factor(G1 - c.x);
        e[3] = factor(G1 - c.y);
        e[4] = at.g >= 2 * at.q ? factor(G1 - c.z) : 0.0f;
        e[5] = at.g > 2 * at.q ? factor(G1 - c.w) : 0.0f;
    }
};

// The diagonal block with its decays, nothing on and above the diagonal.
__device__ __forceinline__ void decay_diagonal(Diagonal &n, const float (&e)[6], int l) {
    const Lane at(l);
    const bool left = at.g > 2 * at.q, right = at.g > 2 * at.q + 1;
    n.a[0] = left ? n.a[0] * e[0] : 0.0f, n.a[1] = right ? n.a[1] * e[1] : 0.0f;
    n.e[0] = left ? n.e[0] * e[4] : 0.0f, n.e[1] = right ? n.e[1] * e[5] : 0.0f;
    n.left[0] *= e[2], n.left[1] *= e[3];
}

// What the lane has of the weights of rows g and g + 8 of L, as one pair. `to`: the lane's word, lanes of a row side by side.
__device__ __forceinline__ void store_weights(const Diagonal &n, Weights &weights, uint32_t left, uint32_t to) {
    weights.add(0, pack_f16(n.a[0], n.a[1])), weights.add(1, pack_f16(n.e[0], n.e[1])), weights.add(1, left);
    const __half2 most =
        __hmax2(__lows2half2(weights.most[0], weights.most[1]), __highs2half2(weights.most[0], weights.most[1]));
    const __half2 sum = __hadd2(__lows2half2(weights.sum[0], weights.sum[1]), __highs2half2(weights.sum[0], weights.sum[1]));
    const __half2 weight = __hfma2(__hgt2(most, __float2half2_rn(kMostElement)), __float2half2_rn(16.0f), sum);
    ptx::st_shared_u32(to, *reinterpret_cast<const uint32_t *>(&weight));
}

// Weights in whole numbers, so that the order of their sums does not matter. A row that is too much alone, or not a number, is
// too much for the chunk.
constexpr float kWeightUnit = 1024.0f;
template <class C>
constexpr int kMostWhole = static_cast<int>(kMostWeight<C> * kWeightUnit);
template <class C>
__device__ __forceinline__ int whole_weight(float x) {
    return x <= kMostInRow<C> ? static_cast<int>(x * kWeightUnit) : kMostWhole<C> + 1;
}

// Rows 16 i + j and 16 i + 8 + j, j < 8; number: 8 i + j.
__device__ __forceinline__ float2 row_weights(uint32_t weights, int number) {
    const uint4 x = ptx::ld_shared_v4_u32(weights + 16 * number);
    const auto pair = [](const uint32_t &bits) { return *reinterpret_cast<const __half2 *>(&bits); };
    return __half22float2(__hadd2(__hadd2(pair(x.x), pair(x.y)), __hadd2(pair(x.z), pair(x.w))));
}

// Weight of all rows of the chunk; the same in all lanes.
template <class C>
__device__ __forceinline__ int chunk_weight(uint32_t weights, int l) {
    const float2 own = row_weights(weights, Lane(l).lane);
    return __reduce_add_sync(~0u, whole_weight<C>(own.x) + whole_weight<C>(own.y));
}

// The first token of the chunk that needs two terms, or kChunk; the same in all lanes.
template <class C>
__device__ __forceinline__ int first_precise(uint32_t weights, int l) {
    const Lane at(l);
    const int row = 2 * at.lane, number = row / 16 * 8 + row % 8;
    const float2 x = row_weights(weights, number), y = row_weights(weights, number + 1);
    const int even = whole_weight<C>(row & 8 ? x.y : x.x), odd = whole_weight<C>(row & 8 ? y.y : y.x);
    int through = even + odd;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, through, step);
        if (at.lane >= step) through += other;
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, through > kMostWhole<C>))) - 1;
    return 2 * owner + (__shfl_sync(~0u, through - odd, owner) > kMostWhole<C> ? 0 : 1);
}

// Columns of the inverses of I - N for the two strictly lower 8x8 matrices of a diagonal block: lane l has column l mod 8, of the
// second matrix where l mod 16 >= 8. N goes through shared memory (`scratch`, 464 bytes, the warp's own), row 0 left out, the
// second matrix 4 banks beside the first.
__device__ __forceinline__ void solve_8x8(const Diagonal &n, float (&x)[8], uint32_t scratch, int l) {
    const Lane at(l);
    if (at.g > 0) {
        const uint32_t to = scratch + (at.g - 1) * 32 + at.q * 8;
        ptx::st_shared_v2_u32(to, make_uint2(__float_as_uint(n.a[0]), __float_as_uint(n.a[1])));
        ptx::st_shared_v2_u32(to + 240, make_uint2(__float_as_uint(n.e[0]), __float_as_uint(n.e[1])));
    }
    __syncwarp();
    const int column = at.lane & 7;
    const uint32_t rows = scratch + (at.lane & 8) * 30;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float row[8] = {};
        if (i > 0) {
            const float4 left = ptx::ld_shared_v4_f32(rows + (i - 1) * 32);
            row[0] = left.x, row[1] = left.y, row[2] = left.z, row[3] = left.w;
        }
        if (i > 4) {
            const float4 right = ptx::ld_shared_v4_f32(rows + (i - 1) * 32 + 16);
            row[4] = right.x, row[5] = right.y, row[6] = right.z, row[7] = right.w;
        }
        x[i] = column == i ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < i; k++) x[i] = fmaf(row[k], x[k], x[i]);
    }
    __syncwarp();
}

// Inverse of diagonal block w: to X for the substitution, without its diagonal to A^.
template <class C>
__device__ __forceinline__ void invert_diagonal(const Diagonal &n, uint32_t n_left, uint32_t X, uint32_t A, int w, int l) {
    float x[8];
    solve_8x8(n, x, X + w * 512, l);
    const Lane at(l);
    // Rows of the inverses' transposes: what comes back of them are the matrices and, for a right operand, their transposes.
    if (at.lane < 16)
        ptx::st_shared_v4_u32(
            X + w * 512 + (at.lane & 8) * 48 + (at.lane & 7) * 16,
            make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])));
    __syncwarp();
    uint32_t inverse[4], transposed[4];
    ptx::ldmatrix_x4_trans(inverse, X + w * 512 + at.lane * 16), ptx::ldmatrix_x4(transposed, X + w * 512 + at.lane * 16);
    const uint32_t upper = inverse[0], lower = inverse[3];
    float d[4] = {}, z[4] = {};  // lower left: Y N X
    ptx::mma_m16n8k8<__half>(d, {lower, 0}, ptx::movmatrix_trans(n_left));
    ptx::mma_m16n8k8<__half>(z, {pack_f16(d[0], d[1]), 0}, transposed[0]);
    ptx::stmatrix_x4(X + w * 512 + at.lane * 16, {upper, pack_f16(z[0], z[1]), 0, lower});
    using T = typename C::T;
    const bool left = at.g > 2 * at.q, right = at.g > 2 * at.q + 1;
    const float2 x0 = unpack(__half(), upper), y0 = unpack(__half(), lower);
    ptx::stmatrix_x4(product_block(A, w, w, at.lane),
                     {ptx::cvt_rn_x2<T>(left ? x0.x : 0.0f, right ? x0.y : 0.0f), ptx::cvt_rn_x2<T>(z[0], z[1]), 0,
                      ptx::cvt_rn_x2<T>(left ? y0.x : 0.0f, right ? y0.y : 0.0f)});
}

// (a, b) in T, or their second terms.
template <class T, bool kSecond>
__device__ __forceinline__ uint32_t term(float a, float b) {
    const uint32_t first = ptx::cvt_rn_x2<T>(a, b);
    return kSecond ? second_term<T>(first, a, b) : first;
}

// Row w of Q K^T -> P, or its second terms. scale: of the diagonal block's rows g and g + 8.
template <class C, bool kSecond, class W>
__device__ __forceinline__ void store_p(const float (&d)[32], const float (&e)[6], uint32_t t, uint32_t P, float2 scale, W w,
                                        int l) {
    if constexpr (!C::kOutputs) return;
    using T = typename C::T;
    const LaneOf<C::kSharedCode> at(l);
    const uint32_t to = product_block(P, w, 0, at.lane);
    if (w > 0) {
        const float f0 = ptx::ld_shared_f32(t + 4 * (table::kRowDecayScaled + at.g));
        const float f1 = ptx::ld_shared_f32(t + 4 * (table::kRowDecayScaled + 8 + at.g));
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (j >= w) break;
            const float *b = d + 8 * j;
            const float4 c = column_factors<C>(t, w, j, at.q);
            ptx::stmatrix_x4(
                to ^ (j * 32),
                {term<T, kSecond>(b[0] * c.x * f0, b[1] * c.y * f0), term<T, kSecond>(b[2] * c.x * f1, b[3] * c.y * f1),
                 term<T, kSecond>(b[4] * c.z * f0, b[5] * c.w * f0), term<T, kSecond>(b[6] * c.z * f1, b[7] * c.w * f1)});
        }
    }
    float4 r = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (C::kL2Norm) r = ptx::ld_shared_v4_f32(t + 4 * table::kColumnNormK + at.q * 16);
    // The masked elements of e are 0 and those of d finite: q and k rows past the end are cleared.
    float f[6] = {e[0] * scale.x * r.x, e[1] * scale.x * r.y, e[2] * scale.y * r.x,
                  e[3] * scale.y * r.y, e[4] * scale.y * r.z, e[5] * scale.y * r.w};
    if constexpr (C::kSharedCode) ptx::register_fence(f);  // or else they are computed behind the branch, once for each warp
    uint32_t block[4];
    for_warp(w, [&](auto warp) {
        const float *b = d + 8 * decltype(warp)::value;
        block[0] = term<T, kSecond>(b[0] * f[0], b[1] * f[1]);
        block[1] = term<T, kSecond>(b[2] * f[2], b[3] * f[3]);
        block[3] = term<T, kSecond>(b[6] * f[4], b[7] * f[5]);
    });
    block[2] = 0;
    ptx::stmatrix_x4(to ^ (w * 32), block);
}

// Block (i, j) of A^, i > j.
template <class C, int i, int j>
__device__ __forceinline__ void store_a(const float (&x)[8], uint32_t A, int l) {
    using T = typename C::T;
    ptx::stmatrix_x4(product_block(A, i, j, Lane(l).lane), {ptx::cvt_rn_x2<T>(x[0], x[1]), ptx::cvt_rn_x2<T>(x[2], x[3]),
                                                            ptx::cvt_rn_x2<T>(x[4], x[5]), ptx::cvt_rn_x2<T>(x[6], x[7])});
}

// d += a b for 16x16 blocks; b by ldmatrix_x4_trans.
__device__ __forceinline__ void multiply(float (&d)[8], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    ptx::mma_m16n8k16<__half>(reinterpret_cast<float (&)[4]>(d[0]), a, b[0], b[1]);
    ptx::mma_m16n8k16<__half>(reinterpret_cast<float (&)[4]>(d[4]), a, b[2], b[3]);
}

__device__ __forceinline__ void pack_block(uint32_t (&r)[4], const float (&d)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = pack_f16(d[2 * i], d[2 * i + 1]);
}

// The blocks of the inverse below the diagonal, and, woven in behind the first products, the warp's row of P and the chunk's
// weight. M, X, X10: addresses of the lane; tw: table at the warp's first row.
template <class C>
struct Substitution {
    uint32_t tw, M, X, X10, A, P, weights, x10_barrier;
    float2 scale;
    int lane;

    __device__ __forceinline__ uint32_t m(int i, int j) const { return M + (i * (i - 1) / 2 + j) * 512; }
    __device__ __forceinline__ uint32_t x(int i) const { return X + i * 512; }

    __device__ __forceinline__ static void clear(float (&d)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) d[i] = 0.0f;
    }

    // y = a M_ij.
    __device__ __forceinline__ void product(float (&y)[8], const uint32_t (&a)[4], int i, int j) const {
        uint32_t b[4];
        clear(y);
        ptx::ldmatrix_x4_trans(b, m(i, j)), multiply(y, a, b);
    }

    // Products that wait for no other: warps 0 and 2 have X33 M32, X33 M31 in y, warp 0 also X33 M30 unless registers are short,
    // warp 1 X22 M21, X22 M20; warp 3 ends with X10.
    template <class W>
    __device__ __forceinline__ void first(float (&y)[3][8], W w) const {
        uint32_t a[4], b[4];
        if (w < 3) {
            const int row = w == 1 ? 2 : 3;
            ptx::ldmatrix_x4(a, x(row));
            product(y[0], a, row, row - 1), product(y[1], a, row, row - 2);
            if (!C::kSharedCode && w == 0) product(y[2], a, 3, 0);
        } else {
            float z[8];
            ptx::ldmatrix_x4(a, x(1));
            product(z, a, 1, 0);
            pack_block(a, z);
            clear(y[0]);
            ptx::ldmatrix_x4_trans(b, x(0)), multiply(y[0], a, b);
            pack_block(a, y[0]);
            ptx::stmatrix_x4(X10, a);
            ptx::bar_arrive(x10_barrier, 96);
        }
    }

    template <int w>
    __device__ __forceinline__ void second(float (&y)[3][8]) const {
        uint32_t a[4], b[4];
        if constexpr (w == 0) {  // block 30
            float x32[8] = {}, r[8] = {};
            pack_block(a, y[0]);
            ptx::ldmatrix_x4_trans(b, x(2)), multiply(x32, a, b);
            if constexpr (C::kSharedCode) ptx::ldmatrix_x4(a, x(3)), product(y[2], a, 3, 0);
            pack_block(a, x32);
            ptx::ldmatrix_x4_trans(b, m(2, 0)), multiply(y[2], a, b);
            ptx::ldmatrix_x4_trans(b, m(2, 1)), multiply(y[1], a, b);
            pack_block(a, y[2]);
            ptx::ldmatrix_x4_trans(b, x(0)), multiply(r, a, b);
            ptx::barrier_sync(x10_barrier, 96);
            pack_block(a, y[1]);
            ptx::ldmatrix_x4_trans(b, X10), multiply(r, a, b);
            store_a<C, 3, 0>(r, A, lane);
        } else if constexpr (w == 1) {  // blocks 21, 20
            float r1[8] = {}, r0[8] = {};
            uint32_t a0[4];
            pack_block(a, y[0]);
            ptx::ldmatrix_x4_trans(b, x(1)), multiply(r1, a, b);
            pack_block(a0, y[1]);
            ptx::ldmatrix_x4_trans(b, x(0)), multiply(r0, a0, b);
            store_a<C, 2, 1>(r1, A, lane);
            ptx::barrier_sync(x10_barrier, 96);
            ptx::ldmatrix_x4_trans(b, X10), multiply(r0, a, b);
            store_a<C, 2, 0>(r0, A, lane);
        } else if constexpr (w == 2) {  // blocks 32, 31
            float x32[8] = {}, x31[8] = {};
            pack_block(a, y[0]);
            ptx::ldmatrix_x4_trans(b, x(2)), multiply(x32, a, b);
            pack_block(a, x32);
            ptx::ldmatrix_x4_trans(b, m(2, 1)), multiply(y[1], a, b);
            store_a<C, 3, 2>(x32, A, lane);
            pack_block(a, y[1]);
            ptx::ldmatrix_x4_trans(b, x(1)), multiply(x31, a, b);
            store_a<C, 3, 1>(x31, A, lane);
        } else {  // block 10
            store_a<C, 1, 0>(y[0], A, lane);
        }
    }

    // The result is the chunk's weight.
    template <class W>
    __device__ __forceinline__ int run(const float (&qk)[32], const float (&e)[6], W w) const {
        float y[3][8];
        first(y, w);
        store_p<C, false>(qk, e, tw, P, scale, w, lane);
        const int weight = chunk_weight<C>(weights, lane);
        for_warp(w, [&](auto warp) { second<decltype(warp)::value>(y); });
        return weight;
    }
};

}  // namespace linattn::cuda::gdn
