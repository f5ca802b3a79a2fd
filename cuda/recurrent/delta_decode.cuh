// Decode at memory speed: the delta rule for one or a few tokens against a pool of states, in place.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// One CTA per SM walks over the tiles: the states of (sequence, value head) pairs, or for few pairs slices of kWidth columns of V,
// so that every SM has some. A state lies contiguous in its pool (D x D elements); a tile comes and goes in bulk copies.
// kStages tiles are in shared memory, one being computed, the others arriving or leaving.
//
//   warp 8, state producer   row from the table . wait for a free stage . bulk load . what the tile is (Tile)
//   warps 9 and up, token producers, by turns of a tile: q, k, v, g, beta . normalise, gate . a ring of token slots
//   warps 0 to 7, consumers  state to registers . tokens . state to its stage . bulk store . free the stage a tile later
//
// The order of the last two strides decides how consumers hold the state, because shared memory is as the pool is:
//   V-first (K contiguous)   a warp owns kWidth/8 columns of V and all of K; lane (lk, lv) as in tile.cuh, with kWidth/32
//                            columns; sums over K by 3 exchanges in the warp.
//   K-first (V contiguous)   a warp owns the rows of K that lane lk = warp holds in tile.cuh, and all columns of the tile; the
//                            eight warps' sums meet in shared memory, in the order of those exchanges.
// So every layout and delta_recurrent_kernel sum in the same order and agree in bits.
//
// Shared memory at D = 128: 3 stages of 64 KB (fp32; bf16 5 of 32 KB) + 8 token slots of 2 KB (16) + 8 KB of sums (K-first) = 217 KB
// (bf16 201). Registers: state 64, sums 8, the rest addresses: at most 160 (416 threads).
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
    static constexpr int kConsumerWarps = 8, kConsumers = 32 * kConsumerWarps;
    static constexpr int kGroup = D / 8, kTokenBlock = 32 / kGroup;  // tokens that the token producer prepares at once
    static constexpr int kTileBytes = D * kWidth * static_cast<int>(sizeof(State));
    static constexpr int kStages = kTileBytes == 65536 ? 3 : 5;
    // Loads of tokens take some 4 us among the states' traffic: a producer each for as many tiles as pass in that time.
    static constexpr int kTokenWarps = kTileBytes == 65536 ? 2 : 4, kTokenStages = 2 * kTokenWarps;
    static constexpr int kThreads = kConsumers + 32 + 32 * kTokenWarps;
    static_assert(kVFirst || kSlices == 1, "slices are contiguous only where K is");
    static constexpr int kRows = D / 8, kCols = kWidth / 32;  // rows of K and columns of V that a lane holds
};

// What the consumers need to know of a tile in a stage.
struct Tile {
    int64_t write_offset;        // elements into state_out, -1: not written
    int64_t o_offset, u_offset;  // elements into o and kept_u, of the first token
    int length;
    int padding;  // 1: a row of -1, the outputs are zeroed
    int index;
};

template <class C>
struct alignas(128) Smem {
    typename C::State state[C::kStages][C::D * C::kWidth];
    TokenSlot<C::D, C::kKda, C::kWidth> token[C::kTokenStages][C::kTokenBlock];
    float sum[2][C::kVFirst ? 1 : C::kConsumerWarps][C::kWidth];  // K-first: S^T k and S^T q by warp
    float u[C::kWidth];
    Tile tile[C::kStages];
    uint64_t state_ring[2 * C::kStages], token_ring[2 * C::kTokenStages];
};

