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
//   many states  a whole state, several CTAs an SM, which walk over the states: the loads of the next state and draft are on their
//                way while the present one's u and o and the next one's X are computed.
//
// KDA: with E_i = e^(G_i - c), X = (k_i E_i, q_i E_i) and Y = k_j / E_j in fp32, for a constant c in the middle of what G can be,
// T lower_bound / 2: |G - c| <= 40 in natural units. GDN: X = (k_i, q_i), the decays multiply products.
//
// Schedule:  copies of the tokens, loads of the state . barrier . X, Y, norms . barrier . one warp: k k^T and q k^T, scaled;
//            all: X S . barrier . a thread a column: u by substitution, o
#pragma once
#include "common/device_guard.h"
#include "verify_tokens.cuh"

namespace linattn::cuda::delta_verify {

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
__device__ __forceinline__ void multiply_state(const Smem<C> &smem, const Share<C> &S, float (&total)[2][C::kTiles][4]) {
#pragma unroll
    for (int first = 0; first < C::kSteps; first += 2) {
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
            float sum[2][4] = {};
#pragma unroll
            for (int step = first; step < first + 2; ++step) {
                float4 x = *reinterpret_cast<const float4 *>(&smem.x[8 * tile + S.g()][S.row(step)]);
#pragma unroll
                for (int i = 0; i < 4; i += 2)
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        uint32_t a[4] = {S.operand(step, i, j), S.operand(step, i, j + 1), S.operand(step, i + 1, j),
                                         S.operand(step, i + 1, j + 1)};
                        mma(sum[j / 2], a, i ? x.z : x.x, i ? x.w : x.y);
                    }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) total[m][tile][e] = first ? total[m][tile][e] + sum[m][e] : sum[m][e];
        }
    }
}

template <class C>
__device__ __forceinline__ void store_products(Smem<C> &smem, const Share<C> &S, const float (&total)[2][C::kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            *reinterpret_cast<float4 *>(&smem.z[S.part()][8 * tile + 2 * S.c() + e][S.column()]) =
                make_float4(total[0][tile][e], total[0][tile][e + 2], total[1][tile][e], total[1][tile][e + 2]);
}

// u of the thread's column by substitution, then o.
template <class C>
__device__ __forceinline__ void solve(const Params &p, const Choices &c, const Smem<C> &smem, int turn, char *to) {
    uint32_t column = threadIdx.x;
    bool bf16 = c.q.dtype == DType::BF16;
    auto product = [&](int row) {
        float z = smem.z[0][row][column];
#pragma unroll
        for (int part = 1; part < C::kParts; ++part) z += smem.z[part][row][column];
        return z;
    };
    float u[C::R];
#pragma unroll
    for (int t = 0; t < C::R; ++t) {
        uint16_t raw = smem.v[turn][t][column];
        float4 factor = smem.factor[t];
        u[t] = factor.x * (bf16 ? wide<true>(raw) : wide<false>(raw)) - factor.y * product(t);
    }
#pragma unroll
    for (int j = 0; j + 1 < C::R; ++j)
#pragma unroll
        for (int first = (j + 1) / 4 * 4; first < C::R; first += 4) {
            float4 x = ptx::ld_shared_v4_f32(ptx::shared_address(&smem.in_u[j][first]));
            const float in_u[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i > j) u[first + i] = fmaf(-in_u[i], u[j], u[first + i]);
        }
    uint16_t *of_column = reinterpret_cast<uint16_t *>(to) + column;
#pragma unroll
    for (int t = 0; t < C::R; ++t) {
        if (t >= static_cast<int>(p.tokens)) break;
        float o = smem.factor[t].z * product(C::R + t);
#pragma unroll
        for (int first = 0; first <= t; first += 4) {
            float4 x = ptx::ld_shared_v4_f32(ptx::shared_address(&smem.in_o[t][first]));
            const float in_o[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + j <= t) o = fmaf(in_o[j], u[first + j], o);
        }
        *of_column = bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(o)) : __half_as_ushort(__float2half_rn(o));
        of_column += p.o.token / 2;
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_verify_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    constexpr bool kMany = C::kParts == 1;
    Choices c(p.options, p.lower_bound);
    uint32_t n = kMany ? blockIdx.x / p.heads : blockIdx.y, head = kMany ? blockIdx.x % p.heads : blockIdx.x / C::kSlices;
    uint32_t v_cta = kMany ? 0 : blockIdx.x % C::kSlices * C::kWidth;
    uint32_t step_n = kMany ? gridDim.x / p.heads : 0, step_head = kMany ? gridDim.x % p.heads : 0;
    auto read_row = [&] {
        return p.read && n < p.sequences ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, n) : Row(n);
    };
    auto advance = [&] {
        n += step_n, head += step_head;
        if (head >= p.heads) head -= p.heads, ++n;
    };
    auto outputs = [&] { return p.o.at(n, 0, head) + 2 * v_cta; };
    Row row = read_row();
    auto find = [&] {  // on to an item that is no padding
        while (n < p.sequences && !row.within(p.rows)) {
            if (threadIdx.x < C::kWidth)
                for (uint32_t t = 0; t < p.tokens; ++t)
                    reinterpret_cast<uint16_t *>(outputs() + uint64_t{p.o.token} * t)[threadIdx.x] = 0;
            if (!kMany) return false;
            advance();
            row = read_row();
        }
        return n < p.sequences;
    };
    Scalars<C> scalars;
    ChannelGate gate;
    auto fetch_tokens = [&](int turn) {
        copy_tokens(p, c, smem, n, head, v_cta, turn);
        if (threadIdx.x < 32) scalars.fetch(p, c, n, head);
        if constexpr (C::kKda) gate.fetch(p, c, head);
    };
    Share<C> S;
    auto fetch_state = [&] {
        S.fetch(reinterpret_cast<const typename C::State *>(p.state + uint64_t{row.low} * p.state_row +
                                                            uint64_t{head} * p.state_head) +
                v_cta * (C::kVFirst ? C::D : 1));
    };
    if (!kMany) fetch_tokens(0);  // while the table is on its way
    if (!find()) {
        ptx::cp_async_wait_group<0>();
        return;
    }
    if (kMany) fetch_tokens(0);
    fetch_state();
    for (int turn = 0;; turn ^= 1) {
        if (threadIdx.x < 32) scalars.finish(p, c, smem);
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        char *o = outputs();
        if (kMany) {
            advance();
            row = read_row();
        }
        prepare_tokens(p, c, smem, gate);
        __syncthreads();
        if (uint32_t t = threadIdx.x; t < C::R) {
            float decay = ptx::ex2_approx_ftz(C::kKda ? middle(p) : smem.G[t]), beta = smem.beta[t];
            smem.factor[t] = make_float4(beta, beta * smem.norm[t] * decay, p.scale * smem.norm[C::R + t] * decay, 0.0f);
        }
        bool more = kMany && find();
        if (more) fetch_tokens(turn ^ 1);
        int tile = (threadIdx.x / 32 + blockIdx.x) % C::kWarps;  // not of the same warp in every CTA
        if (C::R == 16 || tile == 0) multiply_tokens(p, smem, tile);
        float products[2][C::kTiles][4];
        multiply_state(smem, S, products);
        if (C::kZInX) __syncthreads();
        store_products(smem, S, products);
        if (more)
            fetch_state();
        else
            S = {};  // what was there is not kept
        __syncthreads();
        if (threadIdx.x < C::kWidth) solve(p, c, smem, turn, o);
        if (!more) return;
    }
}

