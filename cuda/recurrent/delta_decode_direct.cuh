// Decode and verify, states straight between the pool and registers: the delta rule for at most a few tokens, in place.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// Grid: one CTA of kWidth/16 warps per (sequence, value head, kWidth columns of V). Every load of a CTA is in flight at once;
// while it waits for them, prepares its tokens or finishes, the other CTAs on its SM compute. Verify of many tokens is bound by
// arithmetic, and decode of few states by latency: both want many warps that do not wait for each other.
//
// A thread holds the rows of one lane class lk (tile.cuh) in four columns of V: D/2 floats. The order of the last two strides
// decides which threads:
//   V-first (K contiguous)   lane (lk, lv) as in tile.cuh: a warp owns all of K and 16 columns; three exchanges sum over K.
//   K-first (V contiguous)   kWidth/4 lanes side by side hold a row. A warp's lanes exchange as far as its classes go, then the
//                            warps' sums meet in shared memory, in the order of the exchanges.
// So every layout, width and kernel sums in the same order and agrees in bits.
//
// Schedule:  loads of row, tokens . loads of the state . tokens to shared memory . barrier .
//            for each token { decay, S^T k, S^T q . exchanges (K-first: barrier) . u . update . o } . store
// All tokens are in shared memory before the first step: a sequence has 16 kThreads/D of them at most, for verify 16.
//
// Shared memory: slots of 1.1 to 2 KB per token, and sums: below 50 KB.
// Registers: state 64, k 16, sums 8, a token as loaded 22: below 128, so that 16 warps fit an SM.
#pragma once
#include "common/launch.h"
#include "recurrent.h"
#include "tokens.cuh"

namespace linattn::cuda::delta_decode_direct {

template <int kD, bool kKdaGate, class StateT, bool kVFirstOrder, bool kVerifyOp, int kColumns>
struct Config {
    static constexpr int D = kD, kWidth = kColumns, kCols = 4;  // columns of V of a CTA, of a lane
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder, kVerify = kVerifyOp;
    using State = StateT;
    static constexpr int kThreads = 2 * kWidth, kWarps = kThreads / 32, kSlices = D / kWidth;
    static constexpr int kResident = 512 / kThreads;                  // CTAs on an SM
    static constexpr int kLanes = D / 8, kBlock = kThreads / kLanes;  // lanes per token, tokens at once
    static constexpr int kTokens = kVerify ? 16 : kBlock;             // tokens that a sequence may have
    static constexpr int kGates = kKda ? 8 : 1;                       // of a block, per thread
    static constexpr int kRows = D / 8;                               // of a class
    static constexpr int kRowLanes = kWidth / kCols;                  // K-first: lanes of a row
    static constexpr int kFinal = kVFirst ? 1 : kWarps;               // classes that the exchanges in a warp leave apart
    // A lane's sums, S^T k and S^T q of its columns, that are left after them.
    static constexpr int kSums = kFinal;
    static_assert(kVFirst || kWarps > 1, "K-first sums meet in shared memory");
};

template <class C>
struct Smem {
    TokenSlot<C::D, C::kKda, C::kWidth> token[C::kTokens];
    // S^T k and S^T q of each warp. Two of each: those of the next token are written while others read.
    alignas(16) float sum[2][2][C::kVFirst ? 1 : C::kWarps][C::kVFirst ? 1 : C::kWidth];
};

// Rows 32 j + 4 lk + i of K, in kCols columns of V.
template <class C>
struct Share {
    float s[C::kRows][C::kCols];
    int lk, column;

    __device__ __forceinline__ Share() {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        lk = C::kVFirst ? lane % 8 : warp + C::kWarps * (lane / C::kRowLanes);
        column = C::kCols * (C::kVFirst ? 4 * warp + lane / 8 : lane % C::kRowLanes);
    }

