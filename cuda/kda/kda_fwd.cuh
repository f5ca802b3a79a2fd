// Kimi delta attention over whole sequences in chunks of 32 tokens:
//
//   S = diag(exp(g)) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q                          arXiv:2510.26692
//
// Two kernels: kda_fwd_prepare_kernel (prepare.cuh) makes the operands of every chunk, kda_fwd_scan_kernel carries the state
// through them. The scan's grid: persistent CTAs over items (items.cuh), a sequence, a value head and 64 or 128 columns of V
// each. Block: the state warpgroups (state.cuh), 64 columns each, and one of which a warp loads; they meet at one ring of
// mbarriers. Shared memory: 4 stages of 50 KB. Where 64 columns and 128 are chosen by the lengths it is kda_fwd_wide_kernel; of
// cut sequences the first segments and the transitions are kda_fwd_first_kernel.
#pragma once
#include <cstddef>

#include "common/launch.h"
#include "prepare.cuh"
#include "state.cuh"

namespace linattn::cuda::kda {

// With two state warpgroups the launch gives every thread 168 registers, shared out anew.
constexpr int kLoadRegisters = 24, kStateRegisters = 240;
static_assert(kLoadRegisters + 2 * kStateRegisters <= 3 * 168);

// One warp loads. Registers are shared out anew by warpgroups: where that is done there is a whole one.
template <int kGroups>
constexpr int kScanThreads = kGroups == 1 ? 160 : 384;

// CTAs of the scan on an SM.
template <int D>
constexpr int kScanCtas = D == 128 ? 1 : 2;

// The operands of a chunk, without what only outputs need, and V. low: second terms too.
template <int D, int kGroups, bool kOutputs>
__device__ __forceinline__ void load_chunk(const TensorMaps &maps, ScanSmem<D, kGroups> &smem, const Item &item, int token,
                                           const Operands<D> &g_from, bool low, int stage) {
    const uint32_t full = smem.ring().full(stage), v = ptx::shared_address(smem.v[stage]);
    const uint32_t to = ptx::shared_address(&smem.operands[stage]);
    const char *g_bytes = reinterpret_cast<const char *>(&g_from);
    constexpr uint32_t kKEnd = offsetof(Operands<D>, k_end), kA = offsetof(Operands<D>, a),
                       kFactors = offsetof(Operands<D>, factors);
    constexpr uint32_t kPanel = Pair<D>::kPanelStrideBytes, kPlain = offsetof(Operands<D>, k_end_low);
    const uint32_t end = low ? sizeof(Operands<D>) : kPlain;
    const auto copy = [&](uint32_t first, uint32_t bytes) {
        if (64 * kGroups == D && kOutputs)  // nobody reads it again
            ptx::cp_async_bulk_load_hint(to + first, g_bytes + first, bytes, full, ptx::createpolicy_evict_first());
        else
            ptx::cp_async_bulk_load(to + first, g_bytes + first, bytes, full);
    };
    if (kOutputs) {
        ptx::mbarrier_arrive_expect_tx(full, end + sizeof(smem.v[0]));
        copy(0, end);
    } else {
        const uint32_t values = item.from_identity ? 0 : sizeof(smem.v[0]);
        ptx::mbarrier_arrive_expect_tx(full, end - (kFactors - kA) - Pair<D>::kBytes / 2 + values);
#pragma unroll
        for (int panel = 0; panel < Pair<D>::kPanels; panel++) copy(panel * kPanel, kPanel / 2);  // K~
        copy(kKEnd, kA - kKEnd);
        copy(kFactors, end - kFactors);
        if (item.from_identity) return;
    }
#pragma unroll
    for (int panel = 0; panel < kGroups; panel++)
        ptx::cp_async_bulk_tensor_4d_load(v + panel * Tile<D>::kPanelStrideBytes, &maps.v, full,
                                          64 * (kGroups * item.piece + panel), item.head, token, item.batch);
}

// The state that an item begins with, where it is one piece of memory, to L2, while the item before is being worked on.
template <int D>
__device__ __forceinline__ void prefetch_state(const DeltaParams &p, const Item &item) {
    const Tensor &t = p.state_in;
    if (!t || threadIdx.x % 32 != 0 || t.stride[2] * t.stride[3] != D || (t.stride[2] != 1 && t.stride[3] != 1)) return;
    const int bytes = t.dtype == DType::F32 ? 4 : 2;
    const char *g_state = t.data + (item.read_row * t.stride[0] + item.head * t.stride[1]) * bytes;
    if (reinterpret_cast<uintptr_t>(g_state) % 16 == 0)
        ptx::cp_async_bulk_prefetch(g_state, static_cast<uint32_t>(D * D * bytes));
}

template <int D, int kGroups, bool kOutputs>
__device__ __forceinline__ void load(const KernelParams &params, const TensorMaps &maps, ScanSmem<D, kGroups> &smem,
                                     Pass pass) {
    RingState<kStages<D>> stage;
    for (uint32_t round = 0;; round++) {
        Item &item = smem.item[4 * kGroups];  // its numbers are not kept in registers
        if (!smem.next(item, params, pass, round)) break;
        if (item.read_row < 0) continue;
        const ItemRange range(params, item);
        if (item.segment == 0 && item.piece == 0 && !range.continues) prefetch_state<D>(params.p, item);
        if (pass != Pass::Later) ptx::griddepcontrol_wait();  // the operands, for which the join has waited
        int precise = kChunk;                                 // of the lane's chunk among 32
        for (int c = range.first; c < range.end; c++, stage.advance()) {
            const int number = (c - range.first) % 32, lane = threadIdx.x % 32;
            if (number == 0 && c + lane < range.end)
                precise = params.g_precise[int64_t{range.slot + c - range.first + lane} * params.p.HV + item.head];
            const bool low = __shfl_sync(~0u, precise, number) < kChunk;
            smem.ring().wait_empty(stage);
            if (lane == 0)
                load_chunk<D, kGroups, kOutputs>(maps, smem, item, item.bos + c * kChunk,
                                                 *operands_of<D>(params, range.slot + c - range.first, item.head), low,
                                                 stage.stage);
            __syncwarp();
        }
    }
    ptx::griddepcontrol_wait();  // a launch without work ends after what it waits for, too
}

// A CTA of kThreads, whose plan is made where it goes over whole sequences. kOutputs: false makes the transitions of segments.
template <class T, int D, int kGroups, bool kOutputs, int kThreads>
__device__ __forceinline__ void scan(const KernelParams &params, const TensorMaps &maps, ScanSmem<D, kGroups> &smem,
                                     Pass pass) {
    if (threadIdx.x == 0) smem.ring().init(1, 4 * kGroups * kWarpArrivals);
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < kGroups) {
        if constexpr (kThreads == kScanThreads<2>) ptx::setmaxnreg_inc<kStateRegisters>();
        state<T, D, kGroups, kOutputs>(params, smem, pass, group);
    } else {
        if constexpr (kThreads == kScanThreads<2>) ptx::setmaxnreg_dec<kLoadRegisters>();
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == (kThreads - 1) / 128 * 4)
            load<D, kGroups, kOutputs>(params, maps, smem, pass);
    }
}

