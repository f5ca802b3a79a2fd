// What the roles of gdn_bwd_gradients_kernel know, and the work of the loader and of the helpers: tiles; dv, dbeta, dg. See
// gdn_bwd_gradients.cu.
#pragma once
#include "gdn_bwd.cuh"
#include "ptx/prefetch.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kHelpers = 128, kLoaders = 128;  // of the loaders two warps make operands of do

template <class C>
struct alignas(1024) GradientsSmem {
    char q[C::Rows::kBytes], k[C::Rows::kBytes];
    struct Tokens {
        char d_o[C::Rows::kBytes], e[C::Rows::kBytes], dr[C::Rows::kBytes];
    } tokens[2];  // of this value head, of the next
    char state[C::State::kBytes], grad[C::State::kBytes];
    char pairs[C::Square::kBytes], erase[C::Square::kBytes];  // P', M; 0 above the diagonal from the start
    Factors f[2];                                             // as tokens
    struct Head {
        Chunk chunk;                 // with head
        float d_o;                   // what makes an operand of do
        float forwards, in_reverse;  // units, to the caller's
        float grad;                  // what D is still to be multiplied by
        bool flagged;
    } head[2];    // as tokens
    struct Key {  // of the key head, for the multipliers
        Chunk chunk;
        float along[2][2][kC];  // y . dq', y . dk', by warpgroup
        float norm[2][kC];      // 1 / |q|, 1 / |k|
        float back[2][kC];      // from dq', dk' to the caller's dq, dk
    } key[2];                   // of this key head and of the one before, which slower warps may still read
    struct Sums {
        float pairs[2][4][kC];          // of H, by its two parts and rows of a warp
        float c[2][kC], after[2][kC];   // c_i, f_j, by warpgroup
    } sums[2];                          // from the multipliers to the helpers
    float dbeta[2][kC], product[2][4];  // by place
    alignas(8) char key_ring[Ring<1>::kBytes], tokens_ring[Ring<2>::kBytes], given_ring[Ring<2>::kBytes],
        state_ring[Ring<1>::kBytes], grad_ring[Ring<1>::kBytes], sums_ring[Ring<2>::kBytes];
};
static_assert(sizeof(GradientsSmem<Config<__half, 128>>) <= 227 * 1024, "fits");

// Named barriers: the warpgroups that multiply; the helpers.
enum GradientsMeeting { kMultipliers = 1, kHelpersOnly };

template <class C>
struct GradientsParts {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Square = typename C::Square;
    using State = typename C::State;
    static constexpr int D = C::D, kMultiply = 128 * C::kHalves, kThreads = kMultiply + kHelpers + kLoaders;
    static constexpr ptx::Major kK = ptx::Major::K, kMN = ptx::Major::MN;
    const Call &call;
    GradientsSmem<C> &smem;
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, q = lane % 4;
    const int row = 16 * warp + lane / 4;  // and row + 8: the thread's rows of all fragments
    const uint32_t s_q = ptx::shared_address(smem.q), s_k = ptx::shared_address(smem.k),
                   s_state = ptx::shared_address(smem.state), s_grad = ptx::shared_address(smem.grad),
                   s_pairs = ptx::shared_address(smem.pairs), s_erase = ptx::shared_address(smem.erase);
    // Read by the multipliers and the helpers; key: by the former; sums: written by the former, read by one warp of the latter.
    const Ring<1> key_ring{ptx::shared_address(smem.key_ring)};
    // given: do, as the caller has it; free again with the rest of the tokens.
    const Ring<2> tokens_ring{ptx::shared_address(smem.tokens_ring)}, given_ring{ptx::shared_address(smem.given_ring)},
        sums_ring{ptx::shared_address(smem.sums_ring)};
    const Ring<1> state_ring{ptx::shared_address(smem.state_ring)}, grad_ring{ptx::shared_address(smem.grad_ring)};

    __device__ __forceinline__ void init() const {
        constexpr uint32_t kMultiplyArrivals = kMultiply / 32 * kWarpArrivals,
                           kAll = (kMultiply + kHelpers) / 32 * kWarpArrivals;
        key_ring.init(1, kMultiplyArrivals);
        given_ring.init(1 + 32, 1);
        tokens_ring.init(1 + kConverters / 32 * kWarpArrivals, kAll);
        state_ring.init(1, kAll), grad_ring.init(1, kAll);
        sums_ring.init(kMultiplyArrivals, kWarpArrivals);
    }

    __device__ __forceinline__ uint32_t s_do(int place) const { return ptx::shared_address(smem.tokens[place].d_o); }
    __device__ __forceinline__ uint32_t s_e(int place) const { return ptx::shared_address(smem.tokens[place].e); }
    __device__ __forceinline__ uint32_t s_dr(int place) const { return ptx::shared_address(smem.tokens[place].dr); }

