// Decode at memory speed: the delta rule for one or a few tokens against a pool of states, in place.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// One CTA per SM walks over the tiles: the states of (sequence, value head) pairs, or for few pairs slices of kWidth columns of V,
// so that every SM has some. A state lies contiguous in its pool (D x D elements); a tile comes and goes in bulk copies.
// kStages tiles are in shared memory, one being computed, the others arriving or leaving.
//
//   warpgroups 0 and 1, consumers: two groups of four warps, which take the tiles in turn, so that one computes while the other
//                        waits: state to registers . tokens . state to its stage
//   warp 8, loads states     row from the table . wait for a free stage . bulk loads . what the tile is (Tile)
//   warp 9, stores states    wait for a tile to be ready . bulk store . free the stage once it has been read
//   warps 10, 11, tokens     of one group each: q, k, v, g, beta . normalise, gate . the group's ring of token slots
//
// The order of the last two strides decides how consumers hold the state, because shared memory is as the pool is:
//   V-first (K contiguous)   a warp owns a quarter of the columns and all of K; lane (lk, lv) as in tile.cuh; sums over K by 3
//                            exchanges in the warp.
//   K-first (V contiguous)   a warp owns all columns of the tile and the rows of K that the lanes lk = warp and warp + 4 hold in
//                            tile.cuh; the four warps' sums meet in shared memory, in the order of those exchanges.
// So every layout and delta_recurrent_kernel sum in the same order and agree in bits.
//
// Shared memory at D = 128: 3 stages of 64 KB (fp32; bf16 5 of 32 KB) + 8 token slots of 2 KB + 8 KB of sums (K-first) = 217 KB.
// Registers: consumers 208 (state 128, sums 8), producers 88: 256 x 208 + 128 x 88 = 384 x 168, what the CTA
// starts with (to ask for more waits for ever).
#pragma once
#include "common/device_guard.h"
#include "common/launch.h"
#include "common/pipeline.cuh"
#include "ptx/cta.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "recurrent.h"
#include "tokens.cuh"

