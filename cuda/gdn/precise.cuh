// AUX's second pass over a chunk with correlated keys: A^ again, with both terms of each operand of the block substitution and
// two terms in fp16 of each result, and the second terms of P.
//
// Rows of A^ before `first`, the first token that needs this, stay as the first pass left them: one term in T. The rows from
// `first` on lie there in fp16 (|A^| <= 2 for keys of length 1), their second terms in the place of the products that the
// group's next chunk will use. See StateLoop::precise_chunk for what is made of them.
#pragma once
#include <cstddef>

#include "aux.cuh"

namespace linattn::cuda::gdn {

struct Terms {
    uint32_t first[4], second[4];
};

__device__ __forceinline__ void split(uint32_t (&first)[4], uint32_t (&second)[4], const float (&d)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        first[i] = pack_f16(d[2 * i], d[2 * i + 1]);
        second[i] = second_term<__half>(first[i], d[2 * i], d[2 * i + 1]);
    }
}

// d += a b; the smallest products first.
__device__ __forceinline__ void multiply(float (&d)[8], const Terms &a, const Terms &b) {
    multiply(d, a.second, b.first);
    multiply(d, a.first, b.second);
    multiply(d, a.first, b.first);
}

// scratch: address of the lane in InverseScratch; first terms are in the buffers `parity`, second ones in the others. A, A2: the
// tiles of A^ for them.
struct PreciseInverse {
    uint32_t scratch, parity, A, A2, x10_barrier;
    int first, lane;

    template <int kOffset, int kBytes>
    __device__ __forceinline__ Terms right(int block) const {  // a right operand
        const uint32_t from = scratch + kOffset + parity * kBytes + block * 512;
        Terms b;
        ptx::ldmatrix_x4_trans(b.first, from);
        ptx::ldmatrix_x4_trans(b.second, from + kBytes - 2 * parity * kBytes);
        return b;
    }
    static constexpr int kM = offsetof(InverseScratch, M), kX = offsetof(InverseScratch, X),
                         kX10 = offsetof(InverseScratch, X10);
    static constexpr int kBytesM = sizeof(InverseScratch::M) / 2, kBytesX = sizeof(InverseScratch::X) / 2, kBytesX10 = 512;
    __device__ __forceinline__ Terms m(int i, int j) const { return right<kM, kBytesM>(i * (i - 1) / 2 + j); }
    __device__ __forceinline__ Terms x(int i) const { return right<kX, kBytesX>(i); }
    __device__ __forceinline__ Terms x10() const { return right<kX10, kBytesX10>(0); }
    __device__ __forceinline__ uint32_t x_address(int i, uint32_t buffer) const {
        return scratch + kX + buffer * kBytesX + i * 512;
    }
    __device__ __forceinline__ Terms left(int i) const {
        Terms a;
        ptx::ldmatrix_x4(a.first, x_address(i, parity)), ptx::ldmatrix_x4(a.second, x_address(i, parity ^ 1));
        return a;
    }
    __device__ __forceinline__ static Terms left(const float (&d)[8]) {
        Terms a;
        split(a.first, a.second, d);
        return a;
    }

    // Block (i, j) of A^. First terms of rows that keep what is there go where the second terms come next.
    __device__ __forceinline__ void store(int i, int j, const Terms &block) const {
        const int l = Lane(lane).lane;
        const uint32_t second = product_block(A2, i, j, l);
        ptx::stmatrix_x4(16 * i + (l & 15) < first ? second : product_block(A, i, j, l), block.first);
        __syncwarp();
        ptx::stmatrix_x4(second, block.second);
    }

