// The inner loops, one set for each instruction set, chosen at run time.
#pragma once
#include <cstdint>

#include "../ops.h"

namespace linattn::cpu {

// Columns of the state that are worked on together: with K = 128 the block takes 16 KiB and stays in the first cache.
template <class Real>
constexpr int64_t kCols = 128 / sizeof(Real);

// Matrices are row-major with `ld` elements from row to row; a block of the state is [K][kCols].
// Within one set equal inputs give equal bits, whatever op calls: every state update runs the same `advance`.
template <class Real>
struct Kernels {
    // Strided memory of any dtype to and from rows of Real.
    void (*load)(Real *dst, int64_t ld, const char *src, DType dtype, int64_t row_stride, int64_t col_stride, int64_t rows,
                 int64_t cols);
    void (*store)(char *dst, DType dtype, int64_t row_stride, int64_t col_stride, const Real *src, int64_t ld, int64_t rows,
                  int64_t cols);
    // x = x / sqrt(sum x^2 + 1e-6), row by row.
    void (*unit)(Real *x, int64_t ld, int64_t rows, int64_t cols);
    // g = log decay of the raw gate input; beta = write strength of the logits; x = exp(x).
    void (*gate)(Real *g, const Real *bias, int64_t n, Gate gate, Real amplitude, Real lower_bound);
    void (*beta)(Real *beta, int64_t n, BetaForm form);
    void (*exp)(Real *x, int64_t n);
    // decayed_k = decay k, decayed_q = decay q, unless decay is null; returns q . k. decayed_q may be q.
    Real (*fold)(Real *decayed_k, Real *decayed_q, const Real *decay, const Real *k, const Real *q, int64_t K);
    // y = S^T decayed_k, z = S^T decayed_q
    void (*dots)(const Real *S, int64_t ld, const Real *decayed_k, const Real *decayed_q, Real *y, Real *z, int64_t K);
    // u = beta (v - fade y), o = scale (fade z + qk u), and u is written times u_scale; u may be v.
    void (*emit)(Real *u, Real *o, const Real *v, const Real *y, const Real *z, Real beta, Real qk, Real scale, Real fade,
                 Real u_scale);
    // S_out = decay S + k u^T, and in the same pass, for the token that follows, the dots with S_out. S_out may be S.
    void (*advance)(const Real *S, int64_t ld, Real *S_out, int64_t ld_out, const Real *decay, const Real *k, const Real *u,
                    const Real *next_decayed_k, const Real *next_decayed_q, Real *y, Real *z, int64_t K);
    // The same without a decay.
    void (*grow)(const Real *S, int64_t ld, Real *S_out, int64_t ld_out, const Real *k, const Real *u, const Real *next_k,
                 const Real *next_q, Real *y, Real *z, int64_t K);
};

enum class Isa { Baseline, Avx2, Avx512 };

// The best that this processor has; LINATTN_CPU_ISA = baseline | avx2 | avx512 lowers it.
Isa detect_isa();

template <class Real>
const Kernels<Real> &kernels(Isa isa);

template <>
const Kernels<float> &kernels<float>(Isa isa);
template <>
const Kernels<double> &kernels<double>(Isa isa);

}  // namespace linattn::cpu
