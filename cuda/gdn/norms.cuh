// l2norm: q and k stay as they are. 1/|k| goes into the row and column factors of the table: |k|^2 is the diagonal of K K^T. 1/|q|
// goes into O in the state loop; squares of q are summed by AUX, while K K^T is on its way, or by the gate warps (Config).
#pragma once
#include "items.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace linattn::cuda::gdn {

// kFenced: g too is opaque, or else each address 4 (g + constant) becomes a sum and a mask of its own.
template <bool kFenced>
struct LaneOf {
    int lane, g, q;
    __device__ __forceinline__ explicit LaneOf(int l) {
        uint32_t opaque[1] = {static_cast<uint32_t>(l)};
        ptx::register_fence(opaque);
        lane = static_cast<int>(opaque[0]), g = lane >> 2, q = lane & 3;
        if constexpr (kFenced) {
            uint32_t row[1] = {opaque[0] >> 2};
            ptx::register_fence(row);
            g = static_cast<int>(row[0]);
        }
    }
};
using Lane = LaneOf<false>;

// Address of lane `lane` for an stmatrix of the 16x16 block (i, j) of A^ or P (both 64x64, 128-byte swizzle).
__device__ __forceinline__ uint32_t product_block(uint32_t tile, int i, int j, int lane) {
    return tile + (((16 * i + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) * 16)) ^ (j * 32));
}

// The diagonal of row w of K K^T -> 1/|k_i| in the table, in the order of rows and of columns, and into the row factors that the
// state loop reads. t: table at the warp's first row. The factors of the lane's two rows are read while K K^T is on its way.
struct KeyNorms {
    float beta_gamma[2], rho[2], square[2];

    __device__ __forceinline__ void read(uint32_t t, int l) {
        const LaneOf<true> at(l);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            beta_gamma[i] = ptx::ld_shared_f32(t + 4 * (table::kBetaGamma + 8 * i + at.g));
            rho[i] = ptx::ld_shared_f32(t + 4 * (table::kRho + 8 * i + at.g));
        }
    }
    // (g, g) and (8 + g, 8 + g) of the warp's diagonal block, where the lane has them.
    __device__ __forceinline__ void choose(const float *diagonal, int l) {
        const bool odd = LaneOf<true>(l).g & 1;
        square[0] = odd ? diagonal[1] : diagonal[0], square[1] = odd ? diagonal[7] : diagonal[6];
    }
    __device__ __forceinline__ void write(uint32_t t, int l) const {
        const LaneOf<true> at(l);
        __syncwarp();                  // the others' reads
        if (at.q != at.g / 2) return;  // who stays has what choose() chose
        const int odd = at.g & 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float r = ptx::rsqrt_approx_ftz(square[i] + 1e-6f);
            ptx::st_shared_f32(t + 4 * (table::kColumnNormK + 4 * at.q + 2 * i + odd), r);
            ptx::st_shared_f32(t + 4 * (table::kNormK + 8 * i + at.g), r);
            ptx::st_shared_f32(t + 4 * (table::kBetaGamma + 8 * i + at.g), r * beta_gamma[i]);
            ptx::st_shared_f32(t + 4 * (table::kRho + 8 * i + at.g), r * rho[i]);
        }
    }
};

// Sum of the squares of sixteen numbers of T, added to two sums. Those of bf16 stay in bf16 for eight at a time, which leaves a
// norm within 2^-11 (RMS); fp16 has not the range for that.
template <class T>
__device__ __forceinline__ void add_squares(float (&sum)[2], const uint4 &x, const uint4 &y) {
    if constexpr (ptx::kIsBf16<T>) {
        const auto pair = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162 *>(&bits); };
        __nv_bfloat162 a = __hmul2(pair(x.x), pair(x.x)), b = __hmul2(pair(y.x), pair(y.x));
        a = __hfma2(pair(x.y), pair(x.y), a), b = __hfma2(pair(y.y), pair(y.y), b);
        a = __hfma2(pair(x.z), pair(x.z), a), b = __hfma2(pair(y.z), pair(y.z), b);
        a = __hfma2(pair(x.w), pair(x.w), a), b = __hfma2(pair(y.w), pair(y.w), b);
        a = __hadd2(a, b);
        const float2 s = unpack(T(), *reinterpret_cast<const uint32_t *>(&a));
        sum[0] += s.x, sum[1] += s.y;
    } else {
        const uint32_t word[8] = {x.x, y.x, x.y, y.y, x.z, y.z, x.w, y.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 s = unpack(T(), word[i]);
            sum[0] = fmaf(s.x, s.x, sum[0]), sum[1] = fmaf(s.y, s.y, sum[1]);
        }
    }
}

// Squares of 16 kPairs numbers of row `row`, from a place in a panel of the tile on; eight lanes on eight rows that differ mod 8
// read without bank conflicts. Beside the state warpgroups an instruction that waits for another takes ten cycles and more: few
// instructions, two loads at a time.
template <class T, int kPairs>
__device__ __forceinline__ float squares(uint32_t panel, int row, uint32_t place = 0) {
    float sum[2] = {};
    const uint32_t first = panel + row * 128 + ((row & 7) * 16 ^ place);
#pragma unroll 1
    for (uint32_t pair = 0; pair < 32 * kPairs; pair += 32)
        add_squares<T>(sum, ptx::ld_shared_v4_u32(first ^ pair), ptx::ld_shared_v4_u32(first ^ pair ^ 16));
    return sum[0] + sum[1];
}

__device__ __forceinline__ float inverse_norm(float squares) { return ptx::rsqrt_approx_ftz(squares + 1e-6f); }

// 1/|q_i| of the 16 rows of warp w, two lanes a row. The sums are those of query_norms in gates.cuh, to the bit.
template <class C>
__device__ __forceinline__ void query_norms_of_warp(float *norms, uint32_t q, int w, int l) {
    using Tile = typename Smem<C>::Tile;
    const Lane at(l);
    const int row = 16 * w + (at.lane & 15), half = at.lane >> 4;
    float sum;
    if constexpr (Tile::kPanels == 2)
        sum = squares<typename C::T, 4>(q + half * Tile::kPanelStrideBytes, row);
    else
        sum = squares<typename C::T, 2>(q, row, half * 64);
    sum += __shfl_xor_sync(~0u, sum, 16);
    if (half == 0) norms[row] = inverse_norm(sum);
}

}  // namespace linattn::cuda::gdn