// Named barriers. The state producer makes the mbarriers and goes on; all others wait for it.
constexpr uint32_t kBarriersReady = 1, kConsumersMeet = 2;

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
__device__ void produce_states(const DeltaParams &p, Smem<C> &smem, int tiles) {
    Ring<C::kStages> ring{ptx::shared_address(smem.state_ring)};
    RingState<C::kStages> at;
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        ring.init(1, C::kConsumerWarps);
        Ring<C::kTokenStages>{ptx::shared_address(smem.token_ring)}.init(1, C::kConsumerWarps);
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
            tile.write_offset = write < 0 ? -1 : tile_offset(p.state_out, write, item);
            tile.o_offset = token_offset(p.o, item, 0) + item.v_cta;
            tile.u_offset = p.kept_u ? token_offset(p.kept_u, item, 0) + item.v_cta : 0;
            tile.length = item.length;
            tile.padding = read < 0;
            tile.index = i;
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
__device__ void produce_tokens(const DeltaParams &p, Smem<C> &smem, int tiles, int producer) {
    Ring<C::kTokenStages> ring{ptx::shared_address(smem.token_ring)};
    RingState<C::kTokenStages> at;
    int own = threadIdx.x % 32 / C::kGroup, turn = 0;
    bool ready = false;  // the first loads need not wait for the barriers
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        Item item = item_of<C>(p, i);
        bool mine = turn == producer;
        turn = turn + 1 == C::kTokenWarps ? 0 : turn + 1;
        if (pool_row(p.read_indices, item.n, p.P) < 0) continue;
        if (!mine) {
            for (int first = 0; first < item.length; first += C::kTokenBlock) at.advance();
            continue;
        }
        TokenLoader<C::D, C::kKda, C::kWidth, true> tokens(p, item);
        for (int first = 0; first < item.length; first += C::kTokenBlock, at.advance()) {
            tokens.fetch(first + own);
            if (!ready) ptx::bar_sync(kBarriersReady, C::kThreads);
            ready = true;
            ring.wait_empty(at);
            tokens.deposit(first + own, smem.token[at.stage][own]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.full(at.stage));
        }
    }
    if (!ready) ptx::bar_sync(kBarriersReady, C::kThreads);
}

// The part of a state that a lane holds: row(kk) of K, columns column() .. + kCols of V.
template <class C>
struct Share {
    float s[C::kRows][C::kCols];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int lk = C::kVFirst ? lane % 8 : warp;  // which rows: 32 (kk / 4) + 4 lk + kk % 4
    int column = C::kVFirst ? warp * (C::kWidth / 8) + C::kCols * (lane / 8) : C::kCols * lane;

    // f(element of the stage, kk, r, count along kk): vectors of four, or of kCols along V.
    template <class F>
    __device__ __forceinline__ void for_each_vector(F f) const {
        if constexpr (C::kVFirst) {
#pragma unroll
            for (int r = 0; r < C::kCols; ++r)
#pragma unroll
                for (int kk = 0; kk < C::kRows; kk += 4) f((column + r) * C::D + 8 * kk + 4 * lk, kk, r);
        } else {
#pragma unroll
            for (int kk = 0; kk < C::kRows; ++kk) f((32 * (kk / 4) + 4 * lk + kk % 4) * C::kWidth + column, kk, 0);
        }
    }
    static constexpr int kVector = C::kVFirst ? 4 : C::kCols;
    static __device__ __forceinline__ constexpr int row(int kk, int i) { return C::kVFirst ? kk + i : kk; }
    static __device__ __forceinline__ constexpr int col(int r, int i) { return C::kVFirst ? r : i; }

    struct alignas(kVector * sizeof(typename C::State)) Vector {
        typename C::State x[kVector];
    };
    __device__ __forceinline__ void load(const typename C::State *stage) {
        for_each_vector([&](int at, int kk, int r) {
            Vector v = *reinterpret_cast<const Vector *>(stage + at);
#pragma unroll
            for (int i = 0; i < kVector; ++i) s[row(kk, i)][col(r, i)] = static_cast<float>(v.x[i]);
        });
    }
    __device__ __forceinline__ void store(typename C::State *stage) const {
        for_each_vector([&](int at, int kk, int r) {
            Vector v;
#pragma unroll
            for (int i = 0; i < kVector; ++i) v.x[i] = static_cast<typename C::State>(s[row(kk, i)][col(r, i)]);
            *reinterpret_cast<Vector *>(stage + at) = v;
        });
    }
};

