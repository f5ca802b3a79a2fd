// The products of a chunk's tokens with their decays, by one warp over its D / 4 channels:
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
// k-step of m16n8k16, at a time; it takes its k-steps in a loop, because code that is run once a chunk comes from far away and
// costs more than what it does. Sums wait in shared memory from step to step: 128 registers, four CTAs on an SM. Products of
// decays inside a group stay in the lane, those of whole groups come by shuffles.
//
// Operands never leave registers: what a lane has of a token of its group is what a fragment wants of row or column `group`,
// the channels 4 quad .. 4 quad + 3 in the place of columns 2 quad, 2 quad + 1, 2 quad + 8, 2 quad + 9. A product of 16 x 8:
//   rows 0-7 and 8-15: k and q of an upper token of each group;   columns: k of a lower token of each group
// Pairs inside a group (levels 2 and 1): six products, of which the diagonal counts. Pairs of groups (levels 16, 8, 4): groups
// of the upper half of a node have upper tokens only, those of the lower half lower ones only; two of the four words go to the
// partner in the other half, in exchange for two of its own, so that all rows and columns count: four products a level, of
// which level 16 has all pairs of groups, level 8 those of one half of the chunk, level 4 those of one quarter.
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

    // Offset of token 4 group of the quad, of warp w, in a tile of tokens x D channels.
    template <class TileOf>
    __device__ __forceinline__ uint32_t raw(int w, int step) const {
        const int channel = w * (TileOf::kCols / 4) + 16 * step;
        return (channel / 64 * TileOf::kPanelStrideBytes + group * 512 + channel % 64 * 2 + quad * 8) ^ (group & 1) << 6;
    }
    // Token i of the group.
    static __device__ __forceinline__ uint32_t token(uint32_t raw, int i) { return (raw ^ (i << 4)) + i * 128; }
};

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
__device__ __forceinline__ Words exchange(const Words &v, int mask) {
    return {__shfl_xor_sync(~0u, v.x, mask), __shfl_xor_sync(~0u, v.y, mask)};
}
// Four channels times their factors, rounded once: a factor rounded by itself would be off in all channels alike.
__device__ __forceinline__ Words times(const float *x, const float *f) {
    return {ptx::cvt_rn_f16x2(x[0] * f[0], x[1] * f[1]), ptx::cvt_rn_f16x2(x[2] * f[2], x[3] * f[3])};
}
// Four tokens of four channels, brought to a length of 1 to 2.
template <class T>
__device__ __forceinline__ void scale_unit(float (&x)[16], const Words (&v)[4], const float *s_inverse) {
    const float4 inverse = ptx::ld_shared_v4_f32(ptx::shared_address(s_inverse));
    const float f[4] = {inverse.x, inverse.y, inverse.z, inverse.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 a = unpack(T(), v[i].x), b = unpack(T(), v[i].y);
        x[4 * i] = a.x * f[i], x[4 * i + 1] = a.y * f[i], x[4 * i + 2] = b.x * f[i], x[4 * i + 3] = b.y * f[i];
    }
}

// Gate inputs of four tokens of four neighbouring channels, x[4 i + c]. The tile's panels are 128 bytes wide, swizzled.
template <int D>
__device__ __forceinline__ void load_gates(float (&x)[16], uint32_t tile, DType dtype, int w, int step) {
    const Lanes at;
    if (dtype == DType::F32) {
        const int channel = w * (D / 4) + 16 * step;
        const uint32_t raw = (channel / 32 * (kChunk * 128) + at.group * 512 + channel % 32 * 4 + at.quad * 16) ^ (at.group & 1)
                                                                                                                      << 6;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = ptx::ld_shared_v4_f32(tile + Lanes::token(raw, i));
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        }
        return;
    }
    const uint32_t raw = at.raw<Tile<D>>(w, step);
    Words v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = load_words(tile + Lanes::token(raw, i));
    const auto as = [&](auto type) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 a = unpack(type, v[i].x), b = unpack(type, v[i].y);
            x[4 * i] = a.x, x[4 * i + 1] = a.y, x[4 * i + 2] = b.x, x[4 * i + 3] = b.y;
        }
        ptx::register_fence(x);  // a branch, not both under predicates
    };
    if (dtype == DType::BF16)
        as(__nv_bfloat16());
    else
        as(__half());
}

