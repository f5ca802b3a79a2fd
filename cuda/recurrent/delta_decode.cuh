// Decode at memory speed: the delta rule for one or a few tokens against a pool of states, in place.
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// One CTA per SM walks over the tiles, the states of (sequence, value head) pairs. A state lies contiguous in its pool (D x D
// elements) and comes in one bulk copy. kStages tiles are in shared memory, two being computed, the others on their way.
//
//   warpgroups 0 and 1, consumers: two groups of four warps, which take the tiles in turn, so that one computes while the other
//                        waits: state to registers . tokens . state to the pool
//   warp 8, moves states     rows from the tables . wait until the stage is done with . bulk store of what is in it . bulk load
//   warps 9, 10, tokens      decode: of one group each: q, k, v, g, beta . normalise, gate . the group's ring of slots
//
// For verify a group prepares its own tokens, kBlock at a time, the loads in flight while the block or the tile before is
// computed: the first two warps of group 0 and the last two of group 1, one on each scheduler. Two warps would not keep up.
//
// The order of the last two strides decides how consumers hold the state, because shared memory is as the pool is:
//   V-first (K contiguous)   a warp owns a quarter of the columns and all of K; lane (lk, lv) as in tile.cuh; sums over K by 3
//                            exchanges in the warp.
//   K-first (V contiguous)   a warp owns all columns of the tile and the rows of K that the lanes lk = warp and warp + 4 hold
//                            in tile.cuh; the four warps' sums meet in shared memory, in the order of those exchanges.
// So every layout and delta_recurrent_kernel sum in the same order and agree in bits.
// K-first states go from registers to the pool, 256 or 512 bytes of a row at a time; V-first ones, whose pieces are shorter, go
// back to their stage and leave in one bulk copy.
//
// Shared memory at D = 128: 3 stages of 64 KB (fp32; bf16 6 of 32 KB) + 8 token slots of 2 KB + sums 16 KB (K-first) = 225 KB.
// Registers: consumers 200 or 232 (state 128, sums 16; verify: the next tokens 22 to 30), other warps the rest of 384 x 168,
// what the CTA starts with (to ask for more waits for ever).
#pragma once
#include "common/launch.h"
#include "common/pipeline.cuh"
#include "ptx/cta.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "recurrent.h"
#include "tokens.cuh"

