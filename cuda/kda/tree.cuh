// The products of a chunk's tokens with their decays, by one warp over its 32 channels:
//
//   M_ts = sum_c k_tc k_sc prod_{s<r<=t} a_rc, s < t;   A_ts the same with q_t, s <= t
//
// exact for any gates, -inf included, without a division or a difference of exponents: tokens s and t part at one boundary of a
// binary tree, s in the lower half of a node of 2 h tokens, t in the upper one. The product up to the boundary goes to k_s, that
// from it on to k_t and q_t; both are at most 1. Each level h = 16, 8, 4, 2, 1 is one set of operands.
//
// Operands are fp16, for bf16 inputs too: K and Q are brought to fp16, exactly but for what is below 2^-27 of the largest of the
// warp's numbers, with a power of 2 that the sums take back. In bf16 a k times 0.999 would be k again, for all
// channels alike, and the sums over U, which cancel where keys are alike, would keep that 0.001.
//
// Lane = four tokens (group: lane / 4) of four neighbouring channels (quad: lane % 4), so that a warp has 16 channels, one k-step of
// m16n8k16, at a time; it takes its two k-steps in a loop, because code that is run once a chunk comes from far away and costs
// more than what it does. Products inside a group stay in the lane, those of whole groups come by shuffles. Operands go to the
// warp's scratch: of a block of 16 tokens and a level, the eight upper tokens' k and q are the 16 rows, the eight lower tokens' k
// the 8 columns; what lies outside the nodes is left away. Loads are grouped before stores: the wrappers of cuda/ptx are volatile,
// and no load passes a store.
#pragma once
#include <cstddef>

#include "common/fragments.cuh"
#include "gates.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace linattn::cuda::kda {

struct Lanes {
    int lane, group, quad;
    // Made anew for each phase: nothing that depends on the lane stays in registers from one to the next.
    __device__ __forceinline__ Lanes() { lane = opaque_lane(), group = lane / 4, quad = lane % 4; }

    // Offset of token 4 group of the quad, of k-step `step` of warp w, in a tile of tokens x channels.
    __device__ __forceinline__ uint32_t raw(int w, int step) const {
        return (w / 2 * Tile::kPanelStrideBytes + group * 512 + (w & 1) * 64 + step * 32 + quad * 8) ^ (group & 1) << 6;
    }
    // Token i of the group, in the `number`-th tile from the one in which `raw` lies.
    static __device__ __forceinline__ uint32_t token(uint32_t raw, int i, int number = 0) {
        return (raw ^ (i << 4)) + (i * 128 + number * Tile::kBytes);
    }
};

// Scratch: rows of 16 channels in fp16. A row is moved on by one for each four before it, so that the rows that 16 lanes store at
// once, and the eight of an ldmatrix, meet different banks. A level of both blocks takes kLevelBytes.
__device__ __forceinline__ constexpr uint32_t row_offset(int row) { return (row + row / 4) * 32; }
constexpr int kLowRows = 22 * 32, kLowRowsTop = 40 * 32;  // where the lower tokens begin: levels 8 to 1, and 16

// Lane addresses of ldmatrix_x4: 16 rows from `first` (a multiple of 8) on, an A fragment.
__device__ __forceinline__ uint32_t fragment_a(uint32_t first, int lane) {
    const int r = lane & 15;
    return first + row_offset(r) + (((lane >> 4) ^ ((r >> 2) & 1)) << 4);
}
// Two B fragments of 8 rows, the second one `apart` bytes further on.
__device__ __forceinline__ uint32_t fragment_b(uint32_t first, uint32_t apart, int lane) {
    const int r = lane & 7;
    return first + (lane >> 4) * apart + row_offset(r) + ((((lane >> 3) & 1) ^ ((r >> 2) & 1)) << 4);
}

struct Words {  // four channels in 16 bits
    uint32_t x, y;
};