    static __device__ __forceinline__ void copy(uint32_t to, const void *from, int bytes, uint32_t bar) {
        ptx::cp_async_bulk_load(to, from, static_cast<uint32_t>(bytes), bar);
    }

    // By the loader: q and k; what belongs to tokens, of a flagged head the factors alone; S or D.
    __device__ __forceinline__ void fetch_key(const Chunk &c, const RingState<1> &at) const {
        key_ring.wait_empty(at);
        if (lane != 0) return;
        const uint32_t full = key_ring.full(0);
        const int64_t tile = call.of_key(c.index, c.key_head);
        ptx::mbarrier_arrive_expect_tx(full, 2 * Rows::kBytes);
        copy(s_q, tile_of<Rows>(call.q, tile), Rows::kBytes, full);
        copy(s_k, tile_of<Rows>(call.k, tile), Rows::kBytes, full);
    }
    __device__ __forceinline__ void fetch_tokens(const Chunk &c, const RingState<2> &at) const {
        tokens_ring.wait_empty(at);
        const uint32_t full = tokens_ring.full(at.stage), given_full = given_ring.full(at.stage);
        const bool flagged = call.flagged(c.n, c.head), given = call.as_given(c);
        if (lane == 0) {
            const int64_t own = call.of_value(c.index, c.head);
            ptx::mbarrier_expect_tx(given_full, !flagged && given ? Rows::kBytes : 0);
            ptx::mbarrier_expect_tx(full, (flagged ? 0 : 2) * Rows::kBytes + sizeof(Factors));
            if (!flagged) {
                if (given) load_given<Rows>(s_do(at.stage), call.map_do, c, c.head, given_full);
                copy(s_e(at.stage), tile_of<Rows>(call.e, own), Rows::kBytes, full);
                copy(s_dr(at.stage), tile_of<Rows>(call.dr, own), Rows::kBytes, full);
            }
            copy(ptx::shared_address(&smem.f[at.stage]), call.factors + own, sizeof(Factors), full);
            // What is waited for here does not keep the copies.
            const Largest largest = call.largest_of(c.n, c.key_head);
            const Unit reverse = in_reverse(largest);
            smem.head[at.stage] = {c,
                                   reverse.to * call.factors[own].queries,
                                   forwards(largest).from,
                                   reverse.from,
                                   call.fall_behind(c.n, c.index, c.head),
                                   flagged};
            ptx::mbarrier_arrive(given_full), ptx::mbarrier_arrive(full);
        }
        if (!flagged && !given) load_rows<Rows>(s_do(at.stage), call.p().d_o, c, c.head, 0, lane, 32);
        ptx::cp_async_mbarrier_arrive_noinc(given_full);
    }
    // By the loaders' last two warps.
    __device__ __forceinline__ void convert() const {
        RingState<2> at;
#pragma unroll 1
        for (int left = heads(); left > 0; left--, at.advance()) {
            given_ring.wait_full(at);
            const typename GradientsSmem<C>::Head &head = smem.head[at.stage];
            if (!head.flagged) convert_tile<T, Rows>(s_do(at.stage), head.d_o, static_cast<int>(threadIdx.x) % kConverters);
            warp_arrive(tokens_ring.full(at.stage), lane);
        }
    }
    __device__ __forceinline__ void fetch_state(const RingState<1> &at, const Ring<1> &ring, uint32_t to,
                                                const char *from) const {
        ring.wait_empty(at);
        if (lane != 0) return;
        ptx::mbarrier_arrive_expect_tx(ring.full(0), State::kBytes);
        copy(to, from, State::kBytes, ring.full(0));
    }
    // Asks for S, D, and with a first head for q and k, early, to L2: shared memory has no room for two.
    __device__ __forceinline__ void prefetch(const Chunk &c) const {
        if (call.flagged(c.n, c.head)) return;
        if (lane != 0) return;
        if (c.head % (call.p().HV / call.p().H) == 0) {
            const int64_t key = call.of_key(c.index, c.key_head);
            ptx::cp_async_bulk_prefetch(tile_of<Rows>(call.q, key), Rows::kBytes);
            ptx::cp_async_bulk_prefetch(tile_of<Rows>(call.k, key), Rows::kBytes);
        }
        const int64_t own = call.of_value(c.index, c.head);
        ptx::cp_async_bulk_prefetch(call.state(own), State::kBytes);
        ptx::cp_async_bulk_prefetch(call.grad<C>(own), State::kBytes);
    }
    static __device__ __forceinline__ void multipliers() { ptx::barrier_sync(kMultipliers, kMultiply); }
    static __device__ __forceinline__ void helpers() { ptx::barrier_sync(kHelpersOnly, kHelpers); }