// Of whole sequences, or of the segments after the first, 64 columns of V a CTA.
template <class T, int D>
__global__ void __launch_bounds__(kScanThreads<1>, kScanCtas<D>)
    kda_fwd_scan_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    ScanSmem<D, 1> &smem = *reinterpret_cast<ScanSmem<D, 1> *>(smem_bytes);
    const Pass pass = params.cut != 0 ? Pass::Later : Pass::Whole;
    if (pass == Pass::Whole) smem.plan.make(params, D / 64, kScanThreads<1>);
    scan<T, D, 1, true, kScanThreads<1>>(params, maps, smem, pass);
}

// Of whole sequences, 64 columns of V a CTA or all 128, whichever ends first.
template <class T, int D>
__global__ void __launch_bounds__(kScanThreads<2>, 1)
    kda_fwd_wide_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    ScanSmem<D, 2> &smem = *reinterpret_cast<ScanSmem<D, 2> *>(smem_bytes);
    smem.plan.make_whole(params, kScanThreads<2>);
    if (smem.plan.halves)
        scan<T, D, 1, true, kScanThreads<2>>(params, maps, *reinterpret_cast<ScanSmem<D, 1> *>(smem_bytes), Pass::Whole);
    else
        scan<T, D, 2, true, kScanThreads<2>>(params, maps, smem, Pass::Whole);
}

