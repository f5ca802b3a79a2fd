// Decode and verify: every kernel and shape against the token loop in float64, and against each other in bits.
#define EMULATED delta_decode
#include <algorithm>
#include <random>
#include <string>
#include "emu.h"
#include "tensor.h"
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
#define ALIAS __attribute__((alias("_ZN7linattn4cuda12delta_decode10smem_bytesE")))
namespace linattn::cuda::delta_decode_direct {
extern char smem_bytes[232448] ALIAS;
}
namespace linattn::cuda::delta_recurrent {
extern char smem_bytes[232448] ALIAS;
}
namespace linattn::ptx {
inline void cp_async_bulk_prefetch(const void *g, uint32_t n) {
    if (n % 16 || (uintptr_t)g % 16) abort();
}
}  // namespace linattn::ptx
#include "recurrent/delta_decode.cuh"
#include "recurrent/delta_decode_direct.cuh"
#include "recurrent/delta_recurrent.cu"
// Shared memory of a fixed size: one CTA runs at a time.
#undef __shared__
#define __shared__ static
#include "recurrent/delta_decode_one.cuh"
using namespace linattn;
using namespace linattn::cuda;
std::mt19937 rng;
float rnd() { return std::normal_distribution<float>()(rng); }
float uni() { return std::uniform_real_distribution<float>()(rng); }
double up(uint16_t x) { return ptx::up<__nv_bfloat16>(x); }
int bad = 0;

struct Case {
    int D, N, T;
    bool kda, verify, f32, vfirst, gates, packed, table, bounded;
    DType dtype;  // of g and dt_bias, and, the other one of two bytes, of beta and A_log
};
struct Call {
    Case c;
    int H = 2, HV = 4, P, B, TT, G;
    std::vector<int> len, cu, rows;
    std::vector<int64_t> wide_rows;
    std::vector<uint16_t> q, k, v, o, s16;
    std::vector<float> g, beta, A, bias, kept_k, kept_u, kept_g, s32, s0;
    std::vector<uint16_t> g16, beta16, A16, bias16;
    DeltaParams p;

