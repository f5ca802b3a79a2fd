// First kernel of the chunked GDN backward: what a chunk gives to both scans, from q, k, g and beta alone. One CTA of 8 warps per
// chunk and key head, which takes the key head's value heads one after another. Without gates, since those come in as row and
// column factors 2^G (a similarity), and with i, j tokens of the chunk:
//
//   L_ij = k_i . k_j (i > j);  X = L (1 + beta L)^-1, so that (1 + beta L)^-1 = 1 - beta X and (1 + L beta)^-1 = 1 - X beta
//   solve = -2^(G_i - G_j) X;   pairs = scale 2^(G_i - G_j) (Q - Q beta X), Q_ij = q_i . k_j (i >= j)
//   erase = -2^G (k - X beta k);   keys = 2^(G_last - G) (k - X^T beta k)
//
// X in float: 16 x 16 diagonal blocks row by row, then twice X_21 = (1 - X_22 beta) L_21 (1 - beta X_11). The products with X are
// on tensor cores with X, and Q, in two terms each, so what nearly equal keys cancel is lost before nothing was rounded. 1 / |k|
// goes into factors: the tiles of q and k stay as they were given.
//
// Sequences and heads whose X is so large, or whose keys agree so much, that single roundings in the scans lose digits are flagged.
// Shared memory at D = 128: q, k, keys 48 KB, L and X 34 KB, Y 5 KB, factors 2 KB: two CTAs an SM at 128 registers.
#include "common/launch.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kPrepareThreads = 256, kPitch = kC + 4, kHalf = kC / 2;
constexpr float kLargestSum = 12.0f;    // of a row or column of |X beta|
constexpr float kLargestMatch = 44.0f;  // of a row of 2^(G_i - G_j) |L_ij beta_j|; 63: one key for all tokens, beta 1

template <class C>
struct alignas(1024) PrepareSmem {
    char k[C::Rows::kBytes], q[C::Rows::kBytes], keys[C::Rows::kBytes];  // q: later erase
    float l[kC][kPitch];                                                  // later the tiles of pairs and solve
    float x[kC][kPitch];
    float y[kHalf][kHalf + 4];  // L_21 (1 - beta X_11)
    Factors f;
};

template <class C>
struct Prepare {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    static constexpr int D = C::D;
    const Call &call;
    PrepareSmem<C> &smem;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const uint32_t s_k = ptx::shared_address(smem.k), s_q = ptx::shared_address(smem.q), s_keys = ptx::shared_address(smem.keys);
    const uint32_t s_pairs = ptx::shared_address(smem.l), s_solve = s_pairs + Square::kBytes;
    static_assert(2 * Square::kBytes <= sizeof(PrepareSmem<C>::l), "pairs and solve lie where L was");

