// Gradients of a chunk of up to 64 tokens and one value head, from what the scans kept. With S the state before the chunk, D its
// gradient after it, u = beta e, w = beta du = dv, and d_{s..t} the product of the decays of tokens s + 1 .. t, per channel of K:
//
//   a_ts = u_s . do_t,  b_ts = u_s . w_t                                                    over V, all pairs s <= t of the chunk
//   dq_t =   scale [ d_{0..t} (S do_t)  +  sum_{s <= t} d_{s..t} k_s a_ts ]
//   dk_t = - d_{0..t} (S w_t)  -  sum_{s < t} d_{s..t} k_s b_ts
//          + d_{t..end} (D u_t)  +  sum_{s >= t} d_{t..s} (scale q_s a_st - k_s b_st)
//   dg_t =   sum_{s < t <= r} h_sr,   h_sr = d_{s..r} k_s (scale q_r a_rs - k_r b_rs),   and the same with S for s, D for r
//   dbeta_t = du_t . e_t
//
// dg is summed over the pairs that a decay lies between, every one of which has that decay as a factor: nothing cancels, so a
// steep gate has a small gradient, not the rounding of a large one. Decays enter as running products from token to token:
// no exponential, no overflow, and a full reset is a factor of 0. arXiv:2412.06464, arXiv:2510.26692.
//
// One CTA of D threads per (chunk, value head). In passes 1 and 2 a warp has 32 channels of K, or rows of tokens, from then on a
// thread has one channel. Passes:
//   1  a and b: tf32 with both factors in two terms, from slices of D / 8 columns of V in shared memory
//   2  S do, S w and D u likewise
//   3  what these give to dq, dk, dg; running products forwards, backwards
//   4  pairs: 16 tokens s at a time in registers, t running over the rest of the chunk; 64 x 64 x D, four times, in float
//   5  through the gate and the form of beta, sums over the chunk for A_log and dt_bias
// Shared memory at D = 128: pairs 32 KB, dg and h 2 x 32 KB, slices 14 KB: two CTAs an SM. Registers below 255, the 128 sums of
// pass 2 being the most. What a thread reads from global memory is asked for one step ahead.
#include "common/device_guard.h"
#include "common/launch.h"
#include "ptx/mma.cuh"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_bwd {

constexpr int kC = kBwdChunk, kPitch = kC + 8, kTile = 16;

template <int kD, bool kKdaGate>
struct ChunkConfig {
    static constexpr int D = kD;
    static constexpr bool kKda = kKdaGate;
    static constexpr int kSlice = D / 8,
                         kStaged = kC * kSlice / D;  // columns of V at a time; elements of each that a thread brings
};

template <class C>
struct alignas(16) ChunkSmem {
    float a[kC][kC], b[kC][kC];         // [t][s]
    float dg[kC][C::D], h[kC][C::D];    // by token and channel; h_t: sums of h_st over the s of earlier tiles
    float slice[3][C::kSlice][kPitch];  // columns of V of do, w and u, [column][token]
    float beta[kC], sum[2][C::D];       // sums of a chunk: of A_log, of dt_bias
};

template <class C>
struct ChunkGradients {
    static constexpr int D = C::D, kSlice = C::kSlice;
    const BwdCall &call;
    const Chunk &c;
    ChunkSmem<C> &smem;
    const int channel = threadIdx.x;
    const float scale = static_cast<float>(call.p.scale);

    // Offsets into the workspace: of a value head's row, of a key head's.
    __device__ __forceinline__ int64_t value_row(int t) const { return ((c.row + t) * call.p.HV + c.head) * D; }
    __device__ __forceinline__ int64_t key_row(int t) const { return ((c.row + t) * call.p.H + c.key_head) * D; }
    __device__ __forceinline__ float q(int t) const { return call.w.q[key_row(t) + channel]; }
    __device__ __forceinline__ float k(int t) const { return call.w.k[key_row(t) + channel]; }
    __device__ __forceinline__ float decay(int t) const {
        return C::kKda ? call.w.decay[value_row(t) + channel] : call.w.decay[(c.row + t) * call.p.HV + c.head];
    }
    __device__ __forceinline__ float &dq(int t) const { return call.w.dq[value_row(t) + channel]; }
    __device__ __forceinline__ float &dk(int t) const { return call.w.dk[value_row(t) + channel]; }

