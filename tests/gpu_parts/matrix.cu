// mma.sync, ldmatrix, stmatrix, movmatrix, and the two ways in which wgmma accumulators go on: packed as the A operand of the
// next product, and by stmatrix into a swizzled tile that TMA stores.
#include "common/tensor_map.h"
#include "parts.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace parts {

using namespace linattn::ptx;

constexpr int kScratchBytes = 4096;

// Loads `scratch` into shared memory, runs one ldmatrix with lane addresses offsets[32] (bytes), writes out[32][kCount].
template <int kCount, bool kTrans>
__global__ void ldmatrix_kernel(const uint32_t *scratch, const uint32_t *offsets, uint32_t *out) {
    alignas(128) __shared__ uint32_t s_scratch[kScratchBytes / 4];
    for (int i = threadIdx.x; i < kScratchBytes / 4; i += 32) s_scratch[i] = scratch[i];
    __syncthreads();
    const uint32_t address = shared_address(s_scratch) + offsets[threadIdx.x];
    uint32_t r[kCount];
    if constexpr (kCount == 1) kTrans ? ldmatrix_x1_trans(r, address) : ldmatrix_x1(r, address);
    if constexpr (kCount == 2) kTrans ? ldmatrix_x2_trans(r, address) : ldmatrix_x2(r, address);
    if constexpr (kCount == 4) kTrans ? ldmatrix_x4_trans(r, address) : ldmatrix_x4(r, address);
    for (int i = 0; i < kCount; i++) out[threadIdx.x * kCount + i] = r[i];
}

// The reverse: in[32][kCount] by one stmatrix into shared memory prefilled from scratch, which is written back.
template <int kCount, bool kTrans>
__global__ void stmatrix_kernel(uint32_t *scratch, const uint32_t *offsets, const uint32_t *in) {
    alignas(128) __shared__ uint32_t s_scratch[kScratchBytes / 4];
    for (int i = threadIdx.x; i < kScratchBytes / 4; i += 32) s_scratch[i] = scratch[i];
    __syncthreads();
    const uint32_t address = shared_address(s_scratch) + offsets[threadIdx.x];
    uint32_t r[kCount];
    for (int i = 0; i < kCount; i++) r[i] = in[threadIdx.x * kCount + i];
    if constexpr (kCount == 1) kTrans ? stmatrix_x1_trans(address, r) : stmatrix_x1(address, r);
    if constexpr (kCount == 2) kTrans ? stmatrix_x2_trans(address, r) : stmatrix_x2(address, r);
    if constexpr (kCount == 4) kTrans ? stmatrix_x4_trans(address, r) : stmatrix_x4(address, r);
    __syncthreads();
    for (int i = threadIdx.x; i < kScratchBytes / 4; i += 32) scratch[i] = s_scratch[i];
}

__global__ void movmatrix_kernel(const uint32_t *in, uint32_t *out) { out[threadIdx.x] = movmatrix_trans(in[threadIdx.x]); }

// D = A B + C on one warp: A [16,kK], B [kK,8] row-major, C and D [16,8].
template <class T, int kK>
__global__ void mma_kernel(const uint16_t *a, const uint16_t *b, const float *c, float *d) {
    const int g = threadIdx.x / 4, q = threadIdx.x % 4;
    auto pair_a = [&](int row, int col) { return *reinterpret_cast<const uint32_t *>(a + row * kK + col); };
    auto pair_b = [&](int k) { return uint32_t(b[k * 8 + g]) | uint32_t(b[(k + 1) * 8 + g]) << 16; };
    float acc[4];
    for (int i = 0; i < 4; i++) acc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * q + i % 2];
    if constexpr (kK == 16) {
        const uint32_t fa[4] = {pair_a(g, 2 * q), pair_a(g + 8, 2 * q), pair_a(g, 2 * q + 8), pair_a(g + 8, 2 * q + 8)};
        mma_m16n8k16<T>(acc, fa, pair_b(2 * q), pair_b(2 * q + 8));
    } else {
        const uint32_t fa[2] = {pair_a(g, 2 * q), pair_a(g + 8, 2 * q)};
        mma_m16n8k8<T>(acc, fa, pair_b(2 * q));
    }
    for (int i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * q + i % 2] = acc[i];
}

