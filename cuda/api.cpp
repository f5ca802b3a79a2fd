// extern "C", here and in api_bwd.cpp alone: catch everything, check, pick the backend, call it. Here all but the gradients.
#include "api_common.h"
#include "device.h"

#ifndef LINATTN_VERSION
#define LINATTN_VERSION "0.0.0"
#endif
#ifndef LINATTN_BUILD_INFO
#define LINATTN_BUILD_INFO "built by hand"
#endif

using namespace linattn;

namespace {

template <class Args>
void own_inputs(Checker &check, const Args &a, DeltaParams &p) {
    const char *op = check.op();
    if constexpr (std::is_same_v<Args, linattn_gdn_fwd_args> || std::is_same_v<Args, linattn_kda_fwd_args>) {
        p.state_in = check("initial_state", a.initial_state, Checker::MaybeIn, "[P,HV,K,V]", kStates);
        packed_lengths(check, a, p);
        const int32_t zeros = choice(op, "zero_tail", a.zero_tail, 4);
        p.zero_tail = zeros & 1;
        gate_parameters(check, a, p);
        p.read_indices = check("read_indices", a.read_indices, Checker::MaybeIn, "[N]", kInts);
        p.write_indices = check("write_indices", a.write_indices, Checker::MaybeIn, "[N]", kInts);
        p.checkpoint_indices = check("checkpoint_indices", a.checkpoint_indices, Checker::MaybeIn, "[N,M]", kInts);
        p.o = check("o", a.o, Checker::Out, "[B,T,HV,V]", "=q");
        p.state_out = check("final_state", a.final_state, Checker::MaybeOut, "[F,HV,K,V]", kStates);
        p.checkpoints = check("checkpoints", a.checkpoints, Checker::MaybeOut, "[C,HV,K,V]", kStates);
        p.zero_checkpoints = zeros & 2 && p.checkpoints && p.cu_seqlens && !p.checkpoint_indices;
        p.saved = check("saved", a.saved, Checker::MaybeOut, "[S]", "u8");
        p.P = check.size("P"), p.F = check.size("F"), p.C = check.size("C"), p.M = check.size("M");
        if (p.read_indices && !p.state_in) fail(Status::Value, "%s: read_indices is given, but initial_state is not", op);
        if (p.write_indices && !p.state_out) fail(Status::Value, "%s: write_indices is given, but final_state is not", op);
        bool in_place = p.state_out && same_array(a.initial_state, a.final_state);
        if (!p.write_indices && in_place) p.write_indices = p.read_indices;
        if (p.state_in && !p.read_indices) rows_match(op, "initial_state", p.P, p.N, "read_indices");
        if (p.state_out && !p.write_indices) rows_match(op, "final_state", p.F, p.N, "write_indices");
        p.checkpoint_every = a.checkpoint_every;
        if (a.checkpoint_every < 0 || a.checkpoint_every % 64)
            fail(Status::Value, "%s: checkpoint_every is %d; it must be a multiple of 64, or 0 for none", op,
                 a.checkpoint_every);
        if ((a.checkpoint_every > 0) != static_cast<bool>(p.checkpoints))
            fail(Status::Value, "%s: checkpoints and checkpoint_every go together; only %s is given", op,
                 p.checkpoints ? "checkpoints" : "checkpoint_every");
        if (p.checkpoint_indices && !p.checkpoints)
            fail(Status::Value, "%s: checkpoint_indices is given, but checkpoints is not", op);
        if (p.checkpoints && !p.checkpoint_indices && !p.cu_seqlens && p.C < p.B * (p.T / p.checkpoint_every))
            fail(Status::Value, "%s: checkpoints has %lld rows, but B (T / checkpoint_every) = %lld are needed", op,
                 (long long)p.C, (long long)(p.B * (p.T / p.checkpoint_every)));
        saved_states(check, a, p);
        if (p.saved) {  // the backward takes a row of initial_state for each sequence, as it was
            for (auto [name, t] : {std::pair{"read_indices", &a.read_indices}, std::pair{"write_indices", &a.write_indices},
                                   std::pair{"checkpoints", &a.checkpoints}})
                if (given(*t)) fail(Status::Value, "%s: %s does not go with save \"states\"", op, name);
            if (in_place)
                fail(Status::Value, "%s: final_state is initial_state itself, which the backward of save \"states\" needs", op);
        }
        if (a.splits < 0) fail(Status::Value, "%s: splits is %d; 0 (chosen) or a number of pieces is possible", op, a.splits);
        if (a.splits > 1)
            fail(Status::Unsupported, "%s: splits is %d; this version does not split a sequence (0 or 1)", op, a.splits);
        p.splits = a.splits;
        check.allow_same(a.initial_state, a.final_state);
        if (p.checkpoint_indices) {
            check.allow_same(a.initial_state, a.checkpoints);
            if (p.write_indices) check.allow_same(a.final_state, a.checkpoints);
        }
        check.state_layout("initial_state", a.initial_state);
        check.state_layout("final_state", a.final_state);
        check.state_layout("checkpoints", a.checkpoints);
    } else {
        constexpr bool verify = std::is_same_v<Args, linattn_gdn_verify_args> || std::is_same_v<Args, linattn_kda_verify_args>;
        bool writes = !verify || given(a.write_indices);
        p.state_in = check("state", a.state, writes ? Checker::InOut : Checker::In, "[P,HV,K,V]", kStates);
        p.P = check.size("P");
        if constexpr (verify) {
            check.bind("N", p.N = p.B, "B");
        } else {
            packed_lengths(check, a, p);
            p.zero_tail = choice(op, "zero_tail", a.zero_tail, 2);
        }
        gate_parameters(check, a, p);
        p.read_indices = check("read_indices", a.read_indices, Checker::MaybeIn, "[N]", kInts);
        p.write_indices = check("write_indices", a.write_indices, Checker::MaybeIn, verify ? "[N,T]" : "[N]", kInts);
        if constexpr (verify) {
            if (p.T > 16) fail(Status::Value, "%s: q has T = %lld drafted tokens; 16 at most are possible", op, (long long)p.T);
            bool kda = p.family == Family::Kda;
            p.parents = check("parents", a.parents, Checker::MaybeIn, "[N,T]", kInts);
            p.o = check("o", a.o, Checker::Out, "[B,T,HV,V]", "=q");
            p.kept_k = check("kept_k", a.kept_k, Checker::MaybeOut, "[B,T,H,K]", "f32|f64");
            p.kept_u = check("kept_u", a.kept_u, Checker::MaybeOut, "[B,T,HV,V]", "f32|f64");
            p.kept_g = check("kept_g", a.kept_g, Checker::MaybeOut, kda ? "[B,T,HV,K]" : "[B,T,HV]", "f32|f64");
            if (p.write_indices) p.state_out = p.state_in, p.F = p.P;
            check.rows_of_16_bytes("kept_k", a.kept_k, 3);
            check.rows_of_16_bytes("kept_u", a.kept_u, 3);
            if (kda) check.rows_of_16_bytes("kept_g", a.kept_g, 3);
        } else {
            p.o = check("o", a.o, Checker::Out, "[B,T,HV,V]", "=q");
            if (!p.write_indices) p.write_indices = p.read_indices;
            p.state_out = p.state_in, p.F = p.P;
        }
        if constexpr (!verify) must_be_zero(op, a.reserved);
        if (!p.read_indices) rows_match(op, "state", p.P, p.N, "read_indices");
        check.state_layout("state", a.state);
    }
    check.rows_of_16_bytes("q", a.q, 3);
    check.rows_of_16_bytes("k", a.k, 3);
    check.rows_of_16_bytes("v", a.v, 3);
    check.rows_of_16_bytes("o", a.o, 3);
}

template <class Args>
DeltaParams params_of(Checker &check, const Args &a, Family family, Op op) {
    DeltaParams p;
    p.family = family;
    p.op = op;
    common_inputs(check, a, p);
    own_inputs(check, a, p);
    p.workspace = check("workspace", a.workspace, Checker::MaybeOut, "[W]", "u8");
    check.overlaps();
    return p;
}

CommitParams params_of(Checker &check, const linattn_delta_commit_args &a) {
    CommitParams p;
    const char *op = check.op();
    p.state = check("state", a.state, Checker::InOut, "[P,HV,K,V]", kStates);
    p.per_channel = a.g.ndim == 4;
    p.k = check("k", a.k, Checker::In, "[B,T,H,K]", "f32|f64");
    p.u = check("u", a.u, Checker::In, "[B,T,HV,V]", "=k");
    p.g = check("g", a.g, Checker::In, p.per_channel ? "[B,T,HV,K]" : "[B,T,HV]", "=k");
    p.B = check.size("B"), p.T = check.size("T"), p.H = check.size("H"), p.HV = check.size("HV");
    p.K = check.size("K"), p.V = check.size("V"), p.P = check.size("P");
    check.bind("N", p.N = p.B, "B");
    p.accepted = check("accepted", a.accepted, Checker::In, "[N]", kInts);
    p.path = check("path", a.path, Checker::MaybeIn, "[N,T]", kInts);
    p.read_indices = check("read_indices", a.read_indices, Checker::MaybeIn, "[N]", kInts);
    p.write_indices = check("write_indices", a.write_indices, Checker::MaybeIn, "[N]", kInts);
    p.workspace = check("workspace", a.workspace, Checker::MaybeOut, "[W]", "u8");
    if (p.K < 1 || p.V < 1)
        fail(Status::Value, "%s: K and V must be at least 1, got %lld and %lld", op, (long long)p.K, (long long)p.V);
    if (p.H == 0 ? p.HV != 0 : p.HV % p.H != 0)
        fail(Status::Value, "%s: u has HV = %lld heads, which must be a multiple of the H = %lld heads of k", op,
             (long long)p.HV, (long long)p.H);
    if (p.T > 16) fail(Status::Value, "%s: k has T = %lld tokens; 16 at most are possible", op, (long long)p.T);
    if (!p.read_indices) rows_match(op, "state", p.P, p.N, "read_indices");
    if (!p.write_indices) p.write_indices = p.read_indices;
    choice(op, "checked", a.checked, 2);
    must_be_zero(op, a.reserved);
    check.state_layout("state", a.state);
    check.rows_of_16_bytes("k", a.k, 3);
    check.rows_of_16_bytes("u", a.u, 3);
    if (p.per_channel) check.rows_of_16_bytes("g", a.g, 3);
    check.overlaps();
    p.stream = a.stream;
    p.device = check.device_id();
    return p;
}

// Bytes of `saved`.
template <class Args>
linattn_status saved_op(const char *op, Family family, const Args *args, uint64_t *bytes) {
    return guarded([&] {
        if (!bytes) fail(Status::Value, "%s: bytes is NULL", op);
        Args a = arguments(op, args);
        const bool nothing = choice(op, "save", a.save, 2) == LINATTN_SAVE_NOTHING;
        a.save = LINATTN_SAVE_NOTHING, a.saved = {};  // what it has to be is asked for
        Checker check(op);
        const DeltaParams p = params_of(check, a, family, Op::Fwd);
        *bytes = nothing ? 0 : saved_bytes(op, p, check.device_type());
    });
}

template <class Args>
linattn_status delta_op(const char *op, Family family, Op kind, OpEntry<DeltaParams> Backend::*member, const Args *args,
                        uint64_t *bytes) {
    return guarded([&] {
        const Args &a = arguments(op, args);
        Checker check(op);
        DeltaParams p = params_of(check, a, family, kind);
        const OpEntry<DeltaParams> &entry = backend_of(op, check.device_type()).*member;
        if (bytes) {
            *bytes = checked_plan(check, a, p, entry, nullptr);
            return;
        }
        checked_plan(check, a, p, entry, &a.workspace);
        last_path = entry.run(p);
    });
}

linattn_status commit_op(const linattn_delta_commit_args *args, uint64_t *bytes) {
    return guarded([&] {
        const auto &a = arguments("delta_commit", args);
        Checker check("delta_commit");
        CommitParams p = params_of(check, a);
        const OpEntry<CommitParams> &entry = backend_of("delta_commit", check.device_type()).delta_commit;
        if (bytes) {
            *bytes = checked_plan(check, a, p, entry, nullptr);
            return;
        }
        checked_plan(check, a, p, entry, &a.workspace);
        last_path = entry.run(p);
    });
}

struct NamedOp {
    const char *name;
    Family family;
    Op kind;
    OpEntry<DeltaParams> Backend::*member;
};
constexpr NamedOp kDeltaOps[] = {
    {"gdn_fwd", Family::Gdn, Op::Fwd, &Backend::gdn_fwd},
    {"kda_fwd", Family::Kda, Op::Fwd, &Backend::kda_fwd},
    {"gdn_decode", Family::Gdn, Op::Decode, &Backend::gdn_decode},
    {"kda_decode", Family::Kda, Op::Decode, &Backend::kda_decode},
    {"gdn_verify", Family::Gdn, Op::Verify, &Backend::gdn_verify},
    {"kda_verify", Family::Kda, Op::Verify, &Backend::kda_verify},
};

void check_support(const char *op, int32_t device_type, int32_t device_id, int32_t dtype, int64_t K, int64_t V) {
    if (!op) fail(Status::Value, "supports: op is NULL");
    if (K < 1 || V < 1)
        fail(Status::Value, "supports: K and V must be at least 1, got %lld and %lld", (long long)K, (long long)V);
    if (check_backward_support(op, device_type, device_id, dtype, K, V)) return;
    const Backend &backend = backend_of(op, device_type);
    if (std::strcmp(op, "delta_commit") == 0) {
        CommitParams p;
        p.K = K, p.V = V, p.device = device_id;
        p.k.dtype = dtype == LINATTN_F64 ? DType::F64 : DType::F32;
        p.state.dtype = p.k.dtype;
        p.state.stride[2] = V, p.state.stride[3] = 1;
        backend.delta_commit.workspace(p);
        return;
    }
    for (const NamedOp &known : kDeltaOps) {
        if (std::strcmp(known.name, op) != 0) continue;
        if (dtype < LINATTN_F32 || dtype > LINATTN_F16)
            fail(Status::Unsupported, "%s: q must be bf16, f16, f32 or f64, got %s", op, dtype_name(dtype));
        DeltaParams p;
        p.family = known.family, p.op = known.kind, p.K = K, p.V = V, p.device = device_id;
        p.q.dtype = p.k.dtype = p.v.dtype = p.o.dtype = static_cast<DType>(dtype);
        p.g.dtype = p.beta.dtype = DType::F32;
        (backend.*known.member).workspace(p);
        return;
    }
    fail(Status::Value, "supports: there is no op %s", op);
}

}  // namespace

