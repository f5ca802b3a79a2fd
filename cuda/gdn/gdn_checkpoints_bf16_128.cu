#include "gdn_fwd.cuh"

namespace linattn::cuda::gdn {

template void launch_fwd<Config<__nv_bfloat16, 128, 128, false, Pass::Either, false, true>>(const KernelParams &,
                                                                                            const TensorMaps &, int);
template void launch_fwd<Config<__nv_bfloat16, 128, 128, true, Pass::Either, false, true>>(const KernelParams &,
                                                                                           const TensorMaps &, int);
template void launch_fwd<Config<__nv_bfloat16, 128, 64, false, Pass::Either, false, true>>(const KernelParams &,
                                                                                           const TensorMaps &, int);
template void launch_fwd<Config<__nv_bfloat16, 128, 64, true, Pass::Either, false, true>>(const KernelParams &,
                                                                                          const TensorMaps &, int);
template void launch_fwd<Config<__nv_bfloat16, 128, 64, false, Pass::Outputs, true, true>>(const KernelParams &,
                                                                                           const TensorMaps &, int);

}  // namespace linattn::cuda::gdn
