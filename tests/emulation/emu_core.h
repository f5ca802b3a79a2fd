// Threads of a CTA as fibres that switch at barriers; copies that land late.
#pragma once
#define __launch_bounds__(...)

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>
#ifndef EMULATED  // the namespace of the kernels
#define EMULATED gdn
#endif
namespace linattn::cuda::EMULATED {
alignas(1024) inline char smem_bytes[232448];
}
namespace emu {
using linattn::cuda::EMULATED::smem_bytes;
struct U3 {
    unsigned x = 0, y = 0, z = 0;
};
struct Fiber {
    ucontext_t ctx;
    std::vector<char> stack;
    U3 tid;
    bool done = false;
};
inline std::vector<Fiber *> fibers;
inline Fiber *cur;
inline ucontext_t main_ctx;
inline U3 block, grid, dim;
inline long progress = 0, idle = 0;
inline void yield() {
    Fiber *f = cur;
    swapcontext(&f->ctx, &main_ctx);
}
struct Sync {
    int count = 0;
    unsigned gen = 0;
};
inline Sync warp_s[32], group_s[8], bars[16];
inline uint64_t wbuf[32][32];
inline void meet(Sync &s, int n, const std::function<void()> &f = {}) {
    unsigned g = s.gen;
    if (++s.count == n) {
        if (f) f();
        s.count = 0;
        s.gen++;
        progress++;
    } else
        while (s.gen == g) yield();
}
inline int W() { return cur->tid.x / 32; }
inline int L() { return cur->tid.x % 32; }
inline void warp() { meet(warp_s[W()], 32); }
template <class T>
inline T exchange(T v, int from) {
    static_assert(sizeof(T) <= 8);
    uint64_t b = 0;
    memcpy(&b, &v, sizeof v);
    wbuf[W()][L()] = b;
    warp();
    T r;
    memcpy(&r, &wbuf[W()][from & 31], sizeof r);
    warp();
    return r;
}
inline std::vector<std::function<void()>> pending;
inline unsigned prs = getenv("EMU_SEED") ? 777 * atoi(getenv("EMU_SEED")) : 777;
inline void run_pending(bool force) {
    prs = prs * 1664525u + 1013904223u;
    if (pending.empty() || (!force && (prs >> 10) % 3)) return;
    size_t i = (prs >> 16) % pending.size();
    auto f = pending[i];
    pending.erase(pending.begin() + i);
    f();
    progress++;
}
inline void reset();
inline std::function<void()> body;
inline void entry() {
    body();
    cur->done = true;
    progress++;
    while (true) yield();
}
inline void run(unsigned g, unsigned d, std::function<void()> f, const char *name) {
    body = f;
    grid.x = g;
    dim.x = d;
    for (unsigned b = 0; b < g; b++) {
        block.x = getenv("EMU_REVERSE") ? g - 1 - b : b;
        for (auto &s : warp_s) s = {};
        for (auto &s : group_s) s = {};
        for (auto &s : bars) s = {};
        memset(smem_bytes, 0xff, sizeof smem_bytes);
        reset();
        while (fibers.size() < d) {
            fibers.push_back(new Fiber);
            fibers.back()->stack.resize(256 << 10);
        }
        for (unsigned t = 0; t < d; t++) {
            Fiber *x = fibers[t];
            x->tid.x = t;
            x->done = false;
            getcontext(&x->ctx);
            x->ctx.uc_stack.ss_sp = x->stack.data();
            x->ctx.uc_stack.ss_size = x->stack.size();
            x->ctx.uc_link = nullptr;
            makecontext(&x->ctx, entry, 0);
        }
        long last = -1;
        int stuck = 0;
        while (true) {
            unsigned done = 0;
            static unsigned rs = 12345;
            static bool rnd = getenv("EMU_RANDOM") != nullptr;
            for (unsigned t0 = 0; t0 < d; t0++) {
                unsigned t = t0;
                if (rnd) {
                    t = (t0 * 37 + rs) % d;
                    rs = rs * 1664525u + 1013904223u;
                }
                Fiber *x = fibers[rnd ? (rs >> 8) % d : t];
                if (!rnd) {
                    if (x->done) {
                        done++;
                        continue;
                    }
                } else {
                    if (t0 == 0)
                        for (unsigned u = 0; u < d; u++) done += fibers[u]->done;
                    if (x->done) continue;
                }
                cur = x;
                swapcontext(&main_ctx, &x->ctx);
            }
            run_pending(progress == last);
            if (done == d) break;
            if (progress == last) {
                if (++stuck > (getenv("EMU_RANDOM") ? 3000 : 50)) {
                    fprintf(stderr, "%s: DEADLOCK in block %u\n", name, b);
                    for (unsigned t = 0; t < d; t += 32) fprintf(stderr, "%d", fibers[t]->done);
                    fprintf(stderr, "\n");
                    exit(3);
                }
            } else
                stuck = 0;
            last = progress;
        }
    }
}
}  // namespace emu
