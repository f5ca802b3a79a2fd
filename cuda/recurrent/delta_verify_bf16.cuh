// Verify for its outputs alone (delta_verify.cuh has the equations) of states in bf16: products in bf16, KDA's K^ and Q^ and f16
// inputs in two terms each.
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
// Schedule:  copies of tokens and state . gates, norms, X, Y, X Y^T over the warp's channels . barrier . X S begins; A, Q; a warp:
//            factors . barrier . a warp: P; all: W . barrier . O
#pragma once
#include "common/device_guard.h"
#include "common/swizzle.cuh"
#include "common/tensor_map.h"
#include "ptx/mbarrier.cuh"
#include "verify_tokens.cuh"

namespace linattn::cuda::delta_verify {

template <bool kKdaGate, bool kVFirstOrder, int kMostTokens, int kTermsOfX, int kColumns, int kTilesOfWarp, int kCtas>
struct Bf16Config {
    static constexpr int D = 128, R = kMostTokens, kTerms = kTermsOfX, kWidth = kColumns, kResident = kCtas;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder, kBf16Products = true;
    static constexpr bool kTma = kWidth == D;  // many states
    using State = __nv_bfloat16;
    static constexpr int kTiles = kTilesOfWarp;  // of 16 columns of V, of a warp
    static constexpr int kWarps = kWidth / 16 / kTiles, kThreads = 32 * kWarps, kSlices = D / kWidth;
    static constexpr int kUnits = D / 16 / kWarps;  // of 16 channels, of a warp
    static constexpr int kGroup = R / 4;            // tokens of a lane
    using X = SmemTile<2 * R * kTerms, D, ptx::Swizzle::B128>;  // of each term: rows of k, rows of q
    using Y = SmemTile<R, D, ptx::Swizzle::B128>;
    using V = SmemTile<R, kWidth, ptx::Swizzle::B128>;
    using S = SmemTile<kVFirst ? 64 : D, kVFirst ? D : 64, ptx::Swizzle::B128>;  // of a warpgroup
    static constexpr int kLow = 2 * R * 128;  // bytes from a number's high term to its low one
    static_assert(R == 8 || kWarps == 4, "sums of products are of four warps' channels");
};

template <class C>
struct Bf16Smem {
    alignas(1024) char S[C::kWidth / 64][C::S::kBytes];
    char x[C::X::kBytes];                          // as copied: q and k in the high term, g in the low one
    char y[C::kKda ? 2 * C::Y::kBytes : 0];        // terms of k_j / E_j; GDN has k itself
    char v[C::V::kBytes];                          // then o
    alignas(16) float A[C::R][C::R + 4], Q[C::R][C::R + 4];
    union {
        alignas(16) float product[C::R == 16 ? 4 : 8][2 * C::R][C::R];  // of the channels of a warp (R = 8: 16 channels)
        alignas(16) uint16_t p[2][C::R / 8][C::R][8];                   // then terms of P, [j / 8][i][j % 8]
    };
    float square[8][2 * C::R];                     // of 16 channels of the rows of k and q
    float4 factor[C::R];                           // of v and k S in W; of q S and of Q in o
    alignas(16) float c[C::R], G[C::kKda ? 4 : C::R];
    uint64_t arrived[3];                           // many states
};

// Boxes of 64 numbers (f32 gates: 32) of all tokens of a head, of the state's rows in a panel.
struct Maps {
    CUtensorMap q, k, v, g, state;
};

__device__ __forceinline__ uint32_t lane_of() { return threadIdx.x % 32; }

// f32 gates lie in boxes of 32 channels: in the low term of k, then of q, of one panel. Where a unit of 16 begins.
template <class C>
__device__ __forceinline__ uint32_t f32_gate_offset(int unit, int token, int chunk) {
    return C::X::offset(2 * C::R + unit / 2 % 2 * C::R + token, 64 * (unit / 4) + 32 * (unit % 2) + 8 * chunk);
}

// Few states: by each warp its channels of k, q and g, and its columns of v. Rows past the tokens are zero.
template <class C>
__device__ __forceinline__ void copy_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, uint32_t n, uint32_t head,
                                           uint32_t v_cta) {
    uint32_t key = head * p.key_of >> 16, lane = lane_of(), warp = threadIdx.x / 32, part = lane % 2;
    uint32_t x = ptx::shared_address(smem.x);
    bool f32 = C::kKda && c.g.dtype == DType::F32;
#pragma unroll
    for (uint32_t first = 0; first < 2 * C::R; first += 16) {
        uint32_t row = first + lane / 2, half = row / C::R, to_t = row % C::R, bytes = to_t < p.tokens ? 16 : 0;
        uint32_t t = bytes ? to_t : 0;
        const char *from = half == 0 ? p.k.at(n, t, key) : p.q.at(n, t, key);
#pragma unroll
        for (int i = 0; i < C::kUnits; ++i) {
            uint32_t unit = warp + i * C::kWarps;
            ptx::cp_async_16_zfill(x + C::X::offset(row, 16 * unit + 8 * part), from + 32 * unit + 16 * part, bytes);
            if (!C::kKda) continue;
            const char *g = p.g.at(n, t, head);
            if (f32)
                ptx::cp_async_16_zfill(x + f32_gate_offset<C>(unit, to_t, 2 * half + part),
                                       g + 64 * unit + 32 * half + 16 * part, bytes);
            else if (half == 0)
                ptx::cp_async_16_zfill(x + C::X::offset(row, 16 * unit + 8 * part) + C::kLow, g + 32 * unit + 16 * part, bytes);
        }
        if (half == 0)
            ptx::cp_async_16_zfill(ptx::shared_address(smem.v) + C::V::offset(to_t, 16 * warp + 8 * part),
                                   p.v.at(n, t, head) + 2 * v_cta + 32 * warp + 16 * part, bytes);
    }
    ptx::cp_async_commit_group();
}

