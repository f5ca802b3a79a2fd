// Instances of delta_decode_kernel (delta_decode.cuh) for KDA.
#include "delta_decode.cuh"

namespace linattn::cuda {

void launch_kda_decode(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    p.K == 128 ? delta_decode::launch_for<128, true>(p, multiprocessors)
               : delta_decode::launch_for<64, true>(p, multiprocessors);
}

}  // namespace linattn::cuda