    // 1 / |x| of the rows of q and k: two lanes a row.
    __device__ __forceinline__ void norms() const {
        const int row = threadIdx.x / 2 % kC, of_q = threadIdx.x / 2 / kC, half = threadIdx.x % 2;
        float sum = 1.0f;
        if (call.p().qk_l2norm) {
            sum = 0.0f;
            for (int unit = 0; unit < D / 16; unit++) {
                const uint4 x = ptx::ld_shared_v4_u32((of_q ? s_q : s_k) + Rows::offset(row, half * (D / 2) + 8 * unit));
                const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 pair = unpack(T{}, word[i]);
                    sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
                }
            }
            sum = sum + __shfl_xor_sync(~0u, sum, 1) + 1e-6f;
        }
        if (half == 0) (of_q ? smem.f.norm_q : smem.f.norm_k)[row] = 1.0f / sqrtf(sum);
    }

    // A warp's 16 rows of L (warps 0 to 3) or Q (4 to 7), in fragments; 0 above the diagonal.
    __device__ __forceinline__ void similarities(float (&sum)[8][4]) const {
        const int block = warp % 4;
        const bool of_q = warp >= 4;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
#pragma unroll 2
        for (int s = 0; s < D / 16; s++) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, (of_q ? s_q : s_k) + Rows::block16_offset(16 * block, 16 * s, lane));
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (m > block) continue;
                uint32_t b[4];
                ptx::ldmatrix_x4(b, s_k + Rows::block16_offset(16 * m, 16 * s, lane));
                ptx::mma_m16n8k16<T>(sum[2 * m], a, b[0], b[2]);
                ptx::mma_m16n8k16<T>(sum[2 * m + 1], a, b[1], b[3]);
            }
        }
        const float *row_norm = of_q ? smem.f.norm_q : smem.f.norm_k;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 16 * block + g + i / 2 * 8, column = 8 * n + 2 * q + i % 2;
                const bool kept = of_q ? column <= row : column < row;
                sum[n][i] = kept ? sum[n][i] * row_norm[row] * smem.f.norm_k[column] : 0.0f;
            }
    }

    // By one warp, two tokens a lane.
    __device__ __forceinline__ void factors(const Chunk &c) const {
        const BwdParams &p = call.p();
        const float amplitude = delta_bwd::amplitude_of(p, c.head), scale = static_cast<float>(p.scale);
        float x[2] = {}, beta[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            if (t >= c.length) continue;
            const int64_t at = delta_bwd::element(p.g, c.b, c.token + t, c.head);
            x[i] = kLog2E * log_decay(p, delta_bwd::gate_input(p, at, c.head, 0), amplitude);
            if (x[i] < kLeastLog2Decay) x[i] = kLeastLog2Decay;  // NaN stays
            beta[i] =
                delta_bwd::beta_of(p, delta_bwd::load_float(p.beta, delta_bwd::element(p.beta, c.b, c.token + t, c.head)));
        }
        float through = x[0] + x[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const float last = __shfl_sync(~0u, through, 31);
        const float sum[2] = {through - x[1], through};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            const float norm_q = smem.f.norm_q[t], norm_k = smem.f.norm_k[t], decay = ptx::ex2_approx_ftz(fminf(sum[i], 0.0f));
            smem.f.log2[t] = sum[i], smem.f.beta[t] = beta[i];
            smem.f.pair_q[t] = scale * norm_q, smem.f.pair_k[t] = beta[i] * norm_k;
            smem.f.query[t] = scale * norm_q * decay, smem.f.erase[t] = -beta[i] * norm_k * decay;
            smem.f.write[t] = beta[i] * norm_k * ptx::ex2_approx_ftz(fminf(last - sum[i], 0.0f));
        }
        if (lane == 0) smem.f.decay = ptx::ex2_approx_ftz(fminf(last, 0.0f));
    }

    __device__ __forceinline__ float fading(int row, int column) const {
        return ptx::ex2_approx_ftz(fminf(smem.f.log2[row] - smem.f.log2[column], 0.0f));
    }

    // The four diagonal blocks, a thread a column.
    __device__ __forceinline__ void diagonal() const {
        const int first = threadIdx.x / 16 * 16, j = threadIdx.x % 16;
        float scaled[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float x = smem.l[first + i][first + j];
#pragma unroll
            for (int k = 0; k < i; k++) x = fmaf(-smem.l[first + i][first + k], scaled[k], x);
            x = i > j ? x : 0.0f;
            scaled[i] = smem.f.beta[first + i] * x;
            smem.x[first + i][first + j] = x;
        }
    }

    // X_21 of pairs of kSize x kSize blocks; a thread has kCount neighbours of a row.
    template <int kSize>
    __device__ __forceinline__ void merge() const {
        constexpr int kCount = kSize == 16 ? 2 : 4, kPerBlock = kSize * kSize / kCount;
        const int block = threadIdx.x / kPerBlock, in_block = threadIdx.x % kPerBlock;
        const int i = in_block / (kSize / kCount), j = in_block % (kSize / kCount) * kCount;
        const int column = 2 * kSize * block, row = column + kSize;
        float sum[kCount];
#pragma unroll
        for (int e = 0; e < kCount; e++) sum[e] = smem.l[row + i][column + j + e];
#pragma unroll 8
        for (int k = 0; k < kSize; k++) {
            const float a = smem.l[row + i][column + k] * smem.f.beta[column + k];
#pragma unroll
            for (int e = 0; e < kCount; e++) sum[e] = fmaf(-a, smem.x[column + k][column + j + e], sum[e]);
        }
        const auto y = [&](int k, int e) -> float & { return smem.y[16 * block + k][j + e]; };
#pragma unroll
        for (int e = 0; e < kCount; e++) y(i, e) = sum[e];
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < kSize; k++) {
            const float a = smem.x[row + i][row + k] * smem.f.beta[row + k];
#pragma unroll
            for (int e = 0; e < kCount; e++) sum[e] = fmaf(-a, y(k, e), sum[e]);
        }
