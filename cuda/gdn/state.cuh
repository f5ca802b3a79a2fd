// A state warpgroup of gdn_fwd_kernel: 64 columns of V, S^T (64 x K) in fp32 accumulators.
//
//   U = beta (V - Gamma K S);  V' = U + A^ U;  O = scale Gamma Q S + P V';  S = gamma_C S + K^T D V'
//
// transposed, so that every left operand is in registers: the accumulator of one product packs into the A fragment of the next.
// S, U and V' never cross shared memory. A^ is strictly lower: its unit diagonal is the U that the accumulator of A^ U starts
// from, in fp32, so that the largest part of V' is rounded once, as the operand of P V' and K^T V''.
// Groups in issue order, per chunk:
//   pack S -> [K S] -> [Q S]; S *= gamma_C; V fragments, times beta; wait 1; U -> [A^ U]; wait 1; O *= scale gamma; wait 0;
//   V' -> [P V']; V'' = rho V' -> [K^T V'']; wait 1; O, times 1/|q| under l2norm, to shared memory where V was; wait 0
// Every group starts and ends inside one iteration: one left pending over the back edge makes ptxas serialise all of them.
// Two warpgroups would set out together whenever AUX has finished a chunk, and then want the tensor cores at the same time and
// leave them idle at the same time. So they take turns: one issues K S once the other has issued P V'.
#pragma once
#include "items.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace linattn::cuda::gdn {

constexpr uint32_t kTurnBarrier = 5;  // named barriers: turn of state warpgroup 0, of 1

__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(__half, uint32_t x) { return __half22float2(*reinterpret_cast<__half2 *>(&x)); }

// The thread's elements of S^T: s[4j + 2r + i] is (v = row + 8r, k = 8j + column + i).
template <int kCount>
struct StatePlace {
    int64_t first, step_k, step_v;  // element offsets of (row, column), to the next k, to the next v
    __device__ __forceinline__ StatePlace(const Tensor &t, int64_t row, int head, int v, int k)
        : first(row * t.stride[0] + head * t.stride[1] + k * t.stride[2] + v * t.stride[3]),
          step_k(t.stride[2]),
          step_v(t.stride[3]) {}

    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int j = 0; j < kCount / 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int64_t at = first + (8 * j + i) * step_k;
                f(4 * j + i, at);
                f(4 * j + 2 + i, at + 8 * step_v);
            }
    }
};

template <int kCount>
__device__ __forceinline__ void load_state(float (&s)[kCount], const Tensor &t, int64_t row, int head, int v, int k) {
    const StatePlace<kCount> place(t, row, head, v, k);
    if (t.dtype == DType::F32) {
        const float *from = reinterpret_cast<const float *>(t.data);
        place.for_each([&](int i, int64_t at) { s[i] = from[at]; });
    } else {
        const __nv_bfloat16 *from = reinterpret_cast<const __nv_bfloat16 *>(t.data);
        place.for_each([&](int i, int64_t at) { s[i] = __bfloat162float(from[at]); });
    }
}

template <int kCount>
__device__ __forceinline__ void store_state(const float (&s)[kCount], const Tensor &t, int64_t row, int head, int v, int k) {
    const StatePlace<kCount> place(t, row, head, v, k);
    if (t.dtype == DType::F32) {
        float *to = reinterpret_cast<float *>(t.data);
        place.for_each([&](int i, int64_t at) { to[at] = s[i]; });
    } else {
        __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(t.data);
        place.for_each([&](int i, int64_t at) { to[at] = __float2bfloat16_rn(s[i]); });
    }
}

// The workspace's states as a tensor [slots][HV][K][V], V-first; which = 0: the state before the segment, or what the join adds
// M times the state before to make it; 1: M.
template <int D>
__device__ __forceinline__ Tensor segment_states(const KernelParams &params, int which) {
    Tensor t;
    t.data = reinterpret_cast<char *>(params.g_segments + which * (D * D));
    t.dtype = DType::F32;
    t.stride[0] = params.p.HV * (2 * D * D), t.stride[1] = 2 * D * D, t.stride[2] = 1, t.stride[3] = D;
    return t;
}