    static constexpr int kVector = C::kVFirst ? 4 : C::kCols;  // elements that lie side by side
    static constexpr int kVectors = C::kRows * C::kCols / kVector;
    static constexpr bool kF32 = sizeof(typename C::State) == 4;
    static constexpr int kWords = kF32 ? kVector : kVector / 2;
    struct alignas(4 * kWords) Vector {
        uint32_t word[kWords];
    };
    // Element n of the lane's vectors, from the slice's first element on.
    __device__ __forceinline__ int place(int n) const {
        return C::kVFirst ? (column + n % C::kCols) * C::D + 4 * lk + 32 * (n / C::kCols)
                          : (32 * (n / 4) + 4 * lk + n % 4) * C::D + column;
    }
    __device__ __forceinline__ float &value(int n, int i) {
        return C::kVFirst ? s[n / C::kCols * 4 + i][n % C::kCols] : s[n][i];
    }

    // As loaded; it becomes s after the first tokens' work, because to convert it is to wait for it.
    struct Raw {
        Vector v[kVectors];
    };
    __device__ __forceinline__ void fetch(const typename C::State *slice, Raw &raw) const {
#pragma unroll
        for (int n = 0; n < kVectors; ++n) raw.v[n] = *reinterpret_cast<const Vector *>(slice + place(n));
    }
    __device__ __forceinline__ void take(const Raw &raw) {
#pragma unroll
        for (int n = 0; n < kVectors; ++n)
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                uint32_t word = raw.v[n].word[kF32 ? i : i / 2];
                value(n, i) = __uint_as_float(kF32 ? word : i % 2 ? word & 0xffff0000u : word << 16);
            }
    }
    __device__ __forceinline__ void store(typename C::State *slice) {
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            Vector v;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                if constexpr (kF32) {
                    v.word[i] = __float_as_uint(value(n, i));
                } else {
                    __nv_bfloat162 pair = __floats2bfloat162_rn(value(n, 2 * i), value(n, 2 * i + 1));
                    v.word[i] = *reinterpret_cast<uint32_t *>(&pair);
                }
            }
            *reinterpret_cast<Vector *>(slice + place(n)) = v;
        }
    }
};

// Tokens on their way from global memory to the slots, a block at a time. kLanes threads take q, k and v of a token, a thread
// of the upper half of the CTA its beta and GDN's gate; KDA's gates are spread over all threads.
template <class C>
struct Tokens {
    // KDA: gate number i of a thread is of token i / kParts kStep + gate_token() of the block and of element
    // i % kParts kThreads + gate_element().
    static constexpr int kParts = C::kKda && C::D > C::kThreads ? C::D / C::kThreads : 1;
    static constexpr int kStep = C::D > C::kThreads ? 1 : C::kThreads / C::D;
    const DeltaParams &p;
    const Item &item;
    uint4 q, k, v;
    uint32_t g[C::kGates], beta, bias[kParts], a_log;

    static __device__ __forceinline__ int own() { return threadIdx.x / C::kLanes; }
    static __device__ __forceinline__ int lane() { return threadIdx.x % C::kLanes; }
    static __device__ __forceinline__ int scalar_token() { return static_cast<int>(threadIdx.x) - C::kThreads / 2; }
    static __device__ __forceinline__ int gate_token() { return kParts > 1 ? 0 : threadIdx.x / C::D; }
    static __device__ __forceinline__ int gate_element() { return threadIdx.x % C::D; }
    __device__ __forceinline__ bool has_scalar(int first) const {
        int t = scalar_token();
        return t >= 0 && t < C::kBlock && first + t < item.length;
    }

    __device__ __forceinline__ Tokens(const DeltaParams &params, const Item &of) : p(params), item(of) {}

