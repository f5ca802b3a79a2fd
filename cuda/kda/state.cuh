// A state warpgroup of kda_fwd_scan_kernel: 64 columns of V, S^T (64 x D) in fp32.
//
//   X = beta_v V - beta_k K~ S;  U = X + T^ X;  O = scale_q (Q~ S + A U);  S = gamma S + K^^T U
//
// transposed, so that every left operand is in registers: the accumulator of one product packs into the A fragment of the next.
// U, K^ and A are fp16: 8 bits of U and K^ would leave 3e-3 in states that decay slowly. A power of 2 for each column of V keeps
// the chunk's largest X between 1 and 32, and with it U in fp16's range: S, X, U and O all have that power in them, so that S
// grows and O is summed in the accumulators of the products. It changes only when X leaves that range.
// K~ and Q~ are one operand. Groups in issue order, per chunk:
//   pack S -> [K~ S, Q~ S]; S *= gamma, V and factors, O of the chunk before; wait 0; X -> [T^ X]; range of X, O to global memory;
//   wait 0; U -> [O += A U], [S += K^ U]; wait 1; O to shared memory; wait 0
// Every group starts and ends inside one iteration: one left pending over the back edge makes ptxas serialise all of them.
#pragma once
#include <cstddef>

#include "common/fragments.cuh"
#include "common/states.cuh"
#include "ptx/cta.cuh"
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
template <class T, int D, int kGroups, bool kOutputs>
struct StateLoop {
    const DeltaParams &p;
    ScanSmem<D, kGroups> &smem;
    static constexpr int kStart = kOutputs ? 32 : 16;    // K~ S, and Q~ S from 16 on
    static constexpr bool kWideRange = ptx::kIsBf16<T>;  // fp16 has no room for the power: X and S as operands are without it
    RingState<kStages<D>> stage;

    // Of the lane's two columns of V: the power of 2 in S, and its inverse.
    float up[2], down[2];
    // O of the chunk before lies in shared memory: it is stored while the next chunk's products run.
    int pending = 0;                // its tokens up to the end of the sequence; 0: none
    char *g_o;                      // the lane's place for it
    uint32_t lane_values, lane_to;  // the lane's places in V and, to write, in `o`