// Row of `checkpoints` for the i-th checkpoint of a sequence, -1 for none. By a converged warp.
__device__ __forceinline__ int64_t checkpoint_row(const DeltaParams &p, int sequence, int i) {
    const int every = static_cast<int>(p.checkpoint_every);
    int64_t row;
    if (p.checkpoint_indices) {
        if (i >= p.M) return -1;
        row = load_index(p.checkpoint_indices, sequence * p.checkpoint_indices.stride[0] + i * p.checkpoint_indices.stride[1]);
    } else if (!p.cu_seqlens) {
        row = sequence * (p.T / every) + i;
    } else {
        int before = 0;
        for (int m = threadIdx.x % 32; m < sequence; m += 32) {
            int bos, length;
            sequence_range(p, m, bos, length);
            before += length / every;
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
        row = int64_t{before} + i;
    }
    return row >= 0 && row < p.C ? row : -1;
}

// d (+)= a B for the fragments a of a 64 x 16 n matrix and B^T (K-major) or B (MN-major) in shared memory.
template <class T, ptx::Major kMajor, class Tile, int kSteps, int kCount>
__device__ __forceinline__ void issue(float (&d)[kCount], const uint32_t (&a)[kSteps][4], uint32_t low, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const uint32_t step = (kMajor == ptx::Major::K ? Tile::offset(0, 16 * s) : Tile::offset(16 * s, 0)) >> 4;
        const uint32_t high = kMajor == ptx::Major::K ? Tile::k_major_high() : Tile::mn_major_high();
        ptx::wgmma_rs<T, kMajor>(d, a[s], ptx::wgmma_descriptor(low + step, high), s > 0 || accumulate);
    }
    ptx::wgmma_commit_group();
}

template <class T, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&a)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[s][i] = ptx::cvt_rn_x2<T>(d[8 * s + 2 * i], d[8 * s + 2 * i + 1]);
}

template <int kSteps>
__device__ __forceinline__ void register_fence(uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) ptx::register_fence(a[s]);
}

// Chunks of an item from `first_chunk` on; S in and out.
template <class C>
struct StateLoop {
    using S = Smem<C>;
    using T = typename C::T;
    Smem<C> &smem;
    int group;  // which 64 columns of the CTA's
    RingState<kTileStages> tile;
    RingState<kValueStages> value;
    RingState<kTableStages> factors;
    RingState<kProductStages> product;

