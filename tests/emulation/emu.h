// What CUDA and cuda/ptx/ offer a kernel, done by fibres (emu_core.h).
#pragma once
#include "emu_core.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__
#define threadIdx (emu::cur->tid)
#define blockIdx (emu::block)
#define gridDim (emu::grid)
#define blockDim (emu::dim)
inline void __syncwarp() { emu::warp(); }
inline void __syncthreads() { emu::meet(emu::bars[0], emu::dim.x); }
template <class T>
T __shfl_sync(unsigned, T v, int l) {
    return emu::exchange(v, l);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int d) {
    int l = emu::L();
    return emu::exchange(v, l >= d ? l - d : l);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int m) {
    return emu::exchange(v, emu::L() ^ m);
}
template <class F>
auto emu_all(int v, F f) {
    emu::wbuf[emu::W()][emu::L()] = (uint64_t)(int64_t)v;
    emu::warp();
    auto r = f();
    emu::warp();
    return r;
}
inline unsigned __ballot_sync(unsigned, bool p) {
    return emu_all(p, [] {
        unsigned r = 0;
        for (int i = 0; i < 32; i++)
            if (emu::wbuf[emu::W()][i]) r |= 1u << i;
        return r;
    });
}
inline bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
inline int __reduce_add_sync(unsigned, int v) {
    return emu_all(v, [] {
        int r = 0;
        for (int i = 0; i < 32; i++) r += (int)emu::wbuf[emu::W()][i];
        return r;
    });
}
inline int __reduce_max_sync(unsigned, int v) {
    return emu_all(v, [] {
        int r = INT32_MIN;
        for (int i = 0; i < 32; i++) r = std::max(r, (int)emu::wbuf[emu::W()][i]);
        return r;
    });
}
inline unsigned __vminu2(unsigned a, unsigned b) { return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; }
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    return emu_all((int)v, [] {
        unsigned r = 0;
        for (int i = 0; i < 32; i++) r = std::max(r, (unsigned)emu::wbuf[emu::W()][i]);
        return r;
    });
}
inline float __uint_as_float(uint32_t x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
inline int __float_as_int(float x) {
    int i;
    memcpy(&i, &x, 4);
    return i;
}
inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
inline __half2 emu_half2(float a, float b) { return __half2(__float2half_rn(a), __float2half_rn(b)); }
#define EMU_HALF2(name, expression)                                                                         \
    inline __half2 name(__half2 a, __half2 b) {                                                             \
        const auto f = [](float a, float b) { return expression; };                                         \
        return emu_half2(f(__half2float(a.x), __half2float(b.x)), f(__half2float(a.y), __half2float(b.y))); \
    }
#define __hadd2 emu_hadd2
#define __hmul2 emu_hmul2
#define __hmax2 emu_hmax2
#define __hgt2 emu_hgt2
#define __hfma2 emu_hfma2
#define __habs2 emu_habs2
EMU_HALF2(__hadd2, a + b)
EMU_HALF2(__hmul2, a *b)
EMU_HALF2(__hmax2, a > b ? a : b)
EMU_HALF2(__hgt2, a > b ? 1.0f : 0.0f)
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return emu_half2(__half2float(a.x) * __half2float(b.x) + __half2float(c.x),
                     __half2float(a.y) * __half2float(b.y) + __half2float(c.y));
}
inline __nv_bfloat162 emu_bf162(float a, float b) { return __nv_bfloat162(__float2bfloat16_rn(a), __float2bfloat16_rn(b)); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return emu_bf162(__bfloat162float(a.x) * __bfloat162float(b.x) + __bfloat162float(c.x),
                     __bfloat162float(a.y) * __bfloat162float(b.y) + __bfloat162float(c.y));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return __hfma2(a, b, emu_bf162(-0.0f, -0.0f)); }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return __hfma2(a, emu_bf162(1, 1), b); }
