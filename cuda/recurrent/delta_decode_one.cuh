// Decode of one token per sequence, the call that a serving loop makes: what delta_decode_direct_kernel does, and no more.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// Grid: one CTA per (sequence, value head, kWidth columns of V). Every load of a CTA is in flight at once, straight to registers.
//   few states   are bound by latency. The token has warps of its own, so that nobody's loads wait for another's addresses. From
//                a cold start instructions and parameters come from DRAM as data do: the code is short, the parameters fit a line.
//   many states  are bound by bandwidth, which many small CTAs keep busy: while one waits, others load and store. Each asks for
//                a piece of a later state to be brought to L2, so that loads return soon and the last CTAs are short.
//
// A thread holds the rows of one lane class lk (tile.cuh) in kCols columns of V. The order of the last two strides decides which:
//   V-first (K contiguous)   lane (lk, lv): a warp owns all of K and 4 kCols columns; three exchanges sum over K.
//   K-first (V contiguous)   kWidth/kCols lanes side by side hold a row. A warp's lanes exchange as far as its classes go, then
//                            the warps' sums meet in shared memory, in the order of the exchanges.
// So it sums in the order of every other kernel and agrees with them in bits.
//
// Schedule:  loads of token and state . q, k normalised; beta; gates . barrier . decay, S^T k, S^T q . exchanges
//            (K-first: barrier) . u . update . store . o
#pragma once
#include "common/launch.h"
#include "decode_one_call.cuh"
#include "ptx/cta.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/tma.cuh"
#include "recurrent.h"

namespace linattn::cuda::delta_decode_one {

template <int kD, bool kKdaGate, class StateT, bool kVFirstOrder, int kLaneColumns, int kColumns, int kCtas, bool kFewStates>
struct Config {
    static constexpr int D = kD, kWidth = kColumns, kCols = kLaneColumns, kResident = kCtas;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder, kFew = kFewStates;
    using State = StateT;
    static constexpr int kThreads = 8 * kWidth / kCols, kWarps = kThreads / 32, kSlices = D / kWidth;  // that hold the state
    // Few states: warps of their own for the token, in front: 0: q and k, 1: their product and beta, others: gates. Else the same
    // warps, gates from the middle on. K-first, what warp 1 has is waited for where the sums meet.
    static constexpr int kFirstGate = kFew ? 64 : kThreads / 2;
    static constexpr int kGateThreads = !kKda                      ? 32
                                        : kFew || kThreads / 2 > D ? D
                                                                   : kThreads / 2,
                         kGates = kKda ? D / kGateThreads : 1;
    static constexpr int kTokenThreads = kFew ? kFirstGate + kGateThreads : 0, kBlock = kTokenThreads + kThreads;
    static constexpr int kLate = kVFirst ? 0 : 32;  // few states: threads of warp 1 that come to kSumsMeet, not to kTokenReady
    static constexpr int kLanes = D / 8;            // that hold q and k
    static constexpr int kRows = D / 8;             // of a class
    static constexpr int kRowLanes = kWidth / kCols;     // K-first: lanes of a row
    static constexpr int kFinal = kVFirst ? 1 : kWarps;  // classes that the exchanges in a warp leave apart
    // A lane's sums, S^T k and S^T q of its columns, that are left after them.
    static constexpr int kSums = 2 * kCols * kFinal >= 8 ? 2 * kCols * kFinal / 8 : 1;
    static_assert(kWarps >= 4 && (kVFirst || kWarps <= 8), "roles of the warps, K-first: at most a class in each");
};

template <class C>
struct Smem {
    alignas(16) float q[C::D];  // after l2norm
    float k[C::D];
    float gamma[C::kKda ? C::D : 4];
    float beta, qk, over[2];                                                           // few states: q . k is qk times both
    alignas(16) float sum[2][C::kVFirst ? 1 : C::kWarps][C::kVFirst ? 1 : C::kWidth];  // S^T k and S^T q of each warp
};

// Of the threads that hold the state.
template <class C>
__device__ __forceinline__ uint32_t thread() {
    return threadIdx.x - C::kTokenThreads;
}

// Rows 32 j + 4 lk + i of K, in kCols columns of V.
template <class C>
struct Share {
    float s[C::kRows][C::kCols];
    uint32_t lk, column;

