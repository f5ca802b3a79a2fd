// Verify of drafted tokens for their outputs alone, at memory speed: the tokens of a sequence as one small chunk on tensor cores.
//
//   G_i = g_0 + .. + g_i;   u_i = beta_i (v_i - (k_i e^G_i) S - sum_{j<i} (k_i e^(G_i-G_j) . k_j) u_j)
//   o_i = scale ((q_i e^G_i) S + sum_{j<=i} (q_i e^(G_i-G_j) . k_j) u_j)                arXiv:2412.06464, arXiv:2510.26692
//
// Nothing is kept and no state is written, so nothing has to have the bits of decode: products on the tensor cores are of tf32,
// in which q, k and bf16 states are exact and fp32 states and KDA's decayed q and k rounded to 2^-12.
//
// Grid: one CTA of four warps per (sequence, value head, kWidth columns of V). A warp holds 32 columns of V and 1/kParts of K of
// the state, every load in flight at once straight to registers, in the order of a fragment of mma.m16n8k8: lane (g, c) =
// (lane / 4, lane % 4) has columns 4g + j and rows 16 s + 4c + i of K (V-first in bf16, 16 bytes a load: 32 (s / 2) + 8c +
// 4 (s % 2) + i), i, j < 4. The state is the left operand, so that 8 rows of tokens are one product: k and q of 4 tokens.
//   few states   kParts = 4: 32 columns a CTA, whose warps' sums meet in shared memory.
//   many states  a state a CTA, several CTAs an SM; each asks for a later state to be brought to L2 (delta_decode_one.cuh).
//
// KDA: with E_i = e^(G_i - c), X = (k_i E_i, q_i E_i) and Y = k_j / E_j in fp32, for a constant c in the middle of what G can be,
// T lower_bound / 2: |G - c| <= 40 in natural units. GDN: X = (k_i, q_i), the decays multiply products.
//
// Schedule:  copies of the tokens, loads of the state . barrier . X, Y, norms . barrier . one warp: k k^T and q k^T, scaled;
//            all: X S . barrier . a thread a column: u by substitution, o
#pragma once
#include "common/device_guard.h"
#include "delta_decode_one.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace linattn::cuda::delta_verify {

using delta_decode_one::Choices;
using delta_decode_one::HeadView;
using delta_decode_one::Options;
using delta_decode_one::Row;

constexpr float kLog2e = 1.4426950408889634f;

template <bool kKdaGate, class StateT, bool kVFirstOrder, int kMostTokens, int kWarpsOfColumn, int kCtas>
struct Config {
    static constexpr int D = 128, R = kMostTokens, kParts = kWarpsOfColumn, kResident = kCtas;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder;
    using State = StateT;
    static constexpr bool kF32 = sizeof(State) == 4;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kWidth = 32 * kWarps / kParts, kSlices = D / kWidth;
    static constexpr int kSteps = D / kParts / 16;      // 16 rows of K each, of a warp
    static constexpr int kTiles = R / 4;                // 8 rows of X each
    static constexpr bool kWide = kVFirst && !kF32;     // 8 rows of K side by side in a lane
    static constexpr int kXRow = D + (kWide ? 4 : 16);  // floats; a fragment's loads without bank conflicts
    static constexpr int kZRow = kWidth + 4;
};

// Of a tensor [B,T,HV,..]; strides in bytes.
struct TokenView {
    char *data;
    uint32_t batch, token, head;
    __device__ __forceinline__ char *at(uint32_t n, uint32_t t, uint32_t h) const {
        return data + uint64_t{n} * batch + uint64_t{t} * token + uint64_t{h} * head;
    }
};

// What of DeltaParams the call needs: one line of 256 bytes, as in delta_decode_one.cuh.
struct Params {
    Options options;
    uint32_t rows, key_of;  // of the pool; key head = head key_of >> 16
    float scale, lower_bound;
    uint32_t ahead, tokens;
    uint32_t read_stride;
    char *state;
    uint32_t state_row, state_head;
    TokenView q, k, v, g, beta, o;
    HeadView A_log, dt_bias;
    const char *read;
};
static_assert(sizeof(Params) <= 256 - 16, "parameters start 16 bytes into a line");

