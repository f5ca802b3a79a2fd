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
// Registers: consumers 208 (state 128, sums 16), producers 96: 256 x 208 + 128 x 96 = 64 K.
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
    static constexpr int kClasses = kVFirst ? 1 : 2;                     // values of lk that a lane stands for
    static constexpr int kRows = D / 8;                                  // rows of K of each
    static constexpr int kCols = kVFirst ? kWidth / 16 : kWidth / 32;    // columns of V that a lane holds
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
    uint64_t state_ring[2 * C::kStages], ready[C::kStages], token_ring[C::kGroups][2 * C::kTokenStages];
};

// Named barriers. The state producer makes the mbarriers and goes on; all others wait for it.
constexpr uint32_t kBarriersReady = 1, kGroupMeets = 2;  // + group

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
    Ring<C::kStages> ring{ptx::shared_address(smem.state_ring)};
    RingState<C::kStages> at;
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        ring.init(1, 1);
        for (auto &ready : smem.ready) ptx::mbarrier_init(ptx::shared_address(&ready), C::kGroupWarps);
        for (auto &tokens : smem.token_ring) Ring<C::kTokenStages>{ptx::shared_address(tokens)}.init(1, C::kGroupWarps);
    }
    __syncwarp();
    ptx::bar_arrive(kBarriersReady, C::kThreads);
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at.advance()) {
        Item item = item_of<C>(p, i);
        int64_t read = pool_row(p.read_indices, item.n, p.P);
        uint32_t full = ring.full(at.stage);
        ring.wait_empty(at);
        if (lane == 0) {
            int64_t write = p.state_out ? pool_row(p.write_indices, item.n, p.F) : -1;
            Tile &tile = smem.tile[at.stage];
            tile.write_offset = read < 0 || write < 0 ? -1 : tile_offset(p.state_out, write, item);
            tile.o_offset = token_offset(p.o, item, 0) + item.v_cta;
            tile.u_offset = p.kept_u ? token_offset(p.kept_u, item, 0) + item.v_cta : 0;
            tile.length = item.length;
            tile.padding = read < 0;
            if (read < 0)
                ptx::mbarrier_arrive(full);
            else
                ptx::mbarrier_arrive_expect_tx(full, C::kTileBytes);
        }
        __syncwarp();
        if (read < 0) continue;
        auto *from = reinterpret_cast<const typename C::State *>(p.state_in.data) + tile_offset(p.state_in, read, item);
        // Several copies, which the copy engine works on side by side.
        constexpr int kPiece = C::kTileBytes < 8192 ? C::kTileBytes : 8192;
        if (lane < C::kTileBytes / kPiece)
            ptx::cp_async_bulk_load(ptx::shared_address(smem.state[at.stage]) + lane * kPiece,
                                    reinterpret_cast<const char *>(from) + lane * kPiece, kPiece, full);
    }
}

template <class C>
__device__ void store_states(const DeltaParams &p, Smem<C> &smem, int tiles) {
    Ring<C::kStages> ring{ptx::shared_address(smem.state_ring)};
    RingState<C::kStages> at;
    ptx::bar_sync(kBarriersReady, C::kThreads);
    if (threadIdx.x % 32 != 0) return;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at.advance()) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.ready[at.stage]), at.phase);
        if (int64_t offset = smem.tile[at.stage].write_offset; offset >= 0) {
            ptx::cp_async_bulk_store(reinterpret_cast<typename C::State *>(p.state_out.data) + offset,
                                     ptx::shared_address(smem.state[at.stage]), C::kTileBytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<0>();
        }
        ptx::mbarrier_arrive(ring.empty(at.stage));
    }
}

template <class C>
__device__ void produce_tokens(const DeltaParams &p, Smem<C> &smem, int tiles, int group) {
    Ring<C::kTokenStages> ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kTokenStages> at;
    int own = threadIdx.x % 32 / C::kLanes;
    bool synced = false;  // the first loads need not wait for the barriers
    for (int i = blockIdx.x + group * gridDim.x; i < tiles; i += C::kGroups * gridDim.x) {
        Item item = item_of<C>(p, i);
        if (pool_row(p.read_indices, item.n, p.P) < 0) continue;
        TokenLoader<C::D, C::kKda, C::kWidth, true> tokens(p, item);
        for (int first = 0; first < item.length; first += C::kTokenBlock, at.advance()) {
            tokens.fetch(first + own);
            if (!synced) ptx::bar_sync(kBarriersReady, C::kThreads);
            synced = true;
            ring.wait_empty(at);
            tokens.deposit(first + own, smem.token[group][at.stage][own]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.full(at.stage));
        }
    }
    if (!synced) ptx::bar_sync(kBarriersReady, C::kThreads);
}

// The part of a state that a lane holds: rows row(c, kk) of K, columns column .. column + kCols of V.
template <class C>
struct Share {
    float s[C::kClasses][C::kRows][C::kCols];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % C::kGroupWarps;
    int column = C::kVFirst ? warp * (C::kWidth / 4) + C::kCols * (lane / 8) : C::kCols * lane;

