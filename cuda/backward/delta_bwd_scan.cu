// The two passes of the backward that go token by token. Columns of V never meet in them, so a warp owns 16 (tile.cuh) and
// shares only the tokens' vectors with the other three of its CTA. P = exp(g) S_before; D is the gradient of the state:
//
//   forward   P = d S;   e = v - P^T k;   S = P + k (beta e)^T                                        first token to last
//   reverse   D += scale q do^T;   du = D^T k;   dv = beta du;   D = d (D - k dv^T)                   last token to first
//
// kMap: the affine map of a segment instead, from 0 and from the identity, where v (forward) or do (reverse) is 0:
// forward [h | M] of S_out = M S_in + h, reverse of the gradients.
//
// Kept for delta_bwd_chunk_kernel: e and du of every token, S before every chunk of 64 tokens and D after it. Nothing else is:
// every sum over V is that kernel's. arXiv:2412.06464, arXiv:2510.26692.
//
// Grid: one CTA of 4 warps per (sequence, value head, 64 columns of V). Tokens come in blocks of 16: while one is computed from
// shared memory, the loads of the next are in flight in registers (fetch), then they change places (deposit).
// Shared memory at D = 128: 2 blocks x 16 tokens x (q, k, d: 640 B each, v or do: 256 B) = 70 KB.
// Registers: state 64, fetched block up to 58, sums and factors 24.
#include "common/device_guard.h"
#include "common/launch.h"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_bwd {

constexpr int kBlock = 16, kWarps = 4, kThreads = 32 * kWarps, kColumns = kTileV * kWarps;

template <int kD, bool kKdaGate, bool kBackwards, bool kSegment>
struct ScanConfig {
    static constexpr int D = kD;
    static constexpr bool kKda = kKdaGate, kReverse = kBackwards, kMap = kSegment;
    static constexpr int kBlocksV = (kMap ? 2 : 1) * D / kColumns;  // of a state, or of h and then of M
    static constexpr int kVector = 8 * (D / 8 + 4), kDecays = kKda ? kVector : 4;
};

// Vectors over K in shared memory, as tile.cuh has them but with 4 floats between the shares of two lanes lk: a lane reads its
// share 16 bytes at a time, and eight shares at multiples of 64 bytes would meet in the same banks four by four.
template <int D>
constexpr int kShare = D / 8 + 4;
template <int D>
__device__ __forceinline__ int place(int k) {
    return ((k >> 2) & 7) * kShare<D> + (k >> 5) * 4 + (k & 3);
}
template <int D>
__device__ __forceinline__ float4 rows4(const float *vector, int lk, int kk) {
    return *reinterpret_cast<const float4 *>(vector + lk * kShare<D> + kk);
}

template <class C>
struct alignas(16) ScanToken {
    float k[C::kVector], q[C::kReverse ? C::kVector : 4];  // placed; q times scale
    float decay[C::kDecays];                               // placed; GDN: one, four times
    float x[kColumns];                                     // v, or do
    float beta, unused[3];
};

template <class C>
struct ScanSmem {
    ScanToken<C> token[2][kBlock];
};

// A block of tokens on its way from global to shared memory; tokens outside of [0, length) are left alone.
template <class C>
struct BlockLoader {
    static constexpr int kQuads = kBlock * C::D / 4 / kThreads, kScalars = kBlock * kColumns / kThreads;
    const BwdCall &call;
    const Item &item;
    const bool of_values;  // else v, or do, is 0
    float4 k[kQuads], q[C::kReverse ? kQuads : 1], decay[C::kKda ? kQuads : 1];
    float x[kScalars], beta, gamma;

    __device__ __forceinline__ int64_t row(int token) const { return item.batch * call.p.T + item.bos + token; }