    // Loads the block from token `first` on.
    __device__ __forceinline__ void fetch(int first) {
        if (int token = first + own(); token < item.length) {
            Item key = item;
            key.head = static_cast<uint32_t>(item.head) * static_cast<uint32_t>(p.H) / static_cast<uint32_t>(p.HV);
            auto load = [&](const Tensor &t, const Item &i, int column) {
                return *reinterpret_cast<const uint4 *>(reinterpret_cast<const uint16_t *>(t.data) + token_offset(t, i, token) +
                                                        column);
            };
            q = load(p.q, key, 8 * lane()), k = load(p.k, key, 8 * lane());
            if (8 * lane() < C::kWidth) v = load(p.v, item, item.v_cta + 8 * lane());
        }
        if (C::kKda || has_scalar(first)) {
            int element = C::kKda ? gate_element() : 0;
            if (p.A_log) a_log = load_bits(p.A_log, item.head * p.A_log.stride[0]);
            if (p.dt_bias) {
#pragma unroll
                for (int i = 0; i < kParts; ++i)
                    bias[i] = load_bits(p.dt_bias, item.head * p.dt_bias.stride[0] +
                                                       (C::kKda ? (element + i * C::kThreads) * p.dt_bias.stride[1] : 0));
            }
            if (!C::kKda) g[0] = load_bits(p.g, token_offset(p.g, item, first + scalar_token()));
        }
        if (has_scalar(first)) beta = load_bits(p.beta, token_offset(p.beta, item, first + scalar_token()));
        if constexpr (C::kKda) {
            int size = p.g.dtype == DType::F32 ? 4 : 2, token = first + gate_token();
            int64_t part = p.g.stride[3] * (size * C::kThreads), step = p.g.stride[1] * (size * kStep);
            const char *at =
                static_cast<const char *>(p.g.data) + size * (token_offset(p.g, item, token) + gate_element() * p.g.stride[3]);
#pragma unroll
            for (int i = 0; i < C::kGates; i += kParts, token += kStep, at += step) {
                if (token >= item.length) break;
#pragma unroll
                for (int j = 0; j < kParts; ++j)
                    g[i + j] = size == 4 ? *reinterpret_cast<const uint32_t *>(at + j * part)
                                         : *reinterpret_cast<const uint16_t *>(at + j * part);
            }
        }
    }

    // Normalised, gated and in float, to the block's slots; what verify keeps goes to global memory.
    __device__ __forceinline__ void finish(int first, TokenSlot<C::D, C::kKda, C::kWidth> *slots) const {
        bool keeps = C::kVerify && item.v_cta == 0;
        float amplitude = C::kKda || has_scalar(first) ? gate_amplitude(p, a_log) : 1.0f;
        if (first + (own() & -(32 / C::kLanes)) < item.length) {  // whole warps
            float x[8], y[8], qk = normalise<C::kLanes>(p, q, k, x, y);
            if (int token = first + own(); token < item.length) {
                auto &slot = slots[own()];
                store8(&slot.q[8 * lane()], x);
                store8(&slot.k[8 * lane()], y);
                if (keeps)
                    if (float *kept = Kept(p, item, token).k) store8(kept + 8 * lane(), y);
                if (8 * lane() < C::kWidth) {
                    unpack8(v, p.q.dtype == DType::BF16, x);
                    store8(&slot.v[8 * lane()], x);
                }
                if (lane() == 0) slot.qk = qk;
            }
        }
        if (has_scalar(first)) {
            auto &slot = slots[scalar_token()];
            if (!C::kKda) {
                float d = log_decay(p, gate_input(p, g[0], bias[0]), amplitude), gamma = expf(d);
                *reinterpret_cast<float4 *>(slot.gamma) = make_float4(gamma, gamma, gamma, gamma);
                if (keeps)
                    if (float *kept = Kept(p, item, first + scalar_token()).g) *kept = d;
            }
            slot.beta = beta_value(p, beta);
            slot.scale = static_cast<float>(p.scale);
        }
        if constexpr (C::kKda) {
            // Inputs to where the results go, then a loop over them: unrolled, it would be the largest part of the kernel.
            int token = gate_token();
#pragma unroll
            for (int i = 0; i < C::kGates; i += kParts) {
                if (first + token + i / kParts * kStep >= item.length) break;
#pragma unroll
                for (int j = 0; j < kParts; ++j)
                    slots[token + i / kParts * kStep].gamma[gate_element() + j * C::kThreads] =
                        gate_input(p, g[i + j], bias[j]);
            }
#pragma unroll 1
            for (; token < C::kBlock && first + token < item.length; token += kStep)
#pragma unroll 1
                for (int element = gate_element(); element < C::D; element += C::kThreads) {
                    float &at = slots[token].gamma[element], d = log_decay(p, at, amplitude);
                    at = expf(d);
                    if (keeps && p.kept_g)
                        reinterpret_cast<float *>(p.kept_g.data)[token_offset(p.kept_g, item, first + token) + element] = d;
                }
        }
    }
};

