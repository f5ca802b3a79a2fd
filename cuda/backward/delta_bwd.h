// Launchers of the gradients and of the affine maps on a GPU, and what their kernels pass to each other.
#pragma once
#include "ops.h"

namespace linattn::cuda {

constexpr int kBwdChunk = 64;  // tokens between two stored states

// Everything in float, rows of tokens dense: row = b T + t.
struct BwdWorkspace {
    int *chunk_start;       // [N + 1], chunks of the sequences before
    float *q, *k;           // [B T][H][K], normalised
    float *decay;           // [B T][HV] GDN, [B T][HV][K] KDA: exp of the log decay
    float *beta;            // [B T][HV]
    float *e, *du;          // [B T][HV][V]; e = v - P^T k, du = D^T k
    float *states, *grads;  // [chunks][HV][V][K]: S before the chunk, D after it
    float *dq, *dk;         // [B T][HV][K], before they are summed over the value heads of a key head
    float *dA, *dbias;      // [chunks][HV], [chunks][HV][channels]: sums over a chunk
    int64_t chunks;         // at most
    // What the chunked kernels leave to these: [N][HV], and whether there is any. Null: everything is theirs. Chunks' states of
    // the chunked kernels lie where those of the same chunk and head would.
    int *flags;
};

constexpr int64_t kFlaggedGrid = 1056;  // CTAs of a launch that mostly has nothing to do

struct BwdCall {
    BwdParams p;
    BwdWorkspace w;
    Tensor transition, added;  // segments only, as in SegmentParams
    int64_t cleared;           // words from w.flags on that the plan sets to 0, or to these
    const int *kept;           // may be null
};

// Of all sequences, at most: what is allotted.
inline int64_t most_bwd_chunks(const DeltaParams &p) {
    return p.cu_seqlens ? p.T / kBwdChunk + p.N : p.B * ((p.T + kBwdChunk - 1) / kBwdChunk);
}

uint64_t delta_bwd_workspace_bytes(const BwdParams &p);
void launch_delta_bwd(const BwdParams &p);
uint64_t delta_segment_workspace_bytes(const SegmentParams &p);
void launch_delta_segment(const SegmentParams &p);
void launch_segment_merge(const MergeParams &p);

// Cuts the workspace; returns the bytes that it takes. `base` may be null.
uint64_t cut_delta_bwd_workspace(const BwdParams &p, char *base, BwdWorkspace &w);

// The passes of launch_delta_bwd, in order (delta_bwd.cu).
void launch_delta_bwd_plan(const BwdCall &call);     // chunk_start
void launch_delta_bwd_prepare(const BwdCall &call);  // q, k, decay, beta
void launch_delta_bwd_scans(const BwdCall &call);    // e, states; du, grads, dv, d_initial_state
void launch_delta_bwd_chunks(const BwdCall &call);   // dq, dk, dg, dbeta, dA, dbias
void launch_delta_bwd_sums(const BwdCall &call);     // dA_log, ddt_bias from dA, dbias
void launch_delta_segment_scan(const BwdCall &call, bool backward);

}  // namespace linattn::cuda