template <class C>
__device__ __forceinline__ void copy_state(Bf16Smem<C> &smem, const char *state) {  // of the CTA's first column
    constexpr int kRowChunks = C::kVFirst ? C::D / 8 : C::kWidth / 8, kRows = C::kThreads / kRowChunks;
    uint32_t chunk = threadIdx.x % kRowChunks, row = threadIdx.x / kRowChunks;
    uint32_t to = ptx::shared_address(smem.S) + C::S::offset(row, 8 * chunk);
    const char *from = state + 2 * C::D * row + 16 * chunk;
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::cp_async_16(to + i * kRows * 128, from + 2 * C::D * kRows * i);
    ptx::cp_async_commit_group();
}

// Many states: by one thread of each of three warps, boxes that land where the few states' copies do; rows past the tokens are
// zero. Barriers: q and k; g and v; the state.
enum Arrival { kKeys, kValues, kState, kArrivals };

template <class C>
__device__ __forceinline__ void load_keys(const Params &p, const Maps &maps, Bf16Smem<C> &smem, int n, int head) {
    const uint32_t barrier = ptx::shared_address(&smem.arrived[kKeys]), x = ptx::shared_address(smem.x);
    const int key = head * p.key_of >> 16;
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * C::R * 256);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
        uint32_t to = x + panel * C::X::kPanelStrideBytes;
        ptx::cp_async_bulk_tensor_4d_load(to, &maps.k, barrier, 64 * panel, key, 0, n);
        ptx::cp_async_bulk_tensor_4d_load(to + C::R * 128, &maps.q, barrier, 64 * panel, key, 0, n);
    }
}

