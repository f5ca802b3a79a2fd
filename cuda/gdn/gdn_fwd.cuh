// Gated delta rule over whole sequences in chunks of 64 tokens:
//
//   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q                        arXiv:2412.06464
//
// Grid: persistent CTAs over items (items.cuh): a sequence or a segment of one, a value head, 64 or 128 columns of V.
// Block: warpgroup 0: warp 0 loads, warps 1 and 3 compute the gates' factors, warp 2 stores; then the state warpgroups
// (state.cuh), 64 columns of V each; the last one or two are AUX (aux.cuh). Roles meet at mbarriers only:
//   tiles (K, Q): load -> AUX, gates where they norm q; tables: gates -> AUX; products (A^, P): AUX -> state, which may then read
//   tile and table as well; values (V): load -> state; output_ready: state -> store, which gives the values' stage back.
// Where A^, P and tables were prepared (prepare.cuh) they come with K and Q, and AUX and the gates' warps have no work.
// Registers per thread at 128 columns: 24 + 2 x 208 + 72 = 512 = 65536 / 128. Shared memory: see Smem, 224 KB at K = V = 128,
// 228 KB with 64 columns.
#pragma once
#include <cstddef>

#include "common/launch.h"
#include "gates.cuh"
#include "load.cuh"
#include "precise.cuh"
#include "prepare.cuh"
#include "state.cuh"
#include "store.cuh"

