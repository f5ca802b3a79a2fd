// Verify for its outputs alone: every shape of the kernel against the token loop in float64.
#define EMULATED delta_verify
#include <algorithm>
#include <random>
#include <string>
#include "emu.h"
#include "tensor.h"
namespace linattn::ptx {
using Group = std::vector<std::function<void()>>;
inline std::map<Fiber *, std::deque<Group>> copies;  // of a thread, by groups; the last is open
inline std::deque<Group> &groups() {
    auto &of = copies[cur];
    if (of.empty()) of.emplace_back();
    return of;
}
inline void cp_async_16(uint32_t d, const void *s) {
    if (d % 16 || (uintptr_t)s % 16) abort();
    memset(at(d), 0xff, 16);
    groups().back().push_back([=] { memcpy(at(d), s, 16); });
}
inline void cp_async_16_zfill(uint32_t d, const void *s, uint32_t bytes) {
    if (bytes) return cp_async_16(d, s);
    if (d % 16) abort();
    groups().back().push_back([=] { memset(at(d), 0, 16); });
}
inline void cp_async_commit_group() { groups().emplace_back(); }
template <int n>
void cp_async_wait_group() {
    for (int i = 0; i < 7; i++) yield();
    while ((int)groups().size() > n + 1) {
        for (auto &f : groups().front()) f();
        groups().pop_front();
    }
    progress++;
}
inline void cp_async_bulk_prefetch(const void *g, uint32_t n) {
    if (n % 16 || (uintptr_t)g % 16) abort();
}
inline uint32_t cvt_rna_tf32(float x) { return x != x ? 0x7fffffffu : (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
}  // namespace linattn::ptx
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// Shared memory of a fixed size, in a header that is included for its helpers.
#undef __shared__
#define __shared__ static
#include "recurrent/delta_decode_one.cuh"
#undef __shared__
#define __shared__
#include "recurrent/delta_verify.cuh"
using namespace linattn;
using namespace linattn::cuda;
std::mt19937 rng;
float rnd() { return std::normal_distribution<float>()(rng); }
float uni() { return std::uniform_real_distribution<float>()(rng); }
int bad = 0;
double worst = 0;

struct Case {
    bool kda, f32, vfirst, f16;
    int N, T;
    bool table, norm;
    std::string gates;  // GDN: "none", "softplus", "zero", "forget"; KDA: "bounded", "saturated", "open"
    bool correlated;
    int dtype;  // of g: 0 f32, 1 bf16
};

uint16_t bits16(float x, bool f16) { return f16 ? ptx::h16(x) : ptx::b16(x); }
double value16(uint16_t x, bool f16) { return f16 ? ptx::up<__half>(x) : ptx::up<__nv_bfloat16>(x); }

// Relative RMS error of o; 1e9 where something is wrong. The same inputs for the same seed.
double error(const Case &c, int form, int seed, std::vector<uint16_t> &o) {
    rng.seed(seed);
    constexpr int D = 128, H = 2, HV = 4;
    const int G = c.kda ? D : 1, P = c.N + 3;
    const size_t BT = (size_t)c.N * c.T, per_row = (size_t)HV * D * D;
    std::vector<uint16_t> q(BT * H * D), k(q.size()), v(BT * HV * D), s16(P * per_row), g16(BT * HV * G);
    o.assign(v.size(), 0x7fff);
    std::vector<float> g(BT * HV * G), beta(BT * HV), A(HV), bias(HV * G), s32(s16.size());
    std::vector<int> rows(P);
    for (size_t i = 0; i < k.size(); i++) q[i] = bits16(rnd(), c.f16), k[i] = bits16(rnd(), c.f16);
    if (c.correlated)
        for (size_t i = 0; i < k.size(); i++) k[i] = bits16(1.0f + 0.1f * rnd() * (i % D == 0), c.f16);
    if (!c.norm)
        for (auto *x : {&q, &k})
            for (auto &y : *x) y = bits16(0.088f * value16(y, c.f16), c.f16);
    for (auto &x : v) x = bits16(rnd(), c.f16);
    const bool raw = c.gates != "none" && c.gates != "zero" && c.gates != "forget";
    for (auto &x : g)
        x = raw                   ? rnd()
            : c.gates == "zero"   ? 0
            : c.gates == "forget" ? (uni() < 0.3 ? (uni() < 0.5 ? -INFINITY : -1000.0f) : 0)
                                  : -uni();
    if (c.gates == "saturated")
        for (auto &x : g) x += 30;
    if (c.gates == "open")
        for (auto &x : g) x -= 30;
    for (size_t i = 0; i < g.size(); i++) {
        g16[i] = ptx::b16(g[i]);
        if (c.dtype) g[i] = ptx::up<__nv_bfloat16>(g16[i]);
    }
    for (auto &x : beta) x = c.correlated ? (uni() < 0.5 ? 2 : 1) : raw ? rnd() : uni();
    for (auto &x : A) x = 0.3f * rnd();
    for (auto &x : bias) x = 0.3f * rnd();
    for (size_t i = 0; i < s32.size(); i++) {
        s32[i] = rnd();
        s16[i] = ptx::b16(s32[i]);
        if (!c.f32) s32[i] = ptx::up<__nv_bfloat16>(s16[i]);
    }
    for (int i = 0; i < P; i++) rows[i] = i;
    if (c.table) {
        std::shuffle(rows.begin(), rows.end(), rng);
        rows[2 % c.N] = -1;
    }
    auto of4 = [&](void *x, DType type, int64_t heads, int64_t n) { return tens(x, type, {c.T * heads * n, heads * n, n, 1}); };
    DeltaParams p;
    const DType half = c.f16 ? DType::F16 : DType::BF16;
    p.family = c.kda ? Family::Kda : Family::Gdn, p.op = Op::Verify;
    p.B = p.N = c.N, p.T = c.T, p.H = H, p.HV = HV, p.K = p.V = D, p.P = P;
    p.q = of4(q.data(), half, H, D), p.k = of4(k.data(), half, H, D), p.v = of4(v.data(), half, HV, D),
    p.o = of4(o.data(), half, HV, D), p.beta = of4(beta.data(), DType::F32, HV, 1);
    p.g = of4(c.dtype ? (void *)g16.data() : g.data(), c.dtype ? DType::BF16 : DType::F32, HV, G);
    p.state_in = tens(c.f32 ? (void *)s32.data() : s16.data(), c.f32 ? DType::F32 : DType::BF16,
                      {HV * D * D, D * D, c.vfirst ? 1 : D, c.vfirst ? D : 1});
    if (c.table) p.read_indices = tens(rows.data(), DType::I32, {1});
    p.scale = 1 / std::sqrt((double)D), p.qk_l2norm = c.norm;
    const double lower = -80.0 / std::max(c.T, 8);
    if (raw) {
        p.gate = c.kda ? Gate::Bounded : Gate::Softplus, p.lower_bound = c.kda ? lower : 0;
        if (!c.correlated) p.beta_form = BetaForm::Logits;
        p.A_log = tens(A.data(), DType::F32, {1}), p.dt_bias = tens(bias.data(), DType::F32, {G, 1});
    }
    if (!delta_verify::fits(p)) return 1e9;
    // `form` as a number of multiprocessors: few states with many of them
    c.kda ? delta_verify::launch_verify<true>(p, form ? 1 : 1000) : delta_verify::launch_verify<false>(p, form ? 1 : 1000);
    double e = 0, norm = 0;
    for (int n = 0; n < c.N; n++)
        for (int h = 0; h < HV; h++) {
            const size_t base = (size_t)n * c.T;
            if (rows[n] < 0) {
                for (int i = 0; i < c.T * D; i++)
                    if (o[((base + i / D) * HV + h) * D + i % D]) return 1e9;
                continue;
            }
            const float *from = &s32[((size_t)rows[n] * HV + h) * D * D];
            std::vector<double> S(D * D), K(D), Q(D);
            for (int a = 0; a < D; a++)
                for (int b = 0; b < D; b++) S[a * D + b] = from[c.vfirst ? b * D + a : a * D + b];
            for (int t = 0; t < c.T; t++) {
                double kk = 0, qq = 0, b = beta[(base + t) * HV + h];
                for (int d = 0; d < D; d++) {
                    K[d] = value16(k[((base + t) * H + h / 2) * D + d], c.f16);
                    Q[d] = value16(q[((base + t) * H + h / 2) * D + d], c.f16);
                    kk += K[d] * K[d], qq += Q[d] * Q[d];
                }
                if (c.norm)
                    for (int d = 0; d < D; d++) K[d] /= std::sqrt(kk + 1e-6), Q[d] /= std::sqrt(qq + 1e-6);
                if (raw && !c.correlated) b = 1 / (1 + std::exp(-b));
                for (int a = 0; a < D; a++) {
                    double x = g[((base + t) * HV + h) * G + (c.kda ? a : 0)];
                    if (raw) {
                        x += bias[h * G + (c.kda ? a : 0)];
                        x = c.kda ? lower / (1 + std::exp(-std::exp((double)A[h]) * x))
                                  : -std::exp((double)A[h]) * std::log1p(std::exp(x));
                    }
                    for (int d = 0; d < D; d++) S[a * D + d] *= std::exp(x);
                }
                for (int d = 0; d < D; d++) {
                    double y = 0, z = 0;
                    for (int a = 0; a < D; a++) y += S[a * D + d] * K[a];
                    const double u = b * (value16(v[((base + t) * HV + h) * D + d], c.f16) - y);
                    for (int a = 0; a < D; a++) S[a * D + d] += K[a] * u, z += S[a * D + d] * Q[a];
                    const double x = value16(o[((base + t) * HV + h) * D + d], c.f16), w = z * p.scale;
                    e += x == x ? (x - w) * (x - w) : 1e18, norm += w * w;
                }
            }
        }
    return std::sqrt(e / norm);
}

int main() {
    int seed = 0;
    for (int kda = 0; kda < 2; kda++)
        for (int layout = 0; layout < 4; layout++)
            for (int T : {1, 2, 4, 5, 8, 11, 16})
                for (int kind = 0; kind < 4; kind++) {
                    const char *gates[2][4] = {{"none", "softplus", "zero", "forget"},
                                               {"bounded", "bounded", "saturated", "open"}};
                    Case c = {};
                    c.kda = kda, c.f32 = layout % 2, c.vfirst = layout / 2, c.N = 2 + kind % 2, c.T = T;
                    c.gates = gates[kda][kind], c.table = kind == 1, c.norm = kind != 0, c.f16 = kind == 1;
                    c.correlated = kind >= 2, c.dtype = kind % 2 && !c.f16;
                    seed++;
                    std::vector<uint16_t> o[2];
                    for (int form = 0; form < 2; form++) {
                        const double e = error(c, form, seed, o[form]), limit = c.f16 ? 1e-3 : 2.5e-3;
                        const bool same = !form || o[0] == o[1], ok = e < limit && same;
                        bad += !ok, worst = std::max(worst, e);
                        printf("%s %s T%d %s %s %s %s%s%s%s %.1e\n",
                               ok     ? "ok "
                               : same ? "BAD"
                                      : "BITS",
                               kda ? "kda" : "gdn", T, c.f32 ? "f32" : "bf16", c.vfirst ? "V-first" : "K-first",
                               form ? "many" : "few", c.gates.c_str(), c.correlated ? " correlated" : "",
                               c.table ? " table" : "", c.f16 ? " fp16" : "", e);
                        fflush(stdout);
                    }
                }
    printf("BAD %d, largest error %.1e\n", bad, worst);
    return bad;
}
