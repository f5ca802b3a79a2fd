// gdn_bwd on a GPU in chunks of 64 tokens, on tensor cores: launches and workspace. docs/backward.md has the mathematics.
//
//   plan       chunks of each sequence; flags cleared                prepare     gdn_bwd_prepare.cu, parallel over chunks
//   scan       gdn_bwd_scan.cu: S forwards and D backwards           gradients   gdn_bwd_gradients.cu, parallel over chunks
//   cut, join  gdn_bwd_cut.cu: the scan of long sequences of few heads in segments, before and behind the join
//
// Between scan and gradients run the kernels in float (delta_bwd.cu), for the sequences and heads that prepare or scan flagged, and
// otherwise return at once. What runs does not depend on the host's knowledge of any value.
#include "gdn_bwd.h"

#include "common/device_guard.h"
#include "common/tensor_map.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda {
namespace gdn_bwd {

// Cuts the workspace; returns the bytes that it takes. `base` may be null.
uint64_t cut(const BwdParams &p, int multiprocessors, char *base, Call &call) {
    uint64_t used = cut_delta_bwd_workspace(p, base, call.exact.w);
    const auto take = [&](auto *&piece, int64_t count) {
        piece = base ? reinterpret_cast<std::remove_reference_t<decltype(piece)>>(base + used) : nullptr;
        used += (static_cast<uint64_t>(count) * sizeof(*piece) + 255) / 256 * 256;
    };
    const int64_t keys = call.exact.w.chunks * p.H, values = call.exact.w.chunks * p.HV, rows = kC * p.K;
    const int64_t flags = (p.N * p.HV + 4) / 4 * 4;  // and one for whether there is any
    call.exact.cleared = flags + 4 * p.N * p.H;
    take(call.exact.w.flags, call.exact.cleared);
    call.largest = base ? reinterpret_cast<Largest *>(call.exact.w.flags + flags) : nullptr;
    take(call.q, keys * rows), take(call.k, keys * rows);
    take(call.solve, values * kC * kC), take(call.pairs, values * kC * kC);
    take(call.e, values * rows), take(call.dr, values * rows);
    take(call.factors, values);
    call.cut.streams = cut_streams(p, multiprocessors);
    if (call.cut.streams != 0) {
        call.cut.room = call.cut.streams + 2 * static_cast<int>(p.N - 1);
        take(call.cut.first, p.HV * call.cut.room), take(call.cut.later, p.HV * call.cut.room);
        take(call.cut.join, p.N * p.HV);
        take(call.cut.places, (2 * p.HV * call.cut.slots_a_head() + 1) * p.K * p.V);
    }
    return used;
}

// Rows that copies of 16 bytes can take.
bool in_units(const Tensor &t) {
    return t.stride[3] == 1 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && t.stride[2] % 8 == 0 &&
           reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

void make_maps(const BwdParams &p, Call &call) {
    call.tma = p.B > 0 && p.T > 0 && p.H > 0 && tma_fits(p.q, p.B, p.T, p.H) && tma_fits(p.k, p.B, p.T, p.H) &&
               tma_fits(p.v, p.B, p.T, p.HV) && tma_fits(p.d_o, p.B, p.T, p.HV);
    if (!call.tma) return;
    const auto map = [&](const char *name, const Tensor &t, int64_t heads) {
        return make_tile_map(name, t, p.B, p.T, heads, p.K, kC);
    };
    call.map_q = map("q", p.q, p.H), call.map_k = map("k", p.k, p.H);
    call.map_v = map("v", p.v, p.HV), call.map_do = map("d_o", p.d_o, p.HV);
}

}  // namespace gdn_bwd

bool gdn_bwd_chunked_fits(const BwdParams &p) {
    using gdn_bwd::in_units;
    return p.N * p.HV <= INT32_MAX / 8 && in_units(p.q) && in_units(p.k) && in_units(p.v) && in_units(p.d_o) &&
           in_units(p.dq) && in_units(p.dk) && in_units(p.dv);
}

uint64_t gdn_bwd_chunked_workspace(const BwdParams &p, int multiprocessors) {
    gdn_bwd::Call call = {};
    return gdn_bwd::cut(p, multiprocessors, nullptr, call) + 256;
}

void launch_gdn_bwd_chunked(const BwdParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    gdn_bwd::Call call = {};
    call.exact.p = p;
    call.multiprocessors = multiprocessors;
    gdn_bwd::make_maps(p, call);
    gdn_bwd::cut(p, multiprocessors,
                 reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(p.workspace.data) + 255) / 256 * 256), call);
    launch_delta_bwd_plan(call.exact);
    gdn_bwd::launch_prepare(call);
    if (call.cut.streams == 0) {
        gdn_bwd::launch_scan(call, nullptr);
    } else {
        gdn_bwd::launch_cut(call);
        gdn_bwd::launch_scan(call, call.cut.first);
        gdn_bwd::launch_join(call);
        gdn_bwd::launch_scan(call, call.cut.later);
    }
    launch_delta_bwd_prepare(call.exact);
    launch_delta_bwd_scans(call.exact);
    launch_delta_bwd_chunks(call.exact);
    gdn_bwd::launch_gradients(call);
    launch_delta_bwd_sums(call.exact);
}

}  // namespace linattn::cuda
