// KDA's verify for its outputs alone (delta_verify.cuh has the equations), of states in bf16: products in bf16, K^ and Q^ in two
// terms each.
//
// Grid: one CTA per (sequence, value head, 64 or 128 columns of V), a warp for 16 columns. The state goes to shared memory by
// copies that nobody's registers wait for and is the left operand of wgmma as it lies: Z^T = S^T X^T, with X = (k_i E_i, q_i E_i)
// in a high and a low term. With A and Q the factors of u_j in -u_i and in o_i (A strictly lower, Q lower triangular) and W =
// beta (v - Z_k), outputs are O = Z_q + P W, where P (I + A) = Q: a triangle of the tokens alone, solved by one warp while the
// products with the state run. W is in registers in the form of a fragment; W and P are of two terms, too.
//
// Tokens: a warp copies, normalises and gates 16 channels of K of all tokens (few states: twice 16), and waits for nobody: a lane
// has two channels of R / 4 tokens, sums of the gates meet by shuffles. X takes the place of k, q and g as copied.
//
// Schedule:  copies of tokens and state . gates, norms, X, Y . barrier . X S begins; a warp or two: A, Q, P; one: factors .
//            barrier . W, O
#pragma once
#include "common/device_guard.h"
#include "common/swizzle.cuh"
#include "verify_tokens.cuh"

namespace linattn::cuda::delta_verify {

template <bool kVFirstOrder, int kMostTokens, int kColumns, int kCtas>
struct Bf16Config {
    static constexpr int D = 128, R = kMostTokens, kWidth = kColumns, kResident = kCtas;
    static constexpr bool kVFirst = kVFirstOrder, kWhole = kWidth == D, kTwoTerms = true;
    using State = __nv_bfloat16;
    static constexpr int kWarps = kWidth / 16, kThreads = 32 * kWarps, kSlices = D / kWidth;
    static constexpr int kUnits = D / 16 / kWarps;  // of 16 channels, of a warp
    static constexpr int kGroup = R / 4;            // tokens of a lane
    using X = SmemTile<2 * R, D, ptx::Swizzle::B128>;
    using Y = SmemTile<R, D, ptx::Swizzle::B128>;
    using S = SmemTile<kVFirst ? 64 : D, kVFirst ? D : 64, ptx::Swizzle::B128>;  // of a warpgroup
};

template <class C>
struct Bf16Smem {
    alignas(1024) char S[C::kWidth / 64][C::S::kBytes];
    char x[2][C::X::kBytes];                             // terms; rows of k, rows of q. As copied: k and q; g
    char y[2][C::Y::kBytes];                             // terms of k_j / E_j
    alignas(16) uint16_t v[C::kWarps][2][C::R][8];       // a warp's columns; then o
    alignas(16) uint16_t p[2][C::R / 8][C::R][8];        // terms of P, [j / 8][i][j % 8]
    alignas(16) float A[C::R][C::R + 4], Q[C::R][C::R + 4];
    float square[8][2 * C::R];                           // of 16 channels of the rows of k and q
    float4 factor[C::R];                                 // of v and k S in u; of q S in o
};

__device__ __forceinline__ uint32_t lane_of() { return threadIdx.x % 32; }

// A warp's channels of k, q and g, and its columns of v.
template <class C>
__device__ __forceinline__ void copy_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, uint32_t n, uint32_t head,
                                           uint32_t v_cta) {
    uint32_t key = head * p.key_of >> 16, lane = lane_of(), warp = threadIdx.x / 32, part = lane % 2;
    uint32_t x = ptx::shared_address(smem.x[0]);
    bool f32 = c.g.dtype == DType::F32;
#pragma unroll
    for (uint32_t first = 0; first < 2 * C::R; first += 16) {
        uint32_t row = first + lane / 2, t = row % C::R;
        if (t >= p.tokens) continue;
        const char *from = row < C::R ? p.k.at(n, t, key) : p.q.at(n, t, key);
        const char *g = p.g.at(n, t, head) + (f32 ? 32 * (row / C::R) : 0);
#pragma unroll
        for (int i = 0; i < C::kUnits; ++i) {
            uint32_t unit = warp + i * C::kWarps, to = x + C::X::offset(row, 16 * unit + 8 * part);
            ptx::cp_async_16(to, from + 32 * unit + 16 * part);
            if (f32 || row < C::R) ptx::cp_async_16(to + C::X::kBytes, g + (f32 ? 64 : 32) * unit + 16 * part);
        }
        if (row < C::R)
            ptx::cp_async_16(ptx::shared_address(smem.v[warp][part][t]),
                             p.v.at(n, t, head) + 2 * v_cta + 32 * warp + 16 * part);
    }
    ptx::cp_async_commit_group();
}

