// The CUDA backend: which kernel runs an op, and what has none.
#include "backward/delta_bwd.h"
#include "backward/gdn_bwd.h"
#include "device.h"
#include "error.h"
#include "gdn/gdn.h"
#include "kda/kda.h"
#include "ops.h"
#include "recurrent/recurrent.h"

namespace linattn::cuda {
namespace {

void require_heads(const char *op, int64_t K, int64_t V) {
    if (K != V || (K != 64 && K != 128))
        fail(Status::Unsupported, "%s: no GPU kernel for K = %lld, V = %lld; K = V = 64 and 128 are supported", op,
             static_cast<long long>(K), static_cast<long long>(V));
}

void require_not_f64(const char *op, const char *name, const Tensor &t) {
    if (t.dtype == DType::F64) fail(Status::Unsupported, "%s: %s in f64 runs on the CPU only; use f32 or bf16", op, name);
}

}  // namespace

// What no kernel takes, of any op.
static void require_supported(const DeltaParams &p) {
    const char *op = op_name(p);
    require_heads(op, p.K, p.V);
    if (p.q.dtype != DType::BF16 && p.q.dtype != DType::F16)
        fail(Status::Unsupported, "%s: q, k and v in f32 or f64 run on the CPU only; use bf16 or f16", op);
    require_not_f64(op, "g", p.g);
    require_not_f64(op, "beta", p.beta);
    require_not_f64(op, "A_log", p.A_log);
    require_not_f64(op, "dt_bias", p.dt_bias);
    require_not_f64(op, "the state read", p.state_in);
    require_not_f64(op, "the state written", p.state_out);
    require_not_f64(op, "checkpoints", p.checkpoints);
    require_not_f64(op, "kept_k", p.kept_k);
    require_not_f64(op, "kept_u", p.kept_u);
    require_not_f64(op, "kept_g", p.kept_g);
    if (p.T > INT32_MAX)
        fail(Status::Unsupported, "%s: T is %lld; below 2^31 tokens are supported", op, static_cast<long long>(p.T));
    require_hopper(op, p.device);
}

// Token by token, every option; needs no workspace.
static uint64_t recurrent_workspace(const DeltaParams &p) {
    require_supported(p);
    return 0;
}

static const char *recurrent(const DeltaParams &p) {
    launch_delta_recurrent(p);
    return "cuda/recurrent";
}

// delta_decode_kernel takes states that are contiguous in their pool, and no trees or states after every token.
static bool fits_decode(const DeltaParams &p) {
    if (p.op == Op::Verify && (p.parents || p.write_indices)) return false;
    const int64_t *stride = p.state_in.stride;
    bool contiguous = (stride[3] == 1 && stride[2] == p.V) || (stride[2] == 1 && stride[3] == p.K);
    return contiguous && p.N * p.HV <= INT32_MAX / 4;  // tiles are counted in 32 bits, up to four a state
}

const char *gdn_decode(const DeltaParams &p) {
    if (!fits_decode(p)) return recurrent(p);
    launch_gdn_decode(p, multiprocessors(p.device));
    return "cuda/decode";
}
const char *kda_decode(const DeltaParams &p) {
    if (!fits_decode(p)) return recurrent(p);
    launch_kda_decode(p, multiprocessors(p.device));
    return "cuda/decode";
}

// A forward over so few tokens, from states to states of one layout, is a decode call that writes elsewhere: exact, and without a
// chunk's fixed costs. Not of packed sequences, whose bits must not depend on how long the others are, nor at splits = 1, where
// a sequence has the same bits packed and alone.
static bool decodes(const DeltaParams &p) {
    constexpr int64_t kFewTokens = 4;
    const Tensor &in = p.state_in, &out = p.state_out;
    return p.T >= 1 && p.T <= kFewTokens && p.splits != 1 && !p.cu_seqlens && !p.checkpoints && in && out &&
           in.dtype == out.dtype && in.stride[2] == out.stride[2] && in.stride[3] == out.stride[3] && fits_decode(p);
}

static uint64_t gdn_saved(const DeltaParams &p) {
    require_supported(p);
    return gdn_saved_bytes(p);
}

// In chunks wherever TMA can address the inputs, token by token elsewhere.
static uint64_t gdn_fwd_workspace(const DeltaParams &p) {
    const uint64_t bytes = recurrent_workspace(p);
    if (p.saved) {
        if (!gdn_fwd_saving_fits(p))
            fail(Status::Unsupported, "gdn_fwd: save \"states\" needs q, k, v and o whose strides are multiples of 8 elements");
        return gdn_fwd_saving_workspace(p, multiprocessors(p.device));
    }
    return !decodes(p) && gdn_chunked_fits(p) ? gdn_fwd_chunked_workspace(p, multiprocessors(p.device)) : bytes;
}

const char *gdn_fwd(const DeltaParams &p) {
    if (p.saved) {
        launch_gdn_fwd_saving(p, multiprocessors(p.device));
        return "cuda/chunked";
    }
    if (decodes(p)) return gdn_decode(p);
    if (!gdn_chunked_fits(p)) return recurrent(p);
    launch_gdn_fwd_chunked(p, multiprocessors(p.device));
    return "cuda/chunked";
}

static uint64_t kda_fwd_workspace(const DeltaParams &p) {
    const uint64_t bytes = recurrent_workspace(p);
    return !decodes(p) && kda_chunked_fits(p) ? kda_fwd_chunked_workspace(p, multiprocessors(p.device)) : bytes;
}
const char *kda_fwd(const DeltaParams &p) {
    if (decodes(p)) return kda_decode(p);
    if (!kda_chunked_fits(p)) return recurrent(p);
    launch_kda_fwd_chunked(p, multiprocessors(p.device));
    return "cuda/chunked";
}

const char *gdn_verify(const DeltaParams &p) {
    return fits_decode(p) && gdn_verify_outputs(p, multiprocessors(p.device)) ? "cuda/decode" : gdn_decode(p);
}
const char *kda_verify(const DeltaParams &p) {
    return fits_decode(p) && kda_verify_outputs(p, multiprocessors(p.device)) ? "cuda/decode" : kda_decode(p);
}

static uint64_t delta_commit_workspace(const CommitParams &p) {
    require_heads("delta_commit", p.K, p.V);
    require_not_f64("delta_commit", "k", p.k);
    require_not_f64("delta_commit", "state", p.state);
    require_hopper("delta_commit", p.device);
    return 0;
}

const char *delta_commit(const CommitParams &p) {
    launch_delta_commit(p);
    return "cuda/recurrent";
}

static uint64_t delta_bwd_workspace(const BwdParams &p) {
    require_supported(p);
    require_not_f64(op_name(p), "d_final_state", p.d_final_state);
    require_not_f64(op_name(p), "d_initial_state", p.d_initial_state);
    require_not_f64(op_name(p), "dA_log", p.dA_log);
    require_not_f64(op_name(p), "ddt_bias", p.ddt_bias);
    return delta_bwd_workspace_bytes(p);
}

// In chunks wherever rows can be copied 16 bytes at a time, token by token elsewhere.
static uint64_t gdn_bwd_workspace(const BwdParams &p) {
    const uint64_t bytes = delta_bwd_workspace(p);
    return gdn_bwd_chunked_fits(p) ? gdn_bwd_chunked_workspace(p, multiprocessors(p.device)) : bytes;
}

static const char *delta_bwd(const BwdParams &p) {
    launch_delta_bwd(p);
    return "cuda/recurrent";
}
const char *gdn_bwd(const BwdParams &p) {
    if (!gdn_bwd_chunked_fits(p)) return delta_bwd(p);
    launch_gdn_bwd_chunked(p, multiprocessors(p.device));
    return "cuda/chunked";
}
const char *kda_bwd(const BwdParams &p) { return delta_bwd(p); }

static uint64_t delta_segment_workspace(const SegmentParams &p) {
    require_supported(p);
    require_not_f64(op_name(p), "M", p.transition);
    require_not_f64(op_name(p), "h", p.added);
    return delta_segment_workspace_bytes(p);
}

static const char *delta_segment(const SegmentParams &p) {
    launch_delta_segment(p);
    return "cuda/recurrent";
}
const char *gdn_segment(const SegmentParams &p) { return delta_segment(p); }
const char *kda_segment(const SegmentParams &p) { return delta_segment(p); }

static uint64_t segment_merge_workspace(const MergeParams &p) {
    require_heads("segment_merge", p.K, p.V);
    require_not_f64("segment_merge", "M", p.M);
    require_not_f64("segment_merge", "initial_state", p.initial_state);
    require_not_f64("segment_merge", "final_state", p.final_state);
    require_hopper("segment_merge", p.device);
    return 0;
}

const char *segment_merge(const MergeParams &p) {
    launch_segment_merge(p);
    return "cuda/recurrent";
}

const Backend &backend() {
    static const Backend table = {{gdn_fwd_workspace, gdn_fwd, gdn_saved}, {kda_fwd_workspace, kda_fwd},
                                  {recurrent_workspace, gdn_decode},       {recurrent_workspace, kda_decode},
                                  {recurrent_workspace, gdn_verify},       {recurrent_workspace, kda_verify},
                                  {delta_commit_workspace, delta_commit},  {gdn_bwd_workspace, gdn_bwd},
                                  {delta_bwd_workspace, kda_bwd},          {delta_segment_workspace, gdn_segment},
                                  {delta_segment_workspace, kda_segment},  {segment_merge_workspace, segment_merge}};
    return table;
}

}  // namespace linattn::cuda
