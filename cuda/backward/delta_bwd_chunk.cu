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
// A thread has one channel of K, D threads a CTA, one CTA per (chunk, value head), and all is in float. Passes:
//   1  a and b, from slices of 16 columns of V in shared memory                                         64 x 64 x D, twice
//   2  S do, S w and D u of all tokens, the same slices again, two halves of 32 tokens                  64 x D x D, three times
//   3  what they give to dq, dk, dg; running products forwards, backwards
//   4  pairs: 16 tokens s at a time in registers, t running over the rest of the chunk                  64 x 64 x D, four times
//   5  through the gate and the form of beta, sums over the chunk for A_log and dt_bias
// Shared memory at D = 128: pairs 32 KB, dg and h 2 x 32 KB, slices 13 KB: two CTAs an SM. Registers below 255, the 96 sums of
// pass 2 with two slices on their way being the most. What a thread reads from global memory is asked for one step ahead.
#include "common/device_guard.h"
#include "common/launch.h"
#include "tokens.cuh"

namespace linattn::cuda {
namespace delta_bwd {

constexpr int kC = kBwdChunk, kPitch = kC + 4, kHalf = kC / 2, kTile = 16;

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

// One chunk of one value head.
struct Chunk {
    int64_t row, b, token, head, key_head;  // first row of the workspace; row of T and first token of the caller's arrays
    int64_t index;
    int length;
};

// The chunk with this number: the sequence whose chunks begin at or before it, by bisection.
__device__ __forceinline__ Chunk find_chunk(const BwdCall &call, int64_t index, int64_t head) {
    int low = 0, high = static_cast<int>(call.p.N);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (call.w.chunk_start[middle] <= index ? low : high) = middle;
    }
    const Item item = make_item(call.p, low, static_cast<int>(head), 0);
    const int64_t first = (index - call.w.chunk_start[low]) * kC, left = item.length - first;
    return {item.batch * call.p.T + item.bos + first, item.batch, item.bos + first, head, head / (call.p.HV / call.p.H), index,
            static_cast<int>(left < kC ? left : kC)};
}

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

