// Decode and verify for GDN.
#include "decode_launch.cuh"

namespace linattn::cuda {

void launch_gdn_decode(const DeltaParams &p, int multiprocessors) { launch_decode<false>(p, multiprocessors); }

}  // namespace linattn::cuda
