// Launchers of the recurrent kernels: exact token by token, every option, every length. The oracle of the chunked kernels on
// the GPU, and what decode and verify run on.
#pragma once
#include "ops.h"

namespace linattn::cuda {

constexpr int64_t kMaxGrid = int64_t{1} << 30;  // CTAs in x; the kernels loop over what is beyond

void launch_delta_recurrent(const DeltaParams &p);  // {gdn,kda}_{fwd,decode,verify}
// gdn_fwd of the sequences and heads that are flagged, [N][HV] and whether any is; and the rows that are to be zeroed.
void launch_delta_recurrent_flagged(const DeltaParams &p, const int *flags);
// The same at memory speed, for states that are contiguous in their pool: decode, and verify of a chain that writes no states.
void launch_gdn_decode(const DeltaParams &p, int multiprocessors);
void launch_kda_decode(const DeltaParams &p, int multiprocessors);
// Verify for its outputs alone, as a small chunk: false, and nothing done, where the call is not one for it.
bool gdn_verify_outputs(const DeltaParams &p, int multiprocessors);
bool kda_verify_outputs(const DeltaParams &p, int multiprocessors);
void launch_delta_commit(const CommitParams &p);

}  // namespace linattn::cuda
