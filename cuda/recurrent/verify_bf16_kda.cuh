// KDA's tokens of a draft for states in bf16 (delta_verify_bf16.cuh): from k, q and g as copied to X and to the triangle P.
//
// A warp has units of 16 channels of K of all tokens and holds them as operands of mma.m16n8k16: lane (g, c) = (lane / 4,
// lane % 4) has token g (16 tokens: and g + 8), channels 2c, 2c + 1, 2c + 8, 2c + 9 of a unit. So X, Y and their products need no
// shared memory but for X itself, which wgmma reads; sums of the gates over tokens are shuffles between lanes of a c.
//
// Products: A_ij = X_ki Y_j, i > j, and Q_ij = X_qi Y_j, i >= j, make one square of R R numbers: A below the diagonal, Q transposed
// on it and above. Every warp has it for its channels; one warp adds them and solves P (I + c A) = Q.
#pragma once
#include "verify_bf16_tokens.cuh"

namespace linattn::cuda::delta_verify {

// Of a lane's channels: log decays are bound / (1 + 2^(slope g + offset)), log2.
template <class C>
struct LaneGate {
    uint32_t bias[C::kUnits][2][2] = {}, a_log = 0;
    float slope, offset[C::kUnits][2][2];
    static __device__ __forceinline__ int unit(int i) { return threadIdx.x / 32 + i * C::kWarps; }
    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t head) {
        if (c.A_log) a_log = c.A_log.load(p.A_log.at(head));
        if (!c.dt_bias) return;
        const char *of_head = p.dt_bias.at(head);
#pragma unroll
        for (int i = 0; i < C::kUnits; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                bias[i][j / 2][j % 2] = c.dt_bias.load(of_head, 16 * unit(i) + 8 * (j / 2) + 2 * (lane_of() % 4) + j % 2);
    }
    __device__ __forceinline__ void finish(const Choices &c) {
        slope = -kLog2e;
        if (c.A_log) slope *= fminf(ptx::ex2_approx_ftz(kLog2e * value_of(c.A_log, a_log)), 1e30f);
#pragma unroll
        for (int i = 0; i < C::kUnits; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                offset[i][j / 2][j % 2] = c.dt_bias ? slope * value_of(c.dt_bias, bias[i][j / 2][j % 2]) : 0.0f;
    }
};

// beta_value() without a division, which is a call.
__device__ __forceinline__ float beta_of(const Choices &c, uint32_t bits) {
    float b = value_of(c.beta, bits);
    if (c.beta_form != BetaForm::Weight) b = ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2e * b));
    return c.beta_form == BetaForm::LogitsX2 ? 2.0f * b : b;
}

// Decays so far of a unit, log2 from the centre on, of [token / 8][channel / 8][channel % 2].
template <class C, bool kBf16, bool kF32Gate>
__device__ __forceinline__ void sum_gates(const Params &p, Bf16Smem<C> &smem, const LaneGate<C> &gate, int i,
                                          float (&G)[C::R / 8][2][2]) {
    constexpr int kBlocks = C::R / 8;
    const int lane = lane_of(), g = lane / 4, c = lane % 4, unit = gate.unit(i);
    const float bound = kLog2e * p.lower_bound, first = g == 0 ? -center(p) : 0.0f;
    uint32_t words[4];
    if constexpr (!kF32Gate) {
        uint32_t at = ptx::shared_address(smem.x) + C::kLow;
        if constexpr (kBlocks == 2) {
            ptx::ldmatrix_x4(words, at + C::X::block16_offset(0, 16 * unit, lane));
        } else {
            uint32_t two[2];
            ptx::ldmatrix_x2(two, at + C::X::offset(lane % 8, 16 * unit + lane / 8 % 2 * 8));
            words[0] = two[0], words[1] = two[1];
        }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float z[2];
            if constexpr (kF32Gate) {
                float2 two = *reinterpret_cast<const float2 *>(
                    smem.x + f32_gate_offset<C>(unit, 8 * block + g, 2 * pair + c / 2) + c % 2 * 8);
                z[0] = two.x, z[1] = two.y;
            } else {
                uint32_t two = words[block + kBlocks * pair];
                z[0] = wide<kBf16>(two & 0xffffu), z[1] = wide<kBf16>(two >> 16);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float decay = ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(gate.slope, z[e], gate.offset[i][pair][e])));
                float sum = fmaf(bound, decay, block == 0 ? first : 0.0f);
#pragma unroll
                for (int distance = 1; distance < 8; distance *= 2) {
                    float before = __shfl_up_sync(0xffffffffu, sum, 4 * distance);
                    if (g >= distance) sum += before;
                }
                if (block > 0) sum += __shfl_sync(0xffffffffu, G[0][pair][e], 28 + c);
                G[block][pair][e] = sum;
            }
        }
}