template <class C>
__device__ __forceinline__ void copy_state(Bf16Smem<C> &smem, const char *state) {  // of the CTA's first column
    constexpr int kRowChunks = C::kVFirst ? C::D / 8 : C::kWidth / 8, kRows = C::kThreads / kRowChunks;
    uint32_t chunk = threadIdx.x % kRowChunks, row = threadIdx.x / kRowChunks;
    uint32_t to = ptx::shared_address(smem.S) +
                  (C::kVFirst ? C::S::offset(row, 8 * chunk) : chunk / 8 * C::S::kBytes + C::S::offset(row, 8 * chunk % 64));
    const char *from = state + 2 * C::D * row + 16 * chunk;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#ifdef VER_HINT
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to + i * kRows / C::S::kRows * C::S::kBytes + i * kRows % C::S::kRows * 128), "l"(from + 2 * C::D * kRows * i));
#else
        ptx::cp_async_16(to + i * kRows / C::S::kRows * C::S::kBytes + i * kRows % C::S::kRows * 128, from + 2 * C::D * kRows * i);
#endif
    ptx::cp_async_commit_group();
}

// Of a lane's channels, as loaded.
template <class C>
struct PairGate {
    uint32_t bias[C::kUnits][2] = {}, a_log = 0;
    static __device__ __forceinline__ uint32_t channel(int unit) {
        return 16 * (threadIdx.x / 32 + unit * C::kWarps) + 2 * (lane_of() % 8);
    }
    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t head) {
        if (c.A_log) a_log = c.A_log.load(p.A_log.at(head));
        if (!c.dt_bias) return;
#pragma unroll
        for (int i = 0; i < C::kUnits; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) bias[i][e] = c.dt_bias.load(p.dt_bias.at(head), channel(i) + e);
    }
};

