// One m64nNk128 product by 8 wgmma: D = A B^T (+ C), A [64,128] and B [N,128] row-major in global memory, placed in shared
// memory (or registers) in the layout under test. Unused shared memory holds NaN, so a read beside the operand shows.
#pragma once
#include "parts.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace parts {

constexpr int kM = 64, kK = 128, kSteps = kK / 16;
constexpr int kTileRows = 128;  // of the B tile; N of them are used
constexpr int kABytes = kM * kK * 2, kBBytes = kTileRows * kK * 2;

struct WgmmaCase {
    const uint16_t *a;  // [64,128]
    const uint16_t *b;  // [N,128]
    const float *c;     // [64,N]
    float *d;           // [64,N]
    Swizzle swizzle_a, swizzle_b;
    int n0;  // where B starts in its tile
    bool accumulate;
};

// Descriptor halves of the 8 k-steps.
struct Operand {
    uint32_t low[kSteps], high;
};

template <Major kMajor>
__device__ __forceinline__ Operand place_a(const WgmmaCase &p, unsigned char *tile) {
    Operand operand;
    with_swizzle(p.swizzle_a, [&](auto tag) {
        constexpr Swizzle kSwizzle = decltype(tag)::value;
        using Tile = linattn::cuda::SmemTile<kMajor == Major::K ? kM : kK, kMajor == Major::K ? kK : kM, kSwizzle>;
        const uint32_t base = linattn::ptx::shared_address(tile);
        for (int i = threadIdx.x; i < kM * kK; i += blockDim.x) {
            const int m = i / kK, k = i % kK;
            *reinterpret_cast<uint16_t *>(tile + (kMajor == Major::K ? Tile::offset(m, k) : Tile::offset(k, m))) = p.a[i];
        }
        for (int s = 0; s < kSteps; s++)
            operand.low[s] = kMajor == Major::K ? Tile::k_major_low(base, 0, 16 * s) : Tile::mn_major_low(base, 16 * s, 0);
        operand.high = kMajor == Major::K ? Tile::k_major_high() : Tile::mn_major_high();
    });
    return operand;
}

template <int kN, Major kMajor>
__device__ __forceinline__ Operand place_b(const WgmmaCase &p, unsigned char *tile) {
    Operand operand;
    with_swizzle(p.swizzle_b, [&](auto tag) {
        constexpr Swizzle kSwizzle = decltype(tag)::value;
        using Tile = linattn::cuda::SmemTile<kTileRows, kK, kSwizzle>;  // square: [n,k] or [k,n]
        const uint32_t base = linattn::ptx::shared_address(tile);
        for (int i = threadIdx.x; i < kN * kK; i += blockDim.x) {
            const int n = p.n0 + i / kK, k = i % kK;
            *reinterpret_cast<uint16_t *>(tile + (kMajor == Major::K ? Tile::offset(n, k) : Tile::offset(k, n))) = p.b[i];
        }
        for (int s = 0; s < kSteps; s++)
            operand.low[s] =
                kMajor == Major::K ? Tile::k_major_low(base, p.n0, 16 * s) : Tile::mn_major_low(base, 16 * s, p.n0);
        operand.high = kMajor == Major::K ? Tile::k_major_high() : Tile::mn_major_high();
    });
    return operand;
}

// k-step s of A as a register fragment of this thread's warp.
__device__ __forceinline__ void load_a_fragment(uint32_t (&r)[4], const uint16_t *a, int s) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + 8 * (i % 2), col = 16 * s + 2 * q + 8 * (i / 2);
        r[i] = *reinterpret_cast<const uint32_t *>(a + row * kK + col);
    }
}

