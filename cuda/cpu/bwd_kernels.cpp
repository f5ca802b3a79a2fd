// Bodies of the gradients' inner loops, and their copies for x86-64, AVX2 with FMA, and AVX-512 (see kernels.cpp).
#include "bwd_kernels.h"

#include <cstring>

#include "convert.h"

namespace linattn::cpu {
namespace {

template <class Real>
LINATTN_INLINE void forward_block(const Real *S, Real *S_out, const Real *decay, const Real *k, Real *e, Real *u, Real beta,
                                  int64_t K) {
    constexpr int64_t C = kCols<Real>;
    Real y[C] = {};
    for (int64_t i = 0; i < K; ++i) {
        const Real k_i = decay[i] * k[i];
        for (int64_t c = 0; c < C; ++c) y[c] += k_i * S[i * C + c];
    }
    for (int64_t c = 0; c < C; ++c) {
        e[c] -= y[c];
        u[c] = y[c] = beta * e[c];
    }
    for (int64_t i = 0; i < K; ++i) {
        const Real decay_i = decay[i], k_i = k[i];
        for (int64_t c = 0; c < C; ++c) S_out[i * C + c] = decay_i * S[i * C + c] + k_i * y[c];
    }
}

constexpr int64_t kRows = 4;  // rows of the state whose sums over columns are taken together
template <class Real>
constexpr int64_t kLanes = kCols<Real> / 2;
static_assert(kLanes<float> == 16 && kLanes<double> == 8, "add_sums adds up 16 floats or 8 doubles a row");

// to[r] += sum of lanes[r][:]: without the long chain of additions that a sum along a register would be.
LINATTN_INLINE void add_sums(float *to, const float (&lanes)[kRows][kLanes<float>]) {
    typedef float Float4 __attribute__((vector_size(16)));
    typedef int32_t Int4 __attribute__((vector_size(16), unused));
    Float4 row[kRows], part[kLanes<float> / 4];
    for (int r = 0; r < kRows; ++r) {
        std::memcpy(part, lanes[r], sizeof part);
        row[r] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    const Float4 low01 = LINATTN_SHUFFLE(row[0], row[1], 0, 4, 1, 5), high01 = LINATTN_SHUFFLE(row[0], row[1], 2, 6, 3, 7);
    const Float4 low23 = LINATTN_SHUFFLE(row[2], row[3], 0, 4, 1, 5), high23 = LINATTN_SHUFFLE(row[2], row[3], 2, 6, 3, 7);
    const Float4 sum01 = low01 + high01, sum23 = low23 + high23;  // columns 0 + 2 and 1 + 3, in turns of the two rows
    const Float4 even = LINATTN_SHUFFLE(sum01, sum23, 0, 1, 4, 5), odd = LINATTN_SHUFFLE(sum01, sum23, 2, 3, 6, 7);
    Float4 sum;
    std::memcpy(&sum, to, sizeof sum);
    sum += even + odd;
    std::memcpy(to, &sum, sizeof sum);
}
LINATTN_INLINE void add_sums(double *to, const double (&lanes)[kRows][kLanes<double>]) {
    for (int64_t r = 0; r < kRows; ++r)
        to[r] += ((lanes[r][0] + lanes[r][4]) + (lanes[r][2] + lanes[r][6])) +
                 ((lanes[r][1] + lanes[r][5]) + (lanes[r][3] + lanes[r][7]));
}

// The same for `rows` <= kRows rows.
template <class Real>
LINATTN_INLINE void add_rows(Real *to, const Real (&lanes)[kRows][kLanes<Real>], int64_t rows) {
    if (rows == kRows) return add_sums(to, lanes);
    Real sums[kRows] = {};
    add_sums(sums, lanes);
    for (int64_t r = 0; r < rows; ++r) to[r] += sums[r];
}

// D += scale q d_o^T;  dq += scale S d_o;  dk += D u;  du = D^T k, for `rows` <= kRows rows from row i on.
template <class Real>
LINATTN_INLINE void reverse_update(const ReverseToken<Real> &t, int64_t i, int64_t rows, const Real *d_o, const Real *u,
                                   Real *du) {
    constexpr int64_t C = kCols<Real>, L = kLanes<Real>;
    Real dq[kRows][L] = {}, dk[kRows][L] = {};
    for (int64_t r = 0; r < rows; ++r) {
        const Real q_i = t.q[i + r], k_i = t.k[i + r];
        const Real *after = t.after + (i + r) * C;
        Real *D = t.D + (i + r) * C;
        for (int64_t c = 0; c < L; ++c) {
            const Real low = D[c] + q_i * d_o[c], high = D[L + c] + q_i * d_o[L + c];
            D[c] = low, D[L + c] = high;
            du[c] += k_i * low, du[L + c] += k_i * high;
            dq[r][c] = after[c] * d_o[c] + after[L + c] * d_o[L + c];
            dk[r][c] = low * u[c] + high * u[L + c];
        }
    }
    add_rows(t.dq + i, dq, rows);
    add_rows(t.dk + i, dk, rows);
}

// P = d S_before;  dk -= P dv;  dP = D - k dv^T;  dg += rowsum(P o dP);  D = d dP, for `rows` <= kRows rows from row i on.
template <class Real>
LINATTN_INLINE void reverse_decay(const ReverseToken<Real> &t, int64_t i, int64_t rows, const Real *dv) {
    constexpr int64_t C = kCols<Real>, L = kLanes<Real>;
    Real dk[kRows][L] = {}, dg[kRows][L] = {};
    for (int64_t r = 0; r < rows; ++r) {
        const Real decay_i = t.decay[i + r], k_i = t.k[i + r];
        const Real *before = t.before + (i + r) * C;
        Real *D = t.D + (i + r) * C;
        for (int64_t c = 0; c < L; ++c) {
            const Real P_low = decay_i * before[c], P_high = decay_i * before[L + c];
            const Real dP_low = D[c] - k_i * dv[c], dP_high = D[L + c] - k_i * dv[L + c];
            dk[r][c] = -(P_low * dv[c] + P_high * dv[L + c]);
            dg[r][c] = P_low * dP_low + P_high * dP_high;
            D[c] = decay_i * dP_low, D[L + c] = decay_i * dP_high;
        }
    }
    add_rows(t.dk + i, dk, rows);
    add_rows(t.dg + i, dg, rows);
}

template <class Real>
LINATTN_INLINE void reverse_block(const ReverseToken<Real> &t, int64_t K) {
    constexpr int64_t C = kCols<Real>;
    const int64_t whole = K / kRows * kRows;
    Real d_o[C], u[C], du[C] = {}, dv[C];
    for (int64_t c = 0; c < C; ++c) d_o[c] = t.scale * t.d_o[c], u[c] = t.u[c];
    for (int64_t i = 0; i < whole; i += kRows) reverse_update(t, i, kRows, d_o, u, du);
    if (whole < K) reverse_update(t, whole, K - whole, d_o, u, du);
    Real dbeta = 0;
    for (int64_t c = 0; c < C; ++c) {
        dbeta += du[c] * t.e[c];  // dbeta = du . e;  dv = beta du
        dv[c] = t.beta * du[c];
    }
    *t.dbeta += dbeta;
    std::memcpy(t.dv, dv, sizeof dv);
    for (int64_t i = 0; i < whole; i += kRows) reverse_decay(t, i, kRows, dv);
    if (whole < K) reverse_decay(t, whole, K - whole, dv);
}

template <class Real>
LINATTN_INLINE void reverse_map_block(Real *D, const Real *decay, const Real *k, const Real *q, const Real *d_o, Real beta,
                                      int64_t K) {
    constexpr int64_t C = kCols<Real>;
    Real du[C] = {};
    for (int64_t i = 0; i < K; ++i) {
        const Real q_i = q[i], k_i = k[i];
        for (int64_t c = 0; c < C; ++c) {
            D[i * C + c] += q_i * d_o[c];
            du[c] += k_i * D[i * C + c];
        }
    }
    for (int64_t c = 0; c < C; ++c) du[c] *= beta;
    for (int64_t i = 0; i < K; ++i) {
        const Real decay_i = decay[i], k_i = k[i];
        for (int64_t c = 0; c < C; ++c) D[i * C + c] = decay_i * (D[i * C + c] - k_i * du[c]);
    }
}

template <class Real>
LINATTN_INLINE void multiply_add_block(Real *out, const Real *A, const Real *B, int64_t rows, int64_t inner) {
    constexpr int64_t C = kCols<Real>;
    for (int64_t i = 0; i < rows; ++i) {
        Real sum[C];
        for (int64_t c = 0; c < C; ++c) sum[c] = out[i * C + c];
        for (int64_t j = 0; j < inner; ++j) {
            const Real a = A[i * inner + j];
            for (int64_t c = 0; c < C; ++c) sum[c] += a * B[j * C + c];
        }
        for (int64_t c = 0; c < C; ++c) out[i * C + c] = sum[c];
    }
}

#define LINATTN_BWD_KERNELS(name, Real, attributes)                                                                    \
    namespace name {                                                                                                   \
    attributes void forward(const Real *S, Real *S_out, const Real *decay, const Real *k, Real *e, Real *u, Real beta, \
                            int64_t K) {                                                                               \
        forward_block<Real>(S, S_out, decay, k, e, u, beta, K);                                                        \
    }                                                                                                                  \
    attributes void reverse(const ReverseToken<Real> &token, int64_t K) { reverse_block<Real>(token, K); }             \
    attributes void reverse_map(Real *D, const Real *decay, const Real *k, const Real *q, const Real *d_o, Real beta,  \
                                int64_t K) {                                                                           \
        reverse_map_block<Real>(D, decay, k, q, d_o, beta, K);                                                         \
    }                                                                                                                  \
    attributes void multiply_add(Real *C, const Real *A, const Real *B, int64_t rows, int64_t inner) {                 \
        multiply_add_block<Real>(C, A, B, rows, inner);                                                                \
    }                                                                                                                  \
    constexpr BwdKernels<Real> set = {forward, reverse, reverse_map, multiply_add};                                    \
    }

LINATTN_BWD_KERNELS(baseline_f32, float, )
LINATTN_BWD_KERNELS(baseline_f64, double, )

#if defined(__x86_64__)
#define LINATTN_AVX2 __attribute__((target("avx2,fma")))
#define LINATTN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
LINATTN_BWD_KERNELS(avx2_f32, float, LINATTN_AVX2)
LINATTN_BWD_KERNELS(avx2_f64, double, LINATTN_AVX2)
LINATTN_BWD_KERNELS(avx512_f32, float, LINATTN_AVX512)
LINATTN_BWD_KERNELS(avx512_f64, double, LINATTN_AVX512)
#endif

}  // namespace

template <>
const BwdKernels<float> &bwd_kernels<float>(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::Avx512) return avx512_f32::set;
    if (isa == Isa::Avx2) return avx2_f32::set;
#endif
    (void)isa;
    return baseline_f32::set;
}

template <>
const BwdKernels<double> &bwd_kernels<double>(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::Avx512) return avx512_f64::set;
    if (isa == Isa::Avx2) return avx2_f64::set;
#endif
    (void)isa;
    return baseline_f64::set;
}

}  // namespace linattn::cpu
