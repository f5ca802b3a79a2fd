// A token on its way from global to shared memory: q, k, v, g and beta as they lie (fetch), then normalised, gated and in float
// (deposit). A group of D/8 lanes handles one token, 8 elements of each vector a lane.
#pragma once
#include "tile.cuh"

namespace linattn::cuda {

// What the recurrence reads of one token, of the kColumns columns of V that a CTA owns.
template <int D, bool kKda, int kColumns>
struct alignas(16) TokenSlot {
    float q[D], k[D];           // after l2norm
    float gamma[kKda ? D : 4];  // decay factors; GDN: one, four times
    float v[kColumns];
    float beta, qk, scale, unused;  // qk = q . k; scale of o, which decode reads here
};

// One sequence and value head of a call.
struct Item {
    int64_t n, bos;   // sequence, its first token
    int batch, head;  // row of B, value head
    int length;       // tokens; T is below 2^31
    int v_cta;        // first column of V of the CTA
};

__device__ __forceinline__ int64_t token_offset(const Tensor &t, const Item &item, int token) {
    return item.batch * t.stride[0] + (item.bos + token) * t.stride[1] + item.head * t.stride[2];
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Log decay from the raw gate input; a = exp(A_log). Here and below Params is DeltaParams, or what has its members of these names.
template <class Params>
__device__ __forceinline__ float log_decay(const Params &p, float x, float a) {
    if (p.gate == Gate::None) return x;
    if (p.gate == Gate::Softplus) return -a * (x > 20.0f ? x : log1pf(expf(x)));
    return static_cast<float>(p.lower_bound) * sigmoid(a * x);
}

template <int kLanes>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// A lane's share of a token, as loaded. Nothing is computed of it before deposit(): what follows a load waits for it, and the
// next load behind that.
template <bool kKda>
struct RawToken {
    uint4 q, k, v;
    uint32_t g[kKda ? 8 : 1], beta;
};

// The same of a head's dt_bias and A_log.
template <bool kKda>
struct RawGate {
    uint32_t bias[kKda ? 8 : 1], a_log;
};

__device__ __forceinline__ int heads_per_key(const DeltaParams &p) { return static_cast<int>(p.HV) / static_cast<int>(p.H); }

// The tokens of one sequence and head in global memory.
template <int D, bool kKda, int kColumns>
struct TokenSource {
    static constexpr int kGroup = D / 8;
    const uint16_t *q, *k, *v;
    int64_t g, beta;

    __device__ __forceinline__ TokenSource(const DeltaParams &p, const Item &item) {
        Item key = item;
        key.head = item.head / heads_per_key(p);
        auto at = [](const Tensor &t, const Item &i) {
            return reinterpret_cast<const uint16_t *>(t.data) + token_offset(t, i, 0) + 8 * lane();
        };
        q = at(p.q, key), k = at(p.k, key), v = at(p.v, item) + item.v_cta;
        g = token_offset(p.g, item, 0), beta = token_offset(p.beta, item, 0);
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % kGroup; }

    __device__ __forceinline__ void fetch(const DeltaParams &p, int token, RawToken<kKda> &raw) const {
        raw.q = *reinterpret_cast<const uint4 *>(q + token * p.q.stride[1]);
        raw.k = *reinterpret_cast<const uint4 *>(k + token * p.k.stride[1]);
        if (8 * lane() < kColumns) raw.v = *reinterpret_cast<const uint4 *>(v + token * p.v.stride[1]);
        int64_t from = g + token * p.g.stride[1];
        if constexpr (kKda) {
            from += 8 * lane() * p.g.stride[3];
            auto *words = reinterpret_cast<const uint32_t *>(p.g.data) + from;
            if (p.g.dtype == DType::F32 && p.g.stride[3] == 1 && reinterpret_cast<uintptr_t>(words) % 16 == 0) {
                uint4 low = reinterpret_cast<const uint4 *>(words)[0], high = reinterpret_cast<const uint4 *>(words)[1];
                raw.g[0] = low.x, raw.g[1] = low.y, raw.g[2] = low.z, raw.g[3] = low.w;
                raw.g[4] = high.x, raw.g[5] = high.y, raw.g[6] = high.z, raw.g[7] = high.w;
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) raw.g[i] = load_bits(p.g, from + i * p.g.stride[3]);
            }
        } else {
            raw.g[0] = load_bits(p.g, from);
        }
        raw.beta = load_bits(p.beta, beta + token * p.beta.stride[1]);
    }

    static __device__ __forceinline__ void fetch_gate(const DeltaParams &p, int head, RawGate<kKda> &raw) {
        if (p.A_log) raw.a_log = load_bits(p.A_log, head * p.A_log.stride[0]);
        if (!p.dt_bias) return;
#pragma unroll
        for (int i = 0; i < (kKda ? 8 : 1); ++i)
            raw.bias[i] =
                load_bits(p.dt_bias, head * p.dt_bias.stride[0] + (kKda ? (8 * lane() + i) * p.dt_bias.stride[1] : 0));
    }
};

// Where verify gives k and g as used back to the caller; null where it does not.
struct Kept {
    float *k = nullptr, *g = nullptr;

