// The chunked backward of GDN on a GPU.
#pragma once
#include "ops.h"

namespace linattn::cuda {

bool gdn_bwd_chunked_fits(const BwdParams &p);
uint64_t gdn_bwd_chunked_workspace(const BwdParams &p, int multiprocessors);
void launch_gdn_bwd_chunked(const BwdParams &p, int multiprocessors);

// The forward that saves what that backward would compute again, in the same chunks. Bytes saved depend on sizes alone.
uint64_t gdn_saved_bytes(const DeltaParams &p);
bool gdn_fwd_saving_fits(const DeltaParams &p);
uint64_t gdn_fwd_saving_workspace(const DeltaParams &p, int multiprocessors);
void launch_gdn_fwd_saving(const DeltaParams &p, int multiprocessors);

}  // namespace linattn::cuda
