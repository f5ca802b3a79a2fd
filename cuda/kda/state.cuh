// A state warpgroup of kda_fwd_scan_kernel: 64 columns of V, S^T (64 x 128) in fp32 accumulators.
//
//   X = V - |k|^-1 K~ S;  U = beta |k|^-1 X + T^ X;  O = scale |q|^-1 Q~ S + A U;  S = gamma S + K^T U
//
// transposed, so that every left operand is in registers: the accumulator of one product packs into the A fragment of the next.
// What the next chunk waits for, S, comes first; O is put together beside it. Groups in issue order, per chunk:
//   pack S -> [K~ S]; O of the chunk before to global memory, V fragments; wait 0; X -> [T^ X]; [Q~ S]; S *= gamma; wait 1;
//   U -> [K^ U], three products; [A U]; wait 0
// Every group starts and ends inside one iteration: one left pending over the back edge makes ptxas serialise all of them.
#pragma once
#include <cstddef>

#include "common/fragments.cuh"
#include "common/states.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scan_smem.cuh"

namespace linattn::cuda::kda {

// What packing x into `first` left.
template <class T, int kSteps>
__device__ __forceinline__ void second_terms(uint32_t (&second)[kSteps][4], const float (&x)[8 * kSteps],
                                             const uint32_t (&first)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; i++) {
        const float2 h = unpack(T(), first[i / 4][i % 4]);
        second[i / 4][i % 4] = ptx::cvt_rn_x2<T>(x[2 * i] - h.x, x[2 * i + 1] - h.y);
    }
}

// kOutputs: O is computed; else only S, for the transition of a segment.
template <class T, int kGroups, bool kOutputs>
struct StateLoop {
    ScanSmem<kGroups> &smem;
    int group;  // which 64 columns of the CTA's
    RingState<kStages> stage;

    // O of the chunk before, not stored yet: that happens while the next chunk's first product runs.
    // In 16 bits: ptxas waits for all products before it touches what one of them defined in the iteration before.
    uint32_t packed[2][4];
    int pending = -1;  // its first token; -1: none

    // The chunk of `item` from token `at` on.
    __device__ __forceinline__ void chunk(float (&s)[64], const KernelParams &params, const Item &item, int at) {
        uint32_t fs[8][4];
        pack<T>(fs, s);
        smem.ring().wait_full(stage);
        const int first = smem.operands[stage.stage].factors.first_precise;
        if (__any_sync(~0u, first < kChunk))
            run<true>(s, fs, params.p, item, at, first);
        else
            run<false>(s, fs, params.p, item, at, kChunk);
        if constexpr (kOutputs) pending = at;
        give_back(stage);
        stage.advance();
    }

    __device__ __forceinline__ void flush(const DeltaParams &p, const Item &item) {
        if (pending < 0) return;
        store(p, item);
        pending = -1;
    }