    __device__ __forceinline__ StateLoop(const DeltaParams &params, ScanSmem<D, kGroups> &from) : p(params), smem(from) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // V: 16 tokens of the warp's 16 columns, matrices of an ldmatrix in the order of a fragment of V^T, (tokens, columns) =
        // (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15). O the same way.
        const int row = (lane & 7) + (lane & 16) / 2, unit = (lane & 8) / 8;
        lane_values = ptx::shared_address(smem.v[0]) + warp / 4 * Tile<D>::kPanelStrideBytes + row * 128 +
                      ((warp % 4 * 2 + unit) ^ (lane & 7)) * 16;
        lane_to = unit_of(warp, row, unit);
    }

    __device__ __forceinline__ uint32_t unit_of(int warp, int row, int unit) const {
        return ptx::shared_address(smem.o[warp]) + row * 32 + ((unit ^ (row >> 2 & 1)) << 4);
    }

    // Of an item: what its columns' powers are, 4 or those of the slab before. S gets them, or has them taken out.
    __device__ __forceinline__ void enter(float first, float second) {
        up[0] = first, up[1] = second;
#pragma unroll
        for (int r = 0; r < 2; r++) down[r] = __uint_as_float((254u << 23) - __float_as_uint(up[r]));
    }
    static __device__ __forceinline__ void multiply(float (&s)[D / 2], const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) s[i] *= by[i / 2 % 2];
    }

    // A chunk between its two halves, behind K~ S. That is where a loop over chunks has its back edge: ptxas waits for all products
    // before it touches what one of them defined in the iteration before.
    struct Chunk {
        float x[16], y[16];  // X, Q~ S
        uint4 o[2];          // O of the chunk before
        int left;            // tokens from the first one to the end of the sequence
        int first;           // token that takes second terms; kChunk: none
    };

    // What has to be waited for is asked for early: V and factors before O of the chunk before comes from shared memory.
    // kFirst: of an item, whose S ptxas takes for a product's.
    template <bool kFirst>
    __device__ __forceinline__ void open(Chunk &c, float (&s)[D / 2], const Item &item, int left) {
        uint32_t fs[D / 16][4];
        float start_s[kStart];
        if constexpr (kWideRange) {
            pack<T>(fs, s);
        } else {
#pragma unroll
            for (int i = 0; i < D / 4; i++)
                fs[i / 4][i % 4] = ptx::cvt_rn_x2<T>(s[2 * i] * down[i % 2], s[2 * i + 1] * down[i % 2]);
        }
        smem.ring().wait_full(stage);
        const Operands<D> &from = smem.operands[stage.stage];
        ptx::register_fence(start_s), register_fence(fs);
        issue<T, ptx::Major::K, Pair<D>>(start_s, fs, Pair<D>::k_major_low(ptx::shared_address(from.start), 0, 0), false);
        c.left = left, c.first = from.factors.first_precise;
        uint32_t fv[2][4];
        load_values(fv, item, left);
        const uint32_t factors = ptx::shared_address(&from.factors) + 16 * (threadIdx.x % 4);
        float4 beta[4];
#pragma unroll
        for (int j = 0; j < 4; j++) beta[j] = ptx::ld_shared_v4_f32(factors + offsetof(Factors<D>, beta) + 64 * j);
        if constexpr (kOutputs) gather(c.o);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 v = unpack(T(), fv[j / 2][2 * (j % 2) + r]);
                const int i = 4 * j + 2 * r;
                const float by = kWideRange ? up[r] : 1.0f;
                c.x[i] = beta[j].x * by * v.x, c.x[i + 1] = beta[j].y * by * v.y;
            }
        const auto decay = [&] {
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                const float4 f = ptx::ld_shared_v4_f32(factors + offsetof(Factors<D>, gamma) + 64 * j);
                float *to = &s[8 * j];
                to[0] *= f.x, to[1] *= f.y, to[2] *= f.x, to[3] *= f.y, to[4] *= f.z, to[5] *= f.w, to[6] *= f.z, to[7] *= f.w;
            }
        };
        if constexpr (!kFirst) decay();
        ptx::wgmma_wait_group<0>();
        if constexpr (kFirst) decay();
        ptx::register_fence(start_s);