// A [16,8], B [8,8] float, rounded to tf32 here; the bits below are to be ignored.
__global__ void mma_tf32_kernel(const float *a, const float *b, const float *c, float *d) {
    const int g = threadIdx.x / 4, q = threadIdx.x % 4;
    float acc[4];
    for (int i = 0; i < 4; i++) acc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * q + i % 2];
    const auto operand = [](float x) { return cvt_rna_tf32(x) | 0x1fffu; };
    const uint32_t fa[4] = {operand(a[g * 8 + q]), operand(a[(g + 8) * 8 + q]), operand(a[g * 8 + q + 4]),
                            operand(a[(g + 8) * 8 + q + 4])};
    mma_m16n8k8_tf32(acc, fa, operand(b[q * 8 + g]), operand(b[(q + 4) * 8 + g]));
    for (int i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * q + i % 2] = acc[i];
}

// Y = bf16(A X^T) X for A, X [64,64] bf16 row-major, through registers: the accumulator of the first product is the A fragment
// of the second, which reads the same tile of X as its MN-major operand. Y leaves as bf16 through a tile of the same swizzle
// and a TMA store; kTrans writes Y^T, by stmatrix.trans.
template <Swizzle kSwizzle, bool kTrans>
__global__ void __launch_bounds__(128)
    chain_kernel(const uint16_t *a, const uint16_t *x, const __grid_constant__ CUtensorMap y_map) {
    using T = __nv_bfloat16;
    using Tile = linattn::cuda::SmemTile<64, 64, kSwizzle>;
    unsigned char *smem = aligned_smem();
    const uint32_t s_a = shared_address(smem), s_x = s_a + Tile::kBytes, s_y = s_x + Tile::kBytes;
    for (int i = threadIdx.x; i < 64 * 64; i += 128) {
        st_shared_u16(s_a + Tile::offset(i / 64, i % 64), a[i]);
        st_shared_u16(s_x + Tile::offset(i / 64, i % 64), x[i]);
    }
    fence_proxy_async_shared_cta();
    __syncthreads();

    float w[32], y[32];
    wgmma_fence();
    wgmma_ss_first<T, Major::K, Major::K>(w, wgmma_descriptor(Tile::k_major_low(s_a, 0, 0), Tile::k_major_high()),
                                          wgmma_descriptor(Tile::k_major_low(s_x, 0, 0), Tile::k_major_high()));
#pragma unroll
    for (int s = 1; s < 4; s++)
        wgmma_ss<T, Major::K, Major::K>(w, wgmma_descriptor(Tile::k_major_low(s_a, 0, 16 * s), Tile::k_major_high()),
                                        wgmma_descriptor(Tile::k_major_low(s_x, 0, 16 * s), Tile::k_major_high()), true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    register_fence(w);

    uint32_t f[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) f[i / 4][i % 4] = cvt_rn_x2<T>(w[2 * i], w[2 * i + 1]);
#pragma unroll
    for (int s = 0; s < 4; s++) register_fence(f[s]);
    wgmma_fence();
    wgmma_rs_first<T, Major::MN>(y, f[0], wgmma_descriptor(Tile::mn_major_low(s_x, 0, 0), Tile::mn_major_high()));
#pragma unroll
    for (int s = 1; s < 4; s++)
        wgmma_rs<T, Major::MN>(y, f[s], wgmma_descriptor(Tile::mn_major_low(s_x, 16 * s, 0), Tile::mn_major_high()), true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    register_fence(y);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; j++) {  // 16x16 block: rows of this warp, columns 16 j
        const uint32_t r[4] = {cvt_rn_x2<T>(y[8 * j], y[8 * j + 1]), cvt_rn_x2<T>(y[8 * j + 2], y[8 * j + 3]),
                               cvt_rn_x2<T>(y[8 * j + 4], y[8 * j + 5]), cvt_rn_x2<T>(y[8 * j + 6], y[8 * j + 7])};
        if constexpr (kTrans) {
            const uint32_t t[4] = {r[0], r[2], r[1], r[3]};  // the transposed block: its lower left is r[2]
            stmatrix_x4_trans(s_y + Tile::block16_offset(16 * j, 16 * warp, lane), t);
        } else {
            stmatrix_x4(s_y + Tile::block16_offset(16 * warp, 16 * j, lane), r);
        }
    }
    fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int p = 0; p < Tile::kPanels; p++)
            cp_async_bulk_tensor_2d_store(&y_map, s_y + p * Tile::kPanelStrideBytes, p * Tile::kPanelCols, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}

linattn::cuda::LaunchConfig one_warp() {
    linattn::cuda::LaunchConfig config;
    config.block = {32};
    return config;
}

}  // namespace parts

