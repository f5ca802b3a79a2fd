// Instances of delta_decode_kernel and delta_decode_few_kernel for GDN.
#include "delta_decode.cuh"
#include "delta_decode_few.cuh"

namespace linattn::cuda {

void launch_gdn_decode(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    bool few = p.N * p.HV * (p.V / 32) <= multiprocessors;  // an SM for each slice of 32 columns
    if (p.K == 128)
        few ? delta_decode_few::launch_for<128, false>(p) : delta_decode::launch_for<128, false>(p, multiprocessors);
    else
        few ? delta_decode_few::launch_for<64, false>(p) : delta_decode::launch_for<64, false>(p, multiprocessors);
}

}  // namespace linattn::cuda
