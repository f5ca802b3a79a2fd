// Which kernel a call of decode or verify runs on. All give the same bits; measured times decide (docs/recurrent.md).
#pragma once
#include <type_traits>

#include "common/device_guard.h"
#include "delta_decode.cuh"
#include "delta_decode_direct.cuh"
#include "delta_decode_few.cuh"
#include "delta_decode_one.cuh"

namespace linattn::cuda {

// One token per sequence; false where another kernel takes the call. Few states: two CTAs of 32 columns on an SM at most; GDN: or
// four, which 72 registers allow and KDA's four warps of gates do not. More: as many CTAs on an SM as registers allow without
// spills; of K = 64 not measured, so left where it was.
template <int D, bool kKda, class State, bool kVFirst>
bool launch_decode_one(const DeltaParams &p, int multiprocessors) {
    using Few = delta_decode_one::Config<D, kKda, State, kVFirst, 2, 32, 2, true>;
    if (!delta_decode_one::fits(p)) return false;
    if (p.N * p.HV * Few::kSlices <= 2 * multiprocessors) {
        delta_decode_one::launch_config<Few>(p, multiprocessors);
        return true;
    }
    if constexpr (D == 128 && !kKda) {
        using Wave = delta_decode_one::Config<D, kKda, State, kVFirst, 2, 32, 4, true>;
        if (p.N * p.HV * Wave::kSlices <= 4 * multiprocessors) {
            delta_decode_one::launch_config<Wave>(p, multiprocessors);
            return true;
        }
    }
    if constexpr (D == 128) {
        using KFirst = delta_decode_one::Config<D, kKda, State, false, 2, 64, 4, false>;
        using VFirst = delta_decode_one::Config<D, kKda, State, true, 2, 32, sizeof(State) == 4 ? 7 : 8, false>;
        delta_decode_one::launch_config<std::conditional_t<kVFirst, VFirst, KFirst>>(p, multiprocessors);
        return true;
    }
    return false;
}

template <int D, bool kKda, class State, bool kVFirst, bool kVerify>
void launch_decode_layout(const DeltaParams &p, int multiprocessors) {
    using Half = delta_decode_direct::Config<D, kKda, State, kVFirst, kVerify, 64>;
    using Whole = delta_decode_direct::Config<D, kKda, State, kVFirst, kVerify, D>;
    using Few = delta_decode_few::Config<D, kKda, State, kVFirst>;
    if constexpr (!kVerify)
        if (launch_decode_one<D, kKda, State, kVFirst>(p, multiprocessors)) return;
    if (p.N * p.HV * Few::kSlices <= multiprocessors) {  // an SM for each slice of 32 columns
        if constexpr (!kVerify)
            if (p.T <= Half::kTokens) return delta_decode_direct::launch_config<Half>(p);
        return delta_decode_few::launch_config<Few>(p);
    }
    if constexpr (kVerify)
        if (p.T > 8 && p.N <= 65535)  // sequences are the y of its grid
            return delta_decode_direct::launch_config<std::conditional_t<kKda || kVFirst, Whole, Half>>(p);
    delta_decode::launch_config<delta_decode::Config<D, kKda, State, kVFirst, !kVerify>>(p, multiprocessors);
}

template <int D, bool kKda, class State>
void launch_decode_state(const DeltaParams &p, int multiprocessors) {
    bool v_first = p.state_in.stride[2] == 1;
    if (p.op == Op::Verify)
        v_first ? launch_decode_layout<D, kKda, State, true, true>(p, multiprocessors)
                : launch_decode_layout<D, kKda, State, false, true>(p, multiprocessors);
    else
        v_first ? launch_decode_layout<D, kKda, State, true, false>(p, multiprocessors)
                : launch_decode_layout<D, kKda, State, false, false>(p, multiprocessors);
}

template <int D, bool kKda>
void launch_decode_size(const DeltaParams &p, int multiprocessors) {
    p.state_in.dtype == DType::F32 ? launch_decode_state<D, kKda, float>(p, multiprocessors)
                                   : launch_decode_state<D, kKda, __nv_bfloat16>(p, multiprocessors);
}

template <bool kKda>
void launch_decode(const DeltaParams &p, int multiprocessors) {
    DeviceGuard guard(p.device);
    p.K == 128 ? launch_decode_size<128, kKda>(p, multiprocessors) : launch_decode_size<64, kKda>(p, multiprocessors);
}

}  // namespace linattn::cuda