template <class C>
__device__ __forceinline__ void load_values(const Choices &c, const Maps &maps, Bf16Smem<C> &smem, int n, int head) {
    const uint32_t barrier = ptx::shared_address(&smem.arrived[kValues]), x = ptx::shared_address(smem.x) + C::kLow,
                   v = ptx::shared_address(smem.v);
    const bool f32 = C::kKda && c.g.dtype == DType::F32;
    ptx::mbarrier_arrive_expect_tx(barrier, C::R * 256 * (C::kKda ? f32 ? 3 : 2 : 1));
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
        if constexpr (C::kKda) {
            uint32_t to = x + panel * C::X::kPanelStrideBytes;
            ptx::cp_async_bulk_tensor_4d_load(to, &maps.g, barrier, 64 * panel, head, 0, n);
            if (f32) ptx::cp_async_bulk_tensor_4d_load(to + C::R * 128, &maps.g, barrier, 64 * panel + 32, head, 0, n);
        }
        ptx::cp_async_bulk_tensor_4d_load(v + panel * C::V::kPanelStrideBytes, &maps.v, barrier, 64 * panel, head, 0, n);
    }
}

template <class C>
__device__ __forceinline__ void load_state(const Maps &maps, Bf16Smem<C> &smem, int row, int head) {
    const uint32_t barrier = ptx::shared_address(&smem.arrived[kState]), to = ptx::shared_address(smem.S);
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * C::D * C::D);
#pragma unroll
    for (int i = 0; i < (C::kVFirst ? 4 : 2); ++i)
        ptx::cp_async_bulk_tensor_4d_load(to + i * C::S::kPanelStrideBytes, &maps.state, barrier,
                                          C::kVFirst ? 64 * (i % 2) : 64 * i, head, C::kVFirst ? 64 * (i / 2) : 0, row);
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
        if constexpr (C::kKda) {
#pragma unroll
            for (int i = 0; i < C::kUnits; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) bias[i][e] = c.dt_bias.load(p.dt_bias.at(head), channel(i) + e);
        } else {
            bias[0][0] = c.dt_bias.load(p.dt_bias.at(head));
        }
    }
};

__device__ __forceinline__ float value_of(const Known &of, uint32_t bits) {
    float x = __uint_as_float(of.dtype == DType::F32 ? bits : bits << 16);
    return of.dtype == DType::F16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits))) : x;
}

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
    uint32_t x = ptx::shared_address(smem.x) + C::X::block16_offset(0, 16 * unit, lane_of());
#pragma unroll
    for (int first = 0; first < 2 * C::R; first += 16) {
        uint32_t a[4];
        float low[4] = {}, high[4] = {};
        ptx::ldmatrix_x4(a, x + 128 * first);
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
    char *x = smem.x, *y = smem.y;
    // Rows of a group begin at a multiple of kGroup: a row in it is an exclusive or of its place and of its swizzle at once.
    constexpr uint32_t kNextRow = 128 | 16;
    float slope = -kLog2e, bound = kLog2e * p.lower_bound;
    if (c.A_log) slope *= fminf(ptx::ex2_approx_ftz(kLog2e * value_of(c.A_log, gate.a_log)), 1e30f);
    float G[C::kUnits][C::kGroup][2];
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i) {
        int channel = gate.channel(i), unit = channel / 16;
        float total[2] = {0.0f, 0.0f}, offset[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) offset[e] = c.dt_bias ? slope * value_of(c.dt_bias, gate.bias[i][e]) : 0.0f;
#pragma unroll
        for (int t = 0; t < C::kGroup; ++t) {
            float z[2];
            if constexpr (kF32Gate) {
                float2 two = *reinterpret_cast<const float2 *>(x + (f32_gate_offset<C>(unit, first, pair / 2) + pair % 2 * 8 ^ t * kNextRow));
                z[0] = two.x, z[1] = two.y;
            } else {
                uint32_t two = *reinterpret_cast<const uint32_t *>(x + (C::X::offset(first, channel) ^ t * kNextRow) + C::kLow);
                z[0] = wide<kBf16>(two & 0xffffu), z[1] = wide<kBf16>(two >> 16);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                G[i][t][e] = total[e] =
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
            for (int t = 0; t < C::kGroup; ++t) G[i][t][e] += below;
            if constexpr (C::kGroup == 4)  // an order of tokens without bank conflicts
                if (group & 2) {
                    float other = G[i][0][e];
                    G[i][0][e] = G[i][2][e], G[i][2][e] = other, other = G[i][1][e];
                    G[i][1][e] = G[i][3][e], G[i][3][e] = other;
                }
        }
        square_rows<C, T>(smem, unit);
    }
    if constexpr (kF32Gate)
        __syncthreads();  // other warps' gates lie where terms go
    else
        __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i)