namespace linattn::cuda::delta_decode {

template <int kD, bool kKdaGate, class StateT, bool kVFirstOrder, bool kDecode>
struct Config {
    static constexpr int D = kD;
    static constexpr bool kKda = kKdaGate, kVFirst = kVFirstOrder, kTokenWarps = kDecode, kBulkStore = kVFirst;
    using State = StateT;
    static constexpr int kGroups = 2, kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;  // of consumers
    static constexpr int kThreads = kGroups * kGroupThreads + 128;  // a whole warpgroup, because setmaxnreg counts in them
    static constexpr int kConsumerRegisters = !kTokenWarps ? 232 : kVFirst && sizeof(State) == 4 ? 208 : 200;
    static constexpr int kOtherRegisters = 3 * 168 - 2 * kConsumerRegisters;
    static constexpr int kLanes = D / 8;                             // per token
    static constexpr int kJobs = 32 / kLanes;                        // tokens that a token warp has in flight
    static constexpr int kBlock = kGroupThreads / 2 / kLanes;        // tokens that a group prepares at once
    static constexpr int kSlots = kTokenWarps ? 2 * kJobs : kBlock;  // tokens in shared memory, of each group
    static constexpr int kTileBytes = D * D * static_cast<int>(sizeof(State));
    static constexpr int kStages = kTileBytes == 65536 ? 3 : 6;
    static constexpr int kClasses = kVFirst ? 1 : 2;         // values of lk that a lane stands for
    static constexpr int kRows = D / 8;                      // rows of K of each
    static constexpr int kCols = kVFirst ? D / 16 : D / 32;  // columns of V that a lane holds
};

// What is known of a tile in a stage.
struct Tile {
    int64_t write_offset;        // elements into state_out, -1: not written
    int64_t o_offset, u_offset;  // elements into o and kept_u, of the first token
    int length;
    int padding;  // 1: a row of -1, the outputs are zeroed
};

template <class C>
struct alignas(128) Smem {
    typename C::State state[C::kStages][C::D * C::D];
    TokenSlot<C::D, C::kKda, C::D> token[C::kGroups][C::kSlots];
    // K-first: S^T k and S^T q by warp. Two of each: those of the next token are written while others read.
    float sum[C::kVFirst ? 1 : C::kGroups][2][2][C::kGroupWarps][C::kVFirst ? 1 : C::D];
    Tile tile[C::kStages];
    // Tile j of a CTA lies in stage j mod kStages, and its arrival is told by barrier j mod 2 kStages, on which one group alone
    // waits: were it shared, a group could take the phase before for its own while the other's tile is late (seen as a hang).
    uint64_t full[2 * C::kStages], done[C::kStages];
    uint64_t token_ring[C::kGroups][2 * C::kSlots];
};

constexpr uint32_t kGroupMeets = 1;  // named barriers, of group 0 and of group 1

template <class C>
__device__ __forceinline__ Item item_of(const DeltaParams &p, int i) {
    int heads = static_cast<int>(p.HV);
    return make_item(p, i / heads, i % heads, 0);
}

// Each lane looks up a tile of the next 32, so that the loads of their tables overlap; then they move the states in turn.
template <class C>
__device__ void move_states(const DeltaParams &p, Smem<C> &smem, int tiles) {
    int lane = threadIdx.x % 32, step = gridDim.x, count = (tiles - static_cast<int>(blockIdx.x) + step - 1) / step;
    auto empty = [&](int number) {  // the stage of a tile, once consumers are done with it
        int stage = number % C::kStages;
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.done[stage]), number / C::kStages % 2);
        if constexpr (C::kBulkStore) {
            if (int64_t offset = smem.tile[stage].write_offset; offset >= 0) {
                ptx::cp_async_bulk_store(reinterpret_cast<typename C::State *>(p.state_out.data) + offset,
                                         ptx::shared_address(smem.state[stage]), C::kTileBytes);
                ptx::cp_async_bulk_commit_group();
                ptx::cp_async_bulk_wait_group_read<0>();
            }
        }
    };
    for (int first = 0; first < count; first += 32) {
        int number = first + lane;
        Tile tile = {};
        const typename C::State *from = nullptr;
        if (number < count) {
            Item item = item_of<C>(p, blockIdx.x + number * step);
            int64_t read = pool_row(p.read_indices, item.n, p.P),
                    write = p.state_out ? pool_row(p.write_indices, item.n, p.F) : -1;
            auto at = [&](const Tensor &t, int64_t row) { return row * t.stride[0] + item.head * t.stride[1]; };
            tile.write_offset = read < 0 || write < 0 ? -1 : at(p.state_out, write);
            tile.o_offset = token_offset(p.o, item, 0);
            tile.u_offset = p.kept_u ? token_offset(p.kept_u, item, 0) : 0;
            tile.length = item.length;
            tile.padding = read < 0;
            if (read >= 0) from = reinterpret_cast<const typename C::State *>(p.state_in.data) + at(p.state_in, read);
        }
        for (int j = 0; j < 32 && first + j < count; ++j) {
            if (lane == j) {
                int stage = number % C::kStages;
                uint32_t full = ptx::shared_address(&smem.full[number % (2 * C::kStages)]);
                if (number >= C::kStages) empty(number - C::kStages);
                smem.tile[stage] = tile;
                if (tile.padding) {
                    ptx::mbarrier_arrive(full);
                } else {
                    ptx::mbarrier_arrive_expect_tx(full, C::kTileBytes);
                    ptx::cp_async_bulk_load(ptx::shared_address(smem.state[stage]), from, C::kTileBytes, full);
                }
            }
            __syncwarp();
        }
    }
    if constexpr (C::kBulkStore)
        if (lane == 0)
            for (int number = count < C::kStages ? 0 : count - C::kStages; number < count; ++number) empty(number);
}

// Decode: the tokens of a group's tiles, one after the other, in turn by the kJobs groups of kLanes lanes of a warp: with one
// token per sequence too, several are in flight. Tokens of padding come along, so that nothing here waits for the table.
template <class C>
__device__ void produce_tokens(const DeltaParams &p, Smem<C> &smem, int tiles, int group) {
    Ring<C::kSlots> ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kSlots> at;
    int step = C::kGroups * gridDim.x, i = blockIdx.x + group * gridDim.x, token = threadIdx.x % 32 / C::kLanes;
    at.stage = token;
    Item item = {};
    auto find = [&](bool next) {  // the tile that token belongs to, and its number there
        for (; i < tiles; i += step, next = true) {
            if (next) item = item_of<C>(p, i);
            if (token < item.length) return;
            token -= item.length;
        }
    };
    find(true);
    while (__any_sync(0xffffffffu, i < tiles)) {
        bool mine = i < tiles;
        RawToken<C::kKda> raw;
        RawGate<C::kKda> gate;
        if (mine) {
            using Source = TokenSource<C::D, C::kKda, C::D>;
            Source(p, item).fetch(p, token, raw);
            Source::fetch_gate(p, item.head, gate);
            ring.wait_empty(at);
        }
        __syncwarp();
        deposit<C::D, C::kKda, C::D>(p, raw, gate, mine, smem.token[group][at.stage], [] { return Kept(); });
        if (mine) ptx::mbarrier_arrive(ring.full(at.stage));
        token += C::kJobs;
        at.stage += C::kJobs;
        if (at.stage >= C::kSlots) at.stage -= C::kSlots, at.phase ^= 1;
        find(false);
        __syncwarp();
    }
}

