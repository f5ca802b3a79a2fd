// The chunked backward of GDN on a GPU.
#pragma once
#include "ops.h"

namespace linattn::cuda {

bool gdn_bwd_chunked_fits(const BwdParams &p);
uint64_t gdn_bwd_chunked_workspace(const BwdParams &p, int multiprocessors);
void launch_gdn_bwd_chunked(const BwdParams &p, int multiprocessors);

}  // namespace linattn::cuda
