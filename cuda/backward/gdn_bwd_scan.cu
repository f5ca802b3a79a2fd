// Second kernel of the chunked GDN backward: S from the first chunk to the last and its gradient D from the last to the first, side
// by side, since neither needs the other. Per chunk, with tokens in rows, factors of rows (beta, fade, write, ...), and solve = -X
// and pairs from gdn_bwd_prepare.cu, v and do in the units of gdn_bwd.cuh:
//
//   forward   r = v + fade k S;               e = r + solve (beta r);       S = 2^G_last S + k^T (write e)
//   reverse   z = pairs^T do + left k D;      dr = z + solve^T (beta z);    D = rise 2^G_last D + q^T (query do) + k^T (erase dr)
//
// One CTA per sequence, value head, 64 columns of V and direction, or per item of a cut (gdn_bwd_cut.cuh); the two halves of V are a cluster, whose CTAs each load half of
// what both need. A warpgroup holds the transposed state, V x K, in fp32 accumulators; packed to 16 bits it is the left operand of
// the product that needs it, and what goes to memory. Transposed, r, e, z and dr come out as the left operands of what follows, so
// nothing of the chain passes through shared memory. Per chunk three products depend on each other; those with do are issued ahead.
//
// Roles: warps 0 to 3 compute; warp 4 loads, three stages; warp 5 stores; warps 6 and 7 make operands of v or do where they lie.
// Nothing but the chain is left to the computing warps, one to a scheduler.
// Shared memory at D = 128: 3 x 58 KB, e and the state on their way out 2 x 24 KB: one CTA an SM. Registers: state 64, packed 32, dr 32,
// y 32, do 32.
#include <cstddef>

#include "common/launch.h"
#include "common/states.cuh"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kScanThreads = 192 + kConverters, kStages = 3;

template <class C>
struct alignas(1024) ScanStage {
    char k[C::Rows::kBytes], q[C::Rows::kBytes];              // q: reverse only
    char solve[C::Square::kBytes], pairs[C::Square::kBytes];  // pairs: reverse only
    char x[C::Half::kBytes];                                  // v; do
    ScanFactors f;
};

template <class C>
struct alignas(1024) ScanSmem {
    ScanStage<C> stage[kStages];
    // On their way out, in turn, so that a chunk need not wait until the one before has left: the state; e or dr.
    char state[2][C::HalfState::kBytes], x[2][C::Half::kBytes];
    alignas(8) char ring[Ring<kStages>::kBytes], given[Ring<kStages>::kBytes];
};

// What one CTA does: that, with the sequence and its first chunk.
struct Job : ScanItem {
    Item item;
    int64_t first_chunk;
};

template <class C>
struct Scan {
    using T = typename C::T;
    using Rows = typename C::Rows;
    using Half = typename C::Half;
    using Square = typename C::Square;
    static constexpr int D = C::D, kSteps = D / 16;
    const Call &call;
    ScanSmem<C> &smem;
    const Job &job;
    // given: v or do, as the caller has it; free again with the rest of the stage.
    const Ring<kStages> ring{ptx::shared_address(smem.ring)}, given{ptx::shared_address(smem.given)};

    __device__ __forceinline__ int chunk_at(int step) const { return job.begin + (job.reverse ? job.chunks - 1 - step : step); }
    __device__ __forceinline__ int64_t value(int step) const {
        return call.of_value(job.first_chunk + chunk_at(step), job.item.head);
    }

    // Of what is given. It is made again where it is wanted: registers are few.
    __device__ __forceinline__ Unit unit() const {
        const Largest of = call.largest_of(job.item.n, job.item.head / (call.p().HV / call.p().H));
        return job.reverse ? in_reverse(of) : forwards(of);
    }

