// The products of a chunk's tokens with their decays, by one warp over its 32 channels:
//
//   M_ts = sum_c k_tc k_sc prod_{s<r<=t} a_rc, s < t;   A_ts the same with q_t, s <= t
//
// exact for any gates, -inf included, without a division or a difference of exponents: tokens s and t part at one boundary of a
// binary tree, s in the lower half of a node of 2 h tokens, t in the upper one. The product up to the boundary goes to k_s,
// that from it on to k_t and q_t; both are at most 1. Each level h = 16, 8, 4, 2, 1 is one set of operands.
//
// k and q are brought to a length of 1 to 2 first, by a power of 2. Operands are fp16, for bf16 inputs too: in bf16 a k times
// 0.999 would be k again, for all channels alike, and the sums over U, which cancel where keys are alike, would keep that
// 0.001.
//
// Lane = four tokens (group: lane / 4) of four neighbouring channels (quad: lane % 4), so that a warp has 16 channels, one
// k-step of m16n8k16, at a time; it takes its two k-steps in a loop, because code that is run once a chunk comes from far away
// and costs more than what it does. Products inside a group stay in the lane, those of whole groups come by shuffles. Operands
// go to the warp's scratch: of a block of 16 tokens and a level, the eight upper tokens' k and q are the 16 rows, the eight
// lower tokens' k the 8 columns; what lies outside the nodes is left away. Loads are grouped before stores: the wrappers of
// cuda/ptx are volatile, and no load passes a store.
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
    template <class TileOf>
    __device__ __forceinline__ uint32_t raw(int w, int step) const {
        return (w / 2 * TileOf::kPanelStrideBytes + group * 512 + (w & 1) * 64 + step * 32 + quad * 8) ^ (group & 1) << 6;
    }
    // Token i of the group.
    static __device__ __forceinline__ uint32_t token(uint32_t raw, int i) { return (raw ^ (i << 4)) + i * 128; }
};

// Scratch: rows of 16 channels in fp16. A row is moved on by one for each four before it, so that the rows that 16 lanes store
// at once, and the eight of an ldmatrix, meet different banks. A level of both blocks takes kLevelBytes.
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
// Four tokens of four channels, brought to a length of 1 to 2.
template <class T>
__device__ __forceinline__ void load_unit(float (&x)[16], uint32_t tile, uint32_t raw, const float *s_inverse) {
    Words v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = load_words(tile + Lanes::token(raw, i));
    const float4 inverse = ptx::ld_shared_v4_f32(ptx::shared_address(s_inverse));
    const float f[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 a = unpack(T(), v[i].x), b = unpack(T(), v[i].y);
        x[4 * i] = a.x * f[i], x[4 * i + 1] = a.y * f[i], x[4 * i + 2] = b.x * f[i], x[4 * i + 3] = b.y * f[i];
    }
}

// Gate inputs of four tokens of four neighbouring channels, x[4 i + c]. The tile's panels are 128 bytes wide, swizzled.
__device__ __forceinline__ void load_gates(float (&x)[16], uint32_t tile, DType dtype, int w, int step) {
    const Lanes at;
    if (dtype == DType::F32) {
        const uint32_t raw = (w * (kChunk * 128) + at.group * 512 + step * 64 + at.quad * 16) ^ (at.group & 1) << 6;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = ptx::ld_shared_v4_f32(tile + Lanes::token(raw, i));
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        }
        return;
    }
    const uint32_t raw = at.raw<Tile>(w, step);
    const bool bf16 = dtype == DType::BF16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Words v = load_words(tile + Lanes::token(raw, i));
        const float2 a = bf16 ? unpack(__nv_bfloat16(), v.x) : unpack(__half(), v.x);
        const float2 b = bf16 ? unpack(__nv_bfloat16(), v.y) : unpack(__half(), v.y);
        x[4 * i] = a.x, x[4 * i + 1] = a.y, x[4 * i + 2] = b.x, x[4 * i + 3] = b.y;
    }
}

__device__ __forceinline__ void store_sums(const float (&d)[4], Partial &partial, int t, int s) {
    partial.x[s * kPitch + t] = d[0];
    partial.x[(s + 1) * kPitch + t] = d[1];
    *reinterpret_cast<float2 *>(&partial.x[t * kPitch + s]) = make_float2(d[2], d[3]);
}

// Sums of a warp, in accumulators: levels 1, 2, 4, 8 for both blocks, k's rows and q's, and level 16, top[m][j] of k (m = 0) or
// q and columns 8 j ... What lies outside the nodes is of no use.
struct Sums {
    float level[4][2][4], top[2][2][4];
};

// The products of level 1 << kLog that lie in scratch.
template <int kLog>
__device__ __forceinline__ void add_level(uint32_t scratch, int lane, Sums &sums) {
    uint32_t a[2][4], b[4];
#pragma unroll
    for (int block = 0; block < 2; block++) ptx::ldmatrix_x4(a[block], fragment_a(scratch + block * kBlockBytes, lane));
    ptx::ldmatrix_x4(b, fragment_b(scratch + kLowRows, kBlockBytes, lane));
#pragma unroll
    for (int block = 0; block < 2; block++)
        ptx::mma_m16n8k16<__half>(sums.level[kLog][block], a[block], b[2 * block], b[2 * block + 1]);
}