    // Inverse of diagonal block w, to X and A^.
    __device__ __forceinline__ void invert_diagonal(const Diagonal &n, int w) const {
        const Lane at(lane);
        const uint32_t own = x_address(w, parity) - 16 * lane;
        float column[8];
        solve_8x8(n, column, own, lane);
        if (at.lane < 16) {
#pragma unroll
            for (int i = 0; i < 8; i++) ptx::st_shared_f32(own + (at.lane & 8) * 32 + i * 32 + (at.lane & 7) * 4, column[i]);
        }
        __syncwarp();
        const float2 x2 = ptx::ld_shared_v2_f32(own + 8 * at.lane), y2 = ptx::ld_shared_v2_f32(own + 256 + 8 * at.lane);
        const float x[2] = {x2.x, x2.y}, y[2] = {y2.x, y2.y};
        __syncwarp();
        const uint32_t upper = pack_f16(x[0], x[1]), upper2 = second_term<__half>(upper, x[0], x[1]);
        const uint32_t lower = pack_f16(y[0], y[1]), lower2 = second_term<__half>(lower, y[0], y[1]);
        const uint32_t left = pack_f16(n.left[0], n.left[1]), middle = ptx::movmatrix_trans(left);
        const uint32_t middle2 = ptx::movmatrix_trans(second_term<__half>(left, n.left[0], n.left[1]));
        float d[4] = {}, z[4] = {};  // lower left: Y N X
        ptx::mma_m16n8k8<__half>(d, {lower2, 0}, middle);
        ptx::mma_m16n8k8<__half>(d, {lower, 0}, middle2);
        ptx::mma_m16n8k8<__half>(d, {lower, 0}, middle);
        const uint32_t product = pack_f16(d[0], d[1]), product2 = second_term<__half>(product, d[0], d[1]);
        const uint32_t upper_b = ptx::movmatrix_trans(upper);
        ptx::mma_m16n8k8<__half>(z, {product2, 0}, upper_b);
        ptx::mma_m16n8k8<__half>(z, {product, 0}, ptx::movmatrix_trans(upper2));
        ptx::mma_m16n8k8<__half>(z, {product, 0}, upper_b);
        const uint32_t corner = pack_f16(z[0], z[1]), corner2 = second_term<__half>(corner, z[0], z[1]);
        ptx::stmatrix_x4(x_address(w, parity), {upper, corner, 0, lower});
        ptx::stmatrix_x4(x_address(w, parity ^ 1), {upper2, corner2, 0, lower2});
        // A^ has no diagonal.
        const uint32_t keep = (at.g > 2 * at.q ? 0x0000ffffu : 0) | (at.g > 2 * at.q + 1 ? 0xffff0000u : 0);
        store(w, w, {{upper & keep, corner, 0, lower & keep}, {upper2 & keep, corner2, 0, lower2 & keep}});
    }

    // The blocks below the diagonal, dealt out as in Substitution.
    template <int w>
    __device__ __forceinline__ void run() const {
        if constexpr (w == 0) {  // block 30
            float z[8] = {}, y1[8] = {}, y0[8] = {}, x32[8] = {}, r[8] = {};
            const Terms x3 = left(3);
            multiply(z, x3, m(3, 2));
            multiply(y1, x3, m(3, 1));
            multiply(y0, x3, m(3, 0));
            multiply(x32, left(z), x(2));
            const Terms a32 = left(x32);
            multiply(y0, a32, m(2, 0));
            multiply(y1, a32, m(2, 1));
            multiply(r, left(y0), x(0));
            ptx::barrier_sync(x10_barrier, 96);
            multiply(r, left(y1), x10());
            store(3, 0, left(r));
        } else if constexpr (w == 1) {  // blocks 21, 20
            float y1[8] = {}, y0[8] = {}, r1[8] = {}, r0[8] = {};
            const Terms x2 = left(2);
            multiply(y1, x2, m(2, 1));
            multiply(y0, x2, m(2, 0));
            const Terms a1 = left(y1);
            multiply(r1, a1, x(1));
            store(2, 1, left(r1));
            multiply(r0, left(y0), x(0));
            ptx::barrier_sync(x10_barrier, 96);
            multiply(r0, a1, x10());
            store(2, 0, left(r0));
        } else if constexpr (w == 2) {  // blocks 32, 31
            float z[8] = {}, y1[8] = {}, x32[8] = {}, x31[8] = {};
            const Terms x3 = left(3);
            multiply(z, x3, m(3, 2));
            multiply(y1, x3, m(3, 1));
            multiply(x32, left(z), x(2));
            const Terms a32 = left(x32);
            store(3, 2, a32);
            multiply(y1, a32, m(2, 1));
            multiply(x31, left(y1), x(1));
            store(3, 1, left(x31));
        } else {  // block 10
            float z[8] = {}, x10[8] = {};
            multiply(z, left(1), m(1, 0));
            multiply(x10, left(z), x(0));
            const Terms a10 = left(x10);
            ptx::stmatrix_x4(scratch + kX10 + parity * kBytesX10, a10.first);
            ptx::stmatrix_x4(scratch + kX10 + (parity ^ 1) * kBytesX10, a10.second);
            ptx::bar_arrive(x10_barrier, 96);
            store(1, 0, a10);
        }
    }
};

