// The chunked forward of the gated delta rule.
#pragma once
#include "ops.h"

namespace linattn::cuda {

// Is there a chunked kernel for this call? bf16 or fp16 inputs that TMA can address; what is not taken runs token by token.
bool gdn_chunked_fits(const DeltaParams &p);
// Bytes of workspace that launch_gdn_fwd_chunked needs; depends on shapes and options only.
uint64_t gdn_fwd_chunked_workspace(const DeltaParams &p, int multiprocessors);
void launch_gdn_fwd_chunked(const DeltaParams &p, int multiprocessors);

}  // namespace linattn::cuda