// The first number that a lane of class lk is left with.
template <class C>
__device__ __forceinline__ int first_sum(int lk) {
    return lk & (8 - C::kSums);
}

// One token. turn: its number in the sequence.
template <class C>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, const TokenSlot<C::D, C::kKda, C::kWidth> &x, int turn,
                                     const Results &to) {
    float sum[2 * C::kCols] = {}, k[C::kRows], u[C::kCols];
    auto take_k = [&](int kk) {
        float4 k4 = share4(x.k, S.lk, kk);
        k[kk] = k4.x, k[kk + 1] = k4.y, k[kk + 2] = k4.z, k[kk + 3] = k4.w;
    };
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 g4 = gamma4(x, S.lk, kk), q4 = share4(x.q, S.lk, kk);
        const float g[4] = {g4.x, g4.y, g4.z, g4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
        take_k(kk);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < C::kCols; ++r) {
                float &s = S.s[kk + i][r];
                s = __fmul_rn(s, g[i]);
                sum[r] = fmaf(s, k[kk + i], sum[r]);
                sum[C::kCols + r] = fmaf(s, q[i], sum[C::kCols + r]);
            }
    }
    sum_in_warp<C>(sum, S.lk);
    float4 scalars = *reinterpret_cast<const float4 *>(&x.beta);
    float beta = scalars.x, qk = scalars.y;
    Results out = to;
    out.scale = scalars.z;
    int first = first_sum<C>(S.lk);
    if constexpr (C::kVFirst) {
        int r = first % C::kCols, own_column = S.column + r;
        float own = beta * (x.v[own_column] - sum[0]);  // of use where the sum is of S^T k
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) u[i] = __shfl_sync(0xffffffffu, own, (threadIdx.x & 24) + i);
        if (first >= C::kCols) {
            float u_own = r & 2 ? (r & 1 ? u[3] : u[2]) : (r & 1 ? u[1] : u[0]);
            out.o[own_column] = static_cast<uint16_t>(out.o_bits(sum[0], qk, u_own));
        } else if (C::kVerify && out.kept_u) {
            out.kept_u[own_column] = own;
        }
    } else {
        auto &part = smem.sum[turn % 2];
        constexpr int kPiece = C::kSums < C::kCols ? C::kSums : C::kCols;
        int warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < C::kSums; i += kPiece) {
            Columns<kPiece> piece;
#pragma unroll
            for (int r = 0; r < kPiece; ++r) piece.x[r] = sum[i + r];
            int number = first + i;
            *reinterpret_cast<Columns<kPiece> *>(&part[number / C::kCols][warp][S.column + number % C::kCols]) = piece;
        }
        __syncthreads();
        Columns<C::kCols> v = load_columns<C::kCols>(&x.v[S.column]), y = sum_over_warps<C::kCols>(part[0], S.column), all;
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) u[r] = all.x[r] = beta * (v.x[r] - y.x[r]);
        if (S.lk == turn % 8) {
            Columns<C::kCols> z = sum_over_warps<C::kCols>(part[1], S.column);
            Columns<C::kCols / 2> words;
#pragma unroll
            for (int r = 0; r < C::kCols; r += 2)
                words.x[r / 2] = __uint_as_float(out.o_bits(z.x[r], qk, u[r]) | out.o_bits(z.x[r + 1], qk, u[r + 1]) << 16);
            *reinterpret_cast<Columns<C::kCols / 2> *>(out.o + S.column) = words;
            if (C::kVerify && out.kept_u) *reinterpret_cast<Columns<C::kCols> *>(out.kept_u + S.column) = all;
        }
    }
#pragma unroll
    for (int kk = 0; kk < C::kRows; ++kk) {
        if (!C::kVFirst && kk % 4 == 0) take_k(kk);  // read again, for want of registers
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) S.s[kk][r] = __fmaf_rn(k[kk], u[r], S.s[kk][r]);
    }
}

