// The delta rule token by token, for {gdn,kda}_{fwd,decode,verify}:
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q        arXiv:2412.06464, arXiv:2510.26692
//
// Grid: one CTA of kWarps warps per (sequence, value head, block of 16 kWarps columns of V), in a loop over what does not fit.
// A warp owns all of K and 16 columns of V in registers (tile.cuh: D/2 floats a lane) and shares nothing with other warps but
// the tokens' vectors. Tokens pass through a ring of 16 slots in shared memory, in blocks of kBlock: while a block is computed
// the next one's loads are in flight in registers (fetch), then they are normalised, gated and put into their slots (deposit).
//
// Schedule, per block:  fetch(next) . for each token { decay, S^T k and S^T q, reduce over 8 lanes, u, update, o } .
//                       deposit(next) . barrier
// A lane group of D/8 lanes fetches one token: 8 elements of q, k, g (KDA) and v each.
// The sums over K run over 16 products in a lane and 3 exchanges, in an order that depends on nothing but K: results do not
// depend on kWarps, the batch, the packing or the stride order, and decode, verify and fwd agree in bits.
//
// Shared memory at D = 128: 16 slots x (q, k, gamma: 512 B each, v and u: 64 kWarps B each) = 32 KB with 4 warps.
// Registers: state 64, k and q 32, gamma 16 (KDA), sums 8, fetched block 22: below 168 (3 CTAs of 4 warps on an SM).
#include <type_traits>

#include "common/device_guard.h"
#include "common/launch.h"
#include "common/sequences.cuh"
#include "recurrent.h"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_recurrent {  // named: an anonymous one would put the path of this file into the kernels' names

template <int kD, bool kKdaGate, int kWarpCount, bool kFewTokens>
struct Config {
    static constexpr int D = kD, kWarps = kWarpCount;
    static constexpr bool kKda = kKdaGate;
    static constexpr bool kDrafts =
        kFewTokens;  // decode and verify: loads are not overlapped with the steps, which saves registers
    static constexpr int kThreads = 32 * kWarps, kGroup = D / 8;  // lanes that fetch one token
    static constexpr int kBlock = kThreads / kGroup;              // tokens per block
    static constexpr int kColumns = kTileV * kWarps;              // columns of V per CTA
    // Tokens in shared memory: the block being computed and the next one; all 16 of a verify call.
    static constexpr int kSlots = 2 * kBlock > 16 ? 2 * kBlock : 16;
    static_assert(kColumns / 8 <= kGroup, "a lane group fetches the CTA's columns of v");
};

template <class C>
struct Smem {
    TokenSlot<C::D, C::kKda, C::kColumns> token[C::kSlots];
    float u[C::kSlots][C::kColumns];
};

// The tokens of an item on their way to their slots, one of a block for each group of lanes.
template <class C>
struct Tokens {
    const DeltaParams &p;
    const Item &item;
    TokenSource<C::D, C::kKda, C::kColumns> source;
    RawToken<C::kKda> raw;
    RawGate<C::kKda> gate;

    __device__ __forceinline__ Tokens(const DeltaParams &params, const Item &i) : p(params), item(i), source(params, i) {
        source.fetch_gate(p, item.head, gate);
    }
    __device__ __forceinline__ void fetch(int token) {
        if (token < item.length) source.fetch(p, token, raw);
    }
    __device__ __forceinline__ void finish(int token, TokenSlot<C::D, C::kKda, C::kColumns> &slot) const {
        deposit<C::D, C::kKda, C::kColumns>(p, raw, gate, token < item.length, slot,
                                            [&] { return C::kDrafts && item.v_cta == 0 ? Kept(p, item, token) : Kept(); });
    }
};

struct Nothing {
    template <class... Args>
    __device__ __forceinline__ Nothing(const Args &...) {}
};

// Where a lane writes its output: o of token 0, then one stride of T per token.
struct Output {
    uint16_t *first;
    int64_t stride;
    float scale;
    bool bf16;