    __device__ __forceinline__ int lk(int c) const { return C::kVFirst ? lane % 8 : warp + 4 * c; }

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
                    f(C::kVFirst ? (column + r) * C::D + 8 * kk + 4 * lk(c) : (32 * (kk / 4) + 4 * lk(c) + kk % 4) * C::kWidth + column,
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
        o[column] = p.o.dtype == DType::BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(y)) : __half_as_ushort(__float2half_rn(y));
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

// y = S^T k and z = S^T q by lane to u by lane, V-first: every lane gets the u of its kCols columns.
template <class C, class Slot>
__device__ __forceinline__ void finish_in_warp(const Share<C> &S, const Slot &x, const float (&y)[C::kCols], const float (&z)[C::kCols],
                                               const Results &to, float (&u)[C::kCols]) {
    constexpr int kSums = 2 * C::kCols;
    constexpr int kLeft = kSums > 8 ? kSums / 8 : 1, kTwins = kSums < 8 ? 8 / kSums : 1;  // sums a lane ends with; lanes that end alike
    float sum[kSums];
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) sum[r] = y[r], sum[C::kCols + r] = z[r];
    int lk = S.lane & 7;
    sum_over_lanes<kSums, 4>(sum, lk);  // y ends in lanes lk < 4
    int from = S.lane & 24, place = (lk & 3) / kTwins;
    float own[kLeft];  // of use in lanes lk < 4
#pragma unroll
    for (int i = 0; i < kLeft; ++i) own[i] = x.beta * (x.v[S.column + place * kLeft + i] - sum[i]);
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) u[r] = __shfl_sync(0xffffffffu, own[r % kLeft], from + r / kLeft * kTwins);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
        int column = S.column + place * kLeft + i;
        float mine = __shfl_sync(0xffffffffu, own[i], from + place * kTwins);
        if (lk < 4)
            to.put_u(column, own[i]);
        else
            to.put_o(column, sum[i], x.qk, mine);
    }
}

// The same K-first: through shared memory, in the order of the exchanges above (lanes lk and lk + 4 met in the warp already).
template <class C, class Slot>
__device__ __forceinline__ void finish_in_group(const Share<C> &S, Smem<C> &smem, int group, const Slot &x, const float (&y)[C::kCols],
                                                const float (&z)[C::kCols], const Results &to, float (&u)[C::kCols]) {
    auto &sum = smem.sum[group];
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) sum[0][S.warp][S.column + r] = y[r], sum[1][S.warp][S.column + r] = z[r];
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
    for (int r = 0; r < C::kCols; ++r) u[r] = smem.u[group][S.column + r];
}

// One token, with its slot's vectors.
template <class C, class Slot>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, int group, const Slot &x, const Results &to) {
    float y[C::kClasses][C::kCols] = {}, z[C::kClasses][C::kCols] = {}, u[C::kCols];
#pragma unroll
    for (int c = 0; c < C::kClasses; ++c)
#pragma unroll
        for (int kk = 0; kk < C::kRows; kk += 4) {
            int lk = S.lk(c);
            float4 g4 = gamma4(x, lk, kk), k4 = share4<C::D>(x.k, lk, kk), q4 = share4<C::D>(x.q, lk, kk);
            const float g[4] = {g4.x, g4.y, g4.z, g4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < C::kCols; ++r) {
                    float &s = S.s[c][kk + i][r];
                    s = __fmul_rn(s, g[i]);
                    y[c][r] = fmaf(s, k[i], y[c][r]);
                    z[c][r] = fmaf(s, q[i], z[c][r]);
                }
        }
    if constexpr (C::kVFirst) {
        finish_in_warp<C>(S, x, y[0], z[0], to, u);
    } else {
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) y[0][r] += y[1][r], z[0][r] += z[1][r];
        finish_in_group<C>(S, smem, group, x, y[0], z[0], to, u);
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
    Ring<C::kStages> ring{ptx::shared_address(smem.state_ring)};
    RingState<C::kStages> at;
    Ring<C::kTokenStages> token_ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kTokenStages> from;
    Share<C> S;
    bool leader = S.lane == 0;
    Results to = {p, nullptr, nullptr};
    ptx::bar_sync(kBarriersReady, C::kThreads);
    if (group == 1) at.advance();
    auto ready = [&] {
        __syncwarp();
        if (leader) ptx::mbarrier_arrive(ptx::shared_address(&smem.ready[at.stage]));
    };
    for (int i = blockIdx.x + group * gridDim.x; i < tiles; i += C::kGroups * gridDim.x, at.advance(), at.advance()) {
        ring.wait_full(at);
        const Tile &tile = smem.tile[at.stage];
        bool written = tile.write_offset >= 0;
        int length = tile.length;
        if (tile.padding) {
            zero_outputs<C::D, C::kKda, C::kWidth, true, C::kGroupThreads>(p, item_of<C>(p, i), threadIdx.x % C::kGroupThreads);
            ready();
            continue;
        }
        typename C::State *stage = smem.state[at.stage];
        to.o = reinterpret_cast<uint16_t *>(p.o.data) + tile.o_offset;
        to.kept_u = p.kept_u ? reinterpret_cast<float *>(p.kept_u.data) + tile.u_offset : nullptr;
        S.load(stage);
        if (!written) ready();  // the stage is free
        for (int t = 0; t < length; ++t) {
            int slot = t % C::kTokenBlock;
            if (slot == 0) token_ring.wait_full(from);
            step<C>(S, smem, group, smem.token[group][from.stage][slot], to);
            to.o += p.o.stride[1];
            if (to.kept_u) to.kept_u += p.kept_u.stride[1];
            if (slot == C::kTokenBlock - 1 || t == length - 1) {
                __syncwarp();
                if (leader) ptx::mbarrier_arrive(token_ring.empty(from.stage));
                from.advance();
            }
        }
        if (!written) continue;
        S.store(stage);
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
    if (warp < kConsumerWarps) {
        ptx::setmaxnreg_inc<208>();
        consume(p, smem, tiles, warp / C::kGroupWarps);
    } else {
        ptx::setmaxnreg_dec<96>();
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
