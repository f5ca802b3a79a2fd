// The inner loops of the gradients, one set for each instruction set. A block of the state is [K][kCols], row-major.
#pragma once
#include "kernels.h"

namespace linattn::cpu {

// What the reverse step of one token reads, and where its gradients are added; D is the gradient of the state.
template <class Real>
struct ReverseToken {
    const Real *before, *after;  // [K][kCols], the state before and after the token
    const Real *q, *k, *decay;   // [K]
    const Real *d_o, *e, *u;     // [kCols]; e = v - (d S)^T k, u = beta e
    Real beta, scale;
    Real *D;             // [K][kCols]
    Real *dq, *dk, *dg;  // [K], added to; dg per channel
    Real *dv;            // [kCols]
    Real *dbeta;         // added to
};

template <class Real>
struct BwdKernels {
    // P = d S; e = v - P^T k; u = beta e; S_out = P + k u^T. e holds v on entry; S_out may be S.
    void (*forward)(const Real *S, Real *S_out, const Real *decay, const Real *k, Real *e, Real *u, Real beta, int64_t K);
    void (*reverse)(const ReverseToken<Real> &token, int64_t K);
    // D = d (D' - k (beta D'^T k)^T) with D' = D + q d_o^T; q is scaled already.
    void (*reverse_map)(Real *D, const Real *decay, const Real *k, const Real *q, const Real *d_o, Real beta, int64_t K);
    // C += A B for A of [rows][inner], B of [inner][kCols] and C of [rows][kCols].
    void (*multiply_add)(Real *C, const Real *A, const Real *B, int64_t rows, int64_t inner);
};

template <class Real>
const BwdKernels<Real> &bwd_kernels(Isa isa);

template <>
const BwdKernels<float> &bwd_kernels<float>(Isa isa);
template <>
const BwdKernels<double> &bwd_kernels<double>(Isa isa);

}  // namespace linattn::cpu
