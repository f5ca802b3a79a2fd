// gdn_bwd on a GPU in chunks of 64 tokens, on tensor cores: launches and workspace. docs/backward.md has the mathematics.
//
//   plan       chunks of each sequence; flags cleared                prepare     gdn_bwd_prepare.cu, parallel over chunks
//   scan       gdn_bwd_scan.cu: S forwards and D backwards           gradients   gdn_bwd_gradients.cu, parallel over chunks
//   cut, join  gdn_bwd_cut.cu: the scan of long sequences of few heads in segments, before and behind the join
//
// Between scan and gradients run the kernels in float (delta_bwd.cu), for the sequences and heads that prepare or scan flagged, and
// otherwise return at once. What runs does not depend on the host's knowledge of any value.
//
// save = "states": the forward is plan, prepare and the scan forwards, which then gives the outputs too (gdn_bwd_outputs.cu), and the
// token loop for what they flagged. The backward begins with the units of what comes in reverse (gdn_bwd_units.cu) in place of prepare,
// and scans in reverse alone. What the forward saves is a part of the workspace otherwise, and the same bits but where cuts differ.
#include "gdn_bwd.h"

#include "common/device_guard.h"
#include "common/tensor_map.h"
#include "gdn_bwd.cuh"
#include "recurrent/recurrent.h"

namespace linattn::cuda {
namespace gdn_bwd {

// Cuts what lies behind `base`, which may be null.
struct Cutter {
    char *base;
    uint64_t used = 0;
    template <class T>
    void take(T *&piece, int64_t count) {
        piece = base ? reinterpret_cast<T *>(base + used) : nullptr;
        used += (static_cast<uint64_t>(count) * sizeof(T) + 255) / 256 * 256;
    }
};

// Flags, and behind them what units follow from.
static void take_flags(const BwdParams &p, Cutter &cut, Call &call) {
    const int64_t flags = (p.N * p.HV + 4) / 4 * 4;  // and one for whether there is any
    call.exact.cleared = flags + 4 * p.N * p.H;
    cut.take(call.exact.w.flags, call.exact.cleared);
    call.largest = cut.base ? reinterpret_cast<Largest *>(call.exact.w.flags + flags) : nullptr;
}

// What prepare and the scan forwards leave, but S.
static void take_forward(const BwdParams &p, Cutter &cut, Call &call) {
    const int64_t chunks = most_bwd_chunks(p), keys = chunks * p.H, values = chunks * p.HV, rows = kC * p.K;
    cut.take(call.q, keys * rows), cut.take(call.k, keys * rows);
    cut.take(call.solve, values * kC * kC), cut.take(call.pairs, values * kC * kC);
    cut.take(call.e, values * rows);
    cut.take(call.factors, values);
}

static void take_cut(const BwdParams &p, Cutter &cut, Call &call) {
    call.cut.directions = call.part == Part::Whole ? 2 : 1;
    call.cut.streams = cut_streams(p, call.cut.directions, call.multiprocessors);
    if (call.cut.streams == 0) return;
    call.cut.room = call.cut.streams + call.cut.directions * static_cast<int>(p.N - 1);
    cut.take(call.cut.first, p.HV * call.cut.room), cut.take(call.cut.later, p.HV * call.cut.room);
    cut.take(call.cut.join, p.N * p.HV);
    cut.take(call.cut.places, (2 * p.HV * call.cut.slots_a_head() + 1) * p.K * p.V);
}

// What the forward saves; returns its bytes. `base` may be null. The backward has flags of its own, which begin as those.
uint64_t cut_saved(const BwdParams &p, char *base, Call &call) {
    Cutter cut{base};
    take_flags(p, cut, call);
    take_forward(p, cut, call);
    const int64_t state = 2 * p.K * p.V;
    cut.take(call.states, most_bwd_chunks(p) * p.HV * state);
    call.state_bytes = state;
    return cut.used;
}

// Cuts the workspace of the backward; returns the bytes that it takes. `base` may be null. With call.part that of Reverse, what the
// forward saved has been cut before.
uint64_t cut(const BwdParams &p, char *base, Call &call) {
    Cutter cut{base, cut_delta_bwd_workspace(p, base, call.exact.w)};
    take_flags(p, cut, call);
    if (call.part == Part::Whole) {
        take_forward(p, cut, call);
        call.states = reinterpret_cast<char *>(call.exact.w.states), call.state_bytes = 4 * p.K * p.V;
    }
    cut.take(call.dr, call.exact.w.chunks * p.HV * kC * p.V);
    take_cut(p, cut, call);
    return cut.used;
}

// That of the forward that saves.
uint64_t cut_forward(const BwdParams &p, char *base, Call &call) {
    Cutter cut{base};
    call.exact.w.chunks = most_bwd_chunks(p);
    cut.take(call.exact.w.chunk_start, p.N + 1);
    take_cut(p, cut, call);
    return cut.used;
}

// Rows that copies of 16 bytes can take.
static bool in_units(const BwdParams &p, const Tensor &t, int64_t heads) {
    return t.stride[3] == 1 && (p.B == 1 || t.stride[0] % 8 == 0) && (p.T == 1 || t.stride[1] % 8 == 0) &&
           (heads == 1 || t.stride[2] % 8 == 0) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}
// Of a call, and of it the inputs.
static bool fits(const BwdParams &p) {
    return p.N * p.HV <= INT32_MAX / 8 && in_units(p, p.q, p.H) && in_units(p, p.k, p.H) && in_units(p, p.v, p.HV);
}

static void make_maps(const BwdParams &p, Call &call) {
    const bool forward = call.part == Part::Forward;
    const Tensor &outputs = forward ? p.o : p.d_o;
    call.tma = p.B > 0 && p.T > 0 && p.H > 0 && tma_fits(p.q, p.B, p.T, p.H) && tma_fits(p.k, p.B, p.T, p.H) &&
               tma_fits(p.v, p.B, p.T, p.HV) && tma_fits(outputs, p.B, p.T, p.HV);
    if (!call.tma) return;
    const auto map = [&](const char *name, const Tensor &t, int64_t heads) {
        return make_tile_map(name, t, p.B, p.T, heads, p.K, kC);
    };
    call.map_q = map("q", p.q, p.H), call.map_k = map("k", p.k, p.H), call.map_v = map("v", p.v, p.HV);
    if (forward)
        call.map_o = map("o", p.o, p.HV);
    else
        call.map_do = map("d_o", p.d_o, p.HV);
}

static char *aligned(const Tensor &workspace) {
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(workspace.data) + 255) / 256 * 256);
}

