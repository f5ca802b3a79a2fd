// With save = "states", in place of gdn_bwd_prepare_kernel: what the units of do and D follow from (gdn_bwd_units.cuh), as that kernel
// notes it. A warp per chunk and value head.
#include "common/launch.h"
#include "gdn_bwd.cuh"

namespace linattn::cuda::gdn_bwd {

constexpr int kUnitsThreads = 128;

template <class C>
__global__ void __launch_bounds__(kUnitsThreads) gdn_bwd_units_kernel(const __grid_constant__ Call call) {
    const BwdParams &p = call.p();
    const int64_t index = int64_t{blockIdx.x} * (kUnitsThreads / 32) + threadIdx.x / 32;
    delta_bwd::after_those_before();
    if (index >= call.chunks() * p.HV) return;
    const Chunk c = delta_bwd::find_chunk(p, call.exact.w.chunk_start, index / p.HV, index % p.HV);
    Largest &to = call.largest_of(c.n, c.key_head);
    const float largest = largest_of_rows<typename C::T, C::D>(p.d_o, c);
    note(&to.d_o, call.factors[call.of_value(c.index, c.head)].queries * largest);
    if (p.d_final_state && c.index + 1 == call.exact.w.chunk_start[c.n + 1])
        note(&to.grad, largest_of_state<C::D>(p.d_final_state, c.n, c.head));
}

void launch_units(const Call &call) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        LaunchConfig launch_config;
        constexpr int kWarps = kUnitsThreads / 32;
        launch_config.grid.x = (call.exact.w.chunks * call.exact.p.HV + kWarps - 1) / kWarps;
        launch_config.block.x = kUnitsThreads;
        launch_config.stream = static_cast<cudaStream_t>(call.exact.p.stream);
        launch_config.programmatic = true;
        launch("gdn_bwd_units_kernel", gdn_bwd_units_kernel<C>, launch_config, call);
    });
}

}  // namespace linattn::cuda::gdn_bwd