// Where the first pass has left Q K^T in d, and A^ and P in place; K is still there.
template <class C>
__device__ __forceinline__ void precise_products(const KernelParams &params, Smem<C> &smem, InverseScratch &scratch, int group,
                                                 float (&d)[32], uint32_t k, uint32_t tw, int stage, int second_stage,
                                                 uint32_t parity, int first, int w, int lane) {
    float e[6];
    Diagonal n = {};
    if constexpr (C::kOutputs) {
        const uint32_t P = ptx::shared_address(smem.p[second_stage]);
        DiagonalDecays(tw, lane).get(e, lane);  // again: to keep them would cost registers
        for_warp_or_all<C>(w, [&](auto warp) { store_p<C, true>(d, e, tw, P, {params.scale, params.scale}, warp, lane); });
    }
    issue_product<C>(d, k, k);
    const PreciseInverse inverse{ptx::shared_address(&scratch) + 16 * lane,
                                 parity,
                                 ptx::shared_address(smem.a[stage]),
                                 ptx::shared_address(smem.a[second_stage]),
                                 kX10Barrier + group,
                                 first,
                                 lane};
    group_meets(smem, group);  // the first pass is over in all warps
    ptx::wgmma_wait_group<0>();
    ptx::register_fence(d);
    Weights weights;
    for_warp_or_all<C>(
        w, [&](auto warp) { scale_kk<C, true>(d, n, weights, tw, ptx::shared_address(scratch.M[parity ^ 1]), warp, lane); });
    DiagonalDecays(tw, lane).get(e, lane);
    decay_diagonal(n, e, lane);
    inverse.invert_diagonal(n, w);
    group_meets(smem, group);
    for_warp(w, [&](auto warp) { inverse.template run<decltype(warp)::value>(); });
    group_meets(smem, group);  // before the next chunk's M
}

