// What the files of the C interface share: errors into statuses, the backend of a device, and the checks of common arguments.
#pragma once
#include <new>
#include <type_traits>
#include <utility>

#include "check.h"
#include "ops.h"
#include "values.h"

namespace linattn {

inline thread_local char last_error[1024];
inline thread_local const char *last_path = "";

template <class Body>
linattn_status guarded(Body body) noexcept {
    auto report = [](Status status, const char *text) {
        std::snprintf(last_error, sizeof last_error, "%s", text);
        return static_cast<linattn_status>(status);
    };
    try {
        body();
        last_error[0] = 0;
        return LINATTN_OK;
    } catch (const Error &e) {
        return report(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return report(Status::Runtime, "out of host memory");
    } catch (const std::exception &e) {
        return report(Status::Runtime, e.what());
    } catch (...) {
        return report(Status::Runtime, "an unknown C++ exception");
    }
}

inline const Backend &backend_of(const char *op, int32_t device_type) {
    if (device_type == LINATTN_CPU) return cpu::backend();
#ifdef LINATTN_WITH_CUDA
    if (device_type == LINATTN_CUDA) return cuda::backend();
#else
    if (device_type == LINATTN_CUDA)
        fail(Status::Unsupported, "%s: this library was built without CUDA; it runs on the CPU only", op);
#endif
    fail(Status::Type, "%s: device type %d is not known; the CPU (1) and CUDA (2) are", op, device_type);
}

template <class Args>
const Args &arguments(const char *op, const Args *args) {
    if (!args) fail(Status::Value, "%s: the argument struct is NULL", op);
    if (args->size != sizeof(Args))
        fail(Status::Value, "%s: size is %llu, but this library's argument struct has %zu bytes (its ABI is %d.%d)", op,
             static_cast<unsigned long long>(args->size), sizeof(Args), LINATTN_ABI_VERSION >> 16,
             LINATTN_ABI_VERSION & 0xffff);
    return *args;
}

inline void must_be_zero(const char *op, int32_t reserved) {
    if (reserved) fail(Status::Value, "%s: reserved is %d; it must be 0", op, reserved);
}

inline int32_t choice(const char *op, const char *name, int32_t value, int32_t count) {
    if (value < 0 || value >= count) fail(Status::Value, "%s: %s is %d; 0 to %d are possible", op, name, value, count - 1);
    return value;
}

inline constexpr const char *kFloats = "bf16|f16|f32|f64", *kGates = "f32|bf16|f16|f64", *kStates = "f32|bf16|f64",
                            *kInts = "i32|i64";

// q, k, v, g, beta and the options they share, of every op that runs the recurrence.
template <class Args>
void common_inputs(Checker &check, const Args &a, DeltaParams &p) {
    bool kda = p.family == Family::Kda;
    p.q = check("q", a.q, Checker::In, "[B,T,H,K]", kFloats);
    p.k = check("k", a.k, Checker::In, "[B,T,H,K]", "=q");
    p.v = check("v", a.v, Checker::In, "[B,T,HV,V]", "=q");
    p.g = check("g", a.g, Checker::In, kda ? "[B,T,HV,K]" : "[B,T,HV]", kGates);
    p.beta = check("beta", a.beta, Checker::In, "[B,T,HV]", kGates);
    p.B = check.size("B"), p.T = check.size("T"), p.H = check.size("H"), p.HV = check.size("HV");
    p.K = check.size("K"), p.V = check.size("V");
    const char *op = check.op();
    if (p.K < 1 || p.V < 1)
        fail(Status::Value, "%s: K and V must be at least 1, got %lld and %lld", op, (long long)p.K, (long long)p.V);
    if (p.H == 0 ? p.HV != 0 : p.HV % p.H != 0)
        fail(Status::Value, "%s: v has HV = %lld heads, which must be a multiple of the H = %lld heads of q", op,
             (long long)p.HV, (long long)p.H);

    p.scale = a.scale;
    if (!std::isfinite(a.scale) || a.scale == 0)
        fail(Status::Value, "%s: scale is %g; it must be finite and not 0", op, a.scale);
    p.qk_l2norm = choice(op, "qk_l2norm", a.qk_l2norm, 2);
    p.gate = static_cast<Gate>(choice(op, "gate", a.gate, 3));
    p.beta_form = static_cast<BetaForm>(choice(op, "beta_form", a.beta_form, 3));
    choice(op, "checked", a.checked, 2);
    p.lower_bound = a.lower_bound;
    if (p.gate == Gate::Bounded ? !(a.lower_bound < 0 && std::isfinite(a.lower_bound)) : a.lower_bound != 0)
        fail(Status::Value,
             "%s: lower_bound is %g; it must be finite and below 0 with gate \"bounded\", and 0 (not given) without", op,
             a.lower_bound);
    p.stream = a.stream;
    p.device = check.device_id();
}

inline uint64_t saved_bytes(const char *op, const DeltaParams &p, int32_t device_type) {
    const Backend &backend = backend_of(op, device_type);
    const OpEntry<DeltaParams> &forward = p.family == Family::Kda ? backend.kda_fwd : backend.gdn_fwd;
    if (!forward.saved)
        fail(Status::Unsupported,
             "%s: save \"states\" is not there on a GPU; use \"nothing\", with which the backward recomputes from the inputs",
             op);
    return forward.saved(p);
}

template <class Args>
void gate_parameters(Checker &check, const Args &a, DeltaParams &p) {
    bool kda = p.family == Family::Kda;
    const char *op = check.op();
    if (p.gate == Gate::None)
        for (auto [name, t] : {std::pair{"A_log", &a.A_log}, std::pair{"dt_bias", &a.dt_bias}})
            if (given(*t))
                fail(Status::Value, "%s: %s is given, but gate is \"none\", so g is already the log decay", op, name);
    if (p.gate == Gate::Softplus && !given(a.A_log)) fail(Status::Value, "%s: gate \"softplus\" needs A_log, shape [HV]", op);
    p.A_log = check("A_log", a.A_log, Checker::MaybeIn, "[HV]", kStates);
    p.dt_bias = check("dt_bias", a.dt_bias, Checker::MaybeIn, kda ? "[HV,K]" : "[HV]", kStates);
}

template <class Args>
void packed_lengths(Checker &check, const Args &a, DeltaParams &p) {
    p.cu_seqlens = check("cu_seqlens", a.cu_seqlens, Checker::MaybeIn, "[N+1]", kInts);
    if (p.cu_seqlens && p.B != 1)
        fail(Status::Value, "%s: q has B = %lld, but with cu_seqlens the sequences are packed along T and B must be 1",
             check.op(), (long long)p.B);
    if (!p.cu_seqlens) check.bind("N", p.B, "B");
    p.N = check.size("N");
}

// save = "states": what the forward saves and the backward reads must be as large as the shapes say.
template <class Args>
void saved_states(Checker &check, const Args &a, const DeltaParams &p) {
    const char *op = check.op();
    if (choice(op, "save", a.save, 2) == LINATTN_SAVE_NOTHING) {
        if (given(a.saved)) fail(Status::Value, "%s: saved is given, but save is \"nothing\"", op);
        return;
    }
    const uint64_t need = saved_bytes(op, p, check.device_type());
    if (!given(a.saved))
        fail(Status::Value, "%s: saved is required, %llu bytes of u8, for save \"states\"", op, (unsigned long long)need);
    if (static_cast<uint64_t>(a.saved.shape[0]) != need)
        fail(Status::Value,
             "%s: saved has %lld bytes, but of these shapes and this dtype of q it has %llu: that of another call, or not all "
             "of it",
             op, (long long)a.saved.shape[0], (unsigned long long)need);
    if ((need > 1 && a.saved.strides[0] != 1) || reinterpret_cast<uintptr_t>(a.saved.data) % 16 != 0)
        fail(Status::Value, "%s: saved must be contiguous, at an address that is a multiple of 16", op);
}

inline void rows_match(const char *op, const char *name, int64_t rows, int64_t N, const char *table) {
    if (rows != N)
        fail(Status::Value, "%s: %s has %lld rows for %lld sequences; without %s there must be one each", op, name,
             (long long)rows, (long long)N, table);
}

// Everything that can be refused is refused before `run`. segment_merge has no values to test.
template <class Args, class Params>
uint64_t checked_plan(Checker &check, const Args &a, const Params &p, const OpEntry<Params> &entry,
                      const linattn_tensor *workspace) {
    if (!entry.workspace) fail(Status::Unsupported, "%s: there is no GPU kernel for it yet; it runs on the CPU", check.op());
    uint64_t need = entry.workspace(p);
    if (!workspace) return need;
    uint64_t have = given(*workspace) ? static_cast<uint64_t>(workspace->shape[0]) : 0;
    if (have < need)
        fail(Status::Value, "%s: workspace has %llu bytes, but %llu are needed", check.op(), (unsigned long long)have,
             (unsigned long long)need);
    if constexpr (!std::is_same_v<Params, MergeParams>) check_values(check.op(), p, check.on_gpu(), a.checked != 0);
    return need;
}

inline linattn_status need_bytes(const char *op) {
    return guarded([&] { fail(Status::Value, "%s: bytes is NULL", op); });
}

// Throws Error(Unsupported) where the backend has no kernel of bwd, segment or merge; false where `op` is none of them.
bool check_backward_support(const char *op, int32_t device_type, int32_t device_id, int32_t dtype, int64_t K, int64_t V);

}  // namespace linattn