    __device__ __forceinline__ void fetch(int first) {
        const int64_t HV = call.p.HV, H = call.p.H, key_head = item.head / (HV / H);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int at = i * kThreads + threadIdx.x, token = first + at / (C::D / 4), column = at % (C::D / 4) * 4;
            if (token >= item.length) continue;
            k[i] = *reinterpret_cast<const float4 *>(call.w.k + (row(token) * H + key_head) * C::D + column);
            if constexpr (C::kReverse)
                q[i] = *reinterpret_cast<const float4 *>(call.w.q + (row(token) * H + key_head) * C::D + column);
            if constexpr (C::kKda)
                decay[i] = *reinterpret_cast<const float4 *>(call.w.decay + (row(token) * HV + item.head) * C::D + column);
        }
        const Tensor &from = C::kReverse ? call.p.d_o : call.p.v;
#pragma unroll
        for (int i = 0; i < kScalars; ++i) {
            const int at = i * kThreads + threadIdx.x, token = first + at / kColumns;
            x[i] = 0.0f;
            if (of_values && token < item.length)
                x[i] = load_float(from, element(from, item.batch, item.bos + token, item.head, item.v_cta + at % kColumns));
        }
        if (threadIdx.x < kBlock && first + static_cast<int>(threadIdx.x) < item.length) {
            const int64_t at = row(first + threadIdx.x) * HV + item.head;
            beta = call.w.beta[at];
            if constexpr (!C::kKda) gamma = call.w.decay[at];
        }
    }

    __device__ __forceinline__ void deposit(ScanToken<C> (&to)[kBlock]) const {
        const float scale = static_cast<float>(call.p.scale);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int at = i * kThreads + threadIdx.x, token = at / (C::D / 4);
            const int column = place<C::D>(at % (C::D / 4) * 4);
            *reinterpret_cast<float4 *>(&to[token].k[column]) = k[i];
            if constexpr (C::kReverse)
                *reinterpret_cast<float4 *>(&to[token].q[column]) =
                    make_float4(scale * q[i].x, scale * q[i].y, scale * q[i].z, scale * q[i].w);
            if constexpr (C::kKda) *reinterpret_cast<float4 *>(&to[token].decay[column]) = decay[i];
        }
#pragma unroll
        for (int i = 0; i < kScalars; ++i) {
            const int at = i * kThreads + threadIdx.x;
            to[at / kColumns].x[at % kColumns] = x[i];
        }
        if (threadIdx.x < kBlock) {
            to[threadIdx.x].beta = beta;
            if constexpr (!C::kKda)
                *reinterpret_cast<float4 *>(to[threadIdx.x].decay) = make_float4(gamma, gamma, gamma, gamma);
        }
    }
};

// f(row of K, kk) for each of the lane's rows.
template <int D, class F>
__device__ __forceinline__ void for_each_row(F f) {
#pragma unroll
    for (int kk = 0; kk < D / 8; ++kk) f(kk / 4 * 32 + 4 * static_cast<int>(threadIdx.x & 7) + kk % 4, kk);
}

// f(element, kk, r) for each of the lane's, in a state of the caller of any strides.
template <int D, class F>
__device__ __forceinline__ void for_each_element(const Tensor &t, const Item &item, int v_warp, F f) {
    const int64_t first = item.n * t.stride[0] + item.head * t.stride[1] + (v_warp + threadIdx.x % 32 / 8 * 4) * t.stride[3];
    for_each_row<D>([&](int row, int kk) {
#pragma unroll
        for (int r = 0; r < 4; ++r) f(first + row * t.stride[2] + r * t.stride[3], kk, r);
    });
}

template <class C>
__device__ __forceinline__ float4 decay_of(const ScanToken<C> &x, int lk, int kk) {
    return C::kKda ? rows4<C::D>(x.decay, lk, kk) : *reinterpret_cast<const float4 *>(x.decay);
}

// Sums of four columns over the eight lanes lk; lane lk ends with column lk / 2.
__device__ __forceinline__ float sum_over_rows(const float (&sum)[4], int lk) {
    const bool upper = lk & 4, odd = lk & 2;
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) pair[i] = (upper ? sum[2 + i] : sum[i]) + __shfl_xor_sync(~0u, upper ? sum[i] : sum[2 + i], 4);
    const float one = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 2);
    return one + __shfl_xor_sync(~0u, one, 1);
}

// Where a lane's own column goes: after sum_over_rows, lanes lk and lk + 1 have the same one.
struct Lane {
    int lk, group, column;  // column of the CTA that the lane's tile begins with
    __device__ Lane()
        : lk(threadIdx.x & 7), group(threadIdx.x & 24), column(threadIdx.x / 32 * kTileV + (threadIdx.x & 31) / 8 * 4) {}
    __device__ int own() const { return column + lk / 2; }
    __device__ bool first() const { return lk % 2 == 0; }
    __device__ void all(float own_value, float (&x)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = __shfl_sync(~0u, own_value, group + 2 * r);
    }
};

