// First kernel of the chunked GDN backward: what a chunk gives to both scans, from q, k, g and beta alone. One CTA of 4 warps per chunk
// and value head, six to an SM, since each is a chain of short steps. With i, j tokens of the chunk and F_ij = 2^(G_i - G_j), which
// comes in at the end (a similarity):
//
//   L_ij = k_i . k_j (i > j);  X = L (1 + beta L)^-1, so that (1 + beta L)^-1 = 1 - beta X and (1 + L beta)^-1 = 1 - X beta
//   solve = -F X;   pairs = scale F Q / queries,  Q_ij = q_i . k_j (i >= j)
//
// X in float: 16 x 16 diagonal blocks row by row, a block a warp, then twice X_21 = Y - X_22 beta Y, Y = L_21 (1 - beta X_11), on tensor
// cores with both factors in two terms. 1 / |q| and 1 / |k| go into factors; the first and last value heads of a key head write q and k as
// operands, times the powers of 2 next to 1 / length. What units follow from (gdn_bwd_units.cuh) is looked at beside the loads.
//
// Sequences and heads are flagged where X is large or several keys are nearly one with beta near 1: there single roundings in the
// scans lose digits; and sequences of at most kFewTokens, of which nothing but the factors is made.
// Shared memory at any D: q and k (32 KB at D = 128), where later L 13, in its place X, Y 4 and what goes out 16 KB lie; decays, beta, norms 2.
#include "common/launch.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kPrepareThreads = 128, kPrepareCtas = 6;
constexpr int kHalf = kC / 2, kPitch = kHalf + 4;
constexpr float kLargestX = 3.0f;     // for keys of length 1 and beta up to 2, |X_ij| <= 1
constexpr float kNearlyOne = 0.85f;   // match_ij = F_ij beta_j |L_ij|
constexpr float kMostMatches = 4.0f;  // largest sum of match_ij^32 over a row

using Block = float[kHalf][kPitch];  // a quarter of a matrix tokens x tokens

template <class C>
struct PrepareSmem {  // begins at a multiple of 1024, as tiles do; alignas would round its size up
    struct Given {
        char k[C::Rows::kBytes], q[C::Rows::kBytes];
    };
    struct Made {
        char solve[C::Square::kBytes], pairs[C::Square::kBytes];
        Block l[3], y;  // L_11, L_21, L_22, the first and the last becoming X
    };
    union {
        alignas(16) Given given;
        alignas(16) Made made;
    };
    float log2[kC], beta[kC], norm_q[kC], norm_k[kC], power_q[kC], power_k[kC];
    float queries[4];  // largest of a warp's rows
    float rows[2];     // largest of v, of do
    alignas(8) char barrier[8];
};
static_assert(kPrepareCtas * (sizeof(PrepareSmem<Config<__half, 128>>) + 1024) <= 228 * 1024, "CTAs of an SM fit");

template <class C>
struct Prepare {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    static constexpr int D = C::D;
    static constexpr ptx::Major kK = ptx::Major::K;
    const Call &call;
    PrepareSmem<C> &smem;
    const Chunk &c;
    const unsigned own = blockIdx.x;  // of_value() of the chunk and head
    const int thread = threadIdx.x, warp = thread / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, q = lane % 4, row = 16 * warp + g;  // and row + 8: the thread's rows of fragments
    const uint32_t s_k = ptx::shared_address(smem.given.k), s_q = ptx::shared_address(smem.given.q),
                   s_solve = ptx::shared_address(smem.made.solve), s_pairs = ptx::shared_address(smem.made.pairs);

    static __device__ __forceinline__ float2 pair(const float *from) { return *reinterpret_cast<const float2 *>(from); }