    // Columns first .. first + kSlice of do, w and u on their way to shared memory; zeros past the chunk's end.
    struct Slice {
        uint16_t d_o[C::kStaged];
        float du[C::kStaged], e[C::kStaged];
    };
    static constexpr int kTokensAtOnce = D / kSlice;
    static __device__ __forceinline__ int staged_token(int i) { return threadIdx.x / kSlice + i * kTokensAtOnce; }
    static __device__ __forceinline__ int staged_column() { return threadIdx.x % kSlice; }
    __device__ __forceinline__ void fetch(Slice &slice, int first) const {
        const Tensor &from = call.p.d_o;
        const int column = first + staged_column();
        const auto *d_o =
            reinterpret_cast<const uint16_t *>(from.data) + element(from, c.b, c.token + staged_token(0), c.head, column);
        const float *du = call.w.du + value_row(staged_token(0)) + column, *e = call.w.e + (du - call.w.du);
        const int64_t step = call.p.HV * (D * kTokensAtOnce), step_do = from.stride[1] * kTokensAtOnce;
#pragma unroll
        for (int i = 0; i < C::kStaged; ++i, d_o += step_do, du += step, e += step) {
            const bool inside = staged_token(i) < c.length;
            slice.d_o[i] = inside ? *d_o : 0;
            slice.du[i] = inside ? *du : 0.0f;
            slice.e[i] = inside ? *e : 0.0f;
        }
    }
    __device__ __forceinline__ void deposit(const Slice &slice) const {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < C::kStaged; ++i) {
            const int t = staged_token(i), column = staged_column();
            const float beta = t < c.length ? smem.beta[t] : 0.0f;
            smem.slice[0][column][t] =
                call.p.d_o.dtype == DType::BF16 ? bf16_bits(slice.d_o[i]) : __half2float(__ushort_as_half(slice.d_o[i]));
            smem.slice[1][column][t] = beta * slice.du[i];
            smem.slice[2][column][t] = beta * slice.e[i];
        }
        __syncthreads();
    }

    // Products of 64 tokens with something else over kSlice columns of V, on tensor cores in tf32, each factor in two terms (a half
    // precision one is exact in one): what is left of the rounding is 2^-21 of a factor. Operands as mma_m16n8k8_tf32 has them.
    struct Split {
        uint32_t high, low;
        __device__ __forceinline__ explicit Split(float x) {
            high = __float_as_uint(x) & 0xffffe000u;
            low = __float_as_uint(x - __uint_as_float(high));
        }
    };
    struct Rows {  // 16 tokens of a slice, columns column .. column + 8
        uint32_t high[4], low[4];
    };
    struct Columns {  // 8 of the other factor
        uint32_t high[2], low[2];
        __device__ __forceinline__ Columns(float x0, float x1) {
            const Split a(x0), b(x1);
            high[0] = a.high, high[1] = b.high, low[0] = a.low, low[1] = b.low;
        }
    };
    static __device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int lane_column() { return threadIdx.x % 4; }
    __device__ __forceinline__ Rows rows(int which, int column, int token) const {
        Rows r;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Split x(smem.slice[which][column + lane_column() + i / 2 * 4][token + lane_row() + i % 2 * 8]);
            r.high[i] = x.high, r.low[i] = x.low;
        }
        return r;
    }
    template <bool kExactRows>
    static __device__ __forceinline__ void multiply(float (&sum)[4], const Rows &a, const Columns &b) {
        if (!kExactRows) ptx::mma_m16n8k8_tf32(sum, a.low, b.high[0], b.high[1]);
        ptx::mma_m16n8k8_tf32(sum, a.high, b.low[0], b.low[1]);
        ptx::mma_m16n8k8_tf32(sum, a.high, b.high[0], b.high[1]);
    }
    // f(row, column, two values) for the pairs of a tile of sums.
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const float (&sum)[4], int row, int column, F f) {
        f(row + lane_row(), column + 2 * lane_column(), make_float2(sum[0], sum[1]));
        f(row + lane_row() + 8, column + 2 * lane_column(), make_float2(sum[2], sum[3]));
    }

    static constexpr int kWarps = D / 32, kRowTiles = kC / 16, kOwnTiles = kRowTiles / kWarps, kChannelTiles = 4;

    // The warp's columns of S or D for one step of the products with a state: 8 rows of V, 32 channels.
    struct StateStep {
        float x[kChannelTiles][2];
    };
    __device__ __forceinline__ StateStep state_step(const float *state, int column) const {
        StateStep step;
        const float *from = state + (column + lane_column()) * D + threadIdx.x / 32 * 32 + lane_row();
#pragma unroll
        for (int n = 0; n < kChannelTiles; ++n)
            step.x[n][0] = column < D ? from[8 * n] : 0.0f, step.x[n][1] = column < D ? from[8 * n + 4 * D] : 0.0f;
        return step;
    }

    // Pass 1: a and b, a warp's own rows of tokens t.
    __device__ __forceinline__ void pairs() const {
        const int own = threadIdx.x / 32 * kOwnTiles;
        float a[kOwnTiles][kC / 8][4] = {}, b[kOwnTiles][kC / 8][4] = {};
        Slice slice;
        fetch(slice, 0);
#pragma unroll 1
        for (int first = 0; first < D; first += kSlice) {
            deposit(slice);
            if (first + kSlice < D) fetch(slice, first + kSlice);
#pragma unroll 1
            for (int column = 0; column < kSlice; column += 8)
#pragma unroll
                for (int m = 0; m < kOwnTiles; ++m) {
                    const Rows d_o = rows(0, column, 16 * (own + m)), w = rows(1, column, 16 * (own + m));
#pragma unroll
                    for (int n = 0; n < kC / 8; ++n) {
                        if (n >= 2 * (own + m + 1)) continue;  // no s <= t
                        const auto u = [&](int k) { return smem.slice[2][column + lane_column() + k][8 * n + lane_row()]; };
                        const Columns others(u(0), u(4));
                        multiply<true>(a[m][n], d_o, others);
                        multiply<false>(b[m][n], w, others);
                    }
                }
        }
#pragma unroll
        for (int m = 0; m < kOwnTiles; ++m)
#pragma unroll
            for (int n = 0; n < kC / 8; ++n) {
                for_each_pair(a[m][n], 16 * (own + m), 8 * n,
                              [&](int t, int s, float2 x) { *reinterpret_cast<float2 *>(&smem.a[t][s]) = x; });
                for_each_pair(b[m][n], 16 * (own + m), 8 * n, [&](int t, int s, float2 x) {
                    *reinterpret_cast<float2 *>(&smem.b[t][s]) = make_float2(t == s ? 0.0f : x.x, t == s + 1 ? 0.0f : x.y);
                });
            }
    }

    // Products of a state with kCount of the slices from kFirst on, all tokens, a warp's own channels: put(i, t, channel, two values).
    template <int kFirst, int kCount, class Put>
    __device__ __forceinline__ void with_state(const float *state, Put put) const {
        float sum[kCount][kRowTiles][kChannelTiles][4] = {};
        Slice slice;
        fetch(slice, 0);
        StateStep next = state_step(state, 0);
#pragma unroll 1
        for (int first = 0; first < D; first += kSlice) {
            deposit(slice);
            if (first + kSlice < D) fetch(slice, first + kSlice);
#pragma unroll 1
            for (int column = 0; column < kSlice; column += 8) {
                const StateStep step = next;
                next = state_step(state, first + column + 8);
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                    for (int i = 0; i < kCount; ++i) {
                        const Rows x = rows(kFirst + i, column, 16 * m);
#pragma unroll
                        for (int n = 0; n < kChannelTiles; ++n) {
                            const Columns others(step.x[n][0], step.x[n][1]);
                            if (kFirst + i == 0)
                                multiply<true>(sum[i][m][n], x, others);
                            else
                                multiply<false>(sum[i][m][n], x, others);
                        }
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                for (int n = 0; n < kChannelTiles; ++n)
                    for_each_pair(sum[i][m][n], 16 * m, threadIdx.x / 32 * 32 + 8 * n,
                                  [&](int t, int of_channel, float2 x) { put(i, t, of_channel, x); });
    }

    // Pass 2: S do and S w, to where dq and dk will be, and D u, to where dg will be.
    __device__ __forceinline__ void states() const {
        const int64_t at = (c.index * call.p.HV + c.head) * D * D;
        with_state<0, 2>(call.w.states + at, [&](int i, int t, int of_channel, float2 x) {
            float *const to = i == 0 ? call.w.dq : call.w.dk;
            if (t < c.length) *reinterpret_cast<float2 *>(to + value_row(t) + of_channel) = x;
        });
        with_state<2, 1>(call.w.grads + at, [&](int, int t, int of_channel, float2 x) {
            *reinterpret_cast<float2 *>(&smem.dg[t][of_channel]) = x;
        });
        __syncthreads();
    }

    // Pass 3: decays of what S and D give.
    __device__ __forceinline__ void borders() const {
        const int64_t at = (c.index * call.p.HV + c.head) * D * D + channel;
        float both = 0.0f, faded = 1.0f;  // row sum of S o D; d_{0..t}
#pragma unroll 8
        for (int column = 0; column < D; ++column)
            both = fmaf(call.w.states[at + column * D], call.w.grads[at + column * D], both);
#pragma unroll 4
        for (int t = 0; t < c.length; ++t) {
            faded *= decay(t);
            const float of_do = faded * dq(t), of_w = faded * dk(t);
            dq(t) = scale * of_do;
            dk(t) = -of_w;
            smem.h[t][channel] = scale * q(t) * of_do - k(t) * of_w;
        }
        float left = 1.0f;  // d_{t..end}
        for (int t = c.length - 1; t >= 0; --t) {
            const float x = left * smem.dg[t][channel];
            dk(t) += x;
            smem.dg[t][channel] = k(t) * x;
            left *= decay(t);
        }
        float before = left * both;  // of S and D, then of the tokens before t and D
        for (int t = 0; t < c.length; ++t) {
            const float own = smem.dg[t][channel];
            smem.dg[t][channel] = before;
            before += own;
        }
    }

    // Pass 4: what a token t brings, and where its share of the pairs goes; and the tokens s of one tile.
    struct Token {
        float decay, q, k, dq, dk;
    };
    struct Tile {
        float key[kTile], faded[kTile], dk[kTile], dg[kTile];  // faded: d_{s..t}
    };
    __device__ __forceinline__ Token token(int t) const {
        if (t >= c.length) return {};
        return {decay(t), q(t), k(t), dq(t), dk(t)};
    }
    // kWithin: t is one of the tile.
    template <bool kWithin>
    __device__ __forceinline__ void meet(Tile &tile, int first, int t, const Token &x) const {
        const float q_t = scale * x.q;
        float to_dq = 0.0f, to_dk = 0.0f, h = 0.0f;
#pragma unroll
        for (int i4 = 0; i4 < kTile; i4 += 4) {
            const float4 a4 = *reinterpret_cast<const float4 *>(&smem.a[t][first + i4]);
            const float4 b4 = *reinterpret_cast<const float4 *>(&smem.b[t][first + i4]);
            const float a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = i4 + j, s = first + i;
                if (kWithin)
                    tile.faded[i] = s < t ? tile.faded[i] * x.decay : s == t ? 1.0f : 0.0f;
                else
                    tile.faded[i] *= x.decay;
                const float shared = tile.faded[i] * tile.key[i], y = q_t * a[j] - x.k * b[j];
                to_dq = fmaf(shared, a[j], to_dq), to_dk = fmaf(shared, b[j], to_dk);
                tile.dk[i] = fmaf(tile.faded[i], y, tile.dk[i]);
                if (!kWithin || s <= t) tile.dg[i] += h;  // h: of the pairs (before s, t)
                if (!kWithin || s < t) h = fmaf(shared, y, h);
            }
        }
        dq(t) = fmaf(scale, to_dq, x.dq);
        dk(t) = x.dk - to_dk;
        if (!kWithin) smem.h[t][channel] += h;
    }

    __device__ __forceinline__ void tokens() const {
        for (int first = 0; first < c.length; first += kTile) {
            const int end = min(first + kTile, c.length);
            float after = 0.0f;  // pairs of an earlier tile, or S, with a token from t on
            for (int t = c.length - 1; t >= first; --t) {
                after += smem.h[t][channel];
                if (t < end) smem.dg[t][channel] += after;
            }
            Tile tile = {};
#pragma unroll
            for (int i = 0; i < kTile; ++i) tile.key[i] = first + i < end ? k(first + i) : 0.0f;
            Token next = token(first);
            const auto step = [&](int t) {
                const Token x = next;
                next = token(t + 1);
                return x;
            };
            for (int t = first; t < end; ++t) meet<true>(tile, first, t, step(t));
            for (int t = end; t < c.length; ++t) meet<false>(tile, first, t, step(t));
#pragma unroll
            for (int i = 0; i < kTile; ++i) {
                if (first + i >= end) continue;
                dk(first + i) += tile.dk[i];
                smem.dg[first + i][channel] += tile.dg[i];
            }
        }
    }

    // d(raw gate input) from d(log decay); adds what A_log and dt_bias get.
    __device__ __forceinline__ float gate_gradient(float dg, int t, int of_channel, float amplitude, float &dA,
                                                   float &dbias) const {
        const BwdParams &p = call.p;
        if (p.gate == Gate::None) return dg;
        const float x = gate_input(p, element(p.g, c.b, c.token + t, c.head, C::kKda ? of_channel : 0), c.head, of_channel);
        return through_gate(p, x, dg, amplitude, dA, dbias);
    }

    // Pass 5.
    __device__ __forceinline__ void gates() const {
        const BwdParams &p = call.p;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const float amplitude = amplitude_of(p, c.head);
        float dA = 0.0f, dbias = 0.0f;
        __syncthreads();
        if constexpr (C::kKda) {
            for (int t = 0; t < c.length; ++t)
                store_float(p.dg, element(p.dg, c.b, c.token + t, c.head, channel),
                            gate_gradient(smem.dg[t][channel], t, channel, amplitude, dA, dbias));
        }
        for (int t = warp; t < c.length; t += D / 32) {
            float dbeta = 0.0f, dg = 0.0f;
            for (int i = lane; i < D; i += 32) {
                dbeta = fmaf(call.w.du[value_row(t) + i], call.w.e[value_row(t) + i], dbeta);
                if constexpr (!C::kKda) dg += smem.dg[t][i];
            }
            dbeta = sum_over<32>(dbeta);
            if constexpr (!C::kKda) dg = sum_over<32>(dg);
            if (lane != 0) continue;
            if constexpr (!C::kKda)
                store_float(p.dg, element(p.dg, c.b, c.token + t, c.head), gate_gradient(dg, t, 0, amplitude, dA, dbias));
            const float x = load_float(p.beta, element(p.beta, c.b, c.token + t, c.head));
            store_float(p.dbeta, element(p.dbeta, c.b, c.token + t, c.head), through_beta(p, x, dbeta));
        }
        if (p.gate == Gate::None) return;
        const int64_t at = c.index * p.HV + c.head;
        smem.sum[0][threadIdx.x] = dA, smem.sum[1][threadIdx.x] = dbias;
        if constexpr (C::kKda) call.w.dbias[at * D + channel] = dbias;
        __syncthreads();
        if (threadIdx.x >= 2) return;
        float total = 0.0f;
        for (int i = 0; i < D; ++i) total += smem.sum[threadIdx.x][i];
        if (threadIdx.x == 0)
            call.w.dA[at] = total;
        else if (!C::kKda)
            call.w.dbias[at] = total;
    }
};

template <class C>
__global__ void __launch_bounds__(C::D) delta_bwd_chunk_kernel(const __grid_constant__ BwdCall call) {
    extern __shared__ __align__(16) char smem_bytes[];
    ChunkSmem<C> &smem = *reinterpret_cast<ChunkSmem<C> *>(smem_bytes);
    const int64_t HV = call.p.HV;
    after_those_before();
    if (nothing_flagged(call)) return;
    for (int64_t i = blockIdx.x; i < call.w.chunk_start[call.p.N] * HV; i += gridDim.x) {
        const Chunk chunk = find_chunk(call.p, call.w.chunk_start, i / HV, i % HV);
        if (left_out(call, chunk.n, chunk.head)) continue;
        __syncthreads();  // the previous chunk's shared memory
        for (int t = threadIdx.x; t < chunk.length; t += C::D) smem.beta[t] = call.w.beta[(chunk.row + t) * HV + chunk.head];
        const ChunkGradients<C> gradients{call, chunk, smem};
        gradients.pairs();
        gradients.states();
        gradients.borders();
        gradients.tokens();
        gradients.gates();
    }
}

template <class C>
void launch_chunks(const BwdCall &call) {
    LaunchConfig config;
    config.grid.x = call.w.chunks * call.p.HV;
    const int64_t most = call.w.flags ? kFlaggedGrid : int64_t{1} << 30;
    if (config.grid.x > most) config.grid.x = most;
    config.block.x = C::D;
    config.smem_bytes = sizeof(ChunkSmem<C>);
    config.stream = static_cast<cudaStream_t>(call.p.stream);
    config.programmatic = true;
    launch("delta_bwd_chunk_kernel", delta_bwd_chunk_kernel<C>, config, call);
}

}  // namespace delta_bwd

void launch_delta_bwd_chunks(const BwdCall &call) {
    using namespace delta_bwd;
    const bool kda = call.p.family == Family::Kda;
    if (call.p.K == 128)
        kda ? launch_chunks<ChunkConfig<128, true>>(call) : launch_chunks<ChunkConfig<128, false>>(call);
    else
        kda ? launch_chunks<ChunkConfig<64, true>>(call) : launch_chunks<ChunkConfig<64, false>>(call);
}

}  // namespace linattn::cuda