    __device__ __forceinline__ Share() {
        uint32_t lane = threadIdx.x % 32, warp = thread<C>() / 32;
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
    // Element 0 of the lane's vectors, and from there to vector n, from the slice's first element on.
    __device__ __forceinline__ uint32_t first() const { return C::kVFirst ? column * C::D + 4 * lk : 4 * lk * C::D + column; }
    static __device__ __forceinline__ int place(int n) {
        return C::kVFirst ? n % C::kCols * C::D + 32 * (n / C::kCols) : (32 * (n / 4) + n % 4) * C::D;
    }
    __device__ __forceinline__ float &value(int n, int i) {
        return C::kVFirst ? s[n / C::kCols * 4 + i][n % C::kCols] : s[n][i];
    }

    // As loaded; it becomes s after the token's work, because to convert it is to wait for it.
    struct Raw {
        Vector v[kVectors];
    };
    __device__ __forceinline__ void fetch(const typename C::State *lane, Raw &raw) const {
#pragma unroll
        for (int n = 0; n < kVectors; ++n) raw.v[n] = *reinterpret_cast<const Vector *>(lane + place(n));
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
    __device__ __forceinline__ void store(typename C::State *lane) {
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
            *reinterpret_cast<Vector *>(lane + place(n)) = v;
        }
    }
};

// The first number that a lane of class lk is left with.
template <class C>
__device__ __forceinline__ uint32_t first_sum(uint32_t lk) {
    return lk / C::kFinal * (2 * C::kCols) / (8 / C::kFinal);
}

// 1/|x| as over_norms() of tokens.cuh, to the bit, of one vector.
template <int kGroup>
__device__ __forceinline__ float over_norm(const float (&x)[8]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    return rsqrtf(sum_over<kGroup>(squares) + 1e-6f);
}

// exp(log_decay()) of tokens.cuh, to the bit, from g, dt_bias and A_log as loaded. The state waits longest for this one: the two
// exponentials of what was loaded run beside one another, in front of the branches.
__device__ __forceinline__ float decay_factor(const Choices &c, uint32_t raw_g, uint32_t raw_bias, uint32_t raw_a_log) {
    float z = float_of(c.g, raw_g), amplitude = fminf(expf(float_of(c.A_log, raw_a_log)), 1e30f);
    z = c.dt_bias ? z + float_of(c.dt_bias, raw_bias) : z;
    amplitude = c.A_log ? amplitude : 1.0f;
    float e = expf(z);
    if (c.gate == Gate::None) return e;
    if (c.gate == Gate::Bounded) return expf(c.lower_bound * sigmoid(amplitude * z));
    float log = log1pf(e);
    return expf(-amplitude * (z > 20.0f ? z : log));
}

constexpr uint32_t kTokenReady = 1, kSumsMeet = 2;  // named barriers, few states

// A thread's part of the token: as loaded, then to shared memory, normalised and gated.
template <class C>
struct Token {
    uint32_t raw[8];
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int gate() { return static_cast<int>(threadIdx.x) - C::kFirstGate; }
    static __device__ __forceinline__ bool has_gate() { return gate() >= 0 && gate() < C::kGateThreads; }