    // kPrecise: tokens from `first` on take the second terms too. Those before it get the same bits either way, so that they do
    // not depend on later tokens.
    template <bool kPrecise>
    __device__ __forceinline__ void run(float (&s)[64], uint32_t (&fs)[8][4], const DeltaParams &p, const Item &item, int at,
                                        int first) {
        const int lane = opaque_lane(), pair = 2 * (lane & 3);
        const Operands &from = smem.operands[stage.stage];
        const uint32_t k_start = ptx::shared_address(from.k_start);
        constexpr uint32_t kQStart = offsetof(Operands, q_start), kKEnd = offsetof(Operands, k_end);
        const uint32_t factors = ptx::shared_address(from.factors.norm_k) + 4 * pair;
        float x[16], o[16], y[16], z[16];
        ptx::register_fence(x), register_fence(fs);
        issue<T, ptx::Major::K, Tile>(x, fs, Tile::k_major_low(k_start, 0, 0), false);
        if constexpr (kOutputs) flush(p, item);
        uint32_t fv[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) ptx::ldmatrix_x4_trans(fv[i], values(stage.stage, lane) + i * 2048);
        if constexpr (!kOutputs) {
            if (item.from_identity) {
#pragma unroll
                for (int i = 0; i < 8; i++) fv[i / 4][i % 4] = 0;
            }
        }
        if (item.length - at < kChunk) {  // rows past the end are another sequence's
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int left = item.length - at - (8 * (j / 2) + pair);
                uint32_t &f = fv[j / 4][j % 4];
                f = left >= 2 ? f : left == 1 ? f & 0xffffu : 0;
            }
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        uint32_t fx[2][4], low[2][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 norm = ptx::ld_shared_v2_f32(factors + 32 * j);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 v = unpack(T(), fv[j / 2][2 * (j % 2) + r]);
                float &x0 = x[4 * j + 2 * r], &x1 = x[4 * j + 2 * r + 1];
                x0 = fmaf(-norm.x, x0, v.x), x1 = fmaf(-norm.y, x1, v.y);
            }
        }
        pack<T>(fx, x);
        if constexpr (kPrecise) second_terms<T>(low, x, fx);
        scale_columns(x, factors + offsetof(Factors, beta_norm) - offsetof(Factors, norm_k));
        const uint32_t t = Square::k_major_low(ptx::shared_address(from.t), 0, 0);
        ptx::register_fence(x), register_fence(fx);
        issue<T, ptx::Major::K, Square>(x, fx, t, true);
        if constexpr (kPrecise) add_second_terms(z, fx, low, t);
        if constexpr (kOutputs) {
            ptx::register_fence(o), register_fence(fs);
            issue<T, ptx::Major::K, Tile>(o, fs, Tile::k_major_low(k_start + kQStart, 0, 0), false);
        }
        const uint32_t gamma = ptx::shared_address(from.factors.gamma) + 4 * pair;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 f = ptx::ld_shared_v2_f32(gamma + 32 * j);
            s[4 * j] *= f.x, s[4 * j + 1] *= f.y, s[4 * j + 2] *= f.x, s[4 * j + 3] *= f.y;
        }
        ptx::wgmma_wait_group<kOutputs ? 1 : 0>();
        ptx::register_fence(x);
        if constexpr (kPrecise) select(x, z, first, pair);
        pack<T>(fx, x);  // U
        second_terms<T>(low, x, fx);
        const uint32_t a = Square::k_major_low(ptx::shared_address(from.a), 0, 0);
        const uint32_t k_end = Tile::mn_major_low(k_start + kKEnd, 0, 0);
        ptx::register_fence(s), register_fence(fx), register_fence(low);
        issue<T, ptx::Major::MN, Tile>(s, fx, k_end, true);
        issue<T, ptx::Major::MN, Tile>(s, low, k_end, true);
        issue<T, ptx::Major::MN, Tile>(s, fx, k_end + (Tile::kBytes >> 4), true);
        if constexpr (!kOutputs) {
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(s);
            return;
        }
        ptx::register_fence(y);
        issue<T, ptx::Major::K, Square>(y, fx, a, false);
        if constexpr (kPrecise) add_second_terms(z, fx, low, a);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(s), ptx::register_fence(o), ptx::register_fence(y);
        if constexpr (kPrecise) select(y, z, first, pair);
        const uint32_t scale = factors + offsetof(Factors, scale_q) - offsetof(Factors, norm_k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = ptx::ld_shared_v2_f32(scale + 32 * j);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i++) y[i] = fmaf(i % 2 == 0 ? f.x : f.y, o[i], y[i]);
        }
        pack<T>(packed, y);
    }

    // Lane address of 16 tokens of the warp's 16 columns of V: matrices of an ldmatrix in the
    // order of a fragment of V^T, (tokens, columns) = (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    __device__ __forceinline__ uint32_t values(int at, int lane) const {
        const int w = threadIdx.x / 32 % 4;
        return panel(at) + ((lane & 7) + (lane & 16) / 2) * 128 + ((w * 2 + (lane & 8) / 8) ^ (lane & 7)) * 16;
    }
    __device__ __forceinline__ uint32_t panel(int at) const {
        return ptx::shared_address(smem.v[at]) + group * Tile::kPanelStrideBytes;
    }

    // Accumulators times a factor for each token.
    static __device__ __forceinline__ void scale_columns(float (&x)[16], uint32_t factors) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = ptx::ld_shared_v2_f32(factors + 32 * j);
            x[4 * j] *= f.x, x[4 * j + 1] *= f.y, x[4 * j + 2] *= f.x, x[4 * j + 3] *= f.y;
        }
    }

    // z = (first + second term of x) (first + second term of a matrix), without the product of the first ones.
    static __device__ __forceinline__ void add_second_terms(float (&z)[16], uint32_t (&high)[2][4], uint32_t (&low)[2][4],
                                                            uint32_t matrix) {
        ptx::register_fence(z), register_fence(low);
        issue<T, ptx::Major::K, Square>(z, low, matrix, false);
        issue<T, ptx::Major::K, Square>(z, high, matrix + (Square::kBytes >> 4), true);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(z);
    }

    static __device__ __forceinline__ void select(float (&x)[16], const float (&z)[16], int first, int pair) {
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] += 8 * (i / 4) + pair + i % 2 >= first ? z[i] : 0.0f;
    }

    // O through the warp's own shared memory to global memory: two lanes a row, whole sectors of 32 bytes. Nothing of it is V's
    // place: the fence that the next copy to there would need waits for the stores to global memory as well.
    __device__ __forceinline__ void store(const DeltaParams &p, const Item &item) {
        const int lane = opaque_lane(), w = threadIdx.x / 32 % 4;
        const uint32_t own = ptx::shared_address(smem.o[4 * group + w]);
        const auto unit_at = [&](int row, int unit) { return own + row * 32 + ((unit ^ (row >> 2 & 1)) << 4); };
        const uint32_t to = unit_at((lane & 7) + (lane & 16) / 2, (lane & 8) / 8);
#pragma unroll
        for (int i = 0; i < 2; i++) ptx::stmatrix_x4_trans(to + i * 512, packed[i]);
        const int64_t stride = p.o.stride[1];
        uint16_t *g_o = reinterpret_cast<uint16_t *>(p.o.data) + item.batch * p.o.stride[0] + (item.bos + pending) * stride +
                        item.head * p.o.stride[2] + 64 * (kGroups * item.piece + group) + 16 * w;
        const int rows = item.length - pending;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * i + lane / 2, unit = lane % 2;
            const uint4 v = ptx::ld_shared_v4_u32(unit_at(row, unit));
            if (row < rows) *reinterpret_cast<uint4 *>(g_o + row * stride + 8 * unit) = v;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void give_back(const RingState<kStages> &used) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.ring().empty(used.stage));
    }
};