// Two numbers to two terms of bf16.
struct Terms {
    uint32_t high, low;
    __device__ __forceinline__ Terms(float a, float b) {
        high = ptx::cvt_rn_bf16x2(a, b);
        low = ptx::cvt_rn_bf16x2(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
    }
};

// Squares of the rows of k and q over 16 channels: diagonals of products of a fragment with itself.
template <class C, class T>
__device__ __forceinline__ void square_rows(Bf16Smem<C> &smem, int unit) {
    int g = lane_of() / 4, c = lane_of() % 4;
#pragma unroll
    for (int first = 0; first < 2 * C::R; first += 16) {
        uint32_t a[4];
        float low[4] = {}, high[4] = {};
        ptx::ldmatrix_x4(a, ptx::shared_address(smem.x[0]) + C::X::block16_offset(first, 16 * unit, lane_of()));
        ptx::mma_m16n8k16<T>(low, a, a[0], a[2]);
        ptx::mma_m16n8k16<T>(high, a, a[1], a[3]);
        if (c == g / 2) {
            smem.square[unit][first + g] = g % 2 ? low[1] : low[0];
            smem.square[unit][first + 8 + g] = g % 2 ? high[3] : high[2];
        }
    }
}

template <class C, bool kBf16, bool kF32Gate>
__device__ __forceinline__ void prepare_pairs(const Params &p, const Choices &c, Bf16Smem<C> &smem, const PairGate<C> &gate) {
    using T = std::conditional_t<kBf16, __nv_bfloat16, __half>;
    const int pair = lane_of() % 8, group = lane_of() / 8, first = group * C::kGroup;
    char *x = smem.x[0], *y = smem.y[0];
    float slope = -kLog2e * gate_amplitude(c, gate.a_log), bound = kLog2e * p.lower_bound;
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i) {
        int channel = gate.channel(i), unit = channel / 16;
        float G[C::kGroup][2], total[2] = {0.0f, 0.0f}, offset[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) offset[e] = slope * (c.dt_bias ? float_of(c.dt_bias, gate.bias[i][e]) : 0.0f);
#pragma unroll
        for (int t = 0; t < C::kGroup; ++t) {
            float z[2];
            if constexpr (kF32Gate) {
                float2 two = *reinterpret_cast<const float2 *>(
                    x + C::X::kBytes + C::X::offset(pair / 4 * C::R + first + t, 16 * unit + pair / 2 % 2 * 8) + pair % 2 * 8);
                z[0] = two.x, z[1] = two.y;
            } else {
                uint32_t two = *reinterpret_cast<const uint32_t *>(x + C::X::kBytes + C::X::offset(first + t, channel));
                z[0] = wide<kBf16>(two & 0xffffu), z[1] = wide<kBf16>(two >> 16);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                G[t][e] = total[e] =
                    fmaf(bound, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(slope, z[e], offset[e]))), total[e]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // of the groups before
            float below = __shfl_up_sync(0xffffffffu, total[e], 8);
            if (group >= 1) total[e] += below;
            below = __shfl_up_sync(0xffffffffu, total[e], 16);
            if (group >= 2) total[e] += below;
            below = __shfl_up_sync(0xffffffffu, total[e], 8);
            below = (group ? below : 0.0f) - middle(p);
#pragma unroll
            for (int t = 0; t < C::kGroup; ++t) G[t][e] += below;
            if constexpr (C::kGroup == 4)  // an order of tokens without bank conflicts
                if (group & 2) {
                    float other = G[0][e];
                    G[0][e] = G[2][e], G[2][e] = other, other = G[1][e];
                    G[1][e] = G[3][e], G[3][e] = other;
                }
        }
        square_rows<C, T>(smem, unit);
        __syncwarp();
#pragma unroll
        for (int t = 0; t < C::kGroup; ++t) {
            int row = first + (C::kGroup == 4 ? t ^ (group & 2) : t);
            uint32_t at = C::X::offset(row, channel), of_q = C::X::offset(C::R + row, channel),
                     of_y = C::Y::offset(row, channel);
            uint32_t k = *reinterpret_cast<const uint32_t *>(x + at), q = *reinterpret_cast<const uint32_t *>(x + of_q);
            float E[2], inverse[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) E[e] = ptx::ex2_approx_ftz(G[t][e]), inverse[e] = ptx::ex2_approx_ftz(-G[t][e]);
            float k0 = wide<kBf16>(k & 0xffffu), k1 = wide<kBf16>(k >> 16);
            auto store = [&](char *to, uint32_t low, float a, float b) {
                Terms terms(a, b);
                *reinterpret_cast<uint32_t *>(to) = terms.high;
                *reinterpret_cast<uint32_t *>(to + low) = terms.low;
            };
            store(x + at, C::X::kBytes, k0 * E[0], k1 * E[1]);
            store(x + of_q, C::X::kBytes, wide<kBf16>(q & 0xffffu) * E[0], wide<kBf16>(q >> 16) * E[1]);
            store(y + of_y, C::Y::kBytes, k0 * inverse[0], k1 * inverse[1]);
        }
    }
}

template <class C>
__device__ __forceinline__ void prepare_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, const PairGate<C> &gate) {
    bool bf16 = c.q.dtype == DType::BF16;
    if (c.g.dtype == DType::F32)
        bf16 ? prepare_pairs<C, true, true>(p, c, smem, gate) : prepare_pairs<C, false, true>(p, c, smem, gate);
    else
        bf16 ? prepare_pairs<C, true, false>(p, c, smem, gate) : prepare_pairs<C, false, false>(p, c, smem, gate);
}

// 1 / norm of row lane % 2R of k and q.
template <class C>
__device__ __forceinline__ float norm_of_lane(const Choices &c, const Bf16Smem<C> &smem) {
    if (!c.qk_l2norm) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += smem.square[i][lane_of() % (2 * C::R)];
    return rsqrtf(sum + 1e-6f);
}

