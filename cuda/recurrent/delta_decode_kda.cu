// Decode and verify for KDA.
#include "decode_launch.cuh"

namespace linattn::cuda {

void launch_kda_decode(const DeltaParams &p, int multiprocessors) { launch_decode<true>(p, multiprocessors); }

}  // namespace linattn::cuda