// Rows 0 .. rows - 1 of o from `token` on, all 128 columns, are zero; by all threads of the state warpgroups.
__device__ __forceinline__ void clear_output(const DeltaParams &p, int batch, int head, int token, int rows, int threads) {
    const int thread = threadIdx.x % threads;
    uint16_t *g_o = reinterpret_cast<uint16_t *>(p.o.data) + batch * p.o.stride[0] + head * p.o.stride[2] + 8 * (thread % 16);
    for (int row = thread / 16; row < rows; row += threads / 16)
        *reinterpret_cast<uint4 *>(g_o + (token + row) * p.o.stride[1]) = make_uint4(0, 0, 0, 0);
}

// States of the workspace as a tensor [..][HV][K][V], V-first.
__device__ __forceinline__ Tensor workspace_states(const KernelParams &params, float *g_first, int64_t each) {
    Tensor t;
    t.data = reinterpret_cast<char *>(g_first);
    t.dtype = DType::F32;
    t.stride[0] = params.p.HV * each, t.stride[1] = each, t.stride[2] = 1, t.stride[3] = kD;
    return t;
}
// The states between slabs, by sequence.
__device__ __forceinline__ Tensor carried(const KernelParams &params) {
    return workspace_states(params, params.g_carry, kD * kD);
}
// By place in the workspace, which = 0: the states before the segments, 1: their M.
__device__ __forceinline__ Tensor segment_states(const KernelParams &params, int which) {
    return workspace_states(params, params.g_segments + which * (kD * kD), 2 * kD * kD);
}