    template <class C>
    static __device__ Output of(const DeltaParams &p, const Item &item) {
        int lane = threadIdx.x & 31, column = item.v_cta + (threadIdx.x / 32) * kTileV + 4 * (lane >> 3) + (lane & 3);
        return {reinterpret_cast<uint16_t *>(p.o.data) + token_offset(p.o, item, 0) + column, p.o.stride[1],
                static_cast<float>(p.scale), p.o.dtype == DType::BF16};
    }
    __device__ __forceinline__ void store(int token, float x) const {
        first[token * stride] = bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
    }
};

// One token: S from the slot's vectors, its output to global memory, u to shared memory.
template <class C>
__device__ __forceinline__ void step(const Output &out, Smem<C> &smem, StateTile<C::D> &S, int token) {
    int lane = threadIdx.x & 31, lk = lane & 7, slot = token % C::kSlots;
    int column = (threadIdx.x / 32) * kTileV + 4 * (lane >> 3);  // in the CTA
    const auto &x = smem.token[slot];
    float sum[8] = {};  // S^T k in 0..3, S^T q in 4..7
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) {
        S.decay4(kk, gamma4(x, lk, kk));
        float4 k4 = share4(x.k, lk, kk), q4 = share4(x.q, lk, kk);
        const float k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                sum[r] = fmaf(S.s[kk + i][r], k[i], sum[r]);
                sum[4 + r] = fmaf(S.s[kk + i][r], q[i], sum[4 + r]);
            }
    }
    // Eight sums over the eight lanes lk: each exchange halves what a lane carries, lane lk ends with sum number lk.
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        bool upper = lk & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            float sent = upper ? sum[i] : sum[i + half], kept = upper ? sum[i + half] : sum[i];
            sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, half);
        }
    }
    int r = lk & 3;
    float u_own = x.beta * (x.v[column + r] - sum[0]);  // of use in lanes lk < 4
    float u[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = __shfl_sync(0xffffffffu, u_own, (lane & 24) + i);
#pragma unroll
    for (int kk = 0; kk < C::D / 8; kk += 4) S.update4(kk, share4(x.k, lk, kk), u);
    float u_mine = __shfl_sync(0xffffffffu, u_own, (lane & 24) + r);
    if (lk >= 4)
        out.store(token, out.scale * fmaf(x.qk, u_mine, sum[0]));
    else
        smem.u[slot][column + r] = u_own;
}

// Row of `checkpoints` for the i-th checkpoint of sequence n, -1 for none. Called by whole warps.
__device__ __forceinline__ int64_t checkpoint_row(const DeltaParams &p, int64_t n, int64_t i) {
    int64_t row;
    if (p.checkpoint_indices) {
        if (i >= p.M) return -1;
        row = load_int(p.checkpoint_indices, n * p.checkpoint_indices.stride[0] + i * p.checkpoint_indices.stride[1]);
    } else if (!p.cu_seqlens) {
        row = n * (p.T / p.checkpoint_every) + i;
    } else {
        int64_t before = 0;
        for (int64_t m = threadIdx.x & 31; m < n; m += 32) {
            int64_t length = clamped_start(p, m + 1) - clamped_start(p, m);
            before += length > 0 ? length / p.checkpoint_every : 0;
        }
        for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(0xffffffffu, before, mask);
        row = before + i;
    }
    return row >= 0 && row < p.C ? row : -1;
}

// Parent of a drafted token: -1 is the state that was read.
__device__ __forceinline__ int parent_of(const DeltaParams &p, int64_t n, int token) {
    if (!p.parents) return token - 1;
    int64_t parent = load_int(p.parents, n * p.parents.stride[0] + token * p.parents.stride[1]);
    return parent >= 0 && parent < token ? static_cast<int>(parent) : -1;
}

