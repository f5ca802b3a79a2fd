// Verify for its outputs alone, for KDA.
#include "delta_verify.cuh"

namespace linattn::cuda {

bool kda_verify_outputs(const DeltaParams &p, int multiprocessors) {
    if (!delta_verify::fits(p)) return false;
    delta_verify::launch_verify<true>(p, multiprocessors);
    return true;
}

}  // namespace linattn::cuda