template <class C>
struct Smem {
    struct Raw {  // as copied
        alignas(16) uint16_t k[C::R][C::D], q[C::R][C::D];
        uint32_t g[C::kKda ? C::R : 1][C::D];
    };
    union {
        Raw raw;
        alignas(16) float z[C::kParts][2 * C::R][C::kZRow];  // X S, of each part of K
    };
    alignas(16) uint16_t v[C::R][C::kWidth];
    alignas(16) float x[2 * C::R][C::kXRow];            // rows of k, rows of q
    alignas(16) float y[C::kKda ? C::R : 1][C::kXRow];  // KDA; GDN has k itself
    alignas(16) float in[2][C::R][C::R];                // [..][j][i]: factors of u_j in -u_i and in o_i
    float4 factor[C::R];                                // of v and k S in u; of q S in o
    float G[C::R], beta[C::R], norm[2 * C::R];          // G in log2 units
};

// Copies of q, k, v and KDA's g: 16 threads a token.
template <class C>
__device__ __forceinline__ void copy_tokens(const Params &p, const Choices &c, Smem<C> &smem, uint32_t n, uint32_t head,
                                            uint32_t v_cta) {
    uint32_t key = head * p.key_of >> 16, chunk = threadIdx.x % 16;
#pragma unroll
    for (uint32_t first = 0; first < C::R; first += 8) {
        uint32_t t = first + threadIdx.x / 16;
        if (t >= p.tokens) break;
        auto copy = [&](void *to, const char *from, uint32_t i) {
            ptx::cp_async_16(ptx::shared_address(static_cast<char *>(to) + 16 * i), from + 16 * i);
        };
        copy(smem.raw.k[t], p.k.at(n, t, key), chunk);
        copy(smem.raw.q[t], p.q.at(n, t, key), chunk);
        if constexpr (C::kKda) {
            copy(smem.raw.g[t], p.g.at(n, t, head), chunk);
            if (c.g.dtype == DType::F32) copy(smem.raw.g[t], p.g.at(n, t, head), chunk + 16);
        }
        if (chunk < C::kWidth / 8) copy(smem.v[t], p.v.at(n, t, head) + 2 * v_cta, chunk);
    }
    ptx::cp_async_commit_group();
}

// beta and GDN's log decays, by one warp, a lane a token; as loaded, then in shared memory.
template <class C>
struct Scalars {
    uint32_t beta = 0, g = 0, bias = 0, a_log = 0;

    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t n, uint32_t head) {
        uint32_t t = threadIdx.x;
        if (t >= p.tokens) return;
        beta = c.beta.load(p.beta.at(n, t, head));
        if constexpr (!C::kKda) {
            g = c.g.load(p.g.at(n, t, head));
            if (c.dt_bias) bias = c.dt_bias.load(p.dt_bias.at(head));
            if (c.A_log) a_log = c.A_log.load(p.A_log.at(head));
        }
    }
    __device__ __forceinline__ void finish(const Params &p, const Choices &c, Smem<C> &smem) const {
        uint32_t t = threadIdx.x;
        bool valid = t < p.tokens;
        if (t < C::R) smem.beta[t] = valid ? beta_value(c, beta) : 0.0f;
        if constexpr (!C::kKda) {
            float G = valid ? kLog2e * log_decay(c, gate_input(c, g, bias), gate_amplitude(c, a_log)) : 0.0f;
            if (G < -128.0f) G = -128.0f;  // 0 as a factor, and -inf - -inf is none
#pragma unroll
            for (int distance = 1; distance < C::R; distance *= 2) {
                float before = __shfl_up_sync(0xffffffffu, G, distance);
                if (t % 32 >= distance) G += before;
            }
            if (t < C::R) smem.G[t] = G;
        }
    }
};