    // q and k to shared memory; by the first warps what the units follow from.
    __device__ __forceinline__ void load() const {
        const uint32_t barrier = ptx::shared_address(smem.barrier);
        if (call.as_given(c)) {
            if (thread == 0) {
                ptx::mbarrier_init(barrier, 1);
                ptx::fence_mbarrier_init();
                ptx::mbarrier_arrive_expect_tx(barrier, 2 * Rows::kBytes);
                load_given<Rows>(s_k, call.map_k, c, c.key_head, barrier),
                    load_given<Rows>(s_q, call.map_q, c, c.key_head, barrier);
            }
        } else {
            load_rows<Rows>(s_k, call.p().k, c, c.key_head, 0, thread, kPrepareThreads);
            load_rows<Rows>(s_q, call.p().q, c, c.key_head, 0, thread, kPrepareThreads);
            ptx::cp_async_commit_group();
        }
        if (warp == 3) gates();
        if (warp < (call.part == Part::Forward ? 1 : 2)) {
            const float largest = largest_of_rows<T, D>(warp == 0 ? call.p().v : call.p().d_o, c);
            if (lane == 0) smem.rows[warp] = largest;
        }
        if (warp == 2) states();
        if (!call.as_given(c)) {
            ptx::cp_async_wait_group<0>();
            ptx::fence_proxy_async_shared_cta();
        }
        __syncthreads();
        if (call.as_given(c)) ptx::mbarrier_wait_parity(barrier, 0);
    }

    // q and k as operands to the workspace, once for all value heads: by the first and the last of them.
    __device__ __forceinline__ void give_rows() const {
        const int64_t group_size = call.p().HV / call.p().H, at = call.of_key(c.index, c.key_head);
        if (c.head % group_size == 0) give_tile(tile_of<Rows>(call.q, at), s_q, smem.power_q);
        if (c.head % group_size == group_size - 1) give_tile(tile_of<Rows>(call.k, at), s_k, smem.power_k);
    }
    __device__ __forceinline__ void give_tile(char *to, uint32_t tile, const float *powers) const {
#pragma unroll 2
        for (int at = 16 * thread; at < Rows::kBytes; at += 16 * kPrepareThreads)
            *reinterpret_cast<uint4 *>(to + at) =
                operands<T>(ptx::ld_shared_v4_u32(tile + at), powers[at % Rows::kPanelStrideBytes / 128]);
    }

    // The given states, by the chunks next to them.
    __device__ __forceinline__ void states() const {
        const BwdParams &p = call.p();
        const int *start = call.exact.w.chunk_start + c.n;
        Largest &to = call.largest_of(c.n, c.key_head);
        if (p.state_in && c.index == start[0]) note(&to.state, largest_of_state<D>(p.state_in, c.n, c.head));
        if (p.d_final_state && c.index + 1 == start[1]) note(&to.grad, largest_of_state<D>(p.d_final_state, c.n, c.head));
    }

    // Sums of log2 decays, and beta; two tokens a lane.
    __device__ __forceinline__ void gates() const {
        const BwdParams &p = call.p();
        const float amplitude = delta_bwd::amplitude_of(p, c.head);
        float log2[2], beta[2];
        const delta_bwd::GateBits<2> bits(p, c, 2 * lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool inside = 2 * lane + i < c.length;
            beta[i] = float_of(p.beta, bits.beta[i]);
            log2[i] = kLog2E * log_decay(p, bits.gate_input(p, i), amplitude);
            if (log2[i] < kLeastLog2Decay) log2[i] = kLeastLog2Decay;  // NaN stays
            log2[i] = inside ? log2[i] : 0.0f, beta[i] = inside ? delta_bwd::beta_of(p, beta[i]) : 0.0f;
        }
        float through = log2[0] + log2[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        *reinterpret_cast<float2 *>(&smem.log2[2 * lane]) = make_float2(through - log2[1], through);
        *reinterpret_cast<float2 *>(&smem.beta[2 * lane]) = make_float2(beta[0], beta[1]);
    }

    // 1 / |x| of the warp's rows with l2norm, else 1, and the powers of 2 below 1 / |x|, from the diagonal of a product. Returns the
    // largest quotient of the two.
    __device__ __forceinline__ float norms(uint32_t tile, float *to, float *powers) const {
        float upper[4] = {}, lower[4] = {};
#pragma unroll
        for (int s = 0; s < D / 16; s++) {
            uint32_t x[4];
            ptx::ldmatrix_x4(x, tile + Rows::block16_offset(16 * warp, 16 * s, lane));
            ptx::mma_m16n8k16<T>(upper, x, x[0], x[2]);
            ptx::mma_m16n8k16<T>(lower, x, x[1], x[3]);
        }
        const float sums[2] = {g % 2 ? upper[1] : upper[0], g % 2 ? lower[3] : lower[2]};
        float largest = 0.0f;
        if (lane / 8 == q)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float inverse = 1.0f / sqrtf(sums[half] + (call.p().qk_l2norm ? 1e-6f : 1e-30f));
                const float power = __uint_as_float(max(__float_as_uint(inverse) & 0x7f800000u, 27u << 23));
                const float norm = call.p().qk_l2norm ? inverse : 1.0f;
                to[row + 8 * half] = norm, powers[row + 8 * half] = power;
                largest = fmaxf(largest, norm * inverse_power(power));
            }
        return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
    }