    __device__ __forceinline__ void fetch_keys(const Params &p, uint32_t n, uint32_t head) {
        uint32_t key = head * p.key_of >> 16, at = 16 * (threadIdx.x % C::kLanes);
        uint4 q = *reinterpret_cast<const uint4 *>(p.q.at(n, key) + at);
        uint4 k = *reinterpret_cast<const uint4 *>(p.k.at(n, key) + at);
        raw[0] = q.x, raw[1] = q.y, raw[2] = q.z, raw[3] = q.w, raw[4] = k.x, raw[5] = k.y, raw[6] = k.z, raw[7] = k.w;
    }
    __device__ __forceinline__ void finish_keys(const Choices &c, Smem<C> &smem) const {
        float q[8], k[8];
        float qk = normalise<C::kLanes>(c, make_uint4(raw[0], raw[1], raw[2], raw[3]),
                                        make_uint4(raw[4], raw[5], raw[6], raw[7]), q, k);
        if (int lane = threadIdx.x; lane < C::kLanes) {
            store8(&smem.q[8 * lane], q);
            store8(&smem.k[8 * lane], k);
            smem.qk = qk;
        }
    }
    __device__ __forceinline__ void fetch_gates(const Params &p, const Choices &c, uint32_t n, uint32_t head) {
        const char *g = p.g.at(n, head), *bias = p.dt_bias.at(head);
#pragma unroll
        for (int i = 0; i <= 2 * C::kGates; ++i) raw[i] = 0;  // of what is not given
#pragma unroll
        for (int i = 0; i < C::kGates; ++i) {
            int element = C::kKda ? gate() + i * C::kGateThreads : 0;
            raw[i] = c.g.load(g, element);
            if (p.dt_bias.data) raw[C::kGates + i] = c.dt_bias.load(bias, element);  // no table of jumps, see GateChoice
        }
        if (c.A_log) raw[2 * C::kGates] = c.A_log.load(p.A_log.at(head));
    }
    __device__ __forceinline__ void finish_gates(const Choices &c, Smem<C> &smem) const {
#pragma unroll
        for (int i = 0; i < C::kGates; ++i)
            smem.gamma[C::kKda ? gate() + i * C::kGateThreads : 0] =
                decay_factor(c, raw[i], raw[C::kGates + i], raw[2 * C::kGates]);
    }