__device__ __forceinline__ void product(float (&sum)[4], const Words &k, const Words &q, const Words &lower) {
    const uint32_t a[4] = {k.x, q.x, k.y, q.y};
    ptx::mma_m16n8k16<__half>(sum, a, lower.x, lower.y);
}

// The sums that count, as pieces: see Place. inside: pairs of tokens (2, 0), (2, 1), (3, 0), (3, 1), (1, 0), (3, 2) of each
// group; across: product 2 i + j of the left operand i and the right one j.
__device__ __forceinline__ void store_piece(float4 *s_pieces, int piece, float a, float b, float c, float d) {
    ptx::st_shared_v4_f32(ptx::shared_address(s_pieces + piece), make_float4(a, b, c, d));
}
__device__ __forceinline__ void store_inside(const float (&sums)[6][4], float4 *s_pieces) {
    const Lanes at;
    const int g = at.group;
    if (g / 2 != at.quad) return;
    const bool odd = g % 2;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float (&x)[4] = sums[2 * i], (&y)[4] = sums[2 * i + 1];
        store_piece(s_pieces, 224 + 8 * i + g, odd ? x[1] : x[0], odd ? y[1] : y[0], odd ? x[3] : x[2], odd ? y[3] : y[2]);
    }
}
__device__ __forceinline__ void store_across(const float (&sums)[4][4], int level, float4 *s_pieces) {
    const Lanes at;
    const int g = at.group, q = at.quad;
    if (level == 0 ? g / 2 != q : level == 1 && g / 4 != q / 2) return;
    const int first = level == 0 ? 192 + g : level == 1 ? 128 + 2 * g + q % 2 : at.lane, apart = 8 << level;
#pragma unroll
    for (int i = 0; i < 4; i++) store_piece(s_pieces, first + apart * i, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
}

// The same as accumulators, of the warp's channels before. What does not count may hold anything.
__device__ __forceinline__ void load_inside(float (&sums)[6][4], const float4 *s_pieces) {
    const Lanes at;
    if (at.group / 2 != at.quad) return;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float4 v = ptx::ld_shared_v4_f32(ptx::shared_address(s_pieces + 224 + 8 * i + at.group));
        float (&x)[4] = sums[2 * i], (&y)[4] = sums[2 * i + 1];
        x[0] = x[1] = v.x, y[0] = y[1] = v.y, x[2] = x[3] = v.z, y[2] = y[3] = v.w;
    }
}
__device__ __forceinline__ void load_across(float (&sums)[4][4], int level, const float4 *s_pieces) {
    const Lanes at;
    const int g = at.group, q = at.quad;
    if (level == 0 ? g / 2 != q : level == 1 && g / 4 != q / 2) return;
    const int first = level == 0 ? 192 + g : level == 1 ? 128 + 2 * g + q % 2 : at.lane, apart = 8 << level;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 v = ptx::ld_shared_v4_f32(ptx::shared_address(s_pieces + first + apart * i));
        sums[i][0] = v.x, sums[i][1] = v.y, sums[i][2] = v.z, sums[i][3] = v.w;
    }
}

// Of the lane's four channels: the decay of nodes of 4, 8, 16 tokens, and in the chunk's node around it what comes before the
// lane's group of four tokens and after it.
struct Nodes {
    float total[4], before[4] = {1.0f, 1.0f, 1.0f, 1.0f}, after[4] = {1.0f, 1.0f, 1.0f, 1.0f};