template <class C>
__device__ __forceinline__ void run_slice(const DeltaParams &p, Smem<C> &smem) {
    int n = blockIdx.y, head = static_cast<int>(blockIdx.x) / C::kSlices;
    int v_cta = static_cast<int>(blockIdx.x) % C::kSlices * C::kWidth;
    auto bits_of = [&](const Tensor &table) { return table ? load_int_bits(table, n * table.stride[0]) : 0; };
    auto row_of = [&](const Tensor &table, uint64_t bits, int64_t rows) {
        int64_t row = table ? int_of(table, bits) : n;
        return row >= 0 && row < rows ? static_cast<int>(row) : -1;
    };
    auto slice_of = [&](const Tensor &t, int row) {
        return reinterpret_cast<typename C::State *>(t.data) + row * t.stride[0] + head * t.stride[1] +
               v_cta * (C::kVFirst ? C::D : 1);
    };
    uint64_t read_bits = bits_of(p.read_indices), write_bits = !C::kVerify ? bits_of(p.write_indices) : 0;
    Share<C> S;
    typename Share<C>::Raw raw;
    // Without a table the state is the first load, else the tokens are: they are on their way while the row is. Where they take
    // more than one block, they come before the state, for want of registers.
    constexpr bool kOneBlock = C::kTokens <= C::kBlock;
    bool direct = kOneBlock && !p.read_indices && n < p.P;
    if (direct) S.fetch(slice_of(p.state_in, n), raw);
    Item item = make_item(p, n, head, v_cta);
    Tokens<C> tokens(p, item);
    tokens.fetch(0);
    if (!direct) {
        int row = row_of(p.read_indices, read_bits, p.P);
        if (row < 0) {
            zero_outputs<C::D, C::kKda, C::kWidth, C::kVerify, C::kThreads>(p, item, threadIdx.x);
            return;
        }
        if constexpr (!kOneBlock) {
#pragma unroll 1
            for (int first = 0;;) {
                tokens.finish(first, smem.token + first);
                if ((first += C::kBlock) >= item.length) break;
                tokens.fetch(first);
            }
        }
        S.fetch(slice_of(p.state_in, row), raw);
    }
    if constexpr (kOneBlock) tokens.finish(0, smem.token);
    int write = !C::kVerify && p.state_out ? row_of(p.write_indices, write_bits, p.F) : -1;
    Results to = {reinterpret_cast<uint16_t *>(p.o.data) + token_offset(p.o, item, 0) + v_cta, nullptr, 0.0f,
                  p.o.dtype == DType::BF16};
    if (C::kVerify && p.kept_u) to.kept_u = reinterpret_cast<float *>(p.kept_u.data) + token_offset(p.kept_u, item, 0) + v_cta;
    S.take(raw);
    __syncthreads();
    for (int t = 0; t < item.length; ++t) {
        step<C>(S, smem, smem.token[t], t, to);
        to.o += p.o.stride[1];
        if (C::kVerify && to.kept_u) to.kept_u += p.kept_u.stride[1];
    }
    if (write >= 0) S.store(slice_of(p.state_out, write));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) delta_decode_direct_kernel(const __grid_constant__ DeltaParams p) {
    extern __shared__ __align__(16) char smem_bytes[];
    if (blockIdx.y < p.N) run_slice<C>(p, *reinterpret_cast<Smem<C> *>(smem_bytes));
    zero_tail<C::D, C::kThreads>(p, blockIdx.y * gridDim.x + blockIdx.x, gridDim.y * gridDim.x);
}

template <class C>
void launch_config(const DeltaParams &p) {
    LaunchConfig config;
    config.grid.x = p.HV * C::kSlices;
    config.grid.y = p.N;
    if (p.zero_tail && config.grid.x * config.grid.y < 128) config.grid.y = (127 + config.grid.x) / config.grid.x;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_decode_direct_kernel", delta_decode_direct_kernel<C>, config, p);
}

}  // namespace linattn::cuda::delta_decode_direct
