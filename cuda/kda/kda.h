// The chunked forward of Kimi delta attention.
#pragma once
#include "ops.h"

namespace linattn::cuda {

// Is there a chunked kernel for this call? K = V = 128, or 64 with l2norm and sigmoid inside; bf16 or fp16 inputs that TMA can
// address, g included. What is not taken runs token by token.
bool kda_chunked_fits(const DeltaParams &p);
// Bytes of workspace that launch_kda_fwd_chunked needs; depends on shapes and the number of multiprocessors only.
uint64_t kda_fwd_chunked_workspace(const DeltaParams &p, int multiprocessors);
void launch_kda_fwd_chunked(const DeltaParams &p, int multiprocessors);

}  // namespace linattn::cuda