    Call(const Case &of, int seed)
        : c(of), P(c.N + 3), B(c.packed ? 1 : c.N), G(c.kda ? c.D : 1), len(c.N, c.T), cu(c.N + 1, 0) {
        rng.seed(seed);
        for (int n = 0; n < c.N; n++) {
            if (c.packed) len[n] = n % 4 == 1 ? 0 : 1 + n * 5 % c.T;
            cu[n + 1] = cu[n] + len[n];
        }
        TT = c.packed ? cu[c.N] + 3 : c.T;
        const size_t BT = (size_t)B * TT, D = c.D, per_row = (size_t)HV * D * D;
        auto words = [](size_t n) {
            std::vector<uint16_t> x(n);
            for (auto &y : x) y = ptx::b16(rnd());
            return x;
        };
        q = words(BT * H * D), k = words(BT * H * D), v = words(BT * HV * D), o = words(BT * HV * D), s16.resize(P * per_row);
        for (auto *x : {&kept_k, &kept_u, &kept_g, &g, &beta, &A, &bias, &s32})
            x->resize(x == &kept_k              ? BT * H * D
                      : x == &kept_u            ? BT * HV * D
                      : x == &kept_g || x == &g ? BT * HV * G
                      : x == &beta              ? BT * HV
                      : x == &A                 ? HV
                      : x == &bias              ? HV * G
                                                : P * per_row,
                      7.0f);
        for (auto &x : g) x = c.gates ? rnd() : -uni();
        for (auto &x : beta) x = c.gates ? rnd() : uni();
        for (auto &x : A) x = rnd();
        for (auto &x : bias) x = rnd();
        for (size_t i = 0; i < s32.size(); i++) {
            s32[i] = 0.1f * rnd();
            s16[i] = ptx::b16(s32[i]);
            if (!c.f32) s32[i] = up(s16[i]);
        }
        s0 = s32;
        if (c.dtype != DType::F32) {  // the numbers are those of two bytes
            const bool bf16 = c.dtype == DType::BF16;
            auto narrow = [](std::vector<uint16_t> &to, std::vector<float> &from, bool bf16) {
                to.resize(from.size());
                for (size_t i = 0; i < from.size(); i++) {
                    to[i] = bf16 ? ptx::b16(from[i]) : __half_as_ushort(__float2half_rn(from[i]));
                    from[i] = bf16 ? up(to[i]) : __half2float(__ushort_as_half(to[i]));
                }
            };
            narrow(g16, g, bf16), narrow(bias16, bias, bf16), narrow(beta16, beta, !bf16), narrow(A16, A, !bf16);
        }
        rows.resize(P);
        for (int i = 0; i < P; i++) rows[i] = i;
        if (c.table) {
            std::shuffle(rows.begin(), rows.end(), rng);
            rows[2 % c.N] = -1;
        }
        p.family = c.kda ? Family::Kda : Family::Gdn, p.op = c.verify ? Op::Verify : Op::Decode;
        p.B = B, p.T = TT, p.H = H, p.HV = HV, p.K = p.V = D, p.N = c.N, p.P = p.F = P;
        const int64_t t = TT, d = D;
        auto of4 = [&](void *x, DType type, int64_t heads, int64_t n) {
            return tens(x, type, {t * heads * n, heads * n, n, 1});
        };
        p.q = of4(q.data(), DType::BF16, H, d), p.k = of4(k.data(), DType::BF16, H, d);
        p.v = of4(v.data(), DType::BF16, HV, d), p.o = of4(o.data(), DType::BF16, HV, d);
        const bool narrow = c.dtype != DType::F32;
        const DType other = !narrow ? DType::F32 : c.dtype == DType::BF16 ? DType::F16 : DType::BF16;
        auto either = [&](std::vector<float> &wide, std::vector<uint16_t> &two_bytes) {
            return narrow ? static_cast<void *>(two_bytes.data()) : wide.data();
        };
        p.g = of4(either(g, g16), c.dtype, HV, G), p.beta = of4(either(beta, beta16), other, HV, 1);
        p.state_in = tens(c.f32 ? (void *)s32.data() : s16.data(), c.f32 ? DType::F32 : DType::BF16,
                          {HV * d * d, d * d, c.vfirst ? 1 : d, c.vfirst ? d : 1});
        if (c.table) p.read_indices = tens(rows.data(), DType::I32, {1});
        if (c.packed) p.cu_seqlens = tens(cu.data(), DType::I32, {1}), p.zero_tail = true;
        if (c.verify) {
            p.kept_k = of4(kept_k.data(), DType::F32, H, d), p.kept_u = of4(kept_u.data(), DType::F32, HV, d);
            p.kept_g = of4(kept_g.data(), DType::F32, HV, G);
        } else {
            p.state_out = p.state_in, p.write_indices = p.read_indices;
            wide_rows.assign(rows.begin(), rows.end());  // a table of its own, of i64
            if (c.table && c.gates) p.write_indices = tens(wide_rows.data(), DType::I64, {1});
        }
        p.scale = 1 / std::sqrt((double)D), p.qk_l2norm = true;
        if (c.gates) {
            p.gate = c.bounded ? Gate::Bounded : Gate::Softplus, p.lower_bound = -5;
            p.beta_form = c.bounded ? BetaForm::LogitsX2 : BetaForm::Logits;
            p.A_log = tens(either(A, A16), other, {1}), p.dt_bias = tens(either(bias, bias16), c.dtype, {G, 1});
        }
    }