namespace linattn::cuda::delta_decode {

template <int kD, bool kKdaGate, class StateT, bool kVFirstOrder, int kSliceCount>
struct Config {
    static constexpr int D = kD, kSlices = kSliceCount, kWidth = D / kSlices;  // columns of V in a tile
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder;
    using State = StateT;
    static constexpr int kGroups = 2, kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;  // of consumers
    static constexpr int kThreads = kGroups * kGroupThreads + 32 * (2 + kGroups);
    static constexpr int kLanes = D / 8, kTokenBlock = 32 / kLanes;  // lanes per token; tokens prepared at once
    static constexpr int kTokenStages = 2;                           // of each group
    static constexpr int kTileBytes = D * kWidth * static_cast<int>(sizeof(State));
    static constexpr int kStages = kTileBytes == 65536 ? 3 : 5;
    static_assert(kVFirst || kSlices == 1, "slices are contiguous only where K is");
    static constexpr int kClasses = kVFirst ? 1 : 2;                   // values of lk that a lane stands for
    static constexpr int kRows = D / 8;                                // rows of K of each
    static constexpr int kCols = kVFirst ? kWidth / 16 : kWidth / 32;  // columns of V that a lane holds
};

// What the consumers need to know of a tile in a stage.
struct Tile {
    int64_t write_offset;        // elements into state_out, -1: not written
    int64_t o_offset, u_offset;  // elements into o and kept_u, of the first token
    int length;
    int padding;  // 1: a row of -1, the outputs are zeroed
};

template <class C>
struct alignas(128) Smem {
    typename C::State state[C::kStages][C::D * C::kWidth];
    TokenSlot<C::D, C::kKda, C::kWidth> token[C::kGroups][C::kTokenStages][C::kTokenBlock];
    float sum[C::kGroups][2][C::kVFirst ? 1 : C::kGroupWarps][C::kWidth];  // K-first: S^T k and S^T q by warp
    float u[C::kGroups][C::kWidth];
    Tile tile[C::kStages];
    // Tile j of a CTA lies in stage j mod kStages, and its arrival is told by barrier j mod 2 kStages, on which one group alone waits:
    // were it shared, a group could take the phase before for its own while the other's tile is late (seen as a hang).
    uint64_t full[2 * C::kStages], ready[C::kStages], empty[C::kStages];
    uint64_t token_ring[C::kGroups][2 * C::kTokenStages];
};

constexpr uint32_t kGroupMeets = 1;  // named barriers, of group 0 and of group 1

template <class C>
__device__ __forceinline__ Item item_of(const DeltaParams &p, int i) {
    int heads = static_cast<int>(p.HV), pair = i / C::kSlices;
    return make_item(p, pair / heads, pair % heads, i % C::kSlices * C::kWidth);
}

// Element of a state where the columns of a tile begin.
__device__ __forceinline__ int64_t tile_offset(const Tensor &t, int64_t row, const Item &item) {
    return row * t.stride[0] + item.head * t.stride[1] + item.v_cta * t.stride[3];
}

template <class C>
__device__ void load_states(const DeltaParams &p, Smem<C> &smem, int tiles) {
    RingState<C::kStages> at;
    RingState<2 * C::kStages> arrival;
    if (threadIdx.x % 32 != 0) return;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at.advance(), arrival.advance()) {
        Item item = item_of<C>(p, i);
        int64_t read = pool_row(p.read_indices, item.n, p.P), write = p.state_out ? pool_row(p.write_indices, item.n, p.F) : -1;
        uint32_t full = ptx::shared_address(&smem.full[arrival.stage]);
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.empty[at.stage]), at.phase ^ 1);
        Tile &tile = smem.tile[at.stage];
        tile.write_offset = read < 0 || write < 0 ? -1 : tile_offset(p.state_out, write, item);
        tile.o_offset = token_offset(p.o, item, 0) + item.v_cta;
        tile.u_offset = p.kept_u ? token_offset(p.kept_u, item, 0) + item.v_cta : 0;
        tile.length = item.length;
        tile.padding = read < 0;
        if (read < 0) {
            ptx::mbarrier_arrive(full);
            continue;
        }
        ptx::mbarrier_arrive_expect_tx(full, C::kTileBytes);
        auto *from = reinterpret_cast<const typename C::State *>(p.state_in.data) + tile_offset(p.state_in, read, item);
        ptx::cp_async_bulk_load(ptx::shared_address(smem.state[at.stage]), from, C::kTileBytes, full);
    }
}

template <class C>
__device__ void store_states(const DeltaParams &p, Smem<C> &smem, int tiles) {
    RingState<C::kStages> at;
    if (threadIdx.x % 32 != 0) return;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at.advance()) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.ready[at.stage]), at.phase);
        if (int64_t offset = smem.tile[at.stage].write_offset; offset >= 0) {
            ptx::cp_async_bulk_store(reinterpret_cast<typename C::State *>(p.state_out.data) + offset,
                                     ptx::shared_address(smem.state[at.stage]), C::kTileBytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<0>();
        }
        ptx::mbarrier_arrive(ptx::shared_address(&smem.empty[at.stage]));
    }
}

template <class C>
__device__ void produce_tokens(const DeltaParams &p, Smem<C> &smem, int tiles, int group) {
    Ring<C::kTokenStages> ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kTokenStages> at;
    int own = threadIdx.x % 32 / C::kLanes;
    for (int i = blockIdx.x + group * gridDim.x; i < tiles; i += C::kGroups * gridDim.x) {
        Item item = item_of<C>(p, i);
        if (pool_row(p.read_indices, item.n, p.P) < 0) continue;
        TokenLoader<C::D, C::kKda, C::kWidth, true> tokens(p, item);
        for (int first = 0; first < item.length; first += C::kTokenBlock, at.advance()) {
            tokens.fetch(first + own);
            ring.wait_empty(at);
            tokens.deposit(first + own, smem.token[group][at.stage][own]);
            ptx::mbarrier_arrive(ring.full(at.stage));
        }
    }
}

