#include "gdn_fwd.cuh"

namespace linattn::cuda::gdn {

template void launch_fwd<Config<__nv_bfloat16, 64, 64, false, Pass::Transition>>(const KernelParams &, const TensorMaps &, int);
template void launch_fwd<Config<__nv_bfloat16, 64, 64, true, Pass::Transition>>(const KernelParams &, const TensorMaps &, int);
template void launch_fwd<Config<__half, 64, 64, false, Pass::Transition>>(const KernelParams &, const TensorMaps &, int);
template void launch_fwd<Config<__half, 64, 64, true, Pass::Transition>>(const KernelParams &, const TensorMaps &, int);

}  // namespace linattn::cuda::gdn