// The scan, of sequences that are cut or not.
static void launch_scans(const Call &call) {
    const auto scan = call.part == Part::Forward ? launch_outputs : launch_scan;
    if (call.cut.streams == 0) return scan(call, nullptr);
    launch_cut(call);
    scan(call, call.cut.first);
    launch_join(call);
    scan(call, call.cut.later);
}

}  // namespace gdn_bwd

bool gdn_bwd_chunked_fits(const BwdParams &p) {
    using gdn_bwd::in_units;
    return gdn_bwd::fits(p) && in_units(p, p.d_o, p.HV) && in_units(p, p.dq, p.H) && in_units(p, p.dk, p.H) &&
           in_units(p, p.dv, p.HV);
}

static gdn_bwd::Call backward_call(const BwdParams &p, int multiprocessors) {
    gdn_bwd::Call call = {};
    call.exact.p = p;
    call.multiprocessors = multiprocessors;
    call.part = p.saved ? gdn_bwd::Part::Reverse : gdn_bwd::Part::Whole;
    return call;
}

uint64_t gdn_bwd_chunked_workspace(const BwdParams &p, int multiprocessors) {
    gdn_bwd::Call call = backward_call(p, multiprocessors);
    return gdn_bwd::cut(p, nullptr, call) + 256;
}

void launch_gdn_bwd_chunked(const BwdParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    gdn_bwd::Call call = backward_call(p, multiprocessors);
    gdn_bwd::make_maps(p, call);
    if (p.saved) {
        gdn_bwd::cut_saved(p, p.saved.data, call);
        call.exact.kept = call.exact.w.flags;
    }
    gdn_bwd::cut(p, gdn_bwd::aligned(p.workspace), call);
    launch_delta_bwd_plan(call.exact);
    p.saved ? gdn_bwd::launch_units(call) : gdn_bwd::launch_prepare(call);
    gdn_bwd::launch_scans(call);
    launch_delta_bwd_prepare(call.exact);
    launch_delta_bwd_scans(call.exact);
    launch_delta_bwd_chunks(call.exact);
    gdn_bwd::launch_gradients(call);
    launch_delta_bwd_sums(call.exact);
}

// ---- save = "states"

static BwdParams inputs_of(const DeltaParams &forward) {
    BwdParams p;
    static_cast<DeltaParams &>(p) = forward;
    return p;
}

uint64_t gdn_saved_bytes(const DeltaParams &p) {
    gdn_bwd::Call call = {};
    return gdn_bwd::cut_saved(inputs_of(p), nullptr, call);
}

bool gdn_fwd_saving_fits(const DeltaParams &p) {
    const BwdParams inputs = inputs_of(p);
    return gdn_bwd::fits(inputs) && gdn_bwd::in_units(inputs, p.o, p.HV);
}

uint64_t gdn_fwd_saving_workspace(const DeltaParams &p, int multiprocessors) {
    gdn_bwd::Call call = {};
    call.multiprocessors = multiprocessors, call.part = gdn_bwd::Part::Forward;
    return gdn_bwd::cut_forward(inputs_of(p), nullptr, call) + 256;
}

void launch_gdn_fwd_saving(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    gdn_bwd::Call call = {};
    call.exact.p = inputs_of(p);
    call.multiprocessors = multiprocessors, call.part = gdn_bwd::Part::Forward;
    gdn_bwd::make_maps(call.exact.p, call);
    gdn_bwd::cut_saved(call.exact.p, p.saved.data, call);
    gdn_bwd::cut_forward(call.exact.p, gdn_bwd::aligned(p.workspace), call);
    launch_delta_bwd_plan(call.exact);
    gdn_bwd::launch_prepare(call);
    gdn_bwd::launch_scans(call);
    launch_delta_recurrent_flagged(p, call.exact.w.flags);
}

}  // namespace linattn::cuda
