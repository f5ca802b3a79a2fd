// l2norm, by AUX: q and k stay as they are, 1/|q| and 1/|k| go into the row and column factors of the table. |k|^2 is the diagonal of
// K K^T; the squares of q are summed while K K^T is on its way. A warp has the norms of its 16 rows.
#pragma once
#include "items.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace linattn::cuda::gdn {

struct Lane {
    int lane, g, q;
    __device__ __forceinline__ explicit Lane(int l) {
        uint32_t opaque[1] = {static_cast<uint32_t>(l)};
        ptx::register_fence(opaque);
        lane = static_cast<int>(opaque[0]), q = lane & 3;
        opaque[0] >>= 2;
        ptx::register_fence(opaque);  // else each address 4 (g + constant) becomes a sum and a mask of its own
        g = static_cast<int>(opaque[0]);
    }
};

// Address of lane `lane` for an stmatrix or ldmatrix of the 16x16 block (i, j) of A^, P or 64 columns of Q (64x64, 128-byte swizzle).
__device__ __forceinline__ uint32_t product_block(uint32_t tile, int i, int j, int lane) {
    return tile + (((16 * i + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) * 16)) ^ (j * 32));
}

// The diagonal of row w of K K^T -> 1/|k_i| in the table, in the order of rows and of columns, and into the row factors that the
// state loop reads. t: table at the warp's first row. The factors of the lane's two rows are read while K K^T is on its way.
struct KeyNorms {
    float beta_gamma[2], rho[2], square[2];

    __device__ __forceinline__ void read(uint32_t t, int l) {
        const Lane at(l);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            beta_gamma[i] = ptx::ld_shared_f32(t + 4 * (table::kBetaGamma + 8 * i + at.g));
            rho[i] = ptx::ld_shared_f32(t + 4 * (table::kRho + 8 * i + at.g));
        }
    }
    // (g, g) and (8 + g, 8 + g) of the warp's diagonal block, where the lane has them.
    __device__ __forceinline__ void choose(const float *diagonal, int l) {
        const bool odd = Lane(l).g & 1;
        square[0] = odd ? diagonal[1] : diagonal[0], square[1] = odd ? diagonal[7] : diagonal[6];
    }
    __device__ __forceinline__ void write(uint32_t t, int l) const {
        const Lane at(l);
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

// Squares of the four fragments of 16x64 numbers of T, added to the sums of rows g and g + 8. Those of bf16 stay in bf16 for eight at
// a time, which leaves a norm within 2^-11 (RMS); fp16 has not the range for that.
template <class T>
__device__ __forceinline__ void add_squares(float (&sum)[2], const uint32_t (&x)[4][4]) {
    if constexpr (ptx::kIsBf16<T>) {
        const auto pair = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162 *>(&bits); };
        __nv_bfloat162 squares[4];
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                squares[i] = s == 0 ? __hmul2(pair(x[s][i]), pair(x[s][i])) : __hfma2(pair(x[s][i]), pair(x[s][i]), squares[i]);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const __nv_bfloat162 both = __hadd2(squares[row], squares[row + 2]);
            const float2 s = unpack(T(), *reinterpret_cast<const uint32_t *>(&both));
            sum[row] += s.x + s.y;
        }
    } else {
        float odd[2] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 s = unpack(T(), x[i / 4][i % 4]);
            sum[i % 2] = fmaf(s.x, s.x, sum[i % 2]), odd[i % 2] = fmaf(s.y, s.y, odd[i % 2]);
        }
        sum[0] += odd[0], sum[1] += odd[1];
    }
}

// 1/|q_i| of row g of warp w's where q is even, of row g + 8 where it is odd. tile: of Q.
template <class C>
__device__ __forceinline__ float query_norm(uint32_t tile, int w, int l) {
    using Tile = typename Smem<C>::Tile;
    const Lane at(l);
    uint32_t from = product_block(tile, w, 0, at.lane);
    float sum[2] = {};
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanels; panel++, from += Tile::kPanelStrideBytes) {
        uint32_t x[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) ptx::ldmatrix_x4(x[s], from ^ (s * 32));
        add_squares<typename C::T>(sum, x);
    }
    const bool odd = at.q & 1;
    float own = odd ? sum[1] : sum[0];
    own += __shfl_xor_sync(~0u, odd ? sum[0] : sum[1], 1);
    own += __shfl_xor_sync(~0u, own, 2);
    return ptx::rsqrt_approx_ftz(own + 1e-6f);
}

// What query_norm found, into the row factors. t: table at the warp's first row.
__device__ __forceinline__ void scale_by_query_norm(float norm, float scale, uint32_t t, int l) {
    const Lane at(l);
    if (at.q > 1) return;
    const uint32_t row = t + 4 * (at.g + 8 * at.q);
    ptx::st_shared_f32(row + 4 * table::kScaledGamma, norm * ptx::ld_shared_f32(row + 4 * table::kScaledGamma));
    ptx::st_shared_f32(row + 4 * table::kRowScale, norm * scale);
}

}  // namespace linattn::cuda::gdn