__device__ __forceinline__ Words load_words(uint32_t address) {
    const uint2 v = ptx::ld_shared_v2_u32(address);
    return {v.x, v.y};
}
__device__ __forceinline__ void store_words(uint32_t address, const Words &v) {
    ptx::st_shared_v2_u32(address, make_uint2(v.x, v.y));
}
__device__ __forceinline__ Words f16_words(const float *f) {
    return {ptx::cvt_rn_f16x2(f[0], f[1]), ptx::cvt_rn_f16x2(f[2], f[3])};
}
// Four channels times their factors, rounded once: a factor rounded by itself would be off in all channels alike.
__device__ __forceinline__ Words times(const float *x, const float *f) {
    return {ptx::cvt_rn_f16x2(x[0] * f[0], x[1] * f[1]), ptx::cvt_rn_f16x2(x[2] * f[2], x[3] * f[3])};
}
// Four tokens of four channels from fp16.
__device__ __forceinline__ void widen(float (&x)[16], const Words (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 a = unpack(__half(), v[i].x), b = unpack(__half(), v[i].y);
        x[4 * i] = a.x, x[4 * i + 1] = a.y, x[4 * i + 2] = b.x, x[4 * i + 3] = b.y;
    }
}

// A power of 2 that brings the largest of the warp's numbers in K and Q to 2^13 .. 2^14, for bf16; fp16 stays as it is.
template <class T>
__device__ __forceinline__ float f16_scale(uint32_t k, int w) {
    if constexpr (!ptx::kIsBf16<T>) return 1.0f;
    const Lanes at;
    uint32_t most = 0;
#pragma unroll 1
    for (int step = 0; step < 2; step++) {
        const uint32_t raw = k + at.raw(w, step);
        Words x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = load_words(Lanes::token(raw, i % 4, i / 4));
#pragma unroll
        for (int i = 0; i < 8; i++)  // the order of magnitudes is that of their bits
            most = __vmaxu2(most, __vmaxu2(x[i].x & 0x7fff7fffu, x[i].y & 0x7fff7fffu));
    }
    most = most >> 16 > (most & 0xffff) ? most >> 16 : most & 0xffff;
    most = __reduce_max_sync(~0u, most) >> 7;  // exponent
    most = most < 80 ? 80 : most > 200 ? 200 : most;
    return __uint_as_float((267 - most) << 23);
}
__device__ __forceinline__ float power_of_2_inverse(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

template <class T>
__device__ __forceinline__ Words to_f16(const Words &x, float scale) {
    if constexpr (!ptx::kIsBf16<T>) return x;
    const float2 a = unpack(T(), x.x), b = unpack(T(), x.y);
    return {ptx::cvt_rn_f16x2(a.x * scale, a.y * scale), ptx::cvt_rn_f16x2(b.x * scale, b.y * scale)};
}

// Gate inputs of four tokens of four neighbouring channels, x[4 i + c].
__device__ __forceinline__ void load_gates(float (&x)[16], uint32_t tile, DType dtype, int w, int step) {
    const Lanes at;
    const int element = 4 * at.group * kD + 32 * w + 16 * step + 4 * at.quad;
    if (dtype == DType::F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = ptx::ld_shared_v4_f32(tile + 4 * (element + i * kD));
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Words v = load_words(tile + 2 * (element + i * kD));
        const bool bf16 = dtype == DType::BF16;
        const float2 a = bf16 ? unpack(__nv_bfloat16(), v.x) : unpack(__half(), v.x);
        const float2 b = bf16 ? unpack(__nv_bfloat16(), v.y) : unpack(__half(), v.y);
        x[4 * i] = a.x, x[4 * i + 1] = a.y, x[4 * i + 2] = b.x, x[4 * i + 3] = b.y;
    }
}

// A tile of 16 x 8 sums, k's rows and q's, at tokens t (of the lane's row) and s, s + 1 (of its columns).
__device__ __forceinline__ void load_sums(float (&d)[4], const Partial &partial, int t, int s, bool first) {
    if (first) {
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        return;
    }
    const float2 y = *reinterpret_cast<const float2 *>(&partial.x[t * kPitch + s]);
    d[0] = partial.x[s * kPitch + t], d[1] = partial.x[(s + 1) * kPitch + t], d[2] = y.x, d[3] = y.y;
}
__device__ __forceinline__ void store_sums(const float (&d)[4], Partial &partial, int t, int s) {
    partial.x[s * kPitch + t] = d[0];
    partial.x[(s + 1) * kPitch + t] = d[1];
    *reinterpret_cast<float2 *>(&partial.x[t * kPitch + s]) = make_float2(d[2], d[3]);
}

// The products of level h = 8, 4, 2 or 1 that lie in scratch, added to the sums.
template <int h>
__device__ __forceinline__ void add_level(uint32_t scratch, int lane, Partial &partial, bool first) {
    uint32_t a[2][4], b[4];
#pragma unroll
    for (int block = 0; block < 2; block++) ptx::ldmatrix_x4(a[block], fragment_a(scratch + block * kBlockBytes, lane));
    ptx::ldmatrix_x4(b, fragment_b(scratch + kLowRows, kBlockBytes, lane));
    const int g = lane >> 2, n = 2 * (lane & 3);
    const int t = (((g & ~(h - 1)) << 1) | h | (g & (h - 1)));
    float d[2][4] = {};
    if constexpr (h == 1) {  // one sum of each matrix in a lane
        const bool own = g / 2 == n / 2;
        if (!first && own) {
#pragma unroll
            for (int block = 0; block < 2; block++) {
                const float x = partial.x[(16 * block + t - 1) * kPitch + 16 * block + t];
                const float y = partial.x[(16 * block + t) * kPitch + 16 * block + t - 1];
                d[block][0] = d[block][1] = x, d[block][2] = d[block][3] = y;
            }
        }
#pragma unroll
        for (int block = 0; block < 2; block++) ptx::mma_m16n8k16<__half>(d[block], a[block], b[2 * block], b[2 * block + 1]);
        if (own) {
#pragma unroll
            for (int block = 0; block < 2; block++) {
                partial.x[(16 * block + t - 1) * kPitch + 16 * block + t] = g & 1 ? d[block][1] : d[block][0];
                partial.x[(16 * block + t) * kPitch + 16 * block + t - 1] = g & 1 ? d[block][3] : d[block][2];
            }
        }
    } else {
        const int s = ((n & ~(h - 1)) << 1) | (n & (h - 1));
        const bool own = g / h == n / h;
        if (own) {
#pragma unroll
            for (int block = 0; block < 2; block++) load_sums(d[block], partial, 16 * block + t, 16 * block + s, first);
        }
#pragma unroll
        for (int block = 0; block < 2; block++) ptx::mma_m16n8k16<__half>(d[block], a[block], b[2 * block], b[2 * block + 1]);
        if (own) {
#pragma unroll
            for (int block = 0; block < 2; block++) store_sums(d[block], partial, 16 * block + t, 16 * block + s);
        }
    }
}

// Level 16, from scratch: d[m][j] of k (m = 0) or q, columns 8 j ...
__device__ __forceinline__ void add_top_level(uint32_t scratch, int lane, float (&d)[2][2][4]) {
    uint32_t a[2][4], b[4];
#pragma unroll
    for (int m = 0; m < 2; m++) ptx::ldmatrix_x4(a[m], fragment_a(scratch + row_offset(16 * m), lane));
    ptx::ldmatrix_x4(b, fragment_b(scratch + kLowRowsTop, row_offset(8), lane));
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::mma_m16n8k16<__half>(d[i / 2][i % 2], a[i / 2], b[2 * (i % 2)], b[2 * (i % 2) + 1]);
}

__device__ __forceinline__ void store_top_level(const float (&d)[2][2][4], Partial &partial) {
    const int lane = opaque_lane(), g = lane >> 2, n = 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sums[4] = {d[0][j][2 * r], d[0][j][2 * r + 1], d[1][j][2 * r], d[1][j][2 * r + 1]};
            store_sums(sums, partial, 16 + g + 8 * r, n + 8 * j);
        }
}