#pragma unroll
        for (int i = 0; i < kStart; i++) {
            if (i < 16)
                c.x[i] = fmaf(i % 2 == 0 ? -beta[i / 4].z : -beta[i / 4].w, start_s[i], c.x[i]);
            else
                c.y[i - 16] = start_s[i];
        }
    }

    __device__ __forceinline__ void close(Chunk &c, float (&s)[D / 2]) {
        if (__any_sync(~0u, c.first < kChunk))
            close<true>(c, s, c.first);
        else
            close<false>(c, s, kChunk);
        if constexpr (kOutputs) pending = c.left;
        give_back(stage);
        stage.advance();
    }

    __device__ __forceinline__ void flush() {
        uint4 o[2];
        gather(o);
        store(o);
        pending = 0;
    }

    // kPrecise: tokens from `first` on take the second terms too. Those before it get the same bits either way, so that they do
    // not depend on later tokens.
    template <bool kPrecise>
    __device__ __forceinline__ void close(Chunk &c, float (&s)[D / 2], int first) {
        const int pair = 2 * (threadIdx.x % 4);
        const Operands<D> &from = smem.operands[stage.stage];
        const uint32_t factors = ptx::shared_address(&from.factors) + 16 * (threadIdx.x % 4);
        if constexpr (kOutputs && kPrecise) store(c.o);
        float (&x)[16] = c.x, (&y)[16] = c.y, z[16];  // x: X, then U; y: Q~ S, then O
        uint32_t fx[2][4], fu[2][4], low[2][4];
        pack<T>(fx, x);
        if constexpr (kPrecise) second_terms<T>(low, x, fx);
        const uint32_t t = Square::k_major_low(ptx::shared_address(from.t), 0, 0);
        constexpr uint32_t kLow = (offsetof(Operands<D>, t_low) - offsetof(Operands<D>, t)) >> 4;
        ptx::register_fence(x), register_fence(fx);
        issue<T, ptx::Major::K, Square>(x, fx, t, true);
        if constexpr (kPrecise) add_second_terms<T>(z, fx, low, t, t + kLow);
        float by[2];
        const bool far = range(by, fx);
        if constexpr (kOutputs && !kPrecise) store(c.o);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(x);
        if constexpr (kPrecise) select(x, z, first, pair);
        if (far) multiply(s, by);
        if (far || !kWideRange) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float to = kWideRange ? by[i / 2 % 2] : up[i / 2 % 2];
                x[i] *= to;
                if constexpr (kOutputs) y[i] *= to;
            }
        }
        pack<__half>(fu, x);
        const uint32_t a = Square::k_major_low(ptx::shared_address(from.a), 0, 0);
        const uint32_t k_end = Tile<D>::mn_major_low(ptx::shared_address(from.k_end), 0, 0);
        if constexpr (kOutputs) {  // the small product first: O leaves while the large one runs
            ptx::register_fence(y), register_fence(fu);
            issue<__half, ptx::Major::K, Square>(y, fu, a, true);
        }
        ptx::register_fence(s), register_fence(fu);
        issue<__half, ptx::Major::MN, Tile<D>>(s, fu, k_end, true);
        if constexpr (kPrecise) {
            constexpr uint32_t kEndLow = (offsetof(Operands<D>, k_end_low) - offsetof(Operands<D>, k_end)) >> 4;
            second_terms<__half>(low, x, fu);
            register_fence(low);
            issue<__half, ptx::Major::MN, Tile<D>>(s, low, k_end, true);
            issue<__half, ptx::Major::MN, Tile<D>>(s, fu, k_end + kEndLow, true);
        }
        if constexpr (kOutputs) {
            float scale[8];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 of =
                    ptx::ld_shared_v2_f32(factors - 8 * (threadIdx.x % 4) + offsetof(Factors<D>, scale_q) + 32 * j);
                scale[2 * j] = of.x, scale[2 * j + 1] = of.y;
            }
            if constexpr (kPrecise)
                add_second_terms<__half>(z, fu, low, a, a + kLow);
            else
                ptx::wgmma_wait_group<1>();
            ptx::register_fence(y);
            if constexpr (kPrecise) select(y, z, first, pair);
