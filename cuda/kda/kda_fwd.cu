// What a kda_fwd call becomes: for each slab of chunks, the preparation and the scan, or, where sequences are cut into
// segments, the preparation, the first segments' scan beside the transitions, their join, and the other segments' scan.
#include "kda.h"

#include "common/device_guard.h"
#include "common/launch.h"
#include "common/tensor_map.h"
#include "cut.cuh"
#include "kda_join.cuh"

namespace linattn::cuda {
namespace kda {

template <class T, int D>
void launch_slab(const KernelParams &params, const TensorMaps &maps, int64_t chunks, int multiprocessors);  // kda_fwd.cuh

// The workspace stays below this; a slab has one chunk at least.
constexpr int64_t kWorkspaceBytes = int64_t{768} << 20;
static_assert(kWorkspaceBytes / sizeof(Operands<64>) <= 65535, "a slab's chunks are a grid's second axis");

static int64_t operand_bytes(const DeltaParams &p) { return p.K == 128 ? sizeof(Operands<128>) : sizeof(Operands<64>); }

// Chunks of all sequences, at most, and of a slab: slabs of about one size.
struct Slabs {
    int64_t all, length;
};

static Slabs slabs(const DeltaParams &p) {
    const int64_t all = p.cu_seqlens ? p.T / kChunk + p.N : (p.T + kChunk - 1) / kChunk * p.N;
    const int64_t fit = kWorkspaceBytes / (operand_bytes(p) * p.HV);
    if (all <= fit) return {all, all};
    const int64_t count = fit < 1 ? all : (all + fit - 1) / fit;
    return {all, (all + count - 1) / count};
}

template <int D>
void launch_join(const KernelParams &params) {
    LaunchConfig config;
    config.grid.x = params.p.N * params.p.HV * (D / kJoinColumns);
    config.block.x = 2 * D;
    config.smem_bytes = sizeof(JoinSmem<D>);
    config.stream = static_cast<cudaStream_t>(params.p.stream);
    config.programmatic = true;
    launch("kda_fwd_join_kernel", kda_fwd_join_kernel<D>, config, params);
}
template void launch_join<128>(const KernelParams &);
template void launch_join<64>(const KernelParams &);

// CTAs that segments may have for a head, 0 where sequences are not cut: asked not to, too few multiprocessors, or too short
// for it to pay. Where the lengths of several sequences are not known here, the device has the last word.
static int cut(const DeltaParams &p, const Slabs &slabs, int multiprocessors) {
    const int64_t most = multiprocessors / p.HV;
    if (p.splits == 1 || p.N > kMaxCutSequences || 4 * p.N > most) return 0;
    const int64_t pieces = p.V / 64, each = p.cu_seqlens ? most - pieces * (p.N - 1) : most / p.N;
    const int64_t segments = (each - pieces) / 2 + 2;  // two for each middle one's transition
    int64_t longest = (p.T + kChunk - 1) / kChunk;
    if (longest > slabs.length) longest = slabs.length;
    const int chunks = static_cast<int>(longest), least = least_segment_chunks(chunks);
    int length = static_cast<int>(chunks / (segments + 1));
    length = length < least ? least : length;
    while (segments_of(chunks, length) > segments) length++;
    return cut_pays(length, chunks) ? static_cast<int>(most) : 0;
}

// Of the later segments' states and transitions, V / 64 CTAs each.
static int64_t segment_bytes(const DeltaParams &p, int cut) {
    return cut / (p.V / 64) * p.HV * 4 * (p.K == 128 ? kSlotFloats<128> : kSlotFloats<64>);
}

// Of what CTAs do where sequences are cut.
static int64_t items_bytes(const DeltaParams &p, int cut) { return 2 * cut * p.HV * static_cast<int64_t>(sizeof(Item)); }
static int64_t plan_bytes(const DeltaParams &p, int cut) {
    return cut == 0 ? 0 : items_bytes(p, cut) + p.N * static_cast<int64_t>(sizeof(Joined));
}

static int64_t carry_bytes(const DeltaParams &p, const Slabs &slabs) {
    return slabs.length < slabs.all ? p.N * p.HV * (p.K + 1) * p.V * 4 : 0;
}

}  // namespace kda

bool kda_chunked_fits(const DeltaParams &p) {
    if ((p.q.dtype != DType::BF16 && p.q.dtype != DType::F16) || (p.K != 128 && p.K != 64) || p.V != p.K) return false;
    // One key for all tokens with beta 2, and keys longer than one, miss the targets in chunks of K = 64: only where both are bounded.
    if (p.K == 64 && !(p.qk_l2norm && p.beta_form == BetaForm::Logits)) return false;
    if (p.g.dtype != DType::F32 && p.g.dtype != DType::BF16 && p.g.dtype != DType::F16) return false;
    if (p.B < 1 || p.T < 1 || p.N < 1 || p.HV < 1 || p.T > INT32_MAX - 64 || p.N > INT32_MAX / (4 * p.HV)) return false;
    if (kda::slabs(p).all > INT32_MAX || kda::slabs(p).length > INT32_MAX / p.HV) return false;  // a grid's limit
    return tma_fits(p.q, p.B, p.T, p.H) && tma_fits(p.k, p.B, p.T, p.H) && tma_fits(p.v, p.B, p.T, p.HV) &&
           tma_fits(p.o, p.B, p.T, p.HV) && tma_fits(p.g, p.B, p.T, p.HV);
}

uint64_t kda_fwd_chunked_workspace(const DeltaParams &p, int multiprocessors) {
    using namespace kda;
    const Slabs slabs = kda::slabs(p);
    const int cut = kda::cut(p, slabs, multiprocessors);
    const int64_t segments = segment_bytes(p, cut) + plan_bytes(p, cut);
    const int64_t chunks = slabs.length * p.HV * (operand_bytes(p) + static_cast<int64_t>(sizeof(int)));
    return static_cast<uint64_t>(chunks + carry_bytes(p, slabs) + segments + 2048);  // of these to align it
}

void launch_kda_fwd_chunked(const DeltaParams &p, int multiprocessors) {
    using namespace kda;
    DeviceGuard guard(p.device);
    const TensorMaps maps = {make_tile_map("q", p.q, p.B, p.T, p.H, p.K, kChunk),
                             make_tile_map("k", p.k, p.B, p.T, p.H, p.K, kChunk),
                             make_tile_map("v", p.v, p.B, p.T, p.HV, p.V, kChunk),
                             make_tile_map("g", p.g, p.B, p.T, p.HV, p.K, kChunk, 128 / dtype_bytes(p.g.dtype))};
    const Slabs slabs = kda::slabs(p);
    char *workspace = p.workspace.data + (-reinterpret_cast<uintptr_t>(p.workspace.data) & 1023);
    KernelParams params = {p, static_cast<float>(p.scale), static_cast<float>(p.lower_bound),
                           static_cast<uint32_t>(p.HV / p.H)};
    params.slab_chunks = static_cast<int>(slabs.length);
    params.g_operands = workspace;
    workspace += slabs.length * p.HV * operand_bytes(p);
    params.g_carry = reinterpret_cast<float *>(workspace);
    params.cut = cut(p, slabs, multiprocessors);
    workspace += carry_bytes(p, slabs);
    params.g_segments = reinterpret_cast<float *>(workspace);
    workspace += segment_bytes(p, params.cut);
    params.g_items = workspace;
    params.g_joins = reinterpret_cast<Joined *>(workspace + items_bytes(p, params.cut));
    params.g_precise = reinterpret_cast<int *>(workspace + plan_bytes(p, params.cut));
    for (int64_t first = 0; first < slabs.all; first += slabs.length) {
        params.first_chunk = static_cast<int>(first);
        const auto launch = [&](auto type) {
            using T = decltype(type);
            p.K == 128 ? launch_slab<T, 128>(params, maps, slabs.length, multiprocessors)
                       : launch_slab<T, 64>(params, maps, slabs.length, multiprocessors);
        };
        p.q.dtype == DType::BF16 ? launch(__nv_bfloat16()) : launch(__half());
    }
}

}  // namespace linattn::cuda
