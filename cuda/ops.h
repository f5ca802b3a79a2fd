// What api.cpp hands to a backend, after every check: plain pointers, sizes and options. Nothing below knows the C ABI.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define LINATTN_HOST_DEVICE __host__ __device__
#else
#define LINATTN_HOST_DEVICE
#endif

namespace linattn {

// Same numbers as linattn_dtype; None marks a tensor that was not given.
enum class DType : int32_t { None = 0, F32 = 1, F64 = 2, BF16 = 3, F16 = 4, I32 = 5, I64 = 6, U8 = 7 };

constexpr int64_t dtype_bytes(DType t) {
    switch (t) {
        case DType::F64:
        case DType::I64: return 8;
        case DType::F32:
        case DType::I32: return 4;
        case DType::BF16:
        case DType::F16: return 2;
        case DType::U8: return 1;
        default: return 0;
    }
}

// A borrowed array: first element, strides in elements, axis by axis as the header gives the shape.
struct Tensor {
    char *data = nullptr;
    int64_t stride[5] = {};
    DType dtype = DType::None;
    LINATTN_HOST_DEVICE explicit operator bool() const { return dtype != DType::None; }
};

enum class Family : int32_t { Gdn = 0, Kda = 1 };
enum class Op : int32_t { Fwd = 0, Decode = 1, Verify = 2, Bwd = 3, Segment = 4 };
enum class Gate : int32_t { None = 0, Softplus = 1, Bounded = 2 };
enum class BetaForm : int32_t { Weight = 0, Logits = 1, LogitsX2 = 2 };

// Arguments of {gdn,kda}_{fwd,decode,verify} and, in part, of bwd and segment: one recurrence, several ways to use it.
//   S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q
struct DeltaParams {
    Family family = Family::Gdn;
    Op op = Op::Fwd;
    int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;
    int64_t N = 0;              // sequences: B, or packed in one row of T tokens by cu_seqlens
    int64_t P = 0;              // rows of state_in
    int64_t F = 0;              // rows of state_out
    int64_t C = 0;              // rows of checkpoints
    int64_t M = 0;              // columns of checkpoint_indices
    Tensor q, k;                // [B,T,H,K]
    Tensor v, o;                // [B,T,HV,V]
    Tensor g;                   // [B,T,HV] GDN, [B,T,HV,K] KDA
    Tensor beta;                // [B,T,HV]
    Tensor state_in;            // [P,HV,K,V]; not given: zeros
    Tensor state_out;           // [F,HV,K,V]; may not be given; may be state_in itself
    Tensor cu_seqlens;          // [N+1]; may not be given
    Tensor A_log;               // [HV]; may not be given (amplitude 1)
    Tensor dt_bias;             // [HV] GDN, [HV,K] KDA; may not be given (0)
    Tensor read_indices;        // [N]; not given: row n
    Tensor write_indices;       // [N], defaults applied by api.cpp, not given: row n; verify: [N,T], not given: write nothing
    Tensor checkpoints;         // [C,HV,K,V]; may not be given
    Tensor checkpoint_indices;  // [N,M]; not given: row sum_{m<n} floor(len_m / every) + i
    Tensor parents;             // [N,T]; not given: a chain. verify only
    Tensor kept_k, kept_u, kept_g;  // verify only; may not be given
    double scale = 0, lower_bound = 0;
    bool qk_l2norm = false;
    Gate gate = Gate::None;
    BetaForm beta_form = BetaForm::Weight;
    int64_t checkpoint_every = 0;
    int splits = 0;
    bool zero_tail = false;         // zero rows of o past cu_seqlens[N]
    bool zero_checkpoints = false;  // zero rows of checkpoints that no packed sequence has
    Tensor saved;                   // fwd, bwd: of save = "states", else not given
    Tensor workspace;
    int device = 0;
    void *stream = nullptr;
};

// The op's public name, for messages.
inline const char *op_name(const DeltaParams &p) {
    static const char *const names[2][5] = {{"gdn_fwd", "gdn_decode", "gdn_verify", "gdn_bwd", "gdn_segment"},
                                            {"kda_fwd", "kda_decode", "kda_verify", "kda_bwd", "kda_segment"}};
    return names[static_cast<int>(p.family)][static_cast<int>(p.op)];
}

// delta_commit: S = exp(g_t) S + k_t u_t^T for the accepted tokens t = path[0], path[1], ..
struct CommitParams {
    int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0, N = 0, P = 0;
    bool per_channel = false;  // g is [B,T,HV,K]
    Tensor state;              // [P,HV,K,V]
    Tensor k, u, g;            // [B,T,H,K], [B,T,HV,V], [B,T,HV] or [B,T,HV,K]
    Tensor accepted;           // [N], clamped to 0..T
    Tensor path;               // [N,T]; not given: 0, 1, 2, ..
    Tensor read_indices;       // [N]; not given: row n
    Tensor write_indices;      // [N]; default (read_indices) applied by api.cpp
    Tensor workspace;
    int device = 0;
    void *stream = nullptr;
};

// {gdn,kda}_bwd: the forward's inputs (state_in is initial_state, a row per sequence) and the gradient of each.
struct BwdParams : DeltaParams {
    Tensor d_o;               // [B,T,HV,V]
    Tensor d_final_state;     // [N,HV,K,V]; not given: zeros
    Tensor dq, dk;            // [B,T,H,K], summed over the value heads of a group
    Tensor dv, dg, dbeta;     // as v, g, beta
    Tensor d_initial_state;   // [N,HV,K,V]; may not be given
    Tensor dA_log, ddt_bias;  // as A_log, dt_bias, summed over all tokens; may not be given
};

// {gdn,kda}_segment: S_out = transition S_in + added; backward, dS_in = transition dS_out + added.
struct SegmentParams : DeltaParams {
    bool backward = false;
    Tensor d_o;         // [B,T,HV,V], backward only
    Tensor transition;  // [N,HV,K,K]
    Tensor added;       // [N,HV,K,V]
};

// segment_merge: states[r] = S; S = M[r] S + h[r], from the first segment to the last; backward from the last to the first.
struct MergeParams {
    int64_t R = 0, N = 0, HV = 0, K = 0, V = 0;
    bool backward = false;
    Tensor M;              // [R,N,HV,K,K]
    Tensor h, states;      // [R,N,HV,K,V]
    Tensor initial_state;  // [N,HV,K,V]; not given: zeros
    Tensor final_state;    // [N,HV,K,V]; may not be given
    Tensor workspace;
    int device = 0;
    void *stream = nullptr;
};

// One op of a backend. `workspace` throws Error(Unsupported) where there is no kernel and otherwise returns the bytes of
// scratch; `run` computes and returns the name of the path taken, such as "cpu/avx512".
template <class Params>
struct OpEntry {
    uint64_t (*workspace)(const Params &) = nullptr;
    const char *(*run)(const Params &) = nullptr;
    // Of fwd alone, where save = "states" is possible: bytes of `saved`, which follow from sizes.
    uint64_t (*saved)(const Params &) = nullptr;
};

struct Backend {
    OpEntry<DeltaParams> gdn_fwd, kda_fwd, gdn_decode, kda_decode, gdn_verify, kda_verify;
    OpEntry<CommitParams> delta_commit;
    // Left out by a backend that has none.
    OpEntry<BwdParams> gdn_bwd{}, kda_bwd{};
    OpEntry<SegmentParams> gdn_segment{}, kda_segment{};
    OpEntry<MergeParams> segment_merge{};
};

// What `checked = True` needs of a GPU: both synchronise the stream.
namespace cuda {
void copy_to_host(void *to, const void *from, int64_t bytes, int device, void *stream);
bool any_positive_g(const DeltaParams &p, int64_t b, int64_t first,
                    int64_t end);  // is some g > 0 or NaN in tokens first .. end?
}  // namespace cuda

// Row of a state pool that sequence n reads or writes; -1 where there is nothing to do.
inline int64_t clamp_row(int64_t row, int64_t rows) { return row >= 0 && row < rows ? row : -1; }

namespace cpu {
const Backend &backend();
}
namespace cuda {
const Backend &backend();
}

}  // namespace linattn
