// What one token needs, as rows of float or double: the caller's q, k, g and beta converted, normalised and activated.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "memory.h"

namespace linattn::cpu {

template <class Real>
struct DeltaRows {
    Real *k, *decay;              // [chunk][K]; decay = exp(g), the same in every column for gdn
    Real *decayed_k, *decayed_q;  // [chunk][K]
    Real *beta, *qk, *gates;      // [chunk]; qk = q.k, gates: gdn's g, then exp(g)
    Real *fade;                   // [chunk], see Delta::plan_fades
    bool *renews;                 // [chunk]
    Real *bias;                   // [max(chunk, K)], dt_bias of the head
    Real *zeros;                  // [max(K, kCols)]
    Real *u, *o;                  // [chunk][kCols]; u is v before its token's turn
    Real *y, *z;                  // [kCols]
    Real *states;                 // [slots][K][kCols]

    DeltaRows(Cutter &cut, int64_t K, int64_t chunk, int64_t slots)
        : k(cut.take<Real>(chunk * K)),
          decay(cut.take<Real>(chunk * K)),
          decayed_k(cut.take<Real>(chunk * K)),
          decayed_q(cut.take<Real>(chunk * K)),
          beta(cut.take<Real>(chunk)),
          qk(cut.take<Real>(chunk)),
          gates(cut.take<Real>(chunk)),
          fade(cut.take<Real>(chunk)),
          renews(cut.take<bool>(chunk)),
          bias(cut.take<Real>(std::max(chunk, K))),
          zeros(cut.take<Real>(std::max(K, kCols<Real>))),
          u(cut.take<Real>(chunk * kCols<Real>)),
          o(cut.take<Real>(chunk * kCols<Real>)),
          y(cut.take<Real>(kCols<Real>)),
          z(cut.take<Real>(kCols<Real>)),
          states(cut.take<Real>(slots * K * kCols<Real>)) {}
};

// Gate of one head.
template <class Real>
struct GateOptions {
    Real amplitude, lower_bound;
    const Real *bias;
};

inline double value_at(const Tensor &x, int64_t i) {
    double value = 0;
    kernels<double>(Isa::Baseline).load(&value, 1, element(x, i), x.dtype, 0, 1, 1, 1);
    return value;
}

// exp(A_log) and the row of dt_bias; `bias` takes the row.
template <class Real>
GateOptions<Real> gate_options(const DeltaParams &p, int64_t head, Real *bias, int64_t n) {
    // Bounded, so that it times 0 is 0; any gate but 0 is then far below the smallest log decay.
    const double amplitude = p.A_log ? std::min(std::exp(value_at(p.A_log, head)), 1e30) : 1.0;
    const bool per_channel = p.family == Family::Kda;
    for (int64_t i = 0; i < n; ++i) bias[i] = 0;
    if (p.gate != Gate::None && p.dt_bias) {
        if (per_channel)
            kernels<Real>(Isa::Baseline).load(bias, n, element(p.dt_bias, head), p.dt_bias.dtype, 0, p.dt_bias.stride[1], 1, n);
        else
            std::fill_n(bias, n, static_cast<Real>(value_at(p.dt_bias, head)));
    }
    return {static_cast<Real>(amplitude), static_cast<Real>(p.lower_bound), bias};
}

// Tokens t .. t + size of batch entry b, for one value head.
struct TokenRun {
    int64_t b, t, size, head;
};

// Fills k, decay, decayed_k, decayed_q, beta and qk. `keeps`: this task is the one that writes kept_k and kept_g. `lazy`: for
// gdn, decay and decayed_k are left alone and decayed_q is q.
template <class Real>
void prepare_rows(const DeltaParams &p, const Kernels<Real> &kernel, const GateOptions<Real> &gate, const TokenRun &run,
                  bool keeps, bool lazy, const DeltaRows<Real> &rows) {
    const int64_t K = p.K, r = p.HV / p.H, k_head = run.head / r;
    const auto load = [&](Real *to, const Tensor &x, int64_t head) {
        kernel.load(to, K, element(x, run.b, run.t, head), x.dtype, x.stride[1], x.stride[3], run.size, K);
    };
    const auto load_scalars = [&](Real *to, const Tensor &x) {
        kernel.load(to, run.size, element(x, run.b, run.t, run.head), x.dtype, 0, x.stride[1], 1, run.size);
    };
    Real *const q = rows.decayed_q;  // until it is decayed
    load(rows.k, p.k, k_head);
    load(q, p.q, k_head);
    if (p.qk_l2norm) {
        kernel.unit(rows.k, K, run.size, K);
        kernel.unit(q, K, run.size, K);
    }
    if (p.kept_k && keeps && run.head % r == 0)
        kernel.store(element(p.kept_k, run.b, run.t, k_head), p.kept_k.dtype, p.kept_k.stride[1], p.kept_k.stride[3], rows.k, K,
                     run.size, K);

    if (p.family == Family::Kda) {
        load(rows.decay, p.g, run.head);
        if (p.gate != Gate::None)
            for (int64_t i = 0; i < run.size; ++i)
                kernel.gate(rows.decay + i * K, gate.bias, K, p.gate, gate.amplitude, gate.lower_bound);
        if (p.kept_g && keeps)
            kernel.store(element(p.kept_g, run.b, run.t, run.head), p.kept_g.dtype, p.kept_g.stride[1], p.kept_g.stride[3],
                         rows.decay, K, run.size, K);
        kernel.exp(rows.decay, run.size * K);
    } else {
        load_scalars(rows.gates, p.g);
        kernel.gate(rows.gates, gate.bias, run.size, p.gate, gate.amplitude, gate.lower_bound);
        if (p.kept_g && keeps)
            kernel.store(element(p.kept_g, run.b, run.t, run.head), p.kept_g.dtype, 0, p.kept_g.stride[1], rows.gates, run.size,
                         1, run.size);
        kernel.exp(rows.gates, run.size);
        for (int64_t i = 0; i < run.size && !lazy; ++i) std::fill_n(rows.decay + i * K, K, rows.gates[i]);
    }

    load_scalars(rows.beta, p.beta);
    kernel.beta(rows.beta, run.size, p.beta_form);
    for (int64_t i = 0; i < run.size; ++i)
        rows.qk[i] =
            kernel.fold(rows.decayed_k + i * K, q + i * K, lazy ? nullptr : rows.decay + i * K, rows.k + i * K, q + i * K, K);
}

}  // namespace linattn::cpu
