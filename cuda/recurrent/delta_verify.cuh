// Verify of drafted tokens for their outputs alone, at memory speed: the tokens of a sequence as one small chunk on tensor cores.
// Here of states in fp32; of states in bf16: delta_verify_bf16.cuh.
//
//   G_i = g_0 + .. + g_i;   u_i = beta_i (v_i - (k_i e^G_i) S - sum_{j<i} (k_i e^(G_i-G_j) . k_j) u_j)
//   o_i = scale ((q_i e^G_i) S + sum_{j<=i} (q_i e^(G_i-G_j) . k_j) u_j)                arXiv:2412.06464, arXiv:2510.26692
//
// Nothing is kept and no state is written, so nothing has to have the bits of decode: products on the tensor cores are of tf32,
// in which q and k are exact and the state and KDA's decayed q and k rounded to 2^-12.
//
// Grid: one CTA of four warps per (sequence, value head, kWidth columns of V). A warp holds 32 columns of V and 1/kParts of K of
// the state, every load in flight at once straight to registers, in the order of a fragment of mma.m16n8k8: lane (g, c) =
// (lane / 4, lane % 4) has columns 4g + j and rows 16 s + 4c + i of K, i, j < 4. The state is the left operand, so that 8 rows of
// tokens are one product: k and q of 4 tokens.
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
#include "delta_verify_bf16.cuh"
#include "verify_tokens.cuh"

namespace linattn::cuda::delta_verify {

// A lane's part of the state.
template <class C>
struct Share {
    struct alignas(16) Vector {
        uint32_t word[4];
    };
    Vector raw[C::kSteps * 4];
    static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int c() { return threadIdx.x % 4; }
    static __device__ __forceinline__ int part() { return threadIdx.x / 32 % C::kParts; }
    static __device__ __forceinline__ int column() { return 32 * (threadIdx.x / 32 / C::kParts) + 4 * g(); }  // of the CTA
    // The first of the four rows of K of a step.
    static __device__ __forceinline__ int row(int step) { return part() * (C::D / C::kParts) + 16 * step + 4 * c(); }