// Returns the lane's own column of e.
template <class C>
__device__ __forceinline__ float forward_token(StateTile<C::D> &S, const ScanToken<C> &x, const Lane &lane) {
    float sum[4] = {}, u[4];
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) {
        S.decay4(kk, decay_of(x, lane.lk, kk));
        const float4 k4 = rows4<C::D>(x.k, lane.lk, kk);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[r] = fmaf(S.s[kk + i][r], k[i], sum[r]);
    }
    const float own = x.x[lane.own()] - sum_over_rows(sum, lane.lk);
    lane.all(x.beta * own, u);
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) S.update4(kk, rows4<C::D>(x.k, lane.lk, kk), u);
    return own;
}

// Returns the lane's own column of du.
template <class C>
__device__ __forceinline__ float reverse_token(StateTile<C::D> &grad, const ScanToken<C> &x, const Lane &lane) {
    float sum[4] = {}, d_o[4], minus_dv[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) d_o[r] = x.x[lane.column + r];
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) {
        grad.update4(kk, rows4<C::D>(x.q, lane.lk, kk), d_o);
        const float4 k4 = rows4<C::D>(x.k, lane.lk, kk);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) sum[r] = fmaf(grad.s[kk + i][r], k[i], sum[r]);
    }
    const float du = sum_over_rows(sum, lane.lk);
    lane.all(-x.beta * du, minus_dv);
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) {
        grad.update4(kk, rows4<C::D>(x.k, lane.lk, kk), minus_dv);
        grad.decay4(kk, decay_of(x, lane.lk, kk));
    }
    return du;
}

// Items index, index + step, ...
template <class C>
__device__ __forceinline__ void scan(const BwdCall &call, char *smem_bytes, int64_t index, int64_t step_of_items) {
    ScanSmem<C> &smem = *reinterpret_cast<ScanSmem<C> *>(smem_bytes);
    const BwdParams &p = call.p;
    const Lane lane;
    const Tensor marks = chunk_states<C::D>(C::kReverse ? call.w.grads : call.w.states, p.HV);
    for (int64_t i = index; i < p.N * p.HV * C::kBlocksV; i += step_of_items) {
        if (left_out(call, i / C::kBlocksV / p.HV, i / C::kBlocksV % p.HV)) continue;
        const int column = static_cast<int>(i % C::kBlocksV) * kColumns;
        const bool of_values = column < C::D;
        const Item item = make_item(p, i / C::kBlocksV / p.HV, static_cast<int>(i / C::kBlocksV % p.HV), column % C::D);
        const int v_warp = item.v_cta + static_cast<int>(threadIdx.x) / 32 * kTileV;
        const int64_t first_chunk = C::kMap ? 0 : call.w.chunk_start[item.n];
        StateTile<C::D> S;
        S.zero();
        const Tensor &start = C::kReverse ? p.d_final_state : p.state_in;
        if (C::kMap && !of_values)
            for_each_row<C::D>([&](int row, int kk) {
#pragma unroll
                for (int r = 0; r < 4; ++r) S.s[kk][r] = row == item.v_cta + lane.column + r ? 1.0f : 0.0f;
            });
        else if (!C::kMap && start)
            for_each_element<C::D>(start, item, v_warp, [&](int64_t at, int kk, int r) { S.s[kk][r] = load_float(start, at); });
        const int blocks = (item.length + kBlock - 1) / kBlock;
        BlockLoader<C> loader{call, item, of_values};
        const auto block_at = [&](int step) { return C::kReverse ? blocks - 1 - step : step; };
        if (blocks > 0) loader.fetch(block_at(0) * kBlock);
        for (int step = 0; step < blocks; ++step) {
            ScanToken<C>(&token)[kBlock] = smem.token[step % 2];
            loader.deposit(token);
            __syncthreads();
            if (step + 1 < blocks) loader.fetch(block_at(step + 1) * kBlock);
            const int first = block_at(step) * kBlock, size = min(kBlock, item.length - first);
            for (int j = 0; j < size; ++j) {
                const int t = C::kReverse ? first + size - 1 - j : first + j;
                const ScanToken<C> &x = token[t - first];
                if (!C::kMap && (C::kReverse ? t + 1 == item.length || (t + 1) % kBwdChunk == 0 : t % kBwdChunk == 0))
                    S.store(marks, first_chunk + t / kBwdChunk, item.head, v_warp);
                const float own = C::kReverse ? reverse_token(S, x, lane) : forward_token(S, x, lane);
                if (C::kMap || !lane.first()) continue;
                const int64_t at = (loader.row(t) * p.HV + item.head) * C::D + item.v_cta + lane.own();
                (C::kReverse ? call.w.du : call.w.e)[at] = own;
                if constexpr (C::kReverse)
                    store_float(p.dv, element(p.dv, item.batch, item.bos + t, item.head, item.v_cta + lane.own()),
                                x.beta * own);
            }
        }
        const Tensor &end = !C::kMap ? p.d_initial_state : of_values ? call.added : call.transition;
        if ((C::kMap || C::kReverse) && end)
            for_each_element<C::D>(end, item, v_warp, [&](int64_t at, int kk, int r) { store_float(end, at, S.s[kk][r]); });
        __syncthreads();  // the next item's tokens
    }
}