// What the nodes of a level have among the sums, at tokens t (of the lane's row) and s, s + 1 (of its columns).
template <int kLog>
__device__ __forceinline__ void store_level(const Sums &sums, Partial &partial, int g, int n) {
    constexpr int h = 1 << kLog;
    const int t = ((g & ~(h - 1)) << 1) | h | (g & (h - 1));
    if constexpr (h == 1) {  // one sum of each matrix in a lane
        if (g / 2 != n / 2) return;
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const float (&d)[4] = sums.level[0][block];
            partial.x[(16 * block + t - 1) * kPitch + 16 * block + t] = g & 1 ? d[1] : d[0];
            partial.x[(16 * block + t) * kPitch + 16 * block + t - 1] = g & 1 ? d[3] : d[2];
        }
    } else {
        const int s = ((n & ~(h - 1)) << 1) | (n & (h - 1));
        if (g / h != n / h) return;
#pragma unroll
        for (int block = 0; block < 2; block++) store_sums(sums.level[kLog][block], partial, 16 * block + t, 16 * block + s);
    }
}

// Level 16.
__device__ __forceinline__ void add_top_level(uint32_t scratch, int lane, Sums &sums) {
    uint32_t a[2][4], b[4];
#pragma unroll
    for (int m = 0; m < 2; m++) ptx::ldmatrix_x4(a[m], fragment_a(scratch + row_offset(16 * m), lane));
    ptx::ldmatrix_x4(b, fragment_b(scratch + kLowRowsTop, row_offset(8), lane));
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::mma_m16n8k16<__half>(sums.top[i / 2][i % 2], a[i / 2], b[2 * (i % 2)], b[2 * (i % 2) + 1]);
}

__device__ __forceinline__ void store_all(const Sums &sums, Partial &partial) {
    const int lane = opaque_lane(), g = lane >> 2, n = 2 * (lane & 3);
    store_level<0>(sums, partial, g, n), store_level<1>(sums, partial, g, n);
    store_level<2>(sums, partial, g, n), store_level<3>(sums, partial, g, n);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float d[4] = {sums.top[0][j][2 * r], sums.top[0][j][2 * r + 1], sums.top[1][j][2 * r],
                                sums.top[1][j][2 * r + 1]};
            store_sums(d, partial, 16 + g + 8 * r, n + 8 * j);
        }
}

// Where the lane's token i goes in scratch at levels 1 and 2, and the channels' place in the row.
__device__ __forceinline__ uint32_t lane_row(uint32_t first, int row, int quad) {
    return first + row_offset(row) + (((quad >> 1) ^ ((row >> 2) & 1)) << 4) + (quad & 1) * 8;
}

// Of the lane's four channels: the decay of nodes of 4, 8, 16 tokens, and in the chunk's node around it what comes before the
// lane's group of four tokens and after it.
struct Nodes {
    float total[4], before[4] = {1.0f, 1.0f, 1.0f, 1.0f}, after[4] = {1.0f, 1.0f, 1.0f, 1.0f};

    // From nodes of 4 << level tokens to nodes twice as large.
    __device__ __forceinline__ void widen(int level, bool upper) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float other = __shfl_xor_sync(~0u, total[c], 4 << level);
            before[c] *= upper ? other : 1.0f, after[c] *= upper ? 1.0f : other, total[c] *= other;
        }
    }
};

// x times the decay from each token to the end of the group.
__device__ __forceinline__ void to_group_end(float (&x)[16], const float (&a)[16]) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float f = a[12 + c];
#pragma unroll
        for (int i = 2; i >= 0; i--) {
            x[4 * i + c] *= f;
            if (i > 0) f *= a[4 * i + c];
        }
    }
}

// One k-step: all levels, and K~, Q~, K^, gamma. a[4 i + c]: decay of token i of the group, channel c of the quad.
template <class T>
__device__ __forceinline__ void k_step(const float (&a)[16], Sums &sums, PrepSmem &smem, int w, int step,
                                       Operands *g_operands) {
    const Lanes at;
    const int G = at.group, in_block = G & 3;
    const uint32_t tiles = ptx::shared_address(smem.k), scratch = ptx::shared_address(smem.warp[w].scratch);
    const uint32_t raw = at.raw<Tile>(w, step), block = scratch + G / 4 * kBlockBytes;
    float kk[16], qq[16];
    load_unit<T>(kk, tiles, raw, smem.inverse_k[w] + 4 * G),
        load_unit<T>(qq, tiles + Tile::kBytes, raw, smem.inverse_q[w] + 4 * G);
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
    add_level<0>(scratch, at.lane, sums);
    add_level<1>(scratch + kLevelBytes, at.lane, sums);
    __syncwarp();
    // k and q times the decay since the start of the group; kk becomes k times the decay to its end.
    Nodes nodes;
    float kp[16];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float f = a[c];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i > 0) f *= a[4 * i + c];
            kp[4 * i + c] = kk[4 * i + c] * f, qq[4 * i + c] *= f;
        }
        nodes.total[c] = f;
    }
    to_group_end(kk, a);
