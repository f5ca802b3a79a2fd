#include "gdn_fwd.cuh"

namespace linattn::cuda::gdn {

template void launch_prepare<Config<__nv_bfloat16, 128, 64, false, Pass::Outputs>>(const KernelParams &, const TensorMaps &,
                                                                                   int64_t);
template void launch_prepare<Config<__nv_bfloat16, 128, 64, true, Pass::Outputs>>(const KernelParams &, const TensorMaps &,
                                                                                  int64_t);
template void launch_prepare<Config<__half, 128, 64, false, Pass::Outputs>>(const KernelParams &, const TensorMaps &, int64_t);
template void launch_prepare<Config<__half, 128, 64, true, Pass::Outputs>>(const KernelParams &, const TensorMaps &, int64_t);
template void launch_fwd<Config<__nv_bfloat16, 128, 64, false, Pass::Outputs, true>>(const KernelParams &, const TensorMaps &,
                                                                                     int);
template void launch_fwd<Config<__nv_bfloat16, 128, 128, false, Pass::Transition, true>>(const KernelParams &,
                                                                                         const TensorMaps &, int);
template void launch_fwd<Config<__half, 128, 64, false, Pass::Outputs, true>>(const KernelParams &, const TensorMaps &, int);
template void launch_fwd<Config<__half, 128, 128, false, Pass::Transition, true>>(const KernelParams &, const TensorMaps &,
                                                                                  int);

}  // namespace linattn::cuda::gdn
