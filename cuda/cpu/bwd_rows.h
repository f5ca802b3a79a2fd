// What the gradients need of a run of tokens: inputs converted, normalised and activated, and the way back through each.
#pragma once
#include <algorithm>
#include <cmath>

#include "gates.h"
#include "rows.h"

namespace linattn::cpu {

// Tokens of one sequence: rows [first, first + length) of batch entry b.
struct SequenceSpan {
    int64_t b = 0, first = 0, length = 0;
};

inline SequenceSpan span_of_sequence(const DeltaParams &p, int64_t n) {
    if (!p.cu_seqlens) return {n, 0, p.T};
    const int64_t first = std::clamp<int64_t>(index_at(p.cu_seqlens, n), 0, p.T);
    const int64_t end = std::clamp<int64_t>(index_at(p.cu_seqlens, n + 1), first, p.T);
    return {0, first, end - first};
}

inline int64_t longest_sequence(const DeltaParams &p) {
    int64_t most = 0;
    for (int64_t n = 0; n < p.N; ++n) most = std::max(most, span_of_sequence(p, n).length);
    return most;
}

// Decays per token and head: one, or one per key channel.
inline int64_t gate_channels(const DeltaParams &p) { return p.family == Family::Kda ? p.K : 1; }

template <class Real>
struct TokenRows {
    Real *q, *k, *decay;  // [chunk][K]; decay = exp(g), the same in every column for gdn
    Real *gates, *steps;  // [chunk][channels]: g, and exp(g) for gdn
    Real *beta;           // [chunk]
    Real *bias;           // [channels], dt_bias of the head

    TokenRows(Cutter &cut, int64_t K, int64_t chunk, int64_t channels)
        : q(cut.take<Real>(chunk * K)),
          k(cut.take<Real>(chunk * K)),
          decay(cut.take<Real>(chunk * K)),
          gates(cut.take<Real>(chunk * channels)),
          steps(cut.take<Real>(chunk * channels)),
          beta(cut.take<Real>(chunk)),
          bias(cut.take<Real>(channels)) {}
};

// x[b, t + i, head, :] of `run`'s tokens, [size][cols], with rows `ld` apart.
template <class Real>
void load_tokens(const Kernels<Real> &kernel, Real *to, int64_t ld, const Tensor &x, const TokenRun &run, int64_t head,
                 int64_t col, int64_t cols) {
    kernel.load(to, ld, element(x, run.b, run.t, head, col), x.dtype, x.stride[1], x.stride[3], run.size, cols);
}
template <class Real>
void store_tokens(const Kernels<Real> &kernel, const Tensor &x, const TokenRun &run, int64_t head, int64_t col,
                  const Real *from, int64_t ld, int64_t cols) {
    kernel.store(element(x, run.b, run.t, head, col), x.dtype, x.stride[1], x.stride[3], from, ld, run.size, cols);
}

// g as it was given, [size][channels].
template <class Real>
void load_gates(const DeltaParams &p, const Kernels<Real> &kernel, const TokenRun &run, Real *to) {
    const int64_t channels = gate_channels(p);
    const int64_t column = p.family == Family::Kda ? p.g.stride[3] : 1;
    kernel.load(to, channels, element(p.g, run.b, run.t, run.head), p.g.dtype, p.g.stride[1], column, run.size, channels);
}
template <class Real>
void load_beta(const DeltaParams &p, const Kernels<Real> &kernel, const TokenRun &run, Real *to) {
    kernel.load(to, run.size, element(p.beta, run.b, run.t, run.head), p.beta.dtype, 0, p.beta.stride[1], 1, run.size);
}

template <class Real>
void prepare_tokens(const DeltaParams &p, const Kernels<Real> &kernel, const GateOptions<Real> &gate, const TokenRun &run,
                    const TokenRows<Real> &rows) {
    const int64_t K = p.K, k_head = run.head / (p.HV / p.H), channels = gate_channels(p);
    load_tokens(kernel, rows.k, K, p.k, run, k_head, 0, K);
    load_tokens(kernel, rows.q, K, p.q, run, k_head, 0, K);
    if (p.qk_l2norm) {
        kernel.unit(rows.k, K, run.size, K);
        kernel.unit(rows.q, K, run.size, K);
    }
    load_gates(p, kernel, run, rows.gates);
    for (int64_t i = 0; i < run.size; ++i)
        kernel.gate(rows.gates + i * channels, gate.bias, channels, p.gate, gate.amplitude, gate.lower_bound);
    Real *const steps = p.family == Family::Kda ? rows.decay : rows.steps;
    std::copy_n(rows.gates, run.size * channels, steps);
    kernel.exp(steps, run.size * channels);
    if (p.family == Family::Gdn)
        for (int64_t i = 0; i < run.size; ++i) std::fill_n(rows.decay + i * K, K, steps[i]);
    load_beta(p, kernel, run, rows.beta);
    kernel.beta(rows.beta, run.size, p.beta_form);
}

// d(log decay) to d(raw gate input), in place, for one token; x is g as given, `log_decay` what came of it. Adds to the
// gradients of A_log (one number) and dt_bias [channels].
//   softplus  g = -a softplus(x + bias):     dx = -a sigmoid(x + bias) dg,            dA_log += dg g
//   bounded   g = L s, s = sigmoid(a (x + bias)):  dx = dg L a s (1 - s),             dA_log += dx (x + bias)
template <class Real>
void gate_gradient(const DeltaParams &p, const GateOptions<Real> &gate, const Real *x, const Real *log_decay, Real *dg,
                   int64_t channels, double *dA_log, double *ddt_bias) {
    if (p.gate == Gate::None) return;
    double amplitude_sum = 0;
    for (int64_t c = 0; c < channels; ++c) {
        const Real input = x[c] + gate.bias[c];
        Real dx, log_amplitude;
        if (p.gate == Gate::Softplus) {
            log_amplitude = dg[c] == 0 ? 0 : dg[c] * log_decay[c];  // 0 at a full reset, whose log decay is -inf
            dx = -gate.amplitude * sigmoid(input) * dg[c];
        } else {
            const Real at = gate.amplitude * input;
            dx = dg[c] * gate.lower_bound * gate.amplitude * sigmoid(at) * sigmoid(-at);
            log_amplitude = dx == 0 ? 0 : dx * input;
        }
        dg[c] = dx;
        amplitude_sum += log_amplitude;
        ddt_bias[c] += dx;
    }
    *dA_log += amplitude_sum;
}

// d(write strength) to d(logits), in place; x is beta as given.
template <class Real>
void beta_gradient(BetaForm form, const Real *x, Real *dbeta, int64_t n) {
    const Real top = form == BetaForm::LogitsX2 ? 2 : 1;
    if (form != BetaForm::Weight)
        for (int64_t i = 0; i < n; ++i) dbeta[i] *= top * sigmoid(x[i]) * sigmoid(-x[i]);
}

// y = x r, r = 1 / sqrt(sum x^2 + 1e-6):  dx = r (dy - y (dy . y)), in place, row by row.
template <class Real>
void unit_gradient(const Real *x, Real *dy, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; ++i, x += cols, dy += cols) {
        Real squares = 0, along = 0;
        for (int64_t c = 0; c < cols; ++c) squares += x[c] * x[c], along += x[c] * dy[c];
        const Real r = Real(1) / std::sqrt(squares + Real(1e-6));
        for (int64_t c = 0; c < cols; ++c) dy[c] = r * (dy[c] - x[c] * (r * r * along));
    }
}

}  // namespace linattn::cpu
