// Bodies of the inner loops, and their copies for x86-64, AVX2 with FMA, and AVX-512.
// A copy is a set of plain functions carrying a target attribute, into which the templates are always inlined, so that no
// AVX code ends up in an inline function shared with the rest of the library. The selects in gates.h and convert.h are
// vectorised only with -fno-trapping-math, which the build sets.
#include "kernels.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../error.h"
#include "convert.h"
#include "gates.h"

namespace linattn::cpu {
namespace {

// kBytes of consecutive numbers, in one register.
template <class Real, int kBytes>
struct Lanes {
    static constexpr int kCount = kBytes / sizeof(Real);
    typedef Real Vec __attribute__((vector_size(kBytes)));
    typedef Real Unaligned __attribute__((vector_size(kBytes), aligned(sizeof(Real)), may_alias));
};

template <class Real, int kBytes>
LINATTN_INLINE Real dot(const Real *a, const Real *b, int64_t n) {
    using L = Lanes<Real, kBytes>;
    typename L::Vec sum = {};
    int64_t i = 0;
    for (; i + L::kCount <= n; i += L::kCount)
        sum +=
            *reinterpret_cast<const typename L::Unaligned *>(a + i) * *reinterpret_cast<const typename L::Unaligned *>(b + i);
    Real total = 0;
    for (; i < n; ++i) total += a[i] * b[i];
    for (int lane = 0; lane < L::kCount; ++lane) total += sum[lane];
    return total;
}

template <class Real, int kBytes>
LINATTN_INLINE void unit_rows(Real *x, int64_t ld, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r) {
        Real *row = x + r * ld;
        const Real inverse = Real(1) / std::sqrt(dot<Real, kBytes>(row, row, cols) + Real(1e-6));
        for (int64_t c = 0; c < cols; ++c) row[c] *= inverse;
    }
}

template <class Real, int kBytes>
LINATTN_INLINE Real fold_row(Real *decayed_k, Real *decayed_q, const Real *decay, const Real *k, const Real *q, int64_t K) {
    const Real qk = dot<Real, kBytes>(q, k, K);
    if (!decay) return qk;
    for (int64_t i = 0; i < K; ++i) {
        decayed_k[i] = decay[i] * k[i];
        decayed_q[i] = decay[i] * q[i];
    }
    return qk;
}

template <class Real, int kBytes, int kVecs>
LINATTN_INLINE void dots_block(const Real *S, int64_t ld, const Real *decayed_k, const Real *decayed_q, Real *y, Real *z,
                               int64_t K) {
    using L = Lanes<Real, kBytes>;
    using Vec = typename L::Vec;
    using Unaligned = typename L::Unaligned;
    for (int64_t c = 0; c < kCols<Real>; c += kVecs * L::kCount) {
        Vec y_sum[kVecs] = {}, z_sum[kVecs] = {};
        for (int64_t i = 0; i < K; ++i) {
            const Real k_i = decayed_k[i], q_i = decayed_q[i];
            for (int n = 0; n < kVecs; ++n) {
                const Vec s = *reinterpret_cast<const Unaligned *>(S + i * ld + c + n * L::kCount);
                y_sum[n] += k_i * s;
                z_sum[n] += q_i * s;
            }
        }
        for (int n = 0; n < kVecs; ++n) {
            *reinterpret_cast<Unaligned *>(y + c + n * L::kCount) = y_sum[n];
            *reinterpret_cast<Unaligned *>(z + c + n * L::kCount) = z_sum[n];
        }
    }
}

template <class Real, int kBytes, int kVecs, bool kDecays>
LINATTN_INLINE void advance_block(const Real *S, int64_t ld, Real *S_out, int64_t ld_out, const Real *decay, const Real *k,
                                  const Real *u, const Real *next_decayed_k, const Real *next_decayed_q, Real *y, Real *z,
                                  int64_t K) {
    using L = Lanes<Real, kBytes>;
    using Vec = typename L::Vec;
    using Unaligned = typename L::Unaligned;
    for (int64_t c = 0; c < kCols<Real>; c += kVecs * L::kCount) {
        Vec u_c[kVecs], y_sum[kVecs] = {}, z_sum[kVecs] = {};
        for (int n = 0; n < kVecs; ++n) u_c[n] = *reinterpret_cast<const Unaligned *>(u + c + n * L::kCount);
        for (int64_t i = 0; i < K; ++i) {
            const Real decay_i = kDecays ? decay[i] : Real(1), k_i = k[i], next_k_i = next_decayed_k[i],
                       next_q_i = next_decayed_q[i];
            for (int n = 0; n < kVecs; ++n) {
                const Vec before = *reinterpret_cast<const Unaligned *>(S + i * ld + c + n * L::kCount);
                const Vec s = (kDecays ? decay_i * before : before) + k_i * u_c[n];
                *reinterpret_cast<Unaligned *>(S_out + i * ld_out + c + n * L::kCount) = s;
                y_sum[n] += next_k_i * s;
                z_sum[n] += next_q_i * s;
            }
        }
        for (int n = 0; n < kVecs; ++n) {
            *reinterpret_cast<Unaligned *>(y + c + n * L::kCount) = y_sum[n];
            *reinterpret_cast<Unaligned *>(z + c + n * L::kCount) = z_sum[n];
        }
    }
}

template <class Real>
LINATTN_INLINE void emit_row(Real *u, Real *o, const Real *v, const Real *y, const Real *z, Real beta, Real qk, Real scale,
                             Real fade, Real u_scale) {
    for (int64_t c = 0; c < kCols<Real>; ++c) {
        const Real u_c = beta * (v[c] - fade * y[c]);
        u[c] = u_c * u_scale;
        o[c] = scale * (fade * z[c] + qk * u_c);
    }
}

// One set: `attributes` select the instructions, `bytes` is the register width, `vecs` the registers of columns per pass.
#define LINATTN_KERNELS(name, Real, attributes, bytes, vecs)                                                                \
    namespace name {                                                                                                        \
    attributes void load(Real *dst, int64_t ld, const char *src, DType dtype, int64_t row_stride, int64_t col_stride,       \
                         int64_t rows, int64_t cols) {                                                                      \
        load_rows<Real>(dst, ld, src, dtype, row_stride, col_stride, rows, cols);                                           \
    }                                                                                                                       \
    attributes void store(char *dst, DType dtype, int64_t row_stride, int64_t col_stride, const Real *src, int64_t ld,      \
                          int64_t rows, int64_t cols) {                                                                     \
        store_rows<Real>(dst, dtype, row_stride, col_stride, src, ld, rows, cols);                                          \
    }                                                                                                                       \
    attributes void unit(Real *x, int64_t ld, int64_t rows, int64_t cols) { unit_rows<Real, bytes>(x, ld, rows, cols); }    \
    attributes void gate(Real *g, const Real *bias, int64_t n, Gate form, Real amplitude, Real lower_bound) {               \
        gate_row<Real>(g, bias, n, form, amplitude, lower_bound);                                                           \
    }                                                                                                                       \
    attributes void beta(Real *x, int64_t n, BetaForm form) { beta_row<Real>(x, n, form); }                                 \
    attributes void exp(Real *x, int64_t n) { exp_row<Real>(x, n); }                                                        \
    attributes Real fold(Real *decayed_k, Real *decayed_q, const Real *decay, const Real *k, const Real *q, int64_t K) {    \
        return fold_row<Real, bytes>(decayed_k, decayed_q, decay, k, q, K);                                                 \
    }                                                                                                                       \
    attributes void dots(const Real *S, int64_t ld, const Real *decayed_k, const Real *decayed_q, Real *y, Real *z,         \
                         int64_t K) {                                                                                       \
        dots_block<Real, bytes, vecs>(S, ld, decayed_k, decayed_q, y, z, K);                                                \
    }                                                                                                                       \
    attributes void emit(Real *u, Real *o, const Real *v, const Real *y, const Real *z, Real beta, Real qk, Real scale,     \
                         Real fade, Real u_scale) {                                                                         \
        emit_row<Real>(u, o, v, y, z, beta, qk, scale, fade, u_scale);                                                      \
    }                                                                                                                       \
    attributes void advance(const Real *S, int64_t ld, Real *S_out, int64_t ld_out, const Real *decay, const Real *k,       \
                            const Real *u, const Real *next_decayed_k, const Real *next_decayed_q, Real *y, Real *z,        \
                            int64_t K) {                                                                                    \
        advance_block<Real, bytes, vecs, true>(S, ld, S_out, ld_out, decay, k, u, next_decayed_k, next_decayed_q, y, z, K); \
    }                                                                                                                       \
    attributes void grow(const Real *S, int64_t ld, Real *S_out, int64_t ld_out, const Real *k, const Real *u,              \
                         const Real *next_k, const Real *next_q, Real *y, Real *z, int64_t K) {                             \
        advance_block<Real, bytes, vecs, false>(S, ld, S_out, ld_out, nullptr, k, u, next_k, next_q, y, z, K);              \
    }                                                                                                                       \
    constexpr Kernels<Real> set = {load, store, unit, gate, beta, exp, fold, dots, emit, advance, grow};                    \
    }

LINATTN_KERNELS(baseline_f32, float, , 16, 2)
LINATTN_KERNELS(baseline_f64, double, , 16, 2)

#if defined(__x86_64__)
#define LINATTN_AVX2 __attribute__((target("avx2,fma")))
#define LINATTN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
LINATTN_KERNELS(avx2_f32, float, LINATTN_AVX2, 32, 2)
LINATTN_KERNELS(avx2_f64, double, LINATTN_AVX2, 32, 2)
LINATTN_KERNELS(avx512_f32, float, LINATTN_AVX512, 64, 2)
LINATTN_KERNELS(avx512_f64, double, LINATTN_AVX512, 64, 2)
#endif

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return Isa::Avx512;
    if (avx2) return Isa::Avx2;
#endif
    return Isa::Baseline;
}

}  // namespace

Isa detect_isa() {
    const Isa best = best_isa();
    const char *text = std::getenv("LINATTN_CPU_ISA");
    if (!text || !*text) return best;
    const char *const names[] = {"baseline", "avx2", "avx512"};
    for (const Isa isa : {Isa::Baseline, Isa::Avx2, Isa::Avx512})
        if (std::strcmp(text, names[static_cast<int>(isa)]) == 0) return isa < best ? isa : best;
    fail(Status::Value, "LINATTN_CPU_ISA is \"%s\"; it must be baseline, avx2 or avx512", text);
}

template <>
const Kernels<float> &kernels<float>(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::Avx512) return avx512_f32::set;
    if (isa == Isa::Avx2) return avx2_f32::set;
#endif
    (void)isa;
    return baseline_f32::set;
}

template <>
const Kernels<double> &kernels<double>(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::Avx512) return avx512_f64::set;
    if (isa == Isa::Avx2) return avx2_f64::set;
#endif
    (void)isa;
    return baseline_f64::set;
}

}  // namespace linattn::cpu