using linattn::cuda::launch;
using parts::guarded;
using parts::one_warp;

PARTS_API int parts_ldmatrix(const uint32_t *scratch, const uint32_t *offsets, uint32_t *out, int count, int trans) {
    return guarded([&] {
        auto kernel = count == 1   ? (trans ? parts::ldmatrix_kernel<1, true> : parts::ldmatrix_kernel<1, false>)
                      : count == 2 ? (trans ? parts::ldmatrix_kernel<2, true> : parts::ldmatrix_kernel<2, false>)
                                   : (trans ? parts::ldmatrix_kernel<4, true> : parts::ldmatrix_kernel<4, false>);
        launch("ldmatrix_kernel", kernel, one_warp(), scratch, offsets, out);
    });
}

PARTS_API int parts_stmatrix(uint32_t *scratch, const uint32_t *offsets, const uint32_t *in, int count, int trans) {
    return guarded([&] {
        auto kernel = count == 1   ? (trans ? parts::stmatrix_kernel<1, true> : parts::stmatrix_kernel<1, false>)
                      : count == 2 ? (trans ? parts::stmatrix_kernel<2, true> : parts::stmatrix_kernel<2, false>)
                                   : (trans ? parts::stmatrix_kernel<4, true> : parts::stmatrix_kernel<4, false>);
        launch("stmatrix_kernel", kernel, one_warp(), scratch, offsets, in);
    });
}

PARTS_API int parts_movmatrix(const uint32_t *in, uint32_t *out) {
    return guarded([&] { launch("movmatrix_kernel", parts::movmatrix_kernel, one_warp(), in, out); });
}

PARTS_API int parts_mma(const void *a, const void *b, const float *c, float *d, int k, int bf16) {
    return guarded([&] {
        auto kernel = k == 16 ? (bf16 ? parts::mma_kernel<__nv_bfloat16, 16> : parts::mma_kernel<__half, 16>)
                              : (bf16 ? parts::mma_kernel<__nv_bfloat16, 8> : parts::mma_kernel<__half, 8>);
        launch("mma_kernel", kernel, one_warp(), static_cast<const uint16_t *>(a), static_cast<const uint16_t *>(b), c, d);
    });
}

PARTS_API int parts_mma_tf32(const float *a, const float *b, const float *c, float *d) {
    return guarded([&] { launch("mma_tf32_kernel", parts::mma_tf32_kernel, one_warp(), a, b, c, d); });
}

PARTS_API int parts_chain(const uint16_t *a, const uint16_t *x, uint16_t *y, int swizzle, int trans) {
    return guarded([&] {
        parts::with_swizzle(static_cast<parts::Swizzle>(swizzle), [&](auto tag) {
            constexpr parts::Swizzle kSwizzle = decltype(tag)::value;
            using Tile = linattn::cuda::SmemTile<64, 64, kSwizzle>;
            const CUtensorMap map = linattn::cuda::make_tensor_map(
                "y", y, linattn::DType::BF16, {{64, 1, Tile::kPanelCols}, {64, 64, 64}}, Tile::kSwizzleBytes);
            linattn::cuda::LaunchConfig config;
            config.block = {128};
            config.smem_bytes = 3 * Tile::kBytes + 1024;
            launch("chain_kernel", trans ? parts::chain_kernel<kSwizzle, true> : parts::chain_kernel<kSwizzle, false>, config,
                   a, x, map);
        });
    });
}
