// A token on its way from global to shared memory: q, k, v, g and beta as they lie, then normalised, gated and in float.
// A group of D/8 lanes handles one token, 8 elements of each vector a lane.
#pragma once
#include "tile.cuh"

namespace linattn::cuda {

// What the recurrence reads of one token, of the kColumns columns of V that a CTA owns.
template <int D, bool kKda, int kColumns>
struct alignas(16) TokenSlot {
    float q[D], k[D];           // permuted (tile.cuh), after l2norm
    float gamma[kKda ? D : 4];  // decay factors, permuted; GDN: one, four times
    float v[kColumns];
    float beta, qk, unused[2];  // qk = q . k
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

// Log decay from the raw gate input; a = exp(A_log).
__device__ __forceinline__ float log_decay(const DeltaParams &p, float x, float a) {
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

// kKeep: verify, which gives k and g as used back to the caller.
template <int D, bool kKda, int kColumns, bool kKeep>
struct TokenLoader {
    static constexpr int kGroup = D / 8;
    using Slot = TokenSlot<D, kKda, kColumns>;
    const DeltaParams &p;
    const Item &item;
    int lane_in_group = threadIdx.x % kGroup;
    int head_qk;
    float amplitude = 1.0f, bias = 0.0f, bias8[8] = {};
    uint4 q{}, k{}, v{};
    float g8[8] = {}, g = 0.0f, beta = 0.0f;

    __device__ TokenLoader(const DeltaParams &params, const Item &i) : p(params), item(i) {
        head_qk = item.head / ratio();
        if (p.A_log)
            amplitude = fminf(expf(load_float(p.A_log, item.head * p.A_log.stride[0])), 1e30f);  // inf would make inf x 0
        if (!p.dt_bias) return;
        if constexpr (kKda) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                bias8[i] =
                    load_float(p.dt_bias, item.head * p.dt_bias.stride[0] + (8 * lane_in_group + i) * p.dt_bias.stride[1]);
        } else {
            bias = load_float(p.dt_bias, item.head * p.dt_bias.stride[0]);
        }
    }

    __device__ __forceinline__ int ratio() const { return static_cast<int>(p.HV) / static_cast<int>(p.H); }
    __device__ __forceinline__ int64_t offset_qk(const Tensor &t, int token) const {
        return item.batch * t.stride[0] + (item.bos + token) * t.stride[1] + head_qk * t.stride[2];
    }
    static __device__ __forceinline__ uint4 load8(const Tensor &t, int64_t offset) {
        return *reinterpret_cast<const uint4 *>(reinterpret_cast<const uint16_t *>(t.data) + offset);
    }
    __device__ void store8(const Tensor &t, int64_t offset, const float (&x)[8]) const {
        float4 *to = reinterpret_cast<float4 *>(reinterpret_cast<float *>(t.data) + offset + 8 * lane_in_group);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }

    // The loads of this group's token; none for a token past the sequence.
    __device__ __forceinline__ void fetch(int token) {
        if (token >= item.length) return;
        q = load8(p.q, offset_qk(p.q, token) + 8 * lane_in_group);
        k = load8(p.k, offset_qk(p.k, token) + 8 * lane_in_group);
        if (8 * lane_in_group < kColumns) v = load8(p.v, token_offset(p.v, item, token) + item.v_cta + 8 * lane_in_group);
        if constexpr (kKda) {
            int64_t from = token_offset(p.g, item, token) + 8 * lane_in_group * p.g.stride[3];
#pragma unroll
            for (int i = 0; i < 8; ++i) g8[i] = load_float(p.g, from + i * p.g.stride[3]);
        } else {
            g = load_float(p.g, token_offset(p.g, item, token));
        }
        beta = load_float(p.beta, token_offset(p.beta, item, token));
    }

    // Whole warps call it, with the same token as fetch.
    __device__ __forceinline__ void deposit(int token, Slot &slot) {
        bool bf16 = p.q.dtype == DType::BF16;
        float x[8], y[8], qq = 0.0f, kk = 0.0f, qk = 0.0f;
        unpack8(q, bf16, x);
        unpack8(k, bf16, y);
        if (p.qk_l2norm) {  // x / sqrt(sum x^2 + 1e-6)
#pragma unroll
            for (int i = 0; i < 8; ++i) qq += x[i] * x[i], kk += y[i] * y[i];
            float rq = 1.0f / sqrtf(sum_over<kGroup>(qq) + 1e-6f), rk = 1.0f / sqrtf(sum_over<kGroup>(kk) + 1e-6f);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= rq, y[i] *= rk;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) qk += x[i] * y[i];
        qk = sum_over<kGroup>(qk);
        if (token >= item.length) return;
        bool keep = kKeep && item.v_cta == 0;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            int to = permuted<D>(8 * lane_in_group + i);
            *reinterpret_cast<float4 *>(&slot.q[to]) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            *reinterpret_cast<float4 *>(&slot.k[to]) = make_float4(y[i], y[i + 1], y[i + 2], y[i + 3]);
        }
        if (8 * lane_in_group < kColumns) {
            float w[8];
            unpack8(v, bf16, w);
            float4 *to = reinterpret_cast<float4 *>(&slot.v[8 * lane_in_group]);
            to[0] = make_float4(w[0], w[1], w[2], w[3]);
            to[1] = make_float4(w[4], w[5], w[6], w[7]);
        }
        if (keep && p.kept_k && head_qk * ratio() == item.head) store8(p.kept_k, offset_qk(p.kept_k, token), y);
        if constexpr (kKda) {
            float d[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                d[i] = log_decay(p, g8[i] + bias8[i], amplitude);
                slot.gamma[permuted<D>(8 * lane_in_group + i)] = expf(d[i]);
            }
            if (keep && p.kept_g) store8(p.kept_g, token_offset(p.kept_g, item, token), d);
        }
        if (lane_in_group != 0) return;
        if constexpr (!kKda) {
            float d = log_decay(p, g + bias, amplitude), gamma = expf(d);
            *reinterpret_cast<float4 *>(slot.gamma) = make_float4(gamma, gamma, gamma, gamma);
            if (keep && p.kept_g) reinterpret_cast<float *>(p.kept_g.data)[token_offset(p.kept_g, item, token)] = d;
        }
        float b = p.beta_form == BetaForm::Weight ? beta : sigmoid(beta);
        slot.beta = p.beta_form == BetaForm::LogitsX2 ? 2.0f * b : b;
        slot.qk = qk;
    }
};

// Decay factors of rows kk .. kk + 3 of lane lk.
template <int D, bool kKda, int kColumns>
__device__ __forceinline__ float4 gamma4(const TokenSlot<D, kKda, kColumns> &slot, int lk, int kk) {
    return kKda ? share4<D>(slot.gamma, lk, kk) : *reinterpret_cast<const float4 *>(slot.gamma);
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

// Rows of o past the last sequence, when o is ours.
template <int D, int kThreads>
__device__ void zero_tail(const DeltaParams &p) {
    if (!p.zero_tail || !p.cu_seqlens) return;
    for (int64_t t = clamped_start(p, p.N) + blockIdx.x; t < p.T; t += gridDim.x)
        for (int64_t i = threadIdx.x; i < p.HV * D; i += kThreads)
            reinterpret_cast<uint16_t *>(p.o.data)[t * p.o.stride[1] + i / D * p.o.stride[2] + i % D] = 0;
}

}  // namespace linattn::cuda