    __device__ __forceinline__ void fetch(const Params &p, const Choices &c, uint32_t n, uint32_t head) {
        if (warp() == 0)
            fetch_keys(p, n, head);
        else if (warp() == 1)
            raw[0] = c.beta.load(p.beta.at(n, head));
        else if (has_gate())
            fetch_gates(p, c, n, head);
    }
    __device__ __forceinline__ void finish(const Choices &c, Smem<C> &smem) const {
        if (warp() == 0)
            finish_keys(c, smem);
        else if (warp() == 1)
            smem.beta = beta_value(c, raw[0]);
        else if (has_gate())
            finish_gates(c, smem);
    }
    // Few states: all at once, since code that comes cold from memory is a straight line for each role then. A group of lanes has
    // q, the next one k. q . k is the second warp's, or its sum would stand before those of the norms.
    __device__ __forceinline__ void fetch_and_finish(const Params &p, const Choices &c, uint32_t n, uint32_t head,
                                                     Smem<C> &smem) {
        if (warp() == 0) {
            uint32_t at = threadIdx.x % C::kLanes, of_k = threadIdx.x / C::kLanes % 2;
            const View &view = of_k ? p.k : p.q;
            float x[8], over = 1.0f;
            unpack8(*reinterpret_cast<const uint4 *>(view.at(n, head * p.key_of >> 16) + 16 * at), c.q.dtype == DType::BF16, x);
            if (c.qk_l2norm) {
                over = over_norm<C::kLanes>(x);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] *= over;
            }
            if (2 * C::kLanes == 32 || threadIdx.x < 2 * C::kLanes) {
                store8((of_k ? smem.k : smem.q) + 8 * at, x);
                if (at == 0) smem.over[of_k] = over;
            }
            ptx::bar_arrive(kTokenReady, C::kBlock - C::kLate);
        } else if (warp() == 1) {
            float q[8], k[8];
            uint32_t beta = c.beta.load(p.beta.at(n, head));
            fetch_keys(p, n, head);
            unpack8(make_uint4(raw[0], raw[1], raw[2], raw[3]), c.q.dtype == DType::BF16, q);
            unpack8(make_uint4(raw[4], raw[5], raw[6], raw[7]), c.q.dtype == DType::BF16, k);
            smem.qk = product<C::kLanes>(q, k);
            smem.beta = beta_value(c, beta);
            if (C::kLate)
                ptx::bar_arrive(kSumsMeet, C::kThreads + C::kLate);
            else
                ptx::bar_arrive(kTokenReady, C::kBlock);
        } else {
            fetch_gates(p, c, n, head);
            finish_gates(c, smem);
            ptx::bar_arrive(kTokenReady, C::kBlock - C::kLate);
        }
    }
};

// How far ahead of their CTAs states are brought to L2: 6 to 10 MB are alike, 16 are too many, lines are lost before their use.
constexpr int64_t kAheadBytes = 8 << 20;

template <class C>
__global__ void __launch_bounds__(C::kBlock, C::kResident) delta_decode_one_kernel(const __grid_constant__ Params p) {
    __shared__ Smem<C> smem;
    uint32_t n = blockIdx.y, head = blockIdx.x / C::kSlices;
    Choices c(p.options, p.lower_bound);
    Token<C> token;
    if (C::kFew && threadIdx.x < C::kTokenThreads) {
        token.fetch_and_finish(p, c, n, head, smem);
        return;
    }
    auto read_row = [&](uint32_t of) {
        return p.read ? Row(p.read, p.read_stride, p.options.bits >> Options::kReadWide & 1, of) : Row(of);
    };
    Row row = read_row(n), to_row = row;
    if (p.write) to_row = Row(p.write, p.write_stride, p.options.bits >> Options::kWriteWide & 1, n);
    if (!C::kFew) token.fetch(p, c, n, head);
    uint32_t v_cta = blockIdx.x % C::kSlices * C::kWidth;
    auto of_cta = [&](const View &x) { return reinterpret_cast<uint16_t *>(x.at(n, head)) + v_cta; };
    if (!row.within(p.rows)) {
        if (uint32_t t = thread<C>(); t < C::kWidth / 2) reinterpret_cast<uint32_t *>(of_cta(p.o))[t] = 0;
        if (C::kFew) ptx::bar_sync(kTokenReady, C::kBlock - C::kLate);
        if (C::kFew && C::kLate) ptx::bar_sync(kSumsMeet, C::kThreads + C::kLate);
        return;
    }
    uint32_t written = to_row.within(p.rows) ? to_row.low : UINT32_MAX;
    Share<C> S;
    char *of_head = p.state + uint64_t{head} * p.state_head;
    auto of_lane = [&](uint32_t of) {
        return reinterpret_cast<typename C::State *>(of_head + uint64_t{of} * p.state_row) + S.first() +
               v_cta * (C::kVFirst ? C::D : 1);
    };
    typename Share<C>::Raw raw;
    S.fetch(of_lane(row.low), raw);
    // V-first: of the column whose sum a lane is left with.
    uint32_t own_first = first_sum<C>(S.lk), own_column = S.column + own_first % C::kCols;
    constexpr int kVWords = C::kVFirst ? 1 : C::kCols / 2;
    Columns<kVWords> v;
    if constexpr (C::kVFirst)
        v.x[0] = __uint_as_float(of_cta(p.v)[own_column]);
    else
        v = load_columns<kVWords>(reinterpret_cast<const float *>(of_cta(p.v) + S.column));
    if (!C::kFew && p.ahead && threadIdx.x == C::kThreads - 1 && n + p.ahead < gridDim.y) {
        constexpr uint32_t kBytes = C::kWidth * C::D * sizeof(typename C::State);
        if (Row next = read_row(n + p.ahead); next.within(p.rows))
            ptx::cp_async_bulk_prefetch(of_head + uint64_t{next.low} * p.state_row + blockIdx.x % C::kSlices * kBytes, kBytes);
    }
    if constexpr (C::kFew) {
        ptx::prefetch_global_l2(
            of_cta(p.o));  // the kernel ends with this store, and its page may be one that nothing else touched
        S.take(raw);       // before the barrier: what is computed meanwhile is computed for nothing
        ptx::bar_sync(kTokenReady, C::kBlock - C::kLate);
    } else {
        token.finish(c, smem);
        __syncthreads();
        S.take(raw);
    }
    float sum[2 * C::kCols] = {}, k[C::kRows], u[C::kCols], beta, qk;
    auto take_beta = [&] { beta = smem.beta, qk = C::kFew ? smem.qk * (smem.over[0] * smem.over[1]) : smem.qk; };
    if (!C::kFew || !C::kLate) take_beta();
    auto take_k = [&](int kk) {
        float4 k4 = share4(smem.k, S.lk, kk);
        k[kk] = k4.x, k[kk + 1] = k4.y, k[kk + 2] = k4.z, k[kk + 3] = k4.w;
    };
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float g1 = smem.gamma[0];
        float4 g4 = C::kKda ? share4(smem.gamma, S.lk, kk) : make_float4(g1, g1, g1, g1);
        float4 q4 = share4(smem.q, S.lk, kk);
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
    if constexpr (C::kVFirst) {
        float own = beta * (float_of(c.q, __float_as_uint(v.x[0])) - sum[0]);  // of use where the sum is of S^T k
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) u[r] = __shfl_sync(0xffffffffu, own, (threadIdx.x & 24) + 4 / C::kCols * r);
    } else {
        constexpr int kPiece = C::kSums < C::kCols ? C::kSums : C::kCols;
        uint32_t warp = thread<C>() / 32;
#pragma unroll
        for (int i = 0; i < C::kSums; i += kPiece) {
            Columns<kPiece> piece;
#pragma unroll
            for (int r = 0; r < kPiece; ++r) piece.x[r] = sum[i + r];
            uint32_t number = own_first + i;
            *reinterpret_cast<Columns<kPiece> *>(&smem.sum[number / C::kCols][warp][S.column + number % C::kCols]) = piece;
        }
        if constexpr (C::kFew) {
            ptx::bar_sync(kSumsMeet, C::kThreads + C::kLate);
            take_beta();
        } else {
            __syncthreads();
        }
        Columns<C::kCols> y = sum_over_warps<C::kCols>(smem.sum[0], S.column);
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) {
            uint32_t pair = __float_as_uint(v.x[r / 2]);
            u[r] = beta * (float_of(c.q, r % 2 ? pair >> 16 : pair & 0xffffu) - y.x[r]);
        }
    }