#pragma unroll
        for (int t = 0; t < C::kGroup; ++t) {
            const int channel = gate.channel(i), start = C::kGroup == 4 ? first ^ (group & 2) : first;
            char *of_k = x + (C::X::offset(start, channel) ^ t * kNextRow), *of_q = of_k + C::R * 128;
            uint32_t k = *reinterpret_cast<const uint32_t *>(of_k), q = *reinterpret_cast<const uint32_t *>(of_q);
            float E[2], inverse[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) E[e] = ptx::ex2_approx_ftz(G[i][t][e]), inverse[e] = ptx::ex2_approx_ftz(-G[i][t][e]);
            float k0 = wide<kBf16>(k & 0xffffu), k1 = wide<kBf16>(k >> 16);
            auto store = [&](char *to, uint32_t low, float a, float b) {
                Terms terms(a, b);
                *reinterpret_cast<uint32_t *>(to) = terms.high;
                *reinterpret_cast<uint32_t *>(to + low) = terms.low;
            };
            store(of_k, C::kLow, __fmul_rn(k0, E[0]), __fmul_rn(k1, E[1]));
            store(of_q, C::kLow, __fmul_rn(wide<kBf16>(q & 0xffffu), E[0]), __fmul_rn(wide<kBf16>(q >> 16), E[1]));
            store(y + (C::Y::offset(start, channel) ^ t * kNextRow), C::Y::kBytes, __fmul_rn(k0, inverse[0]), __fmul_rn(k1, inverse[1]));
        }
}

// GDN: q and k as they are; f16 to two terms.
template <class C>
__device__ __forceinline__ void prepare_plain(Bf16Smem<C> &smem) {
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i) {
        int unit = threadIdx.x / 32 + i * C::kWarps;
        if constexpr (C::kTerms == 1) {
            square_rows<C, __nv_bfloat16>(smem, unit);
        } else {
            square_rows<C, __half>(smem, unit);
            __syncwarp();
#pragma unroll
            for (int row = lane_of() / 8; row < 2 * C::R; row += 4) {
                auto *at = reinterpret_cast<uint32_t *>(smem.x + C::X::offset(row, 16 * unit + 2 * (lane_of() % 8)));
                Terms terms(wide<false>(*at & 0xffffu), wide<false>(*at >> 16));
                at[0] = terms.high, at[C::kLow / 4] = terms.low;
            }
        }
    }
}

template <class C>
__device__ __forceinline__ void prepare_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, const PairGate<C> &gate) {
    bool bf16 = c.q.dtype == DType::BF16;
    if constexpr (!C::kKda)
        prepare_plain(smem);
    else if (c.g.dtype == DType::F32)
        bf16 ? prepare_pairs<C, true, true>(p, c, smem, gate) : prepare_pairs<C, false, true>(p, c, smem, gate);
    else
        bf16 ? prepare_pairs<C, true, false>(p, c, smem, gate) : prepare_pairs<C, false, false>(p, c, smem, gate);
}