    // By ordinary stores: initcheck of compute-sanitizer does not see a bulk copy, and these are read by ordinary loads too.
    __device__ __forceinline__ void factors(float queries) const {
        if (thread >= kC) return;
        Factors &f = call.factors[own];
        const int t = thread;
        const float scale = static_cast<float>(call.p().scale) * inverse_power(queries), sum = smem.log2[t],
                    last = smem.log2[kC - 1];
        const float power_q = smem.power_q[t], power_k = smem.power_k[t], beta = smem.beta[t];
        const float norm_q = smem.norm_q[t] * inverse_power(power_q), norm_k = smem.norm_k[t] * inverse_power(power_k);
        const float fade = ptx::ex2_approx_ftz(fminf(sum, 0.0f)), left = ptx::ex2_approx_ftz(fminf(last - sum, 0.0f));
        const float first = smem.log2[0];
        const int rise = first < -8.0f && first > -126.0f ? static_cast<int>(-first) : 0;  // a reset stays 0
        const float risen = ptx::ex2_approx_ftz(fminf(sum + rise, 0.0f));
        f.log2[t] = sum, f.beta[t] = beta, f.norm_q[t] = norm_q, f.norm_k[t] = norm_k;
        f.power_q[t] = power_q, f.power_k[t] = power_k;
        f.pair_q[t] = scale * norm_q, f.pair_k[t] = beta * norm_k;
        f.query[t] = scale * norm_q * risen, f.erase[t] = -beta * norm_k * risen, f.write[t] = beta * norm_k * left;
        f.fade[t] = -norm_k * fade, f.left[t] = norm_k * left;
        if (t != 0) return;
        f.decay = ptx::ex2_approx_ftz(fminf(last, 0.0f)), f.queries = queries;
        f.rise = __uint_as_float((127 + rise) << 23), f.fall = __uint_as_float((127 - rise) << 23);
    }

    // The power of 2 below the largest scale / |q|.
    __device__ __forceinline__ float largest_query() const {
        const float largest = fmaxf(fmaxf(smem.queries[0], smem.queries[1]), fmaxf(smem.queries[2], smem.queries[3]));
        const uint32_t bits = __float_as_uint(fabsf(static_cast<float>(call.p().scale)) * largest) >> 23;
        return __uint_as_float(min(max(bits, 27u), 227u) << 23);
    }

    __device__ __forceinline__ float fading(float own, float other) const {
        return ptx::ex2_approx_ftz(fminf(own - other, 0.0f));
    }