// Where the lane's token i goes in scratch at levels 1 and 2, and the channels' place in the row.
__device__ __forceinline__ uint32_t lane_row(uint32_t first, int row, int quad) {
    return first + row_offset(row) + (((quad >> 1) ^ ((row >> 2) & 1)) << 4) + (quad & 1) * 8;
}

// One k-step: all levels, and K~, Q~, K^, gamma. a[4 i + c]: decay of token i of the group, channel c of the quad.
template <class T>
__device__ __forceinline__ void k_step(const float (&a)[16], float (&top)[2][2][4], float scale, uint32_t tiles,
                                       uint32_t scratch, int w, int step, uint8_t *g_out, Factors &factors, Partial &partial) {
    const Lanes at;
    const int G = at.group, in_block = G & 3;
    const uint32_t raw = tiles + at.raw(w, step), block = scratch + G / 4 * kBlockBytes;
    Words k[4], q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) k[i] = load_words(Lanes::token(raw, i)), q[i] = load_words(Lanes::token(raw, i, 1));
#pragma unroll
    for (int i = 0; i < 4; i++) k[i] = to_f16<T>(k[i], scale), q[i] = to_f16<T>(q[i], scale);
    float kk[16], qq[16];
    widen(kk, k), widen(qq, q);
    __syncwarp();
    {  // levels 1 and 2: rows 2 in_block and the one after it; the other section of scratch is the other level's
        const uint32_t one = lane_row(block, 2 * in_block, at.quad), two = one + kLevelBytes;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t row1 = one + i / 2 * 32, row2 = two + i % 2 * 32;
            if (i % 2 == 1) {
                store_words(row1, times(&kk[4 * i], &a[4 * i]));
                store_words(row1 + row_offset(8), times(&qq[4 * i], &a[4 * i]));
            } else {
                store_words(row1 + kLowRows, f16_words(&kk[4 * i]));
            }
            if (i >= 2) {
                float f[4];
#pragma unroll
                for (int c = 0; c < 4; c++) f[c] = i == 2 ? a[8 + c] : a[8 + c] * a[12 + c];
                store_words(row2, times(&kk[4 * i], f));
                store_words(row2 + row_offset(8), times(&qq[4 * i], f));
            } else {
                store_words(row2 + kLowRows, i == 1 ? f16_words(&kk[4]) : times(&kk[0], &a[4]));
            }
        }
    }
    __syncwarp();
    add_level<1>(scratch, at.lane, partial, step == 0);
    add_level<2>(scratch + kLevelBytes, at.lane, partial, step == 0);
    __syncwarp();
    // Products from the start of the group and to its end, and of the groups around it, in ever larger nodes.
    float pre[16], suf[12], before[4], after[4], total[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        pre[c] = a[c], suf[8 + c] = a[12 + c];
#pragma unroll
        for (int i = 1; i < 4; i++) pre[4 * i + c] = pre[4 * i - 4 + c] * a[4 * i + c];
#pragma unroll
        for (int i = 1; i >= 0; i--) suf[4 * i + c] = suf[4 * i + 4 + c] * a[4 * i + 4 + c];
        total[c] = pre[12 + c], before[c] = after[c] = 1.0f;
    }