// The warp's part of the products of tokens: rows of k and q by rows of Y, over its channels.
template <class C>
__device__ __forceinline__ void multiply_draft(Bf16Smem<C> &smem) {
    using Y = std::conditional_t<C::kKda, typename C::Y, typename C::X>;
    constexpr int kLowY = C::kKda ? C::Y::kBytes : C::kLow, kBlocks = C::R / 8;
    const int lane = lane_of(), g = lane / 4, c = lane % 4, warp = threadIdx.x / 32;
    float sum[kBlocks][kBlocks][2][4];
#pragma unroll
    for (int unit = 0; unit < C::kUnits; ++unit) {
        const int channel = 16 * (warp + unit * C::kWarps);
        uint32_t x = ptx::shared_address(smem.x) + C::X::block16_offset(0, channel, lane), yh[4], yl[4];
        uint32_t y = ptx::shared_address(C::kKda ? smem.y : smem.x);
        if constexpr (C::R == 16) {
            y += Y::block16_offset(0, channel, lane);
            ptx::ldmatrix_x4(yh, y);
            if constexpr (C::kTerms == 2) ptx::ldmatrix_x4(yl, y + kLowY);
        } else {
            y += (C::kTerms == 2 ? lane / 16 * kLowY : 0) + Y::offset(lane % 8, channel + lane / 8 % 2 * 8);
            ptx::ldmatrix_x4(yh, y);
            yl[0] = yh[2], yl[2] = yh[3], yh[2] = yh[1];
        }
#pragma unroll
        for (int tile = 0; tile < kBlocks; ++tile) {
            uint32_t xh[4], xl[4];
            ptx::ldmatrix_x4(xh, x + 16 * 128 * tile);
            if constexpr (C::kTerms == 2) ptx::ldmatrix_x4(xl, x + 16 * 128 * tile + C::kLow);
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) {
                if (unit == 0 || C::R == 8)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[tile][j][0][e] = sum[tile][j][1][e] = 0.0f;
                ptx::mma_m16n8k16<__nv_bfloat16>(sum[tile][j][0], xh, yh[j], yh[j + 2]);
                if constexpr (C::kTerms == 2) {
                    ptx::mma_m16n8k16<__nv_bfloat16>(sum[tile][j][1], xl, yh[j], yh[j + 2]);
                    ptx::mma_m16n8k16<__nv_bfloat16>(sum[tile][j][1], xh, yl[j], yl[j + 2]);
                }
            }
        }
        if (C::R == 16 && unit < C::kUnits - 1) continue;
#pragma unroll
        for (int tile = 0; tile < kBlocks; ++tile)
#pragma unroll
            for (int j = 0; j < kBlocks; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float(&of)[2][4] = sum[tile][j];
                    *reinterpret_cast<float2 *>(
                        &smem.product[C::R == 16 ? warp : channel / 16][16 * tile + 8 * half + g][8 * j + 2 * c]) =
                        make_float2(of[0][2 * half] + of[1][2 * half], of[0][2 * half + 1] + of[1][2 * half + 1]);
                }
    }
}

// A / (beta |k_i| |k_j|) and Q / (scale |q_i| |k_j|) from the parts: four of a row a thread.
template <class C>
__device__ __forceinline__ void sum_products(Bf16Smem<C> &smem) {
    constexpr int kInRow = C::R / 4, kParts = C::R == 16 ? 4 : 8;
    if (threadIdx.x >= 2 * C::R * kInRow) return;
    const int row = threadIdx.x / kInRow, j = threadIdx.x % kInRow * 4, of_q = row / C::R, i = row % C::R;
    float x[4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        float4 four = *reinterpret_cast<const float4 *>(&smem.product[part][row][j]);
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if constexpr (!C::kKda) x[e] *= ptx::ex2_approx_ftz(smem.G[i] - smem.G[j + e]);
        // A token that is no number has W that is none: begin_columns() sees to it, in A it would spoil earlier ones.
        if (j + e >= i + of_q || (!of_q && !(x[e] * 0.0f == 0.0f))) x[e] = 0.0f;
    }
    *reinterpret_cast<float4 *>(&(of_q ? smem.Q : smem.A)[i][j]) = make_float4(x[0], x[1], x[2], x[3]);
}

// By one warp: what the norms, beta, scale and GDN's decays come to. With N = 1 / |k|: W' = N W, and P' (I + c A) = Q, c = N^2 beta.
template <class C>
__device__ __forceinline__ void scale_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, float beta) {
    const int lane = lane_of();
    float sum = 0.0f, norm = 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += smem.square[i][lane % (2 * C::R)];
    if (c.qk_l2norm) norm = rsqrtf(sum + 1e-6f);
    float of_q = p.scale * __shfl_sync(0xffffffffu, norm, (lane + C::R) % 32);
    if (lane >= C::R) return;
    float decay = ptx::ex2_approx_ftz(C::kKda ? middle(p) : smem.G[C::kKda ? 0 : lane]), of_v = beta * norm, of_a = of_v * norm;
    smem.factor[lane] = make_float4(of_v, of_a * decay, of_q * decay, of_q);
    smem.c[lane] = of_a * 0.0f == 0.0f ? of_a : 0.0f;
}