    // Warp 4. What the CTAs of a cluster share, each loads a part of, for all.
    __device__ __forceinline__ void load() const {
        const BwdParams &p = call.p();
        const int lane = threadIdx.x % 32;
        const uint32_t parts = ptx::cluster_nctarank(), part = ptx::cluster_ctarank();
        const int64_t key_head = job.item.head / (p.HV / p.H);
        RingState<kStages> at;
        for (int step = 0; step < job.chunks; step++, at.advance()) {
            ScanStage<C> &stage = smem.stage[at.stage];
            const uint32_t full = ring.full(at.stage);
            Chunk c;
            c.b = job.item.batch, c.token = job.item.bos + int64_t{chunk_at(step)} * kC, c.key_head = key_head;
            c.length = min(kC, job.item.length - chunk_at(step) * kC);
            if (step >= kStages) pass_back(at.stage, lane);
            ring.wait_empty(at);
            if (lane == 0) {
                const int64_t own = value(step), key = call.of_key(job.first_chunk + chunk_at(step), key_head);
                const auto copy = [&](char *to, const char *from, uint32_t bytes) {
                    const uint32_t own_bytes = bytes / parts, first = part * own_bytes;
                    if (parts == 1)
                        ptx::cp_async_bulk_load(ptx::shared_address(to), from, bytes, full);
                    else
                        ptx::cp_async_bulk_load_multicast(ptx::shared_address(to) + first, from + first, own_bytes, full,
                                                          static_cast<uint16_t>((1 << parts) - 1));
                };
                const int tiles = job.reverse ? 2 : 1;
                const uint32_t from = job.reverse ? offsetof(ScanFactors, beta) : 0;
                const uint32_t factors = (job.reverse ? sizeof(ScanFactors) : offsetof(ScanFactors, left)) - from;
                ptx::mbarrier_arrive_expect_tx(given.full(at.stage), call.as_given(c) && !job.no_v ? Half::kBytes : 0);
                if (call.as_given(c) && !job.no_v)
                    ptx::cp_async_bulk_tensor_4d_load(ptx::shared_address(stage.x), job.reverse ? &call.map_do : &call.map_v,
                                                      given.full(at.stage), job.item.v_cta, job.item.head,
                                                      static_cast<int32_t>(c.token), static_cast<int32_t>(c.b));
                ptx::mbarrier_arrive_expect_tx(full, tiles * (Rows::kBytes + Square::kBytes) + factors);
                copy(stage.k, tile_of<Rows>(call.k, key), Rows::kBytes);
                copy(reinterpret_cast<char *>(&stage.f) + from, reinterpret_cast<const char *>(call.factors + own) + from,
                     factors);
                copy(stage.solve, tile_of<Square>(call.solve, own), Square::kBytes);
                if (job.reverse) {
                    copy(stage.q, tile_of<Rows>(call.q, key), Rows::kBytes);
                    copy(stage.pairs, tile_of<Square>(call.pairs, own), Square::kBytes);
                }
            }
            if (!call.as_given(c) && !job.no_v)
                load_rows<Half>(ptx::shared_address(stage.x), job.reverse ? p.d_o : p.v, c, job.item.head, job.item.v_cta, lane,
                                32);
            ptx::cp_async_mbarrier_arrive_noinc(given.full(at.stage));
        }
    }
    // Warps 6 and 7.
    __device__ __forceinline__ void convert() const {
        RingState<kStages> at;
        const auto queries = [&](int step) {  // of a later chunk, under way while this one's rows are
            return job.reverse && step < job.chunks ? call.factors[value(step)].queries : 1.0f;
        };
        const float to_unit = unit().to;
        float next = queries(0);
#pragma unroll 1
        for (int step = 0; step < job.chunks; step++, at.advance()) {
            const float factor = to_unit * next;
            next = queries(step + 1);
            given.wait_full(at);
            if (!job.no_v)
                convert_tile<T, Half>(ptx::shared_address(smem.stage[at.stage].x), factor,
                                      static_cast<int>(threadIdx.x) - kScanThreads + kConverters);
            warp_arrive(ring.full(at.stage), threadIdx.x % 32);
        }
    }