// The part of a state that a lane holds: rows row(c, kk) of K, columns column .. column + kCols of V.
template <class C>
struct Share {
    float s[C::kClasses][C::kRows][C::kCols];
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % C::kGroupWarps; }
    static __device__ __forceinline__ int column() {
        return C::kVFirst ? warp() * (C::kWidth / 4) + C::kCols * (lane() / 8) : C::kCols * lane();
    }

    __device__ __forceinline__ int lk(int c) const { return C::kVFirst ? lane() % 8 : warp() + 4 * c; }

    static constexpr int kVector = C::kVFirst ? 4 : C::kCols;  // elements that lie side by side
    struct alignas(kVector * sizeof(typename C::State)) Vector {
        typename C::State x[kVector];
    };
    // f(element of the stage, c, kk, r): kVector values, of which value(c, kk, r, i) is number i.
    template <class F>
    __device__ __forceinline__ void for_each_vector(F f) const {
#pragma unroll
        for (int c = 0; c < C::kClasses; ++c)
#pragma unroll
            for (int kk = 0; kk < C::kRows; kk += C::kVFirst ? 4 : 1)
#pragma unroll
                for (int r = 0; r < (C::kVFirst ? C::kCols : 1); ++r)
                    f(C::kVFirst ? (column() + r) * C::D + 8 * kk + 4 * lk(c)
                                 : (32 * (kk / 4) + 4 * lk(c) + kk % 4) * C::kWidth + column(),
                      c, kk, r);
    }
    __device__ __forceinline__ float &value(int c, int kk, int r, int i) { return C::kVFirst ? s[c][kk + i][r] : s[c][kk][i]; }

    __device__ __forceinline__ void load(const typename C::State *stage) {
        for_each_vector([&](int at, int c, int kk, int r) {
            Vector v = *reinterpret_cast<const Vector *>(stage + at);
#pragma unroll
            for (int i = 0; i < kVector; ++i) value(c, kk, r, i) = static_cast<float>(v.x[i]);
        });
    }
    __device__ __forceinline__ void store(typename C::State *stage) {
        for_each_vector([&](int at, int c, int kk, int r) {
            Vector v;
#pragma unroll
            for (int i = 0; i < kVector; ++i) v.x[i] = static_cast<typename C::State>(value(c, kk, r, i));
            *reinterpret_cast<Vector *>(stage + at) = v;
        });
    }
};

// Where a token's results go; column 0 of the tile. What a register can be spared for is read from p, in constant memory.
struct Results {
    const DeltaParams &p;
    uint16_t *o;
    float *kept_u;  // may be null

    __device__ __forceinline__ void put_o(int column, float x, float qk, float u) const {  // o = scale (S^T q + (q . k) u)
        float y = static_cast<float>(p.scale) * fmaf(qk, u, x);
        o[column] =
            p.o.dtype == DType::BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(y)) : __half_as_ushort(__float2half_rn(y));
    }
    __device__ __forceinline__ void put_u(int column, float x) const {
        if (kept_u) kept_u[column] = x;
    }
};

// Sums over the eight lanes lk: an exchange halves what a lane carries, until one is left.
template <int kCarried, int kMask, int kSums>
__device__ __forceinline__ void sum_over_lanes(float (&sum)[kSums], int lk) {
    constexpr int kNext = kCarried > 1 ? kCarried / 2 : 1;
    bool upper = lk & kMask;
#pragma unroll
    for (int i = 0; i < kNext; ++i) {
        float other = kCarried > 1 ? sum[i + kCarried / 2] : sum[i];
        float sent = upper ? sum[i] : other, kept = upper ? other : sum[i];
        sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kMask);
    }
    if constexpr (kMask > 1) sum_over_lanes<kNext, kMask / 2>(sum, lk);
}

// K-first: y = S^T k and z = S^T q of the warps to u, in shared memory and in the order of the exchanges above (lanes lk and lk + 4
// have met in the warp already).
template <class C, class Slot>
__device__ __forceinline__ void finish_in_group(const Share<C> &S, Smem<C> &smem, int group, const Slot &x,
                                                const float (&y)[C::kCols], const float (&z)[C::kCols], const Results &to,
                                                float (&u)[C::kCols]) {
    auto &sum = smem.sum[group];
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) sum[0][S.warp()][S.column() + r] = y[r], sum[1][S.warp()][S.column() + r] = z[r];
    ptx::bar_sync(kGroupMeets + group, C::kGroupThreads);
    int column = static_cast<int>(threadIdx.x) % C::kGroupThreads;
    if (column < C::kWidth) {
        auto total = [&](int which) {
            const auto &part = sum[which];
            return (part[0][column] + part[2][column]) + (part[1][column] + part[3][column]);
        };
        float own = x.beta * (x.v[column] - total(0));
        smem.u[group][column] = own;
        to.put_u(column, own);
        to.put_o(column, total(1), x.qk, own);
    }
    ptx::bar_sync(kGroupMeets + group, C::kGroupThreads);
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) u[r] = smem.u[group][S.column() + r];
}