// Drafted tokens: each continues from its parent's state, which is replayed from the one read unless it is the one at hand.
template <class C>
__device__ void verify(const DeltaParams &p, const Item &item, Smem<C> &smem, StateTile<C::D> &S, int64_t read_row,
                       int v_warp) {
    int lane = threadIdx.x & 31, lk = lane & 7, column = (threadIdx.x / 32) * kTileV + 4 * (lane >> 3);
    {
        int own = threadIdx.x / C::kGroup;
        Tokens<C> tokens(p, item);
        for (int t = own; t < own + item.length; t += C::kBlock) {
            tokens.fetch(t);
            tokens.finish(t, smem.token[t % C::kSlots]);
        }
        __syncthreads();
    }
    Output out = Output::of<C>(p, item);
    int at_hand = -1;
    for (int t = 0; t < item.length; ++t) {
        int parent = parent_of(p, item.n, t);
        if (parent != at_hand) {
            uint32_t path = 0;
            for (int a = parent; a >= 0; a = parent_of(p, item.n, a)) path |= 1u << a;
            S.load(p.state_in, read_row, item.head, v_warp);
            __syncwarp();
            for (; path; path &= path - 1) {
                int a = __ffs(path) - 1;
                float u[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) u[r] = smem.u[a][column + r];
#pragma unroll
                for (int kk = 0; kk < C::D / 8; kk += 4) {
                    S.decay4(kk, gamma4(smem.token[a], lk, kk));
                    S.update4(kk, share4(smem.token[a].k, lk, kk), u);
                }
            }
        }
        step<C>(out, smem, S, t);
        __syncwarp();
        at_hand = t;
        if (p.write_indices) {
            int64_t row = load_int(p.write_indices, item.n * p.write_indices.stride[0] + t * p.write_indices.stride[1]);
            if (row >= 0 && row < p.F) S.store(p.state_out, row, item.head, v_warp);
        }
    }
    if (!p.kept_u) return;
    for (int i = lane; i < item.length * kTileV; i += 32) {
        int t = i / kTileV, own = (threadIdx.x / 32) * kTileV + i % kTileV;
        reinterpret_cast<float *>(p.kept_u.data)[token_offset(p.kept_u, item, t) + item.v_cta + own] = smem.u[t][own];
    }
}

template <class C>
__device__ void run_item(const DeltaParams &p, const Item &item, Smem<C> &smem) {
    int v_warp = item.v_cta + (threadIdx.x / 32) * kTileV;
    int64_t read_row = pool_row(p.read_indices, item.n, p.state_in ? p.P : p.N);
    if (read_row < 0) {
        zero_outputs<C::D, C::kKda, C::kColumns, C::kDrafts, C::kThreads>(p, item, threadIdx.x);
        return;
    }
    StateTile<C::D> S;
    if (p.state_in)
        S.load(p.state_in, read_row, item.head, v_warp);
    else
        S.zero();

    if constexpr (C::kDrafts) {
        if (p.op == Op::Verify) {
            verify<C>(p, item, smem, S, read_row, v_warp);
            return;
        }
    }
    Output out = Output::of<C>(p, item);
    int own = threadIdx.x / C::kGroup;  // token of the block that this thread's group handles
    auto slot_of = [&](int token) -> auto & { return smem.token[token % C::kSlots]; };
    auto prepare = [&](int token) {  // nothing of it lives through the steps
        Tokens<C> tokens(p, item);
        tokens.fetch(token);
        tokens.finish(token, slot_of(token));
    };
    std::conditional_t<C::kDrafts, Nothing, Tokens<C>> tokens(p, item);
    prepare(own);
    __syncthreads();
    for (int first = 0; first < item.length; first += C::kBlock) {
        int next = first + C::kBlock, end = next < item.length ? next : item.length;
        if constexpr (!C::kDrafts) tokens.fetch(next + own);
        for (int t = first; t < end; ++t) {
            step<C>(out, smem, S, t);
            if constexpr (!C::kDrafts) {
                if (p.checkpoint_every && (t + 1) % static_cast<int>(p.checkpoint_every) == 0) {
                    int64_t row = checkpoint_row(p, item.n, (t + 1) / static_cast<int>(p.checkpoint_every) - 1);
                    if (row >= 0) S.store(p.checkpoints, row, item.head, v_warp);
                }
            }
        }
        if (next < item.length) {
            if constexpr (C::kDrafts)
                prepare(next + own);
            else
                tokens.finish(next + own, slot_of(next + own));
        }
        __syncthreads();
    }
    if (!p.state_out) return;
    int64_t write_row = pool_row(p.write_indices, item.n, p.F);
    if (write_row >= 0) S.store(p.state_out, write_row, item.head, v_warp);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kWarps == 4 ? 2 : 8)
    delta_recurrent_kernel(const __grid_constant__ DeltaParams p) {
    extern __shared__ __align__(16) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    constexpr int kBlocksV = C::D / C::kColumns;
    int64_t items = p.N * p.HV * kBlocksV;
    for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
        Item item = make_item(p, i / kBlocksV / p.HV, static_cast<int>(i / kBlocksV % p.HV),
                              static_cast<int>(i % kBlocksV) * C::kColumns);
        __syncthreads();  // the previous item's slots are free
        run_item<C>(p, item, smem);
    }
    zero_tail<C::D, C::kThreads>(p, blockIdx.x, gridDim.x);
    if constexpr (!C::kDrafts) clear_checkpoints<C::D>(p, blockIdx.x, gridDim.x, threadIdx.x, C::kThreads);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2)
    delta_recurrent_flagged_kernel(const __grid_constant__ DeltaParams p, const int *flags) {
    extern __shared__ __align__(16) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    constexpr int kBlocksV = C::D / C::kColumns;
    zero_tail<C::D, C::kThreads>(p, blockIdx.x, gridDim.x);
    if (!flags[p.N * p.HV]) return;
    for (int64_t i = blockIdx.x; i < p.N * p.HV * kBlocksV; i += gridDim.x) {
        const int64_t n = i / kBlocksV / p.HV, head = i / kBlocksV % p.HV;
        if (!flags[n * p.HV + head]) continue;
        __syncthreads();  // the previous item's slots are free
        run_item<C>(p, make_item(p, n, static_cast<int>(head), static_cast<int>(i % kBlocksV) * C::kColumns), smem);
    }
}