    // f(i, factor) for the tokens of the accumulators' pairs: i counts pairs of neighbouring tokens.
    static __device__ __forceinline__ float2 factor(const float *of, int j) {
        return *reinterpret_cast<const float2 *>(of + 8 * j + threadIdx.x % 4 * 2);
    }
    // Of all of the thread's tokens. Loaded ahead: while wgmma reads shared memory a load takes long.
    static __device__ __forceinline__ void factors(float2 (&f)[8], const float *of) {
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = factor(of, j);
    }
    // A fragments of x times factors of tokens, from accumulators V x tokens.
    static __device__ __forceinline__ void pack_scaled(uint32_t (&a)[4][4], const float (&x)[32], const float2 (&f)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            a[j / 2][j % 2 * 2] = ptx::cvt_rn_x2<Operand>(f[j].x * x[4 * j], f[j].y * x[4 * j + 1]);
            a[j / 2][j % 2 * 2 + 1] = ptx::cvt_rn_x2<Operand>(f[j].x * x[4 * j + 2], f[j].y * x[4 * j + 3]);
        }
    }
    // 16 tokens of v or do as fragments V x tokens.
    static __device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t tile, int s) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        ptx::ldmatrix_x4_trans(a, tile + Half::offset(16 * s + lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8));
    }
    // 16 tokens of e or dr to its place on the way out, tokens in rows; 16 columns of the state.
    __device__ __forceinline__ void stage_rows(const float (&x)[32], int place, int s) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t tile = ptx::shared_address(smem.x[place]);
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = ptx::cvt_rn_x2<Operand>(x[8 * s + 2 * i], x[8 * s + 2 * i + 1]);
        ptx::stmatrix_x4_trans(tile + Half::offset(16 * s + lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8), a);
    }
    __device__ __forceinline__ void stage_state(const uint32_t (&a)[4], int place, int s) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        ptx::stmatrix_x4(ptx::shared_address(smem.state[place]) + C::HalfState::block16_offset(16 * warp, 16 * s, lane), a);
    }
    // A place of what is on its way out: full, then free again. Named barriers between the computing warps and the one that stores:
    // they are no loops, so products may be under way.
    static constexpr uint32_t kFull = 1, kFree = 3, kRead = 5, kWithStorer = 128 + 32;
    // What a chunk gave out, when all have staged theirs. By one warp.
    __device__ __forceinline__ void store() const {
        const int half = job.item.v_cta / 64;
        for (int place = 0; place < 2 && place < job.chunks; place++) ptx::bar_arrive(kFree + place, kWithStorer);
        for (int step = 0; step < job.chunks; step++) {
            const int place = step % 2;
            const int64_t own = value(step);
            char *const states = call.state<C>(job.reverse ? call.exact.w.grads : call.exact.w.states, own);
            ptx::bar_sync(kFull + place, kWithStorer);
            if (threadIdx.x % 32 == 0 && step >= job.silent) {
#pragma unroll
                for (int panel = 0; panel < D / 64; panel++)
                    ptx::cp_async_bulk_store(states + panel * C::State::kPanelStrideBytes + half * C::Half::kBytes,
                                             ptx::shared_address(smem.state[place]) + panel * C::Half::kBytes, C::Half::kBytes);
                ptx::cp_async_bulk_store(tile_of<Rows>(job.reverse ? call.dr : call.e, own) + half * C::Half::kBytes,
                                         ptx::shared_address(smem.x[place]), C::Half::kBytes);
                ptx::cp_async_bulk_commit_group();
                ptx::cp_async_bulk_wait_group_read<0>();
            }
            __syncwarp();
            if (step + 2 < job.chunks) ptx::bar_arrive(kFree + place, kWithStorer);
        }
        if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }
    static __device__ __forceinline__ void when_free(int place) { ptx::bar_sync(kFree + place, kWithStorer); }
    // By the computing warps: their share is staged.
    static __device__ __forceinline__ void staged(int place) {
        ptx::fence_proxy_async_shared_cta();
        ptx::bar_arrive(kFull + place, kWithStorer);
    }

    // d (+)= a B as issue() does it, f(step) behind each step: while products queue up, the warp has nothing else to do.
    template <ptx::Major kMajor, class Tile, int kCount, int kOf, class F>
    static __device__ __forceinline__ void issue_with(float (&d)[kCount], const uint32_t (&a)[kOf][4], uint32_t low,
                                                      bool accumulate, F f) {
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kOf; s++) {
            const uint32_t step = (kMajor == ptx::Major::K ? Tile::offset(0, 16 * s) : Tile::offset(16 * s, 0)) >> 4;
            const uint32_t high = kMajor == ptx::Major::K ? Tile::k_major_high() : Tile::mn_major_high();
            ptx::wgmma_rs<Operand, kMajor>(d, a[s], ptx::wgmma_descriptor(low + step, high), s > 0 || accumulate);
            if (s == kOf - 1) ptx::wgmma_commit_group();
            f(s);
        }
    }
    // By the computing warps: a stage has been read. To the loaders of all CTAs whose copies land in it, by way of this CTA's: an arrival
    // at another CTA's barrier takes long. Racecheck does not follow a barrier that some warps only arrive at: in its build
    // (common/pipeline.cuh) each thread tells all of them.
    static constexpr bool kEachTells = kWarpArrivals == 32;
    __device__ __forceinline__ void tell(int stage) const {
        const uint32_t barrier = ring.empty(stage);
        if (ptx::cluster_nctarank() == 1) return ptx::mbarrier_arrive(barrier);
        for (uint32_t rank = 0; rank < C::kHalves; rank++) ptx::mbarrier_arrive_cluster_release_cta(ptx::mapa(barrier, rank));
    }
    __device__ __forceinline__ void give_back(int stage) const {
        if constexpr (kEachTells)
            tell(stage);
        else
            ptx::bar_arrive(kRead + stage, kWithStorer);
    }
    __device__ __forceinline__ void pass_back(int stage, int lane) const {
        if constexpr (kEachTells) return;
        ptx::bar_sync(kRead + stage, kWithStorer);
        if (lane == 0) tell(stage);
    }

    // S, before the chunk, becomes S after it. Barriers are waited for where no product is under way, and S is
    // scaled where it is: elsewhere ptxas serialises the products.
    __device__ __forceinline__ void forward(float (&S)[D / 2], const ScanStage<C> &stage, int place) const {
        float e[32];
        uint32_t state[kSteps][4], a[4][4];
        pack<Operand>(state, S);
        register_fence(state);
        float2 fade[8], beta[8];
        when_free(place);
        issue_with<ptx::Major::K, Rows>(e, state, Rows::k_major_low(ptx::shared_address(stage.k), 0, 0), false, [&](int s) {
            if (s < 4) load_transposed(a[s], ptx::shared_address(stage.x), s);
            stage_state(state[s], place, s);
        });
        factors(fade, stage.f.fade), factors(beta, stage.f.beta);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(e), register_fence(state);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = fade[j];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = unpack(Operand{}, a[j / 2][j % 2 * 2 + half]);
                e[4 * j + 2 * half] = fmaf(f.x, e[4 * j + 2 * half], v.x);
                e[4 * j + 2 * half + 1] = fmaf(f.y, e[4 * j + 2 * half + 1], v.y);
            }
        }
        pack_scaled(a, e, beta);
        factors(beta, stage.f.write);
        register_fence(a), ptx::register_fence(e);
        issue<Operand, ptx::Major::K, Square>(e, a, Square::k_major_low(ptx::shared_address(stage.solve), 0, 0), true);
        const float decay = stage.f.decay;
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] *= decay;
        ptx::register_fence(S);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(e), register_fence(a);
        pack_scaled(a, e, beta);
        register_fence(a), ptx::register_fence(S);
        issue_with<ptx::Major::MN, Rows>(S, a, Rows::mn_major_low(ptx::shared_address(stage.k), 0, 0), true,
                                         [&](int s) { stage_rows(e, place, s); });
        staged(place);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(S), register_fence(a);
    }

    // D, after the chunk, becomes D before it, both still to be multiplied by `fall`. What does not depend on D is issued where the chain leaves the tensor cores idle.
    __device__ __forceinline__ void reverse(float (&grad)[D / 2], float &fall, const ScanStage<C> &stage, int place) const {
        float dr[32], y[32];
        uint32_t state[kSteps][4], a[4][4], b[4][4], d_o[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) load_transposed(d_o[s], ptx::shared_address(stage.x), s);
        register_fence(d_o);
        issue<Operand, ptx::Major::MN, Square>(dr, d_o, Square::mn_major_low(ptx::shared_address(stage.pairs), 0, 0), false);
        pack<Operand>(state, grad);
        register_fence(state);
        when_free(place);
        issue_with<ptx::Major::K, Rows>(y, state, Rows::k_major_low(ptx::shared_address(stage.k), 0, 0), false,
                                        [&](int s) { stage_state(state[s], place, s); });
        const float decay = fall * stage.f.decay * stage.f.rise, next_fall = stage.f.fall;
#pragma unroll
        for (int i = 0; i < D / 2; i++) grad[i] *= decay;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = factor(stage.f.query, j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 x = unpack(Operand{}, d_o[j / 2][j % 2 * 2 + half]);
                b[j / 2][j % 2 * 2 + half] = ptx::cvt_rn_x2<Operand>(f.x * x.x, f.y * x.y);
            }
        }
        float2 left[8], beta[8];
        factors(left, stage.f.left), factors(beta, stage.f.beta);