// P (I + c A) = Q, a lane a row.
template <class C>
__device__ __forceinline__ void solve_draft(Bf16Smem<C> &smem) {
    const int i = lane_of();
    if (i >= C::R) return;
    float row[C::R], c[C::R], scale = smem.factor[i].w;
    auto fetch = [](float *to, const float *from) {
        float4 four = *reinterpret_cast<const float4 *>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    };
#pragma unroll
    for (int j = 0; j < C::R; j += 4) fetch(&row[j], &smem.Q[i][j]), fetch(&c[j], &smem.c[j]);
#pragma unroll
    for (int l = C::R - 1; l > 0; --l) {
        float x = -__fmul_rn(row[l], c[l]);
#pragma unroll
        for (int j = 0; j < l; j += 4) {
            float a[4];
            fetch(a, &smem.A[l][j]);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j + e < l) row[j + e] = fmaf(x, a[e], row[j + e]);
        }
    }
#pragma unroll
    for (int j = 0; j < C::R; j += 8) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            Terms terms(__fmul_rn(scale, row[j + 2 * e]), __fmul_rn(scale, row[j + 2 * e + 1]));
            high[e] = terms.high, low[e] = terms.low;
        }
        *reinterpret_cast<uint4 *>(smem.p[0][j / 8][i]) = make_uint4(high[0], high[1], high[2], high[3]);
        *reinterpret_cast<uint4 *>(smem.p[1][j / 8][i]) = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// 16 columns of the warp: W, and o as far as it is of the state.
template <class C>
struct Columns {
    static constexpr int kBlocks = C::R / 8;
    uint32_t high[2 * kBlocks], low[2 * kBlocks];  // of W
    float out[kBlocks][4];
    int first[2];  // token that is no number, of the lane's two columns
    bool broken;

    static __device__ __forceinline__ uint32_t place(Bf16Smem<C> &smem, int columns) {
        const int lane = lane_of(), matrix = lane / 8;
        return ptx::shared_address(smem.v) +
               C::V::offset(kBlocks == 2 ? matrix / 2 * 8 + lane % 8 : lane % 8, columns + 8 * (matrix % 2));
    }

    __device__ __forceinline__ void begin(const Choices &c, Bf16Smem<C> &smem, const float (&z)[C::R * C::kTerms], int columns) {
        const int q = lane_of() % 4;
        const bool bf16 = c.q.dtype == DType::BF16;
        auto sum_of_terms = [&](int i) { return C::kTerms == 2 ? z[i] + z[C::R + i] : z[i]; };
        uint32_t v[2 * kBlocks];
        if constexpr (kBlocks == 2)
            ptx::ldmatrix_x4_trans(v, place(smem, columns));
        else
            ptx::ldmatrix_x2_trans(v, place(smem, columns));
        float w[kBlocks][4], probe = 0.0f;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float4 factor = smem.factor[8 * block + 2 * q + e % 2];
                uint16_t bits = static_cast<uint16_t>(v[2 * block + e / 2] >> 16 * (e % 2));
                w[block][e] = fmaf(factor.x, bf16 ? wide<true>(bits) : wide<false>(bits),
                                   -__fmul_rn(factor.y, sum_of_terms(4 * block + e)));
                probe = fmaf(w[block][e], 0.0f, probe);
                out[block][e] = factor.z * sum_of_terms(4 * (kBlocks + block) + e);
            }
        // What follows sums over all tokens: what is no number must not reach the tokens before its own.
        first[0] = first[1] = C::R;
        broken = __any_sync(0xffffffffu, !(probe == 0.0f));
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
    }

    // o = .. + P W, to memory.
    __device__ __forceinline__ void end(const Params &p, const Choices &c, Bf16Smem<C> &smem, int columns, char *o) {
        const int lane = lane_of(), q = lane % 4, matrix = lane / 8, tokens = static_cast<int>(p.tokens);
        const bool bf16 = c.q.dtype == DType::BF16;
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
        uint32_t words[2 * kBlocks];
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            float a = out[i / 2][i % 2 * 2], b = out[i / 2][i % 2 * 2 + 1];
            words[i] = bf16 ? ptx::cvt_rn_bf16x2(a, b) : ptx::cvt_rn_f16x2(a, b);
        }
        if constexpr (kBlocks == 2)
            ptx::stmatrix_x4_trans(place(smem, columns), words);
        else
            ptx::stmatrix_x2_trans(place(smem, columns), words);
        __syncwarp();
        if (int t = lane / 2; t < tokens)
            *reinterpret_cast<uint4 *>(o + uint64_t{p.o.token} * t + 2 * columns + 16 * (lane % 2)) =
                *reinterpret_cast<const uint4 *>(smem.v + C::V::offset(t, columns + 8 * (lane % 2)));
    }
};

