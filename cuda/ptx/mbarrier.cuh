// mbarrier objects: 8 bytes of shared memory, 8-byte aligned. A phase completes when the pending arrivals and the pending
// transaction bytes are both zero; waiting is by the parity of the phase. PTX ISA 9.7.13.15.
#pragma once
#include <cstdint>

namespace linattn::ptx {

// 9.7.13.15 mbarrier.init. Not visible to other threads, other CTAs or the async proxy by itself: one thread initialises, then
// fence_mbarrier_init() and a CTA (or cluster) barrier before the first use elsewhere. arrivals >= 1.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// 9.7.13.15 mbarrier.inval. Needed before the memory is used for anything else. Does not wait for anybody.
__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 9.7.13.4 fence.mbarrier_init. Makes this thread's mbarrier.init visible to the cluster and to the async proxy; orders nothing
// else and does not replace the barrier after it.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// 9.7.13.15 mbarrier.arrive, one arrival, release at CTA scope. Does not make generic stores visible to the async proxy.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same on the barrier of another CTA of the cluster (address from mapa()), release at cluster scope: publishes stores to
// any memory; the waiter must use mbarrier_wait_parity_cluster(). Costs a MEMBAR.ALL.GPU. The other CTA must still be running.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t remote_barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}

// The remote arrival without the fence, release at CTA scope only: hands back a buffer that was only read. Publishes no store.
__device__ __forceinline__ void mbarrier_arrive_cluster_release_cta(uint32_t remote_barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}

// 9.7.13.15 mbarrier.arrive.expect_tx: raises the pending bytes, then arrives once. The bytes must be counted before they land
// or together with the arrival that could complete the phase. At most 2^20 - 1 bytes per phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// 9.7.13.15 mbarrier.expect_tx: raises the pending bytes without arriving; relaxed, orders nothing.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives, as mbarrier_arrive() does, and waits for the phase that this arrival was part of, so that no parity need be kept.
__device__ __forceinline__ void mbarrier_arrive_and_wait(uint32_t barrier) {
    uint64_t phase;
    uint32_t done;
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];" : "=l"(phase) : "r"(barrier) : "memory");
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "l"(phase)
                     : "memory");
    } while (!done);
}

// 9.7.13.15 mbarrier.test_wait.parity, acquire at CTA scope. Never suspends. True once the phase of this parity has completed;
// cannot tell a phase from the one two later.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// 9.7.13.15 mbarrier.try_wait.parity, acquire at CTA scope. May suspend for a time the hardware chooses and may come back false
// early: loop, or use mbarrier_wait_parity().
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// The same with a limit on the suspension. ptxas 13.0 turns the hint into NANOSLEEP between polls: for waits that are long and
// not urgent, never in a math loop.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity, uint32_t suspend_ns) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity), "r"(suspend_ns)
                 : "memory");
    return done;
}

// Acquire at cluster scope, for phases completed by mbarrier_arrive_cluster() or st_async. Costs an L1 invalidation
// (CCTL.IVALL) on success, which the CTA-scope form does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// Loops over try_wait until the phase of this parity has completed. Data that TMA wrote under this barrier is then visible to
// this thread's ordinary loads. Waiting with the parity of the phase before the first (1 on a fresh barrier) returns at once.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity, uint32_t suspend_ns) {
    while (!mbarrier_try_wait_parity(barrier, parity, suspend_ns)) {
    }
}

__device__ __forceinline__ void mbarrier_wait_parity_cluster(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait_parity_cluster(barrier, parity)) {
    }
}

}  // namespace linattn::ptx