    __device__ __forceinline__ void fetch(const float *state) {  // of the CTA's first column
        const float *lane = state + (C::kVFirst ? column() * C::D + row(0) : row(0) * C::D + column());
#pragma unroll
        for (int n = 0; n < C::kSteps * 4; ++n)
            raw[n] = *reinterpret_cast<const Vector *>(lane +
                                                       (C::kVFirst ? n % 4 * C::D + n / 4 * 16 : (n / 4 * 16 + n % 4) * C::D));
    }
    // Row row(step) + i of column column() + j, as an operand.
    __device__ __forceinline__ uint32_t operand(int step, int i, int j) const {
        return __float_as_uint(kRoundUp * __uint_as_float(C::kVFirst ? raw[4 * step + j].word[i] : raw[4 * step + i].word[j]));
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

// u of the thread's column by substitution, and o, four tokens at a time.
template <class C>
__device__ __forceinline__ void solve(const Params &p, const Choices &c, Smem<C> &smem, char *to) {
    uint32_t column = threadIdx.x;
    bool bf16 = c.q.dtype == DType::BF16;
    uint16_t *of_column = reinterpret_cast<uint16_t *>(to) + column;
#pragma unroll 1
    for (int first = 0; first < static_cast<int>(p.tokens); first += 4) {
        float u[4], o[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float z[2];
#pragma unroll
            for (int of_q = 0; of_q < 2; ++of_q) {
                z[of_q] = smem.z[0][of_q * C::R + first + i][column];
#pragma unroll
                for (int part = 1; part < C::kParts; ++part) z[of_q] += smem.z[part][of_q * C::R + first + i][column];
            }
            float4 factor = smem.factor[first + i];
            uint16_t v = smem.v[first + i][column];
            u[i] = factor.x * (bf16 ? wide<true>(v) : wide<false>(v)) - factor.y * z[0], o[i] = factor.z * z[1];
        }
        auto add = [&](int from, int i, const float (&given)[4], int count_u, int count_o) {
            float4 in_u = *reinterpret_cast<const float4 *>(&smem.in_u[first + i][from]),
                   in_o = *reinterpret_cast<const float4 *>(&smem.in_o[first + i][from]);
            const float of_u[4] = {in_u.x, in_u.y, in_u.z, in_u.w}, of_o[4] = {in_o.x, in_o.y, in_o.z, in_o.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j < count_u) u[i] = fmaf(-of_u[j], given[j], u[i]);
                if (j < count_o) o[i] = fmaf(of_o[j], given[j], o[i]);
            }
        };
#pragma unroll 1
        for (int from = 0; from < first; from += 4) {
            float before[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) before[j] = smem.z[0][from + j][column];
#pragma unroll
            for (int i = 0; i < 4; ++i) add(from, i, before, 4, 4);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            add(first, i, u, i, 0);
            add(first, i, u, 0, i + 1);
            if constexpr (C::R > 4) smem.z[0][first + i][column] = u[i];
            if (first + i >= static_cast<int>(p.tokens)) break;
            *of_column = bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(o[i])) : __half_as_ushort(__float2half_rn(o[i]));
            of_column += p.o.token / 2;
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_verify_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char smem_bytes[];
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
#pragma unroll 1
        for (uint32_t t = 0; t < p.tokens; ++t)
            if (threadIdx.x < C::kWidth) reinterpret_cast<uint16_t *>(o + uint64_t{p.o.token} * t)[threadIdx.x] = 0;
        ptx::cp_async_wait_group<0>();
        return;
    }
    char *of_head = p.state + uint64_t{head} * p.state_head;
    Share<C> S;
    S.fetch(reinterpret_cast<const float *>(of_head + uint64_t{row.low} * p.state_row) + v_cta * (C::kVFirst ? C::D : 1));
    if (C::kParts == 1 && p.ahead && threadIdx.x == C::kThreads - 1 && n + p.ahead < gridDim.y)
        if (Row next = read_row(n + p.ahead); next.within(p.rows))
            ptx::cp_async_bulk_prefetch(of_head + uint64_t{next.low} * p.state_row, C::D * C::D * 4);
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
    if (threadIdx.x < C::kWidth) solve(p, c, smem, o);
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

inline Params parameters(const DeltaParams &p) {
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
    x.state = p.state_in.data, x.state_row = stride(p.state_in, 0), x.state_head = stride(p.state_in, 1);
    x.q = view(p.q), x.k = view(p.k), x.v = view(p.v), x.g = view(p.g), x.beta = view(p.beta), x.o = view(p.o);
    x.A_log = {p.A_log.data, stride(p.A_log, 0)}, x.dt_bias = {p.dt_bias.data, stride(p.dt_bias, 0)};
    x.read = p.read_indices.data, x.read_stride = stride(p.read_indices, 0);
    return x;
}

template <class C>
LaunchConfig shape(const DeltaParams &p, int64_t smem_bytes) {
    LaunchConfig config;
    config.grid.x = p.HV * C::kSlices;
    config.grid.y = p.N;
    config.block.x = C::kThreads;
    config.smem_bytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(p.stream);
    return config;
}

template <class C>
void launch_f32_form(const DeltaParams &p, int multiprocessors) {
    Params x = parameters(p);
    if (C::kParts == 1 && p.N * p.HV > int64_t{C::kResident} * multiprocessors)
        x.ahead = static_cast<uint32_t>(delta_decode_one::kAheadBytes / (p.HV * C::D * C::D * 4));
    launch("delta_verify_kernel", delta_verify_kernel<C>, shape<C>(p, sizeof(Smem<C>)), x);
}

template <bool kKda, bool kVFirst, int R>
void launch_f32(const DeltaParams &p, int multiprocessors) {
    if (p.N * p.HV * 4 <= 2 * multiprocessors)
        launch_f32_form<Config<kKda, kVFirst, R, 4, 2>>(p, multiprocessors);
    else
        launch_f32_form<Config<kKda, kVFirst, R, 1, 3>>(p, multiprocessors);
}

// Few states: two CTAs on an SM at most.
template <bool kKda, bool kVFirst, int R, int kTerms>
void launch_bf16_form(const DeltaParams &p, int multiprocessors) {
    using Few = Bf16Config<kKda, kVFirst, R, kTerms, 64, 1, 2>;
    using Many = Bf16Config<kKda, kVFirst, R, kTerms, 128, R == 16 ? 2 : 1, R == 16 && kTerms == 2 && !kKda ? 3 : 4>;
    static_assert(Many::kResident * (sizeof(Bf16Smem<Many>) + 1024) <= 228 * 1024, "shared memory of an SM");
    Params x = parameters(p);
    if (p.N * p.HV * Few::kSlices <= 2 * multiprocessors || !boxes_fit(p))
        return launch("delta_verify_few_kernel", delta_verify_few_kernel<Few>, shape<Few>(p, sizeof(Bf16Smem<Few>)), x);
    // KDA's states are asked for when the tokens are there where tokens that queue behind other CTAs' states would be work begun
    // late: their work is long beyond 4 tokens; of fewer tokens it hides behind the states once there are more than four waves.
    const bool few_waves = p.N * p.HV <= int64_t{4 * Many::kResident} * multiprocessors;
    if (kKda && (p.T > 4 || few_waves)) x.options.bits |= 1u << Options::kStateLast;
    launch("delta_verify_many_kernel", delta_verify_many_kernel<Many>, shape<Many>(p, sizeof(Bf16Smem<Many>)), x,
           maps_of<Many>(p));
}

template <bool kKda, bool kVFirst, int R>
void launch_bf16(const DeltaParams &p, int multiprocessors) {
    if constexpr (!kKda)
        if (p.q.dtype == DType::BF16) return launch_bf16_form<kKda, kVFirst, R, 1>(p, multiprocessors);
    launch_bf16_form<kKda, kVFirst, R, 2>(p, multiprocessors);
}

template <bool kKda, bool kVFirst>
void launch_layout(const DeltaParams &p, int multiprocessors) {
    if (p.state_in.dtype == DType::BF16)
        p.T <= 8 ? launch_bf16<kKda, kVFirst, 8>(p, multiprocessors) : launch_bf16<kKda, kVFirst, 16>(p, multiprocessors);
    else if (p.T <= 4)
        launch_f32<kKda, kVFirst, 4>(p, multiprocessors);
    else
        p.T <= 8 ? launch_f32<kKda, kVFirst, 8>(p, multiprocessors) : launch_f32<kKda, kVFirst, 16>(p, multiprocessors);
}

template <bool kKda>
void launch_verify(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    p.state_in.stride[2] == 1 ? launch_layout<kKda, true>(p, multiprocessors) : launch_layout<kKda, false>(p, multiprocessors);
}

}  // namespace linattn::cuda::delta_verify
