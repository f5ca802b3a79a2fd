// Which kernels a gdn_fwd call becomes: whole sequences per CTA, V cut in two, or segments of sequences joined by their
// transitions: the first segments' outputs and, at the same time, the middle ones' transitions; the join; the other outputs.
#include "gdn.h"

#include "common/device_guard.h"
#include "common/launch.h"
#include "common/tensor_map.h"
#include "gdn_join.cuh"
#include "prepared.cuh"

namespace linattn::cuda {
namespace gdn {

template <class T, int D, Pass kPass>
static void launch_columns(const KernelParams &params, const TensorMaps &maps, int multiprocessors, bool narrow_columns) {
    const bool norm = params.p.qk_l2norm;
    if constexpr (D == 128) {
        if (!narrow_columns || kPass == Pass::Transition) {
            norm ? launch_fwd<Config<T, D, 128, true, kPass>>(params, maps, multiprocessors)
                 : launch_fwd<Config<T, D, 128, false, kPass>>(params, maps, multiprocessors);
            return;
        }
    }
    if constexpr (D == 64 || kPass != Pass::Transition)
        norm ? launch_fwd<Config<T, D, 64, true, kPass>>(params, maps, multiprocessors)
             : launch_fwd<Config<T, D, 64, false, kPass>>(params, maps, multiprocessors);
}

template <Pass kPass>
static void launch_pass(const KernelParams &params, const TensorMaps &maps, int multiprocessors, bool narrow_columns) {
    const bool bf16 = params.p.q.dtype == DType::BF16;
    if constexpr (kPass != Pass::Either) {
        if (params.g_prepared) {
            constexpr int kColumns = kPass == Pass::Outputs ? 64 : 128;
            bf16 ? launch_fwd<Config<__nv_bfloat16, 128, kColumns, false, kPass, true>>(params, maps, multiprocessors)
                 : launch_fwd<Config<__half, 128, kColumns, false, kPass, true>>(params, maps, multiprocessors);
            return;
        }
    }
    if (params.p.K == 128)
        bf16 ? launch_columns<__nv_bfloat16, 128, kPass>(params, maps, multiprocessors, narrow_columns)
             : launch_columns<__half, 128, kPass>(params, maps, multiprocessors, narrow_columns);
    else if constexpr (kPass != Pass::Either)
        bf16 ? launch_columns<__nv_bfloat16, 64, kPass>(params, maps, multiprocessors, narrow_columns)
             : launch_columns<__half, 64, kPass>(params, maps, multiprocessors, narrow_columns);
}

template <class T>
static void prepare(const KernelParams &params, const TensorMaps &maps, int64_t chunks) {
    params.p.qk_l2norm ? launch_prepare<Config<T, 128, 64, true, Pass::Outputs>>(params, maps, chunks)
                       : launch_prepare<Config<T, 128, 64, false, Pass::Outputs>>(params, maps, chunks);
}

template <int D>
static void launch_join(const KernelParams &params) {
    LaunchConfig config;
    config.grid.x = params.p.N * params.p.HV * (D / kJoinColumns);
    config.block.x = 2 * D;
    config.smem_bytes = sizeof(JoinSmem<D>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    config.programmatic = true;
    launch("gdn_join_kernel", gdn_join_kernel<D>, config, params);
}

// Few pairs of sequence and head: 64 columns of V for a CTA, so that each pair runs on two.
static bool narrow(const DeltaParams &p, int multiprocessors) { return p.N * p.HV * 2 <= multiprocessors; }

// How many middle segments run beside the first ones, or 0 where sequences are not cut: asked not to, too few free
// multiprocessors, or one sequence (whose length is known here) that is too short. Lengths are on the device, which has the last
// word (choose_segment_tokens).
static int middle_segments(const DeltaParams &p, int multiprocessors) {
    if (p.splits == 1 || p.N > kMaxCutSequences) return 0;
    const int64_t middles = (multiprocessors / p.HV - p.N * (p.V / 64)) / 2;  // N and M of each
    if (middles < 1) return 0;
    const int chunks = static_cast<int>((p.T + kChunk - 1) / kChunk);
    const int per_sequence = static_cast<int>(p.cu_seqlens ? middles : middles / p.N) + 2;
    const int segment = (chunks + per_sequence - 1) / per_sequence, least = least_segment_chunks(chunks);
    return cut_pays(segment < least ? least : segment, chunks) ? static_cast<int>(middles) : 0;
}

// Packed sequences of lengths that the host does not know, long enough on average for a launch more not to matter.
static bool lengths_decide(const DeltaParams &p) {
    return p.K == 128 && p.cu_seqlens && p.N > 1 && p.N <= kMaxSorted && p.T >= 2048 * p.N;
}

// Workspace: states and transitions of the segments, then the length of a segment.
static uint64_t segment_bytes(const DeltaParams &p, int middles) {
    return static_cast<uint64_t>((middles + p.N) * p.HV * 4 * (p.K == 128 ? kSlotFloats<128> : kSlotFloats<64>));
}

// Chunks of all sequences, at most, if their A^ and P are prepared: where sequences are cut, while the workspace stays below this.
constexpr int64_t kMostPreparedBytes = int64_t{768} << 20;

static int64_t prepared_chunks(const DeltaParams &p, int middles) {
    if (p.K != 128 || middles == 0) return 0;
    const int64_t chunks = p.cu_seqlens ? p.T / kChunk + p.N : (p.T + kChunk - 1) / kChunk * p.N;
    return chunks * p.HV * static_cast<int64_t>(sizeof(Prepared)) <= kMostPreparedBytes ? chunks : 0;
}

// Value heads of a key head share its K and Q in a CTA; but where they would be too few CTAs, each head has one.
static int prepare_heads(const DeltaParams &p, int64_t chunks, int multiprocessors) {
    return chunks * p.H >= 6 * multiprocessors ? static_cast<int>(p.HV / p.H) : 1;
}

static uint64_t prepared_bytes(const DeltaParams &p, int64_t chunks) {
    return static_cast<uint64_t>(chunks * p.HV) * (sizeof(Prepared) + sizeof(int));
}

}  // namespace gdn

bool gdn_chunked_fits(const DeltaParams &p) {
    if (p.q.dtype != DType::BF16 && p.q.dtype != DType::F16) return false;
    if (p.B < 1 || p.T < 1 || p.N < 1 || p.HV < 1 || p.T > INT32_MAX - 64 || p.N > INT32_MAX / (4 * p.HV)) return false;
    return tma_fits(p.q, p.B, p.T, p.H) && tma_fits(p.k, p.B, p.T, p.H) && tma_fits(p.v, p.B, p.T, p.HV) &&
           tma_fits(p.o, p.B, p.T, p.HV);
}

uint64_t gdn_fwd_chunked_workspace(const DeltaParams &p, int multiprocessors) {
    const int middles = gdn::middle_segments(p, multiprocessors);
    if (middles == 0) return 0;
    return gdn::prepared_bytes(p, gdn::prepared_chunks(p, middles)) + gdn::segment_bytes(p, middles) +
           160;  // of these to align it
}

void launch_gdn_fwd_chunked(const DeltaParams &p, int multiprocessors) {
    using namespace gdn;
    DeviceGuard guard(p.device);
    const TensorMaps maps = {
        make_tile_map("q", p.q, p.B, p.T, p.H, p.K, kChunk), make_tile_map("k", p.k, p.B, p.T, p.H, p.K, kChunk),
        make_tile_map("v", p.v, p.B, p.T, p.HV, p.V, kChunk), make_tile_map("o", p.o, p.B, p.T, p.HV, p.V, kChunk)};
    KernelParams params = {p,
                           middle_segments(p, multiprocessors),
                           Part::Whole,
                           nullptr,
                           nullptr,
                           static_cast<float>(p.scale),
                           static_cast<float>(p.lower_bound),
                           multiprocessors};
    char *workspace = p.workspace.data + (-reinterpret_cast<uintptr_t>(p.workspace.data) & 127);
    if (const int64_t chunks = prepared_chunks(p, params.middles)) {
        params.g_prepared = reinterpret_cast<Prepared *>(workspace);
        workspace += sizeof(Prepared) * static_cast<uint64_t>(chunks * p.HV);
        params.g_precise = reinterpret_cast<int *>(workspace + segment_bytes(p, params.middles) + 16);
        params.prepare_heads = prepare_heads(p, chunks, multiprocessors);
        p.q.dtype == DType::BF16 ? prepare<__nv_bfloat16>(params, maps, chunks) : prepare<__half>(params, maps, chunks);
    }
    if (params.middles != 0) {
        params.g_segments = reinterpret_cast<float *>(workspace);
        params.g_segment_tokens = reinterpret_cast<int *>(workspace + segment_bytes(p, params.middles));
        params.part = Part::First;
        launch_pass<Pass::Outputs>(params, maps, multiprocessors, true);
        launch_pass<Pass::Transition>(params, maps, multiprocessors, false);
        p.K == 128 ? launch_join<128>(params) : launch_join<64>(params);
        params.part = Part::Later;
    }
    const bool halves = narrow(p, multiprocessors);
    if (!halves && params.middles == 0 && lengths_decide(p)) {
        launch_pass<Pass::Either>(params, maps, multiprocessors, false);
        launch_pass<Pass::Either>(params, maps, multiprocessors, true);
    } else {
        launch_pass<Pass::Outputs>(params, maps, multiprocessors, halves);
    }
}

}  // namespace linattn::cuda
