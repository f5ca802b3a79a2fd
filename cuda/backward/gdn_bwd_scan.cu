// Second kernel of the chunked GDN backward: S from the first chunk to the last and its gradient D from the last to the first, side
// by side, since neither needs the other. Per chunk, with tokens in rows, factors of rows (beta, fade, write, ...), and solve = -X
// and pairs from gdn_bwd_prepare.cu, v and do in the units of gdn_bwd.cuh:
//
//   forward   r = v + fade k S;               e = r + solve (beta r);       S = 2^G_last S + k^T (write e)
//   reverse   z = pairs^T do + left k D;      dr = z + solve^T (beta z);    D = rise 2^G_last D + q^T (query do) + k^T (erase dr)
//
// One CTA per sequence, value head, 64 columns of V and direction, or per item of a cut (gdn_bwd_cut.cuh); the two halves of V are a cluster, whose CTAs each load half of
// what both need. A warpgroup holds the transposed state, V x K, in fp32 accumulators; packed to 16 bits it is the left operand of
// the product that needs it, and what goes to memory. Transposed, r, e, z and dr come out as the left operands of what follows, so
// nothing of the chain passes through shared memory. Per chunk three products depend on each other; those with do are issued ahead.
//
// Roles: warps 0 to 3 compute; warp 4 loads, three stages; warp 5 stores; warps 6 and 7 make operands of v or do where they lie.
// Nothing but the chain is left to the computing warps, one to a scheduler.
// Shared memory at D = 128: 3 x 58 KB, e and the state on their way out 2 x 24 KB: one CTA an SM. Registers: state 64, packed 32, dr 32,
// y 32, do 32.
#include "gdn_bwd_scan.cuh"

namespace linattn::cuda::gdn_bwd {

template <class C>
__global__ void __launch_bounds__(kScanThreads, 1)
    gdn_bwd_scan_kernel(const __grid_constant__ Call call, const ScanItem *items) {
    scan_cta<C, false>(call, items);
}

void launch_scan(const Call &call, ScanItem *items) {
    for_config(call.exact.p, [&](auto config) {
        using C = decltype(config);
        launch("gdn_bwd_scan_kernel", gdn_bwd_scan_kernel<C>, scan_config<C>(call, items), call, items);
    });
}

}  // namespace linattn::cuda::gdn_bwd