namespace linattn::cuda::gdn {

template <class C>
__device__ __forceinline__ void init_barriers(Smem<C> &smem) {
    constexpr uint32_t kWarp = kWarpArrivals, kStateWarps = 4 * C::kStateGroups * kWarp;
    constexpr uint32_t kAuxWarps = 4 * kWarp;                                      // of the group that has the chunk
    constexpr uint32_t kHelpers = (C::kPrepared ? 0 : 2) + (C::kOutputs ? 1 : 0);  // gate warps, store warp
    smem.item_ring().init(kWarp, kStateWarps + C::kAuxGroups * kAuxWarps + kHelpers * kWarp);
    smem.tiles().init(kWarp, kStateWarps + C::kAuxGroups * kAuxWarps);
    smem.values().init(kWarp, C::kOutputs ? kWarp : kStateWarps);
    if constexpr (C::kPrepared) {
        smem.seconds().init(kWarp, kStateWarps);
    } else {
        smem.tables().init(kWarp, kAuxWarps);
        smem.products().init(kAuxWarps, kStateWarps);
    }
    for (int i = 0; i < kValueStages; i++) ptx::mbarrier_init(ptx::shared_address(&smem.output_ready[i]), kStateWarps);
    for (int i = 0; i < kTileStages; i++) ptx::mbarrier_init(ptx::shared_address(&smem.query_norm_ready[i]), kWarp);
    ptx::mbarrier_init(ptx::shared_address(&smem.tail_landed), 2);
    for (int i = 0; i < C::kAuxGroups; i++) ptx::mbarrier_init(ptx::shared_address(&smem.inverse_ready[i]), kAuxWarps);
#ifdef LINATTN_EVERY_LANE_ARRIVES
    for (int i = 0; i < C::kAuxGroups; i++) ptx::mbarrier_init(ptx::shared_address(&smem.group_meets[i]), 128);
#endif
    ptx::fence_mbarrier_init();
}

// One word of another line of the parameters in each of the last warps, for all lines to be on their way at once: roles ask for
// parameters one after another, and where the constants are cold each line is a miss to DRAM. Stored so that it is loaded; to where
// plan() puts something else after its barrier.
template <class C>
__device__ __forceinline__ void touch_parameters(const KernelParams &params, Smem<C> &smem) {
    constexpr int kLineBytes = 256, kLines = static_cast<int>(sizeof(KernelParams) - 1) / kLineBytes + 1;
    static_assert(kLines <= C::kThreads / 32, "a warp for each line");
    const int line = C::kThreads / 32 - 1 - static_cast<int>(threadIdx.x / 32);
    if (line < kLines) smem.lengths[line] = reinterpret_cast<const int *>(&params)[line * (kLineBytes / 4)];
}

// How the launch's work is cut, and the order of the sequences.
template <class C>
__device__ __forceinline__ void plan(const KernelParams &params, Smem<C> &smem) {
    const DeltaParams &p = params.p;
    if (threadIdx.x / 32 == 0) {
        int segment_tokens = kUncut;
        if (C::kOutputs && params.part == Part::Later)
            segment_tokens = *params.g_segment_tokens;
        else if (!C::kOutputs || params.part == Part::First)
            segment_tokens = choose_segment_tokens(params);
        bool others = false;
        if constexpr (C::kEither) others = halves_are_faster(params) != (C::kStateGroups == 1);
        if (threadIdx.x == 0) {
            if (C::kOutputs && params.part == Part::First && blockIdx.x == 0) *params.g_segment_tokens = segment_tokens;
            smem.segment_tokens = segment_tokens;
            int segments = others ? 0 : static_cast<int>(p.N);
            if (!C::kOutputs || params.part == Part::Later)
                segments = segment_tokens == kUncut ? 0 : C::kOutputs ? slots(params) : params.middles;
            smem.items = segments * static_cast<uint32_t>(p.HV) * kPieces<C>;
        }
    }
    __syncthreads();
    if (!in_order<C>(params, smem)) return;
    const int N = static_cast<int>(p.N);
    for (int n = threadIdx.x; n < N; n += C::kThreads) {
        int bos;
        sequence_range(p, n, bos, smem.lengths[n]);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < N; n += C::kThreads) {
        int rank = 0;
        for (int m = 0; m < N; m++) rank += smem.lengths[m] > smem.lengths[n] || (smem.lengths[m] == smem.lengths[n] && m < n);
        smem.order[rank] = static_cast<uint16_t>(n);
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gdn_fwd_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ CUtensorMap map_q,
                   const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                   const __grid_constant__ CUtensorMap map_o) {
    extern __shared__ __align__(1024) char smem_bytes[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(smem_bytes);
    touch_parameters<C>(params, smem);
    // The Transition pass runs beside the first segments, whose launch waited for what came before, and ends after them, so that
    // the join, which waits for it, finds the states of both.
    if constexpr (!C::kOutputs) ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 128) init_barriers<C>(smem);
    // Or else the first copies wait for them.
    if (threadIdx.x == 32) {
        ptx::prefetch_tensormap(&map_k);
        if constexpr (C::kOutputs) ptx::prefetch_tensormap(&map_q), ptx::prefetch_tensormap(&map_o);
        ptx::prefetch_tensormap(&map_v);
    }
    // Blocks above the diagonal of A^ and P stay zero for good.
    constexpr int kProductBytes = sizeof(smem.a) + sizeof(smem.p);
    static_assert(offsetof(Smem<C>, p) == offsetof(Smem<C>, a) + sizeof(smem.a), "A^ and P are cleared as one");
    if constexpr (!C::kPrepared) {
        for (int i = threadIdx.x * 16; i < kProductBytes; i += C::kThreads * 16)
            ptx::st_shared_v4_u32(ptx::shared_address(smem.a) + i, make_uint4(0, 0, 0, 0));
    }
    ptx::fence_proxy_async_shared_cta();
    if constexpr (C::kOutputs) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
    }
    plan<C>(params, smem);
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        if constexpr (C::kShareRegisters) ptx::setmaxnreg_dec<C::kLoadRegisters>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        // Not compared with 0, 2 and others: that would become a table of jumps, in constants that are cold when the kernel starts.
        if (warp % 2 != 0) {
            if constexpr (!C::kPrepared) gates<C>(params, smem, warp / 2);
        } else if (warp == 2) {
            if constexpr (C::kOutputs)
                store_outputs<C>(params, &map_o, smem);
            else
                ptx::griddepcontrol_wait();
        } else if constexpr (C::kPrepared) {
            load_prepared<C>(params, &map_q, &map_k, &map_v, smem);
        } else {
            load<C>(params, &map_q, &map_k, &map_v, smem);
        }
    } else if (group <= C::kStateGroups) {
        if constexpr (C::kShareRegisters) ptx::setmaxnreg_inc<C::kStateRegisters>();
        state<C>(params, smem);
    } else if constexpr (!C::kPrepared) {
        if constexpr (C::kAuxRegisters > C::kLaunchRegisters)
            ptx::setmaxnreg_inc<C::kAuxRegisters>();
        else
            ptx::setmaxnreg_dec<C::kAuxRegisters>();
        auxiliary<C>(params, smem, group - 1 - C::kStateGroups);
    }
}

template <class C>
void launch_fwd(const KernelParams &params, const TensorMaps &maps, int multiprocessors) {
    int64_t segments = params.p.N;
    if (!C::kOutputs || params.part == Part::Later) segments = C::kOutputs ? slots(params) : params.middles;
    const int64_t items = segments * params.p.HV * kPieces<C>;
    LaunchConfig config;
    config.grid.x = items < multiprocessors ? items : multiprocessors;
    config.block.x = C::kThreads;
    // The two SMs of a TPC get CTAs of the same kernel: where First and Transition run side by side on every TPC, each took
    // more than twice its time.
    if (params.part != Part::Whole && config.grid.x % 2 == 0) config.cluster.x = 2;
    static_assert(sizeof(Smem<C>) <= 232448, "shared memory of a CTA");
    config.smem_bytes = sizeof(Smem<C>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    config.programmatic = !C::kOutputs || params.part == Part::Later || (C::kEither && C::kStateGroups == 1) || C::kPrepared;
    launch("gdn_fwd_kernel", gdn_fwd_kernel<C>, config, params, maps.q, maps.k, maps.v, maps.o);
}

}  // namespace linattn::cuda::gdn
