// Which kernel and shape a call of decode or verify takes. All give the same bits; measured times decide (docs/recurrent.md).
#pragma once
#include "common/device_guard.h"
#include "delta_decode.cuh"
#include "delta_stream.cuh"

namespace linattn::cuda {

template <int D, bool kKda, class State, bool kVFirst, bool kVerify>
void launch_decode_layout(const DeltaParams &p, int multiprocessors) {
    using namespace delta_decode;
    using Few = delta_decode::Config<D, kKda, State, kVFirst, kVerify, 32, 2>;
    using Half = delta_decode::Config<D, kKda, State, kVFirst, kVerify, 64, 4>;
    using Whole = delta_decode::Config<D, kKda, State, kVFirst, true, D, 4>;
    if (p.N * p.HV * Few::kSlices <= multiprocessors) return launch_config<Few>(p);  // an SM for each slice of 32 columns
    if constexpr (kVerify) {
        p.T > Half::kBlock ? launch_config<Whole>(p) : launch_config<Half>(p);
    } else {
        delta_stream::launch_config<delta_stream::Config<D, kKda, State, kVFirst>>(p, multiprocessors);
    }
}

template <bool kKda>
void launch_decode(const DeltaParams &p, int multiprocessors) {
    using Launcher = void (*)(const DeltaParams &, int);
    static constexpr Launcher launchers[2][2][2][2] = {// [K = 128][bf16][V-first][verify]
#define LAYOUT(D, State)                                                                                           \
    {                                                                                                              \
        {launch_decode_layout<D, kKda, State, false, false>, launch_decode_layout<D, kKda, State, false, true>}, { \
            launch_decode_layout<D, kKda, State, true, false>, launch_decode_layout<D, kKda, State, true, true>    \
        }                                                                                                          \
    }
                                                       {LAYOUT(64, float), LAYOUT(64, __nv_bfloat16)},
                                                       {LAYOUT(128, float), LAYOUT(128, __nv_bfloat16)}};
#undef LAYOUT
    DeviceGuard guard(p.device);
    launchers[p.K == 128][p.state_in.dtype == DType::BF16][p.state_in.stride[2] == 1][p.op == Op::Verify](p, multiprocessors);
}

}  // namespace linattn::cuda
