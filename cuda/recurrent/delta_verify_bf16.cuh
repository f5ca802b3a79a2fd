// Verify for its outputs alone (delta_verify.cuh has the equations) of states in bf16: products in bf16, KDA's K^ and Q^ and f16
// inputs in two terms each.
//
// Grid: one CTA per (sequence, value head, 64 or 128 columns of V), a warp for 16 columns. The state goes to shared memory by
// copies that nobody's registers wait for and is the left operand of wgmma as it lies: Z^T = S^T X^T, with X = (k_i E_i, q_i E_i)
// in a high and a low term. With A and Q the factors of u_j in -u_i and in o_i (A strictly lower, Q lower triangular) and W =
// beta (v - Z_k), outputs are O = Z_q + P W, where P (I + A) = Q: a triangle of the tokens alone, solved by one warp while the
// products with the state run. W is in registers in the form of a fragment; W and P are of two terms, too.
//
// Tokens: a warp copies, normalises and gates 16 channels of K of all tokens (few states: twice 16), and waits for nobody. X takes
// the place of k, q and g as copied; KDA's Y = k_j / E_j stays in registers (verify_bf16_kda.cuh).
//
// Schedule:  KDA  copies of tokens and state . gates, norms, X, X Y^T over the warp's channels . barrier . a warp: factors; a warp:
//                 A, Q, P . the state is there, barrier . X S, W, O: only they follow the state, which lands long after its tokens
//            GDN  copies . norms, X X^T . the state is there, barrier . X S begins; A, Q; a warp: factors . barrier . a warp: P;
//                 all: W . barrier . O
//
// Shared memory of an SM with four states of 16 tokens of KDA: 4 (56 + 1) KB, all there is: S 32, X 16, v 4, parts of A and Q 3.
#pragma once
#include "common/device_guard.h"
#include "common/tensor_map.h"
#include "ptx/cta.cuh"
#include "ptx/wgmma.cuh"
#include "verify_bf16_kda.cuh"

namespace linattn::cuda::delta_verify {

constexpr uint32_t kFactorsReady = 1;  // KDA's barrier of two warps

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

    __device__ __forceinline__ void begin(const Choices &c, Bf16Smem<C> &smem, const float (&z)[C::R * C::kTerms],
                                          int columns) {
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
            uint32_t at = ptx::shared_address(smem.triangle.p[0][matrix % 2][matrix / 2 * 8 + lane % 8]), of[4], rest[4];
            ptx::ldmatrix_x4(of, at);
            ptx::ldmatrix_x4(rest, at + sizeof smem.triangle.p[0]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                ptx::mma_m16n8k16<__nv_bfloat16>(out[j], high, of[2 * j], of[2 * j + 1]);
                ptx::mma_m16n8k16<__nv_bfloat16>(out[j], low, of[2 * j], of[2 * j + 1]);
                ptx::mma_m16n8k16<__nv_bfloat16>(out[j], high, rest[2 * j], rest[2 * j + 1]);
            }
        } else {
            uint32_t of[2];
            ptx::ldmatrix_x2(of, ptx::shared_address(smem.triangle.p[matrix % 2][0][lane % 8]));
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
__device__ __forceinline__ void wait_for_state(Bf16Smem<C> &smem) {
    if constexpr (C::kTma)
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.arrived[1]), 0);
    else
        ptx::cp_async_wait_group<0>();
}

// Of 64 columns, the first of the warpgroup.
template <class C>
__device__ __forceinline__ int wide_tile() {
    return C::kThreads > 128 ? __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) * C::kTiles : 0;
}

// Z^T of the warpgroup's tiles, begun.
template <class C>
__device__ __forceinline__ void multiply_state(Bf16Smem<C> &smem, float (&z)[C::kTiles][C::R * C::kTerms]) {
    // Of one step of K for the first tile; the others are a constant further on.
    const uint32_t state = ptx::shared_address(smem.S), x = ptx::shared_address(smem.x);
    const int column = 64 * wide_tile<C>();
    const uint32_t left = C::kVFirst ? C::S::k_major_low(state, column, 0) : C::S::mn_major_low(state, 0, column),
                   right = C::X::k_major_low(x, 0, 0);
    constexpr uint32_t kLeftHigh = C::kVFirst ? C::S::k_major_high() : C::S::mn_major_high();
    constexpr ptx::Major kLeft = C::kVFirst ? ptx::Major::K : ptx::Major::MN;
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m)
#pragma unroll
        for (int s = 0; s < C::D / 16; ++s) {
            const uint32_t of_left = C::kVFirst ? C::S::offset(64 * m, 16 * s) : C::S::offset(16 * s, 64 * m);
            uint64_t a = ptx::wgmma_descriptor(left + of_left / 16, kLeftHigh),
                     b = ptx::wgmma_descriptor(right + C::X::offset(0, 16 * s) / 16, C::X::k_major_high());
            if (s == 0)
                ptx::wgmma_ss_first<__nv_bfloat16, kLeft, ptx::Major::K>(z[m], a, b);
            else
                ptx::wgmma_ss<__nv_bfloat16, kLeft, ptx::Major::K>(z[m], a, b, true);
        }
    ptx::wgmma_commit_group();
}