#define DELTA_OP(op, family, kind)                                                               \
    linattn_status linattn_##op(const linattn_##op##_args *args) {                               \
        return delta_op(#op, family, kind, &Backend::op, args, nullptr);                         \
    }                                                                                            \
    linattn_status linattn_##op##_workspace(const linattn_##op##_args *args, uint64_t *bytes) {  \
        return bytes ? delta_op(#op, family, kind, &Backend::op, args, bytes) : need_bytes(#op); \
    }

extern "C" {

DELTA_OP(gdn_fwd, Family::Gdn, Op::Fwd)
DELTA_OP(kda_fwd, Family::Kda, Op::Fwd)
DELTA_OP(gdn_decode, Family::Gdn, Op::Decode)
DELTA_OP(kda_decode, Family::Kda, Op::Decode)
DELTA_OP(gdn_verify, Family::Gdn, Op::Verify)
DELTA_OP(kda_verify, Family::Kda, Op::Verify)

linattn_status linattn_gdn_fwd_saved(const linattn_gdn_fwd_args *args, uint64_t *bytes) {
    return saved_op("gdn_fwd", Family::Gdn, args, bytes);
}
linattn_status linattn_kda_fwd_saved(const linattn_kda_fwd_args *args, uint64_t *bytes) {
    return saved_op("kda_fwd", Family::Kda, args, bytes);
}

linattn_status linattn_delta_commit(const linattn_delta_commit_args *args) { return commit_op(args, nullptr); }
linattn_status linattn_delta_commit_workspace(const linattn_delta_commit_args *args, uint64_t *bytes) {
    return bytes ? commit_op(args, bytes) : need_bytes("delta_commit");
}

linattn_status linattn_supports(const char *op, int32_t device_type, int32_t device_id, int32_t dtype, int64_t K, int64_t V) {
    return guarded([&] {
        try {
            check_support(op, device_type, device_id, dtype, K, V);
        } catch (const Error &e) {  // no driver, no such device: an answer here, not a failure
            if (e.status != Status::Runtime) throw;
            throw Error(Status::Unsupported, e.text);
        }
    });
}

const char *linattn_last_error(void) { return last_error; }
const char *linattn_last_path(void) { return last_path; }
int32_t linattn_abi_version(void) { return LINATTN_ABI_VERSION; }
const char *linattn_version(void) { return LINATTN_VERSION; }
const char *linattn_build_info(void) { return LINATTN_BUILD_INFO; }

linattn_status linattn_device_count(int32_t *count) {
    return guarded([&] {
        if (!count) fail(Status::Value, "device_count: count is NULL");
        *count = 0;
#ifdef LINATTN_WITH_CUDA
        *count = cuda::device_count();
#else
        fail(Status::Runtime, "this library was built without CUDA; it runs on the CPU only");
#endif
    });
}

linattn_status linattn_device_query(int32_t device_id, linattn_device_info *info) {
    return guarded([&] {
        if (!info) fail(Status::Value, "device_query: info is NULL");
#ifdef LINATTN_WITH_CUDA
        cuda::DeviceInfo d = cuda::device_query(device_id);
        *info = {};
        std::memcpy(info->name, d.name, sizeof info->name);
        info->memory_bytes = d.memory_bytes;
        info->compute_capability = d.compute_capability;
        info->multiprocessors = d.multiprocessors;
        info->driver_version = d.driver_version;
        info->runtime_version = d.runtime_version;
        info->usable = d.usable;
#else
        fail(Status::Runtime, "device_query: device %d: this library was built without CUDA", device_id);
#endif
    });
}

linattn_status linattn_tensor_from_dlpack(const struct DLTensor *from, linattn_tensor *to) {
    // The layout of DLTensor, unchanged since DLPack 0.2.
    struct Layout {
        void *data;
        int32_t device_type, device_id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        const int64_t *shape, *strides;
        uint64_t byte_offset;
    };
    static_assert(sizeof(Layout) == 48 && offsetof(Layout, byte_offset) == 40, "DLTensor has 48 bytes");
    return guarded([&] {
        if (!from || !to) fail(Status::Value, "tensor_from_dlpack: an argument is NULL");
        Layout t;
        std::memcpy(&t, from, sizeof t);
        if (t.ndim < 1 || t.ndim > 5) fail(Status::Value, "tensor_from_dlpack: %d dimensions; 1 to 5 are possible", t.ndim);
        struct Known {
            uint8_t code, bits;
            int32_t dtype;
        };
        constexpr Known known[] = {{2, 32, LINATTN_F32}, {2, 64, LINATTN_F64}, {2, 16, LINATTN_F16}, {4, 16, LINATTN_BF16},
                                   {0, 32, LINATTN_I32}, {0, 64, LINATTN_I64}, {1, 8, LINATTN_U8}};
        linattn_tensor r = {};
        for (const Known &k : known)
            if (t.lanes == 1 && t.code == k.code && t.bits == k.bits) r.dtype = k.dtype;
        if (!r.dtype)
            fail(Status::Type,
                 "tensor_from_dlpack: dtype code %d with %d bits and %d lanes is not known; f32, f64, f16, bf16, i32, i64 and "
                 "u8 are",
                 t.code, t.bits, t.lanes);
        if (t.device_type != LINATTN_CPU && t.device_type != LINATTN_CUDA)
            fail(Status::Type, "tensor_from_dlpack: device type %d is not known; the CPU (1) and CUDA (2) are", t.device_type);
        r.data = t.data ? static_cast<char *>(t.data) + t.byte_offset : nullptr;
        r.ndim = t.ndim;
        int64_t run = 1;
        for (int i = t.ndim - 1; i >= 0; --i) {
            r.shape[i] = t.shape[i];
            r.strides[i] = t.strides ? t.strides[i] : run;
            run *= t.shape[i];
        }
        r.device_type = t.device_type;
        r.device_id = t.device_id;
        *to = r;
    });
}

}  // extern "C"