template <int D>
void launch_flagged(const DeltaParams &p, const int *flags) {
    using C = Config<D, false, 4, false>;
    const int64_t items = p.N * p.HV * (D / C::kColumns);
    LaunchConfig config;
    config.grid.x = p.zero_tail || items > 1056 ? 1056 : items;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    linattn::cuda::launch("delta_recurrent_flagged_kernel", delta_recurrent_flagged_kernel<C>, config, p, flags);
}

template <class C>
void launch(const DeltaParams &p) {
    int64_t items = p.N * p.HV * (C::D / C::kColumns);
    if (p.zero_tail && p.T > items) items = p.T < 1024 ? p.T : 1024;
    LaunchConfig config;
    config.grid.x = items < kMaxGrid ? items : kMaxGrid;
    config.block.x = C::kThreads;
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(p.stream);
    linattn::cuda::launch("delta_recurrent_kernel", delta_recurrent_kernel<C>, config, p);
}

template <int D, bool kKda, bool kDrafts>
void launch_for(const DeltaParams &p) {
    // Few states: one warp a CTA, so that a state spreads over D/16 SMs.
    if (p.N * p.HV * (D / 64) < 4 * 132)
        launch<Config<D, kKda, 1, kDrafts>>(p);
    else
        launch<Config<D, kKda, 4, kDrafts>>(p);
}

}  // namespace delta_recurrent

void launch_delta_recurrent_flagged(const DeltaParams &p, const int *flags) {
    DeviceGuard guard(p.device);
    p.K == 128 ? delta_recurrent::launch_flagged<128>(p, flags) : delta_recurrent::launch_flagged<64>(p, flags);
}

void launch_delta_recurrent(const DeltaParams &p) {
    using namespace delta_recurrent;
    DeviceGuard guard(p.device);
    using Launcher = void (*)(const DeltaParams &);
    static constexpr Launcher launchers[2][2][2] = {// [K = 128][KDA][decode or verify]
                                                    {{launch_for<64, false, false>, launch_for<64, false, true>},
                                                     {launch_for<64, true, false>, launch_for<64, true, true>}},
                                                    {{launch_for<128, false, false>, launch_for<128, false, true>},
                                                     {launch_for<128, true, false>, launch_for<128, true, true>}}};
    launchers[p.K == 128][p.family == Family::Kda][p.op != Op::Fwd](p);
}

}  // namespace linattn::cuda