    // From nodes of 4 << level tokens to nodes twice as large: the other half's decay, and what that makes.
    __device__ __forceinline__ void other_half(float (&other)[4], int level) const {
#pragma unroll
        for (int c = 0; c < 4; c++) other[c] = __shfl_xor_sync(~0u, total[c], 4 << level);
    }
    __device__ __forceinline__ void widen(const float (&other)[4], bool upper) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (upper)
                before[c] *= other[c];
            else
                after[c] *= other[c];
            total[c] *= other[c];
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

// A lane's four tokens of k and q.
struct Loaded {
    Words k[4], q[4];

    template <int D>
    __device__ __forceinline__ Loaded(const PrepSmem<D> &smem, int w, int step) {
        const uint32_t start = ptx::shared_address(smem.start) + Lanes().raw<Pair<D>>(w, step);
#pragma unroll
        for (int i = 0; i < 4; i++)
            k[i] = load_words(Lanes::token(start, i)), q[i] = load_words(Lanes::token(start, i) + kQueries);
    }
};

// All levels, and K~, Q~, K^, gamma. a[4 i + c]: decay of token i of the group, channel c of the quad.
template <class T, int D>
__device__ __forceinline__ void tree(const Loaded &loaded, const float (&a)[16], PrepSmem<D> &smem, int w, int step,
                                     Operands<D> &g_to) {
    const Lanes at;
    const int G = at.group;
    float kk[16], qq[16];
    scale_unit<T>(kk, loaded.k, smem.inverse_k + 4 * G);
    scale_unit<T>(qq, loaded.q, smem.inverse_q + 4 * G);
    {  // levels 2 and 1
        const Words lower0 = times(&kk[0], &a[4]), lower1 = f16_words(&kk[4]);
        float f[4], sums[6][4] = {};
        if (step > 0) load_inside(sums, smem.partial[w]);
#pragma unroll
        for (int c = 0; c < 4; c++) f[c] = a[8 + c] * a[12 + c];
        const Words k2 = times(&kk[8], &a[8]), q2 = times(&qq[8], &a[8]), k3 = times(&kk[12], f), q3 = times(&qq[12], f);
        product(sums[0], k2, q2, lower0);
        product(sums[1], k2, q2, lower1);
        product(sums[2], k3, q3, lower0);
        product(sums[3], k3, q3, lower1);
        product(sums[4], times(&kk[4], &a[4]), times(&qq[4], &a[4]), f16_words(&kk[0]));
        product(sums[5], times(&kk[12], &a[12]), times(&qq[12], &a[12]), f16_words(&kk[8]));
        store_inside(sums, smem.partial[w]);
    }
    __syncwarp();  // of some lanes only
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
        float outside[4], other[4], sums[4][4] = {};
        if (step > 0) load_across(sums, level, smem.partial[w]);
        nodes.other_half(other, level);
#pragma unroll
        for (int c = 0; c < 4; c++) outside[c] = upper ? nodes.before[c] : nodes.after[c];
        Words k[4], q[4], left_k[2], left_q[2], right[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x[4];
#pragma unroll
            for (int c = 0; c < 4; c++) x[c] = upper ? kp[4 * i + c] : kk[4 * i + c];
            k[i] = times(x, outside), q[i] = times(&qq[4 * i], outside);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Words k_other = exchange(k[2 * i + 1], 4 << level), q_other = exchange(q[2 * i + 1], 4 << level);
            left_k[i] = upper ? k[2 * i] : k_other, right[i] = upper ? k_other : k[2 * i];
            left_q[i] = upper ? q[2 * i] : q_other;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) product(sums[i], left_k[i / 2], left_q[i / 2], right[i % 2]);
        nodes.widen(other, upper);
        store_across(sums, level, smem.partial[w]);
        __syncwarp();
    }
    if (G == 0) {
        float *to = &smem.factors.gamma[gamma_place(w * (D / 4) + 16 * step + 4 * at.quad)];
        *reinterpret_cast<float2 *>(to) = make_float2(nodes.total[0], nodes.total[1]);
        *reinterpret_cast<float2 *>(to + 4) = make_float2(nodes.total[2], nodes.total[3]);
    }
    // Each lane where it has read.
    const uint32_t start = ptx::shared_address(smem.start) + at.raw<Pair<D>>(w, step);
    const uint32_t end = at.raw<Tile<D>>(w, step);
    const auto put = [&](uint32_t to, const float *x, const float *f) {
        store_words(to, {ptx::cvt_rn_x2<T>(x[0] * f[0], x[1] * f[1]), ptx::cvt_rn_x2<T>(x[2] * f[2], x[3] * f[3])});
    };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        put(Lanes::token(start, i), &kp[4 * i], nodes.before);
        put(Lanes::token(start, i) + kQueries, &qq[4 * i], nodes.before);
        const Words v = times(&kk[4 * i], nodes.after);
        *reinterpret_cast<uint2 *>(g_to.k_end + Lanes::token(end, i)) = make_uint2(v.x, v.y);
    }
}

