// The tokens of a draft for delta_verify_kernel: from global memory to X, Y and the factors of its substitution (delta_verify.cuh
// has the equations).
#pragma once
#include "delta_decode_one.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace linattn::cuda::delta_verify {

using delta_decode_one::Choices;
using delta_decode_one::HeadView;
using delta_decode_one::Known;
using delta_decode_one::Options;
using delta_decode_one::Row;

constexpr float kLog2e = 1.4426950408889634f;

template <bool kKdaGate, bool kVFirstOrder, int kMostTokens, int kWarpsOfColumn, int kCtas>
struct Config {
    static constexpr int D = 128, R = kMostTokens, kParts = kWarpsOfColumn, kResident = kCtas;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kWidth = 32 * kWarps / kParts, kSlices = D / kWidth;
    static constexpr int kSteps = D / kParts / 16;  // 16 rows of K each, of a warp
    static constexpr int kTiles = R / 4;            // 8 rows of X each
    static constexpr int kXRow = D + 16;            // floats; a fragment's loads without bank conflicts
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
    uint32_t ahead, tokens;  // sequences between a state and the one that is brought to L2 when it is loaded, 0: none
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
    union {
        struct {  // as copied, like v
            alignas(16) uint16_t k[C::R][C::D], q[C::R][C::D];
            uint32_t g[C::kKda ? C::R : 1][C::D];
        };
        alignas(16) float z[C::kParts][2 * C::R][C::kZRow];  // X S, of each part of K; then u in the rows of k
    };
    alignas(16) uint16_t v[C::R][C::kWidth];
    alignas(16) float x[2 * C::R][C::kXRow];               // rows of k, rows of q
    alignas(16) float y[C::kKda ? C::R : 1][C::kXRow];     // KDA; GDN has k itself
    alignas(16) float in_u[C::R][C::R], in_o[C::R][C::R];  // [i][j]: factors of u_j in -u_i and in o_i
    float4 factor[C::R];                                   // of v and k S in u; of q S in o
    float G[C::R], beta[C::R], norm[2 * C::R];             // G in log2 units
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
        copy(smem.k[t], p.k.at(n, t, key), chunk);
        copy(smem.q[t], p.q.at(n, t, key), chunk);
        if constexpr (C::kKda) {
            copy(smem.g[t], p.g.at(n, t, head), chunk);
            if (c.g.dtype == DType::F32) copy(smem.g[t], p.g.at(n, t, head), chunk + 16);
        }
        if (chunk < C::kWidth / 8) copy(smem.v[t], p.v.at(n, t, head) + 2 * v_cta, chunk);
    }
    ptx::cp_async_commit_group();
}

// GDN's G of token `lane`, of a warp, from its gate as loaded.
template <int R>
__device__ __forceinline__ float decays_so_far(const Choices &c, bool valid, uint32_t g, uint32_t bias, uint32_t a_log) {
    float G = valid ? kLog2e * log_decay(c, gate_input(c, g, bias), gate_amplitude(c, a_log)) : 0.0f;
    if (G < -128.0f) G = -128.0f;  // 0 as a factor, and -inf - -inf is none
#pragma unroll
    for (int distance = 1; distance < R; distance *= 2) {
        float before = __shfl_up_sync(0xffffffffu, G, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) G += before;
    }
    return G;
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
            float G = decays_so_far<C::R>(c, valid, g, bias, a_log);
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
#pragma unroll 1
    for (uint32_t first = 0; first < 2 * C::R; first += 8) {
        uint32_t row = first + threadIdx.x / 16, lane = threadIdx.x % 16;
        float x[8];
        unpack8(*reinterpret_cast<const uint4 *>(&(row < C::R ? smem.k[row] : smem.q[row - C::R])[8 * lane]), kBf16, x);
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
#pragma unroll 1
    for (int first = 0; first < static_cast<int>(p.tokens); first += 4) {
#pragma unroll
        for (int t = first; t < first + 4; ++t) {
            float z = kF32Gate ? __uint_as_float(smem.g[t][d]) : wide<kBf16>(reinterpret_cast<uint16_t *>(smem.g[t])[d]);
            G = fmaf(bound, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(slope, z, offset))), G);
            float E = ptx::ex2_approx_ftz(G + kLog2RoundUp), k = wide<kBf16>(smem.k[t][d]);
            smem.x[t][d] = k * E;
            smem.x[C::R + t][d] = wide<kBf16>(smem.q[t][d]) * E;
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
#pragma unroll 2
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
        (of_q ? smem.in_o : smem.in_u)[i][j] = j < i + of_q ? x : 0.0f;
    }
}

}  // namespace linattn::cuda::delta_verify
