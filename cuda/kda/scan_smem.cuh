// Shared memory of kda_fwd_scan_kernel.
#pragma once
#include "plan.cuh"

namespace linattn::cuda::kda {

constexpr int kStages = 4;  // chunks in flight

// kGroups: state warpgroups, 64 columns of V each.
template <int kGroups>
struct alignas(1024) ScanSmem {
    Operands operands[kStages];
    uint8_t v[kStages][kGroups * Tile::kPanelStrideBytes];
    uint8_t o[4 * kGroups][kChunk * 32];  // of each state warp, 16 columns
    Item item[4 * kGroups + 1];           // of each state warp and the one that loads
    Plan plan;
    uint64_t barriers[2 * kStages];

    __device__ Ring<kStages> ring() { return {ptx::shared_address(barriers)}; }
};

}  // namespace linattn::cuda::kda
