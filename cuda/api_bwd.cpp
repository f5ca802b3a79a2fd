// extern "C" of the gradients and of what context parallelism needs: {gdn,kda}_bwd, {gdn,kda}_segment, segment_merge.
#include "api_common.h"

using namespace linattn;

namespace {

template <class Args>
BwdParams bwd_params(Checker &check, const Args &a, Family family) {
    BwdParams p;
    const char *op = check.op();
    const bool kda = family == Family::Kda;
    p.family = family;
    p.op = Op::Bwd;
    common_inputs(check, a, p);
    p.d_o = check("d_o", a.d_o, Checker::In, "[B,T,HV,V]", "=q");
    packed_lengths(check, a, p);
    p.state_in = check("initial_state", a.initial_state, Checker::MaybeIn, "[N,HV,K,V]", kStates);
    p.P = p.N;
    p.d_final_state = check("d_final_state", a.d_final_state, Checker::MaybeIn, "[N,HV,K,V]", kStates);
    gate_parameters(check, a, p);
    p.saved = check("saved", a.saved, Checker::MaybeIn, "[S]", "u8");
    p.dq = check("dq", a.dq, Checker::Out, "[B,T,H,K]", "=q");
    p.dk = check("dk", a.dk, Checker::Out, "[B,T,H,K]", "=q");
    p.dv = check("dv", a.dv, Checker::Out, "[B,T,HV,V]", "=q");
    p.dg = check("dg", a.dg, Checker::Out, kda ? "[B,T,HV,K]" : "[B,T,HV]", kGates);
    p.dbeta = check("dbeta", a.dbeta, Checker::Out, "[B,T,HV]", kGates);
    p.d_initial_state = check("d_initial_state", a.d_initial_state, Checker::MaybeOut, "[N,HV,K,V]", kStates);
    p.dA_log = check("dA_log", a.dA_log, Checker::MaybeOut, "[HV]", kStates);
    p.ddt_bias = check("ddt_bias", a.ddt_bias, Checker::MaybeOut, kda ? "[HV,K]" : "[HV]", kStates);
    p.workspace = check("workspace", a.workspace, Checker::MaybeOut, "[W]", "u8");
    if (p.dA_log && !p.A_log) fail(Status::Value, "%s: dA_log is given, but A_log is not", op);
    if (p.ddt_bias && !p.dt_bias) fail(Status::Value, "%s: ddt_bias is given, but dt_bias is not", op);
    saved_states(check, a, p);
    if (a.splits < 0) fail(Status::Value, "%s: splits is %d; 0 (chosen) or a number of pieces is possible", op, a.splits);
    if (a.splits > 1)
        fail(Status::Unsupported, "%s: splits is %d; this version does not split a sequence (0 or 1)", op, a.splits);
    p.splits = a.splits;
    check.overlaps();
    return p;
}

template <class Args>
SegmentParams segment_params(Checker &check, const Args &a, Family family) {
    SegmentParams p;
    const char *op = check.op();
    p.family = family;
    p.op = Op::Segment;
    common_inputs(check, a, p);
    p.d_o = check("d_o", a.d_o, Checker::MaybeIn, "[B,T,HV,V]", "=q");
    packed_lengths(check, a, p);
    gate_parameters(check, a, p);
    p.transition = check("M", a.M, Checker::Out, "[N,HV,K,K]", "f32|f64");
    p.added = check("h", a.h, Checker::Out, "[N,HV,K,V]", "f32|f64");
    p.workspace = check("workspace", a.workspace, Checker::MaybeOut, "[W]", "u8");
    p.backward = choice(op, "direction", a.direction, 2) == LINATTN_BACKWARD;
    if (p.backward && !p.d_o) fail(Status::Value, "%s: d_o is required, shape [B,T,HV,V], for direction \"backward\"", op);
    if (!p.backward && p.d_o) fail(Status::Value, "%s: d_o is given, but direction is \"forward\", which reads none", op);
    must_be_zero(op, a.reserved);
    check.overlaps();
    return p;
}

MergeParams merge_params(Checker &check, const linattn_segment_merge_args &a) {
    MergeParams p;
    const char *op = check.op();
    p.M = check("M", a.M, Checker::In, "[R,N,HV,K,K]", "f32|f64");
    p.h = check("h", a.h, Checker::In, "[R,N,HV,K,V]", "=M");
    p.initial_state = check("initial_state", a.initial_state, Checker::MaybeIn, "[N,HV,K,V]", kStates);
    p.states = check("states", a.states, Checker::Out, "[R,N,HV,K,V]", "=M");
    p.final_state = check("final_state", a.final_state, Checker::MaybeOut, "[N,HV,K,V]", kStates);
    p.workspace = check("workspace", a.workspace, Checker::MaybeOut, "[W]", "u8");
    p.R = check.size("R"), p.N = check.size("N"), p.HV = check.size("HV"), p.K = check.size("K"), p.V = check.size("V");
    if (p.K < 1 || p.V < 1)
        fail(Status::Value, "%s: K and V must be at least 1, got %lld and %lld", op, (long long)p.K, (long long)p.V);
    p.backward = choice(op, "direction", a.direction, 2) == LINATTN_BACKWARD;
    choice(op, "checked", a.checked, 2);
    check.overlaps();
    p.stream = a.stream;
    p.device = check.device_id();
    return p;
}

// `params` checks the arguments; `bytes` is set for the workspace query.
template <class Args, class Params, class Make>
linattn_status run_op(const char *op, OpEntry<Params> Backend::*member, const Args *args, uint64_t *bytes, Make params) {
    return guarded([&] {
        const Args &a = arguments(op, args);
        Checker check(op);
        const Params p = params(check, a);
        const OpEntry<Params> &entry = backend_of(op, check.device_type()).*member;
        const uint64_t need = checked_plan(check, a, p, entry, bytes ? nullptr : &a.workspace);
        if (bytes)
            *bytes = need;
        else
            last_path = entry.run(p);
    });
}

template <class Params>
bool entry_supports(const char *op, const OpEntry<Params> &entry, const Params &p) {
    if (!entry.workspace) fail(Status::Unsupported, "%s: there is no GPU kernel for it yet; it runs on the CPU", op);
    entry.workspace(p);
    return true;
}

}  // namespace

