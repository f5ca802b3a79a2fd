#include <random>
#include <string>
#include "emu.h"
#include "gdn/gdn_fwd.cu"
#include "gdn/gdn_fwd.cuh"
#include "tensor.h"
using namespace linattn;
using namespace linattn::cuda;
std::mt19937 rng(getenv("EMU_SEED") ? atoi(getenv("EMU_SEED")) : 1);
float rnd() { return std::normal_distribution<float>()(rng); }
float uni() { return std::uniform_real_distribution<float>()(rng); }
uint16_t to16(float x, bool bf) { return bf ? ptx::b16(x) : ptx::h16(x); }
float from16(uint16_t x, bool bf) { return bf ? ptx::up<__nv_bfloat16>(x) : ptx::up<__half>(x); }
int bad = 0;
struct Case {
    std::string name;
    std::vector<int> lens;
    int H = 1, HV = 1, D = 128;
    bool bf = true, l2 = false, init = true, vfirst = false;
    float gs = 1;
    int sms = 132, mode = 0, pad = 5, dense = 0, splits = 0, ckpt = 0;
    bool padding = false;
    float cosine = -1, beta = -1;          // of the keys, if not negative: correlated; if not negative
    float size = 1, length = 1, gate = 1;  // of v; of the keys; if negative: g of all tokens
    bool along = false;                    // queries like the keys
    int every = 1;                         // correlated: the keys of every so many blocks of 64 tokens
    // Checkpoints in bf16; by a table, in reverse order, some of them skipped; in a row stride that TMA does not take; in the pool of
    // the states, the last of each sequence where its final state goes.
    bool ckpt_bf = false, ckpt_table = false, ckpt_odd = false, ckpt_pool = false;
};
void run(const Case &c) {
    int D = c.D, HV = c.HV, H = c.H, N = c.dense ? c.dense : c.lens.size(), T = 0;
    for (int l : c.lens) T += l;
    if (!c.dense) T += c.pad;
    int B = c.dense ? c.dense : 1;
    int64_t BT = (int64_t)B * T;
    std::vector<uint16_t> q(BT * H * D), k(BT * H * D), v(BT * HV * D), o(BT * HV * D, 0x7fc0);
    std::vector<float> g(BT * HV), be(BT * HV), h0((size_t)N * HV * D * D), hf((size_t)N * HV * D * D, NAN);
    std::vector<int> cu(N + 1, 0);
    for (int n = 0; n < N && !c.dense; n++) cu[n + 1] = cu[n] + c.lens[n];
    std::vector<float> base(128);
    float base_norm = 0;
    for (int d = 0; d < D; d++) base[d] = rnd(), base_norm += base[d] * base[d];
    auto fill = [&](std::vector<uint16_t> &x, int heads, bool norm, bool correlated = false, float size = 1) {
        for (int64_t t = 0; t < BT; t++)
            for (int h = 0; h < heads; h++) {
                float r[128], s = 0;
                for (int d = 0; d < D; d++) r[d] = rnd() + (norm && c.mode == 2 ? 3.f : 0), s += r[d] * r[d];
                if (correlated && t / 64 % c.every == 0) {
                    float n = std::sqrt(s), a = std::sqrt(c.cosine / base_norm), b = std::sqrt(1 - c.cosine) / n;
                    s = 0;
                    for (int d = 0; d < D; d++) r[d] = a * base[d] + b * r[d], s += r[d] * r[d];
                }
                s = norm ? 1 / std::sqrt(s) : size;
                bool past = !c.dense && t >= cu[N];
                for (int d = 0; d < D; d++) x[(t * heads + h) * D + d] = past ? 0x7fff : to16(r[d] * s, c.bf);
            }
    };
    fill(q, H, !c.l2, c.along);
    fill(k, H, !c.l2, c.cosine >= 0);
    if (c.length != 1)
        for (auto &x : k) x = to16(c.length * from16(x, c.bf), c.bf);
    fill(v, HV, false, false, c.size);
    if (c.mode == 3)
        for (int64_t t = 1; t < (c.dense ? BT : cu[N]); t++)
            for (int i = 0; i < H * D; i++) k[t * H * D + i] = k[i];
    for (auto &x : g) x = c.gate < 0 ? c.gate : -c.gs * uni();
    for (auto &x : be) x = c.beta >= 0 ? c.beta : c.mode >= 2 ? 1 : uni();
    for (auto &x : h0) x = rnd();
    if (c.mode == 1)
        for (size_t i = 0; i < g.size(); i += 3) g[i] = i % 2 ? -INFINITY : -1000;
    if (c.mode == 4)  // what a sequence's last tokens find: two tokens, nothing before
        for (int n = 0; n < N; n++)
            for (int h = 0; h < HV; h++) g[(cu[n] + 62) * HV + h] = -INFINITY;
    DeltaParams p;
    p.B = B;
    p.T = T;
    p.H = H;
    p.HV = HV;
    p.K = p.V = D;
    p.N = p.P = p.F = N;
    DType dt = c.bf ? DType::BF16 : DType::F16;
    p.q = tens(q.data(), dt, {T * H * D, H * D, D, 1});
    p.k = tens(k.data(), dt, {T * H * D, H * D, D, 1});
    p.v = tens(v.data(), dt, {T * HV * D, HV * D, D, 1});
    p.o = tens(o.data(), dt, {T * HV * D, HV * D, D, 1});
    p.g = tens(g.data(), DType::F32, {T * HV, HV, 1});
    p.beta = tens(be.data(), DType::F32, {T * HV, HV, 1});
    std::vector<int64_t> ss = {HV * D * D, D * D, c.vfirst ? 1 : D, c.vfirst ? D : 1};
    if (c.init) p.state_in = tens(h0.data(), DType::F32, ss);
    p.state_out = tens(hf.data(), DType::F32, ss);
    if (!c.dense) p.cu_seqlens = tens(cu.data(), DType::I32, {1});
    int C = 0, M = 0;  // checkpoints; of the longest sequence
    auto length_of = [&](int n) { return c.dense ? T : c.lens[n]; };
    if (c.ckpt)
        for (int n = 0; n < N; n++) C += length_of(n) / c.ckpt, M = std::max(M, length_of(n) / c.ckpt);
    const int64_t state = (int64_t)HV * D * D, ck_row = state + c.ckpt_odd;
    std::vector<float> ck((C + N) * ck_row, NAN);
    std::vector<uint16_t> ck_bf(ck.size(), 0x7fc0);
    std::vector<int> table(N * M), ri(N);
    const bool by_table = c.ckpt_table || c.ckpt_pool;
    if (c.ckpt) {
        p.checkpoint_every = c.ckpt;
        p.C = C;
        p.checkpoints = c.ckpt_bf ? tens(ck_bf.data(), DType::BF16, ss) : tens(ck.data(), DType::F32, ss);
        p.checkpoints.stride[0] = ck_row;
        for (int n = 0, row = 0; n < N; n++)
            for (int m = 0; m < M; m++) {
                const bool exists = m < length_of(n) / c.ckpt, last = m == length_of(n) / c.ckpt - 1;
                table[n * M + m] = !exists ? -1 : c.ckpt_pool && last ? C + n : C - 1 - row;
                row += exists;
                if (c.ckpt_table && exists && row % 5 == 2) table[n * M + m] = -1;
            }
        if (by_table) p.checkpoint_indices = tens(table.data(), DType::I32, {M, 1}), p.M = M;
    }
    if (c.ckpt_pool) {
        std::copy(h0.begin(), h0.end(), ck.begin() + C * state);
        p.state_in = p.state_out = p.checkpoints;
        p.P = p.F = p.C = C + N;
        for (int n = 0; n < N; n++) ri[n] = C + n;
        p.read_indices = p.write_indices = tens(ri.data(), DType::I32, {1});
    } else
        for (int n = 0; n < N; n++) ri[n] = n % 2 ? -1 : N - 1 - n;
    if (c.padding) {
        p.read_indices = tens(ri.data(), DType::I32, {1});
        p.write_indices = p.read_indices;
    }
    p.scale = 1 / std::sqrt((double)D);
    p.qk_l2norm = c.l2;
    p.zero_tail = true;
    p.splits = c.splits;
    if (!gdn_chunked_fits(p)) {
        printf("does not fit\n");
        bad++;
        return;
    }
    uint64_t ws = gdn_fwd_chunked_workspace(p, c.sms);
    std::vector<float> w(ws / 4 + 8, NAN);
    p.workspace.data = (char *)(((uintptr_t)w.data() + 15) & ~15ull);
    launch_gdn_fwd_chunked(p, c.sms);
    if (c.ckpt_pool) std::copy(ck.begin() + C * state, ck.end(), hf.begin());
    if (c.ckpt_bf)
        for (size_t i = 0; i < ck.size(); i++) ck[i] = from16(ck_bf[i], true);
    double eo = 0, es = 0, ec = 0;
    int row = 0, tailbad = 0;
    for (int n = 0; n < N; n++) {
        if (c.padding && ri[n] < 0) {
            for (int64_t i = (int64_t)cu[n] * HV * D; i < (int64_t)cu[n + 1] * HV * D; i++) tailbad += o[i] != 0;
            continue;
        }
        int64_t rn = c.padding ? ri[n] : n;
        int64_t bos = c.dense ? (int64_t)n * T : cu[n];
        int len = c.dense ? T : c.lens[n];
        for (int h = 0; h < HV; h++) {
            std::vector<double> S(D * D);
            for (int a = 0; a < D; a++)
                for (int b = 0; b < D; b++) S[a * D + b] = c.init ? h0[rn * ss[0] + h * ss[1] + a * ss[2] + b * ss[3]] : 0;
            double se = 0, sn = 0, te = 0, tn = 0;  // of the sequence, of its last chunk
            auto cmp = [&](const float *x) {
                double e = 0, m = 1e-30;
                for (int a = 0; a < D; a++)
                    for (int b = 0; b < D; b++) {
                        double y = x[h * ss[1] + a * ss[2] + b * ss[3]], r = S[a * D + b];
                        e += (y - r) * (y - r);
                        m += r * r;
                    }
                e = std::sqrt(e / m);
                return e == e ? e : 9e9;
            };
            for (int t = 0; t < len; t++) {
                int64_t at = bos + t;
                double kk[128], qq[128], u[128], sk = 0, sq = 0;
                for (int d = 0; d < D; d++) {
                    kk[d] = from16(k[(at * H + h * H / HV) * D + d], c.bf);
                    qq[d] = from16(q[(at * H + h * H / HV) * D + d], c.bf);
                    sk += kk[d] * kk[d];
                    sq += qq[d] * qq[d];
                }
                if (c.l2)
                    for (int d = 0; d < D; d++) kk[d] /= std::sqrt(sk + 1e-6), qq[d] /= std::sqrt(sq + 1e-6);
                double gm = std::exp((double)g[at * HV + h]);
                for (auto &x : S) x *= gm;
                for (int b = 0; b < D; b++) u[b] = 0;
                for (int a = 0; a < D; a++)
                    for (int b = 0; b < D; b++) u[b] += S[a * D + b] * kk[a];
                for (int b = 0; b < D; b++) u[b] = be[at * HV + h] * (from16(v[(at * HV + h) * D + b], c.bf) - u[b]);
                double oo[128] = {};
                for (int a = 0; a < D; a++)
                    for (int b = 0; b < D; b++) {
                        S[a * D + b] += kk[a] * u[b];
                        oo[b] += S[a * D + b] * qq[a] * p.scale;
                    }
                for (int b = 0; b < D; b++) {
                    double x = from16(o[(at * HV + h) * D + b], c.bf);
                    if (x != x) x = 9e9;
                    double e = (x - oo[b]) * (x - oo[b]), m = oo[b] * oo[b];
                    se += e, sn += m;
                    if (t >= (len - 1) / 64 * 64) te += e, tn += m;
                }
                if (c.ckpt && (t + 1) % c.ckpt == 0) {
                    const int m = (t + 1) / c.ckpt - 1, to = by_table ? table[n * M + m] : row + m;
                    if (to >= 0 && to < C) ec = std::max(ec, cmp(ck.data() + to * ck_row));
                }
            }
            if (len) eo = std::max({eo, std::sqrt(se / sn), std::sqrt(te / tn)});
            es = std::max(es, cmp(hf.data() + rn * ss[0]));
        }
        if (c.ckpt) row += len / c.ckpt;
    }
    int tail = tailbad;
    if (!c.dense)
        for (int64_t i = (int64_t)cu[N] * HV * D; i < BT * HV * D; i++) tail += o[i] != 0;
    bool ok = eo < (c.bf ? 5e-3 : 1e-3) && es < (c.bf ? 3e-3 : 1e-3) && ec < (c.ckpt_bf ? 4e-3 : 3e-3) && !tail;
    bad += !ok;
    printf("%s %-34s o %.2e state %.2e ckpt %.2e tail %d workspace %lu\n", ok ? "ok " : "BAD", c.name.c_str(), eo, es, ec, tail,
           (unsigned long)ws);
    fflush(stdout);
}
int main(int argc, char **argv) {
    std::vector<Case> cs = {
        {"plain", {128}, 1, 1},
        {"narrow tails", {70, 0, 1, 64, 130}, 1, 2},
        {"wide", {70, 0, 1, 64, 130, 65}, 1, 2, 128, true, false, true, true, 1, 8},
        {"wide l2, few CTAs", {70, 0, 1, 64, 130, 200}, 1, 2, 128, true, true, true, false, 1, 5},
        {"D64", {70, 0, 1, 64, 130}, 1, 2, 64, true, true},
        {"fp16", {70, 130}, 1, 2, 128, false, true},
        {"resets", {200, 70}, 1, 2, 128, true, false, true, false, 1, 132, 1},
        {"correlated", {200}, 1, 1, 128, true, false, true, false, 0, 132, 2},
        {"cut", {3300}, 1, 2, 128, true, false, true, false, 0.02},
        {"cut no init vfirst", {3700, 64, 3000}, 1, 2, 128, true, true, false, true, 0.02, 40},
        {"cut D64", {3300}, 1, 2, 64, true, true, true, false, 0.02},
        {"dense", {100}, 1, 1, 128, true, false, true, false, 1, 132, 0, 0, 3},
        {"dense cut", {3700}, 1, 1, 128, true, false, true, false, 0.02, 20, 0, 0, 2},
        {"cut ckpt", {3700, 64}, 1, 1, 128, true, false, true, false, .02, 16, 0, 3, 0, 0, 128},
        {"wide ckpt", {256, 70, 128}, 1, 1, 128, true, false, true, false, 1, 2, 0, 3, 0, 0, 64},
        {"wide ckpt, vfirst", {256, 70, 128}, 1, 1, 128, true, true, true, true, 1, 2, 0, 3, 0, 0, 64},
        {"ckpt, vfirst, D64", {256, 70}, 1, 1, 64, true, false, true, true, 1, 132, 0, 3, 0, 0, 64},
        {"padding", {70, 65, 10, 64, 3}, 1, 2, 128, true, false, true, false, 1, 132, 0, 5, 0, 0, 0, true},
        {"padding cut", {3700, 3400, 10}, 1, 1, 128, true, false, true, false, .02, 20, 0, 5, 0, 0, 0, true},
        {"cut in three", {5500}, 1, 4, 128, true, true, true, false, 0.02, 16},
        {"cut, heads prepared in turn", {4200}, 1, 2, 128, true, true, true, false, 0.02, 8},
        {"wide D128 gva", {65, 200, 64}, 2, 6, 128, true, true, true, true, 1, 7},
        {"one key 17", {17}, 1, 1, 128, true, false, false, false, 0, 132, 3},
        {"one key 64", {64}, 1, 1, 128, true, false, false, false, 0, 132, 3},
        {"one key 200", {200}, 1, 1, 128, true, false, false, false, 0, 132, 3},
        {"few tokens after a reset", {65, 66, 67, 68, 70, 72, 65, 65}, 2, 6, 128, true, false, true, false, 0, 132, 4},
        {"few tokens after a reset, D64, l2", {65, 66, 67, 68, 70, 72, 65, 65}, 2, 6, 64, true, true, true, false, 0, 132, 4},
        {"few tokens after a reset, wide, l2", {65, 66, 67, 65, 65}, 1, 3, 128, true, true, true, false, 0, 3, 4},
        {"D64 without decay", {512, 512}, 2, 8, 64, true, false, false, false, 0},
        {"D64 cut without decay", {3300}, 1, 2, 64, true, true, true, false, 0},
        {"cut D64, plain", {3300}, 1, 2, 64, true, false, true, false, 0.02},
        {"lengths ask for halves", {4100, 70}, 1, 1, 128, true, false, true, false, 1, 3},
        {"lengths ask for all columns, l2", {2070, 2100, 2048}, 1, 1, 128, true, true, true, true, 1, 2},
        {"unsplit", {3300}, 1, 1, 128, true, false, true, false, 0.02, 132, 0, 0, 0, 1}};
    auto checkpoints = [&](const char *name, std::vector<int> lens, int sms, int every, bool l2, bool vfirst) -> Case & {
        Case c;
        c.name = std::string("ckpt ") + name;
        c.lens = lens, c.sms = sms, c.ckpt = every, c.l2 = l2, c.vfirst = vfirst;
        cs.push_back(c);
        return cs.back();
    };
    for (bool vfirst : {false, true}) {
        auto name = [&](const char *n) { return std::string(n) + (vfirst ? ", V-first" : ", K-first"); };
        checkpoints(name("wide every 128, l2").c_str(), {400, 256, 64, 128}, 2, 128, true, vfirst).HV = 2;
        checkpoints(name("wide every 64").c_str(), {200, 64, 64, 0, 64, 130}, 2, 64, false, vfirst).HV = 2;
        checkpoints(name("wide, bf16").c_str(), {200, 256}, 1, 64, false, vfirst).ckpt_bf = true;
        checkpoints(name("narrow, bf16").c_str(), {200, 70}, 132, 64, true, vfirst).ckpt_bf = true;
        checkpoints(name("narrow, fp16").c_str(), {330}, 132, 128, false, vfirst).bf = false;
        checkpoints(name("cut, fp16").c_str(), {3300}, 132, 192, false, vfirst).bf = false, cs.back().gs = .02;
        checkpoints(name("cut, bf16").c_str(), {3700, 64}, 16, 128, true, vfirst).ckpt_bf = true, cs.back().gs = .02;
        checkpoints(name("wide, by a table").c_str(), {320, 70, 200, 256}, 3, 64, false, vfirst).ckpt_table = true;
        checkpoints(name("wide, no stride for TMA").c_str(), {200, 256}, 1, 64, false, vfirst).ckpt_odd = true;
        checkpoints(name("narrow, no stride for TMA").c_str(), {200, 256}, 132, 64, false, vfirst).ckpt_odd = true;
    }
    checkpoints("in the pool, wide", {200, 256, 70, 300}, 3, 64, false, false).ckpt_pool = true;
    checkpoints("in the pool, narrow", {200, 256, 70, 300}, 132, 64, false, false).ckpt_pool = true;
    checkpoints("dense, wide", {200}, 2, 64, true, false).dense = 3;
    checkpoints("lengths ask for halves", {4100, 70}, 3, 256, false, false).gs = .02;
    checkpoints("lengths ask for all columns", {2070, 2100, 2048}, 2, 512, true, true).gs = .02;
    checkpoints("near keys now and then, wide", {330, 64, 256}, 3, 64, false, false).cosine = .9999f, cs.back().every = 2;
    checkpoints("near keys now and then, wide, l2", {330}, 1, 64, true, false).cosine = .9999f, cs.back().every = 3;
    checkpoints("near keys, narrow", {330}, 132, 128, false, false).cosine = .9999f, cs.back().every = 2;
    checkpoints("near keys, cut", {3300}, 132, 128, false, true).cosine = .9999f, cs.back().every = 3, cs.back().gs = .02;
    auto hard = [&](const char *name, std::vector<int> lens, float cosine, float beta, float g, bool along) -> Case & {
        Case c;
        c.name = std::string("hard ") + name;
        c.lens = lens, c.cosine = cosine, c.beta = beta, c.gs = g, c.along = along, c.init = false;
        cs.push_back(c);
        return cs.back();
    };
    for (bool along : {false, true}) {
        const char *q = along ? "q like k" : "q random";
        auto name = [&](const char *n) { return std::string(n) + ", " + q; };
        hard(name("one key").c_str(), {16, 17, 200}, 1, 1, 0, along);
        hard(name("one key, beta 2").c_str(), {16, 17, 128}, 1, 2, 0, along);
        hard(name("near keys").c_str(), {17, 128}, 0.9999f, 1, 0, along);
        hard(name("near keys, beta 2").c_str(), {17, 128}, 0.9999f, 2, 1e-3f, along);
        hard(name("cosine 0.3").c_str(), {200}, 0.3f, 1, 0, along);
        hard(name("cosine 0.3, beta 2").c_str(), {200}, 0.3f, 2, 0, along);
    }
    hard("near keys, v 1e-8", {130}, 0.9999f, 1, 0, true).size = 1e-8f;
    hard("near keys, v 1e4", {130}, 0.9999f, 1, 0, true).size = 1e4f;
    hard("near keys, fp16", {130}, 0.9999f, 1, 0, true).bf = false;
    hard("near keys, D64", {130}, 0.9999f, 1, 0, true).D = 64;
    hard("near keys, l2norm", {130}, 0.9999f, 1, 0, true).l2 = true;
    hard("near keys, wide", {70, 64, 130}, 0.9999f, 1, 0, true).sms = 3;
    Case &two = hard("keys of length 2 that decay", {300}, 1, 1, 0, false);  // 1 - beta |k|^2 = -3, times 1/3.05
    two.length = 2, two.gate = -std::log(3.05f), two.D = 64, two.init = true;
    hard("near keys, cut", {3300}, 0.9999f, 1, 0, true).HV = 2;
    hard("near keys now and then", {700}, 0.9999f, -1, 0.1f, false).every = 3;
    hard("near keys now and then, l2norm", {130, 400}, 0.9999f, -1, 0.1f, false).every = 2, cs.back().l2 = true;
    hard("near keys now and then, wide", {130, 400, 64, 300}, 0.9999f, -1, 0.1f, false).every = 2, cs.back().sms = 3;
    hard("near keys now and then, wide, l2", {500}, 0.9999f, -1, 0.1f, false).every = 3, cs.back().sms = 1, cs.back().l2 = true;
    for (auto &c : cs)
        if (argc < 2 || c.name.find(argv[1]) != std::string::npos) run(c);
    printf("BAD %d\n", bad);
    return bad;
}
