// Shared memory of kda_fwd_scan_kernel.
#pragma once
#include "plan.cuh"

namespace linattn::cuda::kda {

// Chunks in flight. With D = 64 two CTAs share an SM.
template <int D>
constexpr int kStages = D == 128 ? 4 : 3;

// kGroups: state warpgroups, 64 columns of V each.
template <int D, int kGroups>
struct alignas(1024) ScanSmem {
    Plan plan;  // of whole sequences; in front: there it is for any kGroups
    Operands<D> operands[kStages<D>];
    uint8_t v[kStages<D>][kGroups * Tile<D>::kPanelStrideBytes];
    uint8_t o[4 * kGroups][kChunk * 32];  // of each state warp, 16 columns
    Item item[4 * kGroups + 1];           // of each state warp and the one that loads
    uint64_t barriers[2 * kStages<D>];

    // A warp's item of a round over the grid, of which there is one where sequences are cut; false: no more. By a converged warp.
    __device__ __forceinline__ bool next(Item &to, const KernelParams &params, Pass pass, uint32_t round) const {
        if (pass == Pass::Whole)
            plan.find(to, params, D / 64 / kGroups, round);
        else if (round == 0)
            load_item(to, params, pass);
        else
            return false;
        return to.exists;
    }

    __device__ Ring<kStages<D>> ring() { return {ptx::shared_address(barriers)}; }
};

}  // namespace linattn::cuda::kda