    // The helpers' work. dv:
    __device__ __forceinline__ void values(const Chunk &c, int place) const {
        constexpr int kUnits = D / 8;
        const BwdParams &p = call.p();
        uint16_t *const dv = reinterpret_cast<uint16_t *>(p.dv.data) + delta_bwd::element(p.dv, c.b, c.token, c.head);
        const float size = smem.head[place].in_reverse;
#pragma unroll 2
        for (int i = threadIdx.x % kHelpers; i < kC * kUnits; i += kHelpers) {
            const int t = i / kUnits, unit = i % kUnits * 8;
            if (t >= c.length) break;
            const uint4 from = ptx::ld_shared_v4_u32(s_dr(place) + Rows::offset(t, unit));
            const uint32_t dr[4] = {from.x, from.y, from.z, from.w};
            uint32_t out[4];
            const float beta = smem.f[place].beta[t] * size;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 y = unpack(Operand{}, dr[j]);
                out[j] = ptx::cvt_rn_x2<T>(beta * y.x, beta * y.y);
            }
            *reinterpret_cast<uint4 *>(dv + t * p.dv.stride[1] + unit) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }

    // Adds to the diagonal of A B^T for 16 rows of two tiles, kCount columns.
    template <class Tile, int kCount>
    __device__ __forceinline__ void diagonal(float (&upper)[4], float (&lower)[4], uint32_t a, uint32_t b, int first) const {
#pragma unroll 4
        for (int s = 0; s < kCount / 16; s++) {
            uint32_t x[4], y[4];
            ptx::ldmatrix_x4(x, a + Tile::block16_offset(first, 16 * s, lane));
            ptx::ldmatrix_x4(y, b + Tile::block16_offset(first, 16 * s, lane));
            ptx::mma_m16n8k16<Operand>(upper, x, y[0], y[2]);
            ptx::mma_m16n8k16<Operand>(lower, x, y[1], y[3]);
        }
    }
    // The thread's element of the diagonals: upper[0] or [1] at (g, 2q ..), lower[2] or [3] at (g + 8, 2q ..).
    __device__ __forceinline__ bool on_diagonal() const { return lane / 8 == q; }

    // dbeta before the form of beta, and S . D.
    __device__ __forceinline__ void diagonals(int place, int sums) const {
        float upper[4] = {}, lower[4] = {};
        const int odd = lane / 4 % 2;
        float *const to = smem.dbeta[sums];
        diagonal<Rows, D>(upper, lower, s_dr(place), s_e(place), 16 * warp);
        if (on_diagonal()) to[row] = odd ? upper[1] : upper[0], to[row + 8] = odd ? lower[3] : lower[2];
    }
    __device__ __forceinline__ void state_product(int place) const {
        float upper[4] = {}, lower[4] = {};
        const int odd = lane / 4 % 2;
#pragma unroll 1
        for (int block = warp; block < D / 16; block += 4) diagonal<State, D>(upper, lower, s_state, s_grad, 16 * block);
        float sum = odd ? upper[1] + lower[3] : upper[0] + lower[2];
        sum = sum_over<32>(on_diagonal() ? sum : 0.0f);
        if (lane == 0) smem.product[place][warp] = sum;
    }

    // Sum of x over the lanes before this one, and over those after it.
    __device__ __forceinline__ float sum_before(float x) const {
        float through = x;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const float before = __shfl_up_sync(~0u, through, 1);
        return lane > 0 ? before : 0.0f;
    }
    __device__ __forceinline__ float sum_after(float x) const {
        return __shfl_sync(~0u, sum_before(__shfl_sync(~0u, x, 31 - lane)), 31 - lane);
    }

