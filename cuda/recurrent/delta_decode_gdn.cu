// Instances of delta_decode_kernel (delta_decode.cuh) for GDN.
#include "delta_decode.cuh"

namespace linattn::cuda {

void launch_gdn_decode(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    p.K == 128 ? delta_decode::launch_for<128, false>(p, multiprocessors)
               : delta_decode::launch_for<64, false>(p, multiprocessors);
}

}  // namespace linattn::cuda
