// Verify for its outputs alone, for GDN.
#include "delta_verify.cuh"

namespace linattn::cuda {

bool gdn_verify_outputs(const DeltaParams &p, int multiprocessors) {
    if (!delta_verify::fits(p)) return false;
    delta_verify::launch_verify<false>(p, multiprocessors);
    return true;
}

}  // namespace linattn::cuda
