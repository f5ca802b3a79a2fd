// Instances of delta_decode_kernel and delta_decode_few_kernel for KDA.
#include "delta_decode.cuh"
#include "delta_decode_few.cuh"

namespace linattn::cuda {

void launch_kda_decode(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    bool few = p.N * p.HV * (p.V / 32) <= multiprocessors;  // an SM for each slice of 32 columns
    if (p.K == 128)
        few ? delta_decode_few::launch_for<128, true>(p) : delta_decode::launch_for<128, true>(p, multiprocessors);
    else
        few ? delta_decode_few::launch_for<64, true>(p) : delta_decode::launch_for<64, true>(p, multiprocessors);
}

}  // namespace linattn::cuda