// What the warp's channels give to the square, in the order of lanes: of 16 tokens rows g and g + 8, each in columns 2c, 2c + 1,
// 2c + 8, 2c + 9; of 8 tokens A and Q, row g, columns 2c, 2c + 1.
template <class C>
struct Square {
    static constexpr int kBlocks = C::R / 8;
    float part[kBlocks][4];

    // Row g + 8 block, column `column`: whether it is of A.
    static __device__ __forceinline__ bool of_a(int block, int i) {
        const int g = lane_of() / 4, c = lane_of() % 4;
        return i / 2 < block || (i / 2 == block && 2 * c + i % 2 < g);
    }
    __device__ __forceinline__ void store(Bf16Smem<C> &smem, int slot) const {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
            smem.triangle.part[slot][block][lane_of()] =
                make_float4(part[block][0], part[block][1], part[block][2], part[block][3]);
    }
    // The sum over all warps, to triangle.aq, by the warp whose own part this is. Slot i - 1 is of the warp that differs from
    // this one by an exclusive or with i, so that the order of the sums is the same for every such warp.
    __device__ __forceinline__ void collect(Bf16Smem<C> &smem) const {
        const int lane = lane_of(), g = lane / 4, c = lane % 4;
        float sum[kBlocks][4];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            float4 of[C::kWarps];
            of[0] = make_float4(part[block][0], part[block][1], part[block][2], part[block][3]);
#pragma unroll
            for (int i = 1; i < C::kWarps; ++i) of[i] = smem.triangle.part[i - 1][block][lane];
#pragma unroll
            for (int half = C::kWarps / 2; half > 0; half /= 2)
#pragma unroll
                for (int i = 0; i < half; ++i)
                    of[i].x += of[i + half].x, of[i].y += of[i + half].y, of[i].z += of[i + half].z, of[i].w += of[i + half].w;
            sum[block][0] = of[0].x, sum[block][1] = of[0].y, sum[block][2] = of[0].z, sum[block][3] = of[0].w;
        }
        __syncwarp();  // the sum lies where parts do
        // A token that is no number has W that is none: begin() sees to it, in A it would spoil earlier ones.
        auto number = [](float x) { return x * 0.0f == 0.0f ? x : 0.0f; };
        auto &aq = smem.triangle.aq;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 2 * c + i % 2;
                if constexpr (kBlocks == 2) {
                    float x = sum[block][i];
                    aq[g + 8 * block][column + i / 2 * 8] = of_a(block, i) ? number(x) : x;
                } else if (i < 2) {
                    if (column < g) aq[g][column] = number(sum[0][i]);
                } else {
                    if (column <= g) aq[column][g] = sum[0][i];
                }
            }
    }
};

template <class C, bool kBf16, bool kF32Gate>
__device__ __forceinline__ void prepare_channels(const Params &p, Bf16Smem<C> &smem, const LaneGate<C> &gate,
                                                 Square<C> &square) {
    using T = std::conditional_t<kBf16, __nv_bfloat16, __half>;
    using B = __nv_bfloat16;
    constexpr int kBlocks = C::R / 8, kProducts = C::R == 16 ? 4 : C::kUnits;
    const int lane = lane_of(), g = lane / 4, c = lane % 4;
    float G[C::kUnits][kBlocks][2][2];
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i) sum_gates<C, kBf16, kF32Gate>(p, smem, gate, i, G[i]);
    if constexpr (kF32Gate)
        __syncthreads();  // other warps' gates lie where terms go
    else
        __syncwarp();
    // Of 16 tokens: A in columns of both halves, Q transposed likewise. Of 8: A and Q, of each unit.
    float product[kProducts][4] = {}, squares[kBlocks][2][4] = {};
