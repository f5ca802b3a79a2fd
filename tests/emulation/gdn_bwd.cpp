// The chunked GDN backward for gdn_bwd.py. The kernels in float are left out: a flagged sequence and head is reported.
#define EMULATED gdn_bwd
#include "emu.h"
inline void atomicMax(uint32_t *to, uint32_t x) { *to = *to > x ? *to : x; }
namespace linattn::ptx {
inline void cp_async_16_zfill(uint32_t d, const void *s, uint32_t n) {
    if (d % 16 || (uintptr_t)s % 16) abort();
    memset(at(d), 0, 16);
    memcpy(at(d), s, n);
}
inline void cp_async_commit_group() {}
template <int>
inline void cp_async_wait_group() {}
inline void cp_async_bulk_prefetch(const void *, uint32_t) {}
inline void cp_async_bulk_prefetch_tensor_4d(const CUtensorMap *, int, int, int, int) {}
inline uint32_t cluster_nctarank() { return 1; }
inline uint32_t cluster_ctarank() { return 0; }
inline uint32_t mapa(uint32_t, uint32_t) { abort(); }
inline void mbarrier_arrive_cluster_release_cta(uint32_t) { abort(); }
inline void barrier_cluster_arrive() { abort(); }
inline void barrier_cluster_wait() { abort(); }
inline void cp_async_bulk_load_multicast(uint32_t, const void *, uint32_t, uint32_t, uint16_t) { abort(); }
inline void cp_async_bulk_tensor_4d_load_multicast(uint32_t, const CUtensorMap *, uint32_t, int, int, int, int, uint16_t) {
    abort();
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t b) { mbarrier_arrive(b); }
}  // namespace linattn::ptx
using std::max;
using std::min;
#include "backward/gdn_bwd.cu"
#include "backward/gdn_bwd_cut.cu"
#include "backward/gdn_bwd_gradients.cu"
#include "backward/gdn_bwd_outputs.cu"
#include "backward/gdn_bwd_prepare.cu"
#include "backward/gdn_bwd_scan.cu"
#include "backward/gdn_bwd_units.cu"
#include "common/tensor_map.h"

namespace linattn::cuda {
uint64_t cut_delta_bwd_workspace(const BwdParams &p, char *base, BwdWorkspace &w) {
    uint64_t used = 0;
    const auto take = [&](auto *&piece, int64_t count) {
        piece = base ? reinterpret_cast<std::remove_reference_t<decltype(piece)>>(base + used) : nullptr;
        used += (count * sizeof(*piece) + 255) / 256 * 256;
    };
    w.chunks = p.cu_seqlens ? p.T / kBwdChunk + p.N : p.B * ((p.T + kBwdChunk - 1) / kBwdChunk);
    take(w.chunk_start, p.N + 1);
    take(w.states, w.chunks * p.HV * p.K * p.V), take(w.grads, w.chunks * p.HV * p.K * p.V);
    take(w.dA, w.chunks * p.HV), take(w.dbias, w.chunks * p.HV);
    take(w.dq, p.B * p.T * p.HV * p.K), take(w.dk, p.B * p.T * p.HV * p.K);
    return used;
}
static BwdCall last;
void launch_delta_bwd_plan(const BwdCall &call) {
    int sum = 0;
    for (int n = 0; n < call.p.N; n++) {
        call.w.chunk_start[n] = sum;
        sum += (make_item(call.p, n, 0, 0).length + kBwdChunk - 1) / kBwdChunk;
    }
    call.w.chunk_start[call.p.N] = sum;
    for (int i = 0; i < call.cleared; i++) call.w.flags[i] = call.kept ? call.kept[i] : 0;
}
void launch_delta_recurrent_flagged(const DeltaParams &, const int *) {}
void launch_delta_bwd_prepare(const BwdCall &) {}
void launch_delta_bwd_scans(const BwdCall &) {}
void launch_delta_bwd_chunks(const BwdCall &) {}
void launch_delta_bwd_sums(const BwdCall &call) {
    const BwdParams &p = call.p;
    for (int h = 0; h < p.HV; h++) {
        float a = 0, b = 0;
        for (int c = 0; c < call.w.chunk_start[p.N]; c++) a += call.w.dA[c * p.HV + h], b += call.w.dbias[c * p.HV + h];
        if (p.dA_log) ((float *)p.dA_log.data)[h] = a;
        if (p.ddt_bias) ((float *)p.ddt_bias.data)[h] = b;
    }
    last = call;
}
}  // namespace linattn::cuda

