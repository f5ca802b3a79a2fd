// The CPU backend's table: which op there is, for what sizes, and under which name it runs.
#include "../error.h"
#include "bwd.h"
#include "delta.h"
#include "kernels.h"
#include "schedule.h"

namespace linattn::cpu {
namespace {

const char *path() {
    switch (detect_isa()) {
        case Isa::Avx512: return "cpu/avx512";
        case Isa::Avx2: return "cpu/avx2";
        default: return "cpu/baseline";
    }
}

// save = "states" is the states after every 64 tokens, as checkpoints.
DeltaParams with_saved(const DeltaParams &p) {
    DeltaParams with = p;
    if (p.saved) with.checkpoints = saved_states(p), with.checkpoint_every = kChunk, with.C = saved_rows(p);
    return with;
}

const char *run(const DeltaParams &given) {
    const char *name = path();
    const DeltaParams p = with_saved(given);
    if (p.q.dtype == DType::F64)
        run_delta<double>(p);
    else
        run_delta<float>(p);
    return name;
}

void check_head(const char *op, int64_t K, int64_t V) {
    if (K < 1 || K > kMaxHead || V < 1 || V > kMaxHead)
        fail(Status::Unsupported, "%s: no CPU kernel for K = %lld, V = %lld; 1 to %d are supported", op,
             static_cast<long long>(K), static_cast<long long>(V), static_cast<int>(kMaxHead));
}

// The scratch depends on the number of threads and is the call's own, so none is asked of the caller.
uint64_t delta_workspace(const DeltaParams &p) {
    check_head(op_name(p), p.K, p.V);
    return 0;
}

uint64_t delta_saved(const DeltaParams &p) {
    check_head(op_name(p), p.K, p.V);
    return saved_rows(p) * p.HV * p.K * p.V * dtype_bytes(saved_states(p).dtype);
}

uint64_t commit_workspace(const CommitParams &p) {
    check_head("delta_commit", p.K, p.V);
    return 0;
}

uint64_t merge_workspace(const MergeParams &p) {
    check_head("segment_merge", p.K, p.V);
    return 0;
}

// bwd and segment take what the recurrence takes.
template <class Params>
uint64_t recurrence_workspace(const Params &p) {
    return delta_workspace(p);
}

// Double where the first array is, else float.
template <class Params>
const char *run_as(void (*in_float)(const Params &), void (*in_double)(const Params &), DType dtype, const Params &p) {
    const char *name = path();
    (dtype == DType::F64 ? in_double : in_float)(p);
    return name;
}

}  // namespace

const char *gdn_fwd(const DeltaParams &p) { return run(p); }
const char *kda_fwd(const DeltaParams &p) { return run(p); }
const char *gdn_decode(const DeltaParams &p) { return run(p); }
const char *kda_decode(const DeltaParams &p) { return run(p); }
const char *gdn_verify(const DeltaParams &p) { return run(p); }
const char *kda_verify(const DeltaParams &p) { return run(p); }

const char *delta_commit(const CommitParams &p) {
    const char *name = path();
    if (p.k.dtype == DType::F64)
        run_commit<double>(p);
    else
        run_commit<float>(p);
    return name;
}

const char *gdn_bwd(const BwdParams &p) { return run_as(run_bwd<float>, run_bwd<double>, p.q.dtype, p); }
const char *kda_bwd(const BwdParams &p) { return gdn_bwd(p); }
const char *gdn_segment(const SegmentParams &p) { return run_as(run_segment<float>, run_segment<double>, p.q.dtype, p); }
const char *kda_segment(const SegmentParams &p) { return gdn_segment(p); }
const char *segment_merge(const MergeParams &p) { return run_as(run_merge<float>, run_merge<double>, p.M.dtype, p); }

const Backend &backend() {
    static constexpr Backend table = {
        {delta_workspace, gdn_fwd, delta_saved},
        {delta_workspace, kda_fwd, delta_saved},
        {delta_workspace, gdn_decode},
        {delta_workspace, kda_decode},
        {delta_workspace, gdn_verify},
        {delta_workspace, kda_verify},
        {commit_workspace, delta_commit},
        {recurrence_workspace<BwdParams>, gdn_bwd},
        {recurrence_workspace<BwdParams>, kda_bwd},
        {recurrence_workspace<SegmentParams>, gdn_segment},
        {recurrence_workspace<SegmentParams>, kda_segment},
        {merge_workspace, segment_merge},
    };
    return table;
}

}  // namespace linattn::cpu