template <class C>
__device__ __forceinline__ void verify_draft(const Params &p, const Maps *maps, Bf16Smem<C> &smem) {
    const uint32_t n = blockIdx.y, head = blockIdx.x / C::kSlices, v_cta = blockIdx.x % C::kSlices * C::kWidth;
    const uint32_t role = (threadIdx.x / 32 + blockIdx.x) % C::kWarps;  // not of the same warp in every CTA
    Choices c(p.options, p.lower_bound);
    const Row row = p.read ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, n) : Row(n);
    if constexpr (C::kTma) {
        const uint32_t loads = threadIdx.x / 32;
        if (loads < kArrivals && lane_of() == 0) {
            ptx::mbarrier_init(ptx::shared_address(&smem.arrived[loads]), 1);
            ptx::fence_mbarrier_init();
            if (loads == kKeys)
                load_keys(p, *maps, smem, n, head);
            else if (loads == kValues)
                load_values(c, *maps, smem, n, head);
            else if (row.within(p.rows))
                load_state(*maps, smem, row.low, head);
        }
        __syncwarp();
    } else {
        copy_draft(p, c, smem, n, head, v_cta);
    }
    PairGate<C> gate;
    const bool token = lane_of() < p.tokens;
    uint32_t beta_bits = 0, g_bits = 0;
    if (C::kKda || role == 0) gate.fetch(p, c, head);
    if (role == 1 && token) beta_bits = c.beta.load(p.beta.at(n, lane_of(), head));
    if (!C::kKda && role == 0 && token) g_bits = c.g.load(p.g.at(n, lane_of(), head));
    char *o = p.o.at(n, 0, head) + 2 * v_cta;
    if constexpr (C::kTma) {
        __syncthreads();
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.arrived[kKeys]), 0);
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.arrived[kValues]), 0);
    }
    if (!row.within(p.rows)) {
#pragma unroll 1
        for (uint32_t t = 0; t < p.tokens; ++t)
            if (threadIdx.x < C::kWidth) reinterpret_cast<uint16_t *>(o + uint64_t{p.o.token} * t)[threadIdx.x] = 0;
        if constexpr (!C::kTma) ptx::cp_async_wait_group<0>();
        return;
    }
    if constexpr (!C::kTma) {
        copy_state(smem, p.state + uint64_t{head} * p.state_head + uint64_t{row.low} * p.state_row +
                             v_cta * (C::kVFirst ? 2 * C::D : 2));
        ptx::cp_async_wait_group<1>();
        if (C::kKda && c.g.dtype == DType::F32)
            __syncthreads();
        else
            __syncwarp();
    }
    prepare_draft(p, c, smem, gate);
    __syncwarp();
    multiply_draft(smem);
    if constexpr (!C::kKda)
        if (role == 0) {
            float G = decays_so_far<C::R>(c, token, g_bits, gate.bias[0][0], gate.a_log);
            if (lane_of() < C::R) smem.G[lane_of()] = G;
        }
    if constexpr (C::kTma)
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.arrived[kState]), 0);
    else
        ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    const int wide_tile = threadIdx.x / 128 * C::kTiles;  // of 64 columns, the first of the warpgroup
    float z[C::kTiles][C::R * C::kTerms];
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
        uint32_t state = ptx::shared_address(smem.S[wide_tile + m]), x = ptx::shared_address(smem.x);