template <class C>
__device__ __forceinline__ void verify_draft(const Params &p, const Maps *maps, Bf16Smem<C> &smem) {
    const uint32_t n = blockIdx.y, head = blockIdx.x / C::kSlices, v_cta = blockIdx.x % C::kSlices * C::kWidth;
    // Not of the same warp in every CTA: 0 solves the triangle, 1 has its factors. KDA's are the slots of verify_bf16_kda.cuh, too.
    const uint32_t role = C::kKda ? (threadIdx.x / 32) ^ blockIdx.x % C::kWarps : (threadIdx.x / 32 + blockIdx.x) % C::kWarps;
    Choices c(p.options, p.lower_bound);
    auto read_row = [&] { return p.read ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, n) : Row(n); };
    // One lane, chosen so that the compiler knows it for one: no loop around each copy.
    auto elected = [] { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 0 && ptx::elect_sync(); };
    const bool state_last = C::kKda && (p.options.bits >> Options::kStateLast & 1);
    Row row(n);
    if constexpr (C::kTma) {
        if (elected()) {
            ptx::mbarrier_init(ptx::shared_address(&smem.arrived[0]), 1);
            ptx::mbarrier_init(ptx::shared_address(&smem.arrived[1]), 1);
            ptx::fence_mbarrier_init();
            load_draft(p, c, *maps, smem, n, head);
        }
        row = read_row();  // a coordinate waits where it is read: behind the tokens' copies
        if (!state_last && elected() && row.within(p.rows)) load_state(*maps, smem, row.low, head);
        __syncwarp();
    } else {
        row = read_row();
        copy_draft(p, c, smem, n, head, v_cta);
    }
    std::conditional_t<C::kKda, LaneGate<C>, HeadGate> gate;
    const bool token = lane_of() < p.tokens;
    uint32_t beta_bits = 0, g_bits = 0;
    if (C::kKda || role == 0) gate.fetch(p, c, head);
    if (role == 1 && token) beta_bits = c.beta.load(p.beta.at(n, lane_of(), head));
    if (!C::kKda && role == 0 && token) g_bits = c.g.load(p.g.at(n, lane_of(), head));
    char *o = p.o.at(n, 0, head) + 2 * v_cta;
    if constexpr (C::kTma) {
        __syncthreads();
        if constexpr (C::kKda) gate.finish(c);
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.arrived[0]), 0);
        if constexpr (C::kKda) {
            if (state_last && elected() && row.within(p.rows)) load_state(*maps, smem, row.low, head);
            __syncwarp();
        }
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
        if constexpr (C::kKda) gate.finish(c);
        ptx::cp_async_wait_group<1>();
        if (C::kKda && c.g.dtype == DType::F32)
            __syncthreads();
        else
            __syncwarp();
    }
    float z[C::kTiles][C::R * C::kTerms];
    if constexpr (C::kKda) {
        Square<C> square;
        prepare_channels(p, c, smem, gate, square);
        if (role > 0) square.store(smem, role - 1);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (role == 0) {
            square.collect(smem);
            __syncwarp();
            ptx::bar_sync(kFactorsReady, 64);
            solve_draft(smem);
        } else if (role == 1) {
            scale_draft(p, c, smem, token ? beta_of(c, beta_bits) : 0.0f);
            __syncwarp();
            ptx::bar_arrive(kFactorsReady, 64);
        }
        wait_for_state(smem);
        if constexpr (!C::kTma) ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        multiply_state(smem, z);
    } else {
        prepare_plain(smem);
        __syncwarp();
        multiply_draft(smem);
        if (role == 0) {
            float G = decays_so_far<C::R>(c, token, g_bits, gate.bias, gate.a_log);
            if (lane_of() < C::R) smem.G[lane_of()] = G;
        }
        wait_for_state(smem);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        multiply_state(smem, z);
        sum_products(smem);
        if (role == 1) scale_draft(p, c, smem, token ? beta_value(c, beta_bits) : 0.0f);
        __syncthreads();
        if (role == 0) solve_draft(smem);
    }
    ptx::wgmma_wait_group<0>();
    Columns<C> columns[C::kTiles];
    auto first_column = [&](int m) { return 64 * (wide_tile<C>() + m) + 16 * static_cast<int>(threadIdx.x / 32 % 4); };
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
        ptx::register_fence(z[m]);
        columns[m].begin(c, smem, z[m], first_column(m));
    }
    if constexpr (!C::kKda) __syncthreads();
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
    auto map = [&](const char *name, const Tensor &t, int64_t heads, int tokens) {
        const int64_t panel = 128 / dtype_bytes(t.dtype), panels = C::D / panel;
        return make_tensor_map(name, t.data, t.dtype,
                               {{panel, 1, panel},
                                {heads, t.stride[2], 1},
                                {p.T, t.stride[1], tokens},
                                {p.N, t.stride[0], 1},
                                {panels, panel, panels}},
                               128);
    };
    Maps maps = {map("q", p.q, p.H, 8), map("k", p.k, p.H, 8), map("v", p.v, p.HV, C::R), {}, {}};
    if (C::kKda) maps.g = map("g", p.g, p.HV, 8);
    maps.state = make_tensor_map(
        "state", p.state_in.data, p.state_in.dtype,
        {{64, 1, 64}, {p.HV, p.state_in.stride[1], 1}, {C::D, C::D, C::D}, {p.P, p.state_in.stride[0], 1}, {2, 64, 2}}, 128);
    return maps;
}

}  // namespace linattn::cuda::delta_verify