#pragma unroll
    for (int level = 0; level < 3; level++) {  // 4, 8, 16
        const bool upper = (G >> level) & 1;
        // Level 4: rows of 4 of the two nodes in a block. Level 8: of the two groups in a half. Level 16: of the block's
        // groups.
        const int row = level == 0 ? in_block / 2 * 4 : level == 1 ? in_block % 2 * 4 : in_block * 4;
        const uint32_t section = level == 0 ? block : level == 1 ? block + kLevelBytes : scratch;
        const uint32_t first = lane_row(section + (upper ? 0 : level == 2 ? kLowRowsTop : kLowRows), row, at.quad);
        const uint32_t to_q = row_offset(level == 2 ? 16 : 8);
        float outside[4];
#pragma unroll
        for (int c = 0; c < 4; c++) outside[c] = upper ? nodes.before[c] : nodes.after[c];
        if (level == 2) __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float k[4];
#pragma unroll
            for (int c = 0; c < 4; c++) k[c] = upper ? kp[4 * i + c] : kk[4 * i + c];
            store_words(first + i * 32, times(k, outside));
            if (upper) store_words(first + i * 32 + to_q, times(&qq[4 * i], outside));
        }
        nodes.widen(level, upper);
        if (level == 1) {
            __syncwarp();
            add_level<2>(scratch, at.lane, sums);
            add_level<3>(scratch + kLevelBytes, at.lane, sums);
        }
    }
    __syncwarp();
    add_top_level(scratch, at.lane, sums);
    if (G == 0) {
        float *to = &smem.factors.gamma[gamma_place(32 * w + 16 * step + 4 * at.quad)];
        *reinterpret_cast<float2 *>(to) = make_float2(nodes.total[0], nodes.total[1]);
        *reinterpret_cast<float2 *>(to + 4) = make_float2(nodes.total[2], nodes.total[3]);
    }
    uint32_t chunk[1] = {blockIdx.x};
    ptx::register_fence(chunk);
    Operands &g_to = g_operands[chunk[0]];
    uint8_t *g_start = g_to.start + at.raw<Pair>(w, step), *g_end = g_to.k_end + raw;
    const auto put = [&](uint8_t *g_tile, const float *x, const float *f) {
        *reinterpret_cast<uint2 *>(g_tile) =
            make_uint2(ptx::cvt_rn_x2<T>(x[0] * f[0], x[1] * f[1]), ptx::cvt_rn_x2<T>(x[2] * f[2], x[3] * f[3]));
    };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int to = Lanes::token(raw, i) - raw;  // the same in both tiles
        put(g_start + to, &kp[4 * i], nodes.before);
        put(g_start + to + kChunk * 128, &qq[4 * i], nodes.before);
        const Words end = times(&kk[4 * i], nodes.after);
        *reinterpret_cast<uint2 *>(g_end + to) = make_uint2(end.x, end.y);
    }
}

// K^'s second terms.
template <class T>
__device__ __forceinline__ void k_end_second_terms(const float (&a)[16], PrepSmem &smem, int w, int step, Operands &g_to) {
    const Lanes at;
    const uint32_t raw = at.raw<Tile>(w, step);
    float kk[16];
    load_unit<T>(kk, ptx::shared_address(smem.k), raw, smem.inverse_k[w] + 4 * at.group);
    Nodes nodes;
#pragma unroll
    for (int c = 0; c < 4; c++) nodes.total[c] = a[c] * a[4 + c] * a[8 + c] * a[12 + c];
    to_group_end(kk, a);
#pragma unroll
    for (int level = 0; level < 3; level++) nodes.widen(level, (at.group >> level) & 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float end[4];
#pragma unroll
        for (int c = 0; c < 4; c++) end[c] = kk[4 * i + c] * nodes.after[c];
        const Words v = f16_words(end);
        const float2 v0 = unpack(__half(), v.x), v1 = unpack(__half(), v.y);
        const float low[4] = {end[0] - v0.x, end[1] - v0.y, end[2] - v1.x, end[3] - v1.y};
        const Words second = f16_words(low);
        *reinterpret_cast<uint2 *>(g_to.k_end_low + Lanes::token(raw, i)) = make_uint2(second.x, second.y);
    }
}

// q_t k_t, and the squares. w: warp.
template <class T>
__device__ __forceinline__ void same_token(uint32_t k, int w, PrepSmem &smem) {
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
        ptx::ldmatrix_x4(c, k + Tile::kBytes + columns + at);
        ptx::mma_m16n8k16<T>(e, x, c[0], c[1]);
        ptx::mma_m16n8k16<T>(e, y, c[2], c[3]);
        ptx::mma_m16n8k16<T>(d, y, b[2], b[3]);
        if (diagonal) {
            smem.kk[w][8 * block + g] = g & 1 ? d[1] : d[0];
            smem.qk[w][8 * block + g] = g & 1 ? d[3] : d[2];
            smem.qq[w][8 * block + g] = g & 1 ? e[3] : e[2];
        }
    }
}

}  // namespace linattn::cuda::kda