    // f(element of a fragment, its row and column, is it near the diagonal?) at and below the diagonal, two columns at a time.
    template <class F>
    __device__ __forceinline__ void each_pair(F f) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < 8; n++)
                if (n <= 2 * warp + 1) f(4 * n + 2 * half, row + 8 * half, 8 * n + 2 * q, n >= 2 * warp);
    }
    // Pairs, packed, from the products of queries and keys.
    __device__ __forceinline__ void make_pairs(const float (&qk)[32], uint32_t (&packed)[16]) const {
        const float scale = static_cast<float>(call.p().scale) * inverse_power(largest_query());
        each_pair([&](int at, int i, int j, bool diagonal) {
            const float2 norm = pair(&smem.norm_k[j]), other = pair(&smem.log2[j]);
            const float log2 = smem.log2[i], query = scale * smem.norm_q[i];
            float2 p = make_float2(query * norm.x * fading(log2, other.x) * qk[at],
                                   query * norm.y * fading(log2, other.y) * qk[at + 1]);
            if (diagonal) p.x = j <= i ? p.x : 0.0f, p.y = j < i ? p.y : 0.0f;
            packed[at / 2] = ptx::cvt_rn_x2<Operand>(p.x, p.y);
        });
    }
    // L, from the products of keys, and pairs to shared memory. Returns whether the head is a hard one.
    __device__ __forceinline__ bool similarities(const float (&kk)[32], const uint32_t (&packed)[16]) const {
        Block &beside = warp < 2 ? smem.made.l[0] : smem.made.l[1], &below = smem.made.l[2];
        float match = 0.0f;
        // 0 right of the diagonal's 16 x 16 block, half a row of a block a lane.
        for (int block = warp + 1; block < 4; block++) {
            const uint32_t at = Square::offset(16 * warp + lane / 2, 16 * block + lane % 2 * 8);
            ptx::st_shared_v4_u32(s_pairs + at, make_uint4(0, 0, 0, 0)),
                ptx::st_shared_v4_u32(s_solve + at, make_uint4(0, 0, 0, 0));
        }
        each_pair([&](int at, int i, int j, bool diagonal) {
            const float2 norm = pair(&smem.norm_k[j]), beta = pair(&smem.beta[j]);
            const float own = smem.norm_k[i];
            float2 l = make_float2(own * norm.x * kk[at], own * norm.y * kk[at + 1]);
            if (diagonal) l.x = j < i ? l.x : 0.0f, l.y = j + 1 < i ? l.y : 0.0f;
            *reinterpret_cast<float2 *>(j < kHalf ? &beside[i % kHalf][j] : &below[i % kHalf][j - kHalf]) = l;
            match = fmaxf(match, fmaxf(fabsf(l.x * beta.x), fabsf(l.y * beta.y)));
            ptx::st_shared_u32(s_pairs + Square::offset(i, j), packed[at / 2]);
        });
        return __any_sync(~0u, match > kNearlyOne) && repeats(kk);
    }

    // How much a state may grow by the warp's rows of keys, which are no longer than 1 as a rule: see Factors. NaN stays.
    __device__ __forceinline__ void growth(const float (&kk)[32]) const {
        float log2 = 0.0f;
        each_pair([&](int at, int i, int j, bool diagonal) {
            if (!diagonal || j != i / 2 * 2) return;
            const float norm = smem.norm_k[i], square = norm * norm * (i % 2 ? kk[at + 1] : kk[at]);
            const float factor = fabsf(1.0f - smem.beta[i] * square);
            log2 += factor <= 1.0f ? 0.0f : ptx::lg2_approx_ftz(factor);
        });
        log2 = sum_quad(log2);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) log2 += __shfl_xor_sync(~0u, log2, mask);
        if (lane == 0) (&call.factors[own].growth.x)[warp] = log2;
    }

    // Is a row's key nearly that of several earlier tokens?
    __device__ __forceinline__ bool repeats(const float (&kk)[32]) const {
        float sum[2] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n > 2 * warp + 1) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = row + e / 2 * 8, j = 8 * n + 2 * q + e % 2;
                if (j >= i) continue;
                float match =
                    fading(smem.log2[i], smem.log2[j]) * smem.norm_k[i] * smem.norm_k[j] * kk[4 * n + e] * smem.beta[j];
