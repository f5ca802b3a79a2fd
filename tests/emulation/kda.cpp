#define EMULATED kda
#include <random>
#include <string>
#include "emu.h"
namespace linattn::ptx {
inline void cp_async_bulk_prefetch(const void *, uint32_t) {}
inline void cp_async_bulk_load_hint(uint32_t d, const void *s, uint32_t n, uint32_t b, uint64_t) {
    cp_async_bulk_load(d, s, n, b);
}
}  // namespace linattn::ptx
#include "kda/kda_fwd.cu"
#include "kda/kda_fwd.cuh"
#include "tensor.h"
using namespace linattn;
using namespace linattn::cuda;
constexpr int kMost = 128;
int D;  // K = V of the case
std::mt19937 rng(1);
float rnd() { return std::normal_distribution<float>()(rng); }
float uni() { return std::uniform_real_distribution<float>()(rng); }
uint16_t to16(float x, DType t) { return t == DType::BF16 ? ptx::b16(x) : ptx::h16(x); }
float from16(uint16_t x, DType t) { return t == DType::BF16 ? ptx::up<__nv_bfloat16>(x) : ptx::up<__half>(x); }
// Numbers as given to the kernel, in a dtype.
struct Array {
    std::vector<float> f;
    std::vector<uint16_t> h;
    DType type;
    Array(size_t n, DType t) : f(t == DType::F32 ? n : 0), h(t == DType::F32 ? 0 : n), type(t) {}
    void set(size_t i, float x) {
        if (type == DType::F32)
            f[i] = x;
        else
            h[i] = to16(x, type);
    }
    double operator[](size_t i) const { return type == DType::F32 ? f[i] : from16(h[i], type); }
    size_t size() const { return f.size() + h.size(); }
    Tensor tensor(std::vector<int64_t> stride) { return tens(type == DType::F32 ? (void *)f.data() : h.data(), type, stride); }
};
Tensor ints(std::vector<int> &x) { return tens(x.data(), DType::I32, {1}); }
enum Keys { Random, Correlated, One, Near, Uneven };
// Raw gates: decays at the bound, none, little, each of them in some channels, or anywhere.
enum Gates { Usual, Lowest, Still, Slow, Channels, Any };
struct Case {
    std::string name;
    std::vector<int> lens;
    int H = 1, HV = 1;
    DType type = DType::BF16, gtype = DType::F32;
    bool l2 = false, init = true, vfirst = false;
    float gs = 1;
    Gate gate = Gate::None;
    BetaForm form = BetaForm::Weight;
    bool resets = false;
    Keys keys = Random;
    float beta = -1;  // or random
    int sms = 132, dense = 0, ckpt = 0;
    bool padding = false, known = false;  // known: misses the target, see docs/kda.md
    float g = 1, length = 1;              // g <= 0: of all gates; of keys
    bool in_place = false;                // final states where the initial ones are
    int D = 128;
    Gates gates = Usual;
    float bound = -5;
    bool jumps = false;  // V of one chunk is larger or smaller by far than that of the one before
};
float raw_gate(Gates gates, int channel) {
    if (gates == Channels) gates = (Gates)(channel % 4);
    if (gates == Any) gates = (Gates)(int)(4 * uni());
    return gates == Lowest ? 60 : gates == Still ? -200 : gates == Slow ? rnd() - 9 : 2 * rnd();
}
int bad = 0;
void run(const Case &c) {
    D = c.D;
    const int HV = c.HV, H = c.H, N = c.dense ? c.dense : (int)c.lens.size(), B = c.dense ? c.dense : 1;
    int T = c.dense ? 0 : 5;
    for (int l : c.lens) T += l;
    const int64_t BT = (int64_t)B * T;
    std::vector<int> cu(N + 1, 0);
    for (int n = 0; n < N && !c.dense; n++) cu[n + 1] = cu[n] + c.lens[n];
    const int64_t end = c.dense ? BT : cu[N];
    Array q(BT * H * D, c.type), k(BT * H * D, c.type), v(BT * HV * D, c.type), o(BT * HV * D, c.type), g(BT * HV * D, c.gtype),
        beta(BT * HV, DType::F32), h0((size_t)N * HV * D * D, DType::F32), hf(h0.size(), DType::F32), A(HV, DType::F32),
        bias(HV * D, DType::F32);
    float base[kMost];
    for (int d = 0; d < D; d++) base[d] = rnd();
    auto fill = [&](Array &x, int heads, bool unit, Keys keys) {
        for (int64_t t = 0; t < BT; t++)
            for (int h = 0; h < heads; h++) {
                float r[kMost], s = 0;
                for (int d = 0; d < D; d++) {
                    const float e = rnd();
                    r[d] = keys == One ? base[d] : keys == Near ? base[d] + 0.1f * e : keys == Correlated ? e + 3 : e;
                    s += r[d] * r[d];
                }
                s = unit ? 1 / std::sqrt(s) : keys == Uneven ? std::exp2((float)(t % 25 - 8)) : 1;
                for (int d = 0; d < D; d++) x.set((t * heads + h) * D + d, t >= end ? NAN : r[d] * s);
            }
    };
    fill(q, H, !c.l2, c.keys == One ? Random : c.keys);
    fill(k, H, !c.l2, c.keys);
    for (size_t i = 0; i < k.size() && c.length != 1; i++) k.set(i, k[i] * c.length);
    fill(v, HV, false, Random);
    const float sizes[] = {1, 1e-5f, 1e4f, 1e4f, 1e-3f, 0};
    for (size_t i = 0; i < v.size() && c.jumps; i++) v.set(i, v[i] * sizes[i / (32 * HV * D) % 6]);
    for (size_t i = 0; i < o.size(); i++) o.set(i, NAN);
    for (size_t i = 0; i < hf.size(); i++) hf.set(i, NAN);
    for (size_t i = 0; i < g.size(); i++)
        g.set(i, (int64_t)i >= end * HV * D ? NAN
                 : c.g <= 0                 ? c.g
                 : c.gate != Gate::None     ? raw_gate(c.gates, (int)(i % D))
                 : c.resets && i % 7 < 3    ? (i % 2 ? -INFINITY : -1000)
                                            : -c.gs * uni());
    for (size_t i = 0; i < beta.size(); i++) {
        const float r = c.form == BetaForm::Weight ? uni() : rnd();
        beta.set(i, (int64_t)i >= end * HV ? NAN : c.beta >= 0 ? c.beta : r);
    }
    for (size_t i = 0; i < h0.size(); i++) h0.set(i, rnd());
    for (size_t i = 0; i < A.size(); i++) A.set(i, c.gs * rnd());
    for (size_t i = 0; i < bias.size(); i++) bias.set(i, rnd());
    DeltaParams p;
    p.family = Family::Kda;
    p.B = B, p.T = T, p.H = H, p.HV = HV, p.K = p.V = D, p.N = p.P = p.F = N;
    p.q = q.tensor({(int64_t)T * H * D, H * D, D, 1});
    p.k = k.tensor({(int64_t)T * H * D, H * D, D, 1});
    p.v = v.tensor({(int64_t)T * HV * D, HV * D, D, 1});
    p.o = o.tensor({(int64_t)T * HV * D, HV * D, D, 1});
    p.g = g.tensor({(int64_t)T * HV * D, HV * D, D, 1});
    p.beta = beta.tensor({(int64_t)T * HV, HV, 1});
    p.gate = c.gate;
    p.beta_form = c.form;
    p.lower_bound = c.bound;
    if (c.gate != Gate::None) p.A_log = A.tensor({1}), p.dt_bias = bias.tensor({D, 1});
    const std::vector<int64_t> ss = {HV * D * D, D * D, c.vfirst ? 1 : D, c.vfirst ? D : 1};
    if (c.init) p.state_in = h0.tensor(ss);
    p.state_out = hf.tensor(ss);
    if (c.in_place) hf = h0, p.state_in = p.state_out = hf.tensor(ss);
    if (!c.dense) p.cu_seqlens = ints(cu);
    int C = 0;
    if (c.ckpt)
        for (int l : c.lens) C += l / c.ckpt;
    Array ck((size_t)C * HV * D * D, DType::F32);
    if (c.ckpt) p.checkpoint_every = c.ckpt, p.C = C, p.checkpoints = ck.tensor(ss);
    std::vector<int> rows(N);
    for (int n = 0; n < N; n++) rows[n] = n % 2 ? -1 : N - 1 - n;
    if (c.padding) p.read_indices = p.write_indices = ints(rows);
    p.scale = 1 / std::sqrt((double)D);
    p.qk_l2norm = c.l2;
    p.zero_tail = true;
    DeltaParams bounded = p;  // the kernels take K = 64 with every option; calls without these go elsewhere for accuracy alone
    bounded.qk_l2norm = true, bounded.beta_form = BetaForm::Logits;
    if (!kda_chunked_fits(D == 64 ? bounded : p)) {
        printf("does not fit\n");
        bad++;
        return;
    }
    std::vector<char> workspace(kda_fwd_chunked_workspace(p, c.sms), -1);
    p.workspace.data = workspace.data();
    launch_kda_fwd_chunked(p, c.sms);
    double eo = 0, es = 0, ec = 0;
    int row = 0, tail = 0;
    auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    for (int n = 0; n < N; n++) {
        const int64_t bos = c.dense ? (int64_t)n * T : cu[n];
        const int len = c.dense ? T : c.lens[n];
        if (c.padding && rows[n] < 0) {
            for (int64_t i = bos * HV * D; i < (bos + len) * HV * D; i++) tail += o[i] != 0;
            continue;
        }
        const int64_t rn = c.padding ? rows[n] : n;
        for (int h = 0; h < HV; h++) {
            std::vector<double> S(D * D);
            for (int a = 0; a < D; a++)
                for (int b = 0; b < D; b++) S[a * D + b] = c.init ? h0[rn * ss[0] + h * ss[1] + a * ss[2] + b * ss[3]] : 0;
            double se = 0, sn = 1e-60;
            auto compare = [&](const Array &x, int64_t first) {
                double e = 0, m = 1e-60;
                for (int a = 0; a < D; a++)
                    for (int b = 0; b < D; b++) {
                        const double y = x[first + h * ss[1] + a * ss[2] + b * ss[3]], r = S[a * D + b];
                        e += (y - r) * (y - r), m += r * r;
                    }
                e = std::sqrt(e / m);
                return e == e ? e : 9e9;
            };
            for (int t = 0; t < len; t++) {
                const int64_t at = bos + t;
                double kk[kMost], qq[kMost], u[kMost] = {}, sk = 0, sq = 0, oo[kMost] = {};
                for (int d = 0; d < D; d++) {
                    kk[d] = k[(at * H + h * H / HV) * D + d], qq[d] = q[(at * H + h * H / HV) * D + d];
                    sk += kk[d] * kk[d], sq += qq[d] * qq[d];
                }
                for (int d = 0; d < D && c.l2; d++) kk[d] /= std::sqrt(sk + 1e-6), qq[d] /= std::sqrt(sq + 1e-6);
                double b = beta[at * HV + h];
                if (c.form != BetaForm::Weight) b = sigmoid(b) * (c.form == BetaForm::LogitsX2 ? 2 : 1);
                for (int a = 0; a < D; a++) {
                    double x = g[(at * HV + h) * D + a];
                    if (c.gate != Gate::None) x += bias[h * D + a];
                    if (c.gate == Gate::Softplus) x = -std::exp(A[h]) * std::log1p(std::exp(x));
                    if (c.gate == Gate::Bounded) x = c.bound * sigmoid(std::exp(A[h]) * x);
                    x = std::exp(x);
                    for (int e = 0; e < D; e++) S[a * D + e] *= x, u[e] += S[a * D + e] * kk[a];
                }
                for (int e = 0; e < D; e++) u[e] = b * (v[(at * HV + h) * D + e] - u[e]);
                for (int a = 0; a < D; a++)
                    for (int e = 0; e < D; e++) S[a * D + e] += kk[a] * u[e], oo[e] += S[a * D + e] * qq[a] * p.scale;
                for (int e = 0; e < D; e++) {
                    double x = o[(at * HV + h) * D + e];
                    if (x != x) x = 9e9;
                    se += (x - oo[e]) * (x - oo[e]), sn += oo[e] * oo[e];
                }
                if (c.ckpt && (t + 1) % c.ckpt == 0) ec = std::max(ec, compare(ck, (row + (t + 1) / c.ckpt - 1) * ss[0]));
            }
            if (len) eo = std::max(eo, std::sqrt(se / sn));
            es = std::max(es, compare(hf, rn * ss[0]));
        }
        if (c.ckpt) row += len / c.ckpt;
    }
    for (int64_t i = end * HV * D; i < BT * HV * D; i++) tail += o[i] != 0;
    const bool bf = c.type == DType::BF16, ok = eo < (bf ? 5e-3 : 3e-3) && es < 3e-3 && ec < 3e-3 && !tail;
    bad += !ok && !c.known;
    printf("%s %-24s o %.2e state %.2e checkpoints %.2e tail %d\n",
           ok        ? "ok "
           : c.known ? "known"
                     : "BAD",
           c.name.c_str(), eo, es, ec, tail);
    fflush(stdout);
}
int main(int argc, char **argv) {
    const DType bf = DType::BF16, h = DType::F16, f = DType::F32;
    const Gate none = Gate::None, soft = Gate::Softplus, bound = Gate::Bounded;
    const BetaForm weight = BetaForm::Weight, logits = BetaForm::Logits, x2 = BetaForm::LogitsX2;
    std::vector<Case> cases = {
        {"plain", {64}},
        {"one chunk, no state", {32}, 1, 1, bf, f, false, false},
        {"tails", {70, 0, 1, 64, 33}, 1, 2},
        {"l2norm, vfirst", {70, 0, 31, 64, 130}, 1, 2, bf, bf, true, true, true},
        {"few CTAs", {70, 0, 1, 64, 130, 65}, 1, 2, bf, f, true, true, false, 1, none, weight, false, Random, -1, 5},
        {"in halves", {130, 0, 70, 33}, 1, 2, bf, f, true, true, false, 1, none, weight, false, Random, -1, 10},
        {"fp16", {70, 96}, 1, 1, h, h, false, true},
        {"fp16 l2norm", {70, 96}, 1, 1, h, f, true, true},
        {"resets", {100, 70}, 1, 1, bf, f, false, true, false, 1, none, weight, true},
        {"resets fp16", {100, 70}, 1, 1, h, f, false, true, false, 1, none, weight, true},
        {"steep", {150}, 1, 1, bf, f, false, true, false, 20},
        {"slow", {150}, 1, 1, bf, f, false, true, false, 1e-3},
        {"softplus", {100}, 1, 2, bf, bf, true, true, false, 1, soft, logits},
        {"bounded", {100}, 1, 2, bf, bf, true, true, false, 1, bound, logits},
        {"bounded x2", {100}, 1, 2, bf, bf, true, true, false, 1, bound, x2},
        {"gva", {65, 100}, 2, 6, bf, f, true, true, true},
        {"dense", {70}, 1, 2, bf, f, false, true, false, 1, none, weight, false, Random, -1, 132, 3},
        {"checkpoints", {200, 64}, 1, 1, bf, f, false, true, false, .02, none, weight, false, Random, -1, 132, 0, 64},
        {"padding", {70, 65, 10, 64, 3}, 1, 2, bf, f, false, true, false, 1, none, weight, false, Random, -1, 132, 0, 0, true},
        {"correlated", {200}, 1, 1, bf, f, false, true, false, 0, none, weight, false, Correlated, 1},
        {"one key 17", {17}, 1, 1, bf, f, false, false, false, 0, none, weight, false, One, 1},
        {"one key 128", {128}, 1, 1, bf, f, false, false, false, 0, none, weight, false, One, 1},
        {"one key .9997", {200}, 1, 1, bf, f, false, false, false, 1e-3, none, weight, false, One, .9997},
        {"near keys", {200}, 1, 1, bf, f, false, false, false, 0, none, weight, false, Near, 1},
        {"near keys .9997", {200}, 1, 1, bf, f, false, false, false, 1e-3, none, weight, false, Near, .9997},
        {"near keys beta 2", {200}, 1, 1, bf, f, false, false, false, 0, none, weight, false, Near, 2},
        {"one key beta 2", {200}, 1, 1, bf, f, false, false, false, 1e-3, none, weight, false, One, 2, 132, 0, 0, false, true},
        {"one key beta 2 fp16",
         {200},
         1,
         1,
         h,
         f,
         false,
         false,
         false,
         1e-3,
         none,
         weight,
         false,
         One,
         2,
         132,
         0,
         0,
         false,
         true},
        {"near keys beta 2 fp16", {200}, 1, 1, h, f, false, false, false, 1e-3, none, weight, false, Near, 2},
        {"cut", {2400}, 1, 2, bf, f, false, true, false, .02, none, weight, false, Random, -1, 48},
        {"cut, slow, vfirst", {2400}, 1, 1, bf, bf, true, true, true, 1e-3, none, weight, false, Random, -1, 24},
        {"cut, packed", {2000, 0, 70, 900}, 1, 1, bf, f, false, true, false, .02, none, weight, false, Random, -1, 24},
        {"cut, not worth it", {700, 700, 720}, 1, 1, bf, f, false, true, false, .02, none, weight, false, Random, -1, 24},
        {"cut, dense", {2000}, 1, 1, bf, f, false, false, false, .02, none, weight, false, Random, -1, 24, 2},
        {"cut, checkpoints", {2400}, 1, 1, bf, f, false, true, false, .02, none, weight, false, Random, -1, 24, 0, 64},
        {"cut, padding",
         {2000, 1000, 10},
         1,
         1,
         bf,
         f,
         false,
         true,
         false,
         .02,
         none,
         weight,
         false,
         Random,
         -1,
         24,
         0,
         0,
         true},
        {"cut, correlated", {2000}, 1, 1, bf, f, false, true, false, 1e-3, none, weight, false, Correlated, 1, 24},
        {"cut, fp16", {2000}, 1, 1, h, h, false, true, false, 1e-3, none, weight, false, Random, -1, 24},
        {"uneven rows", {96}, 1, 1, bf, f, true, true, false, 1, none, weight, false, Uneven},
        {"one key fp16", {130}, 1, 1, h, f, false, false, false, 1e-3, none, weight, false, One, .9997},
        {"random beta 2", {200}, 1, 1, bf, f, false, false, false, 0, none, weight, false, Random, 2},
    };
    Case in_place = {"cut, in place", {2000, 100}, 1, 1};
    in_place.sms = 24, in_place.gs = .02, in_place.in_place = true;
    cases.push_back(in_place);
    Case one_hop = {"cut, one hop", {4000}, 1, 1, bf, f, true};
    one_hop.sms = 5, one_hop.gs = .02;
    cases.push_back(one_hop);
    for (const DType type : {bf, h}) {  // 1 - beta |k|^2 = -3, times 1 / 3.05
        Case two = {type == bf ? "keys of length 2 that decay" : "keys of length 2 that decay fp16", {300}};
        two.type = type, two.keys = One, two.beta = 1, two.length = 2, two.g = -std::log(3.05f);
        two.known = type == bf;
        cases.push_back(two);
    }
    for (const DType type : {bf, h})
        for (const int length : {230, 2400}) {
            Case jumps = {
                std::string("jumps of V") + (type == bf ? "" : " fp16") + (length > 230 ? ", cut" : ""), {length}, 1, 2, type};
            jumps.jumps = true, jumps.gs = length > 230 ? .5f : 4, jumps.sms = 48, jumps.init = length == 230;
            cases.push_back(jumps);
            jumps.name += " D 64", jumps.D = 64;
            cases.push_back(jumps);
        }
    Case large = {"keys of length 100, beta 1e-4", {200}};
    large.beta = 1e-4f, large.length = 100, large.gs = .01f, large.known = true;
    cases.push_back(large);
    const std::pair<const char *, Gates> raw[] = {
        {"lowest", Lowest}, {"still", Still}, {"slow", Slow}, {"channels", Channels}, {"any", Any}};
    for (const auto &[name, gates] : raw)
        for (const DType type : {bf, h})
            for (const Keys keys : {Random, Near, One})
                for (const float limit : {-5.0f, -5.01f, -0.1f}) {  // beyond -5: the tree
                    if (keys != Random && limit != -5) continue;
                    Case gate = {std::string("gates ") + name, {100, 33, 15, 16, 17, 64}, 1, 2, type, type, true};
                    gate.gate = bound, gate.gs = .2f, gate.gates = gates, gate.bound = limit;
                    gate.keys = keys, gate.init = keys == Random, gate.beta = keys == Random ? -1 : 8, gate.form = logits;
                    gate.name += type == bf ? "" : " fp16";
                    gate.name += limit == -5 ? "" : limit < -5 ? ", bound -5.01" : ", bound -0.1";
                    gate.name += keys == Random ? "" : keys == Near ? ", near keys" : ", one key";
                    cases.push_back(gate);
                    gate.name += " D 64", gate.D = 64;
                    if (limit == -5) cases.push_back(gate);
                }
    for (const char *name : {"plain", "tails", "l2norm, vfirst", "few CTAs", "fp16", "resets", "steep", "bounded", "gva",
                             "dense", "checkpoints", "padding", "near keys", "one key fp16", "cut", "cut, packed"})
        for (size_t i = 0, count = cases.size(); i < count; i++)
            if (cases[i].name == name) {
                cases.push_back(cases[i]);
                cases.back().name += " D 64", cases.back().D = 64;
            }
    for (auto &c : cases)
        if (argc < 2 || c.name.find(argv[1]) != std::string::npos) run(c);
    printf("BAD %d\n", bad);
    return bad;
}