// Both directions at once, since neither needs the other: the first half of the CTAs does the reverse one, which takes longer.
template <int D, bool kKda>
__global__ void __launch_bounds__(kThreads) delta_bwd_scan_kernel(const __grid_constant__ BwdCall call) {
    extern __shared__ __align__(16) char smem_bytes[];
    const int64_t half = gridDim.x / 2, index = blockIdx.x;
    after_those_before();
    if (nothing_flagged(call)) return;
    if (index < half)
        scan<ScanConfig<D, kKda, true, false>>(call, smem_bytes, index, half);
    else
        scan<ScanConfig<D, kKda, false, false>>(call, smem_bytes, index - half, half);
}

template <class C>
__global__ void __launch_bounds__(kThreads) delta_segment_scan_kernel(const __grid_constant__ BwdCall call) {
    extern __shared__ __align__(16) char smem_bytes[];
    after_those_before();
    scan<C>(call, smem_bytes, blockIdx.x, gridDim.x);
}

// C: of the larger direction.
template <class C>
LaunchConfig scan_config(const BwdCall &call) {
    LaunchConfig config;
    config.grid.x = call.p.N * call.p.HV * C::kBlocksV;
    const int64_t most = call.w.flags ? kFlaggedGrid / 2 : int64_t{1} << 29;
    if (config.grid.x > most) config.grid.x = most;
    if (!C::kMap) config.grid.x *= 2;
    config.block.x = kThreads;
    config.smem_bytes = sizeof(ScanSmem<C>);
    config.stream = static_cast<cudaStream_t>(call.p.stream);
    config.programmatic = true;
    return config;
}

template <class C>
void launch_segment_scan(const BwdCall &call) {
    launch("delta_segment_scan_kernel", delta_segment_scan_kernel<C>, scan_config<C>(call), call);
}

// f<D, kKda>() for the call.
template <class F>
void for_config(const BwdParams &p, F f) {
    using std::bool_constant, std::integral_constant;
    const auto with_gate = [&](auto D) {
        p.family == Family::Kda ? f(D, bool_constant<true>{}) : f(D, bool_constant<false>{});
    };
    p.K == 128 ? with_gate(integral_constant<int, 128>{}) : with_gate(integral_constant<int, 64>{});
}

}  // namespace delta_bwd

void launch_delta_bwd_scans(const BwdCall &call) {
    using namespace delta_bwd;
    for_config(call.p, [&](auto D, auto kda) {
        launch("delta_bwd_scan_kernel", delta_bwd_scan_kernel<D.value, kda.value>,
               scan_config<ScanConfig<D.value, kda.value, true, false>>(call), call);
    });
}

void launch_delta_segment_scan(const BwdCall &call, bool backward) {
    using namespace delta_bwd;
    for_config(call.p, [&](auto D, auto kda) {
        backward ? launch_segment_scan<ScanConfig<D.value, kda.value, true, true>>(call)
                 : launch_segment_scan<ScanConfig<D.value, kda.value, false, true>>(call);
    });
}

}  // namespace linattn::cuda