#pragma unroll
                for (int power = 1; power < 32; power *= 2) match *= match;
                sum[e / 2] += match;
            }
        }
        const float upper = sum_quad(sum[0]), lower = sum_quad(sum[1]);
        return upper > kMostMatches || lower > kMostMatches;
    }

    // solve at the fragment's rows first + g (+ 8) and columns column + 2q, from X there. Returns the largest |X|.
    __device__ __forceinline__ float put_solve(const float (&x)[4], int first, int column) const {
        const int j = column + 2 * q;
        const float2 other = pair(&smem.log2[j]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = first + g + 8 * half;
            const float own = smem.log2[i];
            ptx::st_shared_u32(
                s_solve + Square::offset(i, j),
                ptx::cvt_rn_x2<Operand>(-fading(own, other.x) * x[2 * half], -fading(own, other.y) * x[2 * half + 1]));
        }
        return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    }
    // A fragment, 16 x 8 elements, of a block, and back.
    static __device__ __forceinline__ void get(float (&x)[4], const Block &from, int first, int column) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 v = pair(&from[first + lane / 4 + 8 * half][column + lane % 4 * 2]);
            x[2 * half] = v.x, x[2 * half + 1] = v.y;
        }
    }
    static __device__ __forceinline__ void put(const float (&x)[4], Block &to, int first, int column) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float2 *>(&to[first + lane / 4 + 8 * half][column + lane % 4 * 2]) =
                make_float2(x[2 * half], x[2 * half + 1]);
    }

    // The warp's 16 x 16 diagonal block of X, a lane a column, in place of that of L.
    __device__ __forceinline__ float diagonal() const {
        const int j = lane % 16, first = 16 * (warp % 2);
        Block &l = smem.made.l[warp / 2 * 2];
        const auto row4 = [](const float *from) { return *reinterpret_cast<const float4 *>(from); };
        float column[16];
        float scaled[16];  // -beta column
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum[2] = {l[first + i][first + j], 0.0f};
#pragma unroll
            for (int k = 0; k < i; k += 4) {
                const float4 a = row4(&l[first + i][first + k]);
                const float value[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (k + e < i) sum[e % 2] = fmaf(value[e], scaled[k + e], sum[e % 2]);
            }
            column[i] = sum[0] + sum[1];
            scaled[i] = -smem.beta[16 * warp + i] * column[i];
        }
        __syncwarp();
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++) l[first + i][first + j] = column[i];
        __syncwarp();
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float own[4];
            get(own, l, first, first + 8 * n);
            largest = fmaxf(largest, put_solve(own, 16 * warp, 16 * warp + 8 * n));
        }
        return largest;
    }

    // sum -= A beta B: rows `first` and columns `inner` (16 each) of A, beta from `token` on, rows `inner` of B and kCount times 8 columns.
    template <int kCount>
    __device__ __forceinline__ void subtract(float (&sum)[kCount][4], const Block &a, int first, int inner, int token,
                                             const Block &b, int column) const {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = pair(&a[first + g + i % 2 * 8][inner + 2 * q + i / 2 * 8]),
                         beta = pair(&smem.beta[token + 2 * q + i / 2 * 8]);
            split<T>(-v.x * beta.x, -v.y * beta.y, high[i], low[i]);
        }