    __device__ __forceinline__ Kept() {}
    __device__ __forceinline__ Kept(const DeltaParams &p, Item item, int token) {
        if (p.kept_g) g = reinterpret_cast<float *>(p.kept_g.data) + token_offset(p.kept_g, item, token);
        if (!p.kept_k) return;
        int ratio = heads_per_key(p), key_head = item.head / ratio;
        if (key_head * ratio != item.head) return;
        item.head = key_head;
        k = reinterpret_cast<float *>(p.kept_k.data) + token_offset(p.kept_k, item, token);
    }
};

__device__ __forceinline__ void store8(float *to, const float (&x)[8]) {
    reinterpret_cast<float4 *>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4 *>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Of q and k of a token, 8 elements each in each of kGroup lanes: q . k.
template <int kGroup>
__device__ __forceinline__ float product(const float (&q)[8], const float (&k)[8]) {
    float qk = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) qk += q[i] * k[i];
    return sum_over<kGroup>(qk);
}

// With qk_l2norm, both over their norm. Returns what q . k is then to be multiplied by.
template <int kGroup, class Params>
__device__ __forceinline__ float over_norms(const Params &p, float (&q)[8], float (&k)[8]) {
    if (!p.qk_l2norm) return 1.0f;
    float qq = 0.0f, kk = 0.0f;  // x / sqrt(sum x^2 + 1e-6)
#pragma unroll
    for (int i = 0; i < 8; ++i) qq += q[i] * q[i], kk += k[i] * k[i];
    float rq = rsqrtf(sum_over<kGroup>(qq) + 1e-6f), rk = rsqrtf(sum_over<kGroup>(kk) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] *= rq, k[i] *= rk;
    return rq * rk;
}

// q and k as loaded, in float and over their norms; q . k is returned.
template <int kGroup, class Params>
__device__ __forceinline__ float normalise(const Params &p, const uint4 &raw_q, const uint4 &raw_k, float (&q)[8],
                                           float (&k)[8]) {
    bool bf16 = p.q.dtype == DType::BF16;
    unpack8(raw_q, bf16, q);
    unpack8(raw_k, bf16, k);
    float qk = product<kGroup>(q, k);
    return qk * over_norms<kGroup>(p, q, k);
}

// exp(A_log), held to what is finite: inf would make inf x 0.
template <class Params>
__device__ __forceinline__ float gate_amplitude(const Params &p, uint32_t a_log) {
    return p.A_log ? fminf(expf(float_of(p.A_log, a_log)), 1e30f) : 1.0f;
}

// What log_decay takes, from g and dt_bias as loaded.
template <class Params>
__device__ __forceinline__ float gate_input(const Params &p, uint32_t g, uint32_t bias) {
    float z = float_of(p.g, g);
    return p.dt_bias ? z + float_of(p.dt_bias, bias) : z;
}

template <class Params>
__device__ __forceinline__ float beta_value(const Params &p, uint32_t raw) {
    float b = float_of(p.beta, raw);
    if (p.beta_form != BetaForm::Weight) b = sigmoid(b);
    return p.beta_form == BetaForm::LogitsX2 ? 2.0f * b : b;
}

// A token into its slot. Whole warps call it; where `valid` is false nothing is written. kept_of() gives a Kept.
template <int D, bool kKda, int kColumns, class KeptOf>
__device__ __forceinline__ void deposit(const DeltaParams &p, const RawToken<kKda> &raw, const RawGate<kKda> &raw_gate,
                                        bool valid, TokenSlot<D, kKda, kColumns> &slot, KeptOf kept_of) {
    constexpr int kGroup = D / 8;
    int lane = threadIdx.x % kGroup;
    float x[8], y[8];
    float qk = normalise<kGroup>(p, raw.q, raw.k, x, y);
    if (!valid) return;
    Kept kept = kept_of();
    store8(&slot.q[8 * lane], x);
    store8(&slot.k[8 * lane], y);
    if (kept.k) store8(kept.k + 8 * lane, y);
    if (8 * lane < kColumns) {
        unpack8(raw.v, p.q.dtype == DType::BF16, x);
        store8(&slot.v[8 * lane], x);
    }
    float amplitude = gate_amplitude(p, raw_gate.a_log);
    if constexpr (kKda) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            y[i] = log_decay(p, gate_input(p, raw.g[i], raw_gate.bias[i]), amplitude), x[i] = expf(y[i]);
        store8(&slot.gamma[8 * lane], x);
        if (kept.g) store8(kept.g + 8 * lane, y);
    }
    if (lane != 0) return;
    if constexpr (!kKda) {
        float d = log_decay(p, gate_input(p, raw.g[0], raw_gate.bias[0]), amplitude), gamma = expf(d);
        *reinterpret_cast<float4 *>(slot.gamma) = make_float4(gamma, gamma, gamma, gamma);
        if (kept.g) *kept.g = d;
    }
    slot.beta = beta_value(p, raw.beta);
    slot.qk = qk;
}