inline __half2 __habs2(__half2 a) { return emu_half2(std::fabs(__half2float(a.x)), std::fabs(__half2float(a.y))); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
namespace linattn::ptx {
using namespace emu;
inline char *at(uint32_t a) {
    if (a >= sizeof smem_bytes) {
        fprintf(stderr, "shared address %x\n", a);
        abort();
    }
    return smem_bytes + a;
}
inline uint32_t shared_address(const void *p) { return (uint32_t)((const char *)p - smem_bytes); }
template <class T>
T ld(uint32_t a) {
    if (a % sizeof(T)) {
        fprintf(stderr, "misaligned %x\n", a);
        abort();
    }
    T v;
    memcpy(&v, at(a), sizeof v);
    return v;
}
template <class T>
void st(uint32_t a, T v) {
    if (a % sizeof(T)) {
        fprintf(stderr, "misaligned store %x\n", a);
        abort();
    }
    memcpy(at(a), &v, sizeof v);
}
inline uint32_t ld_shared_u32(uint32_t a) { return ld<uint32_t>(a); }
inline float ld_shared_f32(uint32_t a) { return ld<float>(a); }
inline uint4 ld_shared_v4_u32(uint32_t a) { return ld<uint4>(a); }
inline float2 ld_shared_v2_f32(uint32_t a) { return ld<float2>(a); }
inline float4 ld_shared_v4_f32(uint32_t a) { return ld<float4>(a); }
inline uint2 ld_shared_v2_u32(uint32_t a) { return ld<uint2>(a); }
inline void st_shared_v2_u32(uint32_t a, uint2 v) { st(a, v); }
inline void st_shared_u16(uint32_t a, uint16_t v) { st(a, v); }
inline void st_shared_u32(uint32_t a, uint32_t v) { st(a, v); }
inline void st_shared_f32(uint32_t a, float v) { st(a, v); }
inline void st_shared_v4_u32(uint32_t a, uint4 v) { st(a, v); }
inline void st_shared_v4_f32(uint32_t a, float4 v) { st(a, v); }
// cta
inline void bar_sync(uint32_t id, uint32_t n) { meet(bars[id], n); }
inline void barrier_sync(uint32_t id, uint32_t n) { bar_sync(id, n); }
inline bool elect_sync() {
    warp();
    return L() == 31;  // which one is not promised
}
inline void bar_arrive(uint32_t id, uint32_t n) {
    if (++bars[id].count == (int)n) {
        bars[id].count = 0;
        bars[id].gen++;
    }
    progress++;
}
template <int>
inline void setmaxnreg_inc() {}
template <int>
inline void setmaxnreg_dec() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
// mbarrier
struct MB {
    uint16_t phase : 1, expected : 15;
    int16_t pending;
    int32_t tx;
};
inline MB &mb(uint32_t a) { return *(MB *)at(a); }
inline void mb_check(MB &m) {
    progress++;
    if (m.pending < 0) {
        fprintf(stderr, "mbarrier overrun\n");
        abort();
    }
    if (m.pending == 0 && m.tx == 0) {
        m.phase ^= 1;
        m.pending = m.expected;
    }
}
inline void mbarrier_init(uint32_t b, uint32_t n) { mb(b) = {0, (uint16_t)n, (int16_t)n, 0}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t b) {
    mb(b).pending--;
    mb_check(mb(b));
}
inline void mbarrier_arrive_expect_tx(uint32_t b, uint32_t n) {
    mb(b).tx += n;
    mb(b).pending--;
    mb_check(mb(b));
}
inline void mbarrier_expect_tx(uint32_t b, uint32_t n) { mb(b).tx += n; }
inline void mbarrier_wait_parity(uint32_t b, uint32_t p) {
    while (mb(b).phase == (p & 1)) yield();
}
inline void mbarrier_arrive_and_wait(uint32_t b) {
    const uint32_t phase = mb(b).phase;
    mbarrier_arrive(b);
    mbarrier_wait_parity(b, phase);
}
inline void complete(uint32_t b, int n) {
    mb(b).tx -= n;
    mb_check(mb(b));
}
// math
inline float ex2_approx_ftz(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float lg2_approx_ftz(float x) { return std::log2(x); }
inline float rcp_approx_ftz(float x) { return 1.0f / x; }
inline float rsqrt_approx_ftz(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t b16(float x) {
    __nv_bfloat16 h = __float2bfloat16_rn(x);
    uint16_t r;
    memcpy(&r, &h, 2);
    return r;
}
inline uint32_t h16(float x) {
    __half h = __float2half_rn(x);
    uint16_t r;
    memcpy(&r, &h, 2);
    return r;
}
inline uint32_t cvt_rn_bf16x2(float a, float b) { return b16(a) | b16(b) << 16; }
inline uint32_t cvt_rn_f16x2(float a, float b) { return h16(a) | h16(b) << 16; }
template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
template <class T>
uint32_t cvt_rn_x2(float a, float b) {
    return kIsBf16<T> ? cvt_rn_bf16x2(a, b) : cvt_rn_f16x2(a, b);
}
inline uint32_t mul_rn_f16x2(uint32_t a, uint32_t b);
template <class T>
float up(uint16_t x) {
    T h;
    memcpy(&h, &x, 2);
    return (float)h;
}
inline uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) {
    return cvt_rn_f16x2(up<__half>(a) * up<__half>(b), up<__half>(a >> 16) * up<__half>(b >> 16));
}
inline uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
    return cvt_rn_bf16x2(up<__nv_bfloat16>(a) * up<__nv_bfloat16>(b), up<__nv_bfloat16>(a >> 16) * up<__nv_bfloat16>(b >> 16));
}
}  // namespace linattn::ptx
#include "emu_mma.h"
namespace linattn::ptx {
// tma
inline void fence_proxy_async_shared_cta() {}
inline void fence_proxy_async_global() {}
inline void prefetch_tensormap(const CUtensorMap *) {}
inline void prefetch_global_l2(const void *) {}
struct Map {
    char *data;
    int64_t size[5], stride[5];
    int box[5], bytes, swizzle;  // of an element; width, or 0
    int box_bytes() const { return box[0] * box[2] * box[4] * bytes; }
};
inline const Map &map_of(const CUtensorMap *m) { return *(const Map *)m; }
inline void tensor(uint32_t s, const CUtensorMap *m, const int (&c)[5], bool store) {
    const Map &t = map_of(m);
    if (s % (t.swizzle ? 1024 : 128) || (t.swizzle && t.box[0] * t.bytes != t.swizzle)) abort();
    for (int r = 0; r < t.box[2] * t.box[4]; r++)
        for (int x = 0; x < t.box[0]; x++) {
            uint32_t a = s + (r * t.box[0] + x) * t.bytes;
            if (t.swizzle) a ^= ((a >> 7) & 7) << 4;
            int64_t p[5] = {c[0] + x, c[1], c[2] + r % t.box[2], c[3], c[4] + r / t.box[2]};
            bool in = true;
            int64_t o = 0;
            for (int i = 0; i < 5; i++) {
                in &= p[i] >= 0 && p[i] < t.size[i];
                o += p[i] * t.stride[i];
            }
            if (store) {
                if (in) memcpy(t.data + t.bytes * o, at(a), t.bytes);
            } else if (in)
                memcpy(at(a), t.data + t.bytes * o, t.bytes);
            else
                memset(at(a), 0, t.bytes);
        }
}
struct Stores {  // of a thread, in bulk groups; the last one is open
    std::deque<std::vector<std::function<void()>>> groups{1};
};
inline std::map<Fiber *, Stores> stores;
inline void cp_async_bulk_tensor_5d_load(uint32_t d, const CUtensorMap *m, uint32_t b, int c0, int c1, int c2, int c3, int c4) {
    memset(at(d), 0xff, map_of(m).box_bytes());
    pending.push_back([=] {
        tensor(d, m, {c0, c1, c2, c3, c4}, false);
        complete(b, map_of(m).box_bytes());
    });
}
inline uint64_t createpolicy_evict_first() { return 0; }
inline void cp_async_bulk_tensor_5d_load_hint(uint32_t d, const CUtensorMap *m, uint32_t b, int c0, int c1, int c2, int c3,
                                              int c4, uint64_t) {
    cp_async_bulk_tensor_5d_load(d, m, b, c0, c1, c2, c3, c4);
}
inline void cp_async_bulk_tensor_4d_load(uint32_t d, const CUtensorMap *m, uint32_t b, int c0, int c1, int c2, int c3) {
    cp_async_bulk_tensor_5d_load(d, m, b, c0, c1, c2, c3, 0);
}
inline void cp_async_bulk_tensor_4d_store(const CUtensorMap *m, uint32_t s, int c0, int c1, int c2, int c3) {
    stores[cur].groups.back().push_back([=] { tensor(s, m, {c0, c1, c2, c3, 0}, true); });
}
inline void cp_async_bulk_store(void *d, uint32_t s, uint32_t n) {
    if (n % 16 || s % 16 || (uintptr_t)d % 16) abort();
    stores[cur].groups.back().push_back([=] { memcpy(d, at(s), n); });
}
inline void cp_async_bulk_load(uint32_t d, const void *s, uint32_t n, uint32_t b) {
    if (n % 16 || d % 16 || (uintptr_t)s % 16) abort();
    memset(at(d), 0xff, n);
    pending.push_back([=] {
        memcpy(at(d), s, n);
        complete(b, n);
    });
}
inline void cp_async_bulk_commit_group() { stores[cur].groups.emplace_back(); }
// A copy reads its source, and writes, as late as it may: when it is waited for.
template <int kPending>
inline void cp_async_bulk_wait_group_read() {
    for (int i = 0; i < 7; i++) yield();
    auto &groups = stores[cur].groups;
    for (; (int)groups.size() - 1 > kPending; groups.pop_front())
        for (auto &f : groups.front()) f();
    progress++;
}
template <int kPending>
inline void cp_async_bulk_wait_group() {
    cp_async_bulk_wait_group_read<kPending>();
}
// wgmma
enum class Swizzle : uint32_t { None = 0, B128 = 1, B64 = 2, B32 = 3 };
enum class Major : int { K = 0, MN = 1 };
constexpr inline uint32_t wgmma_descriptor_low(uint32_t a, uint32_t l) {
    return ((a & 0x3ffffu) >> 4) | ((l & 0x3ffffu) >> 4) << 16;
}
constexpr inline uint32_t wgmma_descriptor_high(uint32_t s, Swizzle w) {
    return ((s & 0x3ffffu) >> 4) | static_cast<uint32_t>(w) << 30;
}
inline uint64_t wgmma_descriptor(uint32_t l, uint32_t h) { return l | (uint64_t)h << 32; }
struct Op {
    long commit;
    std::function<void()> f;
};
inline std::deque<Op> ops[8];
inline long commits[8];
inline Sync commit_s[8];
inline std::map<Fiber *, long> own;
inline void wgmma_fence() {}
inline void wgmma_commit_group() {
    int g = threadIdx.x / 128;
    meet(commit_s[g], 128, [&] { commits[g]++; });
    own[cur]++;
}
template <int n>
inline void wgmma_wait_group() {
    int g = threadIdx.x / 128;
    for (int i = 0; i < 5; i++) yield();
    while (!ops[g].empty() && ops[g].front().commit <= own[cur] - n) {
        ops[g].front().f();
        ops[g].pop_front();
        progress++;
    }
    warp();
}
template <int n>
void register_fence(float (&)[n]) {}
template <int n>
void register_fence(uint32_t (&)[n]) {}
template <class T>
float element(uint64_t desc, Major major, int mn, int k) {
    uint32_t low = (uint32_t)desc, high = desc >> 32, start = (low & 0x3fff) << 4, lead = ((low >> 16) & 0x3fff) << 4,
             stride = (high & 0x3fff) << 4;
    uint32_t width = high >> 30 == 1 ? 128 : high >> 30 == 2 ? 64 : 0;
    if (!width || start % 16) abort();
    uint32_t a = major == Major::K
                     ? start + (mn / 8) * stride + (mn % 8) * width + 2 * k
                     : start + (mn / (width / 2)) * lead + (k / 8) * stride + (k % 8) * width + (mn % (width / 2)) * 2;
    a ^= ((a >> 7) & (width / 16 - 1)) << 4;
    uint16_t x;
    memcpy(&x, at(a), 2);
    return up<T>(x);
}
inline float *dptr[8][128];
inline uint32_t acopy[8][128][4];
template <class T, int count>
void product(float (&d)[count], const uint32_t *a, uint64_t adesc, Major ma, uint64_t b, Major mbj, bool acc) {
    int g = threadIdx.x / 128, t = threadIdx.x % 128;
    dptr[g][t] = d;
    if (a) memcpy(acopy[g][t], a, 16);
    meet(group_s[g], 128, [&] {
        constexpr int N = 2 * count;
        struct State {
            float *d[128];
            uint32_t a[128][4];
        };
        auto st = std::make_shared<State>();
        memcpy(st->d, dptr[g], sizeof st->d);
        memcpy(st->a, acopy[g], sizeof st->a);
        bool rs = a != nullptr;
        ops[g].push_back(
            {commits[g] + 1, [=] {
                 static float B[16][128], A[64][16];
                 for (int k = 0; k < 16; k++)
                     for (int n = 0; n < N; n++) B[k][n] = element<T>(b, mbj, n, k);
                 for (int r = 0; r < 64; r++)
                     for (int k = 0; k < 16; k++)
                         A[r][k] = rs ? up<T>(st->a[(r / 16) * 32 + (r % 8) * 4 + (k % 8) / 2][(r % 16) / 8 + 2 * (k / 8)] >>
                                              (16 * (k % 2)))
                                      : element<T>(adesc, ma, r, k);
                 for (int u = 0; u < 128; u++)
                     for (int i = 0; i < count; i++) {
                         int r = (u / 32) * 16 + (u % 32) / 4 + 8 * ((i % 4) / 2), c = 8 * (i / 4) + 2 * (u % 4) + i % 2;
                         float x = 0;
                         for (int k = 0; k < 16; k++) x += A[r][k] * B[k][c];
                         float &o = st->d[u][i];
                         o = acc ? o + x : x;
                     }
             }});
    });
}
template <class T, Major kA, Major kB, int n>
void wgmma_ss(float (&d)[n], uint64_t a, uint64_t b, bool acc) {
    product<T>(d, nullptr, a, kA, b, kB, acc);
}
template <class T, Major kA, Major kB, int n>
void wgmma_ss_first(float (&d)[n], uint64_t a, uint64_t b) {
    product<T>(d, nullptr, a, kA, b, kB, false);
}
template <class T, Major kB, int n>
void wgmma_rs(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool acc) {
    product<T>(d, a, 0, Major::K, b, kB, acc);
}
template <class T, Major kB, int n>
void wgmma_rs_first(float (&d)[n], const uint32_t (&a)[4], uint64_t b) {
    product<T>(d, a, 0, Major::K, b, kB, false);
}
}  // namespace linattn::ptx

namespace emu {
inline void reset() {
    for (auto &o : linattn::ptx::ops) o.clear();
    for (auto &c : linattn::ptx::commits) c = 0;
    for (auto &x : linattn::ptx::commit_s) x = {};
    linattn::ptx::own.clear();
    for (auto &thread : linattn::ptx::stores)
        if (thread.second.groups.size() > 1 || !thread.second.groups.back().empty()) {
            fprintf(stderr, "pending stores\n");
            abort();
        }
    linattn::ptx::stores.clear();
    if (!pending.empty()) {
        fprintf(stderr, "pending copies\n");
        abort();
    }
}
}  // namespace emu
