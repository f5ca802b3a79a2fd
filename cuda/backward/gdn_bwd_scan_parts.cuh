// What the scans of the chunked GDN backward (gdn_bwd_scan.cuh) are made of, but for their arithmetic: shared memory, the warps that load,
// convert and store, and how the computing warps meet them.
#pragma once
#include <cstddef>

#include "common/launch.h"
#include "common/states.cuh"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kScanThreads = 192 + kConverters, kStages = 3;

template <class C>
struct alignas(1024) ScanStage {
    char k[C::Rows::kBytes], q[C::Rows::kBytes];              // q: reverse and outputs only
    char solve[C::Square::kBytes], pairs[C::Square::kBytes];  // pairs: the same
    char x[C::Half::kBytes];                                  // v, then o; do
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

// d (+)= a B as issue() does it, f(step) behind each step: while products queue up, the warp has nothing else to do.
template <ptx::Major kMajor, class Tile, int kCount, int kOf, class F>
__device__ __forceinline__ void issue_with(float (&d)[kCount], const uint32_t (&a)[kOf][4], uint32_t low, bool accumulate,
                                           F f) {
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

template <class C, bool kOutputs>
struct ScanParts {
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
                const bool all = kOutputs || job.reverse;
                const int tiles = all ? 2 : 1;
                const uint32_t from = job.reverse ? offsetof(ScanFactors, beta) : 0;
                const uint32_t factors = (all ? sizeof(ScanFactors) : offsetof(ScanFactors, left)) - from;
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
                if (all) {
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
    // A stage has been read by the computing warps, and with outputs by the one that stores.
    static constexpr uint32_t kReaders = 128 + (kOutputs ? 32 : 0), kWithLoader = kReaders + 32;
    // What a chunk gave out, when all have staged theirs. By one warp.
    __device__ __forceinline__ void store() const {
        const int half = job.item.v_cta / 64;
        RingState<kStages> at;
        for (int place = 0; place < 2 && place < job.chunks; place++) ptx::bar_arrive(kFree + place, kWithStorer);
        for (int step = 0; step < job.chunks; step++, at.advance()) {
            const int place = step % 2;
            const int64_t own = value(step);
            char *const states = job.reverse ? call.grad<C>(own) : call.state(own);
            ptx::bar_sync(kFull + place, kWithStorer);
            if constexpr (kOutputs) store_outputs(step, ptx::shared_address(smem.stage[at.stage].x));
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
            if constexpr (kOutputs)
                if (step + kStages < job.chunks) give_back(at.stage);
        }
        if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }
    // The chunk's outputs, in the caller's type, from where v was; of a full chunk they go with what is stored next.
    __device__ __forceinline__ void store_outputs(int step, uint32_t tile) const {
        if (step < job.silent) return;
        const Tensor &o = call.p().o;
        const int lane = threadIdx.x % 32, token = chunk_at(step) * kC, length = min(kC, job.item.length - token);
        const int64_t first = job.item.bos + token;
        if (call.tma && length == kC) {
            if (lane == 0)
                ptx::cp_async_bulk_tensor_4d_store(&call.map_o, tile, job.item.v_cta, job.item.head,
                                                   static_cast<int32_t>(first), static_cast<int32_t>(job.item.batch));
            return;
        }
        uint16_t *const to =
            reinterpret_cast<uint16_t *>(o.data) + delta_bwd::element(o, job.item.batch, first, job.item.head, job.item.v_cta);
        for (int i = lane; i < length * 8; i += 32)
            *reinterpret_cast<uint4 *>(to + i / 8 * o.stride[1] + i % 8 * 8) =
                ptx::ld_shared_v4_u32(tile + Half::offset(i / 8, i % 8 * 8));
    }
    static __device__ __forceinline__ void when_free(int place) { ptx::bar_sync(kFree + place, kWithStorer); }
    // By the computing warps: their share is staged.
    static __device__ __forceinline__ void staged(int place) {
        ptx::fence_proxy_async_shared_cta();
        ptx::bar_arrive(kFull + place, kWithStorer);
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
            ptx::bar_arrive(kRead + stage, kWithLoader);
    }
    __device__ __forceinline__ void pass_back(int stage, int lane) const {
        if constexpr (kEachTells) return;
        ptx::bar_sync(kRead + stage, kWithLoader);
        if (lane == 0) tell(stage);
    }
};

}  // namespace linattn::cuda::gdn_bwd