// The part of a state that a lane holds: rows row(c, kk) of K, columns column .. column + kCols of V.
template <class C>
struct Share {
    float s[C::kClasses][C::kRows][C::kCols];
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % C::kGroupWarps; }
    static __device__ __forceinline__ int column() {
        return C::kVFirst ? warp() * (C::D / 4) + C::kCols * (lane() / 8) : C::kCols * lane();
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
                                 : (32 * (kk / 4) + 4 * lk(c) + kk % 4) * C::D + column(),
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
    __device__ __forceinline__ void store(typename C::State *state) {
        for_each_vector([&](int at, int c, int kk, int r) {
            Vector v;
#pragma unroll
            for (int i = 0; i < kVector; ++i) v.x[i] = static_cast<typename C::State>(value(c, kk, r, i));
            *reinterpret_cast<Vector *>(state + at) = v;
        });
    }
};

// K-first: the sums of the warps in the order of the exchanges above (lanes lk and lk + 4 have met in the warp already).
template <class C>
__device__ __forceinline__ Columns<C::kCols> sum_over_warps(const float (&part)[C::kGroupWarps][C::kVFirst ? 1 : C::D],
                                                            int column) {
    Columns<C::kCols> p[4], total;
#pragma unroll
    for (int w = 0; w < 4; ++w) p[w] = load_columns<C::kCols>(&part[w][column]);
#pragma unroll
    for (int r = 0; r < C::kCols; ++r) total.x[r] = (p[0].x[r] + p[2].x[r]) + (p[1].x[r] + p[3].x[r]);
    return total;
}

// S is decayed, and y = S^T k and z = S^T q are summed over the rows of class c.
template <class C, class Slot>
__device__ __forceinline__ void decay_and_multiply(Share<C> &S, const Slot &x, int c, float (&y)[C::kCols],
                                                   float (&z)[C::kCols]) {
#pragma unroll
    for (int kk = 0; kk < C::kRows; kk += 4) {
        float4 g4 = gamma4(x, S.lk(c), kk), k4 = share4(x.k, S.lk(c), kk), q4 = share4(x.q, S.lk(c), kk);
        const float g[4] = {g4.x, g4.y, g4.z, g4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < C::kCols; ++r) {
                float &s = S.s[c][kk + i][r];
                s = __fmul_rn(s, g[i]);
                y[r] = fmaf(s, k[i], y[r]);
                z[r] = fmaf(s, q[i], z[r]);
            }
    }
}

// One token, with its slot's vectors: the outputs, and u for update(). turn: number of the token among the group's.
template <class C, class Slot>
__device__ __forceinline__ void step(Share<C> &S, Smem<C> &smem, int group, const Slot &x, int turn, const Results &to,
                                     float (&u)[C::kCols]) {
    float y[C::kCols] = {}, z[C::kCols] = {};  // S^T k, S^T q
    decay_and_multiply<C>(S, x, 0, y, z);
    if constexpr (C::kVFirst) {
        constexpr int kTwins = 8 / C::kCols;  // lanes that end with the same column
        int lk = S.lane() & 7, column = S.column() + lk / kTwins;
        sum_over_lanes<C::kCols, 4>(y, lk);
        sum_over_lanes<C::kCols, 4>(z, lk);
        float own = x.beta * (x.v[column] - y[0]);
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) u[r] = __shfl_sync(0xffffffffu, own, (S.lane() & 24) + r * kTwins);
        if (lk % kTwins == 0) {
            if (to.kept_u) to.kept_u[column] = own;
            to.o[column] = static_cast<uint16_t>(to.o_bits(z[0], x.qk, own));
        }
    } else {
        float y1[C::kCols] = {}, z1[C::kCols] = {};
        decay_and_multiply<C>(S, x, 1, y1, z1);
        auto &sum = smem.sum[group][turn % 2];
        Columns<C::kCols> both;
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) both.x[r] = y[r] + y1[r];
        *reinterpret_cast<Columns<C::kCols> *>(&sum[0][S.warp()][S.column()]) = both;
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) both.x[r] = z[r] + z1[r];
        *reinterpret_cast<Columns<C::kCols> *>(&sum[1][S.warp()][S.column()]) = both;
        ptx::bar_sync(kGroupMeets + group, C::kGroupThreads);
        Columns<C::kCols> v = load_columns<C::kCols>(&x.v[S.column()]), total = sum_over_warps<C>(sum[0], S.column()), all_u;
