// Decode and verify of few states: what delta_decode_kernel does, with each state spread over D/32 CTAs.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// Grid: one CTA of 4 warps per (sequence, value head, 32 columns of V). While the states do not fill the card, latency is all:
// the row from the table, the tokens and then the state are loads in flight together, straight to registers.
// A thread holds the rows of one lane class lk (tile.cuh) in two columns: 32 floats. Rows of a K-first slice are 128 bytes.
//   V-first  lanes of a warp are the eight classes of four pairs of columns; sums over K by three exchanges in the warp
//   K-first  half a warp is the 16 pairs of a class; sums meet in shared memory, in the order of those exchanges
// The order of summation is that of every other kernel, so the bits are the same.
//
// Schedule:  loads of row, tokens . loads of the state . tokens to shared memory . barrier .
//            for each token { decay, S^T k, S^T q . (K-first: barrier) . u . update . o } . store
// Tokens come in blocks of 1024/D; the next block's loads are in flight while one is computed.
#pragma once
#include "common/launch.h"
#include "recurrent.h"
#include "tokens.cuh"

namespace linattn::cuda::delta_decode_few {

template <int kD, bool kKdaGate, class StateT, bool kVFirstOrder>
struct Config {
    static constexpr int D = kD;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder;
    using State = StateT;
    static constexpr int kThreads = 128, kWidth = 32, kSlices = D / kWidth;  // columns of V of a CTA
    static constexpr int kLanes = D / 8, kBlock = kThreads / kLanes,
                         kRows = D / 8;  // lanes per token, tokens at once, rows of a class
};

template <class C>
struct Smem {
    TokenSlot<C::D, C::kKda, C::kWidth> token[C::kBlock];
    // K-first: S^T k and S^T q of each class. Two of each: those of the next token are written while others read.
    alignas(16) float sum[2][2][8][C::kVFirst ? 1 : C::kWidth];
};

// Rows 32 j + 4 lk + i of K, in two columns of V.
template <class C>
struct Share {
    float s[C::kRows][2];
    int lk, column;

    __device__ Share() {
        int t = threadIdx.x;
        lk = C::kVFirst ? t % 8 : t / 16;
        column = 2 * (C::kVFirst ? t / 8 : t % 16);
    }

    static constexpr int kVector = C::kVFirst ? 4 : 2;  // elements that lie side by side
    struct alignas(kVector * sizeof(typename C::State)) Vector {
        typename C::State x[kVector];
    };
    // f(element from the slice's first, kk, r): kVector values, of which value(kk, r, i) is number i.
    template <class F>
    __device__ __forceinline__ void for_each_vector(F f) const {
#pragma unroll
        for (int kk = 0; kk < C::kRows; kk += C::kVFirst ? 4 : 1)
#pragma unroll
            for (int r = 0; r < (C::kVFirst ? 2 : 1); ++r)
                f(C::kVFirst ? (column + r) * C::D + 8 * kk + 4 * lk : (32 * (kk / 4) + 4 * lk + kk % 4) * C::D + column, kk,
                  r);
    }
    __device__ __forceinline__ float &value(int kk, int r, int i) { return C::kVFirst ? s[kk + i][r] : s[kk][i]; }

    // As loaded; it becomes s after the first tokens' work, because to convert it is to wait for it.
    struct Raw {
        Vector v[C::kRows * 2 / kVector];
    };
    __device__ __forceinline__ void fetch(const typename C::State *slice, Raw &raw) const {
        int n = 0;
        for_each_vector([&](int at, int, int) { raw.v[n++] = *reinterpret_cast<const Vector *>(slice + at); });
    }
    __device__ __forceinline__ void take(const Raw &raw) {
        int n = 0;
        for_each_vector([&](int, int kk, int r) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) value(kk, r, i) = static_cast<float>(raw.v[n].x[i]);
            ++n;
        });
    }
    __device__ __forceinline__ void store(typename C::State *slice) {
        for_each_vector([&](int at, int kk, int r) {
            Vector v;
#pragma unroll
            for (int i = 0; i < kVector; ++i) v.x[i] = static_cast<typename C::State>(value(kk, r, i));
            *reinterpret_cast<Vector *>(slice + at) = v;
        });
    }
};