    // Pass 1. A thread has tiles of 8 tokens t by 4 tokens s.
    __device__ __forceinline__ void pairs() const {
        constexpr int kTiles = kC / 8 * (kC / 4) / D;
        float a[kTiles][8][4] = {}, b[kTiles][8][4] = {};
        const auto tile_t = [](int i) { return (threadIdx.x + i * D) / (kC / 4) * 8; };
        const auto tile_s = [](int i) { return (threadIdx.x + i * D) % (kC / 4) * 4; };
        Slice slice;
        if (kTiles == 1) fetch(slice, 0);
        for (int first = 0; first < D; first += kSlice) {
            if (kTiles > 1) fetch(slice, first);  // no registers for the next one
            deposit(slice);
            if (kTiles == 1 && first + kSlice < D) fetch(slice, first + kSlice);
#pragma unroll 4
            for (int column = 0; column < kSlice; ++column)
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    alignas(16) float d_o[8], w[8], u[4];
                    const auto four = [&](int which, int token, float *x) {
                        *reinterpret_cast<float4 *>(x) = *reinterpret_cast<const float4 *>(&smem.slice[which][column][token]);
                    };
                    four(0, tile_t(i), d_o), four(0, tile_t(i) + 4, d_o + 4), four(2, tile_s(i), u);
                    four(1, tile_t(i), w), four(1, tile_t(i) + 4, w + 4);
#pragma unroll
                    for (int t = 0; t < 8; ++t)
#pragma unroll
                        for (int s = 0; s < 4; ++s)
                            a[i][t][s] = fmaf(d_o[t], u[s], a[i][t][s]), b[i][t][s] = fmaf(w[t], u[s], b[i][t][s]);
                }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int t = 0; t < 8; ++t)
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    smem.a[tile_t(i) + t][tile_s(i) + s] = a[i][t][s];
                    smem.b[tile_t(i) + t][tile_s(i) + s] = tile_t(i) + t == tile_s(i) + s ? 0.0f : b[i][t][s];
                }
    }

    // Passes 2 and 3: what S and D give.
    __device__ __forceinline__ void states() const {
        const int64_t at = (c.index * call.p.HV + c.head) * D * D + channel;
        const float *S = call.w.states + at, *grad = call.w.grads + at;
        float both = 0.0f, faded = 1.0f;  // row sum of S o D; d_{0..t}
        for (int half = 0; half < kC; half += kHalf) {
            if (half >= c.length) break;
            float of_do[kHalf] = {}, of_w[kHalf] = {}, of_u[kHalf] = {};
            Slice slice;
            fetch(slice, 0);
            constexpr int kAhead = 4;
            struct Column {
                float S, grad;
            } columns[kAhead];
            const auto column_at = [&](int column) -> Column { return {S[column * D], grad[column * D]}; };
#pragma unroll
            for (int i = 0; i < kAhead; ++i) columns[i] = column_at(i);
            for (int first = 0; first < D; first += kSlice) {
                deposit(slice);
                if (first + kSlice < D) fetch(slice, first + kSlice);
#pragma unroll 1
                for (int group = 0; group < kSlice; group += kAhead)
#pragma unroll
                    for (int i = 0; i < kAhead; ++i) {
                        const int column = group + i;
                        const float s = columns[i].S, g = columns[i].grad;
                        if (first + column + kAhead < D) columns[i] = column_at(first + column + kAhead);
                        if (half == 0) both = fmaf(s, g, both);
#pragma unroll
                        for (int t = 0; t < kHalf; t += 4) {
                            const auto four = [&](int which) {
                                return *reinterpret_cast<const float4 *>(&smem.slice[which][column][half + t]);
                            };
                            const float4 d_o = four(0), w = four(1), u = four(2);
                            of_do[t] = fmaf(s, d_o.x, of_do[t]), of_do[t + 1] = fmaf(s, d_o.y, of_do[t + 1]);
                            of_do[t + 2] = fmaf(s, d_o.z, of_do[t + 2]), of_do[t + 3] = fmaf(s, d_o.w, of_do[t + 3]);
                            of_w[t] = fmaf(s, w.x, of_w[t]), of_w[t + 1] = fmaf(s, w.y, of_w[t + 1]);
                            of_w[t + 2] = fmaf(s, w.z, of_w[t + 2]), of_w[t + 3] = fmaf(s, w.w, of_w[t + 3]);
                            of_u[t] = fmaf(g, u.x, of_u[t]), of_u[t + 1] = fmaf(g, u.y, of_u[t + 1]);
                            of_u[t + 2] = fmaf(g, u.z, of_u[t + 2]), of_u[t + 3] = fmaf(g, u.w, of_u[t + 3]);
                        }
                    }
            }
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const int t = half + i;
                if (t >= c.length) continue;
                faded *= decay(t);
                dq(t) = scale * faded * of_do[i];
                dk(t) = -faded * of_w[i];
                smem.h[t][channel] = faded * (scale * q(t) * of_do[i] - k(t) * of_w[i]);
                smem.dg[t][channel] = of_u[i];
            }
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

    // Through the gate: d(raw gate input) from d(log decay); adds what A_log and dt_bias get.
    __device__ __forceinline__ float through_gate(float dg, int t, int of_channel, float amplitude, float &dA,
                                                  float &dbias) const {
        const BwdParams &p = call.p;
        if (p.gate == Gate::None) return dg;
        const float x = gate_input(p, element(p.g, c.b, c.token + t, c.head, C::kKda ? of_channel : 0), c.head, of_channel);
        float dx, log_amplitude;
        if (p.gate == Gate::Softplus) {
            dx = -amplitude * sigmoid(x) * dg;
            log_amplitude = dg == 0.0f ? 0.0f : dg * log_decay(p, x, amplitude);  // 0 at a full reset, whose log decay is -inf
        } else {
            const float at = amplitude * x;
            dx = dg * static_cast<float>(p.lower_bound) * amplitude * sigmoid(at) * sigmoid(-at);
            log_amplitude = dx == 0.0f ? 0.0f : dx * x;
        }
        dA += log_amplitude, dbias += dx;
        return dx;
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
                            through_gate(smem.dg[t][channel], t, channel, amplitude, dA, dbias));
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
                store_float(p.dg, element(p.dg, c.b, c.token + t, c.head), through_gate(dg, t, 0, amplitude, dA, dbias));
            if (p.beta_form != BetaForm::Weight) {
                const float x = load_float(p.beta, element(p.beta, c.b, c.token + t, c.head));
                dbeta *= (p.beta_form == BetaForm::LogitsX2 ? 2.0f : 1.0f) * sigmoid(x) * sigmoid(-x);
            }
            store_float(p.dbeta, element(p.dbeta, c.b, c.token + t, c.head), dbeta);
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
    for (int64_t i = blockIdx.x; i < call.w.chunk_start[call.p.N] * HV; i += gridDim.x) {
        const Chunk chunk = find_chunk(call, i / HV, i % HV);
        __syncthreads();  // the previous chunk's shared memory
        for (int t = threadIdx.x; t < chunk.length; t += C::D) smem.beta[t] = call.w.beta[(chunk.row + t) * HV + chunk.head];
        const ChunkGradients<C> gradients{call, chunk, smem};
        gradients.pairs();
        gradients.states();
        gradients.tokens();
        gradients.gates();
    }
}

template <class C>
void launch_chunks(const BwdCall &call) {
    LaunchConfig config;
    config.grid.x = call.w.chunks * call.p.HV;
    if (config.grid.x > (int64_t{1} << 30)) config.grid.x = int64_t{1} << 30;
    config.block.x = C::D;
    config.smem_bytes = sizeof(ChunkSmem<C>);
    config.stream = static_cast<cudaStream_t>(call.p.stream);
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
