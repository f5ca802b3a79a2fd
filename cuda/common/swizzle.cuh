// Shared-memory tiles of 2-byte elements, laid out as TMA writes them and wgmma reads them.
//
// A tile of kRows x kCols is cut into column panels as wide as the swizzle (128, 64, 32 bytes; None: 16 bytes); a panel holds
// its kRows rows one after another, so one TMA box (panel columns x kRows rows) fills one panel. Inside a repeat of 8 rows the
// 16-byte units of a row are permuted: with b the byte offset in the panel and W the width,
//     b ^ ((b >> 3) & (W - 16) & 0x70)        128B: bits 4-6 ^= bits 7-9;  64B: bits 4-5 ^= bits 7-8;  32B: bit 4 ^= bit 7.
// Panels start at multiples of 8 W (the hardware takes the bits from the address, not from the offset).
//
// Banks (32 of 4 bytes, 128 bytes a cycle): the same 16-byte column of 8 consecutive rows falls into 8 different bank groups in
// every mode, so ldmatrix and stmatrix on 8x8 blocks, plain and transposed, are conflict-free. 16-byte accesses along a row are
// conflict-free too. Walking down one column with 2- or 4-byte accesses is not: 8 rows give 8 bank groups, then they repeat.
#pragma once
#include <cstdint>

#include "ptx/wgmma.cuh"

namespace linattn::cuda {

constexpr int swizzle_bytes(ptx::Swizzle swizzle) {
    return swizzle == ptx::Swizzle::B128 ? 128 : swizzle == ptx::Swizzle::B64 ? 64 : swizzle == ptx::Swizzle::B32 ? 32 : 0;
}

template <int kTileRows, int kTileCols, ptx::Swizzle kTileSwizzle>
struct SmemTile {
    static constexpr int kRows = kTileRows, kCols = kTileCols;
    static constexpr ptx::Swizzle kSwizzle = kTileSwizzle;
    static constexpr int kSwizzleBytes = swizzle_bytes(kSwizzle);
    static constexpr int kPanelBytes = kSwizzleBytes == 0 ? 16 : kSwizzleBytes;  // bytes of one row in one panel
    static constexpr int kPanelCols = kPanelBytes / 2;
    static constexpr int kPanels = kCols / kPanelCols;
    static constexpr int kPanelStrideBytes = kRows * kPanelBytes;
    static constexpr int kBytes = kRows * kCols * 2;
    static constexpr int kAlignBytes = 8 * kPanelBytes;
    static_assert(kCols % kPanelCols == 0, "a tile is a whole number of panels wide");
    static_assert(kRows % 8 == 0, "a tile is a whole number of 8-row repeats high");

    // Byte offset of element (row, col); 8 neighbouring columns from a multiple of 8 are contiguous.
    static constexpr __host__ __device__ __forceinline__ uint32_t offset(int row, int col) {
        const uint32_t panel = static_cast<uint32_t>(col) / kPanelCols * kPanelStrideBytes;
        const uint32_t b = static_cast<uint32_t>(row) * kPanelBytes + static_cast<uint32_t>(col) % kPanelCols * 2;
        return panel + (b ^ ((b >> 3) & (kPanelBytes - 16) & 0x70));
    }

    // Low descriptor half of a K-major operand (rows = M or N, columns = K) that starts at (row, col); row a multiple of 8, col
    // of 16. The k-step after col is at col + 16.
    static constexpr __host__ __device__ __forceinline__ uint32_t k_major_low(uint32_t base, int row, int col) {
        return ptx::wgmma_descriptor_low(base + offset(row, col), kSwizzleBytes == 0 ? kPanelStrideBytes : 16);
    }
    static constexpr __host__ __device__ __forceinline__ uint32_t k_major_high() {
        return ptx::wgmma_descriptor_high(8 * kPanelBytes, kSwizzle);
    }

    // Low descriptor half of an MN-major operand (rows = K, columns = M or N) that starts at (row, col); row a multiple of 8,
    // col of 8. The operand either starts a panel or ends inside the panel it starts in. The k-step after row is at row + 16.
    static constexpr __host__ __device__ __forceinline__ uint32_t mn_major_low(uint32_t base, int row, int col) {
        return ptx::wgmma_descriptor_low(base + offset(row, col), kSwizzleBytes == 0 ? 8 * kPanelBytes : kPanelStrideBytes);
    }
    static constexpr __host__ __device__ __forceinline__ uint32_t mn_major_high() {
        return ptx::wgmma_descriptor_high(kSwizzleBytes == 0 ? kPanelStrideBytes : 8 * kPanelBytes, kSwizzle);
    }

    // Address for lane `lane` of ldmatrix_x4 / stmatrix_x4 on the 16x16 block at (row, col): matrices in the order of an A
    // fragment (upper left, lower left, upper right, lower right).
    static constexpr __host__ __device__ __forceinline__ uint32_t block16_offset(int row, int col, int lane) {
        return offset(row + lane % 16, col + lane / 16 * 8);
    }
};

}  // namespace linattn::cuda