// K-first: the sums of the classes in the order of the exchanges.
template <int kWidth>
__device__ __forceinline__ Columns<2> sum_over_classes(const float (&part)[8][kWidth], int column) {
    Columns<2> p[8], total;
#pragma unroll
    for (int lk = 0; lk < 8; ++lk) p[lk] = load_columns<2>(&part[lk][column]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        total.x[r] = ((p[0].x[r] + p[4].x[r]) + (p[2].x[r] + p[6].x[r])) + ((p[1].x[r] + p[5].x[r]) + (p[3].x[r] + p[7].x[r]));
    return total;
}

template <class C, class Slot>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, const Slot &x, int token, const Results &to) {
    float y[2] = {}, z[2] = {}, u[2];  // S^T k, S^T q
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 g4 = gamma4(x, S.lk, kk), k4 = share4(x.k, S.lk, kk), q4 = share4(x.q, S.lk, kk);
        const float g[4] = {g4.x, g4.y, g4.z, g4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float &s = S.s[kk + i][r];
                s = __fmul_rn(s, g[i]);
                y[r] = fmaf(s, k[i], y[r]);
                z[r] = fmaf(s, q[i], z[r]);
            }
    }
    if constexpr (C::kVFirst) {
        int lane = threadIdx.x % 32, own_column = S.column + S.lk / 4;
        sum_over_lanes<2, 4>(y, S.lk);
        sum_over_lanes<2, 4>(z, S.lk);
        float own = x.beta * (x.v[own_column] - y[0]);
        u[0] = __shfl_sync(0xffffffffu, own, lane & 24), u[1] = __shfl_sync(0xffffffffu, own, (lane & 24) + 4);
        if (S.lk % 4 == 0) {
            if (to.kept_u) to.kept_u[own_column] = own;
            to.o[own_column] = static_cast<uint16_t>(to.o_bits(z[0], x.qk, own));
        }
    } else {
        auto &sum = smem.sum[token % 2];
        *reinterpret_cast<Columns<2> *>(&sum[0][S.lk][S.column]) = {y[0], y[1]};
        *reinterpret_cast<Columns<2> *>(&sum[1][S.lk][S.column]) = {z[0], z[1]};
        __syncthreads();
        Columns<2> v = load_columns<2>(&x.v[S.column]), total = sum_over_classes<C::kWidth>(sum[0], S.column);
        u[0] = x.beta * (v.x[0] - total.x[0]), u[1] = x.beta * (v.x[1] - total.x[1]);
        if (to.kept_u && S.lk == 2) *reinterpret_cast<Columns<2> *>(to.kept_u + S.column) = {u[0], u[1]};
        if (S.lk == 0) {
            total = sum_over_classes<C::kWidth>(sum[1], S.column);
            *reinterpret_cast<uint32_t *>(to.o + S.column) =
                to.o_bits(total.x[0], x.qk, u[0]) | to.o_bits(total.x[1], x.qk, u[1]) << 16;
        }
    }
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 k4 = share4(x.k, S.lk, kk);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) S.s[kk + i][r] = __fmaf_rn(k[i], u[r], S.s[kk + i][r]);
    }
}

template <class C>
__device__ __forceinline__ void run_slice(const DeltaParams &p, Smem<C> &smem) {
    int heads = static_cast<int>(p.HV), pair = blockIdx.x / C::kSlices, own = threadIdx.x / C::kLanes;
    int64_t n = pair / heads;
    uint64_t read_bits = p.read_indices ? load_int_bits(p.read_indices, n * p.read_indices.stride[0]) : 0;
    uint64_t write_bits = p.write_indices ? load_int_bits(p.write_indices, n * p.write_indices.stride[0]) : 0;
    Item item = make_item(p, n, pair % heads, blockIdx.x % C::kSlices * C::kWidth);
    TokenSource<C::D, C::kKda, C::kWidth> source(p, item);
    RawToken<C::kKda> token;
    RawGate<C::kKda> gate;
    source.fetch_gate(p, item.head, gate);
    auto fetch = [&](int t) {
        if (t < item.length) source.fetch(p, t, token);
    };
    auto finish = [&](int t) {
        deposit<C::D, C::kKda, C::kWidth>(p, token, gate, t < item.length, smem.token[own],
                                          [&] { return item.v_cta == 0 ? Kept(p, item, t) : Kept(); });
    };
    fetch(own);
    auto row_of = [&](const Tensor &table, uint64_t bits, int64_t rows) {
        int64_t row = table ? int_of(table, bits) : n;
        return row >= 0 && row < rows ? row : -1;
    };
    auto offset = [&](const Tensor &t, int64_t row) {
        return row * t.stride[0] + item.head * t.stride[1] + item.v_cta * t.stride[3];
    };
    int64_t read = row_of(p.read_indices, read_bits, p.P);
    if (read < 0) {
        zero_outputs<C::D, C::kKda, C::kWidth, true, C::kThreads>(p, item, threadIdx.x);
        return;
    }
    Share<C> S;
    typename Share<C>::Raw raw;
    S.fetch(reinterpret_cast<const typename C::State *>(p.state_in.data) + offset(p.state_in, read), raw);
    Results to = {reinterpret_cast<uint16_t *>(p.o.data) + token_offset(p.o, item, 0) + item.v_cta,
                  p.kept_u ? reinterpret_cast<float *>(p.kept_u.data) + token_offset(p.kept_u, item, 0) + item.v_cta : nullptr,
                  static_cast<float>(p.scale), p.o.dtype == DType::BF16};
    finish(own);
    S.take(raw);
    for (int first = 0; first < item.length; first += C::kBlock) {
        if (first) {
            __syncthreads();  // the slots are free
            finish(first + own);
        }
        __syncthreads();
        fetch(first + C::kBlock + own);
        for (int t = first; t < first + C::kBlock && t < item.length; ++t) {
            step<C>(S, smem, smem.token[t - first], t, to);
            to.o += p.o.stride[1];
            if (to.kept_u) to.kept_u += p.kept_u.stride[1];
        }
    }
    int64_t write = p.state_out ? row_of(p.write_indices, write_bits, p.F) : -1;
    if (write >= 0) S.store(reinterpret_cast<typename C::State *>(p.state_out.data) + offset(p.state_out, write));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 3) delta_decode_few_kernel(const __grid_constant__ DeltaParams p) {
    __shared__ Smem<C> smem;
    if (blockIdx.x < p.N * p.HV * C::kSlices) run_slice<C>(p, smem);
    zero_tail<C::D, C::kThreads>(p, blockIdx.x, gridDim.x);
}

template <class C>
void launch_config(const DeltaParams &p) {
    LaunchConfig config;
    config.grid.x = p.N * p.HV * C::kSlices;
    if (p.zero_tail && config.grid.x < 128) config.grid.x = (128 + C::kSlices - 1) / C::kSlices * C::kSlices;
    config.block.x = C::kThreads;
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_decode_few_kernel", delta_decode_few_kernel<C>, config, p);
}

}  // namespace linattn::cuda::delta_decode_few