#pragma unroll
    for (int kk = 0; kk < C::kRows; ++kk) {
        if (!C::kVFirst && !C::kFew && kk % 4 == 0) take_k(kk);  // read again, for want of registers
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) S.s[kk][r] = __fmaf_rn(k[kk], u[r], S.s[kk][r]);
    }
    if (written != UINT32_MAX) S.store(of_lane(written));
    Results to = {of_cta(p.o), nullptr, p.scale, c.q.dtype == DType::BF16};
    if constexpr (C::kVFirst) {
        if (S.lk >= 4 && S.lk % (4 / C::kCols) == 0) {
            float u_own = u[0];
#pragma unroll
            for (int r = 1; r < C::kCols; ++r) u_own = own_first % C::kCols == r ? u[r] : u_own;
            to.o[own_column] = static_cast<uint16_t>(to.o_bits(sum[0], qk, u_own));
        }
    } else if (S.lk == 0) {
        Columns<C::kCols> z = sum_over_warps<C::kCols>(smem.sum[1], S.column);
        Columns<C::kCols / 2> words;
#pragma unroll
        for (int r = 0; r < C::kCols; r += 2)
            words.x[r / 2] = __uint_as_float(to.o_bits(z.x[r], qk, u[r]) | to.o_bits(z.x[r + 1], qk, u[r + 1]) << 16);
        *reinterpret_cast<Columns<C::kCols / 2> *>(to.o + S.column) = words;
    }
}