// A and Q: with 16 tokens a warp each, else both by one.
template <class C>
__device__ __forceinline__ void multiply_draft(const Params &p, Bf16Smem<C> &smem, int tile, float norm, float beta) {
    const int lane = lane_of(), g = lane / 4, c = lane % 4;
    uint32_t x = ptx::shared_address(smem.x[0]) + C::X::block16_offset(16 * tile, 0, lane),
             y = ptx::shared_address(smem.y[0]) + (C::R == 16 ? C::Y::block16_offset(0, 0, lane)
                                                              : lane / 16 * C::Y::kBytes + C::Y::offset(lane % 8, lane / 8 % 2 * 8));
    float sum[C::R / 8][3][4] = {};
#pragma unroll
    for (int s = 0; s < C::D / 16; ++s) {
        // the k-step as an exclusive or: the swizzle of a lane's row is in its address
        uint32_t step = s % 4 * 32, panel = s / 4, xh[4], xl[4], yh[4], yl[4];
        ptx::ldmatrix_x4(xh, (x ^ step) + panel * C::X::kPanelStrideBytes);
        ptx::ldmatrix_x4(xl, (x ^ step) + panel * C::X::kPanelStrideBytes + C::X::kBytes);
        ptx::ldmatrix_x4(yh, (y ^ step) + panel * C::Y::kPanelStrideBytes);
        if constexpr (C::R == 16) {
            ptx::ldmatrix_x4(yl, (y ^ step) + panel * C::Y::kPanelStrideBytes + C::Y::kBytes);
        } else {
            yl[0] = yh[2], yl[2] = yh[3], yh[2] = yh[1];
        }
#pragma unroll
        for (int j = 0; j < C::R / 8; ++j) {
            ptx::mma_m16n8k16<__nv_bfloat16>(sum[j][0], xh, yh[j], yh[j + 2]);
            ptx::mma_m16n8k16<__nv_bfloat16>(sum[j][1], xl, yh[j], yh[j + 2]);
            ptx::mma_m16n8k16<__nv_bfloat16>(sum[j][2], xh, yl[j], yl[j + 2]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int of_q = C::R == 16 ? tile : half, i = C::R == 16 ? g + 8 * half : g;
        float of_row = __shfl_sync(0xffffffffu, norm, of_q * C::R + i), of_beta = __shfl_sync(0xffffffffu, beta, i);
        of_row *= of_q ? p.scale : of_beta;
#pragma unroll
        for (int j = 0; j < C::R / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int column = 8 * j + 2 * c + e, at = 2 * half + e;
                float factor = of_row * __shfl_sync(0xffffffffu, norm, column);
                (of_q ? smem.Q : smem.A)[i][column] =
                    column < i + of_q && i < static_cast<int>(p.tokens)
                        ? factor * (sum[j][0][at] + (sum[j][1][at] + sum[j][2][at]))
                        : 0.0f;
            }
    }
}

// P (I + A) = Q, a lane a row. A row's zeros above its diagonal meet nothing: what is no number stays with later tokens.
template <class C>
__device__ __forceinline__ void solve_draft(Bf16Smem<C> &smem) {
    const int i = lane_of();
    if (i >= C::R) return;
    float row[C::R];
#pragma unroll
    for (int j = 0; j < C::R; j += 4) {
        float4 four = *reinterpret_cast<const float4 *>(&smem.Q[i][j]);
        row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
    }
#pragma unroll
    for (int l = C::R - 1; l > 0; --l) {
#pragma unroll
        for (int j = 0; j < l; j += 4) {
            float4 four = *reinterpret_cast<const float4 *>(&smem.A[l][j]);
            const float a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j + e < l && i >= l) row[j + e] = fmaf(-row[l], a[e], row[j + e]);
        }
    }
#pragma unroll
    for (int j = 0; j < C::R; j += 8) {
        Terms a(row[j], row[j + 1]), b(row[j + 2], row[j + 3]), c(row[j + 4], row[j + 5]), d(row[j + 6], row[j + 7]);
        *reinterpret_cast<uint4 *>(smem.p[0][j / 8][i]) = make_uint4(a.high, b.high, c.high, d.high);
        *reinterpret_cast<uint4 *>(smem.p[1][j / 8][i]) = make_uint4(a.low, b.low, c.low, d.low);
    }
}

// W and o of the warp's columns from Z, and o to memory.
template <class C>
__device__ __forceinline__ void finish_columns(const Params &p, const Choices &c, Bf16Smem<C> &smem, const float (&z)[C::R],
                                               char *o) {
    constexpr int kBlocks = C::R / 8;
    const int lane = lane_of(), q = lane % 4, matrix = lane / 8, warp = threadIdx.x / 32, tokens = static_cast<int>(p.tokens);
    const bool bf16 = c.q.dtype == DType::BF16;
    uint32_t mine = ptx::shared_address(smem.v[warp][matrix % 2][kBlocks == 2 ? matrix / 2 * 8 + lane % 8 : lane % 8]);
    uint32_t v[2 * kBlocks], high[2 * kBlocks], low[2 * kBlocks];
    if constexpr (kBlocks == 2)
        ptx::ldmatrix_x4_trans(v, mine);
    else
        ptx::ldmatrix_x2_trans(v, mine);
    float w[kBlocks][4], out[kBlocks][4], probe = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int t = 8 * block + 2 * q + e % 2;
            float4 factor = smem.factor[t];
            uint16_t bits = static_cast<uint16_t>(v[2 * block + e / 2] >> 16 * (e % 2));
            float x = factor.x * (bf16 ? wide<true>(bits) : wide<false>(bits)) - factor.y * z[4 * block + e];
            w[block][e] = t < tokens ? x : 0.0f;
            probe = fmaf(w[block][e], 0.0f, probe);
            out[block][e] = factor.z * z[4 * (kBlocks + block) + e];
        }
    // A sum over all tokens: what is no number must not reach the tokens before its own.
    int first[2] = {C::R, C::R};
    bool broken = __any_sync(0xffffffffu, !(probe == 0.0f));
    if (broken) {
#pragma unroll
        for (int block = kBlocks - 1; block >= 0; --block)
#pragma unroll
            for (int e = 3; e >= 0; --e)
                if (!(w[block][e] * 0.0f == 0.0f)) first[e / 2] = 8 * block + 2 * q + e % 2, w[block][e] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {
                int other = __shfl_xor_sync(0xffffffffu, first[r], mask);
                first[r] = other < first[r] ? other : first[r];
            }
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        Terms terms(w[i / 2][i % 2 * 2], w[i / 2][i % 2 * 2 + 1]);
        high[i] = terms.high, low[i] = terms.low;
    }
    if constexpr (kBlocks == 2) {
        uint32_t at = ptx::shared_address(smem.p[0][matrix % 2][matrix / 2 * 8 + lane % 8]), of[4], rest[4];
        ptx::ldmatrix_x4(of, at);
        ptx::ldmatrix_x4(rest, at + sizeof smem.p[0]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            ptx::mma_m16n8k16<__nv_bfloat16>(out[j], high, of[2 * j], of[2 * j + 1]);
            ptx::mma_m16n8k16<__nv_bfloat16>(out[j], low, of[2 * j], of[2 * j + 1]);
            ptx::mma_m16n8k16<__nv_bfloat16>(out[j], high, rest[2 * j], rest[2 * j + 1]);
        }
    } else {
        uint32_t of[2];
        ptx::ldmatrix_x2(of, ptx::shared_address(smem.p[matrix % 2][0][lane % 8]));
        ptx::mma_m16n8k8<__nv_bfloat16>(out[0], high, of[0]);
        ptx::mma_m16n8k8<__nv_bfloat16>(out[0], low, of[0]);
        ptx::mma_m16n8k8<__nv_bfloat16>(out[0], high, of[1]);
    }
    if (broken)
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * block + 2 * q + e % 2 >= first[e / 2]) out[block][e] = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        float a = out[i / 2][i % 2 * 2], b = out[i / 2][i % 2 * 2 + 1];
        v[i] = bf16 ? ptx::cvt_rn_bf16x2(a, b) : ptx::cvt_rn_f16x2(a, b);
    }
    __syncwarp();
    if constexpr (kBlocks == 2)
        ptx::stmatrix_x4_trans(mine, v);
    else
        ptx::stmatrix_x2_trans(mine, v);
    __syncwarp();
    if (int t = lane / 2; t < tokens)
        *reinterpret_cast<uint4 *>(o + uint64_t{p.o.token} * t + 32 * warp + 16 * (lane % 2)) =
            *reinterpret_cast<const uint4 *>(smem.v[warp][lane % 2][t]);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_verify_bf16_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char smem_bytes[];
    Bf16Smem<C> &smem = *reinterpret_cast<Bf16Smem<C> *>(smem_bytes);
    const uint32_t n = blockIdx.y, head = blockIdx.x / C::kSlices, v_cta = blockIdx.x % C::kSlices * C::kWidth;
    const uint32_t role = (threadIdx.x / 32 + blockIdx.x) % C::kWarps;  // not of the same warp in every CTA
    Choices c(p.options, p.lower_bound);
    auto read_row = [&](uint32_t of) {
        return p.read ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, of) : Row(of);
    };
    Row row = read_row(n);
    copy_draft(p, c, smem, n, head, v_cta);
    PairGate<C> gate;
    gate.fetch(p, c, head);
    uint32_t beta_bits = 0;
    if (lane_of() % C::R < p.tokens) beta_bits = c.beta.load(p.beta.at(n, lane_of() % C::R, head));
    char *o = p.o.at(n, 0, head) + 2 * v_cta;
    if (!row.within(p.rows)) {
#pragma unroll 1
        for (uint32_t t = 0; t < p.tokens; ++t)
            if (threadIdx.x < C::kWidth) reinterpret_cast<uint16_t *>(o + uint64_t{p.o.token} * t)[threadIdx.x] = 0;
        ptx::cp_async_wait_group<0>();
        return;
    }
    char *of_head = p.state + uint64_t{head} * p.state_head;
    copy_state(smem, of_head + uint64_t{row.low} * p.state_row + v_cta * (C::kVFirst ? 2 * C::D : 2));
    if (p.ahead && threadIdx.x == C::kThreads - 1 && n + p.ahead < gridDim.y)
        if (Row next = read_row(n + p.ahead); next.within(p.rows))
            ptx::cp_async_bulk_prefetch(of_head + uint64_t{next.low} * p.state_row, C::D * C::D * 2);
    ptx::cp_async_wait_group<1>();
    __syncwarp();
    prepare_draft(p, c, smem, gate);
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    float z[C::R];
    {
        uint32_t state = ptx::shared_address(smem.S[threadIdx.x / 128]), x = ptx::shared_address(smem.x[0]);
        ptx::wgmma_fence();
#pragma unroll
        for (int term = 0; term < 2; ++term)
#pragma unroll
            for (int s = 0; s < C::D / 16; ++s) {
                uint64_t left = C::kVFirst ? ptx::wgmma_descriptor(C::S::k_major_low(state, 0, 16 * s), C::S::k_major_high())
                                           : ptx::wgmma_descriptor(C::S::mn_major_low(state, 16 * s, 0), C::S::mn_major_high());
                uint64_t right =
                    ptx::wgmma_descriptor(C::X::k_major_low(x + term * C::X::kBytes, 0, 16 * s), C::X::k_major_high());
                constexpr ptx::Major kLeft = C::kVFirst ? ptx::Major::K : ptx::Major::MN;
                if (term == 0 && s == 0)
                    ptx::wgmma_ss_first<__nv_bfloat16, kLeft, ptx::Major::K>(z, left, right);
                else
                    ptx::wgmma_ss<__nv_bfloat16, kLeft, ptx::Major::K>(z, left, right, true);
            }
        ptx::wgmma_commit_group();
    }
    constexpr uint32_t kTiles = C::R / 8;
    if (role <= kTiles) {
        float norm = norm_of_lane(c, smem), beta = lane_of() % C::R < p.tokens ? beta_value(c, beta_bits) : 0.0f;
        if (role < kTiles) {
            multiply_draft(p, smem, role, norm, beta);
            if constexpr (kTiles == 2)
                ptx::bar_sync(1, 64);
            else
                __syncwarp();
            if (role == 0) solve_draft(smem);
        } else {
            float of_q = __shfl_sync(0xffffffffu, norm, (lane_of() + C::R) % 32), decay = ptx::ex2_approx_ftz(middle(p));
            if (lane_of() < C::R) smem.factor[lane_of()] = make_float4(beta, beta * norm * decay, p.scale * of_q * decay, 0.0f);
        }
    }
    ptx::wgmma_wait_group<0>();
    ptx::register_fence(z);
    __syncthreads();
    finish_columns(p, c, smem, z, o);
}

}  // namespace linattn::cuda::delta_verify
