#include "kda_fwd.cuh"

namespace linattn::cuda::kda {

template void launch_slab<__half, 128>(const KernelParams &, const TensorMaps &, int64_t, int);

}  // namespace linattn::cuda::kda