    uint64_t bits() const {
        uint64_t hash = 1469598103934665603ull;
        auto mix = [&](const void *x, size_t n) {
            for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)x)[i]) * 1099511628211ull;
        };
        mix(o.data(), o.size() * 2), mix(s32.data(), s32.size() * 4), mix(s16.data(), s16.size() * 2);
        mix(kept_k.data(), kept_k.size() * 4), mix(kept_u.data(), kept_u.size() * 4), mix(kept_g.data(), kept_g.size() * 4);
        return hash;
    }

    bool right() const {
        const int D = c.D;
        double eo = 0, no = 0, es = 0, ns = 0, eu = 0;
        int wrong = 0;
        std::vector<char> used(P, 0);
        const int64_t sk = c.vfirst ? 1 : D, sv = c.vfirst ? D : 1;
        for (int n = 0; n < c.N; n++)
            for (int h = 0; h < HV; h++) {
                const int64_t base = c.packed ? cu[n] : (int64_t)n * c.T;
                if (rows[n] < 0) {
                    for (int64_t i = 0; i < (int64_t)len[n] * D; i++) {
                        const int64_t at = base + i / D, d = i % D;
                        wrong += o[(at * HV + h) * D + d] != 0;
                        if (c.verify) wrong += kept_u[(at * HV + h) * D + d] != 0 || kept_k[(at * H + h / 2) * D + d] != 0;
                    }
                    continue;
                }
                used[rows[n]] = 1;
                const size_t off = ((size_t)rows[n] * HV + h) * D * D;
                std::vector<double> S(D * D), K(D), Q(D), u(D);
                for (int i = 0; i < D * D; i++) S[i] = s0[off + i / D * sk + i % D * sv];
                for (int t = 0; t < len[n]; t++) {
                    const int64_t at = base + t;
                    double kk = 0, qq = 0, b = beta[at * HV + h];
                    for (int d = 0; d < D; d++) {
                        K[d] = up(k[(at * H + h / 2) * D + d]), Q[d] = up(q[(at * H + h / 2) * D + d]);
                        kk += K[d] * K[d], qq += Q[d] * Q[d];
                    }
                    for (int d = 0; d < D; d++) K[d] /= std::sqrt(kk + 1e-6), Q[d] /= std::sqrt(qq + 1e-6);
                    for (int a = 0; a < D; a++) {
                        double x = g[(at * HV + h) * G + (c.kda ? a : 0)];
                        const double z = x + bias[h * G + (c.kda ? a : 0)], amplitude = std::exp((double)A[h]);
                        if (c.gates) x = c.bounded ? -5 / (1 + std::exp(-amplitude * z)) : -amplitude * std::log1p(std::exp(z));
                        for (int d = 0; d < D; d++) S[a * D + d] *= std::exp(x);
                    }
                    if (c.gates) b = (c.bounded ? 2 : 1) / (1 + std::exp(-b));
                    for (int d = 0; d < D; d++) {
                        double y = 0, z = 0;
                        for (int a = 0; a < D; a++) y += S[a * D + d] * K[a];
                        u[d] = b * (up(v[(at * HV + h) * D + d]) - y);
                        if (c.verify) eu = std::max(eu, std::fabs(u[d] - kept_u[(at * HV + h) * D + d]));
                        for (int a = 0; a < D; a++) S[a * D + d] += K[a] * u[d], z += S[a * D + d] * Q[a];
                        const double x = up(o[(at * HV + h) * D + d]), e = x == x ? x - z * p.scale : 1e9;
                        eo += e * e, no += z * p.scale * z * p.scale;
                    }
                }
                for (int i = 0; i < D * D; i++) {
                    const size_t at = off + i / D * sk + i % D * sv;
                    const double x = c.f32 ? s32[at] : up(s16[at]), w = c.verify ? s0[at] : S[i];
                    es += (x - w) * (x - w), ns += w * w;
                }
            }
        const size_t per_row = (size_t)HV * D * D;
        for (size_t i = 0; i < P * per_row; i++) wrong += !used[i / per_row] && (c.f32 ? s32[i] : (float)up(s16[i])) != s0[i];
        if (c.packed)
            for (size_t i = (size_t)cu[c.N] * HV * D; i < o.size(); i++) wrong += o[i] != 0;
        eo = std::sqrt(eo / no), es = std::sqrt(es / ns);
        const bool ok = eo < 5e-3 && es < (c.f32 ? 1e-5 : 2e-3) && eu < 1e-4 && !wrong;
        if (!ok) printf("o %.1e state %.1e u %.1e wrong %d\n", eo, es, eu, wrong);
        return ok;
    }
};