// kFirst: the first product through the write-only form.
template <int kN, class T, bool kRegisterA, Major kMajorA, Major kMajorB, bool kFirst>
__global__ void __launch_bounds__(128) wgmma_kernel(const WgmmaCase p) {
    using namespace linattn::ptx;
    unsigned char *smem = aligned_smem();
    for (int i = threadIdx.x; i < (kABytes + kBBytes) / 4; i += blockDim.x) reinterpret_cast<uint32_t *>(smem)[i] = 0x7fff7fffu;
    __syncthreads();
    Operand a = {};
    if constexpr (!kRegisterA) a = place_a<kMajorA>(p, smem);
    const Operand b = place_b<kN, kMajorB>(p, smem + kABytes);
    fence_proxy_async_shared_cta();
    __syncthreads();

    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float d[kN / 2];
    uint32_t r[kSteps][4];
#pragma unroll
    for (int i = 0; i < kN / 2; i++) {
        const int row = 16 * warp + g + 8 * (i / 2 % 2), col = 8 * (i / 4) + 2 * q + i % 2;
        d[i] = p.accumulate ? p.c[row * kN + col] : __int_as_float(0x7fffffff);
    }
    if constexpr (kRegisterA) {
#pragma unroll
        for (int s = 0; s < kSteps; s++) load_a_fragment(r[s], p.a, s);
#pragma unroll
        for (int s = 0; s < kSteps; s++) register_fence(r[s]);
    }
    if constexpr (!kFirst) register_fence(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const uint64_t db = wgmma_descriptor(b.low[s], b.high);
        const bool accumulate = s > 0 || p.accumulate;
        if constexpr (kRegisterA) {
            if (kFirst && s == 0)
                wgmma_rs_first<T, kMajorB>(d, r[s], db);
            else
                wgmma_rs<T, kMajorB>(d, r[s], db, accumulate);
        } else {
            const uint64_t da = wgmma_descriptor(a.low[s], a.high);
            if (kFirst && s == 0)
                wgmma_ss_first<T, kMajorA, kMajorB>(d, da, db);
            else
                wgmma_ss<T, kMajorA, kMajorB>(d, da, db, accumulate);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    register_fence(d);
#pragma unroll
    for (int i = 0; i < kN / 2; i++) {
        const int row = 16 * warp + g + 8 * (i / 2 % 2), col = 8 * (i / 4) + 2 * q + i % 2;
        p.d[row * kN + col] = d[i];
    }
}

template <int kN, class T, bool kRegisterA, Major kMajorA, Major kMajorB, bool kFirst>
void launch_wgmma(const WgmmaCase &p) {
    linattn::cuda::LaunchConfig config;
    config.block = {128};
    config.smem_bytes = kABytes + kBBytes + 1024;
    linattn::cuda::launch("wgmma_kernel", wgmma_kernel<kN, T, kRegisterA, kMajorA, kMajorB, kFirst>, config, p);
}

template <int kN, class T, bool kFirst>
void choose_majors(const WgmmaCase &p, bool register_a, Major a, Major b) {
    constexpr Major K = Major::K, MN = Major::MN;
    if (register_a)
        b == K ? launch_wgmma<kN, T, true, K, K, kFirst>(p) : launch_wgmma<kN, T, true, K, MN, kFirst>(p);
    else if (a == K)
        b == K ? launch_wgmma<kN, T, false, K, K, kFirst>(p) : launch_wgmma<kN, T, false, K, MN, kFirst>(p);
    else
        b == K ? launch_wgmma<kN, T, false, MN, K, kFirst>(p) : launch_wgmma<kN, T, false, MN, MN, kFirst>(p);
}

template <int kN, class T>
void choose_first(const WgmmaCase &p, bool register_a, Major a, Major b, bool first) {
    first ? choose_majors<kN, T, true>(p, register_a, a, b) : choose_majors<kN, T, false>(p, register_a, a, b);
}

template <class T>
void run_wgmma(const WgmmaCase &p, int n, bool register_a, Major a, Major b, bool first) {
    switch (n) {
        case 16: return choose_first<16, T>(p, register_a, a, b, first);
        case 32: return choose_first<32, T>(p, register_a, a, b, first);
        case 64: return choose_first<64, T>(p, register_a, a, b, first);
        case 128: return choose_first<128, T>(p, register_a, a, b, first);
        default: linattn::fail(linattn::Status::Unsupported, "N = %d is not 16, 32, 64 or 128.", n);
    }
}

}  // namespace parts