#pragma unroll
        for (int r = 0; r < C::kCols; ++r) u[r] = all_u.x[r] = x.beta * (v.x[r] - total.x[r]);
        if (to.kept_u && S.warp() == (turn + 2) % 4) *reinterpret_cast<Columns<C::kCols> *>(to.kept_u + S.column()) = all_u;
        if (S.warp() == turn % 4) {
            total = sum_over_warps<C>(sum[1], S.column());
            uint32_t words[C::kCols / 2];
#pragma unroll
            for (int r = 0; r < C::kCols; r += 2)
                words[r / 2] = to.o_bits(total.x[r], x.qk, u[r]) | to.o_bits(total.x[r + 1], x.qk, u[r + 1]) << 16;
            if constexpr (C::kCols == 4)
                *reinterpret_cast<uint2 *>(to.o + S.column()) = make_uint2(words[0], words[1]);
            else
                *reinterpret_cast<uint32_t *>(to.o + S.column()) = words[0];
        }
    }
}

// S = S + k u^T
template <class C, class Slot>
__device__ __forceinline__ void update(Share<C> &S, const Slot &x, const float (&u)[C::kCols]) {
#pragma unroll
    for (int c = 0; c < C::kClasses; ++c)
#pragma unroll
        for (int kk = 0; kk < C::kRows; kk += 4) {
            float4 k4 = share4(x.k, S.lk(c), kk);
            const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < C::kCols; ++r) S.s[c][kk + i][r] = __fmaf_rn(k[i], u[r], S.s[c][kk + i][r]);
        }
}

// Verify: the tokens of a group's tiles, on their way from global memory to the group's slots.
template <class C>
struct Tokens {
    using Source = TokenSource<C::D, C::kKda, C::D>;
    const DeltaParams &p;
    int own;  // token of a block that this thread works on, -1: none
    Item item;
    RawToken<C::kKda> raw;
    RawGate<C::kKda> gate;

    __device__ __forceinline__ Tokens(const DeltaParams &params, int group)
        : p(params), own(static_cast<int>(threadIdx.x) % C::kGroupThreads) {
        if (group == 1) own -= C::kGroupThreads / 2;
        own = own < 0 || own >= C::kGroupThreads / 2 ? -1 : own / C::kLanes;
    }
    __device__ __forceinline__ void go_to(int tile) {
        item = item_of<C>(p, tile);
        if (own < 0) return;
        Source::fetch_gate(p, item.head, gate);
        fetch(0);
    }
    __device__ __forceinline__ void fetch(int first) {
        if (own >= 0 && first + own < item.length) Source(p, item).fetch(p, first + own, raw);
    }
    __device__ __forceinline__ void finish(int first, TokenSlot<C::D, C::kKda, C::D> (&slots)[C::kSlots]) const {
        if (own < 0) return;  // whole warps
        deposit<C::D, C::kKda, C::D>(p, raw, gate, first + own < item.length, slots[own],
                                     [&] { return Kept(p, item, first + own); });
    }
};