// KDA's gate of the thread's channel, as loaded.
struct ChannelGate {
    uint32_t bias = 0, a_log = 0;
    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t head) {
        if (c.dt_bias) bias = c.dt_bias.load(p.dt_bias.at(head), threadIdx.x);
        if (c.A_log) a_log = c.A_log.load(p.A_log.at(head));
    }
};

// Operands are cut to tf32, 10 bits behind the point: a factor that makes it rounding on average, in one instruction.
constexpr float kRoundUp = 1.0f + 0.6931472f / 2048;
constexpr float kLog2RoundUp = 0.6931472f / 2048 * kLog2e;

// c of KDA in log2 units.
__device__ __forceinline__ float middle(const Params &p) {
    return 0.5f * kLog2e * p.lower_bound * static_cast<float>(p.tokens);
}

template <bool kBf16>
__device__ __forceinline__ float wide(uint16_t x) {
    return kBf16 ? __uint_as_float(uint32_t{x} << 16) : __half2float(__ushort_as_half(x));
}

// X, Y and the factors of qk_l2norm. Rows past T are computed from what happens to be there: they stay among themselves.
template <class C, bool kBf16>
__device__ __forceinline__ void prepare_rows(const Choices &c, Smem<C> &smem) {  // 16 lanes a row
#pragma unroll
    for (uint32_t first = 0; first < 2 * C::R; first += 8) {
        uint32_t row = first + threadIdx.x / 16, lane = threadIdx.x % 16;
        float x[8];
        unpack8(*reinterpret_cast<const uint4 *>(&(row < C::R ? smem.raw.k[row] : smem.raw.q[row - C::R])[8 * lane]), kBf16, x);
        if constexpr (!C::kKda) store8(&smem.x[row][8 * lane], x);
        if (!c.qk_l2norm) continue;
        float xx = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) xx += x[i] * x[i];
        xx = sum_over<16>(xx);
        if (lane == 0) smem.norm[row] = rsqrtf(xx + 1e-6f);
    }
    if (!c.qk_l2norm && threadIdx.x < 2 * C::R) smem.norm[threadIdx.x] = 1.0f;
}

template <class C, bool kBf16, bool kF32Gate>
__device__ __forceinline__ void prepare_channel(const Params &p, const Choices &c, Smem<C> &smem, const ChannelGate &gate) {
    uint32_t d = threadIdx.x;
    float slope = -kLog2e * gate_amplitude(c, gate.a_log), offset = slope * (c.dt_bias ? float_of(c.dt_bias, gate.bias) : 0.0f);
    float bound = kLog2e * p.lower_bound, G = -middle(p);
#pragma unroll
    for (int first = 0; first < C::R; first += 4) {
        if (first >= static_cast<int>(p.tokens)) break;
#pragma unroll
        for (int t = first; t < first + 4; ++t) {
            float z =
                kF32Gate ? __uint_as_float(smem.raw.g[t][d]) : wide<kBf16>(reinterpret_cast<uint16_t *>(smem.raw.g[t])[d]);
            G = fmaf(bound, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(slope, z, offset))), G);
            float E = ptx::ex2_approx_ftz(G + kLog2RoundUp), k = wide<kBf16>(smem.raw.k[t][d]);
            smem.x[t][d] = k * E;
            smem.x[C::R + t][d] = wide<kBf16>(smem.raw.q[t][d]) * E;
            smem.y[t][d] = k * ptx::ex2_approx_ftz(kLog2RoundUp - G);
        }
    }
}

template <class C>
__device__ __forceinline__ void prepare_tokens(const Params &p, const Choices &c, Smem<C> &smem, const ChannelGate &gate) {
    bool bf16 = c.q.dtype == DType::BF16;
    bf16 ? prepare_rows<C, true>(c, smem) : prepare_rows<C, false>(c, smem);
    if constexpr (C::kKda) {
        if (c.g.dtype == DType::F32)
            bf16 ? prepare_channel<C, true, true>(p, c, smem, gate) : prepare_channel<C, false, true>(p, c, smem, gate);
        else
            bf16 ? prepare_channel<C, true, false>(p, c, smem, gate) : prepare_channel<C, false, false>(p, c, smem, gate);
    }
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], float b0, float b1) {
    ptx::mma_m16n8k8_tf32(d, a, __float_as_uint(b0), __float_as_uint(b1));
}

