// First kernel of the chunked GDN backward: what a chunk gives to both scans, from q, k, g and beta alone. One CTA per chunk and key
// head, two teams of 4 warps, each of which takes every second value head of it. With i, j tokens of the chunk and without gates, which
// come in as factors F_ij = 2^(G_i - G_j) at the end (a similarity):
//
//   L_ij = k_i . k_j (i > j);  X = L (1 + beta L)^-1, so that (1 + beta L)^-1 = 1 - beta X and (1 + L beta)^-1 = 1 - X beta
//   solve = -F X;   pairs = scale F (Q - Q beta X),  Q_ij = q_i . k_j (i >= j)
//
// X in float: 16 x 16 diagonal blocks column by column, then twice X_21 = Y - X_22 beta Y, Y = L_21 (1 - beta X_11), of 16 x 16 blocks
// in float, of 32 x 32 blocks and Q beta X on tensor cores with both factors in two terms. 1 / |q| and 1 / |k| go into factors: the tiles
// of q and k stay as they were given.
//
// Sequences and heads are flagged where X is large or several keys are nearly one with beta near 1: there single roundings in the
// scans lose digits.
// Shared memory at D = 128: q, k, then what goes out, 32 KB, L, Q 36, X 36, factors 6: two CTAs an SM at 128 registers.
#include "common/launch.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kTeams = 2, kTeamThreads = 128, kPrepareThreads = kTeams * kTeamThreads;
constexpr int kPitch = kC + 8, kHalf = kC / 2, kPitchY = kHalf + 4;
constexpr float kLargestX = 3.0f;     // for keys of length 1 and beta up to 2, |X_ij| <= 1
constexpr float kNearlyOne = 0.85f;   // match_ij = F_ij beta_j |L_ij|
constexpr float kMostMatches = 4.0f;  // largest sum of match_ij^32 over a row

template <class C>
struct alignas(1024) PrepareSmem {
    static constexpr int kOut = 2 * C::Square::kBytes;
    static constexpr int kTiles = 2 * C::Rows::kBytes > kTeams *kOut ? 2 * C::Rows::kBytes : kTeams * kOut;
    char tiles[kTiles];                  // k, q; then of each team Y, then solve and pairs
    float x[kTeams][kC][kPitch];         // X; then its two terms as tiles
    float l[kC][kPitch], p[kC][kPitch];  // L, Q
    Factors f[kTeams];
    float norm_q[kC], norm_k[kC];
};

// g and beta of a lane's two tokens.
struct GateInputs {
    float log2[2], beta[2];
};

template <class C>
struct Prepare {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    using Smem = PrepareSmem<C>;
    static constexpr int D = C::D;
    const Call &call;
    Smem &smem;
    const int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads, warp = thread / 32,
              lane = threadIdx.x % 32;
    const int g = lane / 4, q = lane % 4, row = 16 * warp + g;  // and row + 8: the thread's rows of fragments
    float (*const x)[kPitch] = smem.x[team];
    float (*const y)[kPitchY] = reinterpret_cast<float (*)[kPitchY]>(smem.tiles + team * Smem::kOut);
    Factors &f = smem.f[team];
    static_assert(kHalf * kPitchY * 4 <= Smem::kOut && 2 * Square::kBytes <= sizeof(Smem::x) / kTeams,
                  "what shares memory fits");
    static_assert(sizeof(Smem::x) / kTeams % 1024 == 0, "tiles begin at multiples of 1024");

    __device__ __forceinline__ uint32_t s_k() const { return ptx::shared_address(smem.tiles); }
    __device__ __forceinline__ uint32_t s_q() const { return s_k() + Rows::kBytes; }
    __device__ __forceinline__ uint32_t s_solve() const { return s_k() + team * Smem::kOut; }
    __device__ __forceinline__ uint32_t s_pairs() const { return s_solve() + Square::kBytes; }
    __device__ __forceinline__ uint32_t s_high() const { return ptx::shared_address(smem.x[team]); }
    __device__ __forceinline__ uint32_t s_low() const { return s_high() + Square::kBytes; }
    __device__ __forceinline__ void together() const {
        team == 0 ? ptx::bar_sync(1, kTeamThreads) : ptx::bar_sync(2, kTeamThreads);
    }
    static __device__ __forceinline__ float2 pair(const float *from) { return *reinterpret_cast<const float2 *>(from); }