bool linattn::check_backward_support(const char *op, int32_t device_type, int32_t device_id, int32_t dtype, int64_t K,
                                     int64_t V) {
    auto is = [op](const char *name) { return std::strcmp(op, name) == 0; };
    const bool merge = is("segment_merge");
    if (!merge && !is("gdn_bwd") && !is("kda_bwd") && !is("gdn_segment") && !is("kda_segment")) return false;
    const Backend &backend = backend_of(op, device_type);
    if (dtype < LINATTN_F32 || dtype > LINATTN_F16)
        fail(Status::Unsupported, "%s: q must be bf16, f16, f32 or f64, got %s", op, dtype_name(dtype));
    if (merge) {
        MergeParams p;
        p.K = K, p.V = V, p.device = device_id;
        p.M.dtype = p.h.dtype = p.states.dtype = dtype == LINATTN_F64 ? DType::F64 : DType::F32;
        return entry_supports(op, backend.segment_merge, p);
    }
    auto describe = [&](DeltaParams &p, Op kind) {
        p.family = is("gdn_bwd") || is("gdn_segment") ? Family::Gdn : Family::Kda;
        p.op = kind, p.K = K, p.V = V, p.device = device_id;
        p.q.dtype = p.k.dtype = p.v.dtype = static_cast<DType>(dtype);
        p.g.dtype = p.beta.dtype = DType::F32;
    };
    if (is("gdn_bwd") || is("kda_bwd")) {
        BwdParams p;
        describe(p, Op::Bwd);
        return entry_supports(op, p.family == Family::Gdn ? backend.gdn_bwd : backend.kda_bwd, p);
    }
    SegmentParams p;
    describe(p, Op::Segment);
    return entry_supports(op, p.family == Family::Gdn ? backend.gdn_segment : backend.kda_segment, p);
}

#define GRADIENT_OP(op, params)                                                                                               \
    linattn_status linattn_##op(const linattn_##op##_args *args) { return run_op(#op, &Backend::op, args, nullptr, params); } \
    linattn_status linattn_##op##_workspace(const linattn_##op##_args *args, uint64_t *bytes) {                               \
        return bytes ? run_op(#op, &Backend::op, args, bytes, params) : need_bytes(#op);                                      \
    }

extern "C" {

GRADIENT_OP(gdn_bwd, [](Checker &check, const auto &a) { return bwd_params(check, a, Family::Gdn); })
GRADIENT_OP(kda_bwd, [](Checker &check, const auto &a) { return bwd_params(check, a, Family::Kda); })
GRADIENT_OP(gdn_segment, [](Checker &check, const auto &a) { return segment_params(check, a, Family::Gdn); })
GRADIENT_OP(kda_segment, [](Checker &check, const auto &a) { return segment_params(check, a, Family::Kda); })
GRADIENT_OP(segment_merge, merge_params)

}  // extern "C"