// A tile of the products of tokens, to their factors in u and o. With 16 tokens each warp has one of four tiles; else there is one.
template <class C>
__device__ __forceinline__ void multiply_tokens(const Params &p, Smem<C> &smem, int tile) {
    int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const float (&right)[C::kKda ? C::R : 2 * C::R][C::kXRow] = [&]() -> auto & {
        if constexpr (C::kKda)
            return smem.y;
        else
            return smem.x;
    }();
    int j_first = C::R == 16 ? 8 * (tile % 2) : 0, row = C::R == 16 ? 16 * (tile / 2) + g : g;
    const float *left = smem.x[row], *other = smem.x[row + (C::R == 4 ? 0 : 8)], *k = right[j_first + (C::R == 4 ? g % 4 : g)];
    float sum[2][4] = {};
#pragma unroll
    for (int s = 0; s < C::D / 16; ++s) {
        float4 a = *reinterpret_cast<const float4 *>(left + 16 * s + 4 * c),
               b = *reinterpret_cast<const float4 *>(k + 16 * s + 4 * c);
        float4 a8 = C::R == 4 ? make_float4(0, 0, 0, 0) : *reinterpret_cast<const float4 *>(other + 16 * s + 4 * c);
        uint32_t low[4] = {__float_as_uint(a.x), __float_as_uint(a8.x), __float_as_uint(a.y), __float_as_uint(a8.y)},
                 high[4] = {__float_as_uint(a.z), __float_as_uint(a8.z), __float_as_uint(a.w), __float_as_uint(a8.w)};
        mma(sum[0], low, b.x, b.y);
        mma(sum[1], high, b.z, b.w);
    }
#pragma unroll
    for (int e = 0; e < (C::R == 4 ? 2 : 4); ++e) {
        int of_q = C::R == 16 ? tile / 2 : C::R == 8 ? e / 2 : g / 4;
        int i = C::R == 16 ? g + 8 * (e / 2) : g % C::R, j = j_first + 2 * c + e % 2;
        if (j >= C::R) continue;
        float x = (sum[0][e] + sum[1][e]) * smem.norm[j] * smem.norm[of_q * C::R + i] * (of_q ? p.scale : smem.beta[i]);
        if constexpr (!C::kKda) x *= ptx::ex2_approx_ftz(smem.G[i] - smem.G[j]);
        smem.in[of_q][j][i] = j < i + of_q ? x : 0.0f;
    }
}

// A lane's part of the state.
template <class C>
struct Share {
    static constexpr int kVectors = C::kWide ? C::kSteps * 2 : C::kSteps * 4;  // of 16 bytes; bf16 K-first 8
    struct alignas(C::kF32 || C::kWide ? 16 : 8) Vector {
        uint32_t word[C::kF32 || C::kWide ? 4 : 2];
    };
    Vector raw[kVectors];
    static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int c() { return threadIdx.x % 4; }
    static __device__ __forceinline__ int part() { return threadIdx.x / 32 % C::kParts; }
    static __device__ __forceinline__ int column() { return 32 * (threadIdx.x / 32 / C::kParts) + 4 * g(); }  // of the CTA
    // The first of the four rows of K of a step.
    static __device__ __forceinline__ int row(int step) {
        return part() * (C::D / C::kParts) + (C::kWide ? 32 * (step / 2) + 8 * c() + 4 * (step % 2) : 16 * step + 4 * c());
    }