// One token, with its slot's vectors: S is updated, o and (unless null) kept_u get its rows.
template <class C>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, const TokenSlot<C::D, C::kKda, C::kWidth> &x, uint16_t *o,
                                     float *kept_u, float scale, bool bf16) {
    constexpr int kCols = C::kCols;
    float y[kCols] = {}, z[kCols] = {};  // S^T k, S^T q
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 g4 = gamma4(x, S.lk, kk), k4 = share4<C::D>(x.k, S.lk, kk), q4 = share4<C::D>(x.q, S.lk, kk);
        const float g[4] = {g4.x, g4.y, g4.z, g4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < kCols; ++r) {
                S.s[kk + i][r] = __fmul_rn(S.s[kk + i][r], g[i]);
                y[r] = fmaf(S.s[kk + i][r], k[i], y[r]);
                z[r] = fmaf(S.s[kk + i][r], q[i], z[r]);
            }
    }
    auto to_half = [bf16](float f) {
        return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(f)) : __half_as_ushort(__float2half_rn(f));
    };
    float u[kCols];
    if constexpr (C::kVFirst) {
        float sum[2 * kCols];
#pragma unroll
        for (int r = 0; r < kCols; ++r) sum[r] = y[r], sum[kCols + r] = z[r];
        // 2 kCols sums over the eight lanes lk: an exchange halves what a lane carries, until one is left.
        int carried = 2 * kCols;
#pragma unroll
        for (int mask = 4; mask > 0; mask /= 2) {
            bool upper = S.lk & mask;
            if (carried > 1) {
                carried /= 2;
#pragma unroll
                for (int i = 0; i < carried; ++i) {
                    float sent = upper ? sum[i] : sum[i + carried], kept = upper ? sum[i + carried] : sum[i];
                    sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
                }
            } else {
                sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], mask);
            }
        }
        constexpr int kTwins = 4 / kCols;  // lanes that end with the same sum
        int r = (S.lk & 3) / kTwins, column = S.column + r, from = S.lane & 24;
        float u_own = x.beta * (x.v[column] - sum[0]);  // of use in lanes lk < 4
#pragma unroll
        for (int i = 0; i < kCols; ++i) u[i] = __shfl_sync(0xffffffffu, u_own, from + i * kTwins);
        float u_mine = __shfl_sync(0xffffffffu, u_own, from + r * kTwins);
        if (S.lk >= 4)
            o[column] = to_half(scale * fmaf(x.qk, u_mine, sum[0]));
        else if (kept_u)
            kept_u[column] = u_own;
    } else {
#pragma unroll
        for (int r = 0; r < kCols; ++r) smem.sum[0][S.warp][S.column + r] = y[r], smem.sum[1][S.warp][S.column + r] = z[r];
        ptx::bar_sync(kConsumersMeet, C::kConsumers);
        // Thread t < kWidth sums S^T k of column t and makes u, thread kWidth + t sums S^T q and makes o.
        int t = static_cast<int>(threadIdx.x), column = t % C::kWidth;
        float total = 0.0f;
        if (t < 2 * C::kWidth) {
            const auto &part = smem.sum[t / C::kWidth];
            total = ((part[0][column] + part[4][column]) + (part[2][column] + part[6][column])) +
                    ((part[1][column] + part[5][column]) + (part[3][column] + part[7][column]));
        }
        if (t < C::kWidth) {
            float own = x.beta * (x.v[column] - total);
            smem.u[column] = own;
            if (kept_u) kept_u[column] = own;
        }
        ptx::bar_sync(kConsumersMeet, C::kConsumers);
#pragma unroll
        for (int r = 0; r < kCols; ++r) u[r] = smem.u[S.column + r];
        if (t >= C::kWidth && t < 2 * C::kWidth) o[column] = to_half(scale * fmaf(x.qk, smem.u[column], total));
    }
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 k4 = share4<C::D>(x.k, S.lk, kk);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < kCols; ++r) S.s[kk + i][r] = __fmaf_rn(k[i], u[r], S.s[kk + i][r]);
    }
}