// A sum by lane to make: sum = S^T w.
struct Term {
    const float *w;
    float *sum;
};

// S is decayed, or not, and the terms are summed over the rows of class c.
template <class C, bool kDecay, class Slot, class... Terms>
__device__ __forceinline__ void product(Share<C> &S, const Slot &x, int c, Terms... terms) {
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        if (kDecay) {
            float4 g4 = gamma4(x, S.lk(c), kk);
            const float g[4] = {g4.x, g4.y, g4.z, g4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < C::kCols; ++r) S.s[c][kk + i][r] = __fmul_rn(S.s[c][kk + i][r], g[i]);
        }
        auto add = [&](const float *w, float *sum) {
            float4 w4 = share4<C::D>(w, S.lk(c), kk);
            const float f[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < C::kCols; ++r) sum[r] = fmaf(S.s[c][kk + i][r], f[i], sum[r]);
        };
        (add(terms.w, terms.sum), ...);
    }
}

// One token, with its slot's vectors.
template <class C, class Slot>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, int group, const Slot &x, const Results &to) {
    float y[C::kCols] = {}, z[C::kCols] = {}, u[C::kCols];  // S^T k, S^T q; one after the other, to need fewer registers
    if constexpr (C::kVFirst) {
        constexpr int kTwins = 8 / C::kCols;  // lanes that end with the same column
        int lk = S.lane() & 7, column = S.column() + lk / kTwins;
        product<C, true>(S, x, 0, Term{x.k, y});
        sum_over_lanes<C::kCols, 4>(y, lk);
        product<C, false>(S, x, 0, Term{x.q, z});
        sum_over_lanes<C::kCols, 4>(z, lk);
        float own = x.beta * (x.v[column] - y[0]);
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) u[r] = __shfl_sync(0xffffffffu, own, (S.lane() & 24) + r * kTwins);
        if (lk % kTwins == 0) {
            to.put_u(column, own);
            to.put_o(column, z[0], x.qk, own);
        }
    } else {
        float more[C::kCols] = {};
        product<C, true>(S, x, 0, Term{x.k, y});
        product<C, true>(S, x, 1, Term{x.k, more});
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) y[r] += more[r], more[r] = 0.0f;
        product<C, false>(S, x, 0, Term{x.q, z});
        product<C, false>(S, x, 1, Term{x.q, more});
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) z[r] += more[r];
        finish_in_group<C>(S, smem, group, x, y, z, to, u);
    }
#pragma unroll
    for (int c = 0; c < C::kClasses; ++c)
#pragma unroll
        for (int kk = 0; kk < C::kRows; kk += 4) {
            float4 k4 = share4<C::D>(x.k, S.lk(c), kk);
            const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < C::kCols; ++r) S.s[c][kk + i][r] = __fmaf_rn(k[i], u[r], S.s[c][kk + i][r]);
        }
}