#pragma unroll
    for (int level = 0; level < 3; level++) {  // 4, 8, 16
        const bool upper = (G >> level) & 1;
        // Level 4: rows of 4 of the two nodes in a block. Level 8: of the two groups in a half. Level 16: of the block's groups.
        const int row = level == 0 ? in_block / 2 * 4 : level == 1 ? in_block % 2 * 4 : in_block * 4;
        const uint32_t section = level == 0 ? block : level == 1 ? block + kLevelBytes : scratch;
        const uint32_t first = lane_row(section + (upper ? 0 : level == 2 ? kLowRowsTop : kLowRows), row, at.quad);
        const uint32_t to_q = row_offset(level == 2 ? 16 : 8);
        float outside[4];
#pragma unroll
        for (int c = 0; c < 4; c++) outside[c] = upper ? before[c] : after[c];
        if (level == 2) __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float f[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                f[c] = (upper ? pre[4 * i + c] : i == 3 ? 1.0f : suf[i == 3 ? 0 : 4 * i + c]) * outside[c];
            store_words(first + i * 32, times(&kk[4 * i], f));
            if (upper) store_words(first + i * 32 + to_q, times(&qq[4 * i], f));
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float other = __shfl_xor_sync(~0u, total[c], 4 << level);
            before[c] *= upper ? other : 1.0f, after[c] *= upper ? 1.0f : other, total[c] *= other;
        }
        if (level == 1) {
            __syncwarp();
            add_level<4>(scratch, at.lane, partial, step == 0);
            add_level<8>(scratch + kLevelBytes, at.lane, partial, step == 0);
        }
    }
    __syncwarp();
    add_top_level(scratch, at.lane, top);
    if (G == 0)
        *reinterpret_cast<float4 *>(&factors.gamma[32 * w + 16 * step + 4 * at.quad]) =
            make_float4(total[0], total[1], total[2], total[3]);
    const uint32_t out = at.raw(w, step);
    const float back = power_of_2_inverse(scale);
    const auto put = [&](int i, uint32_t tile, uint32_t x, uint32_t y) {
        *reinterpret_cast<uint2 *>(g_out + tile + Lanes::token(out, i)) = make_uint2(x, y);
    };
    constexpr uint32_t kQStart = offsetof(Operands, q_start), kKEnd = offsetof(Operands, k_end);