#pragma unroll
            for (int i = 0; i < 16; i++) y[i] *= scale[i / 4 * 2 + i % 2] * down[i / 2 % 2];
            put(y);  // to shared memory, or ptxas would do all of it behind the next wait
        }
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(s);
    }

    // V^T of the chunk, as fragments; 0 past the end of the sequence, where another one's rows are, and for a segment's M.
    __device__ __forceinline__ void load_values(uint32_t (&fv)[2][4], const Item &item, int left) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            ptx::ldmatrix_x4_trans(fv[i], lane_values + stage.stage * static_cast<uint32_t>(sizeof(smem.v[0])) + i * 2048);
        if (!kOutputs && item.from_identity) {
#pragma unroll
            for (int i = 0; i < 8; i++) fv[i / 4][i % 4] = 0;
        }
        if (left < kChunk) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int there = left - (8 * (j / 2) + 2 * static_cast<int>(threadIdx.x % 4));
                uint32_t &f = fv[j / 4][j % 4];
                f = there >= 2 ? f : there == 1 ? f & 0xffffu : 0;
            }
        }
    }

    // Where the largest X of one of the warp's columns is not in 1 .. 32: the columns' powers are changed, by `by` for each of the
    // lane's two, to what brings it to 4 .. 8. U, which may be larger than X by what T^ makes of it, has 2^11 left.
    __device__ __forceinline__ bool range(float (&by)[2], const uint32_t (&fx)[2][4]) {
        uint32_t most[2];
#pragma unroll
        for (int r = 0; r < 2; r++)  // the order of magnitudes is that of their bits
            most[r] = __vmaxu2(__vmaxu2(fx[0][r] & 0x7fff7fffu, fx[0][2 + r] & 0x7fff7fffu),
                               __vmaxu2(fx[1][r] & 0x7fff7fffu, fx[1][2 + r] & 0x7fff7fffu));
        // Both columns in one register: first in the lower half.
        uint32_t both = __vmaxu2(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
        for (int step = 1; step < 4; step *= 2) both = __vmaxu2(both, __shfl_xor_sync(~0u, both, step));
        float largest[2];
        bool far[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = unpack(T(), r == 0 ? both & 0xffffu : both >> 16).x * (kWideRange ? 1.0f : up[r]);
            far[r] = (largest[r] < 1.0f && largest[r] > 0.0f) || !(largest[r] < 32.0f);
        }
        if (!__any_sync(~0u, far[0] || far[1])) return false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int exponent = static_cast<int>(__float_as_uint(largest[r]) >> 23), now = __float_as_uint(up[r]) >> 23;
            int next = far[r] ? now + 129 - exponent : now;
            next = next < 127 - 60 ? 127 - 60 : next > 127 + 60 ? 127 + 60 : next;
            by[r] = __uint_as_float((127 + next - now) << 23);
            up[r] = __uint_as_float(next << 23), down[r] = __uint_as_float((254 - next) << 23);
        }
        return true;
    }

    // z = (first + second term of x) (first + second term of a matrix), without the product of the first ones.
    template <class E>
    static __device__ __forceinline__ void add_second_terms(float (&z)[16], uint32_t (&high)[2][4], uint32_t (&low)[2][4],
                                                            uint32_t matrix, uint32_t matrix_low) {
        ptx::register_fence(z), register_fence(low);
        issue<E, ptx::Major::K, Square>(z, low, matrix, false);
        issue<E, ptx::Major::K, Square>(z, high, matrix_low, true);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(z);
    }

    static __device__ __forceinline__ void select(float (&x)[16], const float (&z)[16], int first, int pair) {
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] += 8 * (i / 4) + pair + i % 2 >= first ? z[i] : 0.0f;
    }

    // Where O of an item goes, from chunk `first` on.
    __device__ __forceinline__ void outputs_to(const Item &item, int first) {
        const int lane = threadIdx.x % 32;
        const int64_t at = item.batch * p.o.stride[0] + int64_t{item.bos + first * kChunk + lane / 2} * p.o.stride[1] +
                           item.head * p.o.stride[2] + 64 * kGroups * item.piece + threadIdx.x / 32 * 16 + lane % 2 * 8;
        g_o = p.o.data + 2 * at;
    }

    // O through the warp's own shared memory to global memory: two lanes a row, whole sectors of 32 bytes. Nothing of it is V's
    // place: the fence that the next copy to there would need waits for the stores to global memory as well.
    __device__ __forceinline__ void put(const float (&o)[16]) const {
        uint32_t packed[2][4];
        pack<T>(packed, o);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) ptx::stmatrix_x4_trans(lane_to + i * 512, packed[i]);
    }
    __device__ __forceinline__ void gather(uint4 (&o)[2]) const {
        __syncwarp();
        const int lane = opaque_lane();
        const uint32_t lane_from = unit_of(threadIdx.x / 32, lane / 2, lane % 2);
#pragma unroll
        for (int i = 0; i < 2; i++) o[i] = ptx::ld_shared_v4_u32(lane_from + i * 512);
    }
    __device__ __forceinline__ void store(const uint4 (&o)[2]) {
        if (pending == 0) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (16 * i + static_cast<int>(threadIdx.x % 32) / 2 < pending) *reinterpret_cast<uint4 *>(g_o) = o[i];
            g_o += 32 * p.o.stride[1];
        }
    }

    __device__ __forceinline__ void give_back(const RingState<kStages<D>> &used) {
        warp_arrive(smem.ring().empty(used.stage), threadIdx.x % 32);
    }
};