    __device__ __forceinline__ void fetch(const typename C::State *state) {  // of the CTA's first column
        const typename C::State *lane = state + (C::kVFirst ? column() * C::D + row(0) : row(0) * C::D + column());
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            int step = C::kWide ? n / 4 * 32 : n / 4 * 16;
            raw[n] = *reinterpret_cast<const Vector *>(lane + (C::kVFirst ? n % 4 * C::D + step : (step + n % 4) * C::D));
        }
    }
    // Row row(step) + i of column column() + j, as an operand.
    __device__ __forceinline__ uint32_t operand(int step, int i, int j) const {
        if constexpr (C::kF32)
            return __float_as_uint(kRoundUp *
                                   __uint_as_float(C::kVFirst ? raw[4 * step + j].word[i] : raw[4 * step + i].word[j]));
        uint32_t word = C::kVFirst ? raw[step / 2 * 4 + j].word[step % 2 * 2 + i / 2] : raw[4 * step + i].word[j / 2];
        return (C::kVFirst ? i : j) % 2 ? word & 0xffff0000u : word << 16;
    }
};

// X S of the lane's part. K in quarters, whose sums are added in the order of solve(), so that bits do not depend on kParts.
template <class C>
__device__ __forceinline__ void multiply_state(Smem<C> &smem, const Share<C> &S) {
    float total[2][C::kTiles][4];
#pragma unroll
    for (int first = 0; first < C::kSteps; first += 2) {
        float sum[2][C::kTiles][4] = {};
#pragma unroll
        for (int step = first; step < first + 2; ++step) {
            float4 x[C::kTiles];
#pragma unroll
            for (int tile = 0; tile < C::kTiles; ++tile)
                x[tile] = *reinterpret_cast<const float4 *>(&smem.x[8 * tile + S.g()][S.row(step)]);
#pragma unroll
            for (int i = 0; i < 4; i += 2)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    uint32_t a[4] = {S.operand(step, i, j), S.operand(step, i, j + 1), S.operand(step, i + 1, j),
                                     S.operand(step, i + 1, j + 1)};
#pragma unroll
                    for (int tile = 0; tile < C::kTiles; ++tile)
                        mma(sum[j / 2][tile], a, i ? x[tile].z : x[tile].x, i ? x[tile].w : x[tile].y);
                }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) total[m][tile][e] = first ? total[m][tile][e] + sum[m][tile][e] : sum[m][tile][e];
    }
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            *reinterpret_cast<float4 *>(&smem.z[S.part()][8 * tile + 2 * S.c() + e][S.column()]) =
                make_float4(total[0][tile][e], total[0][tile][e + 2], total[1][tile][e], total[1][tile][e + 2]);
}

// u and o of the thread's column.
template <class C, bool kBf16>
__device__ __forceinline__ void solve(const Params &p, const Smem<C> &smem, char *to) {
    uint32_t column = threadIdx.x;
    float u[C::R], o[C::R];
#pragma unroll
    for (int t = 0; t < C::R; ++t) {
        float z[2];
#pragma unroll
        for (int of_q = 0; of_q < 2; ++of_q) {
            z[of_q] = smem.z[0][of_q * C::R + t][column];
#pragma unroll
            for (int part = 1; part < C::kParts; ++part) z[of_q] += smem.z[part][of_q * C::R + t][column];
        }
        float4 factor = smem.factor[t];
        u[t] = factor.x * wide<kBf16>(smem.v[t][column]) - factor.y * z[0], o[t] = factor.z * z[1];
    }
#pragma unroll
    for (int j = 0; j < C::R; ++j)
#pragma unroll
        for (int first = j / 4 * 4; first < C::R; first += 4) {
            float4 lower = *reinterpret_cast<const float4 *>(&smem.in[0][j][first]),
                   upper = *reinterpret_cast<const float4 *>(&smem.in[1][j][first]);
            const float in_u[4] = {lower.x, lower.y, lower.z, lower.w}, in_o[4] = {upper.x, upper.y, upper.z, upper.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + i > j) u[first + i] = fmaf(-in_u[i], u[j], u[first + i]);
                if (first + i >= j) o[first + i] = fmaf(in_o[i], u[j], o[first + i]);
            }
        }
    uint16_t *of_column = reinterpret_cast<uint16_t *>(to) + column;