    // 1 / |x| of the rows of q and k: two lanes a row.
    __device__ __forceinline__ void norms() const {
        const int t = threadIdx.x / 2 % kC, of_q = threadIdx.x / 2 / kC, half = threadIdx.x % 2;
        float sum = 1.0f;
        if (call.p().qk_l2norm) {
            sum = 0.0f;
#pragma unroll
            for (int unit = 0; unit < D / 16; unit++) {
                const uint4 from = ptx::ld_shared_v4_u32((of_q ? s_q() : s_k()) + Rows::offset(t, half * (D / 2) + 8 * unit));
                const uint32_t word[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 two = unpack(T{}, word[i]);
                    sum = fmaf(two.x, two.x, fmaf(two.y, two.y, sum));
                }
            }
            sum = sum + __shfl_xor_sync(~0u, sum, 1) + 1e-6f;
        }
        if (half == 0) (of_q ? smem.norm_q : smem.norm_k)[t] = 1.0f / sqrtf(sum);
    }

    // L by the first team, Q by the second; 0 above the diagonal's 16 x 16 blocks is left out.
    __device__ __forceinline__ void similarities() const {
        const bool of_q = team == 1;
        float sum[8][4] = {};
#pragma unroll 2
        for (int s = 0; s < D / 16; s++) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, (of_q ? s_q() : s_k()) + Rows::block16_offset(16 * warp, 16 * s, lane));
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (m > warp) continue;
                uint32_t b[4];
                ptx::ldmatrix_x4(b, s_k() + Rows::block16_offset(16 * m, 16 * s, lane));
                ptx::mma_m16n8k16<T>(sum[2 * m], a, b[0], b[2]);
                ptx::mma_m16n8k16<T>(sum[2 * m + 1], a, b[1], b[3]);
            }
        }
        float (*const to)[kPitch] = of_q ? smem.p : smem.l;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) continue;
            const int j = 8 * n + 2 * q;
            const float2 norm = pair(&smem.norm_k[j]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = row + 8 * half;
                const float own = (of_q ? smem.norm_q : smem.norm_k)[i];
                *reinterpret_cast<float2 *>(&to[i][j]) =
                    make_float2(j < i || (of_q && j == i) ? own * norm.x * sum[n][2 * half] : 0.0f,
                                j + 1 < i || (of_q && j + 1 == i) ? own * norm.y * sum[n][2 * half + 1] : 0.0f);
            }
        }
    }

    __device__ __forceinline__ GateInputs gate_inputs(const Chunk &c) const {
        const BwdParams &p = call.p();
        const float amplitude = delta_bwd::amplitude_of(p, c.head);
        GateInputs in = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            if (t >= c.length) continue;
            const int64_t at = delta_bwd::element(p.g, c.b, c.token + t, c.head);
            in.log2[i] = kLog2E * log_decay(p, delta_bwd::gate_input(p, at, c.head, 0), amplitude);
            if (in.log2[i] < kLeastLog2Decay) in.log2[i] = kLeastLog2Decay;  // NaN stays
            in.beta[i] =
                delta_bwd::beta_of(p, delta_bwd::load_float(p.beta, delta_bwd::element(p.beta, c.b, c.token + t, c.head)));
        }
        return in;
    }
    // By one warp.
    __device__ __forceinline__ void factors(const GateInputs &in) const {
        const float scale = static_cast<float>(call.p().scale);
        float through = in.log2[0] + in.log2[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const float last = __shfl_sync(~0u, through, 31);
        const float sum[2] = {through - in.log2[1], through};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            const float norm_q = smem.norm_q[t], norm_k = smem.norm_k[t], beta = in.beta[i];
            const float fade = ptx::ex2_approx_ftz(fminf(sum[i], 0.0f)), left = ptx::ex2_approx_ftz(fminf(last - sum[i], 0.0f));
            f.log2[t] = sum[i], f.beta[t] = beta, f.norm_q[t] = norm_q, f.norm_k[t] = norm_k;
            f.pair_q[t] = scale * norm_q, f.pair_k[t] = beta * norm_k;
            f.query[t] = scale * norm_q * fade, f.erase[t] = -beta * norm_k * fade, f.write[t] = beta * norm_k * left;
            f.fade[t] = -norm_k * fade, f.left[t] = norm_k * left;
        }
        if (lane == 0) f.decay = ptx::ex2_approx_ftz(fminf(last, 0.0f));
    }

    // The four diagonal blocks, a thread a column.
    __device__ __forceinline__ void diagonal() const {
        const int first = thread / 16 * 16, j = thread % 16;
        float column[16];
#pragma unroll
        for (int i = 0; i < 16; i++) column[i] = i > j ? smem.l[first + i][first + j] : 0.0f;
#pragma unroll
        for (int k = 1; k < 15; k++) {
            const float a = -f.beta[first + k] * column[k];
#pragma unroll
            for (int i = k + 1; i < 16; i++) column[i] = fmaf(smem.l[first + i][first + k], a, column[i]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) x[first + i][first + j] = column[i];
    }

    // X_21 of the two pairs of 16 x 16 blocks; a thread has four neighbours of a row.
    __device__ __forceinline__ void merge16() const {
        const int block = thread / 64, i = thread % 64 / 4, j = thread % 4 * 4, column = 32 * block, low = column + 16;
        const auto row4 = [](float *from) -> float4 & { return *reinterpret_cast<float4 *>(from); };
        const auto subtract = [&](float4 &sum, float a, const float4 &b) {
            sum.x = fmaf(-a, b.x, sum.x), sum.y = fmaf(-a, b.y, sum.y), sum.z = fmaf(-a, b.z, sum.z),
            sum.w = fmaf(-a, b.w, sum.w);
        };
        float4 sum = row4(&smem.l[low + i][column + j]);
#pragma unroll
        for (int k = 0; k < 16; k++)
            subtract(sum, smem.l[low + i][column + k] * f.beta[column + k], row4(&x[column + k][column + j]));
        row4(&y[16 * block + i][j]) = sum;
        together();
#pragma unroll
        for (int k = 0; k < 16; k++) subtract(sum, x[low + i][low + k] * f.beta[low + k], row4(&y[16 * block + k][j]));
        row4(&x[low + i][column + j]) = sum;
        together();
    }

    // A fragment of -a beta, in two terms: rows from `first` on, columns from `column` on, beta of `scaled` on.
    template <int kRowPitch>
    __device__ __forceinline__ void scaled_rows(uint32_t (&high)[4], uint32_t (&low)[4], const float (*a)[kRowPitch], int first,
                                                int column, int scaled) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = pair(&a[first + g + i % 2 * 8][column + 2 * q + i / 2 * 8]),
                         beta = pair(&f.beta[scaled + 2 * q + i / 2 * 8]);
            split<T>(-v.x * beta.x, -v.y * beta.y, high[i], low[i]);
        }
    }
    // sum += A B for 16 columns of B from (first, column) on.
    template <int kRowPitch>
    __device__ __forceinline__ void multiply(float (&sum)[2][4], const uint32_t (&high)[4], const uint32_t (&low)[4],
                                             const float (*b)[kRowPitch], int first, int column) const {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t b_high[2], b_low[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *from = &b[first + 2 * q + 8 * i][column + 8 * n + g];
                split<T>(from[0], from[kRowPitch], b_high[i], b_low[i]);
            }
            ptx::mma_m16n8k16<T>(sum[n], low, b_high[0], b_high[1]);
            ptx::mma_m16n8k16<T>(sum[n], high, b_low[0], b_low[1]);
            ptx::mma_m16n8k16<T>(sum[n], high, b_high[0], b_high[1]);
        }
    }
    // X_21 of the 32 x 32 blocks, a 16 x 16 block a warp.
    __device__ __forceinline__ void merge32() const {
        const int down = 16 * (warp % 2), across = 16 * (warp / 2);
        float sum[2][4];
        uint32_t high[4], low[4];
        const auto each = [&](float (*to)[kPitch], int first, auto use) {
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    use(&to[first + down + g + 8 * half][across + 8 * n + 2 * q], sum[n][2 * half], sum[n][2 * half + 1]);
        };
        each(smem.l, kHalf, [](float *at, float &a, float &b) { a = at[0], b = at[1]; });
        for (int s = across; s < kHalf; s += 16) {
            scaled_rows<kPitch>(high, low, smem.l, kHalf + down, s, s);
            multiply<kPitch>(sum, high, low, x, s, across);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<float2 *>(&y[down + g + 8 * half][across + 8 * n + 2 * q]) =
                    make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        together();
        for (int s = 0; s <= down; s += 16) {
            scaled_rows<kPitch>(high, low, x, kHalf + down, kHalf + s, kHalf + s);
            multiply<kPitchY>(sum, high, low, y, s, across);
        }
        each(x, kHalf, [](float *at, float a, float b) { at[0] = a, at[1] = b; });
        together();
    }

    __device__ __forceinline__ float fading(float own, float other) const {
        return ptx::ex2_approx_ftz(fminf(own - other, 0.0f));
    }

    // Is a row's key nearly that of several earlier tokens?
    __device__ __forceinline__ bool repeats(const float (&decay)[8][4]) const {
        float sum[2] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) continue;
            const float2 beta = pair(&f.beta[8 * n + 2 * q]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float match = decay[n][i] * smem.l[row + i / 2 * 8][8 * n + 2 * q + i % 2] * (i % 2 ? beta.y : beta.x);
#pragma unroll
                for (int power = 1; power < 32; power *= 2) match *= match;
                sum[i / 2] += match;
            }
        }
        const float upper = sum_quad(sum[0]), lower = sum_quad(sum[1]);
        return upper > kMostMatches || lower > kMostMatches;
    }

    // solve, from X, whose place its two terms take. Returns whether the head is a hard one; decay: F of the thread's elements.
    __device__ __forceinline__ bool finish(float (&decay)[8][4]) const {
        uint32_t high[8][2], low[8][2];
        float largest = 0.0f, match = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int j = 8 * n + 2 * q;
            if (n > 2 * warp + 1) {
#pragma unroll
                for (int half = 0; half < 2; half++) ptx::st_shared_u32(s_solve() + Square::offset(row + 8 * half, j), 0);
                continue;
            }
            const float2 log2 = pair(&f.log2[j]), beta = pair(&f.beta[j]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = row + 8 * half;
                const float2 v = pair(&x[i][j]), l = pair(&smem.l[i][j]);
                const float own = f.log2[i];
                const float a = fading(own, log2.x), b = fading(own, log2.y);
                decay[n][2 * half] = a, decay[n][2 * half + 1] = b;
                split<T>(v.x, v.y, high[n][half], low[n][half]);
                ptx::st_shared_u32(s_solve() + Square::offset(i, j), ptx::cvt_rn_x2<T>(-a * v.x, -b * v.y));
                largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
                match = fmaxf(match, fmaxf(fabsf(l.x * beta.x), fabsf(l.y * beta.y)));
            }
        }
        bool hard = largest > kLargestX;
        if (__any_sync(~0u, match > kNearlyOne)) hard = repeats(decay) || hard;
        together();
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t at = Square::offset(row + 8 * half, 8 * n + 2 * q);
                ptx::st_shared_u32(s_high() + at, high[n][half]), ptx::st_shared_u32(s_low() + at, low[n][half]);
            }
        }
        together();
        return hard;
    }

    // Returns whether an element is too large.
    __device__ __forceinline__ bool pairs(const float (&decay)[8][4]) const {
        float sum[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = pair(&smem.p[row + 8 * half][8 * n + 2 * q]);
                sum[n][2 * half] = v.x, sum[n][2 * half + 1] = v.y;
            }
        }
        const float scale = static_cast<float>(call.p().scale);
        bool large = false;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = row + 8 * half, j = 8 * n + 2 * q;
                uint32_t both = 0;
                if (n <= 2 * warp + 1) {
                    const float a = j <= i ? scale * decay[n][2 * half] * sum[n][2 * half] : 0.0f;
                    const float b = j < i ? scale * decay[n][2 * half + 1] * sum[n][2 * half + 1] : 0.0f;
                    large = large || fabsf(a) > 6e4f || fabsf(b) > 6e4f;
                    both = ptx::cvt_rn_x2<T>(a, b);
                }
                ptx::st_shared_u32(s_pairs() + Square::offset(i, j), both);
            }
        return large && !ptx::kIsBf16<T>;
    }

    static __device__ __forceinline__ void store(void *to, uint32_t from, int bytes) {
        ptx::cp_async_bulk_store(to, from, static_cast<uint32_t>(bytes));
    }

    // By ordinary stores: initcheck of compute-sanitizer does not see a bulk copy, and these are read by ordinary loads too.
    __device__ __forceinline__ void store_factors(Factors *to) const {
        for (int i = thread; i < static_cast<int>(sizeof(Factors) / 16); i += kTeamThreads)
            reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(&f)[i];
    }

    // One value head by one team; in: by warp 3.
    __device__ __forceinline__ void value_head(const Chunk &c, const GateInputs &in) const {
        if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
        if (warp == 3) factors(in);
        together();
        if (thread < kC) diagonal();
        together();
        merge16();
        merge32();
        float decay[8][4];
        bool hard = finish(decay);
        hard = pairs(decay) || hard;
        if (hard) call.flag(c.n, c.head);
        const int64_t at = call.of_value(c.index, c.head);
        store_factors(call.factors + at);
        ptx::fence_proxy_async_shared_cta();
        together();
        if (thread != 0) return;
        store(tile_of<Square>(call.pairs, at), s_pairs(), Square::kBytes);
        store(tile_of<Square>(call.solve, at), s_solve(), Square::kBytes);
        ptx::cp_async_bulk_commit_group();
    }

    __device__ __forceinline__ void key_head(Chunk c) const {
        const BwdParams &p = call.p();
        const int64_t group = p.HV / p.H;
        if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
        __syncthreads();
        load_rows<Rows>(s_k(), p.k, c, c.key_head, 0, threadIdx.x, kPrepareThreads);
        load_rows<Rows>(s_q(), p.q, c, c.key_head, 0, threadIdx.x, kPrepareThreads);
        ptx::cp_async_commit_group();
        GateInputs in = {};
        c.head = c.key_head * group + team;
        if (warp == 3 && team < group) in = gate_inputs(c);
        ptx::cp_async_wait_group<0>();
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            const int64_t at = call.of_key(c.index, c.key_head);
            store(tile_of<Rows>(call.k, at), s_k(), Rows::kBytes);
            store(tile_of<Rows>(call.q, at), s_q(), Rows::kBytes);
            ptx::cp_async_bulk_commit_group();
        }
        norms();
        __syncthreads();
        similarities();
        if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read<0>();
        __syncthreads();
        for (int64_t r = team; r < group; r += kTeams) {
            c.head = c.key_head * group + r;
            if (r >= kTeams && warp == 3) in = gate_inputs(c);
            value_head(c, in);
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
    if (threadIdx.x % kTeamThreads == 0) ptx::cp_async_bulk_wait_group<0>();
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