// Rows 0 .. rows - 1 of o from `token` on, all columns, are zero; by all threads of the state warpgroups.
template <int D>
__device__ __forceinline__ void clear_output(const DeltaParams &p, int batch, int head, int token, int rows, int threads) {
    constexpr int kUnits = D / 8;
    const int thread = threadIdx.x % threads;
    uint16_t *g_o =
        reinterpret_cast<uint16_t *>(p.o.data) + batch * p.o.stride[0] + head * p.o.stride[2] + 8 * (thread % kUnits);
    for (int row = thread / kUnits; row < rows; row += threads / kUnits)
        *reinterpret_cast<uint4 *>(g_o + (token + row) * p.o.stride[1]) = make_uint4(0, 0, 0, 0);
}

// A lane's part of a state in the workspace, fp32 and V-first, from its first element on: s[4j + 2r + i] is (v + 8r, k + 8j + i).
template <int D>
__device__ __forceinline__ void load_workspace(float (&s)[D / 2], const float *g_from) {
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const float2 x = *reinterpret_cast<const float2 *>(g_from + i / 4 * 8 + i / 2 % 2 * 8 * D);
        s[i] = x.x, s[i + 1] = x.y;
    }
}
template <int D>
__device__ __forceinline__ void store_workspace(const float (&s)[D / 2], float *g_to) {
#pragma unroll
    for (int i = 0; i < D / 2; i += 2)
        *reinterpret_cast<float2 *>(g_to + i / 4 * 8 + i / 2 % 2 * 8 * D) = make_float2(s[i], s[i + 1]);
}
// M goes K-first.
template <int D>
__device__ __forceinline__ void store_transition(const float (&s)[D / 2], float *g_to) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) g_to[(i / 4 * 8 + i % 2) * kTransitionPitch<D> + i / 2 % 2 * 8] = s[i];
}

// Of element (v, k): the states between slabs, by sequence, with the powers of 2 of their columns of V, which follow all of them;
// by place in the workspace the states before the segments; M.
template <int D>
__device__ __forceinline__ float *carried_power(const KernelParams &params, const Item &item, int v) {
    const int64_t pairs = params.p.N * params.p.HV, pair = int64_t{item.sequence} * params.p.HV + item.head;
    return params.g_carry + pairs * (D * D) + pair * D + v;
}
template <int D>
__device__ __forceinline__ float *carried(const KernelParams &params, const Item &item, int v, int k) {
    return params.g_carry + (int64_t{item.sequence} * params.p.HV + item.head) * (D * D) + v * D + k;
}
template <int D>
__device__ __forceinline__ float *slot(const KernelParams &params, int number, int head) {
    return params.g_segments + (int64_t{number} * params.p.HV + head) * kSlotFloats<D>;
}
template <int D>
__device__ __forceinline__ float *segment_state(const KernelParams &params, int number, int head, int v, int k) {
    return slot<D>(params, number, head) + v * D + k;
}
template <int D>
__device__ __forceinline__ float *transition(const KernelParams &params, int number, int head, int v, int k) {
    return slot<D>(params, number, head) + D * D + k * kTransitionPitch<D> + v;
}

// The state that an item begins with: v, k as in load_state.
template <int D>
__device__ __forceinline__ void begin(float (&s)[D / 2], const KernelParams &params, const Item &item, const ItemRange &range,
                                      Pass pass, bool outputs, int v, int k) {
    if (pass == Pass::Later) {
        load_workspace<D>(s, segment_state<D>(params, item.slot + item.segment - 1, item.head, v, k));
    } else if (item.segment == 0 && range.continues) {
        load_workspace<D>(s, carried<D>(params, item, v, k));
    } else if (item.segment == 0 && params.p.state_in) {
        load_state(s, params.p.state_in, item.read_row, item.head, v, k);
    } else {
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            s[i] = !outputs && item.from_identity && v + i / 2 % 2 * 8 == k + i / 4 * 8 + i % 2 ? 1.0f : 0.0f;
    }
}

