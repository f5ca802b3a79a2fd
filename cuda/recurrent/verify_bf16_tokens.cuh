// The tokens of a draft for states in bf16 (delta_verify_bf16.cuh): the copies, GDN's X and products, and from products to P.
// KDA's: verify_bf16_kda.cuh.
#pragma once
#include "common/swizzle.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "verify_tokens.cuh"

namespace linattn::cuda::delta_verify {

// Rows of 128 numbers in blocks of 8, in a block its two panels of 64 columns one after the other: what a box of TMA brings.
template <int kTileRows>
struct BlockTile {
    using Block = SmemTile<8, 128, ptx::Swizzle::B128>;
    static constexpr int kBytes = kTileRows * 256;
    static constexpr __host__ __device__ __forceinline__ uint32_t offset(int row, int col) {
        return static_cast<uint32_t>(row) / 8 * Block::kBytes + Block::offset(static_cast<uint32_t>(row) % 8, col);
    }
    static constexpr __host__ __device__ __forceinline__ uint32_t k_major_low(uint32_t base, int row, int col) {
        return ptx::wgmma_descriptor_low(base + offset(row, col), 16);
    }
    static constexpr __host__ __device__ __forceinline__ uint32_t k_major_high() {
        return ptx::wgmma_descriptor_high(Block::kBytes, Block::kSwizzle);
    }
    static constexpr __host__ __device__ __forceinline__ uint32_t block16_offset(int row, int col, int lane) {
        return offset(row + lane % 16, col + lane / 16 * 8);
    }
};

template <bool kKdaGate, bool kVFirstOrder, int kMostTokens, int kTermsOfX, int kColumns, int kTilesOfWarp, int kCtas>
struct Bf16Config {
    static constexpr int D = 128, R = kMostTokens, kTerms = kTermsOfX, kWidth = kColumns, kResident = kCtas;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder;
    static constexpr bool kTma = kWidth == D;    // many states
    static constexpr int kTiles = kTilesOfWarp;  // of 16 columns of V, of a warp
    static constexpr int kWarps = kWidth / 16 / kTiles, kThreads = 32 * kWarps, kSlices = D / kWidth;
    static constexpr int kUnits = D / 16 / kWarps;            // of 16 channels, of a warp
    static constexpr int kSquares = kKda && R == 16 ? 4 : 8;  // parts of |k|^2 and |q|^2
    using X = BlockTile<2 * R * kTerms>;                      // of each term: rows of k, rows of q
    using V = SmemTile<R, kWidth, ptx::Swizzle::B128>;
    using S = SmemTile<kVFirst ? kWidth : D, kVFirst ? D : kWidth, ptx::Swizzle::B128>;
    static constexpr int kLow = 2 * R * 256;  // bytes from a number's high term to its low one
    static_assert(R == 8 || kWarps == 4, "sums of products are of four warps' channels");
};

template <class C>
struct GdnTriangle {
    alignas(16) float A[C::R][C::R + 4], Q[C::R][C::R + 4];
    union {
        alignas(16) float product[C::R == 16 ? 4 : 8][2 * C::R][C::R];  // of the channels of a warp (R = 8: 16 channels)
        alignas(16) uint16_t p[2][C::R / 8][C::R][8];                   // then terms of P, [j / 8][i][j % 8]
    };
};

template <class C>
struct KdaTriangle {
    union {
        float4 part[C::kWarps - 1][C::R / 8][32];  // of aq, of the channels of each warp but one
        struct {
            alignas(16) float aq[C::R][C::R];              // A, and from the diagonal on Q transposed
            alignas(16) uint16_t p[2][C::R / 8][C::R][8];  // terms of P, [j / 8][i][j % 8]
        };
    };
};

template <class C>
struct Bf16Smem {
    alignas(1024) char S[C::S::kBytes];
    char x[C::X::kBytes];  // as copied: q and k in the high term, g in the low one
    char v[C::V::kBytes];  // then o
    std::conditional_t<C::kKda, KdaTriangle<C>, GdnTriangle<C>> triangle;
    float square[C::kSquares][2 * C::R];  // of the rows of k and q: of 16 channels each, or of a warp's
    float4 factor[C::R];                  // of v and k S in W; of q S and of Q in o
    alignas(16) float c[C::R], G[C::kKda ? 4 : C::R];
    uint64_t arrived[2];  // many states: tokens, state
};

// Boxes of all panels of 64 numbers (f32 gates: 32): of 8 tokens of a head (v: all), of a state.
struct Maps {
    CUtensorMap q, k, v, g, state;
};

// middle(), rounded before anything is added to it: few and many states have to have the same bits, so nothing here is left to be
// fused or not; products that sums take are rounded by name.
__device__ __forceinline__ float center(const Params &p) {
    return __fmul_rn(0.5f * kLog2e * p.lower_bound, static_cast<float>(p.tokens));
}

__device__ __forceinline__ uint32_t lane_of() { return threadIdx.x % 32; }

// f32 gates, in boxes of 8 tokens and 4 panels of 32 channels, fill the low terms of k and q. A chunk of 4 of a unit of 16.
template <class C>
__device__ __forceinline__ uint32_t f32_gate_offset(int unit, int token, int chunk) {
    return C::kLow + token / 8 * 4096 + unit / 2 * 1024 + C::X::offset(token % 8, 32 * (unit % 2) + 8 * chunk);
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

// Many states: by one thread, boxes that land where the few states' copies do; rows past the tokens are zero.
template <class C>
__device__ __forceinline__ void load_draft(const Params &p, const Choices &c, const Maps &maps, Bf16Smem<C> &smem, int n,
                                           int head) {
    const uint32_t barrier = ptx::shared_address(&smem.arrived[0]), x = ptx::shared_address(smem.x),
                   v = ptx::shared_address(smem.v);
    const bool f32 = C::kKda && c.g.dtype == DType::F32;
    const int key = head * p.key_of >> 16;
    ptx::mbarrier_arrive_expect_tx(barrier, C::R * 256 * (C::kKda ? f32 ? 5 : 4 : 3));
#pragma unroll
    for (int first = 0; first < C::R; first += 8) {
        uint32_t to = x + C::X::offset(first, 0);
        ptx::cp_async_bulk_tensor_5d_load(to, &maps.k, barrier, 0, key, first, n, 0);
        ptx::cp_async_bulk_tensor_5d_load(to + C::X::offset(C::R, 0), &maps.q, barrier, 0, key, first, n, 0);
        if constexpr (C::kKda)
            ptx::cp_async_bulk_tensor_5d_load(x + C::kLow + first * (f32 ? 512 : 256), &maps.g, barrier, 0, head, first, n, 0);
    }
    ptx::cp_async_bulk_tensor_5d_load(v, &maps.v, barrier, 0, head, 0, n, 0);
}

template <class C>
__device__ __forceinline__ void load_state(const Maps &maps, Bf16Smem<C> &smem, int row, int head) {
    const uint32_t barrier = ptx::shared_address(&smem.arrived[1]), to = ptx::shared_address(smem.S);
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * C::D * C::D);
    // Read once, so the first to leave L2: it displaces states that were read, not lines that have to be written back.
    ptx::cp_async_bulk_tensor_5d_load_hint(to, &maps.state, barrier, 0, head, 0, row, 0, ptx::createpolicy_evict_first());
}

// GDN's gate of the head, as loaded.
struct HeadGate {
    uint32_t bias = 0, a_log = 0;
    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t head) {
        if (c.A_log) a_log = c.A_log.load(p.A_log.at(head));
        if (c.dt_bias) bias = c.dt_bias.load(p.dt_bias.at(head));
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
        ptx::ldmatrix_x4(a, x + C::X::offset(first, 0));
        ptx::mma_m16n8k16<T>(low, a, a[0], a[2]);
        ptx::mma_m16n8k16<T>(high, a, a[1], a[3]);
        if (c == g / 2) {
            smem.square[unit][first + g] = g % 2 ? low[1] : low[0];
            smem.square[unit][first + 8 + g] = g % 2 ? high[3] : high[2];
        }
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

// GDN: the warp's part of the products of tokens, rows of k and q by rows of k, over its channels.
template <class C>
__device__ __forceinline__ void multiply_draft(Bf16Smem<C> &smem) {
    constexpr int kBlocks = C::R / 8;
    const int lane = lane_of(), g = lane / 4, c = lane % 4, warp = threadIdx.x / 32;
    float sum[kBlocks][kBlocks][2][4];
#pragma unroll
    for (int unit = 0; unit < C::kUnits; ++unit) {
        const int channel = 16 * (warp + unit * C::kWarps);
        uint32_t x = ptx::shared_address(smem.x) + C::X::block16_offset(0, channel, lane), yh[4], yl[4];
        uint32_t y = ptx::shared_address(smem.x);
        if constexpr (C::R == 16) {
            y += C::X::block16_offset(0, channel, lane);
            ptx::ldmatrix_x4(yh, y);
            if constexpr (C::kTerms == 2) ptx::ldmatrix_x4(yl, y + C::kLow);
        } else {
            y += (C::kTerms == 2 ? lane / 16 * C::kLow : 0) + C::X::offset(lane % 8, channel + lane / 8 % 2 * 8);
            ptx::ldmatrix_x4(yh, y);
            yl[0] = yh[2], yl[2] = yh[3], yh[2] = yh[1];
        }
#pragma unroll
        for (int tile = 0; tile < kBlocks; ++tile) {
            uint32_t xh[4], xl[4];
            ptx::ldmatrix_x4(xh, x + C::X::offset(16 * tile, 0));
            if constexpr (C::kTerms == 2) ptx::ldmatrix_x4(xl, x + C::X::offset(16 * tile, 0) + C::kLow);
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
                    const float (&of)[2][4] = sum[tile][j];
                    *reinterpret_cast<float2 *>(
                        &smem.triangle.product[C::R == 16 ? warp : channel / 16][16 * tile + 8 * half + g][8 * j + 2 * c]) =
                        make_float2(of[0][2 * half] + of[1][2 * half], of[0][2 * half + 1] + of[1][2 * half + 1]);
                }
    }
}

// GDN: A / (beta |k_i| |k_j|) and Q / (scale |q_i| |k_j|) from the parts, four of a row a thread.
template <class C>
__device__ __forceinline__ void sum_products(Bf16Smem<C> &smem) {
    constexpr int kInRow = C::R / 4, kParts = C::R == 16 ? 4 : 8;
    if (threadIdx.x >= 2 * C::R * kInRow) return;
    const int row = threadIdx.x / kInRow, j = threadIdx.x % kInRow * 4, of_q = row / C::R, i = row % C::R;
    float x[4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        float4 four = *reinterpret_cast<const float4 *>(&smem.triangle.product[part][row][j]);
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        x[e] *= ptx::ex2_approx_ftz(smem.G[i] - smem.G[j + e]);
        // A token that is no number has W that is none: begin_columns() sees to it, in A it would spoil earlier ones.
        if (j + e >= i + of_q || (!of_q && !(x[e] * 0.0f == 0.0f))) x[e] = 0.0f;
    }
    *reinterpret_cast<float4 *>(&(of_q ? smem.triangle.Q : smem.triangle.A)[i][j]) = make_float4(x[0], x[1], x[2], x[3]);
}

// By one warp: what the norms, beta, scale and GDN's decays come to. With N = 1 / |k|: W' = N W, and P' (I + c A) = Q, c = N^2 beta.
template <class C>
__device__ __forceinline__ void scale_draft(const Params &p, const Choices &c, Bf16Smem<C> &smem, float beta) {
    const int lane = lane_of();
    float sum = 0.0f, norm = 1.0f;
#pragma unroll
    for (int i = 0; i < C::kSquares; ++i) sum += smem.square[i][lane % (2 * C::R)];
    if (c.qk_l2norm) norm = rsqrtf(sum + 1e-6f);
    float of_q = p.scale * __shfl_sync(0xffffffffu, norm, (lane + C::R) % 32);
    if (lane >= C::R) return;
    float decay = ptx::ex2_approx_ftz(C::kKda ? center(p) : smem.G[C::kKda ? 0 : lane]), of_v = beta * norm, of_a = of_v * norm;
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
    for (int j = 0; j < C::R; j += 4) {
        if constexpr (!C::kKda) fetch(&row[j], &smem.triangle.Q[i][j]);
        fetch(&c[j], &smem.c[j]);
    }
    if constexpr (C::kKda)
#pragma unroll
        for (int j = 0; j < C::R; ++j) row[j] = j <= i ? smem.triangle.aq[j][i] : 0.0f;
#pragma unroll
    for (int l = C::R - 1; l > 0; --l) {
        float x = -__fmul_rn(row[l], c[l]);
#pragma unroll
        for (int j = 0; j < l; j += 4) {
            float a[4];
            if constexpr (C::kKda)
                fetch(a, &smem.triangle.aq[l][j]);
            else
                fetch(a, &smem.triangle.A[l][j]);
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
        *reinterpret_cast<uint4 *>(smem.triangle.p[0][j / 8][i]) = make_uint4(high[0], high[1], high[2], high[3]);
        *reinterpret_cast<uint4 *>(smem.triangle.p[1][j / 8][i]) = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

}  // namespace linattn::cuda::delta_verify
