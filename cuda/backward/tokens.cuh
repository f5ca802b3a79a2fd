// What all passes of the backward share: where a sequence and a chunk lie, and single values of the caller's arrays.
#pragma once
#include "delta_bwd.h"
#include "ptx/cta.cuh"
#include "recurrent/tokens.cuh"

namespace linattn::cuda::delta_bwd {

// Element [row of T][token][head][column].
__device__ __forceinline__ int64_t element(const Tensor &t, int64_t b, int64_t token, int64_t head, int64_t column = 0) {
    return b * t.stride[0] + token * t.stride[1] + head * t.stride[2] + column * t.stride[3];
}

__device__ __forceinline__ float load_float(const Tensor &t, int64_t at) { return float_of(t, load_bits(t, at)); }

__device__ __forceinline__ void store_float(const Tensor &t, int64_t at, float x) {
    if (t.dtype == DType::F32)
        reinterpret_cast<float *>(t.data)[at] = x;
    else
        reinterpret_cast<uint16_t *>(t.data)[at] =
            t.dtype == DType::BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

// exp(A_log), bounded so that it times 0 is 0.
__device__ __forceinline__ float amplitude_of(const DeltaParams &p, int64_t head) {
    return p.A_log ? fminf(expf(load_float(p.A_log, head * p.A_log.stride[0])), 1e30f) : 1.0f;
}

// Raw gate input with its bias. `channel` is 0 for GDN.
__device__ __forceinline__ float gate_input(const DeltaParams &p, int64_t at, int64_t head, int64_t channel) {
    const float x = load_float(p.g, at);
    return p.dt_bias ? x + load_float(p.dt_bias, head * p.dt_bias.stride[0] + channel * p.dt_bias.stride[1]) : x;
}

// Through the gate: d(raw gate input x) from d(log decay); adds what A_log and dt_bias get.
__device__ __forceinline__ float through_gate(const DeltaParams &p, float x, float dg, float amplitude, float &dA,
                                              float &dbias) {
    float dx, log_amplitude;
    if (p.gate == Gate::Softplus) {
        dx = -amplitude * sigmoid(x) * dg;
        log_amplitude = dg == 0.0f ? 0.0f : dg * log_decay(p, x, amplitude);  // 0 at a full reset, whose log decay is -inf
    } else {
        const float at = amplitude * x;
        dx = dg * static_cast<float>(p.lower_bound) * amplitude * sigmoid(at) * sigmoid(-at);
        log_amplitude = dx == 0.0f ? 0.0f : dx * x;
    }
    dA += log_amplitude, dbias += dx;
    return dx;
}

// Through the form of beta: d(raw input x) from d(beta).
__device__ __forceinline__ float through_beta(const DeltaParams &p, float x, float dbeta) {
    if (p.beta_form == BetaForm::Weight) return dbeta;
    return dbeta * ((p.beta_form == BetaForm::LogitsX2 ? 2.0f : 1.0f) * sigmoid(x) * sigmoid(-x));
}

__device__ __forceinline__ float beta_of(const DeltaParams &p, float x) {
    if (p.beta_form == BetaForm::Weight) return x;
    return (p.beta_form == BetaForm::LogitsX2 ? 2.0f : 1.0f) * sigmoid(x);
}

// One chunk of one value head.
struct Chunk {
    int64_t row, b, token, head, key_head;  // first row of the workspace; row of T and first token of the caller's arrays
    int64_t index, n;                       // of all chunks; sequence
    int length;
};

// Gate inputs and betas of a chunk's tokens first .. as they lie in memory (GDN). The cases for types in load_float() are branches,
// behind which the compiler puts no further load, so each would wait for its own; here all are under way at once. Past the end the
// last token's come again.
template <int kCount>
struct GateBits {
    uint32_t gate[kCount], bias, beta[kCount];

    __device__ __forceinline__ GateBits(const DeltaParams &p, const Chunk &c, int first, bool wanted = true) {
        bias = 0;
        if (!wanted) return;
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int64_t t = c.token + (first + i < c.length ? first + i : c.length - 1);
            gate[i] = load_bits(p.g, element(p.g, c.b, t, c.head));
            beta[i] = load_bits(p.beta, element(p.beta, c.b, t, c.head));
        }
        if (p.dt_bias) bias = load_bits(p.dt_bias, c.head * p.dt_bias.stride[0]);
    }
    __device__ __forceinline__ float gate_input(const DeltaParams &p, int i) const {
        return p.dt_bias ? float_of(p.g, gate[i]) + float_of(p.dt_bias, bias) : float_of(p.g, gate[i]);
    }
};

// The chunk with this number: the sequence whose chunks begin at or before it, by bisection.
__device__ __forceinline__ Chunk find_chunk(const DeltaParams &p, const int *chunk_start, int64_t index, int64_t head) {
    int low = 0, high = static_cast<int>(p.N);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (chunk_start[middle] <= index ? low : high) = middle;
    }
    const Item item = make_item(p, low, static_cast<int>(head), 0);
    const int64_t first = (index - chunk_start[low]) * kBwdChunk, left = item.length - first;
    return {item.batch * p.T + item.bos + first,
            item.batch,
            item.bos + first,
            head,
            head / (p.HV / p.H),
            index,
            low,
            static_cast<int>(left < kBwdChunk ? left : kBwdChunk)};
}

// First in every kernel that follows another of the call: the next may start, and what those before wrote is there.
__device__ __forceinline__ void after_those_before() {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
}

// With flags: is the head without one, or are all of them? Then other kernels have done it.
__device__ __forceinline__ bool left_out(const BwdCall &call, int64_t n, int64_t head) {
    return call.w.flags && !call.w.flags[n * call.p.HV + head];
}
__device__ __forceinline__ bool nothing_flagged(const BwdCall &call) {
    return call.w.flags && !call.w.flags[call.p.N * call.p.HV];
}

// The state arrays of the workspace as a tensor [chunks][HV][K][V] whose columns of K are contiguous.
template <int D>
__device__ __forceinline__ Tensor chunk_states(float *data, int64_t HV) {
    Tensor t;
    t.data = reinterpret_cast<char *>(data);
    t.dtype = DType::F32;
    t.stride[0] = HV * D * D, t.stride[1] = D * D, t.stride[2] = 1, t.stride[3] = D;
    return t;
}

}  // namespace linattn::cuda::delta_bwd