template <class T, int D, int kGroups, bool kOutputs>
__device__ __forceinline__ void state(const KernelParams &params, ScanSmem<D, kGroups> &smem, Pass pass, int group) {
    const DeltaParams &p = params.p;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    using Loop = StateLoop<T, D, kGroups, kOutputs>;
    Loop loop(p, smem);
    float s[D / 2];
    for (uint32_t round = 0;; round++) {
        Item &item = smem.item[4 * group + warp];  // its numbers are not kept in registers
        if (!smem.next(item, params, pass, round)) break;
        if (pass == Pass::Later) ptx::griddepcontrol_wait();  // the joined states
        if (item.read_row < 0) {
            if (kOutputs && params.first_chunk == 0 && item.piece == 0)
                clear_output<D>(p, item.batch, item.head, item.bos, item.cleared, 128 * kGroups);
            continue;
        }
        const ItemRange range(params, item);
        // Empty sequences hand their states on in the first slab.
        if (range.first >= range.end && !(item.length == 0 && params.first_chunk == 0)) continue;
        // The lane's place in a state, found again where it is used.
        const auto v = [&] { return 64 * (kGroups * item.piece + group) + 16 * warp + opaque_lane() / 4; };
        const auto k = [&] { return 2 * (opaque_lane() % 4); };
        begin<D>(s, params, item, range, pass, kOutputs, v(), k());
        if (item.segment == 0 && range.continues) {  // S has its powers: slabs do not show
            const float *g_power = carried_power<D>(params, item, v());
            loop.enter(g_power[0], g_power[8]);
        } else {
            loop.enter(4.0f, 4.0f);
            loop.multiply(s, loop.up);
        }
        if constexpr (kOutputs) loop.outputs_to(item, range.first);
        const int length = item.length, every = static_cast<int>(p.checkpoint_every);
        if (range.first < range.end) {
            typename Loop::Chunk chunk;
            int c = range.first;
            loop.template open<true>(chunk, s, item, length - c * kChunk);
            while (true) {
                loop.close(chunk, s);
                const int at = ++c * kChunk;
                if (kOutputs && every && at <= item.length && at % every == 0) {
                    const int64_t to = checkpoint_row(p, item.sequence, at / every - 1);
                    if (to >= 0) {
                        loop.multiply(s, loop.down);
                        store_state(s, p.checkpoints, to, item.head, v(), k());
                        loop.multiply(s, loop.up);
                    }
                }
                if (c >= range.end) break;
                loop.template open<false>(chunk, s, item, length - at);
            }
        }
        const bool to_slab = kOutputs && (pass == Pass::Whole || item.last()) && range.end < chunks_of(item.length);
        if (!to_slab) loop.multiply(s, loop.down);
        if constexpr (!kOutputs) {
            const int at = item.slot + item.segment;
            if (item.from_identity)
                store_transition<D>(s, transition<D>(params, at - 1, item.head, v(), k()));
            else  // N goes where the state after it will be
                store_workspace<D>(s, segment_state<D>(params, at, item.head, v(), k()));
        } else {
            loop.flush();
            if (to_slab) {
                store_workspace<D>(s, carried<D>(params, item, v(), k()));
                if (k() == 0) {
                    float *g_power = carried_power<D>(params, item, v());
                    g_power[0] = loop.up[0], g_power[8] = loop.up[1];
                }
            } else if (pass != Pass::Whole && !item.last()) {
                if (pass == Pass::First) store_workspace<D>(s, segment_state<D>(params, item.slot, item.head, v(), k()));
            } else if (p.state_out) {
                const int to = pool_row(p.write_indices, item.sequence, p.F);
                if (to >= 0) store_state(s, p.state_out, to, item.head, v(), k());
            }
        }
    }
    if (pass == Pass::First || params.first_chunk != 0) return;
    if constexpr (kOutputs) clear_checkpoints<D>(p, blockIdx.x, gridDim.x, threadIdx.x % (128 * kGroups), 128 * kGroups);
    if (!p.zero_tail || !p.cu_seqlens) return;
    const int end = sequence_start(p, static_cast<int>(p.N));
    for (int head = blockIdx.x; head < static_cast<int>(p.HV); head += gridDim.x)
        clear_output<D>(p, 0, head, end, static_cast<int>(p.T) - end, 128 * kGroups);
}

}  // namespace linattn::cuda::kda