template <class C>
__device__ void consume(const DeltaParams &p, Smem<C> &smem, int tiles, int group) {
    Ring<C::kSlots> token_ring{ptx::shared_address(smem.token_ring[group])};
    RingState<C::kSlots> from;
    RingState<2 * C::kStages> at;
    Share<C> S;
    Results to = {nullptr, nullptr, static_cast<float>(p.scale), p.o.dtype == DType::BF16};
    int turn = 0, stride = C::kGroups * gridDim.x, i = blockIdx.x + group * gridDim.x;
    if (i >= tiles) return;
    auto meet = [&] { ptx::bar_sync(kGroupMeets + group, C::kGroupThreads); };
    auto arrive = [](uint32_t barrier) {  // what a warp is done with, told by one lane
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
    };
    Tokens<C> tokens(p, group);
    auto look_ahead = [&] {
        if (i + stride < tiles) tokens.go_to(i + stride);
    };
    if constexpr (!C::kTokenWarps) tokens.go_to(i);
    if (group == 1) at.advance();
    for (; i < tiles; i += stride, at.advance(), at.advance()) {
        int stage = at.stage < C::kStages ? at.stage : at.stage - C::kStages;
        uint32_t done = ptx::shared_address(&smem.done[stage]);
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.full[at.stage]), at.phase);
        Tile tile = smem.tile[stage];
        bool written = tile.write_offset >= 0, leaves_from_stage = C::kBulkStore && written;
        if (!tile.padding) S.load(smem.state[stage]);
        if (!leaves_from_stage) arrive(done);
        if (tile.padding) {
            zero_outputs<C::D, C::kKda, C::D, true, C::kGroupThreads>(p, item_of<C>(p, i), threadIdx.x % C::kGroupThreads);
            if constexpr (C::kTokenWarps) {
                for (int t = 0; t < tile.length; ++t, from.advance()) {
                    token_ring.wait_full(from);
                    arrive(token_ring.empty(from.stage));
                }
            } else {
                look_ahead();
            }
            continue;
        }
        to.o = reinterpret_cast<uint16_t *>(p.o.data) + tile.o_offset;
        to.kept_u = p.kept_u ? reinterpret_cast<float *>(p.kept_u.data) + tile.u_offset : nullptr;
        auto one_token = [&](const auto &x, bool last) {
            float u[C::kCols];
            step<C>(S, smem, group, x, turn, to, u);
            if (written || !last) update<C>(S, x, u);
            ++turn;
            to.o += p.o.stride[1];
            if (to.kept_u) to.kept_u += p.kept_u.stride[1];
        };
        if constexpr (C::kTokenWarps) {
            for (int t = 0; t < tile.length; ++t, from.advance()) {
                token_ring.wait_full(from);
                one_token(smem.token[group][from.stage], t == tile.length - 1);
                arrive(token_ring.empty(from.stage));
            }
        } else {
            for (int first = 0; first < tile.length; first += C::kBlock) {
                meet();  // the slots are free
                tokens.finish(first, smem.token[group]);
                meet();
                int next = first + C::kBlock;
                next < tile.length ? tokens.fetch(next) : look_ahead();
                for (int t = first; t < next && t < tile.length; ++t)
                    one_token(smem.token[group][t - first], t == tile.length - 1);
            }
        }
        if (leaves_from_stage) {
            S.store(smem.state[stage]);
            ptx::fence_proxy_async_shared_cta();
            arrive(done);
        } else if (written) {
            S.store(reinterpret_cast<typename C::State *>(p.state_out.data) + tile.write_offset);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) delta_decode_kernel(const __grid_constant__ DeltaParams p) {
    extern __shared__ __align__(128) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    int tiles = static_cast<int>(p.N * p.HV), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (auto &full : smem.full) ptx::mbarrier_init(ptx::shared_address(&full), 1);
        for (auto &done : smem.done) ptx::mbarrier_init(ptx::shared_address(&done), C::kGroupWarps);
        for (auto &tokens : smem.token_ring) Ring<C::kSlots>{ptx::shared_address(tokens)}.init(C::kLanes, C::kGroupWarps);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    constexpr int kConsumerWarps = C::kGroups * C::kGroupWarps;
    if (warp < kConsumerWarps) {
        ptx::setmaxnreg_inc<C::kConsumerRegisters>();
        consume(p, smem, tiles, warp / C::kGroupWarps);
    } else {
        ptx::setmaxnreg_dec<C::kOtherRegisters>();
        if (warp == kConsumerWarps) move_states(p, smem, tiles);
        if constexpr (C::kTokenWarps) {
            int group = warp - kConsumerWarps - 1;
            if (group == 0 || group == 1) produce_tokens(p, smem, tiles, group);
        }
    }
    zero_tail<C::D, C::kThreads>(p, blockIdx.x, gridDim.x);
}

template <class C>
void launch_config(const DeltaParams &p, int multiprocessors) {
    static_assert(sizeof(Smem<C>) <= 232448, "227 KB of shared memory per CTA");
    int64_t tiles = p.N * p.HV;
    LaunchConfig config;
    config.grid.x = tiles < multiprocessors && !p.zero_tail ? tiles : multiprocessors;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    launch("delta_decode_kernel", delta_decode_kernel<C>, config, p);
}

}  // namespace linattn::cuda::delta_decode