// K^'s second terms. k's own place is K~'s by now: it comes from global memory, of the quad's channels in the chunk's first
// token, `stride` bytes a token.
template <class T, int D>
__device__ __forceinline__ void k_end_second_terms(const float (&a)[16], PrepSmem<D> &smem, int w, int step, const char *g_k,
                                                   int64_t stride, Operands<D> &g_to) {
    const Lanes at;
    float kk[16];
    Words k[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 4 * at.group + i;
        k[i] = {0, 0};
        if (token >= smem.rows) continue;
        const uint2 v = *reinterpret_cast<const uint2 *>(g_k + token * stride + 8 * at.quad);
        k[i] = {v.x, v.y};
    }
    scale_unit<T>(kk, k, smem.inverse_k + 4 * at.group);
    Nodes nodes;
#pragma unroll
    for (int c = 0; c < 4; c++) nodes.total[c] = a[c] * a[4 + c] * a[8 + c] * a[12 + c];
    to_group_end(kk, a);
#pragma unroll
    for (int level = 0; level < 3; level++) {
        float other[4];
        nodes.other_half(other, level);
        nodes.widen(other, (at.group >> level) & 1);
    }
    const uint32_t raw = at.raw<Tile<D>>(w, step);
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

// q_t k_t, and the squares. w: warp. A fragment of rows of k and q holds the columns of both as well.
template <class T, int D>
__device__ __forceinline__ void same_token(int w, PrepSmem<D> &smem) {
    const int lane = opaque_lane(), g = lane >> 2, m = lane >> 3, unit = w * (D / 32) + (m >> 1);
    const uint32_t rows = ptx::shared_address(smem.start) + (m & 1) * kQueries + unit / 8 * Pair<D>::kPanelStrideBytes +
                          (lane & 7) * 128 + ((unit % 8 ^ (lane & 7)) << 4);
    constexpr int kBlocks = kChunk / 8, kSteps = D / 64;
    uint32_t x[kSteps][kBlocks][4];
    float d[kBlocks][4] = {}, e[kBlocks][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; i++)
#pragma unroll
        for (int block = 0; block < kBlocks; block++) ptx::ldmatrix_x4(x[i][block], (rows ^ i * 32) + block * 1024);
#pragma unroll
    for (int i = 0; i < kSteps; i++)
#pragma unroll
        for (int block = 0; block < kBlocks; block++) {
            const uint32_t (&a)[4] = x[i][block];
            ptx::mma_m16n8k16<T>(d[block], a, a[0], a[2]);
            ptx::mma_m16n8k16<T>(e[block], a, a[1], a[3]);
        }
    if (g >> 1 != (lane & 3)) return;  // the diagonal
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
        smem.kk[w][8 * block + g] = g & 1 ? d[block][1] : d[block][0];
        smem.qk[w][8 * block + g] = g & 1 ? d[block][3] : d[block][2];
        smem.qq[w][8 * block + g] = g & 1 ? e[block][3] : e[block][2];
    }
}

}  // namespace linattn::cuda::kda