#pragma unroll
        for (int j = 0; j < 8; j++) left[j].x *= fall, left[j].y *= fall;
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(dr), ptx::register_fence(y), register_fence(d_o), register_fence(state);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 f = left[j];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                dr[4 * j + 2 * half] = fmaf(f.x, y[4 * j + 2 * half], dr[4 * j + 2 * half]);
                dr[4 * j + 2 * half + 1] = fmaf(f.y, y[4 * j + 2 * half + 1], dr[4 * j + 2 * half + 1]);
            }
        }
        pack_scaled(a, dr, beta);
        factors(beta, stage.f.erase);
        register_fence(a), ptx::register_fence(dr), register_fence(b), ptx::register_fence(grad);
        issue<Operand, ptx::Major::MN, Square>(dr, a, Square::mn_major_low(ptx::shared_address(stage.solve), 0, 0), true);
        issue<Operand, ptx::Major::MN, Rows>(grad, b, Rows::mn_major_low(ptx::shared_address(stage.q), 0, 0), true);
        ptx::wgmma_wait_group<1>();
        ptx::register_fence(dr), register_fence(a);
        pack_scaled(a, dr, beta);
        register_fence(a);
        issue_with<ptx::Major::MN, Rows>(grad, a, Rows::mn_major_low(ptx::shared_address(stage.k), 0, 0), true,
                                         [&](int s) { stage_rows(dr, place, s); });
        staged(place);
        ptx::wgmma_wait_group<0>();
        ptx::register_fence(grad), register_fence(a), register_fence(b);
        fall = next_fall;
    }

    template <bool kReverse>
    __device__ __forceinline__ void compute() const {
        const BwdParams &p = call.p();
        const int lane = threadIdx.x % 32, row = job.item.v_cta + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
        const Tensor start = place(job.from, kReverse ? p.d_final_state : p.state_in, false);
        float S[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] = 0.0f;
        if (start) load_state(S, start, job.item.n, job.item.head, row, lane % 4 * 2);
        if (job.from == kGiven) multiply(S, unit().to);
        float fall =
            kReverse && job.chunks > 0 ? call.fall_behind(job.item.n, job.first_chunk + chunk_at(0), job.item.head) : 1.0f;
        if (kReverse) multiply(S, inverse_power(fall));
        RingState<kStages> at;
#pragma unroll 1
        for (int step = 0; step < job.chunks; step++, at.advance()) {
            ring.wait_full(at);
            const ScanStage<C> &stage = smem.stage[at.stage];
            kReverse ? reverse(S, fall, stage, step % 2) : forward(S, stage, step % 2);
            if (step + kStages < job.chunks) give_back(at.stage);
        }
        // An operand that overflowed made its column of the state infinite or NaN from there on.
        const Unit own = unit();
        bool bad = own.apart;
#pragma unroll
        for (int i = 0; i < D / 2; i++) bad = bad || !(fabsf(S[i]) < __uint_as_float(0x7f800000u));
        if (bad && job.chunks > 0) call.flag(job.item.n, job.item.head);
        multiply(S, job.to == kGiven ? fall * own.from : fall);
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const Tensor end = place(i == 0 ? job.to : job.to_transposed, p.d_initial_state, i == 1);
            if (end) store_state(S, end, job.item.n, job.item.head, row, lane % 4 * 2);
        }
    }

    static __device__ __forceinline__ void multiply(float (&S)[D / 2], float factor) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) S[i] *= factor;
    }
    // Of a state: a slot, or the caller's array, or none.
    __device__ __forceinline__ Tensor place(int number, const Tensor &given, bool transposed) const {
        if (number == kGiven) return given;
        Tensor t;
        if (number == kNothing) return t;
        t.data = reinterpret_cast<char *>(call.state_at(number));
        t.dtype = DType::F32;
        t.stride[0] = 0, t.stride[1] = 0, t.stride[2] = transposed ? D : 1, t.stride[3] = transposed ? 1 : D;
        return t;
    }
};