template <int D, bool kKda, class State, bool kVFirst, bool kVerify>
void run(const Case &c, int seed) {
    using Half = delta_decode_direct::Config<D, kKda, State, kVFirst, kVerify, 64>;
    using Whole = delta_decode_direct::Config<D, kKda, State, kVFirst, kVerify, D>;
    uint64_t want = 0;
    for (const char *kernel : {"recurrent", "decode", "direct half", "direct whole", "one few", "one 2", "one 4"}) {
        Call call(c, seed);
        const std::string name = kernel;
        if ((name == "direct half" && call.TT > Half::kTokens) || (name == "direct whole" && call.TT > Whole::kTokens))
            continue;
        if (name.substr(0, 3) == "one") {
            namespace one = delta_decode_one;
            if (!one::fits(call.p)) continue;
            if (name == "one few") one::launch_config<one::Config<D, kKda, State, kVFirst, 2, 32, 2, true>>(call.p, 1);
            if (name == "one 2") one::launch_config<one::Config<D, kKda, State, kVFirst, 2, 64, 3, false>>(call.p, 1);
            if (name == "one 4") one::launch_config<one::Config<D, kKda, State, kVFirst, 4, 64, 4, false>>(call.p, 1);
        }
        if (name == "recurrent") launch_delta_recurrent(call.p);
        if (name == "decode") delta_decode::launch_config<delta_decode::Config<D, kKda, State, kVFirst, !kVerify>>(call.p, 3);
        if (name == "direct half") delta_decode_direct::launch_config<Half>(call.p);
        if (name == "direct whole") delta_decode_direct::launch_config<Whole>(call.p);
        if (!want) want = call.bits();
        const bool right = call.right(), same = call.bits() == want;
        bad += !right || !same;
        printf("%s D%d %s N%d T%d %s %s %s%s%s%s%s %s\n",
               right && same ? "ok "
               : right       ? "BITS"
                             : "BAD",
               D, kKda ? "kda" : "gdn", c.N, c.T, kVerify ? "verify" : "decode", c.f32 ? "f32" : "bf16",
               kVFirst ? "V-first" : "K-first", c.gates ? " gates" : "", c.packed ? " packed" : "", c.table ? " table" : "",
               c.bounded ? " bounded" : "", kernel);
        fflush(stdout);
    }
}
template <int D, bool kKda, bool kVerify>
void run_layouts(Case c, int seed) {
    c.D = D, c.kda = kKda, c.verify = kVerify;
    for (int layout = 0; layout < 4; layout++) {
        c.f32 = layout % 2, c.vfirst = layout / 2;
        if (c.f32)
            c.vfirst ? run<D, kKda, float, true, kVerify>(c, seed) : run<D, kKda, float, false, kVerify>(c, seed);
        else
            c.vfirst ? run<D, kKda, __nv_bfloat16, true, kVerify>(c, seed)
                     : run<D, kKda, __nv_bfloat16, false, kVerify>(c, seed);
    }
}
int main(int argc, char **argv) {
    const bool one_token = argc > 1 && std::string(argv[1]) == "one";
    int seed = 0;
    struct {
        int N, T;
        bool gates, packed, table, bounded;
        DType dtype = DType::F32;
    } cases[] = {{5, 1, false, false, true},
                 {4, 1, true, false, true},
                 {3, 1, true, false, false},
                 {3, 1, true, false, true, true, DType::BF16},
                 {2, 1, true, false, false, false, DType::F16},
                 {2, 1, false, false, false, false, DType::BF16},
                 {6, 11, true, true, true},
                 {3, 5, true, false, true},
                 {2, 16, false, false, false}};
    for (const auto &x : cases) {
        Case c = {};
        c.N = x.N, c.T = x.T, c.gates = x.gates, c.packed = x.packed, c.table = x.table;
        c.bounded = x.bounded, c.dtype = x.dtype;
        seed++;
        if (one_token && x.T > 1) continue;
        run_layouts<64, false, false>(c, seed), run_layouts<64, true, false>(c, seed);
        run_layouts<128, false, false>(c, seed), run_layouts<128, true, false>(c, seed);
        if (x.packed) continue;
        run_layouts<64, false, true>(c, seed), run_layouts<64, true, true>(c, seed);
        run_layouts<128, false, true>(c, seed), run_layouts<128, true, true>(c, seed);
    }
    printf("BAD %d\n", bad);
    return bad;
}