#pragma unroll
        for (int n = 0; n < kCount; n++) {
            uint32_t b_high[2], b_low[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *from = &b[inner + 2 * q + 8 * i][column + 8 * n + g];
                split<T>(from[0], from[kPitch], b_high[i], b_low[i]);
            }
            ptx::mma_m16n8k16<T>(sum[n], low, b_high[0], b_high[1]);
            ptx::mma_m16n8k16<T>(sum[n], high, b_low[0], b_low[1]);
            ptx::mma_m16n8k16<T>(sum[n], high, b_high[0], b_high[1]);
        }
    }

    // X_21 of the two pairs of 16 x 16 blocks, in place of L_21: 8 columns a warp.
    __device__ __forceinline__ float merge16() const {
        const int block = warp / 2, column = warp % 2 * 8;
        Block &l = smem.made.l[2 * block], &y = smem.made.y;  // rows of y: block
        float sum[1][4];
        get(sum[0], l, 16, column);
        subtract(sum, l, 16, 0, 32 * block, l, column);
        // Rows 16 .. of y as a factor: those of the block's own place.
        put(sum[0], y, 16, 16 * block + column);
        block == 0 ? ptx::bar_sync(1, 64) : ptx::bar_sync(2, 64);  // L_21 is read
        subtract(sum, l, 16, 16, 32 * block + 16, y, 16 * block + column);
        put(sum[0], l, 16, column);
        return put_solve(sum[0], 32 * block + 16, 32 * block + column);
    }

    // X_21 of the 32 x 32 blocks, a 16 x 16 block a warp.
    __device__ __forceinline__ float merge32() const {
        const int down = 16 * (warp % 2), across = 16 * (warp / 2);
        const Block &l = smem.made.l[1], &x11 = smem.made.l[0], &x22 = smem.made.l[2];
        Block &y = smem.made.y;
        float sum[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) get(sum[n], l, down, across + 8 * n);
        for (int s = across; s < kHalf; s += 16) subtract(sum, l, down, s, s, x11, across);
#pragma unroll
        for (int n = 0; n < 2; n++) put(sum[n], y, down, across + 8 * n);
        __syncthreads();
        for (int s = 0; s <= down; s += 16) subtract(sum, x22, down, s, kHalf + s, y, across);
        return fmaxf(put_solve(sum[0], kHalf + down, across), put_solve(sum[1], kHalf + down, across + 8));
    }

    __device__ __forceinline__ void work() const {
        load();
        bool hard;
        {
            float x[32];  // q k^T, then k k^T: both at once would leave registers for five CTAs
            uint32_t packed[16];
            issue_ss<T, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(s_q, 0, 0), Rows::k_major_low(s_k, 0, 0), false);
            const float longest = norms(s_q, smem.norm_q, smem.power_q);
            norms(s_k, smem.norm_k, smem.power_k);
            if (lane == 0) smem.queries[warp] = longest;
            __syncthreads();  // norms are known
            factors(largest_query());
            if (warp == 0) note(&call.largest_of(c.n, c.key_head).v, smem.rows[0]);
            if (warp == 1 && call.part != Part::Forward)
                note(&call.largest_of(c.n, c.key_head).d_o, largest_query() * smem.rows[1]);
            give_rows();
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(x);
            make_pairs(x, packed);
            issue_ss<T, kK, Rows, kK, Rows, D / 16>(x, Rows::k_major_low(s_k, 0, 0), Rows::k_major_low(s_k, 0, 0), false);
            ptx::wgmma_wait_group<0>();
            ptx::register_fence(x);
            if (is_few(call, c)) {  // the kernels in float do it
                if (thread != 0) return;
                call.flag(c.n, c.head);
                return ptx::cp_async_bulk_wait_group_read<0>();
            }
            if (call.cut.streams != 0) growth(x);
            __syncthreads();  // q and k are read
            hard = similarities(x, packed);
        }
        __syncwarp();
        float largest = diagonal();
        __syncthreads();
        largest = fmaxf(largest, merge16());
        __syncthreads();
        largest = fmaxf(largest, merge32());
        if (hard || largest > kLargestX) call.flag(c.n, c.head);
        ptx::fence_proxy_async_shared_cta();
        __syncthreads();
        if (thread != 0) return;
        ptx::cp_async_bulk_store(tile_of<Square>(call.pairs, own), s_pairs, Square::kBytes);
        ptx::cp_async_bulk_store(tile_of<Square>(call.solve, own), s_solve, Square::kBytes);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<0>();
    }
};

template <class C>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareCtas) gdn_bwd_prepare_kernel(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) char smem_bytes[];
    const int64_t HV = call.p().HV, index = blockIdx.x / HV;
    delta_bwd::after_those_before();
    if (index >= call.chunks()) return;
    const Chunk c = delta_bwd::find_chunk(call.p(), call.exact.w.chunk_start, index, blockIdx.x % HV);
    const Prepare<C> prepare{call, *reinterpret_cast<PrepareSmem<C> *>(smem_bytes), c};
    prepare.work();
}

void launch_prepare(const Call &call) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        launch_config.grid.x = call.exact.w.chunks * call.exact.p.HV;
        launch_config.block.x = kPrepareThreads;
        launch_config.smem_bytes = sizeof(PrepareSmem<C>);
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch_config.programmatic = true;
        launch("gdn_bwd_prepare_kernel", gdn_bwd_prepare_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
