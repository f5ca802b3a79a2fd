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
enum class Op : int32_t { Fwd = 0, Decode = 1, Verify = 2 };
enum class Gate : int32_t { None = 0, Softplus = 1, Bounded = 2 };
enum class BetaForm : int32_t { Weight = 0, Logits = 1, LogitsX2 = 2 };

// Arguments of {gdn,kda}_{fwd,decode,verify}: one recurrence, three ways to use it.
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
    bool zero_tail = false;  // zero rows of o past cu_seqlens[N]
    Tensor workspace;
    int device = 0;
    void *stream = nullptr;
};

// The op's public name, for messages.
inline const char *op_name(const DeltaParams &p) {
    static const char *const names[2][3] = {{"gdn_fwd", "gdn_decode", "gdn_verify"}, {"kda_fwd", "kda_decode", "kda_verify"}};
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

// One op of a backend. `workspace` throws Error(Unsupported) where there is no kernel and otherwise returns the bytes of
// scratch; `run` computes and returns the name of the path taken, such as "cpu/avx512".
template <class Params>
struct OpEntry {
    uint64_t (*workspace)(const Params &) = nullptr;
    const char *(*run)(const Params &) = nullptr;
};

struct Backend {
    OpEntry<DeltaParams> gdn_fwd, kda_fwd, gdn_decode, kda_decode, gdn_verify, kda_verify;
    OpEntry<CommitParams> delta_commit;
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