// Decay factors of rows kk .. kk + 3 of lane lk.
template <int D, bool kKda, int kColumns>
__device__ __forceinline__ float4 gamma4(const TokenSlot<D, kKda, kColumns> &slot, int lk, int kk) {
    return kKda ? share4(slot.gamma, lk, kk) : *reinterpret_cast<const float4 *>(slot.gamma);
}

__device__ __forceinline__ int64_t clamped_start(const DeltaParams &p, int64_t n) {
    int64_t at = load_int(p.cu_seqlens, n * p.cu_seqlens.stride[0]);
    return at < 0 ? 0 : at > p.T ? p.T : at;
}

__device__ __forceinline__ Item make_item(const DeltaParams &p, int64_t n, int head, int v_cta) {
    Item item = {n, 0, static_cast<int>(n), head, static_cast<int>(p.T), v_cta};
    if (p.cu_seqlens) {
        item.batch = 0;
        item.bos = clamped_start(p, n);
        int64_t end = clamped_start(p, n + 1);
        item.length = end > item.bos ? static_cast<int>(end - item.bos) : 0;
    }
    return item;
}

// Where a token's results go: column 0 of o and of kept_u.
struct Results {
    uint16_t *o;
    float *kept_u;  // may be null
    float scale;
    bool bf16;

    __device__ __forceinline__ uint32_t o_bits(float x, float qk, float u) const {  // o = scale (S^T q + (q . k) u)
        float y = scale * fmaf(qk, u, x);
        return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(y)) : __half_as_ushort(__float2half_rn(y));
    }
};

// Padding: the outputs of the sequence's tokens are zero.
template <int D, bool kKda, int kColumns, bool kKeep, int kThreads>
__device__ void zero_outputs(const DeltaParams &p, const Item &item, int thread) {
    auto float_at = [](const Tensor &t, int64_t at) -> float & { return reinterpret_cast<float *>(t.data)[at]; };
    for (int64_t i = thread; i < int64_t{item.length} * kColumns; i += kThreads) {
        int token = static_cast<int>(i / kColumns), column = item.v_cta + static_cast<int>(i % kColumns);
        reinterpret_cast<uint16_t *>(p.o.data)[token_offset(p.o, item, token) + column] = 0;
        if (!kKeep) continue;
        if (p.kept_u) float_at(p.kept_u, token_offset(p.kept_u, item, token) + column) = 0.0f;
        if (p.kept_g && (kKda || column == 0))
            float_at(p.kept_g, token_offset(p.kept_g, item, token) + (kKda ? column : 0)) = 0.0f;
        Item k_item = item;
        k_item.head = static_cast<int>(item.head / (p.HV / p.H));
        if (p.kept_k && k_item.head * (p.HV / p.H) == item.head)
            float_at(p.kept_k, token_offset(p.kept_k, k_item, token) + column) = 0.0f;
    }
}

// Rows of o past the last sequence, when o is ours; by all CTAs.
template <int D, int kThreads>
__device__ void zero_tail(const DeltaParams &p, int64_t cta, int64_t ctas) {
    if (!p.zero_tail || !p.cu_seqlens) return;
    for (int64_t t = clamped_start(p, p.N) + cta; t < p.T; t += ctas)
        for (int64_t i = threadIdx.x; i < p.HV * D; i += kThreads)
            reinterpret_cast<uint16_t *>(p.o.data)[t * p.o.stride[1] + i / D * p.o.stride[2] + i % D] = 0;
}

}  // namespace linattn::cuda