    __device__ __forceinline__ void chunk(float (&s)[C::D / 2], bool has_values) {
        const int lane = threadIdx.x % 32, w = threadIdx.x / 32 % 4, q8 = (lane & 3) * 8;
        const uint32_t k = ptx::shared_address(smem.k[tile.stage]);
        const uint32_t t = ptx::shared_address(smem.table[factors.stage]) + q8;
        // 16 tokens of the warp's 16 columns of V, and of O, which takes its place: matrices of an ldmatrix in the order of a
        // fragment of V^T, (tokens, columns) = (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
        const uint32_t v = ptx::shared_address(smem.v[value.stage]) + group * (kChunk * 128) +
                           ((lane & 7) + (lane & 16) / 2) * 128 + ((w * 2 + (lane & 8) / 8) ^ (lane & 7)) * 16;
        uint32_t fs[C::D / 16][4];
        float x[32], o[32];
        pack<T>(fs, s);
        smem.products().wait_full(product);  // AUX waited for K, Q and the table
        if constexpr (C::kStateGroups == 2) ptx::bar_sync(kTurnBarrier + group, 256);
        ptx::register_fence(x), register_fence(fs);
        issue<T, ptx::Major::K, typename S::Tile>(x, fs, S::Tile::k_major_low(k, 0, 0), false);
        if constexpr (C::kOutputs) {
            ptx::register_fence(o);
            issue<T, ptx::Major::K, typename S::Tile>(
                o, fs, S::Tile::k_major_low(ptx::shared_address(smem.q[tile.stage]), 0, 0), false);
        }
        // Here the multiplications fill the wait for K S; among the instructions that issue A^ U they would hold it up.
        const float chunk_decay = ptx::ld_shared_f32(t - q8 + 4 * table::kChunkDecay);
        if (chunk_decay != 1.0f) {
#pragma unroll
            for (int i = 0; i < C::D / 2; i++) s[i] *= chunk_decay;
        }
        smem.values().wait_full(value);
        uint32_t fv[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (C::kOutputs || has_values)
                ptx::ldmatrix_x4_trans(fv[i], v + i * 2048);
            else
                fv[i][0] = fv[i][1] = fv[i][2] = fv[i][3] = 0;
        }
        float bv[32];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 beta = ptx::ld_shared_v2_f32(t + 4 * table::kBeta + j * 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 value = unpack(T(), fv[j / 2][2 * (j % 2) + r]);
                bv[4 * j + 2 * r] = beta.x * value.x, bv[4 * j + 2 * r + 1] = beta.y * value.y;
            }
        }
        ptx::register_fence(bv);
        ptx::wgmma_wait_group<C::kOutputs ? 1 : 0>();
        ptx::register_fence(x);
        uint32_t fu[4][4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 gamma = ptx::ld_shared_v2_f32(t + 4 * table::kBetaGamma + j * 32);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                x[4 * j + 2 * r] = fmaf(-gamma.x, x[4 * j + 2 * r], bv[4 * j + 2 * r]);
                x[4 * j + 2 * r + 1] = fmaf(-gamma.y, x[4 * j + 2 * r + 1], bv[4 * j + 2 * r + 1]);
            }
        }
        pack<T>(fu, x);
        ptx::register_fence(x), register_fence(fu);
        issue<T, ptx::Major::K, typename S::Product>(
            x, fu, S::Product::k_major_low(ptx::shared_address(smem.a[product.stage]), 0, 0), true);
        if constexpr (C::kOutputs) {
            ptx::wgmma_wait_group<1>();
            ptx::register_fence(o);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float2 gamma = ptx::ld_shared_v2_f32(t + 4 * table::kScaledGamma + j * 32);
                o[4 * j] *= gamma.x, o[4 * j + 1] *= gamma.y, o[4 * j + 2] *= gamma.x, o[4 * j + 3] *= gamma.y;
            }
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        uint32_t fd[4][4];
        if constexpr (C::kOutputs) {
            uint32_t fw[4][4];
            pack<T>(fw, x);
            ptx::register_fence(o), register_fence(fw);
            issue<T, ptx::Major::K, typename S::Product>(
                o, fw, S::Product::k_major_low(ptx::shared_address(smem.p[product.stage]), 0, 0), true);
        }
        if constexpr (C::kStateGroups == 2) ptx::bar_arrive(kTurnBarrier + (group ^ 1), 256);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 rho = ptx::ld_shared_v2_f32(t + 4 * table::kRho + j * 32);
            fd[j / 2][2 * (j % 2)] = ptx::cvt_rn_x2<T>(x[4 * j] * rho.x, x[4 * j + 1] * rho.y);
            fd[j / 2][2 * (j % 2) + 1] = ptx::cvt_rn_x2<T>(x[4 * j + 2] * rho.x, x[4 * j + 3] * rho.y);
        }
        ptx::register_fence(s), register_fence(fd);
        issue<T, ptx::Major::MN, typename S::Tile>(s, fd, S::Tile::mn_major_low(k, 0, 0), true);
        if constexpr (C::kOutputs) {
            ptx::wgmma_wait_group<1>();
            ptx::register_fence(o);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(smem.products().empty(product.stage));
            if constexpr (C::kL2Norm) {
                ptx::mbarrier_wait_parity(ptx::shared_address(&smem.query_norm_ready[tile.stage]), tile.phase);
                const uint32_t norms = ptx::shared_address(smem.query_norm[tile.stage]) + q8;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float2 r = ptx::ld_shared_v2_f32(norms + j * 32);
                    o[4 * j] *= r.x, o[4 * j + 1] *= r.y, o[4 * j + 2] *= r.x, o[4 * j + 3] *= r.y;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t r[4];
#pragma unroll
                for (int j = 0; j < 4; j++) r[j] = ptx::cvt_rn_x2<T>(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]);
                ptx::stmatrix_x4_trans(v + i * 2048, r);
            }
            ptx::fence_proxy_async_shared_cta();
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem.output_ready[value.stage]));
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(s);
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(smem.tiles().empty(tile.stage));
            if constexpr (!C::kOutputs) {
                ptx::mbarrier_arrive(smem.products().empty(product.stage));
                ptx::mbarrier_arrive(smem.values().empty(value.stage));
            }
        }
        tile.advance(), value.advance(), factors.advance(), product.advance();
    }
};