using namespace linattn;
struct Plain {
    void *data;
    int64_t stride[5];
    int32_t dtype;
};
// arrays: q k v g beta d_o | state_in d_final_state cu_seqlens A_log dt_bias | dq dk dv dg dbeta d_initial_state dA_log ddt_bias |
// o final_state: where o is given, the forward with save = "states" gives it. sizes: B T H HV K N. Returns how many sequences and heads were flagged; items: of the scan's two launches, where sequences may be cut.
extern "C" int emulate(const Plain *a, const int64_t *n, double scale, int l2norm, int gate, int beta_form, double lower,
                       int multiprocessors, int splits, int *items) {
    BwdParams p;
    p.B = n[0], p.T = n[1], p.H = n[2], p.HV = n[3], p.K = p.V = n[4], p.N = p.P = n[5];
    Tensor o, state_out;
    Tensor *const to[] = {
        &p.q,        &p.k,       &p.v,      &p.g,  &p.beta, &p.d_o, &p.state_in, &p.d_final_state,   &p.cu_seqlens,
        &p.A_log,    &p.dt_bias, &p.dq,     &p.dk, &p.dv,   &p.dg,  &p.dbeta,    &p.d_initial_state, &p.dA_log,
        &p.ddt_bias, &o,         &state_out};
    for (auto *t : to) {
        t->data = (char *)a->data, t->dtype = (DType)a->dtype;
        memcpy(t->stride, a->stride, sizeof t->stride);
        a++;
    }
    p.scale = scale, p.qk_l2norm = l2norm, p.gate = (Gate)gate, p.beta_form = (BetaForm)beta_form, p.lower_bound = lower,
    p.splits = splits;
    if (!cuda::gdn_bwd_chunked_fits(p)) return -1;
    std::vector<char> saved;
    if (o.dtype != DType::None) {  // the forward that saves, and the backward with what it saved
        DeltaParams forward = p;
        forward.o = o, forward.state_out = state_out, forward.F = p.N;
        if (!cuda::gdn_fwd_saving_fits(forward)) return -1;
        saved.assign(cuda::gdn_saved_bytes(forward), -1);
        p.saved.data = forward.saved.data = saved.data(), p.saved.dtype = forward.saved.dtype = DType::U8;
        std::vector<char> workspace(cuda::gdn_fwd_saving_workspace(forward, multiprocessors), -1);
        forward.workspace.data = workspace.data();
        cuda::launch_gdn_fwd_saving(forward, multiprocessors);
    }
    const std::vector<char> kept = saved;
    std::vector<char> workspace(cuda::gdn_bwd_chunked_workspace(p, multiprocessors), -1);
    p.workspace.data = workspace.data();
    cuda::launch_gdn_bwd_chunked(p, multiprocessors);
    if (saved != kept) return -2;
    cuda::gdn_bwd::Call call = cuda::backward_call(p, multiprocessors);
    cuda::gdn_bwd::cut(p, (char *)(((uintptr_t)workspace.data() + 255) / 256 * 256), call);
    for (int i = 0; i < (call.cut.streams ? p.HV * call.cut.room : 0); i++)
        items[0] += call.cut.first[i].n >= 0, items[1] += call.cut.later[i].n >= 0;
    int flagged = 0;
    for (int i = 0; i < p.N * p.HV; i++) flagged += cuda::last.w.flags[i];
    return flagged;
}