// Group `group` has the chunks whose number in the CTA is group mod kAuxGroups.
template <class C>
__device__ __forceinline__ void auxiliary(const KernelParams &params, Smem<C> &smem, int group) {
    const int w = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);  // opaque
    InverseScratch &scratch = smem.inverse[group];
    const uint32_t inverse_ready = ptx::shared_address(&smem.inverse_ready[group]);
    RingState<kTileStages> tile;
    RingState<kTableStages> factors;
    RingState<C::kProductStages> product;
    bool precise_before = false;  // was the group's last chunk one of correlated keys?
    bool others = group == 0;     // is the chunk the other group's?
    uint32_t parity = 0;          // parity of the group's count of chunks: buffer of the scratch, and phase of inverse_ready
    float d[32];
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        int chunks = item.chunks();
        for (; chunks > 0; chunks--, tile.advance(), factors.advance(), product.advance()) {
            if constexpr (C::kAuxGroups == 2) {
                others = !others;
                if (others) {  // no phase may go by unseen, or its parity would pass for that of the next but one
                    smem.tiles().wait_full(tile);
                    warp_arrive(smem.tiles().empty(tile.stage), lane);
                    continue;
                }
            }
            const uint32_t k = ptx::shared_address(smem.k[tile.stage]);
            const uint32_t t = ptx::shared_address(smem.table[factors.stage]), tw = t + 64 * w;
            const uint32_t M = ptx::shared_address(scratch.M[parity]), X = ptx::shared_address(scratch.X[parity]);
            const uint32_t row_sums = ptx::shared_address(scratch.weights[parity]);
            const uint32_t A = ptx::shared_address(smem.a[product.stage]);
            const uint32_t P = C::kOutputs ? ptx::shared_address(smem.p[product.stage]) : 0;
            smem.tiles().wait_full(tile);
            issue_product<C>(d, k, k);
            Diagonal diagonal;
            Weights weights;
            smem.tables().wait_full(factors);
            if constexpr (C::kAuxNormsQueries)
                query_norms_of_warp<C>(smem.query_norm[tile.stage], ptx::shared_address(smem.q[tile.stage]), w, lane);
            KeyNorms norms;
            if constexpr (C::kL2Norm) norms.read(tw, lane);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(d);
            if constexpr (C::kL2Norm) {
                for_warp(w, [&](auto warp) { norms.choose(d + 8 * decltype(warp)::value, lane); });
                norms.write(tw, lane);
                group_meets(smem, group);
            }
            for_warp_or_all<C>(w, [&](auto warp) { scale_kk<C, false>(d, diagonal, weights, tw, M, warp, lane); });
            const DiagonalDecays decays(tw, lane);
            if constexpr (C::kOutputs) {
                issue_product<C>(d, ptx::shared_address(smem.q[tile.stage]), k);
            }
            smem.products().wait_empty(product);
            if (precise_before) {  // second terms lie here until that chunk is done with
                RingState<C::kProductStages> before = product;
                for (int i = 0; i < C::kProductStages - C::kAuxGroups; i++) before.advance();
                smem.products().wait_empty(before);
            }
            float e[6];
            decays.get(e, lane);
            decay_diagonal(diagonal, e, lane);
            const uint32_t left = pack_f16(diagonal.left[0], diagonal.left[1]);
            store_weights(diagonal, weights, left, row_sums + 128 * w + 4 * Lane(lane).lane);
            invert_diagonal<C>(diagonal, left, X, A, w, lane);
            warp_arrive(inverse_ready, lane);
            if constexpr (C::kOutputs) {
                ptx::wgmma_wait_group<0>();
                ptx::register_fence(d);
            }
            ptx::mbarrier_wait_parity(inverse_ready, parity);
            const Substitution<C> substitution{tw,
                                               M + 16 * lane,
                                               X + 16 * lane,
                                               ptx::shared_address(scratch.X10[parity]) + 16 * lane,
                                               A,
                                               P,
                                               row_sums,
                                               kX10Barrier + group,
                                               {params.scale, params.scale},
                                               lane};
            int weight;
            for_warp_or_all<C>(w, [&](auto warp) { weight = substitution.run(d, e, warp); });
            const bool few = C::kOutputs && chunks == 1 && (item.length - 1) % kChunk < kFewTokens;
            precise_before = weight > kMostWhole<C> || few;
            int first = kChunk;
            if (precise_before) {
                RingState<C::kProductStages> second = product;
                for (int i = 0; i < C::kAuxGroups; i++) second.advance();
                smem.products().wait_empty(second);
                first = few ? 0 : first_precise<C>(row_sums, lane);
                // lane + 0 is a lane that the compiler does not know: nothing derived from it is kept so long
                precise_products<C>(params, smem, scratch, group, d, k, tw, product.stage, second.stage, parity, first, w,
                                    lane + (first >> 16));
            }
            ptx::fence_proxy_async_shared_cta();
            __syncwarp();
            if (kWarpArrivals == 32 || lane == 0) {
                if (w == 0 && lane == 0) ptx::st_shared_u32(t + 4 * table::kFirstPrecise, first);
                ptx::mbarrier_arrive(smem.tiles().empty(tile.stage));
                ptx::mbarrier_arrive(smem.products().full(product.stage));
                ptx::mbarrier_arrive(smem.tables().empty(factors.stage));
            }
            parity ^= 1;
        }
    }
}

}  // namespace linattn::cuda::gdn