template <class C>
__device__ __forceinline__ void state(const KernelParams &params, Smem<C> &smem, int group) {
    const DeltaParams &p = params.p;
    const int lane = threadIdx.x % 32;
    const int row = 64 * group + 16 * (threadIdx.x / 32 % 4) + lane / 4, k = 2 * (lane % 4);
    StateLoop<C> loop{smem, group, {}, {}, {}, {}};
    float s[C::D / 2];
    if (C::kStateGroups == 2 && group == 1) ptx::bar_arrive(kTurnBarrier, 256);
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        if (item.read_row < 0 || (!C::kOutputs && item.length == 0)) continue;
        const int v = row + (C::kOutputs ? item.piece * C::kColumns : 0);
        const bool transition_M = !C::kOutputs && item.piece == 1;
        if (C::kOutputs && !item.first) {
            load_state(s, segment_states<C::D>(params, 0), item.slot, item.head, v, k);
        } else if (C::kOutputs && p.state_in) {
            load_state(s, p.state_in, item.read_row, item.head, v, k);
        } else {
#pragma unroll
            for (int i = 0; i < C::D / 2; i++)
                s[i] = transition_M && v + 8 * (i / 2 % 2) == 8 * (i / 4) + k + i % 2 ? 1.0f : 0.0f;
        }
#pragma unroll 1
        for (int left = item.length; left > 0; left -= kChunk) {
            loop.chunk(s, !transition_M);
            if constexpr (C::kOutputs) {
                if (p.checkpoint_every && left >= kChunk) {
                    const int every = static_cast<int>(p.checkpoint_every);
                    int bos, length;
                    sequence_range(p, item.sequence, bos, length);
                    const int done = item.bos - bos + item.length - left + kChunk;
                    if (done % every == 0) {
                        const int64_t to = checkpoint_row(p, item.sequence, done / every - 1);
                        if (to >= 0) store_state(s, p.checkpoints, to, item.head, v, k);
                    }
                }
            }
        }
        if constexpr (C::kOutputs) {
            if (!item.last) {
                if (item.first) store_state(s, segment_states<C::D>(params, 0), item.slot, item.head, v, k);
                continue;
            }
            if (!p.state_out) continue;
            const int to = pool_row(p.write_indices, item.sequence, p.F);
            if (to >= 0) store_state(s, p.state_out, to, item.head, v, k);
        } else {
            // N is what the next segment starts from but for M S.
            store_state(s, segment_states<C::D>(params, item.piece), item.slot + (transition_M ? 0 : 1), item.head, v, k);
        }
    }
    if (C::kStateGroups == 2 && group == 0) ptx::bar_sync(kTurnBarrier, 256);  // the other's last hand-over
}

}  // namespace linattn::cuda::gdn