// Whether the call is one for this kernel: outputs of a chain alone; KDA: gates within what fp32 can undo.
inline bool fits(const DeltaParams &p) {
    if (p.op != Op::Verify || p.K != 128 || p.V != 128 || p.T < 1 || p.T > 16 || p.cu_seqlens || p.parents || p.write_indices ||
        p.kept_k || p.kept_u || p.kept_g || p.N > 65535 || p.N * p.HV > INT32_MAX || p.P > INT32_MAX ||
        p.HV * (p.HV / p.H) >= 65536)
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
    x.heads = static_cast<uint32_t>(p.HV), x.sequences = static_cast<uint32_t>(p.N);
    x.state = p.state_in.data, x.state_row = stride(p.state_in, 0), x.state_head = stride(p.state_in, 1);
    x.q = view(p.q), x.k = view(p.k), x.v = view(p.v), x.g = view(p.g), x.beta = view(p.beta), x.o = view(p.o);
    x.A_log = {p.A_log.data, stride(p.A_log, 0)}, x.dt_bias = {p.dt_bias.data, stride(p.dt_bias, 0)};
    x.read = p.read_indices.data, x.read_stride = stride(p.read_indices, 0);
    LaunchConfig config;
    if (C::kParts == 1) {  // all CTAs at once, with the same number of items as far as it goes
        const int64_t items = p.N * p.HV, most = int64_t{C::kResident} * multiprocessors, turns = (items + most - 1) / most;
        config.grid.x = (items + turns - 1) / turns;
    } else {
        config.grid.x = p.HV * C::kSlices;
        config.grid.y = p.N;
    }
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_verify_kernel", delta_verify_kernel<C>, config, x);
}

template <bool kKda, class State, bool kVFirst, int R>
void launch_tokens(const DeltaParams &p, int multiprocessors) {
    constexpr int kCtas = sizeof(State) == 4 ? 3 : R == 4 ? 5 : 4;  // as registers allow
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
