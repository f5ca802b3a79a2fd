#include "kda_fwd.cuh"

namespace linattn::cuda::kda {

template void launch_slab<__nv_bfloat16, 64>(const KernelParams &, const TensorMaps &, int64_t, int);
template void launch_slab<__half, 64>(const KernelParams &, const TensorMaps &, int64_t, int);

}  // namespace linattn::cuda::kda