#pragma unroll
    for (int i = 0; i < C::kUnits; ++i) {
        const uint32_t x = ptx::shared_address(smem.x) + C::X::block16_offset(0, 16 * gate.unit(i), lane);
        // Rows 8 b + g of k, then of q: word [b / 2][b % 2 + 2 pair].
        uint32_t raw[kBlocks][4], high[kBlocks][4], low[kBlocks][4], y[2][2 * kBlocks];
#pragma unroll
        for (int tile = 0; tile < kBlocks; ++tile) {
            ptx::ldmatrix_x4(raw[tile], x + C::X::offset(16 * tile, 0));
            // |k|^2 and |q|^2: the diagonal of the products of a fragment with itself
            if (C::R == 8)
#pragma unroll
                for (int e = 0; e < 4; ++e) squares[tile][0][e] = squares[tile][1][e] = 0.0f;
            ptx::mma_m16n8k16<T>(squares[tile][0], raw[tile], raw[tile][0], raw[tile][2]);
            ptx::mma_m16n8k16<T>(squares[tile][1], raw[tile], raw[tile][1], raw[tile][3]);
            if (c == g / 2 && (C::R == 8 || i == C::kUnits - 1)) {
                float *to = smem.square[C::R == 8 ? gate.unit(i) : gate.unit(0)] + 16 * tile + g;
                to[0] = g % 2 ? squares[tile][0][1] : squares[tile][0][0];
                to[8] = g % 2 ? squares[tile][1][3] : squares[tile][1][2];
            }
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                float E[2], inverse[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    E[e] = ptx::ex2_approx_ftz(G[i][block][pair][e]);
                    inverse[e] = ptx::ex2_approx_ftz(-G[i][block][pair][e]);
                }
                auto times = [&](int b, const float (&factor)[2]) {
                    uint32_t two = raw[b / 2][b % 2 + 2 * pair];
                    return Terms(__fmul_rn(wide<kBf16>(two & 0xffffu), factor[0]),
                                 __fmul_rn(wide<kBf16>(two >> 16), factor[1]));
                };
#pragma unroll
                for (int b = block; b < 2 * kBlocks; b += kBlocks) {
                    Terms terms = times(b, E);
                    high[b / 2][b % 2 + 2 * pair] = terms.high, low[b / 2][b % 2 + 2 * pair] = terms.low;
                }
                Terms terms = times(block, inverse);
                y[0][block + kBlocks * pair] = terms.high, y[1][block + kBlocks * pair] = terms.low;
            }
#pragma unroll
        for (int tile = 0; tile < kBlocks; ++tile) {
            ptx::stmatrix_x4(x + C::X::offset(16 * tile, 0), high[tile]);
            ptx::stmatrix_x4(x + C::X::offset(16 * tile, 0) + C::kLow, low[tile]);
        }
        if constexpr (kBlocks == 2) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ptx::mma_m16n8k16<B>(product[n], high[0], y[0][n], y[0][n + 2]);
                ptx::mma_m16n8k16<B>(product[2 + n], y[0], high[1][n], high[1][n + 2]);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ptx::mma_m16n8k16<B>(product[n], low[0], y[0][n], y[0][n + 2]);
                ptx::mma_m16n8k16<B>(product[2 + n], y[1], high[1][n], high[1][n + 2]);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ptx::mma_m16n8k16<B>(product[n], high[0], y[1][n], y[1][n + 2]);
                ptx::mma_m16n8k16<B>(product[2 + n], y[0], low[1][n], low[1][n + 2]);
            }
        } else {
            ptx::mma_m16n8k16<B>(product[i], high[0], y[0][0], y[0][1]);
            ptx::mma_m16n8k16<B>(product[i], low[0], y[0][0], y[0][1]);
            ptx::mma_m16n8k16<B>(product[i], high[0], y[1][0], y[1][1]);
        }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if constexpr (kBlocks == 2) {
                float a = product[e / 2][2 * block + e % 2], q = product[2 + e / 2][2 * block + e % 2];
                square.part[block][e] = square.of_a(block, e) ? a : q;
            } else {
                square.part[0][e] = C::kUnits == 2 ? product[0][e] + product[C::kUnits - 1][e] : product[0][e];
            }
}

template <class C>
__device__ __forceinline__ void prepare_channels(const Params &p, const Choices &c, Bf16Smem<C> &smem, const LaneGate<C> &gate,
                                                 Square<C> &square) {
    const bool bf16 = c.q.dtype == DType::BF16;
    if (c.g.dtype == DType::F32)
        bf16 ? prepare_channels<C, true, true>(p, smem, gate, square) : prepare_channels<C, false, true>(p, smem, gate, square);
    else
        bf16 ? prepare_channels<C, true, false>(p, smem, gate, square)
             : prepare_channels<C, false, false>(p, smem, gate, square);
}

}  // namespace linattn::cuda::delta_verify
