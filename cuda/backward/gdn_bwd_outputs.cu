// The forward with save = "states": the scan of gdn_bwd_scan.cu forwards, with outputs (kOutputs in gdn_bwd_scan.cuh), so that S and e,
// which the backward wants, come from the one walk that the forward is. Per chunk two products more than there, q S beside k S and
// P (beta e) before the state's: they wait for nothing that the chain does not wait for.
// Shared memory and registers as in the reverse direction of that scan; o leaves from where v was.
#include "gdn_bwd_scan.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C>
__global__ void __launch_bounds__(kScanThreads, 1)
    gdn_bwd_outputs_kernel(const __grid_constant__ Call call, const ScanItem *items) {
    scan_cta<C, true>(call, items);
}

void launch_outputs(const Call &call, ScanItem *items) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        launch("gdn_bwd_outputs_kernel", gdn_bwd_outputs_kernel<C>, scan_config<C>(call, items), call, items);
    });
}

}  // namespace linattn::cuda::gdn_bwd