#pragma unroll
    for (int t = 0; t < C::R; ++t) {
        if (t >= static_cast<int>(p.tokens)) break;
        *of_column = kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(o[t])) : __half_as_ushort(__float2half_rn(o[t]));
        of_column += p.o.token / 2;
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_verify_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    uint32_t n = blockIdx.y, head = blockIdx.x / C::kSlices, v_cta = blockIdx.x % C::kSlices * C::kWidth;
    Choices c(p.options, p.lower_bound);
    auto read_row = [&](uint32_t of) {
        return p.read ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, of) : Row(of);
    };
    Row row = read_row(n);
    copy_tokens(p, c, smem, n, head, v_cta);
    Scalars<C> scalars;
    ChannelGate gate;
    if (threadIdx.x < 32) scalars.fetch(p, c, n, head);
    if constexpr (C::kKda) gate.fetch(p, c, head);
    char *o = p.o.at(n, 0, head) + 2 * v_cta;
    if (!row.within(p.rows)) {
        if (threadIdx.x < C::kWidth)
            for (uint32_t t = 0; t < p.tokens; ++t) reinterpret_cast<uint16_t *>(o + uint64_t{p.o.token} * t)[threadIdx.x] = 0;
        ptx::cp_async_wait_group<0>();
        return;
    }
    char *of_head = p.state + uint64_t{head} * p.state_head;
    Share<C> S;
    S.fetch(reinterpret_cast<const typename C::State *>(of_head + uint64_t{row.low} * p.state_row) +
            v_cta * (C::kVFirst ? C::D : 1));
    if (C::kParts == 1 && p.ahead && threadIdx.x == C::kThreads - 1 && n + p.ahead < gridDim.y)
        if (Row next = read_row(n + p.ahead); next.within(p.rows))
            ptx::cp_async_bulk_prefetch(of_head + uint64_t{next.low} * p.state_row, C::D * C::D * sizeof(typename C::State));
    if (threadIdx.x < 32) scalars.finish(p, c, smem);
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    prepare_tokens(p, c, smem, gate);
    __syncthreads();
    if (uint32_t t = threadIdx.x; t < C::R) {
        float decay = ptx::ex2_approx_ftz(C::kKda ? middle(p) : smem.G[t]), beta = smem.beta[t];
        smem.factor[t] = make_float4(beta, beta * smem.norm[t] * decay, p.scale * smem.norm[C::R + t] * decay, 0.0f);
    }
    int tile = (threadIdx.x / 32 + blockIdx.x) % C::kWarps;  // not of the same warp in every CTA
    if (C::R == 16 || tile == 0) multiply_tokens(p, smem, tile);
    multiply_state(smem, S);
    __syncthreads();
    if (threadIdx.x >= C::kWidth) return;
    c.q.dtype == DType::BF16 ? solve<C, true>(p, smem, o) : solve<C, false>(p, smem, o);
}

// Whether the call is one for this kernel: outputs of a chain alone; KDA: gates within what fp32 can undo.
inline bool fits(const DeltaParams &p) {
    if (p.op != Op::Verify || p.K != 128 || p.V != 128 || p.T < 1 || p.T > 16 || p.cu_seqlens || p.parents || p.write_indices ||
        p.kept_k || p.kept_u || p.kept_g || p.N > 65535 || p.P > INT32_MAX || p.HV * (p.HV / p.H) >= 65536)
        return false;
    for (const Tensor *t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.o, &p.A_log, &p.dt_bias, &p.state_in, &p.read_indices})
        for (int i = 0; i < 3; ++i)
            if (t->stride[i] < 0 || t->stride[i] * dtype_bytes(t->dtype) > UINT32_MAX) return false;
    if (p.family == Family::Gdn) return true;
    if (p.gate != Gate::Bounded || !(-p.lower_bound * static_cast<double>(p.T) <= 80.0)) return false;
    if ((p.g.dtype != DType::F32 && p.g.dtype != p.q.dtype) || p.g.stride[3] != 1 || (p.dt_bias && p.dt_bias.stride[1] != 1))
        return false;
    bool aligned = reinterpret_cast<uintptr_t>(p.g.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) aligned = aligned && p.g.stride[i] * dtype_bytes(p.g.dtype) % 16 == 0;
    return aligned;
}