// Whether the call is one for this kernel: one token a sequence, strides of 32 bits, gates side by side.
inline bool fits(const DeltaParams &p) {
    if (p.op != Op::Decode || p.T != 1 || p.cu_seqlens || p.N > 65535 || p.P > INT32_MAX || p.HV * (p.HV / p.H) >= 65536)
        return false;
    if (p.family == Family::Kda && (p.g.stride[3] != 1 || (p.dt_bias && p.dt_bias.stride[1] != 1))) return false;
    for (const Tensor *t :
         {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.o, &p.A_log, &p.dt_bias, &p.state_in, &p.read_indices, &p.write_indices})
        for (int i = 0; i < 3; ++i)
            if (t->stride[i] < 0 || t->stride[i] * dtype_bytes(t->dtype) > UINT32_MAX) return false;
    return true;
}

template <class C>
void launch_config(const DeltaParams &p, int multiprocessors) {
    auto stride = [](const Tensor &t, int axis) { return static_cast<uint32_t>(t.stride[axis] * dtype_bytes(t.dtype)); };
    auto view = [&](const Tensor &t) { return View{t.data, stride(t, 0), stride(t, 2)}; };
    auto bits = [](auto value, int field) { return static_cast<uint32_t>(value) << field; };
    Params x = {};
    x.options.bits = bits(p.q.dtype, Options::kQ) | bits(p.g.dtype, Options::kG) | bits(p.beta.dtype, Options::kBeta) |
                     bits(p.A_log.dtype, Options::kALog) | bits(p.dt_bias.dtype, Options::kBias) |
                     bits(p.gate, Options::kGate) | bits(p.beta_form, Options::kBetaForm) | bits(p.qk_l2norm, Options::kNorm) |
                     bits(p.read_indices.dtype == DType::I64, Options::kReadWide) |
                     bits(p.write_indices.dtype == DType::I64, Options::kWriteWide);
    const int64_t ratio = p.HV / p.H;
    x.rows = static_cast<uint32_t>(p.P), x.key_of = static_cast<uint32_t>((65536 + ratio - 1) / ratio);
    x.scale = static_cast<float>(p.scale), x.lower_bound = static_cast<float>(p.lower_bound);
    if (p.N * p.HV * C::kSlices > int64_t{C::kResident} * multiprocessors)
        x.ahead = static_cast<uint32_t>(kAheadBytes / (p.HV * C::D * C::D * sizeof(typename C::State)));
    x.state = p.state_in.data, x.state_row = stride(p.state_in, 0), x.state_head = stride(p.state_in, 1);
    x.q = view(p.q), x.k = view(p.k), x.v = view(p.v), x.g = view(p.g), x.beta = view(p.beta), x.o = view(p.o);
    x.A_log = {p.A_log.data, stride(p.A_log, 0)}, x.dt_bias = {p.dt_bias.data, stride(p.dt_bias, 0)};
    x.read = p.read_indices.data, x.read_stride = stride(p.read_indices, 0);
    x.write = p.write_indices.data, x.write_stride = stride(p.write_indices, 0);
    if (x.write == x.read && x.write_stride == x.read_stride && p.write_indices.dtype == p.read_indices.dtype)
        x.write = nullptr;
    LaunchConfig config;
    config.grid.x = p.HV * C::kSlices;
    config.grid.y = p.N;
    config.block.x = C::kBlock;
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_decode_one_kernel", delta_decode_one_kernel<C>, config, x);
}

}  // namespace linattn::cuda::delta_decode_one
