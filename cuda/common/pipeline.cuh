// A ring of kStages shared-memory buffers between producers and consumers: one "full" and one "empty" mbarrier per stage.
//   producer: wait_empty(s); arrive_expect_tx(full(s), bytes); copies on full(s); s.advance()
//   consumer: wait_full(s); use the buffer; mbarrier_arrive(empty(s)); s.advance()
// Under multicast each consumer arrives on the empty barrier of every CTA of the cluster (mbarrier_arrive_cluster_release_cta).
// Both sides walk the stages in the same order, each with a RingState of its own that starts at stage 0, phase 0.
#pragma once
#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace linattn::cuda {

// A warp's arrival, after all its lanes are done with what it tells: one lane's, since 32 at one address follow one another.
// compute-sanitizer's racecheck takes what the other lanes did for a race, __syncwarp or not; with LINATTN_EVERY_LANE_ARRIVES
// each lane arrives for itself. Barriers count in kWarpArrivals.
#ifdef LINATTN_EVERY_LANE_ARRIVES
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif

__device__ __forceinline__ void warp_arrive(uint32_t barrier, int lane) {
    __syncwarp();
    if (kWarpArrivals == 32 || lane == 0) ptx::mbarrier_arrive(barrier);
}

// Stage and phase parity of the use that comes next. Plain registers; the phase flips when the ring wraps.
template <int kStages>
struct RingState {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The barriers of a ring by address: kBytes of shared memory at `base`, a multiple of 8.
template <int kStages>
struct Ring {
    static constexpr int kBytes = 2 * kStages * 8;
    uint32_t base;

    __device__ __forceinline__ uint32_t full(int stage) const { return base + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return base + 8 * (kStages + stage); }

    // By one thread, before a CTA barrier (a cluster barrier if other CTAs touch the ring). full_arrivals counts the
    // arrive_expect_tx calls of a fill, empty_arrivals the consumers' arrivals (those of other CTAs included under multicast).
    __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
        for (int i = 0; i < kStages; i++) {
            ptx::mbarrier_init(full(i), full_arrivals);
            ptx::mbarrier_init(empty(i), empty_arrivals);
        }
        ptx::fence_mbarrier_init();
    }

    __device__ __forceinline__ void wait_full(const RingState<kStages> &s) const {
        ptx::mbarrier_wait_parity(full(s.stage), s.phase);
    }

    // The first round passes at once: a fresh barrier counts the phase before its first as completed.
    __device__ __forceinline__ void wait_empty(const RingState<kStages> &s) const {
        ptx::mbarrier_wait_parity(empty(s.stage), s.phase ^ 1);
    }
};

}  // namespace linattn::cuda