// Bulk stores of what a warp holds: its columns (V-first) or its groups of four rows (K-first), contiguous in the pool.
template <class C>
__device__ __forceinline__ void bulk_store(const Share<C> &S, typename C::State *to, const typename C::State *stage) {
    constexpr int kChunk = C::kVFirst ? C::D * C::kWidth / 8 : 4 * C::D, kChunks = C::D * C::kWidth / 8 / kChunk;  // elements
    if (S.lane < kChunks) {
        int at = C::kVFirst ? S.warp * kChunk : (32 * S.lane + 4 * S.warp) * C::D;
        ptx::cp_async_bulk_store(to + at, ptx::shared_address(stage + at),
                                 kChunk * static_cast<int>(sizeof(typename C::State)));
        ptx::cp_async_bulk_commit_group();
    }
}

template <class C>
__device__ void consume(const DeltaParams &p, Smem<C> &smem, int tiles) {
    Ring<C::kStages> ring{ptx::shared_address(smem.state_ring)};
    RingState<C::kStages> at;
    Ring<C::kTokenStages> token_ring{ptx::shared_address(smem.token_ring)};
    RingState<C::kTokenStages> from;
    Share<C> S;
    bool leader = S.lane == 0, bf16 = p.o.dtype == DType::BF16;
    float scale = static_cast<float>(p.scale);
    ptx::bar_sync(kBarriersReady, C::kThreads);
    int leaving = -1;  // stage whose bulk store may still be reading it
    auto free_leaving = [&] {
        if (leaving < 0) return;
        ptx::cp_async_bulk_wait_group_read<0>();
        __syncwarp();
        if (leader) ptx::mbarrier_arrive(ring.empty(leaving));
    };
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at.advance()) {
        ring.wait_full(at);
        const Tile tile = smem.tile[at.stage];
        if (tile.padding) {
            zero_outputs<C::D, C::kKda, C::kWidth, true, C::kConsumers>(p, item_of<C>(p, tile.index), threadIdx.x);
            __syncwarp();
            if (leader) ptx::mbarrier_arrive(ring.empty(at.stage));
            continue;
        }
        typename C::State *stage = smem.state[at.stage];
        S.load(stage);
        if (tile.write_offset < 0) {
            __syncwarp();
            if (leader) ptx::mbarrier_arrive(ring.empty(at.stage));
        }
        auto *o = reinterpret_cast<uint16_t *>(p.o.data) + tile.o_offset;
        auto *kept_u = p.kept_u ? reinterpret_cast<float *>(p.kept_u.data) + tile.u_offset : nullptr;
        for (int t = 0; t < tile.length; ++t) {
            int slot = t % C::kTokenBlock;
            if (slot == 0) token_ring.wait_full(from);
            step(S, smem, smem.token[from.stage][slot], o, kept_u, scale, bf16);
            o += p.o.stride[1];
            if (kept_u) kept_u += p.kept_u.stride[1];
            if (slot == C::kTokenBlock - 1 || t == tile.length - 1) {
                __syncwarp();
                if (leader) ptx::mbarrier_arrive(token_ring.empty(from.stage));
                from.advance();
            }
        }
        free_leaving();
        leaving = -1;
        if (tile.write_offset < 0) continue;
        S.store(stage);
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        bulk_store(S, reinterpret_cast<typename C::State *>(p.state_out.data) + tile.write_offset, stage);
        leaving = at.stage;
    }
    ptx::cp_async_bulk_wait_group_read<0>();  // shared memory outlives the stores that read it
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) delta_decode_kernel(const __grid_constant__ DeltaParams p) {
    extern __shared__ __align__(128) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    int tiles = static_cast<int>(p.N * p.HV) * C::kSlices, warp = threadIdx.x / 32;
    if (warp == C::kConsumerWarps)
        produce_states(p, smem, tiles);
    else if (warp > C::kConsumerWarps)
        produce_tokens(p, smem, tiles, warp - C::kConsumerWarps - 1);
    else
        consume(p, smem, tiles);
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