// The state that an item begins with: v, k as in load_state.
__device__ __forceinline__ void begin(float (&s)[64], const KernelParams &params, const Item &item, const ItemRange &range,
                                      bool outputs, int v, int k) {
    if (item.segment > 0 && outputs) {
        load_state(s, segment_states(params, 0), item.slot + item.segment - 1, item.head, v, k);
    } else if (item.segment == 0 && range.continues) {
        load_state(s, carried(params), item.sequence, item.head, v, k);
    } else if (item.segment == 0 && params.p.state_in) {
        load_state(s, params.p.state_in, item.read_row, item.head, v, k);
    } else {
#pragma unroll
        for (int i = 0; i < 64; i++)
            s[i] = !outputs && item.from_identity && v + i / 2 % 2 * 8 == k + i / 4 * 8 + i % 2 ? 1.0f : 0.0f;
    }
}

template <class T, int kGroups, bool kOutputs>
__device__ __forceinline__ void state(const KernelParams &params, ScanSmem<kGroups> &smem, int group) {
    const DeltaParams &p = params.p;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    StateLoop<T, kGroups, kOutputs> loop{smem, group, {}, {}, -1};
    float s[64];
    if (kOutputs && params.cut != 0) ptx::griddepcontrol_wait();  // the joined states
    for (uint32_t round = 0;; round++) {
        Item &item = smem.item[4 * group + warp];  // its numbers are not kept in registers
        __syncwarp();
        item = smem.plan.find(params, kD / 64 / kGroups, kOutputs, round);
        __syncwarp();
        if (!item.exists) break;
        if (item.read_row < 0) {
            if (kOutputs && params.first_chunk == 0 && item.piece == 0)
                clear_output(p, item.batch, item.head, item.bos, item.cleared, 128 * kGroups);
            continue;
        }
        const ItemRange range(params, item);
        // Empty sequences hand their states on in the first slab.
        if (range.first >= range.end && !(item.length == 0 && params.first_chunk == 0)) continue;
        const int v = 64 * (kGroups * item.piece + group) + 16 * warp + lane / 4, k = 2 * (lane % 4);
        begin(s, params, item, range, kOutputs, v, k);
        for (int c = range.first; c < range.end; c++) {
            const int at = c * kChunk, every = static_cast<int>(p.checkpoint_every);
            loop.chunk(s, params, item, at);
            if (kOutputs && every && at + kChunk <= item.length && (at + kChunk) % every == 0) {
                const int64_t to = checkpoint_row(p, item.sequence, (at + kChunk) / every - 1);
                if (to >= 0) store_state(s, p.checkpoints, to, item.head, v, k);
            }
        }
        if constexpr (!kOutputs) {  // N goes where the state after it will be
            const bool m = item.from_identity;
            store_state(s, segment_states(params, m), item.slot + item.segment - m, item.head, v, k);
        } else {
            loop.flush(p, item);
            if (!range.last) continue;
            if (range.end < chunks_of(item.length)) {
                store_state(s, carried(params), item.sequence, item.head, v, k);
            } else if (p.state_out) {
                const int to = pool_row(p.write_indices, item.sequence, p.F);
                if (to >= 0) store_state(s, p.state_out, to, item.head, v, k);
            }
        }
    }
    if (!kOutputs || !p.zero_tail || !p.cu_seqlens || params.first_chunk != 0) return;
    const int end = sequence_start(p, static_cast<int>(p.N));
    for (int head = blockIdx.x; head < static_cast<int>(p.HV); head += gridDim.x)
        clear_output(p, 0, head, end, static_cast<int>(p.T) - end, 128 * kGroups);
}

}  // namespace linattn::cuda::kda