    // dg, dbeta and the chunk's sums, by one warp, two tokens a lane. passes: of S . D; unit: to the caller's.
    __device__ __forceinline__ void gates(const Chunk &c, const delta_bwd::GateBits<2> &in, float passes, float unit,
                                          const RingState<2> &at) const {
        const BwdParams &p = call.p();
        const auto two = [&](const float *from) { return *reinterpret_cast<const float2 *>(from + 2 * lane); };
        sums_ring.wait_full(at);
        const typename GradientsSmem<C>::Sums &sums = smem.sums[at.stage];
        float2 pairs = make_float2(0.0f, 0.0f), here = two(sums.c[0]), after = two(sums.after[0]);
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int rows = 0; rows < 4; rows++) {
                const float2 x = two(sums.pairs[part][rows]);
                pairs.x += x.x, pairs.y += x.y;
            }
        if (C::kHalves > 1) {
            const float2 c1 = two(sums.c[1]), after1 = two(sums.after[1]);
            here.x += c1.x, here.y += c1.y, after.x += after1.x, after.y += after1.y;
        }
        const float *const product = smem.product[at.stage];
        const float passing = passes * (product[0] + product[1] + product[2] + product[3]);
        const float2 dbeta = two(smem.dbeta[at.stage]);
        warp_arrive(sums_ring.empty(at.stage), lane);
        const float later = sum_after(here.x + here.y) + here.y, earlier = sum_before(after.x + after.y);
        const float dg[2] = {unit * (pairs.x + (later + here.x) + earlier + passing),
                             unit * (pairs.y + later + (earlier + after.x) + passing)};
        const float of_beta[2] = {unit * dbeta.x, unit * dbeta.y}, amplitude = delta_bwd::amplitude_of(p, c.head);
        float dA = 0.0f, dbias = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            if (t >= c.length) continue;
            const float x =
                p.gate != Gate::None ? delta_bwd::through_gate(p, in.gate_input(p, i), dg[i], amplitude, dA, dbias) : dg[i];
            delta_bwd::store_float(p.dg, delta_bwd::element(p.dg, c.b, c.token + t, c.head), x);
            delta_bwd::store_float(p.dbeta, delta_bwd::element(p.dbeta, c.b, c.token + t, c.head),
                                   delta_bwd::through_beta(p, float_of(p.beta, in.beta[i]), of_beta[i]));
        }
        if (p.gate == Gate::None) return;
        dA = sum_over<32>(dA), dbias = sum_over<32>(dbias);
        if (lane != 0) return;
        call.exact.w.dA[call.of_value(c.index, c.head)] = dA, call.exact.w.dbias[call.of_value(c.index, c.head)] = dbias;
    }

    // The value heads of this CTA, one after another.
    struct Cursor {
        const Call &call;
        int64_t item;
        int r;
        Chunk c;
        __device__ __forceinline__ explicit Cursor(const Call &of)
            : call(of), item(int64_t{blockIdx.x} - gridDim.x), r(INT32_MAX - 1) {}
        __device__ __forceinline__ bool advance() {
            const BwdParams &p = call.p();
            const int group_size = static_cast<int>(p.HV / p.H);
            if (++r >= group_size) {
                item += gridDim.x;
                if (item >= call.chunks() * p.H) return false;
                c = delta_bwd::find_chunk(p, call.exact.w.chunk_start, item / p.H, 0);
                c.key_head = item % p.H;
                r = 0;
            }
            c.head = c.key_head * group_size + r;
            return true;
        }
    };
    __device__ __forceinline__ int heads() const {
        const BwdParams &p = call.p();
        const int64_t items = call.chunks() * p.H, first = blockIdx.x;
        return first >= items ? 0 : static_cast<int>(((items - first - 1) / gridDim.x + 1) * (p.HV / p.H));
    }

    // Tokens of a head are loaded while the one before is worked on; S, D, and by a second warp q and k, as soon as its have been read.
    __device__ __forceinline__ void load_keys() const {
        Cursor cursor(call);
        RingState<1> keys;
        while (cursor.advance())
            if (cursor.r == 0) fetch_key(cursor.c, keys), keys.advance();
    }
    __device__ __forceinline__ void load() const {
        Cursor cursor(call);
        RingState<1> states;
        RingState<2> tokens;
        while (cursor.advance()) {
            fetch_tokens(cursor.c, tokens), tokens.advance();
            if (cursor.item != blockIdx.x || cursor.r > 0) prefetch(cursor.c);
            if (!call.flagged(cursor.c.n, cursor.c.head)) {
                const int64_t own = call.of_value(cursor.c.index, cursor.c.head);
                fetch_state(states, state_ring, s_state, call.state(own));
                fetch_state(states, grad_ring, s_grad, call.grad<C>(own));
                states.advance();
            }
        }
    }

    __device__ __forceinline__ void help() const {
        const BwdParams &p = call.p();
        RingState<1> states;
        RingState<2> at, sums;
        for (int left = heads(); left > 0; left--, at.advance()) {
            tokens_ring.wait_full(at);
            const Chunk c = smem.head[at.stage].chunk;
            if (smem.head[at.stage].flagged) {
                warp_arrive(tokens_ring.empty(at.stage), lane);
                continue;
            }
            const delta_bwd::GateBits<2> in(p, c, 2 * lane, warp == 1);
            const typename GradientsSmem<C>::Head &head = smem.head[at.stage];
            const float passing = smem.f[at.stage].decay * head.grad, unit = head.forwards * head.in_reverse;
            // First of all S . D, so that the next S, D, q and k can come.
            state_ring.wait_full(states), grad_ring.wait_full(states);
            state_product(sums.stage);
            warp_arrive(state_ring.empty(0), lane), warp_arrive(grad_ring.empty(0), lane);
            diagonals(at.stage, sums.stage);
            values(c, at.stage);
            warp_arrive(tokens_ring.empty(at.stage), lane);
            helpers();
            if (warp == 1) gates(c, in, passing, unit, sums);
            states.advance(), sums.advance();
        }
    }
};

}  // namespace linattn::cuda::gdn_bwd