#pragma unroll
        for (int e = 0; e < kCount; e++) smem.x[row + i][column + j + e] = sum[e];
        __syncthreads();
    }

    // Threads 0 to 127.
    __device__ __forceinline__ bool correlated() const {
        const int own = threadIdx.x % kC;
        float sum = 0.0f, match = 0.0f;
        if (threadIdx.x < kC) {
            for (int k = 0; k < own; k++) {
                const float beta = fabsf(smem.f.beta[k]);
                sum = fmaf(fabsf(smem.x[own][k]), beta, sum);
                match = fmaf(fabsf(smem.l[own][k]) * fading(own, k), beta, match);
            }
        } else {
            for (int k = own + 1; k < kC; k++) sum = fmaf(fabsf(smem.x[k][own]), fabsf(smem.f.beta[k]), sum);
        }
        return sum > kLargestSum || match > kLargestMatch;
    }

    // k minus a product with X, half of the channels of 16 rows a warp. kTransposed: keys, else erase.
    template <bool kTransposed>
    __device__ __forceinline__ void with_keys() const {
        constexpr int kTiles = D / 16;
        const int block = warp % 4, first = warp / 4 * (D / 2);
        float sum[kTiles][4] = {};
#pragma unroll 1
        for (int s = kTransposed ? block : 0; s < (kTransposed ? 4 : block + 1); s++) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 16 * block + g + i % 2 * 8, column = 16 * s + 2 * q + i / 2 * 8;
                const float x = kTransposed ? smem.x[column][row] : smem.x[row][column];
                const float y = kTransposed ? smem.x[column + 1][row] : smem.x[row][column + 1];
                split<T>(x * smem.f.pair_k[column], y * smem.f.pair_k[column + 1], high[i], low[i]);
            }
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                uint32_t b[4];
                ptx::ldmatrix_x4_trans(b, s_k + Rows::block16_offset(16 * s, first + 8 * n, lane));
                ptx::mma_m16n8k16<T>(sum[n], low, b[0], b[1]);
                ptx::mma_m16n8k16<T>(sum[n], high, b[0], b[1]);
                ptx::mma_m16n8k16<T>(sum[n + 1], low, b[2], b[3]);
                ptx::mma_m16n8k16<T>(sum[n + 1], high, b[2], b[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * block + g + 8 * half;
            const float own = smem.f.norm_k[row], sum_log2 = smem.f.log2[row];
            const float decay = kTransposed ? ptx::ex2_approx_ftz(fminf(smem.f.log2[kC - 1] - sum_log2, 0.0f))
                                            : -ptx::ex2_approx_ftz(fminf(sum_log2, 0.0f));
#pragma unroll
            for (int n = 0; n < kTiles; n++) {
                const int column = first + 8 * n + 2 * q;
                const float2 k = load_pair<T, Rows>(s_k, row, column);
                ptx::st_shared_u32((kTransposed ? s_keys : s_q) + Rows::offset(row, column),
                                   ptx::cvt_rn_x2<T>(decay * (own * k.x - sum[n][2 * half]),
                                                     decay * (own * k.y - sum[n][2 * half + 1])));
            }
        }
    }

    // Warps 4 to 7, from their rows of Q. Returns whether an element is too large.
    __device__ __forceinline__ bool pairs(const float (&of_q)[8][4]) const {
        const int block = warp % 4;
        float sum[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = of_q[n][i];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (s > block) continue;
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = 16 * s + 2 * q + i / 2 * 8;
                const float *from = &of_q[2 * s + i / 2][i % 2 * 2];
                split<T>(-from[0] * smem.f.beta[column], -from[1] * smem.f.beta[column + 1], high[i], low[i]);
            }
#pragma unroll
            for (int n = 0; n <= 2 * s + 1; n++) {
                uint32_t b_high[2], b_low[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = 16 * s + 2 * q + 8 * i;
                    split<T>(smem.x[row][8 * n + g], smem.x[row + 1][8 * n + g], b_high[i], b_low[i]);
                }
                ptx::mma_m16n8k16<T>(sum[n], low, b_high[0], b_high[1]);
                ptx::mma_m16n8k16<T>(sum[n], high, b_low[0], b_low[1]);
                ptx::mma_m16n8k16<T>(sum[n], high, b_high[0], b_high[1]);
            }
        }
        const float scale = static_cast<float>(call.p().scale);
        bool large = false;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * block + g + 8 * half, column = 8 * n + 2 * q;
                const float x = column <= row ? scale * fading(row, column) * sum[n][2 * half] : 0.0f;
                const float y = column < row ? scale * fading(row, column + 1) * sum[n][2 * half + 1] : 0.0f;
                large = large || fabsf(x) > 6e4f || fabsf(y) > 6e4f;
                ptx::st_shared_u32(s_pairs + Square::offset(row, column), ptx::cvt_rn_x2<T>(x, y));
            }
        return large && !ptx::kIsBf16<T>;
    }

    // Warps 0 to 3.
    __device__ __forceinline__ void solve() const {
#pragma unroll 4
        for (int i = threadIdx.x; i < kC * kC / 2; i += 128) {
            const int row = i / (kC / 2), column = i % (kC / 2) * 2;
            const float x = column < row ? -fading(row, column) * smem.x[row][column] : 0.0f;
            const float y = column + 1 < row ? -fading(row, column + 1) * smem.x[row][column + 1] : 0.0f;
            ptx::st_shared_u32(s_solve + Square::offset(row, column), ptx::cvt_rn_x2<T>(x, y));
        }
    }

    __device__ __forceinline__ void store(char *to, uint32_t from, int bytes) const {
        ptx::cp_async_bulk_store(to, from, static_cast<uint32_t>(bytes));
    }

    // One value head; `sum`: the warp's rows of L or Q.
    __device__ __forceinline__ void value_head(const Chunk &c, const float (&sum)[8][4]) const {
        if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read<0>();
        __syncthreads();
        if (warp == 7) factors(c);
        for (int i = threadIdx.x; i < kC * kPitch; i += kPrepareThreads) smem.x[i / kPitch][i % kPitch] = 0.0f;
        if (warp < 4) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) smem.l[16 * warp + g + i / 2 * 8][8 * n + 2 * q + i % 2] = sum[n][i];
        }
        __syncthreads();
        if (threadIdx.x < kC) diagonal();
        __syncthreads();
        merge<16>();
        merge<32>();
        bool hard = threadIdx.x < 2 * kC && correlated();
        with_keys<false>();
        with_keys<true>();
        __syncthreads();  // L has been read
        if (warp < 4)
            solve();
        else
            hard = pairs(sum) || hard;
        if (hard) call.flag(c.n, c.head);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x != 0) return;
        const int64_t at = call.of_value(c.index, c.head);
        store(tile_of<Rows>(call.erase, at), s_q, Rows::kBytes);
        store(tile_of<Rows>(call.keys, at), s_keys, Rows::kBytes);
        store(tile_of<Square>(call.pairs, at), s_pairs, Square::kBytes);
        store(tile_of<Square>(call.solve, at), s_solve, Square::kBytes);
        store(reinterpret_cast<char *>(call.factors + at), ptx::shared_address(&smem.f), sizeof(Factors));
        ptx::cp_async_bulk_commit_group();
    }

    __device__ __forceinline__ void key_head(Chunk c) const {
        const BwdParams &p = call.p();
        if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read<0>();
        __syncthreads();
        load_rows<Rows>(s_k, p.k, c, c.key_head, 0, threadIdx.x, kPrepareThreads);
        load_rows<Rows>(s_q, p.q, c, c.key_head, 0, threadIdx.x, kPrepareThreads);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            const int64_t at = call.of_key(c.index, c.key_head);
            store(tile_of<Rows>(call.k, at), s_k, Rows::kBytes);
            store(tile_of<Rows>(call.q, at), s_q, Rows::kBytes);
            ptx::cp_async_bulk_commit_group();
        }
        norms();
        __syncthreads();
        float sum[8][4];
        similarities(sum);
        const int64_t group = p.HV / p.H;
        for (int64_t r = 0; r < group; r++) {
            c.head = c.key_head * group + r;
            value_head(c, sum);
        }
    }
};

template <class C>
__global__ void __launch_bounds__(kPrepareThreads, 2) gdn_bwd_prepare_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    const Prepare<C> prepare{call, *reinterpret_cast<PrepareSmem<C> *>(smem_bytes)};
    const int64_t H = call.p().H;
    for (int64_t i = blockIdx.x; i < call.chunks() * H; i += gridDim.x) {
        Chunk c = delta_bwd::find_chunk(call.p(), call.exact.w.chunk_start, i / H, 0);
        c.key_head = i % H;
        prepare.key_head(c);
    }
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group<0>();
}

void launch_prepare(const Call &call) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        const int64_t items = call.exact.w.chunks * call.exact.p.H, most = 2 * call.multiprocessors;
        launch_config.grid.x = items < most ? items : most;
        launch_config.block.x = kPrepareThreads;
        launch_config.smem_bytes = sizeof(PrepareSmem<C>);
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch("gdn_bwd_prepare_kernel", gdn_bwd_prepare_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