#pragma unroll
    for (int c = 0; c < 4; c++) before[c] *= back, after[c] *= back;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float f[4], x[4];
#pragma unroll
        for (int c = 0; c < 4; c++) f[c] = pre[4 * i + c] * before[c];
        put(i, 0, ptx::cvt_rn_x2<T>(kk[4 * i] * f[0], kk[4 * i + 1] * f[1]),
            ptx::cvt_rn_x2<T>(kk[4 * i + 2] * f[2], kk[4 * i + 3] * f[3]));
        put(i, kQStart, ptx::cvt_rn_x2<T>(qq[4 * i] * f[0], qq[4 * i + 1] * f[1]),
            ptx::cvt_rn_x2<T>(qq[4 * i + 2] * f[2], qq[4 * i + 3] * f[3]));
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] = kk[4 * i + c] * (i == 3 ? after[c] : suf[i == 3 ? 0 : 4 * i + c] * after[c]);
        const Words end = {ptx::cvt_rn_x2<T>(x[0], x[1]), ptx::cvt_rn_x2<T>(x[2], x[3])};
        put(i, kKEnd, end.x, end.y);
        const float2 e0 = unpack(T(), end.x), e1 = unpack(T(), end.y);
        put(i, kKEnd + Tile::kBytes, ptx::cvt_rn_x2<T>(x[0] - e0.x, x[1] - e0.y), ptx::cvt_rn_x2<T>(x[2] - e1.x, x[3] - e1.y));
    }
}

// q_t k_t, and the squares for l2norm. w: warp.
template <class T>
__device__ __forceinline__ void same_token(uint32_t k, int w, bool norms, Partial &partial) {
    const int lane = opaque_lane(), g = lane >> 2, m = lane >> 3;
    const uint32_t panel = w / 2 * Tile::kPanelStrideBytes + (lane & 7) * 128;
    const uint32_t rows = k + (m & 1) * Tile::kBytes + panel + ((((w & 1) * 4 + (m >> 1)) ^ (lane & 7)) << 4);
    const uint32_t columns = panel + ((((w & 1) * 4 + m) ^ (lane & 7)) << 4);
    const bool diagonal = (g >> 1) == (lane & 3);
#pragma unroll 1
    for (int block = 0; block < 4; block++) {  // of 8 tokens
        const uint32_t at = block * 1024;
        uint32_t x[4], y[4], b[4], c[4];
        float d[4] = {}, e[4] = {};
        ptx::ldmatrix_x4(x, rows + at);
        ptx::ldmatrix_x4(y, (rows ^ 32) + at);
        ptx::ldmatrix_x4(b, k + columns + at);
        ptx::mma_m16n8k16<T>(d, x, b[0], b[1]);
        if (norms) {
            ptx::ldmatrix_x4(c, k + Tile::kBytes + columns + at);
            ptx::mma_m16n8k16<T>(e, x, c[0], c[1]);
            ptx::mma_m16n8k16<T>(e, y, c[2], c[3]);
        }
        ptx::mma_m16n8k16<T>(d, y, b[2], b[3]);
        if (diagonal) {
            partial.kk[8 * block + g] = g & 1 ? d[1] : d[0];
            partial.qk[8 * block + g] = g & 1 ? d[3] : d[2];
            if (norms) partial.qq[8 * block + g] = g & 1 ? e[3] : e[2];
        }
    }
}

}  // namespace linattn::cuda::kda