template <class C>
__global__ void __launch_bounds__(kScanThreads, 1)
    gdn_bwd_scan_kernel(const __grid_constant__ Call call, const ScanItem *items) {
    extern __shared__ __align__(1024) char smem_bytes[];
    ScanSmem<C> &smem = *reinterpret_cast<ScanSmem<C> *>(smem_bytes);
    const BwdParams &p = call.p();
    delta_bwd::after_those_before();
    const int half = blockIdx.x % C::kHalves;
    const unsigned index = blockIdx.x / C::kHalves;
    Job job;
    if (items) {
        static_cast<ScanItem &>(job) = items[index];
        if (job.n < 0) return;                           // all of the cluster
        job.reverse = __shfl_sync(~0u, job.reverse, 0);  // or ptxas takes the warps for divergent and serialises the products
        job.item = make_item(p, job.n, job.head, 64 * half);
    } else {
        // Reverse scans, which take longer, come first.
        const unsigned states = static_cast<unsigned>(p.N * p.HV), HV = static_cast<unsigned>(p.HV);
        job.item = make_item(p, index % states / HV, static_cast<int>(index % states % HV), 64 * half);
        if (job.item.length <= kFewTokens && job.item.length > 0) return;  // all of the cluster; the kernels in float do it
        job.no_v = false;
        job.begin = 0, job.chunks = (job.item.length + kC - 1) / kC, job.silent = 0;
        job.reverse = index < states;
        job.from = kGiven, job.to = job.reverse ? kGiven : kNothing, job.to_transposed = kNothing;
    }
    job.first_chunk = call.exact.w.chunk_start[job.item.n];
    const Scan<C> scan{call, smem, job};
    const bool alone = ptx::cluster_nctarank() == 1;
    if (threadIdx.x == 0) {
        scan.ring.init(1 + kConverters / 32 * kWarpArrivals, ptx::cluster_nctarank() * (Scan<C>::kEachTells ? 128 : 1));
        scan.given.init(1 + 32, 1);
    }
    if (job.no_v) {
        for (int i = threadIdx.x; i < kStages * Scan<C>::Half::kBytes / 16; i += kScanThreads) {
            constexpr int kUnits = Scan<C>::Half::kBytes / 16;
            reinterpret_cast<uint4 *>(smem.stage[i / kUnits].x)[i % kUnits] = make_uint4(0, 0, 0, 0);
        }
    }
    __syncthreads();
    if (!alone) ptx::barrier_cluster_arrive(), ptx::barrier_cluster_wait();
    if (threadIdx.x >= 192)
        scan.convert();
    else if (threadIdx.x >= 160)
        scan.store();
    else if (threadIdx.x >= 128)
        scan.load();
    else if (job.reverse)
        scan.template compute<true>();
    else
        scan.template compute<false>();
    if (!alone) ptx::barrier_cluster_arrive(), ptx::barrier_cluster_wait();  // until nobody writes here any more
}

void launch_scan(const Call &call, ScanItem *items) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        launch_config.grid.x = (items ? call.cut.room : 2 * call.exact.p.N) * call.exact.p.HV * C::kHalves;
        launch_config.block.x = kScanThreads;
        launch_config.cluster.x = C::kHalves;
        launch_config.smem_bytes = sizeof(ScanSmem<C>);
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch_config.programmatic = true;
        launch("gdn_bwd_scan_kernel", gdn_bwd_scan_kernel<C>, launch_config, call, items);
    });
}

}  // namespace linattn::cuda::gdn_bwd