template <class C>
__device__ void consume(const DeltaParams &p, Smem<C> &smem, int tiles, int group) {
    Ring<C::kTokenStages> token_ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kTokenStages> from;
    RingState<2 * C::kStages> at;
    Share<C> S;
    Results to = {p, nullptr, nullptr};
    if (group == 1) at.advance();
    for (int i = blockIdx.x + group * gridDim.x; i < tiles; i += C::kGroups * gridDim.x, at.advance(), at.advance()) {
        int stage = at.stage < C::kStages ? at.stage : at.stage - C::kStages;
        auto ready = [&] { ptx::mbarrier_arrive(ptx::shared_address(&smem.ready[stage])); };
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.full[at.stage]), at.phase);
        const Tile &tile = smem.tile[stage];
        bool written = tile.write_offset >= 0;
        int length = tile.length;
        if (tile.padding) {
            zero_outputs<C::D, C::kKda, C::kWidth, true, C::kGroupThreads>(p, item_of<C>(p, i), threadIdx.x % C::kGroupThreads);
            ready();
            continue;
        }
        to.o = reinterpret_cast<uint16_t *>(p.o.data) + tile.o_offset;
        to.kept_u = p.kept_u ? reinterpret_cast<float *>(p.kept_u.data) + tile.u_offset : nullptr;
        S.load(smem.state[stage]);
        if (!written) ready();  // the stage is free
        for (int t = 0; t < length; ++t) {
            int slot = t % C::kTokenBlock;
            if (slot == 0) token_ring.wait_full(from);
            step<C>(S, smem, group, smem.token[group][from.stage][slot], to);
            to.o += p.o.stride[1];
            if (to.kept_u) to.kept_u += p.kept_u.stride[1];
            if (slot == C::kTokenBlock - 1 || t == length - 1) {
                ptx::mbarrier_arrive(token_ring.empty(from.stage));
                from.advance();
            }
        }
        if (!written) continue;
        S.store(smem.state[stage]);
        ptx::fence_proxy_async_shared_cta();
        ready();
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) delta_decode_kernel(const __grid_constant__ DeltaParams p) {
    extern __shared__ __align__(128) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    int tiles = static_cast<int>(p.N * p.HV) * C::kSlices, warp = threadIdx.x / 32;
    constexpr int kConsumerWarps = C::kGroups * C::kGroupWarps;
    if (threadIdx.x == 0) {
        for (auto &full : smem.full) ptx::mbarrier_init(ptx::shared_address(&full), 1);
        for (auto &ready : smem.ready) ptx::mbarrier_init(ptx::shared_address(&ready), C::kGroupThreads);
        for (auto &empty : smem.empty) ptx::mbarrier_init(ptx::shared_address(&empty), 1);
        for (auto &tokens : smem.token_ring) Ring<C::kTokenStages>{ptx::shared_address(tokens)}.init(32, C::kGroupThreads);
    }
    __syncthreads();
    if (warp < kConsumerWarps) {
        ptx::setmaxnreg_inc<208>();
        consume(p, smem, tiles, warp / C::kGroupWarps);
    } else {
        ptx::setmaxnreg_dec<88>();
        if (warp == kConsumerWarps)
            load_states(p, smem, tiles);
        else if (warp == kConsumerWarps + 1)
            store_states(p, smem, tiles);
        else
            produce_tokens(p, smem, tiles, warp - kConsumerWarps - 2);
    }
    zero_tail<C::D, C::kThreads>(p);
}

template <class C>
void launch_config(const DeltaParams &p, int multiprocessors) {
    static_assert(sizeof(Smem<C>) <= 232448, "227 KB of shared memory per CTA");
    int64_t tiles = p.N * p.HV * C::kSlices;
    LaunchConfig config;
    config.grid.x = tiles < multiprocessors && !p.zero_tail ? tiles : multiprocessors;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_decode_kernel", delta_decode_kernel<C>, config, p);
}

template <int D, bool kKda>
void launch_for(const DeltaParams &p, int multiprocessors) {
    bool v_first = p.state_in.stride[2] == 1, f32 = p.state_in.dtype == DType::F32;
    // Slices of V give every SM some of the few states. Only V-first ones, whose columns are contiguous: row by row it is slower.
    if (v_first && p.N * p.HV * 2 <= multiprocessors)
        f32 ? launch_config<Config<D, kKda, float, true, D / 32>>(p, multiprocessors)
            : launch_config<Config<D, kKda, __nv_bfloat16, true, D / 32>>(p, multiprocessors);
    else if (v_first)
        f32 ? launch_config<Config<D, kKda, float, true, 1>>(p, multiprocessors)
            : launch_config<Config<D, kKda, __nv_bfloat16, true, 1>>(p, multiprocessors);
    else
        f32 ? launch_config<Config<D, kKda, float, false, 1>>(p, multiprocessors)
            : launch_config<Config<D, kKda, __nv_bfloat16, false, 1>>(p, multiprocessors);
}

}  // namespace linattn::cuda::delta_decode