// First segments, 64 columns of V a CTA, and transitions, all columns: as many SMs take the whole time.
template <class T, int D>
__global__ void __launch_bounds__(kScanThreads<D / 64>, 1)
    kda_fwd_first_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char smem_bytes[];
    ptx::griddepcontrol_wait();  // the plan; before what follows, for which it is enough that the join has begun
    ptx::griddepcontrol_launch_dependents();
    if (is_transition(params))
        scan<T, D, D / 64, false, kScanThreads<D / 64>>(params, maps, *reinterpret_cast<ScanSmem<D, D / 64> *>(smem_bytes),
                                                        Pass::First);
    else
        scan<T, D, 1, true, kScanThreads<D / 64>>(params, maps, *reinterpret_cast<ScanSmem<D, 1> *>(smem_bytes), Pass::First);
}

template <int D>
void launch_join(const KernelParams &params);  // kda_fwd.cu

template <int D>
LaunchConfig scan_config(const KernelParams &params, int64_t items, int multiprocessors) {
    const int64_t most = int64_t{kScanCtas<D>} * multiprocessors;
    LaunchConfig config;
    config.grid.x = items < most ? items : most;
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    config.programmatic = true;  // starts while the last operands are being made
    return config;
}

template <class T, int D>
void launch_scan(const KernelParams &params, const TensorMaps &maps, int multiprocessors) {
    const int64_t items = (params.cut != 0 ? params.cut : params.p.N * (D / 64)) * params.p.HV;
    LaunchConfig config = scan_config<D>(params, items, multiprocessors);
    config.block.x = kScanThreads<1>;
    config.smem_bytes = sizeof(ScanSmem<D, 1>);
    launch("kda_fwd_scan_kernel", kda_fwd_scan_kernel<T, D>, config, params, maps);
}

template <class T, int D>
void launch_wide(const KernelParams &params, const TensorMaps &maps, int multiprocessors) {
    LaunchConfig config = scan_config<D>(params, 2 * params.p.N * params.p.HV, multiprocessors);
    config.block.x = kScanThreads<2>;
    config.smem_bytes = sizeof(ScanSmem<D, 2>);
    launch("kda_fwd_wide_kernel", kda_fwd_wide_kernel<T, D>, config, params, maps);
}

template <class T, int D>
void launch_first(const KernelParams &params, const TensorMaps &maps, int multiprocessors) {
    LaunchConfig config = scan_config<D>(params, params.cut * params.p.HV, multiprocessors);
    config.block.x = kScanThreads<D / 64>;
    config.smem_bytes = sizeof(ScanSmem<D, D / 64>);
    launch("kda_fwd_first_kernel", kda_fwd_first_kernel<T, D>, config, params, maps);
}

template <class T, int D>
void launch_slab(const KernelParams &params, const TensorMaps &maps, int64_t chunks, int multiprocessors) {
    launch_prepare<T, D>(params, maps, chunks);
    if (params.cut != 0) {
        launch_first<T, D>(params, maps, multiprocessors);
        launch_join<D>(params);
    }
    if constexpr (D == 128) {
        if (params.cut == 0 && 2 * params.p.N * params.p.HV > multiprocessors) {
            launch_wide<T, D>(params, maps, multiprocessors);
            return;
        }
    }
    launch_scan<T, D>(params, maps, multiprocessors);
}

}  // namespace linattn::cuda::kda