#pragma unroll
        for (int s = 0; s < C::D / 16; ++s) {
            uint64_t left = C::kVFirst ? ptx::wgmma_descriptor(C::S::k_major_low(state, 0, 16 * s), C::S::k_major_high())
                                       : ptx::wgmma_descriptor(C::S::mn_major_low(state, 16 * s, 0), C::S::mn_major_high());
            uint64_t right = ptx::wgmma_descriptor(C::X::k_major_low(x, 0, 16 * s), C::X::k_major_high());
            constexpr ptx::Major kLeft = C::kVFirst ? ptx::Major::K : ptx::Major::MN;
            if (s == 0)
                ptx::wgmma_ss_first<__nv_bfloat16, kLeft, ptx::Major::K>(z[m], left, right);
            else
                ptx::wgmma_ss<__nv_bfloat16, kLeft, ptx::Major::K>(z[m], left, right, true);
        }
    }
    ptx::wgmma_commit_group();
    sum_products(smem);
    if (role == 1) scale_draft(p, c, smem, token ? beta_value(c, beta_bits) : 0.0f);
    __syncthreads();
    if (role == 0) solve_draft(smem);
    ptx::wgmma_wait_group<0>();
    Columns<C> columns[C::kTiles];
    auto first_column = [&](int m) { return 64 * (wide_tile + m) + 16 * static_cast<int>(threadIdx.x / 32 % 4); };
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
        ptx::register_fence(z[m]);
        columns[m].begin(c, smem, z[m], first_column(m));
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) columns[m].end(p, c, smem, first_column(m), o);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_verify_few_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char smem_bytes[];
    verify_draft<C>(p, nullptr, *reinterpret_cast<Bf16Smem<C> *>(smem_bytes));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    delta_verify_many_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    verify_draft<C>(p, &maps, *reinterpret_cast<Bf16Smem<C> *>(smem_bytes));
}

// Whether TMA can address all that the form for many states loads by it.
inline bool boxes_fit(const DeltaParams &p) {
    auto fits = [&](const Tensor &t, int64_t heads) { return tma_fits(t, p.N, p.T, heads); };
    const int64_t *stride = p.state_in.stride;
    bool state = reinterpret_cast<uintptr_t>(p.state_in.data) % 16 == 0 && stride[0] % 8 == 0 && stride[1] % 8 == 0 &&
                 (stride[0] > 0 || p.P <= 1) && (stride[1] > 0 || p.HV == 1) && p.P >= 1;
    return state && fits(p.q, p.H) && fits(p.k, p.H) && fits(p.v, p.HV) && (p.family == Family::Gdn || fits(p.g, p.HV));
}

template <class C>
Maps maps_of(const DeltaParams &p) {
    auto map = [&](const char *name, const Tensor &t, int64_t heads) {
        return make_tile_map(name, t, p.N, p.T, heads, C::D, C::R, 128 / dtype_bytes(t.dtype));
    };
    Maps maps = {map("q", p.q, p.H), map("k", p.k, p.H), map("v", p.v, p.HV), {}, {}};
    if (C::kKda) maps.g = map("g", p.g, p.HV);
    maps.state = make_tensor_map("state", p.state_in.data, p.state_in.dtype,
                                 {{C::D, 1, 64}, {p.HV, p.state_in.stride[1], 1}, {C::D, C::D, C::S::kRows}, {p.P, p.state_in.stride[0], 1}},
                                 128);
    return maps;
}

}  // namespace linattn::cuda::delta_verify
