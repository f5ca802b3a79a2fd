// exp, the gates and the write strength, element by element, in a form that the compiler vectorises.
#pragma once
#include <cmath>
#include <cstdint>

#include "convert.h"

namespace linattn::cpu {

// exp in float, within 2 ulp. exp(x) = 2^n exp(r), x = n log 2 + r, |r| <= log(2)/2, Taylor to r^7 (remainder 6e-9).
// 0 at -inf, inf at +inf, nan stays nan.
LINATTN_INLINE float exp_of(float x) {
    const float above = x < -110.0f ? -110.0f : x;  // 2^-158 is 0
    const float bounded = above > 89.0f ? 89.0f : above;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23
    const float shifted = bounded * 1.44269504f + to_integer;
    const float n = shifted - to_integer;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // 2^n in two factors, each of which is a normal number.
    const int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(to_integer);
    const int32_t half = exponent >> 1;
    const float low = bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
    const float high = bit_cast<float>(static_cast<uint32_t>(exponent - half + 127) << 23);
    return p * low * high;
}
LINATTN_INLINE double exp_of(double x) { return std::exp(x); }

// log(1 + e) for e in [0,1]: 2 artanh(s), s = e / (2 + e) <= 1/3, series to s^15 (remainder 2e-9 relative).
LINATTN_INLINE float log1p_of(float e) {
    const float s = e / (2.0f + e), s2 = s * s;
    float p = 1.0f / 15;
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    p = p * s2 + 1.0f;
    return 2.0f * s * p;
}
LINATTN_INLINE double log1p_of(double e) { return std::log1p(e); }

// log(1 + exp(x)) without an exp of a positive number.
template <class Real>
LINATTN_INLINE Real softplus(Real x) {
    const Real magnitude = x < 0 ? -x : x;
    return (x > 0 ? x : Real(0)) + log1p_of(exp_of(-magnitude));
}

template <class Real>
LINATTN_INLINE Real sigmoid(Real x) {
    return Real(1) / (Real(1) + exp_of(-x));
}

// Raw gate input to log decay, in place; bias [n].
template <class Real>
LINATTN_INLINE void gate_row(Real *g, const Real *bias, int64_t n, Gate gate, Real amplitude, Real lower_bound) {
    if (gate == Gate::Softplus)
        for (int64_t i = 0; i < n; ++i) g[i] = -amplitude * softplus(g[i] + bias[i]);
    else if (gate == Gate::Bounded)
        for (int64_t i = 0; i < n; ++i) g[i] = lower_bound * sigmoid(amplitude * (g[i] + bias[i]));
}

template <class Real>
LINATTN_INLINE void beta_row(Real *beta, int64_t n, BetaForm form) {
    const Real top = form == BetaForm::LogitsX2 ? 2 : 1;
    if (form != BetaForm::Weight)
        for (int64_t i = 0; i < n; ++i) beta[i] = top * sigmoid(beta[i]);
}

template <class Real>
LINATTN_INLINE void exp_row(Real *x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = exp_of(x[i]);
}

}  // namespace linattn::cpu