template <class C>
void launch_config(const DeltaParams &p, int multiprocessors) {
    auto stride = [](const Tensor &t, int axis) { return static_cast<uint32_t>(t.stride[axis] * dtype_bytes(t.dtype)); };
    auto view = [&](const Tensor &t) { return TokenView{t.data, stride(t, 0), stride(t, 1), stride(t, 2)}; };
    auto bits = [](auto value, int field) { return static_cast<uint32_t>(value) << field; };
    Params x = {};
    x.options.bits = bits(p.q.dtype, Options::kQ) | bits(p.g.dtype, Options::kG) | bits(p.beta.dtype, Options::kBeta) |
                     bits(p.A_log.dtype, Options::kALog) | bits(p.dt_bias.dtype, Options::kBias) |
                     bits(p.gate, Options::kGate) | bits(p.beta_form, Options::kBetaForm) | bits(p.qk_l2norm, Options::kNorm) |
                     bits(p.read_indices.dtype == DType::I64, Options::kReadWide);
    const int64_t ratio = p.HV / p.H;
    x.rows = static_cast<uint32_t>(p.P), x.key_of = static_cast<uint32_t>((65536 + ratio - 1) / ratio);
    x.scale = static_cast<float>(p.scale), x.lower_bound = static_cast<float>(p.lower_bound);
    x.tokens = static_cast<uint32_t>(p.T);
    if (C::kParts == 1 && p.N * p.HV > int64_t{C::kResident} * multiprocessors)
        x.ahead = static_cast<uint32_t>(delta_decode_one::kAheadBytes / (p.HV * C::D * C::D * sizeof(typename C::State)));
    x.state = p.state_in.data, x.state_row = stride(p.state_in, 0), x.state_head = stride(p.state_in, 1);
    x.q = view(p.q), x.k = view(p.k), x.v = view(p.v), x.g = view(p.g), x.beta = view(p.beta), x.o = view(p.o);
    x.A_log = {p.A_log.data, stride(p.A_log, 0)}, x.dt_bias = {p.dt_bias.data, stride(p.dt_bias, 0)};
    x.read = p.read_indices.data, x.read_stride = stride(p.read_indices, 0);
    LaunchConfig config;
    config.grid.x = p.HV * C::kSlices;
    config.grid.y = p.N;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_verify_kernel", delta_verify_kernel<C>, config, x);
}

template <bool kKda, class State, bool kVFirst, int R>
void launch_tokens(const DeltaParams &p, int multiprocessors) {
    constexpr int kCtas = sizeof(State) == 4 ? 3 : R == 16 ? 4 : 5;
    if (p.N * p.HV * 4 <= 2 * multiprocessors)
        launch_config<Config<kKda, State, kVFirst, R, 4, 2>>(p, multiprocessors);
    else
        launch_config<Config<kKda, State, kVFirst, R, 1, kCtas>>(p, multiprocessors);
}

template <bool kKda, class State, bool kVFirst>
void launch_layout(const DeltaParams &p, int multiprocessors) {
    if (p.T <= 4) return launch_tokens<kKda, State, kVFirst, 4>(p, multiprocessors);
    if (p.T <= 8) return launch_tokens<kKda, State, kVFirst, 8>(p, multiprocessors);
    launch_tokens<kKda, State, kVFirst, 16>(p, multiprocessors);
}

template <bool kKda>
void launch_verify(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    bool v_first = p.state_in.stride[2] == 1;
    if (p.state_in.dtype == DType::F32)
        v_first ? launch_layout<kKda, float, true>(p, multiprocessors) : launch_layout<kKda, float, false>(p, multiprocessors);
    else
        v_first ? launch_layout<kKda, __nv_bfloat16, true>(p, multiprocessors)
                : launch_layout<kKda, __nv_bfloat16, false>(p, multiprocessors);
}

}  // namespace linattn::cuda::delta_verify
